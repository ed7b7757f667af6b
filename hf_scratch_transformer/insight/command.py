"""`scratch-transformer inspect SRC`: the sizes of a model as tables, or as JSON.

What a command needs is imported once it is asked for, so that the list of commands and the other commands stay quick.
"""

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from . import plot, senses, serve

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from .sizes import Part, Report


def add_commands(subparsers: Any) -> None:
    """Add the commands that show what is inside a model."""
    _add_inspect(subparsers)
    plot.add_commands(subparsers)
    senses.add_commands(subparsers)
    serve.add_commands(subparsers)


def _add_inspect(subparsers: Any) -> None:
    text = "parameters, shapes, floating-point operations and memory of a model, from its configuration alone"
    parser = subparsers.add_parser("inspect", help=text, description=text)
    parser.add_argument("source", metavar="SRC", help="a preset, a config.json, a checkpoint's folder, or a Hub id")
    parser.add_argument("--batch", type=int, default=1, help="rows in a batch (%(default)s)")
    parser.add_argument(
        "--length",
        "--target-length",
        type=int,
        dest="length",
        help="tokens in a row; in one of the target, for an encoder-decoder (the model's longest, at most 1024)",
    )
    parser.add_argument(
        "--source-length", type=int, help="tokens of the source of an encoder-decoder (as the target's)"
    )
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (the configuration's)")
    parser.add_argument(
        "--attention", choices=("eager", "sdpa"), help="how attention is computed (as transformers would)"
    )
    parser.add_argument("--optimizer", default="adamw", help="adamw or muon (%(default)s)")
    parser.add_argument(
        "--checkpointing", action="store_true", help="also train keeping only what goes into each layer"
    )
    parser.add_argument("--loss-only", action="store_true", help="train with the head on the targets alone")
    parser.add_argument("--json", action="store_true", help="everything, for machines")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> None:
    from .sizes import inspect

    options = {name: value for name, value in vars(arguments).items() if name not in ("run", "json")}
    report = inspect(**options)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file has no width to fit into
    for renderable in tables(report):
        console.print(renderable)


def tables(report: "Report") -> "list[RenderableType]":
    """A report for people, of rich: print each."""
    lengths = f"length {report.length}"
    if report.source_length is not None:
        lengths = f"source length {report.source_length}, target length {report.length}"
    title = (
        f"[bold]{report.source}[/bold]: {report.model}, {report.parameters:,} parameters in {report.dtype}; "
        f"batch {report.batch}, {lengths}, {report.attention} attention"
    )
    symbols = ", ".join(f"{name} = {value:,}" for name, value in report.symbols.items())
    return [title, symbols, _parameters(report), _shapes(report), _work(report), _memory(report)]


def _table(title: str, *columns: str) -> "Table":
    """A table whose columns that start with > stand on the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        on_right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if on_right else "left", no_wrap=on_right)
    return table


def _parameters(report: "Report") -> "Table":
    columns = ["part", ">times", "formula", ">each", ">total", ">matrices, heads apart"]
    known = any(part.in_article for part in report.parts)
    table = _table("Parameters", *columns, *(["in the articles"] if known else []))
    paths = Counter(part.path for part in report.parts)
    beyond: Counter[str] = Counter()
    for part in report.parts:
        # Where the articles count one half of a part, each half says which it is.
        name = part.path if paths[part.path] == 1 or part.in_article else f"{part.path}: {_contents(part)}"
        formula = part.formula + (f"\nthe same as {part.tied_to}" if part.tied_to else "")
        cells = [name, str(part.times), formula, f"{part.parameters:,}", f"{part.total:,}"]
        counted = ["yes" if part.in_article else "no"] if known else []
        table.add_row(*cells, str(part.times * part.matrices), *counted)
        if not part.in_article:
            beyond[name.rpartition(".")[2]] += part.total
    table.add_section()
    if known:
        table.caption = (
            "The articles' formulas, after “Attention Is All You Need”, count no norms, no biases of attention, and "
            "nothing that later models added."
        )
        table.caption_justify = "left"
        in_layers, in_tables = report.article_parameters
        sums = {
            "the articles' formulas, in the layers": in_layers,
            "+ token tables and head, tied ones once": in_tables,
            **{f"+ {name}": count for name, count in beyond.items() if count},
        }
        for name, count in sums.items():
            table.add_row(name, "", "", "", f"{count:,}")
    matrices = f"{report.matrices:,} in the articles" if known else ""
    table.add_row("[bold]all[/bold]", "", "", "", f"[bold]{report.parameters:,}[/bold]", matrices)
    return table


def _contents(part: "Part") -> str:
    if all(name.endswith("bias") for name in part.shapes):
        return "biases"
    return ", ".join(name.removesuffix(".weight") for name in part.shapes)


def _shapes(report: "Report") -> "Table":
    columns = ("module", ">times", "inputs", "weights", "outputs", ">operations", "formula")
    table = _table("Shapes, and floating-point operations of the matrix products of one forward pass", *columns)
    for row in report.sublayers:
        outputs = [_shape(shape) for shape in row.outputs]
        if row.scores:
            outputs.append(f"weights {_shape(row.scores)}")
        table.add_row(
            row.path or row.kind,
            str(row.times),
            "\n".join(f"{name} {_shape(shape)}" for name, shape in row.inputs.items()),
            "\n".join(f"{name} {_shape(shape)}" for name, shape in row.weights.items()),
            "\n".join(outputs),
            f"{row.flops:,}" if row.flops else "",
            row.flops_formula,
        )
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _work(report: "Report") -> "Table":
    table = _table("Floating-point operations", "", ">a batch", ">a token")
    rows = {
        "forward pass": report.forward_flops,
        "training, forward and backward": report.training_flops,
        "training with checkpointing": report.checkpointed_flops,
    }
    for name, flops in rows.items():
        if flops is not None:
            table.add_row(name, f"{flops:,}", f"{flops / report.tokens:,.0f}")
    return table


def _memory(report: "Report") -> "Table":
    from rich.filesize import decimal

    memory = report.memory
    held = (memory.weights, memory.gradients, memory.optimizer)
    columns: dict[str, tuple[int | None, ...]] = {">training": (*held, memory.activations, None, memory.training_peak)}
    if memory.checkpointed_peak is not None:
        columns[">with checkpointing"] = (*held, memory.checkpointed_activations, None, memory.checkpointed_peak)
    columns[">inference"] = (memory.weights, None, None, None, memory.cache, memory.inference_peak)
    table = _table("Memory, as PyTorch takes it on a CPU", "", *columns)
    names = (
        "weights",
        "gradients",
        f"states of {report.optimizer}",
        "activations kept for the backward pass",
        "keys and values of all these tokens",
        "[bold]most at one time[/bold]",
    )
    for name, *row in zip(names, *columns.values(), strict=True):
        table.add_row(name, *("" if value is None else decimal(value) for value in row))
    table.caption = "The last line: weights, and whatever else is alive at the worst moment, temporary tensors too."
    table.caption_justify = "left"
    return table
