"""Lightning: a LightningModule round a model, beside a plain loop."""

from typing import Any

import lightning
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

from tests import tiny

BATCHES, EPOCHS = 3, 2


class Module(lightning.LightningModule):
    def __init__(self, model: Any):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(folder: Any, epochs: int) -> lightning.Trainer:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "gradient_clip_val": 1.0}
    return lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **options)


def batches(head: Any) -> DataLoader:
    model = tiny.model(head)
    found = []
    for seed in range(BATCHES):
        inputs = tiny.inputs(model, seed=seed)
        found.append(inputs | tiny.labels(model, inputs, seed=seed + 1))
    return DataLoader(found, batch_size=None)


def plain(head: Any) -> tuple[Any, list[float]]:
    model = tiny.model(head).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(EPOCHS):
        for batch in batches(head):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_losses(head, tmp_path):
    """a LightningModule round each family, 6 clipped steps: losses and weights = a plain loop's"""
    expected, losses = plain(head)
    module = Module(tiny.model(head).train())
    trainer(tmp_path, EPOCHS).fit(module, batches(head))
    assert len(set(losses)) == BATCHES * EPOCHS
    assert_close(module.losses, losses)
    assert_close(module.model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_resumed(head, tmp_path):
    """a checkpoint after 3 steps, opened by another model: losses and weights = those of the run that went on"""
    expected, losses = plain(head)
    first = trainer(tmp_path, 1)
    first.fit(Module(tiny.model(head).train()), batches(head))
    first.save_checkpoint(tmp_path / "after.ckpt")
    module = Module(tiny.model(head, seed=1).train())
    trainer(tmp_path, EPOCHS).fit(module, batches(head), ckpt_path=tmp_path / "after.ckpt")
    assert_close(module.losses, losses[BATCHES:])
    assert_close(module.model.state_dict(), expected.state_dict())
