"""`scratch-transformer convert`."""

import argparse
import importlib.util
from typing import Any

from .families import FAMILIES
from .folders import convert_folder

ENGINE = "ctranslate2"  # which is installed by those who want it


def add_commands(subparsers: Any) -> None:
    parser = subparsers.add_parser("convert", help="a model of another architecture as ours, or ours as theirs")
    parser.add_argument("source", metavar="SRC", help="folder, id on the Hub, or .gguf file")
    parser.add_argument("target", metavar="DST", help="new folder")
    targets = (*FAMILIES, ENGINE)
    parser.add_argument("--to", metavar="FAMILY", choices=targets, help=f"if SRC is ours: {', '.join(targets)}")
    words = "do not compare what both compute, which needs both in memory"
    parser.add_argument("--no-verify", dest="verify", action="store_false", help=words)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.to == ENGINE:
        if importlib.util.find_spec(ENGINE) is None:
            raise ValueError(f"--to {ENGINE} needs that engine: pip install {ENGINE}")
        from .ctranslate2 import to_ctranslate2

        to_ctranslate2(arguments.source, arguments.target)
    else:
        print(convert_folder(arguments.source, arguments.target, arguments.to, arguments.verify))
    print(f"wrote {arguments.target}")
