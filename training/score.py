"""A finished model, ours or a native one, measured on any text or pairs, on the senses of words, or on a task of
EleutherAI's harness; nothing is written."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from hf_scratch_transformer import ScratchConfig
from hf_scratch_transformer.embedding import check_ids
from hf_scratch_transformer.files import reading, weights
from hf_scratch_transformer.insight import senses
from hf_scratch_transformer.insight.plot import open_model
from hf_scratch_transformer.insight.presets import read_config
from hf_scratch_transformer.onednn import onednn_products

from . import corpus, evaluation, sharding
from .objectives import OBJECTIVES
from .publication import summarise
from .recipe import Data, Recipe, resolved
from .run import Session, open_accelerator
from .sections import RecipeError, override

USAGE = (
    f"usage: python -m {__package__} evaluate MODEL --data PATH [--key value ...], or --senses PATH, "
    "or --task NAME [--include_path FOLDER] [--limit N]; --json for machines"
)
JSON = "--json"  # as `scratch-transformer senses` has it
KEYS = ("objective", "data", "evaluation", "optimisation", "seed")  # of a recipe, that are heeded


def score(words: Sequence[str]) -> None:
    """Print the scores of a model on the test split of some data, by the words of a command line; with `--json` among
    them, as one JSON object with all that was counted.

    Raises RecipeError when model, data or words cannot be used.
    """
    if not words or words[0].startswith("-"):
        raise RecipeError(USAGE)
    source = words[0]
    named = {word.partition("=")[0] for word in words}
    for name, measure in OTHERS.items():
        if name in named:
            return measure(words)
    of = _weights(words)
    try:
        recipe = _recipe(source, read_config(source), [word for word in words[1:] if word != JSON])
        model = open_model(source, OBJECTIVES[recipe.objective].auto_model, attention=None, dtype="float32")
    except RecipeError:
        raise
    except ValueError as error:  # whatever is wrong with a model's folder
        raise RecipeError(str(error)) from error
    accelerator = open_accelerator(recipe)
    tokenizer = corpus.read_tokenizer(source, "MODEL")
    objective = OBJECTIVES[recipe.objective](recipe, tokenizer)
    split = corpus.load(recipe, "test", objective.encode, keep_texts=True)
    if objective.end(split) < 1:
        raise RecipeError("data.splits.test: too short for a single prediction")
    for name, column in split.columns.items():
        try:
            check_ids(model, [[int(column.tokens.max(initial=0))]], target=name == "target")
        except ValueError as error:
            raise RecipeError(f"{source}: {error}") from error
    if accelerator.is_main_process:
        print(corpus.account("test", split, objective.examples(split), tokenizer), file=sys.stderr)
    share = sharding.share(accelerator, None)
    session = Session(recipe=recipe, accelerator=accelerator, objective=objective, share=share)
    with onednn_products():
        values, _ = evaluation.measure(session, model.to(accelerator.device), split)
    if accelerator.is_main_process:
        summarise(values | of, as_json=JSON in words)


def _weights(words: Sequence[str]) -> dict[str, Any]:
    """Which they are, for machines; asked before they are read, since a training may replace them meanwhile."""
    return {"weights": weights(Path(words[0]))} if JSON in words else {}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"evaluate: {message}; {USAGE}")


def _senses(words: Sequence[str]) -> None:
    """As `scratch-transformer senses`, with its other words."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("model")
    parser.add_argument("--senses", required=True)
    asked, others = parser.parse_known_args(words)
    commands = _Parser(allow_abbrev=False, add_help=False)
    senses.add_commands(commands.add_subparsers(parser_class=_Parser))
    try:
        senses.run(commands.parse_args(["senses", asked.model, asked.senses, *others]))
    except (ValueError, OSError) as error:
        raise RecipeError(str(error)) from error


def _task(words: Sequence[str]) -> None:
    """By lm-evaluation-harness: its own tasks, or those of the YAML files in a folder."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("model")
    parser.add_argument("--task", nargs="+", required=True)
    parser.add_argument("--include_path")
    parser.add_argument("--limit", type=int)
    parser.add_argument(JSON, dest="as_json", action="store_true")
    asked = parser.parse_args(words)
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError("--task needs lm_eval: pip install 'lm_eval[hf]'")
    import lm_eval
    from lm_eval.tasks import TaskManager

    if asked.limit is not None and asked.limit < 1:
        raise RecipeError(f"--limit {asked.limit} must be at least 1")
    try:
        config = read_config(asked.model)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not (config.architectures or [""])[0].endswith(WRITERS):
        raise RecipeError(f"--task: {asked.model} does not write; language models and translators have tasks")
    of = _weights(words)
    manager = TaskManager(include_path=asked.include_path, include_defaults=asked.include_path is None)
    if unknown := [name for name in asked.task if name not in manager.all_tasks]:
        raise RecipeError(f"--task: there is no {', '.join(unknown)} in {asked.include_path or 'lm_eval'}")
    model = {"pretrained": asked.model, "backend": "seq2seq" if config.is_encoder_decoder else "causal"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        options = {"tasks": asked.task, "task_manager": manager, "limit": asked.limit, "device": device}
        found = lm_eval.simple_evaluate("hf", model, **options)
    except Exception as error:  # whatever the harness, its task and the files of that say
        raise RecipeError(f"--task {' '.join(asked.task)}: {' '.join(str(error).split())}") from error
    results: dict[str, Any] = {}
    for task, values in found["results"].items():
        for key, value in values.items():
            name, _, rest = key.partition(",")
            if not isinstance(value, float) or name.endswith("_stderr"):
                continue
            results[f"{task} {name}"] = value
            spread = values.get(f"{name}_stderr,{rest}")
            if isinstance(spread, float):
                results[f"{task} {name}_interval"] = [value - DEVIATIONS * spread, value + DEVIATIONS * spread]
    summarise(results | of, asked.as_json)


WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")
OTHERS = {"--senses": _senses, "--task": _task}
DEVIATIONS = 1.96  # of the standard error, either way, in which 95% of a normal distribution lie


def _recipe(source: str, config: PreTrainedConfig, words: Sequence[str]) -> Recipe:
    """A recipe that measures a model as its own settings have it, unless the words say otherwise."""
    words = [word.replace("--data", "--data.path", 1) if word.partition("=")[0] == "--data" else word for word in words]
    keys = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    for key in keys:
        if key.partition(".")[0] not in KEYS:
            raise RecipeError(f"--{key}: to evaluate heeds {', '.join(KEYS)} and what is in them, as a recipe has it")
    if "data.path" not in keys:
        raise RecipeError(f"--data: name what to measure {source} on: a file, a folder or a dataset on the Hub")
    saved = (config.architectures or [""])[0]
    known = {
        name: getattr(kind.auto_model._model_mapping.get(type(config), None), "__name__", None)
        for name, kind in OBJECTIVES.items()
    }
    tree: dict[str, Any] = {
        "objective": next((name for name, head in known.items() if head == saved), None),
        "model": {"model_type": config.model_type},
        "data": {"splits": {"test": "test"}},
        "optimisation": {"max_steps": 1},
        "output_dir": "runs",  # into which nothing is written
    }
    if tree["objective"] is None:
        raise RecipeError(f"{source}: a {saved or 'model without a head'} predicts neither translations nor tokens")
    if longest := getattr(config, "max_position_embeddings", None):
        if isinstance(config, ScratchConfig):
            tree["model"]["max_position_embeddings"] = longest
        for name in ("window", "max_length"):
            tree["data"][name] = min(longest, Data.model_fields[name].default)
    file = Path(source, GENERATION_CONFIG_NAME)
    with reading(file) if file.exists() else suppress(OSError):  # most encoders have no such settings
        settings = GenerationConfig.from_pretrained(source)
        tree["evaluation"] = {"num_beams": settings.num_beams or 1}
        if settings.length_penalty is not None:
            tree["evaluation"]["length_penalty"] = settings.length_penalty
    problems = [*override(tree, words, Recipe)]
    if isinstance(splits := tree["data"]["splits"], str):
        with suppress(ValueError, RecursionError):  # which is said when it is read
            splits = json.loads(splits)
    if isinstance(splits, dict):  # of a recipe, which trains as well
        tree["data"]["splits"] = {"train": "train"} | splits
    return resolved(Path(source).name, tree, (), problems)
