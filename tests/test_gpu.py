"""What only a GPU can show: kernels, bf16, compilers, memory. Without one the same tests run at a tiny size, through
what a CPU has in their place; `python -m benchmarks.gpu run --rehearse` does that."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from benchmarks.measures import memory_of
from hf_scratch_transformer import unpadding_scratch
from tests import tiny, tiny_runs
from tests.test_loop import Killed, kill_at

pytestmark = pytest.mark.gpu
LARGE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
}
# For flash attention the kernels have to be there: nothing may be downloaded for a test.
BACKENDS = {
    "sdpa": True,
    "flex_attention": True,
    "flash_attention_2": is_flash_attn_2_available(),
    "flash_attention_3": is_flash_attn_3_available(),
}


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield


def make(model_class: type[PreTrainedModel], device: torch.device, **overrides: Any) -> PreTrainedModel:
    """With heads as wide as kernels like them, on a GPU."""
    sizes = LARGE if device.type == "cuda" else {}
    return tiny.model(model_class, **sizes | overrides).to(device)


def batch(model: PreTrainedModel, padding: str | None = "right", seed: int = 0) -> dict[str, Tensor]:
    """Inputs and labels of a language model; much of it padding."""
    rows, length = (16, 96) if model.device.type == "cuda" else (6, 12)
    inputs = tiny.inputs(model, rows, length, padding=None, seed=seed)
    if padding is not None:
        lengths = torch.linspace(2, length, rows).long()
        mask = torch.arange(length) < lengths[:, None]
        mask = mask if padding == "right" else mask.flip(-1)
        inputs |= {"input_ids": inputs["input_ids"].masked_fill(~mask, 0), "attention_mask": mask.long()}
    inputs |= tiny.labels(model, inputs)
    return {name: value.to(model.device) for name, value in inputs.items()}


def gradients(model: PreTrainedModel, loss: Tensor) -> Tensor:
    """All in one vector."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def assert_alike(one: Tensor, other: Tensor, tolerance: float) -> None:
    """By their direction and length, since in half precision single entries are off."""
    assert torch.cosine_similarity(one, other, dim=0) > 1 - tolerance
    assert float(one.norm() / other.norm()) == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_backends_equal_the_formula_in_single_precision(
    model_class: type[PreTrainedModel], backend: str, padding: str | None, device: torch.device
) -> None:
    if not BACKENDS[backend]:
        pytest.skip(f"{backend} is not installed")
    if model_class is not tiny.LANGUAGE_MODELS[0] and padding == "left":
        pytest.skip("padding on the left is for generation, and has its place there")
    is_flash, reference = backend.startswith("flash"), make(model_class, device, attn_implementation="eager")
    inputs = batch(reference, padding)
    expected = reference(**inputs).loss
    model = make(model_class, device, attn_implementation=backend)
    # flex has no backward pass on a CPU, where it would be compiled for half a minute.
    on_cpu = device.type == "cpu"
    goes_back = not (on_cpu and backend == "flex_attention")
    with (
        torch.set_grad_enabled(goes_back),
        torch.compiler.set_stance("force_eager") if on_cpu else nullcontext(),
        torch.autocast(device.type, torch.bfloat16, enabled=is_flash),
    ):
        loss = model(**inputs).loss
    tolerance = 2e-2 if is_flash else 1e-4
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    if goes_back:
        assert_alike(gradients(model, loss), gradients(reference, expected), tolerance)


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_tokens_without_padding_have_the_same_loss(model_class: type[PreTrainedModel], device: torch.device) -> None:
    """In bf16 through FlashAttention's kernel for texts of any length."""
    model = make(model_class, device).train()
    inputs = batch(model)
    with (
        mock.patch.object(unpadding_scratch, "varlen_attn", side_effect=unpadding_scratch.varlen_attn) as kernel,
        torch.autocast(device.type, torch.bfloat16),
    ):
        loss = model(**inputs, loss_only=True).loss
    got = gradients(model, loss)
    assert kernel.called == (device.type == "cuda")
    model.set_attn_implementation("eager")
    expected = model(**inputs).loss
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    assert_alike(got, gradients(model, expected), 2e-2)


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_training_in_bf16_follows_single_precision(model_class: type[PreTrainedModel], device: torch.device) -> None:
    losses = {}
    for is_half in (False, True):
        model = make(model_class, device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        inputs, losses[is_half] = batch(model), []
        for _ in range(10):
            with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
                loss = model(**inputs, loss_only=True).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[is_half].append(loss.item())
    assert losses[True][-1] < 0.98 * losses[True][0]
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_compiled_training_has_one_graph_and_the_same_gradients(
    model_class: type[PreTrainedModel], device: torch.device
) -> None:
    model = make(model_class, device).train()
    counting = CompileCounterWithBackend("inductor" if device.type == "cuda" else "eager")
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    for seed in range(2):
        inputs = batch(model, seed=seed)
        with torch.autocast(device.type, torch.bfloat16):
            losses = [run(**inputs, loss_only=True).loss for run in (compiled, model)]
        got, expected = (gradients(model, loss) for loss in losses)
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=2e-2)
        assert_alike(got, expected, 2e-2)
    assert counting.frame_count == 1 and not counters["graph_break"]  # beside those of operations of their own


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS[1:], ids=tiny.family)
def test_compiled_decoding_writes_the_same_tokens(model_class: type[PreTrainedModel], device: torch.device) -> None:
    model = make(model_class, device, initializer_range=0.7, tie_word_embeddings=False, eos_token_id=None)
    source = {name: value for name, value in batch(model, padding="left").items() if name != "labels"}
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**source, **options)
    compiling = CompileConfig(fullgraph=True, backend="inductor" if device.type == "cuda" else "eager")
    compiling._compile_all_devices = True  # else not on a CPU
    counters.clear()
    got = model.generate(**source, **options, cache_implementation="static", compile_config=compiling)
    assert float((got == expected).float().mean()) > 0.99
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_the_loss_alone_takes_less_memory(model_class: type[PreTrainedModel], device: torch.device) -> None:
    model = make(model_class, device, vocab_size=131072).train()  # so many that a few of their rows are one turn
    inputs = batch(model)
    peaks = {}
    for loss_only in (False, True):
        options = {"loss_only": True} if loss_only else {}
        for _ in range(2):  # in the first, gradients are new
            peaks[loss_only], _ = memory_of(lambda options=options: model(**inputs, **options).loss.backward(), device)
    assert peaks[True] < 0.7 * peaks[False]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_goes_on_as_it_would_have(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the order in which a GPU may add: the state of its optimisers and of what it draws comes back to it."""
    optimisation = {"optimizer": optimizer, "precision": "bf16"}
    recipe = tiny_runs.write_recipe(tmp_path, optimisation=optimisation, data={"workers": 1})
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 6)
        tiny_runs.run(recipe, tmp_path / "killed")
    assert tiny_runs.run(recipe, tmp_path / "killed", "--resume") == 0
    assert tiny_runs.losses(tmp_path / "killed") == pytest.approx(tiny_runs.losses(tmp_path / "whole"), rel=1e-3)
