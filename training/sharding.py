"""FSDP2 (Zhao et al. 2023; torch's `fully_shard`): weights, gradients and optimiser states spread over the processes.

`accelerate launch --use_fsdp --fsdp_version 2` asks for it, `--use_parallelism_config` for several such copies (HSDP).
Where there is no GPU, Accelerate's own FSDP2 becomes data parallelism in silence; what is done here is the same on gloo
and on NCCL, so that tests without a GPU test it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed import is_initialized
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from .sections import RecipeError

MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"  # what `accelerate launch --use_parallelism_config` sets


@contextmanager
def unmeshed() -> Iterator[None]:
    """Accelerate is not told of the mesh that `shard` makes: on a CPU it would refuse it."""
    given = os.environ.pop(MESH, None)
    try:
        yield
    finally:
        if given is not None:
            os.environ[MESH] = given


def plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """What the launcher asks for; None when it is not FSDP, or when there is nobody to share with.

    Raises RecipeError for FSDP1, for options of FSDP2 that would be left undone, and for a mesh of other processes.
    """
    alone = accelerator.num_processes == 1 and not is_initialized()  # not even a group of one, to see that it works
    if os.environ.get("ACCELERATE_USE_FSDP") != "true" or alone:
        return None
    options = FullyShardedDataParallelPlugin()
    if options.fsdp_version != 2:
        raise RecipeError("accelerate launch --use_fsdp: give --fsdp_version 2 beside it")
    if isinstance(options.cpu_offload, CPUOffloadPolicy):
        raise RecipeError("accelerate launch --fsdp_offload_params true: training has no such thing, leave it out")
    copies, parts = sizes(accelerator.num_processes)
    if copies * parts != accelerator.num_processes:
        given = f"--parallelism_config_dp_replicate_size {copies} and --parallelism_config_dp_shard_size {parts}"
        raise RecipeError(
            f"accelerate launch: {given} are for {copies * parts} processes, not {accelerator.num_processes}"
        )
    return options


def sizes(processes: int) -> tuple[int, int]:
    """How many copies of the model there are, and over how many processes each is spread: one over all, or as the
    launcher's mesh has it (HSDP, hybrid sharding: Zhao et al. 2023). Raises RecipeError for other meshes."""
    if os.environ.get(MESH) != "true":
        return 1, processes
    given = ParallelismConfig()
    for name in ("tp", "cp", "sp"):
        if (size := getattr(given, f"{name}_size")) != 1:
            raise RecipeError(f"accelerate launch --parallelism_config_{name}_size {size}: training has no such thing")
    return given.dp_replicate_size, given.dp_shard_size


def shard(model: PreTrainedModel, options: FullyShardedDataParallelPlugin, accelerator: Accelerator) -> None:
    """Spread a model over processes, in place: one unit a block, and one for everything else.

    Embeddings and head lie in the same unit, so they may be tied. Optimisers are to be made afterwards. In bf16 weights
    travel rounded, gradients do not.
    """
    copies, parts = sizes(accelerator.num_processes)
    whole = (accelerator.num_processes,) if copies == 1 else (copies, parts)
    mesh = init_device_mesh(accelerator.device.type, whole, mesh_dim_names=("dp_replicate", "dp_shard")[-len(whole) :])
    rounded = accelerator.mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if rounded else MixedPrecisionPolicy()
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, mesh=mesh, reshard_after_forward=options.reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


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
