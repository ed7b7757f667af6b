"""The `scratch-transformer` command: one subcommand for each thing to be done with a model."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence

# Each module has `add_commands(subparsers)`; a subcommand's function is its default `run`, given the parsed arguments.
MODULES = ("conversion.command", "surgery", "hub", "insight.command")
# Those of `training`, which reads its own words.
TRAINING = {
    "new": "a recipe for a text of your own and this machine",
    "train": "a model from a recipe",
    "prepare": "tokenise the corpus of a recipe ahead of a run",
    "plan": "what a run of a recipe will take on this machine",
    "evaluate": "a finished model on text or pairs, senses or a task",
    "verify": "the recipe of a model card, from another seed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0, or 2 after one line on what was wrong."""
    parser = argparse.ArgumentParser(prog="scratch-transformer", description=__doc__)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in TRAINING.items():
        # Its words are for the recipe to read, --help and other keys among them.
        words = subparsers.add_parser(name, help=text, prefix_chars="\0", add_help=False)
        words.add_argument("words", nargs="*")
        words.set_defaults(run=_training, name=name)
    for module in MODULES:
        importlib.import_module(f".{module}", __package__).add_commands(subparsers)
    arguments, rest = parser.parse_known_args(argv)
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(arguments, "target", "") is None:
        arguments.target = rest.pop()  # argparse looks for it before the options only
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"scratch-transformer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _training(arguments: argparse.Namespace) -> None:
    name = f"{__package__}.training"  # in a checkout it lies beside this package
    try:
        program = importlib.import_module(f"{name if importlib.util.find_spec(name) else 'training'}.__main__")
    except ModuleNotFoundError as error:
        hint = "pip install 'hf-scratch-transformer[training]'"
        raise ValueError(f"{arguments.name} needs {error.name}: {hint}") from error
    program.command([arguments.name] * (arguments.name != "train") + arguments.words)


if __name__ == "__main__":
    sys.exit(main())
