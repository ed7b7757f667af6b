"""`scratch-transformer convert`."""

import argparse
from typing import Any

from .families import FAMILIES
from .folders import convert_folder


def add_commands(subparsers: Any) -> None:
    parser = subparsers.add_parser("convert", help="a model of another architecture as ours, or ours as theirs")
    parser.add_argument("source", metavar="SRC", help="folder, id on the Hub, or .gguf file")
    parser.add_argument("target", metavar="DST", help="new folder")
    parser.add_argument("--to", metavar="FAMILY", choices=FAMILIES, help=f"if SRC is ours: {', '.join(FAMILIES)}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    convert_folder(arguments.source, arguments.target, arguments.to)
    print(f"wrote {arguments.target}")
