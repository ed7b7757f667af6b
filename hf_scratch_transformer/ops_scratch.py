"""The same numbers with less work: a norm whose backward pass is one kernel, a loss without all logits. With
`nn.RMSNorm`, the head and `F.cross_entropy` in their place models are slower, else the same.

Shapes: N rows, D width, V vocabulary.
"""

import zlib
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.flop_counter import flop_registry, register_flop_formula


def is_compiling_or_tracing() -> bool:
    """Whether somebody other than a backward pass follows the operations: a compiler, a tracer, a transform."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or is_transformed()


def is_transformed() -> bool:
    """Whether a functional transform or a forward-mode derivative does, which know torch's own operations only."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which matrices are multiplied here."""
    device = x.device.type
    is_known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)  # torch 2.11 cannot trace it
    return torch.get_autocast_dtype(device) if is_known and torch.is_autocast_enabled(device) else x.dtype


def is_unmodified(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling it is to multiply by its weight and no more: not adapted, quantised, sharded or listened to."""
    return (
        type(linear) is nn.Linear
        and type(linear.weight) is nn.Parameter
        and not (linear._forward_pre_hooks or linear._forward_hooks)
        and not (linear._backward_pre_hooks or linear._backward_hooks or _has_any_global_hook())
        and "forward" not in vars(linear)  # where accelerate puts its hooks
    )


# --- Norm -------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang & Sennrich, 2019), in the type of its weight, also under autocast. torch has no
    backward pass of it for a CPU in one piece; that of a layer norm around 0 is all but one term of it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != weight.dtype and torch.promote_types(x.dtype, weight.dtype) != weight.dtype:
            return super().forward(x)
        # Also where a checkpointed layer runs ahead without gradients, so that both runs are equal.
        if self.training and FusedRMSNorm.can_take(x, weight):
            return FusedRMSNorm.apply(x, weight, self.eps)
        x = x if x.dtype == weight.dtype else x.to(weight.dtype)
        return torch.rms_norm(x, self.normalized_shape, weight, self.eps)


class FusedRMSNorm(torch.autograd.Function):
    """`x / sqrt(mean(x²) + eps) * weight`, in the type of the weight."""

    @staticmethod
    def can_take(x: Tensor, weight: Tensor) -> bool:
        is_precise = weight.dtype in (torch.float32, torch.float64)
        return is_precise and x.device.type in ("cpu", "meta") and x.numel() > 0 and not is_compiling_or_tracing()

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps, exact = eps, x.to(weight.dtype)
        scale = (torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)  # (..., D), (D,), (..., 1)
        return (exact * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight, scale) = grads, ctx.saved_tensors
        exact = x.to(weight.dtype)
        if torch.is_grad_enabled():  # second derivatives are wanted
            output = F.rms_norm(exact, weight.shape, weight, ctx.eps)
            inputs = [each for each in (x, weight) if each.requires_grad]
            found = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
            return *(next(found) if each.requires_grad else None for each in (x, weight)), None
        mask = [True, ctx.needs_input_grad[1], False]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), exact, [x.shape[-1]], torch.zeros_like(scale), scale, weight, None, mask
        )
        # A layer norm takes the mean of the gradient away.
        grad_x += (grad @ weight)[..., None] * (scale / x.shape[-1])
        return grad_x.to(x.dtype), grad_weight, None


# --- Loss -------------------------------------------------------------------------------------------------------------

# Logits at a time: on a CPU about what its caches hold, elsewhere enough rows to keep the hardware busy, and to add up
# the gradient of the weight in few turns.
CHUNK, CPU_CHUNK = 2**27, 2**23

compiled = cache(torch.compile)  # when it is asked for, since compilers take long to import


def linear_cross_entropy(
    hidden_states: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    target_ids: Tensor,  # (N,), -100 where there is nothing to predict
    label_smoothing: float = 0.0,
) -> Tensor:
    """`cross_entropy(linear(hidden_states, weight, bias), target_ids, reduction="sum")`, in nats and at least single
    precision, without logits of rows that have no target, and without the N × V logits ever being there at once.

    As in Cut Cross-Entropy (Wijmans et al., 2025), the logits of some rows are used up before the next ones are made,
    for their gradients too, so that the widest product of a model is not done again.
    """
    dtype = compute_dtype(hidden_states)
    hidden_states, weight, bias = hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if is_transformed():
        logits = F.linear(hidden_states, weight, bias).to(torch.promote_types(dtype, torch.float32))
        return F.cross_entropy(logits, target_ids, reduction="sum", label_smoothing=label_smoothing)
    is_compiled = torch.compiler.is_compiling() and weight.is_cuda
    return operation(hidden_states, weight, bias, target_ids, label_smoothing, torch.is_grad_enabled(), is_compiled)[0]


def cross_entropy_in_chunks(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    label_smoothing: float,
    with_gradients: bool,
    is_compiled: bool,  # what calls it, so that what is done with the logits may be, too
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients by hidden states, weight and bias."""
    accumulation_dtype = torch.promote_types(weight.dtype, torch.float32)
    zeros = partial(torch.zeros, dtype=accumulation_dtype, device=weight.device)
    loss, grad_states = zeros(()), torch.zeros_like(hidden_states)
    grad_weight = zeros(weight.shape if with_gradients else 0)
    grad_bias = zeros(len(weight) if with_gradients and bias is not None else 0)
    of_rows = compiled(cross_entropy_of_rows) if is_compiled else cross_entropy_of_rows
    for rows in (target_ids != -100).nonzero()[:, 0].split(chunk_rows(weight)):
        states, targets = hidden_states[rows], target_ids[rows, None]
        loss_of_rows, grad_logits = of_rows(states, weight, bias, targets, label_smoothing, with_gradients)
        loss += loss_of_rows
        if not with_gradients:
            continue
        if bias is not None:
            grad_bias += grad_logits.sum(0, dtype=accumulation_dtype)
        grad_states[rows] = F.linear(grad_logits, weight.T)
        if weight.dtype == accumulation_dtype:
            grad_weight.addmm_(grad_logits.T, states)
        else:
            grad_weight += grad_logits.T @ states
    return loss, grad_states, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


def cross_entropy_of_rows(
    states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, label_smoothing: float, with_gradients: bool
) -> tuple[Tensor, Tensor]:  # (n, D), (V, D), (V,), (n, 1) -> (), (n, V)
    """The loss, and its gradient by the logits: their probabilities less the distribution of the target. Compiled it
    takes a third of the passes over memory."""
    logits, dtype = F.linear(states, weight, bias), torch.promote_types(weight.dtype, torch.float32)
    log_probabilities, even = F.log_softmax(logits, dim=-1, dtype=dtype), label_smoothing / len(weight)
    of_targets = log_probabilities.gather(1, targets)
    loss = (label_smoothing - 1) * of_targets.sum()
    if label_smoothing:
        loss = loss - even * log_probabilities.sum()
    if not with_gradients:
        return loss, logits
    # Written at once in the type that is multiplied, over what is not needed any more.
    grad_logits = torch.exp(log_probabilities, out=log_probabilities if weight.dtype == dtype else logits)
    if label_smoothing:
        grad_logits -= even
    at_targets = of_targets.exp() - (1 - label_smoothing + even)
    return loss, grad_logits.scatter_(1, targets, at_targets.to(weight.dtype))


def chunk_rows(weight: Tensor) -> int:
    """How many rows of logits are made at a time: a power of two, which hardware multiplies fastest."""
    return 1 << max(0, ((CPU_CHUNK if weight.is_cpu else CHUNK) // len(weight)).bit_length() - 1)


def _shapes(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Results of the right shapes without data, for compilers."""
    loss = weight.new_empty((), dtype=torch.promote_types(weight.dtype, torch.float32))
    rows = len(weight) if rest[2] else 0  # with gradients
    grads = weight.new_empty(weight.shape if rows else (0,)), weight.new_empty(0 if bias is None else rows)
    return loss, torch.empty_like(hidden_states), *grads


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.has_bias = inputs[2] is not None
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # they would be 0, in silence
        raise NotImplementedError("loss_only=True has no second derivatives by backward: use loss_only=False")
    # In place, since they are as large as the table, unless they are kept, or a compiler plans their memory.
    is_kept = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
    scale = torch.mul if is_kept else Tensor.mul_
    grad_states, grad_weight, grad_bias = (scale(saved, grad.to(saved.dtype)) for saved in ctx.saved_tensors)
    return grad_states, grad_weight, grad_bias if ctx.has_bias else None, None, None, None, None


# To torch.compile one operation, since how often its loop runs depends on how many targets a batch has. Copies of this
# file, the package's and those of models from the Hub, share it where they are the same.
_name = f"cross_entropy_in_chunks_{zlib.crc32(Path(__file__).read_bytes()):08x}"
if not hasattr(torch.ops.scratch_transformer, _name):
    # No part of a CUDA graph: it asks the device how many targets there are.
    _registered = torch.library.custom_op(
        f"scratch_transformer::{_name}", cross_entropy_in_chunks, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
    )
    _registered.register_fake(_shapes)
    _registered.register_autograd(_backward, setup_context=_save_gradients)
operation = getattr(torch.ops.scratch_transformer, _name)


def _flops(states: Any, weight: Tensor, bias: Any, targets: Tensor, *rest: Any, **_: Any) -> int:
    return (6 if rest[1] else 2) * int((targets != -100).sum()) * weight.numel()


if operation not in flop_registry:  # for `FlopCounterMode`, which cannot look inside
    register_flop_formula(operation, get_raw=True)(_flops)
