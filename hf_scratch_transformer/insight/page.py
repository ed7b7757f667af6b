"""A page on which one types a sentence and sees what a model makes of it.

| saved with the head of | the page shows                                                             |
| ---------------------- | -------------------------------------------------------------------------- |
| an encoder-decoder     | its translation                                                            |
| a causal LM            | the distribution of the next token, and a continuation drawn from it       |
| a masked LM            | the words it would put where `[MASK]` is                                   |
| any or none            | who attends to whom; a word's vectors in two sentences                     |

Texts appear while they are written. Of models with the same head, any two answer side by side.

`build` makes the page; `scratch-transformer serve` and a Space on the Hub launch it. It needs no network: analytics are
off, and all that a browser asks for comes from the machine that serves it.
"""

import html
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import gradio
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from ..embedding import most_positions
from ..files import reading
from .answers import (
    ALL,
    MASK,
    Models,
    attended,
    continuation,
    masked_word,
    moved_word,
    next_token,
    side_by_side,
    translate,
)
from .pictures import attention_weights
from .plot import open_model, open_tokenizer
from .presets import read_config

AT_ONCE = 4  # texts that are written at the same time; who comes later waits
# On a phone a picture keeps a size at which it can be read, and is moved within its frame.
STYLE = """
.note p { font-size: 0.85em; opacity: 0.75 }
@media (max-width: 640px) {
  .tab-container button { flex: none; max-width: 60vw; overflow: hidden; text-overflow: ellipsis }
  .block.picture .matplotlib { overflow-x: auto; align-items: flex-start }
  .block.picture .matplotlib img { max-width: none; width: auto; zoom: 0.85 }
}
"""
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


@dataclass(frozen=True)
class Task:
    """What one asks of models with one kind of head: how it is typed, and how the answer is shown."""

    function: Callable[..., Any]
    fits: Callable[[PreTrainedModel], bool]
    button: str
    text: dict[str, Any]
    answer: Callable[[], Any]
    options: Sequence[Callable[[Sequence[PreTrainedModel]], Any]] = ()

    @property
    def streams(self) -> bool:
        return inspect.isgeneratorfunction(self.function)


def _temperature(models: Sequence[PreTrainedModel]) -> Any:
    return gradio.Slider(0.1, 2, value=1, step=0.1, label="Temperature", min_width=200)


def _new_tokens(models: Sequence[PreTrainedModel]) -> Any:
    most = min(500, *(most_positions(model) - 1 for model in models))
    return gradio.Slider(1, most, value=min(100, most), step=1, label="Tokens to generate, at most", min_width=200)


def _seed(models: Sequence[PreTrainedModel]) -> Any:
    return gradio.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32, min_width=200)


def _writes_on(model: PreTrainedModel) -> bool:
    return not model.config.is_encoder_decoder and not _guesses(model) and model.can_generate()


def _guesses(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForMaskedLM")


_GOES_ON = {"label": "Text", "placeholder": "A text to go on with", "lines": 2}
TASKS = {
    "Translation": Task(
        translate,
        lambda model: bool(model.config.is_encoder_decoder),
        "Translate",
        {"label": "Sentence", "placeholder": "A sentence to translate"},
        partial(gradio.Textbox, label="Translation", lines=2),
    ),
    "Continuation": Task(
        continuation,
        _writes_on,
        "Generate",
        _GOES_ON,
        partial(gradio.Textbox, label="Continuation", lines=8, max_lines=20),
        (_temperature, _new_tokens, _seed),
    ),
    "Next token": Task(
        next_token,
        _writes_on,
        "Predict",
        _GOES_ON,
        partial(gradio.Label, label="Next token", show_heading=False),
        (_temperature,),
    ),
    "Masked word": Task(
        masked_word,
        _guesses,
        "Guess the word",
        {"label": f"Sentence with one {MASK}", "placeholder": f"She sat on the {MASK} of the river."},
        partial(gradio.Label, label="Candidates", show_heading=False),
    ),
}


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
            with gradio.Tab(name) if len(opened) > 1 else nullcontext():
                gradio.Markdown(f"**{name}**: {type(model).__name__}, {model.num_parameters():,} parameters")
                for label, task in TASKS.items():
                    if task.fits(model):
                        with gradio.Tab(label):
                            _task(task, model, tokenizer)
                if not model.config.is_encoder_decoder:
                    _attention_tab(model, tokenizer)
                _movement_tab(model, tokenizer)
        alike = {label: {n: o for n, o in opened.items() if task.fits(o[0])} for label, task in TASKS.items()}
        if any(len(models) > 1 for models in alike.values()):
            with gradio.Tab("Compare"):
                gradio.Markdown("Both get the same, one after the other, so that neither slows the other down.")
                for label, models in alike.items():
                    if len(models) > 1:
                        with gradio.Tab(label):
                            _comparison(TASKS[label], models)
        gradio.HTML(f"<style>{STYLE}</style>", padding=False)
    return page


def _question(task: Task, models: Sequence[PreTrainedModel]) -> tuple[list[Any], list[Any], Any]:
    """What is typed and chosen; what asks; and the button that stops the answer."""
    text = gradio.Textbox(**task.text)
    with gradio.Row() if task.options else nullcontext():
        options = [make(models) for make in task.options]
    with gradio.Row():
        button = gradio.Button(task.button, variant="primary", min_width=160)
        stop = gradio.Button("Stop", min_width=80, scale=0, visible=task.streams)
    choices = [] if task.streams else [option.release for option in options]
    return [text, *options], [button.click, text.submit, *choices], stop


def _task(task: Task, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    asked, triggers, stop = _question(task, [model])
    answer = _shown(task)
    event = _answer(partial(gradio.on, triggers), partial(task.function, model, tokenizer), asked, answer)
    stop.click(None, cancels=[event])
    if model.config.is_encoder_decoder:
        text, translation = asked[0], answer[0]
        text.input(None, None, translation, js="() => ''")  # which is of another sentence now
        if sizes := _attention_sizes(model, tokenizer):
            _attention(model, tokenizer, sizes, text, [], event, translation)


def _comparison(task: Task, models: Models) -> None:
    asked, triggers, stop = _question(task, [model for model, _ in models.values()])
    names, answers = [], []
    with gradio.Row():
        for place, name in enumerate(list(models)[:2]):
            with gradio.Column(min_width=300):
                names.append(gradio.Dropdown(list(models), value=name, label=("Model", "Beside it")[place]))
                answers += _shown(task)
    function = side_by_side(task.function, models)
    name = f"compare_{task.function.__name__}"
    event = _answer(partial(gradio.on, triggers), function, [*names, *asked], answers, api_name=name)
    stop.click(None, cancels=[event])


def _shown(task: Task) -> list[Any]:
    """Where an answer goes; of one that is written bit by bit, a note on it too."""
    return [task.answer(), *([gradio.Markdown(elem_classes="note")] if task.streams else [])]


def _attention_tab(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if sizes := _attention_sizes(model, tokenizer):
        with gradio.Tab("Attention"):
            text = gradio.Textbox(label="Text to read", placeholder="A sentence whose words look at each other")
            button = gradio.Button("Show", variant="primary")
            _attention(model, tokenizer, sizes, text, [button.click, text.submit])


def _attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sizes: tuple[int, ...],
    text: Any,
    triggers: Sequence[Any],
    event: Any = None,
    translation: Any = None,
) -> None:
    """The choosers of layer and head, and a picture; drawn anew after an event, which writes the translation."""
    (layers, heads), kinds = sizes, _kinds(model)
    with gradio.Row():
        layer = gradio.Dropdown([ALL, *range(layers)], value=layers - 1, label="Layer", min_width=90)
        head = gradio.Dropdown([ALL, *range(heads)], value=ALL, label="Head", min_width=90)
        of = gradio.Dropdown(kinds, value=kinds[0], label="Attention", min_width=120, visible=len(kinds) > 1)
    plot = gradio.Plot(show_label=False, format="png", elem_classes="picture")
    inputs = [text, layer, head, of, *filter(None, [translation])]
    function = partial(attended, model, tokenizer)
    _answer(partial(gradio.on, [*triggers, *(chosen.input for chosen in (layer, head, of))]), function, inputs, plot)
    if event:
        _answer(event.success, function, inputs, plot, api_name="attended_after", api_visibility="private")


def _kinds(model: PreTrainedModel) -> tuple[str, ...]:
    return ("cross", "encoder", "decoder") if model.config.is_encoder_decoder else ("self",)


def _attention_sizes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """How many layers and heads there are to choose from, by a trial; none, if a model has no weights to show."""
    target = "a" if model.config.is_encoder_decoder else None
    try:
        shapes = [attention_weights(model, tokenizer, "a", target, of).weights.shape for of in _kinds(model)]
    except (ValueError, AttributeError, TypeError):  # Mamba, for one
        return ()
    return tuple(max(sizes) for sizes in zip(*(shape[:2] for shape in shapes), strict=True))


def _movement_tab(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with gradio.Tab("A word in two sentences"):
        with gradio.Row():
            word = gradio.Textbox(label="Word", placeholder="bank", min_width=120)
            first = gradio.Textbox(label="A sentence with it", placeholder="She sat on the bank of the river.", scale=3)
            second = gradio.Textbox(label="Another", placeholder="She took money from the bank.", scale=3)
        button = gradio.Button("Show", variant="primary")
        plot = gradio.Plot(show_label=False, format="png", elem_classes="picture")
    triggers = [button.click, word.submit, first.submit, second.submit]
    _answer(partial(gradio.on, triggers), partial(moved_word, model, tokenizer), [word, first, second], plot)


def _answer(listen: Callable[..., Any], function: Any, inputs: Sequence[Any], outputs: Any, **options: Any) -> Any:
    """Run a function when something happens; what is wrong with what was typed, or sent without the page, is a message.
    What it yields is shown bit by bit."""

    def answer(*sent: Any) -> Any:
        with _messages():
            return function(*map(_checked, inputs, sent))

    def answers(*sent: Any) -> Any:
        with _messages():
            yield from function(*map(_checked, inputs, sent))

    streams = inspect.isgeneratorfunction(getattr(function, "func", function))
    run = answers if streams else answer
    # By the names of its parameters the page is called from a program.
    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    options = {"api_name": getattr(function, "func", function).__name__} | options
    if streams:
        options |= {"concurrency_limit": AT_ONCE, "concurrency_id": "streams"}
    # Gradio's own check would print a traceback.
    return listen(run, list(inputs), outputs, preprocess=False, **options)


@contextmanager
def _messages() -> Iterator[None]:
    """Within it, a `ValueError` becomes a message on the page."""
    try:
        yield
    except ValueError as error:
        # The message is shown as HTML, and quotes what was typed.
        message = html.escape(str(error), quote=False)
        raise gradio.Error(message, print_exception=False) from error


def _checked(component: Any, sent: Any) -> Any:
    """What a component makes of a value. Raises a `ValueError` that names it."""
    with reading(component.label):
        value = component.preprocess(sent)
    if value is None:
        raise ValueError(f"{component.label}: nothing was sent")
    return value
