"""What varies training in ways that no option of a recipe says."""

import gzip
import json
import re
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM

from benchmarks import ablations, variations
from benchmarks.__main__ import main
from benchmarks.variations import VARIATIONS, BackTranslation, Distillation, NorMuon, Preceded
from hf_scratch_transformer.configuration_scratch import ScratchDecoderConfig
from hf_scratch_transformer.modeling_scratch_decoder import ScratchDecoderForCausalLM
from training import folder, metrics, publication
from training.batches import CONTENT, EVALUATION, ORDER, Draws
from training.corpus import load
from training.objectives import OBJECTIVES, Translation
from training.optimisation import Muon
from training.preparation import tokenizer
from training.recipe import Recipe, parse
from training.run import TrainingError
from training.sections import RecipeError

from .. import tiny_runs


def objective(folder: Path, name: str, kind: str = "translation", **data: int) -> tuple:
    """The objective that a variation makes of a tiny recipe, the plain one, the tokens, and the recipe."""
    recipe = parse([str(tiny_runs.write_recipe(folder, kind, data=data)), "--output_dir", str(folder / "run")])
    place, key, variation, _ = VARIATIONS[name]
    made = [each(recipe, tokenizer(recipe)) for each in (variation, place[key])]
    return *made, load(recipe, "train", made[1].encode), recipe


def passes(varied: Translation, corpus: object, recipe: Recipe, count: int) -> list[list[np.ndarray]]:
    return [varied.plan(corpus, (recipe.seed, ORDER, epoch, 0)) for epoch in range(count)]


@pytest.fixture
def patched(monkeypatch):
    """Puts a variation in its place for one test."""

    def patch(name: str) -> None:
        place, key, variation, _ = VARIATIONS[name]
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


@pytest.fixture
def preceded(tmp_path, monkeypatch):
    """A tiny recipe, and what trains what precedes it, tiny as well, in this process."""
    recipe = tiny_runs.write_recipe(tmp_path)
    monkeypatch.setattr(Preceded, "RUNS", tmp_path)
    monkeypatch.setattr(Distillation, "WORDS", ("--model.hidden_size", "32"))
    monkeypatch.setattr(Preceded, "given", [str(recipe), "--seed", "1"], raising=False)
    monkeypatch.setattr(publication, "target_flops", variations.counted)

    def run(command, check):  # as it is in a process of its own
        with monkeypatch.context() as plainly:
            plainly.setitem(OBJECTIVES, "translation", Translation)
            assert tiny_runs.main(command[3:]) == 0

    monkeypatch.setattr(variations, "subprocess", SimpleNamespace(run=run, CalledProcessError=CalledProcessError))
    return recipe


def test_a_larger_model_teaches_and_is_counted(tmp_path, preceded, patched):
    assert tiny_runs.run(preceded, tmp_path / "plain") == 0
    patched("distillation")
    assert tiny_runs.run(preceded, tmp_path / "student") == 0
    (run,) = (path for path in tmp_path.glob("teacher-*") if path.is_dir())
    plain, student, teacher = (finished(path) for path in (tmp_path / "plain", tmp_path / "student", run))
    assert teacher["parameters"] > student["parameters"] == plain["parameters"]
    assert student["targets"] == plain["targets"]
    third = teacher["flops"] / teacher["targets"] * student["targets"] / 3  # it only goes forward
    # Both predict where there is padding, too.
    assert 0 < student["flops"] - plain["flops"] - third - teacher["flops"] < 0.4 * plain["flops"]
    assert tiny_runs.losses(tmp_path / "student")[12] != tiny_runs.losses(tmp_path / "plain")[12]


def test_half_of_the_loss_is_the_teachers(tmp_path, preceded, monkeypatch):
    recipe = parse([str(preceded), "--output_dir", str(tmp_path / "student")])
    objective = Distillation(recipe, tokenizer(recipe))
    corpus = load(recipe, "train", objective.encode)
    batch = objective.collate(corpus, np.arange(8), Draws((0,), np.arange(8)), 0)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(objective.teacher.config).train()
    model.config.dropout = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    (logits, targets), (theirs, _) = (objective.predict(each, batch) for each in (model, objective.teacher))
    told = -(theirs.softmax(-1) * logits.log_softmax(-1)).sum()
    known = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(objective.loss(model, batch, 0.1), (told + known) / 2)
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(objective.loss(model.eval(), batch), plain, msg="what is measured is as it was")
    assert not objective.teacher.training

    def failing(command, check):
        raise CalledProcessError(-9, command)

    monkeypatch.setattr(variations.subprocess, "run", failing)
    Distillation(recipe, objective.tokenizer)  # which is there
    monkeypatch.setattr(Distillation, "WORDS", ("--model.hidden_size", "48"))
    with pytest.raises(TrainingError, match=r"the teacher, .*/teacher-\w{8}, has ended with -9"):
        Distillation(recipe, objective.tokenizer)


def test_further_texts_are_translated_back_and_counted(tmp_path, preceded, patched, monkeypatch):
    assert tiny_runs.run(preceded, tmp_path / "plain") == 0
    patched("back_translation")
    further = tmp_path / "corpus" / "descriptions"
    further.mkdir()
    texts = [f"eins {number} {other}" for number in tiny_runs.NUMBERS.values() for other in tiny_runs.NUMBERS.values()]
    for place, some in enumerate((texts[:20], texts[20:])):
        (further / f"{place}.de.gz").write_bytes(gzip.compress("\n".join(some).encode()))
    assert tiny_runs.run(preceded, tmp_path / "varied") == 0
    (run,) = (path for path in tmp_path.glob("reverse-*") if path.is_dir())
    pairs = json.loads((run / "pairs.json").read_text(encoding="utf-8"))
    assert pairs["target"] == texts and len(pairs["source"]) == len(texts)
    recipe = parse([str(run / "recipe.yaml"), "--output_dir", str(run)])
    assert recipe.data.columns == {"source": ("de",), "target": ("en",)}
    plain, varied, reverse = (finished(path) for path in (tmp_path / "plain", tmp_path / "varied", run))
    assert reverse["flops"] < pairs["flops"] < 2 * reverse["flops"]
    rate = plain["flops"] / plain["targets"]
    assert varied["flops"] - pairs["flops"] == pytest.approx(rate * varied["targets"], rel=0.4)

    def again(*_, **__):
        raise AssertionError("what is there is read")

    monkeypatch.setattr(Translation, "translate", again)
    monkeypatch.setattr(variations.subprocess, "run", again)
    made, plain, corpus, recipe = objective(tmp_path, "back_translation")
    english = {name: known.lengths.tolist() for name, known in made.further.items()}
    count, others = made.examples(corpus), len(english["target"])
    assert others == sum(bool(text) for text in pairs["source"])
    seen = []
    for epoch in range(2):
        rows = np.sort(np.concatenate(made.plan(corpus, (recipe.seed, ORDER, epoch, 0))))
        np.testing.assert_array_equal(rows[:count], np.arange(count), err_msg="each pair of the corpus once a pass")
        seen += [*(rows[count:] - count)]
    assert len(seen) == 2 * count and {*seen} == {*range(others)}
    times = np.bincount(seen)
    assert times.max() - times.min() <= 1, "none again before all others"
    row = np.array([count])
    batch = made.collate(corpus, row, Draws((recipe.seed, CONTENT, 0, 0, 0), row), 0)
    read = [made.tokenizer.batch_decode(batch[name], skip_special_tokens=True)[0] for name in ("input_ids", "labels")]
    assert tuple(read) in zip(pairs["source"], pairs["target"], strict=True)
    assert len(np.concatenate(made.plan(corpus, None))) == count, "what is measured is as it was"


def test_what_no_run_precedes_is_refused_before_any_is_trained(tmp_path, preceded, patched, monkeypatch, capsys):
    patched("back_translation")
    file = tmp_path / "corpus" / "descriptions" / "1.de.gz"

    def refused(*words: str) -> str:
        assert tiny_runs.run(preceded, tmp_path / "run", *words) == 2
        assert not [path for path in tmp_path.glob("reverse-*") if path.is_dir()]
        return capsys.readouterr().err

    assert "no further text in" in refused()
    file.parent.mkdir()
    for content, message in (
        (b"no", "1.de.gz: Not a gzipped file"),
        (gzip.compress("fünf".encode("latin-1")), "1.de.gz: 'utf-8' codec"),
        (gzip.compress(b"\n \n"), "no further text in"),
        (gzip.compress((tmp_path / "corpus" / "valid.de").read_bytes()), "no further text in"),
    ):
        file.write_bytes(content)
        assert message in refused()
    file.write_bytes(gzip.compress(b"eins"))
    file.rename(file.with_name("1.en.gz"))
    assert "no further text in" in refused(), "of the target's language"
    file.with_name("1.en.gz").rename(file)
    split = ("--data.splits", json.dumps({"validation": "valid", "test": "test"}))
    assert "data.streaming: true: does not go" in refused("--data.streaming", "true")
    assert "data.sources: does not go" in refused("--data.sources", '[{"split": "train"}]', *split)
    splits = json.dumps({"train": "train", "test": "test"})
    without = ("--data.splits", splits, "--evaluation.every_steps", "null")
    assert "data.splits.validation: none: does not go" in refused(*without)
    with monkeypatch.context() as several:
        several.setattr(variations, "POOL", 10)
        assert "data.splits.train: 60 pairs, where this is for 10 at most" in refused()
    recipe = parse([str(preceded), "--output_dir", str(tmp_path / "run")])
    trained = tokenizer(recipe)
    monkeypatch.setenv("WORLD_SIZE", "2")  # where each process would wait for the other one
    with pytest.raises(RecipeError, match="processes: more than one: does not go"):
        BackTranslation(recipe, trained)


def test_what_precedes_is_of_what_it_reads(tmp_path, preceded, monkeypatch):
    file = tmp_path / "corpus" / "descriptions" / "1.de.gz"
    file.parent.mkdir()
    runs = []

    def lines(text: str) -> list[str]:
        file.write_bytes(gzip.compress(text.encode()))
        recipe = parse([str(preceded), "--output_dir", str(tmp_path / "run")])
        made = BackTranslation(recipe, tokenizer(recipe))
        assert len(made.further["source"].lengths) == 1, "the other one is too long"
        runs.append(made.preceding())
        return json.loads((runs[-1] / "pairs.json").read_text(encoding="utf-8"))["target"]

    def translated(self, model, corpus, rows, *_, **__):
        return ["one " * 50 ** (row == 1) for row in rows]

    monkeypatch.setattr(Translation, "translate", translated)
    assert lines("eins zwei eins\nzwei zwei eins\neins zwei eins\n\n") == ["eins zwei eins", "zwei zwei eins"]
    assert lines("eins zwei eins\nzwei drei eins") == ["eins zwei eins", "zwei drei eins"]
    tiny_runs.write_corpus(tmp_path / "corpus", rows=30)
    lines("eins zwei eins\nzwei drei eins")
    lines("eins zwei eins\nzwei drei eins")
    assert len({*runs}) == 3 and runs[-1] == runs[-2]
    monkeypatch.setattr(Translation, "translate", lambda self, model, corpus, rows, *_, **__: [""] * len(rows))
    with pytest.raises(TrainingError, match=r"pairs\.json has no pair to train on"):
        lines("vier vier vier")


def finished(folder: Path) -> dict:
    return metrics.last(folder / "metrics.jsonl")["finished"]


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


def test_the_last_layer_reads_what_the_first_gave(patched):
    patched("unet_skips")
    config = ScratchDecoderConfig(vocab_size=30, hidden_size=16, num_hidden_layers=4, num_attention_heads=2)
    layers = ScratchDecoderForCausalLM(config).eval().model.layers
    given: list[torch.Tensor] = []
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: given.append(args[0]))
        layer.self_attn.o_proj.weight.data.zero_()  # so that each gives x + mlp(norm(x))
    x = torch.randn(1, 3, 16)
    outputs = []
    for index, layer in enumerate(layers):
        read = outputs[-1] if outputs else x
        outputs.append(layer(read))
        if index >= 2:
            read = read + outputs[3 - index]
        torch.testing.assert_close(given[-1], layer.mlp_norm(read))


def test_steps_of_neurons_are_evened_out_by_earlier_ones():
    steps: dict[type, list[torch.Tensor]] = {}
    for kind in (Muon, NorMuon):
        matrix = torch.nn.Parameter(torch.zeros(6, 4))
        optimizer = kind([matrix], 0.02, weight_decay=0.0, momentum=0.0)
        draw = torch.Generator().manual_seed(1)
        for _ in range(2):
            before = matrix.detach().clone()
            matrix.grad = torch.randn(6, 4, generator=draw) * torch.arange(1, 7)[:, None]
            optimizer.step()
            steps.setdefault(kind, []).append(matrix.detach() - before)
    assert steps[Muon][0].norm(dim=1).std() > 0.001
    lengths = steps[NorMuon][0].norm(dim=1)
    torch.testing.assert_close(lengths, lengths.mean().expand(6), msg="at first by the step itself")
    squares = [step.square().mean(dim=1, keepdim=True) for step in steps[Muon]]
    even = steps[Muon][1] / (0.95 * squares[0] + squares[1]).sqrt()
    torch.testing.assert_close(steps[NorMuon][1], even * steps[Muon][1].norm() / even.norm())


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
    for wrong, said in (
        ("short_frist", "did you mean short_first?"),
        (None, "'None' is not known"),
        (["a"], "not known"),
    ):
        for fields in ({"common": {"variation": wrong}}, {"ideas": [{"name": "a", "changes": {"variation": wrong}}]}):
            file.write_text(yaml.safe_dump({**ideas, "ideas": [{"name": "a"}], **fields}))
            with pytest.raises(ValueError, match=re.escape(said)):
                ablations.read(file)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ([], "translation", "variation '' is not known"),
        (["short_frist"], "translation", "did you mean short_first?"),
        (["growing_windows"], "translation", "is for objective: causal_lm, not 'translation'"),
        (["value_residuals"], "masked_lm", "is for objective: causal_lm, not 'masked_lm'"),
        (["short_first", "--model_card", "card"], "translation", "model_card: 'card' is for what a recipe alone says"),
        (["normuon", "--optimisation.optimizer", "adamw"], "causal_lm", "optimisation.optimizer: muon, not 'adamw'"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, monkeypatch, capsys, words, kind, said):
    monkeypatch.setattr(variations, "command", lambda _: pytest.fail("too late"))
    recipe = str(tiny_runs.write_recipe(tmp_path, kind))
    assert main(["variation", *words[:1], *([recipe] if words else []), *words[1:]]) == 2
    assert said in capsys.readouterr().err


def test_the_command_trains(tmp_path, monkeypatch):
    called: list[list[str]] = []
    monkeypatch.setattr(variations, "command", called.append)
    monkeypatch.setattr(publication, "target_flops", publication.target_flops)
    monkeypatch.setattr(folder, "environment", folder.environment)
    monkeypatch.setattr(Recipe, "identity", Recipe.identity)
    monkeypatch.setitem(OBJECTIVES, "translation", Translation)
    words = [str(tiny_runs.write_recipe(tmp_path)), "--seed", "3"]
    assert main(["variation", "short_first", *words]) == 0
    assert OBJECTIVES["translation"] is variations.ShortFirst and called == [words]
    about = folder.environment(torch.device("cpu"), 1)
    assert about["command"][:3] == ["python", "-m", "benchmarks"]


def test_neither_goes_on_with_the_others_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(variations, "command", lambda _: None)
    monkeypatch.setattr(publication, "target_flops", publication.target_flops)
    monkeypatch.setattr(folder, "environment", folder.environment)
    recipe, output = tiny_runs.write_recipe(tmp_path), tmp_path / "run"
    assert tiny_runs.run(recipe, output) == 0
    with monkeypatch.context() as varied:
        varied.setattr(Recipe, "identity", Recipe.identity)
        varied.setitem(OBJECTIVES, "translation", Translation)
        assert main(["variation", "short_first", str(recipe)]) == 0
        assert tiny_runs.run(recipe, output, "--resume") == 2
        assert "this is another run (variation was None, now short_first)" in capsys.readouterr().err
        assert tiny_runs.run(recipe, output, "--overwrite") == tiny_runs.run(recipe, output, "--resume") == 0
    assert tiny_runs.run(recipe, output, "--resume") == 2
    assert "this is another run (variation was short_first, now None)" in capsys.readouterr().err


def test_each_has_what_it_varies():
    assert all(name in place and issubclass(part, place[name]) for place, name, part, _ in VARIATIONS.values())
