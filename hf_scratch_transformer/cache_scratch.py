"""A key-value cache with capacity ahead: `DynamicCache` with less copying.

Shapes: B batch, H heads, S tokens held, d width of a head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .ops_scratch import is_compiling_or_tracing


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, (B, H, S, d) each, as the filled part of tensors with capacity for more: what is
    held already is copied when the capacity is used up, or beams trade places, and not for every new token."""

    buffers: tuple[Tensor, ...] = ()  # of keys and of values, (B, H, capacity, d)
    filled: tuple[Tensor, ...] = ()  # their filled parts, as this layer left them

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Gradients flow through concatenation only, and a graph knows the lengths that it was made for.
        if self.keys is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        past, new = self.keys.shape[-2], key_states.shape[-2]
        if not self.has_capacity(past + new):
            if past == 0 or is_compiling_or_tracing():
                return super().update(key_states, value_states, *args, **kwargs)
            self.allocate(past + new)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, past, new).copy_(states)
        return self.fill(past + new)

    def has_capacity(self, length: int) -> bool:
        """For so many tokens, unless somebody has put other tensors here."""
        if not self.filled or self.keys is not self.filled[0] or self.values is not self.filled[1]:
            return False
        buffer = self.buffers[0]
        return buffer.shape[-2] >= length and buffer.is_inference() == torch.is_inference_mode_enabled()

    def allocate(self, length: int) -> None:
        capacity, held = length + max(64, length // 4), (self.keys, self.values)
        self.buffers = tuple(old.new_empty(*old.shape[:2], capacity, old.shape[-1]) for old in held)
        for buffer, old in zip(self.buffers, held, strict=True):
            buffer.narrow(2, 0, old.shape[-2]).copy_(old)

    def fill(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.filled = tuple(buffer.narrow(2, 0, length) for buffer in self.buffers)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        length = self.get_seq_length()
        if not self.has_capacity(length):
            return super().reorder_cache(beam_idx)
        self.buffers = tuple(buffer.index_select(0, beam_idx.to(buffer.device)) for buffer in self.buffers)
        self.fill(length)


def preallocate(cache: Cache) -> None:
    """Give the layers of a new cache, as `generate` makes it, capacity ahead; others are left as they are."""
    if type(cache) is DynamicCache and not cache.offloading:
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = PreallocatedLayer
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                cache.layers[index] = PreallocatedLayer()
