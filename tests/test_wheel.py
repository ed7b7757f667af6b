"""The wheel in an environment of its own, away from the checkout: what `pip install` gives a user.

python -m pytest -m slow tests/test_wheel.py
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
OPENING = """
import hf_scratch_transformer
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("runs/tiny/model")
print(hf_scratch_transformer.__version__, type(model).__module__, type(AutoModel.from_pretrained("native")).__name__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs the Python of a new environment, in an empty folder, and gives what it printed."""
    where = tmp_path_factory.mktemp("installed")
    sources = where / "sources"  # in which the build leaves its folders
    for name in ("hf_scratch_transformer", "training"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    subprocess.run([sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", where, sources], check=True)
    (wheel,) = where.glob("*.whl")
    venv.create(where / "venv", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{where / 'venv' / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    (where / "here").mkdir()

    def run(*words, code=0):
        done = subprocess.run(
            words, cwd=where / "here", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    constraints = ["--constraint", str(ROOT / "requirements.lock")]
    run("python", *PIP, "install", *constraints, str(wheel))
    run.folder = where / "here"
    run.add = lambda extra: run("python", *PIP, "install", *constraints, f"{wheel}[{extra}]")
    return run


def test_every_package_of_the_project_is_in_the_wheel():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    inside = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("hf_scratch_transformer/**/*.py")}
    assert {*setup["packages"]} == {*inside, "hf_scratch_transformer.training"}


@pytest.mark.slow
def test_a_model_is_looked_at_trained_loaded_and_converted_from_the_wheel_alone(installed):
    assert "parameters" in installed("scratch-transformer", "inspect", "gpt-2")
    message = installed("scratch-transformer", "train", "shakespeare_char_cpu", code=2)
    assert message.strip().endswith("pip install 'hf-scratch-transformer[training]'") and message.count("\n") == 1
    installed.add("training,insight")
    for name in ("train", "valid"):
        (installed.folder / f"{name}.txt").write_text("To be, or not to be: that is the question.\n" * 200)
    splits = {"train": "train.txt[:90%]", "validation": "train.txt[90%:]", "test": "valid.txt"}
    words = ["--data.path", ".", f"--data.splits={json.dumps(splits)}", "--model.num_hidden_layers=1"]
    words += ["--optimisation.max_steps=3", "--evaluation.every_steps=null", "--checkpoints.every_steps=null"]
    installed("scratch-transformer", "train", "shakespeare_char_cpu", *words, "--output_dir", "runs/tiny")
    about = json.loads((installed.folder / "runs/tiny/environment.json").read_text())
    assert about["command"][:3] == ["python", "-m", "hf_scratch_transformer.training"]
    words = ["--data", "valid.txt", "--data.window", "32"]
    assert "loss" in installed("scratch-transformer", "evaluate", "runs/tiny/model", *words)
    installed("scratch-transformer", "convert", "runs/tiny/model", "native", "--to", "qwen3")
    version, module, native = installed("python", "-c", OPENING).split()[-3:]
    assert module == "hf_scratch_transformer.modeling_scratch_decoder" and native == "Qwen3Model"
    assert version == installed("python", *PIP[:2], "show", "hf-scratch-transformer").split("Version: ")[1].split()[0]
