"""`scratch-transformer convert`."""

import argparse
import importlib.util
from typing import Any

from .families import FAMILIES
from .folders import convert_folder

ENGINES = ("ctranslate2", "gguf", "onnx")  # the packages of those that want them, and our files for them


def add_commands(subparsers: Any) -> None:
    parser = subparsers.add_parser("convert", help="a model of another architecture as ours, or ours as theirs")
    parser.add_argument("source", metavar="SRC", help="folder, id on the Hub, or .gguf file")
    parser.add_argument("target", metavar="DST", help="new folder, or file for gguf")
    targets = (*FAMILIES, *ENGINES)
    parser.add_argument("--to", metavar="FAMILY", choices=targets, help=f"if SRC is ours: {', '.join(targets)}")
    words = "do not compare what both compute, which needs both in memory"
    parser.add_argument("--no-verify", dest="verify", action="store_false", help=words)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    engine, source, target = arguments.to, arguments.source, arguments.target
    if engine not in ENGINES:
        print(convert_folder(source, target, engine, arguments.verify))
    elif engine == "onnx":
        from .onnx import write

        compared = write(source, target, arguments.verify)
        if arguments.verify:
            print(compared or "not compared with the model: pip install onnxruntime, which runs it")
    elif importlib.util.find_spec(engine) is None:
        raise ValueError(f"--to {engine} needs that package: pip install {engine}")
    elif engine == "gguf":
        from .gguf import to_gguf

        if (compared := to_gguf(source, target, arguments.verify)) is not None:
            print(compared)
    else:
        from .ctranslate2 import to_ctranslate2

        to_ctranslate2(source, target)
    print(f"wrote {target}")
