"""Less work gives the same numbers."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing import assert_close

from hf_scratch_transformer import ops_scratch as ops


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "CPU_CHUNK", 200)  # 4 rows of 50 logits, 12 chunks, the last with one row


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
    function = ops.linear_cross_entropy
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_logits_compiled_by_themselves_are_the_same(
    bias: bool, label_smoothing: float, dtype: torch.dtype, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a compiled step on a GPU, whose graph holds the loop over them as one operation."""
    monkeypatch.setattr(ops, "compiled", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    inputs, targets = head_and_targets(45, bias, dtype)
    with torch.no_grad():
        loop = functools.partial(ops.cross_entropy_in_chunks, *inputs, targets, label_smoothing)
        for with_gradients in (True, False):
            assert_close(loop(with_gradients, True), loop(with_gradients, False))


def test_cross_entropy_of_no_targets_is_zero(small_chunks: None) -> None:
    (states, weight, _), targets = head_and_targets(0, bias=False)
    loss = ops.linear_cross_entropy(states, weight, None, targets)
    loss.backward()
    assert loss == 0 and not weight.grad.any()


def test_cross_entropy_under_autocast_is_that_of_autocast_logits(small_chunks: None) -> None:
    inputs, targets = head_and_targets(45, bias=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ops.linear_cross_entropy(*inputs, targets)
        logits = F.linear(*inputs)
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.float(), targets, reduction="sum")
    assert_close(loss, expected, atol=1e-4, rtol=1e-6)
    for gradient, other in zip(*(torch.autograd.grad(x, inputs) for x in (loss, expected)), strict=True):
        assert gradient.dtype == torch.float32
        assert_close(gradient, other, atol=0.02 * other.abs().max().item(), rtol=0.02)


def test_gradients_may_be_asked_for_twice() -> None:
    inputs, targets = head_and_targets(5, bias=True)
    loss = ops.linear_cross_entropy(*inputs, targets)
    once, twice, last = (
        torch.autograd.grad(loss, inputs, torch.tensor(2.0), retain_graph=kept) for kept in (True, True, False)
    )
    assert all(map(torch.equal, once, twice)) and all(map(torch.equal, once, last))


@pytest.mark.parametrize("factor", [1, 2])
def test_cross_entropy_may_be_loaded_twice(factor: int, tmp_path: Path) -> None:
    """As it is when a model comes from the Hub beside the installed package, or two models do, perhaps of other
    versions: each has the loss and the gradients of its own file."""
    code, line = Path(ops.__file__).read_text(), "return loss, grad_states, grad_weight.to"
    assert line in code
    path = tmp_path / "ops_scratch.py"
    path.write_text(code.replace(line, f"return {factor} * loss, grad_states, {factor} * grad_weight.to"))
    spec = importlib.util.spec_from_file_location("stranger.ops_scratch", path if factor > 1 else ops.__file__)
    stranger = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stranger)
    inputs, targets = head_and_targets(5, bias=False)
    one, other = (module.linear_cross_entropy(*inputs, targets) for module in (ops, stranger))
    assert factor * one == other
    one, other = (torch.autograd.grad(loss, inputs[1])[0] for loss in (one, other))
    assert torch.equal(factor * one, other)


def tangents(function: Callable, inputs: list[Tensor], directions: list[Tensor]) -> tuple[Tensor, ...]:
    """The derivative in these directions: by a functional transform, and by dual numbers with and without gradients."""
    found = [torch.func.jvp(function, tuple(inputs), tuple(directions))[1]]
    for has_gradients in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(has_gradients):
            duals = map(forward_ad.make_dual, inputs, directions)
            found.append(forward_ad.unpack_dual(function(*duals)).tangent)
    return tuple(found)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy_in_chunks_has_derivatives_of_every_kind(bias: bool, label_smoothing: float) -> None:
    inputs, targets = head_and_targets(9, bias)
    inputs = [x.detach() for x in inputs if x is not None]
    directions = [torch.randn_like(x) for x in inputs]
    targets[::3] = -100

    def ours(states: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return ops.linear_cross_entropy(states, weight, *(bias or [None]), targets, label_smoothing)

    def plain(*inputs: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(*inputs), targets, reduction="sum", label_smoothing=label_smoothing)

    close = functools.partial(assert_close, atol=1e-10, rtol=1e-10)
    expected = torch.func.jvp(plain, tuple(inputs), tuple(directions))[1]
    for tangent in tangents(ours, inputs, directions):
        close(tangent, expected)
    compiled = torch.compile(lambda *x: torch.func.jvp(ours, x, tuple(directions))[1], backend="aot_eager")
    close(compiled(*inputs), expected)
    curvature = torch.func.jvp(torch.func.grad(plain), tuple(inputs), tuple(directions))[1]
    close(torch.func.jvp(torch.func.grad(ours), tuple(inputs), tuple(directions))[1], curvature)
    batch = torch.stack([inputs[0], directions[0]])
    each = (torch.func.vmap(torch.func.grad(f), (0, *[None] * len(inputs[1:]))) for f in (ours, plain))
    close(*(function(batch, *inputs[1:]) for function in each))


def test_second_derivatives_that_would_be_zero_are_refused() -> None:
    inputs, targets = head_and_targets(5, bias=True)
    loss = ops.linear_cross_entropy(*inputs, targets)
    with pytest.raises(NotImplementedError, match="no second derivatives by backward: use loss_only=False"):
        torch.autograd.grad(loss, inputs, create_graph=True)


# Root mean square norm


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 16)])
def test_the_norm_on_a_cpu_has_the_gradients_of_torchs(shape):
    torch.manual_seed(0)
    norm, x = ops.RMSNorm(16, eps=0.1).double(), torch.randn(*shape, dtype=torch.float64).requires_grad_()
    nn.init.normal_(norm.weight)
    leaves = [x, norm.weight]

    def derivatives(function):
        output = function()
        first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        return output, first, torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

    expected = derivatives(lambda: F.rms_norm(x, (16,), norm.weight, 0.1))
    assert_close(derivatives(lambda: norm(x)), expected, atol=1e-10, rtol=1e-10)
    assert "FusedRMSNorm" in type(norm(x).grad_fn).__name__
    with torch.no_grad():
        assert_close(norm(x), expected[0].detach(), atol=1e-10, rtol=0)
    assert_close(torch.func.vmap(norm)(x), expected[0], atol=1e-10, rtol=0)
    direction = [torch.randn_like(x)]
    _, tangent = torch.func.jvp(lambda x: F.rms_norm(x, (16,), norm.weight, 0.1), (x.detach(),), tuple(direction))
    for found in tangents(norm, [x.detach()], direction):
        assert_close(found, tangent, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_the_norm_of_what_is_frozen_has_both_derivatives(frozen):
    """As under adapters, which leave norms as they are."""
    norm, x = ops.RMSNorm(16, eps=0.1).double(), torch.randn(5, 16, dtype=torch.float64).requires_grad_()
    {"x": x, "weight": norm.weight}[frozen].requires_grad_(False)
    leaf = norm.weight if frozen == "x" else x

    def derivatives(function):
        (first,) = torch.autograd.grad(function().sin().sum(), leaf)
        (again,) = torch.autograd.grad(function().sin().sum(), leaf, create_graph=True)
        return first, again, torch.autograd.grad(again.square().sum(), leaf)[0]

    expected = derivatives(lambda: F.rms_norm(x, (16,), norm.weight, 0.1))
    assert_close(derivatives(lambda: norm(x)), expected, atol=1e-10, rtol=1e-10)


def test_the_norm_of_half_precision_is_computed_in_that_of_its_weight():
    norm, x = ops.RMSNorm(16, eps=1e-6), torch.randn(5, 16).bfloat16().requires_grad_()
    output = norm(x)
    assert_close(output, F.rms_norm(x.float(), (16,), norm.weight, 1e-6))
    with torch.no_grad():
        assert_close(norm(x), output)
    half = ops.RMSNorm(16, eps=1e-6).bfloat16()
    assert half(x).dtype == torch.bfloat16 and half(x.float()).dtype == torch.float32
    output.sin().sum().backward()
    other = x.detach().float().requires_grad_()
    F.rms_norm(other, (16,), norm.weight, 1e-6).sin().sum().backward()
    assert_close(x.grad.float(), other.grad, atol=1e-2, rtol=1e-2)
    assert norm(x[:0]).shape == (0, 16)
