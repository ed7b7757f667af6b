"""Decoding on a CPU by one compiled graph a token, for transformers' `generate`.

    decode = CompiledDecoding()
    model.generate(**inputs, custom_generate=decode)

A step of eager decoding waits for the interpreter more than for the arithmetic. Here a step is one graph of
TorchInductor on a static cache. Of a single row, products of matrices are written as sums, which the compiler fuses
with what is around them, and which run at the speed of memory.

Shapes: B rows, T tokens of a prompt, L tokens so far, S tokens of the source, D input and F output width of a matrix.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LogitsProcessorList, PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMode

from .stack_scratch import ScratchPreTrainedModel

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
READ = {
    "attention_mask",
    "encoder_outputs",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "position_ids",
}  # also `generate`'s own
LEAST_SLOTS = 64  # of a cache, doubled until all tokens fit: few sizes, few graphs
# Nothing is asked before each step, which would take longer than the step of a small model: `CompiledDecoding` has a
# graph for each shape.
OPTIONS: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "cpp_wrapper": True}

Step = Callable[..., tuple[Tensor, Tensor]]


class CompiledDecoding:
    """Greedy search and sampling, to be given to `generate` as `custom_generate`, for any number of calls.

    Tokens are those of `generate` without it. A graph is compiled, in some ten seconds, at the first call for each
    model, number of rows, and number of tokens and of source tokens, both rounded up to powers of two. A model that has
    changed since (adapters, quantisation, another attention backend) wants a new object. transformers does not hand a
    `streamer` to a `custom_generate`.
    """

    def __init__(self, backend: Any = "inductor") -> None:  # of torch.compile
        self.backend = backend
        self.steps: dict[tuple[Any, ...], Step] = {}
        self.products: list[Any] = []  # that graphs were made with: a compiler forgets a graph with what it was made of

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
            ValueError: on a model that is not on a CPU, has sliding windows or is being trained; on another mode, or
                more asked for than tokens; without a C++ compiler.
        """
        refuse(model, generation_config, model_kwargs)
        slots, rows = slots_for(generation_config.max_length), len(input_ids)
        mask, encoded = model_kwargs.get("attention_mask"), model_kwargs.get("encoder_outputs")
        positions: Tensor | None = None
        if encoded is None:
            inputs, positions = of_language_model(model, input_ids, mask, slots)
        else:
            inputs = of_translator(model, mask, encoded[0], slots)
        chosen_positions = model_kwargs.get("position_ids")
        if chosen_positions is not None and (positions is None or not chosen_positions.equal(positions)):
            raise ValueError("CompiledDecoding: position_ids must be those that attention_mask gives")
        shapes = tuple(tuple(each.shape) for each in inputs.values() if isinstance(each, Tensor))
        key = (model, model.dtype, rows, slots, shapes, torch.get_num_threads())
        logits, tokens = next_tokens(model, input_ids, positions, inputs)  # prompts have any length: not compiled
        unfinished, pad = torch.ones(rows, dtype=torch.bool), generation_config._pad_token_tensor
        is_plain = not logits_processor and not generation_config.do_sample
        while True:
            if not is_plain:
                tokens = chosen(logits_processor(input_ids, logits), generation_config.do_sample)
            if pad is not None and rows > 1:
                tokens = torch.where(unfinished[:, None], tokens, pad)
            input_ids = torch.cat([input_ids, tokens], dim=1)
            unfinished &= ~stopping_criteria(input_ids, logits)
            if not unfinished.any():
                return input_ids
            positions = None if positions is None else positions[:, -1:] + 1
            if (step := self.steps.get(key)) is None:
                step = compiled(next_tokens, self.backend)
                with products(model, multiply_row if rows == 1 else nn.Linear.forward) as made:
                    logits, tokens = step(model, tokens, positions, inputs)
                self.steps[key] = step
                self.products += made
            else:
                logits, tokens = step(model, tokens, positions, inputs)


def refuse(model: PreTrainedModel, generation_config: Any, given: dict[str, Any]) -> None:
    """Say what cannot be decoded so."""
    mode = generation_config.get_generation_mode()
    text_config = model.config.get_text_config(decoder=True)
    more = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in more if getattr(generation_config, name, False)]
    ropes = getattr(text_config, "rope_parameters", None) or {}
    turned = {each.get("rope_type") for each in (ropes, *ropes.values()) if isinstance(each, dict)}
    unread = [name for name, value in given.items() if value is not None and name not in READ]
    problems = {
        f"{type(model).__name__} is not one of ours: convert it": not isinstance(model, ScratchPreTrainedModel),
        f"{', '.join(unread)}: it reads tokens and their mask": bool(unread),
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
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    cache = StaticCache(config=model.config, max_cache_len=slots)
    # Slots that are not filled yet are behind every query.
    inputs = {"attention_mask": F.pad(mask, (0, slots - mask.shape[1]), value=1), "past_key_values": cache}
    return inputs, (mask.cumsum(-1) - 1).clamp(min=0)


def of_translator(model: PreTrainedModel, attention_mask: Tensor | None, states: Tensor, slots: int) -> Any:
    """What every step of a target is given beside its tokens; states (B, S, D) are padded, for few lengths."""
    mask = states.new_ones(states.shape[:2], dtype=torch.long) if attention_mask is None else attention_mask
    missing = slots_for(states.shape[1]) - states.shape[1]
    config = model.config.get_text_config(decoder=True)
    caches = [StaticCache(config=config, max_cache_len=most) for most in (slots, states.shape[1] + missing)]
    return {
        "attention_mask": F.pad(mask, (0, missing)),
        "encoder_outputs": (F.pad(states, (0, 0, 0, missing)),),
        "past_key_values": EncoderDecoderCache(*caches),
    }


def next_tokens(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor | None, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """A step: the last token's logits (B, V) in single precision, and the likeliest next tokens (B, 1)."""
    if positions is None:
        outputs = model(decoder_input_ids=tokens, use_cache=True, **inputs)
    else:
        outputs = model(input_ids=tokens, position_ids=positions, use_cache=True, **inputs)
    logits = outputs.logits[:, -1].float()
    return logits, logits.argmax(-1, keepdim=True)


def chosen(scores: Tensor, is_drawn: bool) -> Tensor:
    """The best token of each row (B, 1), or one drawn."""
    return torch.multinomial(scores.softmax(-1), 1) if is_drawn else scores.argmax(-1, keepdim=True)


def compiled(function: Any, backend: Any) -> Step:
    """A graph of its own: those of a function are looked up by its code, and without guards the first is taken."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options = OPTIONS if backend == "inductor" else {"guard_filter_fn": OPTIONS["guard_filter_fn"]}
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=dict(options))


@contextmanager
def products(model: PreTrainedModel, multiply: Callable[[nn.Linear, Tensor], Tensor]) -> Iterator[list[Any]]:
    """Within it, matrices are multiplied so, whatever `generate` has put in place of that for its own steps."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    before = [vars(linear).get("forward") for linear in linears]
    made = [partial(multiply, linear) for linear in linears]
    for linear, product in zip(linears, made, strict=True):
        vars(linear)["forward"] = product
    try:
        yield made
    finally:
        for linear, forward in zip(linears, before, strict=True):
            vars(linear).pop("forward")
            vars(linear).update({} if forward is None else {"forward": forward})


def multiply_row(linear: nn.Linear, input: Tensor) -> Tensor:  # (1, 1, D) -> (1, 1, F)
    """`linear(input)` as a sum over D of each output's products."""
    output = (linear.weight * input.reshape(1, -1)).sum(-1)
    return (output if linear.bias is None else output + linear.bias).view(*input.shape[:-1], -1)
