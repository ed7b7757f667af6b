"""What a model without data says of itself is what a real one does: bytes by the allocator's own records, products by
torch's own counter."""

import gc
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, GPT2Config, LlamaConfig, MarianConfig, PreTrainedModel

from hf_scratch_transformer.insight import trace
from tests import tiny

# Large enough that what is kept outweighs what is not told of a model, such as random states.
SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
OLD = {"position_embedding_type": "learned", "norm_type": "layer_norm", "norm_position": "post"}


@pytest.fixture(scope="module", autouse=True)
def quick_collection():
    gc.freeze()
    yield
    gc.unfreeze()


def allocations(run: Any) -> tuple[int, int]:
    """Bytes alive when `run` calls what it is given, and the most ever alive, by the allocator of the CPU."""

    def mark() -> None:
        with record_function("MARK"):
            pass

    gc.collect()
    gc.disable()  # what was freed in between would count against what is made
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run(mark)
    gc.enable()
    # The plain records: `recorded.events()` gives each to the operation that it happened in.
    events = recorded.profiler.kineto_results.events()
    (end,) = (event.start_ns() for event in events if event.name() == "MARK")
    live = peak = kept = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
        kept = live if event.start_ns() < end else kept
    return kept, peak


def pair(config: Any, attention: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model without data, and the same with data."""
    model = trace.build(config, attention=attention)
    return model, type(model)._from_config(config, attn_implementation=attention)


def real(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.randint(3, 40, tensor.shape) for name, tensor in inputs.items()}


CASES = [
    ("decoder", {"hidden_act": "swiglu"}, (4, 64, None), "sdpa", False, False),
    ("decoder", {"hidden_act": "swiglu"} | DROPOUT, (4, 48, None), "eager", False, True),
    ("decoder", OLD | DROPOUT, (2, 64, None), "sdpa", True, False),
    ("encoder", OLD, (8, 32, None), "sdpa", False, True),
    ("encoder", OLD | DROPOUT, (3, 50, None), "eager", True, False),
    ("encoder", {"value_head_dim": 8}, (4, 64, None), "sdpa", False, False),
    ("seq2seq", OLD, (4, 30, 60), "sdpa", False, False),
    ("seq2seq", OLD | DROPOUT, (4, 60, 30), "eager", False, True),
    ("seq2seq", {"num_key_value_heads": 4}, (4, 40, 60), "sdpa", True, True),
]


@pytest.mark.parametrize(("family", "fields", "shape", "attention", "checkpointing", "loss_only"), CASES)
def test_a_training_step_takes_the_bytes_that_the_trace_says(
    family, fields, shape, attention, checkpointing, loss_only
):
    model, with_data = pair(tiny.config(family, **SIZES | fields), attention)
    told = trace.forward_backward(model, trace.make_inputs(model, *shape), checkpointing, loss_only)
    inputs = real(trace.make_inputs(model, *shape))
    targets = inputs.get("decoder_input_ids", inputs["input_ids"])
    if loss_only and family == "encoder":
        targets = targets.masked_fill(torch.arange(targets.numel()).view_as(targets) >= 0.15 * targets.numel(), -100)
    inputs |= {"labels": targets} | ({"loss_only": True} if loss_only else {})
    with_data.train()
    if checkpointing:
        with_data.gradient_checkpointing_enable()

    def step(mark: Any) -> None:
        loss = with_data(**inputs, **({} if family == "encoder" else {"use_cache": False})).loss
        mark()
        loss.backward()

    step(lambda: None)  # what is made once and kept
    with_data.zero_grad(set_to_none=True)
    kept, peak = allocations(step)
    assert kept > 300_000
    assert told.kept == pytest.approx(kept, rel=0.05)
    assert told.peak == pytest.approx(peak, rel=0.01)


NATIVE = [
    BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=300),
    GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300, bos_token_id=0, eos_token_id=0),
    LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=300,
    ),
    MarianConfig(
        d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=300, pad_token_id=0, decoder_start_token_id=0,
        eos_token_id=1, forced_eos_token_id=1,
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", NATIVE, ids=lambda config: config.model_type)
def test_native_models_are_traced_as_well(config):
    model, with_data = pair(config, "eager")
    told = trace.forward_backward(model, trace.make_inputs(model, 4, 40))
    inputs = real(trace.make_inputs(model, 4, 40))
    inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"])
    with_data.train()
    with_data.config.use_cache = False

    def step(mark: Any) -> None:
        loss = with_data(**inputs).loss
        mark()
        loss.backward()

    step(lambda: None)
    with_data.zero_grad(set_to_none=True)
    kept, peak = allocations(step)
    assert (told.kept, told.peak) == (pytest.approx(kept, rel=0.05), pytest.approx(peak, rel=0.05))
    with FlopCounterMode(display=False) as counter:
        step(lambda: None)
    assert told.flops == counter.get_total_flops()


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_prompt_takes_the_bytes_that_the_trace_says(family, attention):
    model, with_data = pair(tiny.config(family, **SIZES), attention)
    told = trace.prefill(model, trace.make_inputs(model, 4, 60, 50 if family == "seq2seq" else None))
    inputs = real(trace.make_inputs(model, 4, 60, 50 if family == "seq2seq" else None))
    options = {"decoder": {"use_cache": True, "logits_to_keep": 1}, "seq2seq": {"use_cache": True}}.get(family, {})
    with_data.eval()

    @torch.no_grad()
    def step(mark: Any) -> Any:
        outputs = with_data(**inputs, **options)
        cache = outputs.get("past_key_values")
        del outputs
        mark()
        return cache

    step(lambda: None)
    kept, peak = allocations(step)
    assert told.peak == pytest.approx(peak, rel=0.01)
    if family == "encoder":
        assert told.kept == 0
    else:
        # Two numbers of four bytes for each token, layer and width of the key-value heads.
        lengths = {"decoder": 2 * [60], "seq2seq": 2 * [60] + 2 * [50]}[family]
        assert told.kept == 2 * 4 * 4 * 2 * 16 * sum(lengths)
        assert told.kept == pytest.approx(kept, rel=0.01)


def test_shapes_are_those_of_the_real_model():
    model, with_data = pair(tiny.config("seq2seq", **SIZES), "eager")
    inputs = trace.make_inputs(model, 3, 20, 30)
    seen = {}
    for path, module in with_data.named_modules():
        module.register_forward_hook(lambda module, args, out, path=path: seen.setdefault(path, out))
    with_data(**real(inputs))
    calls = {call.path: call for call in trace.forward_backward(model, inputs).calls}
    assert calls.keys() == seen.keys()
    for path, out in seen.items():
        if isinstance(out, torch.Tensor):
            assert calls[path].outputs == [tuple(out.shape)], path
    for stack, attention, lengths in (
        ("encoder", "self_attn", (30, 30)),
        ("decoder", "self_attn", (20, 20)),
        ("decoder", "cross_attn", (20, 30)),
    ):
        path = f"model.{stack}.layers.0.{attention}"
        assert calls[path].scores == tuple(seen[path][1].shape) == (3, 4, *lengths)
    assert calls["model.decoder.layers.0.cross_attn"].inputs["encoder_hidden_states"] == (3, 30, 64)
    assert calls["lm_head"].weights == {"weight": (500, 64)}


def test_modules_are_left_as_they_were():
    """A hook on all modules, or what torch still holds of one, would slow everything that the process does later."""
    model, _ = pair(tiny.config("decoder", **SIZES), "eager")
    trace.forward_backward(model, trace.make_inputs(model, 3, 20))
    assert not torch.nn.modules.module._has_any_global_hook()


@pytest.mark.parametrize("model_class", tiny.MODELS, ids=lambda model_class: model_class.__name__)
def test_every_head_is_found_and_traced(model_class):
    config = tiny.config(tiny.family(model_class), architectures=[model_class.__name__])
    model = trace.build(config, torch.bfloat16, "eager")
    assert type(model) is model_class and model.dtype == torch.bfloat16 and model.device.type == "meta"
    run = trace.forward_backward(model, trace.make_inputs(model, 2, 6))
    assert 2.5 < run.flops / run.forward_flops <= 3  # a product of matrices has two gradients
    assert run.peak > run.kept > 0
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(ValueError, match="BertForMaskedLM has no loss_only"):
        model = trace.build(NATIVE[0])
        trace.forward_backward(model, trace.make_inputs(model, 1, 4), loss_only=True)
    from transformers import MambaConfig, ViTConfig

    with pytest.raises(ValueError, match="ViT.* takes pixel_values"):
        trace.build(ViTConfig(num_hidden_layers=1))
    model = trace.build(MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=20))
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="does not support gradient checkpointing"):
        trace.forward_backward(model, trace.make_inputs(model, 1, 4), checkpointing=True)


def test_a_model_of_too_many_layers_is_refused_at_once():
    with pytest.raises(ValueError, match="gpt2 with n_layer=50256: more than 10,000 layers are not built"):
        trace.build(GPT2Config(n_layer=50256))
