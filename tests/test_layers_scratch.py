"""Each brick against the formula, written out with loops."""

import importlib.util
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_scratch_transformer import layers_scratch as layers
from hf_scratch_transformer.layers_scratch import (
    FEED_FORWARDS,
    NORMS,
    FeedForward,
    RotaryPositions,
    SinusoidalPositions,
    attention,
    post_norm,
    pre_norm,
    repeat_heads,
    rotate,
)


def test_sinusoidal_positions_of_the_article():
    table = SinusoidalPositions(3)(torch.arange(4)[None])[0]
    expected = [[0, 1, 0], [0.84, 0.54, 0], [0.91, -0.42, 0], [0.14, -0.99, 0.01]]
    assert_close(table, torch.tensor(expected), atol=0.005, rtol=0)
    assert_close(
        SinusoidalPositions(3)(torch.tensor([[4]]))[0, 0], torch.tensor([-0.76, -0.65, 0.01]), atol=5e-3, rtol=0
    )


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
    turned = rotate(x, *RotaryPositions(dim, theta)(positions, x.dtype))
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
    positions = RotaryPositions(8, 10000.0)
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


@pytest.mark.parametrize("activation", FEED_FORWARDS)
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward_is_the_formula(activation, bias):
    kind, function = FEED_FORWARDS[activation]
    layer = kind(4, 6, function, bias, 0.0)
    x = torch.randn(2, 3, 4)
    linear = lambda name, x: x @ getattr(layer, name).weight.T + (getattr(layer, name).bias if bias else 0)  # noqa: E731
    up = linear("up_proj", x)
    hidden = {
        "relu": lambda: up.clamp(min=0),
        "gelu": lambda: up * 0.5 * (1 + torch.erf(up / 2**0.5)),
        "gelu_new": lambda: up * 0.5 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (up + 0.044715 * up**3))),
        "silu": lambda: up * torch.sigmoid(up),
        "swiglu": lambda: linear("gate_proj", x) * torch.sigmoid(linear("gate_proj", x)) * up,
    }[activation]()
    assert_close(layer(x), linear("down_proj", hidden))
    assert (layer.up_proj.bias is not None) == bias


def test_feed_forward_drops_hidden_units():
    layer = FeedForward(4, 1000, torch.relu, False, 0.5).train()
    nn.init.ones_(layer.up_proj.weight)
    nn.init.constant_(layer.down_proj.weight, 1 / 4000)
    kept = layer(torch.ones(1, 1, 4))[0, 0, 0].item() / 2  # what is kept is doubled
    assert 0.4 < kept < 0.6


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_the_formula(name):
    norm = NORMS[name](5, eps=0.1)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 5)
    if name == "layer_norm":
        nn.init.normal_(norm.bias)
        mean = x.mean(-1, keepdim=True)
        expected = (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight + norm.bias
    else:
        expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    assert_close(norm(x), expected)


def test_residuals():
    x, norm, sublayer = torch.randn(2, 3, 4), nn.LayerNorm(4), nn.Linear(4, 4)
    assert_close(pre_norm(x, sublayer, norm, nn.Identity()), x + sublayer(norm(x)))
    assert_close(post_norm(x, sublayer, norm, nn.Identity()), norm(x + sublayer(x)))
    assert_close(pre_norm(x, sublayer, norm, nn.Dropout(1.0)), x)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "CPU_CHUNK", 200)  # 4 rows of 50 logits, 12 chunks, the last with one row


def head_and_targets(rows: int, bias: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor | None], Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(rows, 16), torch.randn(50, 16), torch.randn(50) if bias else None]
    return [x if x is None else x.to(dtype).requires_grad_() for x in tensors], torch.randint(0, 50, (rows,))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy_in_chunks_is_that_of_all_logits(
    bias: bool, label_smoothing: float, compiled: bool, small_chunks: None
) -> None:
    inputs, targets = head_and_targets(45, bias)
    targets[::7] = -100
    function = layers.linear_cross_entropy
    if compiled:
        function = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    leaves = [x for x in inputs if x is not None]
    loss = function(*inputs, targets, label_smoothing)
    expected = F.cross_entropy(F.linear(*inputs), targets, reduction="sum", label_smoothing=label_smoothing)
    assert_close(loss, expected, atol=1e-10, rtol=0)
    # Scaled, as a loss is that is divided by its targets.
    for gradient, other in zip(*(torch.autograd.grad(x * 0.3, leaves) for x in (loss, expected)), strict=True):
        assert_close(gradient, other, atol=1e-10, rtol=0)
    with torch.no_grad():
        assert_close(function(*inputs, targets, label_smoothing), expected, atol=1e-10, rtol=0)


def test_cross_entropy_of_no_targets_is_zero(small_chunks: None) -> None:
    (states, weight, _), targets = head_and_targets(0, bias=False)
    loss = layers.linear_cross_entropy(states, weight, None, targets)
    loss.backward()
    assert loss == 0 and not weight.grad.any()


def test_cross_entropy_under_autocast_is_that_of_autocast_logits(small_chunks: None) -> None:
    inputs, targets = head_and_targets(45, bias=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layers.linear_cross_entropy(*inputs, targets)
        logits = F.linear(*inputs)
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.float(), targets, reduction="sum")
    assert_close(loss, expected, atol=1e-4, rtol=1e-6)
    for gradient, other in zip(*(torch.autograd.grad(x, inputs) for x in (loss, expected)), strict=True):
        assert gradient.dtype == torch.float32
        assert_close(gradient, other, atol=0.02 * other.abs().max().item(), rtol=0.02)


def test_cross_entropy_may_be_loaded_twice() -> None:
    """As it is when a model comes from the Hub beside the installed package, or two models do."""
    spec = importlib.util.spec_from_file_location("stranger.layers_scratch", layers.__file__)
    stranger = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stranger)
    inputs, targets = head_and_targets(5, bias=False)
    one, other = (module.linear_cross_entropy(*inputs, targets) for module in (layers, stranger))
    assert one == other
    assert torch.equal(*(torch.autograd.grad(loss, inputs[1])[0] for loss in (one, other)))


# Products by the quicker library

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build has no oneDNN")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a processor that MKL is slow on; tells which operations multiplied."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.__name__.split(".")[0] in ("_linear_pointwise", "mm", "addmm", "linear"):
                seen.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(layers, "is_mkl_slow", lambda: True)
    with Watch():
        yield seen


def wide_linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 256, bias=bias)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 256), (1, 1, 256)])
def test_a_product_by_the_quicker_library_is_the_same(shape, bias, chosen):
    linear, x = wide_linear(bias), torch.randn(*shape).requires_grad_()
    expected = linear(x)
    leaves = [x, *linear.parameters()]
    gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    chosen.clear()
    output = layers.project(linear, x)
    assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert_close(torch.autograd.grad(output.sin().sum(), leaves), gradients, atol=1e-5, rtol=1e-5)
    assert chosen == ["_linear_pointwise"] * 3
    with torch.no_grad():
        assert_close(layers.project(linear, x), expected, atol=1e-5, rtol=1e-5)
    assert chosen == ["_linear_pointwise"] * 4


@needs_onednn
def test_products_have_second_derivatives(chosen):
    linear, x = wide_linear(), torch.randn(4, 256).requires_grad_()

    def second(product):
        (gradient,) = torch.autograd.grad(product(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, linear.weight])

    assert_close(second(lambda x: layers.project(linear, x)), second(linear), atol=1e-4, rtol=1e-4)


@needs_onednn
@pytest.mark.parametrize(
    "adapt",
    [
        lambda linear: linear.double(),
        lambda linear: linear.register_forward_hook(lambda *_: None),
        lambda linear: linear.register_forward_pre_hook(lambda *_: None),
        lambda linear: setattr(linear, "forward", linear.forward),
        lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight[:64, :64].clone())),
    ],
    ids=["double", "hook", "pre-hook", "wrapped", "small"],
)
def test_a_linear_map_that_is_not_plain_is_called(adapt, chosen):
    linear = wide_linear(bias=False)
    adapt(linear)
    x = torch.randn(3, linear.weight.shape[1], dtype=linear.weight.dtype)
    assert torch.equal(layers.project(linear, x), linear(x))
    assert "_linear_pointwise" not in chosen


@needs_onednn
def test_the_library_is_left_alone_where_it_matters(chosen):
    linear, x = wide_linear(), torch.randn(3, 256)
    with torch.autocast("cpu", torch.bfloat16):
        assert layers.project(linear, x).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(layers.project(linear, x), linear(x))
    assert layers.project(linear, torch.empty(0, 256)).shape == (0, 256)
    tangent = torch.func.jvp(lambda x: layers.project(linear, x), (x,), (x,))[1]
    assert_close(tangent, linear(x) - linear.bias, atol=1e-5, rtol=1e-5)
    assert_close(torch.func.vmap(lambda x: layers.project(linear, x))(x[:, None]), linear(x)[:, None])
    assert "_linear_pointwise" not in chosen


@needs_onednn
def test_operations_are_counted_whichever_library_does_them(monkeypatch):
    monkeypatch.setattr(layers, "is_mkl_slow", lambda: True)
    linear, x = wide_linear(), torch.randn(7, 256).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        layers.project(linear, x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 7 * 256 * 256
    inputs, targets = head_and_targets(45, bias=False)
    targets[::3] = -100
    with FlopCounterMode(display=False) as counter:
        layers.linear_cross_entropy(*inputs, targets).backward()
    assert counter.get_total_flops() == 3 * 2 * 30 * 16 * 50
