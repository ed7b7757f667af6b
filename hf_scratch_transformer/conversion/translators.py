"""Encoder-decoders, one table each."""

from collections.abc import Mapping
from typing import Any

from ..configuration_scratch import ScratchSeq2SeqConfig
from .shared import ACTIVATIONS, NOT_QUANTIZED, TOKENS, WITH_BIASES
from .tables import Family, Field, Head, OneRow, Row, SinusoidTable, chosen, same

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


def like_bart(native: str, prefix: str, rows: tuple[Row, ...] = (), **constants: Any) -> Family:
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
        fields=SEQ2SEQ_FIELDS + ONE_VOCABULARY + same("classifier_dropout"),
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
