"""The encoder beside DistilBERT."""

import unittest

from family import BOS, EOS, HEADS, INNER_WIDTH, LAYERS, PAD, POSITIONS, VOCABULARY, WIDTH, FamilyTest
from transformers import (
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForMultipleChoice,
    DistilBertForQuestionAnswering,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    DistilBertModel,
)

from hf_scratch_transformer import (
    ScratchEncoderConfig,
    ScratchEncoderForMaskedLM,
    ScratchEncoderForMultipleChoice,
    ScratchEncoderForQuestionAnswering,
    ScratchEncoderForSequenceClassification,
    ScratchEncoderForTokenClassification,
    ScratchEncoderModel,
)


class ScratchEncoderTest(FamilyTest, unittest.TestCase):
    config_class = ScratchEncoderConfig
    config_values = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER_WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": POSITIONS,
        "norm_type": "layer_norm",
        "norm_position": "post",
        "attention_bias": True,
        "mlp_bias": True,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    all_model_classes = (
        ScratchEncoderModel,
        ScratchEncoderForMaskedLM,
        ScratchEncoderForSequenceClassification,
        ScratchEncoderForTokenClassification,
        ScratchEncoderForQuestionAnswering,
        ScratchEncoderForMultipleChoice,
    )
    pipeline_model_mapping = {
        "feature-extraction": ScratchEncoderModel,
        "fill-mask": ScratchEncoderForMaskedLM,
        "text-classification": ScratchEncoderForSequenceClassification,
        "token-classification": ScratchEncoderForTokenClassification,
        "zero-shot": ScratchEncoderForSequenceClassification,
    }
    trained_class = ScratchEncoderForMaskedLM
    test_resize_position_embeddings = True

    def test_resize_position_vector_embeddings(self) -> None:
        self.config_values = self.config_values | {"position_embedding_type": "learned"}  # rotary ones have no table
        super().test_resize_position_vector_embeddings()


class DistilBertTest(FamilyTest, unittest.TestCase):
    is_native = True
    config_class = DistilBertConfig
    config_values = {
        "vocab_size": VOCABULARY,
        "dim": WIDTH,
        "hidden_dim": INNER_WIDTH,
        "n_heads": HEADS,
        "n_layers": LAYERS,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": PAD,
    }
    all_model_classes = (
        DistilBertModel,
        DistilBertForMaskedLM,
        DistilBertForSequenceClassification,
        DistilBertForTokenClassification,
        DistilBertForQuestionAnswering,
        DistilBertForMultipleChoice,
    )
    pipeline_model_mapping = {
        "feature-extraction": DistilBertModel,
        "fill-mask": DistilBertForMaskedLM,
        "text-classification": DistilBertForSequenceClassification,
        "token-classification": DistilBertForTokenClassification,
        "zero-shot": DistilBertForSequenceClassification,
    }
    trained_class = DistilBertForMaskedLM
    test_resize_position_embeddings = True
