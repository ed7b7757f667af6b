"""Encoder-decoders, one table each."""

from collections.abc import Mapping
from typing import Any

from ..configuration_scratch import ScratchSeq2SeqConfig
from .decoders import QUERY_SCALAR, SOME_WINDOW
from .shared import (
    ACTIVATIONS,
    EQUAL_HEADS,
    GATED,
    NOT_QUANTIZED,
    PADDING_FIRST,
    SOME_CLASSIFIER_DROPOUT,
    TOKENS,
    WITH_BIASES,
)
from .tables import Family, Field, Head, OneOf, OneRow, Row, SinusoidTable, chosen, same

# Encoder-decoders: Marian (Junczys-Dowmunt et al., 2018) and BART (Lewis et al., 2020)

SEQ2SEQ_STACKS = tuple(
    Row(f"{stack}.layers.{{layer}}.{theirs}", f"{stack}.layers.{{layer}}.{ours}")
    for stack in ("encoder", "decoder")
    for theirs, ours in (
        *(
            (f"{their_attention}.{their_part}", f"{our_attention}.{our_part}")
            for their_attention, our_attention in (("self_attn", "self_attn"), ("encoder_attn", "cross_attn"))
            for their_part, our_part in (
                ("q_proj", "q_proj"),
                ("k_proj", "k_proj"),
                ("v_proj", "v_proj"),
                ("out_proj", "o_proj"),
            )
        ),
        ("self_attn_layer_norm", "self_attn_norm"),
        ("encoder_attn_layer_norm", "cross_attn_norm"),
        ("fc1", "mlp.up_proj"),
        ("fc2", "mlp.down_proj"),
        ("final_layer_norm", "mlp_norm"),
    )
)
# Untied, each stack has a table of its own and `shared` is a spare; tied, `shared` is the only one that is stored.
SEQ2SEQ_ROWS = (
    Row("encoder.embed_tokens", "encoder.embeddings.word_embeddings"),
    Row("decoder.embed_tokens", "decoder.embeddings.word_embeddings"),
    Row("shared", "encoder.embeddings.word_embeddings"),
    *SEQ2SEQ_STACKS,
)
SINUSOIDS = tuple(Row(f"{stack}.embed_positions", (), SinusoidTable()) for stack in ("encoder", "decoder"))
SEQ2SEQ_HEAD = (Row("lm_head", "lm_head"), Row("final_logits_bias", "lm_head.bias", OneRow()))
SEQ2SEQ_FIELDS = (
    TOKENS
    + same(
        "encoder_layers",
        "decoder_layers",
        "dropout",
        "attention_dropout",
        "activation_dropout",
        "scale_embedding",
        "max_position_embeddings",
        "decoder_start_token_id",
        "use_cache",
    )
    + (
        Field("d_model", "hidden_size"),
        *(Field(f"{stack}_ffn_dim", "intermediate_size") for stack in ("encoder", "decoder")),
        *(Field(f"{stack}_attention_heads", "num_attention_heads") for stack in ("encoder", "decoder")),
        Field("init_std", "initializer_range"),
    )
)
# Both sides have one vocabulary, and share its table where it is tied.
ONE_VOCABULARY = (
    Field("vocab_size", "decoder_vocab_size"),
    Field("tie_word_embeddings", "share_encoder_decoder_embeddings"),
    chosen("activation_function", "hidden_act", ACTIVATIONS),
)
SEQ2SEQ: Mapping[str, Any] = {
    **WITH_BIASES,
    "norm_position": "post",
    "layer_norm_eps": 1e-5,
    "lm_head_bias": True,
}


def not_shared_untied(shared: bool, ours: Mapping[str, Any]) -> bool:
    if shared and not ours["tie_word_embeddings"]:
        raise KeyError(False)
    return shared


MARIAN = Family(
    native="marian",
    config=ScratchSeq2SeqConfig,
    rows=SEQ2SEQ_ROWS + SINUSOIDS,
    heads={"": Head("MarianModel"), "ConditionalGeneration": Head("MarianMTModel", SEQ2SEQ_HEAD)},
    fields=SEQ2SEQ_FIELDS
    + same("decoder_vocab_size")
    + (
        chosen("activation_function", "hidden_act", {"swish": "silu", **ACTIVATIONS}),  # as its checkpoints call it
        Field(
            "share_encoder_decoder_embeddings",
            "share_encoder_decoder_embeddings",
            lambda shared, theirs: shared and theirs["tie_word_embeddings"],  # untied, transformers shares nothing
            not_shared_untied,
        ),
    ),
    constants={**SEQ2SEQ, "position_embedding_type": "sinusoidal_halves"},
    requires=NOT_QUANTIZED,
)
FINAL_NORMS = tuple(Row(f"{stack}.layer_norm", f"{stack}.norm") for stack in ("encoder", "decoder"))


def like_bart(
    native: str,
    prefix: str,
    rows: tuple[Row, ...] = (),
    fields: tuple[Field, ...] = (SOME_CLASSIFIER_DROPOUT,),
    **constants: Any,
) -> Family:
    return Family(
        native=native,
        config=ScratchSeq2SeqConfig,
        rows=SEQ2SEQ_ROWS
        + tuple(
            Row(f"{stack}.{theirs}", f"{stack}.embeddings.{ours}")
            for stack in ("encoder", "decoder")
            for theirs, ours in (("embed_positions", "position_embeddings"), ("layernorm_embedding", "norm"))
        )
        + rows,
        heads={
            "": Head(f"{prefix}Model"),
            "ConditionalGeneration": Head(f"{prefix}ForConditionalGeneration", SEQ2SEQ_HEAD),
        },
        fields=SEQ2SEQ_FIELDS + ONE_VOCABULARY + fields,
        constants={
            **SEQ2SEQ,
            "position_embedding_type": "learned",
            "position_offset": 2,
            "embedding_norm": True,
            **constants,
        },
        requires=NOT_QUANTIZED,
    )


# PLBART (Ahmad et al., 2021) is BART on programs; mBART (Liu et al., 2020) has norms before each sub-layer.
BART = like_bart("bart", "Bart")
PLBART = like_bart("plbart", "PLBart", wrap_labels=True)
MBART = like_bart("mbart", "MBart", FINAL_NORMS, wrap_labels=True, norm_position="pre")

# Blenderbot's smaller models (Roller et al., 2021)
BLENDERBOT_SMALL = like_bart(
    "blenderbot-small", "BlenderbotSmall", fields=(), position_offset=0, decoder_embedding_norm_first=True
)

# Norms before each sub-layer, and one after the last: Pegasus (Zhang et al., 2020), Blenderbot (Roller et al., 2021)

PRE_NORM_ROWS = SEQ2SEQ_ROWS + FINAL_NORMS
PEGASUS = Family(
    native="pegasus",
    config=ScratchSeq2SeqConfig,
    rows=PRE_NORM_ROWS + SINUSOIDS,
    heads={"": Head("PegasusModel"), "ConditionalGeneration": Head("PegasusForConditionalGeneration", SEQ2SEQ_HEAD)},
    fields=SEQ2SEQ_FIELDS + ONE_VOCABULARY,
    constants={**SEQ2SEQ, "norm_position": "pre", "position_embedding_type": "sinusoidal_halves"},
    requires=NOT_QUANTIZED,
)
BLENDERBOT = Family(
    native="blenderbot",
    config=ScratchSeq2SeqConfig,
    rows=PRE_NORM_ROWS
    + tuple(
        Row(f"{stack}.embed_positions", f"{stack}.embeddings.position_embeddings") for stack in ("encoder", "decoder")
    ),
    heads={
        "": Head("BlenderbotModel"),
        "ConditionalGeneration": Head("BlenderbotForConditionalGeneration", SEQ2SEQ_HEAD),
    },
    fields=SEQ2SEQ_FIELDS + ONE_VOCABULARY,
    constants={**SEQ2SEQ, "norm_position": "pre", "position_embedding_type": "learned"},
    requires=NOT_QUANTIZED,
)


def apart_from_padding(start: int | None, options: Mapping[str, Any]) -> int | None:
    """What a target starts with, where padding has no position."""
    if start is not None and start == options["pad_token_id"]:
        raise KeyError("any but pad_token_id")
    return start


START = Field("decoder_start_token_id", "decoder_start_token_id", apart_from_padding, apart_from_padding)


# M2M-100 (Fan et al., 2021) and NLLB-200 (NLLB Team, 2022), whose positions are counted from the id of their padding
M2M_100 = Family(
    native="m2m_100",
    config=ScratchSeq2SeqConfig,
    rows=PRE_NORM_ROWS,
    heads={
        "": Head("M2M100Model"),
        "ConditionalGeneration": Head("M2M100ForConditionalGeneration", SEQ2SEQ_HEAD[:1]),
    },
    fields=SEQ2SEQ_FIELDS + ONE_VOCABULARY + (PADDING_FIRST, START),
    constants={
        **SEQ2SEQ,
        "norm_position": "pre",
        "position_embedding_type": "sinusoidal_tensor2tensor",
        "lm_head_bias": False,
    },
    requires=NOT_QUANTIZED,
)


# T5 (Raffel et al., 2020), mT5 (Xue et al., 2021) and UMT5 (Chung et al., 2023)


def t5_layers(stack: str, feed_forward: int) -> tuple[Row, ...]:
    """The sub-layers of a block are numbered; an attention to the source stands between the two others."""
    layer, attentions = f"{stack}.block.{{layer}}.layer", {0: ("SelfAttention", "self_attn")}
    if stack == "decoder":
        attentions[1] = "EncDecAttention", "cross_attn"
    mlp = {"wi": "up_proj", "wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    return (
        *(
            Row(f"{layer}.{place}.{theirs}.{part}", f"{stack}.layers.{{layer}}.{ours}.{part}_proj")
            for place, (theirs, ours) in attentions.items()
            for part in ("q", "k", "v", "o")
        ),
        *(
            Row(f"{layer}.{place}.layer_norm", f"{stack}.layers.{{layer}}.{ours}_norm")
            for place, (_, ours) in attentions.items()
        ),
        *(
            Row(f"{layer}.{feed_forward}.DenseReluDense.{theirs}", f"{stack}.layers.{{layer}}.mlp.{ours}")
            for theirs, ours in mlp.items()
        ),
        Row(f"{layer}.{feed_forward}.layer_norm", f"{stack}.layers.{{layer}}.mlp_norm"),
        Row(f"{stack}.final_layer_norm", f"{stack}.norm"),
        Row(
            f"{stack}.block.{{layer}}.layer.0.SelfAttention.relative_attention_bias",
            f"{stack}.position_bias.{{layer}}.table",
        ),
    )


def scaled(scaling: float, ours: Mapping[str, Any]) -> bool:
    """Of logits: by the root of the width, or not at all."""
    if scaling not in (1.0, ours["hidden_size"] ** 0.5):
        raise KeyError(1.0, ours["hidden_size"] ** 0.5)
    return scaling != 1.0


# A gated GELU is the one that is approximated by a hyperbolic tangent.
FEED_FORWARD = {
    "gated-gelu": "gated-gelu_new",
    **{f"gated-{name}": gated for name, gated in GATED.items() if name != "gelu"},
    **ACTIVATIONS,
}


def like_t5(native: str, prefix: str, fields: tuple[Field, ...] = (), **constants: Any) -> Family:
    return Family(
        native=native,
        config=ScratchSeq2SeqConfig,
        rows=(*SEQ2SEQ_ROWS[:3], *t5_layers("encoder", 1), *t5_layers("decoder", 2)),
        heads={
            "": Head(f"{prefix}Model"),
            "ConditionalGeneration": Head(f"{prefix}ForConditionalGeneration", SEQ2SEQ_HEAD[:1]),
        },
        fields=tuple(option for option in TOKENS if option.theirs != "tie_word_embeddings")
        + same("relative_attention_num_buckets", "relative_attention_max_distance", "use_cache")
        + same("decoder_start_token_id")
        + (
            SOME_CLASSIFIER_DROPOUT,
            Field("d_model", "hidden_size"),
            Field("d_kv", "head_dim"),
            Field("d_ff", "intermediate_size"),
            Field("num_layers", "encoder_layers"),
            Field("num_decoder_layers", "decoder_layers"),
            Field("num_heads", "num_attention_heads"),
            Field("layer_norm_epsilon", "layer_norm_eps"),
            *(Field("dropout_rate", name) for name in ("dropout", "attention_dropout", "activation_dropout")),
            Field("vocab_size", "decoder_vocab_size"),
            chosen("feed_forward_proj", "hidden_act", FEED_FORWARD),
        )
        + fields,
        constants={
            "num_key_value_heads": EQUAL_HEADS["num_key_value_heads"],
            "value_head_dim": EQUAL_HEADS["value_head_dim"],
            "attention_output_bias": EQUAL_HEADS["attention_output_bias"],
            "position_embedding_type": "relative_bias",
            "attention_multiplier": 1.0,
            "tie_word_embeddings": OneOf([True, False]),  # whatever its configuration says: see `held_apart`
            **constants,
        },
        requires=NOT_QUANTIZED,
        has_prefix=False,
    )


def scaled_if(option: str) -> tuple[Field, ...]:
    return (
        Field(
            option,
            "logits_scaling",
            lambda is_scaled, theirs: theirs["d_model"] ** 0.5 if is_scaled else 1.0,
            scaled,
        ),
    )


T5 = like_t5("t5", "T5", scaled_if("scale_decoder_outputs"))
MT5 = like_t5("mt5", "MT5")
UMT5 = like_t5("umt5", "UMT5", scaled_if("tie_word_embeddings"), share_relative_attention_bias=False)


# T5Gemma (Zhang et al., 2025): an encoder and a decoder of Gemma 2's blocks, here of one size


def t5gemma_rows(stack: str) -> tuple[Row, ...]:
    attentions = ("self_attn", "cross_attn") if stack == "decoder" else ("self_attn",)
    layer = f"{stack}.layers.{{layer}}"
    norms = {each: each for each in attentions} | {"mlp": "feedforward"}
    return (
        Row(f"{stack}.embed_tokens", f"{stack}.embeddings.word_embeddings"),
        *(Row(f"{layer}.{each}.{part}_proj", f"{layer}.{each}.{part}_proj") for each in attentions for part in "qkvo"),
        *(Row(f"{layer}.mlp.{part}_proj", f"{layer}.mlp.{part}_proj") for part in ("gate", "up", "down")),
        *(
            Row(f"{layer}.{theirs}_{name}_layernorm", f"{layer}.{part}_{ours}")
            for part, name in norms.items()
            for theirs, ours in (("pre", "norm"), ("post", "output_norm"))
        ),
        Row(f"{stack}.norm", f"{stack}.norm"),
    )


def t5gemma_fields(stack: str) -> tuple[Field, ...]:
    options = (
        *same("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *same("max_position_embeddings", "rope_parameters", "initializer_range", "attention_bias"),
        SOME_WINDOW,
        *same("attn_logit_softcapping", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id"),
        Field("rms_norm_eps", "layer_norm_eps"),
        Field("dropout_rate", "dropout"),
        Field("num_hidden_layers", f"{stack}_layers"),
        Field("layer_types", f"{stack}_layer_types"),
        Field("vocab_size", "vocab_size" if stack == "encoder" else "decoder_vocab_size"),
        QUERY_SCALAR,
        chosen("hidden_activation", "hidden_act", GATED),
    )
    return tuple(option._replace(theirs=f"{stack}.{option.theirs}") for option in options)


T5GEMMA = Family(
    native="t5gemma",
    config=ScratchSeq2SeqConfig,
    rows=t5gemma_rows("encoder") + t5gemma_rows("decoder"),
    heads={
        "": Head("T5GemmaModel"),
        "ConditionalGeneration": Head("T5GemmaForConditionalGeneration", (Row("lm_head.out_proj", "lm_head"),)),
    },
    # What it says of the vocabulary above those of its two stacks is not looked at, and need not be there.
    fields=(Field("vocab_size", "vocab_size", lambda _, theirs: theirs["encoder.vocab_size"]), *TOKENS[1:])
    + t5gemma_fields("encoder")
    + t5gemma_fields("decoder")
    + same("attention_dropout", "initializer_range")
    + (
        Field("dropout_rate", "dropout"),
        SOME_CLASSIFIER_DROPOUT._replace(theirs="classifier_dropout_rate"),
        Field("decoder.final_logit_softcapping", "final_logit_softcapping"),
    ),
    constants={
        **{name: EQUAL_HEADS[name] for name in ("value_head_dim", "attention_output_bias")},
        "position_embedding_type": "rotary",
        "norm_type": "rms_norm_1p",
        "norm_position": "sandwich",
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": False,
        "decoder_start_token_id": lambda config: config.bos_token_id,
    },
    requires=NOT_QUANTIZED,
    parts=("encoder", "decoder"),
)
