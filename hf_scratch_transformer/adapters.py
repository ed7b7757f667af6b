"""What PEFT knows of native architectures by heart, told to it of ours: which layers each of its methods adapts when
nobody names them."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# PEFT's tables, one a method: {model type: [end of a layer's name, ...]}.
TABLES = "peft.utils.constants"
# Our layers are called as Llama's are, but for these.
RENAMED = {"input_layernorm": "self_attn_norm", "post_attention_layernorm": "mlp_norm"}


def register(*model_types: str) -> None:
    """Give these model types Llama's row of every table: now if PEFT has been imported, or else when it is, since
    importing it takes seconds that most programs need not spend. Rows that are there already are left as they are."""
    if TABLES in sys.modules:
        _add_rows(sys.modules[TABLES], model_types)
    else:
        sys.meta_path.insert(0, _AfterImport(model_types))


def _add_rows(tables: ModuleType, model_types: tuple[str, ...]) -> None:
    for name, table in vars(tables).items():
        if name.endswith("_MODULES_MAPPING") and "llama" in table:
            for model_type in model_types:
                table.setdefault(model_type, [RENAMED.get(layer, layer) for layer in table["llama"]])


class _AfterImport(MetaPathFinder):
    def __init__(self, model_types: tuple[str, ...]):
        self.model_types = model_types

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != TABLES:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                _add_rows(module, self.model_types)

            spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec
