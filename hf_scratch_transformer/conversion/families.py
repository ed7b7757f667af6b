"""The families, one table each."""

from collections.abc import Mapping
from typing import Any

from ..configuration_scratch import ScratchDecoderConfig, ScratchEncoderConfig, ScratchSeq2SeqConfig
from .tables import (
    Family,
    Field,
    Fused,
    Head,
    OneOf,
    OneRow,
    Requirement,
    Row,
    SinusoidTable,
    Transposed,
    chosen,
    every,
    only,
    same,
)

TOKENS = same("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
# Heads share the width of the model equally, and there are as many keys and values as queries.
EQUAL_HEADS: Mapping[str, Any] = {
    "num_key_value_heads": lambda config: config.num_attention_heads,
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "value_head_dim": lambda config: config.head_dim,
    "attention_output_bias": lambda config: config.attention_bias,
}
WITH_BIASES: Mapping[str, Any] = {
    **EQUAL_HEADS,
    "norm_type": "layer_norm",
    "attention_bias": True,
    "mlp_bias": True,
}
NOT_QUANTIZED = {"quantization_config": only(None)}

# Encoders: BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019), DistilBERT (Sanh et al., 2019), and
# ELECTRA (Clark et al., 2020)

ENCODER: Mapping[str, Any] = {
    **WITH_BIASES,
    "position_embedding_type": "learned",
    "norm_position": "post",
    "embedding_norm": True,
    "lm_head_bias": True,
    "lm_head_transform": True,
}
ENCODER_REQUIRES = {
    **NOT_QUANTIZED,
    "is_decoder": only(False),
    "add_cross_attention": only(False),
    "position_embedding_type": only("absolute"),
}
ENCODER_EMBEDDINGS = (
    Row("embeddings.word_embeddings", "embeddings.word_embeddings"),
    Row("embeddings.position_embeddings", "embeddings.position_embeddings"),
    Row("embeddings.token_type_embeddings", "embeddings.token_type_embeddings"),
    Row("embeddings.LayerNorm", "embeddings.norm"),
)
BERT_ROWS = (
    *ENCODER_EMBEDDINGS,
    Row("encoder.layer.{layer}.attention.self.query", "layers.{layer}.self_attn.q_proj"),
    Row("encoder.layer.{layer}.attention.self.key", "layers.{layer}.self_attn.k_proj"),
    Row("encoder.layer.{layer}.attention.self.value", "layers.{layer}.self_attn.v_proj"),
    Row("encoder.layer.{layer}.attention.output.dense", "layers.{layer}.self_attn.o_proj"),
    Row("encoder.layer.{layer}.attention.output.LayerNorm", "layers.{layer}.self_attn_norm"),
    Row("encoder.layer.{layer}.intermediate.dense", "layers.{layer}.mlp.up_proj"),
    Row("encoder.layer.{layer}.output.dense", "layers.{layer}.mlp.down_proj"),
    Row("encoder.layer.{layer}.output.LayerNorm", "layers.{layer}.mlp_norm"),
    Row("pooler.dense", "pooler.dense"),
)
BERT_FIELDS = same(
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "type_vocab_size",
    "layer_norm_eps",
    "initializer_range",
    "classifier_dropout",
) + (
    Field("hidden_dropout_prob", "dropout"),
    Field("attention_probs_dropout_prob", "attention_dropout"),
)
CLASSIFIER = (Row("classifier", "classifier"),)
DENSE_CLASSIFIER = (Row("classifier.dense", "model.pooler.dense"), Row("classifier.out_proj", "classifier"))
QUESTIONS = (Row("qa_outputs", "qa_outputs"),)
CHOICES = (Row("classifier", "choice_scorer"),)
# Decoders classify whole texts without a bias; a head that ours is given later shall do so too. Their other heads have
# one, which is zero where ours has none.
NO_BIAS = {"classifier_bias": False}
ANY_BIAS = {"classifier_bias": OneOf([True, False])}
POOLER_OR_NONE = {"pooler_act": OneOf(["tanh", None])}  # BertModel(config, add_pooling_layer=False) has none

BERT = Family(
    native="bert",
    config=ScratchEncoderConfig,
    rows=BERT_ROWS,
    heads={
        "": Head("BertModel", constants=POOLER_OR_NONE),
        "MaskedLM": Head(
            "BertForMaskedLM",
            (
                Row("cls.predictions.transform.dense", "lm_transform.dense"),
                Row("cls.predictions.transform.LayerNorm", "lm_transform.norm"),
                Row("cls.predictions.decoder", "lm_head"),
                Row("cls.predictions.bias", "lm_head.bias"),
            ),
        ),
        "SequenceClassification": Head("BertForSequenceClassification", CLASSIFIER),
        "TokenClassification": Head("BertForTokenClassification", CLASSIFIER),
        "QuestionAnswering": Head("BertForQuestionAnswering", QUESTIONS),
        "MultipleChoice": Head("BertForMultipleChoice", CHOICES),
    },
    fields=TOKENS + BERT_FIELDS + same("max_position_embeddings") + (chosen("hidden_act", "hidden_act", ACTIVATIONS),),
    constants={**ENCODER, "pooler_act": "tanh"},
    requires=ENCODER_REQUIRES,
    left_out=("cls.seq_relationship.",),
)


def like_roberta(native: str, prefix: str) -> Family:
    return Family(
        native=native,
        config=ScratchEncoderConfig,
        rows=BERT_ROWS,
        heads={
            "": Head(f"{prefix}Model", constants=POOLER_OR_NONE),
            "MaskedLM": Head(
                f"{prefix}ForMaskedLM",
                (
                    Row("lm_head.dense", "lm_transform.dense"),
                    Row("lm_head.layer_norm", "lm_transform.norm"),
                    Row("lm_head.decoder", "lm_head"),
                    Row("lm_head.bias", "lm_head.bias"),
                ),
            ),
            "SequenceClassification": Head(f"{prefix}ForSequenceClassification", DENSE_CLASSIFIER),
            "TokenClassification": Head(f"{prefix}ForTokenClassification", CLASSIFIER),
            "QuestionAnswering": Head(f"{prefix}ForQuestionAnswering", QUESTIONS),
            "MultipleChoice": Head(f"{prefix}ForMultipleChoice", CHOICES),
        },
        fields=TOKENS
        + BERT_FIELDS
        + (
            chosen("hidden_act", "hidden_act", {"gelu": "gelu"}),  # its masked-LM head knows no other
            # The first rows of its table of positions, up to that of the padding token's id, are for padding.
            Field("pad_token_id", "position_offset", lambda pad, _: pad + 1, lambda offset, _: offset - 1),
            Field(
                "max_position_embeddings",
                "max_position_embeddings",
                lambda rows, theirs: rows - theirs["pad_token_id"] - 1,
                lambda longest, ours: longest + ours["position_offset"],
            ),
        ),
        constants={**ENCODER, "pooler_act": "tanh"},
        requires=ENCODER_REQUIRES,
    )


ROBERTA = like_roberta("roberta", "Roberta")
XLM_ROBERTA = like_roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = like_roberta("camembert", "Camembert")

# Its generator and its discriminator alike, as long as tokens have vectors of the model's width; but not the head that
# tells replaced tokens apart, which is made of two layers.
ELECTRA = Family(
    native="electra",
    config=ScratchEncoderConfig,
    rows=BERT_ROWS[:-1],  # there is no pooler
    heads={
        "": Head("ElectraModel"),
        "MaskedLM": Head(
            "ElectraForMaskedLM",
            (
                Row("generator_predictions.dense", "lm_transform.dense"),
                Row("generator_predictions.LayerNorm", "lm_transform.norm"),
                Row("generator_lm_head", "lm_head"),
            ),
        ),
        "SequenceClassification": Head("ElectraForSequenceClassification", DENSE_CLASSIFIER, {"pooler_act": "gelu"}),
        "TokenClassification": Head("ElectraForTokenClassification", CLASSIFIER),
        "QuestionAnswering": Head("ElectraForQuestionAnswering", QUESTIONS),
        "MultipleChoice": Head(
            "ElectraForMultipleChoice",
            (Row("sequence_summary.summary", "model.pooler.dense"), *CHOICES),
            {"pooler_act": "gelu"},
        ),
    },
    fields=TOKENS
    + BERT_FIELDS
    + same("max_position_embeddings")
    + (Field("embedding_size", "hidden_size"), chosen("hidden_act", "hidden_act", {"gelu": "gelu"})),
    constants={**ENCODER, "pooler_act": None},
    requires={
        **ENCODER_REQUIRES,
        "summary_type": only("first"),
        "summary_use_proj": only(True),
        "summary_activation": only("gelu"),
    },
)

PRE_CLASSIFIER = (Row("pre_classifier", "model.pooler.dense"),)
PRE_ACTIVATION = {"pooler_act": "relu"}
PRE_DROPOUT = (Field("seq_classif_dropout", "classifier_dropout"),)
DISTILBERT = Family(
    native="distilbert",
    config=ScratchEncoderConfig,
    rows=(
        *ENCODER_EMBEDDINGS,
        Row("transformer.layer.{layer}.attention.q_lin", "layers.{layer}.self_attn.q_proj"),
        Row("transformer.layer.{layer}.attention.k_lin", "layers.{layer}.self_attn.k_proj"),
        Row("transformer.layer.{layer}.attention.v_lin", "layers.{layer}.self_attn.v_proj"),
        Row("transformer.layer.{layer}.attention.out_lin", "layers.{layer}.self_attn.o_proj"),
        Row("transformer.layer.{layer}.sa_layer_norm", "layers.{layer}.self_attn_norm"),
        Row("transformer.layer.{layer}.ffn.lin1", "layers.{layer}.mlp.up_proj"),
        Row("transformer.layer.{layer}.ffn.lin2", "layers.{layer}.mlp.down_proj"),
        Row("transformer.layer.{layer}.output_layer_norm", "layers.{layer}.mlp_norm"),
    ),
    heads={
        "": Head("DistilBertModel"),
        "MaskedLM": Head(
            "DistilBertForMaskedLM",
            (
                Row("vocab_transform", "lm_transform.dense"),
                Row("vocab_layer_norm", "lm_transform.norm"),
                Row("vocab_projector", "lm_head"),
            ),
        ),
        "SequenceClassification": Head(
            "DistilBertForSequenceClassification", PRE_CLASSIFIER + CLASSIFIER, PRE_ACTIVATION, PRE_DROPOUT
        ),
        "TokenClassification": Head("DistilBertForTokenClassification", CLASSIFIER),
        "QuestionAnswering": Head(
            "DistilBertForQuestionAnswering", QUESTIONS, fields=(Field("qa_dropout", "classifier_dropout"),)
        ),
        "MultipleChoice": Head("DistilBertForMultipleChoice", PRE_CLASSIFIER + CHOICES, PRE_ACTIVATION, PRE_DROPOUT),
    },
    fields=TOKENS
    + same("max_position_embeddings", "initializer_range", "dropout", "attention_dropout")
    + (
        Field("dim", "hidden_size"),
        Field("hidden_dim", "intermediate_size"),
        Field("n_layers", "num_hidden_layers"),
        Field("n_heads", "num_attention_heads"),
        chosen("activation", "hidden_act", ACTIVATIONS),
    ),
    constants={**ENCODER, "layer_norm_eps": 1e-12},
    requires=NOT_QUANTIZED,
)

# Decoders: GPT-2 (Radford et al., 2019), Llama (Touvron et al., 2023) and those built like it


def decoder_heads(prefix: str, lm_head: str = "lm_head") -> dict[str, Head]:
    """Those that all decoders but GPT-2 name alike."""
    return {
        "": Head(f"{prefix}Model", constants=NO_BIAS),
        "CausalLM": Head(f"{prefix}ForCausalLM", (Row(lm_head, "lm_head"),), NO_BIAS),
        "SequenceClassification": Head(f"{prefix}ForSequenceClassification", (Row("score", "classifier"),), NO_BIAS),
    }


GPT2 = Family(
    native="gpt2",
    config=ScratchDecoderConfig,
    rows=(
        Row("wte", "embeddings.word_embeddings"),
        Row("wpe", "embeddings.position_embeddings"),
        Row("h.{layer}.ln_1", "layers.{layer}.self_attn_norm"),
        Row(
            "h.{layer}.attn.c_attn",
            tuple(f"layers.{{layer}}.self_attn.{name}_proj" for name in ("q", "k", "v")),
            Fused(),
        ),
        Row("h.{layer}.attn.c_proj", "layers.{layer}.self_attn.o_proj", Transposed()),
        Row("h.{layer}.ln_2", "layers.{layer}.mlp_norm"),
        Row("h.{layer}.mlp.c_fc", "layers.{layer}.mlp.up_proj", Transposed()),
        Row("h.{layer}.mlp.c_proj", "layers.{layer}.mlp.down_proj", Transposed()),
        Row("ln_f", "norm"),
    ),
    heads={
        "": Head("GPT2Model", constants=NO_BIAS),
        "CausalLM": Head("GPT2LMHeadModel", (Row("lm_head", "lm_head"),), NO_BIAS),
        "SequenceClassification": Head("GPT2ForSequenceClassification", (Row("score", "classifier"),), NO_BIAS),
        "TokenClassification": Head("GPT2ForTokenClassification", CLASSIFIER, ANY_BIAS),
        "QuestionAnswering": Head("GPT2ForQuestionAnswering", QUESTIONS, ANY_BIAS),
    },
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
    {
        **decoder_heads("OPT"),
        "QuestionAnswering": Head("OPTForQuestionAnswering", QUESTIONS, ANY_BIAS),
    },
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
    {
        **decoder_heads("BioGpt", "output_projection"),
        "TokenClassification": Head("BioGptForTokenClassification", CLASSIFIER, ANY_BIAS),
    },
    same("intermediate_size", "initializer_range", "scale_embedding", "activation_dropout")
    + (
        Field("hidden_dropout_prob", "dropout"),
        Field("attention_probs_dropout_prob", "attention_dropout"),
        chosen("hidden_act", "hidden_act", ACTIVATIONS),
    ),
)

LLAMA_ROWS = (
    Row("embed_tokens", "embeddings.word_embeddings"),
    *(
        Row(f"layers.{{layer}}.{name}", f"layers.{{layer}}.{name}")
        for name in (
            *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
        )
    ),
    Row("layers.{layer}.input_layernorm", "layers.{layer}.self_attn_norm"),
    Row("layers.{layer}.post_attention_layernorm", "layers.{layer}.mlp_norm"),
    Row("norm", "norm"),
)
FULL_ROTATION = Requirement(
    "without partial_rotary_factor", lambda rope, _: (rope or {}).get("partial_rotary_factor") in (None, 1.0)
)
LLAMA_CONSTANTS: Mapping[str, Any] = {
    **{name: EQUAL_HEADS[name] for name in ("value_head_dim", "attention_output_bias")},
    "position_embedding_type": "rotary",
}
LLAMA_REQUIRES = {
    **NOT_QUANTIZED,
    "layer_types": every("full_attention"),
    "num_experts": only(None, 0),
    "num_local_experts": only(None, 0),
    "rope_parameters": FULL_ROTATION,
}


def like_llama(
    native: str,
    prefix: str,
    fields: tuple[Field, ...],
    constants: Mapping[str, Any],
    requires: Mapping[str, Requirement] | None = None,
    written: Mapping[str, Any] | None = None,
) -> Family:
    return Family(
        native=native,
        config=ScratchDecoderConfig,
        rows=LLAMA_ROWS,
        heads={
            **decoder_heads(prefix),
            "TokenClassification": Head(f"{prefix}ForTokenClassification", (Row("score", "classifier"),), ANY_BIAS),
            "QuestionAnswering": Head(f"{prefix}ForQuestionAnswering", QUESTIONS, ANY_BIAS),
        },
        fields=TOKENS
        + same(
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
        + (Field("rms_norm_eps", "layer_norm_eps"), chosen("hidden_act", "hidden_act", {"silu": "swiglu"}))
        + fields,
        constants={
            **LLAMA_CONSTANTS,
            **constants,
        },
        requires={**LLAMA_REQUIRES, **(requires or {})},
        written=written or {},
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
LLAMA = like_llama("llama", "Llama", FREE_HEADS + same("attention_bias", "mlp_bias"), {})
MISTRAL = like_llama("mistral", "Mistral", FREE_HEADS, {}, {"sliding_window": only(None)}, {"sliding_window": None})
QWEN2 = like_llama(
    "qwen2",
    "Qwen2",
    (),
    {**EQUAL_WIDTHS, "attention_bias": True, "attention_output_bias": False},
    DERIVED_HEADS,
)
QWEN3 = like_llama("qwen3", "Qwen3", FREE_HEADS + same("attention_bias"), {"use_qk_norm": True})
SMOLLM3 = like_llama(
    "smollm3",
    "SmolLM3",
    same("attention_bias", "mlp_bias"),
    EQUAL_WIDTHS,
    {**DERIVED_HEADS, "no_rope_layers": every(1)},
    {"no_rope_layers": lambda config: [1] * config.num_hidden_layers},
)

SEED_OSS = like_llama(
    "seed_oss",
    "SeedOss",
    FREE_HEADS
    + same("attention_bias", "mlp_bias")
    + (Field("attention_out_bias", "attention_output_bias"), Field("residual_dropout", "dropout")),
    {},
)

# An encoder of Llama's blocks: EuroBERT (Boizard et al., 2025)

EUROBERT = Family(
    native="eurobert",
    config=ScratchEncoderConfig,
    rows=LLAMA_ROWS,
    heads={
        "": Head("EuroBertModel"),
        "MaskedLM": Head("EuroBertForMaskedLM", (Row("lm_head", "lm_head"),)),
        "TokenClassification": Head("EuroBertForTokenClassification", CLASSIFIER),
    },
    fields=LLAMA.fields + (Field("mlp_bias", "lm_head_bias"),),
    constants=LLAMA_CONSTANTS,
    requires=LLAMA_REQUIRES,
)

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

FAMILIES = {
    family.native: family
    for family in (
        *(DISTILBERT, BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, EUROBERT),
        *(GPT2, OPT, BIOGPT, LLAMA, QWEN2, QWEN3, MISTRAL, SMOLLM3, SEED_OSS),
        *(MARIAN, BART, PLBART, MBART, PEGASUS, BLENDERBOT),
    )
}
