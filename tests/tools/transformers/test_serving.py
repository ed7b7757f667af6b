"""Models put to work by transformers itself: its server, its chat, its pipelines, its continuous batching."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import openai
import pytest
import torch
from pytest import approx
from torch import Tensor
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, pipeline

import hf_scratch_transformer as scratch
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

PACKAGE = "transformers"
# As the command `transformers`, which first asks the package index for a newer version.
COMMAND = [sys.executable, "-c", "from transformers.cli.transformers import app; app()"]
NEW = 12  # tokens
TEXT = "she asked a bank"


@contextmanager
def served(folder: str, home: Path, *options: str) -> Iterator[str]:
    """The address of a server of its own; the last words of one that dies are raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address, log = f"http://127.0.0.1:{port}", home / "log"
    where = ["--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    with log.open("w") as words:
        server = subprocess.Popen([*COMMAND, "serve", folder, *where, *options], stdout=words, stderr=words)
        try:
            while not answers(f"{address}/health"):
                if server.poll() is not None:
                    raise RuntimeError(log.read_text().strip().splitlines()[-1])
                time.sleep(0.2)
            yield address
        finally:
            server.kill()
            server.wait()


def answers(url: str) -> bool:
    try:
        with urlopen(url) as reply:
            return reply.status == 200
    except URLError:
        return False


def written(decoder, prompt: str, **how: Any) -> str:
    """What our model writes after it."""
    ids = decoder.tokenizer(prompt, return_tensors="pt").input_ids
    tokens = decoder.ours.generate(ids, max_new_tokens=NEW, do_sample=False, **how)[0, ids.shape[1] :]
    return decoder.tokenizer.decode(tokens, skip_special_tokens=True)


def assert_answers(address: str, folder: str, decoder) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    how = {"model": folder, "temperature": 0.0}
    chat = [{"role": "user", "content": TEXT}]
    expected = written(decoder, f"{TEXT} ")
    assert client.completions.create(prompt=TEXT, max_tokens=NEW, **how).choices[0].text == written(decoder, TEXT)
    reply = client.chat.completions.create(messages=chat, max_tokens=NEW, **how)
    assert reply.choices[0].message.content == expected
    stream = client.chat.completions.create(messages=chat, max_tokens=NEW, stream=True, **how)
    assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == expected
    assert client.responses.create(input=TEXT, max_output_tokens=NEW, stream=False, **how).output_text == expected
    assert len(expected) >= NEW / 2


@pytest.mark.parametrize("options", [(), ("--continuous-batching", "--cb-num-blocks", "16")], ids=["", "continuous"])
def test_serve_llama(options, decoder, tmp_path):
    """transformers serve, with continuous batching too, the Llama export: four kinds of answers = ours by generate"""
    with served(decoder.folders["native"], tmp_path, *options) as address:
        assert_answers(address, decoder.folders["native"], decoder)


def test_serve(decoder, tmp_path):
    """transformers serve, our own folder: four kinds of answers = ours by generate"""
    try:
        with served(decoder.folders["ours"], tmp_path, "--trust-remote-code") as address:
            assert_answers(address, decoder.folders["ours"], decoder)
    except RuntimeError as error:
        pytest.skip(str(error))


def test_chat(decoder, tmp_path):
    """transformers chat, the Llama export: words in the terminal = ours by generate"""
    # Offline, it refuses to ask a server on the same machine.
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    folder = decoder.folders["native"]
    allowed = decoder.tokenizer.encode(" ".join(TEXT.split() * 2))
    bias = [token for token in range(decoder.ours.config.vocab_size) if token not in allowed]
    with served(folder, tmp_path) as address:
        flags = [f"max_new_tokens={NEW}", "do_sample=False", f"suppress_tokens=[{','.join(map(str, bias))}]"]
        shown = subprocess.run(
            [*COMMAND, "chat", folder, address, *flags],
            input=f"{TEXT}\nn\n!exit\n",
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert shown.returncode == 0, shown.stderr
    expected = written(decoder, f"{TEXT} ", suppress_tokens=bias)
    assert len(expected) > NEW and expected.split() and " ".join(expected.split()) in " ".join(shown.stdout.split())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_continuous_batching(implementation, decoder):
    """generate_batch, paged sdpa and eager: tokens = generate's, and Llama's by generate_batch"""
    prompts = [row[mask == 1].tolist() for row, mask in zip(*decoder.inputs.values(), strict=True)]
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = []
    for model in (decoder.ours, decoder.native):
        before = model.config._attn_implementation
        model.set_attn_implementation(implementation)
        # Without these it takes what memory there is.
        paged = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=paged)
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
        found.append([by_prompt[tuple(prompt)] for prompt in prompts])
        model.set_attn_implementation(before)
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    alone = [decoder.ours.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist() for prompt in prompts]
    assert found == [alone, alone]


# Pipelines


@pytest.fixture
def home(tmp_path, texts):
    """Saves a tiny model with a tokenizer; returns both and a pipeline of the folder."""

    def opened(task: str, model_class: type[PreTrainedModel], **others: Any):
        family = tiny.family(model_class)
        tokenizer = train_tokenizer(texts, family=family, vocab_size=320, min_frequency=1)
        model = tiny.model(model_class, **config_fields(tokenizer, family) | others)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        run = pipeline(task, model=str(tmp_path), device="cpu")
        assert type(run.model) is model_class
        return model, AutoTokenizer.from_pretrained(tmp_path), run

    return opened


@torch.no_grad()
def logits(model: PreTrainedModel, tokenizer: Any, *texts: str) -> Tensor:
    return model(**tokenizer(*texts, return_tensors="pt", return_token_type_ids=False)).logits[0]


def test_text_generation(decoder):
    """text-generation pipeline, a batch: texts = generate's, row by row"""
    run = pipeline("text-generation", model=decoder.folders["ours"], device="cpu")
    prompts = [TEXT, "trout swim upstream", "the bank"]
    made = run(prompts, max_new_tokens=NEW, do_sample=False, return_full_text=False, batch_size=3)
    assert [text[0]["generated_text"] for text in made] == [written(decoder, prompt) for prompt in prompts]


def test_fill_mask(home):
    """fill-mask pipeline: tokens and scores of a call of the model"""
    model, tokenizer, run = home("fill-mask", scratch.ScratchEncoderForMaskedLM)
    text = f"she {tokenizer.mask_token} a bank"
    at = tokenizer(text).input_ids.index(tokenizer.mask_token_id)
    scores, tokens = logits(model, tokenizer, text)[at].softmax(-1).topk(5)
    guesses = run(text)
    assert [guess["token"] for guess in guesses] == tokens.tolist()
    assert [guess["score"] for guess in guesses] == approx(scores.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "model_class", [scratch.ScratchEncoderForSequenceClassification, scratch.ScratchDecoderForSequenceClassification]
)
def test_text_classification(model_class, home):
    """text-classification pipeline, an encoder and a decoder: labels and scores of a call of the model"""
    model, tokenizer, run = home("text-classification", model_class, num_labels=3)
    scores = {found["label"]: found["score"] for found in run(TEXT, top_k=None)}
    expected = logits(model, tokenizer, TEXT).softmax(-1).tolist()
    assert [scores[f"LABEL_{label}"] for label in range(3)] == approx(expected, abs=1e-6)


def test_zero_shot_classification(home):
    """zero-shot-classification pipeline: scores from entailment of each pair of texts"""
    names = {"id2label": {0: "contradiction", 1: "entailment"}, "label2id": {"contradiction": 0, "entailment": 1}}
    model, tokenizer, run = home("zero-shot-classification", scratch.ScratchEncoderForSequenceClassification, **names)
    labels = ["river", "bank", "trout"]
    of_pairs = torch.stack([logits(model, tokenizer, TEXT, f"This example is {label}.")[1] for label in labels])
    found = run(TEXT, labels)
    scores = dict(zip(found["labels"], found["scores"], strict=True))
    assert [scores[label] for label in labels] == approx(of_pairs.softmax(0).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "model_class", [scratch.ScratchEncoderForTokenClassification, scratch.ScratchDecoderForTokenClassification]
)
def test_token_classification(model_class, home):
    """token-classification pipeline, an encoder and a decoder: label and score of every token"""
    model, tokenizer, run = home("token-classification", model_class, num_labels=3)
    ids = tokenizer(TEXT, return_special_tokens_mask=True)
    scores, labels = logits(model, tokenizer, TEXT).softmax(-1).max(-1)
    real = [at for at, special in enumerate(ids["special_tokens_mask"]) if not special]
    found = run(TEXT, ignore_labels=[])
    assert [word["entity"] for word in found] == [f"LABEL_{labels[at]}" for at in real]
    assert [word["score"] for word in found] == approx(scores[real].tolist(), abs=1e-6)


@pytest.mark.parametrize("model_class", [scratch.ScratchEncoderModel, scratch.ScratchDecoderModel])
@torch.no_grad()
def test_feature_extraction(model_class, home):
    """feature-extraction pipeline, an encoder and a decoder: vectors of a call of the model"""
    model, tokenizer, run = home("feature-extraction", model_class)
    inputs = tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False)
    torch.testing.assert_close(run(TEXT, return_tensors=True), model(**inputs)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "model_class"),
    [
        ("question-answering", scratch.ScratchEncoderForQuestionAnswering),
        ("translation", scratch.ScratchSeq2SeqForConditionalGeneration),
    ],
)
def test_removed(task, model_class, home):
    """question-answering and translation pipelines: answers of a call of the model"""
    try:
        home(task, model_class)
    except KeyError as error:
        pytest.skip(error.args[0])
    pytest.fail("there are such pipelines again, and this row should compare")
