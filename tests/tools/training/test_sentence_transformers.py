"""sentence-transformers: vectors of texts, and scores of pairs, by an encoder and by a decoder."""

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from torch.testing import assert_close

from hf_scratch_transformer.embedding import sentence_embeddings
from hf_scratch_transformer.tokenization import config_fields
from tests import tiny

OPTIONS = {
    **{"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1},
    **{"max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 3e-3},
}


def folder(tokenizer, family, task, path, **options):
    head = next(model for model in tiny.MODELS if (tiny.family(model), tiny.task(model)) == (family, task))
    model = tiny.model(head, **config_fields(tokenizer, family), **options)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, str(path)


@pytest.fixture(scope="module")
def pairs(texts):
    others = [*texts[1:], texts[0]]
    same = [{"sentence1": text, "sentence2": text, "label": 1.0} for text in texts]
    return Dataset.from_list(
        same + [{"sentence1": one, "sentence2": two, "label": 0.0} for one, two in zip(texts, others, strict=True)]
    )


def fell(trainer):
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses[-1] < losses[0]


def test_sentence_transformer(family, tokenizer, texts, pairs, tmp_path):
    """SentenceTransformer, trained: vectors = ours; saved and loaded = trained"""
    model, path = folder(tokenizer, family, "", tmp_path / "model")
    encoder = SentenceTransformer(path)
    vectors = encoder.encode(texts, convert_to_tensor=True)
    assert_close(vectors, sentence_embeddings(model, tokenizer, texts), atol=1e-5, rtol=1e-5)
    arguments = SentenceTransformerTrainingArguments(str(tmp_path / "run"), **OPTIONS)
    assert fell(SentenceTransformerTrainer(encoder, arguments, train_dataset=pairs, loss=CosineSimilarityLoss(encoder)))
    trained = encoder.encode(texts, convert_to_tensor=True)
    assert (trained - vectors).abs().max() > 1e-3
    encoder.save(str(tmp_path / "trained"))
    loaded = SentenceTransformer(str(tmp_path / "trained"))
    assert_close(loaded.encode(texts, convert_to_tensor=True), trained)


def test_cross_encoder(family, tokenizer, texts, pairs, tmp_path):
    """CrossEncoder, trained: scores = our head's; saved and loaded = trained"""
    model, path = folder(tokenizer, family, "SequenceClassification", tmp_path / "model", num_labels=1)
    scorer = CrossEncoder(path)
    asked = [(row["sentence1"], row["sentence2"]) for row in pairs]
    scores = scorer.predict(asked, convert_to_tensor=True)
    inputs = tokenizer(*map(list, zip(*asked, strict=True)), padding=True, return_tensors="pt")
    with torch.no_grad():
        assert_close(scores, model(**inputs).logits[:, 0].sigmoid(), atol=1e-5, rtol=1e-5)
    arguments = CrossEncoderTrainingArguments(str(tmp_path / "run"), **OPTIONS)
    assert fell(CrossEncoderTrainer(scorer, arguments, train_dataset=pairs, loss=BinaryCrossEntropyLoss(scorer)))
    trained = scorer.predict(asked, convert_to_tensor=True)
    ranking = scorer.rank(texts[0], texts)
    assert [row["score"] for row in ranking] == sorted((row["score"] for row in ranking), reverse=True)
    scorer.save(str(tmp_path / "trained"))
    assert_close(CrossEncoder(str(tmp_path / "trained")).predict(asked, convert_to_tensor=True), trained)
