"""EleutherAI's harness, told nothing but a folder and YAML tasks over local files."""

import json
import math
import re
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from pytest import approx
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny
from training.__main__ import main

WINDOW = 16  # shorter than the texts to be read
NEW = 8
LANGUAGE_MODELS = {"causal": ScratchDecoderForCausalLM, "seq2seq": ScratchSeq2SeqForConditionalGeneration}

Saved = tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]


@pytest.fixture(scope="module", params=LANGUAGE_MODELS)
def saved(request, texts, tmp_path_factory) -> Saved:
    model_class = LANGUAGE_MODELS[request.param]
    family = tiny.family(model_class)
    tokenizer = train_tokenizer(texts, family=family, vocab_size=320, min_frequency=1)
    model = tiny.model(model_class, **config_fields(tokenizer, family) | {"max_position_embeddings": WINDOW})
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder), tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """What the harness makes of a task over these rows: its results, and each row's."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def run(saved: Saved, rows: list[dict[str, Any]], **fields: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
        model, _, folder = saved
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"task": "ours", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (tmp_path / "ours.yaml").write_text(json.dumps(task | {"test_split": "test"} | fields))  # JSON is YAML
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={
                "pretrained": str(folder),
                "trust_remote_code": True,
                "backend": "seq2seq" if model.config.is_encoder_decoder else "default",
            },
            tasks=["ours"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            device="cpu",
            batch_size=len(rows),
            bootstrap_iters=0,
        )
        results = {name.removesuffix(",none"): value for name, value in found["results"]["ours"].items()}
        return results, sorted(found["samples"]["ours"], key=lambda sample: sample["doc_id"])

    return run


@pytest.mark.parametrize("saved", ["causal"], indirect=True)
def test_perplexity(saved, texts, evaluate, tools):
    """a decoder, perplexity of local texts longer than its window: by word and byte, its numbers = ours"""
    model, tokenizer, _ = saved
    documents = [" ".join(texts[i:] + texts[:i]) for i in range(4)]
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    results, _ = evaluate(
        saved,
        [{"text": text} for text in documents],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=metrics,
    )
    total = 0.0
    for text in documents:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) > 2 * WINDOW
        ids = [tokenizer.bos_token_id, *ids]
        for first in range(1, len(ids), WINDOW):
            end = min(first + WINDOW, len(ids))  # the last window is as long as the others, and counts only what is new
            found = tools.log_probabilities(model, ids[end - 1 - WINDOW : end - 1])
            total += sum(float(found[place - end, ids[place]]) for place in range(first, end))
    words, size = sum(len(text.split()) for text in documents), sum(len(text.encode()) for text in documents)
    assert results["word_perplexity"] == approx(math.exp(-total / words), rel=1e-5)
    assert results["byte_perplexity"] == approx(math.exp(-total / size), rel=1e-5)
    assert results["bits_per_byte"] == approx(-total / size / math.log(2), rel=1e-5)


def test_multiple_choice(saved, texts, evaluate, tools, tmp_path, capsys):
    """a decoder and a translator, four choices: each log-likelihood, accuracy and that by bytes, its = ours"""
    model, tokenizer, _ = saved
    endings = [" ".join(text.split()[2:5]) for text in texts]
    rows = [
        {"question": " ".join(text.split()[:2]), "choices": [endings[(i + k) % len(texts)] for k in range(4)]}
        for i, text in enumerate(texts)
    ]
    rows = [row | {"gold": i % 4} for i, row in enumerate(rows)]
    results, samples = evaluate(
        saved,
        rows,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{gold}}",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    ours = [
        [tools.log_likelihood(model, tokenizer, row["question"], f" {choice}") for choice in row["choices"]]
        for row in rows
    ]
    theirs = [[float(found[0][0]) for found in sample["resps"]] for sample in samples]
    assert theirs == [approx(row, abs=1e-4) for row in ours]
    best = [max(range(4), key=row.__getitem__) for row in ours]
    by_bytes = [
        max(range(4), key=lambda k, found=found, row=row: found[k] / len(row["choices"][k].encode()))
        for found, row in zip(ours, rows, strict=True)
    ]
    assert len(set(best)) > 1
    for metric, chosen in (("acc", best), ("acc_norm", by_bytes)):
        right = sum(choice == row["gold"] for choice, row in zip(chosen, rows, strict=True))
        assert results[metric] == approx(right / len(rows))
    # And by our own command, of tasks in a folder.
    words = ["evaluate", str(saved[2]), "--task", "ours", "--include_path", str(tmp_path)]
    assert main(words) == 0
    printed = re.search(r"^test ours acc: (\S+) \(95%: (\S+) to (\S+)\)$", capsys.readouterr().out, re.MULTILINE)
    value, low, high = map(float, printed.groups())
    assert value == approx(results["acc"], abs=1e-3)
    assert high - low == approx(2 * 1.96 * math.sqrt(value * (1 - value) / (len(rows) - 1)), abs=2e-3)
    assert main([*words[:3], "theirs", *words[4:]]) == 2
    assert "there is no theirs" in capsys.readouterr().err


def test_generation(saved, texts, evaluate):
    """a decoder and a translator, greedy: texts up to a stop word, its own = ours, and exact match = 1"""
    model, tokenizer, _ = saved
    prompts = [" ".join(text.split()[:2]) for text in texts]
    stop, expected = " a", []
    ids = [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in prompts]
    assert len({row.shape for row in ids}) > 1
    # In one batch, whose longest prompt it takes for the start of a translation too.
    is_translator = model.config.is_encoder_decoder
    limit = {"max_length": max(row.shape[1] for row in ids) + NEW} if is_translator else {"max_new_tokens": NEW}
    for row in ids:
        found = model.generate(input_ids=row, do_sample=False, **limit)[0, 0 if is_translator else row.shape[1] :]
        expected.append(tokenizer.decode(found, skip_special_tokens=True).split(stop)[0])
    assert len(set(expected)) > 2
    results, samples = evaluate(
        saved,
        [{"prompt": prompt, "expected": text} for prompt, text in zip(prompts, expected, strict=True)],
        output_type="generate_until",
        doc_to_text="{{prompt}}",
        doc_to_target="{{expected}}",
        generation_kwargs={"until": [stop], "max_gen_toks": NEW, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )
    assert [sample["resps"][0][0] for sample in samples] == expected
    assert results["exact_match"] == 1
