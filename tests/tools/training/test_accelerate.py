"""Accelerate, without our training program: gradient accumulation, and models dispatched and offloaded."""

import pytest
import torch
from accelerate import Accelerator, disk_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.state import AcceleratorState, GradientState
from torch.testing import assert_close

from tests import tiny


@pytest.fixture(autouse=True)
def fresh():
    """One state for all of a process, which other trainers leave as it suited them."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def outputs(model, head):
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_accumulation(head):
    """Accelerator, gradients of 2 batches accumulated: weights after 3 steps = a plain loop's"""
    trained = []
    for accumulated in (True, False):
        model = tiny.model(head).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = []
        for seed in range(6):
            inputs = tiny.inputs(model, seed=seed)
            batches.append(inputs | tiny.labels(model, inputs, seed=seed + 1))
        if accumulated:
            accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
            model, optimizer = accelerator.prepare(model, optimizer)
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            model = accelerator.unwrap_model(model)
        else:
            for one, two in zip(batches[::2], batches[1::2], strict=True):
                ((model(**one).loss + model(**two).loss) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        trained.append(model.state_dict())
    assert_close(*trained, atol=1e-5, rtol=1e-5)
    assert any(not torch.equal(value, trained[0][name]) for name, value in tiny.model(head).state_dict().items())


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_dispatched(head, tmp_path):
    """dispatch_model, half of it on disk, and all of it: outputs = ours; from a folder into an empty model too"""
    model = tiny.model(head)
    expected = outputs(model, head)
    model.save_pretrained(tmp_path / "saved")
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules]
    places = dict.fromkeys(top_level(model, blocks), "cpu") | {blocks[-1]: "disk"}
    dispatched = dispatch_model(tiny.model(head), places, main_device="cpu", offload_dir=tmp_path / "part")
    assert any(value.is_meta for value in dispatched.parameters())
    assert_close(outputs(dispatched, head), expected)
    offloaded = disk_offload(tiny.model(head), tmp_path / "whole", execution_device=torch.device("cpu"))
    assert all(value.is_meta for value in offloaded.parameters())
    assert_close(outputs(offloaded, head), expected)
    with init_empty_weights():
        empty = head(model.config)
    empty.tie_weights()
    filled = load_checkpoint_and_dispatch(
        empty.eval(), tmp_path / "saved", device_map=places, offload_folder=tmp_path / "third"
    )
    assert_close(outputs(filled, head), expected)


def top_level(model, blocks):
    """The blocks, and the largest modules that hold none of them."""
    found = []

    def walk(module, prefix):
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if any(block.startswith(f"{path}.") for block in blocks):
                walk(child, f"{path}.")
            elif any(True for _ in child.state_dict()):
                found.append(path)

    walk(model, "")
    return found
