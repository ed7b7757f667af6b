"""Texts as vectors, at the cost of their own tokens rather than of the longest text's."""

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_TOKENS = 4096


@torch.inference_mode()
def sentence_embeddings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    batch_tokens: int = BATCH_TOKENS,
    normalize: bool = False,
) -> Tensor:
    """The mean of the last hidden states over the tokens of each text (Reimers & Gurevych, 2019), in the order given.

    Args:
        model: an encoder or a decoder without head. A text is cut to what it can take.
        batch_tokens: padded tokens at a time; texts of like length go together.
        normalize: to length 1, so that products are cosines.

    Returns:
        (texts, D) in single precision, on the model's device.

    Raises:
        ValueError: a text without tokens has no mean; or `batch_tokens` is below 1.
    """
    limit = longest_input(model, tokenizer)
    if not texts:  # of which tokenizers make an error
        return torch.empty(0, model.config.hidden_size, device=model.device)
    encoded = tokenizer(list(texts), truncation=True, max_length=limit, return_attention_mask=False)["input_ids"]
    for row, ids in enumerate(encoded):
        if not ids:
            raise ValueError(f"texts[{row}]={texts[row]!r} has no tokens")
    vectors = torch.empty(len(encoded), model.config.hidden_size, device=model.device)
    for rows in batches_by_length([len(ids) for ids in encoded], batch_tokens):
        inputs = tokenizer.pad({"input_ids": [encoded[row] for row in rows]}, return_tensors="pt").to(model.device)
        mask = inputs["attention_mask"]
        # Without padding there is nothing to mask, and faster attention to be had.
        padded = {} if mask.all() else {"attention_mask": mask}
        states = model(input_ids=inputs["input_ids"], **padded).last_hidden_state.float()
        vectors[rows] = torch.einsum("btd,bt->bd", states, mask / mask.sum(1, keepdim=True))
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows of like length together, at least one and as many as stay within so many tokens when padded.

    The longest come first: if memory does not suffice, that shows at once.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens={batch_tokens} must be at least 1")
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    while order:
        count = max(1, batch_tokens // max(1, lengths[order[0]]))
        yield order[:count]
        order = order[count:]


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens that a model takes at once."""
    return min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
