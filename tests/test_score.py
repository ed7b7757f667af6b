"""`python -m training evaluate`: any finished model on any text or pairs, with its folder left as it is."""

import json

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_scratch_transformer import ScratchEncoderModel, cli
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny, tiny_runs
from tests.test_run import contents
from training import metrics, score
from training.__main__ import main
from training.objectives import OBJECTIVES

SIZES = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
NATIVE = {
    "causal_lm": ("decoder", GPT2LMHeadModel, GPT2Config, {"n_embd": 16, "n_layer": 1, "n_head": 2}),
    "masked_lm": ("encoder", BertForMaskedLM, BertConfig, {"hidden_size": 12, "num_hidden_layers": 1}),
    "translation": ("seq2seq", BartForConditionalGeneration, BartConfig, SIZES | {"max_position_embeddings": 64}),
}


def scores(capsys):
    """What was printed, by name."""
    lines = [line.removeprefix("test ").split(": ", 1) for line in capsys.readouterr().out.splitlines()]
    return {name: value.split()[0] for name, value in lines}


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_a_run_and_its_model_have_the_same_scores(objective, tmp_path, monkeypatch, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, objective, optimisation={"max_steps": 4}, evaluation={"num_beams": 2})
    options = ["--optimisation.final_weights=last", "--data.batch_tokens=32"]  # several batches, for intervals
    assert tiny_runs.run(recipe, tmp_path / "run", *options) == 0
    expected = next(line for line in metrics.read(tmp_path / "run" / "metrics.jsonl") if line["event"] == "test")
    before = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    words = ["--data", "corpus", "--data.batch_tokens=32"]
    if objective == "translation":
        words += ["--data.columns", '{"source": "en", "target": "de"}', "--data.max_length=32"]
    else:
        words += ["--data.splits", '{"test": "test.en"}', "--data.window=16"]
    assert main(["evaluate", "run/model", *words]) == 0
    told = {k: f"{v:.4g}" for k, v in expected.items() if isinstance(v, float) and k != "seconds"}
    assert scores(capsys) == told
    assert main(["evaluate", "run/model", "--json", *words]) == 0
    whole = json.loads(capsys.readouterr().out)
    finished = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert whole.pop("weights") == finished["weights"] != {}, "of what was measured"
    assert whole and whole == {name: expected[name] for name in whole} and told.keys() <= whole.keys()
    by = {"num_beams": 2, "length_penalty": 1.0, "minimum_bayes_risk": None}
    assert whole.get("decoding") == (by if objective == "translation" else None), "how it was measured"
    assert contents(tmp_path) == before
    for name in {"loss", "perplexity", "bits_per_byte", "word_perplexity", "masked_accuracy"} & set(told):
        low, high = expected[f"{name}_interval"]
        assert low <= expected[name] <= high, name


@pytest.fixture(params=NATIVE)
def native(request, tmp_path):
    family, model_class, config_class, sizes = NATIVE[request.param]
    tokenizer = train_tokenizer([*tiny_runs.NUMBERS, *tiny_runs.NUMBERS.values()], family=family, vocab_size=300)
    torch.manual_seed(0)
    fields = config_fields(tokenizer, family)
    model = model_class(config_class(**{"vocab_size": 300} | fields, **sizes)).eval()
    model.save_pretrained(tmp_path / "native")
    tokenizer.save_pretrained(tmp_path / "native")
    return request.param, model, tokenizer


def test_a_native_model_is_measured_on_a_file(native, tmp_path, capsys):
    objective, model, tokenizer = native
    if objective == "translation":
        file, words = tmp_path / "pairs.jsonl", ["--data.columns", '{"source": "en", "target": "de"}']
        file.write_text(json.dumps({"en": "one two", "de": "zwei eins"}), encoding="utf-8")
        batch = tokenizer("one two", return_tensors="pt") | {
            "labels": tokenizer("zwei eins", return_tensors="pt").input_ids
        }
    else:
        file, words = tmp_path / "text", []
        file.write_text("one two three\n", encoding="utf-8")
        batch = tokenizer("one two three" + (tokenizer.eos_token or ""), return_tensors="pt")
        batch["labels"] = batch["input_ids"]
    assert main(["evaluate", str(tmp_path / "native"), f"--data={file}", *words]) == 0
    found = scores(capsys)
    if objective == "masked_lm":
        assert 0 < float(found["loss"]) < 10 and 0 <= float(found["masked_accuracy"]) <= 1
    else:
        assert found["loss"] == f"{model(**batch).loss.item():.4g}"


@pytest.mark.parametrize("content", ["[]", "{bad"])
def test_generation_settings_that_cannot_be_read_are_named(native, content, tmp_path, capsys):
    (tmp_path / "native" / "generation_config.json").write_text(content, encoding="utf-8")
    (tmp_path / "text").write_text("one two\n", encoding="utf-8")
    columns = [] if native[0] != "translation" else ["--data.columns", '{"source": "text", "target": "text"}']
    assert main(["evaluate", str(tmp_path / "native"), "--data", str(tmp_path / "text"), *columns]) == 2
    assert "generation_config.json" in capsys.readouterr().err


def test_what_cannot_be_measured_is_one_line_with_code_2(native, tmp_path, capsys):
    objective, model, _ = native
    (tmp_path / "headless").mkdir()
    model.base_model.save_pretrained(tmp_path / "headless")
    folder, text = str(tmp_path / "native"), tmp_path / "text"
    text.write_bytes(b"thr\xffee\n")
    columns = [] if objective != "translation" else ["--data.columns", '{"source": "text", "target": "text"}']
    for words, expected in [
        ([], "usage: python -m training evaluate MODEL --data PATH"),
        ([folder], "--data: name what to measure"),
        ([str(tmp_path / "nowhere"), "--data", str(text)], "nowhere"),
        ([str(tmp_path / "headless"), "--data", str(text)], "predicts neither translations nor tokens"),
        ([folder, "--data", str(text), *columns], "no usable row (1 broken UTF-8, as text in Latin-1 or UTF-16 is)"),
        (
            [folder, "--data", str(text), "--model.hidden_size=8"],
            "--model.hidden_size: to evaluate heeds objective, data",
        ),
        (
            [folder, "--data", "nowhere", *columns],
            "no file or folder 'nowhere' here; a dataset on the Hub is owner/name",
        ),
        ([folder, "--data", str(text), "--data.windw=8"], "data.windw: unknown key; did you mean data.window?"),
    ]:
        assert main(["evaluate", *words]) == 2
        assert expected in capsys.readouterr().err


def test_senses_are_measured_as_their_own_command_does(tmp_path, capsys):
    tokenizer = train_tokenizer([*tiny_runs.NUMBERS], family="encoder", vocab_size=300)
    model = tiny.model(ScratchEncoderModel, **config_fields(tokenizer, "encoder"))
    model.save_pretrained(tmp_path / "model"), tokenizer.save_pretrained(tmp_path / "model")
    rows = [f"bank\t{split}\t{sense}\t\tthe {sense} bank" for split in ("train", "test") for sense in ("one", "two")]
    data = tmp_path / "senses.tsv"
    data.write_text("\n".join(["word\tsplit\tsense\tposition\tsentence", *rows]))
    assert main(["evaluate", str(tmp_path / "model"), "--senses", str(data)]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["senses", str(tmp_path / "model"), str(data)]) == 0
    assert printed == capsys.readouterr().out and "test macro_f1: 100 (95%: 100 to 100)" in printed


@pytest.mark.parametrize(
    "words, message",
    [
        (["--senses"], "--senses: expected one argument"),
        (["--senses", "none.tsv"], "none.tsv"),
        (["--senses", "none.tsv", "--layers", "2"], "unrecognized arguments: --layers"),
        (["--task"], "--task: expected at least one argument"),
        (["--task", "arc_easy"], "--task needs lm_eval: pip install 'lm_eval[hf]'"),
        (["--task", "arc_easy", "--data", "x"], "unrecognized arguments: --data x"),
    ],
    ids=" ".join,
)
def test_senses_and_tasks_that_cannot_be_measured(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(score.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "model", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_text_of_which_nothing_can_be_predicted_is_refused(tmp_path, monkeypatch, capsys):
    """Also where there is no batch at all."""
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", optimisation={"max_steps": 2})
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    monkeypatch.setattr(OBJECTIVES["causal_lm"], "plan", lambda *arguments: [])
    assert main(["evaluate", str(tmp_path / "run/model"), "--data", str(tmp_path / "corpus/test.en")]) == 2
    assert "nothing to predict: give more text" in capsys.readouterr().err
