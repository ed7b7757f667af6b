"""What SGLang does with a decoder that it has no code for, since it does not run here: the rules in its
`sglang/srt/models/transformers.py`, on a folder of ours."""

import re
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import AutoConfig, AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_scratch_transformer import ScratchDecoderForCausalLM
from tests import tiny

PACKAGE, VERSION = "sglang", "0.5.23, not run"
# Those of a plan that it knows, and what they are to it; every entry must have one, also of what is no matrix.
STYLES = {"colwise": "colwise", "rowwise": "rowwise"} | dict.fromkeys(
    ("replicate", "embedding_rowwise", "replicated_with_grad_allreduce"), "replicate"
)
PARTED = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise", "down_proj": "rowwise"}
PARTED |= {"gate_proj": "colwise", "up_proj": "colwise"}
LENGTHS = [4, 6]
DECODERS = {
    "llama": {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"},
    "qwen3": {"hidden_act": "swiglu", "norm_type": "rms_norm", "use_qk_norm": True, "num_key_value_heads": 2},
    "gemma": {"norm_type": "rms_norm_1p", "scale_embedding": True, "tie_word_embeddings": True},
}


class Matrix(nn.Module):
    """In place of every `nn.Linear`; one rank has the whole of it."""

    def __init__(self, old: nn.Linear):
        super().__init__()
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """In place of every module whose class is called so: it asks for `eps` and `weight`, and takes rows of tokens."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self.weight, self.eps = old.weight, old.eps

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, rows.shape[-1:], self.weight, self.eps).reshape(x.shape)


@contextmanager
def without_memory():
    """Parameters are made on the meta device, buffers where they are needed."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None:
            old = module._parameters[name]
            options = old.__dict__ | {"requires_grad": parameter.requires_grad}
            module._parameters[name] = type(old)(old.to("meta"), **options)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def replaced(module: nn.Module, plan: dict[str, str], prefix: str = "") -> dict[str, str]:
    """Put its own matrices and norms in; how each matrix is parted."""
    styles: dict[str, str] = {}
    for name, child in list(module.named_children()):
        path = f"{prefix}{name}"
        if isinstance(child, nn.Linear):
            styles[path] = next((style for pattern, style in plan.items() if re.match(pattern, path)), "replicate")
            setattr(module, name, Matrix(child))
        elif type(child).__name__.endswith("RMSNorm"):
            setattr(module, name, Norm(child))
        else:
            styles |= replaced(child, plan, f"{path}.")
    return styles


@pytest.mark.parametrize("kind", DECODERS)
def test_decoder(kind, tmp_path, monkeypatch):
    """its way to a model, written out: without memory, own matrices and norms; logits of two requests = ours"""
    ours = tiny.model(ScratchDecoderForCausalLM, **DECODERS[kind])
    ours.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert get_class_from_dynamic_module(config.auto_map["AutoModel"], tmp_path)._supports_attention_backend
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sglang", attention)
    config._attn_implementation = "sglang"
    with without_memory():
        model = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True)
    assert all(getattr(each, "is_causal", True) for each in model.modules())
    plan = {pattern.removeprefix("model."): STYLES[style] for pattern, style in model.tp_plan.items()}
    styles = replaced(model, plan)
    assert styles and all(style == PARTED[name.split(".")[-1]] for name, style in styles.items())
    model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size, device="meta"))
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_head.weight", None)
    assert (head is None) == config.tie_word_embeddings
    named = {name.removeprefix("model."): value for name, value in weights.items()}
    model.load_state_dict(named, assign=True)
    ids = [tiny.tokens(config.vocab_size, length, seed=length) for length in LENGTHS]
    layers = dict(enumerate(seen := [0] * config.num_hidden_layers))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        states = model.eval()(
            input_ids=torch.cat(ids)[None],
            inputs_embeds=None,
            use_cache=False,
            position_ids=positions[None],
            return_dict=False,
            forward_batch=seen,
            attention_instances=layers,
        )[0][0]
        expected = torch.cat([ours(each[None]).logits[0] for each in ids])
    assert seen == [1] * config.num_hidden_layers
    head = model.get_input_embeddings().weight if head is None else head
    torch.testing.assert_close(states @ head.T, expected, rtol=0, atol=1e-5)


def attention(module, query, key, value, attention_mask, scaling, attention_instances, forward_batch, **_):
    """Flat rows of tokens for each request, by the layer's own number; keys and values are not repeated."""
    assert module.layer_idx in attention_instances
    forward_batch[module.layer_idx] += 1
    split = [each[0].split(LENGTHS, 1) for each in (query, key, value)]
    parts = [
        scaled_dot_product_attention(*each, is_causal=True, scale=scaling, enable_gqa=True)
        for each in zip(*split, strict=True)
    ]
    return torch.cat(parts, 1).transpose(0, 1).flatten(1), None
