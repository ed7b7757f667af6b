"""Our models as files of other engines, each run by the engine itself, where it is there, before anything appears."""

import importlib
import importlib.util
import os
from dataclasses import dataclass
from importlib.metadata import version

import torch

from ..files import making, new_folder
from .comparison import Comparison
from .folders import open_ours

MODULES = {"llama-cpp-python": "llama_cpp"}  # of packages that are imported by another name


@dataclass(frozen=True)
class Engine:
    """How one is written for, and by which packages what was written is run: the first of them that is there.

    Its module here has `write(saved, model, new)`, and the functions that `runs` names, which compare."""

    needs: tuple[str, ...]
    runs: dict[str, str]
    suffix: str = ""  # of a file; else it is a folder
    dtype: torch.dtype | None = None  # of what is written; else that of the model


ENGINES = {
    "ctranslate2": Engine(("ctranslate2",), {"ctranslate2": "run"}),
    "executorch": Engine(("executorch",), {"executorch": "run"}, dtype=torch.float32),
    "gguf": Engine(("gguf",), {"llama-cpp-python": "run", "transformers": "read_back"}, suffix=".gguf"),
    "onnx": Engine(("onnx", "onnxscript"), {"onnxruntime": "run"}, dtype=torch.float32),
}


@dataclass(frozen=True)
class Exported:
    """What became of a model on its way to an engine."""

    engine: str
    compared: Comparison | None
    by: str | None  # the package that ran it

    def __str__(self) -> str:
        first = next(iter(ENGINES[self.engine].runs))
        hint = "" if is_there(first) else f"pip install {first}, which runs it"
        if self.by is None:
            return "not compared with the model" + (f": {hint}" if hint else "")
        return f"{self.by} {version(self.by)}: {self.compared}" + (f"\nfor the engine itself: {hint}" if hint else "")


def export(
    source: str | os.PathLike[str], engine: str, target: str | os.PathLike[str], verify: bool = True
) -> Exported:
    """Write a model of ours for an engine; it appears once all of it is there, and computes the same.

    Args:
        source: a folder, or an id on the Hub.
        engine: one of `ENGINES`.
        target: a folder, or a file with the engine's suffix, that does not exist yet.
        verify: run it with the engine, if that is installed, and compare it with the model.

    Raises:
        ValueError: if a package is missing, if `source` holds no model of ours or one without counterpart there, if
            `target` exists, and if it computes something else.
    """
    row, target = ENGINES[engine], new_folder(target)
    if missing := [name for name in row.needs if not is_there(name)]:
        install = dict.fromkeys([*missing, next(iter(row.runs))])
        raise ValueError(f"--to {engine} needs {' and '.join(missing)}: pip install {' '.join(install)}")
    if target.suffix != row.suffix and row.suffix:
        raise ValueError(f"{target} must end in {row.suffix}")
    saved = open_ours(source, engine)
    model = saved.whole(row.dtype).eval()
    module = importlib.import_module(f".{engine}", __package__)
    by = next(filter(is_there, row.runs), None) if verify else None
    with making(target) as new:
        module.write(saved, model, new)
        compared = getattr(module, row.runs[by])(saved, model.float(), new) if by else None
        if compared is not None and not compared.is_close:
            first = next(iter(row.runs))
            advice = "" if by == first else f"; install {first}, which runs it, or --no-verify"
            raise ValueError(f"{source}: {target.name} would compute something else by {by}; {compared}{advice}")
    return Exported(engine, compared, by)


def is_there(package: str) -> bool:
    return importlib.util.find_spec(MODULES.get(package, package)) is not None
