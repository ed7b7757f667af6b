"""The loop: a run stopped at any moment and resumed is the run that never stopped, for all three objectives."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from hf_scratch_transformer.layers_scratch import ScratchAttention
from tests import tiny_runs
from training import checkpoints, launcher, loop, metrics
from training.objectives import Translation

ROOT = Path(__file__).parent.parent


class Killed(BaseException):
    """Ends a run where no handler can save it, as SIGKILL would."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """From now on, runs die inside this step: after the backward pass and the update, before anything is written."""
    honest = loop._step

    def dying(run, *group):
        norm = honest(run, *group)
        if run.state.step == step:
            raise Killed
        return norm

    monkeypatch.setattr(loop, "_step", dying)


def assert_same(one: Path, other: Path) -> None:
    assert tiny_runs.losses(one) == tiny_runs.losses(other)
    first, second = tiny_runs.weights(one), tiny_runs.weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_a_resumed_run_is_the_run_that_never_stopped(objective, tmp_path, monkeypatch):
    recipe = tiny_runs.write_recipe(tmp_path, objective, optimisation={"accumulation": 2, "label_smoothing": 0.1})
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    for number, step in enumerate((2, 6, 10)):  # before the first checkpoint, and in the middle of later epochs
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, step)
            tiny_runs.run(recipe, tmp_path / "killed", *(["--resume"] if number else []))
    assert tiny_runs.run(recipe, tmp_path / "killed", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_the_share_of_time_that_is_spent_waiting_for_data_is_logged(tmp_path, monkeypatch):
    alone = {"splits": {"train": "train"}}  # other batches would be waited for, too
    few, never = {"max_steps": 6}, {"every_steps": None}
    recipe = tiny_runs.write_recipe(tmp_path, data=alone, evaluation=never, optimisation=few)
    honest, slowly = Translation.collate, 0.0
    monkeypatch.setattr(Translation, "collate", lambda *given: time.sleep(slowly) or honest(*given))
    medians = []
    for slowly in (0.0, 0.5):
        assert tiny_runs.run(recipe, tmp_path / f"run {slowly}") == 0
        lines = metrics.read(tmp_path / f"run {slowly}" / "metrics.jsonl")
        shares = sorted(line["data_wait"] for line in lines if line["event"] == "train")
        assert all(0 <= share <= 1 for share in shares)
        medians.append(shares[len(shares) // 2])
    assert medians[0] < 0.5 < medians[1]


def test_many_resumes_in_one_epoch_and_loader_workers_change_nothing(tmp_path, monkeypatch):
    recipe = tiny_runs.write_recipe(
        tmp_path, data={"batch_tokens": 32}, checkpoints={"every_steps": 1}, evaluation={"every_steps": None}
    )
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    for number in range(5):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, 2 * number + 1)
            tiny_runs.run(
                recipe, tmp_path / "killed", "--data.workers", str(number % 2), *(["--resume"] if number else [])
            )
    assert tiny_runs.run(recipe, tmp_path / "killed", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_a_streamed_corpus_resumes_inside_its_parts(tmp_path, monkeypatch):
    recipe = tiny_runs.write_recipe(tmp_path, data={"streaming": True, "part_rows": 13}, checkpoints={"every_steps": 3})
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 8)
        tiny_runs.run(recipe, tmp_path / "killed")
    assert tiny_runs.run(recipe, tmp_path / "killed", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_exits_with_its_code(number, code, workers, tmp_path, monkeypatch):
    """Schedulers and terminals signal the processes that load data, too: the step that is under way waits for them."""
    recipe = tiny_runs.write_recipe(tmp_path, data={"workers": workers}, checkpoints={"every_steps": None})
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    honest, before = loop._step, signal.getsignal(number)

    def signalled(run, *group):
        if run.state.step == 6:
            children = psutil.Process().children()
            assert len(children) >= workers
            if children:  # by another process: torch tells a signal of its own process apart
                subprocess.run(["kill", f"-{int(number)}", *(str(child.pid) for child in children)], check=True)
            psutil.wait_procs(children, timeout=0.5)
            os.kill(os.getpid(), number)
        return honest(run, *group)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", signalled)
        assert tiny_runs.run(recipe, tmp_path / "stopped") == code
    assert max(tiny_runs.losses(tmp_path / "stopped")) == 7
    assert signal.getsignal(number) is before
    assert tiny_runs.run(recipe, tmp_path / "stopped", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_a_second_signal_ends_at_once(monkeypatch):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    with loop._Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received() == signal.SIGTERM and not ends
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ends, "the same signal by way of a launcher"
        signals.noted -= 3
        os.kill(os.getpid(), signal.SIGINT)
    assert ends == [130]


def spoil(monkeypatch, steps, spoiled):
    """Before each of these steps, `spoiled(run)`."""
    honest = loop._step

    def step(run, *group):
        with monkeypatch.context() as patch:
            if run.state.step in steps:
                spoiled(run, patch)
            return honest(run, *group)

    monkeypatch.setattr(loop, "_step", step)


def spoil_loss(run, patch):
    loss = run.objective.loss
    patch.setattr(run.objective, "loss", lambda *given: loss(*given) * float("nan"))


def test_a_step_whose_gradient_is_not_finite_is_left_out(tmp_path, monkeypatch, capsys):
    """Of the weights, of both optimisers and of the average; stopped and resumed behind it, it is the same run."""
    recipe = tiny_runs.write_recipe(
        tmp_path, optimisation={"optimizer": "muon", "final_weights": "ema", "max_skipped_steps": 2}, log_every=1
    )
    spoil(monkeypatch, {3, 4, 9}, spoil_loss)
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    said = capsys.readouterr().err
    assert said.count("the step is left out") == 3
    assert "step 5: epoch 0, part 0, batches 4 to 4: the gradient is nan" in said
    with monkeypatch.context() as patch:
        kill_at(patch, 5)
        with pytest.raises(Killed):
            tiny_runs.run(recipe, tmp_path / "cut")
    assert tiny_runs.run(recipe, tmp_path / "cut", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")
    for folder in ("whole", "cut"):
        lines = metrics.read(tmp_path / folder / "metrics.jsonl")
        assert [line["step"] for line in lines if line["event"] == "skipped"] == [4, 5, 10]
        assert [line["step"] for line in lines if line["event"] == "train"] == [1, 2, 3, 6, 7, 8, 9, 11, 12]


def test_a_left_out_step_changes_nothing(tmp_path, monkeypatch):
    recipe = tiny_runs.write_recipe(
        tmp_path, optimisation={"optimizer": "muon"}, evaluation={"every_steps": None}, checkpoints={"every_steps": 1}
    )
    spoil(monkeypatch, {4}, spoil_loss)
    assert tiny_runs.run(recipe, tmp_path / "run", "--checkpoints.keep_last", "100") == 0
    before, after, next_one = (
        {
            name: tiny_runs.load_file(tmp_path / f"run/checkpoints/step-{step:08d}" / f"{name}.safetensors")
            for name in ("model", "optimizer")
        }
        for step in (4, 5, 6)
    )
    for kind, tensors in before.items():
        assert all(torch.equal(tensor, after[kind][name]) for name, tensor in tensors.items())
        assert not all(torch.equal(tensor, next_one[kind][name]) for name, tensor in tensors.items())


def test_too_many_left_out_steps_in_a_row_end_the_run(tmp_path, monkeypatch, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, checkpoints={"every_steps": 4}, evaluation={"every_steps": None})
    with monkeypatch.context() as patch:
        spoil(patch, range(6, 12), spoil_loss)
        assert tiny_runs.run(recipe, tmp_path / "run", "--optimisation.max_skipped_steps", "1") == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("training: step 8: epoch") and "optimisation.max_skipped_steps" in message
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 0


def test_a_run_whose_every_step_was_left_out_publishes_nothing(tmp_path, monkeypatch, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 2})
    spoil(monkeypatch, {0, 1}, spoil_loss)
    for words in ([], ["--resume"]):
        assert tiny_runs.run(recipe, tmp_path / "run", *words) == 1
        assert "training: the gradient of none of the 2 steps was finite" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()


def test_weights_that_are_not_finite_end_the_run_at_once(tmp_path, monkeypatch, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, checkpoints={"every_steps": 4}, evaluation={"every_steps": None})
    spoil(monkeypatch, {6}, lambda run, _: next(run.unwrapped_model.parameters()).data.fill_(float("nan")))
    assert tiny_runs.run(recipe, tmp_path / "run", "--log_every", "100") == 1
    assert "training: step 6: the norm of the weights is nan" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("what", ["unwrapped_model", "ema_model"])
@pytest.mark.parametrize("step", [7, 11])
def test_weights_that_are_not_finite_are_neither_saved_nor_published(what, step, tmp_path, monkeypatch, capsys):
    """Step 8 is saved and step 12 is the last: no gradient comes after them that would tell."""
    recipe = tiny_runs.write_recipe(
        tmp_path, optimisation={"final_weights": "ema"}, evaluation={"every_steps": None}, log_every=100
    )
    honest = loop._step

    def poisoned(run, *group):
        norm = honest(run, *group)
        if run.state.step == step:
            next(getattr(run, what).parameters()).data[0, 0] = float("inf")
        return norm

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", poisoned)
        assert tiny_runs.run(recipe, tmp_path / "run") == 1
    assert f"training: step {step + 1}: the norm of the weights is inf" in capsys.readouterr().err
    newest = max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert newest == ("step-00000004" if step == 7 else "step-00000008") and not (tmp_path / "run" / "model").exists()
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 0


def test_weights_that_were_saved_unsound_are_not_published(tmp_path, capsys):
    """By a version that looked at gradients only."""
    recipe = tiny_runs.write_recipe(tmp_path)
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    tensors = tiny_runs.load_file(newest / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, newest / "model.safetensors")
    sums = json.loads((newest / checkpoints.MANIFEST).read_text())
    sums["model.safetensors"] = checkpoints.sha256(newest / "model.safetensors")
    (newest / checkpoints.MANIFEST).write_text(json.dumps(sums))
    before = tiny_runs.weights(tmp_path / "run")
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 1
    assert "step 12: the norm of the weights is nan" in capsys.readouterr().err
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_runs.weights(tmp_path / "run").items())


@pytest.mark.parametrize("step", [9, 11])
def test_a_signal_in_an_evaluation_puts_it_off_until_the_run_is_resumed(step, tmp_path, monkeypatch):
    """It may take longer than a launcher waits. At the last step there is nothing else left to do."""
    recipe = tiny_runs.write_recipe(tmp_path, evaluation={"every_steps": 2, "early_stopping": 99})
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    honest, texts = Translation.score, Translation.translate

    def signalled(objective, model, batch):
        if (tmp_path / "now").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(objective, model, batch)

    def marked(run, *group):
        if run.state.step == step:
            (tmp_path / "now").touch()
        return stepped(run, *group)

    stepped = loop._step
    with monkeypatch.context() as patch:
        patch.setattr(Translation, "score", signalled)
        patch.setattr(Translation, "translate", lambda *words: texts(*words) if not (tmp_path / "now").exists() else [])
        patch.setattr(loop, "_step", marked)
        assert tiny_runs.run(recipe, tmp_path / "stopped") == 143
    newest = max(path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert newest == f"step-{step + 1:08d}-unmeasured"
    assert tiny_runs.run(recipe, tmp_path / "stopped", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    evaluations = [
        [(line["step"], line["loss"]) for line in metrics.read(run / "metrics.jsonl") if line["event"] == "evaluation"]
        for run in (tmp_path / "whole", tmp_path / "stopped")
    ]
    assert evaluations[0] == evaluations[1]


def test_a_launcher_that_is_gone_is_a_signal(tmp_path, monkeypatch):
    recipe = tiny_runs.write_recipe(tmp_path)
    honest = loop._step

    def orphaned(run, *group):
        if run.state.step == 6:
            patch.setattr(os, "getppid", lambda: 1)
        return honest(run, *group)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", orphaned)
        assert tiny_runs.run(recipe, tmp_path / "alone") == 0, "nobody launched it: a shell may well end before it"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", orphaned)
        patch.setattr(launcher, "PARENT", os.getppid())
        patch.setenv("TORCHELASTIC_RUN_ID", "1")
        assert tiny_runs.run(recipe, tmp_path / "run") == 143
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == "step-00000007"


def test_parts_of_a_stream_without_a_usable_row_are_passed_over(tmp_path, monkeypatch, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, data={"streaming": True, "part_rows": 10})
    for language in ("en", "de"):
        path = tmp_path / "corpus" / f"train.{language}"
        lines = path.read_text(encoding="utf-8").splitlines()
        tiny_runs.write_lines(path, [""] * 10 + lines[:10] + [""] * 20 + lines[10:])
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    message = capsys.readouterr().err
    for part in (0, 2, 3):
        assert message.count(f"part {part} of the stream is skipped: data.splits.train: no usable row (10 empty)") == 1
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 9)
        tiny_runs.run(recipe, tmp_path / "killed")
    assert tiny_runs.run(recipe, tmp_path / "killed", "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")
    empty = tiny_runs.write_lines
    for language in ("en", "de"):
        empty(tmp_path / "corpus" / f"train.{language}", [""] * 30)
    words = ["--tokenizer.path", str(tmp_path / "whole" / "tokenizer")]
    assert tiny_runs.run(recipe, tmp_path / "none", *words) == 2
    assert "data.splits.train: there is nothing to predict" in capsys.readouterr().err


def test_accumulation_over_real_targets_equals_one_large_batch(tmp_path):
    """Batches with very different numbers of targets: a mean of means would give another gradient."""
    options = {"optimisation": {"max_steps": 3, "optimizer": "adamw"}, "model": {"dropout": 0.0}}
    one = tiny_runs.write_recipe(tmp_path, data={"batch_tokens": 100_000}, **options)
    assert tiny_runs.run(one, tmp_path / "one") == 0
    many = tiny_runs.write_recipe(tmp_path, data={"batch_tokens": 40}, **options)
    assert tiny_runs.run(many, tmp_path / "many", "--optimisation.accumulation", "1000") == 0
    one_losses, many_losses = tiny_runs.losses(tmp_path / "one"), tiny_runs.losses(tmp_path / "many")
    assert one_losses.keys() == many_losses.keys() == {1, 2, 3}
    assert all(abs(one_losses[step] - many_losses[step]) < 1e-5 for step in one_losses)


def test_the_order_of_batches_is_a_function_of_the_seed(tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 4})
    for name, seed in {"a": "1", "b": "1", "c": "2"}.items():
        assert tiny_runs.run(recipe, tmp_path / name, "--seed", seed) == 0
    assert tiny_runs.losses(tmp_path / "a") == tiny_runs.losses(tmp_path / "b") != tiny_runs.losses(tmp_path / "c")


def test_the_schedule_knows_no_clock(tmp_path, capsys):
    """A machine that is slower, or does something else as well, trains the same model, or the start of it."""
    whole = {"max_steps": 40, "schedule": "linear", "warmup_steps": 2}
    recipe = tiny_runs.write_recipe(tmp_path, optimisation=whole, evaluation={"every_steps": None})
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    assert "ended early" not in capsys.readouterr().err
    assert tiny_runs.run(recipe, tmp_path / "cut", "--optimisation.max_minutes", "0.001") == 0
    cut, rates = tmp_path / "cut", {}
    for name in ("run", "cut"):
        lines = metrics.read(tmp_path / name / "metrics.jsonl")
        rates[name] = {line["step"]: line["learning_rate"] for line in lines if line["event"] == "train"}
    last = max(rates["cut"])
    assert last < 40 and rates["cut"].items() <= rates["run"].items()
    reason = f"optimisation.max_minutes 0.001 is over at step {last} of 40"
    assert f"ended early: {reason}" in capsys.readouterr().err
    assert tiny_runs.run(recipe, cut, "--optimisation.max_minutes", "0.001", "--resume") == 0
    assert f"this run is finished ({reason})" in capsys.readouterr().err


def test_a_long_run_says_so_when_it_has_begun(tmp_path, capsys, monkeypatch):
    recipe = tiny_runs.write_recipe(tmp_path, evaluation={"every_steps": None})
    assert tiny_runs.run(recipe, tmp_path / "short") == 0
    assert "steps to go" not in capsys.readouterr().err
    monkeypatch.setattr(loop, "LONG", 0)
    assert tiny_runs.run(recipe, tmp_path / "long") == 0
    assert "1 steps to go, about 0 minutes on this machine; Ctrl-C saves" in capsys.readouterr().err
    # From then on it says how much of the hardware it uses; the run is the same.
    lines = [line for line in tiny_runs.metrics.read(tmp_path / "long/metrics.jsonl") if line["event"] == "train"]
    assert ["mfu" in line for line in lines] == [False] * 10 + [True] * 2 and all(
        0 < each["mfu"] < 1 for each in lines[10:]
    )
    assert tiny_runs.losses(tmp_path / "long") == tiny_runs.losses(tmp_path / "short")
    one, other = (tiny_runs.weights(tmp_path / name) for name in ("short", "long"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_processes_give_the_losses_of_one(tmp_path):
    # AdamW, since Muon's bfloat16 makes more of the last digits, in which sums over two processes differ.
    optimisation = {"optimizer": "adamw", "accumulation": 2, "max_steps": 6}
    recipe = tiny_runs.write_recipe(tmp_path, model={"dropout": 0.0}, optimisation=optimisation)
    assert tiny_runs.run(recipe, tmp_path / "one") == 0
    tiny_runs.launch("-m", "training", recipe, "--output_dir", tmp_path / "two")
    one, two = tiny_runs.losses(tmp_path / "one"), tiny_runs.losses(tmp_path / "two")
    assert one.keys() == two.keys() and len(one) == 6
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--multi_gpu"], ["--use_fsdp", "--fsdp_version", "2"]], ids=["DDP", "FSDP2"])
def test_two_machines_give_the_losses_of_one(words, tmp_path):
    """`accelerate launch` as CONTRIBUTING.md has it, both machines being this one. Without a GPU it goes over gloo."""
    recipe = tiny_runs.write_recipe(
        tmp_path, model={"dropout": 0.0}, optimisation={"optimizer": "adamw", "max_steps": 6}
    )
    assert tiny_runs.run(recipe, tmp_path / "one") == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words += ["--num_machines", "2", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no"]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *words, "--machine_rank", rank]
            + ["-m", "training", str(recipe), "--output_dir", str(tmp_path / "two")],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    messages = [machine.communicate(timeout=600)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], messages
    assert ("spread over 2 processes" in messages[0]) == ("--use_fsdp" in words)
    one, two = tiny_runs.losses(tmp_path / "one"), tiny_runs.losses(tmp_path / "two")
    assert one.keys() == two.keys() and max(abs(one[step] - two[step]) for step in one) < 1e-5


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_layers_that_are_computed_again_change_nothing(objective, tmp_path, monkeypatch):
    recipe = tiny_runs.write_recipe(tmp_path, objective)
    calls, honest = [], ScratchAttention.forward
    monkeypatch.setattr(ScratchAttention, "forward", lambda *a, **k: calls.append(a[0].training) or honest(*a, **k))
    assert tiny_runs.run(recipe, tmp_path / "plain") == 0
    once = sum(calls)
    assert tiny_runs.run(recipe, tmp_path / "again", "--optimisation.gradient_checkpointing") == 0
    assert sum(calls) == 3 * once > 0, "each layer twice"
    assert tiny_runs.losses(tmp_path / "plain") == tiny_runs.losses(tmp_path / "again")
