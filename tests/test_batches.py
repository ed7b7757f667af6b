"""Batches: every row once a pass, in an order that nothing is stored of, the same for any number of processes."""

import multiprocessing
import pickle
import shutil
import tracemalloc

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny_runs
from tests.test_objectives import opened
from training import batches, objectives, preparation
from training.batches import Batches, Draws, bucket, mixed_rows, pool_rows
from training.checkpoints import read_state
from training.corpus import Sequences, load
from training.recipe import parse


@pytest.fixture
def small_pools(monkeypatch):
    for module in (batches, objectives):
        monkeypatch.setattr(module, "POOL", 7)


def pools(count, seed=0, size=None):
    """All pools of a pass over `count` rows, and the one after the last."""
    return [pool_rows(count, pool, np.random.default_rng(seed)) for pool in range(-(-count // batches.POOL) + 1)]


@settings(deadline=None)
@given(count=st.integers(8, 3000), seed=st.integers(0, 2**32))
def test_every_row_is_in_one_pool(count, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "POOL", 7)
        *filled, last = pools(count, seed)
        assert not len(last) and {len(pool) for pool in filled[:-1]} == {7}
        assert sorted(np.concatenate(filled).tolist()) == list(range(count))


def test_the_order_of_ten_billion_rows_takes_neither_memory_nor_time():
    count = 10**10
    tracemalloc.start()
    rows = pool_rows(count, 9000, np.random.default_rng(1))
    assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    tracemalloc.stop()
    assert len(np.unique(rows)) == batches.POOL and rows.min() >= 0 and rows.max() < count
    # As rows drawn at random lie: in each of a thousand stretches about as many, and neighbours far apart.
    held = np.histogram(rows, 1000, (0, count))[0]
    expected = batches.POOL / 1000
    assert ((held - expected) ** 2 / expected).sum() == pytest.approx(1000, abs=5 * np.sqrt(2000))
    assert np.corrcoef(rows[1:], rows[:-1])[0, 1] == pytest.approx(0, abs=5 / np.sqrt(batches.POOL))
    assert not np.isin(rows, pool_rows(count, 9000, np.random.default_rng(2))).mean() > 0.001
    assert not np.isin(rows, pool_rows(count, 9001, np.random.default_rng(1))).any()


def test_few_rows_are_in_the_order_they_always_were():
    rng, other = np.random.default_rng(3), np.random.default_rng(3)
    assert pool_rows(50, 0, rng).tolist() == list(range(50)) and not len(pool_rows(50, 1, rng))
    assert rng.random() == other.random(), "no number is drawn"


def passes(objective, corpus, seed=0):
    """The batches of one pass, pool by pool."""
    return [batch for pool in range(objective.pools(corpus)) for batch in objective.plan(corpus, (seed,), pool)]


@pytest.mark.parametrize("name", tiny_runs.OBJECTIVES)
def test_pools_of_a_pass_hold_every_token_once(name, small_pools, tmp_path):
    objective, corpus, _ = opened(tmp_path, name)
    assert objective.pools(corpus) > 3
    found = np.concatenate(passes(objective, corpus))
    if name == "translation":
        assert sorted(found.tolist()) == list(range(objective.examples(corpus)))
    else:
        stretches = sorted((first, last) for _, last, first in found.tolist())
        assert stretches[0][0] == 0 and stretches[-1][1] == objective.end(corpus)
        assert all(one[1] == other[0] for one, other in zip(stretches, stretches[1:], strict=False))
    again, other = passes(objective, corpus), passes(objective, corpus, seed=1)
    assert np.concatenate(again).tolist() == found.tolist() != np.concatenate(other).tolist()


def test_random_windows_differ_from_pool_to_pool(small_pools, tmp_path):
    objective, corpus, _ = opened(tmp_path, "causal_lm", "--data.random_windows")
    found = np.concatenate(passes(objective, corpus))[:, 0]
    assert len(found) == objective.end(corpus) // 16 and found[:7].tolist() != found[7:14].tolist()
    _, objective, corpus = mixture(tmp_path / "mixed", "causal_lm", 0.001, 1, random_windows=True)
    plans = [objective.plan(corpus, (1, 2, 0, 0), pool) for pool in range(2)]
    assert all(map(len, plans)) and len({str(np.sort(np.concatenate(plan)[:, 0])) for plan in plans}) == 2


@pytest.mark.parametrize("name", tiny_runs.OBJECTIVES)
def test_a_run_of_several_pools_is_resumed_as_if_it_had_never_stopped(name, small_pools, tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path, name)
    words = ["--optimisation.max_steps", "30", "--checkpoints.every_steps", "1", "--checkpoints.keep_last", "99"]
    assert tiny_runs.run(recipe, tmp_path / "whole", *words) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    states = [read_state(folder)["state"] for folder in folders]
    kept = next(
        i for i, state in enumerate(states) if state["part"] and state["batch"]
    )  # in the middle of a later pool
    for folder in folders[kept + 1 :]:
        shutil.rmtree(folder)
    assert tiny_runs.run(recipe, tmp_path / "run", *words, "--resume") == 0
    assert tiny_runs.losses(tmp_path / "run") == tiny_runs.losses(tmp_path / "whole")


@pytest.mark.parametrize("processes", [2, 3, 64])
@pytest.mark.parametrize("name", tiny_runs.OBJECTIVES)
def test_processes_share_a_batch_that_one_would_have_whole(name, processes, tmp_path):
    words = ["--optimisation.whole_word_masking"] if name == "masked_lm" else []
    objective, corpus, _ = opened(tmp_path, name, *words)
    plan = objective.plan(corpus, (0,))

    def built(process, processes):
        made = Batches(
            plan, lambda *each: objective.collate(corpus, *each), objective.targets, (1,), 0, 1, (process, processes)
        )
        return [made[index] for index in range(len(plan))]

    shares = [built(process, processes) for process in range(processes)]
    for index, (batch, count) in enumerate(built(0, 1)):
        assert sum(share[index][1] for share in shares) == count
        for process in range(processes):
            own, expected = shares[process][index][0], {key: each[process::processes] for key, each in batch.items()}
            for key, values in own.items():
                rows = len(expected[key])
                width = values.shape[1]
                if rows:
                    torch.testing.assert_close(values, expected[key][:, :width], rtol=0, atol=0)
                assert len(values) == max(rows, 1)
            if not len(expected[objective.targets]):
                assert shares[process][index][1] == 0 and (own[objective.targets] == batches.IGNORED).all()


def test_draws_are_those_of_the_row():
    whole = Draws((1, 2), np.arange(9)).random(3, 4)
    assert whole.shape == (9, 3, 4) and len(np.unique(whole)) == whole.size and 0.3 < whole.mean() < 0.7
    assert (Draws((1, 2), np.array([7, 2])).random(3, 4) == whole[[7, 2]]).all()
    assert not np.isin(Draws((1, 3), np.arange(9)).random(3, 4), whole).any()


def test_what_is_mapped_is_not_copied_to_another_process(tmp_path):
    tokens = np.arange(10**6, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens")
    np.full(1000, 1000, np.uint16).tofile(tmp_path / "lengths")
    mapped = Sequences(np.memmap(tmp_path / "tokens", np.uint16, "r"), np.memmap(tmp_path / "lengths", np.uint16, "r"))
    sent = pickle.dumps(mapped)
    assert len(sent) < 2000
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_last, (mapped,)) == tokens[-1000:].tolist()
    kept = pickle.loads(pickle.dumps(Sequences(tokens, np.array([10**6], np.uint32))))
    assert (kept.tokens == tokens).all() and kept.offsets.tolist() == [0, 10**6]


def _last(sequences):
    return sequences.take(np.array([999])).tokens.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_buckets_hold_every_row_once_within_the_budget(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 60, (draw.integers(1, 500), 2))
    batches = bucket(lengths, 256, np.random.default_rng(seed))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    padded = sum(len(batch) * lengths[batch].max(axis=0).sum() for batch in batches)
    assert all(len(batch) * lengths[batch].max() <= 256 for batch in batches)
    if len(lengths) > 200:
        assert padded < 1.6 * lengths.sum()  # with rows in any order it is about 2.5
    assert [b.tolist() for b in batches] == [b.tolist() for b in bucket(lengths, 256, np.random.default_rng(seed))]
    assert len(lengths) < 9 or [b.tolist() for b in batches] != [
        b.tolist() for b in bucket(lengths, 256, np.random.default_rng(seed + 1))
    ]


def test_lengths_of_a_small_type_fit_any_budget():
    lengths = np.array([[3, 2], [60_000, 1], [5, 5]], np.uint16)
    (rows,) = bucket(lengths, 10**6)
    assert sorted(rows) == [0, 1, 2] and len(bucket(lengths, 65_536)) == 2


# --- Several sources ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 10), min_size=5, max_size=5),
)
def test_any_stretch_of_a_run_has_its_share_of_every_source(counts, weights):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "POOL", 7)
        weights, total = weights[: len(counts)], sum(counts)
        drawn = [[] for _ in counts]
        for epoch in range(3):
            for pool in range(-(-total // 7) + 1):
                for source, numbers, _ in mixed_rows(counts, weights, (1, 2, epoch, 0), pool):
                    drawn[source] += numbers.tolist()
                done = epoch * total + min(7 * (pool + 1), total)
                shares = np.array(weights) / sum(weights)
                assert sum(map(len, drawn)) == done
                assert np.abs(np.array([*map(len, drawn)]) - done * shares).max() <= len(counts)
        for numbers, count in zip(drawn, counts, strict=True):
            assert numbers == [place % count for place in range(len(numbers))], "each row once before any comes again"


def mixture(folder, name, *weights, **options):
    """A recipe on two sources of numbers that the other does not have, its objective and its corpus."""
    for number, words in enumerate((["one", "two", "three"], ["four", "five", "six"])):
        path = folder / f"source{number}"
        path.mkdir(parents=True)
        rows = [" ".join(words[(row + at) % 3] for at in range(3 + 3 * number)) for row in range(20 + 40 * number)]
        tiny_runs.write_lines(path / "train.en", rows)
        tiny_runs.write_lines(path / "train.de", rows)
    recipe = tiny_runs.write_recipe(folder, name)
    tree = yaml.safe_load(recipe.read_text())
    del tree["data"]["splits"]["train"]
    tree["data"] |= options
    tree["data"]["sources"] = [
        {"path": str(folder / f"source{number}"), "weight": weight} for number, weight in enumerate(weights)
    ]
    if name != "translation":
        for source in tree["data"]["sources"]:
            source["split"] = "train.en"
    recipe.write_text(yaml.safe_dump(tree))
    parsed = parse([str(recipe), "--data.cache", str(folder / "cache")])
    objective = objectives.OBJECTIVES[name](parsed, preparation.tokenizer(parsed))
    return recipe, objective, preparation.prepared(parsed, objective, print)


@pytest.mark.parametrize("options", [{}, {"random_windows": True}])
@pytest.mark.parametrize("name", tiny_runs.OBJECTIVES)
def test_sources_are_mixed_by_their_tokens(name, options, tmp_path):
    _, objective, corpus = mixture(tmp_path, name, 3, 1, **options)
    assert [stretch.rows for stretch in corpus.stretches] == [20, 60]
    kept = {word: token for word, token in objective.tokenizer.get_vocab().items()}
    first = [token for word, token in kept.items() if word.strip("Ġ▁#") in ("one", "two", "three")]
    column = "target" if name == "translation" else "text"
    seen = []
    for epoch in range(6):
        for pool in range(objective.pools(corpus)):
            for item in objective.plan(corpus, (1, 2, epoch, 0), pool):
                batch = objective.collate(corpus, item, Draws((1,), np.arange(len(item))), 0)
                for row in batch[objective.targets] if name == "translation" else batch["input_ids"]:
                    seen.append((len(row[row >= 0]), int(np.isin(row.numpy(), first).sum())))
    assert corpus.columns[column].tokens.dtype == np.uint16
    lengths, firsts = np.array(seen).T
    share = lengths[firsts > 0].sum() / lengths.sum()
    assert share == pytest.approx(0.75, abs=0.06)
    if name != "translation":
        ordinary = [token for word, token in kept.items() if word.strip("Ġ▁#") in ("four", "five", "six")]
        stream = corpus.columns["text"].tokens
        for start, stop, _ in np.concatenate(objective.plan(corpus, (1, 2, 3, 0))):
            window = stream[start:stop]
            assert np.isin(window, first).any() != np.isin(window, ordinary).any(), "no window spans two sources"


def test_a_run_on_sources_is_the_same_from_memory_and_says_what_it_mixes(tmp_path, capsys):
    recipe, objective, kept = mixture(tmp_path, "causal_lm", 3, 1)
    in_memory = load(objective.recipe, "train", objective.encode)
    assert in_memory.fingerprint == kept.fingerprint and list(in_memory.stretches) == list(kept.stretches)
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    said = capsys.readouterr().err
    assert f"train: 75.0% of its tokens from {tmp_path / 'source0'}, which has {kept.stretches[0].tokens}" in said
    words = ["--data.sources", '[{"path": "elsewhere", "weight": 1}]', "--resume"]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 2


def test_a_source_with_its_columns_changed_about_is_the_other_direction(tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path, "translation")
    tree = yaml.safe_load(recipe.read_text())
    del tree["data"]["splits"]["train"]
    about = {name: column for name, column in zip(("target", "source"), tree["data"]["columns"].values(), strict=True)}
    tree["data"]["sources"] = [{}, {"columns": about}]
    found = {}
    for name, number in (("both", slice(0, 2)), ("one", slice(0, 1)), ("other", slice(1, 2))):
        some = tree | {"data": tree["data"] | {"sources": tree["data"]["sources"][number]}}
        recipe.write_text(yaml.safe_dump(some))
        parsed = parse([str(recipe), "--data.cache", str(tmp_path / "cache")])
        tokenizer = found.setdefault("tokenizer", preparation.tokenizer(parsed))
        corpus = preparation.prepared(parsed, objectives.OBJECTIVES["translation"](parsed, tokenizer), print)
        sides = {side: corpus.columns[side] for side in ("source", "target")}
        found[name] = {side: np.split(of.tokens, of.offsets[1:-1]) for side, of in sides.items()}
        found[name] = {side: [row.tolist() for row in rows] for side, rows in found[name].items()}
    assert found["one"] != found["other"] and found["one"]["source"] == found["other"]["target"]
    assert found["both"] == {side: found["one"][side] + found["other"][side] for side in ("source", "target")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.splits", '{"train": "train", "validation": "valid"}'], "data.splits.train: data.sources are what"),
        (["--data.streaming"], "data.sources: not with data.streaming"),
        (["--data.sources", '[{"path": "x", "weight": 0}]'], "data.sources.0.weight: must be a number, above 0, got 0"),
        (["--data.sources", '[{"path": 3}]'], "data.sources.0.path: must be"),
        (["--data.sources", '[{"revision": "main"}]'], "data.sources.0.revision: main is of no path; name that too"),
        (["--data.sources", '[{"path": "x", "wieght": 1}]'], "data.sources.0.wieght: unknown key"),
        (["--data.deduplicate", "--data.streaming"], "data.deduplicate: not with data.streaming"),
        (
            ["--data.sources", '[{"path": "x", "columns": {"source": "de"}}]'],
            "data.sources.0.columns.source: causal_lm has text",
        ),
    ],
)
def test_sources_that_cannot_be_are_refused_by_their_field(words, said, tmp_path, capsys):
    recipe, *_ = mixture(tmp_path, "causal_lm", 3, 1)
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 2 and said in capsys.readouterr().err


def test_a_source_is_not_what_is_measured_and_not_deleted(tmp_path, capsys):
    recipe, *_ = mixture(tmp_path, "causal_lm", 3, 1)
    held_out = '{"validation": "../source1/train.en"}'
    assert tiny_runs.run(recipe, tmp_path / "run", "--data.splits", held_out) == 2
    assert "data.splits: train and validation are both of" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "corpus.txt").write_text("one two\n" * 9)
    words = ["--data.sources", f'[{{"path": "{tmp_path}/run/checkpoints", "split": "corpus"}}]', "--overwrite"]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 2
    assert (tmp_path / "run" / "checkpoints" / "corpus.txt").exists()
