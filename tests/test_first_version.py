"""Folders that the first version saved open with its own code and with this package's, and say what they said then."""

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

import hf_scratch_transformer as scratch

from . import tiny
from .test_loading import PACKAGE, elsewhere, shipped

FIRST_VERSION = Path(__file__).parent / "first_version"
CLASSES = {
    "masked_lm_post_norm_learned": scratch.ScratchEncoderForMaskedLM,
    "causal_lm_pre_norm_rotary": scratch.ScratchDecoderForCausalLM,
    "translator_post_norm_sinusoidal": scratch.ScratchSeq2SeqForConditionalGeneration,
    "classifier_pre_norm_rotary": scratch.ScratchEncoderForSequenceClassification,
}
AUTO_CLASSES = {name: tiny.auto_class(model_class) for name, model_class in CLASSES.items()}


def assert_says_what_it_said(model: Any, recorded: str) -> None:
    """In double precision, so that it does not depend on the machine, at non-padding tokens.

    Sent as text to a process that cannot import this file."""
    tensors = load_file(recorded)
    expected = tensors.pop("logits")
    inputs = {name.removeprefix("input."): tensor for name, tensor in tensors.items()}
    with torch.no_grad():
        logits = model.eval().double()(**inputs).logits
    if logits.shape[:2] == inputs["attention_mask"].shape:
        real = inputs["attention_mask"] == 1
        logits, expected = logits[real], expected[real]
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", CLASSES)
def test_the_package_opens_what_the_first_version_saved(name: str) -> None:
    folder = FIRST_VERSION / name
    model, info = getattr(transformers, AUTO_CLASSES[name]).from_pretrained(folder, output_loading_info=True)
    assert type(model) is CLASSES[name]
    assert not any(info.values()), info
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == dict(model.named_parameters()).keys()  # tied ones once
    for key, tensor in model.named_parameters():
        assert torch.equal(tensor, stored[key])
    assert_says_what_it_said(model, folder / "recorded.safetensors")


@pytest.mark.parametrize("name", [name for name in CLASSES if CLASSES[name] in tiny.LANGUAGE_MODELS])
def test_the_lean_loss_of_what_the_first_version_saved(name: str) -> None:
    model = CLASSES[name].from_pretrained(FIRST_VERSION / name)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)
    assert_close(model(**inputs, **labels, loss_only=True).loss, model(**inputs, **labels).loss)


def open_with_the_code_in_the_folder(folders: dict[str, str], auto_classes: dict[str, str], code: str) -> None:
    """What a stranger finds. `folders`: {name: a file that only the code expected there has}."""
    import sys
    from pathlib import Path

    import torch
    import transformers
    from safetensors.torch import load_file

    scope: dict[str, Any] = {"Any": Any, "torch": torch, "load_file": load_file}
    exec(code, scope)
    for folder, file in folders.items():
        model, info = getattr(transformers, auto_classes[Path(folder).name]).from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True
        )
        assert not any(info.values()), (folder, info)
        module = sys.modules[type(model).__module__]
        assert module.__name__.startswith("transformers_modules.")
        assert Path(module.__file__).with_name(file).exists(), folder
        scope["assert_says_what_it_said"](model, Path(folder, "recorded.safetensors"))


def test_a_stranger_opens_it_with_the_code_that_it_carries(tmp_path: Path) -> None:
    """And again once this package has saved it, with this package's code."""
    folders = {}
    for name, model_class in CLASSES.items():
        old, new = tmp_path / "old" / name, tmp_path / "new" / name
        shutil.copytree(FIRST_VERSION / name, old)
        shutil.copytree(FIRST_VERSION / "code", old, dirs_exist_ok=True)
        folders[str(old)] = "kernels_scratch.py"
        model_class.from_pretrained(old).save_pretrained(new)
        assert {path.name for path in new.glob("*.py")} == shipped(model_class)
        shutil.copy(old / "recorded.safetensors", new)
        folders[str(new)] = "stack_scratch.py"
    assert not (PACKAGE / "kernels_scratch.py").exists()
    code = inspect.getsource(assert_says_what_it_said)
    elsewhere(open_with_the_code_in_the_folder, tmp_path / "elsewhere", folders, AUTO_CLASSES, code)
