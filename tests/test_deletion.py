"""What is there for speed alone can be deleted: with a few lines of plain torch in the place of three of its files, a
saved model gives the same numbers."""

import inspect
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_scratch_transformer import cache_scratch, unpadding_scratch

from . import tiny
from .test_loading import elsewhere

PLAIN_TORCH = '''\
"""In the place of ops, unpadding and cache: nothing is fused, left out or allocated ahead."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RMSNorm = nn.RMSNorm
is_compiling_or_tracing = torch.compiler.is_compiling


def is_unmodified(linear: nn.Module) -> bool:
    return True


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Any, target_ids: Tensor, label_smoothing: float) -> Tensor:
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits, target_ids, reduction="sum", label_smoothing=label_smoothing)


class VarlenMask:
    """There is none."""


Unpadded, varlen_attention = VarlenMask, VarlenMask


def is_sparse(real: Tensor) -> bool:
    return False


def nothing(*args: Any) -> None:
    """No layout is chosen, no target is the last, no cache is changed."""


unpadded = separate_documents = trim_after_last_target = preallocate = nothing
'''
REPLACED = ("ops_scratch.py", "unpadding_scratch.py", "cache_scratch.py")


def results(model: Any, batch: dict[str, Tensor], prompt: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits, losses and gradients of a padded batch; logits of packed documents; tokens written after a prompt.

    Sent as text to a process that cannot import this file."""
    found = {}
    for loss_only in (False, True):
        for smoothing in (0.0, 0.1):
            model.zero_grad()
            outputs = model(**batch, loss_only=loss_only, label_smoothing=smoothing)
            outputs.loss.backward()
            name = f"loss_only={loss_only}, label_smoothing={smoothing}"
            found[name] = outputs.loss.detach()
            found |= {f"{name}: {key}": parameter.grad.clone() for key, parameter in model.named_parameters()}
            if not loss_only:
                found["logits"] = outputs.logits.detach()
    with torch.no_grad():
        if not model.config.is_encoder_decoder:
            positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
            options = {"use_cache": False} if model.can_generate() else {}
            found["packed"] = model(batch["input_ids"][:1], position_ids=positions, **options).logits
        if model.can_generate():
            found["written"] = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    return found


def open_without_speed(home: str, classes: dict[str, str], code: str) -> None:
    """What a stranger finds who has deleted it."""
    import sys
    from pathlib import Path

    import torch
    import transformers
    from safetensors.torch import load_file

    scope: dict[str, Any] = {"Any": Any, "Tensor": torch.Tensor, "torch": torch}
    exec(code, scope)
    for name, auto_class in classes.items():
        folder = Path(home, name)
        model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True)
        norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
        assert norms and {type(norm) for norm in norms} == {torch.nn.RMSNorm}
        loaded = {Path(module.__file__).name: module for key, module in sys.modules.items() if f".{name}." in key}
        stub = (folder / "ops_scratch.py").read_text()
        replaced = {"ops_scratch.py", "unpadding_scratch.py", "cache_scratch.py"} & loaded.keys()
        assert len(replaced) == 2 + model.can_generate()  # an encoder has no cache
        for file in replaced:
            assert Path(loaded[file].__file__).read_text() == stub
        found = scope["results"](model, load_file(folder / "batch"), load_file(folder / "prompt"))
        expected = load_file(folder / "results")
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_without_its_quick_files_a_model_is_the_same(tmp_path: Path) -> None:
    assert len(PLAIN_TORCH.splitlines()) <= 40
    home, classes = tmp_path / "home", {}
    for model_class in tiny.LANGUAGE_MODELS:
        options = {"tie_word_embeddings": False, "use_qk_norm": True, "lm_head_bias": True, "eos_token_id": None}
        model = tiny.model(model_class, initializer_range=0.3, **options)
        name = model_class.__name__
        classes[name] = tiny.auto_class(model_class)
        model.save_pretrained(home / name)
        batch = tiny.inputs(model)
        batch |= tiny.labels(model, batch)
        batch["labels"][:, 3:] = -100  # what comes after is left out where that is quick
        prompt = tiny.inputs(model, padding="left", seed=1)
        save_file(batch, home / name / "batch")
        save_file(prompt, home / name / "prompt")
        quick = {unpadding_scratch.Unpadded: "unpad", cache_scratch.PreallocatedLayer: "update"}
        with ExitStack() as stack:
            watched = [
                stack.enter_context(mock.patch.object(owner, method, autospec=True, side_effect=getattr(owner, method)))
                for owner, method in quick.items()
            ]
            save_file(results(model, batch, prompt), home / name / "results")
        assert watched[0].called and watched[1].called == model.can_generate(), "there was nothing to delete"
        for file in REPLACED:
            if file != "cache_scratch.py" or model.can_generate():
                assert (home / name / file).read_text(encoding="utf-8") != PLAIN_TORCH
                (home / name / file).write_text(PLAIN_TORCH, encoding="utf-8")
    elsewhere(open_without_speed, tmp_path / "elsewhere", home, classes, inspect.getsource(results))
