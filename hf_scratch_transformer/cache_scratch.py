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

    buffers: Any = (None, None)  # of keys and of values, (B, H, capacity, d)
    filled: Any = (None, None)  # their filled parts, as this layer left them

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Gradients flow through concatenation only, and a graph knows the lengths that it was made for.
        held = self.keys
        if held is None or not held.numel() or torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        past = held.shape[-2]
        length = past + key_states.shape[-2]
        if not self.has_capacity(length):
            self.buffers = self.allocate(held, length), self.allocate(self.values, length)
        keys, values = self.buffers
        keys[:, :, past:length], values[:, :, past:length] = key_states, value_states
        return self.fill(length)

    def has_capacity(self, length: int) -> bool:
        """For so many tokens, unless somebody has put other tensors here."""
        keys, values = self.filled
        return (
            keys is self.keys is not None
            and values is self.values
            and self.buffers[0].shape[-2] >= length
            and self.buffers[0].is_inference() == torch.is_inference_mode_enabled()
        )

    def allocate(self, held: Tensor, length: int) -> Tensor:
        capacity = length + max(16, length // 4)
        buffer = held.new_empty(*held.shape[:2], capacity, held.shape[-1])
        buffer[:, :, : held.shape[-2]] = held
        return buffer

    def fill(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers
        self.keys, self.values = self.filled = keys[:, :, :length], values[:, :, :length]
        return self.filled

    def reorder_cache(self, beam_idx: Tensor) -> None:
        length = self.get_seq_length()
        if not self.has_capacity(length):
            return super().reorder_cache(beam_idx)
        beam_idx = beam_idx.to(self.keys.device)
        self.buffers = tuple(buffer.index_select(0, beam_idx) for buffer in self.buffers)
        self.fill(length)


def preallocate(cache: Cache) -> None:
    """Give the layers of a new cache, as `generate` makes it, capacity ahead; others are left as they are."""
    if type(cache) is DynamicCache and not cache.offloading and not is_compiling_or_tracing():
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = PreallocatedLayer
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                cache.layers[index] = PreallocatedLayer()
