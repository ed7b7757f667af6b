"""What a model makes of what one types: the answers that the page shows.

Texts are given while they are written, again and again with what is new: (text so far, a note on its speed).
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..embedding import longest_output, most_positions
from .pictures import attention, attention_weights, embedding_shift, encode, readable, word_vectors
from .streaming import GumbelNoise, written

CANDIDATES = 12  # shown of a distribution over the vocabulary
ALL = "all"  # layers or heads
MASK = "[MASK]"  # what one types, whatever a tokenizer calls it

Models = dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]  # by the names of their folders


def translate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[tuple[str, str]]:
    """What an encoder-decoder writes, by its own generation settings: the translation so far, and its speed.

    Raises:
        ValueError: an empty text, or one that is too long.
    """
    inputs = _typed(model, tokenizer, text)
    longest = longest_output(inputs["input_ids"].shape[-1], most_positions(model) - 1)
    if model.generation_config.do_sample:
        torch.manual_seed(0)  # two models side by side draw with the same luck
    yield from written(model, tokenizer, inputs, max_new_tokens=longest)


def attended(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    layer: int | str = ALL,
    head: int | str = ALL,
    of: str | None = None,
    translation: str = "",
) -> Figure:
    """The attention of a model on a text; in an encoder-decoder, which writes this translation, or its own greedy one.

    Raises:
        ValueError: an empty text, one that is too long, or a layer or head that the model does not have.
    """
    _typed(model, tokenizer, text)
    weights = attention_weights(model, tokenizer, text, translation or None, of)
    return attention(weights, *(None if index == ALL else int(index) for index in (layer, head)))


@torch.inference_mode()
def next_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, temperature: float = 1.0
) -> dict[str, float]:
    """The likeliest tokens after a text, and their probabilities, for a causal LM.

    Raises:
        ValueError: an empty text, or one that is too long.
    """
    logits = model(**_typed(model, tokenizer, text)).logits[0, -1]
    return _likeliest(tokenizer, logits / temperature)


def continuation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    temperature: float = 1.0,
    new_tokens: int = 40,
    seed: int = 0,
) -> Iterator[tuple[str, str]]:
    """A text and what a causal LM writes after it, so far, and its speed. Each token is drawn from the distribution
    that `next_token` shows, until the model ends the text or has no positions left; a seed gives always the same one.

    Raises:
        ValueError: an empty text, or one that leaves no position.
    """
    inputs = _typed(model, tokenizer, text)
    length = inputs["input_ids"].shape[-1]
    room = most_positions(model) - length
    if room < 1:
        raise ValueError(f"text has {length} tokens, all that the model has positions for: shorten it to have it go on")
    options = {"do_sample": False, "num_beams": 1, "logits_processor": [GumbelNoise(temperature, seed)]}
    yield from written(model, tokenizer, inputs, max_new_tokens=min(new_tokens, room), **options)


@torch.inference_mode()
def masked_word(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, float]:
    """The likeliest tokens in the place of a text's one mask, and their probabilities, for a masked LM.

    Raises:
        ValueError: an empty text, one that is too long, or with no mask or several.
    """
    inputs = _typed(model, tokenizer, text.replace(MASK, str(tokenizer.mask_token)))
    places = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
    if len(places) != 1:
        raise ValueError(f"text must have one {MASK}, where the word is to be guessed; it has {len(places)}")
    return _likeliest(tokenizer, model(**inputs).logits[0, places[0]])


def moved_word(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, word: str, first: str, second: str
) -> Figure:
    """Where two sentences move a word's learned vector. Raises a `ValueError` if one is without it, or too long."""
    return embedding_shift(word_vectors(model, tokenizer, word.strip(), [first, second]))


def _typed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    if not text.strip():  # to many tokenizers, an end-of-sentence token all the same
        raise ValueError("text is empty: type something")
    return encode(model, tokenizer, text)


def _likeliest(tokenizer: PreTrainedTokenizerBase, logits: Tensor) -> dict[str, float]:
    """Logits (V,) as the best tokens' names and probabilities."""
    best = logits.float().softmax(-1).topk(min(CANDIDATES, len(logits)))
    names, tokens = readable(tokenizer, best.indices), tokenizer.convert_ids_to_tokens(best.indices.tolist())
    # With and without the space before it, a word reads the same: then both stay as the tokenizer writes them.
    unlike = [name if names.count(name) == 1 else token for name, token in zip(names, tokens, strict=True)]
    return dict(zip(unlike, best.values.tolist(), strict=True))


def side_by_side(function: Callable[..., Any], models: Models) -> Callable[..., Iterator[list[Any]]]:
    """Of a function of this module, one that asks two models the same, one after the other, so that neither slows the
    other down: what it gives for both, so far. It raises a `ValueError` that names the model."""
    width = 2 if inspect.isgeneratorfunction(function) else 1

    def both(first: str, second: str, *asked: Any) -> Iterator[list[Any]]:
        answers: list[Any] = [None] * 2 * width
        for side, name in enumerate((first, second)):
            try:
                answer = function(*models[name], *asked)
                for so_far in answer if width > 1 else [(answer,)]:
                    answers[side * width : (side + 1) * width] = so_far
                    yield [*answers]
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

    own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("first", "second")]
    parameters = [*own, *list(inspect.signature(function).parameters.values())[2:]]
    both.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return both
