"""`scratch-transformer convert` and `scratch-transformer export`."""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..hub import record_check
from .engines import ENGINES, Exported, export
from .families import FAMILIES
from .folders import Report, convert_folder


def add_commands(subparsers: Any) -> None:
    convert = subparsers.add_parser("convert", help="a model of another architecture as ours, or ours as theirs")
    convert.add_argument("source", metavar="SRC", help="folder, id on the Hub, or .gguf file")
    convert.add_argument("target", metavar="DST", help="new folder")
    convert.add_argument("--to", metavar="FAMILY", choices=FAMILIES, help=f"if SRC is ours: {', '.join(FAMILIES)}")
    convert.set_defaults(run=_convert)
    engines = subparsers.add_parser("export", help="a model of ours for an engine, or as a native one")
    engines.add_argument("source", metavar="MODEL", help="folder, or id on the Hub")
    words = "new folder, or file for gguf; default: beside MODEL, MODEL-WHAT or MODEL.gguf"
    engines.add_argument("target", metavar="DST", nargs="?", help=words)
    choices = (*ENGINES, *FAMILIES)
    engines.add_argument("--to", metavar="WHAT", choices=choices, required=True, help=", ".join(choices))
    engines.set_defaults(run=_export)
    for parser in (convert, engines):
        words = "do not run and compare both, which needs both in memory"
        parser.add_argument("--no-verify", dest="verify", action="store_false", help=words)


def _convert(arguments: argparse.Namespace) -> None:
    print(convert_folder(arguments.source, arguments.target, arguments.to, arguments.verify))
    print(f"wrote {arguments.target}")


def _export(arguments: argparse.Namespace) -> None:
    source, to, verify = Path(arguments.source), arguments.to, arguments.verify
    beside = source if source.exists() else Path(source.name)
    beside = beside if beside.name.strip(".") else beside.resolve()
    suffix = ENGINES[to].suffix if to in ENGINES else ""
    target = Path(arguments.target or beside.with_name(f"{beside.name}{suffix or f'-{to}'}"))
    exported: Exported | Report
    if to in ENGINES:
        exported = export(arguments.source, to, target, verify)
    else:
        exported = convert_folder(arguments.source, target, to, verify)
    print(exported)
    print(f"wrote {target}")
    if (compared := exported.compared) is not None and exported.by is not None and source.is_dir():
        apart = f"{compared.difference:.2g}", f"{compared.allowed:.2g}"
        record_check(source, (to, f"{exported.by} {version(exported.by)}", compared.subject, *apart))
