"""Draw how the data goes, from token ids to the loss: docs/dataflow.svg, from the code itself.

    make pictures

A tiny model of each family is run twice, for its loss alone on unpadded tokens, and plainly with logits. What the
functions in `OPENED` call meanwhile are the boxes, in the order in which they were called; what they return are the
shapes on the arrows. The picture carries that list in its metadata, and a test compares it with what the code does
today.

Letters: B batch, T length, S length of a translator's source, N tokens that are not padding (Nₛ of the source),
D width, d width of a head, V vocabulary.
"""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor, nn

from hf_scratch_transformer import (
    ScratchDecoderConfig,
    ScratchDecoderForCausalLM,
    ScratchEncoderConfig,
    ScratchEncoderForMaskedLM,
    ScratchSeq2SeqConfig,
    ScratchSeq2SeqForConditionalGeneration,
)
from hf_scratch_transformer.heads_scratch import ScratchLanguageModel
from hf_scratch_transformer.layers_scratch import ScratchBlock
from hf_scratch_transformer.stack_scratch import ScratchPreTrainedModel, ScratchStack

PICTURE = Path(__file__).with_name("dataflow.svg")

# What is done in each step, in a few words. A call that is not listed is drawn with its name alone.
WORDS = {
    "labels": "−100 where there is nothing to predict",
    "F.pad": "labels, one step earlier",
    "check_token_labels": "labels fit the tokens",
    "prepare_decoder_input_ids_from_labels": "the target, one step later",
    "trim_after_last_target": "what the loss needs to read",
    "check_inputs": "names and shapes are right",
    "word_embeddings": "ids become vectors",
    "choose_layout": "padded or unpadded, decided once",
    "make_masks": "who sees whom, padded",
    "preallocate": "a new cache gets capacity ahead",
    "default_positions": "0, 1, 2, … along each row",
    "embeddings": "scale, absolute positions, types, norm, dropout",
    "mask": "who sees whom, unpadded: a VarlenMask",
    "unpad": "the padding is left out",
    "unpadded": "where the source has no padding",
    "create_bidirectional_mask": "of the source, padded",
    "rotary": "angles for queries and keys",
    "self_attn": "x = x + self_attn(norm(x))",
    "cross_attn": "x = x + cross_attn(norm(x), encoded)",
    "mlp": "x = x + mlp(norm(x))",
    "norm": "once more after the last block",
    "pad": "the layout is undone",
    "lm_head": "logits",
    "leave_out_padding": "padding predicts nothing",
    "total_loss": "fused: no logits of all tokens at once",
    "linear_cross_entropy": "head and loss in one, in chunks",
    "token_loss": "cross-entropy",
    "loss_function": "cross-entropy, of transformers",
}

INPUTS, FORWARD, BLOCK = "given", "forward", "ScratchBlock.forward"  # whose boxes they are

# Sizes that tell by themselves what they are the size of.
SIZES = {3: "B", 7: "T", 11: "S", 13: "N", 19: "Nₛ", 32: "D", 8: "d", 41: "V"}
BATCH, WIDTH, VOCABULARY = 3, 32, 41
LENGTHS, SOURCE_LENGTHS = (7, 4, 2), (11, 6, 2)  # of the rows


# --- What the code does -----------------------------------------------------------------------------------------------


class Call(NamedTuple):
    owner: str  # the function that makes it
    lane: str
    name: str
    shape: str  # of its result; "" if that is no tensor
    is_flow: bool  # whether the result is what the next step works on


class Step(NamedTuple):
    """One row of the picture."""

    owner: str
    name: str
    shapes: dict[str, str]  # by lane, of those that make this step
    is_flow: bool
    runs: dict[str, str]  # by lane: "both", "unpadded" or "padded"


LANES = {
    "encoder": "scratch_encoder",
    "decoder": "scratch_decoder",
    "target": "scratch_seq2seq, target",
    "source": "scratch_seq2seq, source",
}


def dataflow() -> list[Step]:
    """The steps of all lanes and of both runs, in the order of the code."""
    runs = {name: trace(unpadded=name == "unpadded") for name in ("unpadded", "padded")}
    sequences = [
        [(call.owner, call.name) for call in calls if call.lane == lane] for calls in runs.values() for lane in LANES
    ]
    order: list[tuple[str, str]] = []
    for sequence in sequences:
        order = merge(order, sequence)
    steps = []
    for key in order:
        found = {name: [call for call in calls if (call.owner, call.name) == key] for name, calls in runs.items()}
        shapes, made = {}, {}
        for lane in LANES:
            given = {name: call.shape for name, calls in found.items() for call in calls if call.lane == lane}
            if given:
                shapes[lane] = " | ".join(dict.fromkeys(shape for shape in given.values() if shape))
                made[lane] = "both" if len(given) == 2 else next(iter(given))
        is_flow = any(call.is_flow for calls in found.values() for call in calls)
        steps.append(Step(*key, shapes, is_flow, made))
    return steps


def merge(first: list, second: Sequence) -> list:
    """One list in which both are in order: what is only in the second stands before what follows it there."""
    merged, start, waiting = list(first), 0, []
    for item in second:
        if item not in merged[start:]:
            waiting.append(item)
            continue
        place = merged.index(item, start)
        merged[place:place] = waiting
        start, waiting = place + len(waiting) + 1, []
    return merged + waiting


def trace(unpadded: bool) -> list[Call]:
    """Run a model of each family; what its forward, its backbone, `encode`, the block and the head called."""
    mask, source_mask = padding_mask(LENGTHS), padding_mask(SOURCE_LENGTHS)
    ids, source = (torch.full(each.shape, 5) for each in (mask, source_mask))
    labels = ids.masked_fill(mask == 0, -100)
    # With labels nobody needs a cache; asked for, a plain run fills one.
    how: dict[str, Any] = {"loss_only": True} if unpadded else {"use_cache": True}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
    encoder = ScratchEncoderForMaskedLM(ScratchEncoderConfig(**sizes, num_hidden_layers=2))
    decoder = ScratchDecoderForCausalLM(ScratchDecoderConfig(**sizes, num_hidden_layers=2))
    seq2seq = ScratchSeq2SeqForConditionalGeneration(ScratchSeq2SeqConfig(**sizes, encoder_layers=2, decoder_layers=2))
    calls = [Call(INPUTS, lane, "input_ids", shape_of(ids), True) for lane in ("encoder", "decoder")]
    calls.append(Call(INPUTS, "source", "input_ids", shape_of(source), True))
    calls += [Call(INPUTS, lane, "labels", shape_of(labels), True) for lane in ("encoder", "decoder", "target")]
    for lane, model, tokens, padding in (
        ("encoder", encoder, ids, mask),
        ("decoder", decoder, ids, mask),
        ("target", seq2seq, source, source_mask),
    ):
        arguments = {name: value for name, value in how.items() if name != "use_cache" or lane != "encoder"}
        with recorded(model, lane, calls):
            model.eval()(input_ids=tokens, attention_mask=padding, labels=labels, **arguments)
    return calls


def padding_mask(lengths: Sequence[int]) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


OPENED = (
    ScratchStack.encode,
    ScratchBlock.forward,
    ScratchLanguageModel.predict,
    ScratchLanguageModel.total_loss,
)


@contextmanager
def recorded(model: ScratchPreTrainedModel, lane: str, calls: list[Call]) -> Iterator[None]:
    """Add to `calls` what the functions in `OPENED`, and the forwards of the model and its backbones, call."""
    modules = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    forwards = [type(each).forward for each in model.modules() if isinstance(each, ScratchPreTrainedModel)]
    opened = {code_of(function) for function in (*OPENED, *forwards)}
    seen: set[tuple[str, str, str]] = set()

    def record(frame: FrameType, event: str, result: Any) -> None:
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name == frame.f_code.co_name == "__call__":
            frame, caller = caller, caller.f_back  # a class that calls its base class
        if event != "return" or caller is None or caller.f_code not in opened:
            return
        name = "loss_function" if "Loss" in frame.f_code.co_name else frame.f_code.co_name
        called = frame.f_locals.get("self")
        if isinstance(called, nn.Module) and name in ("_wrapped_call_impl", "__call__"):
            name = modules.get(id(called), "")
            if isinstance(called, nn.Dropout | ScratchBlock | ScratchPreTrainedModel):
                return  # has boxes of its own, or is none
        elif name not in caller.f_code.co_names or frame.f_code in opened or not carries_data(result):
            return
        owner = caller.f_code.co_qualname
        if frame.f_globals["__name__"] == "torch.nn.functional":
            name = f"F.{name}"
        if caller.f_code is code_of(ScratchBlock.forward):
            name = re.sub("(_output)?_norm$", "", name)
            if name == "add":
                return
        side = lane
        if lane == "target":
            stack = caller.f_locals["self"]
            is_source = stack is model.model.encoder or any(stack is layer for layer in model.model.encoder.layers)
            side = "source" if is_source else "target"
        owner = FORWARD if owner.endswith(".forward") and owner != BLOCK else owner
        is_flow = isinstance(result, Tensor) and result.is_floating_point()
        if (owner, side, name) not in seen and name:
            seen.add((owner, side, name))
            calls.append(Call(owner, side, name, shape_of(result), is_flow))

    sys.setprofile(record)
    try:
        yield
    finally:
        sys.setprofile(None)


def code_of(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def carries_data(result: Any) -> bool:
    if isinstance(result, dict):
        return bool(result) and all(value is None or isinstance(value, Tensor | tuple) for value in result.values())
    return result is None or isinstance(result, Tensor | tuple)


def shape_of(result: Any) -> str:
    if isinstance(result, dict):
        result = next(iter(result.values()))
    if isinstance(result, Tensor):
        return f"({', '.join(SIZES.get(size, str(size)) for size in result.shape)})"
    if isinstance(result, tuple) and type(result) is tuple and all(isinstance(each, Tensor) for each in result):
        return f"{len(result)} × {shape_of(result[0])}"
    return "" if result is None else type(result).__name__


# --- The picture ------------------------------------------------------------------------------------------------------

LEFT, LANE, GAP, RIGHT = 2.0, 2.5, 0.12, 0.9  # inches
COLOURS = {"both": "#dce8f4", "unpadded": "#cfead8", "padded": "#fbe3c8"}
EDGES = {"both": "#3b6ea5", "unpadded": "#2e7d4f", "padded": "#b86a14"}
INK, QUIET = "#1f2328", "#6a737d"


def draw(steps: Sequence[Step]) -> Figure:
    """One row a step, one column a lane; a box spans the lanes that share it."""
    lanes = list(LANES)
    tops, y, owner = [], 1.35, ""
    for step in steps:
        y += 0.36 if step.owner != owner else 0.0
        owner = step.owner
        tops.append(y)
        y += height(step, lanes) + (0.40 if step.is_flow else 0.16)
    total, width = y + 0.1, LEFT + len(lanes) * LANE + RIGHT
    figure = Figure((width, total))
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(total, 0))
    axes.axis("off")
    centres = {lane: LEFT + (index + 0.5) * LANE for index, lane in enumerate(lanes)}
    draw_heading(axes, centres)
    draw_owners(axes, steps, tops, lanes, width)

    for lane in lanes:
        draw_arrows(axes, steps, tops, lanes, lane, centres[lane])
        rows = [index for index, step in enumerate(steps) if lane in step.shapes]
        for index in rows:
            if steps[index].is_flow:
                bottom, shape = tops[index] + height(steps[index], lanes), steps[index].shapes[lane]
                text = {"()": "loss"}.get(shape, shape)
                axes.text(centres[lane] + 0.08, bottom + 0.15, text, size=7, family="monospace", va="center", color=INK)
        if lane == "source":
            draw_crossing(axes, steps, tops, lanes, centres, rows[-1])

    for step, top in zip(steps, tops, strict=True):
        for span in spans(step, lanes):
            left, right = centres[span[0]] - LANE / 2 + GAP, centres[span[-1]] + LANE / 2 - GAP
            draw_box(axes, step, span, centres, (left, right), top)
    return figure


def draw_arrows(
    axes: Any, steps: Sequence[Step], tops: Sequence[float], lanes: Sequence[str], lane: str, centre: float
) -> None:
    """From each step of a lane to the next: of both runs, or beside each other where they part. What a run passes by
    hides its arrow."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for run in ("unpadded", "padded"):
        rows = [index for index, step in enumerate(steps) if step.runs.get(lane) in (run, "both")]
        pairs[run] = list(zip(rows, rows[1:], strict=False))
    for run, offset in (("unpadded", 0.0), ("padded", -0.3)):
        for here, there in pairs[run]:
            is_shared = all((here, there) in each for each in pairs.values())
            style = {"color": INK, "lw": 1} if is_shared else {"color": EDGES[run], "lw": 1.2}
            style |= {"linestyle": "--"} if run == "padded" and not is_shared else {}
            x, end = centre + (0.0 if is_shared else offset), tops[there]
            axes.plot((x, x), (tops[here] + height(steps[here], lanes), end - 0.08), zorder=1, **style)
            axes.plot((x,), (end - 0.055,), marker="v", markersize=5, color=style["color"], zorder=2)


def spans(step: Step, lanes: Sequence[str]) -> list[list[str]]:
    """Neighbouring lanes that make this step."""
    found: list[list[str]] = []
    for index, lane in enumerate(lanes):
        if lane in step.shapes:
            if index and lanes[index - 1] in step.shapes:
                found[-1].append(lane)
            else:
                found.append([lane])
    return found


def height(step: Step, lanes: Sequence[str]) -> float:
    is_narrow = any(len(span) == 1 for span in spans(step, lanes)) and step.name in WORDS
    return 0.29 + 0.17 * is_narrow + 0.17 * shows_result(step)


def shows_result(step: Step) -> bool:
    return not step.is_flow and any(step.shapes.values())


def draw_box(axes: Any, step: Step, span: list[str], centres: dict[str, float], edges: Any, top: float) -> None:
    (left, right), lanes = edges, list(centres)
    made = {step.runs[lane] for lane in span}
    run = made.pop() if len(made) == 1 else "both"
    shape = FancyBboxPatch(
        (left, top),
        right - left,
        height(step, lanes),
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=COLOURS[run],
        edgecolor=EDGES[run],
        linestyle="--" if run == "padded" else "-",
        zorder=3,
    )
    axes.add_patch(shape)
    words, middle = WORDS.get(step.name, ""), (left + right) / 2
    is_narrow = any(len(each) == 1 for each in spans(step, lanes)) and step.name in WORDS
    text = {"va": "center", "zorder": 4, "color": INK}
    if is_narrow or not words:
        size = min(8.5, 104 * (right - left) / len(step.name))  # so that a long name fits
        axes.text(middle, top + 0.145, step.name, size=size, family="monospace", ha="center", **text)
        axes.text(middle, top + 0.32, words, size=7.5, ha="center", **text)
    else:
        axes.text(middle - 0.1, top + 0.145, step.name, size=8.5, family="monospace", ha="right", **text)
        axes.text(middle + 0.1, top + 0.145, words, size=7.5, ha="left", **text)
    if shows_result(step):
        for lane in span:
            line, result = top + height(step, lanes) - 0.11, step.shapes[lane]
            if result:
                style = {"size": 6.5, "family": "monospace", "ha": "center"} | text | {"color": QUIET}
                axes.text(centres[lane], line, f"→ {result}", **style)


def draw_heading(axes: Any, centres: dict[str, float]) -> None:
    text = {"va": "center", "color": INK}
    axes.text(0.15, 0.25, "From ids to the loss", size=13, weight="bold", **text)
    letters = "B batch   T length   S length of the source   N tokens that are not padding (Nₛ of the source)"
    axes.text(0.15, 0.52, f"{letters}   D width   d width of a head   V vocabulary", size=8, **text)
    x = 0.15
    for name, words in (
        ("both", "in any case"),
        ("unpadded", "unpadded: loss_only=True, or unpad_inputs=True"),
        ("padded", "padded: logits, a cache"),
    ):
        line = "--" if name == "padded" else "-"
        sample = Rectangle((x, 0.70), 0.26, 0.16, facecolor=COLOURS[name], edgecolor=EDGES[name], linestyle=line)
        axes.add_patch(sample)
        axes.text(x + 0.34, 0.785, words, size=8, **text)
        x += 0.7 + 0.065 * len(words)
    axes.text(x, 0.785, "Of two shapes, the first is of unpadded tokens.", size=8, **text)
    for lane, centre in centres.items():
        axes.text(centre, 1.22, LANES[lane], size=9, weight="bold", ha="center", **text)


def draw_owners(axes: Any, steps: Sequence[Step], tops: Sequence[float], lanes: Sequence[str], width: float) -> None:
    """On the left, whose boxes these are; a frame around those of a block."""
    files = {each.__qualname__: Path(code_of(each).co_filename).name for each in OPENED}
    files |= {FORWARD: "modeling_scratch_*.py", INPUTS: ""}
    names = {FORWARD: "forward of the family", INPUTS: "given"}
    owner = ""
    for index, step in enumerate(steps):
        if step.owner == owner:
            continue
        owner, top = step.owner, tops[index]
        name = names.get(owner, owner.replace(".", ".\n"))
        axes.text(0.15, top + 0.1, name, size=8, weight="bold", color=INK, va="center")
        below = 0.1 + (0.3 if "." in owner else 0.2)
        axes.text(0.15, top + below, files[owner], size=7.5, family="monospace", color=QUIET, va="center")
        axes.plot((0.15, width - 0.15), (top - 0.17, top - 0.17), color="#d0d7de", lw=0.8, zorder=0)
        if owner == BLOCK:
            end = max(i for i, each in enumerate(steps) if each.owner == BLOCK)
            bottom = tops[end] + height(steps[end], lanes)
            frame = Rectangle(
                (LEFT, top - 0.1),
                width - LEFT - RIGHT + 0.25,
                bottom - top + 0.35,
                facecolor="#f6f8fa",
                edgecolor=QUIET,
                lw=1,
            )
            axes.add_patch(frame)
            axes.text(0.15, top + 0.6, "once for each layer", size=7.5, color=QUIET, va="center")


def draw_crossing(
    axes: Any, steps: Sequence[Step], tops: Sequence[float], lanes: list[str], centres: dict[str, float], last: int
) -> None:
    """From the end of the source's lane to the target's cross-attention."""
    index = next(index for index, step in enumerate(steps) if step.name == "cross_attn")
    row = tops[index] + height(steps[index], lanes) / 2
    x, end = centres["source"] + LANE / 2 + 0.5, tops[last] + height(steps[last], lanes)
    start = centres["source"]
    line = {"color": "#a13d63", "lw": 1.4, "zorder": 5}
    target = centres["target"] + LANE / 2 - GAP
    axes.plot((start, start, x, x, target + 0.1), (end, end + 0.3, end + 0.3, row, row), **line)
    axes.annotate("", (target, row), (target + 0.2, row), arrowprops={"arrowstyle": "-|>", "color": line["color"]})
    style = {"size": 8, "family": "monospace", "rotation": 90, "va": "center", "color": line["color"]}
    axes.text(x + 0.12, (row + end) / 2, "encoder_hidden_states", **style)


def structure(steps: Sequence[Step]) -> str:
    return json.dumps([step._asdict() for step in steps], ensure_ascii=False)


def drawn(picture: Path) -> str:
    """The steps that a picture was drawn from."""
    description = ElementTree.parse(picture).find(".//{http://purl.org/dc/elements/1.1/}description")
    return "" if description is None else description.text or ""


def main(path: str = str(PICTURE)) -> None:
    torch.manual_seed(0)
    steps = dataflow()
    # The same steps give the same file.
    with rc_context({"svg.hashsalt": "dataflow", "font.family": "DejaVu Sans"}):
        draw(steps).savefig(path, metadata={"Date": None, "Description": structure(steps)}, facecolor="white")


if __name__ == "__main__":
    main(*sys.argv[1:])
