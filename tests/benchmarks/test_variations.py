"""What varies training in ways that no option of a recipe says."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from benchmarks import ablations, variations
from benchmarks.__main__ import main
from benchmarks.variations import VARIATIONS, Distillation, NorMuon
from hf_scratch_transformer.configuration_scratch import ScratchDecoderConfig
from hf_scratch_transformer.modeling_scratch_decoder import ScratchDecoderForCausalLM
from training import metrics, publication
from training.batches import CONTENT, EVALUATION, ORDER, Draws
from training.corpus import load
from training.objectives import OBJECTIVES, Translation
from training.optimisation import Muon
from training.preparation import tokenizer
from training.recipe import Recipe, parse

from .. import tiny_runs


def objective(folder: Path, name: str, kind: str = "translation", **data: int) -> tuple:
    """The objective that a variation makes of a tiny recipe, the plain one, the tokens, and the recipe."""
    recipe = parse([str(tiny_runs.write_recipe(folder, kind, data=data)), "--output_dir", str(folder / "run")])
    place, key, variation = VARIATIONS[name]
    made = [each(recipe, tokenizer(recipe)) for each in (variation, place[key])]
    return *made, load(recipe, "train", made[1].encode), recipe


def passes(varied: Translation, corpus: object, recipe: Recipe, count: int) -> list[list[np.ndarray]]:
    return [varied.plan(corpus, (recipe.seed, ORDER, epoch, 0)) for epoch in range(count)]


@pytest.fixture
def patched(monkeypatch):
    """Puts a variation in its place for one test."""

    def patch(name: str) -> None:
        place, key, variation = VARIATIONS[name]
        monkeypatch.setitem(place, key, variation)

    return patch


def test_batches_grow_by_passes(tmp_path):
    varied, plain, corpus, recipe = objective(tmp_path, "growing_batch", batch_tokens=32)
    counts = [len(plan) for plan in passes(varied, corpus, recipe, 7)]
    for first, size in ((0, 32), (2, 64), (4, 128)):
        data = recipe.data.model_copy(update={"batch_tokens": size})
        as_large = Translation(recipe.model_copy(update={"data": data}), plain.tokenizer)
        key = (recipe.seed, ORDER, first, 0)
        for one, other in zip(varied.plan(corpus, key), as_large.plan(corpus, key), strict=True):
            np.testing.assert_array_equal(one, other)
    assert counts[0] == counts[1] > counts[2] > counts[4] == counts[6]
    assert len(varied.plan(corpus, None)) == len(plain.plan(corpus, None)), "what is measured is as it was"


def test_short_pairs_come_first(tmp_path):
    varied, plain, corpus, recipe = objective(tmp_path, "short_first")
    longest = np.maximum(corpus.columns["source"].lengths, corpus.columns["target"].lengths)
    for share, plan in zip((1 / 4, 1 / 2, 3 / 4, 1), passes(varied, corpus, recipe, 4), strict=True):
        rows = np.sort(np.concatenate(plan))
        np.testing.assert_array_equal(rows, np.flatnonzero(longest <= np.quantile(longest, share)))
    assert len(np.concatenate(varied.plan(corpus, None))) == len(longest)


def test_merges_are_left_out_of_what_is_trained_on_alone(tmp_path):
    varied, plain, corpus, recipe = objective(tmp_path, "token_dropout")
    varied.loose.model.dropout = 0.9
    (rows, *_) = plain.plan(corpus, None)
    trained = varied.collate(corpus, rows, Draws((recipe.seed, CONTENT, 0, 0, 0), rows), 0)
    measured, usual = (
        each.collate(corpus, rows, Draws((recipe.seed, EVALUATION, 0), rows), 0) for each in (varied, plain)
    )
    for name, values in usual.items():
        torch.testing.assert_close(measured[name], values)
    for name in ("input_ids", "labels"):
        read = [
            plain.tokenizer.batch_decode([row[row >= 0] for row in batch[name]], skip_special_tokens=True)
            for batch in (trained, usual)
        ]
        assert read[0] == read[1], "they are the same texts"
        assert trained[name].shape[1] > usual[name].shape[1], "in more tokens"
    assert (trained["labels"] == plain.tokenizer.eos_token_id).sum() == len(rows)


def test_a_larger_model_teaches_and_is_counted(tmp_path, patched, monkeypatch):
    recipe = tiny_runs.write_recipe(tmp_path)
    monkeypatch.setattr(Distillation, "TEACHER", tmp_path / "teacher")
    monkeypatch.setattr(
        Distillation, "WORDS", ("--model.hidden_size", "32", "--seed", "4", "--output_dir", str(tmp_path / "teacher"))
    )
    monkeypatch.setattr(Distillation, "student", [str(recipe), "--seed", "1"], raising=False)
    monkeypatch.setattr(publication, "target_flops", publication.target_flops)  # to be as it was afterwards

    def run(command, check):  # as it is in a process of its own
        with monkeypatch.context() as plainly:
            plainly.setitem(OBJECTIVES, "translation", Translation)
            assert tiny_runs.main(command[3:]) == 0

    monkeypatch.setattr(variations, "subprocess", SimpleNamespace(run=run))
    assert tiny_runs.run(recipe, tmp_path / "plain") == 0
    patched("distillation")
    assert tiny_runs.run(recipe, tmp_path / "student") == 0
    monkeypatch.undo()
    plain, student, teacher = (finished(tmp_path / name) for name in ("plain", "student", "teacher"))
    assert teacher["parameters"] > student["parameters"] == plain["parameters"]
    assert student["targets"] == plain["targets"]
    third = teacher["flops"] / teacher["targets"] * student["targets"] / 3  # it only goes forward
    # Both predict where there is padding, too.
    assert 0 < student["flops"] - plain["flops"] - third - teacher["flops"] < 0.4 * plain["flops"]
    assert tiny_runs.losses(tmp_path / "student")[12] != tiny_runs.losses(tmp_path / "plain")[12]


def finished(folder: Path) -> dict:
    return {line["event"]: line for line in metrics.read(folder / "metrics.jsonl")}["finished"]


def test_windows_grow_by_passes(tmp_path):
    varied, plain, corpus, recipe = objective(tmp_path, "growing_windows", "causal_lm")
    for plan, size in zip(passes(varied, corpus, recipe, 4), (4, 8, 16, 16), strict=True):
        windows = np.concatenate(plan)
        assert (windows[:, 1] - windows[:, 0]).max() == size
        assert (windows[:, 1] - windows[:, 2]).sum() == varied.end(corpus), "each token is a target once"
        assert len(plan[0]) == recipe.data.batch_tokens // size
    np.testing.assert_array_equal(varied.plan(corpus, None)[0], plain.plan(corpus, None)[0])


@pytest.mark.parametrize(
    ("name", "neutral"),
    [
        ("value_residuals", {"shares": [1.0, 0.0]}),
        ("gated_heads", {"gate_proj.weight": 0.0}),
        ("unet_skips", {"skip": 0.0}),
    ],
)
def test_models_have_a_neutral_setting_and_another_one(patched, name, neutral):
    config = ScratchDecoderConfig(vocab_size=30, hidden_size=16, num_hidden_layers=4, num_attention_heads=2)
    ids = torch.arange(12).view(2, 6)
    torch.manual_seed(0)
    plain = ScratchDecoderForCausalLM(config).eval()
    patched(name)
    varied = ScratchDecoderForCausalLM(config).eval()
    added = varied.load_state_dict(plain.state_dict(), strict=False)
    assert added.missing_keys and not added.unexpected_keys
    weights = dict(varied.named_parameters())
    assert all(key.endswith(tuple(neutral)) for key in added.missing_keys)
    before = varied(ids).logits
    for key in added.missing_keys:
        (value,) = neutral.values()
        weights[key].data.copy_(torch.tensor(value))
    torch.testing.assert_close(varied(ids).logits, plain(ids).logits)
    assert not torch.allclose(before, plain(ids).logits, atol=1e-5)
    varied(ids).logits.square().sum().backward()
    assert all(weights[key].grad.abs().max() > 0 for key in added.missing_keys), "they learn"


def test_steps_of_neurons_are_of_one_length():
    torch.manual_seed(0)
    steps = {}
    for kind in (Muon, NorMuon):
        matrix = torch.nn.Parameter(torch.zeros(6, 4))
        matrix.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 7)[:, None]
        kind([matrix], 0.02, weight_decay=0.0, momentum=0.9).step()
        steps[kind] = matrix.detach()
    lengths = steps[NorMuon].norm(dim=1)
    torch.testing.assert_close(lengths, lengths.mean().expand(6))
    torch.testing.assert_close(steps[NorMuon].norm(), steps[Muon].norm())
    assert steps[Muon].norm(dim=1).std() > 0.001


def test_ablations_train_with_them(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(ablations, "ran", lambda command, *_, **__: ran.append(command))
    ideas = {"recipe": str(tiny_runs.write_recipe(tmp_path)), "score": "loss", "seeds": [1, 2]}
    file = tmp_path / "ideas.yaml"
    file.write_text(yaml.safe_dump(ideas | {"ideas": [{"name": "a", "changes": {"variation": "short_first"}}]}))
    with pytest.raises(KeyError, match="finished"):  # of a run that did not take place
        ablations.trained(ablations.read(file), {"variation": "short_first", "log_every": 2}, 1, [], 1)
    (command,) = ran
    assert command[1:6] == ["-m", "benchmarks", "variation", "short_first", ideas["recipe"]]
    assert "--variation" not in command and command[6:8] == ["--log_every", "2"]
    file.write_text(yaml.safe_dump(ideas | {"ideas": [{"name": "a", "changes": {"variation": "short_frist"}}]}))
    with pytest.raises(ValueError, match="variation 'short_frist' is not known: did you mean short_first?"):
        ablations.read(file)


def test_the_command_trains_and_knows_no_other_words(tmp_path, monkeypatch, capsys):
    for words in ([], ["short_frist"]):
        assert main(["variation", *words]) == 2
        assert "variation" in capsys.readouterr().err
    monkeypatch.setitem(VARIATIONS["short_first"][0], "translation", Translation)
    monkeypatch.setattr(variations, "command", partial(called := [].append))
    words = [str(tiny_runs.write_recipe(tmp_path)), "--seed", "3"]
    assert main(["variation", "short_first", *words]) == 0
    assert VARIATIONS["short_first"][0]["translation"] is variations.ShortFirst and called.__self__ == [words]
