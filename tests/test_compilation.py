"""The same numbers whichever way a model is run: attention backend, compiled graph, exported program, checkpointed."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache, masking_utils

from hf_scratch_transformer import (
    ScratchDecoderForCausalLM,
    ScratchDecoderModel,
    ScratchEncoderForMaskedLM,
    ScratchEncoderModel,
    ScratchSeq2SeqForConditionalGeneration,
)
from hf_scratch_transformer.configuration_scratch import POSITIONS
from hf_scratch_transformer.layers_scratch import ScratchBlock
from tests import tiny

# flex attention and inductor translate to C++.
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
SHAPES: dict[str, dict[str, Any]] = {
    "rotary, grouped": {},
    "d_v apart, query-key norm": {"value_head_dim": 6, "use_qk_norm": True, "num_key_value_heads": 4},
    "as the paper": {
        "position_embedding_type": "sinusoidal",
        "norm_position": "post",
        "norm_type": "layer_norm",
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "relu",
        "scale_embedding": True,
    },
    "learned, gated": {"position_embedding_type": "learned", "hidden_act": "swiglu"},
}


def one_stack_first(models: Iterable[type[PreTrainedModel]]) -> list[Any]:
    """A translator is of two such stacks, and is compiled for as long as both: that is left to `make test-slow`."""
    return [pytest.param(each, marks=[pytest.mark.slow] * (tiny.family(each) == "seq2seq")) for each in models]


# Heads that classify and answer are a layer behind what the others show.
MODELS = [
    pytest.param(model_class, "right", marks=[pytest.mark.slow] * (model_class not in tiny.LANGUAGE_MODELS))
    for model_class in tiny.HEADS
]
BACKBONES = one_stack_first(tiny.BACKBONES)
LANGUAGE_MODELS = one_stack_first(tiny.LANGUAGE_MODELS)


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


class Graphs:
    """A compiler backend that runs what it is given as it is, and counts how many graphs that was."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Callable:
        self.count += 1
        return graph.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> "Graphs":
        return self  # `generate` works on a copy of its settings


def shallow(model_class: type[PreTrainedModel], **overrides: Any) -> PreTrainedModel:
    """One block a stack: a graph does not come out otherwise for more of them, only later."""
    depths = {"num_hidden_layers": 1} if tiny.family(model_class) != "seq2seq" else {"decoder_layers": 1}
    return tiny.model(model_class, **depths | overrides)


def model_inputs(
    model: PreTrainedModel, batch: int = 3, length: int = 7, padding: str | None = "right", seed: int = 0
) -> dict[str, Tensor]:
    """As `tiny.inputs`, with a target, two tokens shorter and padded too, for an encoder-decoder."""
    inputs = tiny.inputs(model, batch, length, padding, seed)
    if model.config.is_encoder_decoder:
        target = tiny.inputs(model, batch, length - 2, padding, seed + 100)
        inputs |= {f"decoder_{name}": value for name, value in target.items()}
    return inputs


def read(model: PreTrainedModel, inputs: dict[str, Tensor], values: Tensor) -> Tensor:
    """Those of `values` (B, T, ...) that stand at non-padding tokens; what stands at padding means nothing."""
    mask = inputs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    return values if mask is None else values[mask == 1]


def packed(model: PreTrainedModel, lengths: tuple[int, ...] = (4, 6, 3)) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Documents in one row, told apart by their positions; and the documents."""
    documents = [tiny.tokens(model.config.vocab_size, 1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": torch.cat(documents, dim=1), "position_ids": positions}, documents


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Attention backends


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("overrides", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("model_class", tiny.BACKBONES, ids=tiny.family)
def test_eager_equals_sdpa(model_class: type[PreTrainedModel], overrides: dict[str, Any], padding: str | None) -> None:
    results = {}
    for backend in ("eager", "sdpa"):
        model = tiny.model(model_class, attn_implementation=backend, **overrides)
        assert model.config._attn_implementation == backend
        inputs = model_inputs(model, padding=padding)
        output = model(**inputs).last_hidden_state
        assert output.isfinite().all()
        states = read(model, inputs, output)
        # Squares, as sums of normalised values have next to no gradient.
        results[backend] = states, gradients(model, states.square().mean())
    torch.testing.assert_close(results["sdpa"], results["eager"], atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("padding", ["left", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_class", BACKBONES, ids=tiny.family)
@torch.no_grad()  # flex has no backward pass on a CPU
def test_flex_equals_eager(model_class: type[PreTrainedModel], padding: str | None) -> None:
    model = shallow(model_class, attn_implementation="eager")
    inputs = model_inputs(model, padding=padding)
    eager = read(model, inputs, model(**inputs).last_hidden_state)
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(read(model, inputs, model(**inputs).last_hidden_state), eager, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel], ids=tiny.family)
@torch.no_grad()
def test_packed_documents_equal_each_alone(model_class: type[PreTrainedModel], positions: str, backend: str) -> None:
    model = tiny.model(model_class, position_embedding_type=positions, attn_implementation=backend)
    # Together longer than `max_position_embeddings`, which limits each of them.
    inputs, documents = packed(model, lengths=(14, 16, 13))
    alone = torch.cat([model(document).last_hidden_state for document in documents], dim=1)
    torch.testing.assert_close(model(**inputs).last_hidden_state, alone, atol=1e-5, rtol=1e-5)


# Compiled graphs


@pytest.mark.parametrize(
    ("model_class", "padding"),
    [*MODELS, *(pytest.param(backbone, None, marks=pytest.mark.slow) for backbone in tiny.BACKBONES)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@torch.no_grad()
def test_one_graph_serves_every_batch_of_a_shape(model_class: type[PreTrainedModel], padding: str | None) -> None:
    model = shallow(model_class)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for seed in range(3):
        inputs = model_inputs(model, padding=padding, seed=seed)
        # Other masks too, not only other words.
        inputs |= {name: mask.roll(seed, dims=0) for name, mask in inputs.items() if name.endswith("mask")}
        torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0])
    assert graphs.count == 1


@pytest.mark.parametrize("model_class", BACKBONES, ids=tiny.family)
@torch.no_grad()
def test_whole_texts_leave_the_order_of_words_to_the_kernel(
    model_class: type[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask in the graph would be the same and several times as slow."""
    # As older versions do, which take every compiled graph for one to export.
    monkeypatch.setattr(masking_utils, "is_torchdynamo_exporting", lambda: True, raising=False)
    model, masks = shallow(model_class), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        attention = torch.nn.functional.scaled_dot_product_attention
        masks.extend(
            (node.kwargs.get("attn_mask"), node.kwargs.get("is_causal", False))
            for node in graph.graph.nodes
            if node.op == "call_function" and node.target is attention
        )
        return graph.forward

    torch.compile(model, fullgraph=True, backend=backend)(**model_inputs(model, padding=None))
    causal = {"encoder": [False], "decoder": [True], "seq2seq": [False, True, False]}[tiny.family(model_class)]
    assert masks == [(None, each) for each in causal]


@pytest.mark.parametrize("model_class", LANGUAGE_MODELS, ids=tiny.family)
@torch.no_grad()
def test_two_graphs_serve_every_length(model_class: type[PreTrainedModel]) -> None:
    """One for the first length, one for any other."""
    model = shallow(model_class)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for length in (7, 9, 12, 8):
        inputs = model_inputs(model, length=length)
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
    assert graphs.count == 2


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize(
    ("model_class", "overrides"),
    [
        *((model_class, {}) for model_class in tiny.LANGUAGE_MODELS),
        (ScratchEncoderForMaskedLM, {"lm_head_transform": True}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_compiled_training_step_has_the_same_loss_and_gradients(
    model_class: type[PreTrainedModel], overrides: dict[str, Any], loss_only: bool
) -> None:
    """One graph also for the lean path, although how many targets there are differs from batch to batch."""
    model = shallow(model_class, **overrides).train()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for seed in range(3):
        inputs = tiny.inputs(model, seed=seed)
        inputs |= tiny.labels(model, inputs, seed=seed)
        inputs["labels"][0, 1 : seed + 2] = -100
        losses = [run(**inputs, loss_only=loss_only).loss for run in (compiled, model)]
        torch.testing.assert_close(*losses)
        got, expected = (gradients(model, loss) for loss in losses)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert graphs.count == 1


@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel], ids=tiny.family)
@torch.no_grad()
def test_packed_documents_stay_apart_in_a_compiled_model(model_class: type[PreTrainedModel]) -> None:
    model = shallow(model_class)
    inputs, documents = packed(model)
    alone = torch.cat([model(document).last_hidden_state for document in documents], dim=1)
    compiled = torch.compile(model, fullgraph=True, backend=Graphs())
    torch.testing.assert_close(compiled(**inputs).last_hidden_state, alone, atol=1e-5, rtol=1e-5)
    if model_class is ScratchDecoderModel:  # also where they fill a cache
        cache = StaticCache(config=model.config, max_cache_len=20)
        cache.early_initialization(1, model.config.num_key_value_heads, model.config.head_dim, torch.float32, "cpu")
        got = compiled(**inputs, past_key_values=cache).last_hidden_state
        torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_class", BACKBONES, ids=tiny.family)
@torch.no_grad()
def test_extras_of_an_engine_do_not_break_the_graph(model_class: type[PreTrainedModel]) -> None:
    model = shallow(model_class)
    inputs = model_inputs(model)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    got = compiled(**inputs, block_table=torch.arange(4), engine_step=3)
    torch.testing.assert_close(got.last_hidden_state, model(**inputs).last_hidden_state)
    assert graphs.count == 1


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 does not trace a copy of a configuration")
@pytest.mark.parametrize("model_class", BACKBONES, ids=tiny.family)
@torch.no_grad()
def test_a_graph_can_show_its_inside(model_class: type[PreTrainedModel]) -> None:
    model = shallow(model_class)
    inputs = model_inputs(model)
    # transformers installs its recorders at the first call that asks for them, which no graph can hold.
    expected = model(**inputs, output_hidden_states=True, output_attentions=True)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    got = compiled(**inputs, output_hidden_states=True, output_attentions=True)
    names = [name for name in expected if name.endswith(("hidden_states", "attentions"))]
    assert len(names) == (5 if model.config.is_encoder_decoder else 2)
    for name in names:
        assert len(got[name]) == len(expected[name])
        torch.testing.assert_close(got[name], expected[name])
    assert graphs.count == 1


@pytest.mark.parametrize("model_class", BACKBONES, ids=tiny.family)
@torch.no_grad()
def test_mistakes_are_refused_in_a_compiled_model_too(model_class: type[PreTrainedModel]) -> None:
    model = shallow(model_class, position_embedding_type="learned")
    compiled = torch.compile(model, backend=Graphs())
    inputs = model_inputs(model)
    target = {name: value for name, value in inputs.items() if name.startswith("decoder_")}
    with pytest.raises(TypeError, match="did you mean 'attention_mask'"):
        compiled(inputs["input_ids"], atention_mask=inputs["attention_mask"], **target)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(3, 6\)"):
        compiled(inputs["input_ids"], inputs["attention_mask"][:, 1:], **target)
    with pytest.raises(ValueError, match="max_position_embeddings=32"):
        compiled(tiny.tokens(40, 3, 33), **target)
    torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize(
    "model_class", [ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration], ids=tiny.family
)
def test_generation_with_a_static_cache_compiles_one_step(model_class: type[PreTrainedModel]) -> None:
    options = {"initializer_range": 0.7, "tie_word_embeddings": False, "eos_token_id": None}
    assert_compiled_decoding_is_the_same(shallow(model_class, **options))


def assert_compiled_decoding_is_the_same(model: PreTrainedModel) -> None:
    source = tiny.inputs(model, padding="left")
    expected = model.generate(**source, max_new_tokens=8, do_sample=False)
    graphs = Graphs()
    compiling = CompileConfig(fullgraph=True, backend=graphs)
    compiling._compile_all_devices = True  # else not on a CPU
    got = model.generate(
        **source, max_new_tokens=8, do_sample=False, cache_implementation="static", compile_config=compiling
    )
    assert torch.equal(got, expected)
    assert graphs.count == 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_inductor_trains_with_the_same_gradients(model_class: type[PreTrainedModel]) -> None:
    for loss_only, shape in ((False, "as the paper"), (True, "d_v apart, query-key norm")):
        torch._dynamo.reset()
        model = shallow(model_class, **SHAPES[shape]).train()
        inputs = tiny.inputs(model)
        inputs |= tiny.labels(model, inputs)
        compiled = torch.compile(model, fullgraph=True)
        got = gradients(model, compiled(**inputs, loss_only=loss_only).loss)
        expected = gradients(model, model(**inputs, loss_only=loss_only).loss)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


# Exported programs


def no_cache(model: PreTrainedModel) -> dict[str, bool]:
    return {} if isinstance(model, ScratchEncoderModel) else {"use_cache": False}


@pytest.mark.parametrize("model_class", tiny.BACKBONES, ids=tiny.family)
@torch.no_grad()
def test_export_for_one_shape(model_class: type[PreTrainedModel]) -> None:
    model = shallow(model_class)
    inputs = model_inputs(model) | no_cache(model)
    program = torch.export.export(model, (), inputs)
    other = model_inputs(model, seed=1) | no_cache(model)
    for batch in (inputs, other):
        torch.testing.assert_close(program.module()(**batch).last_hidden_state, model(**batch).last_hidden_state)


@pytest.mark.parametrize(
    ("model_class", "padding"),
    [
        *(each for each in MODELS if tiny.task(each.values[0]) != "MultipleChoice"),
        *(pytest.param(backbone, None, marks=pytest.mark.slow) for backbone in tiny.BACKBONES),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@torch.no_grad()
def test_export_for_any_batch_and_length(model_class: type[PreTrainedModel], padding: str | None) -> None:
    model = shallow(model_class)
    cache = no_cache(model) if model_class in tiny.BACKBONES or model.can_generate() else {}
    inputs = model_inputs(model, padding=padding)
    free = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in inputs} | dict.fromkeys(cache)
    program = torch.export.export(model, (), inputs | cache, dynamic_shapes=free)
    for batch, length in ((3, 7), (2, 12), (5, 4)):
        inputs = model_inputs(model, batch, length, padding) | cache
        torch.testing.assert_close(program.module()(**inputs)[0], model(**inputs)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel], ids=tiny.family)
@torch.no_grad()
def test_export_of_packed_documents(model_class: type[PreTrainedModel]) -> None:
    model = shallow(model_class)
    inputs, _ = packed(model)
    free = {name: {1: Dim.DYNAMIC} for name in inputs} | dict.fromkeys(no_cache(model))
    program = torch.export.export(model, (), inputs | no_cache(model), dynamic_shapes=free)
    for lengths in ((4, 6, 3), (2, 9), (3, 3, 3, 3)):
        inputs, documents = packed(model, lengths)
        alone = torch.cat([model(document).last_hidden_state for document in documents], dim=1)
        got = program.module()(**inputs, **no_cache(model)).last_hidden_state
        torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-5)


# Sizes at which a library is chosen, or a product split, by a look at the processor: no graph may follow that

WIDE = {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}


def wide_inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Any]:
    inputs = model_inputs(model, seed=seed)
    return inputs if tiny.family(type(model)) == "encoder" else inputs | {"use_cache": False}


@pytest.mark.parametrize("model_class", LANGUAGE_MODELS, ids=tiny.family)
@torch.no_grad()
def test_one_graph_of_a_wide_model(model_class: type[PreTrainedModel]) -> None:
    model = shallow(model_class, **WIDE)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for seed in range(2):
        inputs = wide_inputs(model, seed)
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
    assert graphs.count == 1


@pytest.mark.parametrize("loss_only", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("model_class", LANGUAGE_MODELS, ids=tiny.family)
def test_a_compiled_training_step_of_a_wide_model(model_class: type[PreTrainedModel], loss_only: bool) -> None:
    model = shallow(model_class, **WIDE).train()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    got, expected = (gradients(model, run(**inputs, loss_only=loss_only).loss) for run in (compiled, model))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert graphs.count == 1


@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("model_class", LANGUAGE_MODELS, ids=tiny.family)
@torch.no_grad()
def test_export_of_a_wide_model(model_class: type[PreTrainedModel], strict: bool) -> None:
    model = shallow(model_class, **WIDE)
    program = torch.export.export(model, (), wide_inputs(model), strict=strict).module()
    for seed in range(2):
        inputs = wide_inputs(model, seed)
        torch.testing.assert_close(program(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    "model_class", [ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration], ids=tiny.family
)
def test_generation_of_a_wide_model_with_a_static_cache_compiles_one_step(model_class: type[PreTrainedModel]) -> None:
    assert_compiled_decoding_is_the_same(shallow(model_class, **WIDE, tie_word_embeddings=False, eos_token_id=None))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_inductor_runs_a_wide_model(model_class: type[PreTrainedModel]) -> None:
    model = shallow(model_class, **WIDE)
    inputs = wide_inputs(model)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=1e-4)
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    got, expected = (gradients(model, run(**inputs, loss_only=True).loss) for run in (compiled, model))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
@torch.no_grad()
def test_a_library_compiled_ahead_of_a_wide_model(model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    model = shallow(model_class, **WIDE)
    program = torch.export.export(model, (), wide_inputs(model))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    library = torch._inductor.aoti_load_package(path)
    for seed in range(2):
        inputs = wide_inputs(model, seed)
        got = library(**inputs).logits
        torch.testing.assert_close(got, model(**inputs).logits, atol=1e-4, rtol=1e-4)


# Gradient checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_class", tiny.HEADS, ids=lambda model_class: model_class.__name__)
def test_checkpointed_gradients_are_the_same(model_class: type[PreTrainedModel], reentrant: bool) -> None:
    model = tiny.model(model_class, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1).train()
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    assert_checkpointing_changes_nothing(model, inputs, reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_of_packed_documents_are_the_same(reentrant: bool) -> None:
    for model_class in tiny.LANGUAGE_MODELS[:2]:
        model = tiny.model(model_class, dropout=0.1).train()
        inputs, _ = packed(model)
        assert_checkpointing_changes_nothing(model, inputs | {"labels": inputs["input_ids"]}, reentrant)


def assert_checkpointing_changes_nothing(model: PreTrainedModel, inputs: dict[str, Tensor], reentrant: bool) -> None:
    calls: list[None] = []
    blocks = [module for module in model.modules() if isinstance(module, ScratchBlock)]
    for block in blocks:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(None))

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        calls.clear()
        torch.manual_seed(0)
        loss = model(**inputs).loss
        return loss.detach(), gradients(model, loss)

    plain = step()
    assert len(calls) == len(blocks)
    assert set(plain[1]) == {name for name, _ in model.named_parameters()}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed = step()
    assert len(calls) == 2 * len(blocks), "no block ran a second time: nothing was checkpointed"
    torch.testing.assert_close(checkpointed, plain, atol=1e-7, rtol=1e-5)
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(step(), plain, atol=1e-7, rtol=1e-5)
    assert len(calls) == len(blocks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_frozen_encoder_can_be_checkpointed(reentrant: bool) -> None:
    """The encoder's output then needs no gradient, which the reentrant kind looks for among what it is given."""
    model = tiny.model(ScratchSeq2SeqForConditionalGeneration, share_encoder_decoder_embeddings=False).train()
    model.get_encoder().requires_grad_(False)
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    plain = gradients(model, model(**inputs).loss)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(model, model(**inputs).loss), plain, atol=1e-7, rtol=1e-5)
    assert plain and all(name.startswith(("model.decoder.", "lm_head.")) for name in plain)


def test_checkpointing_and_a_cache_asked_for_together() -> None:
    """Blocks that run twice would write to the cache twice: transformers turns it off while training."""
    model = tiny.model(ScratchDecoderForCausalLM).train()
    inputs = tiny.inputs(model)
    inputs |= {"labels": inputs["input_ids"]}
    plain = gradients(model, model(**inputs).loss)
    model.gradient_checkpointing_enable()
    output = model(**inputs, use_cache=True, past_key_values=DynamicCache(config=model.config))
    torch.testing.assert_close(gradients(model, output.loss), plain, atol=1e-7, rtol=1e-5)


# TorchScript, which the older ONNX exporter goes through


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("model_class", tiny.MODELS, ids=lambda model: model.__name__)
@torch.no_grad()
def test_a_trace_takes_its_shapes_from_the_input(model_class: type[PreTrainedModel]) -> None:
    model = tiny.model(model_class)

    def inputs(batch: int, length: int) -> list[Tensor]:
        ids = tiny.inputs(model, batch, length, padding=None)["input_ids"]
        return [ids, ids.flip(-1)] if model.config.is_encoder_decoder else [ids]

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
            others = {} if target is None else {"decoder_input_ids": target}
            return self.model(input_ids=ids, use_cache=False, return_dict=False, **others)[0]

    traced = torch.jit.trace(Positional(), inputs(3, 7), check_trace=False)
    for batch, length in ((2, 11), (5, 3)):
        expected = Positional()(*inputs(batch, length))
        torch.testing.assert_close(traced(*inputs(batch, length)), expected, atol=1e-5, rtol=1e-5)
