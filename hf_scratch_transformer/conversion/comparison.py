"""Two models beside each other, on the same tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Of the largest number computed, in single precision: of two orders of the same sums some 1e-6 remain after a few
# layers, 1e-4 after many; a matrix in the wrong place leaves nothing alike.
TOLERANCE = 1e-3
ROWS, LENGTH = 2, 32
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


@dataclass(frozen=True)
class Comparison:
    """How far apart two models are."""

    output: str  # the one that is furthest apart
    difference: float  # the largest
    reach: float  # the largest number in it

    @property
    def allowed(self) -> float:
        return TOLERANCE * max(1.0, self.reach)

    @property
    def is_close(self) -> bool:
        return self.difference <= self.allowed

    def __str__(self) -> str:
        return (
            f"the same random tokens through both: {self.output} reach {self.reach:.3g}, "
            f"differ by at most {self.difference:.2g} ({self.allowed:.2g} allowed)"
        )


@torch.no_grad()
def compare(one: PreTrainedModel, other: PreTrainedModel) -> Comparison:
    """What two models of the same task compute of the same random tokens, none of them padding."""
    inputs = tokens_for(one)
    before, after = (model.eval()(**inputs) for model in (one, other))
    names = [name for name in OUTPUTS if before.get(name) is not None and after.get(name) is not None]
    return furthest((name, before[name], after[name]) for name in names)


def furthest(outputs: Iterable[tuple[str, Tensor, Tensor]]) -> Comparison:
    """Of outputs with their names, expected and actual, those that are furthest apart."""
    found = []
    for name, expected, actual in outputs:
        expected, actual = expected.float(), actual.float()
        difference = (actual - expected).abs().max().nan_to_num(nan=float("inf")).item()
        found.append(Comparison(name, difference, expected.abs().max().item()))
    return max(found, key=lambda each: each.difference / each.allowed)


def tokens_for(model: PreTrainedModel) -> dict[str, Tensor]:
    config = model.config
    choices = (2,) if type(model).__name__.endswith("ForMultipleChoice") else ()
    limit = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH) or LENGTH)
    shape = (ROWS, *choices, max(1, limit - 2))  # some tables begin with positions that no token has
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> Tensor:
        ids, pad = torch.randint(0, size, shape, generator=generator), config.pad_token_id
        # A head for whole texts looks for the last token that is not padding.
        return ids if pad is None else ids.masked_fill(ids == pad, (pad + 1) % size)

    inputs = {"input_ids": draw(config.vocab_size)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = draw(getattr(config, "decoder_vocab_size", None) or config.vocab_size)
    return inputs
