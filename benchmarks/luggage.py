"""What travels to a machine with a GPU and no network: corpora and Python packages, as archives in a folder."""

import importlib.util
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_scratch_transformer.files import replacing

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[1]
LUGGAGE = ROOT / ".gpu"  # what travels: an archive for each corpus, one of Python packages, and the commit
CORPORA = {
    "tinyshakespeare": ("input.txt",),
    "multi30k": tuple(f"{part}.{side}" for part in ("train", "val", "test_2016_flickr") for side in ("en", "de")),
    "wikitext-2": tuple(f"wiki.{part}.tokens" for part in ("train", "valid", "test")),
    "babymix": ("babymix_10M.txt.xz",),
    "coarsewsd20": ("*/*.txt",),
}
# Best for text: literals by the four bits before them, no alignment.
TEXT = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0, "dict_size": 2**26}]
# What the steps import, and, of that, what machines with a GPU are often without: those are brought along.
NEEDED = (
    *("torch", "transformers", "accelerate", "datasets", "matplotlib", "numpy", "pydantic", "pytest", "rich"),
    *("sacrebleu", "tokenizers", "tqdm", "yaml"),
)
WHEELS = (
    *("annotated-types", "datasets", "dill", "multiprocess", "pydantic", "pydantic_core", "typing-inspection"),
    "typing_extensions",
)
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_17_x86_64")


def pack_corpus(source: Path, target: Path) -> None:
    """The files of a corpus that recipes read."""
    files = [path for name in CORPORA[source.name] for path in sorted(source.glob(name))]
    if len(files) < len(CORPORA[source.name]):
        raise ValueError(f"--data: {source} must hold {', '.join(CORPORA[source.name])}")
    pack(target, {str(path.relative_to(source.parent)): path.read_bytes() for path in files})


def pack_packages(target: Path) -> None:
    """Wheels of the versions in requirements.lock, for the machine with the GPU, unpacked."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-"): line for line in lock if "==" in line}
    wanted = [pinned[name.lower().replace("_", "-")] for name in WHEELS]
    with replacing(target.with_suffix(".wheels")) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--only-binary=:all:", *TARGET, "--dest", str(folder), *wanted])
        if done.returncode:
            raise ValueError("packages: pip could not download them; with a network, try again")
        contents: dict[str, bytes] = {}
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                contents |= {f"packages/{name}": archive.read(name) for name in archive.namelist() if name[-1] != "/"}
        pack(target, contents)
    shutil.rmtree(target.with_suffix(".wheels"))


def pack(target: Path, contents: dict[str, bytes]) -> None:
    """An archive of files, by their names in it."""
    print(f"packing {target.name} ...", file=sys.stderr)
    with (
        replacing(target) as temporary,
        lzma.open(temporary, "wb", filters=TEXT) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def unpack(archive: Path, folder: Path, name: str) -> None:
    """What an archive holds, as `folder/name`, unless it is there."""
    if archive.exists() and not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(folder / name) as temporary, tarfile.open(archive) as opened:
                opened.extractall(temporary.parent, filter="data")
        except (EOFError, tarfile.TarError, lzma.LZMAError) as error:
            raise ValueError(f"{archive} is damaged ({error}): remove it and prepare it again") from error


def unpack_packages(luggage: Path, folder: Path) -> None:
    """Make importable, from `folder`, what is not installed and was brought along.

    Raises ValueError, naming what is still missing.
    """
    if missing(NEEDED):
        unpack(luggage / "packages.tar.xz", folder, "packages")
        sys.path.insert(0, brought := str(folder / "packages"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [brought, os.environ.get("PYTHONPATH")]))
        importlib.invalidate_caches()
    if absent := missing(NEEDED):
        raise ValueError(f"not installed: {', '.join(absent)}; `prepare` brings {', '.join(WHEELS)}, for Python 3.12")


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def environment_of(device: "torch.device", module: str) -> dict[str, Any]:
    """Versions, hardware and command; of sources that have travelled, the commit they were packed at."""
    from training.folder import environment

    about = environment(device, 1, module)
    # Without git, or over an older commit, of which they are then taken for a change.
    is_known = about["commit"] is not None and not about["commit"].endswith("-dirty")
    if not is_known and (LUGGAGE / "commit").exists():
        about["commit"] = (LUGGAGE / "commit").read_text(encoding="utf-8").strip()
    return about
