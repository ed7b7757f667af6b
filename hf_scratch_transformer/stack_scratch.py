"""What the three families share as PreTrainedModels: initialisation, checks of the input, and `encode`, the one way
from tokens to hidden states. Heads are in `heads_scratch`.

Shapes: B batch, T length, S length of an encoder's output, N tokens that are not padding, D width.
"""

import copy
import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging
from transformers.utils.generic import TransformersKwargs
from transformers.utils.output_capturing import OutputRecorder

from .configuration_scratch import NORM_PLACEMENTS, POSITIONS, ScratchConfig, positions_that
from .layers_scratch import (
    RelativePositionBias,
    RotaryPositions,
    ScratchAttention,
    ScratchBlock,
    ScratchEmbeddings,
    make_norm,
)
from .norms_scratch import OnePlus
from .ops_scratch import is_compiling_or_tracing
from .unpadding_scratch import Unpadded, is_sparse, separate_documents, unpadded


class ScratchKwargs(TransformersKwargs, total=False):
    """Arguments that every backbone takes beside those in its signature."""

    token_type_ids: Tensor | None  # (B, T), looked up where `type_vocab_size` says that there are types
    unpad_inputs: bool  # compute nothing for padding, whose states come back as zeros, where there is much of it


class ScratchPreTrainedModel(PreTrainedModel):
    """What transformers asks of every model: capabilities, initialisation, positions that can be resized."""

    config: ScratchConfig
    base_model_prefix = "model"
    # Marks the class as custom code, for which `save_pretrained` copies the source files beside the weights.
    _auto_class = "AutoModel"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ScratchBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Every argument that some model of ours takes, so that misspelt ones are found.
    known_arguments = {*ScratchKwargs.__annotations__, *TransformersKwargs.__annotations__, "return_dict"}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        signature = inspect.signature(cls.forward)
        cls.known_arguments.update(signature.parameters)
        cls.forward.__signature__ = signature  # `generate` asks for it at every token

    def __init__(self, config: ScratchConfig):
        config.validate_architecture()  # again: fields may have been set since it was made
        # Kernels that know no caps or no bias are refused when they are asked for.
        self._supports_sdpa = config.attn_logit_softcapping is None
        if POSITIONS[config.position_embedding_type].is_bias:
            self._supports_flash_attn = self._supports_flex_attn = False
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """
        | parameter              | normal       | normal_zero_output | xavier_uniform |
        | token, position tables | N(0, range)  | N(0, range)        | Xavier         |
        | o_proj, down_proj      | N(0, range)  | 0                  | Xavier         |
        | every other matrix     | N(0, range)  | N(0, range)        | Xavier         |

        Norm scales start as 1; biases, norm shifts and the padding row are 0. `mup_base_width` makes the range smaller
        for matrices in blocks. What writes are the helpers of `transformers.initialization`, which leave alone what a
        checkpoint has filled.
        """
        super()._init_weights(module)
        if isinstance(module, OnePlus):
            init.zeros_(module.weight)
        if self.config.initialization == "xavier_uniform" and isinstance(module, nn.Linear | nn.Embedding):
            init.xavier_uniform_(module.weight)
            padding_idx = getattr(module, "padding_idx", None)
            if padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[padding_idx])
        elif self.config.initialization == "normal_zero_output" and getattr(module, "ends_sublayer", False):
            init.zeros_(module.weight)
        elif self.config.width_ratio != 1.0 and getattr(module, "is_in_block", False):
            init.normal_(module.weight, std=self.config.initializer_range / self.config.width_ratio**0.5)

    def init_parallel_plans(self) -> None:
        # The plans of a configuration name every part that some configuration has: keep what this model has.
        super().init_parallel_plans()
        parts = {re.sub(r"\d+", "*", name) for name, _ in self.named_modules()}
        for plan in (self._tp_plan, self._pp_plan, self._fsdp_plan):
            for absent in plan.keys() - parts:
                del plan[absent]

    def get_position_embeddings(self) -> nn.Module:
        """The learned table of positions; a `ValueError` where there is none."""
        kind = self.config.position_embedding_type
        if not POSITIONS[kind].has_table:
            raise ValueError(f"position_embedding_type={kind!r} has no table, only {positions_that('has_table')} has")
        return self.get_encoder().base_model.embeddings.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Change the longest sequence to `new_num_position_embeddings` tokens: learned tables are cut or grown at the
        end (new rows drawn as at the start), other kinds of positions need no table."""
        if new_num_position_embeddings < 1:
            raise ValueError(f"new_num_position_embeddings={new_num_position_embeddings} must be at least 1")
        self.config.max_position_embeddings = new_num_position_embeddings
        for module in self.modules():
            if isinstance(module, ScratchEmbeddings) and isinstance(old := module.position_embeddings, nn.Embedding):
                rows = new_num_position_embeddings + self.config.position_offset
                new = nn.Embedding(rows, self.config.hidden_size).to(old.weight.device, old.weight.dtype)
                self._init_weights(new)
                kept = min(len(old.weight), len(new.weight))
                new.weight.data[:kept] = old.weight.data[:kept]
                module.position_embeddings = new.requires_grad_(old.weight.requires_grad)


class ScratchStack(ScratchPreTrainedModel):
    """Embeddings, N blocks and, for pre-norm blocks, one more norm: what an encoder and a decoder share."""

    _input_embed_layer = "word_embeddings"
    _can_record_outputs = {
        "hidden_states": ScratchBlock,
        "attentions": OutputRecorder(ScratchAttention, index=1, layer_name="self_attn"),
    }
    depth = "num_hidden_layers"  # the field of the configuration that says how many blocks are run
    kinds = "layer_types"  # and that which says of which kind each is
    preallocate: Callable[[Cache], None]  # what a decoder does with an empty cache

    def __init__(self, config: ScratchConfig, vocab_size: int, is_causal: bool, has_encoder: bool = False):
        super().__init__(config)
        self.is_causal, self.has_encoder = is_causal, has_encoder
        self.positions = POSITIONS[config.position_embedding_type]
        self.embeddings = ScratchEmbeddings(config, vocab_size, has_encoder and config.decoder_embedding_norm_first)
        # Which of the masks each block is given, and which of the rotations, if one.
        self.layer_types, depth = getattr(config, self.kinds), getattr(config, self.depth)
        self.layers = nn.ModuleList(
            ScratchBlock(config, index, is_causal, has_encoder, kind) for index, kind in enumerate(self.layer_types)
        )
        self.norm = make_norm(config) if NORM_PLACEMENTS[config.norm_position].final else None
        turned = getattr(config, "no_rope_layers", None) or [self.positions.is_rotary] * depth
        self.turned_as = [kind if each else None for kind, each in zip(self.layer_types, turned, strict=True)]
        self.rotary = nn.ModuleDict({kind: RotaryPositions(config, kind) for kind in self.turned_as if kind})
        tables = 0 if not self.positions.is_bias else 1 if config.share_relative_attention_bias else depth
        self.position_bias = nn.ModuleList(RelativePositionBias(config, is_causal) for _ in range(tables))
        self.is_fixed = all(each.is_fixed for each in self.rotary.values())
        self.may_be_longer = not self.is_fixed  # than `max_position_embeddings`
        self.gradient_checkpointing = False
        self.post_init()

    def encode(
        self,
        input_ids: Tensor | None,  # (B, T)
        inputs_embeds: Tensor | None,  # (B, T, D), or these
        attention_mask: Any = None,  # (B, past + T), or prepared in full
        position_ids: Tensor | None = None,  # (B or 1, T)
        past_key_values: Cache | None = None,  # to be read and filled
        encoder_hidden_states: Tensor | None = None,  # (B, S, D)
        encoder_attention_mask: Any = None,  # (B, S)
        token_type_ids: Tensor | None = None,
        unpad_inputs: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:  # -> (B, T, D)
        """Checked, embedded, laid out with or without padding, run through the blocks, normalised, and laid out again
        as it came.

        Raises:
            ValueError, TypeError: on what does not fit, with its name and shape.
        """
        cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            cache = past_key_values.self_attention_cache
        past_length = 0 if cache is None else cache.get_seq_length()
        self.check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, cache, past_length, kwargs)
        if encoder_hidden_states is not None and not self.has_encoder:
            raise ValueError(f"encoder_hidden_states: {type(self).__name__} has no cross-attention to read them with")
        if inputs_embeds is None:
            inputs_embeds = self.embeddings.word_embeddings(input_ids)
        batch, length, _ = inputs_embeds.shape

        layout = None
        if cache is None and (encoder_attention_mask is None or is_padding_mask(encoder_attention_mask)):
            layout = self.choose_layout(batch, attention_mask, position_ids, unpad_inputs, kwargs)
        elif cache is not None and isinstance(past_length, int) and past_length == 0:
            self.preallocate(cache)
        if layout is None:
            filled = None if type(cache) is DynamicCache and not past_length else cache  # one that has a say in masks
            masks = self.make_masks(inputs_embeds, attention_mask, position_ids, filled, kwargs)
        if position_ids is None:
            position_ids = self.default_positions(inputs_embeds, attention_mask, past_length)
        hidden_states = self.embeddings(inputs_embeds, position_ids, token_type_ids)
        if layout is not None:
            masks = dict.fromkeys(self.layer_types, layout.mask(self.is_causal))
            hidden_states = layout.unpad(hidden_states)
            position_ids = layout.unpad(position_ids.expand(batch, -1))
        if encoder_hidden_states is not None and layout is not None:
            if encoder_attention_mask is None:
                encoder_attention_mask = encoder_hidden_states.new_ones(encoder_hidden_states.shape[:2])
            encoder_layout = unpadded(encoder_attention_mask)
            encoder_hidden_states = encoder_layout.unpad(encoder_hidden_states)
            encoder_attention_mask = layout.mask(is_causal=False, keys=encoder_layout)
        elif encoder_attention_mask is not None:
            encoder_attention_mask = create_bidirectional_mask(
                self.masking_config(kwargs), inputs_embeds, encoder_attention_mask, encoder_hidden_states
            )

        turns = {kind: rotary(position_ids, hidden_states.dtype) for kind, rotary in self.rotary.items()}
        shared = {
            "encoder_attention_mask": encoder_attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            **kwargs,
        }
        biased, distances, tables = masks, {}, len(self.position_bias)
        if tables:
            distances = {k: self.distances(k, mask, inputs_embeds, past_length, cache) for k, mask in masks.items()}
        # As many as the configuration says, which self-speculative decoding lowers for a while.
        for index, layer in zip(range(getattr(self.config, self.depth)), self.layers, strict=False):
            if index < tables:  # one for all blocks, or one for each
                biased = {kind: self.position_bias[index](distances[kind], masks[kind]) for kind in masks}
            mask, turn = biased[self.layer_types[index]], turns.get(self.turned_as[index])
            # What gradients flow into is passed by position, where reentrant checkpointing looks for it.
            hidden_states = layer(hidden_states, mask, encoder_hidden_states, position_embeddings=turn, **shared)
        if self.norm is not None:
            hidden_states = self.norm(hidden_states)
        return hidden_states if layout is None else layout.pad(hidden_states, batch, length)

    def choose_layout(
        self, batch: int, attention_mask: Any, position_ids: Tensor | None, unpad: bool, kwargs: dict[str, Any]
    ) -> Unpadded | None:
        """How to lay the texts of a batch one after the other, without their padding, or where the documents are that a
        caller has packed. `None` where that is not less work, or cannot be seen ahead: a graph has no room for as many
        tokens as there happen to be."""
        is_padded = unpad and is_padding_mask(attention_mask) and self.is_fixed
        is_packed = attention_mask is None and position_ids is not None and not self.has_encoder
        shows = ("output_attentions", "output_hidden_states")
        is_plain = self.config._attn_implementation in ("eager", "sdpa") and "sliding_attention" not in self.layer_types
        is_shown = any(kwargs.get(name, getattr(self.config, name, False)) for name in shows)
        is_plain &= not self.positions.is_bias
        if not (is_padded or is_packed) or not is_plain or is_shown or is_compiling_or_tracing():
            return None
        if is_packed:
            return separate_documents(position_ids, batch)
        return unpadded(attention_mask) if is_sparse(attention_mask != 0) else None

    def make_masks(
        self, inputs_embeds: Tensor, attention_mask: Any, position_ids: Tensor | None, cache: Cache | None, kwargs: Any
    ) -> dict[str, Any]:
        """The mask of each kind of layer."""
        if isinstance(attention_mask, dict):
            return attention_mask  # as `generate` prepares them for a compiled step
        kinds, length = set(self.layer_types), inputs_embeds.shape[1]
        is_next = type(cache) is DynamicCache and length == 1
        if attention_mask is None and is_next and kinds == {"full_attention"}:
            return {"full_attention": None}  # it sees all before it
        arguments: dict[str, Any] = {
            "config": self.masking_config(kwargs),
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "past_key_values": cache,
        }
        # Only positions that the caller chose: under a compiler their mere presence costs the mask-free kernels.
        if position_ids is not None and attention_mask is None and length > 1:
            documents = find_packed_sequence_indices(position_ids.expand(len(inputs_embeds), -1))
            if documents is not None:
                if cache is not None:  # which has more slots, and does not know the documents of tokens that it holds
                    slots = max(cache.get_mask_sizes(length, index)[0] for index in range(len(self.layers)))
                    documents = F.pad(documents * (cache.get_seq_length() == 0), (0, slots - length))
                arguments["and_mask_function"] = packed_sequence_mask_function(documents)
        # Whole texts need none beside the kernel's own causality, several times as fast: transformers before 5.23 or
        # torch before 2.13 would make one in a compiled graph.
        kernel, is_whole = arguments["config"]._attn_implementation, attention_mask is position_ids is cache is None
        unmasked = "full_attention" if is_whole and kernel == "sdpa" else None
        return {kind: None if kind == unmasked else MASKS[self.is_causal, kind](**arguments) for kind in kinds}

    def distances(
        self, kind: str, mask: Tensor | None, inputs_embeds: Tensor, past_length: int | Tensor, cache: Cache | None
    ) -> Tensor:
        """How far each key that a kind of layer sees is behind each query (T, S); negative if it is ahead."""
        slots, first, device = inputs_embeds.shape[1], 0, inputs_embeds.device
        queries = torch.arange(slots, device=device) + past_length
        if cache is not None:  # has slots that are not filled yet, or has forgotten what was before a window
            slots, first = cache.get_mask_sizes(slots, self.layer_types.index(kind))
        keys = torch.arange(slots if mask is None else mask.shape[-1], device=device) + first
        return queries[:, None] - keys

    def default_positions(self, inputs_embeds: Tensor, attention_mask: Any, past_length: int | Tensor) -> Tensor:
        """0, 1, 2, ... along each row (B or 1, T). Absolute positions count from the first real token, so that padding
        on the left changes nothing; rotary ones need not, since only differences of positions enter attention."""
        length = inputs_embeds.shape[1]
        if self.positions.is_added and is_padding_mask(attention_mask):
            return of_new_tokens((attention_mask.long().cumsum(-1) - 1).clamp(min=0), length, past_length)
        return (torch.arange(length, device=inputs_embeds.device) + past_length)[None]

    def masking_config(self, kwargs: dict[str, Any]) -> ScratchConfig:
        """The configuration to build masks with: that of the formula written out when its weights are asked for, or
        something is added to its scores."""
        is_plain = not kwargs.get("output_attentions") and not self.positions.is_bias
        if is_plain or self.config._attn_implementation == "eager":
            return self.config
        config = copy.copy(self.config)
        config._attn_implementation = "eager"
        return config

    def check_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        cache: Cache | None,
        past_length: int | Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        """Raise a `ValueError` or `TypeError` that names what is wrong, before any matrix is multiplied. Looks at
        names and shapes only, which a compiler evaluates once."""
        model, has_padding_mask = type(self).__name__, is_padding_mask(attention_mask)
        # Unknown names that resemble none pass through, as serving engines and attention backends have their own.
        for name in kwargs:
            if name not in self.known_arguments and (nearest := nearest_argument(name, self.known_arguments)):
                raise TypeError(f"{model} got an unexpected argument {name!r}: did you mean {nearest!r}?")
        # Dropped here, since the attention backends would follow it in every attention, also of a decoder to a source.
        # Beside a mask prepared in full it says nothing: continuous batching says False to decoders then.
        asked, is_causal = kwargs.pop("is_causal", None), self.is_causal
        if asked not in (None, is_causal) and (attention_mask is None or has_padding_mask):
            raise ValueError(
                f"is_causal={asked}: an encoder sees both sides, a decoder one; {model} has is_causal={is_causal}"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds (decoder_input_ids, decoder_inputs_embeds)")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        shape = tuple(tokens.shape)
        if input_ids is not None and (tokens.ndim != 2 or tokens.is_floating_point()):
            raise ValueError(f"input_ids must be integers of shape (batch, length), got {tokens.dtype} {shape}")
        if inputs_embeds is not None and (tokens.ndim != 3 or shape[2] != self.config.hidden_size):
            wanted = f"(batch, length, hidden_size={self.config.hidden_size})"
            raise ValueError(f"inputs_embeds must have shape {wanted}, got {shape}")
        batch, length = shape[:2]
        if has_padding_mask:
            rows, columns = attention_mask.shape
            # A cache may hold more than the tokens given so far: prefixes learned by PEFT, slots not filled yet.
            least = length + (past_length if isinstance(past_length, int) else 0)
            if rows != batch or columns < least or (cache is None and columns != length):
                raise ValueError(f"attention_mask of shape {(rows, columns)} does not fit input of {(batch, least)}")
        if position_ids is not None and position_ids.shape[-1] != length:
            raise ValueError(f"position_ids of shape {tuple(position_ids.shape)} do not fit input of length {length}")
        if type(cache) is StaticCache:
            if isinstance(past_length, Tensor):  # reading it would stall a GPU
                past_length = int(past_length) if past_length.is_cpu and not is_compiling_or_tracing() else 0
            slots, total = [layer.max_cache_len for layer in cache.layers if not layer.is_sliding], past_length + length
            if slots and total > slots[0]:
                raise ValueError(
                    f"past_key_values: {total} tokens do not fit a static cache of max_cache_len={slots[0]}"
                )
        # Packed documents may be longer together than each may be; positions are read only where that matters.
        limit, is_known = self.config.max_position_embeddings, isinstance(past_length, int) and not self.may_be_longer
        is_long = is_known and past_length + length > limit
        if is_long and (position_ids is None or (not torch.compiler.is_compiling() and position_ids.max() >= limit)):
            said = f"input of {past_length + length} tokens is longer than max_position_embeddings={limit}"
            if self.positions.has_table:
                table = "the size of the learned table of positions: truncate, or call resize_position_embeddings"
                raise ValueError(f"{said}, {table}")
            if not is_compiling_or_tracing():
                self.may_be_longer = True  # said once
                logging.get_logger(__name__).warning(f"{said}, for which {model} is meant")


MASKS = {  # by whether attention is causal, and the kind of layer
    (True, "full_attention"): create_causal_mask,
    (True, "sliding_attention"): create_sliding_window_causal_mask,
    (False, "full_attention"): create_bidirectional_mask,
    (False, "sliding_attention"): create_bidirectional_sliding_window_mask,
}


@torch.compiler.assume_constant_result  # a compiler calls it once and does not look inside
def nearest_argument(name: str, known: set[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.85)), None)


def of_new_tokens(values: Tensor, length: int, past_length: int | Tensor) -> Tensor:
    """(B, past + T) -> (B, T), also beside slots of a static cache that are not filled yet."""
    places = slice(None) if values.shape[1] == length else torch.arange(length, device=values.device) + past_length
    return values[:, places]


def is_padding_mask(attention_mask: Any) -> bool:
    """Whether it is a mask (B, T) of real tokens, rather than nothing or a mask that a caller has prepared in full."""
    return isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
