"""Time, memory and Python calls of our models beside those of others, at equal shapes and numerics, in one process.

    python -m benchmarks KIND... [--shape NAME...] [--peer NAME...] [--output_dir FOLDER] ...

KIND is train, generate, embed, calls, scaling, memory, end-to-end or roofline. The contenders of a comparison take
turns, A B A B, on the same batches; what is reported is the median of the ratios of the rounds, with its quartiles. The
folder receives `benchmark.json`, with every round, and `benchmark.png`. Exit codes: 0 done, 2 it cannot be done.

    python -m benchmarks report [--check]             # what README.md says, from the records
    python -m benchmarks prepare                      # a corpus to tokens on disk, and training on them
    python -m benchmarks scale                        # what two processes take beside the formulas of docs/SCALE.md
    python -m benchmarks engines MODEL --texts FILE   # where to run a model: beside CTranslate2 and others
    python -m benchmarks text OBJECTIVE --data FOLDER # from a text to a score by three commands, beside baselines
    python -m benchmarks ablations FILE               # ideas about a recipe, each alone, over seeds
    python -m benchmarks variation NAME RECIPE        # training with an idea that no option of a recipe says
    python -m benchmarks calls                                                            # however busy the machine is
    python -m benchmarks generate --shape decoder --peer llama --batch 1                  # a single comparison
    python -m benchmarks generate --shape decoder --peer llama --batch 1 --compile        # static cache, torch.compile
"""

import argparse
import dataclasses
import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from rich.console import Console

from training.folder import environment
from training.roofline import roofline, uses_onednn

from .comparisons import KINDS, LIMITS, compare_end_to_end
from .contenders import Options
from .measures import measure, measure_memory
from .peers import NATIVES, PEERS, find_peer
from .report import print_result, write
from .shapes import SHAPES, Shape, find_shapes, unknown

OTHER_KINDS = ("memory", "end-to-end", "roofline")
PROGRAMS = {
    "prepare": "preparation",
    "scale": "scale",
    "engines": "deployment",
    "text": "texts",
    "ablations": "ablations",
    "variation": "variations",
}  # with words of their own
SWITCHES = {
    "compile": "torch.compile for all contenders; of generate and calls, with static caches",
    "padded": "rows as long as sentences, padded to the length, or all full; by default a decoder's are full",
}


class Parser(argparse.ArgumentParser):
    """Raises its errors."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Raises ValueError for what it cannot say."""
    parser = Parser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("kinds", nargs="+", metavar="KIND", help=f"any of {', '.join((*KINDS, *OTHER_KINDS))}")
    add("--shape", nargs="+", help=f"any of tiny, narrow, {', '.join(SHAPES)}; by default what suits the kind")
    known = f"{', '.join(PEERS)}, nanogpt=PATH of a checkout, module:function that is given a Shape"
    add("--peer", nargs="*", help=f"any of {known}; all that fit a shape by default")
    add("--like", choices=NATIVES, help="the peer whose architecture and size ours takes: llama, distilbert or marian")
    for spec in dataclasses.fields(Shape):
        if spec.type is bool:
            add(f"--{spec.name}", action=argparse.BooleanOptionalAction, help=SWITCHES[spec.name])
        elif spec.name != "family":
            kind = int if spec.type is int else str
            add(f"--{spec.name.replace('_', '-')}", type=kind, help=f"in place of the shape's {spec.name}")
    add("--rounds", type=int, default=10, help="turns of each contender (%(default)s)")
    add("--steps", type=int, help="steps of a turn (1; 5 of training on a GPU; 50 of end-to-end)")
    add("--warmup", type=int, help="steps that are not timed (3; one turn of end-to-end, one step of calls)")
    add("--num-beams", type=int, help="1 is greedy (1, and 4 for translators)")
    add("--new-tokens", type=int, help="tokens to generate (half the length)")
    add("--texts", type=int, default=256, help="texts to embed (%(default)s)")
    add("--axis", nargs="+", default=list(LIMITS), choices=LIMITS, help="what to scale (all)")
    add("--values", nargs="+", type=int, default=[], help="sizes along that one axis")
    add("--peer-optimizer", choices=("fused", "foreach"), default="fused", help="of AdamW (%(default)s)")
    add("--compiler", default="inductor", help="of torch.compile: `eager` only follows the graph (%(default)s)")
    add("--no-onednn", action="store_true", help="products by MKL alone, as on processors where that is quick")
    add("--recipe", help="what end-to-end trains; entries are overridden by --data.path FOLDER and the like")
    add("--output_dir", "--output-dir", type=Path, default=Path("runs/benchmark"), help="(%(default)s)")
    arguments, overrides = parser.parse_known_args(argv)
    arguments.overrides = overrides
    if overrides and "end-to-end" not in arguments.kinds:
        raise ValueError(f"unrecognized arguments: {' '.join(overrides)}")
    for kind in arguments.kinds:
        if kind not in KINDS and kind not in OTHER_KINDS:
            raise ValueError(unknown("kind", kind, (*KINDS, *OTHER_KINDS)))
    if arguments.values and len(arguments.axis) > 1:
        raise ValueError("--values are sizes along one --axis")
    for name in ("rounds", "steps", "num_beams", "new_tokens", "texts"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    return arguments


def plan(arguments: argparse.Namespace) -> list[tuple[str, str, Shape | None]]:
    """Kind, name and shape of everything that was asked for.

    Raises ValueError for what is not known or does not fit together.
    """
    overrides = {
        spec.name: value
        for spec in dataclasses.fields(Shape)
        if (value := getattr(arguments, spec.name, None)) is not None
    }
    planned: list[tuple[str, str, Shape | None]] = []
    for kind in arguments.kinds:
        if kind == "end-to-end":
            planned.append((kind, "", None))
        elif kind in KINDS or kind == "memory":
            _, families, usual = KINDS["train" if kind == "memory" else kind]
            shapes = find_shapes(arguments.shape or usual, **overrides)
            fitting = [(kind, name, shape) for name, shape in shapes.items() if shape.family in families]
            if not fitting:
                raise ValueError(f"{kind} is for {' and '.join(families)} shapes, not for {', '.join(shapes)}")
            planned += fitting
    compared = {shape.family for _, _, shape in planned if shape is not None}
    for name in arguments.peer or ():
        families = find_peer(name).families
        if compared and compared.isdisjoint(families):
            raise ValueError(f"peer {name!r} is for {' and '.join(families)} shapes, and none of those is compared")
    return planned


def benchmark(arguments: argparse.Namespace, console: Console) -> None:
    """Run everything that was asked for; after each comparison the folder holds all results so far."""
    planned = plan(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    fields = {spec.name for spec in dataclasses.fields(Options)} - {"device"}
    options = Options(device, **{name: value for name, value in vars(arguments).items() if name in fields})
    record: dict[str, Any] = {"environment": environment(device, 1, "benchmarks"), "onednn": uses_onednn()}
    if set(arguments.kinds) != {"calls"}:  # which have nothing to do with it
        record["roofline"] = best = roofline(device)
        rates = ", ".join(f"{precision} {rate / 1e9:,.1f} GFLOP/s" for precision, rate in best["matmul"].items())
        console.print(f"roofline: matrices {rates}; memory {best['bandwidth'] / 1e9:,.1f} GB/s", highlight=False)
    record["results"] = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind, name, shape in planned:
            for result in measured(kind, name, shape, arguments.peer, options, Path(scratch)):
                record["results"].append(result)
                print_result(result, console)
                write(record, arguments.output_dir)
    if not planned:
        write(record, arguments.output_dir)


def measured(
    kind: str, name: str, shape: Shape | None, peers: Sequence[str] | None, options: Options, scratch: Path
) -> Iterator[dict[str, Any]]:
    """The results of a kind at a shape, beside these peers, or those that are usual."""
    if kind == "memory":
        assert shape is not None
        yield measure_memory(name, shape, options.device)
        return
    if shape is None:
        comparisons = iter([compare_end_to_end(scratch, peers or (), options)])
    else:
        comparisons = KINDS[kind].compare(shape, list(PEERS) if peers is None else peers, options)
    for comparison in comparisons:
        print(f"{kind} {name}: {comparison.title} ...", file=sys.stderr)
        result = measure(comparison, options) | {"name": name}
        del comparison
        gc.collect()
        yield result


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file has no width to fit into
    try:
        if argv[:1] == ["report"]:
            from . import readme  # which needs all of this here

            return readme.main(argv[1:])
        if argv[:1] and argv[0] in PROGRAMS:
            importlib.import_module(f".{PROGRAMS[argv[0]]}", __package__).main(argv[1:])
            return 0
        arguments = parse(argv)
        with torch.backends.mkldnn.flags(enabled=False) if arguments.no_onednn else nullcontext():
            benchmark(arguments, console)
    except (ValueError, OSError) as error:
        print(f"benchmarks: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main(sys.argv[1:]))
