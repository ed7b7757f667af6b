"""Products of few rows, while a model decodes, are those of torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import CompileConfig

from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer import generation_scratch as generation

from . import tiny
from .test_compilation import Graphs


def share_out(monkeypatch, min_entries=0):
    """Whatever the processor."""
    monkeypatch.setattr(generation, "sharing", lambda: (range(1, 65), min_entries))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "outputs, threads, share, parts",
    [
        (48, 4, 256, 4),
        (48, 4, 64, 12),
        (50, 4, 256, 4),
        (50, 2, 128, 2),
        (47, 4, 16, 44),
        (3, 4, 16, 0),
        (47, 1, 16, 0),
    ],
)
def test_products_of_few_rows_are_those_of_linear(outputs, threads, share, parts, bias, monkeypatch):
    """However many cores there are, and whether or not they can share the outputs evenly."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    share_out(monkeypatch)
    monkeypatch.setattr(generation, "SHARE_ENTRIES", share)
    linear, used, multiply = nn.Linear(16, outputs, bias=bias), [], generation.multiply_few_rows
    monkeypatch.setattr(generation, "multiply_few_rows", lambda *given: used.append(len(given[2])) or multiply(*given))
    for shape in ((1, 1, 16), (5, 1, 16), (2, 3, 16), (64, 1, 16), (2, 0, 16), (16,), (3, 16), (65, 1, 16)):
        states = torch.randn(*shape)
        with torch.no_grad(), generation.few_row_products(linear):
            output = linear(states)
            assert output.is_contiguous()
        assert_close(output, linear(states), atol=1e-6, rtol=1e-5)
    assert used == [parts] * 8 * (parts > 0)
    with torch.no_grad(), generation.few_row_products(linear), pytest.raises(RuntimeError):
        linear(torch.randn(1, 2, 8))  # two rows are not taken for one
    assert "forward" not in vars(linear)


@pytest.mark.parametrize(
    "case",
    ["plain", "gradients", "many rows", "small", "one core", "double", "autocast", "compiled", "put in its place"],
)
def test_where_a_product_of_few_rows_is_shared(case, monkeypatch):
    """Not where gradients, compilers or other types have their own way, nor where somebody has put a forward in
    place of that of `nn.Linear`, as accelerate does; it is still there afterwards."""
    shared = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if case == "one core" else 2)
    share_out(monkeypatch, 16 * 48 + (case == "small"))
    matmul = Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda *tensors: shared.append(1) or matmul(*tensors))
    linear, states = nn.Linear(16, 48), torch.randn(1, 65 if case == "many rows" else 1, 16)
    if case == "double":
        linear, states = linear.double(), states.double()
    if case == "put in its place":
        linear.forward = theirs = lambda states: 2 * nn.Linear.forward(linear, states)
    with torch.set_grad_enabled(case == "gradients"), torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        expected = linear(states)
        with generation.few_row_products(linear):
            called = torch.compile(linear, fullgraph=True, backend="eager") if case == "compiled" else linear
            output = called(states)
    assert_close(output, expected)
    assert output.requires_grad == (case == "gradients")
    assert shared == ([1] if case == "plain" else [])
    assert vars(linear).get("forward") is (theirs if case == "put in its place" else None)


@pytest.mark.parametrize(
    "maker, width, shared",
    [
        (None, 256, {1, 3, 4, 12, 13, 64}),
        ("AMD EPYC", 255, set()),
        ("AMD EPYC", 256, {1, 3, 4, 12, 13, 64}),
        ("Intel Xeon", 1023, set()),
        ("Intel Xeon", 1024, {4, 12}),
        ("Intel Xeon without MKL", 256, {1, 3, 4, 12, 13, 64}),
    ],
)
def test_what_is_shared_where(maker, width, shared, monkeypatch):
    """On Intel's processors MKL is faster on its own but for some rows by large matrices."""
    used, multiply = set(), Tensor.__matmul__
    if maker is None:  # as of an older torch
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": maker}, raising=False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: "without" not in (maker or ""))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: used.add(a.shape[-2]) or multiply(a, b))
    linear = nn.Linear(width, 1024, bias=False)
    for rows in (1, 3, 4, 12, 13, 64, 65):
        states = torch.randn(rows, 1, width)
        with torch.no_grad(), generation.few_row_products(linear):
            assert_close(linear(states), F.linear(states, linear.weight), atol=1e-5, rtol=1e-5)
    assert used == shared


def test_products_are_shared_while_a_model_decodes(monkeypatch):
    """Within `generate`, also of another thread at the same time, and when it fails; not before and after."""
    torch.manual_seed(0)
    model, counted, share = tiny.model(ScratchDecoderForCausalLM).eval(), [], generation.multiply_few_rows
    prompt, options = torch.tensor([[3, 4, 5]]), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    plain = model.generate(prompt, **options)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    share_out(monkeypatch)
    monkeypatch.setattr(generation, "multiply_few_rows", lambda *given: counted.append(1) or share(*given))
    with generation.few_row_products(model):  # as of another thread
        assert torch.equal(model.generate(prompt, **options), plain)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(counted) == 4 * len(linears)
    heard = []
    linears[0].register_forward_hook(lambda *_: heard.append(1))
    assert torch.equal(model.generate(prompt, **options), plain)
    assert len(counted) == 8 * len(linears)
    assert len(heard) == 4
    with pytest.raises(ValueError):
        model.generate(prompt, max_new_tokens=-1)
    with torch.no_grad():
        model(prompt)
    assert len(counted) == 8 * len(linears)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("how", ["forward", "call", "generate"])
def test_a_compiled_model_is_compiled_once(how, monkeypatch):
    """What is put on its layers for a while would be a reason to compile them again, at every call."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    share_out(monkeypatch)
    model, graphs = tiny.model(ScratchDecoderForCausalLM, num_hidden_layers=1).eval(), Graphs()
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    if how == "forward":
        model.forward = torch.compile(model.forward, backend=graphs, dynamic=False)
    elif how == "call":
        model.compile(backend=graphs, dynamic=False)
    else:
        options["compile_config"] = CompileConfig(backend=graphs, dynamic=False)
        options["compile_config"]._compile_all_devices = True
    counts = []
    for _ in range(3):
        model.generate(torch.tensor([[3, 4, 5]]), **options)
        counts.append(graphs.count)
    assert 0 < counts[0] == counts[1] == counts[2]
