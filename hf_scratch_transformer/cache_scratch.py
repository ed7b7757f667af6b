"""A key-value cache with capacity ahead: `DynamicCache` with less copying."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .ops_scratch import is_compiling_or_tracing, is_transformed

BLOCK = 16  # tokens by which capacity grows: each time all is copied, as a dynamic cache does for every token
FEW = 2**15  # entries of the keys, below which copying them takes less time than writing into a slice


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, (B, heads, S, d) each, as the filled part of tensors with capacity for more: what
    is held already is copied when the capacity is used up, or beams trade places, and not for every new token."""

    buffers: Any = (None, None)  # of keys and of values, (B, heads, capacity, d)
    filled: Any = (None, None, None)  # which layer filled them (a copy is another), and their filled parts

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Gradients and transforms follow concatenation only, which also knows what to do with other types and shapes.
        held = self.keys
        is_alike = held is not None and held.shape[:2] == key_states.shape[:2] and held.dtype == key_states.dtype
        is_few = self.buffers[0] is None and (held is None or held.numel() < FEW)
        if not is_alike or is_few or torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
            self.buffers, self.filled = PreallocatedLayer.buffers, PreallocatedLayer.filled
            return super().update(key_states, value_states, *args, **kwargs)
        length = held.shape[-2] + key_states.shape[-2]
        if not self.has_capacity(length):
            self.buffers = self.allocate(held, length), self.allocate(self.values, length)
        keys, values = self.buffers
        keys[:, :, held.shape[-2] : length], values[:, :, held.shape[-2] : length] = key_states, value_states
        return self.fill(length)

    def has_capacity(self, length: int) -> bool:
        """For so many tokens, unless somebody has put other tensors here, or copied this layer."""
        layer, keys, values = self.filled
        is_ours, buffer = layer == id(self) and self.keys is keys and self.values is values, self.buffers[0]
        return is_ours and buffer.shape[-2] >= length and buffer.is_inference() == torch.is_inference_mode_enabled()

    def allocate(self, held: Tensor, length: int) -> Tensor:
        return F.pad(held, (0, 0, 0, -(-length // BLOCK) * BLOCK - held.shape[-2]))

    def fill(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        self.filled = id(self), self.keys, self.values
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        length = self.get_seq_length()
        if not self.has_capacity(length):
            return super().reorder_cache(beam_idx)
        self.buffers = tuple(buffer.index_select(0, beam_idx.to(buffer.device)) for buffer in self.buffers)
        self.fill(length)


def preallocate(cache: Cache) -> None:
    """Give the layers of a new cache, as `generate` makes it, capacity ahead; others are left as they are."""
    if type(cache) is DynamicCache and not cache.offloading and not is_compiling_or_tracing():
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = PreallocatedLayer
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                cache.layers[index] = PreallocatedLayer()
