"""Each brick against the formula, written out with loops."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers.activations import ACT2FN

from hf_scratch_transformer.configuration_scratch import ACTIVATIONS, CHOICES, NORM_PLACEMENTS, NORMS
from hf_scratch_transformer.layers_scratch import (
    FeedForward,
    RotaryPositions,
    ScratchAttention,
    ScratchBlock,
    SinusoidalPositions,
    attention,
    repeat_heads,
    rotate,
)

from . import tiny


def rotary(dim: int, theta: float) -> RotaryPositions:
    return RotaryPositions(tiny.config("decoder", head_dim=dim, rope_theta=theta))


def feed_forward(**options) -> FeedForward:
    return FeedForward(tiny.config("decoder", num_attention_heads=1, num_key_value_heads=1, **options))


def test_sinusoidal_positions_of_the_article():
    table = SinusoidalPositions(3)(torch.arange(4)[None])[0]
    expected = [[0, 1, 0], [0.84, 0.54, 0], [0.91, -0.42, 0], [0.14, -0.99, 0.01]]
    assert table.dtype == torch.float32  # as tables of native models are, in double precision too
    assert_close(table, table.new_tensor(expected), atol=0.005, rtol=0)
    fifth = SinusoidalPositions(3)(torch.tensor([[4]]))[0, 0]
    assert_close(fifth, table.new_tensor([-0.76, -0.65, 0.01]), atol=5e-3, rtol=0)


@pytest.mark.parametrize("dim", [1, 2, 7, 16])
def test_sinusoidal_positions_are_the_formula(dim):
    positions = torch.tensor([[0, 1, 5, 1000], [7, 3, 3, 0]])
    table = SinusoidalPositions(dim)(positions)
    assert table.shape == (2, 4, dim) and table.abs().max() <= 1
    for b in range(2):
        for t in range(4):
            for d in range(dim):
                angle = positions[b, t].item() / 10000 ** (2 * (d // 2) / dim)
                expected = math.cos(angle) if d % 2 else math.sin(angle)
                assert table[b, t, d].item() == pytest.approx(expected, abs=1e-7)
    halves = SinusoidalPositions(dim, in_halves=True)(positions)
    assert torch.equal(halves, torch.cat((table[..., 0::2], table[..., 1::2]), dim=-1))


def test_sinusoidal_positions_are_no_parameter():
    assert not SinusoidalPositions(8).state_dict()


def test_rotary_positions_turn_pairs_of_entries():
    dim, theta = 6, 100.0
    positions = torch.tensor([[0, 3, 11]])
    x = torch.randn(1, 2, 3, dim)
    turned = rotate(x, *rotary(dim, theta)(positions, x.dtype))
    for head in range(2):
        for t in range(3):
            for i in range(dim // 2):
                angle = positions[0, t].item() * theta ** (-2 * i / dim)
                first, second = x[0, head, t, i].item(), x[0, head, t, i + dim // 2].item()
                expected = [
                    first * math.cos(angle) - second * math.sin(angle),
                    second * math.cos(angle) + first * math.sin(angle),
                ]
                assert_close(turned[0, head, t, i :: dim // 2], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_rotary_products_depend_on_differences_of_positions_only():
    positions = rotary(8, 10000.0)
    q, k = torch.randn(2, 1, 1, 5, 8, dtype=torch.float64)

    def products(offset: int) -> torch.Tensor:
        angles = positions(torch.arange(5)[None] + offset, torch.float64)
        return rotate(q, *angles) @ rotate(k, *angles).transpose(2, 3)

    assert_close(products(0), products(37), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(products(0), q @ k.transpose(2, 3), atol=1e-2)


def attention_with_loops(q, k, v, allowed, scaling):
    """(B, H, T, d_k), (B, G, S, d_k), (B, G, S, d_v), (B, H, T, S) of bools -> (B, T, H, d_v), (B, H, T, S)."""
    q, k, v = q.detach(), k.detach(), v.detach()
    B, H, T, _ = q.shape
    G, S = k.shape[1:3]
    output, weights = torch.zeros(B, T, H, v.shape[-1]), torch.zeros(B, H, T, S)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for t in range(T):
                seen = [s for s in range(S) if allowed[b, h, t, s]]
                exponentials = {s: math.exp(float(q[b, h, t] @ k[b, g, s]) * scaling) for s in seen}
                for s in seen:
                    weights[b, h, t, s] = exponentials[s] / sum(exponentials.values())
                    output[b, t, h] += weights[b, h, t, s] * v[b, g, s]
    return output, weights


class Groups(nn.Module):
    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("additive", [False, True])
def test_attention_is_the_formula(kind, groups, additive):
    B, H, T, S = 2, 4, 5, 5
    q, k, v = torch.randn(B, H, T, 6), torch.randn(B, H // groups, S, 6), torch.randn(B, H // groups, S, 3)
    allowed = torch.ones(B, 1, T, S, dtype=torch.bool)
    if kind in ("padding", "both"):
        allowed[1, :, :, 3:] = False
    if kind in ("causal", "both"):
        allowed &= torch.ones(T, S, dtype=torch.bool).tril()
    mask = None if kind == "none" else allowed
    if additive and mask is not None:
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    output, weights = attention(Groups(groups).eval(), q, k, v, mask, scaling=6**-0.5)
    expected = attention_with_loops(q, k, v, allowed.expand(B, H, T, S), 6**-0.5)
    assert_close((output, weights), expected, atol=1e-5, rtol=1e-5)
    assert_close(weights.sum(-1), torch.ones(B, H, T))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_with_nothing_to_attend_to_is_finite(dtype):
    q, k, v = torch.randn(3, 1, 2, 3, 4, dtype=dtype)
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    output, weights = attention(Groups(1).eval(), q, k, v, mask, scaling=0.5)
    assert output.isfinite().all() and weights.isfinite().all() and weights.dtype == dtype


def test_attention_dropout_only_in_training():
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    module = Groups(1)
    kept = attention(module.eval(), q, k, v, None, scaling=0.5, dropout=0.5)[1]
    dropped = attention(module.train(), q, k, v, None, scaling=0.5, dropout=0.5)[1]
    assert (kept > 0).all() and (dropped == 0).any()
    assert_close(dropped[dropped > 0], 2 * kept[dropped > 0])


def test_heads_are_repeated_next_to_each_other():
    x = torch.arange(3.0).view(1, 3, 1, 1)
    assert repeat_heads(x, 2).flatten().tolist() == [0, 0, 1, 1, 2, 2]


def gelu_tanh(x):
    return x * 0.5 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


FORMULAS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), gelu_tanh),
    "relu2": lambda x: x.clamp(min=0) ** 2,  # So et al., 2021
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "mish": lambda x: x * torch.tanh(torch.log(1 + x.exp())),  # Misra, 2019
    "linear": lambda x: x,
}


def test_activations_are_those_of_transformers():
    """But those that are trained, and another name; each plain and gated."""
    names = ACT2FN.keys() - {"swish", "prelu", "xielu"}
    assert ACTIVATIONS.keys() == names | {f"gated-{name}" for name in names - {"silu"}} | {"swiglu"}
    x = torch.randn(50)
    for name in names:
        assert_close(ACTIVATIONS[name].function(x), ACT2FN[name](x))


@pytest.mark.parametrize("activation", ["silu", "swiglu", *FORMULAS, *(f"gated-{name}" for name in FORMULAS)])
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward_is_the_formula(activation, bias):
    layer = feed_forward(hidden_size=4, intermediate_size=6, hidden_act=activation, mlp_bias=bias)
    x = torch.randn(2, 3, 4)
    linear = lambda name, x: x @ getattr(layer, name).weight.T + (getattr(layer, name).bias if bias else 0)  # noqa: E731
    up = linear("up_proj", x)
    hidden = {
        **{name: partial(function, up) for name, function in FORMULAS.items()},
        **{f"gated-{name}": lambda f=f: f(linear("gate_proj", x)) * up for name, f in FORMULAS.items()},
        "silu": lambda: up * torch.sigmoid(up),
        "swiglu": lambda: linear("gate_proj", x) * torch.sigmoid(linear("gate_proj", x)) * up,
    }[activation]()
    assert_close(layer(x), linear("down_proj", hidden))
    assert (layer.up_proj.bias is not None) == bias


def test_feed_forward_drops_hidden_units():
    layer = feed_forward(hidden_size=4, intermediate_size=1000, hidden_act="relu", activation_dropout=0.5).train()
    nn.init.ones_(layer.up_proj.weight)
    nn.init.constant_(layer.down_proj.weight, 1 / 4000)
    kept = layer(torch.ones(1, 1, 4))[0, 0, 0].item() / 2  # what is kept is doubled
    assert 0.4 < kept < 0.6


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_the_formula(name):
    norm = NORMS[name](5, eps=0.1)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 5)
    weight = 1 + norm.weight if name.endswith("1p") else norm.weight
    if name.startswith("layer_norm"):
        nn.init.normal_(norm.bias)
        mean = x.mean(-1, keepdim=True)
        expected = (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight + norm.bias
    else:
        expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight
    assert_close(norm(x), expected)


# Where norms stand, as the name of the placement and the formula of one sub-layer.
PLACEMENTS = {
    "pre": (NORM_PLACEMENTS["pre"], lambda x, f, norm, out: x + f(norm(x))),
    "post": (NORM_PLACEMENTS["post"], lambda x, f, norm, out: norm(x + f(x))),
    "reordered": (NORM_PLACEMENTS["reordered"], lambda x, f, norm, out: x + out(f(x))),
    "sandwich": (NORM_PLACEMENTS["sandwich"], lambda x, f, norm, out: x + out(f(norm(x)))),  # Gemma 2
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_norms_stand_where_their_placement_says(name, monkeypatch):
    """A new placement is one row of a table."""
    placement, formula = PLACEMENTS[name]
    monkeypatch.setitem(NORM_PLACEMENTS, name, placement)
    monkeypatch.setitem(CHOICES, "norm_position", (*CHOICES["norm_position"], name))
    config = tiny.config("decoder", norm_position=name)
    config._attn_implementation = "eager"
    block = ScratchBlock(config, 0, is_causal=True).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 3, 32)
    sublayers = {"self_attn": lambda x: block.self_attn(x)[0], "mlp": block.mlp}
    expected = x
    for sublayer, function in sublayers.items():
        norms = (getattr(block, f"{sublayer}_{kind}") for kind in ("norm", "output_norm"))
        expected = formula(expected, function, *norms)
    assert_close(block(x), expected)


def test_dropout_falls_on_what_a_sublayer_adds():
    block = ScratchBlock(tiny.config("decoder"), 0, is_causal=True).train()
    block.self_attn.config._attn_implementation = "eager"
    block.dropout.p = 1.0
    x = torch.randn(2, 3, 32)
    assert_close(block(x), x)


# Options of the field


@pytest.mark.parametrize("name", ["parallel", "parallel_shared"])
def test_sub_layers_side_by_side_read_the_same(name):
    config = tiny.config("decoder", norm_position=name, residual_multiplier=0.5)
    config._attn_implementation = "eager"
    block = ScratchBlock(config, 0, is_causal=True).eval()
    assert (block.mlp_norm is None) == (name == "parallel_shared")
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    x, mask = torch.randn(2, 5, config.hidden_size), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    read = block.self_attn_norm(x)
    attended, _ = block.self_attn(read, None, mask)
    fed = block.mlp(read if name == "parallel_shared" else block.mlp_norm(x))
    assert_close(block(x, mask), x + 0.5 * attended + 0.5 * fed)


def test_part_of_a_head_is_turned():
    config = tiny.config("decoder", rope_parameters={"rope_theta": 50.0, "partial_rotary_factor": 0.5}, head_dim=8)
    cos, sin = RotaryPositions(config)(torch.arange(5)[None], torch.float32)
    x = torch.randn(2, 3, 5, 8)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    pairs = torch.view_as_complex(x[..., :4].unflatten(-1, (2, 2)).transpose(-1, -2).contiguous())
    angles = torch.arange(5.0)[:, None] * 50.0 ** -torch.tensor([0.0, 0.5])
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).transpose(-1, -2).flatten(-2)
    assert_close(turned[..., :4], expected)


def test_scores_are_capped_and_scaled():
    config = tiny.config("decoder", attention_multiplier=3.0, attn_logit_softcapping=0.5)
    config._attn_implementation = "eager"
    layer = ScratchAttention(config, 0, is_causal=True).eval()
    x = torch.randn(1, 4, config.hidden_size)
    _, weights = layer(x)
    query = layer.q_proj(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    key = repeat_heads(layer.keys_and_values(x)[0], layer.num_key_value_groups)
    scores = 0.5 * torch.tanh(3.0 * query @ key.transpose(2, 3) / 0.5)
    assert_close(weights, scores.softmax(-1))


def test_queries_of_all_heads_are_normalised_together():
    config = tiny.config("decoder", use_qk_norm=True, qk_norm_across_heads=True)
    layer = ScratchAttention(config, 0, is_causal=True)
    x = torch.randn(1, 4, config.hidden_size)
    query = layer.normalise(layer.q_proj(x).unflatten(-1, (-1, layer.head_dim)), layer.q_norm)  # (B, T, H, d_k)
    assert_close(query.square().mean((2, 3)), torch.ones(1, 4), atol=1e-2, rtol=0)
    assert not torch.allclose(query.square().mean(3), torch.ones(1, 1), atol=0.05)
