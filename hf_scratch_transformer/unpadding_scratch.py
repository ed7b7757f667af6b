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

from .ops_scratch import compute_dtype, is_compiling_or_tracing


class VarlenMask(NamedTuple):
    """Who attends to whom where R texts stand one after the other without padding: each text to its own keys, which
    start where `cu_seqlens` say (the interface of FlashAttention, Dao, 2023). It goes wherever a mask goes."""

    cu_seqlens_q: Tensor  # (R + 1,)
    cu_seqlens_k: Tensor  # (R + 1,)
    max_seqlen_q: int
    max_seqlen_k: int
    is_causal: bool
    slots_q: Tensor  # (N,): of each token among R × max_seqlen_q, where texts are padded for a backend
    slots_k: Tensor


class Unpadded(NamedTuple):
    """A layout: the texts of a batch one after the other (the unpadding of ModernBERT, Warner et al., 2024)."""

    cu_seqlens: Tensor  # (R + 1,)
    max_seqlen: int
    slots: Tensor  # (N,): of each token among R × max_seqlen
    indices: Tensor | None = None  # (N,): of each token among the B × T of the batch; None: there is no padding

    @classmethod
    def of(cls, lengths: Tensor, count: int, indices: Tensor | None = None) -> "Unpadded":
        longest = int(lengths.max())
        gaps = longest - lengths
        before = (gaps.cumsum(0) - gaps).repeat_interleave(lengths, output_size=count)
        slots = torch.arange(count, device=lengths.device) + before
        return cls(F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), longest, slots, indices)

    def unpad(self, x: Tensor) -> Tensor:  # (B, T, ...) -> (1, N, ...)
        return x if self.indices is None else x.flatten(0, 1).index_select(0, self.indices)[None]

    def pad(self, x: Tensor, batch: int, length: int) -> Tensor:  # (1, N, ...) -> (B, T, ...)
        return x if self.indices is None else _scatter(x[0], self.indices, batch, length)

    def mask(self, is_causal: bool, keys: "Unpadded | None" = None) -> VarlenMask:
        """From these texts to themselves, or to `keys`, one for each of them."""
        keys = keys or self
        offsets, longest = (self.cu_seqlens, keys.cu_seqlens), (self.max_seqlen, keys.max_seqlen)
        return VarlenMask(*offsets, *longest, is_causal, self.slots, keys.slots)


def _scatter(x: Tensor, indices: Tensor, rows: int, length: int) -> Tensor:  # (N, ...) -> (rows, length, ...)
    """Each token to its place, zeros elsewhere."""
    return x.new_zeros(rows * length, *x.shape[1:]).index_copy_(0, indices, x).unflatten(0, (rows, length))


def unpadded(attention_mask: Tensor) -> Unpadded:  # (B, T), 0 for padding
    real = attention_mask != 0
    indices = real.flatten().nonzero()[:, 0]
    return Unpadded.of(real.sum(1), len(indices), indices)


def separate_documents(position_ids: Tensor, batch: int) -> Unpadded | None:  # (B or 1, T)
    """Where documents are that a caller has packed into rows, each with positions of its own; None if there are none,
    or padding them to one length would take more scores than whole rows do."""
    length = position_ids.shape[1]
    is_first = F.pad(position_ids.diff() != 1, (1, 0), value=True).expand(batch, -1)
    starts = is_first.flatten().nonzero()[:, 0]
    lengths = starts.diff(append=starts.new_tensor([batch * length]))
    return Unpadded.of(lengths, batch * length) if len(lengths) * lengths.max() ** 2 < batch * length**2 else None


def is_sparse(real: Tensor) -> bool:
    """Whether so few tokens of a batch are real, if any, that leaving out the others saves more than it costs."""
    count = real.sum()
    return not bool((count == 0) | (count >= 0.9 * real.numel()))


def trim_after_last_target(target_ids: Tensor) -> Tensor | None:  # (B, T)
    """What a causal model has to read for the loss of these targets, as a padding mask: each row up to its last one.
    None stands for nearly everything, or for what a graph cannot know ahead."""
    if is_compiling_or_tracing():
        return None
    needed = (target_ids != -100).flip(-1).cumsum(-1).flip(-1) > 0
    return needed.long() if is_sparse(needed) else None


def varlen_attention(backend: Callable) -> Callable:
    """An attention backend for a `VarlenMask`: FlashAttention's kernel where it runs, or `backend` on texts that are
    padded for it, no wider than the longest."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: VarlenMask, dropout: float = 0.0, **kwargs: Any
    ) -> tuple[Tensor, None]:
        batch, is_fused = len(query), module.config._attn_implementation == "sdpa"
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (B, H, T, d) -> (N, H, d)
        if is_fused and has_varlen_kernel(query, value, dropout):
            key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
            query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
            window = (-1, 0 if mask.is_causal else -1)  # how far back and ahead is looked; -1: to the end
            output: Any = varlen_attn(query, key, value, *mask[:4], scale=kwargs["scaling"], window_size=window)
            return output.unflatten(0, (batch, -1)), None
        texts = len(mask.cu_seqlens_q) - 1
        query = _scatter(query, mask.slots_q, texts, mask.max_seqlen_q).transpose(1, 2)  # (R, H, longest, d)
        key, value = (_scatter(x, mask.slots_k, texts, mask.max_seqlen_k).transpose(1, 2) for x in (key, value))
        output, _ = backend(module, query, key, value, _padding_mask(mask, is_fused), dropout=dropout, **kwargs)
        return output.flatten(0, 1).index_select(0, mask.slots_q).unflatten(0, (batch, -1)), None

    return attend


def has_varlen_kernel(query: Tensor, value: Tensor, dropout: float) -> bool:  # on an NVIDIA GPU from Ampere on
    if not query.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    is_half = compute_dtype(query) in (torch.bfloat16, torch.float16)
    return is_half and dropout == 0.0 and query.shape[-1] == value.shape[-1] in range(8, 257, 8)


def _padding_mask(mask: VarlenMask, is_fused: bool) -> Tensor | None:  # True where a query may look
    device, length = mask.cu_seqlens_k.device, mask.max_seqlen_k
    if mask.is_causal:  # padding comes last, where nobody looks
        return None if is_fused else torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
    # A text without tokens attends to one empty slot rather than to nothing, which would be NaN.
    return torch.arange(length, device=device) < mask.cu_seqlens_k.diff().clamp(min=1)[:, None, None, None]
