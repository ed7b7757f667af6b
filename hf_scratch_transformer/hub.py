"""A model's folder as a Hub repository: its card, a check that nothing is missing, the upload.

`save_pretrained` of our models writes weights, configuration and code, and a tokenizer's writes the tokenizer; what
follows adds what a reader needs. Every figure on a card comes from the records of the run that made the model.
"""

import argparse
import glob
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from huggingface_hub import (
    CommitInfo,
    EvalResult,
    EvalResultEntry,
    HfApi,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
)
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects, yaml_dump
from safetensors import safe_open
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from yaml import YAMLError

from .configuration_scratch import ScratchConfig, ScratchDecoderConfig, ScratchEncoderConfig, ScratchSeq2SeqConfig
from .files import reading, sha256, write_text
from .tokenization_scratch import TARGET_FILE, ScratchTranslationTokenizer

# model_type -> its configuration, and what it is in a sentence.
FAMILIES: dict[str, tuple[type[ScratchConfig], str]] = {
    ScratchEncoderConfig.model_type: (ScratchEncoderConfig, "bidirectional Transformer encoder"),
    ScratchDecoderConfig.model_type: (ScratchDecoderConfig, "causal Transformer decoder"),
    ScratchSeq2SeqConfig.model_type: (ScratchSeq2SeqConfig, "Transformer encoder-decoder"),
}

# Names of scores in the records -> identifier of the metric on the Hub, name for readers; most telling first.
SCORES = {
    "bleu": ("bleu", "BLEU"),
    "f1": ("f1", "F1"),
    "accuracy": ("accuracy", "accuracy"),
    "masked_accuracy": ("accuracy", "accuracy on masked tokens"),
    "word_perplexity": ("perplexity", "perplexity a word"),
    "perplexity": ("perplexity", "perplexity a token"),
    "loss": ("loss", "loss, nats a token"),
    "bits_per_byte": ("bits_per_byte", "bits a byte"),
    "bleu_lowercase": ("bleu", "BLEU, lower-cased"),
    "chrf": ("chrf", "chrF"),
    "exact_match": ("exact_match", "exact matches, %"),
}

# What a row of metrics says of the moment it was measured at.
PLACES = {"step", "epoch", "seconds", "targets"}

# What a model's repository consists of, beside its weights and its code. Nothing else is uploaded: what else lies in a
# folder may be a key, a log or a pickle.
CONTENTS = (
    *("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.txt", "CITATION.cff", ".gitattributes"),
    *(CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, "curves.png", ".eval_results/*.yaml"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *(TARGET_FILE, "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
# What engines have computed by files made of these weights, as the card has it.
CHECKS = re.compile(r"## Checked with engines\n.*?<!-- weights: (\w+) -->\n(.*?)<!-- end -->\n\n?", re.DOTALL)
CHECKED = ("exported to", "run by", "compared", "differ by at most", "allowed")
SHOWN_EVALUATIONS = 10  # rows of the card's table of evaluations


class _Head(NamedTuple):
    pipeline_tag: str  # as the Hub names the task
    does: str
    usage: str  # Python, with $repo, $auto_class, $text, $opening (the text less its last word) and $length filled in
    limits: str
    generates: bool = False


_OPEN = """\
from transformers import $auto_class, AutoTokenizer

repo = $repo
tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
model = $auto_class.from_pretrained(repo, trust_remote_code=True)
"""
_CLASSIFY = """
import torch

inputs = tokenizer($text, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits
print([model.config.id2label[i] for i in logits.argmax(-1).flatten().tolist()])
"""
# The end of a class name, which is its task to transformers as well.
HEADS = {
    "ForMaskedLM": _Head(
        "fill-mask",
        "guesses masked tokens and gives every token a vector that depends on its context",
        """
from transformers import pipeline

fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer)
for guess in fill_mask($opening + tokenizer.mask_token):
    print(guess["token_str"], guess["score"])
```

Sentence embeddings, the mean over the tokens of each text:

```python
import torch
from transformers import AutoModel, AutoTokenizer

repo = $repo
tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
encoder = AutoModel.from_pretrained(repo, trust_remote_code=True)

inputs = tokenizer([$text], padding=True, return_tensors="pt")
with torch.no_grad():
    hidden_states = encoder(**inputs).last_hidden_state  # (texts, tokens, width)
mask = inputs["attention_mask"].unsqueeze(-1)
embeddings = (hidden_states * mask).sum(1) / mask.sum(1)  # (texts, width)
print(embeddings.shape)
""",
        "Its vectors are raw material: most tasks need fine-tuning, for which it loads with every head of its family.",
    ),
    "ForCausalLM": _Head(
        "text-generation",
        "continues a text, one token after the other",
        """
inputs = tokenizer($text, return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=$length, do_sample=True)
print(tokenizer.decode(outputs[0], skip_special_tokens=True))
""",
        "It continues texts in the manner of its corpus. It follows no instructions; what it says need not be true.",
        generates=True,
    ),
    "ForConditionalGeneration": _Head(
        "translation",
        "rewrites a source text as a target text, as in translation",
        """
inputs = tokenizer([$text], padding=True, return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=$length)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True))
""",
        "It knows the kind of text of its corpus, one row at a time; on other text it may leave out or invent things.",
        generates=True,
    ),
    "ForSequenceClassification": _Head(
        "text-classification",
        "sorts texts into classes",
        _CLASSIFY,
        "It always answers with one of its classes, also where none of them fits.",
    ),
    "ForTokenClassification": _Head(
        "token-classification",
        "sorts the tokens of a text into classes",
        _CLASSIFY,
        "It always answers with one of its classes, also where none of them fits.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """What a run wrote down about itself, in plain values.

    Args:
        name: of the model, for readers.
        command: the shell command that makes it again, if it is known.
        dataset: name of the corpus, for readers, if it is known.
        dataset_id: its id on the Hub, if it is there.
        dataset_config, dataset_revision: as `datasets.load_dataset` takes them.
        base_model: id on the Hub of the model whose weights were trained on, if there was one.
        data: what else is known of the corpus (rows, tokens, licence, ...); nested as it likes.
        languages: ISO 639 codes of the texts.
        license: of the weights, as the Hub names it; None: the card claims none.
        example: a text like those of the corpus (a source text, for a translator), for the code that shows the use.
        recipe: the resolved recipe.
        environment: versions and hardware.
        metrics: rows of `metrics.jsonl`; those with `event == "evaluation"` are shown.
        results: {split: {score: value}} of the finished model. Names in `SCORES` reach the metadata; with a score may
            come `<score>_signature`, how it was computed.
    """

    name: str
    command: str = ""
    dataset: str = ""
    dataset_id: str | None = None
    dataset_config: str | None = None
    dataset_revision: str | None = None
    base_model: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    languages: Sequence[str] = ()
    license: str | None = None
    example: str = "This is an example."
    recipe: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write_model_card(folder: str | os.PathLike[str], records: RunRecords, repo_id: str | None = None) -> Path:
    """Write README.md into a folder that holds configuration and weights, and `.eval_results` for a corpus of the Hub.

    A `curves.png` in the folder is shown. `repo_id` is what the code on the card opens; without it, the code opens the
    folder it is run in.

    Returns:
        The card's path.

    Raises:
        ValueError: there is no model of ours in the folder, or one whose head has no card; the metadata is invalid.
    """
    folder = Path(folder)
    config = _read_config(folder)
    head = _head(config)
    if head is None:
        raise ValueError(f"{folder}: architectures={config.get('architectures')} must end in one of {', '.join(HEADS)}")
    evaluations = _eval_results(records, head)
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=head.pipeline_tag,
        license=records.license,
        language=list(records.languages) or None,
        datasets=[records.dataset_id] if records.dataset_id else None,
        base_model=records.base_model,
        metrics=list(dict.fromkeys(result.metric_type for result in evaluations)) or None,
        tags=["custom_code", config["model_type"]],
        model_name=records.name,
        eval_results=evaluations or None,
    )
    body = _body(folder, config, head, records, repo_id)
    card = ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}")
    if entry := _leaderboard_entry(records):
        name = re.sub(r"[^\w.-]+", "_", entry.dataset_id)
        results = folder / ".eval_results"
        results.mkdir(exist_ok=True)
        write_text(results / f"{name}.yaml", yaml_dump(eval_result_entries_to_yaml([entry])))
    write_text(folder / "README.md", str(card))
    return folder / "README.md"


def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Upload a complete folder to the Hub; the repository, and the branch `revision`, are made if they are not there.

    Sent are the weights, the code and `CONTENTS`; a card that says what engines made of other weights says it no more.
    Weights and results of an earlier upload that the folder no longer has are deleted in the same commit. `token`: the
    stored one by default.

    Raises:
        ValueError: the folder is not complete or holds something else (nothing is sent), or the Hub refuses the card's
            metadata.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses the upload.
    """
    check_complete(folder)
    folder = Path(folder)
    config = _read_config(folder)
    _drop_stale_checks(folder, config)
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        revision=revision,
        commit_message=f"Upload {config['architectures'][0]}",
        allow_patterns=[glob.escape(path.relative_to(folder).as_posix()) for path in _contents(folder, config)],
        delete_patterns=["*.safetensors", SAFE_WEIGHTS_INDEX_NAME, ".eval_results/*"],
    )


def record_check(folder: str | os.PathLike[str], cells: Sequence[str]) -> None:
    """Add to a folder's card what an engine has computed by a file made of its weights: a row of `CHECKED`. An earlier
    row of that engine goes, and all rows of other weights.

    A folder without a card of ours stays as it is.
    """
    folder = Path(folder)
    path, config = folder / "README.md", _read_config(folder)
    if any(_card_complaints(folder)) or config["model_type"] not in (ModelCard.load(path).data.tags or ()):
        return
    weights, card = _fingerprint(folder, config), path.read_text(encoding="utf-8")
    found = CHECKS.search(card)
    lines = found[2].splitlines()[2:] if found and found[1] == weights else []
    rows = [*(line for line in lines if line and not line.startswith(f"| {cells[0]} |")), _row(cells)]
    section = (
        "## Checked with engines\n\n"
        "What `scratch-transformer export` made of these weights, run beside the model on the same random tokens:\n\n"
        f"<!-- weights: {weights} -->\n{_table(CHECKED, ())}\n" + "\n".join(sorted(rows)) + "\n<!-- end -->\n\n"
    )
    limits = re.search(r"^## Limits$", card, re.MULTILINE)
    start, end = found.span() if found else [limits.start() if limits else len(card)] * 2
    write_text(path, card[:start] + section + card[end:])


def _drop_stale_checks(folder: Path, config: Mapping[str, Any]) -> None:
    """Of weights that are no longer those of the folder its card claims nothing."""
    path = folder / "README.md"
    card = path.read_text(encoding="utf-8")
    if (found := CHECKS.search(card)) and found[1] != _fingerprint(folder, config):
        write_text(path, card[: found.start()] + card[found.end() :])


def _fingerprint(folder: Path, config: Mapping[str, Any]) -> str:
    """SHA-256 of what a model computes by: weights, and the configuration without its versions."""
    parts = [sha256(path) for path in _weight_files(folder)]
    fields = {name: value for name, value in config.items() if name not in ("transformers_version", "auto_map")}
    return hashlib.sha256(json.dumps([parts, fields], sort_keys=True).encode()).hexdigest()


def check_complete(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that strangers could not open, or that holds what is no part of a model's repository, in one
    `ValueError` that names everything that is wrong."""
    folder = Path(folder)
    config = _read_config(folder)
    wrong = [*_code_complaints(folder, config), *_weight_complaints(folder), *_card_complaints(folder)]
    files = ["tokenizer.json", "tokenizer_config.json"]
    with suppress(OSError, ValueError, AttributeError):  # of which the loading will complain
        if json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("separate_vocabs"):
            files.append(TARGET_FILE)
    head = _head(config)
    if head is not None and head.generates:
        files.append(GENERATION_CONFIG_NAME)
    wrong += [f"{name} is missing" for name in files if not (folder / name).is_file()]
    files = [path.relative_to(folder).as_posix() for path in sorted({*folder.rglob("*")} - _contents(folder, config))]
    wrong += [
        f"{name} is no part of a model's repository: move it out of the folder"
        for name in filter_repo_objects(files, ignore_patterns=DEFAULT_IGNORE_PATTERNS)  # which are never uploaded
        if not (folder / name).is_dir()
    ]
    if wrong:
        raise ValueError(f"{folder} is not a complete repository: " + "; ".join(wrong))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no model: {CONFIG_NAME} cannot be read ({error})") from error
    if config.get("model_type") not in FAMILIES or not config.get("architectures"):
        raise ValueError(
            f"{folder / CONFIG_NAME}: model_type={config.get('model_type')!r} must be one of {', '.join(FAMILIES)}, "
            f"and architectures={config.get('architectures')} must name a class; save the model with save_pretrained"
        )
    return config


def _head(config: Mapping[str, Any]) -> _Head | None:
    architecture = config["architectures"][0]
    return next((head for suffix, head in HEADS.items() if architecture.endswith(suffix)), None)


def _code_complaints(folder: Path, config: Mapping[str, Any]) -> Iterable[str]:
    """What keeps `trust_remote_code=True` from working: an entry of `auto_map`, or a file of code."""
    auto_map = config.get("auto_map") or {}
    references = FAMILIES[config["model_type"]][0]._auto_map
    for auto_class, reference in references.items():
        if auto_map.get(auto_class) != reference:
            yield f"{CONFIG_NAME}: auto_map[{auto_class!r}]={auto_map.get(auto_class)!r} must be {reference!r}"
    yield from (f"{path.name} is missing" for path in _code_files(folder, config) if not path.is_file())


def _contents(folder: Path, config: Mapping[str, Any]) -> set[Path]:
    """The files of a folder that belong to a model's repository."""
    parts = {*_code_files(folder, config), *_weight_files(folder)}
    return {path for pattern in CONTENTS for path in folder.glob(pattern)} | {path for path in parts if path.is_file()}


def _code_files(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """The files that hold the code, the family's own and what they import, whether they exist or not."""
    references = FAMILIES[config["model_type"]][0]._auto_map
    files: list[Path] = []
    waiting = [reference.split(".")[0] for reference in references.values()]
    waiting += [ScratchTranslationTokenizer.__module__.split(".")[-1]] * (folder / TARGET_FILE).is_file()
    while waiting:
        path = folder / f"{waiting.pop()}.py"
        if path not in files:
            files.append(path)
            waiting += get_relative_imports(path) if path.is_file() else []
    return files


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, whether they exist or not."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    return [folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]


def _weight_complaints(folder: Path) -> Iterable[str]:
    for path in _weight_files(folder):
        if path.parent != folder or path.suffix != ".safetensors":
            yield f"{SAFE_WEIGHTS_INDEX_NAME} names {path.relative_to(folder)}, which is no file of weights"
        elif not path.is_file():
            yield f"{path.name} is missing"


def _card_complaints(folder: Path) -> Iterable[str]:
    path = folder / "README.md"
    if not path.is_file():
        yield "README.md is missing: see write_model_card"
        return
    try:
        metadata = ModelCard.load(path).data
    except (ValueError, YAMLError) as error:
        yield f"README.md: {' '.join(str(error).split())}"
        return
    for name in ("library_name", "pipeline_tag"):
        if not metadata.get(name):
            yield f"README.md: its metadata has no {name}"


def _parameters(folder: Path) -> int:
    """Weights in the files, tied ones counted once."""
    count = 0
    for path in _weight_files(folder):
        if not path.is_file():
            raise ValueError(f"{folder} holds no weights: {path.name} is missing")
        with safe_open(path, framework="numpy") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def _scores(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among them; groups of rows, which have scores of their own, are left out."""
    own = {name: value for name, value in values.items() if name != "groups"}
    return {name: v for name, v in _flat(own).items() if type(v) in (int, float) and math.isfinite(v)}


def _by_telling(names: Iterable[str]) -> list[str]:
    """Each name once, those in `SCORES` first and in that order."""
    names = dict.fromkeys(names)
    return [name for name in SCORES if name in names] + [name for name in names if name not in SCORES]


def _eval_results(records: RunRecords, head: _Head) -> list[EvalResult]:
    """The `model-index`."""
    return [
        EvalResult(
            task_type=head.pipeline_tag,
            # The Hub takes nothing but word characters, points, hyphens, and one slash.
            dataset_type=records.dataset_id or re.sub(r"[^A-Za-z0-9_.-]+", "-", records.dataset).strip("-") or "local",
            dataset_name=records.dataset,
            dataset_config=records.dataset_config,
            dataset_revision=records.dataset_revision,
            dataset_split=split,
            metric_type=SCORES[name][0],
            metric_name=SCORES[name][1],
            metric_value=value,
            metric_args={"signature": values[f"{name}_signature"]} if f"{name}_signature" in values else None,
        )
        for split, values in records.results.items()
        for name, value in _scores(values).items()
        if name in SCORES
    ]


def _leaderboard_entry(records: RunRecords) -> EvalResultEntry | None:
    """The most telling score of the last split, for the leaderboard of the corpus.

    The format (https://huggingface.co/docs/hub/eval-results) takes corpora on the Hub only, registered as a benchmark;
    the task is taken to be called as the configuration is.
    """
    if records.dataset_id is None or not records.results:
        return None
    split, values = list(records.results.items())[-1]
    scores = _scores(values)
    name = next((name for name in SCORES if name in scores), None)
    if name is None:
        return None
    return EvalResultEntry(
        dataset_id=records.dataset_id,
        task_id=records.dataset_config or "default",
        dataset_revision=records.dataset_revision,
        value=scores[name],
        notes=f"{SCORES[name][1]}, split {split}",
    )


def _body(folder: Path, config: Mapping[str, Any], head: _Head, records: RunRecords, repo_id: str | None) -> str:
    """The text of the card."""
    architecture = config["architectures"][0]
    auto_class = next(
        auto_class
        for auto_class, reference in FAMILIES[config["model_type"]][0]._auto_map.items()
        if reference.endswith(f".{architecture}") and auto_class != "AutoModelForPreTraining"
    )
    longest = config["max_position_embeddings"]
    depth = " + ".join(str(config[k]) for k in ("num_hidden_layers", "encoder_layers", "decoder_layers") if k in config)
    vocabulary = f"a vocabulary of {config['vocab_size']:,} tokens"
    if "decoder_vocab_size" in config and (folder / TARGET_FILE).is_file():
        vocabulary = f"vocabularies of {config['vocab_size']:,} + {config['decoder_vocab_size']:,} tokens"
    usage = Template(_OPEN + head.usage).substitute(
        repo=json.dumps(repo_id or "."),
        auto_class=auto_class,
        text=json.dumps(records.example, ensure_ascii=False),
        opening=json.dumps("".join(re.findall(r"\S+\s+", records.example)), ensure_ascii=False),
        length=max(1, min(100, longest // 2)),
    )
    family = FAMILIES[config["model_type"]][1]
    trained = f", trained on {records.dataset}" if records.dataset else ""
    sections = {
        f"# {records.name}": f"A {family} that {head.does}: {_parameters(folder):,} parameters, {depth} layers "
        f"of width {config['hidden_size']}, {vocabulary}{trained}. "
        "Its code is in this repository; nothing but `transformers` and `torch` is needed.",
        "## How to use": f"```python\n{usage}```",
        "## Training data": _table(("", ""), _flat(_data(records)).items()) if records.dataset else "",
        "## Results": _results(records) if records.dataset else "",
        "## Training": _curves(folder, records),
        "## Recipe": _table(("field", "value"), _flat(records.recipe).items()) if records.recipe else "",
        "## Limits": f"{head.limits} It is meant for at most {longest} tokens at once, and has the errors and biases "
        f"of {records.dataset or 'the texts that it was trained on'}.",
        "## Make it again": f"```bash\n{records.command}\n```" if records.command else "",
        "## Environment": _table(("", ""), _flat(records.environment).items()) if records.environment else "",
    }
    return "\n\n".join(f"{title}\n\n{text}" for title, text in sections.items() if text.strip()) + "\n"


def _data(records: RunRecords) -> dict[str, Any]:
    link = f"[{records.dataset}](https://huggingface.co/datasets/{records.dataset_id})"
    return {
        "corpus": link if records.dataset_id else records.dataset,
        "configuration": records.dataset_config,
        "revision": records.dataset_revision,
        "languages": list(records.languages),
        **records.data,
    }


def _results(records: RunRecords) -> str:
    """A row for each score, a column for each split; how scores were computed; a table for each kind of group."""
    columns = [_scores(values) for values in records.results.values()]
    names = [name for name in _by_telling(name for column in columns for name in column) if name not in PLACES]
    if not names:
        return "No test was run."
    rows = [(SCORES.get(name, ("", name))[1], *(column.get(name, "") for column in columns)) for name in names]
    signatures = {
        f"- {SCORES[name][1]}: `{values[f'{name}_signature']}`": None
        for values in records.results.values()
        for name in SCORES
        if f"{name}_signature" in values
    }
    tables = [_table(("score", *records.results), rows), "\n".join(signatures)]
    for split, values in records.results.items():
        for column, groups in values.get("groups", {}).items():
            header = _by_telling(name for scores in groups.values() for name in scores)
            titles = (f"{split}, by {column}", *(SCORES.get(name, ("", name))[1] for name in header))
            tables.append(
                _table(titles, [(group, *(s.get(name, "") for name in header)) for group, s in groups.items()])
            )
    return "\n\n".join(filter(None, tables))


def _curves(folder: Path, records: RunRecords) -> str:
    """The picture of the curves, and evaluations of the run, evenly spaced and with the last."""
    picture = "![Loss and scores over the steps of the run](curves.png)\n\n"
    rows = [_scores(row) for row in records.metrics if row.get("event") == "evaluation"]
    rows = rows[:: -max(1, math.ceil(len(rows) / SHOWN_EVALUATIONS))][::-1]
    names = sorted({name: None for row in rows for name in row}, key=lambda name: name in SCORES)
    table = _table(names, [[row.get(name, "") for name in names] for row in rows]) if rows else ""
    return (picture if (folder / "curves.png").is_file() else "") + table


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; what is `None` or empty left out."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None and value != "" and value != [] and value != ():
            flat[f"{prefix}{key}"] = value
    return flat


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(map(_row, [header, ["---"] * len(header), *rows]))


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


# --- scratch-transformer push -----------------------------------------------------------------------------------------


def add_commands(subparsers: Any) -> None:
    parser = subparsers.add_parser("push", help="a model's folder as a repository on the Hub, with its card")
    parser.add_argument("folder", metavar="MODEL", help="folder of one of ours, with its tokenizer")
    parser.add_argument("repo", metavar="NAME/REPO", help="made if it is not there")
    parser.add_argument("--private", action="store_true", help="seen by you alone, if it is made")
    parser.add_argument("--revision", metavar="BRANCH", help="default: main")
    parser.set_defaults(run=_push)


def _push(arguments: argparse.Namespace) -> None:
    folder, repo = Path(arguments.folder), arguments.repo
    if not re.fullmatch(r"[^/\s]+/[^/\s]+", repo):
        raise ValueError(f"{repo!r} is no id of a repository: NAME/REPO")
    if is_new := not (folder / "README.md").exists():
        with reading(folder):
            card = write_model_card(folder, RunRecords(name=repo.partition("/")[2]), repo)
    try:
        check_complete(folder)
    except ValueError:
        if is_new:
            card.unlink()
        raise
    if is_new:
        print(f"wrote {card}, of what the configuration says: the rest is for you to add")
    with reading(f"{folder} was not pushed to {repo}"):
        commit = push(folder, repo, arguments.private, arguments.revision)
    print(f"pushed: {commit.commit_url}")
