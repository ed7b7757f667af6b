"""Contenders: models put to work, ours or others', in training, generation and embedding."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_scratch_transformer.embedding import mean_vectors
from hf_scratch_transformer.onednn import onednn_products
from training.objectives import IGNORED, Batch
from training.optimisation import optimizers
from training.recipe import Optimisation

from .shapes import PAD, Shape


@dataclass(frozen=True)
class Options:
    """What the command line says beside kinds, shapes and peers, under the same names."""

    device: torch.device
    rounds: int = 10
    steps: int | None = None  # of a round
    warmup: int | None = None
    batch: int | None = None  # rows to generate at once; elsewhere the shape's
    num_beams: int | None = None
    new_tokens: int | None = None
    texts: int = 256
    axis: Sequence[str] = ()
    values: Sequence[int] = ()
    peer_optimizer: str = "fused"
    compiler: str = "inductor"  # of torch.compile
    like: str | None = None
    recipe: str | None = None
    overrides: Sequence[str] = ()


class Contender(ABC):
    """One side of a comparison: `build` once, then `step` on one batch after another."""

    name: str
    batches: Sequence[Any]
    # Seconds of the last step that do not count, since a longer one would spend no more on them.
    setup_seconds: float = 0.0

    @abstractmethod
    def build(self) -> None:
        """Make what `step` needs."""

    @abstractmethod
    def step(self, batch: Any) -> Tensor:
        """The work that is timed; returns what came of it, by which contenders can be compared."""

    @abstractmethod
    def tokens(self, batch: Any) -> int:
        """Non-padding tokens in the last step, which was on this batch."""

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


@dataclass
class ModelContender(Contender):
    """A model of a shape, ours or another's."""

    name: str
    make: Callable[[], nn.Module]
    batches: Sequence[Any]
    shape: Shape
    options: Options
    is_ours: bool
    arguments: dict[str, Any] = field(default_factory=dict)  # of every call, beside the batch
    model: Any = field(init=False)

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = self.make().to(self.options.device)

    def products(self) -> AbstractContextManager[None]:
        """How matrices are multiplied within it: ours as `training` does."""
        return onednn_products() if self.is_ours else nullcontext()

    def weight_bytes(self, batch: Any) -> float:
        """Bytes that a step moves to read the weights, and to write them: here, all of them read once."""
        return count_bytes(self.model)


class Training(ModelContender):
    """Forward, backward and AdamW."""

    def build(self) -> None:
        super().build()
        self.model.train()
        if self.is_ours:
            (self.optimizer,) = optimizers(self.model, Optimisation(max_steps=1, learning_rate=1e-4))
        else:
            if isinstance(self.model, PreTrainedModel):
                self.model.config.use_cache = False  # as Trainer does
            options: dict[str, Any] = {"betas": Optimisation(max_steps=1).betas, self.options.peer_optimizer: True}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, **options)
        if self.shape.compile:
            self.model.compile(backend=self.options.compiler)

    def step(self, batch: Batch) -> Tensor:
        bf16 = self.shape.precision == "bf16"
        with self.products():
            with torch.autocast(self.options.device.type, torch.bfloat16, enabled=bf16):
                loss = self.model(**batch, **self.arguments).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def tokens(self, batch: Batch) -> int:
        return count_tokens(batch, self.shape.family == "seq2seq")

    def weight_bytes(self, batch: Batch) -> float:
        # Weights read forward and backward, the gradient written and read, AdamW's three tensors read and written.
        return 10 * super().weight_bytes(batch)


def count_bytes(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def count_tokens(batch: Batch, of_target: bool) -> int:
    """Non-padding tokens of a batch: of the target, or of the text."""
    if of_target:
        return int((batch["labels"] != IGNORED).sum())
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


class Inference(ModelContender):
    """A model that is not trained: bf16 is the type of its weights."""

    def build(self) -> None:
        super().build()
        self.model.eval()
        if self.shape.precision == "bf16":
            self.model.to(torch.bfloat16)


class Generation(Inference):
    """As many tokens as asked for, no fewer, through `generate`."""

    def step(self, batch: Batch) -> Tensor:
        with self.products():
            written = self.model.generate(**batch, do_sample=False, **self.arguments)
        return written[:, -self.arguments["max_new_tokens"] :]

    def tokens(self, batch: Batch) -> int:
        return len(batch["input_ids"]) * self.arguments["max_new_tokens"]

    def weight_bytes(self, batch: Batch) -> float:
        # The decoder's at each token, the encoder's once.
        encoder = count_bytes(self.model.get_encoder().layers) if self.shape.family == "seq2seq" else 0
        return encoder + (super().weight_bytes(batch) - encoder) * self.arguments["max_new_tokens"]


class Embedding(Inference):
    """One vector a text, the mean over its tokens, in the order given. Others take the texts as they come and pad each
    batch to its longest; ours puts texts of like length together."""

    @torch.inference_mode()
    def step(self, batch: list[list[int]]) -> Tensor:
        rows, device = self.shape.batch, self.options.device
        if self.is_ours:
            return mean_vectors(self.model.base_model, batch, rows * max(map(len, batch)))
        vectors = []
        for start in range(0, len(batch), rows):
            ids = pad_sequence([torch.tensor(text) for text in batch[start : start + rows]], True, PAD).to(device)
            mask = (ids != PAD).long()  # no text has a token PAD
            states = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, D)
            vectors.append((states * mask[..., None]).sum(1).float() / mask.sum(1, keepdim=True))
        return torch.cat(vectors)

    def tokens(self, batch: list[list[int]]) -> int:
        return sum(map(len, batch))

    def weight_bytes(self, batch: list[list[int]]) -> float:
        return super().weight_bytes(batch) * math.ceil(self.tokens(batch) / (self.shape.batch * self.shape.length))
