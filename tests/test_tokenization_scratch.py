"""A translator with a vocabulary for each language: its tokenizer, and a run of one from recipe to strangers."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from hf_scratch_transformer import ScratchSeq2SeqConfig, ScratchTranslationTokenizer, hub
from hf_scratch_transformer.insight.pictures import attention_weights
from hf_scratch_transformer.tokenization import config_fields, join_tokenizers, sides, train_tokenizer
from tests import tiny_runs
from training.corpus import vocabularies
from training.recipe import parse
from training.sections import RecipeError

ENGLISH = ["The dog sees a cat.", "A house by the river.", "The river is wide."] * 4
GERMAN = ["Der Hund sieht eine Katze.", "Ein Haus am Fluss.", "Der Fluss ist breit."] * 4


@pytest.fixture(scope="module")
def alone():
    return [
        train_tokenizer(texts, family="seq2seq", vocab_size=size) for texts, size in ((ENGLISH, 300), (GERMAN, 320))
    ]


@pytest.fixture(scope="module")
def tokenizer(alone):
    return join_tokenizers(*alone)


def is_two(tokenizer, alone):
    """Whether a tokenizer reads and writes as two do."""
    source, target = alone
    batch = tokenizer(ENGLISH[:2], text_target=GERMAN[:2], padding=True)
    expected = source(ENGLISH[:2], padding=True).data | {"labels": target(GERMAN[:2], padding=True)["input_ids"]}
    assert batch.data == expected
    assert tokenizer.batch_decode(batch["labels"], skip_special_tokens=True) == GERMAN[:2]
    assert tokenizer(text_target=GERMAN[0])["input_ids"] == batch["labels"][0][: len(target(GERMAN[0])["input_ids"])]
    assert tokenizer(ENGLISH[0])["input_ids"] == source(ENGLISH[0])["input_ids"]  # the mode of the target is left again
    assert len(tokenizer) == len(source) and [len(side) for side in sides(tokenizer)] == [len(source), len(target)]
    return True


def test_each_side_has_its_vocabulary(tokenizer, alone, tmp_path):
    assert is_two(tokenizer, alone)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, ScratchTranslationTokenizer)
    for each in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert is_two(each, alone)
    loaded.save_pretrained(tmp_path / "again")
    for name in ("tokenizer.json", "target_tokenizer.json", "tokenizer_config.json"):
        first, second = (json.loads((folder / name).read_text()) for folder in (tmp_path, tmp_path / "again"))
        assert {**first, "is_local": 0, "local_files_only": 0} == {**second, "is_local": 0, "local_files_only": 0}


def test_the_code_of_a_folder_is_enough(tokenizer, alone, tmp_path):
    tokenizer.save_pretrained(tmp_path / "it")
    program = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("it", trust_remote_code=True)
assert "hf_scratch_transformer" not in sys.modules
print(json.dumps(tokenizer(["A dog."], text_target=["Ein Hund."])["labels"]))
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-I", "-c", program]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [alone[1]("Ein Hund.")["input_ids"]]


def test_a_folder_without_its_targets_vocabulary_is_refused(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "target_tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"separate_vocabs=True: .* has no target_tokenizer.json"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_special_tokens_have_one_id(alone):
    other = train_tokenizer(GERMAN, family="encoder", algorithm="byte_bpe", vocab_size=320)
    with pytest.raises(ValueError, match="must have one id on both sides"):
        join_tokenizers(alone[0], other)


def test_a_tokenizer_of_one_vocabulary_stays_what_it_was(alone, tmp_path):
    alone[0].save_pretrained(tmp_path)
    ScratchSeq2SeqConfig(vocab_size=300).save_pretrained(tmp_path)
    assert not isinstance(AutoTokenizer.from_pretrained(tmp_path), ScratchTranslationTokenizer)
    (tmp_path / "tokenizer_config.json").unlink()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(ENGLISH[0])["input_ids"] == alone[0](ENGLISH[0])["input_ids"]
    assert loaded.decode(loaded(ENGLISH[0])["input_ids"], skip_special_tokens=True) == ENGLISH[0]


def test_a_collator_makes_what_a_model_takes(tokenizer):
    fields = config_fields(tokenizer, "seq2seq")
    assert fields["vocab_size"] != fields["decoder_vocab_size"]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "encoder_layers": 1}
    model = AutoModelForSeq2SeqLM.from_config(ScratchSeq2SeqConfig(**fields, **sizes, decoder_layers=1))
    rows = [tokenizer(source, text_target=target) for source, target in zip(ENGLISH[:2], GERMAN[:2], strict=True)]
    batch = DataCollatorForSeq2Seq(tokenizer, model)(rows)
    outputs = model(**batch)
    assert outputs.logits.shape[-1] == fields["decoder_vocab_size"] and torch.isfinite(outputs.loss)


def test_what_decides_the_tokens_is_of_both_sides(tokenizer, alone):
    digests = {vocabularies(each) for each in (tokenizer, *alone, join_tokenizers(alone[0], alone[0]))}
    assert len(digests) == 4


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("translator")
    tokenizer = {"separate_vocabs": True, "vocab_size": 290}
    return tiny_runs.write_recipe(folder, tokenizer=tokenizer, optimisation={"schedule": "constant"})


def test_a_run_with_two_vocabularies(recipe, tmp_path, capsys):
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    folder = tmp_path / "whole/model"
    said = capsys.readouterr()
    config = json.loads((folder / "config.json").read_text())
    assert config["share_encoder_decoder_embeddings"] is False and config["decoder_vocab_size"] != config["vocab_size"]
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tables = [stack.get_input_embeddings() for stack in (model.model.encoder, model.model.decoder)]
    assert [table.num_embeddings for table in tables] == [len(side) for side in sides(tokenizer)]
    of_each = " + ".join(str(len(side)) for side in sides(tokenizer))
    assert f"parameters, {of_each} tokens" in said.out + said.err
    assert f", vocabularies of {of_each} tokens, trained on" in (folder / "README.md").read_text(encoding="utf-8")
    hub.check_complete(folder)
    # The same, stopped on the way and gone on with.
    words = ("--optimisation.max_steps", "8")
    assert tiny_runs.run(recipe, tmp_path / "parts", *words) == 0
    assert tiny_runs.run(recipe, tmp_path / "parts", "--resume", "--optimisation.max_steps", "12") == 0
    one, other = (tiny_runs.weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    capsys.readouterr()
    # Measured again, and drawn: each side in its own language.
    path = str(tmp_path / "whole/model")
    data = str(recipe.parent / "corpus")
    assert tiny_runs.main(["evaluate", path, "--data", data, "--data.columns", '{"source": "en", "target": "de"}']) == 0
    shown = float(capsys.readouterr().out.split("test loss: ")[1].split()[0])
    last = [line for line in tiny_runs.metrics.read(tmp_path / "whole/metrics.jsonl") if line["event"] == "test"]
    assert shown == pytest.approx(last[0]["loss"], rel=1e-3)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager")
    source, target = ((recipe.parent / "corpus" / f"test.{side}").read_text().splitlines()[0] for side in ("en", "de"))
    drawn = attention_weights(model, tokenizer, source, target)
    assert "".join(drawn.columns[:-1]) == source.replace(" ", "")
    assert "".join(drawn.rows[:-1]) == target.replace(" ", "")


def test_a_repository_without_a_side_is_not_complete(recipe, tmp_path):
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    for name in ("target_tokenizer.json", "tokenization_scratch.py"):
        path = tmp_path / "run/model" / name
        kept = path.read_bytes()
        path.unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            hub.check_complete(tmp_path / "run/model")
        path.write_bytes(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": {"share_encoder_decoder_embeddings": True}},
            "model.share_encoder_decoder_embeddings: must be false",
        ),
        ({"model": {"model_type": "bart"}}, "tokenizer.separate_vocabs: bart has one vocabulary"),
    ],
)
def test_what_two_vocabularies_exclude(recipe, change, message, tmp_path):
    tree = yaml.safe_load(recipe.read_text())
    if "model_type" in change["model"]:
        tree["model"] = {}
    tree["model"] |= change["model"]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(RecipeError, match=message):
        parse([str(path)])


def test_a_language_model_has_one_vocabulary(tmp_path):
    path = tiny_runs.write_recipe(tmp_path, "causal_lm", tokenizer={"separate_vocabs": True})
    with pytest.raises(RecipeError, match=r"tokenizer.separate_vocabs: scratch_decoder has one vocabulary"):
        parse([str(path)])
