"""One block, two stacks, three backbones: everything that turns tokens into hidden states. Heads are in
`heads_scratch`.

Shapes: B batch, T length of the queries, S length of the source, H heads, D width.

ScratchBlock                               self-attention, attention to a source if there is one, feed-forward: each
                                           inside a residual connection
ScratchEncoderModel, ScratchDecoderModel   embeddings, N blocks, a norm
ScratchSeq2SeqModel                        one of each; the decoder attends to the encoder's output
"""

import copy
import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPooling,
    Seq2SeqModelOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_scratch import ScratchConfig, ScratchDecoderConfig, ScratchEncoderConfig, ScratchSeq2SeqConfig
from .kernels_scratch import Packing, attention_end_to_end, has_varlen_kernel, is_watched, project, with_room
from .layers_scratch import (
    FEED_FORWARDS,
    NORMS,
    POOLERS,
    RESIDUALS,
    RotaryPositions,
    SinusoidalPositions,
    attention,
    ends_sublayer,
    repeat_heads,
    rotate,
)

if TYPE_CHECKING:  # never run: a backbone is saved beside the files that it imports, and `auto_map` names this one too
    from .heads_scratch import ScratchLanguageModel as ScratchLanguageModel


class ScratchAttention(nn.Module):
    """Multi-head attention (section 3.2.2 of the paper): over `hidden_states` themselves, or over a `source`."""

    def __init__(self, config: ScratchConfig, layer_idx: int, is_causal: bool):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx  # which layer of the cache holds its keys and values
        self.is_causal = is_causal
        self.head_dim, self.value_head_dim = config.head_dim, config.value_head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        width, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        output_bias = config.attention_bias if config.attention_output_bias is None else config.attention_output_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, groups * self.value_head_dim, bias=config.attention_bias)
        self.o_proj = ends_sublayer(nn.Linear(heads * self.value_head_dim, width, bias=output_bias))
        norm = NORMS["rms_norm"] if config.use_qk_norm else nn.Identity
        self.q_norm = norm(self.head_dim, eps=config.layer_norm_eps)
        self.k_norm = norm(self.head_dim, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        source: Tensor | None = None,  # (B, S, D)
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        packing: Packing | None = None,
        source_packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output (B, T, D) and the weights (B, H, T, T or S), `None` from the backends that never form
        them. Where texts are laid end to end, the mask is for them side by side."""
        query = self.q_norm(project(self.q_proj, hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        if source is None:
            key, value = self.keys_and_values(hidden_states)
            if position_embeddings is not None:
                query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            if past_key_values is not None:
                key, value = past_key_values.update(key, value, self.layer_idx)
        else:
            key, value = self.source_keys_and_values(source, past_key_values)

        dropout = self.config.attention_dropout if self.training else 0.0
        if packing is not None:
            of_keys = packing if source is None else source_packing
            if self.config._attn_implementation == "sdpa" and has_varlen_kernel(query, value, dropout):
                key, value = (repeat_heads(x, self.num_key_value_groups) for x in (key, value))
                output = attention_end_to_end(query, key, value, packing, of_keys, self.is_causal, self.scaling)
                return self.o_proj(output.flatten(2)), None
            query, key, value = packing.side_by_side(query), of_keys.side_by_side(key), of_keys.side_by_side(value)
        # Only the formula written out can show its weights, whichever backend the configuration names.
        implementation = "eager" if kwargs.get("output_attentions") else self.config._attn_implementation
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, attention)
        output, weights = attention_interface(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        if packing is not None:
            output = packing.end_to_end(output, len(hidden_states))
        # Backends of serving engines return (tokens, H · d_v), whatever the shape they were given.
        return project(self.o_proj, output.reshape(*hidden_states.shape[:-1], -1)), weights

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:  # (B, S, D) -> (B, H/groups, S, d_k and d_v)
        key = self.k_norm(project(self.k_proj, states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return key, project(self.v_proj, states).unflatten(-1, (-1, self.value_head_dim)).transpose(1, 2)

    def source_keys_and_values(self, source: Tensor, past_key_values: Cache | None) -> tuple[Tensor, Tensor]:
        """The source does not change while its translation grows: its keys and values are computed once."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self.keys_and_values(source)
        cache = past_key_values.cross_attention_cache
        if not past_key_values.is_updated.get(self.layer_idx):
            past_key_values.is_updated[self.layer_idx] = True
            return cache.update(*self.keys_and_values(source), self.layer_idx)
        return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values


class ScratchBlock(GradientCheckpointingLayer):
    """One layer of either stack (figure 1 of the paper): two sub-layers in the encoder, three beside a source."""

    def __init__(self, config: ScratchConfig, layer_idx: int, is_causal: bool, has_source: bool = False):
        super().__init__()
        self.self_attn = ScratchAttention(config, layer_idx, is_causal)
        self.self_attn_norm = make_norm(config)
        self.cross_attn = ScratchAttention(config, layer_idx, is_causal=False) if has_source else None
        self.cross_attn_norm = make_norm(config) if has_source else None
        feed_forward, activation = FEED_FORWARDS[config.hidden_act]
        self.mlp = feed_forward(
            config.hidden_size, config.intermediate_size, activation, config.mlp_bias, config.activation_dropout
        )
        self.mlp_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.residual = RESIDUALS[config.norm_position]

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,  # (B, S, D)
        encoder_attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.self_attn(x, None, attention_mask, position_embeddings, past_key_values, **kwargs)[0]

        def attend_to_source(x: Tensor) -> Tensor:
            return self.cross_attn(x, encoder_hidden_states, encoder_attention_mask, None, past_key_values, **kwargs)[0]

        hidden_states = self.residual(hidden_states, attend, self.self_attn_norm, self.dropout)
        if encoder_hidden_states is not None:
            hidden_states = self.residual(hidden_states, attend_to_source, self.cross_attn_norm, self.dropout)
        return self.residual(hidden_states, self.mlp, self.mlp_norm, self.dropout)


def make_norm(config: ScratchConfig) -> nn.Module:
    return NORMS[config.norm_type](config.hidden_size, eps=config.layer_norm_eps)


class ScratchEmbeddings(nn.Module):
    """A vector for each token (section 3.4 of the paper), plus one for its position unless attention is told of it,
    plus one for its type if there are types."""

    def __init__(self, config: ScratchConfig, vocab_size: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
        self.position_embeddings: nn.Module | None = None
        if config.position_embedding_type == "learned":
            rows = config.max_position_embeddings + config.position_offset
            self.position_embeddings = nn.Embedding(rows, config.hidden_size)
        elif config.position_embedding_type in ("sinusoidal", "sinusoidal_halves"):
            in_halves = config.position_embedding_type == "sinusoidal_halves"
            self.position_embeddings = SinusoidalPositions(config.hidden_size, in_halves)
        self.position_offset = config.position_offset
        types = getattr(config, "type_vocab_size", 0)  # a translator has none
        self.token_type_embeddings = nn.Embedding(types, config.hidden_size) if types else None
        self.norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        inputs_embeds: Tensor,  # (B, T, D)
        position_ids: Tensor,  # (B or 1, T)
        token_type_ids: Tensor | None = None,  # (B, T); default: all of type 0
    ) -> Tensor:  # -> (B, T, D)
        embeddings = inputs_embeds if self.scale == 1.0 else inputs_embeds * self.scale
        if self.position_embeddings is not None:
            positions = self.position_embeddings(position_ids + self.position_offset)
            embeddings = embeddings + positions.to(embeddings.dtype)
        if self.token_type_embeddings is not None:
            types = torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids
            embeddings = embeddings + self.token_type_embeddings(types)
        return self.dropout(self.norm(embeddings))


class ScratchPooler(nn.Module):
    """One vector for a whole text, from the state of its first token: BERT's pooler, DistilBERT's pre-classifier."""

    def __init__(self, config: ScratchEncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = POOLERS[config.pooler_act]

    def forward(self, vectors: Tensor) -> Tensor:  # (B, D) -> (B, D)
        return self.activation(self.dense(vectors))


# Every argument that a model of ours knows; see `refuse_misspelt`.
FORWARD_ARGUMENTS = {*TransformersKwargs.__annotations__, "token_type_ids", "return_dict"}


def scaled_rotary(config: ScratchConfig, position_ids: Tensor) -> tuple[Tensor, float]:  # -> (D/2,), factor
    """Rotary frequencies of a stretched context, by transformers' own functions: linear, dynamic, yarn, llama3, ..."""
    function = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
    return function(config, position_ids.device, seq_len=position_ids.max() + 1)


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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        signature = inspect.signature(cls.forward)
        FORWARD_ARGUMENTS.update(signature.parameters)
        cls.forward.__signature__ = signature  # `generate` asks for it at every token

    def __init__(self, config: ScratchConfig):
        config.validate_architecture()  # again: fields may have been set since it was made
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """
        | parameter              | normal       | normal_zero_output | xavier_uniform |
        | token, position tables | N(0, range)  | N(0, range)        | Xavier         |
        | o_proj, down_proj      | N(0, range)  | 0                  | Xavier         |
        | every other matrix     | N(0, range)  | N(0, range)        | Xavier         |

        Norm scales are 1; biases, norm shifts and the padding row are 0. What writes are the helpers of
        `transformers.initialization`, which leave alone what a checkpoint has filled.
        """
        super()._init_weights(module)
        if self.config.initialization == "xavier_uniform" and isinstance(module, nn.Linear | nn.Embedding):
            init.xavier_uniform_(module.weight)
            padding_idx = getattr(module, "padding_idx", None)
            if padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[padding_idx])
        elif self.config.initialization == "normal_zero_output" and getattr(module, "ends_sublayer", False):
            init.zeros_(module.weight)

    def init_parallel_plans(self) -> None:
        # The plans of a configuration name every part that some configuration has: keep what this model has.
        super().init_parallel_plans()
        parts = {re.sub(r"\d+", "*", name) for name, _ in self.named_modules()}
        for plan in (self._tp_plan, self._pp_plan, self._fsdp_plan):
            for absent in plan.keys() - parts:
                del plan[absent]

    def get_position_embeddings(self) -> nn.Module:
        """The learned table of positions.

        Raises:
            ValueError: if positions are not learned.
        """
        if self.config.position_embedding_type != "learned":
            raise ValueError(
                f"position_embedding_type={self.config.position_embedding_type!r} has no table; only 'learned' has one"
            )
        return self.get_encoder().base_model.embeddings.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Change the longest sequence to `new_num_position_embeddings` tokens: learned tables are cut or grown at the
        end (new rows drawn as at the start), other kinds of positions need no table."""
        if new_num_position_embeddings < 1:
            raise ValueError(f"new_num_position_embeddings={new_num_position_embeddings} must be at least 1")
        self.config.max_position_embeddings = new_num_position_embeddings
        for module in self.modules():
            if isinstance(module, ScratchEmbeddings) and isinstance(module.position_embeddings, nn.Embedding):
                old = module.position_embeddings
                rows = new_num_position_embeddings + self.config.position_offset
                new = nn.Embedding(rows, self.config.hidden_size)
                new = new.to(old.weight.device, old.weight.dtype)
                self._init_weights(new)
                kept = min(len(old.weight), len(new.weight))
                new.weight.data[:kept] = old.weight.data[:kept]
                module.position_embeddings = new.requires_grad_(old.weight.requires_grad)


class ScratchStack(ScratchPreTrainedModel):
    """Embeddings, N blocks and, for pre-norm blocks, one more norm: what the encoder and the decoder share."""

    _input_embed_layer = "word_embeddings"
    _can_record_outputs = {
        "hidden_states": ScratchBlock,
        "attentions": OutputRecorder(ScratchAttention, index=1, layer_name="self_attn"),
    }

    def __init__(self, config: ScratchConfig, vocab_size: int, depth: int, is_causal: bool, has_source: bool = False):
        super().__init__(config)
        self.is_causal, self.has_source = is_causal, has_source
        self.embeddings = ScratchEmbeddings(config, vocab_size)
        self.layers = nn.ModuleList(ScratchBlock(config, index, is_causal, has_source) for index in range(depth))
        self.norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.rotary = None
        if config.position_embedding_type == "rotary":
            rope = config.rope_parameters
            scaled = functools.partial(scaled_rotary, config) if rope["rope_type"] != "default" else None
            self.rotary = RotaryPositions(config.head_dim, rope["rope_theta"], scaled)
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:  # -> (B, T, D)
        return self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds

    def run(
        self,
        inputs_embeds: Tensor,
        attention_mask: Any,
        position_ids: Tensor,
        encoder_hidden_states: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        packing: Packing | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:  # -> (B, T, D)
        hidden_states = self.embeddings(inputs_embeds, position_ids, token_type_ids)
        batch, length = hidden_states.shape[:2]
        if packing is not None:
            hidden_states = packing.drop_padding(hidden_states)
            position_ids = packing.drop_padding(position_ids.expand(batch, -1))
        position_embeddings = self.rotary(position_ids, hidden_states.dtype) if self.rotary is not None else None
        for layer in self.layers:
            # What gradients flow into is passed by position, where reentrant checkpointing looks for it.
            hidden_states = layer(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                packing=packing,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        return hidden_states if packing is None else packing.restore_padding(hidden_states, batch, length)

    def pack(
        self,
        inputs_embeds: Tensor,
        attention_mask: Any,
        position_ids: Tensor | None,
        skip_padding: bool,
        kwargs: dict[str, Any],
    ) -> Packing | None:
        """How to lay the texts of a batch end to end, without their padding, or where the documents are that a caller
        has packed. `None` where that is not less work, or cannot be seen ahead: a graph has no room for as many tokens
        as there happen to be."""
        shows = ("output_attentions", "output_hidden_states")
        if (
            is_watched()
            or self.config._attn_implementation not in ("eager", "sdpa")
            or any(kwargs.get(name, getattr(self.config, name, False)) for name in shows)
        ):
            return None
        if skip_padding and is_padding_mask(attention_mask):
            real = attention_mask != 0
            return Packing.of_real(real) if is_sparse(real) else None
        if attention_mask is not None or position_ids is None or self.has_source:
            return None
        batch, length = inputs_embeds.shape[:2]
        documents = find_packed_sequence_indices(position_ids.expand(batch, -1))
        if documents is None:
            return None
        documents = documents + torch.arange(batch, device=documents.device)[:, None] * length
        lengths = documents.flatten().unique_consecutive(return_counts=True)[1]
        side_by_side = len(lengths) * lengths.max() ** 2  # scores, and so many in whole rows
        return Packing.of(lengths) if side_by_side < batch * length**2 else None

    def default_positions(self, inputs_embeds: Tensor, attention_mask: Any, past_length: int | Tensor) -> Tensor:
        """0, 1, 2, ... along each row (B or 1, T). Absolute positions count from the first real token, so that padding
        on the left changes nothing; rotary ones need not, since only differences of positions enter attention."""
        length = inputs_embeds.shape[1]
        if self.embeddings.position_embeddings is not None and is_padding_mask(attention_mask):
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        return (torch.arange(length, device=inputs_embeds.device) + past_length)[None]

    def masking_config(self, kwargs: dict[str, Any]) -> ScratchConfig:
        """The configuration to build masks with: that of the formula written out when its weights are asked for."""
        if not kwargs.get("output_attentions") or self.config._attn_implementation == "eager":
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
        past_key_values: Cache | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Raise a `ValueError` or `TypeError` that names what is wrong, before any matrix is multiplied. Looks at
        names and shapes only, which a compiler evaluates once."""
        refuse_misspelt(type(self).__name__, kwargs)
        # Dropped here, since the attention backends would follow it in every attention, also of a decoder to a source.
        is_causal = kwargs.pop("is_causal", None)
        # Beside a mask prepared in full it says nothing: continuous batching says False to decoders then.
        is_prepared = attention_mask is not None and not is_padding_mask(attention_mask)
        if is_causal not in (None, self.is_causal) and not is_prepared:
            raise ValueError(
                f"is_causal={is_causal}: an encoder sees both sides, a decoder one; {type(self).__name__} has "
                f"is_causal={self.is_causal}"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "give exactly one of input_ids and inputs_embeds (decoder_input_ids, decoder_inputs_embeds)"
            )
        if input_ids is not None and (input_ids.ndim != 2 or input_ids.is_floating_point()):
            raise ValueError(
                f"input_ids must be integers of shape (batch, length), got {input_ids.dtype} {tuple(input_ids.shape)}"
            )
        if inputs_embeds is not None and (
            inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size
        ):
            raise ValueError(
                f"inputs_embeds must have shape (batch, length, hidden_size={self.config.hidden_size}), "
                f"got {tuple(inputs_embeds.shape)}"
            )
        batch, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        if is_padding_mask(attention_mask):
            # A cache may hold more than the tokens given so far: prefixes learned by PEFT, slots not filled yet.
            too_short = attention_mask.shape[1] < length
            if (
                attention_mask.shape[0] != batch
                or too_short
                or (past_key_values is None and attention_mask.shape[1] != length)
            ):
                raise ValueError(
                    f"attention_mask of shape {tuple(attention_mask.shape)} does not fit input of {(batch, length)}"
                )
        if position_ids is not None and position_ids.shape[-1] != length:
            raise ValueError(f"position_ids of shape {tuple(position_ids.shape)} do not fit input of length {length}")
        limit = self.config.max_position_embeddings
        # The length held by a static cache is a tensor; reading it would stall a GPU.
        if (
            self.config.position_embedding_type == "learned"
            and isinstance(past_length, int)
            and past_length + length > limit
            # Packed documents may be longer together than each may be; positions are read only where that matters.
            and (position_ids is None or (not torch.compiler.is_compiling() and position_ids.max() >= limit))
        ):
            raise ValueError(
                f"input of {past_length + length} tokens is longer than max_position_embeddings={limit}, the size of "
                "the learned table of positions: truncate, or call resize_position_embeddings"
            )


def refuse_misspelt(model: str, arguments: dict[str, Any]) -> None:
    """`TypeError` for a near-miss of an argument of any forward here. Other unknown names pass through, as serving
    engines and attention backends have their own."""
    for name in arguments:
        if name not in FORWARD_ARGUMENTS and (nearest := nearest_argument(name)):
            raise TypeError(f"{model} got an unexpected argument {name!r}: did you mean {nearest!r}?")


@torch.compiler.assume_constant_result  # a compiler calls it once and does not look inside
def nearest_argument(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name, FORWARD_ARGUMENTS, n=1, cutoff=0.85)), None)


def first_token(hidden_states: Tensor, attention_mask: Any) -> Tensor:  # (..., T, D) -> (..., D)
    """The state of the first token of each text, [CLS]: the first real one, also behind padding on the left."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != hidden_states.ndim - 1:
        return hidden_states[..., 0, :]
    index = attention_mask.long().argmax(-1)[..., None, None]  # (..., 1, 1)
    index = index.expand(*index.shape[:-1], hidden_states.shape[-1])
    return hidden_states.gather(-2, index).squeeze(-2)


def is_sparse(real: Tensor) -> bool:
    """Whether so few tokens of a batch are real, if any, that leaving out the others saves more than it costs."""
    count = real.sum()
    return not bool((count == 0) | (count >= 0.9 * real.numel()))


def is_padding_mask(attention_mask: Any) -> bool:
    """Whether it is a mask (B, T) of real tokens, rather than nothing or a mask that a caller has prepared in full."""
    return isinstance(attention_mask, Tensor) and attention_mask.ndim == 2


class ScratchEncoderModel(ScratchStack):
    """A stack of bidirectional blocks: a contextual embedding for each token (BERT, Devlin et al., 2019)."""

    config: ScratchEncoderConfig

    def __init__(self, config: ScratchEncoderConfig | ScratchSeq2SeqConfig, is_pooled: bool = True):
        """`is_pooled`: with the pooler that the configuration may name; heads that look at single tokens have none."""
        super().__init__(config, config.vocab_size, config.num_hidden_layers, is_causal=False)
        self.pooler = ScratchPooler(config) if is_pooled and config.pooler_act else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        skip_padding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput | BaseModelOutputWithPooling:
        """
        Args:
            input_ids: tokens (B, T), or `inputs_embeds` (B, T, D) in their stead.
            attention_mask: 1 for real tokens, 0 for padding (B, T); or a prepared mask (B, 1, T, T).
            position_ids: (B, T). Where they start again, and no mask is given, a new document starts: packed documents
                do not see each other.
            skip_padding: compute nothing for padding, whose states come back as zeros, where there is much of it. What
                stands at real tokens is the same.

        `token_type_ids` (B, T) are looked up where `type_vocab_size` says that there are types, and ignored elsewhere.

        Returns:
            `last_hidden_state` (B, T, D); with a pooler also `pooler_output` (B, D).

        Raises:
            ValueError, TypeError: on what does not fit, with its name and shape.
        """
        self.check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, None, kwargs)
        inputs_embeds = self.embed(input_ids, inputs_embeds)
        packing = self.pack(inputs_embeds, attention_mask, position_ids, skip_padding, kwargs)
        documents = None
        if position_ids is None:
            position_ids = self.default_positions(inputs_embeds, attention_mask, 0)
        elif attention_mask is None and packing is None:
            documents = find_packed_sequence_indices(position_ids.expand(inputs_embeds.shape[0], -1))
        if packing is not None:
            mask = packing.mask()
        else:
            mask = create_bidirectional_mask(
                config=self.masking_config(kwargs),
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                and_mask_function=packed_sequence_mask_function(documents) if documents is not None else None,
            )
        hidden_states = self.run(inputs_embeds, mask, position_ids, packing=packing, **kwargs)
        if self.pooler is None:
            return BaseModelOutput(last_hidden_state=hidden_states)
        pooler_output = self.pooler(first_token(hidden_states, attention_mask))
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooler_output)


class ScratchDecoderModel(ScratchStack):
    """A stack of causal blocks: each token sees those before it (GPT, Radford et al., 2018)."""

    config: ScratchDecoderConfig

    def __init__(self, config: ScratchDecoderConfig):
        super().__init__(config, config.vocab_size, config.num_hidden_layers, is_causal=True)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        skip_padding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: the new tokens (B, T), or `inputs_embeds` (B, T, D) in their stead.
            attention_mask: 1 for real tokens, 0 for padding, of those in the cache and the new ones (B, past + T).
            position_ids: (B, T). Where they start again, and neither mask nor cache is given, a new document starts:
                packed documents do not see each other.
            past_key_values: keys and values of earlier tokens.
            use_cache: return such a cache.
            skip_padding: as `ScratchEncoderModel.forward`; a cache is in the way of it.

        Raises:
            ValueError, TypeError: on what does not fit, with its name and shape.
        """
        self.check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, kwargs)
        skip_padding = skip_padding and not use_cache
        inputs_embeds, mask, position_ids, packing = self.prepare(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, skip_padding, kwargs
        )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            with_room(past_key_values)
        hidden_states = self.run(
            inputs_embeds, mask, position_ids, packing=packing, past_key_values=past_key_values, **kwargs
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def prepare(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        skip_padding: bool,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Any, Tensor, Packing | None]:
        """Embeddings, causal mask, positions, and how texts are laid end to end, if they are. Called before an empty
        cache is made, which would hide from the mask that documents are packed; and the mask is told of positions only
        if the caller chose them, since under a compiler their mere presence costs the mask-free kernels."""
        inputs_embeds = self.embed(input_ids, inputs_embeds)
        packing = None
        if past_key_values is None:
            packing = self.pack(inputs_embeds, attention_mask, position_ids, skip_padding, kwargs)
        if packing is not None:
            # Padding comes last now, where causal attention never looks, and the kernels know what causal is.
            mask = packing.causal_mask() if self.config._attn_implementation == "eager" else None
        else:
            mask = create_causal_mask(
                config=self.masking_config(kwargs),
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        if position_ids is None:
            past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = self.default_positions(inputs_embeds, attention_mask, past_length)
        return inputs_embeds, mask, position_ids, packing


class ScratchSeq2SeqDecoder(ScratchDecoderModel):
    """The decoder of a translator: causal blocks that also attend to the encoder's output."""

    config: ScratchSeq2SeqConfig
    _can_record_outputs = {
        **ScratchStack._can_record_outputs,
        "cross_attentions": OutputRecorder(ScratchAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: ScratchSeq2SeqConfig):
        ScratchStack.__init__(
            self, config, config.decoder_vocab_size, config.decoder_layers, is_causal=True, has_source=True
        )

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,  # (B, S, D)
        encoder_attention_mask: Tensor | None = None,  # (B, S)
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        skip_padding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """As `ScratchDecoderModel.forward`, with the encoder's output and its padding mask."""
        self.check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, kwargs)
        own_cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            own_cache = past_key_values.self_attention_cache
        skip_padding = skip_padding and not use_cache
        inputs_embeds, mask, position_ids, packing = self.prepare(
            input_ids, inputs_embeds, attention_mask, position_ids, own_cache, skip_padding, kwargs
        )
        source_packing = None
        if packing is not None and encoder_hidden_states is not None:
            if encoder_attention_mask is None:
                encoder_attention_mask = encoder_hidden_states.new_ones(encoder_hidden_states.shape[:2])
            source_packing = Packing.of_real(encoder_attention_mask != 0)
            encoder_hidden_states = source_packing.drop_padding(encoder_hidden_states)
            encoder_attention_mask = source_packing.mask()
        elif encoder_hidden_states is not None:
            encoder_attention_mask = create_bidirectional_mask(
                config=self.masking_config(kwargs),
                inputs_embeds=inputs_embeds,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if isinstance(past_key_values, EncoderDecoderCache):
            with_room(past_key_values.self_attention_cache)
        hidden_states = self.run(
            inputs_embeds,
            mask,
            position_ids,
            encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            packing=packing,
            source_packing=source_packing,
            past_key_values=past_key_values,
            **kwargs,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )


class ScratchSeq2SeqModel(ScratchPreTrainedModel):
    """Encoder and decoder, as in figure 1 of the paper. The two lengths differ freely."""

    config: ScratchSeq2SeqConfig
    _tied_weights_keys = {
        "decoder.embeddings.word_embeddings.weight": "encoder.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: ScratchSeq2SeqConfig):
        super().__init__(config)
        self.encoder = ScratchEncoderModel(config, is_pooled=False)
        self.decoder = ScratchSeq2SeqDecoder(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # transformers ties nothing once the head is untied; here the two token tables have a field of their own.
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys) if self.config.share_encoder_decoder_embeddings else {}

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.set_input_embeddings(value)
        if self.config.share_encoder_decoder_embeddings:
            self.decoder.set_input_embeddings(value)

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        table = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.config.vocab_size = table.num_embeddings  # transformers sets that of `get_text_config()`, maybe a copy
        return table

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """
        Args:
            input_ids, attention_mask, inputs_embeds: the source, (B, S), (B, S), (B, S, D).
            decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds: the target so far, (B, T), (B, T), (B, T,
            D).
            encoder_outputs: the encoder's output, if it has run before.
            past_key_values: an `EncoderDecoderCache` of earlier target tokens.
        """
        source = input_ids if inputs_embeds is None else inputs_embeds
        source = source if encoder_outputs is None else encoder_outputs[0]
        target = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if source is not None and target is not None and source.shape[0] != target.shape[0]:
            sizes = f"{source.shape[0]} sources do not fit {target.shape[0]} targets"
            raise ValueError(f"{sizes} (decoder_input_ids or labels)")
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        else:
            is_output = isinstance(encoder_outputs, BaseModelOutput)
            encoded = encoder_outputs if is_output else BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


__all__ = ["ScratchPreTrainedModel", "ScratchEncoderModel", "ScratchDecoderModel", "ScratchSeq2SeqModel"]
