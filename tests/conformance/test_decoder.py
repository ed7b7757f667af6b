"""The decoder beside Llama."""

import unittest

from family import BOS, EOS, HEADS, INNER_WIDTH, LAYERS, PAD, POSITIONS, VOCABULARY, WIDTH, FamilyTest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from hf_scratch_transformer import (
    ScratchDecoderConfig,
    ScratchDecoderForCausalLM,
    ScratchDecoderForQuestionAnswering,
    ScratchDecoderForSequenceClassification,
    ScratchDecoderForTokenClassification,
    ScratchDecoderModel,
)

VALUES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER_WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


class ScratchDecoderTest(FamilyTest, unittest.TestCase):
    config_class = ScratchDecoderConfig
    config_values = VALUES | {"hidden_act": "swiglu", "use_qk_norm": True, "tie_word_embeddings": False}
    all_model_classes = (
        ScratchDecoderModel,
        ScratchDecoderForCausalLM,
        ScratchDecoderForSequenceClassification,
        ScratchDecoderForTokenClassification,
        ScratchDecoderForQuestionAnswering,
    )
    pipeline_model_mapping = {
        "feature-extraction": ScratchDecoderModel,
        "text-classification": ScratchDecoderForSequenceClassification,
        "text-generation": ScratchDecoderForCausalLM,
        "token-classification": ScratchDecoderForTokenClassification,
        "zero-shot": ScratchDecoderForSequenceClassification,
    }
    trained_class = causal_lm_class = ScratchDecoderForCausalLM


class LlamaTest(FamilyTest, unittest.TestCase):
    is_native = True
    config_class = LlamaConfig
    config_values = VALUES
    all_model_classes = (
        LlamaModel,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
        LlamaForQuestionAnswering,
    )
    pipeline_model_mapping = {
        "feature-extraction": LlamaModel,
        "text-classification": LlamaForSequenceClassification,
        "text-generation": LlamaForCausalLM,
        "token-classification": LlamaForTokenClassification,
        "zero-shot": LlamaForSequenceClassification,
    }
    trained_class = causal_lm_class = LlamaForCausalLM
