"""Published shapes have the published sizes, and what is no source is refused in a line that says what would be one."""

import json

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_scratch_transformer.insight.presets import PRESETS, read_config
from hf_scratch_transformer.insight.trace import build
from tests import tiny


def native(preset: str) -> torch.nn.Module:
    """The native model of a preset, by the fields of its native configuration."""
    ours = read_config(preset)
    sizes = {name: getattr(ours, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    sizes |= {"num_attention_heads": ours.num_attention_heads, "max_position_embeddings": ours.max_position_embeddings}
    with torch.device("meta"):
        if preset.startswith("gpt"):
            return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        sizes |= {name: getattr(ours, name) for name in ("num_key_value_heads", "intermediate_size")}
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))


@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("attention")])
def test_a_preset_has_the_parameters_of_the_native_model(preset):
    model = build(read_config(preset))
    assert model.num_parameters() == native(preset).num_parameters()
    assert model.device.type == "meta"


def test_the_papers_models_are_of_the_size_that_table_3_gives():
    sizes = {name: build(read_config(f"attention-is-all-you-need-{name}")).num_parameters() for name in ("base", "big")}
    assert sizes["base"] == pytest.approx(65e6, rel=0.04)
    assert sizes["big"] == pytest.approx(213e6, rel=0.02)


def test_a_file_and_its_folder_are_the_same_configuration(tmp_path):
    for config in (tiny.config("decoder"), LlamaConfig(hidden_size=32)):
        config.save_pretrained(tmp_path)
        for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
            read = read_config(source)
            assert type(read) is type(config) and read.hidden_size == 32


def test_a_hub_id_is_asked_of_the_cache_first_and_runs_no_code(monkeypatch):
    asked = []

    def from_pretrained(name, local_files_only, trust_remote_code):
        asked.append((name, local_files_only, trust_remote_code))
        if local_files_only:
            raise OSError("not in the cache")
        return tiny.config("encoder")

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    assert read_config("owner/name").model_type == "scratch_encoder"
    assert asked == [("owner/name", True, False), ("owner/name", False, False)]


def test_what_is_no_source_is_refused(tmp_path, monkeypatch):
    def no_hub(*args, **kwargs):
        raise OSError("there is\nno such repository")

    monkeypatch.setattr(AutoConfig, "from_pretrained", no_hub)
    (tmp_path / "empty").mkdir()
    files = {"list": "[1]", "broken": "{", "untyped": json.dumps({"hidden_size": 3}), "odd": '{"model_type": "zork"}'}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    for source, complaint in {
        "llama-3-7b": "did you mean the preset 'llama-3-",
        "attention-is-all-you-need": "'attention-is-all-you-need-b",
        "owner/name": "nor found on the Hub.*no such repository",
        tmp_path / "empty": "empty: no config.json in this folder",
        tmp_path / "absent": "absent: there is no such file or folder",
        "absent.json": "there is no such file or folder",
        tmp_path / "list.json": "no model_type",
        tmp_path / "broken.json": "not JSON",
        tmp_path / "untyped.json": "no model_type",
        tmp_path / "odd.json": "model_type='zork' is not known",
    }.items():
        with pytest.raises(ValueError, match=complaint):
            read_config(source)
