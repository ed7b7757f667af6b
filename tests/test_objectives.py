"""The objectives: what is predicted, and that no token is lost, leaked or counted twice."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import MarianConfig, MarianMTModel

from hf_scratch_transformer.embedding import longest_output
from hf_scratch_transformer.tokenization import config_fields
from tests import tiny_runs
from training import objectives
from training.batches import IGNORED, Draws
from training.corpus import FAMILIES, load, make_tokenizer
from training.objectives import OBJECTIVES
from training.recipe import parse


def opened(folder, name, *words, **sections):
    """An objective with its tokenizer, training split and a model without dropout."""
    recipe = parse([str(tiny_runs.write_recipe(folder, name, **sections)), *words])
    objective = OBJECTIVES[name](recipe, make_tokenizer(recipe))
    corpus = load(recipe, "train", objective.encode)
    fields = config_fields(objective.tokenizer, FAMILIES[name])
    torch.manual_seed(0)
    model = objective.auto_model.from_config(recipe.build_config(**fields)).eval()
    return objective, corpus, model


def batches(objective, corpus, seed=None):
    key = None if seed is None else (seed,)
    return [
        objective.collate(corpus, item, Draws((7, i), np.arange(len(item))), 0)
        for i, item in enumerate(objective.plan(corpus, key))
    ]


@pytest.mark.parametrize("name", tiny_runs.OBJECTIVES)
def test_the_lean_loss_is_the_loss_from_the_logits(name, tmp_path):
    objective, corpus, model = opened(tmp_path, name)
    for batch in batches(objective, corpus)[:3]:
        logits, targets = objective.predict(model, batch)
        assert len(targets) == (batch[objective.targets] != IGNORED).sum()
        for smoothing in (0.0, 0.2):
            expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
            torch.testing.assert_close(objective.loss(model, batch, smoothing), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", tiny_runs.OBJECTIVES)
def test_intervals_do_not_hang_on_the_size_of_a_batch(name, tmp_path, monkeypatch):
    """The parts that they are told from hold the same, of each row once, in batches of any size."""
    monkeypatch.setattr(objectives, "PARTS", 3)
    found = []
    for tokens in (64, 4096):
        objective, corpus, _ = opened(tmp_path, name, "--data.batch_tokens", str(tokens))
        parts = objective.parts(corpus)
        found.append([sorted(np.concatenate(part).tolist()) for part in parts])
    assert len(found[0]) == 3
    assert found[0] == found[1]
    every = np.concatenate(objective.plan(corpus, None)).tolist()
    assert sorted(row for part in found[0] for row in part) == sorted(every)
    assert max(map(len, found[0])) - min(map(len, found[0])) <= 1


def test_a_native_model_trains_through_the_same_objective(tmp_path):
    objective, corpus, _ = opened(tmp_path, "translation")
    ids = config_fields(objective.tokenizer, "seq2seq")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "forced_eos_token_id": None}
    model = MarianMTModel(MarianConfig(**sizes, **ids)).eval()
    batch = batches(objective, corpus)[0]
    mean = model(**batch).loss
    count = (batch["labels"] != IGNORED).sum()
    torch.testing.assert_close(objective.loss(model, batch) / count, mean, atol=1e-5, rtol=1e-5)


def test_every_pair_is_translated_once_an_epoch(tmp_path):
    objective, corpus, _ = opened(tmp_path, "translation")
    seen = []
    for batch in batches(objective, corpus, seed=3):
        assert batch["input_ids"].numel() <= 64 and batch["labels"].numel() <= 64
        assert torch.equal(batch["attention_mask"].bool(), batch["input_ids"] != objective.tokenizer.pad_token_id)
        for source, target in zip(batch["input_ids"], batch["labels"], strict=True):
            texts = objective.tokenizer.batch_decode([source, target[target != IGNORED]], skip_special_tokens=True)
            seen.append(tuple(texts))
    lines = [(tmp_path / "corpus" / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")]
    assert sorted(seen) == sorted(zip(*lines, strict=True))


def test_beams_are_weighed_by_their_probabilities(tmp_path, monkeypatch):
    """Those of whole translations, as a forward pass says them, whatever they are divided by in the search."""
    weighed = []

    def first(texts, log_probabilities):
        weighed.append((texts, log_probabilities))
        return texts[0]

    monkeypatch.setattr("training.objectives.least_risk", first)
    words = ["--evaluation.length_penalty", "0.5", "--data.max_length", "12"]
    objective, corpus, _ = opened(tmp_path, "translation", *words)
    learn = ("--optimisation.max_steps", "150", "--evaluation.every_steps", "150")
    assert tiny_runs.run(tmp_path / "recipe.yaml", tmp_path / "run", *words, *learn) == 0, "one that knows where to end"
    model = objective.auto_model.from_pretrained(tmp_path / "run" / "model")
    rows = np.arange(6)
    batch = objective.collate(corpus, rows, Draws((0,), rows), 0)
    encoded = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"num_beams": 8, "length_penalty": 0.5, "max_new_tokens": longest_output(batch["input_ids"].shape[1], 12)}
    assert objective.translate(model, corpus, rows, 8, 4) == objective.translate(model, corpus, rows, 8)
    assert len(weighed) == 6 and all(len(texts) == len(found) == 4 for texts, found in weighed)
    written = model.generate(**encoded, **options, num_return_sequences=4)
    repeated = {name: values.repeat_interleave(4, 0) for name, values in encoded.items()}
    logits = model(**repeated, decoder_input_ids=written[:, :-1]).logits.log_softmax(-1)
    ends = written[:, 1:] == objective.tokenizer.eos_token_id
    real = ends.cumsum(1) - ends.int() == 0  # what comes before an end, and the first one itself
    assert real.sum(1).unique().numel() > 2, "of several lengths"
    found = logits.gather(-1, written[:, 1:, None])[..., 0] * real
    expected = found.sum(1).view(6, 4).tolist()
    torch.testing.assert_close([each for _, each in weighed], expected, atol=1e-4, rtol=1e-4)


def test_r_drop_is_the_papers_formula(tmp_path):
    words = ["--optimisation.r_drop", "5", "--model.dropout", "0.3"]
    objective, corpus, model = opened(tmp_path, "translation", *words)
    batch = batches(objective, corpus)[0]
    evaluated = objective.loss(model, batch)
    model.train()
    torch.manual_seed(0)
    loss = objective.loss(model, batch)
    torch.manual_seed(0)
    logits, targets = objective.predict(model, {name: values.repeat(2, 1) for name, values in batch.items()})
    one, two = (half.log_softmax(-1) for half in logits.chunk(2))
    loss_sum = F.nll_loss(torch.cat([one, two]), targets, reduction="sum")
    divergence = sum(F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((one, two), (two, one)))
    assert divergence > 0
    torch.testing.assert_close(loss, (loss_sum + 5 * divergence / 2) / 2, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(evaluated, super(type(objective), objective).loss(model.eval(), batch))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_causal_windows_predict_every_token_but_the_first_exactly_once(seed, tmp_path):
    objective, corpus, _ = opened(tmp_path, "causal_lm")
    stream = corpus.columns["text"].tokens
    assert (stream == objective.tokenizer.eos_token_id).sum() == 60, "each row ends"
    inputs, targets = [], []
    for batch in batches(objective, corpus, seed):
        assert batch["input_ids"].shape[1] <= 16
        real = batch["shift_labels"] != IGNORED
        for row, keep in enumerate(real):
            inputs.append(batch["input_ids"][row][keep].tolist())
            targets.append(batch["shift_labels"][row][keep].tolist())
            assert inputs[-1][1:] == targets[-1][:-1]
    assert sorted(sum(targets, [])) == sorted(stream[1:].tolist())
    assert sorted(sum(inputs, [])) == sorted(stream[:-1].tolist())


def test_overlapping_windows_count_every_token_once_and_show_it_more_before_it(tmp_path):
    plain, corpus, model = opened(tmp_path, "causal_lm")
    stream = corpus.columns["text"].tokens

    def measure(stride):
        """Loss, and how many tokens before it each target is predicted from."""
        objective, _, _ = opened(tmp_path, "causal_lm", "--evaluation.stride", str(stride))
        found = batches(objective, corpus)
        real = [batch["shift_labels"] != IGNORED for batch in found]
        targets = torch.cat([batch["shift_labels"][kept] for batch, kept in zip(found, real, strict=True)])
        assert targets.tolist() == stream[1:].tolist()
        assert all(batch["input_ids"].shape[1] <= 16 for batch in found)
        return sum(objective.loss(model, batch) for batch in found), torch.cat([kept.nonzero()[:, 1] for kept in real])

    one, other = batches(plain, corpus), batches(opened(tmp_path, "causal_lm", "--evaluation.stride", "16")[0], corpus)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)
    for stride in (16, 5, 1):
        loss_sum, context = measure(stride)
        assert context[16:].min() >= 16 - stride and context.max() == 15
    ids = torch.from_numpy(stream.astype(np.int64))
    exact = sum(  # the last stride is 1: each token from the 16 before it
        F.cross_entropy(model(ids[None, max(0, at - 15) : at + 1]).logits[0, -1], ids[at + 1])
        for at in range(len(stream) - 1)
    )
    torch.testing.assert_close(loss_sum, exact, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("name", ["causal_lm", "masked_lm"])
def test_separate_documents_do_not_see_each_other(name, tmp_path):
    objective, corpus, model = opened(tmp_path, name, "--data.separate_documents")
    batch = next(b for b in batches(objective, corpus) if (b["position_ids"] == 0).sum() > len(b["position_ids"]))
    positions = batch["position_ids"]
    assert torch.equal(positions[:, 0], torch.zeros(len(positions), dtype=torch.long))
    row = int(((positions == 0).sum(1) > 1).nonzero()[0])
    start = int((positions[row, 1:] == 0).nonzero()[0]) + 1  # of the second document in this window
    changed = {key: values.clone() for key, values in batch.items()}
    changed["input_ids"][row, 0] = (changed["input_ids"][row, 0] + 1) % 40 + 5
    outputs = []
    for inputs in (batch, changed):
        kept = {key: values[row : row + 1] for key, values in inputs.items() if key != objective.targets}
        outputs.append(model(**kept, **({"use_cache": False} if name == "causal_lm" else {})).logits[0])
    torch.testing.assert_close(outputs[0][start:], outputs[1][start:], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(outputs[0][:start], outputs[1][:start])


def test_random_windows_lie_inside_the_stream(tmp_path):
    objective, corpus, _ = opened(tmp_path, "causal_lm", "--data.random_windows")
    windows = np.concatenate(objective.plan(corpus, (0,)))
    assert (windows[:, 1] - windows[:, 0] == 16).all() and windows.min() >= 0
    assert windows.max() <= len(corpus.columns["text"].tokens) - 1
    assert len(np.unique(windows[:, 0] % 16)) > 5, "at any offset"


def test_masking_hides_the_share_asked_for_and_never_special_tokens(tmp_path):
    objective, corpus, _ = opened(
        tmp_path, "masked_lm", "--optimisation.mask_fraction", "0.3", "--data.batch_tokens", "100000"
    )
    tokenizer = objective.tokenizer
    batch = batches(objective, corpus)[0]
    plain = corpus.columns["text"].tokens
    hidden = batch["labels"] != IGNORED
    assert not set(batch["labels"][hidden].tolist()) & set(tokenizer.all_special_ids)
    ordinary = int((~np.isin(plain, tokenizer.all_special_ids)).sum())
    assert int(hidden.sum()) == pytest.approx(0.3 * ordinary, abs=4 * math.sqrt(0.21 * ordinary))
    shown = batch["input_ids"][hidden]
    masks = shown == tokenizer.mask_token_id
    kept = shown == batch["labels"][hidden]
    assert float(masks.float().mean()) == pytest.approx(0.8, abs=0.2) and 0 < int(kept.sum()) < int(masks.sum())
    assert objective.fraction(0) == objective.fraction(10**6) == 0.3


def test_the_mask_fraction_follows_its_schedule(tmp_path):
    objective, _, _ = opened(tmp_path, "masked_lm", "--optimisation.mask_fraction", "[0.4, 0.1]")
    assert [objective.fraction(step) for step in (0, 6, 12, 99)] == pytest.approx([0.4, 0.25, 0.1, 0.1])


def test_whole_words_are_hidden_together(tmp_path):
    words = ["--optimisation.whole_word_masking", "--optimisation.mask_fraction", "0.4", "--tokenizer.vocab_size", "40"]
    objective, corpus, _ = opened(tmp_path, "masked_lm", *words)
    assert objective.inside.any(), "a small vocabulary cuts words into pieces"
    pieces = 0
    for batch in batches(objective, corpus):
        hidden = (batch["labels"] != IGNORED).numpy()
        original = np.where(hidden, batch["labels"].numpy(), batch["input_ids"].numpy())
        inside = objective.inside[original]
        inside[:, 0] = False
        pieces += int(inside.sum())
        assert (hidden[:, 1:][inside[:, 1:]] == hidden[:, :-1][inside[:, 1:]]).all()
    assert pieces > 20


def test_language_model_metrics_are_per_byte_and_per_word(tmp_path):
    objective, corpus, _ = opened(tmp_path, "causal_lm")
    lines = (tmp_path / "corpus" / "train.en").read_text(encoding="utf-8").splitlines()
    assert corpus.words == sum(len(line.split()) + 1 for line in lines)
    assert corpus.bytes == sum(len(line.encode()) for line in lines)
    values = objective.summary({"loss_sum": 1000.0}, 500, corpus)
    assert values["loss"] == 2 and values["perplexity"] == pytest.approx(math.exp(2))
    assert values["bits_per_byte"] == pytest.approx(1000 / math.log(2) / corpus.bytes)
    assert values["word_perplexity"] == pytest.approx(math.exp(1000 / corpus.words))
