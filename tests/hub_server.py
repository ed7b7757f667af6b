"""A small Hub for model repositories, on loopback and in memory: what pushing and loading ask of the real one.

    with HubServer() as hub:
        os.environ["HF_ENDPOINT"] = hub.url  # for a process that has not imported huggingface_hub yet

Repositories have branches and commits; files that are no text go through LFS; the metadata of cards is validated.
Writing takes a token, and so does reading a private repository. Not here: Xet (`HF_HUB_DISABLE_XET=1`), pull requests,
tags.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_loopback"
USER = "tester"
REQUIRED = {"task": "type", "dataset": "type"}  # of each result in a model-index


@dataclass(frozen=True)
class Blob:
    """A file's content, and whether it went through LFS."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """git's hash of the content, or of the pointer that stands for it."""
        content = self.content
        if self.lfs:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(content)}\n"
            content = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def info(self, path: str) -> dict[str, Any]:
        """As listings of a tree show it."""
        info = {"type": "file", "path": path, "oid": self.oid, "size": len(self.content)}
        if self.lfs:
            info["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 130}
        return info


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)  # commit -> path -> content
    branches: dict[str, str] = field(default_factory=dict)  # branch -> commit

    def commit(self, branch: str, tree: dict[str, Blob]) -> str:
        content = json.dumps([len(self.commits), {path: blob.oid for path, blob in tree.items()}])
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = tree
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, or a commit, stands for."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.code = status, code


class HubServer:
    """Serves on a free port of 127.0.0.1 from `with` on. `requests` records (method, path) of everything asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}  # content of LFS, by SHA-256
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def edit(self, repo_id: str, path: str, content: bytes) -> None:
        """Commit a file to main, as its owner may do in the browser."""
        repository = self.repositories[repo_id]
        repository.commit("main", repository.commits[repository.branches["main"]] | {path: Blob(content, lfs=False)})

    def tree(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """{path: content} of a revision."""
        repository = self.repositories[repo_id]
        return {path: blob.content for path, blob in repository.commits[repository.resolve(revision)].items()}


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[HubServer]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which would hold back every body for 40 ms

    def handle_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            try:
                for method, pattern, answer in ROUTES:
                    if self.command in method and (match := re.fullmatch(pattern, path)):
                        answer(self, body, **match.groupdict())
                        return
                raise Refusal(404, f"no route {self.command} {path}")
            except Refusal as refusal:
                headers = {"X-Error-Message": str(refusal)} | ({"X-Error-Code": refusal.code} if refusal.code else {})
                self.answer(str(refusal).encode(), refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, value: Any) -> None:
        self.answer(json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: the tests print enough."""

    def has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def need_token(self) -> None:
        if not self.has_token():
            raise Refusal(401, "Invalid username or password.")

    def find(self, repo_id: str, revision: str | None = None) -> tuple[Repository, str]:
        """A repository and the commit of a revision; what may not be seen is not found, as on the Hub."""
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and not self.has_token()):
            raise Refusal(404 if self.has_token() else 401, f"Repository {repo_id} not found", "RepoNotFound")
        commit = repository.resolve(revision or "main")
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository, commit

    def whoami(self, body: bytes) -> None:
        self.need_token()
        self.answer_json({"type": "user", "name": USER, "orgs": []})

    def create(self, body: bytes) -> None:
        self.need_token()
        wanted = json.loads(body)
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repositories:
            self.answer(json.dumps(url).encode(), 409)
            return
        private = wanted.get("private") or wanted.get("visibility") == "private"
        repository = self.hub.repositories[repo_id] = Repository(bool(private))
        attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        repository.commit("main", {".gitattributes": Blob(attributes, lfs=False)})
        self.answer_json(url)

    def validate(self, body: bytes) -> None:
        errors = card_errors(json.loads(body)["content"])
        content = json.dumps({"errors": [{"message": error} for error in errors], "warnings": []}).encode()
        self.answer(content, 400 if errors else 200, {"Content-Type": "application/json"})

    def create_branch(self, body: bytes, repo_id: str, revision: str) -> None:
        self.need_token()
        repository, commit = self.find(repo_id)
        if revision in repository.branches:
            raise Refusal(409, f"Reference {revision} exists")
        repository.branches[revision] = commit
        self.answer_json({})

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        self.need_token()
        repository, commit = self.find(repo_id, revision)
        files = []
        for file in json.loads(body)["files"]:
            present = repository.commits[commit].get(file["path"])
            is_text = b"\0" not in base64.b64decode(file["sample"]) and not file["path"].endswith(".safetensors")
            mode = "regular" if is_text else "lfs"
            oid = present.oid if present else None
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer_json({"files": files})

    def lfs_batch(self, body: bytes, repo_id: str) -> None:
        self.need_token()
        self.find(repo_id)
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(body)["objects"]]
        for wanted in objects:
            if wanted["oid"] not in self.hub.uploads:
                wanted["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
        self.answer_json({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, f"what came is not {oid}")
        self.hub.uploads[oid] = body
        self.answer(b"")

    def commit(self, body: bytes, repo_id: str, revision: str) -> None:
        self.need_token()
        repository, parent = self.find(repo_id, revision)
        if revision not in repository.branches:
            raise Refusal(400, f"{revision} is no branch")
        tree = dict(repository.commits[parent])
        for line in filter(None, body.split(b"\n")):
            key, value = (operation := json.loads(line))["key"], operation["value"]
            if key == "file":
                tree[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile" and value["oid"] in self.hub.uploads:
                tree[value["path"]] = Blob(self.hub.uploads[value["oid"]], lfs=True)
            elif key == "deletedFile":
                del tree[value["path"]]
            elif key != "header":
                raise Refusal(400, f"cannot do {operation}")
        sha = repository.commit(revision, tree)
        self.answer_json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}"})

    def info(self, body: bytes, repo_id: str, revision: str | None = None) -> None:
        repository, commit = self.find(repo_id, revision)
        siblings = [{"rfilename": path} for path in sorted(repository.commits[commit])]
        about = {"id": repo_id, "modelId": repo_id, "sha": commit, "private": repository.private, "tags": []}
        self.answer_json(about | {"siblings": siblings})

    def list_tree(self, body: bytes, repo_id: str, revision: str, folder: str | None) -> None:
        repository, commit = self.find(repo_id, revision)
        tree = repository.commits[commit]
        inside = sorted(path for path in tree if folder is None or path.startswith(f"{folder}/"))
        if folder is not None and not inside:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        self.answer_json([tree[path].info(path) for path in inside])

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> None:
        repository, commit = self.find(repo_id, revision)
        blob = repository.commits[commit].get(path)
        if blob is None:
            raise Refusal(404, f"{path} is not in {commit}", "EntryNotFound")
        etag = blob.sha256 if blob.lfs else blob.oid
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        self.answer(blob.content, headers=headers)


_ID, _REVISION = r"(?P<repo_id>[\w.-]+/[\w.-]+)", r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models/{_ID}/branch/{_REVISION}", _Handler.create_branch),
    ("POST", rf"/api/models/{_ID}/preupload/{_REVISION}", _Handler.preupload),
    ("POST", rf"/api/models/{_ID}/commit/{_REVISION}", _Handler.commit),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
    ("GET", rf"/api/models/{_ID}", _Handler.info),
    ("GET", rf"/api/models/{_ID}/revision/{_REVISION}", _Handler.info),
    ("GET", rf"/api/models/{_ID}/tree/{_REVISION}(/(?P<folder>.+))?", _Handler.list_tree),
    ("GET HEAD", rf"/{_ID}/resolve/{_REVISION}/(?P<path>.+)", _Handler.resolve),
]


def card_errors(content: str) -> list[str]:
    """What the Hub would refuse in the metadata of a card, as far as its documentation and its messages tell."""
    match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    try:
        metadata = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError as error:
        return [f"metadata is no YAML: {error}"]
    errors = [f'"{name}" must be a string' for name in ("license", "pipeline_tag", "library_name")
              if not isinstance(metadata.get(name, ""), str)]  # fmt: skip
    for name in ("tags", "datasets", "metrics", "language"):
        values = metadata.get(name) or []
        if not all(isinstance(value, str) for value in ([values] if isinstance(values, str) else values)):
            errors.append(f'"{name}" must hold strings')
    for model in metadata.get("model-index") or []:
        if not model.get("name"):
            errors.append('"model-index[].name" is required')
        for result in model.get("results") or []:
            errors += result_errors(result)
    return errors


def result_errors(result: dict[str, Any]) -> list[str]:
    errors = [
        f'"model-index[].results[].{section}.{name}" is required'
        for section, name in REQUIRED.items()
        if not (result.get(section) or {}).get(name)
    ]
    dataset = result.get("dataset") or {}
    if not dataset.get("name"):
        errors.append('"model-index[].results[].dataset.name" is required')
    if not re.fullmatch(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+", str(dataset.get("type"))):
        errors.append(f'"model-index[].results[].dataset.type" with value {dataset.get("type")!r} fails to match')
    for metric in result.get("metrics") or [{}]:
        if not metric.get("type") or metric.get("value") is None:
            errors.append(f'"model-index[].results[].metrics[]": {metric} lacks type or value')
    return errors
