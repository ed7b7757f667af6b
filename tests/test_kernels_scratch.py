"""Less work gives the same numbers."""

import copy
import importlib.util

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_scratch_transformer import kernels_scratch as kernels


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CPU_CHUNK", 200)  # 4 rows of 50 logits, 12 chunks, the last with one row


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
    function = kernels.linear_cross_entropy
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
    loss = kernels.linear_cross_entropy(states, weight, None, targets)
    loss.backward()
    assert loss == 0 and not weight.grad.any()


def test_cross_entropy_under_autocast_is_that_of_autocast_logits(small_chunks: None) -> None:
    inputs, targets = head_and_targets(45, bias=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = kernels.linear_cross_entropy(*inputs, targets)
        logits = F.linear(*inputs)
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.float(), targets, reduction="sum")
    assert_close(loss, expected, atol=1e-4, rtol=1e-6)
    for gradient, other in zip(*(torch.autograd.grad(x, inputs) for x in (loss, expected)), strict=True):
        assert gradient.dtype == torch.float32
        assert_close(gradient, other, atol=0.02 * other.abs().max().item(), rtol=0.02)


def test_cross_entropy_may_be_loaded_twice() -> None:
    """As it is when a model comes from the Hub beside the installed package, or two models do."""
    spec = importlib.util.spec_from_file_location("stranger.kernels_scratch", kernels.__file__)
    stranger = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stranger)
    inputs, targets = head_and_targets(5, bias=False)
    one, other = (module.linear_cross_entropy(*inputs, targets) for module in (kernels, stranger))
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

    monkeypatch.setattr(kernels, "is_mkl_slow", lambda: True)
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
    output = kernels.project(linear, x)
    assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert_close(torch.autograd.grad(output.sin().sum(), leaves), gradients, atol=1e-5, rtol=1e-5)
    assert chosen == ["_linear_pointwise"] * 3
    with torch.no_grad():
        assert_close(kernels.project(linear, x), expected, atol=1e-5, rtol=1e-5)
    assert chosen == ["_linear_pointwise"] * 4


@needs_onednn
def test_products_have_second_derivatives(chosen):
    linear, x = wide_linear(), torch.randn(4, 256).requires_grad_()

    def second(product):
        (gradient,) = torch.autograd.grad(product(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, linear.weight])

    assert_close(second(lambda x: kernels.project(linear, x)), second(linear), atol=1e-4, rtol=1e-4)


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
    assert torch.equal(kernels.project(linear, x), linear(x))
    assert "_linear_pointwise" not in chosen


@needs_onednn
def test_the_library_is_left_alone_where_it_matters(chosen):
    linear, x = wide_linear(), torch.randn(3, 256)
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.project(linear, x).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(kernels.project(linear, x), linear(x))
    assert kernels.project(linear, torch.empty(0, 256)).shape == (0, 256)
    tangent = torch.func.jvp(lambda x: kernels.project(linear, x), (x,), (x,))[1]
    assert_close(tangent, linear(x) - linear.bias, atol=1e-5, rtol=1e-5)
    assert_close(torch.func.vmap(lambda x: kernels.project(linear, x))(x[:, None]), linear(x)[:, None])
    assert "_linear_pointwise" not in chosen


@needs_onednn
def test_operations_are_counted_whichever_library_does_them(monkeypatch):
    monkeypatch.setattr(kernels, "is_mkl_slow", lambda: True)
    linear, x = wide_linear(), torch.randn(7, 256).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        kernels.project(linear, x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 7 * 256 * 256
    inputs, targets = head_and_targets(45, bias=False)
    targets[::3] = -100
    with FlopCounterMode(display=False) as counter:
        kernels.linear_cross_entropy(*inputs, targets).backward()
    assert counter.get_total_flops() == 3 * 2 * 30 * 16 * 50


# A cache with room


def new_states(length: int, seed: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, length, 4, generator=generator), torch.randn(batch, 3, length, 5, generator=generator)


def both_layers() -> tuple[kernels.RoomyLayer, DynamicLayer]:
    """Ours and transformers' after a prompt and a token."""
    layers = kernels.RoomyLayer(), DynamicLayer()
    for layer in layers:
        layer.update(*new_states(6, 0))
        layer.update(*new_states(1, 1))
    return layers


def assert_same(layers: tuple[DynamicLayer, DynamicLayer], rows: int = 2) -> None:
    """Now, and after more tokens than there was room for."""
    for step in range(80):
        one, other = (layer.update(*new_states(1, 10 + step, rows)) for layer in layers)
        assert all(map(torch.equal, one, other))
    assert layers[0].get_seq_length() == layers[1].get_seq_length()


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda layer: None, 2),
        (lambda layer: layer.crop(-2), 2),
        (lambda layer: layer.reorder_cache(torch.tensor([1, 1])), 2),
        (lambda layer: layer.batch_repeat_interleave(3), 6),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), 1),
        (lambda layer: layer.reset(), 2),
    ],
    ids=["none", "crop", "reorder", "repeat", "select", "reset"],
)
def test_a_layer_with_room_holds_what_a_dynamic_one_holds(change, rows):
    layers = both_layers()
    for layer in layers:
        change(layer)
    assert_same(layers, rows)


def test_what_is_there_is_not_copied_for_each_token():
    layer, _ = both_layers()
    places = set()
    for step in range(60):
        keys, values = layer.update(*new_states(1, step))
        places.add((keys.data_ptr(), values.data_ptr()))
    assert len(places) == 1


def test_a_copy_of_a_cache_goes_its_own_way():
    """As prompts are shared: filled once, copied for each continuation."""
    layer, expected = both_layers()
    copies = copy.deepcopy(layer), copy.deepcopy(expected)
    layer.update(*new_states(1, 99))
    assert_same(copies)


def test_gradients_flow_through_a_cache():
    layer = kernels.RoomyLayer()
    first, second = (tuple(x.requires_grad_() for x in new_states(2, seed)) for seed in (0, 1))
    layer.update(*first)
    keys, values = layer.update(*second)
    (keys.sum() + values.sum()).backward()
    assert all(bool((x.grad == 1).all()) for x in (*first, *second))


def test_a_cache_filled_in_inference_mode_is_continued_outside_of_it():
    with torch.inference_mode():
        layers = both_layers()
    with torch.no_grad():
        assert_same(layers)


def test_only_new_dynamic_caches_are_given_room():
    filled = DynamicCache()
    filled.update(*new_states(2, 0), 0)
    kernels.with_room(filled)
    assert type(filled.layers[0]) is DynamicLayer
    new = DynamicCache()
    kernels.with_room(new)
    new.update(*new_states(2, 0), 0)
    assert type(new.layers[0]) is kernels.RoomyLayer
    offloaded = DynamicCache(offloading=True) if torch.accelerator.is_available() else None
    assert offloaded is None or kernels.with_room(offloaded).layer_class_to_replicate is DynamicLayer


# Root mean square norm


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 16)])
def test_the_norm_on_a_cpu_has_the_gradients_of_torchs(shape):
    torch.manual_seed(0)
    norm, x = kernels.RMSNorm(16, eps=0.1).double(), torch.randn(*shape, dtype=torch.float64).requires_grad_()
    nn.init.normal_(norm.weight)
    leaves = [x, norm.weight]

    def derivatives(function):
        output = function()
        first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        return output, first, torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

    expected = derivatives(lambda: F.rms_norm(x, (16,), norm.weight, 0.1))
    assert_close(derivatives(lambda: norm(x)), expected, atol=1e-10, rtol=1e-10)
    assert "OnCPU" in type(norm(x).grad_fn).__name__
    with torch.no_grad():
        assert_close(norm(x), expected[0].detach(), atol=1e-10, rtol=0)
    assert_close(torch.func.vmap(norm)(x), expected[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_the_norm_of_what_is_frozen_has_both_derivatives(frozen):
    """As under adapters, which leave norms as they are."""
    norm, x = kernels.RMSNorm(16, eps=0.1).double(), torch.randn(5, 16, dtype=torch.float64).requires_grad_()
    {"x": x, "weight": norm.weight}[frozen].requires_grad_(False)
    leaf = norm.weight if frozen == "x" else x

    def derivatives(function):
        (first,) = torch.autograd.grad(function().sin().sum(), leaf)
        (again,) = torch.autograd.grad(function().sin().sum(), leaf, create_graph=True)
        return first, again, torch.autograd.grad(again.square().sum(), leaf)[0]

    expected = derivatives(lambda: F.rms_norm(x, (16,), norm.weight, 0.1))
    assert_close(derivatives(lambda: norm(x)), expected, atol=1e-10, rtol=1e-10)


def test_the_norm_of_half_precision_is_computed_in_that_of_its_weight():
    norm, x = kernels.RMSNorm(16, eps=1e-6), torch.randn(5, 16).bfloat16().requires_grad_()
    output = norm(x)
    assert_close(output, F.rms_norm(x.float(), (16,), norm.weight, 1e-6))
    with torch.no_grad():
        assert_close(norm(x), output)
    half = kernels.RMSNorm(16, eps=1e-6).bfloat16()
    assert half(x).dtype == torch.bfloat16 and half(x.float()).dtype == torch.float32
    output.sin().sum().backward()
    other = x.detach().float().requires_grad_()
    F.rms_norm(other, (16,), norm.weight, 1e-6).sin().sum().backward()
    assert_close(x.grad.float(), other.grad, atol=1e-2, rtol=1e-2)
    assert norm(x[:0]).shape == (0, 16)
