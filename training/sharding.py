"""FSDP2 (Zhao et al. 2023; torch's `fully_shard`): weights, gradients and optimiser states spread over the processes.

`accelerate launch --use_fsdp --fsdp_version 2` asks for it, `--use_parallelism_config` for several such copies (HSDP).
Where there is no GPU, Accelerate's own FSDP2 becomes data parallelism in silence; what is done here is the same on gloo
and on NCCL, so that tests without a GPU test it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import get_rank, is_initialized
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_scratch_transformer.files import write_text

from .sections import RecipeError

FILE_SIZE = "500MB"  # of weights in a repository of the Hub, which one process has to hold
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


def shard(
    model: PreTrainedModel,
    options: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    unfilled: "Unfilled | None" = None,
) -> None:
    """Spread a model over processes, in place: one unit a block, and one for everything else, in which is also what is
    tied. Weights that have no memory yet get it then, and their values.

    Optimisers are to be made afterwards. In bf16 weights travel rounded, gradients do not.
    """
    copies, parts = sizes(accelerator.num_processes)
    whole = (accelerator.num_processes,) if copies == 1 else (copies, parts)
    mesh = init_device_mesh(accelerator.device.type, whole, mesh_dim_names=("dp_replicate", "dp_shard")[-len(whole) :])
    rounded = accelerator.mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if rounded else MixedPrecisionPolicy()
    if unfilled is not None:
        unfilled.note(model)
    uses = Counter(map(id, _parameters(model)))
    for module in model.modules():
        is_apart = all(uses[each] == count for each, count in Counter(map(id, _parameters(module))).items())
        if is_apart and type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, mesh=mesh, reshard_after_forward=options.reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if unfilled is not None:
        unfilled.fill(model, accelerator.device)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights of a model are spread over processes, which then can only go forward together."""
    return isinstance(model, FSDPModule)


# --- Weights that are drawn where they will lie ---------------------------------------------------------------------

DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class _Draws(TorchDispatchMode):
    """Of every tensor the state of the random numbers before it is last filled with some. A tensor without memory gets
    none, but as many are drawn as it would take; one with memory gets those it would have got then."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, Tensor] = {}  # by storage
        self.wanted: dict[int, Tensor | None] = {}  # of tensors with memory, by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in DRAWS:
            return func(*args, **kwargs or {})
        tensor, *rest = args
        storage = tensor.untyped_storage()._cdata
        if tensor.is_meta:
            self.states[storage] = torch.get_rng_state()
            func(torch.empty_like(tensor, device="cpu"), *rest, **kwargs or {})
        else:
            if (state := self.wanted.get(storage)) is not None:
                torch.set_rng_state(state)
            func(tensor, *rest, **kwargs or {})
        return tensor


class Unfilled:
    """A model that is built within it has parameters without memory; `fill` gives their values to what they become."""

    def __init__(self) -> None:
        self.draws = _Draws()

    def __enter__(self) -> "Unfilled":
        self.stack = ExitStack()
        self.stack.enter_context(init_empty_weights(include_buffers=False))
        self.stack.enter_context(self.draws)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def note(self, model: PreTrainedModel) -> None:
        """Which parameter is which, before they are sharded; those that are tied are one again."""
        model.tie_weights()
        self.states = {
            name: self.draws.states.get(parameter.untyped_storage()._cdata)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    @torch.no_grad()
    def fill(self, model: PreTrainedModel, device: torch.device) -> None:
        """The values that `model` would have been built with, of which no process holds more than a module's at once.

        Raises RecipeError for a model that draws weights elsewhere than where transformers wants it to.
        """
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        names: dict[int, list[str]] = {}  # of parameters, of which one may be several
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for first, *others in names.values():
            for other in others:
                path, _, key = other.rpartition(".")
                model.get_submodule(path)._parameters[key] = model.get_parameter(first)
        before, done = torch.get_rng_state(), set[int]()
        owners = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
        for name, module in model.named_modules():
            owner = next(owners[each] for each in sorted(owners, key=len, reverse=True) if _is_in(name, each))
            sharded = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
            if all(id(parameter) in done for parameter in sharded.values()):
                continue
            self.draws.wanted.clear()
            for key, parameter in sharded.items():
                whole = nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=parameter.dtype))
                self.draws.wanted[whole.untyped_storage()._cdata] = self.states[f"{name}.{key}".lstrip(".")]
                module._parameters[key] = whole
            with self.draws:
                owner._init_weights(module)
            for key, parameter in sharded.items():
                whole, module._parameters[key] = module._parameters[key], parameter
                if id(parameter) not in done and whole.isnan().any():
                    raise RecipeError(f"model: {type(owner).__name__} does not say how {name}.{key} begins")
                if id(parameter) not in done:  # one that is tied begins as the first that it is tied to
                    parameter.copy_(like(whole.data, parameter))
                done.add(id(parameter))
        torch.set_rng_state(before)


def _is_in(name: str, part: str) -> bool:
    return not part or f"{name}.".startswith(f"{part}.")


# --- Tensors --------------------------------------------------------------------------------------------------------


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; all processes have to call it. Others are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each tied one once; maybe sharded."""
    seen: set[int] = set()
    result = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            result[name] = tensor.detach()
    return result


def place(model: nn.Module) -> tuple[int, int] | None:
    """Which part of the weights this process has, and of how many; of several copies, only one has parts."""
    mesh = next((tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return (0, 1) if not is_initialized() or get_rank() == 0 else None
    *copy, index = mesh.get_coordinate() or (0,)
    return None if any(copy) else (index, mesh.shape[-1])


def part(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """This process's rows of sharded tensors; what is not sharded belongs to the first part."""
    rows: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_split = isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.numel() if is_split else index == 0:
            rows[name] = own
    return rows


def save_pretrained(model: PreTrainedModel, folder: Path) -> None:
    """What `model.save_pretrained` writes, of which this process holds one file of weights at a time, while the others
    go through `hub_files` as well."""
    plain = type(model).__mro__[2]  # before FSDP made a class of its own of it
    with init_empty_weights():
        skeleton = plain(model.config)
    if model.can_generate():
        skeleton.generation_config = model.generation_config
    skeleton.save_pretrained(folder, state_dict={})
    (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
    for name, content in hub_files(model, keep=True):
        if name == SAFE_WEIGHTS_INDEX_NAME:
            write_text(folder / name, json.dumps(content, indent=2, sort_keys=True) + "\n")
        else:
            save_file(content, folder / name, {"format": "pt"})


def hub_files(model: PreTrainedModel, keep: bool) -> Iterator[tuple[str, Any]]:
    """The files that hold weights in a repository of the Hub, by name, and their index: put together one after the
    other, in main memory of the processes that `keep` them. All processes go through them."""
    tensors = weights(model)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_SIZE,
    )
    for file, names in split.filename_to_tensors.items():
        yield file, gather({name: tensors[name] for name in names}, keep)
    if split.is_sharded:
        yield SAFE_WEIGHTS_INDEX_NAME, {"metadata": split.metadata, "weight_map": split.tensor_to_filename}


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
    if isinstance(tensor, DTensor) and isinstance(other, DTensor) and tensor.placements == other.placements:
        return tensor
    tensor = full_tensor(tensor)
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
