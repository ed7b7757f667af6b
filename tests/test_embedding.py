"""Vectors of texts: those of each text alone, whatever it is batched with."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hf_scratch_transformer import (
    ScratchDecoderForCausalLM,
    ScratchDecoderModel,
    ScratchEncoderModel,
    ScratchSeq2SeqForConditionalGeneration,
    ScratchSeq2SeqModel,
)
from hf_scratch_transformer.embedding import batches_by_length, sentence_embeddings
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

TEXTS = ["a bank", "we sat on the bank of the river and slept", "she asked", "the bank was wet", "a bank"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, family="encoder", vocab_size=90, min_frequency=1)


@pytest.mark.parametrize("batch_tokens", [1, 24, 4096])
@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel])
def test_vectors_are_means_of_each_text_alone(model_class, batch_tokens: int, tokenizer) -> None:
    model = tiny.model(model_class, **config_fields(tokenizer, "encoder"))
    vectors = sentence_embeddings(model, tokenizer, TEXTS, batch_tokens)
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.no_grad():
            alone = model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, alone, atol=1e-5, rtol=1e-5)
    unit = sentence_embeddings(model, tokenizer, TEXTS, batch_tokens, normalize=True)
    torch.testing.assert_close(unit, vectors / vectors.norm(dim=1, keepdim=True))


def test_one_text_is_no_sequence_of_characters(tokenizer) -> None:
    model = tiny.model(ScratchEncoderModel, **config_fields(tokenizer, "encoder"))
    (vector,) = sentence_embeddings(model, tokenizer, [TEXTS[1]], normalize=True)
    assert torch.equal(sentence_embeddings(model, tokenizer, TEXTS[1], normalize=True), vector)


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (ScratchDecoderForCausalLM, "ScratchDecoderForCausalLM has a head; give what is below it, model.base_model"),
        (ScratchSeq2SeqModel, r"ScratchSeq2SeqModel reads and writes; give the half that reads, model.get_encoder\(\)"),
        (ScratchSeq2SeqForConditionalGeneration, r"reads and writes; .* model.get_encoder\(\)"),
    ],
)
def test_a_model_without_a_state_for_each_token_is_named(model_class, message: str, tokenizer) -> None:
    model = tiny.model(model_class, vocab_size=90)
    with pytest.raises(ValueError, match=message):
        sentence_embeddings(model, tokenizer, TEXTS)
    other = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    assert sentence_embeddings(other, tokenizer, TEXTS).shape == (len(TEXTS), 32)


def test_a_long_text_is_cut(tokenizer) -> None:
    model = tiny.model(ScratchEncoderModel, **config_fields(tokenizer, "encoder"))
    limit = model.config.max_position_embeddings
    body = limit - tokenizer.num_special_tokens_to_add()
    one, other = sentence_embeddings(model, tokenizer, ["bank " * body, "bank " * 3 * body])
    assert torch.equal(one, other)


def test_rows_of_like_length_go_together() -> None:
    lengths = [3, 9, 1, 9, 4, 2]
    batches = list(batches_by_length(lengths, 12))
    assert [[lengths[row] for row in rows] for rows in batches] == [[9], [9], [4, 3, 2], [1]]
    assert sorted(sum(batches, [])) == list(range(6))
    assert list(batches_by_length([], 12)) == []


def test_what_has_no_vector_is_named(tokenizer) -> None:
    model = tiny.model(ScratchEncoderModel, **config_fields(tokenizer, "encoder"))
    assert sentence_embeddings(model, tokenizer, []).shape == (0, 32)
    with pytest.raises(ValueError, match="batch_tokens=0"):
        sentence_embeddings(model, tokenizer, TEXTS, 0)
    small = tiny.model(ScratchEncoderModel, vocab_size=20)
    with pytest.raises(ValueError, match="the tokenizer gives the id .*, the model's table ends at 19"):
        sentence_embeddings(small, tokenizer, TEXTS)
    plain = train_tokenizer(TEXTS, family="decoder", vocab_size=300, min_frequency=1)
    with pytest.raises(ValueError, match=r"texts\[1\]='' has no tokens"):
        sentence_embeddings(model, plain, ["a", ""])
