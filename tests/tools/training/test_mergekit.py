"""mergekit, which finds out the tensors of an architecture that it does not know."""

import os
import subprocess
import sys

import pytest
import yaml
from torch.testing import assert_close

from hf_scratch_transformer.surgery import average
from tests import tiny


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_linear(head, tmp_path):
    """mergekit-yaml, a linear merge of two folders, three families: weights = those of our average"""
    models = [tiny.model(head, seed=seed) for seed in (0, 1)]
    for name, model in zip("ab", models, strict=True):
        model.save_pretrained(tmp_path / name)
    merged = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in "ab"]
    plan = {"merge_method": "linear", "dtype": "float32", "models": merged}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    paths = [str(tmp_path / "plan.yaml"), str(tmp_path / "merged")]
    options = ["--trust-remote-code", "--no-copy-tokenizer", "--lora-merge-cache", str(tmp_path), "--quiet"]
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", *paths, *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    ours = average(models).state_dict()
    theirs = head.from_pretrained(tmp_path / "merged").state_dict()
    assert any((value - models[0].state_dict()[name]).abs().max() > 0.01 for name, value in ours.items())
    assert_close(theirs, ours, atol=1e-6, rtol=1e-6)
