"""A page on which one types a sentence and sees what a model makes of it.

| saved with the head of | the page shows                                                             |
| ---------------------- | -------------------------------------------------------------------------- |
| an encoder-decoder     | its translation, with the cross-attention                                  |
| a causal LM            | the distribution of the next token, and a continuation drawn from it       |
| a masked LM            | the words it would put where `[MASK]` is                                   |
| any or none            | a word's vectors in two sentences                                          |

`build` makes the page; `scratch-transformer serve` and a Space on the Hub launch it. It needs no network: analytics are
off, and all that a browser asks for comes from the machine that serves it.
"""

import contextlib
import html
import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gradio
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from ..embedding import longest_output, most_positions
from ..files import reading
from .pictures import (
    attention,
    attention_weights,
    embedding_shift,
    encode,
    readable,
    word_vectors,
)
from .plot import open_model, open_tokenizer
from .presets import read_config

CANDIDATES = 12  # shown of a distribution over the vocabulary
ALL = "all"  # layers or heads
# The end of the saved class's name -> what opens it with its head. Of other heads the page shows the backbone.
HEADS = {"ForCausalLM": AutoModelForCausalLM, "LMHeadModel": AutoModelForCausalLM, "ForMaskedLM": AutoModelForMaskedLM}


def open_folder(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with the head that it was saved with, if the page has a use for it, and its tokenizer.

    Raises:
        ValueError: there is no such model or tokenizer, or they cannot be read.
    """
    saved = (read_config(source).architectures or [""])[0]
    head = next((auto_class for end, auto_class in HEADS.items() if saved.endswith(end)), None)
    model = open_model(source, head)
    tokenizer = open_tokenizer(source)
    if head is AutoModelForMaskedLM and tokenizer.mask_token is None:
        raise ValueError(f"{source}: its tokenizer has no mask_token, so that no word can be asked for")
    return model, tokenizer


@torch.inference_mode()
def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    layer: int | str = ALL,
    head: int | str = ALL,
) -> tuple[str, Figure]:
    """What an encoder-decoder writes, by its own generation settings, and the cross-attention in which it does.

    Raises:
        ValueError: an empty text, one that is too long, or a layer or head that the model does not have.
    """
    inputs = _typed(model, tokenizer, text)
    longest = longest_output(inputs["input_ids"].shape[-1], most_positions(model) - 1)
    written = model.generate(**inputs, max_new_tokens=longest)
    translation = tokenizer.decode(written[0], skip_special_tokens=True)
    weights = attention_weights(model, tokenizer, text, translation)
    return translation, attention(weights, *(None if index == ALL else int(index) for index in (layer, head)))


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


@torch.inference_mode()
def continuation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    temperature: float = 1.0,
    new_tokens: int = 40,
) -> str:
    """A text and what a causal LM writes after it: each token drawn from the distribution that `next_token` shows,
    until the model ends it or has no positions left.

    Raises:
        ValueError: an empty text, or one that leaves no position.
    """
    inputs = _typed(model, tokenizer, text)
    length = inputs["input_ids"].shape[-1]
    room = most_positions(model) - length
    if room < 1:
        raise ValueError(f"text has {length} tokens, all that the model has positions for: shorten it to have it go on")
    options = {"do_sample": True, "num_beams": 1, "top_k": 0, "top_p": 1.0}
    written = model.generate(**inputs, temperature=temperature, max_new_tokens=min(new_tokens, room), **options)
    return tokenizer.decode(written[0], skip_special_tokens=True)


@torch.inference_mode()
def masked_word(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, float]:
    """The likeliest tokens in the place of a text's one mask, and their probabilities, for a masked LM.

    Raises:
        ValueError: an empty text, one that is too long, or with no mask or several.
    """
    inputs = _typed(model, tokenizer, text)
    places = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
    if len(places) != 1:
        raise ValueError(
            f"text must have one {tokenizer.mask_token}, where the word is to be guessed; it has {len(places)}"
        )
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


def build(folders: Sequence[str | os.PathLike[str]]) -> gradio.Blocks:
    """The page for these models, to be launched: each a folder written by `save_pretrained`, or a Hub id.

    Raises:
        ValueError: no folder, or one without a model or a tokenizer.
    """
    if not folders:
        raise ValueError("folders: give one at least")
    opened = {os.fspath(folder): open_folder(os.fspath(folder)) for folder in folders}
    with gradio.Blocks(title="scratch-transformer", analytics_enabled=False) as page:
        for name, (model, tokenizer) in opened.items():
            with gradio.Tab(name) if len(opened) > 1 else contextlib.nullcontext():
                gradio.Markdown(f"**{name}**: {type(model).__name__}, {model.num_parameters():,} parameters")
                if model.config.is_encoder_decoder:
                    _translation_tab(model, tokenizer)
                elif type(model).__name__.endswith("ForMaskedLM"):
                    _masked_tab(model, tokenizer)
                elif model.can_generate():
                    _next_token_tab(model, tokenizer)
                _movement_tab(model, tokenizer)
    return page


def _translation_tab(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    layers, heads = attention_weights(model, tokenizer, "a", "a").weights.shape[:2]
    with gradio.Tab("Translation"):
        with gradio.Row():
            text = gradio.Textbox(label="Sentence", placeholder="A sentence to translate", scale=4)
            layer = gradio.Dropdown([ALL, *range(layers)], value=layers - 1, label="Layer", min_width=90)
            head = gradio.Dropdown([ALL, *range(heads)], value=ALL, label="Head", min_width=90)
        button = gradio.Button("Translate", variant="primary")
        translation = gradio.Textbox(label="Translation")
        plot = gradio.Plot(show_label=False, format="png")
    triggers = [button.click, text.submit, layer.input, head.input]
    _answer(triggers, translate, model, tokenizer, [text, layer, head], [translation, plot])


def _next_token_tab(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with gradio.Tab("Next token"), gradio.Row():
        with gradio.Column():
            text = gradio.Textbox(label="Text", placeholder="A text to go on with", lines=3)
            temperature = gradio.Slider(0.1, 2, value=1, step=0.1, label="Temperature")
            button = gradio.Button("Predict", variant="primary")
            most = min(500, most_positions(model) - 1)
            new_tokens = gradio.Slider(1, most, value=min(100, most), step=1, label="Tokens to generate, at most")
            generate = gradio.Button("Generate")
            written = gradio.Textbox(label="Continuation", lines=3)
        tokens = gradio.Label(label="Next token", show_heading=False)
    triggers = [button.click, text.submit, temperature.release]
    _answer(triggers, next_token, model, tokenizer, [text, temperature], tokens)
    _answer([generate.click], continuation, model, tokenizer, [text, temperature, new_tokens], written)


def _masked_tab(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with gradio.Tab("Masked word"), gradio.Row():
        with gradio.Column():
            placeholder = f"She sat on the {tokenizer.mask_token} of the river."
            text = gradio.Textbox(label=f"Sentence with one {tokenizer.mask_token}", placeholder=placeholder)
            button = gradio.Button("Guess the word", variant="primary")
        words = gradio.Label(label="Candidates", show_heading=False)
    _answer([button.click, text.submit], masked_word, model, tokenizer, [text], words)


def _movement_tab(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with gradio.Tab("A word in two sentences"):
        with gradio.Row():
            word = gradio.Textbox(label="Word", placeholder="bank", min_width=120)
            first = gradio.Textbox(label="A sentence with it", placeholder="She sat on the bank of the river.", scale=3)
            second = gradio.Textbox(label="Another", placeholder="She took money from the bank.", scale=3)
        button = gradio.Button("Show", variant="primary")
        plot = gradio.Plot(show_label=False, format="png")
    triggers = [button.click, word.submit, first.submit, second.submit]
    _answer(triggers, moved_word, model, tokenizer, [word, first, second], plot)


def _answer(
    triggers: Sequence[Any],
    function: Callable[..., Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Sequence[Any],
    outputs: Any,
) -> None:
    """Run a function of this module when something is clicked; what is wrong with what was typed, or sent without the
    page, is a message."""

    def answer(*sent: Any) -> Any:
        try:
            return function(model, tokenizer, *map(_checked, inputs, sent))
        except ValueError as error:
            # The message is shown as HTML, and quotes what was typed.
            message = html.escape(str(error), quote=False)
            raise gradio.Error(message, print_exception=False) from error

    # By the names of its parameters the page is called from a program.
    answer.__signature__ = inspect.signature(partial(function, model, tokenizer))  # type: ignore[attr-defined]
    # Gradio's own check would print a traceback.
    gradio.on(triggers, answer, list(inputs), outputs, api_name=function.__name__, preprocess=False)


def _checked(component: Any, sent: Any) -> Any:
    """What a component makes of a value. Raises a `ValueError` that names it."""
    with reading(component.label):
        value = component.preprocess(sent)
    if value is None:
        raise ValueError(f"{component.label}: nothing was sent")
    return value
