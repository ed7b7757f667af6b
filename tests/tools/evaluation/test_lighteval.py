"""Lighteval, on a decoder's folder: its model by itself, and a task of our own in its pipeline."""

import json

import datasets
import pytest
import requests
import torch
from lighteval.logging.evaluation_tracker import EvaluationTracker
from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig
from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
from lighteval.tasks.requests import Doc, SamplingMethod
from pytest import approx

from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

NEW = 8
CHOICES = [" river", " bank", " the bank was wet", " slept"]
GOLD = 1
TASKS = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

def prompt(line, task_name):
    return Doc(task_name=task_name, query=line["text"], choices={choices}, gold_index={gold})

TASKS_TABLE = [
    LightevalTaskConfig(
        name="ours", prompt_function=prompt, hf_repo="{folder}", hf_subset="default",
        hf_avail_splits=["test"], evaluation_splits=["test"], metrics=[Metrics.loglikelihood_acc],
    )
]
"""


@pytest.fixture(scope="module")
def decoder(texts, tmp_path_factory):
    """A model, its tokenizer, and what lighteval has to be told of their folder."""
    tokenizer = train_tokenizer(texts, family="decoder", vocab_size=320, min_frequency=1)
    model = tiny.model(
        ScratchDecoderForCausalLM, **config_fields(tokenizer, "decoder") | {"max_position_embeddings": 64}
    )
    folder, cache = tmp_path_factory.mktemp("decoder"), tmp_path_factory.mktemp("cache")
    model.save_pretrained(folder), tokenizer.save_pretrained(folder)
    config = TransformersModelConfig(
        model_name=str(folder), trust_remote_code=True, device="cpu", batch_size=2, cache_dir=str(cache)
    )
    return model, tokenizer, config


def test_log_likelihoods(decoder, texts, tools):
    """a decoder, four choices: each log-likelihood, its = ours"""
    model, tokenizer, config = decoder
    docs = [
        Doc(query=text, choices=CHOICES, gold_index=GOLD, id=str(i), sampling_methods=[SamplingMethod.LOGPROBS])
        for i, text in enumerate(texts)
    ]
    theirs = [found.logprobs for found in TransformersModel(config).loglikelihood(docs)]
    ours = [[tools.log_likelihood(model, tokenizer, text, choice) for choice in CHOICES] for text in texts]
    assert theirs == [approx(row, abs=1e-4) for row in ours]


def test_generation(decoder, texts):
    """a decoder, greedy: texts of 8 new tokens, its = ours"""
    model, tokenizer, config = decoder
    docs = [
        Doc(
            query=text,
            choices=[""],
            gold_index=0,
            id=str(i),
            sampling_methods=[SamplingMethod.GENERATIVE],
            generation_size=NEW,
            stop_sequences=[],
        )
        for i, text in enumerate(texts)
    ]
    theirs = [found.text for found in TransformersModel(config).greedy_until(docs)]
    ours = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        found = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        ours.append([tokenizer.decode(found, skip_special_tokens=True)])
    assert len({row[0] for row in ours}) > 2
    assert theirs == ours


def test_task(decoder, texts, tools, tmp_path, monkeypatch):
    """a decoder, a task of our own in its pipeline: accuracy, its = ours"""
    model, tokenizer, config = decoder
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tasks = tmp_path / "our_tasks.py"
    tasks.write_text(TASKS.format(choices=CHOICES, gold=GOLD, folder=data))
    options = PipelineParameters(
        launcher_type=ParallelismManager.NONE, custom_tasks_directory=str(tasks), bootstrap_iters=0
    )
    tracker = EvaluationTracker(output_dir=str(tmp_path / "results"), save_details=False)
    try:
        pipeline = Pipeline("ours|0", options, tracker, model_config=config)
    except requests.ConnectionError as error:
        pytest.skip(str(error))
    pipeline.evaluate()
    ours = [[tools.log_likelihood(model, tokenizer, text, choice) for choice in CHOICES] for text in texts]
    right = sum(row.index(max(row)) == GOLD for row in ours)
    assert pipeline.get_results()["results"]["ours|0"]["acc"] == approx(right / len(texts))
