"""Conversion against transformers' own models: what they compute, what comes back, what is refused."""

import copy
import importlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import gguf
import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import hf_scratch_transformer as scratch
from hf_scratch_transformer import cli, hub
from hf_scratch_transformer.configuration_scratch import POSITIONS
from hf_scratch_transformer.conversion import convert_folder, convert_from, convert_to, folders, weights
from hf_scratch_transformer.conversion.comparison import PROMPT, by_model, follow, tokens_for
from hf_scratch_transformer.conversion.engines import export
from hf_scratch_transformer.conversion.families import FAMILIES
from hf_scratch_transformer.conversion.folders import _counterparts, our_task
from hf_scratch_transformer.conversion.gguf import FORMS
from hf_scratch_transformer.hub import RunRecords, write_model_card
from hf_scratch_transformer.tokenization import join_tokenizers, train_tokenizer

from . import tiny
from .hub_server import TOKEN, HubServer

# Three sizes of each family: none a power of two, heads grouped or not, biases or not, tied or not.
ENCODERS = [
    {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 20},
    {"hidden_size": 35, "num_hidden_layers": 3, "num_attention_heads": 5, "max_position_embeddings": 13},
    {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 77},
]
BERTS = [
    ENCODERS[0] | {"intermediate_size": 37, "type_vocab_size": 2},
    ENCODERS[1] | {"intermediate_size": 20, "type_vocab_size": 3, "tie_word_embeddings": False},
    ENCODERS[2] | {"intermediate_size": 50, "type_vocab_size": 1, "layer_norm_eps": 1e-3},
]
DECODERS = [
    ENCODERS[0] | {"ffn_dim": 37, "intermediate_size": 37},
    ENCODERS[1] | {"ffn_dim": 20, "intermediate_size": 20},
    ENCODERS[2] | {"ffn_dim": 50, "intermediate_size": 50},
]
LLAMAS = [
    {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_key_value_heads": 1},
    {"hidden_size": 36, "intermediate_size": 20, "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 77},
    {"hidden_size": 16, "intermediate_size": 50, "num_hidden_layers": 1, "num_key_value_heads": 4},
]
LLAMAS[0] |= {"num_attention_heads": 3, "tie_word_embeddings": True}
LLAMAS[1] |= {"num_attention_heads": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
LLAMAS[2] |= {"num_attention_heads": 4, "rms_norm_eps": 1e-3}
FREE_HEADS = [{}, {"head_dim": 10}, {"head_dim": 6}]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}

KINDS = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 3}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
START = {"decoder_start_token_id": 0, "relative_attention_max_distance": 20, "dropout_rate": 0.0}
FEW = START | {
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 5,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
TRUE_HEADS = [{"head_dim": 8}, {"head_dim": 10}, {"head_dim": 4}]
GEMMAS = [
    {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5},
    {"head_dim": 10, **KINDS, "final_logit_softcapping": 2.0},
    {"head_dim": 4, "final_logit_softcapping": None, "attention_bias": True},
]


GEMMA_SIDE = {
    **{
        "vocab_size": 41,
        "hidden_size": 24,
        "intermediate_size": 37,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    **{"head_dim": 10, "sliding_window": 3, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def part(factor: float) -> dict:
    return {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": factor}


def each(sizes: list[dict], *extras: dict) -> list[dict]:
    return [size | extra for size, extra in itertools.zip_longest(sizes, extras, fillvalue={})]


def translators(*extras: dict) -> list[dict]:
    sizes = [(24, 3, 37, 1, 2), (35, 5, 20, 2, 1), (6, 1, 50, 1, 1)]
    return [
        {
            "d_model": width,
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), inner),
            "encoder_layers": encoder,
            "decoder_layers": decoder,
            "max_position_embeddings": 20,
            "decoder_start_token_id": 2,
        }
        | extra
        for (width, heads, inner, encoder, decoder), extra in zip(sizes, extras, strict=True)
    ]


SIZES = {
    "distilbert": [
        size | {"hidden_dim": inner, "activation": activation}
        for size, inner, activation in zip(ENCODERS, (37, 20, 50), ("gelu", "relu", "gelu"), strict=True)
    ],
    "bert": each(BERTS, {}, {"hidden_act": "gelu_new"}),
    "roberta": each(BERTS, *[{"pad_token_id": 1, "bos_token_id": 0}] * 2, {"pad_token_id": 4}),
    "xlm-roberta": each(BERTS, *[{"pad_token_id": 1, "bos_token_id": 0}] * 2, {"pad_token_id": 4}),
    "camembert": each(BERTS, *[{"pad_token_id": 1, "bos_token_id": 0}] * 2, {"pad_token_id": 4}),
    "mpnet": each(
        [{name: value for name, value in size.items() if name != "type_vocab_size"} for size in BERTS],
        *[{"pad_token_id": 1, "bos_token_id": 0}] * 3,
    ),
    "modernbert": [
        {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3, "local_attention": 4},
        {"hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5, "attention_bias": True, "mlp_bias": True}
        | {"norm_bias": True, "classifier_bias": True, "local_attention": 5, "rope_parameters": ROPES}
        | {"tie_word_embeddings": False},
        {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 77, "decoder_bias": False}
        | {"hidden_activation": "relu", "classifier_activation": "relu"},
    ],
    "electra": each(BERTS, *[{"embedding_size": size["hidden_size"]} for size in BERTS]),
    "eurobert": each(LLAMAS, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 10}),
    "opt": each(DECODERS, {"word_embed_proj_dim": 24}, {"activation_function": "gelu", "tie_word_embeddings": False}),
    "biogpt": each(DECODERS, {"hidden_act": "relu"}, {"scale_embedding": False, "tie_word_embeddings": False}),
    "gpt2": [
        {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 20},
        {"n_embd": 35, "n_layer": 3, "n_head": 5, "n_positions": 20, "n_inner": 20, "tie_word_embeddings": False},
        {"n_embd": 6, "n_layer": 1, "n_head": 1, "vocab_size": 77, "activation_function": "relu"},
    ],
    "llama": each(
        LLAMAS, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 10}, {"rope_parameters": LLAMA3_ROPE}
    ),
    "qwen2": each(LLAMAS, {}, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": each(
        LLAMAS,
        {"head_dim": 8, "attention_bias": True},
        {"head_dim": 10, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"head_dim": 6},
    ),
    "mistral": each(LLAMAS, {"sliding_window": 3}, {"sliding_window": None, "head_dim": 10}, {"head_dim": 6}),
    "ministral": each(
        LLAMAS,
        {"sliding_window": 3, "head_dim": 8},
        KINDS | {"head_dim": 10},
        {"layer_types": ["full_attention"], "head_dim": 4},
    ),
    "smollm3": each(
        LLAMAS,
        {"no_rope_layers": [1, 0]},
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 3},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "arcee": each(LLAMAS, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 10}, {"hidden_act": "gelu"}),
    "olmo2": each(LLAMAS, {"attention_bias": True}),
    "olmo3": each(LLAMAS, {"sliding_window": 3}, KINDS | {"rope_parameters": ROPES}),
    "exaone4": each(LLAMAS, {"sliding_window": 3}, KINDS, {"sliding_window": None, "layer_types": ["full_attention"]}),
    "gemma": each(LLAMAS, *TRUE_HEADS),
    "gemma2": each(LLAMAS, *GEMMAS),
    "gemma3_text": each(
        LLAMAS, *[size | {"attn_logit_softcapping": None, "rope_parameters": ROPES} for size in GEMMAS]
    ),
    "phi3": each(LLAMAS, {"sliding_window": 3, "rope_parameters": part(0.5)}, {"resid_pdrop": 0.1}),
    "glm": each(LLAMAS, {"head_dim": 8}, {"head_dim": 12, "attention_bias": False}, {"head_dim": 4}),
    "glm4": each(LLAMAS, {"head_dim": 8}, {"head_dim": 12, "attention_bias": False}, {"head_dim": 4}),
    "helium": each(LLAMAS, {"head_dim": 8, "attention_bias": True}, {"head_dim": 6, "mlp_bias": True}, {"head_dim": 4}),
    "ernie4_5": each(LLAMAS, {"head_dim": 8, "use_bias": True}, {"head_dim": 10}, {"head_dim": 4}),
    "granite": each(
        LLAMAS,
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "starcoder2": each(LLAMAS, {"sliding_window": 3}, {"use_bias": False}, {"hidden_act": "relu"}),
    "nemotron": each(LLAMAS, {"head_dim": 8}, {"head_dim": 12, "attention_bias": True}, {"mlp_bias": True}),
    "stablelm": each(
        LLAMAS,
        {"use_parallel_residual": True},
        {"use_qkv_bias": True, "rope_parameters": part(0.34)},
        {"rope_parameters": part(0.5)},
    ),
    "phi": each(LLAMAS, {}, {"rope_parameters": part(0.67)}, {"hidden_act": "gelu", "resid_pdrop": 0.1}),
    "cohere": each(LLAMAS, {}, {"logit_scale": 0.3, "attention_bias": True}),
    "cohere2": each(LLAMAS, {"sliding_window": 3}, KINDS | {"logit_scale": 0.3}),
    "gpt_neox": each(
        DECODERS,
        {},
        {"use_parallel_residual": False, "hidden_size": 40, "rope_parameters": part(0.5)},
        {"attention_bias": False, "rope_parameters": part(1.0), "hidden_act": "relu"},
    ),
    "falcon": [
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},  # several queries, one key
        {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "new_decoder_architecture": True}
        | {"num_kv_heads": 2, "ffn_hidden_size": 20, "bias": True, "tie_word_embeddings": False},
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "multi_query": False, "vocab_size": 77}
        | {"parallel_attn": False, "activation": "relu"},
    ],
    "gptj": [
        {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 20, "rotary_dim": 4},
        {"n_embd": 50, "n_layer": 3, "n_head": 5, "n_positions": 20, "n_inner": 20, "rotary_dim": 10},
        {"n_embd": 6, "n_layer": 1, "n_head": 1, "rotary_dim": 2, "activation_function": "relu"},
    ],
    "marian": translators(
        {"activation_function": "swish", "scale_embedding": True},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 51},
        {
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": 77,
            "tie_word_embeddings": False,
            "activation_function": "relu",
        },
    ),
    "seed_oss": each(
        LLAMAS, {"head_dim": 8, "attention_out_bias": True}, {"head_dim": 10, "attention_bias": False}, {"head_dim": 4}
    ),
    **dict.fromkeys(
        ("t5", "mt5", "umt5"),
        [
            {"d_model": 24, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 3} | START,
            {"d_model": 35, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 5} | FEW,
            {"d_model": 6, "d_kv": 6, "d_ff": 50, "num_layers": 1, "num_heads": 1, "vocab_size": 77} | START,
        ],
    ),
    "m2m_100": translators({}, {"d_model": 40, "activation_function": "gelu"}, {"tie_word_embeddings": False}),
    "blenderbot-small": translators({}, {"scale_embedding": True}, {"activation_function": "relu"}),
    "t5gemma": [
        {
            "encoder": GEMMA_SIDE | {"num_hidden_layers": 2},
            "decoder": GEMMA_SIDE | {"num_hidden_layers": 3, "final_logit_softcapping": 2.0},
        },
        {
            "encoder": GEMMA_SIDE | KINDS | {"num_hidden_layers": 3, "num_key_value_heads": 3, "attention_bias": True},
            "decoder": GEMMA_SIDE
            | {"num_hidden_layers": 1, "layer_types": ["full_attention"], "sliding_window": 3, "attention_bias": True}
            | {"num_key_value_heads": 3, "final_logit_softcapping": None},
            "tie_word_embeddings": False,
        },
        {
            side: GEMMA_SIDE | {"num_hidden_layers": 1, "attn_logit_softcapping": None, "hidden_activation": "silu"}
            for side in ("encoder", "decoder")
        },
    ],
    **dict.fromkeys(
        ("pegasus", "blenderbot", "bart", "plbart", "mbart"),
        translators({"scale_embedding": True}, {"activation_function": "relu"}, {"tie_word_embeddings": False}),
    ),
}
T5S = ("t5", "mt5", "umt5")
HEADS = [(family.native, task) for family in FAMILIES.values() for task in family.heads]
GENERATORS = [name for name, family in FAMILIES.items() if {"CausalLM", "ConditionalGeneration"} & family.heads.keys()]


def language_model(name: str) -> str:
    """The task of a family's language model."""
    return next(task for task in ("MaskedLM", "CausalLM", "ConditionalGeneration") if task in FAMILIES[name].heads)


def native(name: str, task: str | None = None, size: int = 0, spread: float = 0.3, **overrides) -> PreTrainedModel:
    """A native model, every number in it drawn at random, also those that start at zero or one."""
    torch.manual_seed(size)
    task = language_model(name) if task is None else task
    tokens = {"vocab_size": 41, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(name, **tokens | copy.deepcopy(SIZES[name][size]) | overrides)
    model = FAMILIES[name].native_class(task)(config).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    biases = [buffer for buffer_name, buffer in model.named_buffers() if buffer_name == "final_logits_bias"]
    with torch.no_grad():
        for tensor in trained + biases:
            tensor.normal_(std=spread)
    return model


def batch(ours: PreTrainedModel, padding: str | None = "right", with_labels: bool = False) -> dict[str, Tensor]:
    inputs = tiny.inputs(ours, padding=padding)
    if padding is not None:
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == ours.config.pad_token_id, 9)
        pad = ours.config.pad_token_id
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad)
    if getattr(ours.config, "type_vocab_size", 0):
        length = inputs["input_ids"].shape[-1]
        types = torch.arange(length) * ours.config.type_vocab_size // length
        inputs["token_type_ids"] = types.expand_as(inputs["input_ids"]).contiguous()
    if with_labels:
        inputs |= tiny.labels(ours, inputs)
        if ours.config.position_embedding_type == "sinusoidal_tensor2tensor":
            # M2M-100 gives no position to what is a pad, in the middle of a target too.
            inputs["labels"] = inputs["labels"].clamp(min=3)
        return inputs
    if ours.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny.tokens(ours.config.decoder_vocab_size, len(inputs["input_ids"]), 5)
    return inputs


def real(states: Tensor, mask: Tensor | None) -> Tensor:
    """Of (B, T, ...), what stands at non-padding tokens."""
    return states if mask is None or states.shape[:2] != mask.shape else states[mask.bool()]


def assert_same_outputs(theirs, ours, mask: Tensor | None, tolerance: float) -> None:
    close = {"atol": tolerance, "rtol": tolerance}
    for name in ("logits", "last_hidden_state", "start_logits", "end_logits"):
        if name in theirs:
            a, b = (real(output[name], mask) for output in (theirs, ours))
            assert_close(b, a, **close)
    if "loss" in theirs:  # in single precision, by some in transformers too
        assert_close(ours.loss.float(), theirs.loss.float(), atol=max(tolerance, 1e-6), rtol=max(tolerance, 1e-6))
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if ours.get(name) is None and len(theirs.get(name) or ()) <= 1:  # T5Gemma has its last state there, unasked
            continue
        for a, b in zip(theirs.get(name) or (), ours.get(name) or (), strict=True):
            keep = None if name == "decoder_hidden_states" else mask
            assert_close(real(b, keep), real(a, keep), **close)


def assert_equal_models(a: PreTrainedModel, b: PreTrainedModel) -> None:
    """The same class, configuration and tensors, less what a class has but never looks at."""
    assert type(a) is type(b)
    assert comparable(a.config) == comparable(b.config)
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    spare = set()
    if not a.config.tie_word_embeddings:
        # Untied, `shared` and the biases outside the layer they belong to take no part in the computation.
        spare = {"shared.weight", "model.shared.weight", "cls.predictions.bias"} | (
            {"lm_head.bias"} if a.config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet") else set()
        )
    for name in left.keys() - spare:
        assert left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]), name


def comparable(config: PreTrainedConfig) -> dict:
    return without_bookkeeping(config.to_dict())


def without_bookkeeping(options: dict) -> dict:
    """And without that of the configurations within."""
    return {
        key: without_bookkeeping(value) if isinstance(value, dict) else value
        for key, value in options.items()
        if key not in ("architectures", "_name_or_path", "dtype")
    }


@pytest.fixture
def precise_norms(monkeypatch):
    """Most natives' norms round to single precision whatever the model's type; here they do not."""

    def rms_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    def one_plus(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)

    def layer_norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, None, self.variance_epsilon)

    for family in FAMILIES.values():
        module = sys.modules[family.native_class("").__module__]
        for name, kind in vars(module).items():
            if "Gemma" in name and name.endswith("RMSNorm"):
                monkeypatch.setattr(kind, "forward", one_plus)
            elif name.startswith("Cohere") and name.endswith("LayerNorm"):
                monkeypatch.setattr(kind, "forward", layer_norm)
            elif name.endswith(("RMSNorm", "T5LayerNorm")) and isinstance(kind, type):
                monkeypatch.setattr(kind, "forward", rms_norm)


# Natives that round more than norms to single precision: scores, turned queries, sinusoids, the scale of embeddings.
ROUNDED = dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gptj", "cohere", "cohere2", "ernie4_5"), 1e-5)
ROUNDED |= dict.fromkeys(("modernbert", "m2m_100", "t5gemma"), 1e-5)


# What converted models compute


@pytest.mark.parametrize("size", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_language_models_compute_the_same(name, size, precise_norms):
    """Logits, every hidden state, the loss and every gradient, on padded batches; there and back again."""
    theirs = native(name, size=size).double()
    ours = convert_from(theirs)
    inputs = batch(ours, with_labels=True)
    mask = inputs["attention_mask"]
    outputs = [model(**inputs, output_hidden_states=True) for model in (theirs, ours)]
    tolerance = ROUNDED.get(name, 1e-10)
    assert_same_outputs(*outputs, mask, tolerance)
    for output in outputs:  # a loss in double precision, which that of the models is not
        F.cross_entropy(output.logits.flatten(0, 1), inputs["labels"].flatten()).backward()
    zero = {n: torch.zeros_like(tensor) for n, tensor in theirs.state_dict().items()}
    gradients = {n: zero[n] if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    expected = weights.Translation(*folders.native_task(theirs.config, type(theirs).__name__), theirs.config, gradients)
    trained_here_only = {"lm_head.bias"} if ours.config.is_encoder_decoder else set()  # a buffer there
    for parameter_name, parameter in ours.named_parameters():
        if parameter_name not in trained_here_only:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            right = expected.tensor(parameter_name)
            assert_close(gradient, right, atol=tolerance, rtol=tolerance, msg=parameter_name)
    assert_equal_models(theirs, convert_to(ours, name))


@pytest.mark.slow
@pytest.mark.parametrize("size", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_language_models_compute_the_same_in_single_precision(name, size):
    theirs = native(name, size=size)
    ours = convert_from(theirs)
    assert ours.dtype == torch.float32 and not ours.training
    with torch.no_grad():
        inputs = batch(ours, with_labels=True)
        outputs = [model(**inputs, output_hidden_states=True) for model in (theirs, ours)]
    assert_same_outputs(*outputs, inputs["attention_mask"], tolerance=1e-5)


@pytest.mark.parametrize(("size", "backend"), [(0, "eager"), (1, "sdpa")])
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_on_either_side_and_packed_documents(name, size, backend):
    """Each text is what the native makes of it where padding is on its right, as they were trained; many natives count
    positions from the left edge whatever is there."""
    theirs = native(name, size=size)
    if theirs._supports_sdpa and (backend == "eager" or name not in T5S):
        theirs.set_attn_implementation(backend)
    ours = convert_from(theirs)
    if ours._supports_sdpa:
        ours.set_attn_implementation(backend)
    right = batch(ours)
    mask = right["attention_mask"].bool()
    first = torch.argsort(mask.int(), dim=1, stable=True)  # the padding
    left = {key: values.gather(1, first) for key, values in right.items() if values.shape == mask.shape}
    with torch.no_grad():
        expected = theirs(**right).logits
        for inputs in (right, right | left):
            assert_close(texts(ours(**inputs).logits, inputs), texts(expected, right), atol=1e-5, rtol=1e-5)
        if not ours.config.is_encoder_decoder:
            packed = {key: values[mask][None] for key, values in right.items() if key != "attention_mask"}
            positions = torch.cat([torch.arange(length) for length in mask.sum(1).tolist()])[None]
            options = {"use_cache": False} if ours.can_generate() else {}
            logits = ours(**packed, position_ids=positions, **options).logits
            assert_close(logits[0], expected[mask], atol=1e-5, rtol=1e-5)


def texts(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """What stands at the tokens of each text, one after the other; of a translation all."""
    return logits if "decoder_input_ids" in inputs else logits[inputs["attention_mask"].bool()]


@pytest.mark.parametrize(("name", "task"), HEADS)
def test_every_head(name, task):
    labels = {"num_labels": 3} if task.endswith("Classification") else {}
    theirs = native(name, task, **labels)
    ours = convert_from(theirs)
    assert type(ours) is FAMILIES[name].our_class(task)
    # An answer is looked for among the padding too, where absolute positions are ours.
    padding = None if task == "QuestionAnswering" else "right"
    inputs = batch(ours, padding, with_labels=task != "")
    with torch.no_grad():
        outputs = [model(**inputs) for model in (theirs, ours)]
    assert_same_outputs(*outputs, inputs.get("attention_mask"), tolerance=1e-5)
    if "pooler_output" in outputs[0]:
        assert_close(outputs[1].pooler_output, outputs[0].pooler_output)
    back = convert_to(ours, name)
    assert_equal_models(theirs, back)
    # Nothing is shared: what is done to one leaves the others as they were.
    kept = [{key: tensor.clone() for key, tensor in model.state_dict().items()} for model in (theirs, back)]
    for parameter in ours.parameters():
        parameter.data.zero_()
    for model, state in zip((theirs, back), kept, strict=True):
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("name", ["t5", "mt5", "umt5", "llama", "bert", "gpt_neox"])
def test_a_head_apart_from_the_table_that_its_configuration_makes_one(name, is_folder, tmp_path):
    """As FLAN-T5's: transformers goes by the numbers in the file."""
    theirs = native(name, size=0, **({} if name == "t5" else {"tie_word_embeddings": True}))
    head = theirs.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    source = theirs
    if is_folder:
        theirs.save_pretrained(source := tmp_path / "native")
        convert_folder(source, tmp_path / "checked", verify=True)
    ours = convert_from(source)
    assert not ours.config.tie_word_embeddings
    inputs = batch(ours)
    with torch.no_grad():
        assert_same_outputs(theirs(**inputs), ours(**inputs), inputs["attention_mask"], tolerance=1e-5)
    back = convert_to(ours, name)
    ours.save_pretrained(tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "back", name, verify=True)
    for model in (back, type(theirs).from_pretrained(tmp_path / "back")):
        assert all(torch.equal(tensor, theirs.state_dict()[each]) for each, tensor in model.state_dict().items())
        assert model.config.tie_word_embeddings == (name in T5S)


def test_other_tables_apart_are_refused():
    theirs = native("marian", size=0)
    table = theirs.model.encoder.embed_tokens
    table.weight = torch.nn.Parameter(torch.randn_like(table.weight))
    with pytest.raises(ValueError, match="makes model.encoder.embed_tokens.weight one with others, but they differ"):
        convert_from(theirs)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", GENERATORS)
def test_generation_token_for_token(name, beams):
    theirs = native(name, spread=1.0)
    ours = convert_from(theirs)
    side = "right" if ours.config.is_encoder_decoder else "left"
    inputs = batch(ours, padding=side)
    inputs.pop("decoder_input_ids", None)
    settings = {"max_new_tokens": 9, "num_beams": beams, "do_sample": False, "no_repeat_ngram_size": 1}
    expected = theirs.generate(**inputs, **settings)
    assert torch.equal(ours.generate(**inputs, **settings), expected)
    assert len(expected.unique()) > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_made_here_becomes_native(name):
    """A configuration of ours with a family's options, nothing of it ever converted before."""
    family, task = FAMILIES[name], language_model(name)
    options = convert_from(native(name)).config.to_dict()
    for key in ("converted_from", "architectures", "auto_map", "transformers_version", "model_type", "_name_or_path"):
        options.pop(key, None)
    torch.manual_seed(0)
    ours = family.our_class(task)(family.config(**options | {"dtype": None})).eval()
    theirs = convert_to(ours, name)
    inputs = batch(ours, with_labels=True)
    with torch.no_grad():
        outputs = [model(**inputs, output_hidden_states=True) for model in (theirs, ours)]
    assert_same_outputs(*outputs, inputs["attention_mask"], tolerance=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_backbone_without_its_pooler(name):
    config = native(name).config
    model_class = FAMILIES[name].native_class("")
    theirs = model_class(config, add_pooling_layer=False).eval()
    ours = convert_from(theirs)
    assert ours.pooler is None
    assert_equal_models(theirs, convert_to(ours, name))


def test_options_that_only_the_native_model_has_come_back():
    theirs = native("gpt2", embd_pdrop=0.3, summary_first_dropout=0.4, task_specific_params={"text": {"length": 5}})
    ours = convert_from(theirs)
    assert_equal_models(theirs, convert_to(ours, "gpt2"))
    marian = native("marian", activation_function="silu", encoder_layerdrop=0.1)  # silu is another name of swish
    ours = convert_from(marian)
    assert_equal_models(marian, convert_to(ours, "marian"))
    ours.config.hidden_act = "relu"
    assert convert_to(ours, "marian").config.activation_function == "relu"


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_converted_model_is_fine_tuned_with_a_new_head_and_goes_back(name, task, tmp_path):
    """What the target needs is set when the source is converted: it is too late once the head is trained."""
    ours_class = FAMILIES[name].our_class(task)
    convert_from(native(name)).save_pretrained(tmp_path / "ours")
    torch.manual_seed(0)
    ours = ours_class.from_pretrained(tmp_path / "ours")
    inputs = batch(ours, padding=None, with_labels=True)
    rows = [{key: values[row] for key, values in inputs.items()} for row in range(len(inputs["input_ids"]))]
    arguments = transformers.TrainingArguments(
        tmp_path / "run", max_steps=2, learning_rate=0.1, report_to="none", save_strategy="no", use_cpu=True
    )
    before = getattr(ours, ours.head_name).weight.detach().clone()
    transformers.Trainer(ours, arguments, train_dataset=rows).train()
    assert not torch.equal(before, getattr(ours.eval(), ours.head_name).weight)
    theirs = convert_to(ours, name)
    assert type(theirs).__name__ == FAMILIES[name].heads[task].native
    with torch.no_grad():
        assert_same_outputs(theirs(**inputs), ours(**inputs), None, tolerance=1e-5)


# What of ours goes into which architecture, of those that a plain decoder of ours can become.
PLAIN = {
    "rms": ({}, ["llama", "glm", "qwen2", "mistral", "ministral", "helium", "ernie4_5", "granite", "seed_oss"]),
    "one plus": ({"norm_type": "layer_norm_1p", "hidden_act": "relu2"}, ["nemotron"]),
    "layer norm": ({"norm_type": "layer_norm"}, ["stablelm"]),
    "parallel": ({"norm_type": "layer_norm", "norm_position": "parallel", "hidden_act": "gelu", "mlp_bias": True}, []),
    "reordered": (
        {"norm_position": "reordered", "use_qk_norm": True, "qk_norm_across_heads": True},
        ["olmo2", "olmo3"],
    ),
    "sandwich": ({"norm_type": "rms_norm_1p", "norm_position": "sandwich", "scale_embedding": True}, ["gemma2"]),
    "sandwich, q/k": (
        {"norm_type": "rms_norm_1p", "norm_position": "sandwich", "scale_embedding": True, "use_qk_norm": True},
        ["gemma3_text"],
    ),
}
PLAIN["parallel"][1].append("gpt_neox")
TARGETS = [(overrides, target) for overrides, targets in PLAIN.values() for target in targets]
TURNED_IN_PART = {"glm", "nemotron", "stablelm", "gpt_neox"}


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize(("overrides", "target"), TARGETS, ids=[target for _, target in TARGETS])
def test_a_decoder_of_ours_becomes_what_computes_the_same_or_is_refused(overrides, target, factor, tmp_path):
    """Configurations of transformers have defaults of their own, and write them into what they are given: Phi's and
    GLM's turn half of each head, or less, where nothing is said."""
    biases = {"attention_bias": True, "attention_output_bias": False} if target in ("glm", "qwen2") else {}
    biases |= {"attention_bias": True} if target == "gpt_neox" else {}
    biases |= {"attention_output_bias": False} if target in ("stablelm", "helium") else {}
    rope = {"rope_type": "default", "rope_theta": 500.0} | ({} if factor is None else {"partial_rotary_factor": factor})
    options = {"hidden_act": "swiglu", "num_key_value_heads": 4, "eos_token_id": 2, "rope_parameters": rope}
    ours = tiny.model(scratch.ScratchDecoderForCausalLM, **options | biases | overrides)
    ids, before = tiny.tokens(40, 2, 9), copy.deepcopy(ours.config.to_dict())
    expected = ours(ids).logits
    if factor is not None and target not in TURNED_IN_PART:
        with pytest.raises(ValueError, match=f"cannot become {target}: .*partial_rotary_factor"):
            convert_to(ours, target)
    else:
        assert_close(convert_to(ours, target)(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert ours.config.to_dict() == before
    assert torch.equal(ours(ids).logits, expected)


def test_a_rotation_that_a_configuration_rewrites_is_refused():
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}
    ours = tiny.model(scratch.ScratchDecoderForCausalLM, hidden_act="swiglu", rope_parameters=rope)
    with pytest.raises(ValueError, match="cannot become phi3: "):
        convert_to(ours, "phi3")
    assert ours.config.rope_parameters["rope_type"] == "yarn"
    factors = {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 8, **factors}
    theirs = native("phi3", size=0, rope_parameters=rope, original_max_position_embeddings=8, sliding_window=None)
    ours = convert_from(theirs)
    for length in (6, 12):
        ids = tiny.tokens(41, 2, length)
        assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
    assert_equal_models(theirs, convert_to(ours, "phi3"))


def test_options_that_mean_something_together_come_back_together():
    """Each alone would mean another model."""
    options = {"new_decoder_architecture": True, "num_kv_heads": 6, "num_ln_in_parallel_attn": 1}
    theirs = native("falcon", size=1, **options)
    assert_equal_models(theirs, convert_to(convert_from(theirs), "falcon"))


def test_a_decoder_moves_from_one_family_to_another():
    theirs = native("mistral", sliding_window=None)
    llama = convert_to(convert_from(theirs), "llama")
    assert type(llama) is transformers.LlamaForCausalLM
    ids = tiny.tokens(41, 2, 7)
    assert_close(llama(ids).logits, theirs(ids).logits)


def test_distilbert_at_its_true_size():
    """66 million parameters, and the article's cell: a word in two sentences."""
    torch.manual_seed(0)
    theirs = transformers.DistilBertModel(transformers.DistilBertConfig()).eval()
    ours = convert_from(theirs)
    assert theirs.num_parameters() == ours.num_parameters() == 66_362_880
    token_ids = torch.tensor([[101, 4339, 1037, 5961, 1997, 1037, 2314, 2924, 102], [101, 1037, 2924, 102, *[0] * 5]])
    tokens = {"input_ids": token_ids, "attention_mask": (token_ids > 0).long()}
    with torch.no_grad():
        learned = ours.embeddings.word_embeddings(token_ids)
        contextual = ours(**tokens).last_hidden_state
        expected = theirs(**tokens).last_hidden_state
    assert torch.equal(learned, theirs.embeddings.word_embeddings(token_ids))
    mask = tokens["attention_mask"]
    assert_close(real(contextual, mask), real(expected, mask), atol=1e-5, rtol=1e-5)
    assert torch.equal(learned[0, 7], learned[1, 2]) and not torch.allclose(contextual[0, 7], contextual[1, 2])
    assert_equal_models(theirs, convert_to(ours, "distilbert"))


# Folders


@pytest.fixture
def tokenizer():
    return train_tokenizer(["the cat sat on the mat", "a dog ate the cat"] * 10, family="decoder", vocab_size=300)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("name", "task"), [*((name, None) for name in FAMILIES), ("bert", ""), ("gpt2", ""), ("marian", "")]
)
def test_folders_there_and_back(name, task, tmp_path, monkeypatch):
    """In shards and in half precision; the native folder that comes out is that which went in."""
    monkeypatch.setattr(folders, "SHARD_SIZE", "8KB")
    theirs = native(name, task).bfloat16()
    theirs.save_pretrained(tmp_path / "native", max_shard_size="10KB")
    assert (tmp_path / "native/model.safetensors.index.json").exists()
    convert_folder(tmp_path / "native", tmp_path / "ours")
    ours = type(convert_from(theirs)).from_pretrained(tmp_path / "ours")
    assert_equal_models(ours, convert_from(theirs))
    assert_equal_models(ours, convert_from(tmp_path / "native"))
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in (tmp_path / "ours").glob("*.safetensors")}
    ours.save_pretrained(tmp_path / "saved")
    code, expected = ({path.name for path in (tmp_path / folder).glob("*.py")} for folder in ("ours", "saved"))
    assert code == expected and f"modeling_{ours.config.model_type}.py" in code
    convert_folder(tmp_path / "ours", tmp_path / "back", name)
    assert_equal_models(type(theirs).from_pretrained(tmp_path / "back"), theirs)
    before, after = tensors(tmp_path / "native"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_native_exports_need_nothing_of_ours(every, tmp_path):
    """Loaded without `trust_remote_code` by a process that cannot find this package."""
    expected = {}
    for name in [*FAMILIES][::every]:
        theirs = native(name)
        convert_from(theirs).save_pretrained(tmp_path / "ours" / name)
        convert_folder(tmp_path / "ours" / name, tmp_path / "native" / name, name)
        inputs = {"input_ids": tiny.tokens(41, 2, 6)}
        if theirs.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = tiny.tokens(41, 2, 4)
        save_file(inputs, tmp_path / "native" / name / "inputs")
        with torch.no_grad():
            expected[name] = theirs(**inputs).logits
    program = """
import sys, importlib.util
from pathlib import Path
assert importlib.util.find_spec("hf_scratch_transformer") is None
import transformers
from safetensors.torch import load_file, save_file
logits = {}
for folder in Path(sys.argv[1]).iterdir():
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    logits[folder.name] = model(**load_file(folder / "inputs")).logits.detach()
save_file(logits, sys.argv[2])
"""
    arguments = [sys.executable, "-I", "-c", program, str(tmp_path / "native"), str(tmp_path / "logits")]
    subprocess.run(arguments, check=True, cwd=tmp_path, capture_output=True)
    logits = load_file(tmp_path / "logits")
    assert logits.keys() == expected.keys()
    for name in expected:  # where in memory a tensor begins decides the order of some sums
        assert_close(logits[name], expected[name], atol=1e-6, rtol=1e-6, msg=name)


def test_tokenizer_and_generation_settings_are_carried_along(tmp_path, tokenizer):
    theirs = native("gpt2", vocab_size=len(tokenizer))
    theirs.generation_config = GenerationConfig(max_new_tokens=5, num_beams=2, eos_token_id=2)
    theirs.save_pretrained(tmp_path / "native")
    tokenizer.save_pretrained(tmp_path / "native")
    settings = json.loads((tmp_path / "native/tokenizer_config.json").read_text())
    settings.pop("tokenizer_class")
    (tmp_path / "native/tokenizer_config.json").write_text(json.dumps(settings))
    convert_folder(tmp_path / "native", tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "back", "gpt2")
    text = "the cat ate a dog"
    for folder in ("ours", "back"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder)(text).input_ids == tokenizer(text).input_ids
        generation = GenerationConfig.from_pretrained(tmp_path / folder)
        assert (generation.max_new_tokens, generation.num_beams) == (5, 2)
    assert convert_from(tmp_path / "native").generation_config.num_beams == 2
    assert json.loads((tmp_path / "ours/tokenizer_config.json").read_text())["tokenizer_class"] == "GPT2Tokenizer"


@pytest.fixture(scope="module")
def of_two_vocabularies(tmp_path_factory) -> tuple[Path, list[PreTrainedTokenizerFast]]:
    """A native translator in a folder with the tokenizer of its two vocabularies, and the tokenizers of either side."""
    texts = (("the cat ate a dog " * 9, 270), ("die Katze fraß einen Hund " * 9, 280))
    alone = [train_tokenizer([text], family="seq2seq", vocab_size=size) for text, size in texts]
    folder = tmp_path_factory.mktemp("two") / "native"
    sizes = {"vocab_size": len(alone[0]), "decoder_vocab_size": len(alone[1])}
    native("marian", share_encoder_decoder_embeddings=False, **sizes).save_pretrained(folder)
    join_tokenizers(*alone).save_pretrained(folder)
    (folder / "target_vocab.json").write_text("{}")  # of MarianTokenizer, if it has two
    return folder, alone


def test_a_vocabulary_for_each_language_is_carried_along(of_two_vocabularies, tmp_path, capsys):
    folder, alone = of_two_vocabularies
    assert cli.main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "marian"]) == 0
    assert "its tokenizer, of two vocabularies, is read with trust_remote_code=True" in capsys.readouterr().out
    source, target = "the cat", "die Katze"
    for name in ("ours", "back"):
        assert (tmp_path / name / "target_vocab.json").exists()
        assert (tmp_path / name / "tokenization_scratch.py").exists()  # for who does not have this package
        loaded = AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert loaded(source).input_ids == alone[0](source).input_ids
        assert loaded(text_target=target).input_ids == alone[1](target).input_ids
        assert loaded.decode(alone[1](target).input_ids, skip_special_tokens=True) == target


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "has no target_tokenizer.json"),
        (lambda file: file.write_text(file.read_text()[:999]), "target_tokenizer.json: "),
        (lambda file: swap(file, file.with_name("tokenizer.json")), "has 280 tokens, the config vocab_size=270"),
        (lambda file: shutil.copyfile(file.with_name("tokenizer.json"), file), None),  # fewer tokens than rows
    ],
    ids=["missing", "damaged", "swapped", "smaller"],
)
def test_vocabularies_that_do_not_fit_are_refused(damage, message, of_two_vocabularies, tmp_path, capsys):
    shutil.copytree(of_two_vocabularies[0], tmp_path / "native")
    damage(tmp_path / "native/target_tokenizer.json")
    assert cli.main(["convert", str(tmp_path / "native"), str(tmp_path / "ours")]) == (2 if message else 0)
    error = capsys.readouterr().err
    if message:
        assert message in error and error.splitlines()[-1].startswith(f"scratch-transformer: {tmp_path}")
        assert not list(tmp_path.glob("*ours*"))


def swap(*files: Path) -> None:
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)


def test_only_what_is_of_a_tokenizer_is_carried_along(tmp_path, tokenizer):
    native("gpt2", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "native")
    tokenizer.save_pretrained(tmp_path / "native")
    (tmp_path / "native/tokenizer_texts").mkdir()
    for name in ("target_tokenizer.json", "target_corpus.txt"):
        (tmp_path / "native" / name).write_text("{}")
    convert_folder(tmp_path / "native", tmp_path / "ours")
    assert not [path for path in (tmp_path / "ours").iterdir() if path.name.startswith(("target", "tokenizer_texts"))]


def test_a_repository_on_the_hub(tmp_path, monkeypatch):
    theirs = native("gpt2")
    theirs.save_pretrained(tmp_path / "native", max_shard_size="10KB")
    with HubServer() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        download = partial(snapshot_download, endpoint=hub.url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(folders, "snapshot_download", download)
        api = huggingface_hub.HfApi(endpoint=hub.url, token=TOKEN)
        api.create_repo("tester/gpt2")
        api.upload_folder(folder_path=tmp_path / "native", repo_id="tester/gpt2")
        convert_folder("tester/gpt2", tmp_path / "ours")
    assert_equal_models(scratch.ScratchDecoderForCausalLM.from_pretrained(tmp_path / "ours"), convert_from(theirs))


def test_memory_stays_at_a_shard(tmp_path, monkeypatch):
    """At no time are more tensors alive than a shard holds, however large the model is."""
    native("llama", num_hidden_layers=12).save_pretrained(tmp_path / "native")
    monkeypatch.setattr(folders, "SHARD_SIZE", "20KB")
    alive, peak, total = [], 0, 0
    original = weights.Translation.tensor

    def tensor(self, name: str) -> Tensor:
        nonlocal peak, total
        made = original(self, name)
        alive.append(weakref.ref(made))
        held = [reference() for reference in alive]
        peak = max(peak, sum(t.nbytes for t in held if t is not None))
        total += made.nbytes
        return made

    monkeypatch.setattr(weights.Translation, "tensor", tensor)
    convert_folder(tmp_path / "native", tmp_path / "ours")
    assert total > 200_000 and peak <= 20_000 + 4 * 41 * 24


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("bert."),
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        lambda name: name.replace("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ],
)
def test_names_of_older_checkpoints(tmp_path, rename):
    theirs = native("bert")
    theirs.save_pretrained(tmp_path)
    state = {rename(name): tensor for name, tensor in tensors(tmp_path).items()}
    state["bert.embeddings.position_ids"] = torch.arange(20)[None]  # a buffer that older versions saved
    state["cls.seq_relationship.weight"] = torch.zeros(2, 24)  # heads of pre-training that the class has not
    state["bert.pooler.dense.weight"] = torch.zeros(24, 24)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal_models(convert_from(tmp_path), convert_from(theirs))


def test_copies_of_tied_tables_and_what_translators_leave_out(tmp_path):
    theirs = native("marian")
    theirs.final_logits_bias.zero_()
    theirs.save_pretrained(tmp_path)
    state = tensors(tmp_path)
    assert "final_logits_bias" in state and "model.shared.weight" in state
    del state["final_logits_bias"]
    state["model.encoder.embed_tokens.weight"] = state.pop("model.shared.weight")
    state["lm_head.weight"] = state["model.encoder.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal_models(convert_from(tmp_path), convert_from(theirs))


# Refusals


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' must be 'absolu"),
        ("bert", {"is_decoder": True}, "is_decoder=True must be False"),
        ("bert", {"hidden_act": "xielu"}, "hidden_act='xielu' must be one of .*'relu'.*'swish'"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act='relu' must be one of 'gelu'"),
        ("olmo2", {"layer_types": ["sliding_attention"] * 2}, "layer_types=.* must be 'full_attention' in every layer"),
        (
            "ministral",
            {"layer_types": ["full_attention", "conv"]},
            "layer_types=.*'conv'.* must be full_attention or s",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0 must be None"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True must be False"),
        ("gptj", {"rotary_dim": 3}, "rotary_dim=3 must be an even number"),
        ("llama", {"num_local_experts": 4}, "num_local_experts=4 must be None or 0"),
        ("llama", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, "without partial_rotary"),
        ("qwen2", {"head_dim": 10}, "head_dim=10 must be hidden_size // num_attention_heads"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True must be False"),
        ("marian", {"decoder_ffn_dim": 50}, "decoder_ffn_dim=50 must go with encoder_ffn_dim=37"),
        ("bart", {"quantization_config": {"bits": 4}}, "quantization_config=.* must be None"),
    ],
)
def test_options_without_counterpart_are_refused(name, options, message, tmp_path):
    native(name).save_pretrained(tmp_path / "native")
    path = tmp_path / "native/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    with pytest.raises(ValueError, match=message):
        convert_folder(tmp_path / "native", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_all_options_come_in_one_message():
    theirs = native("gpt2", scale_attn_weights=False, activation_function="xielu")
    with pytest.raises(ValueError, match="scale_attn_weights=False must be True; activation_function='xielu' must be"):
        convert_from(theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "missing: model.norm.weight"),
        (
            lambda state: state.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(37, 24)}),
            "unexpected: model.layers.2.mlp.up_proj.weight",
        ),
        (lambda state: state.update(extra=torch.zeros(1)), "unexpected: extra"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(9)}),
            r"of the wrong shape: model.norm.weight is \(9,\), not \(24,\)",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, message, tmp_path):
    native("llama").save_pretrained(tmp_path / "native")
    state = tensors(tmp_path / "native")
    change(state)
    save_file(state, tmp_path / "native/model.safetensors")
    with pytest.raises(ValueError, match=message):
        convert_folder(tmp_path / "native", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"", "model.safetensors: SafetensorError"),
        ("model.safetensors.index.json", b"{}", "index.json: KeyError: 'weight_map'"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "x"}', "config.json: .*'hidden_size'.*'x'"),
        ("config.json", b'{"model_type": "llama", "architectures": 3}', "config.json: "),
        ("config.json", b'{"model_type": ["llama"]}', "unknown architecture"),
        ("config.json", b"[1]", "config.json: AttributeError"),
        ("generation_config.json", b"[1]", "generation_config.json: "),
    ],
)
def test_files_that_cannot_be_read_are_named(file, content, message, tmp_path):
    native("llama").save_pretrained(tmp_path / "native")
    (tmp_path / "native" / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        convert_folder(tmp_path / "native", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


@pytest.mark.parametrize(
    ("family", "overrides", "complaints"),
    [
        ("bert", {}, ["norm_type='rms_norm' must be 'layer_norm'", "num_key_value_heads=2 must be 4", "'rotary'"]),
        ("distilbert", {"hidden_act": "swiglu"}, ["hidden_act='swiglu' must be one of", "embedding_norm=False"]),
        (
            "roberta",
            {"position_embedding_type": "learned"},
            ["position_offset=0 would be pad_token_id=-1, which other"],
        ),
    ],
)
def test_options_in_the_way_of_an_export_are_listed(family, overrides, complaints):
    model = tiny.model(scratch.ScratchEncoderForMaskedLM, **overrides)
    with pytest.raises(ValueError) as error:
        convert_to(model, family)
    assert all(complaint in str(error.value) for complaint in [*complaints, "cannot become"]), error.value


def test_another_number_of_answers_is_refused():
    """BERT's class takes any number of labels for a question, of which only two mean something."""
    with pytest.raises(ValueError, match=r"has other shapes: qa_outputs.weight would be \(3, 24\), not \(2, 24\)"):
        convert_from(native("bert", "QuestionAnswering", num_labels=3))


def test_heads_and_families_without_counterpart_are_refused():
    llama = tiny.model(scratch.ScratchDecoderForCausalLM, hidden_act="swiglu")
    with pytest.raises(ValueError, match="unknown architecture 'mixtral'; known are arcee, bart, bert"):
        convert_to(llama, "mixtral")
    with pytest.raises(
        ValueError, match="ScratchDecoderForCausalLM cannot become bert; these can: ScratchEncoderModel"
    ):
        convert_to(llama, "bert")
    with pytest.raises(ValueError, match="LlamaModel is not one of our models"):
        convert_to(native("llama", ""), "llama")
    with pytest.raises(ValueError, match="use_qk_norm=True must be False"):
        convert_to(tiny.model(scratch.ScratchDecoderForCausalLM, hidden_act="swiglu", use_qk_norm=True), "llama")
    with pytest.raises(ValueError, match="head_dim=6 must be 8"):
        convert_to(
            tiny.model(scratch.ScratchDecoderForCausalLM, hidden_act="swiglu", head_dim=6, attention_bias=True), "qwen2"
        )
    untied = tiny.model(
        scratch.ScratchSeq2SeqForConditionalGeneration, tie_word_embeddings=False, decoder_start_token_id=2
    )
    with pytest.raises(ValueError, match="share_encoder_decoder_embeddings=True must be one of False"):
        convert_to(untied, "marian")
    mixture = transformers.MixtralConfig(vocab_size=40, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    with torch.device("meta"), pytest.raises(ValueError, match="unknown architecture 'mixtral'"):
        convert_from(transformers.MixtralForCausalLM(mixture))
    encoder = transformers.T5EncoderModel(native("t5").config)
    with pytest.raises(ValueError, match="T5EncoderModel has no counterpart here; of t5, these have one: T5Model"):
        convert_from(encoder)


@pytest.mark.parametrize(
    ("name", "native_class", "task", "head"),
    [
        ("bert", "BertForPreTraining", "MaskedLM", "cls.seq_relationship.weight"),
        ("bert", "BertForNextSentencePrediction", "", "cls.seq_relationship.weight"),
        ("electra", "ElectraForPreTraining", "", "discriminator_predictions.dense.weight"),
        ("gpt2", "GPT2DoubleHeadsModel", "CausalLM", "multiple_choice_head.summary.weight"),
    ],
)
def test_a_head_without_counterpart_is_left_out_and_said(name, native_class, task, head, tmp_path, caplog):
    """What a pre-training has left beside the model that people want: ELECTRA's discriminator."""
    torch.manual_seed(0)
    theirs = getattr(transformers, native_class)(native(name).config).eval()
    theirs.save_pretrained(tmp_path / "native")
    report = convert_folder(tmp_path / "native", tmp_path / "ours", verify=True)
    assert re.search(f"Left out, since .* has no such head: .*{re.escape(head)}", caplog.text)
    ours = FAMILIES[name].our_class(task).from_pretrained(tmp_path / "ours")
    assert report.target == type(ours).__name__
    inputs = {"input_ids": tiny.tokens(41, 2, 7)}
    with torch.no_grad():
        states = theirs(**inputs, output_hidden_states=True).hidden_states[-1]
        assert_close(ours(**inputs, output_hidden_states=True).hidden_states[-1], states, atol=1e-5, rtol=1e-5)


def test_folders_that_cannot_be_converted(tmp_path, monkeypatch):
    theirs = native("bert")
    theirs.save_pretrained(tmp_path / "native")
    convert_folder(tmp_path / "native", tmp_path / "ours")
    new = tmp_path / "new"
    for source, family, message in (
        ("native", "bert", "is a bert model, and only ours become bert: convert it to ours first"),
        ("ours", None, "is one of our models: name what to convert it to, one of arcee, bart"),
        ("nowhere", None, "is neither a folder nor the id of a repository"),
        ("", None, "holds no config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_folder(tmp_path / source, new, family)
    monkeypatch.chdir(tmp_path)
    for mistaken in ("~/model", ".hidden/model", "ours/none", "owner/"):  # is not looked for on the Hub
        with pytest.raises(ValueError, match="is neither a folder nor the id of a repository"):
            convert_folder(mistaken, new)
    with pytest.raises(ValueError, match="is one of our models already"):
        convert_from(tmp_path / "ours")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'native'} exists already: name a new folder")):
        convert_folder(tmp_path / "ours", tmp_path / "native", "bert")
    (tmp_path / "native/model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        convert_folder(tmp_path / "native", new)
    (tmp_path / "native/pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(ValueError, match="no safetensors but pytorch_model.bin, a pickle.*save_pretrained to a new"):
        convert_folder(tmp_path / "native", new)
    theirs.save_pretrained(tmp_path / "native")
    config = json.loads((tmp_path / "native/config.json").read_text())
    (tmp_path / "native/config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(ValueError, match="config.json: architectures=None must be a list with the name of a class"):
        convert_folder(tmp_path / "native", new)
    assert {path.name for path in tmp_path.iterdir()} == {"native", "ours"}


def test_what_is_not_on_the_hub_either_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "snapshot_download", partial(snapshot_download, local_files_only=True))
    with pytest.raises(ValueError, match="^no/such: "):
        convert_folder("no/such", tmp_path / "new")


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    native("bert").save_pretrained(tmp_path / "native")

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(folders, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        convert_folder(tmp_path / "native", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


# The command, and GGUF


def test_the_command(tmp_path, capsys):
    theirs = native("bert")
    theirs.save_pretrained(tmp_path / "native")
    source, ours, back = (str(tmp_path / name) for name in ("native", "ours", "back"))
    assert cli.main(["convert", source, ours]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "BertForMaskedLM as ScratchEncoderForMaskedLM: 42 tensors, 10,915 parameters"
    pattern = r"the same random tokens through both: logits reach (\S+), differ by at most (\S+) \(0.0\S+ allowed\)"
    found = re.fullmatch(pattern, said[1])
    assert found and float(found[1]) > 1 and 0 < float(found[2]) < 1e-5
    assert cli.main(["convert", ours, back, "--to", "bert", "--no-verify"]) == 0
    assert "differ" not in capsys.readouterr().out
    assert_equal_models(transformers.BertForMaskedLM.from_pretrained(back), theirs)
    capsys.readouterr()
    assert cli.main(["convert", source, ours]) == 2
    assert capsys.readouterr().err == f"scratch-transformer: {ours} exists already: name a new folder\n"


@pytest.mark.parametrize(
    ("name", "task"), [("bert", "MultipleChoice"), ("gpt2", ""), ("gpt2", "SequenceClassification")]
)
def test_what_is_converted_is_compared(name, task, tmp_path):
    native(name, task).bfloat16().save_pretrained(tmp_path / "native")
    report = convert_folder(tmp_path / "native", tmp_path / "ours", verify=True)
    back = convert_folder(tmp_path / "ours", tmp_path / "back", name, verify=True)
    assert report.source == back.target and report.parameters == back.parameters
    assert all(each.compared.difference < 1e-5 < each.compared.reach for each in (report, back))


@pytest.mark.parametrize("name", ["bart", "llama", "gpt_neox"])
def test_a_model_that_would_compute_something_else_is_refused(name, tmp_path, monkeypatch):
    native(name).save_pretrained(tmp_path / "native")
    honest = weights.Translation.tensor

    def wrong(self, parameter: str) -> Tensor:
        tensor = honest(self, parameter)
        return tensor.flip(0) if parameter.endswith("layers.0.mlp.up_proj.weight") else tensor

    monkeypatch.setattr(weights.Translation, "tensor", wrong)
    with pytest.raises(ValueError, match="would compute something else; .* logits reach .* allowed"):
        convert_folder(tmp_path / "native", tmp_path / "ours", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
    convert_folder(tmp_path / "native", tmp_path / "ours")


# One architecture for each option that changes what is computed.
TRAINED = {
    **{"mistral": 0, "smollm3": 1, "gemma2": 0, "gemma3_text": 1, "olmo2": 0, "exaone4": 0, "glm4": 0, "nemotron": 0},
    **{"gpt_neox": 0, "gptj": 0, "granite": 0, "cohere2": 0, "stablelm": 0, "starcoder2": 0, "phi3": 0, "mbart": 0},
    **{"falcon": 1, "modernbert": 0, "mpnet": 0, "m2m_100": 0, "t5": 0, "mt5": 0, "umt5": 1, "t5gemma": 1},
}
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
OVERRIDES = {
    **dict.fromkeys(("mbart", "m2m_100"), NO_DROPOUT | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    "mpnet": {"attention_probs_dropout_prob": 0.0},
}


@pytest.mark.parametrize("name", TRAINED)
def test_ten_steps_of_training_are_those_of_the_native_model(name):
    """AdamW, dropout left out, batches with padding."""
    theirs = native(name, size=TRAINED[name], spread=0.1, **OVERRIDES.get(name, {}))
    ours = convert_from(theirs)
    batches = [batch(ours, with_labels=True) for _ in range(10)]
    losses = []
    for model in (theirs, ours):
        model.train()
        if name == "mbart" and model is ours:
            model.lm_head.bias.requires_grad_(False)  # no parameter of theirs
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses.append([])
        for inputs in batches:
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), atol=1e-4, rtol=0)
    assert losses[0][-1] < losses[0][0] - 0.02


def save_as_ours(name: str, tokenizer, folder: Path, **overrides) -> PreTrainedModel:
    biases = {"attention_bias": False, "mlp_bias": False} if name == "llama" else {}
    ours = convert_from(native(name, vocab_size=len(tokenizer) + 3, **biases | overrides))  # some rows without a token
    ours.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_gguf_out_and_in(name, dtype, tokenizer, tmp_path, capsys):
    """Ours, written as llama.cpp's package has it, read by transformers, and converted again."""
    overrides = {  # what transformers reads: biases where they always are
        "qwen3": {"attention_bias": False},
        "starcoder2": {"sliding_window": None},
    }.get(name, {})
    ours = save_as_ours(name, tokenizer, tmp_path / "ours", tie_word_embeddings=False, **overrides).to(dtype)
    ours.save_pretrained(tmp_path / "ours")
    file = tmp_path / "model.gguf"
    assert cli.main(["export", str(tmp_path / "ours"), "--to", "gguf", str(file)]) == 0
    assert re.search(r"logits reach \S+, differ by at most \S+ ", capsys.readouterr().out)
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert {each.tensor_type.name for each in gguf.GGUFReader(file).tensors if len(each.shape) == 2} == {kind}
    assert cli.main(["convert", str(file), str(tmp_path / "again")]) == 0
    for again in (convert_from(file), type(ours).from_pretrained(tmp_path / "again")):
        assert again.state_dict().keys() == ours.state_dict().keys()
        for parameter, tensor in ours.state_dict().items():
            assert_close(again.state_dict()[parameter].float(), tensor.float(), atol=2e-7, rtol=0, msg=parameter)
    read = AutoTokenizer.from_pretrained(tmp_path / "again")
    for text in ("the cat ate a dog", " Zwei  Zeilen,\n 12 KATZEN: \u4e8c"):
        assert read(text).input_ids == tokenizer(text).input_ids
        assert read.decode(read(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)


def test_what_gguf_cannot_say_is_refused(tokenizer, tmp_path, capsys):
    save_as_ours("llama", tokenizer, tmp_path / "yarn", rope_parameters=LLAMA3_ROPE)
    save_as_ours("gpt2", tokenizer, tmp_path / "gpt2")
    save_as_ours("llama", tokenizer, tmp_path / "good")
    save_as_ours("llama", tokenizer, tmp_path / "gelu", hidden_act="gelu")
    native("llama").save_pretrained(tmp_path / "native")
    words = train_tokenizer(["the cat sat"] * 10, family="encoder", vocab_size=60)
    save_as_ours("llama", words, tmp_path / "words")
    marks = train_tokenizer(["\u0915\u093f\u0938\u0940 \u0928\u0947"] * 10, family="decoder", vocab_size=300)  # Hindi
    save_as_ours("llama", marks, tmp_path / "marks")
    for source, target, message in (
        ("yarn", "new.gguf", "only rope_type='default' is written as gguf"),
        ("gpt2", "new.gguf", "no architecture that is written as gguf has these options: .* cannot become llama"),
        ("words", "new.gguf", "tokenizer: only byte-level BPE over words"),
        ("marks", "new.gguf", r"tokenizer: .* \(.*\) has a combining mark"),
        ("native", "new.gguf", "is a llama model; models of ours become gguf"),
        ("good", "new", "new must end in .gguf"),
        ("gelu", "new.gguf", "hidden_act='gelu' must be 'silu'"),
    ):
        assert cli.main(["export", str(tmp_path / source), str(tmp_path / target), "--to", "gguf"]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert {path.name for path in tmp_path.iterdir()} == {"yarn", "gpt2", "good", "words", "marks", "native", "gelu"}


def test_what_it_can_become_instead_is_named(tmp_path, capsys):
    options = {"norm_type": "rms_norm", "hidden_act": "swiglu", "position_embedding_type": "rotary"}
    tiny.model(tiny.LANGUAGE_MODELS[1], **options, use_qk_norm=True).save_pretrained(tmp_path / "ours")
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "new"), "--to", "llama"]) == 2
    assert "cannot become llama: use_qk_norm=True must be False; it can become qwen3" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
@pytest.mark.parametrize("positions", POSITIONS)
def test_what_else_it_can_become_is_asked_of_every_family(model_class, positions):
    config = tiny.model(model_class, position_embedding_type=positions).config
    config.architectures = [model_class.__name__]
    assert {*_counterparts(config)} <= {*FAMILIES}


def test_gguf_of_a_tied_nemotron_has_the_head_that_llama_cpp_wants(tokenizer, tmp_path):
    ours = save_as_ours("nemotron", tokenizer, tmp_path / "ours", tie_word_embeddings=True)
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "model.gguf"), "--to", "gguf"]) == 0
    assert "output.weight" in {each.name for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    again = convert_from(tmp_path / "model.gguf")
    assert_close(again.lm_head.weight, ours.model.embeddings.word_embeddings.weight)


def test_an_encoder_without_types_of_tokens_is_no_bert(tmp_path, capsys):
    convert_from(native("distilbert")).save_pretrained(tmp_path / "ours")
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "new"), "--to", "bert"]) == 2
    said = capsys.readouterr().err
    assert "type_vocab_size=0 must be one of 1, 2" in said and "it can become distilbert" in said


def test_gguf_that_transformers_passes_over_is_refused(tokenizer, tmp_path, monkeypatch):
    save_as_ours("llama", tokenizer, tmp_path / "biased", attention_bias=True)
    with pytest.raises(ValueError, match="passes over blk.0.attn_k.bias, .*; install llama-cpp-python|--no-verify"):
        export(tmp_path / "biased", "gguf", tmp_path / "model.gguf")
    export(tmp_path / "biased", "gguf", tmp_path / "model.gguf", verify=False)
    with pytest.raises(ValueError, match=r"model.gguf: transformers passes over blk.0.attn_\w+.bias"):
        convert_folder(tmp_path / "model.gguf", tmp_path / "new")
    (tmp_path / "model.gguf").unlink()
    save_as_ours("llama", tokenizer, tmp_path / "ours")
    for write, said in (
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), "rope.scaling.type=linear"),
        (lambda writer: writer.add_rope_scaling_factor(4.0), "rope.scaling.factor=4.0"),
        (lambda writer: writer.add_causal_attention(False), "attention.causal=False"),
        (lambda writer: writer.add_sliding_window(4), "attention.sliding_window=4"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(gguf.GGUFWriter, "add_vocab_size", lambda writer, size, write=write: write(writer))
            export(tmp_path / "ours", "gguf", tmp_path / "model.gguf", verify=False)
        with pytest.raises(ValueError, match=f"model.gguf: transformers passes over {said}"):
            convert_folder(tmp_path / "model.gguf", tmp_path / "new")
        (tmp_path / "model.gguf").unlink()
    assert not (tmp_path / "new").exists()


def test_gguf_with_weights_missing_is_refused(tokenizer, tmp_path, monkeypatch):
    """transformers would draw them at random, with a warning."""
    add = gguf.GGUFWriter.add_tensor

    def without(self, name: str, *args) -> None:
        if name != "blk.1.ffn_up.weight":
            add(self, name, *args)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", without)
    save_as_ours("llama", tokenizer, tmp_path / "ours")
    export(tmp_path / "ours", "gguf", tmp_path / "model.gguf", verify=False)
    with pytest.raises(ValueError, match="model.gguf: 1 weights are missing: model.layers.1.mlp.up_proj.weight"):
        convert_folder(tmp_path / "model.gguf", tmp_path / "new")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ValueError, match="model.gguf: "):
        convert_folder(tmp_path / "model.gguf", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "model.gguf"}


def test_gguf_of_a_folder_with_weights_missing_or_another_head_is_refused(tokenizer, tmp_path):
    save_as_ours("llama", tokenizer, tmp_path / "ours")
    file = tmp_path / "ours" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="up_proj"):
        export(tmp_path / "ours", "gguf", tmp_path / "model.gguf", verify=False)
    tiny.model(scratch.ScratchDecoderForSequenceClassification).save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="is a ScratchDecoderForSequenceClassification; language models become gguf"):
        export(tmp_path / "classifier", "gguf", tmp_path / "model.gguf", verify=False)
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("multiplier", [2.0, 1.5, 0.3])
def test_a_scale_of_queries_that_gemma_cannot_say_is_refused(multiplier):
    ours = convert_from(native("gemma2"))
    ours.config.attention_multiplier = multiplier
    with pytest.raises(ValueError, match="attention_multiplier"):
        convert_to(ours, "gemma2")
    strange = native("gemma2")
    strange.config.query_pre_attn_scalar = 0
    with pytest.raises(ValueError, match="query_pre_attn_scalar=0 must be above 0"):
        convert_from(strange)


def test_a_target_that_starts_with_padding_which_has_no_position_is_refused():
    with pytest.raises(ValueError, match="decoder_start_token_id=0 must be one of 'any but pad_token_id'"):
        convert_from(native("m2m_100", decoder_start_token_id=0))


def test_a_class_that_there_is_not_is_no_backbone():
    with pytest.raises(ValueError, match="ScratchDecoderFoo cannot become llama"):
        our_task("ScratchDecoderFoo", "llama")


@pytest.mark.parametrize(
    "engine, message",
    [
        ("ctranslate2", "needs ctranslate2: pip install ctranslate2"),
        ("executorch", "needs executorch: pip install executorch"),
        ("gguf", "needs gguf: pip install gguf llama-cpp-python"),
        ("onnx", "needs onnx and onnxscript: pip install onnx onnxscript onnxruntime"),
    ],
)
def test_an_engine_that_is_not_there_is_named(engine, message, tmp_path, monkeypatch, capsys):
    """What it does with our models is tested where it is installed, in tests/tools."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["export", str(tmp_path), str(tmp_path / "new"), "--to", engine]) == 2
    assert capsys.readouterr().err == f"scratch-transformer: --to {engine} {message}\n"
    assert not (tmp_path / "new").exists()


# Engines, the card, and what is left behind


@pytest.fixture
def with_card(tokenizer, tmp_path):
    """A language model's folder with a card, deep enough for its neighbours."""
    folder = tmp_path / "run" / "model"
    save_as_ours("llama", tokenizer, folder, tie_word_embeddings=False)
    write_model_card(folder, RunRecords(name="tiny"))
    return folder


def test_an_export_lies_beside_the_model_and_is_on_its_card(with_card, capsys, monkeypatch):
    before = (with_card / "README.md").read_text()
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "llama_cpp" else real(name))
    assert cli.main(["export", str(with_card), "--to", "llama"]) == 0
    assert cli.main(["export", str(with_card), "--to", "gguf"]) == 0
    said = capsys.readouterr().out
    assert said.count("40 of 40 greedy tokens are the same") == 2
    assert "for the engine itself: pip install llama-cpp-python, which runs it\n" in said
    assert {path.name for path in with_card.parent.iterdir()} == {"model", "model-llama", "model.gguf"}
    card = (with_card / "README.md").read_text()
    by = f"transformers {transformers.__version__}"
    rows = re.findall(r"^\| (\w+) \| (.*?) \| logits.* reach .*; 40 of 40 .* \| \S+ \| \S+ \|$", card, re.MULTILINE)
    assert rows == [("gguf", by), ("llama", by)]
    found = hub.CHECKS.search(card)
    assert card[: found.start()] + card[found.end() :] == before and card[found.end() :].startswith("## Limits")
    assert AutoConfig.from_pretrained(with_card.parent / "model-llama").model_type == "llama"
    again = with_card.parent / "again.gguf"
    assert cli.main(["export", str(with_card), str(again), "--to", "gguf"]) == 0
    assert (with_card / "README.md").read_text() == card  # a row for each engine, as it was computed last


def test_a_card_claims_nothing_of_other_weights(with_card):
    assert cli.main(["export", str(with_card), "--to", "llama"]) == 0
    file = with_card / "model.safetensors"
    save_file({name: each * 1.5 for name, each in load_file(file).items()}, file, metadata={"format": "pt"})
    assert cli.main(["export", str(with_card), "--to", "gguf"]) == 0
    card = (with_card / "README.md").read_text()
    assert "| gguf | " in card and "| llama | " not in card


def test_a_folder_without_a_card_of_ours_stays_as_it_is(tokenizer, tmp_path):
    for name, text in {"none": None, "another": "---\ntags: [mine]\n---\n\n# Mine\n"}.items():
        save_as_ours("llama", tokenizer, tmp_path / name)
        if text is not None:
            (tmp_path / name / "README.md").write_text(text)
        before = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert cli.main(["export", str(tmp_path / name), "--to", "llama"]) == 0
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == before


@pytest.mark.parametrize("to", ["gguf", "qwen3"])
def test_what_would_compute_or_write_something_else_is_refused_and_leaves_nothing(
    to, tokenizer, tmp_path, monkeypatch, capsys
):
    ours = save_as_ours("qwen3", tokenizer, tmp_path / "ours", attention_bias=False, head_dim=128)
    module = importlib.import_module(f"hf_scratch_transformer.conversion.{'gguf' if to == 'gguf' else 'weights'}")
    if to == "gguf":
        honest = module._numbers
        monkeypatch.setattr(module, "_numbers", lambda tensor: honest(tensor.flip(0) if tensor.ndim == 1 else tensor))
    else:
        change = module.Translation.tensor
        wrong = "model.layers.1.mlp.gate_proj.weight"
        monkeypatch.setattr(
            module.Translation,
            "tensor",
            lambda self, name: change(self, name).flip(0) if name == wrong else change(self, name),
        )
    assert to == "qwen3" or ours.config.use_qk_norm
    target = tmp_path / "deep" / "er" / f"new{'.gguf' if to == 'gguf' else ''}"
    assert cli.main(["export", str(tmp_path / "ours"), str(target), "--to", to]) == 2
    assert "would compute something else" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_model_that_writes_other_tokens_is_told_by_how_much():
    ours = convert_from(native("llama", spread=0.5))
    theirs = copy.deepcopy(ours)
    honest = follow(ours, by_model(theirs))
    assert honest.is_close and honest.tokens == (40, 40)

    def second_best(source, text, count):
        tokens, logits = by_model(theirs)(source, text, count)
        tokens[:, -1] = logits[:, -1].topk(2).indices[:, 1]
        return tokens, logits

    found = follow(ours, second_best)
    gap = by_model(theirs)(None, folders_prompt(ours), 20)[1][:, -1].topk(2).values.diff().abs().max()
    assert found.tokens == (38, 40) and found.output == "logits of the greedy tokens" and not found.is_close
    assert found.difference == pytest.approx(gap.item(), rel=1e-3)


def folders_prompt(model):
    return tokens_for(model)["input_ids"][:, :PROMPT]


def test_a_tokenizer_that_is_no_mapping_is_named(tmp_path, capsys):
    native("bert").save_pretrained(tmp_path / "native")
    (tmp_path / "native" / "tokenizer_config.json").write_text("[1]")
    assert cli.main(["convert", str(tmp_path / "native"), str(tmp_path / "deep" / "new")]) == 2
    assert "tokenizer_config.json must be a mapping, not a list" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_engines_take_an_id_of_the_hub(tokenizer, tmp_path, monkeypatch):
    save_as_ours("llama", tokenizer, tmp_path / "home" / "ours", tie_word_embeddings=False)
    monkeypatch.setattr(folders, "snapshot_download", lambda name, **_: str(tmp_path / "home" / name.split("/")[1]))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "tester/ours", "--to", "gguf"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "ours.gguf"]


def test_t5gemma_need_not_say_its_vocabulary_twice(tmp_path):
    """Those of the two stacks are what it looks at; transformers fills in 256,000 above them."""
    theirs = native("t5gemma")
    theirs.save_pretrained(tmp_path / "native")
    path = tmp_path / "native" / "config.json"
    options = json.loads(path.read_text())
    del options["vocab_size"]
    path.write_text(json.dumps(options))
    report = convert_folder(tmp_path / "native", tmp_path / "ours", verify=True)
    assert report.compared.tokens == (40, 40)
    back = convert_folder(tmp_path / "ours", tmp_path / "back", "t5gemma", verify=True)
    assert back.compared.tokens == (40, 40)
    assert AutoConfig.from_pretrained(tmp_path / "back").encoder.vocab_size == theirs.config.encoder.vocab_size
