"""LitGPT, through the Llama export: its own converter, its own model."""

import contextlib
import io

import pytest
import torch
from litgpt.config import Config, name_to_config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint
from torch.testing import assert_close
from transformers import LlamaForCausalLM

from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer.conversion import convert_folder, convert_from
from tests import tiny

LIKE_LLAMA = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Our model, and LitGPT's, of a folder named `tiny`."""
    model = tiny.model(ScratchDecoderForCausalLM, **LIKE_LLAMA, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "tiny", "llama")
    config = model.config
    shape = {
        "name": "tiny",
        "hf_config": {"org": "ours", "name": "tiny"},
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_query_groups": config.num_key_value_heads,
        "n_embd": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "norm_eps": config.layer_norm_eps,
        "mlp_class_name": "LLaMAMLP",
    }
    monkeypatch.setitem(name_to_config, "tiny", shape)
    with contextlib.redirect_stdout(io.StringIO()):
        convert_hf_checkpoint(tmp_path / "tiny")
    theirs = GPT(Config.from_checkpoint(tmp_path / "tiny"))
    theirs.load_state_dict(torch.load(tmp_path / "tiny/lit_model.pth", weights_only=True))
    return model, theirs, tmp_path / "tiny"


def test_logits(converted):
    """a decoder, through its Llama export and LitGPT's converter: logits = ours"""
    model, theirs, _ = converted
    ids = tiny.tokens(40, 3, 9)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert expected.std() > 0.5
        assert_close(theirs(ids), expected, atol=1e-5, rtol=1e-5)


def test_trained_and_back(converted, tmp_path):
    """trained by LitGPT, converted back to Llama and to ours: losses of 3 steps = ours; logits = LitGPT's"""
    model, theirs, folder = converted
    ids = tiny.tokens(40, 3, 9)
    losses = []
    for each in (model.train(), theirs):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            logits = each(input_ids=ids).logits if each is model else each(ids)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert_close(losses[1], losses[0], atol=1e-4, rtol=1e-4)
    torch.save({"model": theirs.state_dict()}, folder / "lit_model.pth")
    convert_lit_checkpoint(folder, tmp_path / "back")
    llama = LlamaForCausalLM.from_pretrained(folder)
    llama.load_state_dict(torch.load(tmp_path / "back/model.pth", weights_only=True))
    with torch.no_grad():
        assert_close(convert_from(llama)(input_ids=ids).logits, theirs(ids), atol=1e-5, rtol=1e-5)
