"""Cases by the thousand of what users get wrong: no traceback, no file lost, a refusal that names what is wrong.

make fuzz            # another seed each time, which is printed
make fuzz SEED=1234  # the same cases again
"""

import argparse
import contextlib
import copy
import functools
import hashlib
import io
import json
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from hypothesis import given
from hypothesis import strategies as st

import hf_scratch_transformer as scratch
from hf_scratch_transformer import cli
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny, tiny_runs
from training import __main__ as training
from training import finetune
from training.recipe import Recipe
from training.sections import names as fields

from .mutations import changed, damaged, odd
from .tally import cases

pytestmark = pytest.mark.fuzz

SENTENCES = [
    *("the bank of the river was wet", "she asked the bank for a loan", "the old bank closed", "we sat on the bank"),
    *("one two three four five six seven", "eins zwei drei vier fünf sechs sieben"),
]
MODELS = {
    "encoder": scratch.ScratchEncoderForMaskedLM,
    "decoder": scratch.ScratchDecoderForCausalLM,
    "seq2seq": scratch.ScratchSeq2SeqForConditionalGeneration,
}
SENSES = "word\tsplit\tsense\tposition\tsentence\n" + "".join(
    f"bank\t{split}\t{sense}\t\t{sentence}\n"
    for split in ("train", "test")
    for sense, sentence in zip(["shore", "money"] * 2, SENTENCES[:4], strict=True)
)
NATIVE: dict[str, dict[str, Any]] = {
    "bert": dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=99),
    "gpt2": dict(n_embd=16, n_layer=1, n_head=2, vocab_size=99),
    "llama": dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=99),
    "bart": dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=99)
    | dict(encoder_attention_heads=2, decoder_attention_heads=2),
}


def commands(words: list[str]) -> int:
    return cli.main(words)


@functools.cache
def sources() -> Path:
    """Folders with a tiny model of each family and its tokenizer, and with configurations of native ones."""
    import tempfile

    top = Path(tempfile.mkdtemp(prefix="fuzz"))
    torch.manual_seed(0)
    for family, model in MODELS.items():
        tokenizer = train_tokenizer(SENTENCES * 3, family=family, vocab_size=90 if family == "encoder" else 280)
        tiny.model(model, **config_fields(tokenizer, family), hidden_size=16).save_pretrained(top / family)
        tokenizer.save_pretrained(top / family)
    for name, sizes in NATIVE.items():
        config = transformers.CONFIG_MAPPING[name](**sizes)
        config.architectures = None
        config.save_pretrained(top / name)
    return top


def write(path: Path, tree: Any) -> str:
    path.write_text(json.dumps(tree))
    return str(path)


# --- Settings -------------------------------------------------------------------------------------------------------


@functools.cache
def recipe(objective: str) -> Any:
    path = sources() / f"{objective}.yaml"
    if not path.exists():
        (sources() / "recipes").mkdir(exist_ok=True)
        shutil.copy(tiny_runs.write_recipe(sources() / "recipes", objective), path)
    tree = yaml.safe_load(path.read_text())
    tree["data"]["path"] = "corpus"
    return tree | {"output_dir": "run"}


recipes = st.sampled_from(tiny_runs.OBJECTIVES).flatmap(lambda objective: changed(recipe(objective)))


@cases(4000)
@given(case=recipes)
def test_recipes(tally, case):
    tree, names = case
    with tally.folder() as place:
        (place / "corpus").mkdir()
        (place / "recipe.yaml").write_text(yaml.safe_dump(tree, allow_unicode=False))
        tally.run(training.main, ["recipe.yaml"], [*names, "corpus"], owned="run")


@st.composite
def training_words(draw: Any) -> tuple[list[str], list[str]]:
    words, names = [], []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(
            st.sampled_from(sorted(fields(Recipe))) | st.sampled_from(["model.hidden_size", "lr", "-", "x.y.z"])
        )
        name = draw(st.sampled_from([name] * 6 + [name + "s", name.upper(), f"{name}.x", f".{name}", name[1:]]))
        value = draw(odd(name))
        text = value if isinstance(value, str) else json.dumps(value)
        words += draw(
            st.sampled_from([[f"--{name}", text], [f"--{name}={text}"], [f"--{name}"], [f"-{name}", text], [text]])
        )
        names += [*name.split("."), text]
    return words, names


@cases(2500)
@given(case=training_words(), objective=st.sampled_from(tiny_runs.OBJECTIVES))
def test_command_line_of_training(tally, case, objective):
    words, names = case
    with tally.folder() as place:
        (place / "corpus").mkdir()
        (place / "recipe.yaml").write_text(yaml.safe_dump(recipe(objective)))
        tally.run(training.main, ["recipe.yaml", *words], [*names, "corpus", "usage"], owned="run")


@functools.cache
def parsers() -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """The parser of each command, by its words."""
    found = {}

    def walk(words: tuple[str, ...], subparsers: Any) -> None:
        for name, parser in subparsers.choices.items():
            inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
            if inner:
                walk((*words, name), inner[0])
            else:
                found[*words, name] = parser

    subparsers = argparse.ArgumentParser().add_subparsers()
    for module in cli.MODULES:
        cli.importlib.import_module(f"hf_scratch_transformer.{module}").add_commands(subparsers)
    walk((), subparsers)
    return found


@st.composite
def command_words(draw: Any) -> tuple[list[str], list[str]]:
    command = draw(st.sampled_from(sorted(parsers())))
    places = [str(sources() / name) for name in ("encoder", "decoder", "seq2seq", "bert", "gpt2")]
    others = ["absent", "empty", "senses.tsv", "metrics.jsonl", "out.png", "new", "gpt-2", "no/such", "", "."]
    given, names = list(command), list(command)
    if command == ("serve",):
        places = []  # nothing that it would go on serving
        names.append("port")  # its usual one may be taken
    for action in parsers()[command]._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if action.option_strings and draw(st.integers(0, 3)) != 0:
            continue
        if action.nargs == 0:
            given.append(action.option_strings[0])
            continue
        kind = st.sampled_from(places + others) if not action.option_strings or draw(st.booleans()) else odd("layers")
        if draw(st.booleans()) and action.option_strings:
            kind = st.sampled_from([*action.choices] if action.choices else [0, 1, 2, 5])
        if draw(st.booleans()) and not action.option_strings:
            kind = st.sampled_from(
                others[2:4] + ["bank", "the old bank", "out"] if len(given) > len(command) else places or others
            )
        values = [str(draw(kind)) for _ in range(draw(st.integers(1, 2)) if action.nargs == "+" else 1)]
        given += [*action.option_strings[:1], *values]
        names += [action.dest, *(option.lstrip("-") for option in action.option_strings), *values]
    return given, [name for name in names if name.strip()]


@cases(800)
@given(case=command_words())
def test_command_lines(tally, case):
    words, names = case
    with tally.folder() as place:
        (place / "empty").mkdir()
        (place / "senses.tsv").write_text(SENSES)
        (place / "metrics.jsonl").write_text('{"event": "train", "step": 1, "loss": 2.5}\n' * 3)
        tally.run(commands, words, names)


@st.composite
def task_words(draw: Any) -> tuple[dict[str, Any], list[str]]:
    base = {"model": "absent", "data": "senses.tsv", "validation": 0.1, "output_dir": "run", "learning_rate": 1e-3}
    base |= {"num_train_epochs": 1, "per_device_train_batch_size": 8, "eval_strategy": "epoch", "report_to": "none"}
    base |= {"seed": 1, "warmup_steps": 0.1, "use_cpu": True, "lr_scheduler_type": "cosine", "max_grad_norm": 1.0}
    return draw(changed(base))


@cases(800)
@given(case=task_words())
def test_recipes_of_finetune(tally, case):
    tree, names = case
    with tally.folder() as place:
        (place / "senses.tsv").write_text(SENSES)
        (place / "recipe.yaml").write_text(yaml.safe_dump(tree))
        tally.run(finetune.main, ["recipe.yaml"], [*names, "absent"], owned="run")


@functools.cache
def config(name: str) -> Any:
    return json.loads((sources() / name / "config.json").read_text())


configs = st.sampled_from(["encoder", "decoder", "seq2seq"] * 2 + [*NATIVE]).flatmap(lambda name: changed(config(name)))


@cases(1200)
@given(case=configs, options=st.sampled_from([["--json"], [], ["--checkpointing"], ["--loss-only"]]))
def test_configs(tally, case, options):
    tree, names = case
    with tally.folder() as place:
        write(place / "config.json", tree)
        tally.run(commands, ["inspect", "config.json", "--length", "5", *options], [*names, *tree])


# --- Folders --------------------------------------------------------------------------------------------------------


def uses(family: str) -> list[list[str]]:
    """What can be done with a folder `model`."""
    target = {"encoder": "bert", "decoder": "llama", "seq2seq": "marian"}[family]
    return [
        ["convert", "model", "new", "--to", target],
        ["plot", "positions", "model"],
        ["plot", "parameters", "model"],
        ["plot", "attention", "model", "the old bank", "--layer", "0"],
        ["plot", "embedding-shift", "model", "bank", "the old bank"],
        ["senses", "model", "senses.tsv", "--json"],
        ["inspect", "model", "--length", "5"],
    ]


@st.composite
def folder_cases(draw: Any, files: tuple[str, ...]) -> tuple[str, list[str], str, bytes | None, list[str]]:
    family = draw(st.sampled_from([*MODELS]))
    words = draw(st.sampled_from(uses(family)))
    file = draw(st.sampled_from([name for name in files if (sources() / family / name).exists()]))
    content = (sources() / family / file).read_bytes()
    names = [file, "model"]
    match draw(st.sampled_from(["tree", "tree", "tree", "bytes", "absent", "swap"])):
        case "tree" if file.endswith(".json"):
            tree, more = draw(changed(json.loads(content)))
            return family, words, file, json.dumps(tree).encode(), names + more
        case "absent":
            return family, words, file, None, names
        case "swap":
            other = draw(st.sampled_from([name for name in MODELS if name != family]))
            there = sources() / other / file
            return family, words, file, there.read_bytes() if there.exists() else b"", names
        case _:
            return family, words, file, draw(damaged(content)), names


def _try_folder(tally: Any, case: Any) -> None:
    family, words, file, content, names = case
    with tally.folder() as place:
        shutil.copytree(sources() / family, place / "model", ignore=shutil.ignore_patterns("*.py"))
        (place / "senses.tsv").write_text(SENSES)
        (place / "model" / file).unlink()
        if content is not None:
            (place / "model" / file).write_bytes(content)
        tally.run(commands, words, names)


@cases(400)
@given(case=folder_cases(("model.safetensors", "config.json", "generation_config.json")))
def test_model_folders(tally, case):
    _try_folder(tally, case)


@cases(400)
@given(case=folder_cases(("tokenizer.json", "tokenizer_config.json")))
def test_tokenizers(tally, case):
    _try_folder(tally, case)


# --- Runs -----------------------------------------------------------------------------------------------------------


@st.composite
def corpora(draw: Any) -> tuple[str, dict[str, bytes], list[str]]:
    """Files of a corpus, one or two of them damaged, or of another kind."""
    objective = draw(st.sampled_from(tiny_runs.OBJECTIVES))
    folder = sources() / "recipes" / "corpus" if recipe(objective) else Path()
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    names = []
    for name in draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=2, unique=True)):
        text = files[name].decode()
        names += [name, name.partition(".")[0]]
        match draw(st.sampled_from(["damage"] * 3 + ["absent", "one line", "lines", "json", "csv", "binary", "text"])):
            case "absent":
                del files[name]
            case "one line":
                files[name] = b"one two three " * 1_000
            case "lines":  # ragged, blank, or far too long
                lines = st.sampled_from(
                    ["", " ", "\x00", "one", "\u2028", "\r", "eins zwei " * 200, "\ufffd", "x" * 99]
                )
                files[name] = "\n".join(draw(st.lists(lines, max_size=9))).encode()
            case "json":
                rows = [draw(odd()) for _ in range(3)]
                files[f"{name}.json"] = "\n".join(
                    json.dumps({"text": row, "en": row, "de": "x"}) for row in rows
                ).encode()
                del files[name]
            case "csv":
                files[f"{name.partition('.')[0]}.csv"] = draw(damaged(b"en,de,text\n" + text.encode()[:300]))
                del files[name]
            case "binary":
                files[name] = draw(st.binary(max_size=200))
            case "text":
                files[name] = draw(st.text(max_size=100)).encode("utf-8", "surrogatepass")
            case _:
                files[name] = draw(damaged(files[name]))
    return objective, files, names


@cases(100)
@given(case=corpora(), algorithm=st.sampled_from(["byte_bpe", "char", None]))
def test_corpora(tally, case, algorithm):
    objective, files, names = case
    with tally.folder() as place:
        (place / "corpus").mkdir()
        for name, content in files.items():
            (place / "corpus" / name).write_bytes(content)
        (place / "recipe.yaml").write_text(yaml.safe_dump(recipe(objective)))
        words = ["recipe.yaml", "--optimisation.max_steps=1", f"--tokenizer.algorithm={algorithm or 'null'}"]
        tally.run(training.main, words, [*names, "corpus"], owned="run")


@pytest.mark.parametrize(
    ("objective", "algorithm"), [("translation", "null"), ("causal_lm", "char"), ("masked_lm", "byte_bpe")]
)
def test_one_line_of_ten_megabytes(tally, objective, algorithm):
    """Too large for what is drawn: a file that is one row, which no line ends."""
    with tally.folder() as place:
        (place / "recipe.yaml").write_text(yaml.safe_dump(recipe(objective)))
        shutil.copytree(sources() / "recipes" / "corpus", place / "corpus")
        (place / "corpus" / "train.en").write_bytes(b"one two three " * 750_000)
        (place / "corpus" / "train.de").write_bytes(b"eins zwei drei")
        words = ["recipe.yaml", "--optimisation.max_steps=1", f"--tokenizer.algorithm={algorithm}"]
        tally.run(training.main, words, ["train", "corpus"], owned="run")


@functools.cache
def finished(objective: str) -> Path:
    """The folder of a run that was stopped after two of its three steps."""
    place = sources() / f"run-{objective}"
    tree = copy.deepcopy(recipe(objective))
    tree["data"] |= {"path": str(sources() / "recipes" / "corpus")}
    tree["optimisation"] |= {"max_steps": 3}
    tree["checkpoints"] |= {"every_steps": 1, "keep_last": 9}
    place.mkdir(exist_ok=True)
    (place / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with contextlib.chdir(place), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert training.main(["recipe.yaml"]) == 0
    shutil.rmtree(place / "run" / "model")
    shutil.rmtree(place / "run" / "checkpoints" / "step-00000003")
    return place


@st.composite
def checkpoint_cases(draw: Any) -> tuple[str, str, bytes | None, bool, list[str]]:
    objective = draw(st.sampled_from(tiny_runs.OBJECTIVES))
    run = finished(objective) / "run"
    file = draw(st.sampled_from(sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file())))
    file = draw(st.sampled_from([file] + [f"checkpoints/step-00000002/{n}.json" for n in ("state", "manifest")]))
    content, names = (run / file).read_bytes(), [*Path(file).parts, Path(file).stem, "step-00000002", "output_dir"]
    match draw(st.sampled_from(["tree", "tree", "damage", "absent", "foreign"])):
        case "tree" if file.endswith(".json"):
            tree, more = draw(changed(json.loads(content)))
            return objective, file, json.dumps(tree).encode(), draw(st.booleans()), names + more
        case "absent":
            return objective, file, None, False, names
        case "foreign":
            other = finished(draw(st.sampled_from(tiny_runs.OBJECTIVES))) / "run" / file
            content = other.read_bytes() if other.exists() else b"{}"
            return objective, file, content, draw(st.booleans()), [*names, "fit", "another run"]
        case _:
            return objective, file, draw(damaged(content)), draw(st.booleans()), names


@cases(50)
@given(case=checkpoint_cases(), words=st.sampled_from([[], ["--force"]]))
def test_checkpoints(tally, case, words):
    objective, file, content, is_signed, names = case
    with tally.folder() as place:
        shutil.copytree(finished(objective), place, dirs_exist_ok=True)
        path = place / "run" / file
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        manifest = path.parent / "manifest.json"
        if is_signed and manifest.exists() and path != manifest and content is not None:
            sums = json.loads(manifest.read_bytes()) | {path.name: hashlib.sha256(content).hexdigest()}
            manifest.write_text(json.dumps(sums))
        tally.run(training.main, ["recipe.yaml", "--resume", *words], names, owned="run")


RECORDS = [
    {"event": "train", "step": 1, "loss": 2.5, "learning_rate": 0.1},
    {"event": "evaluation", "step": 2, "loss": 2.0, "bleu": 3.5},
    {"event": "test", "step": 2, "loss": 1.0, "groups": {"length": {"long": {"bleu": 2.0}}}},
]


@cases(300)
@given(case=changed(RECORDS), content=st.none() | damaged("\n".join(map(json.dumps, RECORDS)).encode()))
def test_records(tally, case, content):
    tree, names = case
    with tally.folder() as place:
        lines = "".join(json.dumps(line) + "\n" for line in tree).encode()
        (place / "metrics.jsonl").write_bytes(lines if content is None else content)
        tally.run(commands, ["plot", "curves", "metrics.jsonl"], [*names, "metrics"])


# --- Requests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served():
    """The address of a page for each family."""
    pytest.importorskip("gradio", reason="serve needs Gradio: make .cache/serve")
    from hf_scratch_transformer.insight import page

    urls = {}
    pages = {family: page.build([sources() / family]) for family in MODELS}
    for family, blocks in pages.items():
        _, urls[family], _ = blocks.launch(prevent_thread_lock=True, share=False, quiet=True)
    yield urls
    for blocks in pages.values():
        blocks.close()


REQUESTS = {
    "seq2seq": {
        "translate": ["one two"],
        "attended": ["one two", "all", "all", "cross", "old"],
        "moved_word": ["bank", "the bank", "old bank"],
    },
    "decoder": {"next_token": ["one two", 1.0], "continuation": ["one two", 1.0, 3, 0]},
    "encoder": {"masked_word": ["the [MASK] bank"], "moved_word": ["bank", "the bank", "old bank"]},
}


@st.composite
def requests(draw: Any) -> tuple[str, str, bytes]:
    family = draw(st.sampled_from([*REQUESTS]))
    name = draw(st.sampled_from([*REQUESTS[family]]))
    text = st.text(max_size=40) | st.sampled_from(
        ["", " ", "one " * 200, "[MASK]", "[MASK] [MASK]", "<b>bank</b>", "</s>"]
    )
    data = [draw(text) if isinstance(value, str) and draw(st.booleans()) else value for value in REQUESTS[family][name]]
    for place in draw(st.lists(st.integers(0, len(data) - 1), max_size=2)):
        data[place] = draw(odd())
    body = json.dumps({"data": data}).encode()
    return family, name, draw(damaged(body)) if draw(st.integers(0, 4)) == 0 else body


@cases(400)
@given(case=requests())
def test_requests(tally, served, case):
    """A request that is wrong gets an answer that says so, and the page goes on.

    One with too few values is answered by Gradio, which prints a traceback of its own: not drawn here.
    """
    family, name, body = case
    url = f"{served[family]}gradio_api/call/{name}"

    def ask(words: list[str]) -> int:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                event = json.load(answer)["event_id"]
            with urllib.request.urlopen(f"{url}/{event}") as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = f"event: error\ndata: {error.code} {error.read().decode()}"
        if "event: complete" in text:
            return 0
        print(text, file=sys.stderr)
        return 2

    with tally.folder():
        tally.run(ask, [], [])
