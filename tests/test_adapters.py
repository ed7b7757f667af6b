"""What PEFT is told of our models, with a stand-in for it: the tests of the tool itself are in tests/tools."""

import importlib
import sys
from pathlib import Path

import pytest

from hf_scratch_transformer import adapters  # which imports the whole package

TABLES = """
LORA_TARGET_MODULES_MAPPING = {"llama": ["q_proj", "v_proj"], "known": ["theirs"]}
IA3_FEEDFORWARD_MODULES_MAPPING = {"llama": ["down_proj"]}
LNTUNING_TARGET_MODULES_MAPPING = {"llama": ["input_layernorm", "post_attention_layernorm", "norm"]}
OTHER_MODULES_MAPPING = {"vit": ["query"]}
"""


@pytest.fixture
def peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package of that name, not imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "peft" / "utils"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text("from . import constants\n")
    (folder / "constants.py").write_text(TABLES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        sys, "meta_path", [each for each in sys.meta_path if type(each).__module__ != adapters.__name__]
    )
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        del sys.modules[name]


@pytest.mark.parametrize("is_imported_before", [True, False])
def test_model_types_get_rows_whichever_is_imported_first(is_imported_before, peft):
    if is_imported_before:
        importlib.import_module("peft")
    finders = len(sys.meta_path)
    adapters.register("ours", "known")
    assert ("peft" in sys.modules) == is_imported_before
    tables = importlib.import_module("peft.utils.constants")
    assert tables.LORA_TARGET_MODULES_MAPPING["ours"] == ["q_proj", "v_proj"]
    assert tables.LORA_TARGET_MODULES_MAPPING["known"] == ["theirs"]
    assert tables.IA3_FEEDFORWARD_MODULES_MAPPING["ours"] == ["down_proj"]
    assert tables.LNTUNING_TARGET_MODULES_MAPPING["ours"] == ["self_attn_norm", "mlp_norm", "norm"]
    assert "ours" not in tables.OTHER_MODULES_MAPPING
    assert len(sys.meta_path) == finders


def test_the_package_waits_for_peft_with_its_three_types():
    waiting = [each.model_types for each in sys.meta_path if isinstance(each, adapters._AfterImport)]
    assert waiting == [("scratch_encoder", "scratch_decoder", "scratch_seq2seq")] or "peft" in sys.modules
