"""FSDP2 (Zhao et al. 2023; torch's `fully_shard`) and tensor parallelism (Shoeybi et al. 2019; torch's
`parallelize_module`): weights, gradients and optimiser states spread over the processes.

`accelerate launch --use_fsdp --fsdp_version 2` asks for the first, `--use_parallelism_config` for several such copies
(HSDP) and for the second, in which some processes work on the same batch, each with its share of every head and matrix.
Where there is no GPU, Accelerate's own FSDP2 becomes data parallelism in silence; what is done here is the same on gloo
and on NCCL, so that tests without a GPU test it.
"""

import contextlib
import ctypes
import json
import logging
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce, get_rank, is_initialized
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_scratch_transformer.configuration_scratch import POSITIONS
from hf_scratch_transformer.files import write_text

from .sections import RecipeError

FILE_SIZE = "500MB"  # of weights in a repository of the Hub, which one process has to hold
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # by their names in malloc.h
LARGE = 2**18  # bytes: of a tensor that is asked for by itself under FSDP2
MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"  # what `accelerate launch --use_parallelism_config` sets


@contextlib.contextmanager
def unmeshed() -> Iterator[None]:
    """Accelerate is not told of the mesh that `shard` makes: on a CPU it would refuse it."""
    given = os.environ.pop(MESH, None)
    try:
        yield
    finally:
        if given is not None:
            os.environ[MESH] = given


def plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """What the launcher asks for; None when that spreads no weights, or when there is nobody to share with.

    Raises RecipeError for FSDP1, for options of FSDP2 that would be left undone, and for a mesh of other processes.
    """
    alone = accelerator.num_processes == 1 and not is_initialized()  # not even a group of one, to see that it works
    has_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if alone or not (has_fsdp or sizes(accelerator.num_processes).tp > 1):
        return None
    options = FullyShardedDataParallelPlugin() if has_fsdp else FullyShardedDataParallelPlugin(fsdp_version=2)
    if options.fsdp_version != 2:
        raise RecipeError("accelerate launch --use_fsdp: give --fsdp_version 2 beside it")
    if isinstance(options.cpu_offload, CPUOffloadPolicy):
        raise RecipeError("accelerate launch --fsdp_offload_params true: training has no such thing, leave it out")
    mesh = sizes(accelerator.num_processes)
    if math.prod(mesh) != accelerator.num_processes:
        given = ", ".join(f"--parallelism_config_{name}_size {size}" for name, size in mesh._asdict().items())
        raise RecipeError(
            f"accelerate launch: {given} are for {math.prod(mesh)} processes, not {accelerator.num_processes}"
        )
    return options


class Sizes(NamedTuple):
    """How processes share the work, by Accelerate's names. Neighbours are of one tensor-parallel group."""

    dp_replicate: int = 1  # copies of the model (HSDP, hybrid sharding: Zhao et al. 2023)
    dp_shard: int = 1  # over which each is spread by FSDP
    tp: int = 1  # that work on the same batch, each with its share of every head and matrix

    @property
    def parts(self) -> int:
        """Among how many processes the states of one copy are divided."""
        return self.dp_shard * self.tp


def sizes(processes: int) -> Sizes:
    """One copy, spread over all, or as the launcher's mesh has it. Raises RecipeError for other meshes."""
    if os.environ.get(MESH) != "true":
        return Sizes(dp_shard=processes)
    given = ParallelismConfig()
    for name in ("cp", "sp"):
        if (size := getattr(given, f"{name}_size")) != 1:
            raise RecipeError(f"accelerate launch --parallelism_config_{name}_size {size}: training has no such thing")
    return Sizes(given.dp_replicate_size, given.dp_shard_size, given.tp_size)


def share(accelerator: Accelerator, options: FullyShardedDataParallelPlugin | None) -> tuple[int, int]:
    """Which share of the batches this process has, and of how many; a tensor-parallel group has one."""
    tp = 1 if options is None else sizes(accelerator.num_processes).tp
    return accelerator.process_index // tp, accelerator.num_processes // tp


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
    every = sizes(accelerator.num_processes)._asdict()
    used = {name: size for name, size in every.items() if size > 1 or name == "dp_shard"}
    whole = init_device_mesh(accelerator.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
    mesh = whole[tuple(name for name in used if name != "tp")]
    rounded = accelerator.mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if rounded else MixedPrecisionPolicy()
    if accelerator.device.type == "cpu":
        _return_freed_memory()
    if unfilled is not None:
        unfilled.note(model)
    partial_norms = split(model, whole["tp"]) if "tp" in used else []
    uses = Counter(map(id, _parameters(model)))
    for module in model.modules():
        is_apart = all(uses[each] == count for each, count in Counter(map(id, _parameters(module))).items())
        if is_apart and type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, mesh=mesh, reshard_after_forward=options.reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if unfilled is not None:
        unfilled.fill(model, accelerator.device)
    for norm in partial_norms:
        for parameter in norm.parameters():
            parameter.register_post_accumulate_grad_hook(partial(_sum_gradient, group=whole["tp"].get_group()))
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")


def _return_freed_memory() -> None:
    """Let glibc ask the system for each large tensor and give it back. In its heap what is gathered for one block
    leaves holes that activations begin to fill, so that the next is put elsewhere: three times the memory."""
    glibc("mallopt", M_MMAP_THRESHOLD, LARGE)


def glibc(function: str, *numbers: int) -> None:
    """Call a function of the C library about memory; one that is not glibc has none of the kind."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), function)(*numbers)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights of a model are spread over processes, which then can only go forward together."""
    return isinstance(model, FSDPModule)


# --- Tensor parallelism ---------------------------------------------------------------------------------------------

STYLES: dict[str, Callable[[], ParallelStyle]] = {  # by the names that transformers' plans give them
    "colwise": ColwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
}
HEADS = ("num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads")
# Weights that all have, each with the gradient from its own heads: norms of queries and keys.
PARTIAL = "replicated_with_grad_allreduce"


def split(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each process of a tensor-parallel group its share of heads and matrices, in place, by the plan that the
    model's configuration declares. Returns the modules whose gradients have to be summed over the group.

    Raises RecipeError for a model without a plan, with a style in it that is not known here, or whose heads or widths
    cannot be shared out evenly.
    """
    # Where both share out the same rows, parts of parts are put together in two steps, which torch says each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plan, count, kind = model.tp_plan, mesh.size(), type(model).__name__
    if not plan:
        raise RecipeError(f"model: {kind} declares no plan of tensor parallelism: --parallelism_config_tp_size 1")
    if unknown := sorted({style for style in plan.values() if style not in STYLES and style != PARTIAL}):
        raise RecipeError(f"model: {kind} is split in ways that training does not know: {', '.join(unknown)}")
    biases = {name for name, positions in POSITIONS.items() if positions.is_bias}
    names: dict[str, set] = {"qk_norm_across_heads": {True}, "position_embedding_type": biases}
    for name, alone in names.items():
        if (value := getattr(model.config, name, None)) in alone:  # what all heads have together
            raise RecipeError(f"model.{name} {value}: cannot be shared out among {count} processes")
    for name in HEADS:
        if (heads := getattr(model.config, name, None) or count) % count:
            raise RecipeError(f"model.{name} {heads}: cannot be shared out among {count} processes")
    modules = dict(model.named_modules())
    styles = {name: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name in modules}
    tables = {id(module.weight): name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    ties, inputs = _ties(model), defaultdict[str, _Read](lambda: _Read(mesh))
    for name, module in modules.items():
        if styles[name] is not None and (table := tables.get(id(getattr(module, "weight", None)))) is not None:
            styles[table] = "embedding_rowwise"  # which is tied to a head that is split
        width = module.weight.shape[styles[name] == "rowwise"] if isinstance(module, nn.Linear) else count
        if styles[name] in ("colwise", "rowwise") and width % count:
            raise RecipeError(f"model: the width {width} of {name} cannot be shared out among {count} processes")
    for name, style in styles.items():
        if style in STYLES:
            module = modules[name]
            if "colwise" in style:
                inputs[parent := name.rpartition(".")[0]].readers += 1
                module.register_forward_pre_hook(inputs[parent])
            parallelize_module(module, mesh, STYLES[style](), src_data_rank=None)
    _tie(model, ties)
    return [modules[name] for name, style in styles.items() if style == PARTIAL]


class _Read:
    """An input that all processes have, as the same DTensor for all matrices of a module that read it: the gradients
    that come back from them are summed before they are summed over the group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.readers, self.left = mesh, 0, 0
        self.given: Tensor | None = None
        self.replicated: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor, *rest = inputs
        if tensor is not self.given:
            replicated = DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
            self.given, self.replicated, self.left = tensor, replicated, self.readers
        read, self.left = self.replicated, self.left - 1
        if not self.left:  # nobody else will, and it is large
            self.given = self.replicated = None
        return read, *rest


def _sum_gradient(parameter: Tensor, group: ProcessGroup) -> None:
    assert isinstance(parameter.grad, DTensor)
    all_reduce(parameter.grad.to_local(), group=group)


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, of which one that is tied has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Make one again of what was one."""
    for first, *others in ties:
        for other in others:
            path, _, key = other.rpartition(".")
            model.get_submodule(path)._parameters[key] = model.get_parameter(first)


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
        self.stack = contextlib.ExitStack()
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
        ties = _ties(model)
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        _tie(model, ties)
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


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all tensors as one vector; all processes call it, with tensors that may lie on several meshes."""
    layouts: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        layouts.setdefault(layout, []).append(tensor)
    norms = [full_tensor(get_total_norm(some)) for some in layouts.values()]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def clip_norm(model: nn.Module, most: float) -> Tensor:
    """Scale the gradients of a model down to a norm, as `torch.nn.utils.clip_grad_norm_` does; returns the one that
    they had."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = total_norm(gradients)
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    torch._foreach_mul_(own, (most / (norm + 1e-6)).clamp(max=1.0))
    return norm


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
    meshes = [tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)]
    if not meshes:
        return (0, 1) if not is_initialized() or get_rank() == 0 else None
    mesh = max(meshes, key=lambda each: each.ndim)  # some are not split among a tensor-parallel group
    at = dict(zip(mesh.mesh_dim_names or (), zip(mesh.get_coordinate() or (), mesh.shape, strict=True), strict=True))
    copy, _ = at.pop("dp_replicate", (0, 1))
    index, count = 0, 1
    for coordinate, size in at.values():
        index, count = index * size + coordinate, count * size
    return None if copy else (index, count)


class Part(NamedTuple):
    """What one process has of a tensor."""

    values: Tensor
    offset: tuple[int, ...]  # of its first element in the whole

    def copied(self) -> "Part":
        """In main memory, where nobody else writes."""
        return Part(self.values.detach().to("cpu", copy=True), self.offset)


def part(tensors: Mapping[str, Tensor], index: int) -> dict[str, Part]:
    """What this process has of sharded tensors; what is not sharded belongs to the first part."""
    parts: dict[str, Part] = {}
    for name, tensor in tensors.items():
        is_split = isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.numel() if is_split else index == 0:
            is_whole = not isinstance(tensor, DTensor)
            parts[name] = Part(own, (0,) * tensor.ndim if is_whole else tuple(each.start for each in _extent(tensor)))
    return parts


def _extent(tensor: Any) -> tuple[slice, ...]:
    """Where the part that this process has of a DTensor lies in it."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


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
    own = tensor[_extent(other)].to(other.device).contiguous()
    layout, strides = (other.device_mesh, other.placements), other.stride()
    return DTensor.from_local(own, *layout, run_check=False, shape=other.shape, stride=strides)
