"""The formulas of docs/SCALE.md: what a block really keeps, what two processes really send."""

import json

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import readme, scale
from benchmarks.scale import Model
from hf_scratch_transformer import ScratchDecoderConfig, ScratchDecoderForCausalLM
from training.sharding import Sizes

SMALL = Model(48, 128, 4, 4, 4, 300)


@pytest.mark.parametrize("model", [Model(64, 256, 3, 4, 4, 99), Model(96, 128, 3, 6, 2, 99)])
def test_a_block_keeps_what_the_formula_says(model):
    """By what autograd saves of it, each storage once."""
    ours = ScratchDecoderForCausalLM(ScratchDecoderConfig(**model.fields, max_position_embeddings=128))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in ours.parameters()}
    kept: list[dict[int, int]] = []
    blocks = ours.model.layers
    tokens = torch.randint(1, 99, (2, 64))
    held = []  # as long as they are, no other tensor lies where they do

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and kept:
            kept[-1][storage.data_ptr()] = storage.nbytes()
            held.append(storage)
        return tensor

    for block in blocks:
        block.register_forward_pre_hook(lambda *_: kept.append({}))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ours(tokens)
    assert sum(kept[1].values()) / (4 * tokens.numel()) == pytest.approx(model.activations(), rel=0.08)


def test_parameters_are_counted_as_they_are():
    ours = ScratchDecoderForCausalLM(ScratchDecoderConfig(**SMALL.fields))
    every, block = SMALL.counted()
    assert every == ours.num_parameters()
    assert block == sum(parameter.numel() for parameter in ours.model.layers[1].parameters())


def test_parts_add_up():
    """What is spread over twice as many takes half, and what is sent depends on nothing but the ring."""
    tokens, model = 1024, scale.MODELS["1 billion"]
    one, eight = (scale.memory(model, Sizes(1, parts), tokens, 2) for parts in (1, 8))
    assert eight["states"] == one["states"] / 8 and one["gathered"] == 0 < eight["gathered"]
    assert scale.memory(model, Sizes(1, 8), tokens, 2, True)["activations"] < eight["activations"] / 4
    assert sum(scale.network(model, Sizes(), tokens, 2).values()) == 0
    assert scale.network(model, Sizes(2), tokens, 2)["reduced"] == 4 * model.counted()[0]
    assert scale.checkpoint(model, Sizes(8, 8)) == 12 * model.counted()[0] / 8


@pytest.mark.slow
def test_two_processes_send_what_the_formula_says_and_the_page_says_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale, "MEASURED", SMALL)
    monkeypatch.setattr(scale, "NEGLIGIBLE", SMALL)
    monkeypatch.setattr(scale, "WAYS", {"FSDP2, two parts": scale.WAYS["FSDP2, two parts"]})
    folder = tmp_path / "benchmarks" / "records" / "here"
    assert benchmarks.main(["scale", "--rounds", "1", "--output_dir", str(folder)]) == 0
    way = json.loads((folder / "scale.json").read_text(encoding="utf-8"))["ways"]["FSDP2, two parts"]
    for what in ("network", "checkpoint"):
        assert way["measured"][what] == pytest.approx(way["formula"][what], rel=0.5), what  # of a model this small
    page = "<!-- scale: measured here -->\nold\n<!-- end -->\n<!-- scale: gpus here -->\n<!-- end -->\n"
    filled = readme.filled(page, tmp_path)
    assert "old" not in filled and filled.count("\n| FSDP2, two parts |") == 3
    assert filled.count("\n| 7 billion (6.74) |") == len(scale.GPUS)
    assert "FSDP2, two parts" in capsys.readouterr().out


def test_no_rounds_are_refused(capsys):
    assert benchmarks.main(["scale", "--rounds", "0"]) == 2
    assert capsys.readouterr().err == "benchmarks: --rounds 0 must be at least 1\n"
