"""A model run without weights and without work: on the meta device a tensor has a shape and no data.

So the run shows what a real one would do (the shapes that go in and out of every module, each matrix product, when each
tensor is made and freed) for a model of any size. What is counted is what PyTorch does on a CPU.

Shapes: B batch, T length of the queries, S length of the keys, H heads.
"""

import copy
import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

import hf_scratch_transformer

from .. import ops_scratch
from ..files import reading

Shape = tuple[int, ...]
aten = torch.ops.aten
FUSED_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
HEAD_AND_LOSS = ops_scratch.operation.default
MOST_LAYERS = 10_000  # each takes a millisecond to build
MASKED_SHARE = 0.15  # of the tokens are targets of a masked language model: BERT, section 3.1


@dataclass
class Call:
    """One call of a module."""

    path: str  # "" for the model itself
    kind: str
    is_leaf: bool  # has no modules within
    weights: dict[str, Shape]
    inputs: dict[str, Shape] = field(default_factory=dict)
    outputs: list[Shape] = field(default_factory=list)
    scores: Shape | None = None  # of attention weights (B, H, T, S) made in this module, not in one within it
    flops: int = 0  # of its matrix products, without those of the modules within it


@dataclass(frozen=True)
class Run:
    """What a forward pass, or a forward and a backward pass, takes. Bytes do not count the weights."""

    calls: tuple[Call, ...]
    forward_flops: int
    flops: int
    kept: int  # bytes alive after the forward pass: for the backward pass, or as the cache of the next token
    peak: int  # most bytes alive at any time, gradients included


def build(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> PreTrainedModel:
    """The model of a configuration, on the meta device: of the class that `architectures` names or, without that, a
    language model.

    Args:
        attention: `"eager"` or `"sdpa"`. Default: what transformers takes for this model.

    Raises:
        ValueError: if no class of transformers or ours is made from this configuration, it does not work on tokens, or
            has so many layers that it would take minutes.
    """
    for name in ("num_hidden_layers", "encoder_layers", "decoder_layers"):
        layers = getattr(config, name, None)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            name = config.attribute_map.get(name, name)
            raise ValueError(
                f"{config.model_type} with {name}={layers}: more than {MOST_LAYERS:,} layers are not built"
            )
    with explained(config, lambda other: instantiate(other, dtype, attention)):
        model = instantiate(config, dtype, attention)
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name}; only models of tokens can be inspected"
        )
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False  # `prefill` asks for it
    return model


def instantiate(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> PreTrainedModel:
    """As `build`, but for what the libraries raise, which is left as it is."""
    config = copy.deepcopy(config)  # transformers writes in it
    options = {"dtype": dtype} | ({"attn_implementation": attention} if attention else {})
    with torch.device("meta"):
        return _model_class(config)._from_config(config, **options)


@contextmanager
def explained(config: PreTrainedConfig, works: Callable[[PreTrainedConfig], Any]) -> Iterator[None]:
    """Within it, a model is made of a configuration or run: whatever goes wrong becomes a `ValueError` that names the
    fields each of which, at its default, would let `works` succeed; if there are none such, all that differ from their
    defaults."""
    try:
        yield
    except Exception as error:
        defaults = type(config)()
        own = {name: value for name, value in config.to_dict().items() if value != getattr(defaults, name, value)}
        guilty = []
        for name in own:
            other = copy.deepcopy(config)
            with suppress(Exception):
                setattr(other, name, getattr(defaults, name))
                works(other)
                guilty.append(name)
        fields = ", ".join(f"{name}={own[name]!r}" for name in guilty or own)
        with reading(f"{config.model_type} with {fields} does not work"):
            raise error


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    for name in config.architectures or ():
        for module in (hf_scratch_transformer, transformers):
            found = getattr(module, name, None)
            if found is not None and getattr(found, "config_class", None) is type(config):
                return found
    generic = transformers.AutoModelForSeq2SeqLM
    if not config.is_encoder_decoder:
        # BERT and its like are in both tables; a decoder is only in that of causal language models.
        masked = transformers.AutoModelForMaskedLM
        is_masked = type(config) in masked._model_mapping and not getattr(config, "is_decoder", False)
        generic = masked if is_masked else transformers.AutoModelForCausalLM
    for auto_class in (generic, transformers.AutoModel):
        if type(config) in auto_class._model_mapping:
            found = auto_class._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"{type(config).__name__}: transformers has no model for it")


def make_inputs(model: PreTrainedModel, batch: int, length: int, source_length: int | None = None) -> dict[str, Tensor]:
    """Tokens without padding, (B, T) for `forward`; (B, S) and (B, T) for an encoder-decoder."""

    def tokens(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=model.device)

    if model.config.is_encoder_decoder:
        return {"input_ids": tokens(batch, source_length or length), "decoder_input_ids": tokens(batch, length)}
    if type(model).__name__.endswith("ForMultipleChoice"):
        return {"input_ids": tokens(batch, 2, length)}
    return {"input_ids": tokens(batch, length)}


def forward_backward(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    checkpointing: bool = False,
    loss_only: bool = False,
) -> Run:
    """The loss and its gradients.

    A language model is given labels for all tokens. Any other head's outputs are summed, which costs about what its
    loss does.

    Args:
        checkpointing: keep what goes into each layer only, and compute the rest again in the backward pass (Chen et
            al., 2016).
        loss_only: apply the head to the targets alone, as our own models do when asked: all tokens, or 15% of them for
            a masked language model.
    """
    model.train()
    given: dict[str, Any] = dict(inputs)
    targets = inputs.get("decoder_input_ids", inputs["input_ids"])
    if model.get_output_embeddings() is not None:
        given["labels"] = torch.zeros_like(targets)
    if loss_only:
        if not getattr(model, "supports_loss_only", False):
            raise ValueError(f"{type(model).__name__} has no loss_only: it always computes the logits of all tokens")
        given["loss_only"] = True
    if checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ValueError(f"{type(model).__name__} does not support gradient checkpointing")
        _checkpointing(model, True)
    with _tracing(model, _target_share(model, targets)) as tracer:
        with tracer.recording():
            loss = _loss(model(**given))
        kept, forward_flops = tracer.live, tracer.flops
        loss.backward()
    model.zero_grad(set_to_none=True)
    if checkpointing:
        _checkpointing(model, False)
    return Run(tuple(tracer.calls), forward_flops, tracer.flops, kept, tracer.peak)


def _checkpointing(model: PreTrainedModel, on: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions have other names for it; all have these
        if on:  # without data there is no random state to restore
            kwargs = {"use_reentrant": False, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        else:
            model.gradient_checkpointing_disable()


def _target_share(model: PreTrainedModel, targets: Tensor) -> float:
    if type(model).__name__.endswith("ForMaskedLM"):
        return MASKED_SHARE
    return 1.0 if model.config.is_encoder_decoder else 1 - 1 / targets.shape[-1]  # nothing follows the last token


def _loss(outputs: Any) -> Tensor:
    if (loss := outputs.get("loss")) is not None:
        return loss
    tensors = [leaf for leaf in tree_leaves(tuple(outputs.values())) if isinstance(leaf, Tensor)]
    return torch.stack([tensor.float().sum() for tensor in tensors if tensor.requires_grad]).sum()


@torch.no_grad()
def prefill(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Run:
    """What `generate` does with a prompt: one pass, logits for the last token only, keys and values kept."""
    model.eval()
    accepted = inspect.signature(model.forward).parameters
    options = {name: value for name, value in (("use_cache", True), ("logits_to_keep", 1)) if name in accepted}
    with _tracing(model) as tracer, tracer.recording():
        cache = model(**inputs, **options).get("past_key_values")
    if isinstance(cache, EncoderDecoderCache):
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    else:
        layers = cache.layers if cache is not None else []
    tensors = tree_leaves([list(vars(layer).values()) for layer in layers])
    kept = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
    return Run(tuple(tracer.calls), tracer.flops, tracer.flops, kept, tracer.peak)


@contextmanager
def _tracing(model: nn.Module, target_share: float = 1.0) -> Iterator["_Tracer"]:
    collects = gc.isenabled()
    gc.disable()  # when it would next free what refers to itself is chance
    try:
        with (
            mock.patch.object(F, "scaled_dot_product_attention", _attend),
            mock.patch.object(ops_scratch, "CHUNK", ops_scratch.CPU_CHUNK),  # memory is told as on a CPU
            mock.patch.object(ops_scratch, "_has_any_global_hook", lambda: False),  # those of `recording` are no reason
            _Tracer(model, target_share) as tracer,
        ):
            yield tracer
    finally:
        if collects:
            gc.enable()


@functools.cache
def _makes_views(func: Any) -> bool:
    return any(value.alias_info is not None for value in func._schema.returns)


def _description(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_description, value))
    return type(value), value  # 1, 1.0 and True are equal, but do not give the same dtype


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


class _Made:
    """A new tensor on the meta device that an operation made, to make another like it."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Tracer(TorchDispatchMode):
    """Sees every operation inside it: counts matrix products, and bytes as tensors are made and freed."""

    def __init__(self, model: nn.Module, target_share: float = 1.0) -> None:
        super().__init__()
        self.model, self.target_share = model, target_share
        self.live = self.peak = self.flops = 0
        self.calls: list[Call] = []
        self.stack: list[Call] = []
        self.storages: dict[int, weakref.ref] = {}
        self.made: dict[Any, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._hold(tensor, counted=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is HEAD_AND_LOSS:
            with self:  # it is one operation to a compiler alone
                return ops_scratch.cross_entropy_in_chunks(*args, **kwargs)
        if func is aten.nonzero.default and args[0].is_meta:
            out = args[0].new_zeros((self._places(args[0]), args[0].ndim), dtype=torch.long)
            self._hold(out)
            return out
        if func in INDEXING:
            args = (args[0], [place for index in args[1] for place in self._selected(index)], *args[2:])
        if func is aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # "is there no padding?", "is each row one document?", asked by transformers
        out = self._result(func, args, kwargs)
        self._count(func._overloadpacket, args, kwargs, out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._hold(leaf)
        return out

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation makes of its arguments. Its shape follows from theirs, which PyTorch works out slowly and a
        deep model asks again in every layer: each question is put once."""
        if _makes_views(func):
            return func(*args, **kwargs)
        key = (func, _description(args), *((name, _description(value)) for name, value in kwargs.items()))
        if (made := self.made.get(key)) is None:
            out = func(*args, **kwargs)
            given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            leaves = [leaf for leaf in tree_leaves(out) if leaf is not None]
            if all(_is_meta(leaf) and leaf.untyped_storage()._cdata not in given for leaf in leaves):
                self.made[key] = tree_map_only(Tensor, _Made, out)
            return out
        return tree_map_only(_Made, _Made.again, made)

    def _selected(self, index: Tensor | None) -> list[Tensor | None]:
        """The indices behind one of them."""
        if index is None or index.dtype != torch.bool:
            return [index]
        return [index.new_zeros(self._places(index), dtype=torch.long)] * index.ndim

    def _places(self, mask: Tensor) -> int:
        """A mask without data selects as many places as there would be targets."""
        return max(1, round(mask.numel() * self.target_share))

    def _count(self, operation: Any, args: Any, kwargs: Any, out: Any) -> None:
        count = 0
        if operation is FUSED_ATTENTION:
            query, key, value = self._repeated(tensor.shape for tensor in args[:3])
            count = sdpa_flop_count(query, key, value)
            self._scores((*query[:3], key[2]))
        elif operation is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            count = sdpa_backward_flop_count(*self._repeated(tensor.shape for tensor in args[:4]))
        elif operation in flop_registry:
            count = flop_registry[operation](*args, **kwargs, out_val=out)
        elif operation in (aten._softmax, aten._safe_softmax):
            self._scores(out.shape)
        self.flops += count
        if self.stack:
            self.stack[-1].flops += count

    def _repeated(self, shapes: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
        """Shapes (B, H, T, d) with as many heads as the first has: the counters of torch 2.11 know no groups."""
        first, *others = shapes
        return [tuple(first), *((shape[0], first[1], *shape[2:]) for shape in others)]

    def _scores(self, shape: Sequence[int]) -> None:
        if self.stack and len(shape) == 4:
            self.stack[-1].scores = tuple(shape)

    def _hold(self, tensor: Tensor, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counted else 0
        if key in self.storages:
            return

        def free(_: Any) -> None:
            del self.storages[key]
            self.live -= size

        self.storages[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, every call of a module of the model is written down. By hooks on all modules there are, since one
        that has hooks of its own is treated differently, as our head is when only the loss is asked for."""
        paths = {module: path for path, module in self.model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            if module in paths:
                weights = {name: tuple(weight.shape) for name, weight in module.named_parameters(recurse=False)}
                is_leaf = not any(module.children())
                self.calls.append(Call(paths[module], type(module).__name__, is_leaf, weights))
                self.stack.append(self.calls[-1])

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module in paths:
                call = self.stack.pop()
                named = dict(zip(_argument_names(type(module).forward), args, strict=False)) | kwargs
                for name, shapes in zip(named, map(_shapes, named.values()), strict=True):
                    several = len(shapes) > 1
                    call.inputs |= {f"{name}[{i}]" if several else name: shape for i, shape in enumerate(shapes)}
                call.outputs = _shapes(output)

        handles = [
            modules.register_module_forward_pre_hook(enter),
            modules.register_module_forward_hook(leave, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
                # torch 2.11 to 2.13 forget this mark, which slows every later call of every module.
                modules._global_forward_hooks_with_kwargs.pop(handle.id, None)


@functools.cache
def _argument_names(forward: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _shapes(value: Any) -> list[Shape]:
    return [tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _attend(
    query: Tensor,  # (B, H, T, d_k)
    key: Tensor,  # (B, H/groups, S, d_k)
    value: Tensor,  # (B, H/groups, S, d_v)
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by the kernel that a CPU takes: a tensor without data would always get the formula
    written out, which keeps a matrix of scores."""
    options = {"scale": scale, "enable_gqa": enable_gqa}

    # The choice depends neither on batch nor on lengths.
    samples = [torch.empty_like(tensor[:1, :, :1], device="cpu") for tensor in (query, key, value)]
    mask = attn_mask if attn_mask is None else torch.empty(1, 1, 1, 1, dtype=attn_mask.dtype)
    choice = torch._fused_sdp_choice(*samples, mask, dropout_p, is_causal, **options)  # type: ignore
    if choice != torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        return aten.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    return FUSED_ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def count_flops(step: Callable[[], Any], device_type: str) -> int:
    """Floating-point operations of a call that computes, not compiled: 2 for each multiplication and addition of its
    matrix products; of attention all T × T of them, also where it is causal."""
    counter = FlopCounterMode(display=False)
    # The counter does not know the CPU's fused attention; written out, it has the same products.
    written_out = sdpa_kernel(SDPBackend.MATH) if device_type == "cpu" else nullcontext()
    with torch.compiler.set_stance("force_eager"), written_out, counter:
        step()
    return counter.get_total_flops()
