"""FSDP2 (Zhao et al. 2023; torch's `fully_shard`): weights, gradients and optimiser states spread over the processes.

`accelerate launch --use_fsdp --fsdp_version 2` asks for it. Where there is no GPU, Accelerate's own FSDP2 becomes data
parallelism in silence; what is done here is the same on gloo and on NCCL, so that tests without a GPU test it.
"""

import os
from collections.abc import Mapping

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed import is_initialized
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from .sections import RecipeError


def plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """What the launcher asks for; None when it is not FSDP, or when there is nobody to share with.

    Raises RecipeError for FSDP1, and for options of FSDP2 that would be left undone.
    """
    alone = accelerator.num_processes == 1 and not is_initialized()  # not even a group of one, to see that it works
    if os.environ.get("ACCELERATE_USE_FSDP") != "true" or alone:
        return None
    options = FullyShardedDataParallelPlugin()
    if options.fsdp_version != 2:
        raise RecipeError("accelerate launch --use_fsdp: give --fsdp_version 2 beside it")
    unheeded = {
        "--fsdp_offload_params": isinstance(options.cpu_offload, CPUOffloadPolicy),
        "--fsdp_activation_checkpointing": options.activation_checkpointing,
    }
    for option in (option for option, given in unheeded.items() if given):
        raise RecipeError(f"accelerate launch {option} true: training has no such thing, leave it out")
    return options


def shard(model: PreTrainedModel, options: FullyShardedDataParallelPlugin, accelerator: Accelerator) -> None:
    """Spread a model over all processes, in place: one unit a block, and one for everything else.

    Embeddings and head lie in the same unit, so they may be tied. Optimisers are to be made afterwards.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, mesh=mesh, reshard_after_forward=options.reshard_after_forward)
    fully_shard(model, mesh=mesh)


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; all processes have to call it. Others are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Sharded tensors put together one by one, in main memory of the processes that `keep` them."""
    kept = {}
    for name, tensor in tensors.items():
        put_together = full_tensor(tensor)
        if keep:
            kept[name] = put_together.cpu() if isinstance(tensor, DTensor) else put_together
    return kept


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor that all processes have, or a sharded one, sharded as `other` is."""
    tensor = full_tensor(tensor)
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
