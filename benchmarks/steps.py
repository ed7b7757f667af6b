"""What only a GPU can show, as steps of minutes: their commands, what they should reach, what they take, what came out.

A command is a tuple of words: first who runs it (`RUNNERS`), then what follows on the command line. `{data}` stands for
the folder of the corpora, `{run}` for a folder of the step's own.
"""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from transformers import AutoConfig

from training import metrics
from training.objectives import OBJECTIVES
from training.recipe import parse as parse_recipe
from training.roofline import SHEETS

from . import __main__ as command_line
from .peers import NATIVES, OURS, PEERS, count_parameters, reference
from .shapes import SHAPES, Shape

Words = tuple[str, ...]


class Goal(NamedTuple):
    """What a figure of a step's record should be."""

    figure: str
    value: float
    is_least: bool = True  # rather than the most it may be

    def __str__(self) -> str:
        return f"{self.figure} {'≥' if self.is_least else '≤'} {self.value:g}"

    def is_reached(self, figures: dict[str, Any]) -> bool | None:
        """None where there is no such figure."""
        if (value := figures.get(self.figure)) is None:
            return None
        return value >= self.value if self.is_least else value <= self.value


class Step(NamedTuple):
    """Something to show, in at most nine minutes."""

    name: str
    shows: str
    commands: tuple[Words, ...]
    goals: tuple[Goal, ...] = ()


# --- The table --------------------------------------------------------------------------------------------------------


def recipe_run(recipe: str, corpus: str, *more: str, runner: str = "training") -> Words:
    """A run of a recipe that goes on from where it was stopped."""
    place = ("--output_dir", "{run}", "--resume")
    return (runner, f"training/recipes/{recipe}.yaml", "--data.path", f"{{data}}/{corpus}", *place, *more)


# First, and then.
MFU = (Goal("MFU", 0.45), Goal("MFU", 0.6))
BANDWIDTH = (Goal("bandwidth, 1 row", 0.6), Goal("bandwidth, 1 row", 0.75))


def training_step(shape: str, *peers: str, padded: bool) -> Step:
    """Ours and others compiled, and then as they are: `torch` only so, since a compiler makes little of its checks."""
    family, words = SHAPES[shape].family, ("benchmarks", "train", "--shape", shape, "--rounds", "5")
    padding = "--padded" if padded else "--no-padded"
    return Step(
        f"train-{family}" + "-padded" * padded,
        f"training of {shape}, {'with' if padded else 'without'} padding, compiled and not",
        (
            (*words, padding, "--compile", "--peer", *peers),
            (*words, padding, "--no-compile", "--peer", *peers, "torch"),
        ),
        (*MFU, Goal("speed", 1.3 if padded else 1.15), Goal("memory", 0.5, False)),
    )


def decoding_step(shape: str, *peers: str) -> Step:
    """Of one row, where memory is what counts, and of many."""
    usual = ("--shape", shape, "--compile", "--num-beams", "1", "--new-tokens", "64", "--rounds", "5")
    return Step(
        f"decode-{SHAPES[shape].family}",
        f"greedy decoding by {shape}, one row and 64, static cache, compiled",
        tuple(("benchmarks", "generate", *usual, "--batch", rows, "--peer", *peers) for rows in ("1", "64")),
        BANDWIDTH,
    )


FLASH = [name for name in ("modernbert-flash",) if name in PEERS]  # where its kernel is there
SHARDED = ("--optimisation.max_steps", "200", "--evaluation.every_steps", "200", "--log_every", "50")
STEPS = {
    step.name: step
    for step in (
        Step(
            "tests",
            "attention backends, tokens without padding, bf16, compiled training and decoding, memory of `loss_only`",
            (("pytest", "-m", "gpu", "tests/test_gpu.py", "-p", "no:cacheprovider", "--junitxml", "{run}/tests.xml"),),
            (Goal("failed", 0, False),),
        ),
        training_step("gpt2-124m", "llama", "gpt2", padded=False),
        training_step("bert-110m", "bert", "modernbert", "modernbert-sparse", *FLASH, padded=True),
        decoding_step("gpt2-124m", "llama"),
        Step(
            "shakespeare",
            "characters of Shakespeare, nats over the whole validation part",
            (recipe_run("shakespeare_char", "tinyshakespeare"),),
            (Goal("loss", 1.42, False),),
        ),
        *(
            Step(
                f"multi30k-{seed}",
                f"English to German on Multi30k, seed {seed}, lower-cased BLEU",
                (recipe_run("multi30k_en_de_gpu", "multi30k", "--seed", str(seed)),),
                (Goal("bleu_lowercase", 42.0),),
            )
            for seed in (1, 2, 3)
        ),
        training_step("gpt2-124m", "llama", "gpt2", padded=True),
        training_step("transformer-63m", "marian", padded=True),
        Step(
            "wikitext2",
            "WikiText-2, perplexity a word of the test part",
            (recipe_run("wikitext2", "wikitext-2"),),
            (Goal("word_perplexity", 63, False),),
        ),
        Step(
            "babymix-encoder",
            "an encoder from ten million words; senses of ten nouns, mean macro-F1",
            (
                recipe_run("mlm_babymix_gpu", "babymix"),
                ("senses", "{run}/model", "{data}/coarsewsd20", "--json"),
            ),
            (Goal("macro_f1", 86),),
        ),
        decoding_step("transformer-63m", "marian"),
        Step(
            "sharding",
            "the same 200 steps in a process alone, in DDP and in FSDP2 of one process",
            tuple(
                (*recipe_run("shakespeare_char", "tinyshakespeare", *SHARDED, runner=runner), "--output_dir", where)
                for runner, where in (("training", "{run}/alone"), ("ddp", "{run}/ddp"), ("fsdp2", "{run}/fsdp2"))
            ),
            (Goal("apart", 0.02, False),),
        ),
        Step(
            "memory",
            "memory of a training step beside what `inspect` predicts; what the device does at best",
            (("benchmarks", "roofline", "memory", "--shape", "gpt2-124m", "bert-110m", "transformer-63m"),),
        ),
        Step("babymix-decoder", "a decoder from ten million words", (recipe_run("clm_babymix_gpu", "babymix"),)),
        training_step("bert-110m", "bert", "modernbert", *FLASH, padded=False),
        training_step("transformer-63m", "marian", padded=False),
    )
}


# --- What a step takes ------------------------------------------------------------------------------------------------

# Nothing of this is measured: it is what the first run is planned with. Seconds.
SHEET = SHEETS["H100"]  # dense bf16, FLOP/s
COMPILED_MFU, EAGER_MFU = 0.40, 0.25
START = 20.0  # a process: imports, the device, the corpus
COMPILING = 40.0  # one model, forward and backward
LAYER_STEP = 0.004  # to launch the kernels of one layer in a training step: what small models take
LAYER_TOKEN = 0.001  # the same for one new token, which only reads weights
TESTING = 180.0  # the tests, most of it in compilers
TRANSLATING = 40.0  # by beam search, a test of a thousand sentences
CHARACTERS = 100  # a vocabulary of them, as good as nothing
SCORING = 60.0  # the senses of ten nouns: 20,000 sentences, one word after the other
STACKS = {"decoder": 1, "encoder": 1, "seq2seq": 2.5}  # layers for each one that the shape counts: cross-attention too


def predicted_seconds(step: Step) -> float:
    """On an H100."""
    return sum(PREDICTIONS[words[0]](words[1:]) for words in step.commands)


def _predict_recipe(words: Sequence[str]) -> float:
    recipe = parse_recipe(words)
    spec = recipe.optimisation
    vocab_size = CHARACTERS if recipe.tokenizer.algorithm == "char" else recipe.tokenizer.vocab_size
    parameters, layers, width = _sizes(json.dumps(recipe.model), recipe.objective, vocab_size)
    rows = 2 if spec.r_drop else 1
    tokens = spec.max_steps * spec.accumulation * recipe.data.batch_tokens * rows
    flops = 6 * parameters * tokens + 12 * layers * width * recipe.data.window * tokens
    seconds = START + max(flops / SHEET / EAGER_MFU, spec.max_steps * layers * LAYER_STEP)
    return seconds + (TRANSLATING if recipe.objective == "translation" else 0)


@functools.cache
def _sizes(model: str, objective: str, vocab_size: int) -> tuple[int, float, int]:
    """Parameters, layers and width of the model that a recipe describes."""
    fields: dict[str, Any] = json.loads(model)
    config = AutoConfig.for_model(**{"vocab_size": vocab_size} | fields)
    with torch.device("meta"):
        parameters = count_parameters(OBJECTIVES[objective].auto_model.from_config(config))
    family = config.model_type.removeprefix("scratch_")
    layers = config.decoder_layers if family == "seq2seq" else config.num_hidden_layers
    return parameters, layers * STACKS[family], config.hidden_size


@functools.cache
def _parameters(family: str, shape: Shape) -> int:
    with torch.device("meta"):
        return count_parameters(NATIVES[reference(family)].make(shape))


def _predict_benchmark(words: Sequence[str]) -> float:
    arguments, seconds = command_line.parse(words), START
    for kind, _, shape in command_line.plan(arguments):
        assert shape is not None
        layers, tokens = shape.layers * STACKS[shape.family], shape.batch * shape.length
        flops = 6 * _parameters(shape.family, shape) * tokens + 12 * layers * shape.width * shape.length * tokens
        step = flops / SHEET / (COMPILED_MFU if shape.compile else EAGER_MFU)
        if kind == "memory":  # of three models, forward alone and with the way back
            seconds += 3 * 2 * max(step, layers * LAYER_STEP)
            continue
        peers = [PEERS[name] for name in arguments.peer if shape.family in PEERS[name].families]
        variants = shape.compile if kind == "generate" else not shape.padded
        native = sum(1 + (variants and peer.is_native) for peer in peers)
        if kind == "generate":
            step = (arguments.new_tokens or shape.length // 2) * layers * LAYER_TOKEN
            steps = 3 + arguments.rounds + 10  # ten more: what verifying, and counting calls and operations, costs
        else:
            step, steps = max(step, 0 if shape.compile else layers * LAYER_STEP), 3 + 5 * arguments.rounds + 3
        seconds += (1 + native) * (steps * step + shape.compile * COMPILING)
    return seconds


PREDICTIONS: dict[str, Callable[[Sequence[str]], float]] = {
    "pytest": lambda words: START + TESTING,
    "senses": lambda words: START + SCORING,
    "benchmarks": _predict_benchmark,
    **dict.fromkeys(("training", "ddp", "fsdp2"), _predict_recipe),
}


# --- What came out ----------------------------------------------------------------------------------------------------

CARD = ("model/README.md", "metrics.jsonl", "recipe.yaml", "environment.json")


def outcome(words: Words, printed: str) -> dict[str, Any]:
    """What a finished command has left behind, for the step's record."""
    match words[0]:
        case "pytest":
            (suite,) = ElementTree.parse(_option(words, "--junitxml")).getroot()
            counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
            return {"figures": counts | {"failed": counts["failures"] + counts["errors"]}}
        case "senses":
            scores = json.loads(printed[printed.index("{") :])
            return {"figures": scores["mean"], "senses": scores["words"]}
        case "benchmarks":
            record = json.loads((_option(words, "--output_dir") / "benchmark.json").read_text(encoding="utf-8"))
            return {name: record[name] for name in ("roofline", "results")} | {"figures": {}}
    folder = _option(words, "--output_dir")
    if not (lines := metrics.read(folder / "metrics.jsonl")):
        raise ValueError("it has logged nothing")
    figures: dict[str, Any] = {}
    for event in ("train", "evaluation", "test"):  # of which the last counts
        figures |= {name: value for line in lines if line["event"] == event for name, value in line.items()}
    found = {name: folder / name for name in CARD if (folder / name).exists()}
    card = {Path(name).name: path.read_text(encoding="utf-8") for name, path in found.items()}
    return {
        "figures": {k: v for k, v in figures.items() if isinstance(v, int | float)},
        "name": folder.name,
        "card": card,
    }


def _option(words: Words, name: str) -> Path:
    """The value that counts: the last one."""
    return Path(next(value for key, value in list(zip(words, words[1:], strict=False))[::-1] if key == name))


def figures(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all commands of a step, with those that several of them give together."""
    found = {name: value for each in outcomes for name, value in each["figures"].items()}
    results = [result for each in outcomes for result in each.get("results", ())]
    runs = [each for each in outcomes if "card" in each]
    if len(runs) > 1 and all({"loss", "tokens_per_second"} <= each["figures"].keys() for each in runs):
        losses = [each["figures"]["loss"] for each in runs]
        found["apart"] = max(losses) - min(losses)
        found |= {f"tokens_per_second, {each['name']}": each["figures"]["tokens_per_second"] for each in runs}
    return (
        found | _of_training([r for r in results if r["kind"] == "train"]) | _of_decoding(results) | _of_memory(results)
    )


def _of_training(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ours at its best, compiled or not, beside the fastest of the others, compiled or not."""
    rows = [(name, row, result) for result in results for name, row in result["contenders"].items()]

    def fastest(is_ours: bool) -> tuple[str, dict[str, Any]] | None:
        found = [
            (f"{name}, compiled" if result["shape"]["compile"] else name, row)
            for name, row, result in rows
            if (name == OURS) == is_ours and not name.endswith("mask given")
        ]
        return max(found, key=lambda each: each[1]["tokens_per_second"]["median"], default=None)

    mine, other = fastest(True), fastest(False)
    if mine is None:
        return {}
    found = {"fastest of ours": mine[0], "tokens a second": mine[1]["tokens_per_second"]["median"]}
    found |= {"MFU": mine[1].get("of_sheet"), "peak bytes": mine[1].get("peak_bytes")}
    if other is not None:
        found |= {"fastest peer": other[0], "speed": found["tokens a second"] / other[1]["tokens_per_second"]["median"]}
        if found["peak bytes"] and other[1].get("peak_bytes"):
            found["memory"] = found["peak bytes"] / other[1]["peak_bytes"]
    return found


def _of_decoding(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for result in results:
        if result["kind"] != "generate" or OURS not in result["contenders"]:
            continue
        rows, (name, ratio) = result["title"].removeprefix("greedy, "), next(iter(result["ratios"].items()))
        mine = result["contenders"][OURS]
        found[f"tokens a second, {rows}"] = mine["tokens_per_second"]["median"]
        found[f"bandwidth, {rows}"] = mine.get("of_bandwidth")
        found[f"fastest peer, {rows}"], found[f"speed, {rows}"] = name, ratio["speed"]["median"]
    return found


def _of_memory(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The peak of each model as a part of the predicted one."""
    return {
        f"{result['name']}, {name}": row["peak_of_predicted"]
        for result in results
        if result["kind"] == "memory"
        for name, row in result["contenders"].items()
    }


# --- Rehearsal --------------------------------------------------------------------------------------------------------

TINY_RUN = {
    "model.hidden_size": 16,
    "model.intermediate_size": 32,
    "model.num_attention_heads": 2,
    "data.batch_tokens": 256,
    "data.workers": 0,
    "tokenizer.vocab_size": 300,
    "optimisation.max_steps": 4,
    "optimisation.warmup_steps": 1,
    "evaluation.every_steps": 2,
    "checkpoints.every_steps": 2,
    "log_every": 1,
}
TINY_WINDOW = {"model.num_hidden_layers": 1, "data.window": 32}
TINY_PAIRS = {"model.encoder_layers": 1, "model.decoder_layers": 1, "data.max_length": 64, "evaluation.num_beams": 2}
TINY_BENCHMARK = (
    "--rounds",
    "1",
    "--steps",
    "1",
    "--warmup",
    "1",
    "--precision",
    "bf16",
    "--compiler",
    "eager",
)


def rehearsed(words: Words) -> Words:
    """The same command for a model so small that it takes seconds on a CPU; what is compiled is only traced."""
    runner = words[0]
    if runner == "benchmarks":
        tiny = [f"tiny-{SHAPES[word].family}" if word in SHAPES else word for word in words]
        return (*tiny, *TINY_BENCHMARK, *(("--new-tokens", "3") if "generate" in words else ()))
    if runner in ("training", "ddp", "fsdp2"):
        recipe = parse_recipe(words[1:])
        sizes = TINY_RUN | (TINY_PAIRS if recipe.objective == "translation" else TINY_WINDOW)
        return (*words, *(f"--{name}={value}" for name, value in sizes.items()))
    return words
