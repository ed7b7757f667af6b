"""Decoders, one table each."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..configuration_scratch import LAYER_TYPES, ScratchDecoderConfig, rotary_dim, rotations
from .shared import (
    ACTIVATIONS,
    ANY_BIAS,
    EQUAL_HEADS,
    GATED,
    NATIVE,
    NO_BIAS,
    NOT_QUANTIZED,
    QKV,
    QUESTIONS,
    SOME_CLASSIFIER_DROPOUT,
    TOKENS,
    USE_BIAS,
    WITH_BIASES,
)
from .tables import (
    Family,
    Field,
    Fused,
    Head,
    Interleaved,
    Joined,
    JoinedByGroup,
    Requirement,
    Row,
    Transform,
    Transposed,
    chosen,
    every,
    only,
    same,
)


def decoder_heads(
    prefix: str, lm_head: str = "lm_head", tokens: str = "score", causal: str = "ForCausalLM"
) -> dict[str, Head]:
    """Those that decoders name alike, as far as transformers has them."""
    heads = {
        "": Head(f"{prefix}Model", constants=NO_BIAS),
        "CausalLM": Head(f"{prefix}{causal}", (Row(lm_head, "lm_head"),), NO_BIAS),
        "SequenceClassification": Head(f"{prefix}ForSequenceClassification", (Row("score", "classifier"),), NO_BIAS),
        "TokenClassification": Head(f"{prefix}ForTokenClassification", (Row(tokens, "classifier"),), ANY_BIAS),
        "QuestionAnswering": Head(f"{prefix}ForQuestionAnswering", QUESTIONS, ANY_BIAS),
    }
    return {task: head for task, head in heads.items() if head.native in NATIVE}


# GPT-2 (Radford et al., 2019)

GPT2 = Family(
    native="gpt2",
    config=ScratchDecoderConfig,
    rows=(
        Row("wte", "embeddings.word_embeddings"),
        Row("wpe", "embeddings.position_embeddings"),
        Row("h.{layer}.ln_1", "layers.{layer}.self_attn_norm"),
        Row("h.{layer}.attn.c_attn", QKV, Fused()),
        Row("h.{layer}.attn.c_proj", "layers.{layer}.self_attn.o_proj", Transposed()),
        Row("h.{layer}.ln_2", "layers.{layer}.mlp_norm"),
        Row("h.{layer}.mlp.c_fc", "layers.{layer}.mlp.up_proj", Transposed()),
        Row("h.{layer}.mlp.c_proj", "layers.{layer}.mlp.down_proj", Transposed()),
        Row("ln_f", "norm"),
    ),
    heads=decoder_heads("GPT2", tokens="classifier", causal="LMHeadModel"),
    fields=TOKENS
    + same("initializer_range", "use_cache")
    + (
        Field("n_positions", "max_position_embeddings"),
        Field("n_embd", "hidden_size"),
        Field("n_layer", "num_hidden_layers"),
        Field("n_head", "num_attention_heads"),
        Field("n_inner", "intermediate_size", lambda width, theirs: width or 4 * theirs["n_embd"]),
        Field("layer_norm_epsilon", "layer_norm_eps"),
        Field("resid_pdrop", "dropout"),
        Field("embd_pdrop", "dropout"),
        Field("attn_pdrop", "attention_dropout"),
        chosen("activation_function", "hidden_act", ACTIVATIONS),
    ),
    constants={**WITH_BIASES, "position_embedding_type": "learned"},
    requires={
        **NOT_QUANTIZED,
        "add_cross_attention": only(False),
        "scale_attn_weights": only(True),
        "scale_attn_by_inverse_layer_idx": only(False),
    },
    taken_as={"GPT2DoubleHeadsModel": "CausalLM"},
    left_out=("multiple_choice_head.",),
)

# OPT (Zhang et al., 2022) and BioGPT (Luo et al., 2022): GPT-2 with matrices of their own for queries, keys and values

OPT_LAYER = {
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn_layer_norm": "self_attn_norm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
    "final_layer_norm": "mlp_norm",
}


def like_opt(
    native: str,
    stack: str,
    final_norm: str,
    heads: Mapping[str, Head],
    fields: tuple[Field, ...],
    requires: Mapping[str, Requirement] | None = None,
) -> Family:
    return Family(
        native=native,
        config=ScratchDecoderConfig,
        rows=(
            Row(f"{stack}embed_tokens", "embeddings.word_embeddings"),
            Row(f"{stack}embed_positions", "embeddings.position_embeddings"),
            *(
                Row(f"{stack}layers.{{layer}}.{theirs}", f"layers.{{layer}}.{ours}")
                for theirs, ours in OPT_LAYER.items()
            ),
            Row(f"{stack}{final_norm}", "norm"),
        ),
        heads=heads,
        fields=TOKENS
        + same("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "use_cache")
        + fields,
        constants={
            **WITH_BIASES,
            "position_embedding_type": "learned",
            "position_offset": 2,
            "layer_norm_eps": 1e-5,
        },
        requires={**NOT_QUANTIZED, **(requires or {})},
    )


OPT = like_opt(
    "opt",
    "decoder.",
    "final_layer_norm",
    decoder_heads("OPT"),
    same("dropout", "attention_dropout")
    + (
        Field("ffn_dim", "intermediate_size"),
        Field("init_std", "initializer_range"),
        chosen("activation_function", "hidden_act", ACTIVATIONS),
    ),
    {
        "do_layer_norm_before": only(True),
        "_remove_final_layer_norm": only(False),
        "enable_bias": only(True),
        "layer_norm_elementwise_affine": only(True),
        "word_embed_proj_dim": Requirement("hidden_size", lambda width, theirs: width in (None, theirs["hidden_size"])),
    },
)
BIOGPT = like_opt(
    "biogpt",
    "",
    "layer_norm",
    decoder_heads("BioGpt", "output_projection", "classifier"),
    same("intermediate_size", "initializer_range", "scale_embedding", "activation_dropout")
    + (
        Field("hidden_dropout_prob", "dropout"),
        Field("attention_probs_dropout_prob", "attention_dropout"),
        chosen("hidden_act", "hidden_act", ACTIVATIONS),
    ),
)

# Llama (Touvron et al., 2023) and those built like it

ATTENTION_ROWS = tuple(
    Row(f"layers.{{layer}}.self_attn.{name}", f"layers.{{layer}}.self_attn.{name}")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
)
MLP_ROWS = tuple(
    Row(f"layers.{{layer}}.mlp.{name}", f"layers.{{layer}}.mlp.{name}")
    for name in ("gate_proj", "up_proj", "down_proj")
)
ENDS = (Row("embed_tokens", "embeddings.word_embeddings"), Row("norm", "norm"))


def norm_rows(**norms: str) -> tuple[Row, ...]:
    """{ours: theirs}"""
    return tuple(Row(f"layers.{{layer}}.{theirs}", f"layers.{{layer}}.{ours}") for ours, theirs in norms.items())


PRE_NORMS = norm_rows(self_attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
LLAMA_ROWS = (*ENDS, *ATTENTION_ROWS, *MLP_ROWS, *PRE_NORMS)
FULL_ROTATION = {
    "rope_parameters": Requirement(
        "without partial_rotary_factor",
        lambda rope, _: all(each.get("partial_rotary_factor") in (None, 1.0) for each in rotations(rope)),
    )
}
LLAMA_CONSTANTS: Mapping[str, Any] = {
    **{name: EQUAL_HEADS[name] for name in ("value_head_dim", "attention_output_bias")},
    "position_embedding_type": "rotary",
}
NO_EXPERTS = {"num_experts": only(None, 0), "num_local_experts": only(None, 0)}
ANY_ROTATION: Mapping[str, Requirement] = {"layer_types": every("full_attention")}
LLAMA_REQUIRES = {**ANY_ROTATION, **FULL_ROTATION}
RMS_EPS = (Field("rms_norm_eps", "layer_norm_eps"),)
LAYER_EPS = same("layer_norm_eps")
LLAMA_FIELDS = TOKENS + same(
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_parameters",
    "initializer_range",
    "attention_dropout",
    "use_cache",
)
GATED_ACT = (chosen("hidden_act", "hidden_act", GATED),)
PLAIN_ACT = (chosen("hidden_act", "hidden_act", ACTIVATIONS),)


def like_llama(
    native: str,
    prefix: str,
    fields: tuple[Field, ...],
    constants: Mapping[str, Any],
    requires: Mapping[str, Requirement] | None = None,
    written: Mapping[str, Any] | None = None,
    rows: tuple[Row, ...] = LLAMA_ROWS,
    act: tuple[Field, ...] = GATED_ACT,
    eps: tuple[Field, ...] = RMS_EPS,
    heads: Mapping[str, Head] | None = None,
    without: str | None = None,
    saved_as: Mapping[str, str] | None = None,
) -> Family:
    return Family(
        native=native,
        config=ScratchDecoderConfig,
        rows=rows,
        heads=heads or decoder_heads(prefix),
        fields=tuple(option for option in LLAMA_FIELDS if option.theirs != without) + eps + act + fields,
        constants={**LLAMA_CONSTANTS, **constants},
        requires={**NOT_QUANTIZED, **NO_EXPERTS, **(LLAMA_REQUIRES if requires is None else requires)},
        written=written or {},
        saved_as=saved_as or {},
    )


# Where the width of a head is no option, it follows from the others.
FREE_HEADS = same("head_dim")
EQUAL_WIDTHS = {"head_dim": EQUAL_HEADS["head_dim"]}
DERIVED_HEADS = {
    "head_dim": Requirement(
        "hidden_size // num_attention_heads",
        lambda dim, theirs: dim in (None, theirs["hidden_size"] // theirs["num_attention_heads"]),
    )
}
SEPARATE_BIASES = same("attention_bias", "mlp_bias")
LLAMA = like_llama("llama", "Llama", FREE_HEADS + SEPARATE_BIASES, {})
SEED_OSS = like_llama(
    "seed_oss",
    "SeedOss",
    FREE_HEADS
    + SEPARATE_BIASES
    + (Field("attention_out_bias", "attention_output_bias"), Field("residual_dropout", "dropout")),
    {},
)
NO_GATE_ROWS = tuple(row for row in LLAMA_ROWS if "gate_proj" not in row.theirs)
ARCEE = like_llama("arcee", "Arcee", FREE_HEADS + SEPARATE_BIASES, {}, rows=NO_GATE_ROWS, act=PLAIN_ACT)


# Blocks of several kinds, or all of one

BY_KIND = same("layer_types", "sliding_window")


def window_of_all(kinds: Sequence[str], ours: Mapping[str, Any]) -> int | None:
    if len(set(kinds)) > 1:
        raise KeyError(*([kind] * len(kinds) for kind in sorted(set(kinds))))
    return ours["sliding_window"] if "sliding_attention" in kinds else None


ONE_WINDOW = (
    Field(
        "sliding_window",
        "layer_types",
        lambda window, theirs: ["sliding_attention" if window else "full_attention"] * theirs["num_hidden_layers"],
        window_of_all,
    ),
    Field("sliding_window", "sliding_window", back=lambda window, ours: window_of_all(ours["layer_types"], ours)),
)
# Some make the mask of a window that no layer has, too.
SOME_WINDOW = Field("sliding_window", "sliding_window", back=lambda window, _: 4096 if window is None else window)
BY_KIND_ALWAYS = (*same("layer_types"), SOME_WINDOW)
USE_WINDOW = {"use_sliding_window": lambda config: "sliding_attention" in config.layer_types}
KINDS_REQUIRE = {
    "layer_types": Requirement(" or ".join(LAYER_TYPES), lambda kinds, _: set(kinds or ()) <= set(LAYER_TYPES))
}
OF_KINDS = {**KINDS_REQUIRE, **FULL_ROTATION}
MISTRAL = like_llama("mistral", "Mistral", FREE_HEADS + ONE_WINDOW, {})
MINISTRAL = like_llama("ministral", "Ministral", FREE_HEADS + BY_KIND_ALWAYS, {}, OF_KINDS)
QWEN2 = like_llama(
    "qwen2",
    "Qwen2",
    BY_KIND,
    {**EQUAL_WIDTHS, "attention_bias": True, "attention_output_bias": False},
    {**OF_KINDS, **DERIVED_HEADS},
    USE_WINDOW,
)
QWEN3 = like_llama(
    "qwen3", "Qwen3", FREE_HEADS + same("attention_bias") + BY_KIND, {"use_qk_norm": True}, OF_KINDS, USE_WINDOW
)
SMOLLM3 = like_llama(
    "smollm3",
    "SmolLM3",
    SEPARATE_BIASES
    + BY_KIND
    + (
        Field(
            "no_rope_layers",
            "no_rope_layers",
            lambda turned, _: None if all(turned) else turned,
            lambda turned, ours: turned or [1] * ours["num_hidden_layers"],
        ),
    ),
    EQUAL_WIDTHS,
    {**OF_KINDS, **DERIVED_HEADS},
    USE_WINDOW,
)


# Where each kind of block has a rotation of its own, ours may have one for all.
ROPE_OF_KINDS = Field(
    "rope_parameters",
    "rope_parameters",
    back=lambda rope, _: rope if rope is None or set(rope) <= set(LAYER_TYPES) else dict.fromkeys(LAYER_TYPES, rope),
)

# Norms of what the sub-layers compute: OLMo 2 and 3 (OLMo Team, 2025), EXAONE 4 (LG AI Research, 2025)

OUTPUT_NORMS = norm_rows(self_attn_output_norm="post_attention_layernorm", mlp_output_norm="post_feedforward_layernorm")
REORDERED_ROWS = (*ENDS, *ATTENTION_ROWS, *MLP_ROWS, *OUTPUT_NORMS)
REORDERED = {**EQUAL_WIDTHS, "norm_position": "reordered", "use_qk_norm": True}
ACROSS_HEADS = {**REORDERED, "qk_norm_across_heads": True}
OLMO2 = like_llama("olmo2", "Olmo2", same("attention_bias"), ACROSS_HEADS, rows=REORDERED_ROWS)
OLMO3 = like_llama(
    "olmo3",
    "Olmo3",
    same("attention_bias") + BY_KIND_ALWAYS + (ROPE_OF_KINDS,),
    ACROSS_HEADS,
    OF_KINDS,
    rows=REORDERED_ROWS,
    without="rope_parameters",
)


def turned_in_windows(always: bool) -> Field:
    """Blocks without a window know no positions; unless no block has one, or `always`."""

    def turned(kinds: Sequence[str], options: Mapping[str, Any]) -> list[int] | None:
        if options["sliding_window"] is None and not always:
            return None
        each = [int(kind == "sliding_attention") for kind in kinds]
        return None if all(each) else each

    def back(each: list[int] | None, ours: Mapping[str, Any]) -> Sequence[str]:
        if each != (right := turned(ours["layer_types"], ours)):
            raise KeyError(right)
        return ours["layer_types"]

    return Field("layer_types", "no_rope_layers", turned, back)


EXAONE4 = like_llama(
    "exaone4", "Exaone4", BY_KIND + (turned_in_windows(False),), REORDERED, OF_KINDS, rows=REORDERED_ROWS
)


# Gemma (Gemma Team, 2024 and 2025)

GEMMA: Mapping[str, Any] = {"norm_type": "rms_norm_1p", "scale_embedding": True}
ONE_SIDED = {"use_bidirectional_attention": only(None, False)}
GEMMA1 = like_llama("gemma", "Gemma", FREE_HEADS + same("attention_bias"), GEMMA, {**LLAMA_REQUIRES, **ONE_SIDED})
SANDWICH_ROWS = (
    *(*ENDS, *ATTENTION_ROWS, *MLP_ROWS, *OUTPUT_NORMS),
    *norm_rows(self_attn_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm"),
)


def scalar_of(multiplier: float | None, ours: Mapping[str, Any]) -> int:
    scalar = ours["head_dim"] if multiplier is None else round(multiplier**-2) if multiplier else 0
    if multiplier is not None and not (scalar and math.isclose(multiplier, scalar**-0.5, rel_tol=1e-12)):
        raise KeyError("the inverse root of an integer")
    return scalar


def multiplier_of(scalar: float, _: Mapping[str, Any]) -> float:
    if not scalar > 0:
        raise ValueError(f"query_pre_attn_scalar={scalar!r} must be above 0")
    return scalar**-0.5


QUERY_SCALAR = Field("query_pre_attn_scalar", "attention_multiplier", multiplier_of, scalar_of)
GEMMA2_FIELDS = (
    *FREE_HEADS,
    *same("attention_bias", "final_logit_softcapping"),
    *BY_KIND_ALWAYS,
    QUERY_SCALAR,
)
GEMMA2_ACT = (chosen("hidden_activation", "hidden_act", GATED),)
SANDWICH = {**GEMMA, "norm_position": "sandwich"}
GEMMA2 = like_llama(
    "gemma2",
    "Gemma2",
    GEMMA2_FIELDS + same("attn_logit_softcapping"),
    SANDWICH,
    {**OF_KINDS, **ONE_SIDED},
    rows=SANDWICH_ROWS,
    act=GEMMA2_ACT,
)
GEMMA3 = like_llama(
    "gemma3_text",
    "Gemma3",
    (*GEMMA2_FIELDS, ROPE_OF_KINDS),
    {**SANDWICH, "use_qk_norm": True},
    {**OF_KINDS, **ONE_SIDED, "attn_logit_softcapping": only(None)},
    rows=SANDWICH_ROWS,
    act=GEMMA2_ACT,
    heads={**decoder_heads("Gemma3Text"), "CausalLM": decoder_heads("Gemma3")["CausalLM"]},
    without="rope_parameters",
)


# Matrices that are stored as one, heads turned in part or in pairs of neighbours: Phi-3 (Abdin et al., 2024), GLM and
# GLM-4 (GLM Team, 2024), Helium, ERNIE 4.5

JOINED_MLP = (
    Row(
        "layers.{layer}.mlp.gate_up_proj",
        ("layers.{layer}.mlp.gate_proj", "layers.{layer}.mlp.up_proj"),
        lambda ours: Joined(ours.intermediate_size, ours.intermediate_size),
    ),
    Row("layers.{layer}.mlp.down_proj", "layers.{layer}.mlp.down_proj"),
)


def joined_heads(config: Any) -> Joined:
    queries, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    return Joined(queries, keys, keys)


def turned_entries(config: Any) -> int:
    return rotary_dim(config.head_dim, config.rope_parameters)


def neighbours(names: Mapping[str, str]) -> tuple[Row, ...]:
    """{ours: theirs} of an attention, whose queries and keys are turned in pairs of neighbours."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}

    def transform(name: str) -> Transform | Callable[[Any], Transform]:
        if name not in counts:
            return Transform()
        return lambda config: Interleaved(getattr(config, counts[name]), turned_entries(config))

    return tuple(
        Row(f"layers.{{layer}}.{theirs}", f"layers.{{layer}}.self_attn.{ours}", transform(ours))
        for ours, theirs in names.items()
    )


NEIGHBOUR_ROWS = neighbours({name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
RESIDUAL_DROPOUTS = (Field("resid_pdrop", "dropout"), Field("embd_pdrop", "dropout"))
PHI3 = like_llama(
    "phi3",
    "Phi3",
    ONE_WINDOW + RESIDUAL_DROPOUTS,
    EQUAL_WIDTHS,
    ANY_ROTATION,
    rows=(
        *(*ENDS, *JOINED_MLP, *PRE_NORMS),
        Row("layers.{layer}.self_attn.qkv_proj", QKV, joined_heads),
        Row("layers.{layer}.self_attn.o_proj", "layers.{layer}.self_attn.o_proj"),
    ),
    written={  # which overrides that of the rotation
        "original_max_position_embeddings": lambda config: config.rope_parameters.get(
            "original_max_position_embeddings", 4096
        )
    },
)
NO_OUTPUT_BIAS = {"attention_output_bias": False}
GLM = like_llama(
    "glm",
    "Glm",
    FREE_HEADS + same("attention_bias"),
    NO_OUTPUT_BIAS,
    ANY_ROTATION,
    rows=(*ENDS, *NEIGHBOUR_ROWS, *JOINED_MLP, *PRE_NORMS),
)
GLM4 = like_llama(
    "glm4",
    "Glm4",
    FREE_HEADS + same("attention_bias"),
    {**NO_OUTPUT_BIAS, "norm_position": "sandwich"},
    ANY_ROTATION,
    rows=(
        *(*ENDS, *NEIGHBOUR_ROWS, *JOINED_MLP, *PRE_NORMS),
        *norm_rows(self_attn_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"),
    ),
)
NEIGHBOURS = (*ENDS, *NEIGHBOUR_ROWS, *MLP_ROWS, *PRE_NORMS)
HELIUM = like_llama(
    "helium",
    "Helium",
    FREE_HEADS + SEPARATE_BIASES,
    NO_OUTPUT_BIAS,
    {**LLAMA_REQUIRES, **DERIVED_HEADS},
    rows=NEIGHBOURS,
)
ERNIE45 = like_llama(
    "ernie4_5",
    "Ernie4_5",
    FREE_HEADS + USE_BIAS,
    {},
    rows=NEIGHBOURS,
    without="attention_dropout",
)

# Multipliers: Granite (IBM Granite Team, 2024)

GRANITE = like_llama(
    "granite",
    "Granite",
    SEPARATE_BIASES
    + same("embedding_multiplier", "logits_scaling", "residual_multiplier")
    + (
        Field(
            "attention_multiplier",
            "attention_multiplier",
            back=lambda multiplier, ours: ours["head_dim"] ** -0.5 if multiplier is None else multiplier,
        ),
    ),
    EQUAL_WIDTHS,
    {**LLAMA_REQUIRES, **DERIVED_HEADS},
)

# Layer norms: StarCoder2 (Lozhkov et al., 2024), Nemotron (Parmar et al., 2024), StableLM (Bellagente et al., 2024),
# Phi (Gunasekar et al., 2023), Cohere

LAYER_NORM = {"norm_type": "layer_norm"}
STARCODER2 = like_llama(
    "starcoder2",
    "Starcoder2",
    ONE_WINDOW + USE_BIAS + (Field("residual_dropout", "dropout"), Field("embedding_dropout", "dropout")),
    {**EQUAL_WIDTHS, **LAYER_NORM},
    {**LLAMA_REQUIRES, **DERIVED_HEADS},
    rows=(
        *(*ENDS, *ATTENTION_ROWS, *PRE_NORMS),
        Row("layers.{layer}.mlp.c_fc", "layers.{layer}.mlp.up_proj"),
        Row("layers.{layer}.mlp.c_proj", "layers.{layer}.mlp.down_proj"),
    ),
    act=PLAIN_ACT,
    eps=(Field("norm_epsilon", "layer_norm_eps"),),
)
NEMOTRON = like_llama(
    "nemotron",
    "Nemotron",
    FREE_HEADS + SEPARATE_BIASES,
    {"norm_type": "layer_norm_1p"},
    ANY_ROTATION,
    rows=NO_GATE_ROWS,
    act=PLAIN_ACT,
    eps=(Field("norm_eps", "layer_norm_eps"),),
)
STABLELM = like_llama(
    "stablelm",
    "StableLm",
    (
        Field("use_qkv_bias", "attention_bias"),
        Field("hidden_dropout", "dropout"),
        chosen("use_parallel_residual", "norm_position", {True: "parallel_shared", False: "pre"}),
    ),
    {**EQUAL_WIDTHS, **LAYER_NORM, **NO_OUTPUT_BIAS},
    {**ANY_ROTATION, "qk_layernorm": only(False)},
    eps=LAYER_EPS,
)
SHARED_NORM = norm_rows(self_attn_norm="input_layernorm")
PARALLEL = {**LAYER_NORM, "norm_position": "parallel_shared"}
PHI = like_llama(
    "phi",
    "Phi",
    RESIDUAL_DROPOUTS,
    {**EQUAL_WIDTHS, **PARALLEL, "attention_bias": True, "mlp_bias": True, "lm_head_bias": True},
    {**ANY_ROTATION, "qk_layernorm": only(False)},
    rows=(
        Row("embed_tokens", "embeddings.word_embeddings"),
        Row("final_layernorm", "norm"),
        *(*ATTENTION_ROWS[:3], *SHARED_NORM),
        Row("layers.{layer}.self_attn.dense", "layers.{layer}.self_attn.o_proj"),
        Row("layers.{layer}.mlp.fc1", "layers.{layer}.mlp.up_proj"),
        Row("layers.{layer}.mlp.fc2", "layers.{layer}.mlp.down_proj"),
    ),
    act=PLAIN_ACT,
    eps=LAYER_EPS,
)
COHERE_FIELDS = (
    *same("attention_bias"),
    Field("logit_scale", "logits_scaling", lambda scale, _: 1 / scale, lambda scaling, _: 1 / scaling),
)
COHERE_CONSTANTS = {**EQUAL_WIDTHS, **PARALLEL, "norm_bias": False}
COHERE_ROWS = (*ENDS, *NEIGHBOUR_ROWS, *MLP_ROWS, *SHARED_NORM)
COHERE = like_llama(
    "cohere",
    "Cohere",
    COHERE_FIELDS,
    COHERE_CONSTANTS,
    {**LLAMA_REQUIRES, "use_qk_norm": only(None, False)},
    rows=COHERE_ROWS,
    eps=LAYER_EPS,
)
COHERE2 = like_llama(
    "cohere2",
    "Cohere2",
    COHERE_FIELDS + BY_KIND + (turned_in_windows(True),),
    COHERE_CONSTANTS,
    {**OF_KINDS, **DERIVED_HEADS},
    rows=COHERE_ROWS,
    eps=LAYER_EPS,
)

# GPT-NeoX (Black et al., 2022; Pythia, Biderman et al., 2023), Falcon (Almazrouei et al., 2023) and GPT-J (Wang &
# Komatsuzaki, 2021)


def by_group(config: Any) -> JoinedByGroup:
    return JoinedByGroup(config.num_attention_heads, config.num_key_value_heads)


GPT_NEOX = like_llama(
    "gpt_neox",
    "GPTNeoX",
    same("attention_bias")
    + (
        SOME_CLASSIFIER_DROPOUT,
        Field("hidden_dropout", "dropout"),
        chosen("use_parallel_residual", "norm_position", {True: "parallel", False: "pre"}),
    ),
    {**EQUAL_HEADS, **LAYER_NORM, "mlp_bias": True},
    ANY_ROTATION,
    rows=(
        Row("embed_in", "embeddings.word_embeddings"),
        Row("final_layer_norm", "norm"),
        *PRE_NORMS,
        Row("layers.{layer}.attention.query_key_value", QKV, by_group),
        Row("layers.{layer}.attention.dense", "layers.{layer}.self_attn.o_proj"),
        Row("layers.{layer}.mlp.dense_h_to_4h", "layers.{layer}.mlp.up_proj"),
        Row("layers.{layer}.mlp.dense_4h_to_h", "layers.{layer}.mlp.down_proj"),
    ),
    act=PLAIN_ACT,
    eps=LAYER_EPS,
    heads=decoder_heads("GPTNeoX", tokens="classifier"),
    without="num_key_value_heads",
    saved_as={"lm_head.": "embed_out."},
)


# The later models ("new" ones) have groups of heads, and two norms for what is side by side, or one.


def norms_of(is_parallel: bool, theirs: Mapping[str, Any]) -> str:
    if not is_parallel:
        return "pre"
    count = theirs["num_ln_in_parallel_attn"] or 2
    return "parallel" if theirs["new_decoder_architecture"] and count == 2 else "parallel_shared"


def is_parallel(norm_position: str, ours: Mapping[str, Any]) -> bool:
    known = {"parallel": True, "parallel_shared": True}
    if ours["num_key_value_heads"] in (1, ours["num_attention_heads"]):
        known["pre"] = False
    if norm_position not in known:
        raise KeyError(*known)
    return known[norm_position]


def is_new(config: Any) -> bool:
    return config.norm_position == "parallel" or config.num_key_value_heads not in (1, config.num_attention_heads)


def groups_of(groups: int, theirs: Mapping[str, Any]) -> int:
    if theirs["new_decoder_architecture"]:
        return groups
    return 1 if theirs["multi_query"] else theirs["num_attention_heads"]


FALCON = Family(
    native="falcon",
    config=ScratchDecoderConfig,
    rows=(
        Row("word_embeddings", "embeddings.word_embeddings"),
        Row("ln_f", "norm"),
        *(
            Row(f"h.{{layer}}.{theirs}", f"layers.{{layer}}.{ours}")
            for theirs, ours in (
                *(("input_layernorm", "self_attn_norm"), ("post_attention_layernorm", "mlp_norm")),
                *(("ln_attn", "self_attn_norm"), ("ln_mlp", "mlp_norm")),
                *(("self_attention.dense", "self_attn.o_proj"),),
                *(("mlp.dense_h_to_4h", "mlp.up_proj"), ("mlp.dense_4h_to_h", "mlp.down_proj")),
            )
        ),
        Row("h.{layer}.self_attention.query_key_value", QKV, by_group),
    ),
    heads=decoder_heads("Falcon", tokens="classifier"),
    fields=TOKENS
    + same("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rope_parameters")
    + same("initializer_range", "attention_dropout", "use_cache")
    + (
        Field("num_kv_heads", "num_key_value_heads", groups_of),
        Field("ffn_hidden_size", "intermediate_size"),
        Field("layer_norm_epsilon", "layer_norm_eps"),
        Field("hidden_dropout", "dropout"),
        *(Field("bias", name) for name in ("attention_bias", "mlp_bias")),
        chosen("activation", "hidden_act", ACTIVATIONS),
        Field("parallel_attn", "norm_position", norms_of, is_parallel),
    ),
    constants={
        **{name: value for name, value in EQUAL_HEADS.items() if name != "num_key_value_heads"},
        **LAYER_NORM,
        "position_embedding_type": "rotary",
    },
    requires={
        **NOT_QUANTIZED,
        **FULL_ROTATION,
        "alibi": only(False),
        "new_decoder_architecture": Requirement(
            "with parallel_attn=True", lambda new, theirs: not new or theirs["parallel_attn"]
        ),
    },
    written={
        "new_decoder_architecture": is_new,
        "multi_query": lambda config: config.num_key_value_heads == 1,
        "num_ln_in_parallel_attn": lambda config: 1 + (config.norm_position == "parallel") if is_new(config) else None,
    },
)


def rope_of(turned: int, theirs: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = theirs["n_embd"] // theirs["n_head"]
    factor = turned / head_dim
    if int(head_dim * factor) < turned:  # rounded down
        factor = math.nextafter(factor, 2)
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}


def turned_of(rope: Mapping[str, Any] | None, ours: Mapping[str, Any]) -> int:
    if rope is None or (rope["rope_type"], rope["rope_theta"]) != ("default", 10000.0):
        raise KeyError({"rope_type": "default", "rope_theta": 10000.0})
    return rotary_dim(ours["head_dim"], dict(rope))


GPTJ = Family(
    native="gptj",
    config=ScratchDecoderConfig,
    rows=(
        Row("wte", "embeddings.word_embeddings"),
        Row("ln_f", "norm"),
        Row("h.{layer}.ln_1", "layers.{layer}.self_attn_norm"),
        *(
            Row(row.theirs.replace("layers.", "h."), row.ours, row.transform)
            for row in neighbours({name: f"attn.{name}" for name in ("q_proj", "k_proj", "v_proj")})
        ),
        Row("h.{layer}.attn.out_proj", "layers.{layer}.self_attn.o_proj"),
        Row("h.{layer}.mlp.fc_in", "layers.{layer}.mlp.up_proj"),
        Row("h.{layer}.mlp.fc_out", "layers.{layer}.mlp.down_proj"),
    ),
    heads=decoder_heads("GPTJ"),
    fields=GPT2.fields + (Field("rotary_dim", "rope_parameters", rope_of, turned_of),),
    constants={**EQUAL_HEADS, **PARALLEL, "mlp_bias": True, "lm_head_bias": True, "position_embedding_type": "rotary"},
    requires={
        **NOT_QUANTIZED,
        "rotary_dim": Requirement("an even number, at least 2", lambda turned, _: bool(turned) and turned % 2 == 0),
    },
)
