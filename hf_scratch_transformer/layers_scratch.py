"""The bricks, bottom up: positions, attention, feed-forward, embeddings, and the block that they make.

Shapes: B batch, T length of the queries, S length of the keys and values, H heads, D width, F feed-forward width.
"""

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import TransformersKwargs

from .configuration_scratch import (
    ACTIVATIONS,
    NORM_PLACEMENTS,
    NORMS,
    POOLERS,
    POSITIONS,
    ScratchConfig,
    rotary_dim,
)
from .ops_scratch import RMSNorm
from .unpadding_scratch import VarlenMask, varlen_attention

# --- Positions --------------------------------------------------------------------------------------------------------


class SinusoidalPositions(nn.Module):
    """The fixed positions of "Attention Is All You Need", section 3.5.

    `PE[pos, 2i] = sin(pos / 10000^(2i/D))` and `PE[pos, 2i+1] = cos(pos / 10000^(2i/D))`; an odd `D` drops the last
    cosine. `in_halves` puts all sines before all cosines, as Marian does; with `is_inclusive` the last exponent is 1,
    as in tensor2tensor. Computed when asked for: there is no table that could be too short, or be lost on the meta
    device.
    """

    def __init__(self, dim: int, in_halves: bool = False, is_inclusive: bool = False):
        super().__init__()
        self.dim, self.in_halves = dim, in_halves
        self.last = dim - 2 if is_inclusive else dim

    def forward(self, position_ids: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        # At position 1000 an angle in single precision is off by 6e-5; Apple's GPUs have no other.
        dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
        exponents = torch.arange(0, self.dim, 2, device=position_ids.device, dtype=dtype) / self.last
        angles = position_ids[..., None] / 10000**exponents  # (B, T, D/2)
        waves = angles.sin(), angles.cos()
        table = torch.cat(waves, dim=-1) if self.in_halves else torch.stack(waves, dim=-1).flatten(-2)
        return table[..., : self.dim].float()


class RotaryPositions(nn.Module):
    """Angles that turn queries and keys by their position (RoFormer, Su et al., 2021), in Llama's layout: entry `i` is
    turned together with entry `i + D/2`, by `position / theta^(2i/D)`, where D is that part of a head which is turned.
    Returns cosines, and sines that are negated in the first half. Stretched contexts (linear, dynamic, yarn, llama3,
    ...) have transformers' own frequencies. Blocks of the kind `layer_type` may have some of their own.
    """

    def __init__(self, config: ScratchConfig, layer_type: str = "full_attention"):
        super().__init__()
        self.config, every = config, config.rope_parameters
        self.rope, self.nested = every.get(layer_type, every), {"layer_type": layer_type} if layer_type in every else {}
        self.dim = rotary_dim(config.head_dim, self.rope)
        self.is_fixed = self.rope["rope_type"] not in ("dynamic", "longrope")  # whatever the length

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # (B, T) -> 2 × (B, 1, T, D)
        inv_freq, scaling = self.frequencies(position_ids)
        # Negated here and not at the end: what a compiler puts together, it works out twice.
        angles = position_ids[:, None, :, None].float() * torch.cat((-inv_freq, inv_freq))  # (B, 1, T, D)
        cos, sin = angles.cos(), angles.sin()
        if scaling != 1.0:
            cos, sin = cos * scaling, sin * scaling
        return cos.to(dtype), sin.to(dtype)

    def frequencies(self, position_ids: Tensor) -> tuple[Tensor, float]:  # -> (D/2,), a factor on cosines and sines
        rope, device = self.rope, position_ids.device
        if rope["rope_type"] != "default":
            stretched = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
            return stretched(self.config, device, seq_len=position_ids.max() + 1, **self.nested)
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of `x` (B, H, T, D), or of its first entries, by the angles of `RotaryPositions`."""
    if (turned := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class RelativePositionBias(nn.Module):
    """What is added to the scores of each head by the distance from query to key (T5, Raffel et al., 2020): of its own
    for near ones, then by the logarithm; ahead apart from back, where both sides are seen."""

    def __init__(self, config: ScratchConfig, is_causal: bool):
        super().__init__()
        self.config, self.is_causal = config, is_causal
        self.table = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)

    def forward(self, back: Tensor, mask: Tensor | None) -> Tensor:  # (T, S), how far behind -> (B or 1, H, T, S)
        """The bias, and beside it the mask. Without one a token sees what is before it, or an encoder's all."""
        distance, count = back.clamp(min=0), self.config.relative_attention_num_buckets
        first = torch.zeros_like(back)
        if not self.is_causal:
            distance, count = back.abs(), count // 2
            first = (back < 0) * count
        exact = count // 2
        scale = math.log(self.config.relative_attention_max_distance / exact)
        steps = torch.log(distance.clamp(min=exact).float() / exact) / scale * (count - exact)
        far = (exact + steps.long()).clamp(max=count - 1)
        bias = self.table(first + torch.where(distance < exact, distance, far)).permute(2, 0, 1)[None]
        hidden = torch.finfo(bias.dtype).min
        if mask is not None and mask.dtype != torch.bool:
            return (bias + mask).clamp(min=hidden)
        seen = back >= 0 if mask is None and self.is_causal else mask
        return bias if seen is None else torch.where(seen, bias, hidden)


# --- Attention --------------------------------------------------------------------------------------------------------


def attention(
    module: Any,  # has `num_key_value_groups` and `training`
    query: Tensor,  # (B, H, T, d_k)
    key: Tensor,  # (B, H/groups, S, d_k)
    value: Tensor,  # (B, H/groups, S, d_v)
    attention_mask: Tensor | None,  # (B or 1, H or 1, T, S): True or 0 where allowed, False or very negative where not
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,  # of scores: no more than that, smoothly (Gemma Team, 2024)
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`softmax(Q Kᵀ · scaling + mask) V`, written out: "Attention Is All You Need", equation 1.

    The signature is that of transformers' attention backends, beside which it is the one that shows the weights.

    Returns:
        The output (B, T, H, d_v) and the weights (B, H, T, S); each row of weights sums to 1 before dropout. A row with
        nothing to attend to spreads evenly rather than become NaN.
    """
    key, value = (repeat_heads(x, module.num_key_value_groups) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    # Half precision cannot hold a sum of many small exponentials.
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """(B, H/groups, S, D) -> (B, H, S, D): each key or value head serves `groups` query heads that stand together."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


class ScratchAttention(nn.Module):
    """Multi-head attention (section 3.2.2 of the paper) of the hidden states to themselves, or to an encoder's."""

    def __init__(self, config: ScratchConfig, layer_idx: int, is_causal: bool, layer_type: str = "full_attention"):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx  # which layer of the cache holds its keys and values
        self.is_causal = is_causal
        self.head_dim, self.value_head_dim = config.head_dim, config.value_head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier
        self.options = {} if config.attn_logit_softcapping is None else {"softcap": config.attn_logit_softcapping}
        if layer_type == "sliding_attention":
            # Kernels count a token itself; to each side of an encoder's it has so many besides.
            self.options["sliding_window"] = config.sliding_window + (not is_causal)
        width, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        output_bias = config.attention_bias if config.attention_output_bias is None else config.attention_output_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, groups * self.value_head_dim, bias=config.attention_bias)
        self.o_proj = ends_sublayer(nn.Linear(heads * self.value_head_dim, width, bias=output_bias))
        norm = kind if issubclass(kind := NORMS[config.norm_type], nn.RMSNorm) else RMSNorm
        self.norms_all_heads = config.qk_norm_across_heads
        q_width, k_width = (self.head_dim * (count if self.norms_all_heads else 1) for count in (heads, groups))
        self.q_norm = norm(q_width, eps=config.layer_norm_eps) if config.use_qk_norm else None
        self.k_norm = norm(k_width, eps=config.layer_norm_eps) if config.use_qk_norm else None

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        encoder_hidden_states: Tensor | None = None,  # (B, S, D)
        attention_mask: Tensor | VarlenMask | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output (B, T, D) and the weights (B, H, T, S), `None` from the backends that never form them."""
        batch, length, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch, length, -1, self.head_dim)
        query = (query if self.q_norm is None else self.normalise(query, self.q_norm)).transpose(1, 2)
        if encoder_hidden_states is not None:
            key, value = self.encoder_keys_and_values(encoder_hidden_states, past_key_values)
        else:
            key, value = self.keys_and_values(hidden_states)
            if position_embeddings is not None:
                query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            if past_key_values is not None:
                key, value = past_key_values.update(key, value, self.layer_idx)

        # Only the formula written out can show its weights, whichever backend the configuration names.
        implementation = "eager" if kwargs.get("output_attentions") else self.config._attn_implementation
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, attention)
        if type(attention_mask) is VarlenMask:
            attention_interface = varlen_attention(attention_interface)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attention_interface(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **self.options, **kwargs
        )
        # Backends of serving engines return (tokens, H · d_v), whatever the shape they were given.
        return self.o_proj(output.reshape(batch, length, -1)), weights

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:  # (B, S, D) -> (B, H/groups, S, d_k and d_v)
        batch, length, _ = states.shape
        key = self.k_proj(states).view(batch, length, -1, self.head_dim)
        key = (key if self.k_norm is None else self.normalise(key, self.k_norm)).transpose(1, 2)
        return key, self.v_proj(states).view(batch, length, -1, self.value_head_dim).transpose(1, 2)

    def normalise(self, x: Tensor, norm: nn.Module) -> Tensor:  # (B, T, H, d_k), each head or all as one
        return norm(x.flatten(2)).view_as(x) if self.norms_all_heads else norm(x)

    def encoder_keys_and_values(self, states: Tensor, past_key_values: Cache | None) -> tuple[Tensor, Tensor]:
        """The source does not change while its translation grows: its keys and values are computed once."""
        if not isinstance(past_key_values, EncoderDecoderCache):
            return self.keys_and_values(states)
        cache = past_key_values.cross_attention_cache
        if not past_key_values.is_updated.get(self.layer_idx):
            slots = cache.get_max_length(self.layer_idx)
            if slots not in (-1, states.shape[1]):  # those of a static cache that stay empty would be read as tokens
                raise ValueError(f"past_key_values: cross-attention has max_cache_len={slots}, not {states.shape[1]}")
            past_key_values.is_updated[self.layer_idx] = True
            return cache.update(*self.keys_and_values(states), self.layer_idx)
        return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values


def ends_sublayer(linear: nn.Linear) -> nn.Linear:
    """Mark the last matrix of a sub-layer, which an initialisation may set to zero."""
    linear.ends_sublayer = True  # type: ignore[assignment]
    return linear


# --- Feed-forward -----------------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    """Two linear maps with an activation between, at each position by itself (section 3.3 of the paper); or three, the
    third of which gates the hidden units: with SiLU, the SwiGLU of Shazeer (2020)."""

    def __init__(self, config: ScratchConfig):
        super().__init__()
        self.activation, is_gated = ACTIVATIONS[config.hidden_act]
        width, inner = config.hidden_size, config.intermediate_size
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = ends_sublayer(nn.Linear(inner, width, bias=config.mlp_bias))
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias) if is_gated else None
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        if self.gate_proj is None:
            hidden = self.activation(self.up_proj(x))  # (B, T, F)
        else:
            hidden = self.activation(self.gate_proj(x)) * self.up_proj(x)
        dropout = self.dropout
        return self.down_proj(dropout(hidden) if dropout.training else hidden)


# --- Block ------------------------------------------------------------------------------------------------------------


class ScratchBlock(GradientCheckpointingLayer):
    """One layer of either stack (figure 1 of the paper): two sub-layers in the encoder, three beside an encoder's
    output. Each adds to the residual stream, `x = after(x + dropout(inside(sublayer(before(x)))))`, with norms in those
    of the three places that `norm_position` names; or attention and feed-forward layer add side by side."""

    def __init__(
        self,
        config: ScratchConfig,
        layer_idx: int,
        is_causal: bool,
        has_encoder: bool = False,
        layer_type: str = "full_attention",
    ):
        super().__init__()
        self.placement = NORM_PLACEMENTS[config.norm_position]
        self.self_attn = ScratchAttention(config, layer_idx, is_causal, layer_type)
        self.self_attn_norm, self.self_attn_output_norm = self.make_norms(config)
        if layer_idx == 0 and not config.first_norm:
            self.self_attn_norm = nn.Identity()
        self.cross_attn = self.cross_attn_norm = self.cross_attn_output_norm = None
        if has_encoder:
            self.cross_attn = ScratchAttention(config, layer_idx, is_causal=False)
            self.cross_attn_norm, self.cross_attn_output_norm = self.make_norms(config)
        self.mlp = FeedForward(config)
        self.mlp_norm, self.mlp_output_norm = (None, None) if self.placement.is_shared else self.make_norms(config)
        self.multiplier = config.residual_multiplier
        self.dropout = nn.Dropout(config.dropout)
        for linear in (each for each in self.modules() if isinstance(each, nn.Linear)):
            linear.is_in_block = True  # type: ignore[assignment]  # whose initialisation may depend on the width

    def make_norms(self, config: ScratchConfig) -> tuple[nn.Module | None, nn.Module | None]:
        around = make_norm(config) if self.placement.before or self.placement.after else None
        return around, make_norm(config) if self.placement.inside else None

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        attention_mask: Tensor | VarlenMask | None = None,
        encoder_hidden_states: Tensor | None = None,  # (B, S, D)
        encoder_attention_mask: Tensor | VarlenMask | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        x, cache, encoded = hidden_states, past_key_values, encoder_hidden_states
        # One name for what goes in and what comes out, so that nothing is held for longer than it is needed.
        norm = self.self_attn_norm
        update = norm(x) if self.placement.before else x
        beside = None
        if self.placement.is_parallel:
            beside = self.mlp(update if self.mlp_norm is None else self.mlp_norm(x))
        update, _ = self.self_attn(update, None, attention_mask, position_embeddings, cache, **kwargs)
        x = self.add(x, update, norm, self.self_attn_output_norm)
        if beside is not None:
            return self.add(x, beside, self.mlp_norm, self.mlp_output_norm)
        if encoded is not None:
            norm = self.cross_attn_norm
            update = norm(x) if self.placement.before else x
            update, _ = self.cross_attn(update, encoded, encoder_attention_mask, None, cache, **kwargs)
            x = self.add(x, update, norm, self.cross_attn_output_norm)
        norm = self.mlp_norm
        update = norm(x) if self.placement.before else x
        return self.add(x, self.mlp(update), norm, self.mlp_output_norm)

    def add(self, x: Tensor, update: Tensor, norm: nn.Module | None, output_norm: nn.Module | None) -> Tensor:
        dropout = self.dropout
        if output_norm is not None:
            update = output_norm(update)
        if self.multiplier != 1.0:
            update = update * self.multiplier
        x = x + (dropout(update) if dropout.training else update)  # not called for nothing
        return norm(x) if self.placement.after else x


def make_norm(config: ScratchConfig) -> nn.Module:
    options = {} if config.norm_bias else {"bias": False}
    return NORMS[config.norm_type](config.hidden_size, eps=config.layer_norm_eps, **options)


# --- Before and after the blocks --------------------------------------------------------------------------------------


class ScratchEmbeddings(nn.Module):
    """A vector for each token (section 3.4 of the paper), plus one for its position unless attention is told of it,
    plus one for its type if there are types."""

    def __init__(self, config: ScratchConfig, vocab_size: int, norm_first: bool = False):
        super().__init__()
        width, positions = config.hidden_size, POSITIONS[config.position_embedding_type]
        padding = None if config.train_padding_embedding else config.pad_token_id
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding)
        self.scale = config.embedding_multiplier * (width**0.5 if config.scale_embedding else 1.0)
        if norm_first:  # which undoes any scale
            self.scale = 1.0
        self.position_offset = config.position_offset
        self.position_embeddings: nn.Module | None = None
        if positions.has_table:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings + self.position_offset, width)
        elif positions.is_added:
            self.position_embeddings = SinusoidalPositions(width, positions.in_halves, positions.is_inclusive)
        types = getattr(config, "type_vocab_size", 0)  # a translator has none
        self.token_type_embeddings = nn.Embedding(types, width) if types else None
        self.norm = make_norm(config) if config.embedding_norm else None
        self.norm_first = norm_first  # before positions are added
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        inputs_embeds: Tensor,  # (B, T, D)
        position_ids: Tensor,  # (B or 1, T)
        token_type_ids: Tensor | None = None,  # (B, T); default: all of type 0
    ) -> Tensor:  # -> (B, T, D)
        embeddings = inputs_embeds if self.scale == 1.0 else inputs_embeds * self.scale
        if self.norm is not None and self.norm_first:
            embeddings = self.norm(embeddings)
        if self.position_embeddings is not None:
            places = position_ids + self.position_offset if self.position_offset else position_ids
            embeddings = embeddings + self.position_embeddings(places).to(embeddings.dtype)
        if self.token_type_embeddings is not None:
            types = torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids
            embeddings = embeddings + self.token_type_embeddings(types)
        if self.norm is not None and not self.norm_first:
            embeddings = self.norm(embeddings)
        return self.dropout(embeddings)


class ScratchPooler(nn.Module):
    """One vector for a whole text, from the state of its first token: BERT's pooler, DistilBERT's pre-classifier."""

    def __init__(self, config: ScratchConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = POOLERS[config.pooler_act]

    def forward(self, vectors: Tensor) -> Tensor:  # (B, D) -> (B, D)
        return self.activation(self.dense(vectors))
