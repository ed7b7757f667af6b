"""What transformers' own `Trainer` reports of every head: it reads the signature of `forward` to learn what the labels
are, and scores nothing where a batch does not hold all of them."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.utils import find_labels

from hf_scratch_transformer import ScratchSeq2SeqForConditionalGeneration as Translator

from . import tiny

OPTIONS = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "per_device_eval_batch_size": 3}


def batch_of(model: PreTrainedModel) -> dict[str, Tensor]:
    inputs = tiny.inputs(model)
    return inputs | tiny.labels(model, inputs)


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value[row] for name, value in batch.items()} for row in range(len(batch["input_ids"]))]


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("model_class", tiny.MODELS, ids=lambda model: model.__name__)
def test_only_labels_are_called_labels(model_class):
    """every class: names that it takes for labels = labels"""
    called = [name for name in inspect.signature(model_class.forward).parameters if "label" in name]
    assert called in ([], ["labels"])
    is_answer = tiny.task(model_class) == "QuestionAnswering"
    assert find_labels(model_class) == (["start_positions", "end_positions"] if is_answer else called)


@pytest.mark.parametrize("head", tiny.HEADS, ids=lambda head: head.__name__)
def test_the_trainer_scores_every_head(head, tmp_path: Path):
    """evaluate, predict and compute_metrics, every head: losses, labels and logits = the model's own"""
    model = tiny.model(head)
    batch = batch_of(model)
    labels = [value for name, value in batch.items() if name not in ("input_ids", "attention_mask")]
    seen: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"called": 1.0}

    trainer = Trainer(
        model, TrainingArguments(tmp_path, **OPTIONS), eval_dataset=rows_of(batch), compute_metrics=compute_metrics
    )
    metrics = trainer.evaluate()
    with torch.no_grad():
        outputs = model(**batch)
    assert metrics["eval_called"] == 1.0
    assert metrics["eval_loss"] == pytest.approx(outputs.loss.item(), rel=1e-5)

    predicted = trainer.predict(rows_of(batch))
    assert {"test_loss", "test_called"} <= predicted.metrics.keys()
    for result in (predicted, *seen):
        several = isinstance(result.label_ids, tuple)
        for got, expected in zip(result.label_ids if several else [result.label_ids], labels, strict=True):
            assert_close(torch.as_tensor(got), expected)
        first = result.predictions[0] if isinstance(result.predictions, tuple) else result.predictions
        assert_close(torch.as_tensor(first), outputs[1])
    assert len(seen) == 2


@pytest.mark.parametrize("head", tiny.HEADS, ids=lambda head: head.__name__)
def test_the_trainer_keeps_the_best_model_of_every_head(head, tmp_path: Path):
    """eval_strategy and load_best_model_at_end, every head: loss in the end = the least that was logged"""
    model = tiny.model(head)
    rows = rows_of(batch_of(model))
    arguments = TrainingArguments(
        tmp_path,
        **OPTIONS,
        per_device_train_batch_size=3,
        max_steps=3,
        learning_rate=0.3,  # far too much, so that the last model is not the best
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert len(losses) == 3 and len(set(losses)) == 3
    assert trainer.state.best_metric == pytest.approx(min(losses))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_labels_smoothed_by_the_trainer_are_smoothed_as_ours(head, smoothing, tmp_path: Path):
    """smoothed labels, which it takes from the model and shifts itself for a causal one: losses = ours"""
    model = tiny.model(head)
    batch = batch_of(model)
    with torch.no_grad():
        expected = model(**batch, label_smoothing=smoothing).loss.item()
    if model.config.is_encoder_decoder:  # as the collator of transformers does
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=smoothing, **OPTIONS)
    trainer = Trainer(model, arguments, eval_dataset=rows_of(batch))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    predicted = trainer.predict(rows_of(batch))
    assert predicted.metrics["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert_close(torch.as_tensor(predicted.label_ids), batch["labels"])


@pytest.mark.parametrize("generates", [False, True])
def test_the_trainer_of_translators_scores_what_is_generated(generates, tmp_path: Path):
    """Seq2SeqTrainer, predict_with_generate: tokens that compute_metrics is given = generate's"""
    model = tiny.model(Translator)
    batch = batch_of(model)
    seen: list[Any] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"called": 1.0}

    arguments = Seq2SeqTrainingArguments(
        tmp_path, predict_with_generate=generates, generation_max_length=8, generation_num_beams=1, **OPTIONS
    )
    trainer = Seq2SeqTrainer(model, arguments, eval_dataset=rows_of(batch), compute_metrics=compute_metrics)
    metrics = trainer.evaluate()
    with torch.no_grad():
        loss = model(**batch).loss.item()
        written = model.generate(**without_labels(batch), max_length=8, do_sample=False)
    assert metrics["eval_called"] == 1.0 and metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    labels = torch.as_tensor(trainer.predict(rows_of(batch)).label_ids)
    assert_close(labels[:, : batch["labels"].shape[1]], batch["labels"])  # padded to what may be generated
    if generates:
        for predictions in seen:
            assert torch.equal(torch.as_tensor(predictions)[:, : written.shape[1]], written)
