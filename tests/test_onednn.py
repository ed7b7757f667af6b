"""Products by oneDNN are those of torch."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_scratch_transformer import onednn
from tests import tiny

from .test_ops_scratch import tangents

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build has no oneDNN")


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a processor that MKL is slow on; tells which operations multiplied."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.__name__.split(".")[0] in ("_linear_pointwise", "mm", "addmm", "linear"):
                seen.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(onednn, "is_mkl_slow", lambda: True)
    with Watch():
        yield seen


def wide_linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 256, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 256), (1, 1, 256)])
def test_a_product_by_onednn_is_the_same(shape, bias, multiplied):
    linear, x = wide_linear(bias), torch.randn(*shape).requires_grad_()
    expected = linear(x)
    leaves = [x, *linear.parameters()]
    gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    multiplied.clear()
    with onednn.onednn_products():
        output = linear(x)
        assert_close(output, expected, atol=1e-5, rtol=1e-5)
        assert_close(torch.autograd.grad(output.sin().sum(), leaves), gradients, atol=1e-5, rtol=1e-5)
        assert multiplied == ["_linear_pointwise"] * 3
        with torch.no_grad():
            assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)
        assert multiplied == ["_linear_pointwise"] * 4
    multiplied.clear()
    linear(x)
    assert "_linear_pointwise" not in multiplied


def test_products_have_second_derivatives(multiplied):
    linear, x = wide_linear(), torch.randn(4, 256).requires_grad_()

    def second():
        (gradient,) = torch.autograd.grad(linear(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, linear.weight])

    expected = second()
    with onednn.onednn_products():
        assert_close(second(), expected, atol=1e-4, rtol=1e-4)


def test_what_listens_to_a_layer_goes_on_listening(multiplied):
    linear, heard = wide_linear(), []
    linear.register_forward_hook(lambda *_: heard.append("forward"))
    linear.register_full_backward_hook(lambda *_: heard.append("backward"))
    with onednn.onednn_products():
        linear(torch.randn(3, 256).requires_grad_()).sum().backward()
    assert heard == ["forward", "backward"] and "_linear_pointwise" in multiplied


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[:64, :64].clone()], ids=["double", "small"])
def test_other_products_are_left_to_torch(change, multiplied):
    weight = change(wide_linear().weight.detach())
    x = torch.randn(3, weight.shape[1], dtype=weight.dtype)
    expected = F.linear(x, weight)
    with onednn.onednn_products():
        assert torch.equal(F.linear(x, weight), expected)
    assert "_linear_pointwise" not in multiplied


def test_torch_multiplies_where_it_matters(multiplied):
    linear, x = wide_linear(), torch.randn(3, 256)
    expected = linear(x)
    with onednn.onednn_products():
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        with torch.backends.mkldnn.flags(enabled=False):
            assert torch.equal(linear(x), expected)
        assert linear(torch.empty(0, 256)).shape == (0, 256)
        assert linear(x[0]).shape == (256,)
        for tangent in tangents(linear, [x], [x]):
            assert_close(tangent, expected - linear.bias, atol=1e-5, rtol=1e-5)
        assert_close(torch.func.vmap(linear)(x[:, None]), expected[:, None])
    assert "_linear_pointwise" not in multiplied


def test_a_model_learns_the_same(multiplied):
    """Layers, the loss in chunks and checkpointed layers."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 300}
    model = tiny.model(tiny.LANGUAGE_MODELS[1], **sizes).train()
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)

    def gradients(**options):
        trained = copy.deepcopy(model)
        if options:
            trained.gradient_checkpointing_enable(**options)
        trained(**inputs, loss_only=True).loss.backward()
        return [parameter.grad for parameter in trained.parameters()]

    expected = gradients()
    multiplied.clear()
    with onednn.onednn_products():
        assert_close(gradients(), expected, atol=1e-5, rtol=1e-4)
        assert multiplied.count("_linear_pointwise") > 20
        checkpointed = gradients(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close(checkpointed, expected, atol=1e-5, rtol=1e-4)


def test_operations_are_counted(monkeypatch):
    monkeypatch.setattr(onednn, "is_mkl_slow", lambda: True)
    linear, x = wide_linear(), torch.randn(7, 256).requires_grad_()
    with onednn.onednn_products(), FlopCounterMode(display=False) as counter:
        linear(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 7 * 256 * 256


def test_elsewhere_nothing_changes(monkeypatch):
    monkeypatch.setattr(onednn, "is_mkl_slow", lambda: False)
    before = F.linear
    with onednn.onednn_products():
        assert F.linear is before


def test_a_compiler_does_not_look_into_the_probe_of_the_processor():
    """It would warn of the cache, and of a file being read."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo")
        compiled = torch.compile(lambda x: -x if onednn.is_mkl_slow() else x, fullgraph=True, backend="eager")
        expected = -torch.ones(2) if onednn.is_mkl_slow() else torch.ones(2)
        assert torch.equal(compiled(torch.ones(2)), expected)
