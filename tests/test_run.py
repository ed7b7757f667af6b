"""A run: its folder, its set-up, its state through a checkpoint and back, and the weights it ends with."""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import training
from tests import tiny_runs
from training import checkpoints, corpus, metrics
from training.recipe import parse
from training.run import RENAMED, State, open_accelerator, prepare

ROOT = Path(__file__).parent.parent
# The state of a checkpoint that version 0.1 wrote.
STATE_OF_0_1 = {
    "step": 7,
    "epoch": 1,
    "part": 0,
    "batch": 3,
    "seconds": 2.5,
    "targets": 323,
    "window_nats": 4.5,
    "window_targets": 11,
    "window_start": 2.0,
    "score": 4.6,
    "stale": 2,
    "cuts": 1,
    "uncut": 3,
    "done": {"evaluation": 0.5, "checkpoint": 0.3},
    "averaged": 6,
}


# Products of as many shapes as a long run's batches have, the first of them again at the end.
SHAPES = """
import sys, torch
from training.recipe import parse
from training.run import open_accelerator
open_accelerator(parse([sys.argv[1]]))
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
    for rows in [*range(1, 200), 1]:
        torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 64), torch.ones(64, 64), None, "none", [], "")
"""

# Page faults of a large tensor that is made anew, before and after.
FAULTS = """
import resource, torch
from training.run import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_memory()
faults()
print(first, faults())
"""


@pytest.fixture
def recipe(tmp_path):
    return tiny_runs.write_recipe(tmp_path)


def test_importing_training_runs_no_command_line_and_draws_no_picture():
    modules = [f"training.{path.stem}" for path in (ROOT / "training").glob("*.py") if not path.stem.startswith("__")]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"training.__main__", "hf_scratch_transformer.insight.pictures"} & set(loaded.stdout.split())


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_looked_for_among_what_is_imported(is_enabled, monkeypatch):
    """And whoever had it looked for, or had not, has it so again; also after an import that fails."""
    frozen, before = [], gc.isenabled()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    try:
        (gc.enable if is_enabled else gc.disable)()
        with contextlib.suppress(ImportError), training.uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is is_enabled and frozen == [False]
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not there")
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp's")
@pytest.mark.parametrize(
    ("maker", "load", "given", "spins"),
    [
        ("AuthenticAMD", 100.0, {}, "3000"),
        ("AuthenticAMD", 0.0, {}, "20000"),
        ("GenuineIntel", 100.0, {}, "1000"),
        ("GenuineIntel", 0.0, {}, "6000"),
        ("GenuineIntel", 100.0, {"GOMP_SPINCOUNT": "7"}, "7"),
        ("AuthenticAMD", 100.0, {"OMP_WAIT_POLICY": "PASSIVE"}, "0"),
    ],
)
def test_threads_wait_for_each_other_without_taking_a_busy_machine(maker, load, given, spins):
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    library = next((word for word in loaded if "libgomp" in word), None)
    if library is None:
        pytest.skip("torch has loaded another OpenMP than libgomp")
    code = f"""
import ctypes, pathlib, psutil
psutil.cpu_percent = lambda interval: {load}
pathlib.Path.read_bytes = lambda path: b"vendor_id: {maker}"
import training
ctypes.CDLL("{library}")
"""
    command = [sys.executable, "-c", code]
    environment |= given | {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_runs_of_one_process_differ_in_precision(recipe):
    """As those that a notebook starts."""
    for precision in ("bf16", "fp32", "bf16"):
        accelerator = open_accelerator(parse([str(recipe), "--optimisation.precision", precision]))
        assert accelerator.mixed_precision == {"bf16": "bf16", "fp32": "no"}[precision]


def test_the_programs_that_onednn_keeps_are_few(recipe):
    """Or memory grows with every shape: 1.2 GB after 1,500 products of 500 shapes, now 0.4."""
    command = [sys.executable, "-c", SHAPES, str(recipe)]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    made = [line for line in lines if "inner_product" in line and "create" in line]
    assert len(made) == 200 and "create:cache_miss" in made[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_that_tokenising_frees_is_given_back_before_training(recipe, tmp_path, monkeypatch):
    load, process, kept, held = corpus.load, psutil.Process(), [], []

    def heavy(*given, **named):
        blocks = [bytes(2000) for _ in range(100_000)]  # 200 MB of glibc's heap
        kept.append(blocks[-1])  # at its end, so that glibc gives back nothing of itself
        del blocks
        held.append(process.memory_info().rss)
        return load(*given, **named)

    monkeypatch.setattr(corpus, "load", heavy)
    prepared = parse([str(recipe)])
    prepare(prepared, open_accelerator(prepared), tmp_path / "run", 0.0)
    assert held and process.memory_info().rss < max(held) - 150e6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_that_a_step_frees_is_there_for_the_next(recipe):
    """Or each large tensor is had anew from the system, a fault for each 4 KB: 4,096 for 16 MiB."""
    for told, is_kept in (({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)):
        run = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, env=os.environ | told,
                             capture_output=True, text=True, check=True)  # fmt: skip
        before, after = map(int, run.stdout.split())
        assert (after < 100 < before) if is_kept else after > 100
    ours = "import training.run as run; run.keep_memory = lambda: print('kept'); from training.__main__ import main"
    code = f"{ours}; main([{str(recipe)!r}, '--optimisation.max_steps', '1'])"
    run = subprocess.run([sys.executable, "-c", code], cwd=recipe.parent, env=os.environ | {"PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert "kept" in run.stdout, "training does so"


def test_a_run_is_not_overwritten_unasked(recipe, tmp_path, capsys):
    output = tmp_path / "run"
    (output / "corpus").mkdir(parents=True)
    for name in ("recipe.yaml", "metrics.jsonl"):
        (output / name).write_text("", encoding="utf-8")
    assert tiny_runs.run(recipe, output) == 2
    assert "--resume goes on, --overwrite replaces it" in capsys.readouterr().err
    assert tiny_runs.run(recipe, output, "--overwrite", "--optimisation.max_steps", "1") == 0
    assert (output / "corpus").is_dir(), "what the run did not write stays"


def test_a_run_that_never_started_is_not_in_the_way(recipe, tmp_path):
    output = tmp_path / "run"
    output.mkdir()
    for name in ("recipe.yaml", "environment.json"):
        (output / name).write_text("{}", encoding="utf-8")
    assert tiny_runs.run(recipe, output, "--optimisation.max_steps", "1") == 0


def test_a_folder_that_holds_no_run_loses_nothing(recipe, tmp_path, capsys):
    theirs = tmp_path / "run" / "tokenizer" / "notes.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("not of a run", encoding="utf-8")
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert "output_dir: " in capsys.readouterr().err
    assert theirs.exists()


def test_a_folder_that_cannot_be_written_is_one_line(recipe, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert tiny_runs.run(recipe, tmp_path / "file" / "run") == 2
    assert "output_dir" in capsys.readouterr().err


def test_the_state_that_version_0_1_wrote_is_read_by_its_names():
    assert State.read(STATE_OF_0_1) == State(
        step=7,
        epoch=1,
        batch=3,
        seconds=2.5,
        targets=323,
        window_loss_sum=4.5,
        window_targets=11,
        window_start=2.0,
        best_score=4.6,
        bad_evals=2,
        lr_reductions=1,
        plateau_evals=3,
        last_done={"evaluation": 0.5, "checkpoint": 0.3},
        n_averaged=6,
    )
    assert State.read(vars(State(step=3, best_score=1.0))) == State(step=3, best_score=1.0)


@pytest.mark.parametrize(
    "record", [{"targets": "many"}, {"step": None}, {"last_done": []}, {"steps": 3}, {"batch": -1}, {"seconds": "NaN"}]
)
def test_a_state_of_other_types_or_names_is_refused(record):
    with pytest.raises(ValueError, match=next(iter(record))):
        State.read(record)


def test_a_run_of_version_0_1_is_resumed_as_if_it_had_never_stopped(tmp_path):
    """Its checkpoint has the same files, and other names in the state, all of which the rest of this run depends on."""
    recipe = tiny_runs.write_recipe(
        tmp_path,
        optimisation={"schedule": "plateau", "plateau_patience": 1, "final_weights": "ema", "learning_rate": 0.3},
        evaluation={"every_steps": 2, "early_stopping": 9},
        checkpoints={"keep_last": 9},
    )
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if folder.name > "step-00000008":
            shutil.rmtree(folder)
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    record = checkpoints.read_state(newest)
    older = {name: old for old, name in RENAMED.items()}
    record["state"] = {older.get(name, name): value for name, value in record["state"].items()}
    assert not any(record["state"].pop(name) for name in ("unmeasured", "skipped_steps", "skipped_in_row"))
    assert record["state"].keys() == STATE_OF_0_1.keys() and record["state"]["averaged"] == 8
    assert record["identity"]["recipe"]["tokenizer"].pop("add_prefix_space") is False
    assert not any(record["identity"]["recipe"]["data"].pop(name) for name in ("sources", "deduplicate"))
    assert not record["identity"]["recipe"]["optimisation"].pop("gradient_checkpointing")
    text = json.dumps(record, indent=1)
    (newest / "state.json").write_text(text, encoding="utf-8")
    manifest = newest / checkpoints.MANIFEST
    sums = json.loads(manifest.read_text()) | {"state.json": checkpoints.sha256(newest / "state.json")}
    manifest.write_text(json.dumps(sums), encoding="utf-8")
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 0
    assert tiny_runs.losses(tmp_path / "run") == tiny_runs.losses(tmp_path / "whole")
    one, other = tiny_runs.weights(tmp_path / "whole"), tiny_runs.weights(tmp_path / "run")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_kill_left_half_written_is_cleared_away_on_resuming(recipe, tmp_path):
    assert tiny_runs.run(recipe, tmp_path / "run", "--optimisation.max_steps", "4") == 0
    half = tmp_path / "run" / "checkpoints" / ".step-00000005.x8a9"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert tiny_runs.run(recipe, tmp_path / "run", "--optimisation.max_steps", "4", "--resume") == 0
    assert not half.exists()


def test_nothing_is_written_before_all_checks_have_passed(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = tmp_path / "run"
    refused = {
        "--tokenizer.path": tmp_path / "nowhere",
        "--data.path": tmp_path / "nowhere",
        "--model.vocab_size": 7,
        "--evaluation.group_by": "kind",
    }
    for key, value in refused.items():
        assert tiny_runs.run(recipe, output, key, str(value)) == 2
        assert not output.exists()
    assert tiny_runs.run(recipe, output, "--optimisation.max_steps", "4") == 0
    (output / "checkpoints" / ".step-00000001.abcdefgh").mkdir()
    before = contents(output)
    for key, value in refused.items():
        assert tiny_runs.run(recipe, output, key, str(value), "--overwrite") == 2
        assert contents(output) == before
    assert tiny_runs.run(recipe, output, "--resume", "--seed", "7") == 2
    assert contents(output) == before


def contents(folder):
    """Every file by its path, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("content", ['{"event": "train"}\n{}\n', "not JSON\n{}", b"\xff\xfe"])
def test_a_log_that_cannot_be_read_stops_a_resumed_run_before_it_writes(content, recipe, tmp_path, capsys):
    assert tiny_runs.run(recipe, tmp_path / "run", "--optimisation.max_steps=4") == 0
    (tmp_path / "run" / "metrics.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert tiny_runs.run(recipe, tmp_path / "run", "--optimisation.max_steps=6", "--resume") == 2
    assert "metrics.jsonl is no log of a run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert tiny_runs.run(recipe, tmp_path / "run", "--optimisation.max_steps=4", "--overwrite") == 0, "it goes with it"


def test_a_run_that_is_finished_is_not_trained_on(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(
        tmp_path,
        optimisation={"max_steps": 1000, "learning_rate": 1e-12, "matrix_learning_rate": 1e-12},
        evaluation={"every_steps": 2, "early_stopping": 2, "best_metric": "bleu", "generate_rows": 2},
    )
    output = tmp_path / "run"
    assert tiny_runs.run(recipe, output) == 0
    steps, before, lines = tiny_runs.losses(output), tiny_runs.weights(output), metrics.read(output / "metrics.jsonl")
    assert tiny_runs.run(recipe, output, "--resume") == 0
    assert "this run is finished (2 evaluations without progress)" in capsys.readouterr().err
    assert tiny_runs.losses(output) == steps
    assert [line["event"] for line in metrics.read(output / "metrics.jsonl")] == [line["event"] for line in lines]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_runs.weights(output).items())


def test_what_kills_left_half_written_goes_when_the_run_goes_on_or_is_replaced(recipe, tmp_path):
    output, words = tmp_path / "run", ["--optimisation.max_steps", "1"]
    assert tiny_runs.run(recipe, output, *words) == 0
    for way in ("--resume", "--overwrite"):
        left = [output / ".model.x8a9_b1c", output / ".tokenizer.aaaaaaaa", output / ".metrics.jsonl.bbbbbbbb"]
        for folder in left:
            folder.mkdir()
        (output / ".model.notes").write_text("theirs", encoding="utf-8")
        assert tiny_runs.run(recipe, output, *words, way) == 0
        assert not any(folder.exists() for folder in left) and (output / ".model.notes").exists()


def test_a_changed_run_is_not_resumed_unless_forced(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 4}, checkpoints={"every_steps": 2})
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    for words, named in {
        ("--optimisation.learning_rate", "0.5"): "optimisation.learning_rate",
        ("--seed", "7"): "seed",
    }.items():
        assert tiny_runs.run(recipe, tmp_path / "run", "--resume", *words) == 2
        assert named in capsys.readouterr().err
    corpus = tmp_path / "corpus" / "train.en"
    corpus.write_text(corpus.read_text().replace("one", "two"), encoding="utf-8")
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 2
    assert "corpus" in capsys.readouterr().err
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume", "--force") == 0


def test_another_corpus_or_objective_is_said_in_a_line_for_people(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", optimisation={"max_steps": 2})
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    with open(tmp_path / "corpus/train.en", "a") as file:
        file.write("one more\n")
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 2
    assert "not resumed, this is another run (corpus is another); --force" in capsys.readouterr().err
    masked = tiny_runs.write_recipe(tmp_path, "masked_lm")
    assert tiny_runs.run(masked, tmp_path / "run", "--resume") == 2
    assert "training: tokenizer: masked language modelling needs a mask token" in capsys.readouterr().err
    causal = tiny_runs.write_recipe(tmp_path, "causal_lm")
    assert tiny_runs.run(causal, tmp_path / "new", "--objective", "masked_lm") == 2
    said = capsys.readouterr().err
    assert "model: scratch_decoder is not for masked_lm; scratch_encoder is" in said and "AlbertConfig" not in said
    assert tiny_runs.main([str(tmp_path / "none.yaml")]) == 2
    assert f"{tmp_path}/none.yaml: there is no such recipe" in capsys.readouterr().err
    assert tiny_runs.main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "corpus/test.en")]) == 2
    assert f"no config.json in this folder; give {tmp_path}/run/model" in capsys.readouterr().err


def test_the_learning_rate_of_a_longer_run_is_said_to_jump(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"schedule": "linear", "warmup_steps": 0})
    assert tiny_runs.run(recipe, tmp_path / "run", "--optimisation.max_steps", "9") == 0
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 0
    assert "was 9, now 12; so the learning rate goes on at 0.0025, where it was 0\n" in capsys.readouterr().err


def test_a_run_is_made_longer(tmp_path, monkeypatch, capsys):
    """Its limits and what it reports may be others than before, which is said; its clock goes on."""
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"schedule": "constant"})
    words = ["--optimisation.max_steps", "9", "--log_every", "3"]
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["training", str(recipe), f"--output_dir={tmp_path / 'run'}", "--resume"])
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 0
    said = "other than before: log_every was 3, now 1; optimisation.max_steps was 9, now 12\n"
    assert said in capsys.readouterr().err
    whole, longer = tiny_runs.weights(tmp_path / "whole"), tiny_runs.weights(tmp_path / "run")
    assert all(torch.equal(whole[name], longer[name]) for name in whole)
    lines = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["event"] == "train"] == [3, 6, 9, 10, 11, 12]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert str(tmp_path) not in card and "recipe.yaml --output_dir=run\n" in card


@pytest.mark.parametrize("choice", ["ema", "mean", "best"])
def test_final_weights(choice, tmp_path):
    recipe = tiny_runs.write_recipe(
        tmp_path,
        optimisation={"final_weights": choice, "mean_of": 2, "ema_decay": 0.5},
        checkpoints={"every_steps": 4, "keep_last": 2},
    )
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    saved = [tiny_runs.load_file(folder / "model.safetensors") for folder in folders]
    final = tiny_runs.weights(tmp_path / "run")
    name = (
        "lm_head.weight" if "lm_head.weight" in final and "lm_head.weight" in saved[-1] else "model.decoder.norm.weight"
    )
    assert not torch.equal(final[name], saved[-1][name]) or choice == "best"
    if choice == "mean":
        torch.testing.assert_close(final[name], (saved[-1][name] + saved[-2][name]) / 2)
    elif choice == "ema":
        average = tiny_runs.load_file(folders[-1] / "average.safetensors")
        assert torch.equal(final[name], average[name])
