"""Decoding on a CPU by one compiled graph a token, for transformers' `generate` or beside it.

    decode = CompiledDecoding()
    model.generate(**inputs, custom_generate=decode)
    decode.greedy(model, **inputs, max_new_tokens=100)

A step of eager decoding waits for the interpreter more than for the arithmetic. Here a step is one graph of
TorchInductor on a static cache. Of a single row, products of matrices and attention are written as sums, which the
compiler fuses with what is around them, and which run at the speed of memory.

Shapes: B rows, T tokens of a prompt, L tokens so far, S tokens of the source, C slots for these, H heads, D input and
F output width of a matrix.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import lookup_backend, mark_dynamic
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional as F
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.generation import GenerationMode

from .stack_scratch import ScratchPreTrainedModel

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Inputs, also those that `generate` itself makes.
READ = {"attention_mask", "encoder_outputs", "past_key_values", "use_cache", "logits_to_keep", "position_ids"}
# Of a generation config what greedy search heeds here, and what is of sampling and of beams alone.
HEEDED = {
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens"),
    *("do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("num_beams", "num_return_sequences", "early_stopping", "length_penalty", "diversity_penalty"),
    *("use_cache", "cache_implementation", "transformers_version"),
}
LEAST_SLOTS = 64  # of a cache, doubled until all tokens fit: few sizes, few graphs
INDUCTOR = {"cpp_wrapper": True}

Next = tuple[Tensor, Tensor]  # the last token's logits (B, V) in single precision, and the likeliest next tokens (B, 1)
Inputs = dict[str, Any]  # of every step, beside its tokens: mask, states of the source, cache
# The last three: weights by `id`, which adapters are put on them, and threads.
Identity = tuple[PreTrainedModel, torch.dtype, tuple[int, ...], tuple[Any, ...], int]


class CompiledDecoding:
    """Greedy search and sampling, to be given to `generate` as `custom_generate`, for any number of calls.

    Tokens are those of `generate` without it; in bfloat16, where two scores often round to the same, of nearly all
    texts. A graph is compiled, in some ten seconds, at the first call for each model, number of rows, and number of
    tokens and of source tokens, both rounded up to powers of two; it holds the model and the weights that it was made
    of. A model that computes otherwise since (another attention backend, say) wants a new object. transformers does
    not hand a `streamer` to a `custom_generate`.
    """

    def __init__(self, backend: Any = "inductor") -> None:  # of torch.compile
        self.backend = backend
        self.steps: dict[tuple[Any, ...], Compiled] = {}
        self.sources: dict[tuple[Any, ...], Compiled] = {}

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
        refuse(model, generation_config.max_length, unread(model, generation_config, model_kwargs))
        mask, source = model_kwargs.get("attention_mask"), None
        if (encoded := model_kwargs.get("encoder_outputs")) is not None:
            source = padded_source(model, encoded[0], mask_of(encoded[0], mask), slots_for(encoded[0].shape[1]))
        may_end = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        is_drawn = generation_config.do_sample

        def choose(input_ids: Tensor, logits: Tensor) -> Tensor:
            return chosen(logits_processor(input_ids, logits), is_drawn)

        is_over = ending(stopping_criteria, len(input_ids))
        return self.write(
            *(identity(model), input_ids, mask, source, generation_config.max_length, is_over),
            choose=choose if logits_processor or is_drawn else None,
            pad=generation_config._pad_token_tensor if may_end else None,
            positions=model_kwargs.get("position_ids"),
        )

    @torch.no_grad()
    def greedy(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,  # (B, T), or of the source (B, S)
        attention_mask: Tensor | None = None,  # of the same shape
        *,
        max_new_tokens: int,
    ) -> Tensor:
        """`model.generate(..., do_sample=False, num_beams=1)` without what that prepares anew for each call, in the
        time of some tokens: for short texts. A source is read by a graph, too.

        Returns:
            The tokens (B, L), of a language model prompts included.

        Raises:
            ValueError: as a call does; and where `model.generation_config` asks for what changes the tokens of greedy
                search, a penalty say.
        """
        if not model.can_generate():
            raise ValueError(f"CompiledDecoding: {type(model).__name__} writes no text")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be a whole number, at least 1")
        if input_ids.ndim != 2 or input_ids.is_floating_point():
            raise ValueError(f"input_ids must be integers (B, T), not {input_ids.dtype} {tuple(input_ids.shape)}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            given, fit = tuple(attention_mask.shape), tuple(input_ids.shape)
            raise ValueError(f"attention_mask of shape {given} must have that of input_ids, {fit}")
        config: Any = model.generation_config
        mask, prompt, source, problems = attention_mask, input_ids, None, unheeded(config)
        if model.config.is_encoder_decoder:
            start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
            if not isinstance(start, int):
                raise ValueError("generation_config needs one decoder_start_token_id, or bos_token_id, to begin with")
            prompt = input_ids.new_full((len(input_ids), 1), start)
        else:
            pads, mask = config.pad_token_id, mask if mask is not None else likely_mask(input_ids, config)
            problems[f"attention_mask ends with padding, of pad_token_id={pads} say: it must be on the left"] = (
                mask is not None and not bool(mask[:, -1].all())
            )
        length = prompt.shape[1] + max_new_tokens
        refuse(model, length, problems, source_length=input_ids.shape[1])
        made_of = identity(model)
        if model.config.is_encoder_decoder:
            source = self.read(made_of, input_ids, mask_of(input_ids, mask))
        criteria, pad = StoppingCriteriaList([MaxLengthCriteria(length)]), None
        if config.eos_token_id is not None:
            criteria.append(end := EosTokenCriteria(config.eos_token_id))
            pad = end.eos_token_id[0] if config.pad_token_id is None else torch.tensor(config.pad_token_id)
        return self.write(made_of, prompt, mask, source, length, ending(criteria, len(prompt)), pad=pad)

    def read(self, made_of: Identity, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """`padded_source` of tokens (B, S), by a graph of any S."""
        if input_ids.shape[1] == 1:  # to a compiler, one is not any number
            input_ids, mask = F.pad(input_ids, (0, 1)), F.pad(mask, (0, 1))
        slots = slots_for(input_ids.shape[1])
        key = (*made_of, len(input_ids), slots)
        graph = self.sources.setdefault(key, Compiled(self.backend, read_source, is_any_length=True))
        return graph.bind(made_of[0], {"slots": slots})(input_ids.long(), mask)

    def write(
        self,
        made_of: Identity,
        input_ids: Tensor,  # (B, T)
        mask: Tensor | None,  # (B, T) of a language model
        source: tuple[Tensor, ...] | None,
        max_length: int,
        is_over: Callable[[Tensor, Tensor, Tensor], bool],
        choose: Callable[[Tensor, Tensor], Tensor] | None = None,  # of tokens so far and logits, unless the likeliest
        pad: Tensor | None = None,  # for rows that are over before others
        positions: Tensor | None = None,  # (B, T)
    ) -> Tensor:  # -> (B, L)
        model, rows, slots = made_of[0], len(input_ids), slots_for(max_length)
        if source is None:
            inputs, counted = of_language_model(model, input_ids, mask, slots)
            positions = counted if positions is None else positions.long()
        else:
            inputs, positions = of_translator(source, slots), None
        key = (*made_of, rows, slots, inputs["attention_mask"].shape[1])
        step = self.steps.setdefault(key, Compiled(self.backend, next_tokens)).bind(model, inputs)
        if source is None or input_ids.shape[1] > 1:  # prompts have any length: not compiled
            logits, tokens = next_tokens(model, inputs, input_ids, positions)
        else:
            logits, tokens = step(input_ids.long(), None)  # a graph does not look at types again
        unfinished = torch.ones(rows, dtype=torch.bool)
        while True:
            if choose is not None:
                tokens = choose(input_ids, logits)
            if pad is not None and rows > 1:
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


# --- Graphs -----------------------------------------------------------------------------------------------------------


class Compiled:
    """A function of a model as one graph, given tensors alone: `function(model, inputs, *new)`.

    What torch.compile returns looks every weight up by its name again at each call, longer than the arithmetic of a
    small model takes. Here the weights are those of the first call.
    """

    def __init__(self, backend: Any, function: Callable[..., tuple[Tensor, ...]], is_any_length: bool = False):
        self.backend, self.function = backend, function
        self.is_any_length = is_any_length  # dimension 1 of what is new, at least 2
        self.run: Callable[..., Any] | None = None
        self.tensors: list[Any]  # that the graph reads: weights, and places for what changes

    def bind(self, model: PreTrainedModel, inputs: Inputs) -> Callable[..., tuple[Tensor, ...]]:
        """The graph with the inputs of a call, which have as many and as large tensors as the first."""
        tensors: list[Any] = []

        def call(*new: Tensor | None) -> tuple[Tensor, ...]:
            if self.run is None:
                return self.compile(model, inputs, new)
            if not tensors:  # a cache has its own since the prompt
                tensors.extend(self.tensors)
                put(tensors_of(inputs), self.kept, tensors)
            put(new, self.new, tensors)
            for place in self.lengths:
                tensors[place] = new[0].shape[1]  # type: ignore[union-attr]
            outputs = self.run(*tensors)
            return tuple(outputs[place] for place in self.results)

        return call

    def compile(self, model: PreTrainedModel, inputs: Inputs, new: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """The first call, of a function of its own: the graphs of a function are looked up by its code, of which there
        may be eight."""
        if self.is_any_length:
            new = tuple(each.clone() for each in new if each is not None)  # a caller's own are not marked
            for each in new:
                mark_dynamic(each, 1)
        function: Any = self.function
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        graph = Graph(self.backend)
        compiled = torch.compile(own, fullgraph=True, dynamic=False, backend=graph.compile)
        try:
            results: tuple[Tensor, ...] = compiled(model, inputs, *new)
        except (TorchDynamoException, RuntimeError) as error:  # of layers that another library has put in, say
            reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
            raise ValueError(f"CompiledDecoding: {type(model).__name__} cannot be one graph: {reason}") from error
        self.results = places(results, graph.outputs)
        self.new, self.kept = places(new, graph.inputs), places(tensors_of(inputs), graph.inputs)
        self.lengths = [place for place, each in enumerate(graph.inputs) if not isinstance(each, Tensor)]
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
        for node in graph.graph.nodes:
            node.target = OF_ONE_ROW.get(node.target, node.target) if node.op == "call_function" else node.target
        graph.recompile()
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
    return [None if tensor is None else indices.get(id(tensor)) for tensor in tensors]


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Mask, states of the source, and all that caches hold, always in the same order."""
    cache: Any = inputs.get("past_key_values")
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    held = [value for each in caches if each for layer in each.layers for value in vars(layer).values()]
    found = [inputs.get("attention_mask"), *inputs.get("encoder_outputs", ()), *held]
    return [each for each in found if isinstance(each, Tensor)]


def modules_of(model: PreTrainedModel) -> list[Any]:
    """All of them, in half the time that torch's own walk takes: they are looked at in every call."""
    modules: list[Any] = [model]
    for module in modules:  # which grows
        modules.extend(each for each in module._modules.values() if each is not None)
    return modules


def identity(model: PreTrainedModel) -> Identity:
    """What a graph of a model was made of. Other weights may stand in their place since, as after
    `load_state_dict(assign=True)`."""
    modules = modules_of(model)
    weights = tuple(id(weight) for module in modules for weight in module._parameters.values())
    # Names of PEFT's own: which adapters are added, or merged, or off.
    names = ("_disable_adapters", "_active_adapter", "merged_adapters")
    adapted = [module for module in modules if hasattr(type(module), "merged_adapters")]
    adapters = tuple(str([getattr(module, name, None) for name in names]) for module in adapted)
    return model, model.dtype, weights, adapters, torch.get_num_threads()


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # (..., D) -> (..., F)
    """`F.linear`, of one row as a sum over D of each output's products."""
    width = weight.shape[1]
    if input.numel() != width:
        return F.linear(input, weight, bias)
    # What is looked at by strides is computed before: a norm, say, once, and not again for each of the outputs.
    row = input.contiguous().as_strided((1, width), (width, 1))
    output = (weight * row).sum(-1)
    return (output if bias is None else output + bias).view(*input.shape[:-1], -1)


def attend(
    query: Tensor,  # (B, H, T, d_k)
    key: Tensor,  # (B, H/groups, C, d_k)
    value: Tensor,  # (B, H/groups, C, d_v)
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, of one query of one row as sums."""
    if query.shape[0] * query.shape[2] != 1 or dropout_p or is_causal:
        kernel: Any = F.scaled_dot_product_attention
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (key, value))
    scores = (query * key).sum(-1, keepdim=True) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        seen = attn_mask.transpose(-1, -2)
        scores = torch.where(seen, scores, -math.inf) if seen.dtype == torch.bool else scores + seen
    return (scores.softmax(2) * value).sum(2, keepdim=True)


OF_ONE_ROW: dict[Any, Any] = {F.linear: multiply, F.scaled_dot_product_attention: attend}


# --- What they compute ------------------------------------------------------------------------------------------------


def next_tokens(model: PreTrainedModel, inputs: Inputs, tokens: Tensor, positions: Tensor | None) -> Next:
    """A step."""
    if positions is None:
        outputs = model(decoder_input_ids=tokens, use_cache=True, **inputs)
    else:
        outputs = model(input_ids=tokens, position_ids=positions, use_cache=True, **inputs)
    logits = outputs.logits[:, -1].float()
    return logits, logits.argmax(-1, keepdim=True)


def read_source(model: PreTrainedModel, inputs: Inputs, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """`padded_source` of tokens (B, S)."""
    states = model.get_encoder()(input_ids, mask)[0]
    return padded_source(model, states, mask, inputs["slots"])


def padded_source(model: PreTrainedModel, states: Tensor, mask: Tensor, slots: int) -> tuple[Tensor, ...]:
    """All that a translation reads of its source: the mask (B, C), and of each layer keys and values (B, H, C, d)."""
    layers = model.get_decoder().layers
    held = [each for layer in layers for each in layer.cross_attn.keys_and_values(states)]
    missing = slots - states.shape[1]
    return F.pad(mask, (0, missing)), *(F.pad(each, (0, 0, 0, missing)).contiguous() for each in held)


def of_language_model(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, slots: int
) -> tuple[Inputs, Tensor]:
    """What every step is given beside its tokens, and the positions of the prompt (B, T)."""
    mask = mask_of(input_ids, attention_mask)
    # Slots that are not filled yet are behind every query.
    padded = F.pad(mask, (0, slots - mask.shape[1]), value=1)
    cache = Cache(layers=[StaticLayer(slots) for _ in model.get_decoder().layers])
    return {"attention_mask": padded, "past_key_values": cache}, (mask.cumsum(-1) - 1).clamp(min=0)


def of_translator(source: tuple[Tensor, ...], slots: int) -> Inputs:
    """What every step of a target is given beside its tokens."""
    mask, *held = source
    own, cross = [], []
    for keys, values in zip(held[::2], held[1::2], strict=True):
        layer, of_source = StaticLayer(slots), StaticLayer(keys.shape[2])
        layer.lazy_initialization(keys, values)
        of_source.keys, of_source.values, of_source.is_initialized = keys, values, True
        own.append(layer)
        cross.append(of_source)
    cache = EncoderDecoderCache(Cache(layers=own), Cache(layers=cross))
    cache.is_updated = dict.fromkeys(range(len(own)), True)
    states = held[0].new_zeros(()).expand(*mask.shape, 1)  # not read: their keys and values are made already
    return {"attention_mask": mask, "encoder_outputs": (states,), "past_key_values": cache}


def mask_of(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:  # (B, T) or (B, T, D) -> (B, T)
    """Integers, whatever a caller has given."""
    if attention_mask is None:
        return torch.ones(tokens.shape[:2], dtype=torch.long)
    return attention_mask.long()


def likely_mask(tokens: Tensor, config: GenerationConfig) -> Tensor | None:  # (B, T)
    """That which `generate` makes of prompts that come without: what pads is not read, unless it also ends texts."""
    ends = config.eos_token_id
    if config.pad_token_id is None or config.pad_token_id in (ends if isinstance(ends, list) else [ends]):
        return None
    return tokens.ne(config.pad_token_id)


def slots_for(length: int) -> int:
    """The least power of two, from `LEAST_SLOTS`, that is no less."""
    return max(LEAST_SLOTS, 1 << (length - 1).bit_length())


def chosen(scores: Tensor, is_drawn: bool) -> Tensor:
    """The best token of each row (B, 1), or one drawn."""
    return torch.multinomial(scores.softmax(-1), 1) if is_drawn else scores.argmax(-1, keepdim=True)


# --- What is refused --------------------------------------------------------------------------------------------------


def refuse(model: PreTrainedModel, max_length: int, problems: dict[str, bool], source_length: int = 0) -> None:
    """Say what cannot be decoded so, beside the problems that there may be."""
    if not isinstance(model, ScratchPreTrainedModel):
        problems[f"{type(model).__name__} is not one of ours: convert it"] = True
    else:
        stack: Any = model.get_decoder()
        table = stack.config.max_position_embeddings
        problems |= {
            f"max_length={max_length} must be at most max_position_embeddings={table}": (
                stack.positions.has_table and max_length > table
            ),
            f"a source of {source_length} tokens must be at most max_position_embeddings={table}": (
                model.config.is_encoder_decoder and stack.positions.has_table and source_length > table
            ),
            "rope_parameters that depend on the length": not stack.is_fixed,
            "layer_types with sliding_attention: use cache_implementation='static'": (
                "sliding_attention" in stack.layer_types
            ),
        }
    modules = modules_of(model)
    problems |= {
        f"{model.device} must be cpu: elsewhere, generate compiles with cache_implementation='static'": (
            model.device.type != "cpu"
        ),
        "layers quantised by torch.ao: a graph cannot read their weights": any(
            type(module).__module__.startswith("torch.ao.nn.quantized") for module in modules
        ),
        f"{type(model).__name__}, or a part of it, is in training: call eval()": (
            model.training or any(map(drops, modules))
        ),
        "autocast: load the model in the precision to compute in": torch.is_autocast_enabled("cpu"),
        "no C++ compiler was found: install g++, or set CXX": shutil.which(os.environ.get("CXX", "g++")) is None,
    }
    if said := [problem for problem, is_there in problems.items() if is_there]:
        raise ValueError(f"CompiledDecoding: {'; '.join(said)}")


def drops(module: torch.nn.Module) -> bool:
    """Whether it leaves out some of what it is given, at random."""
    if not module.training:  # as all are, mostly
        return False
    return bool(getattr(module, "p", 0) or getattr(getattr(module, "config", None), "attention_dropout", 0))


def unread(model: PreTrainedModel, generation_config: Any, given: dict[str, Any]) -> dict[str, bool]:
    """What `generate` may be asked for that is not done here."""
    mode = generation_config.get_generation_mode()
    more = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in more if getattr(generation_config, name, False)]
    cache = given.get("past_key_values")
    held = 0 if cache is None else cache.get_seq_length()
    prepares = getattr(model.prepare_inputs_for_generation, "__self__", model)
    known = READ - {"position_ids"} if model.config.is_encoder_decoder else READ
    others = [name for name, value in given.items() if value is not None and name not in known]
    return {
        f"{', '.join(others)}: it reads tokens and their mask": bool(others),
        f"{mode.value} must be one of {', '.join(each.value for each in MODES)}": mode not in MODES,
        f"{', '.join(asked)}: it gives tokens alone": bool(asked),
        f"past_key_values holds {held} tokens: it begins with none": bool(held),
        f"inputs are prepared by {type(prepares).__name__}, which may put more before them": prepares is not model,
        "use_cache=False must be True": not generation_config.use_cache,
    }


def unheeded(generation_config: GenerationConfig) -> dict[str, bool]:
    """What a generation config says that greedy search would heed, and `greedy` does not."""
    usual = GenerationConfig._get_default_generation_params()
    said = {
        f"{name}={value}"
        for name, value in vars(generation_config).items()
        if not name.startswith("_") and name not in HEEDED and value is not None and value != usual.get(name, False)
    }
    return {f"{', '.join(sorted(said))} of generation_config: use generate(custom_generate=...)": bool(said)}
