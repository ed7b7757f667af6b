"""SetFit: a few labelled texts, the encoder trained on pairs of them, then a head on its vectors."""

import pytest
import torch
from datasets import Dataset
from numpy.testing import assert_allclose
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression

from hf_scratch_transformer import ScratchEncoderModel
from hf_scratch_transformer.embedding import sentence_embeddings
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny


@pytest.fixture
def trained(texts, tmp_path):
    tokenizer = train_tokenizer(texts, family="encoder", vocab_size=320, min_frequency=1)
    tiny.model(ScratchEncoderModel, **config_fields(tokenizer, "encoder")).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    labels = [int("bank" in text) for text in texts]
    model = SetFitModel.from_pretrained(str(tmp_path / "model"), trust_remote_code=True)
    before = model.model_body[0].auto_model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    options = {"num_epochs": 1, "batch_size": 8, "body_learning_rate": 1e-3, "report_to": "none"}
    arguments = TrainingArguments(str(tmp_path / "run"), save_strategy="no", show_progress_bar=False, **options)
    Trainer(model, arguments, Dataset.from_dict({"text": texts, "label": labels})).train()
    body = model.model_body[0].auto_model
    assert any(not torch.equal(value, before[name]) for name, value in body.state_dict().items())
    return model, body, tokenizer, labels


def test_scores(trained, texts, tmp_path):
    """a body of ours, trained, its head: probabilities = a logistic regression's on our vectors; loaded = trained"""
    model, body, tokenizer, labels = trained
    ours = sentence_embeddings(body, tokenizer, texts).numpy()
    expected = LogisticRegression().fit(ours, labels).predict_proba(ours)
    scores = model.predict_proba(texts, as_numpy=True)
    assert scores.std() > 0.1
    assert_allclose(scores, expected, atol=1e-3)
    model.save_pretrained(str(tmp_path / "trained"))
    loaded = SetFitModel.from_pretrained(str(tmp_path / "trained"), trust_remote_code=True)
    assert_allclose(loaded.predict_proba(texts, as_numpy=True), scores, atol=1e-6)
