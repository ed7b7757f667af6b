"""Encoders, one table each."""

from collections.abc import Mapping
from typing import Any

from ..configuration_scratch import ScratchEncoderConfig
from .decoders import LLAMA, LLAMA_CONSTANTS, LLAMA_REQUIRES, LLAMA_ROWS
from .shared import ACTIVATIONS, CHOICES, CLASSIFIER, DENSE_CLASSIFIER, NOT_QUANTIZED, QUESTIONS, TOKENS, WITH_BIASES
from .tables import Family, Field, Head, OneOf, Row, chosen, only, same

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
