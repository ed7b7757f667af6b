"""Encoders, one table each."""

from collections.abc import Mapping
from typing import Any

from ..configuration_scratch import ScratchEncoderConfig
from .decoders import LLAMA, LLAMA_CONSTANTS, LLAMA_ROWS, OF_KINDS, ROPE_OF_KINDS
from .shared import (
    ACTIVATIONS,
    CHOICES,
    CLASSIFIER,
    DENSE_CLASSIFIER,
    EQUAL_HEADS,
    GATED,
    NOT_QUANTIZED,
    PADDING_FIRST,
    QKV,
    QUESTIONS,
    SOME_CLASSIFIER_DROPOUT,
    TOKENS,
    UNGATED,
    WITH_BIASES,
)
from .tables import Family, Field, Head, Joined, OneOf, Requirement, Row, chosen, only, same

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


def bert_rows(*attention: str) -> tuple[Row, ...]:
    """With what it calls the matrices of attention, and the norm after it."""
    ours = ("q_proj", "k_proj", "v_proj", "o_proj")
    *matrices, norm = (f"encoder.layer.{{layer}}.attention.{name}" for name in attention)
    return (
        *ENCODER_EMBEDDINGS,
        *(Row(theirs, f"layers.{{layer}}.self_attn.{name}") for theirs, name in zip(matrices, ours, strict=True)),
        Row(norm, "layers.{layer}.self_attn_norm"),
        Row("encoder.layer.{layer}.intermediate.dense", "layers.{layer}.mlp.up_proj"),
        Row("encoder.layer.{layer}.output.dense", "layers.{layer}.mlp.down_proj"),
        Row("encoder.layer.{layer}.output.LayerNorm", "layers.{layer}.mlp_norm"),
        Row("pooler.dense", "pooler.dense"),
    )


BERT_ROWS = bert_rows("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
BERT_SIZES = same(
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "layer_norm_eps",
    "initializer_range",
) + (
    Field("hidden_dropout_prob", "dropout"),
    Field("attention_probs_dropout_prob", "attention_dropout"),
)


def types_of(count: int, _: Mapping[str, Any]) -> int:
    if count < 1:  # they add the type of every token
        raise KeyError(1, 2)
    return count


BERT_FIELDS = (*BERT_SIZES, Field("type_vocab_size", "type_vocab_size", back=types_of), *same("classifier_dropout"))
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
    taken_as={"BertForPreTraining": "MaskedLM", "BertForNextSentencePrediction": ""},
    left_out=("cls.seq_relationship.",),
)


def like_roberta(
    native: str,
    prefix: str,
    rows: tuple[Row, ...] = BERT_ROWS,
    fields: tuple[Field, ...] = BERT_FIELDS,
    constants: Mapping[str, Any] = ENCODER,
    requires: Mapping[str, Requirement] = ENCODER_REQUIRES,
) -> Family:
    return Family(
        native=native,
        config=ScratchEncoderConfig,
        rows=rows,
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
        + fields
        + (
            chosen("hidden_act", "hidden_act", {"gelu": "gelu"}),  # its masked-LM head knows no other
            PADDING_FIRST,
            Field(
                "max_position_embeddings",
                "max_position_embeddings",
                lambda rows, theirs: rows - theirs["pad_token_id"] - 1,
                lambda longest, ours: longest + ours["position_offset"],
            ),
        ),
        constants={**constants, "pooler_act": "tanh"},
        requires=requires,
    )


ROBERTA = like_roberta("roberta", "Roberta")
XLM_ROBERTA = like_roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = like_roberta("camembert", "Camembert")

# With a relative bias beside its table of positions: MPNet (Song et al., 2020), whose number of buckets and id of
# padding are no options but in name.
MPNET = like_roberta(
    "mpnet",
    "MPNet",
    (
        *bert_rows(*(f"attn.{part}" for part in ("q", "k", "v", "o")), "LayerNorm"),
        Row("encoder.relative_attention_bias", "position_bias.0.table"),
    ),
    BERT_SIZES,
    {**ENCODER, "position_embedding_type": "learned_relative_bias"},
    {**NOT_QUANTIZED, "relative_attention_num_buckets": only(32), "pad_token_id": only(1)},
)

# Its generator and its discriminator alike, as long as tokens have vectors of the model's width; the latter without the
# head that tells replaced tokens apart, which is made of two layers.
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
    taken_as={"ElectraForPreTraining": ""},
    left_out=("discriminator_predictions.",),
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
    requires=LLAMA.requires,
)

# ModernBERT (Warner et al., 2025). Its heads for texts and tokens have a layer more than ours.

MODERNBERT = Family(
    native="modernbert",
    config=ScratchEncoderConfig,
    rows=(
        Row("embeddings.tok_embeddings", "embeddings.word_embeddings"),
        Row("embeddings.norm", "embeddings.norm"),
        Row("layers.{layer}.attn_norm", "layers.{layer}.self_attn_norm"),
        Row("layers.{layer}.attn.Wqkv", QKV, lambda config: Joined(*[config.hidden_size] * 3)),
        Row("layers.{layer}.attn.Wo", "layers.{layer}.self_attn.o_proj"),
        Row("layers.{layer}.mlp_norm", "layers.{layer}.mlp_norm"),
        Row(
            "layers.{layer}.mlp.Wi",
            ("layers.{layer}.mlp.gate_proj", "layers.{layer}.mlp.up_proj"),
            lambda config: Joined(*[config.intermediate_size] * 2),
        ),
        Row("layers.{layer}.mlp.Wo", "layers.{layer}.mlp.down_proj"),
        Row("final_norm", "norm"),
    ),
    heads={
        "": Head("ModernBertModel"),
        "MaskedLM": Head(
            "ModernBertForMaskedLM",
            (
                Row("head.dense", "lm_transform.dense"),
                Row("head.norm", "lm_transform.norm"),
                Row("decoder", "lm_head"),
            ),
        ),
    },
    fields=TOKENS
    + same("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    + same("initializer_range", "norm_bias", "attention_bias", "mlp_bias", "layer_types")
    + same("attention_dropout")
    + (
        SOME_CLASSIFIER_DROPOUT,
        ROPE_OF_KINDS,
        Field("norm_eps", "layer_norm_eps"),
        Field("embedding_dropout", "dropout"),
        Field("mlp_dropout", "activation_dropout"),
        Field("decoder_bias", "lm_head_bias"),
        Field("classifier_bias", "lm_head_transform_bias"),
        Field(  # the whole of a window, and what is to one side of a token
            "local_attention",
            "sliding_window",
            lambda both, _: both // 2,
            lambda side, _: 128 if side is None else 2 * side,
        ),
        chosen("hidden_activation", "hidden_act", GATED),
    ),
    constants={
        **EQUAL_HEADS,
        "position_embedding_type": "rotary",
        "norm_type": "layer_norm",
        "embedding_norm": True,
        "first_norm": False,
        "lm_head_transform": True,
    },
    requires={
        **NOT_QUANTIZED,
        **OF_KINDS,
        "sparse_prediction": only(False),
        "classifier_activation": Requirement(
            "hidden_activation", lambda name, theirs: name == theirs["hidden_activation"]
        ),
    },
    written={"classifier_activation": lambda config: UNGATED[config.hidden_act]},
)
