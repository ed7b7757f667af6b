"""The `scratch-transformer` command: one subcommand for each thing to be done with a finished model."""

import argparse
import importlib
import sys
from collections.abc import Sequence

# Each module has `add_commands(subparsers)`; a subcommand's function is its default `run`, given the parsed arguments.
MODULES = ("conversion.command", "insight.command")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0, or 2 after one line on what was wrong."""
    parser = argparse.ArgumentParser(prog="scratch-transformer", description=__doc__)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in MODULES:
        importlib.import_module(f".{module}", __package__).add_commands(subparsers)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"scratch-transformer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
