"""Texts as vectors, at the cost of their own tokens rather than of the longest text's."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .onednn import onednn_products

BATCH_TOKENS = 4096


@torch.inference_mode()
def sentence_embeddings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: str | Sequence[str],
    batch_tokens: int = BATCH_TOKENS,
    normalize: bool = False,
) -> Tensor:
    """The mean of the last hidden states over the tokens of each text (Reimers & Gurevych, 2019), in the order given.

    Args:
        model: an encoder or a decoder without head. A text is cut to what it can take.
        texts: several, or one.
        batch_tokens: padded tokens at a time; texts of like length go together.
        normalize: to length 1, so that products are cosines.

    Returns:
        (texts, D) in single precision, on the model's device; (D,) for one text alone.

    Raises:
        ValueError: a text without tokens has no mean; the model has a head, or translates; `batch_tokens` is below 1.
    """
    check_is_encoder(model)
    if isinstance(texts, str):
        return sentence_embeddings(model, tokenizer, [texts], batch_tokens, normalize)[0]
    limit = longest_input(model, tokenizer)
    if not texts:  # of which tokenizers make an error
        return torch.empty(0, model.config.hidden_size, device=model.device)
    encoded = tokenizer(list(texts), truncation=True, max_length=limit, return_attention_mask=False)["input_ids"]
    for row, ids in enumerate(encoded):
        if not ids:
            raise ValueError(f"texts[{row}]={texts[row]!r} has no tokens")
    check_ids(model, encoded)
    vectors = mean_vectors(model, encoded, batch_tokens)
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors


def check_is_encoder(model: PreTrainedModel) -> None:
    """Raise a ValueError that says what to give in place of a model which has no one state for each token."""
    name, without_head = type(model).__name__, model.base_model
    if "decoder_input_ids" in inspect.signature(without_head.forward).parameters:
        raise ValueError(f"model: {name} reads and writes; give the half that reads, model.get_encoder()")
    if without_head is not model:
        raise ValueError(f"model: {name} has a head; give what is below it, model.base_model")


@torch.inference_mode()
@onednn_products()
def mean_vectors(model: PreTrainedModel, encoded: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """As `sentence_embeddings`, of texts that are token ids already, none of them empty."""
    vectors = torch.empty(len(encoded), model.config.hidden_size, device=model.device)
    for rows in batches_by_length([len(ids) for ids in encoded], batch_tokens):
        inputs, mask = padded(model, [encoded[row] for row in rows])
        states = model(**inputs).last_hidden_state.float()  # (B, T, D)
        shares = mask / mask.sum(1, keepdim=True)
        vectors[torch.tensor(rows, device=model.device)] = (shares[:, None] @ states)[:, 0]
    return vectors


def padded(model: PreTrainedModel, encoded: Sequence[Sequence[int]]) -> tuple[dict[str, Tensor], Tensor]:
    """What the model is given for rows of ids, which begin at the left whatever side their tokenizer pads, and the mask
    of their tokens, (B, T)."""
    rows = [torch.as_tensor(ids, dtype=torch.long) for ids in encoded]
    # Configurations may lack it, or have one that is in no table; what is masked may be any token.
    named: Any = getattr(model.config, "pad_token_id", None)
    pad = named if named in range(model.get_input_embeddings().num_embeddings) else 0
    ids = pad_sequence(rows, batch_first=True, padding_value=pad).to(model.device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    is_full, mask = bool(mask.all()), mask.to(model.device)
    # Without padding there is nothing to mask, and faster attention to be had.
    return {"input_ids": ids} if is_full else {"input_ids": ids, "attention_mask": mask}, mask


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


def check_ids(model: PreTrainedModel, encoded: Iterable[Iterable[int]], *, target: bool = False) -> None:
    """Refuse token ids for which a model has no vector, or its decoder if they are of the target, in a `ValueError`."""
    rows = (model.get_decoder() if target else model).get_input_embeddings().num_embeddings
    greatest = max((token for ids in encoded for token in ids), default=0)
    if greatest >= rows:
        raise ValueError(
            f"the tokenizer gives the id {greatest}, the model's table ends at {rows - 1}: vocab_size differs"
        )


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens that a model takes at once, special ones included."""
    return min(tokenizer.model_max_length, most_positions(model))


def longest_output(source_length: int, most: int) -> int:
    """How many tokens a translation of so many may grow to: twice as many and ten, and never more than `most`."""
    return min(2 * source_length + 10, most)


def most_positions(model: PreTrainedModel) -> int:
    """The most tokens that a model is meant for, by its configuration."""
    return getattr(model.config, "max_position_embeddings", None) or sys.maxsize
