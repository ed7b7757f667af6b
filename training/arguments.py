"""Recipes: a YAML file and the command line become one tree of frozen dataclasses, checked before anything is loaded.

All problems are reported in a single `RecipeError`, so that a recipe with three mistakes needs one run to mend.
"""

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

import hf_scratch_transformer  # noqa: F401  (registers the three families with the Auto classes)


class RecipeError(ValueError):
    """A recipe, or the data it names, that cannot be run. The message is for the terminal, without a traceback."""


def _number(default: Any, at_least: float | None = None, above: float | None = None, below: float | None = None) -> Any:
    """A field that holds a number (or None) inside a range."""
    return field(default=default, metadata={"at_least": at_least, "above": above, "below": below})


@dataclass(frozen=True)
class Data:
    """Where the corpus lies and how it becomes batches."""

    path: str  # a Hub dataset id, a folder or a file
    name: str | None = None  # configuration of the Hub dataset
    revision: str | None = None
    # train, validation, test -> names to look for, the first that exists: a Hub split, a file, or the common stem of
    # parallel text files (`train` finds train.en and train.de). `name[:90%]` takes a part.
    splits: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"train": ("train",)})
    # source and target, or text -> names of the column to look for, the first that exists
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sample_by: Literal["line", "paragraph", "document"] = "line"  # what one row of a plain text file is
    streaming: bool = False  # read the training split part by part instead of holding it in memory
    part_rows: int = _number(100_000, at_least=1)  # rows of a streamed part
    malformed: Literal["skip", "refuse"] = "skip"  # what happens to rows that cannot be used
    max_length: int = _number(256, at_least=2)  # tokens of one side of a pair; longer rows are malformed
    window: int = _number(256, at_least=2)  # predictions per window of a language model
    separate_documents: bool = False  # no attention between the documents packed into one window
    random_windows: bool = False  # windows at random offsets instead of a partition of the corpus
    batch_tokens: int = _number(4096, at_least=2)  # padded tokens of one batch, over all processes
    workers: int = _number(0, at_least=0)  # loader processes
    languages: tuple[str, ...] = ()  # ISO 639 codes, for the model card


@dataclass(frozen=True)
class Tokenizer:
    """The vocabulary: trained on the training split, or loaded from a folder or the Hub."""

    path: str | None = None
    algorithm: Literal["byte_bpe", "wordpiece", "char"] | None = None  # default: what suits the family
    vocab_size: int = _number(8000, at_least=2)  # most tokens in all; a small corpus gives fewer
    min_frequency: int = _number(2, at_least=1)
    lowercase: bool = False


@dataclass(frozen=True)
class Optimisation:
    """The update rule, its schedule, and when training ends."""

    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon on the matrices, AdamW on everything else
    learning_rate: float = _number(1e-3, above=0)  # of AdamW
    matrix_learning_rate: float = _number(0.02, above=0)  # of Muon
    betas: tuple[float, ...] = (0.9, 0.95)
    momentum: float = _number(0.95, at_least=0, below=1)  # of Muon
    weight_decay: float = _number(0.0, at_least=0)  # on matrices only
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay", "plateau"] = "linear"
    warmup_steps: int = _number(100, at_least=0)
    final_fraction: float = _number(0.0, at_least=0, below=1)  # of the learning rate, at the end of a decay
    decay_fraction: float = _number(0.2, above=0, below=1)  # last part of a warmup_stable_decay run
    plateau_factor: float = _number(0.9, above=0, below=1)  # times the rate, after that many
    plateau_patience: int = _number(10, at_least=1)  # evaluations without progress
    max_steps: int | None = _number(None, at_least=1)
    max_minutes: float | None = _number(None, above=0)  # wall clock; the schedule follows whichever limit is nearer
    accumulation: int = _number(1, at_least=1)  # batches per step
    clip_norm: float = _number(1.0, at_least=0)  # 0: no clipping
    label_smoothing: float = _number(0.0, at_least=0, below=1)
    r_drop: float = _number(0.0, at_least=0)  # weight of the divergence between two dropout masks
    mask_fraction: tuple[float, ...] = (0.15,)  # masked LM: constant, or first and last value of a linear schedule
    whole_word_masking: bool = False
    # What is tested in the end and becomes the model: the weights of the last step or of the best evaluation, their
    # exponential moving average, or the mean of the last checkpoints.
    final_weights: Literal["last", "best", "ema", "mean"] = "last"
    ema_decay: float = _number(0.999, above=0, below=1)
    mean_of: int = _number(5, at_least=2)  # checkpoints
    # fp32: nothing is rounded. tf32: products of single-precision matrices in a GPU's TF32 units; on a CPU as fp32.
    # bf16: autocast. auto: bf16 where the hardware multiplies it, else fp32.
    precision: Literal["fp32", "tf32", "bf16", "auto"] = "fp32"
    compile: bool = False


@dataclass(frozen=True)
class Evaluation:
    """What is measured while training and at its end."""

    every_steps: int | None = _number(None, at_least=1)
    every_minutes: float | None = _number(None, above=0)
    # Tokens from one evaluation window of a causal LM to the next; by default the window: no overlap. Each token counts
    # once, and all but the first window's see at least `data.window - stride` tokens before them, for as many times the
    # work as strides fit into the window.
    stride: int | None = _number(None, at_least=1)
    generate_rows: int = _number(200, at_least=0)  # validation rows translated at each evaluation; 0: loss only
    samples: int = _number(3, at_least=0)  # outputs shown at each evaluation
    num_beams: int = _number(1, at_least=1)  # at the final test; evaluations on the way decode greedily
    length_penalty: float = _number(1.0)
    group_by: tuple[str, ...] = ()  # columns of the test rows by whose values the scores are also given apart
    best_metric: str = "loss"  # `loss` (lower is better) or a score (higher is better)
    early_stopping: int | None = _number(None, at_least=1)  # evaluations without progress before the run ends


@dataclass(frozen=True)
class Checkpoints:
    """How often the run is saved and what is kept."""

    every_steps: int | None = _number(None, at_least=1)
    every_minutes: float | None = _number(None, above=0)
    keep_last: int = _number(2, at_least=1)
    keep_best: int = _number(1, at_least=0)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run computes, and where it writes."""

    objective: Literal["translation", "causal_lm", "masked_lm"]
    model: dict[str, Any]  # model_type and the fields of its configuration
    data: Data
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    optimisation: Optimisation = field(default_factory=Optimisation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    seed: int = _number(1, at_least=0)
    output_dir: str = ""  # default: runs/<name of the recipe>
    log_every: int = _number(10, at_least=1)  # steps
    trackers: tuple[str, ...] = ()  # tensorboard, trackio
    resume: bool = False  # continue from the newest complete checkpoint of output_dir
    force: bool = False  # resume although the recipe, vocabulary or corpus has changed
    overwrite: bool = False  # replace the run that output_dir holds
    push_to_hub: str | None = None  # repository that receives the finished model folder
    model_card: str | None = None  # folder that receives the card, its picture and the run's records, without weights

    def model_config(self, **fields: Any) -> PreTrainedConfig:
        """The model's configuration; `fields` (vocabulary size, special tokens) fill in what the recipe leaves open."""
        return AutoConfig.for_model(**{**fields, **self.model})

    def identity(self) -> dict[str, Any]:
        """The part of the recipe that a resumed run must share: everything but places, retention and reporting."""
        tree = dataclasses.asdict(self)
        for key in (
            "output_dir",
            "trackers",
            "resume",
            "force",
            "overwrite",
            "push_to_hub",
            "model_card",
            "checkpoints",
        ):
            del tree[key]
        for key in ("path", "splits", "workers", "languages"):  # the corpus is compared by its content
            del tree["data"][key]
        return json.loads(json.dumps(tree))  # tuples become lists, as in a saved state


COLUMNS = {"translation": ("source", "target"), "causal_lm": ("text",), "masked_lm": ("text",)}


def parse(argv: Sequence[str]) -> Recipe:
    """Read `RECIPE.yaml [--key value | --key=value | --flag] ...`; keys are dotted (`--model.hidden_size 256`).

    Raises RecipeError, with every problem found in one message.
    """
    if not argv or argv[0].startswith("-"):
        raise RecipeError("usage: accelerate launch -m training RECIPE.yaml [--key value ...]")
    path = Path(argv[0])
    tree = read_yaml(path)
    problems: list[str] = []
    _override(tree, argv[1:], problems)
    tree.setdefault("output_dir", f"runs/{path.stem}")
    recipe = _build(Recipe, tree, "", problems)
    misnamed = _misnamed_model_fields(tree.get("model"))
    problems += misnamed
    if recipe is not None:
        problems += _contradictions(recipe)
        if not misnamed:
            problems += _impossible_model(recipe)
    if problems:
        raise RecipeError(f"{path}: {len(problems)} problem(s)\n" + "\n".join(f"  {problem}" for problem in problems))
    return recipe


def read_yaml(path: Path) -> dict[str, Any]:
    """The entries of a recipe, not yet checked. Raises RecipeError when the file holds none."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: cannot be read as a YAML recipe: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this file holds {type(tree).__name__}")
    return tree


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `parse` reads back to an equal one."""
    tree = json.loads(json.dumps(dataclasses.asdict(recipe)))
    for key in ("resume", "force", "overwrite"):  # orders to one process, not properties of the run
        del tree[key]
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def environment(device: torch.device, processes: int, module: str = "training") -> dict[str, Any]:
    """Versions, hardware and command line of this process, which runs `module`, for the record of the run."""
    packages = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "sacrebleu")
    launcher = ("accelerate", "launch") if "ACCELERATE_MIXED_PRECISION" in os.environ else ("python",)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "command": [*launcher, "-m", module, *sys.argv[1:]],
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 5e-3 as a string; this loader reads it as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _override(tree: dict[str, Any], words: Sequence[str], problems: list[str]) -> None:
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            problems.append(f"{word!r}: not of the form --key value")
            continue
        key, separator, text = word[2:].partition("=")
        if not separator:
            if position < len(words) and not words[position].startswith("--"):
                text, position = words[position], position + 1
            else:
                text = "true"
        node: Any = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[leaf] = yaml.load(text, Loader=_Loader)
        else:
            problems.append(f"--{key}: {key.rpartition('.')[0]} holds one value, not a section")


def _build(kind: type, tree: Any, where: str, problems: list[str]) -> Any:
    """An instance of the dataclass `kind` from nested mappings; None when something is missing or of the wrong kind."""
    if not isinstance(tree, dict):
        problems.append(f"{where or 'recipe'}: expected a section, got {tree!r}")
        return None
    known = {f.name: f for f in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    prefix = f"{where}." if where else ""
    for key in tree.keys() - known.keys():
        problems.append(f"{prefix}{key}: unknown key{_closest(str(key), known)}")
    values, before = {}, len(problems)
    for name, spec in known.items():
        if name in tree:
            values[name] = _coerce(hints[name], tree[name], prefix + name, problems)
            _check_range(values[name], spec.metadata, prefix + name, problems)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{name}: missing")
    return None if len(problems) > before else kind(**values)


def _coerce(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    """`value` as the annotation `kind` wants it; a problem is noted when it cannot be."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _build(kind, value, where, problems)
    if origin in (Union, types.UnionType):
        return None if value is None else _coerce(inner[0], value, where, problems)
    if origin is Literal:
        if value not in inner:
            known = ", ".join(map(str, inner))
            problems.append(f"{where}: {value!r} is not one of {known}{_closest(str(value), inner)}")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_coerce(inner[0], item, where, problems) for item in items)
    if origin is dict and isinstance(value, dict):
        if inner[1] is Any:
            return value
        return {key: _coerce(inner[1], item, f"{where}.{key}", problems) for key, item in value.items()}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    wanted = dict if origin is dict else kind
    if not isinstance(value, wanted) or (kind is int and isinstance(value, bool)):
        problems.append(f"{where}: expected {wanted.__name__}, got {value!r}")
    return value


def _check_range(value: Any, limits: Any, where: str, problems: list[str]) -> None:
    if not limits or not isinstance(value, (int, float)):
        return
    words = {"at_least": "at least", "above": "above", "below": "below"}
    fine = {
        "at_least": lambda limit: value >= limit,
        "above": lambda limit: value > limit,
        "below": lambda limit: value < limit,
    }
    broken = [key for key, limit in limits.items() if limit is not None and not fine[key](limit)]
    if broken or value != value:
        wanted = " and ".join(f"{words[key]} {limit:g}" for key, limit in limits.items() if limit is not None)
        problems.append(f"{where}: {value!r} must be {wanted}")


def _closest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, [str(k) for k in known], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _contradictions(recipe: Recipe) -> list[str]:
    """Values that are fine alone and impossible together."""
    data, optimisation, problems = recipe.data, recipe.optimisation, []
    wanted = COLUMNS[recipe.objective]
    if set(data.columns) != set(wanted):
        problems.append(f"data.columns: {recipe.objective} needs exactly {', '.join(wanted)}, got {data.columns}")
    for role in data.splits.keys() - {"train", "validation", "test"}:
        problems.append(f"data.splits.{role}: roles are train, validation and test")
    if "train" not in data.splits:
        problems.append("data.splits.train: missing")
    evaluating = bool(recipe.evaluation.every_steps or recipe.evaluation.every_minutes)
    if evaluating and "validation" not in data.splits:
        problems.append("evaluation: evaluating while training needs data.splits.validation")
    longest = data.max_length if recipe.objective == "translation" else data.window + 1
    if data.batch_tokens < longest:
        problems.append(f"data.batch_tokens: {data.batch_tokens} cannot hold one row of {longest} tokens")
    stride = recipe.evaluation.stride
    if stride is not None and (recipe.objective != "causal_lm" or stride > data.window):
        problems.append(f"evaluation.stride: {stride} must be at most data.window {data.window}, of a causal_lm")
    if optimisation.max_steps is None and optimisation.max_minutes is None:
        problems.append("optimisation: give max_steps, max_minutes or both")
    if optimisation.r_drop and recipe.objective != "translation":
        problems.append("optimisation.r_drop: an option of the translation objective")
    if len(optimisation.betas) != 2 or not all(0 <= beta < 1 for beta in optimisation.betas):
        problems.append(f"optimisation.betas: two numbers in [0, 1), got {optimisation.betas}")
    if not 1 <= len(optimisation.mask_fraction) <= 2 or not all(0 < f < 1 for f in optimisation.mask_fraction):
        problems.append(f"optimisation.mask_fraction: one or two numbers in (0, 1), got {optimisation.mask_fraction}")
    if optimisation.final_weights == "mean" and recipe.checkpoints.keep_last < optimisation.mean_of:
        problems.append(f"checkpoints.keep_last: the mean of {optimisation.mean_of} checkpoints needs as many kept")
    if optimisation.final_weights == "best" and not (recipe.checkpoints.keep_best and evaluating):
        problems.append("optimisation.final_weights: best needs evaluations while training and checkpoints.keep_best")
    if len(optimisation.mask_fraction) == 2 and optimisation.max_steps is None:
        problems.append("optimisation.mask_fraction: a schedule needs max_steps")
    for tracker in set(recipe.trackers) - {"tensorboard", "trackio"}:
        problems.append(f"trackers: {tracker!r} is not one of tensorboard, trackio")
    for tracker in {"tensorboard", "trackio"} & set(recipe.trackers):
        if importlib.util.find_spec(tracker) is None:
            problems.append(f"trackers: {tracker} is not installed")
    return problems


def _misnamed_model_fields(model: Any) -> list[str]:
    if not isinstance(model, dict):
        return []
    model_type = str(model.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return [f"model.model_type: {model_type!r} is not a model type transformers knows"]
    kind = CONFIG_MAPPING[model_type]
    # Native configurations swallow misspelt keys in silence.
    known = {f.name for f in dataclasses.fields(kind)} | kind.attribute_map.keys() | {"model_type"}
    unknown = sorted(model.keys() - known)
    return [f"model.{key}: {model_type} has no such field{_closest(key, known)}" for key in unknown]


def _impossible_model(recipe: Recipe) -> list[str]:
    try:
        recipe.model_config(vocab_size=recipe.tokenizer.vocab_size)
    except Exception as error:  # whatever a configuration class raises is a problem of the recipe
        return [f"model: {' '.join(str(error).split())}"]
    return []
