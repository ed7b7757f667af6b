"""Ways of opening a folder, and numbers of half the size, for every family."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from tests import tiny

PACKAGE = "transformers"
EXACT = {"atol": 0, "rtol": 0}
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


@pytest.fixture(params=tiny.LANGUAGE_MODELS, ids=tiny.family)
def model(request) -> PreTrainedModel:
    return tiny.model(request.param, position_embedding_type="sinusoidal")


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """In pieces of 20 kB."""
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


@torch.no_grad()
def outputs(model: PreTrainedModel) -> Tensor:
    return logits(model, tiny.inputs(model))


def logits(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    target = {"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {}
    return model(**inputs, **target).logits


def test_shards(model, folder):
    """saved in shards: as many safetensors as the index names, no other weights, outputs equal"""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {path.name for path in folder.iterdir() if path.suffix not in (".json", ".py")}
    assert files == set(index.values()) and len(files) > 2
    stored = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert stored.keys() == index.keys() == dict(model.named_parameters()).keys()
    assert_close(outputs(type(model).from_pretrained(folder)), outputs(model), **EXACT)


PLACES = {
    "auto": {"device_map": "auto"},
    "cpu": {"device_map": "cpu"},
    "low memory": {"low_cpu_mem_usage": True},
    "safetensors only": {"use_safetensors": True},
}


@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_options(options, model, folder):
    """device_map="auto" and "cpu", low_cpu_mem_usage, use_safetensors: outputs equal"""
    assert_close(outputs(type(model).from_pretrained(folder, **options)), outputs(model), **EXACT)


def test_explicit_disk(model, folder, tmp_path):
    """device_map with every second block on disk: those are not in memory, outputs equal"""
    names = [name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules]
    places = {name: "disk" for name in names[::2]} | {name: "cpu" for name in names[1::2]}
    for name in [*model.state_dict(), *dict(model.named_buffers())]:
        if not any(name.startswith(f"{block}.") for block in names):
            places[name.rpartition(".")[0]] = "cpu"
    opened = type(model).from_pretrained(folder, device_map=places, offload_folder=tmp_path / "offloaded")
    away = {name for name, parameter in opened.named_parameters() if parameter.device.type == "meta"}
    assert away and away == {name for name, _ in model.named_parameters() if name.startswith(tuple(names[::2]))}
    assert_close(outputs(opened), outputs(model), **CLOSE)


def test_max_memory(model, folder, tmp_path):
    """device_map="auto" with max_memory below the model's size: the rest goes to disk, outputs equal"""
    size = sum(parameter.nbytes for parameter in model.parameters())
    options = {"device_map": "auto", "max_memory": {"cpu": size * 2 // 3}, "offload_folder": tmp_path / "offloaded"}
    opened = type(model).from_pretrained(folder, **options)
    assert "disk" in opened.hf_device_map.values()
    assert any(parameter.device.type == "meta" for parameter in opened.parameters())
    assert_close(outputs(opened), outputs(model), **CLOSE)


def test_accelerate(model, folder, tmp_path):
    """accelerate's cpu_offload, disk_offload, load_checkpoint_and_dispatch: outputs equal"""
    expected = outputs(model)
    with init_empty_weights():
        empty = type(model)(model.config)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    empty.tie_weights()
    places = {"": "cpu"}
    opened = load_checkpoint_and_dispatch(empty, folder, device_map=places)
    opened.tie_weights()
    assert_close(outputs(dispatch_model(opened.eval(), places)), expected, **EXACT)
    for offloaded in (
        cpu_offload(type(model).from_pretrained(folder), torch.device("cpu")),
        disk_offload(type(model).from_pretrained(folder), str(tmp_path / "disk"), torch.device("cpu")),
    ):
        assert {parameter.device.type for parameter in offloaded.parameters()} == {"meta"}
        assert_close(outputs(offloaded), expected, **CLOSE)


def test_meta(model):
    """made on torch.device("meta"), weights assigned: outputs equal"""
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
    assert_close(outputs(empty.eval()), outputs(model), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtype(dtype, model, tmp_path):
    """saved in bf16 and fp16, dtype="auto": the same type, weights rounded once, outputs near those of fp32"""
    expected = outputs(model)
    saved = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    model.to(dtype).save_pretrained(tmp_path)
    opened = type(model).from_pretrained(tmp_path, dtype="auto")
    assert opened.dtype == dtype
    assert all(torch.equal(parameter, saved[name]) for name, parameter in opened.named_parameters())
    assert_close(outputs(opened), outputs(model), **EXACT)
    # Each operation rounds to eight and to eleven bits.
    assert_close(outputs(opened).float(), expected, atol=16 * torch.finfo(dtype).eps, rtol=16 * torch.finfo(dtype).eps)
    wide = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
