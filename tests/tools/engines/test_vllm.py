"""What vLLM asks of models that it has no code for, since it does not run here: the rules in its
`vllm/model_executor/models/transformers`, on our sources."""

import ast
import inspect
import re
import textwrap

import pytest
import torch
from torch import nn
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchDecoderModel, ScratchEncoderModel
from hf_scratch_transformer.layers_scratch import ScratchAttention
from tests import tiny

PACKAGE, VERSION = "vllm", "0.33.0, not run"
MODELS = [ScratchDecoderModel, ScratchEncoderModel]
STYLES = {"colwise", "rowwise", "replicate"}  # those of matrices that it knows


def test_attention_is_found_in_the_source():
    """its rules, written out, on our source: one call of what is read from ALL_ATTENTION_FUNCTIONS, with the scale"""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(ScratchAttention.forward))))
    looked_up = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and "ALL_ATTENTION_FUNCTIONS." in ast.unparse(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    (call,) = [each for each in calls if each.func.id in looked_up]
    (scale,) = [each.value for each in call.keywords if each.arg == "scaling"]
    assert ast.unparse(scale) == "self.scaling"
    model = tiny.model(ScratchDecoderModel, attention_multiplier=0.3)
    found = [each for each in model.modules() if isinstance(each, ScratchAttention)]
    assert [each.layer_idx for each in found] == [0, 1] and {each.scaling for each in found} == {0.3}


@pytest.mark.parametrize("model_class", MODELS)
def test_plan(model_class):
    """its rules, written out, on our classes: backend-compatible, matrices in a tensor-parallel plan of known styles"""
    model = tiny.model(model_class, hidden_act="swiglu")
    assert model_class.is_backend_compatible() and model.base_model_prefix == "model"
    assert {"AutoConfig", "AutoModel"} <= model.config.auto_map.keys()
    plan = model.config.base_model_tp_plan
    linears = [
        name for name, each in model.named_modules() if isinstance(each, nn.Linear) and name.startswith("layers")
    ]
    styles = {name: next((s for p, s in plan.items() if re.match(p, name)), None) for name in linears}
    assert styles and set(styles.values()) <= STYLES
    assert {name.split(".")[-1] for name, style in styles.items() if style.startswith("rowwise")} == {
        "o_proj",
        "down_proj",
    }


def test_decoder_called_as_it_does(monkeypatch):
    """its call of a decoder, written out: two requests as one row of tokens, own attention; states and logits = ours"""
    ours = tiny.model(ScratchDecoderForCausalLM)
    lengths = [4, 6]
    ids = [tiny.tokens(ours.config.vocab_size, length, seed=length) for length in lengths]
    seen = []

    def engine(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen.append(module.layer_idx)
        groups = query.shape[1] // key.shape[1]
        query, key, value = query[0], key[0].repeat_interleave(groups, 0), value[0].repeat_interleave(groups, 0)
        parts = [
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            for q, k, v in zip(*(each.split(lengths, 1) for each in (query, key, value)), strict=True)
        ]
        return torch.cat(parts, 1).transpose(0, 1).flatten(1), None  # (tokens, heads · d)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "engine", engine)
    config = type(ours.config).from_dict(ours.config.to_dict())
    config._attn_implementation = "engine"
    theirs = AutoModel.from_config(config).eval()
    theirs.load_state_dict(ours.model.state_dict())
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        row = torch.cat(ids)[None]
        states = theirs(input_ids=row, inputs_embeds=None, use_cache=False, position_ids=positions, return_dict=False)
        expected = [ours(each[None]).logits[0] for each in ids]
    assert seen == [0, 1]
    logits = nn.functional.linear(states[0][0], ours.model.get_input_embeddings().weight)
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-5)
