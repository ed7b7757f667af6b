"""A recipe for somebody's own text and this machine, each of its choices with the reason beside it.

python -m training new causal_lm|masked_lm|translation --data FOLDER [--minutes M] [--columns SOURCE TARGET]
    [--output RECIPE.yaml]
"""

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from hf_scratch_transformer.files import replacing

from .plan import MEASURED, TOKENS_A_PARAMETER, WARMUP, Pace, begun, duration, fitting
from .recipe import COLUMNS
from .run import Run
from .sections import RecipeError
from .survey import Survey, repeated, survey

PASSES = 16  # over a text, beyond which more of them teach a language model next to nothing (Muennighoff et al. 2023)
PASSES_MASKED = 40  # of which each masks other tokens
STEPS = 1000  # from half of which to twice as many there are, by the size of batches
LETTERS, LEAST_LETTERS = 4, 2  # in a token of a usual vocabulary, and of one of hundreds
EXAMPLES = 100  # of each token of the vocabulary that there should be
ROUNDS = 3  # of measuring: what fits depends on the size that was measured
MODELS = {
    "causal_lm": {"model_type": "scratch_decoder", "num_hidden_layers": 4},
    "masked_lm": {"model_type": "scratch_encoder", "num_hidden_layers": 4},
    "translation": {"model_type": "scratch_seq2seq", "encoder_layers": 4, "decoder_layers": 4},
}
# As in the recipes that come with this program, of which each was measured.
BRICKS = {
    **{"hidden_act": "swiglu", "norm_type": "rms_norm", "norm_position": "pre", "position_embedding_type": "rotary"},
    **{"use_qk_norm": True, "attention_bias": False, "mlp_bias": False, "initialization": "normal_zero_output"},
}
SIZE = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4}  # from which it is made larger or less


UPDATES = {
    **{"optimizer": "muon", "matrix_learning_rate": 0.02, "learning_rate": 0.004, "schedule": "linear"},
    "precision": "auto",
}
# Tokens: of the batches that are tried first, and of those that may be taken. A step has costs of its own: on programs
# 142 seconds of 2048 gave 1.72 bits a byte, 167 seconds of 512 gave 1.85 (a seed each).
BATCH, SMALLEST_BATCH, LARGEST_BATCH = 2048, 1024, 8192
EVALUATIONS, EVALUATING = 5, 0.2  # fewer, where that many took a larger share of the time
# Parameters of the table of tokens, of which a language model makes most, by those outside of it (Tao et al. 2024, from
# the table of the models that they predict for): more of it costs more than it tells.
TABLE, TABLE_POWER = 1.64, 0.83
VOCABULARIES = (500, 1000, 2000, 4000, 8000, 16000, 32000)
FEW_SIGNS, LONG_WORD = 64, 20  # of text that has no words, as DNA has none
SWAPPED = "swapped, it translates the other way"
PREDICTED = "It should take {} s on the machine that wrote this"


class Choice(NamedTuple):
    """A field of a recipe by its dotted name, its value, and why."""

    name: str
    value: Any
    why: str = ""


def propose(words: Sequence[str]) -> None:
    """Write a recipe by the words of a command line, and print what was found and how to go on.

    Raises RecipeError when words or text cannot be used.
    """
    asked = _parsed(words)
    output = Path(asked.output or f"{Path(asked.data).resolve().stem or 'new'}.yaml")
    if os.path.lexists(output):
        raise RecipeError(f"--output: {output} is there already; name another, or remove it")
    if not output.parent.is_dir():
        raise RecipeError(f"--output: there is no folder {output.parent}")
    found = survey(asked.data, asked.objective, asked.columns or ())
    print(f"{asked.data}:", *found.lines(), sep="\n  ", file=sys.stderr)
    command = f"scratch-transformer new {shlex.join(words)}"
    choices, pace, seconds = _fitted(found, asked.objective, asked.minutes)
    head = [f"Written by `{command}`, which found in the training split:", *(f"  {line}" for line in found.lines())]
    head.append(f"{PREDICTED.format(f'{seconds:,.0f}')}.")
    with replacing(output) as place:
        place.write_text(rendered(head, choices), encoding="utf-8")
    model = f"runs/{output.stem}/model"
    taken = f"about {duration(seconds)} on this machine: {pace.targets / pace.step:,.0f} tokens a second"
    print(f"{output} is written; it will take {taken}. Next:")
    print(f"  scratch-transformer train {shlex.quote(str(output))}")
    values = {choice.name: choice.value for choice in choices}
    read = {"data": asked.data, "data.splits": {"test": values["data.splits"]["test"]}}
    read |= {name: values[name] for name in ("data.columns", "data.sample_by", "data.batch_tokens") if name in values}
    words = [f"--{name}={each if isinstance(each, str) else json.dumps(each)}" for name, each in read.items()]
    print(f"  scratch-transformer evaluate {shlex.join([model, *words])}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"new: {message}; usage: {' '.join(self.format_usage().split()[1:])}")


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="scratch-transformer new", allow_abbrev=False, add_help=False)
    parser.add_argument("objective", choices=list(COLUMNS))
    parser.add_argument("--data", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--columns", nargs="+")
    parser.add_argument("--output")
    asked = parser.parse_args(words)
    if not 0 < asked.minutes < math.inf:
        raise RecipeError(f"--minutes: must be a number above 0, got {asked.minutes:g}")
    return asked


def _fitted(found: Survey, objective: str, minutes: float) -> tuple[list[Choice], Pace, float]:
    """The choices, with the size, batches and steps that fit into the minutes; what a step takes, and all of it."""
    sizes, batch, seen, evaluations = dict(SIZE), BATCH, 1.0, EVALUATIONS
    passes = PASSES_MASKED if objective == "masked_lm" else PASSES
    for left in reversed(range(ROUNDS)):
        run, pace, setup = _measured(list(_choices(found, objective, sizes, batch, STEPS, seen, evaluations)))
        _, corpus, _ = next(iter(run.parts(0, 0)))
        whole = len(run.objective.plan(corpus, None))  # steps of a pass
        evaluations = max(1, min(EVALUATIONS, int(EVALUATING * 60 * minutes / pace.evaluation)))
        before = setup + (evaluations + 1) * pace.evaluation  # and the test
        seconds = 60 * minutes - before
        if seconds <= 0:
            raise RecipeError(f"--minutes: {minutes:g} are too few: more than {before / 60:.2g} pass without a step")
        steps = max(1, min(int(seconds / pace.step), passes * whole))
        seen = steps / whole
        fitted = sizes | fitting(run, pace, seconds / 60, passes * whole * pace.targets)
        other = min(max(int(batch * 2.0 ** int(math.log2(steps / STEPS))), SMALLEST_BATCH), LARGEST_BATCH)
        if not left or (fitted, other) == (sizes, batch):
            break
        sizes, batch = fitted, other
    choices = list(_choices(found, objective, sizes, batch, steps, seen, evaluations))
    return choices, pace, before + steps * pace.step


def _measured(choices: Sequence[Choice]) -> tuple[Run, Pace, float]:
    """A run of these, what it takes, and the seconds before its first step."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(rendered([], choices), encoding="utf-8")
        before = time.monotonic()
        run, report, pace = begun([str(recipe)])
    print(f"  measured: {report['parameters']}; {report['a step']}", file=sys.stderr)
    return run, pace, max(time.monotonic() - before - (WARMUP + MEASURED) * pace.step - pace.evaluation, 0.0)


def _choices(
    found: Survey, objective: str, sizes: dict[str, int], batch: int, steps: int, passes: float, evaluations: int
) -> Iterator[Choice]:
    is_translation, is_masked = objective == "translation", objective == "masked_lm"
    yield Choice("objective", objective)
    yield Choice("data.path", os.path.abspath(found.data["path"]))
    yield Choice("data.splits", found.data["splits"], found.notes["splits"])
    yield Choice("data.columns", found.data["columns"], f"the source, then the target; {SWAPPED}" * is_translation)
    if found.data["sample_by"] != "line":
        yield Choice("data.sample_by", found.data["sample_by"], found.notes["sample_by"])
    if (share := repeated(found)) > 0.01:
        yield Choice("data.deduplicate", True, f"{share:.0%} of the rows are there already")
    if is_translation:
        most = found.longest * found.size / found.words / LEAST_LETTERS
        length = min(512, max(32, 2 ** math.ceil(math.log2(max(most, 1)))))
        yield Choice("data.max_length", length, f"tokens of a side; the longest row has {found.longest:,} words")
    else:
        length = 64 if is_masked and found.words < 40 * found.rows else 128 if is_masked else 256
        yield Choice("data.window", length, f"tokens; a row has {found.words / found.rows:,.0f} words on average")
    yield Choice("data.batch_tokens", batch, f"so that there are some {STEPS:,} steps, if time and text allow")
    yield from _tokens(found, math.inf if is_translation else _table(MODELS[objective] | sizes) / sizes["hidden_size"])
    model = MODELS[objective] | BRICKS | sizes | {"max_position_embeddings": length}
    for name, value in model.items():
        why = f"as large as time and text allow: {TOKENS_A_PARAMETER} tokens a parameter, or what there are"
        yield Choice(f"model.{name}", value, why if name == "hidden_size" else "")
    dropout = 0.0 if passes <= 1.5 else 0.1 if passes <= 4 else 0.2
    yield Choice("model.dropout", dropout, f"the text is seen {passes:.2g} times")
    for name, value in UPDATES.items():
        yield Choice(f"optimisation.{name}", value)
    if is_masked:
        yield Choice("optimisation.mask_fraction", [0.3, 0.15], "in the end as little as the finished model reads")
    if is_translation:
        yield Choice("optimisation.label_smoothing", 0.1)
    yield Choice("optimisation.warmup_steps", max(1, min(100, steps // 20)))
    most = PASSES_MASKED if is_masked else PASSES
    why = f"{most} passes over the text; more teach next to nothing" if passes >= most else "what fits into the time"
    yield Choice("optimisation.max_steps", steps, why)
    if passes > 4:
        yield Choice("optimisation.final_weights", "best", "of the evaluations: it may learn the text by heart")
    yield Choice("evaluation.every_steps", max(1, steps // evaluations))
    if is_translation:
        yield Choice("evaluation.num_beams", 5, "at the end")
    yield Choice("checkpoints.every_steps", max(1, steps // evaluations))


def _table(sizes: dict[str, Any]) -> float:
    """Parameters that the table of tokens of a language model should have."""
    block = 4 * sizes["hidden_size"] ** 2 + 3 * sizes["hidden_size"] * sizes["intermediate_size"]
    return float(TABLE * (sizes["num_hidden_layers"] * block) ** TABLE_POWER)


def _tokens(found: Survey, most: float) -> Iterator[Choice]:
    usual = sum(count >= 1e-5 * found.size for count in found.signs.values())
    if usual <= FEW_SIGNS and found.size > LONG_WORD * found.words:
        yield Choice(
            "tokenizer.algorithm", "char", f"no words: {usual} signs, {found.size / found.words:,.0f} in a row"
        )
        return
    seen = found.size / LETTERS / EXAMPLES
    size = next((size for size in reversed(VOCABULARIES) if size <= min(seen, most)), VOCABULARIES[0])
    why = f"so that a token is seen {EXAMPLES} times in {found.size:,} characters"
    yield Choice("tokenizer.vocab_size", size, why if seen <= most else "of which a model of this size makes most")


def rendered(head: Sequence[str], choices: Sequence[Choice]) -> str:
    """A recipe as YAML, the reasons beside the values."""
    lines, section = [f"# {line}" for line in head], ""
    for name, value, why in choices:
        group, _, leaf = name.rpartition(".")
        if group != section and group:
            lines += ["", f"{group}:"]
        section = group
        shown = (
            yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).split("\n...")[0].strip()
        )
        line, above = f"{'  ' * bool(group)}{leaf}: {shown}", f"{'  ' * bool(group)}# {why}"
        is_short = len(line) + len(above) < 100
        lines += [f"{line}  {above.strip()}" if is_short else f"{above}\n{line}"] if why else [line]
    return "\n".join(lines) + "\n"
