"""Update rules and learning-rate schedules."""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from .recipe import Optimisation


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with all matrices of one shape orthogonalised together, in the precision that is quick here.

    torch 2.13 takes one matrix after the other, always in bfloat16. For the 72 matrices of a small translator, on 2
    cores, that costs 241 ms a step; together they cost 33 ms in single precision, and a fifth of it in bfloat16 on a
    CPU that has it in hardware. State, arguments and the result up to rounding are torch's. Of sharded matrices each
    process orthogonalises its share.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update, from the gradients of the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stacks: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                wide = update.mT if _is_tall(update) else update
                layout = (wide.device_mesh, wide.placements) if isinstance(wide, DTensor) else None
                stacks[wide.shape, layout].append((parameter, wide))
            for members in stacks.values():
                constants = group["ns_coefficients"], group["ns_steps"], group["eps"]
                directions = orthogonalised(torch.stack([wide for _, wide in members]), *constants)
                for (parameter, _), direction in zip(members, directions, strict=True):
                    rows, columns = parameter.shape
                    if group["adjust_lr_fn"] == "match_rms_adamw":
                        ratio = 0.2 * math.sqrt(max(rows, columns))
                    else:
                        ratio = math.sqrt(max(1, rows / columns))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(direction.mT if _is_tall(parameter) else direction, alpha=-group["lr"] * ratio)
        return loss


def _is_tall(matrix: Tensor) -> bool:
    return matrix.size(0) > matrix.size(1)


def orthogonalised(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration: matrices [n, rows, columns], rows <= columns, with singular values moved close to 1.

    In bfloat16, which the iteration tolerates, where the hardware multiplies it.
    """
    if isinstance(matrices, DTensor):  # a part of each matrix in each process -> some matrices, whole -> and back
        names, before = matrices.device_mesh.mesh_dim_names or (), matrices.placements
        after = [old if name == "dp_replicate" else Shard(0) for name, old in zip(names, before, strict=True)]
        mine = matrices.redistribute(placements=after)
        done = orthogonalised(mine.to_local(), coefficients, steps, eps)
        theirs = DTensor.from_local(done, mine.device_mesh, mine.placements, shape=mine.shape, stride=matrices.stride())
        return theirs.redistribute(placements=matrices.placements)
    a, b, c = coefficients
    x = matrices.bfloat16() if multiplies_bfloat16(matrices.device.type) else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


@cache
def multiplies_bfloat16(device: str) -> bool:
    """Whether matrices of bfloat16 are multiplied as such on this kind of device, rather than emulated."""
    if device != "cpu":
        return True
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older ones of torch do not tell
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def autocasts(precision: str, device: str) -> bool:
    """Whether a recipe's `precision` means bf16 on this kind of device."""
    return precision == "bf16" or (precision == "auto" and multiplies_bfloat16(device))


def optimizers(model: PreTrainedModel, spec: Optimisation) -> list[Optimizer]:
    """AdamW for all parameters, or Muon for the matrices inside the layers and AdamW for the rest.

    Embedding tables and the head are no matrices in this sense: their rows are updated one by one, not as a whole.
    Weight decay acts on matrices only (of AdamW's: on everything with two dimensions), never on norms and biases. With
    `mup_base_width` AdamW's steps on matrices inside the layers are smaller by the width, and what they decay is not.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables.append(model.get_output_embeddings())
    looked_up = {id(parameter) for module in tables if module is not None for parameter in module.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in looked_up]
    ratio = getattr(model.config, "width_ratio", 1.0)
    apart = matrices if spec.optimizer == "muon" or ratio != 1.0 else []
    taken = {id(parameter) for parameter in apart}
    rest = [parameter for parameter in trained if id(parameter) not in taken]
    decayed = [p for p in rest if p.ndim >= 2 and spec.optimizer == "adamw"]
    plain = [p for p in rest if p.ndim < 2 or spec.optimizer == "muon"]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if spec.optimizer == "adamw":
        slower = {"lr": spec.learning_rate / ratio, "weight_decay": spec.weight_decay * ratio}
        groups.append({"params": apart, **slower})
    first, second = spec.betas
    adamw = AdamW([g for g in groups if g["params"]], lr=spec.learning_rate, betas=(first, second), fused=True)
    result: list[Optimizer] = [adamw]
    if apart and spec.optimizer == "muon":
        muon = Muon(apart, spec.matrix_learning_rate, weight_decay=spec.weight_decay, momentum=spec.momentum)
        result.append(muon)
    for optimizer in result:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return result


def lr_factor(spec: Optimisation, step: int, progress: float, lr_reductions: int = 0) -> float:
    """The factor on the learning rates of a step.

    Args:
        step: optimiser steps done before this one.
        progress: share of the run's steps that are done.
        lr_reductions: how often `plateau` has reduced the rate.
    """
    warmup = min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    floor, progress = spec.final_fraction, min(progress, 1.0)
    match spec.schedule:
        case "linear":
            shape = 1 - (1 - floor) * progress
        case "cosine":
            shape = floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
        case "inverse_sqrt":
            shape = math.sqrt(max(spec.warmup_steps, 1) / max(step + 1, spec.warmup_steps, 1))
        case "warmup_stable_decay":
            shape = floor + (1 - floor) * min(1.0, (1 - progress) / spec.decay_fraction)
        case "plateau":
            shape = spec.plateau_factor**lr_reductions
        case _:
            shape = 1.0
    return warmup * shape


def set_lr(optimizers: list[Optimizer], factor: float) -> None:
    """Put `factor` times its base learning rate on every parameter group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
