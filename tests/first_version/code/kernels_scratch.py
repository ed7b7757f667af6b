"""The same numbers with less work: matrices multiplied by the quicker library, no work for padding, a loss without all
logits, a cache with room to grow. The architecture can be read without this file.

Shapes: B batch, T length of the queries, S length of the keys, H heads, d width of a head, D width, V vocabulary.
"""

import functools
import math
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

# --- Products of matrices ---------------------------------------------------------------------------------------------

SMALL = 2**16  # entries of a matrix below which it makes no difference how it is multiplied


@functools.cache
def is_mkl_slow() -> bool:
    """Whether `linear` leaves half of this processor unused: it calls MKL, which on those of AMD with AVX-512 is less
    than half as quick as oneDNN, by which torch computes other things."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    described = Path("/proc/cpuinfo")
    vendor = described.read_text() if described.exists() else platform.processor()
    return "AuthenticAMD" in vendor and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def can_choose_library(*matrices: Tensor) -> bool:
    """Whether `Product` may multiply these: single precision, and nobody looks at the operations but autograd."""
    return (
        matrices[0].device.type == "cpu"
        and is_mkl_slow()
        and torch._C._get_mkldnn_enabled()  # by torch.backends.mkldnn
        and not is_watched()
        and all(type(x) in (Tensor, nn.Parameter) and compute_dtype(x) == x.dtype == torch.float32 for x in matrices)
        and min(x.numel() for x in matrices) > 0
    )


def onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:  # (..., K), (N, K), (N,) -> (..., N)
    """`a @ b.T + bias`. Compiled models multiply so too; no public name of torch reaches it for dense tensors."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def is_watched() -> bool:
    """Whether somebody other than autograd wants to know how things are computed: compilers, transformations."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


class Product(torch.autograd.Function):
    """`a @ b.T + bias` by oneDNN, and so its gradients: (M, K), (N, K), (N,) -> (M, N)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return onednn(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (a, b) = grads, ctx.saved_tensors
        by_a = Product.apply(grad, b.T, None) if ctx.needs_input_grad[0] else None
        by_b = Product.apply(grad.T, a.T, None) if ctx.needs_input_grad[1] else None
        return by_a, by_b, grad.sum(0) if ctx.needs_input_grad[2] else None


by_onednn: Callable[..., Tensor] = Product.apply


def project(linear: nn.Module, x: Tensor) -> Tensor:  # (..., D) -> (..., F)
    """`linear(x)`, by the library that is quickest."""
    if not is_plain(linear):
        return linear(x)
    weight, bias = linear.weight, linear.bias
    if weight.numel() < SMALL or not can_choose_library(weight, x):
        return linear(x)
    if not torch.is_grad_enabled():
        return onednn(x, weight, bias)
    return by_onednn(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:  # (M, K), (N, K), (N,) -> (M, N)
    """`a @ b.T + bias`, by the library that is quickest."""
    return by_onednn(a, b, bias) if can_choose_library(a, b) else F.linear(a, b, bias)


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling it is to multiply by its weight and no more: nobody has adapted it, quantised it, spread it over
    devices or is listening to it."""
    return (
        type(linear) is nn.Linear
        and type(linear.weight) is nn.Parameter
        and not (linear._forward_pre_hooks or linear._forward_hooks)
        and "forward" not in vars(linear)  # where accelerate puts its hooks
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which matrices are multiplied here."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


# --- Norm -------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang & Sennrich, 2019). torch has no backward pass of it for a CPU in one piece; that of
    a layer norm around 0 is all but one term of it."""

    def forward(self, x: Tensor) -> Tensor:
        """In the type of the weight, also under autocast: torch has no kernels for two types."""
        if torch.promote_types(x.dtype, self.weight.dtype) != self.weight.dtype:
            return super().forward(x)
        is_precise = self.weight.dtype in (torch.float32, torch.float64)
        if is_precise and self.weight.device.type in ("cpu", "meta") and x.numel() and not is_watched():
            return RMSNormOnCPU.apply(x, self.weight, self.eps)
        return super().forward(x.to(self.weight.dtype))


class RMSNormOnCPU(torch.autograd.Function):
    """`x / sqrt(mean(x²) + eps) * weight`, in the type of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        precise = x.to(weight.dtype)
        scale = (torch.linalg.vector_norm(precise, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)  # (..., D), (D,), (..., 1)
        ctx.eps = eps
        return (precise * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight, scale) = grads, ctx.saved_tensors
        precise = x.to(weight.dtype)
        if torch.is_grad_enabled():  # second derivatives are wanted
            output = F.rms_norm(precise, weight.shape, weight, ctx.eps)
            inputs = [each for each in (x, weight) if each.requires_grad]
            found = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
            return *(next(found) if each.requires_grad else None for each in (x, weight)), None
        mask = [True, ctx.needs_input_grad[1], False]
        by_x, by_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), precise, [x.shape[-1]], torch.zeros_like(scale), scale, weight, None, mask
        )
        # A layer norm takes the mean of the gradient away.
        by_x += (grad @ weight)[..., None] * (scale / x.shape[-1])
        return by_x.to(x.dtype), by_weight, None


# --- Texts without padding --------------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """Texts laid end to end, so that whatever works on each token by itself does nothing for padding; attention lays
    them side by side again, no wider than the longest (the unpadding of ModernBERT, Warner et al., 2024).

    N tokens of R texts, of which the longest has L.
    """

    lengths: Tensor  # (R,)
    longest: int
    places: Tensor  # (N,): of each token among the R × L that are side by side
    real: Tensor | None = None  # (N,): of each token among those of a batch with padding, if there is padding

    @classmethod
    def of_real(cls, real: Tensor) -> "Packing":
        """Of a batch (B, T), of which these tokens are not padding."""
        return cls.of(real.sum(1), real.flatten().nonzero()[:, 0])

    @classmethod
    def of(cls, lengths: Tensor, real: Tensor | None = None) -> "Packing":
        rows = torch.repeat_interleave(lengths)  # (N,)
        longest = int(lengths.max())
        gaps = (longest - lengths).cumsum(0) - (longest - lengths)  # (R,): empty slots before each text
        places = torch.arange(len(rows), device=lengths.device) + gaps[rows]
        return cls(lengths, longest, places, real)

    def drop_padding(self, x: Tensor) -> Tensor:  # (B, T, ...) -> (1, N, ...)
        return x if self.real is None else x.flatten(0, 1).index_select(0, self.real)[None]

    def restore_padding(self, x: Tensor, batch: int, length: int) -> Tensor:  # (1, N, ...) -> (B, T, ...), with zeros
        if self.real is None:
            return x
        return x.new_zeros(batch * length, *x.shape[2:]).index_copy_(0, self.real, x[0]).unflatten(0, (batch, length))

    def side_by_side(self, x: Tensor) -> Tensor:  # (B, H, T, d) with B · T = N -> (R, H, L, d)
        x = x.transpose(1, 2).flatten(0, 1)
        slots = x.new_zeros(len(self.lengths) * self.longest, *x.shape[1:]).index_copy_(0, self.places, x)
        return slots.unflatten(0, (-1, self.longest)).transpose(1, 2)

    def end_to_end(self, x: Tensor, batch: int) -> Tensor:  # (R, L, H, d) -> (B, T, H, d)
        return x.flatten(0, 1).index_select(0, self.places).unflatten(0, (batch, -1))

    def mask(self) -> Tensor:  # (R, 1, 1, L): True at real keys
        # A text without tokens attends to one empty slot rather than to nothing, which would be NaN.
        lengths = self.lengths.clamp(min=1)[:, None, None, None]
        return torch.arange(self.longest, device=lengths.device) < lengths

    def causal_mask(self) -> Tensor:  # (L, L): True where a query may look
        return torch.ones(self.longest, self.longest, dtype=torch.bool, device=self.lengths.device).tril()


def has_varlen_kernel(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether `attention_end_to_end` can be computed: on an NVIDIA GPU from Ampere on, in half precision."""
    return (
        query.is_cuda
        and compute_dtype(query) in (torch.bfloat16, torch.float16)
        and dropout == 0.0
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attention_end_to_end(
    query: Tensor,  # (B, H, T, d)
    key: Tensor,  # (B', H, S, d)
    value: Tensor,  # (B', H, S, d)
    packing: Packing,  # of the queries
    of_keys: Packing,
    is_causal: bool,
    scaling: float,
) -> Tensor:  # -> (B, T, H, d)
    """Attention of each text to its own keys, by FlashAttention's kernel for texts that lie end to end."""
    batch, dtype = len(query), compute_dtype(query)
    query, key, value = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (query, key, value))
    starts, key_starts = (F.pad(each.lengths.cumsum(0), (1, 0)).int() for each in (packing, of_keys))
    window = (-1, 0 if is_causal else -1)  # how far back and ahead is looked; -1: to the end
    output: Any = varlen_attn(
        query,
        key,
        value,
        starts,
        key_starts,
        packing.longest,
        of_keys.longest,
        scale=scaling,
        window_size=window,
    )
    return output.unflatten(0, (batch, -1))


# --- Head and loss ----------------------------------------------------------------------------------------------------


# Logits at a time: on a CPU about what its caches hold, elsewhere enough rows to keep the hardware busy.
CHUNK, CPU_CHUNK = 2**25, 2**23


def linear_cross_entropy(
    hidden_states: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,), -100 where there is nothing to predict
    label_smoothing: float = 0.0,
) -> Tensor:
    """`cross_entropy(linear(hidden_states, weight, bias), targets, reduction="sum")`, in nats and at least single
    precision, without logits of rows that have no target, and without the N × V logits ever being there at once.

    As in Cut Cross-Entropy (Wijmans et al., 2025), the logits of some rows are made and used up before the next ones;
    with them at hand, their gradients are computed too, so that the widest product of a model is not done again.
    """
    dtype = compute_dtype(hidden_states)
    hidden_states, weight, bias = hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _as_one_operation(hidden_states, weight, bias, targets, label_smoothing, torch.is_grad_enabled())[0]


def cross_entropy_in_chunks(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    label_smoothing: float,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients by hidden states, weight and bias."""
    vocab_size, precise = len(weight), torch.promote_types(weight.dtype, torch.float32)
    zeros = partial(torch.zeros, dtype=precise, device=weight.device)
    loss = zeros(())
    gradients = torch.zeros_like(hidden_states)
    weight_gradient = zeros(weight.shape if with_gradients else 0)
    bias_gradient = zeros(vocab_size if with_gradients and bias is not None else 0)
    for rows in (targets != -100).nonzero()[:, 0].split(chunk_rows(weight)):
        states, wanted = hidden_states[rows], targets[rows, None]
        log_probabilities = F.log_softmax(multiply(states, weight, bias), dim=-1, dtype=precise)
        loss -= (1 - label_smoothing) * log_probabilities.gather(1, wanted).sum()
        if label_smoothing:
            loss -= label_smoothing / vocab_size * log_probabilities.sum()
        if not with_gradients:
            continue
        by_logits = log_probabilities.exp_()  # less the distribution that is wanted
        if label_smoothing:
            by_logits -= label_smoothing / vocab_size
        by_logits.scatter_add_(1, wanted, by_logits.new_full(wanted.shape, label_smoothing - 1))
        if bias is not None:
            bias_gradient += by_logits.sum(0)
        by_logits = by_logits.to(weight.dtype)
        gradients[rows] = multiply(by_logits, weight.T)
        if weight.dtype == precise:
            weight_gradient.addmm_(by_logits.T, states)
        else:
            weight_gradient += by_logits.T @ states
    return loss, gradients, weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype)


def chunk_rows(weight: Tensor) -> int:
    """How many rows of logits are made at a time: a power of two, which hardware multiplies fastest."""
    rows = (CPU_CHUNK if weight.device.type == "cpu" else CHUNK) // len(weight)
    return 1 << max(0, rows.bit_length() - 1)


def _without_data(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    label_smoothing: float,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results of the right shapes, for compilers."""
    shape = weight.shape if with_gradients else (0,)
    bias_shape = len(weight) if with_gradients and bias is not None else 0
    loss = weight.new_empty((), dtype=torch.promote_types(weight.dtype, torch.float32))
    return loss, torch.empty_like(hidden_states), weight.new_empty(shape), weight.new_empty(bias_shape)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.has_bias = inputs[2] is not None
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    # In place, since they are as large as the table; torch refuses a second backward pass through them. A compiler
    # plans its memory itself.
    scale = torch.mul if torch.compiler.is_compiling() else Tensor.mul_
    by_states, by_weight, by_bias = (scale(gradient, grad.to(gradient.dtype)) for gradient in ctx.saved_tensors)
    return by_states, by_weight, by_bias if ctx.has_bias else None, None, None, None


# To torch.compile one operation, since how often its loop runs depends on how many targets a batch has. This file may
# be loaded several times, as the package's and as that of models from the Hub: the first to come registers it for all.
if not hasattr(torch.ops.scratch_transformer, "cross_entropy_in_chunks"):
    _operation = torch.library.custom_op(
        "scratch_transformer::cross_entropy_in_chunks", cross_entropy_in_chunks, mutates_args=()
    )
    _operation.register_fake(_without_data)
    _operation.register_autograd(_backward, setup_context=_keep_gradients)
_as_one_operation = torch.ops.scratch_transformer.cross_entropy_in_chunks


# What `FlopCounterMode` cannot know of itself.
def _product_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a) * b[0]


def _cross_entropy_flops(
    states: Tensor, weight: Tensor, bias: Any, targets: Tensor, smoothing: float, with_gradients: bool, **_: Any
) -> int:
    return (6 if with_gradients else 2) * int((targets != -100).sum()) * weight.numel()


if _as_one_operation not in flop_registry:
    register_flop_formula(_as_one_operation, get_raw=True)(_cross_entropy_flops)
if hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_product_flops)


# --- Cache ------------------------------------------------------------------------------------------------------------


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, (B, H, S, d) each, in tensors that have room for more: what is there already is not
    copied for every token that is added, only when the room is used up, or beams trade places."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rooms: list[Tensor] = []  # of keys and of values, (B, H, room, d)
        self.seen: list[Tensor] = []  # their filled parts, as this layer left them

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Gradients flow through concatenation only, and a graph knows the lengths that it was made for.
        if is_watched() or (torch.is_grad_enabled() and key_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)
        if self.get_seq_length() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        past, length = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if not self.has_room(length):
            self.rooms = [
                old.new_empty(*old.shape[:2], length + max(64, length // 4), old.shape[-1])
                for old in (self.keys, self.values)
            ]
            for room, old in zip(self.rooms, (self.keys, self.values), strict=True):
                room[:, :, :past] = old
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, past:length] = new
        return self.show(length)

    def has_room(self, length: int) -> bool:
        """For so many tokens, unless somebody has put other tensors here."""
        return (
            bool(self.rooms)
            and self.keys is self.seen[0]
            and self.values is self.seen[1]
            and self.rooms[0].shape[-2] >= length
            and self.rooms[0].is_inference() == torch.is_inference_mode_enabled()
        )

    def show(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.seen = [room[:, :, :length] for room in self.rooms]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        length = self.get_seq_length()
        if not self.has_room(length):
            return super().reorder_cache(beam_idx)
        self.rooms = [room.index_select(0, beam_idx.to(room.device)) for room in self.rooms]
        self.show(length)


def with_room(cache: Cache) -> Cache:
    """Let a new cache as `generate` makes it keep room in its layers; others are left as they are."""
    if type(cache) is DynamicCache and not cache.offloading:
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = RoomyLayer
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                cache.layers[index] = RoomyLayer()
    return cache
