"""Tokens without padding: the only place that knows how a batch is laid out. Whatever works on each token by itself
then does nothing for padding; attention is told by its mask where each text starts.

Shapes: B batch, T length, N tokens that are not padding, R texts, H heads, d width of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import find_packed_sequence_indices

from .ops_scratch import compute_dtype, is_compiling_or_tracing


class VarlenMask(NamedTuple):
    """Who attends to whom where R texts stand one after the other without padding: each text to its own keys, which
    start where `cu_seqlens` say (the interface of FlashAttention, Dao, 2023). It goes wherever a mask goes."""

    cu_seqlens_q: Tensor  # (R + 1,)
    cu_seqlens_k: Tensor  # (R + 1,)
    max_seqlen_q: int
    max_seqlen_k: int
    is_causal: bool


class Unpadded(NamedTuple):
    """A layout: the texts of a batch one after the other (the unpadding of ModernBERT, Warner et al., 2024)."""

    cu_seqlens: Tensor  # (R + 1,)
    max_seqlen: int
    indices: Tensor | None = None  # (N,): of each token among the B × T of the batch; None: there is no padding

    @classmethod
    def of(cls, lengths: Tensor, indices: Tensor | None = None) -> "Unpadded":
        return cls(F.pad(lengths.cumsum(0), (1, 0)), int(lengths.max()), indices)

    def unpad(self, x: Tensor) -> Tensor:  # (B, T, ...) -> (1, N, ...)
        return x if self.indices is None else x.flatten(0, 1).index_select(0, self.indices)[None]

    def pad(self, x: Tensor, batch: int, length: int) -> Tensor:  # (1, N, ...) -> (B, T, ...), with zeros
        if self.indices is None:
            return x
        padded = x.new_zeros(batch * length, *x.shape[2:]).index_copy_(0, self.indices, x[0])
        return padded.unflatten(0, (batch, length))

    def mask(self, is_causal: bool, keys: "Unpadded | None" = None) -> VarlenMask:
        """From these texts to themselves, or to `keys`, one for each of them."""
        keys = keys or self
        return VarlenMask(self.cu_seqlens, keys.cu_seqlens, self.max_seqlen, keys.max_seqlen, is_causal)


def unpadded(attention_mask: Tensor) -> Unpadded:  # (B, T), 0 for padding
    real = attention_mask != 0
    return Unpadded.of(real.sum(1), real.flatten().nonzero()[:, 0])


def is_sparse(real: Tensor) -> bool:
    """Whether so few tokens of a batch are real, if any, that leaving out the others saves more than it costs."""
    count = real.sum()
    return not bool((count == 0) | (count >= 0.9 * real.numel()))


def separate_documents(position_ids: Tensor, batch: int) -> Unpadded | None:  # (B or 1, T)
    """Where documents are that a caller has packed into rows, each with positions of its own; None if there are none,
    or padding them to one length would take more scores than whole rows do."""
    length = position_ids.shape[1]
    documents = find_packed_sequence_indices(position_ids.expand(batch, -1))
    if documents is None:
        return None
    documents = documents + torch.arange(batch, device=documents.device)[:, None] * length
    lengths = documents.flatten().unique_consecutive(return_counts=True)[1]
    return Unpadded.of(lengths) if len(lengths) * lengths.max() ** 2 < batch * length**2 else None


def trim_after_last_target(target_ids: Tensor) -> Tensor | None:  # (B, T)
    """What a causal model has to read for the loss of these targets, as a padding mask: each row up to its last one.
    None stands for nearly everything, or for what a graph cannot know ahead."""
    if is_compiling_or_tracing():
        return None
    needed = (target_ids != -100).flip(1).cumsum(1).flip(1) > 0
    return needed.long() if is_sparse(needed) else None


def varlen_attention(backend: Callable) -> Callable:
    """An attention backend for a `VarlenMask`: FlashAttention's kernel where it runs, or `backend` on texts that are
    padded for it, no wider than the longest. Its signature is that of transformers' backends."""

    def attend(
        module: Any,
        query: Tensor,  # (B, H, T, d)
        key: Tensor,
        value: Tensor,
        mask: VarlenMask,
        dropout: float = 0.0,
        scaling: float = 1.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        batch, fused = len(query), module.config._attn_implementation == "sdpa"
        if fused and has_varlen_kernel(query, value, dropout):
            return _by_kernel(module, query, key, value, mask, scaling), None
        queries = _slots(mask.cu_seqlens_q, mask.max_seqlen_q, batch * query.shape[2])
        keys = queries
        if mask.cu_seqlens_k is not mask.cu_seqlens_q:
            keys = _slots(mask.cu_seqlens_k, mask.max_seqlen_k, len(key) * key.shape[2])
        texts = len(mask.cu_seqlens_q) - 1
        query = _pad_heads(query, queries, texts, mask.max_seqlen_q)
        key, value = (_pad_heads(x, keys, texts, mask.max_seqlen_k) for x in (key, value))
        output, _ = backend(
            module, query, key, value, _padded_mask(mask, fused), dropout=dropout, scaling=scaling, **kwargs
        )
        return output.flatten(0, 1).index_select(0, queries).unflatten(0, (batch, -1)), None

    return attend


def _slots(cu_seqlens: Tensor, longest: int, count: int) -> Tensor:  # -> (N,): of each token among R × longest
    gaps = longest - cu_seqlens.diff()
    before = (gaps.cumsum(0) - gaps).repeat_interleave(cu_seqlens.diff(), output_size=count)
    return torch.arange(count, device=cu_seqlens.device) + before


def _pad_heads(x: Tensor, slots: Tensor, texts: int, longest: int) -> Tensor:  # (B, H, T, d) -> (R, H, longest, d)
    x = x.transpose(1, 2).flatten(0, 1)
    padded = x.new_zeros(texts * longest, *x.shape[1:]).index_copy_(0, slots, x)
    return padded.unflatten(0, (texts, longest)).transpose(1, 2)


def _padded_mask(mask: VarlenMask, fused: bool) -> Tensor | None:  # True where a query may look
    device = mask.cu_seqlens_k.device
    if mask.is_causal:  # padding comes last, where nobody looks
        return None if fused else torch.ones(1, 1, *2 * [mask.max_seqlen_q], dtype=torch.bool, device=device).tril()
    # A text without tokens attends to one empty slot rather than to nothing, which would be NaN.
    lengths = mask.cu_seqlens_k.diff().clamp(min=1)[:, None, None, None]
    return torch.arange(mask.max_seqlen_k, device=device) < lengths  # (R, 1, 1, longest)


def has_varlen_kernel(query: Tensor, value: Tensor, dropout: float) -> bool:
    """On an NVIDIA GPU from Ampere on, in half precision."""
    return (
        query.is_cuda
        and compute_dtype(query) in (torch.bfloat16, torch.float16)
        and dropout == 0.0
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _by_kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: VarlenMask, scaling: float) -> Tensor:
    batch, dtype, groups = len(query), compute_dtype(query), module.num_key_value_groups
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    query, key, value = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (query, key, value))
    window = (-1, 0 if mask.is_causal else -1)  # how far back and ahead is looked; -1: to the end
    offsets = mask.cu_seqlens_q.int(), mask.cu_seqlens_k.int()
    lengths = mask.max_seqlen_q, mask.max_seqlen_k
    output: Any = varlen_attn(query, key, value, *offsets, *lengths, scale=scaling, window_size=window)
    return output.unflatten(0, (batch, -1))  # (B, T, H, d)
