"""Checkpoints: complete or absent, damage is found, the last good one is never lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests import tiny, tiny_runs
from training import checkpoints, sharding
from training.optimisation import optimizers
from training.recipe import Checkpoints, parse

ROOT = Path(__file__).parent.parent


def store(folder, **spec):
    return checkpoints.Store(folder, Checkpoints(**spec))


def save(where, step, score=None, **state):
    files = {
        name: sharding.part({"weight": torch.full((4, 4), float(step))}, 0)
        for name in ("model.safetensors", "optimizer.safetensors")
    }
    where.save(step, files, {"step": step, "score": score, **state})


def names(where):
    return sorted(path.name for path in where.folder.iterdir())


def test_the_last_and_the_best_are_kept(tmp_path):
    where = store(tmp_path, keep_last=2, keep_best=1)
    for step, score in {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None}.items():
        save(where, step, score)
    assert names(where) == ["step-00000002", "step-00000004", "step-00000005"]
    assert where.by_score()[0].name == "step-00000002"
    (newest,), damaged = where.sound(where.complete(), 1)
    assert newest.name == "step-00000005" and not damaged
    assert checkpoints.read_state(newest)["step"] == 5
    assert checkpoints.read_tensors(newest, "model.safetensors")["weight"][0, 0] == 5


def test_what_a_signal_left_does_not_count_among_the_last(tmp_path):
    """It took the place of a checkpoint that a run without interruptions has, and changed the mean of the last."""
    where = store(tmp_path, keep_last=3, keep_best=0)
    for step, expected in {4: [4], 8: [8, 4], 10: [10, 8, 4], 12: [12, 8, 4], 14: [14, 12, 8]}.items():
        save(where, step, by_signal=step == 10)
        assert [int(path.name[5:]) for path in where.scheduled()] == expected
    assert names(where) == ["step-00000008", "step-00000012", "step-00000014"]


@pytest.mark.parametrize("content", ["{}", "[]"])
def test_a_manifest_that_lists_nothing_verifies_nothing(content, tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm")
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    folder = tmp_path / "run" / "checkpoints" / "step-00000012"
    (folder / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(checkpoints.CheckpointError, match="model.safetensors is damaged"):
        checkpoints.verify(folder)


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing file", "no manifest"])
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(damage, tmp_path):
    where = store(tmp_path)
    for step in (1, 2):
        save(where, step)
    file = tmp_path / "step-00000002" / ("manifest.json" if damage == "no manifest" else "model.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "flipped bit":
        content[-5] ^= 1
        file.write_bytes(content)
    elif damage == "truncated":
        file.write_bytes(content[:-8])
    else:
        file.unlink()
    (newest,), damaged = where.sound(where.complete(), 1)
    assert newest.name == "step-00000001"
    assert [path.name for path in damaged] == ["step-00000002"] and "step-00000002" in damaged[file.parent]
    where.set_aside(damaged)
    assert names(where) == ["damaged-step-00000002", "step-00000001"]
    save(where, 2)  # the step is done again
    assert where.sound(where.complete(), 1)[0] == [tmp_path / "step-00000002"]


@pytest.mark.parametrize("moment", ["save_file", "sha256", "_flush", "replace", "verify"])
def test_a_failure_while_saving_leaves_the_last_good_one_and_nothing_half_written(moment, tmp_path, monkeypatch):
    where = store(tmp_path, keep_last=1)
    save(where, 1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if moment == "replace" else checkpoints, moment, fail)
        with pytest.raises(checkpoints.CheckpointError, match="No space left on device; the last good one is"):
            save(where, 2)
    assert "step-00000001" in names(where)
    assert not any(name.startswith(".") for name in names(where))
    save(where, 3)
    assert names(where) == ["step-00000003"]


def test_a_kill_while_saving_leaves_the_last_good_one(tmp_path, monkeypatch):
    where = store(tmp_path)
    save(where, 1)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    for moment in ("save_file", "_flush"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(checkpoints, moment, die)
            save(where, 2)
        assert where.sound(where.complete(), 1)[0] == [tmp_path / "step-00000001"]
        where.sweep()
    save(where, 2)
    assert names(where) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_weights_and_optimisers_come_back_bit_for_bit(family, tmp_path):
    kind = {tiny.family(each): each for each in tiny.LANGUAGE_MODELS}[family]

    def train(model, updates, steps):
        for step in range(steps):
            torch.manual_seed(step)
            sum(parameter.pow(2).sum() * torch.rand(()) for parameter in model.parameters()).backward()
            for optimizer in updates:
                optimizer.step()
                optimizer.zero_grad()

    spec = parse_optimisation(tmp_path)
    model = tiny.model(kind)
    updates = optimizers(model, spec)
    train(model, updates, 3)
    tensors = checkpoints.optimizer_tensors(updates, model)
    every = {"model.safetensors": sharding.weights(model), "optimizer.safetensors": tensors}
    files = {name: sharding.part(each, 0) for name, each in every.items()}
    folder = store(tmp_path / "store").save(3, files, {})
    other = tiny.model(kind, seed=1)
    other_updates = optimizers(other, spec)
    checkpoints.load_weights(other, checkpoints.read_tensors(folder, "model.safetensors"))
    checkpoints.load_optimizers(other_updates, other, checkpoints.read_tensors(folder, "optimizer.safetensors"))
    train(model, updates, 2)
    train(other, other_updates, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_comes_back_to_where_the_weights_are(kind, tmp_path):
    """The counters of steps, too: on a GPU fused updates refuse those of main memory."""
    spec = parse_optimisation(tmp_path, "--optimisation.optimizer", kind)
    model = tiny.model(tiny.LANGUAGE_MODELS[0])
    updates = optimizers(model, spec)
    sum(parameter.pow(2).sum() for parameter in model.parameters()).backward()
    for optimizer in updates:
        optimizer.step()
    tensors = checkpoints.optimizer_tensors(updates, model)
    elsewhere = model.to("meta")
    with mock.patch("training.optimisation.AdamW", lambda groups, fused, **rest: torch.optim.AdamW(groups, **rest)):
        updates = optimizers(elsewhere, spec)
    checkpoints.load_optimizers(updates, elsewhere, tensors)
    states = [tensor for optimizer in updates for state in optimizer.state.values() for tensor in state.values()]
    assert len(states) == len(tensors) and {tensor.device.type for tensor in states} == {"meta"}


def parse_optimisation(folder, *words):
    return parse([str(tiny_runs.write_recipe(folder)), *words]).optimisation


@pytest.mark.parametrize("kinds", [("muon", "adamw"), ("adamw", "muon")])
def test_the_state_of_other_optimisers_is_refused(kinds, tmp_path):
    """As when a run is resumed by force: state that no step would read is lost, of which nobody would know."""
    model = tiny.model(tiny.LANGUAGE_MODELS[0])
    old, new = (optimizers(model, parse_optimisation(tmp_path, "--optimisation.optimizer", kind)) for kind in kinds)
    sum(parameter.pow(2).sum() for parameter in model.parameters()).backward()
    for optimizer in old:
        optimizer.step()
    with pytest.raises(checkpoints.CheckpointError, match="optimisers do not fit: there is no "):
        checkpoints.load_optimizers(new, model, checkpoints.optimizer_tensors(old, model))


def test_weights_of_another_model_are_refused(tmp_path):
    one = tiny.model(tiny.LANGUAGE_MODELS[0])
    other = tiny.model(tiny.LANGUAGE_MODELS[0], hidden_size=64)
    with pytest.raises(checkpoints.CheckpointError, match="does not fit the model"):
        checkpoints.load_weights(one, sharding.weights(other))


def damage(path):
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, checkpoints={"every_steps": 4})
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    whole = tiny_runs.weights(tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    damage(newest / "optimizer.safetensors")
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 0
    message = capsys.readouterr().err
    assert f"{newest.name}: optimizer.safetensors is damaged" in message and "step-00000010" in message
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tiny_runs.weights(tmp_path / "run").items())


def test_a_damaged_old_checkpoint_is_set_aside_and_the_run_goes_on(tmp_path, capsys):
    """Its state was read at every save, to find the best."""
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 8})
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    oldest = min((tmp_path / "run" / "checkpoints").glob("step-*"))
    (oldest / "state.json").write_text('{"state": {"st', encoding="utf-8")
    words = ["--resume", "--force", "--optimisation.max_steps", "16"]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 0
    assert f"{oldest / 'state.json'}: " in capsys.readouterr().err
    assert oldest.with_name(f"damaged-{oldest.name}").is_dir()


def test_the_best_checkpoint_is_verified_before_it_becomes_the_model(tmp_path, capsys):
    # So high a learning rate that the first evaluation is the best.
    options = {
        "final_weights": "best",
        "learning_rate": 3.0,
        "matrix_learning_rate": 3.0,
        "max_steps": 4,
        "schedule": "constant",
    }
    recipe = tiny_runs.write_recipe(tmp_path, optimisation=options, evaluation={"every_steps": 1})
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    (best,) = store(tmp_path / "run" / "checkpoints").by_score()
    assert best.name == "step-00000001"
    before = tiny_runs.weights(tmp_path / "run")
    damage(best / "model.safetensors")
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 1
    message = capsys.readouterr().err
    assert f"{best}: model.safetensors is damaged" in message
    assert "training: optimisation.final_weights: no sound checkpoint is left for best" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_runs.weights(tmp_path / "run").items())


def test_copies_of_checkpoints_are_neither_read_nor_deleted(tmp_path):
    where = store(tmp_path, keep_last=1)
    save(where, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001.bak")
    save(where, 2)
    assert names(where) == ["step-00000001.bak", "step-00000002"]
    assert [path.name for path in where.complete()] == ["step-00000002"]


@pytest.fixture
def mount(tmp_path):
    """Mounts a small file system."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mounted(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no tmpfs can be mounted here")
        return disk

    yield mounted
    subprocess.run(["umount", str(disk)], capture_output=True)


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path, mount):
    disk = mount("size=400k")
    recipe = tiny_runs.write_recipe(tmp_path, checkpoints={"every_steps": 1, "keep_last": 50})
    words = [str(recipe), "--output_dir", str(disk / "run")]
    done = subprocess.run([sys.executable, "-m", "training", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the last good one is" in done.stderr and "Traceback" not in done.stderr
    where = store(disk / "run" / "checkpoints")
    assert where.complete()
    for path in where.complete():
        checkpoints.verify(path)
    assert not list(where.folder.glob(".*"))


@pytest.mark.parametrize("kilobytes", [4, 16, 28])
def test_a_disk_that_is_full_before_training_is_one_line(kilobytes, tmp_path, mount, capsys):
    """While the run's folder is opened, while the tokenizer is written, and after it."""
    disk = mount(f"size={kilobytes}k")
    assert tiny_runs.run(tiny_runs.write_recipe(tmp_path), disk / "run") == 1
    assert "No space left on device" in capsys.readouterr().err.strip().split("\n")[-1]
    assert not list(disk.glob("**/.*"))


def test_a_read_only_file_system_is_one_line(tmp_path, mount, capsys):
    disk = mount("size=400k,ro")
    assert tiny_runs.run(tiny_runs.write_recipe(tmp_path), disk / "run") == 2
    assert "output_dir: " in (message := capsys.readouterr().err) and "Read-only file system" in message
    assert not list(disk.iterdir())


def test_a_file_that_verifies_and_is_none_of_ours_is_named(tmp_path):
    """As when somebody puts another run's in its place, with its sum."""
    for name, content in (("state.json", "no JSON"), ("model.safetensors", "no weights")):
        (tmp_path / name).write_text(content)
    with pytest.raises(checkpoints.CheckpointError, match="state.json: Expecting value"):
        checkpoints.read_state(tmp_path)
    with pytest.raises(checkpoints.CheckpointError, match="model.safetensors: SafetensorError"):
        checkpoints.read_tensors(tmp_path, "model.safetensors")
