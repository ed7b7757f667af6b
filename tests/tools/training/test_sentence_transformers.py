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
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from torch.testing import assert_close
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from hf_scratch_transformer.conversion import convert_folder
from hf_scratch_transformer.embedding import sentence_embeddings
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
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


SHAPE = {"max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
NATIVE = {
    "bert": lambda words: BertForMaskedLM(
        BertConfig(
            vocab_size=words, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **SHAPE
        )
    ),
    "distilbert": lambda words: DistilBertForMaskedLM(
        DistilBertConfig(vocab_size=words, dim=32, n_layers=2, n_heads=4, hidden_dim=48, **SHAPE)
    ),
}


@pytest.fixture(params=NATIVE)
def native_and_ours(request, texts, tmp_path):
    """Two folders, a native masked language model and what it converts to."""
    tokenizer = train_tokenizer(texts, family="encoder", vocab_size=320, min_frequency=1)
    torch.manual_seed(0)
    model = NATIVE[request.param](len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    native, ours = tmp_path / "native", tmp_path / "ours"
    model.save_pretrained(native)
    tokenizer.save_pretrained(native)
    convert_folder(native, ours)
    return str(native), str(ours)


def test_sparse_encoder(native_and_ours, texts, pairs, tmp_path):
    """SparseEncoder (SPLADE), trained: vectors and losses = BERT's and DistilBERT's; loaded = trained"""
    found = []
    rows = Dataset.from_dict({"anchor": texts, "positive": texts[1:] + texts[:1]})
    for path in native_and_ours:
        encoder = SparseEncoder(path)
        vectors = encoder.encode(texts, convert_to_tensor=True).to_dense()
        model = AutoModelForMaskedLM.from_pretrained(path)
        inputs = encoder.tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            weights = model(**inputs).logits.relu().log1p() * inputs["attention_mask"][:, :, None]
        assert_close(vectors, weights.amax(1), atol=1e-5, rtol=1e-5)
        arguments = SparseEncoderTrainingArguments(str(tmp_path / "run"), **OPTIONS)
        loss = SpladeLoss(encoder, SparseMultipleNegativesRankingLoss(encoder), document_regularizer_weight=1e-3)
        trainer = SparseEncoderTrainer(encoder, arguments, train_dataset=rows, loss=loss)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert losses[-1] < losses[0]
        trained = encoder.encode(texts, convert_to_tensor=True).to_dense()
        encoder.save(str(tmp_path / "trained"))
        loaded = SparseEncoder(str(tmp_path / "trained"))
        assert_close(loaded.encode(texts, convert_to_tensor=True).to_dense(), trained)
        found.append((type(model).__name__, vectors, losses))
    (native, *theirs), (name, *ours) = found
    assert name == "ScratchEncoderForMaskedLM" != native
    assert_close(ours[0], theirs[0], atol=1e-4, rtol=1e-4)
    assert_close(ours[1], theirs[1], atol=1e-3, rtol=1e-3)


def test_same_vectors(native_and_ours, texts):
    """SentenceTransformer of what BERT and DistilBERT convert to: vectors = theirs"""
    native, ours = (SentenceTransformer(path).encode(texts, convert_to_tensor=True) for path in native_and_ours)
    assert native.std() > 0.1
    assert_close(ours, native, atol=1e-5, rtol=1e-5)
