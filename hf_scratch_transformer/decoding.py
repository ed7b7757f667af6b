"""Decoding on a CPU by one compiled graph a token, for transformers' `generate`.

    decode = CompiledDecoding()
    model.generate(**inputs, custom_generate=decode)

A step of eager decoding waits for the interpreter more than for the arithmetic. Here a step is one graph of
TorchInductor on a static cache. Of a single row, products of matrices are written as sums, which the compiler fuses
with what is around them, and which run at the speed of memory.

Shapes: B rows, T tokens of a prompt, L tokens so far, S tokens of the source, D input and F output width of a matrix.
"""

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.nn import functional as F
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMode

from .stack_scratch import ScratchPreTrainedModel

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Inputs, also those that `generate` itself makes.
READ = {"attention_mask", "encoder_outputs", "past_key_values", "use_cache", "logits_to_keep", "position_ids"}
LEAST_SLOTS = 64  # of a cache, doubled until all tokens fit: few sizes, few graphs
INDUCTOR = {"cpp_wrapper": True}
COMPILING = threading.Lock()  # a model's products are others meanwhile

Next = tuple[Tensor, Tensor]  # the last token's logits (B, V) in single precision, and the likeliest next tokens (B, 1)


class CompiledDecoding:
    """Greedy search and sampling, to be given to `generate` as `custom_generate`, for any number of calls.

    Tokens are those of `generate` without it. A graph is compiled, in some ten seconds, at the first call for each
    model, number of rows, and number of tokens and of source tokens, both rounded up to powers of two; it holds the
    weights that it was made of. A model that computes otherwise since (another attention backend, say) wants a new
    object. transformers does not hand a `streamer` to a `custom_generate`.
    """

    def __init__(self, backend: Any = "inductor") -> None:  # of torch.compile
        self.backend = backend
        self.steps: dict[tuple[Any, ...], Step] = {}

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,  # (B, T); of the target, if there is a source
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,  # attention_mask (B, T), or of the source (B, S); encoder_outputs
    ) -> Tensor:
        """The tokens (B, L), prompts included.

        Raises:
            ValueError: on a model that is not on a CPU, has sliding windows or is being trained; on another mode, more
                asked for than tokens, or more tokens than learned positions; under autocast; without a C++ compiler.
        """
        refuse(model, generation_config, model_kwargs)
        slots, rows = slots_for(generation_config.max_length), len(input_ids)
        mask, encoded = model_kwargs.get("attention_mask"), model_kwargs.get("encoder_outputs")
        positions: Tensor | None = None
        if encoded is None:
            inputs, positions = of_language_model(model, input_ids, mask, slots)
        else:
            inputs = of_translator(model, mask, encoded[0], slots)
        if model_kwargs.get("position_ids") is not None:  # with which `generate` goes on, too
            positions = model_kwargs["position_ids"].long()
        shapes = tuple(tuple(each.shape) for each in inputs.values() if isinstance(each, Tensor))
        # Others may stand in their place, as after `load_state_dict(assign=True)`.
        weights = tuple(map(id, model.parameters()))
        key = (model, model.dtype, weights, rows, slots, shapes, torch.get_num_threads())
        step = self.steps.setdefault(key, Step(self.backend, model)).bind(inputs)
        if encoded is None or input_ids.shape[1] > 1:  # prompts have any length: not compiled
            logits, tokens = next_tokens(model, input_ids, positions, inputs)
        else:
            logits, tokens = step(input_ids.long(), None)  # a graph does not look at types again
        is_over = ending(stopping_criteria, rows)
        unfinished, pad = torch.ones(rows, dtype=torch.bool), generation_config._pad_token_tensor
        may_pad = rows > 1 and any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        is_plain = not logits_processor and not generation_config.do_sample
        while True:
            if not is_plain:
                tokens = chosen(logits_processor(input_ids, logits), generation_config.do_sample)
            if may_pad:
                tokens = torch.where(unfinished[:, None], tokens, pad)
            input_ids = torch.cat([input_ids, tokens], dim=1)
            if is_over(input_ids, logits, unfinished):
                return input_ids
            positions = None if positions is None else positions[:, -1:] + 1
            logits, tokens = step(tokens, positions)


def ending(criteria: StoppingCriteriaList, rows: int) -> Callable[[Tensor, Tensor, Tensor], bool]:
    """Whether all rows are over, of the tokens so far (B, L) and the last logits; it notes which are (B).

    What `generate` asks of a single row by itself needs no operation on tensors: each takes as long as a small layer.
    """

    def is_over(input_ids: Tensor, logits: Tensor, unfinished: Tensor) -> bool:
        unfinished &= ~criteria(input_ids, logits)
        return not unfinished.any()

    usual = {type(criterion): criterion for criterion in criteria}
    if rows > 1 or len(usual) < len(criteria) or not usual.keys() <= {MaxLengthCriteria, EosTokenCriteria}:
        return is_over
    ends = set(usual[EosTokenCriteria].eos_token_id.tolist()) if EosTokenCriteria in usual else set()
    longest = usual[MaxLengthCriteria].max_length if MaxLengthCriteria in usual else math.inf
    return lambda input_ids, logits, unfinished: input_ids.shape[1] >= longest or int(input_ids[0, -1]) in ends


class Step:
    """`next_tokens` as one graph, given tensors alone.

    What torch.compile returns looks every weight up by its name again at each call, longer than the arithmetic of a
    small model takes. Here the weights are those of the first call.
    """

    def __init__(self, backend: Any, model: PreTrainedModel):
        self.backend, self.model = backend, model
        self.run: Callable[..., Any] | None = None
        self.tensors: list[Any]  # that the graph reads: weights, and places for what changes

    def bind(self, inputs: dict[str, Any]) -> Callable[[Tensor, Tensor | None], Next]:
        """The graph with the mask, states and cache of a call, which has as many of each as the first."""
        tensors: list[Any] = []

        def step(tokens: Tensor, positions: Tensor | None) -> Next:
            if self.run is None:
                return self.compile(tokens, positions, inputs)
            if not tensors:  # a cache has its own since the prompt
                tensors.extend(self.tensors)
                put(tensors_of(inputs), self.kept, tensors)
            put([tokens, positions], self.new, tensors)
            outputs = self.run(*tensors)
            logits, likeliest = (outputs[place] for place in self.results)
            return logits, likeliest

        return step

    def compile(self, tokens: Tensor, positions: Tensor | None, inputs: dict[str, Any]) -> Next:
        """The first call, of a function of its own: the graphs of a function are looked up by its code, of which there
        may be eight."""
        own = FunctionType(next_tokens.__code__.replace(), next_tokens.__globals__, next_tokens.__name__)
        graph = Graph(self.backend)
        function = torch.compile(own, fullgraph=True, dynamic=False, backend=graph.compile)
        with COMPILING, products(self.model, multiply_row if len(tokens) == 1 else nn.Linear.forward):
            results = function(self.model, tokens, positions, inputs)
        self.results = places(results, graph.outputs)
        self.new, self.kept = places([tokens, positions], graph.inputs), places(tensors_of(inputs), graph.inputs)
        self.tensors = graph.inputs
        put([None] * len(self.new + self.kept), self.new + self.kept, self.tensors)
        self.run = graph.run
        return results


class Graph:
    """A backend of torch.compile that makes of a graph what another does, and keeps that, and what its first call read
    and gave."""

    def __init__(self, backend: Any):
        self.backend = backend

    def compile(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        if self.backend == "inductor":
            self.run = torch._inductor.compile(graph, examples, options=INDUCTOR)
        else:
            self.run = lookup_backend(self.backend)(graph, examples)
        return self.first

    def first(self, *inputs: Any) -> Any:
        self.inputs, self.outputs = list(inputs), self.run(*inputs)
        return self.outputs


def put(tensors: Iterable[Any], where: Iterable[int | None], into: list[Any]) -> None:
    for place, tensor in zip(where, tensors, strict=True):
        if place is not None:
            into[place] = tensor


def places(tensors: Iterable[Any], among: Sequence[Any]) -> list[Any]:
    """Where each stands, or None."""
    indices = {id(tensor): index for index, tensor in enumerate(among)}
    return [indices.get(id(tensor)) for tensor in tensors]


def tensors_of(inputs: dict[str, Any]) -> list[Tensor]:
    """Mask, states of the source, and all that caches hold, always in the same order."""
    cache = inputs["past_key_values"]
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    held = [value for each in caches for layer in each.layers for value in vars(layer).values()]
    found = [inputs["attention_mask"], *inputs.get("encoder_outputs", ()), *held]
    return [each for each in found if isinstance(each, Tensor)]


def refuse(model: PreTrainedModel, generation_config: Any, given: dict[str, Any]) -> None:
    """Say what cannot be decoded so."""
    mode = generation_config.get_generation_mode()
    text_config = model.config.get_text_config(decoder=True)
    more = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in more if getattr(generation_config, name, False)]
    ropes = getattr(text_config, "rope_parameters", None) or {}
    turned = {each.get("rope_type") for each in (ropes, *ropes.values()) if isinstance(each, dict)}
    known = READ - {"position_ids"} if model.config.is_encoder_decoder else READ
    unread = [name for name, value in given.items() if value is not None and name not in known]
    table = getattr(text_config, "max_position_embeddings", 0)
    is_learned = getattr(text_config, "position_embedding_type", None) == "learned"
    problems = {
        f"{type(model).__name__} is not one of ours: convert it": not isinstance(model, ScratchPreTrainedModel),
        f"{', '.join(unread)}: it reads tokens and their mask": bool(unread),
        f"max_length={generation_config.max_length} must be at most max_position_embeddings={table}": (
            is_learned and generation_config.max_length > table
        ),
        "rope_parameters that depend on the length": bool(turned & {"dynamic", "longrope"}),
        f"{model.device} must be cpu: elsewhere, generate compiles with cache_implementation='static'": (
            model.device.type != "cpu"
        ),
        f"{mode.value} must be one of {', '.join(each.value for each in MODES)}": mode not in MODES,
        f"{', '.join(asked)}: it gives tokens alone": bool(asked),
        "use_cache=False must be True": not generation_config.use_cache,
        "layer_types with sliding_attention: use cache_implementation='static'": (
            "sliding_attention" in (getattr(text_config, "layer_types", None) or ())
        ),
        f"{type(model).__name__} is in training: call eval()": model.training,
        "autocast: load the model in the precision to compute in": torch.is_autocast_enabled("cpu"),
        "no C++ compiler was found: install g++, or set CXX": shutil.which(os.environ.get("CXX", "g++")) is None,
    }
    if said := [problem for problem, is_there in problems.items() if is_there]:
        raise ValueError(f"CompiledDecoding: {'; '.join(said)}")


def slots_for(length: int) -> int:
    """The least power of two, from `LEAST_SLOTS`, that is no less."""
    return max(LEAST_SLOTS, 1 << (length - 1).bit_length())


def of_language_model(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, slots: int
) -> tuple[dict[str, Any], Tensor]:
    """What every step is given beside its tokens, and the positions of the prompt (B, T)."""
    mask = torch.ones_like(input_ids, dtype=torch.long) if attention_mask is None else attention_mask.long()
    cache = StaticCache(config=model.config, max_cache_len=slots)
    # Slots that are not filled yet are behind every query.
    padded = F.pad(mask, (0, slots - mask.shape[1]), value=1)
    inputs = {"attention_mask": padded.contiguous(), "past_key_values": cache}
    return inputs, (mask.cumsum(-1) - 1).clamp(min=0)


def of_translator(model: PreTrainedModel, attention_mask: Tensor | None, states: Tensor, slots: int) -> Any:
    """What every step of a target is given beside its tokens; states (B, S, D) are padded, for few lengths."""
    mask = states.new_ones(states.shape[:2], dtype=torch.long) if attention_mask is None else attention_mask.long()
    missing = slots_for(states.shape[1]) - states.shape[1]
    states = F.pad(states, (0, 0, 0, missing)).contiguous()
    config = model.config.get_text_config(decoder=True)
    own, cross = (StaticCache(config=config, max_cache_len=most) for most in (slots, states.shape[1]))
    cache = EncoderDecoderCache(own, cross)
    for block, layer in zip(model.get_decoder().layers, own.layers, strict=True):
        layer.lazy_initialization(*block.cross_attn.encoder_keys_and_values(states, cache))
    padded = F.pad(mask, (0, missing)).contiguous()
    return {"attention_mask": padded, "encoder_outputs": (states,), "past_key_values": cache}


def next_tokens(model: PreTrainedModel, tokens: Tensor, positions: Tensor | None, inputs: dict[str, Any]) -> Next:
    """A step."""
    if positions is None:
        outputs = model(decoder_input_ids=tokens, use_cache=True, **inputs)
    else:
        outputs = model(input_ids=tokens, position_ids=positions, use_cache=True, **inputs)
    logits = outputs.logits[:, -1].float()
    return logits, logits.argmax(-1, keepdim=True)


def chosen(scores: Tensor, is_drawn: bool) -> Tensor:
    """The best token of each row (B, 1), or one drawn."""
    return torch.multinomial(scores.softmax(-1), 1) if is_drawn else scores.argmax(-1, keepdim=True)


@contextmanager
def products(model: PreTrainedModel, multiply: Callable[[nn.Linear, Tensor], Tensor]) -> Iterator[None]:
    """Within it, matrices are multiplied so, whatever `generate` has put in place of that for its own steps."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    before = [vars(linear).get("forward") for linear in linears]
    for linear in linears:
        vars(linear)["forward"] = partial(multiply, linear)
    try:
        yield
    finally:
        for linear, forward in zip(linears, before, strict=True):
            vars(linear).pop("forward", None)  # where a `generate` beside this one has ended
            vars(linear).update({} if forward is None else {"forward": forward})


def multiply_row(linear: nn.Linear, input: Tensor) -> Tensor:  # (1, 1, D) -> (1, 1, F)
    """`linear(input)` as a sum over D of each output's products."""
    if input.numel() != linear.in_features:  # of a call beside the one that is compiled
        return nn.Linear.forward(linear, input)
    # What is looked at by strides is computed before: a norm, say, once, and not again for each of the outputs.
    row = input.contiguous().as_strided((1, linear.in_features), (linear.in_features, 1))
    output = (linear.weight * row).sum(-1)
    return (output if linear.bias is None else output + linear.bias).view(*input.shape[:-1], -1)
