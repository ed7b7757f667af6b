"""A model in pictures: positions, attention, words moved by their context, curves of training, where parameters are.

For each picture one function gets the numbers from a model or a file, and one draws them on a matplotlib `Figure` that
belongs to nobody else: no display, no global state. A notebook shows the figure, `save` writes it.

| numbers             | picture           |                                                                        |
| ------------------- | ----------------- | ---------------------------------------------------------------------- |
| `position_code`     | `positions`       | the code of each position, and the dot product of any two              |
| `attention_weights` | `attention`       | who attends to whom: one head, the heads of a layer, or all            |
| `word_vectors`      | `embedding_shift` | a word's learned vector, and where each sentence moves it              |
| `read_metrics`      | `curves`          | loss and score over the steps of one run or several                    |
| `parameter_counts`  | `parameters`      | how many parameters each part has                                      |

Shapes: L layers, H heads, T length of the queries, S length of the keys, D width, N sentences.
"""

import itertools
import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from matplotlib.transforms import Bbox
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..embedding import check_ids, longest_output, most_positions
from ..files import reading, replacing
from ..layers_scratch import RotaryPositions, SinusoidalPositions
from ..tokenization import sides
from .records import RISING
from .records import read_metrics as read_metrics
from .sizes import parts

SUFFIXES = (".png", ".svg")
COLOURS = "viridis"  # even steps of lightness, also to the colour-blind
# Okabe and Ito's colours, which the colour-blind can tell apart; without the yellow, too pale for a line.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Names that tables of positions have in transformers' models.
_TABLES = re.compile(r"(position_embeddings?|embed_positions|positions_embed|wpe)$")


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG or SVG, by the suffix; whole or not at all.

    Raises:
        ValueError: another suffix, or no folder to write into.
    """
    path = check_path(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix[1:].lower())
    return path


def check_path(path: str | os.PathLike[str]) -> Path:
    """The path of a picture to come. Raises a `ValueError` if `save` could not write it."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a picture's name must end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    return path


def sinusoidal_code(dim: int = 400, length: int = 100) -> Tensor:
    """The matrix (T, D) of "Attention Is All You Need", section 3.5.

    Raises:
        ValueError: a size below 1.
    """
    for name, value in {"dim": dim, "length": length}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    return SinusoidalPositions(dim)(torch.arange(length))


@torch.no_grad()
def position_code(model: PreTrainedModel, length: int = 100) -> tuple[Tensor, str]:
    """A model's own code of positions (T, D), and of what kind it is.

    A learned table is given as it is. Of rotary positions, the sine and cosine of every angle stand side by side: the
    dot product of two rows is then what attention gives to two equal vectors at these positions.

    Raises:
        ValueError: no such code (none, or distances only, as in T5), or a table with fewer than `length` positions.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    steps = torch.arange(length, device=model.device)
    for name, module in model.named_modules():
        if isinstance(module, SinusoidalPositions):
            return module(steps).cpu(), "sinusoidal positions"
        if isinstance(module, nn.Embedding) and _TABLES.search(name):
            # Some tables start with rows that no position uses: BART's, and those that count from the padding on.
            unused = getattr(module, "offset", 0 if module.padding_idx is None else module.padding_idx + 1)
            table = module.weight.detach()[unused:].float().cpu()
            if length > len(table):
                raise ValueError(f"length={length}: {model_name(model)} has a table of {len(table)} positions")
            return table[:length], "learned positions" if module.weight.requires_grad else "fixed positions"
        if isinstance(module, RotaryPositions):
            # The second half: sines of the first one are negated.
            cos, sin = (x[0, 0, :, module.dim // 2 :] for x in module(steps[None], torch.float32))
        elif isinstance(turns := getattr(module, "inv_freq", None), Tensor):  # transformers' rotary modules
            angles = steps[:, None] * turns
            cos, sin = (x * getattr(module, "attention_scaling", 1.0) for x in (angles.cos(), angles.sin()))
        else:
            continue
        return torch.stack((sin, cos), dim=-1).flatten(-2).cpu(), "rotary positions"
    raise ValueError(f"{model_name(model)} ({model.config.model_type}) has no code of absolute positions to draw")


def positions(code: Tensor, title: str = "sinusoidal positions") -> Figure:
    """The code of positions (T, D) as a heat map, and beside it the dot product of any two positions (T, T)."""
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.8, 1))
    length, dim = code.shape
    image = left.imshow(code.numpy(), cmap=COLOURS, aspect="auto", interpolation="none")
    left.set(xlabel="dimension", ylabel="position", title=f"{length} positions × {dim} dimensions")
    figure.colorbar(image, ax=left, label="value", pad=0.01)
    image = right.imshow((code @ code.T).numpy(), cmap=COLOURS, interpolation="none")
    right.set(xlabel="position", ylabel="position", title="Dot product of two positions")
    figure.colorbar(image, ax=right, label="dot product", pad=0.02)
    for axis in (left.xaxis, left.yaxis, right.xaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, parse_math=False)
    return figure


@dataclass(frozen=True)
class Attention:
    """Weights (L, H, T, S) of every layer and head, of which each row sums to 1, and the tokens that they join."""

    weights: Tensor
    rows: list[str]  # T
    columns: list[str]  # S
    kind: str
    model: str


# kind -> what the rows and the columns are
_AXES = {
    "self-attention": ("token", "token attended to"),
    "encoder self-attention": ("source token", "source token attended to"),
    "decoder self-attention": ("target token read", "target token attended to"),
    "cross-attention": ("target token written", "source token attended to"),
}


@torch.no_grad()
def attention_weights(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    target: str | None = None,
    of: str | None = None,
) -> Attention:
    """The attention of a model, ours or native, on one text.

    Args:
        model: a native one must be loaded with `attn_implementation="eager"`, as transformers' faster ones never form
            the weights.
        target: for an encoder-decoder, the translation that it is made to write. If not given, its own greedy one, cut
            at 10 tokens more than twice those of the text.
        of: for an encoder-decoder "cross" (if not given), "encoder" or "decoder"; "self" for every other model.

    In cross-attention each row is named after the token that was written there, not after the one before it, which
    the decoder reads at that step: so a row shows where a word comes from.

    Raises:
        ValueError: an attention that the model does not have, a target for a model without a decoder of its own, a text
            without tokens or with too many, weights that the model does not give.
    """
    name, two_stacks = model_name(model), bool(model.config.is_encoder_decoder)
    choices = ("cross", "encoder", "decoder") if two_stacks else ("self",)
    of = of or choices[0]
    if of not in choices:
        kind = "an encoder-decoder" if two_stacks else "one stack"
        raise ValueError(f"of={of!r}: {name} is {kind}; it has attention of {', '.join(choices)}")
    if target is not None and not two_stacks:
        raise ValueError(f"target={target!r}: {name} is no encoder-decoder, it reads one text")
    model.eval()
    inputs = encode(model, tokenizer, text)
    source = readable(tokenizer, inputs["input_ids"][0])
    if not two_stacks:
        weights = model(**inputs, output_attentions=True).attentions
        return Attention(_stacked(weights, name), source, source, "self-attention", name)
    if of == "encoder":
        weights = model.get_encoder()(**inputs, output_attentions=True).attentions
        return Attention(_stacked(weights, name), source, source, "encoder self-attention", name)

    if target is not None:
        written = encode(model, tokenizer, target, "text_target")["input_ids"]
        read = torch.cat((written.new_tensor([[_start(model)]]), written[:, :-1]), dim=1)
    elif model.can_generate():
        longest = longest_output(len(source), most_positions(model) - 1)
        generated = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=longest)
        read, written = generated[:, :-1], generated[:, 1:]
    else:
        raise ValueError(f"target: {name} was loaded without the head that writes one; give it, or load the head")
    outputs = model(**inputs, decoder_input_ids=read, output_attentions=True)
    if of == "decoder":
        target_tokens = readable(sides(tokenizer)[1], read[0])
        weights = _stacked(outputs.decoder_attentions, name)
        return Attention(weights, target_tokens, target_tokens, "decoder self-attention", name)
    target_tokens = readable(sides(tokenizer)[1], written[0])
    return Attention(_stacked(outputs.cross_attentions, name), target_tokens, source, "cross-attention", name)


def attention(shown: Attention, layer: int | None = None, head: int | None = None) -> Figure:
    """Heat maps with tokens on the axes, a row of pictures for each layer: all, or one layer's, one head's. Layers and
    heads count from 0; all maps of a figure have one scale.

    Raises:
        ValueError: no such layer or head.
    """
    chosen = {"layer": (layer, shown.weights.shape[0]), "head": (head, shown.weights.shape[1])}
    for name, (index, count) in chosen.items():
        if index is not None and not 0 <= index < count:
            raise ValueError(f"{name}={index}: {shown.model} has {name}s 0 to {count - 1}")
    layers, heads = ([index] if index is not None else range(count) for index, count in chosen.values())
    places = list(itertools.product(layers, heads))
    columns = len(heads) if len(layers) > 1 < len(heads) else _columns(len(places))
    rows = len(places) // columns
    height, width = len(shown.rows), len(shown.columns)
    # Inches a token has. Where there is less than its letters need, tokens are left out rather than printed on others.
    cell = min(0.24 if len(places) == 1 else 0.14, 30 / max(rows * height, columns * width))
    cell = max(cell, 2.2 / max(height, width))
    every = math.ceil(0.12 / cell)
    margin = 0.08 * max(len(token) for token in shown.rows + shown.columns) + 0.8
    size = (max(columns * (cell * width + 0.2) + margin + 0.8, 5), rows * (cell * height + 0.4) + margin)
    figure = Figure(figsize=size, layout="compressed")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    # By the square root, since weights that are spread over many tokens are small: on an even scale they would all
    # be black beside a single one near 1.
    weights = shown.weights[list(layers)][:, list(heads)]
    scale = PowerNorm(0.5, vmin=0, vmax=float(weights.max()))
    style: Any = {"fontsize": 8, "parse_math": False, "fontfamily": _families(shown.rows + shown.columns)}
    image: AxesImage
    for panel, (layer_index, head_index), matrix in zip(panels.flat, places, weights.flatten(0, 1), strict=True):
        image = panel.imshow(matrix.numpy(), cmap=COLOURS, norm=scale, interpolation="none")
        panel.set_xticks(range(0, width, every), shown.columns[::every], rotation=90, **style)
        panel.set_yticks(range(0, height, every), shown.rows[::every], **style)
        if len(places) > 1:
            panel.set_title(f"layer {layer_index}, head {head_index}", fontsize=9)
    figure.colorbar(image, ax=panels, label="weight", pad=0.02, aspect=size[1] / 0.25)
    row, column = _AXES[shown.kind]
    figure.supylabel(row, fontsize=10)
    figure.supxlabel(column, fontsize=10)
    named = "".join(f", {name} {index}" for name, (index, _) in chosen.items() if index is not None)
    title = f"{shown.model}: {shown.kind}{named}"
    figure.suptitle(title, fontsize=min(max(11, size[0]), 24), parse_math=False)
    return figure


def _columns(count: int) -> int:
    """Of a grid as square as it can be without a hole."""
    return next(columns for columns in range(math.ceil(count**0.5), count + 1) if count % columns == 0)


@dataclass(frozen=True)
class WordVectors:
    """A word in N sentences: its learned and its contextual vectors (N, D), and for each of these 2N vectors the
    entries of the embedding table that point most nearly in its direction."""

    word: str
    sentences: list[str]
    learned: Tensor
    contextual: Tensor
    near_learned: list[dict[str, Tensor]]  # token -> its row of the table (D,)
    near_contextual: list[dict[str, Tensor]]
    model: str
    written: list[str]  # the word's tokens in each sentence, as the tokenizer writes them where that can be read


@torch.no_grad()
def word_vectors(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    word: str,
    sentences: Sequence[str],
    neighbours: int = 5,
) -> WordVectors:
    """The vectors of a word before and after a model has read each sentence; of an encoder-decoder, its encoder.

    The first occurrence counts, whatever its case; of a word in several pieces, the mean over them. Neighbours are
    nearest by cosine, special tokens and the word's own pieces left out.

    Raises:
        ValueError: no sentence, or one without the word; a tokenizer that cannot tell where tokens stand.
    """
    if not sentences:
        raise ValueError("sentences: give one at least")
    if neighbours < 0:
        raise ValueError(f"neighbours={neighbours} must be at least 0")
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} cannot tell where tokens stand: a fast tokenizer is needed")
    model.eval()
    table = model.get_input_embeddings().weight.detach().float().cpu()
    stack = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    learned, contextual, pieces = [], [], []
    for sentence in sentences:
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", sentence, re.IGNORECASE)
        if not word or found is None:
            raise ValueError(f"word={word!r} is not in the sentence {sentence!r}")
        inputs = encode(model, tokenizer, sentence)
        spans = tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"]
        at = [i for i, (start, end) in enumerate(spans) if start < found.end() and end > found.start()]
        if not at:
            raise ValueError(f"word={word!r}: the tokenizer leaves nothing of it in {sentence!r}")
        states = stack(**inputs).last_hidden_state[0].float().cpu()
        pieces.append(inputs["input_ids"][0, at].cpu())
        learned.append(table[pieces[-1]].mean(0))
        contextual.append(states[at].mean(0))
    directions = F.normalize(table[: len(tokenizer)], dim=-1)
    special = [id_ for id_ in tokenizer.all_special_ids if id_ is not None]  # one that its vocabulary lacks has none
    left_out = torch.cat([*pieces, torch.tensor(special, dtype=torch.long)]).unique()
    left_out = left_out[left_out < len(directions)]

    def nearest(vector: Tensor) -> dict[str, Tensor]:
        scores = (directions @ F.normalize(vector, dim=0)).index_fill(0, left_out, -torch.inf)
        # Some pieces look the same on paper, with and without the space before a word: more are asked for than shown.
        best = scores.topk(min(3 * neighbours, len(scores) - len(left_out))).indices
        distinct: dict[str, Tensor] = {}
        for token, row in zip(readable(tokenizer, best), table[best], strict=True):
            distinct.setdefault(token, row)
        return dict(list(distinct.items())[:neighbours])

    return WordVectors(
        word=word,
        sentences=list(sentences),
        learned=torch.stack(learned),
        contextual=torch.stack(contextual),
        near_learned=[nearest(vector) for vector in learned],
        near_contextual=[nearest(vector) for vector in contextual],
        model=model_name(model),
        written=[_written(tokenizer, ids) for ids in pieces],
    )


def principal_plane(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Principal component analysis: the mean (D,) of vectors (P, D), the two directions (2, D) in which they vary most,
    and the share of their variance along each (2,)."""
    mean = vectors.mean(0)
    _, strengths, directions = torch.linalg.svd(vectors - mean, full_matrices=False)
    directions = F.pad(directions, (0, 0, 0, 2))[:2]  # zeros where there are fewer than two
    # A direction is as good as its opposite: the one whose largest entry is positive, so that pictures repeat.
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    shares = F.pad(strengths**2, (0, 2))[:2] / (strengths**2).sum().clamp(min=1e-12)
    return mean, directions * torch.where(largest < 0, -1.0, 1.0), shares


def embedding_shift(shown: WordVectors) -> Figure:
    """A picture for each sentence, side by side and in the same plane: an arrow from the word's learned vector to its
    contextual one (those of the other sentences pale), and the neighbours of both ends in the embedding table.

    Vectors are drawn by direction (length 1), since a norm layer decides on the length of the contextual ones. The
    plane is the one in which the word's own vectors vary most: of a word with one learned and two contextual vectors it
    shows every distance as it is.
    """
    count, near = len(shown.sentences), [*shown.near_learned, *shown.near_contextual]
    own = torch.cat([shown.learned, shown.contextual])
    vectors = F.normalize(torch.cat([own, *(torch.stack([*tokens.values()]) for tokens in near if tokens)]), dim=-1)
    # One sentence gives one line: its neighbours make it a plane.
    mean, directions, shares = principal_plane(vectors[: 2 * count] if count > 1 else vectors)
    plane = (vectors - mean) @ directions.T
    points = [(x, y) for x, y in plane.tolist()]
    starts, ends, rest = points[:count], points[count : 2 * count], points[2 * count :]
    places = [{token: rest.pop(0) for token in tokens} for tokens in near]

    middle = ((plane.amax(0) + plane.amin(0)) / 2).tolist()
    half = float((plane.amax(0) - plane.amin(0)).max()) * 0.6 or 1.0  # one scale for both directions
    columns = _columns(count)
    rows = count // columns
    figure = Figure(figsize=(max(5.2 * columns + 0.6, 6.5), 5.2 * rows + 1))
    figure.set_layout_engine("compressed", h_pad=0.1)
    canvas = FigureCanvasAgg(figure)  # measures how large labels are
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for panel in panels[-1]:
        panel.set_xlabel(f"first principal direction ({shares[0]:.0%} of the variance)")
    for panel in panels[:, 0]:
        panel.set_ylabel(f"second ({shares[1]:.0%})")
    families = _families([*shown.sentences, *(token for tokens in near for token in tokens)])
    for index, panel in enumerate(panels.flat):
        panel.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), box_aspect=1)
        for other in range(count):
            style = {"color": LINES[0], "lw": 2} if other == index else {"color": "#C8C8C8", "lw": 1.2}
            panel.annotate("", ends[other], starts[other], arrowprops={"arrowstyle": "-|>", **style})
        for name, marker, colour, place, tokens in (
            ("learned", "s", LINES[1], starts[index], places[index]),
            ("contextual", "^", LINES[2], ends[index], places[count + index]),
        ):
            panel.plot(*place, marker, color=colour, ms=9, label=f"{name} vector; small: its nearest tokens")
            for near_place in tokens.values():
                panel.plot(*near_place, marker, color=colour, ms=4)
        panel.set_title(textwrap.fill(shown.sentences[index], 64), fontsize=9, parse_math=False, fontfamily=families)
        panel.grid(alpha=0.25)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=min(columns, 2), frameon=False
    )
    title = f"{shown.model}: “{shown.word}” in the table of tokens, and in its sentence"
    figure.suptitle(title, parse_math=False, fontfamily=families)
    # Everything is at its place before labels look for free room, and stays there.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for index, panel in enumerate(panels.flat):
        tokens = {**places[index], **places[count + index]}
        # Other tokens have another learned vector: at the start of a text, or with a capital.
        learned = shown.word if len({*shown.written}) == 1 else shown.written[index]
        labels = [(learned, starts[index], LINES[1]), (shown.word, ends[index], LINES[2])]
        labels += [(token, place, "black") for token, place in tokens.items()]
        _label(panel, canvas.get_renderer(), labels, families)
    return figure


def _label(
    panel: Axes, renderer: RendererAgg, labels: Sequence[tuple[str, tuple[float, float], str]], families: list[str]
) -> None:
    """Write texts, (text, place, colour), each beside its point, where it hides no point, no other text, and not the
    line between the first two points."""
    points = panel.transData.transform([place for _, place, _ in labels])
    line = [points[0] + (points[1] - points[0]) * step / 20 for step in range(21)]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in [*points, *line]]
    taken += [Bbox.from_bounds(x - 8, y - 8, 16, 16) for x, y in points[:2]]
    frame = panel.get_window_extent(renderer)
    angles = [math.radians(degrees) for degrees in range(0, 360, 15)]
    for index, ((text, place, colour), point) in enumerate(zip(labels, points, strict=True)):
        label = panel.annotate(text, place, (0, 0), textcoords="offset points", color=colour, fontsize=9)
        label.set(parse_math=False, fontfamily=families)
        box = label.get_window_extent(renderer)
        tries = []
        for distance, angle in itertools.product((10, 16, 26, 40), angles):
            # The edge of the text that looks at the point, not its middle, keeps the distance.
            x = point[0] + distance * math.cos(angle) - box.width * (1 - math.cos(angle)) / 2
            y = point[1] + distance * math.sin(angle) - box.height / 2
            moved = Bbox.from_bounds(x, y, box.width, box.height)
            cut = not (frame.contains(*moved.min) and frame.contains(*moved.max))
            gaps = np.hypot(*np.maximum(0, np.maximum(moved.min - points, points - moved.max)).T)
            claimed = int((gaps < gaps[index] + 2).sum()) - 1  # points that one could take it to belong to
            tries.append((4 * moved.count_overlaps(taken) + 8 * cut + claimed, moved))
        _, moved = min(tries, key=lambda cost_and_box: cost_and_box[0])
        pixel = 72 / panel.figure.dpi  # in points, which hold at whatever resolution the figure is saved
        label.set_position(((moved.x0 - box.x0) * pixel, (moved.y0 - box.y0) * pixel))
        taken.append(moved)


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """The loss of runs over their steps, and beside it the score that rises, if one was measured.

    One run: training red, evaluation blue. Several: a colour for each run, training thin and pale. `runs` maps a name
    to the records of `read_metrics`.

    Raises:
        ValueError: no run, or one without any loss.
    """
    if not runs:
        raise ValueError("runs: give one at least")
    events = {
        name: {
            event: [line for line in lines if line["event"] == event and "loss" in line]
            for event in ("train", "evaluation")
        }
        for name, lines in runs.items()
    }
    for name, lines in events.items():
        if not any(lines.values()):
            raise ValueError(f"{name}: its metrics have no loss, neither of training nor of an evaluation")
    measured = {key for lines in events.values() for line in lines["evaluation"] for key in line}
    rising = next((name for name in RISING if name in measured), None)
    figure = Figure(figsize=(10 if rising else 5.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if rising else 1, squeeze=False)[0]
    for number, (name, lines) in enumerate(events.items()):
        alone = len(events) == 1
        colour = "blue" if alone else LINES[number % len(LINES)]
        style = "-" if number < len(LINES) else "--"
        train, evaluation = (([v["step"] for v in e], [v["loss"] for v in e]) for e in lines.values())
        smoothing = next((line["label_smoothing"] for line in lines["train"] if "label_smoothing" in line), 0)
        trained = "training" + f", label smoothing {smoothing:g}" * bool(smoothing)
        evaluated = name if not alone else "evaluation" if lines["evaluation"] else None
        panels[0].plot(
            *train,
            color="red" if alone else colour,
            alpha=1 if alone else 0.35,
            lw=1.5 if alone else 1,
            label=trained if alone and lines["train"] else None,
        )
        panels[0].plot(*evaluation, style, marker=".", color=colour, label=evaluated)
        if rising:
            scored = [v for v in lines["evaluation"] if rising in v]
            steps, scores = [v["step"] for v in scored], [v[rising] for v in scored]
            panels[1].plot(steps, scores, style, marker=".", color=colour)
    panels[0].set(xlabel="step", ylabel="loss, nats a token", title="Loss")
    panels[0].legend()
    if rising:
        score = {"bleu": "BLEU", "chrf": "chrF"}.get(rising, rising.replace("_", " "))
        panels[1].set(xlabel="step", ylabel=score, title=f"{score} on the evaluation rows")
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure


def parameter_counts(model: PreTrainedModel) -> dict[str, int]:
    """How many parameters each part has, all layers of a stack together; what is tied counts once, so that the sum is
    `model.num_parameters()`. Works on the meta device."""
    counts: Counter[str] = Counter()
    for part in parts(model, {}):
        counts[part.path] += part.total
    return {path: count for path, count in counts.items() if count}


def parameters(counts: Mapping[str, int], title: str) -> Figure:
    """A bar for each part of a model, {part: parameters}, with its number and its share.

    Raises:
        ValueError: nothing to draw.
    """
    total = sum(counts.values())
    if total <= 0:
        raise ValueError(f"{title}: no parameters to draw")
    figure = Figure(figsize=(9, 1.4 + 0.34 * len(counts)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(counts), list(counts.values()), color=LINES[0])
    axes.bar_label(bars, [f"{value:,} ({value / total:.1%})" for value in counts.values()], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.22, y=0.02)
    axes.set(xlabel="parameters")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}: {total:,} parameters", parse_math=False)
    return figure


def model_name(model: PreTrainedModel) -> str:
    """What titles call a model: the last two parts of where it was loaded from, or its class."""
    return "/".join(Path(model.name_or_path).parts[-2:]) or type(model).__name__


def encode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, role: str = "text") -> Any:
    """One text as a batch of one, on the model's device; refused where the model would fail inside a matrix product."""
    with reading(f"{role}={text!r}"):  # half a character is no text to it
        inputs = tokenizer(**{role: [text]}, return_tensors="pt")
    length, limit = inputs["input_ids"].shape[-1], most_positions(model)
    if length == 0:
        raise ValueError(f"{role}={text!r} has no tokens")
    if length > limit:
        raise ValueError(f"{role} has {length} tokens, more than max_position_embeddings={limit} of the model")
    check_ids(model, inputs["input_ids"].tolist(), target=role == "text_target")
    return inputs.to(model.device)


def _start(model: PreTrainedModel) -> int:
    """The token with which a decoder starts to write."""
    generation = getattr(model, "generation_config", None)
    start = getattr(generation, "decoder_start_token_id", None) or model.config.decoder_start_token_id
    if start is None:
        raise ValueError(f"{model_name(model)}: decoder_start_token_id is not set, so that no target can be read")
    return start


def readable(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> list[str]:
    """Tokens as people write them: umlauts rather than their bytes, white space visible only where it is all."""
    shown = []
    for token in tokenizer.convert_ids_to_tokens(ids.tolist()):
        text = tokenizer.convert_tokens_to_string([token])
        text = text.strip() or text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
        # A part of a letter, or a sign that has no shape, stays as the tokenizer writes it.
        shown.append(text if text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text else token)
    return shown


def _written(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    """The tokens of a word as the tokenizer writes them, or the word, where they are bytes of its letters."""
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(ids.tolist())]
    word = tokenizer.convert_tokens_to_string(tokens)
    return " ".join(tokens) if set(word.strip()) <= set("".join(tokens)) else word.replace(" ", "␣")


def _families(texts: Iterable[str]) -> list[str]:
    """The fonts to write texts with: the default one, and of those on this machine the ones that have what it lacks."""
    default = FontProperties().get_family()
    missing = {ord(sign) for text in texts for sign in text} - get_font(findfont(FontProperties())).get_charmap().keys()
    families = list(default)
    for font in fontManager.ttflist if missing else ():
        if font.style != "normal" or font.weight != 400 or font.name.startswith("Last Resort"):  # which has but boxes
            continue
        if found := missing & get_font(font.fname).get_charmap().keys():
            families.append(font.name)
            missing -= found
    return families


def _stacked(weights: Sequence[Tensor | None] | None, name: str) -> Tensor:
    """(L, H, T, S), of the first row of a batch."""
    if not weights or any(layer is None for layer in weights):
        raise ValueError(f'{name} gives no attention weights: load it with attn_implementation="eager"')
    return torch.stack([layer[0].float().cpu() for layer in weights if layer is not None])
