"""The encoder-decoder beside BART. No pipeline of transformers takes such a model for text any more."""

import unittest

import torch
from family import BOS, EOS, HEADS, INNER_WIDTH, LAYERS, PAD, POSITIONS, VOCABULARY, WIDTH, FamilyTest
from transformers import BartConfig, BartForConditionalGeneration, BartModel

from hf_scratch_transformer import ScratchSeq2SeqConfig, ScratchSeq2SeqForConditionalGeneration, ScratchSeq2SeqModel

TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}


class Seq2SeqTest(FamilyTest):
    is_encoder_decoder = True

    def _create_text_training_batch(self, batch_size: int, seq_length: int, vocab_size: int) -> dict[str, torch.Tensor]:
        # The test generates from the first token alone and expects `input_ids`: so the encoder sees no other token, and
        # since a target begins with the start token, which is the pattern's first, the labels are the pattern after it.
        batch = super()._create_text_training_batch(batch_size, seq_length, vocab_size)
        attention_mask = torch.zeros_like(batch["input_ids"])
        attention_mask[:, 0] = 1
        return batch | {"attention_mask": attention_mask, "labels": batch["input_ids"][:, 1:].contiguous()}


class ScratchSeq2SeqTest(Seq2SeqTest, unittest.TestCase):
    config_class = ScratchSeq2SeqConfig
    config_values = TOKENS | {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER_WIDTH,
        "num_attention_heads": HEADS,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "max_position_embeddings": POSITIONS,
        "hidden_act": "relu",
        "norm_type": "layer_norm",
        "norm_position": "post",
        "scale_embedding": True,
        "attention_bias": True,
        "mlp_bias": True,
        "initialization": "xavier_uniform",
        "dropout": 0.1,
    }
    all_model_classes = (ScratchSeq2SeqModel, ScratchSeq2SeqForConditionalGeneration)
    trained_class = ScratchSeq2SeqForConditionalGeneration


class BartTest(Seq2SeqTest, unittest.TestCase):
    is_native = True
    config_class = BartConfig
    config_values = TOKENS | {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "encoder_ffn_dim": INNER_WIDTH,
        "decoder_ffn_dim": INNER_WIDTH,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "max_position_embeddings": POSITIONS,
        "forced_eos_token_id": None,
    }
    all_model_classes = (BartModel, BartForConditionalGeneration)
    trained_class = BartForConditionalGeneration
