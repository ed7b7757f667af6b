"""The bricks, in plain torch: positions, attention, feed-forward, residual connections.

Shapes: B batch, T length of the queries, S length of the keys and values, H heads, D width, F feed-forward width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .kernels_scratch import RMSNorm, project


class SinusoidalPositions(nn.Module):
    """The fixed positions of "Attention Is All You Need", section 3.5.

    `PE[pos, 2i] = sin(pos / 10000^(2i/D))` and `PE[pos, 2i+1] = cos(pos / 10000^(2i/D))`; an odd `D` drops the last
    cosine. `in_halves` puts all sines before all cosines, as Marian does. Computed when asked for: there is no table
    that could be too short, or be lost on the meta device.
    """

    def __init__(self, dim: int, in_halves: bool = False):
        super().__init__()
        self.dim, self.in_halves = dim, in_halves

    def forward(self, position_ids: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        # At position 1000 an angle in single precision is off by 6e-5; Apple's GPUs have no other.
        precise = torch.float32 if position_ids.device.type == "mps" else torch.float64
        exponents = torch.arange(0, self.dim, 2, device=position_ids.device, dtype=precise) / self.dim
        angles = position_ids[..., None].to(precise) / 10000**exponents  # (B, T, D/2)
        waves = angles.sin().float(), angles.cos().float()
        table = torch.cat(waves, dim=-1) if self.in_halves else torch.stack(waves, dim=-1).flatten(-2)
        return table[..., : self.dim]


class RotaryPositions(nn.Module):
    """Angles that turn queries and keys by their position (RoFormer, Su et al., 2021), in Llama's layout: entry `i` is
    turned together with entry `i + D/2`, by `position / theta^(2i/D)`. Returns cosines, and sines that are negated in
    the first half.

    `scaled`, where context has been stretched, gives other turns per position (D/2,) and a factor on the result, from
    the positions asked for.
    """

    def __init__(self, head_dim: int, theta: float, scaled: Callable[[Tensor], tuple[Tensor, float]] | None = None):
        super().__init__()
        self.head_dim, self.theta, self.scaled = head_dim, theta, scaled

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # (B, T) -> 2 × (B, 1, T, D)
        exponents = torch.arange(0, self.head_dim, 2, device=position_ids.device, dtype=torch.float32) / self.head_dim
        turns, factor = (1.0 / self.theta**exponents, 1.0) if self.scaled is None else self.scaled(position_ids)
        angles = position_ids[:, None, :, None].float() * turns  # (B, 1, T, D/2)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of `x` (B, H, T, D) by the angles of `RotaryPositions`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def ends_sublayer(linear: nn.Linear) -> nn.Linear:
    """Mark the last matrix of a sub-layer, which an initialisation may set to zero."""
    linear.ends_sublayer = True  # type: ignore[assignment]
    return linear


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """(B, H/groups, S, D) -> (B, H, S, D): each key or value head serves `groups` query heads that stand together."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def attention(
    module: Any,  # has `num_key_value_groups` and `training`
    query: Tensor,  # (B, H, T, d_k)
    key: Tensor,  # (B, H/groups, S, d_k)
    value: Tensor,  # (B, H/groups, S, d_v)
    attention_mask: Tensor
    | None,  # (B or 1, H or 1, T, S): True or 0 where allowed, False or a large negative where not
    scaling: float,
    dropout: float = 0.0,
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
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    # Half precision cannot hold a sum of many small exponentials.
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class FeedForward(nn.Module):
    """Two linear maps with an activation between, at each position by itself: section 3.3 of the paper."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Callable, bias: bool, dropout: float):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = ends_sublayer(nn.Linear(intermediate_size, hidden_size, bias=bias))
        self.activation = activation
        self.dropout = nn.Dropout(dropout)

    def hidden(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, F)
        return self.activation(project(self.up_proj, x))

    def forward(self, x: Tensor) -> Tensor:
        return project(self.down_proj, self.dropout(self.hidden(x)))


class GatedFeedForward(FeedForward):
    """A feed-forward layer whose hidden units are multiplied by a gate: with SiLU, the SwiGLU of Shazeer (2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Callable, bias: bool, dropout: float):
        super().__init__(hidden_size, intermediate_size, activation, bias, dropout)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)

    def hidden(self, x: Tensor) -> Tensor:
        return self.activation(project(self.gate_proj, x)) * project(self.up_proj, x)


FEED_FORWARDS: dict[str, tuple[type[FeedForward], Callable]] = {
    "relu": (FeedForward, F.relu),
    "gelu": (FeedForward, F.gelu),
    "gelu_new": (FeedForward, partial(F.gelu, approximate="tanh")),
    "silu": (FeedForward, F.silu),
    "swiglu": (GatedFeedForward, F.silu),
}
POOLERS: dict[str, Callable] = {"tanh": torch.tanh, "relu": F.relu}
NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": RMSNorm}


def pre_norm(x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.Module, dropout: nn.Module) -> Tensor:
    """`x + Dropout(Sublayer(Norm(x)))` (Xiong et al., 2020): the residual stream itself is never normalised."""
    return x + dropout(sublayer(norm(x)))


def post_norm(x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.Module, dropout: nn.Module) -> Tensor:
    """`Norm(x + Dropout(Sublayer(x)))`, as in the paper."""
    return norm(x + dropout(sublayer(x)))


RESIDUALS = {"pre": pre_norm, "post": post_norm}
