"""`scratch-transformer plot KIND ...`: the pictures of `insight.pictures`, written as PNG or SVG.

matplotlib is imported once a picture is asked for: the other commands need none.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME, logging

from ..files import reading
from ..tokenization import check_unknown
from .presets import PRESETS, read_config
from .trace import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_commands(subparsers: Any) -> None:
    """Add `plot`, with a subcommand for each kind of picture."""
    plot = subparsers.add_parser("plot", help="draw a model or a run, as PNG or SVG", description=__doc__)
    kinds = plot.add_subparsers(metavar="KIND", required=True)

    def kind(name: str, draw: Any, text: str) -> argparse.ArgumentParser:
        parser = kinds.add_parser(name, help=text, description=text)
        parser.add_argument("-o", "--output", default=f"{name}.png", help="PNG or SVG by its suffix (%(default)s)")
        parser.set_defaults(run=_write, draw=draw)
        return parser

    folder = "a folder written by save_pretrained, or a Hub id"
    parser = kind("positions", _positions, "the code of positions as a heat map, and the dot product of any two")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{folder}; the sinusoidal code if not given")
    parser.add_argument("--dim", type=int, default=400, help="width of the sinusoidal code (%(default)s)")
    parser.add_argument("--length", type=int, default=100, help="positions (%(default)s)")

    parser = kind("attention", _attention, "who attends to whom: every layer and head, or those named")
    parser.add_argument("model", metavar="MODEL", help=folder)
    parser.add_argument("text", metavar="TEXT")
    parser.add_argument(
        "--target", metavar="TEXT", help="what is written; an encoder-decoder's own translation if not given"
    )
    parser.add_argument(
        "--of",
        choices=("cross", "encoder", "decoder", "self"),
        help="default: cross in an encoder-decoder, else self",
    )
    parser.add_argument("--layer", type=int, help="from 0; all if not given")
    parser.add_argument("--head", type=int, help="from 0; all if not given")

    parser = kind("embedding-shift", _embedding_shift, "a word's learned vector, and where each sentence moves it")
    parser.add_argument("model", metavar="MODEL", help=folder)
    parser.add_argument("word", metavar="WORD")
    parser.add_argument("sentences", metavar="SENTENCE", nargs="+")
    parser.add_argument("--neighbours", type=int, default=5, help="neighbours of each vector (%(default)s)")

    parser = kind("curves", _curves, "loss and score over the steps of one run, or of several")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder, or its metrics.jsonl")

    parser = kind("parameters", _parameters, "where a model's parameters are")
    parser.add_argument("model", metavar="MODEL", help=f"{folder}, a config.json, or one of {', '.join(PRESETS)}")


def _write(arguments: argparse.Namespace) -> None:
    """Draw what the arguments say, and say where it is. A name that cannot be written is refused before the work."""
    try:
        from . import pictures
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ValueError("plot needs matplotlib: pip install 'hf-scratch-transformer[insight]'") from error
    path = pictures.check_path(arguments.output)
    print(pictures.save(arguments.draw(pictures, arguments), path))


def _positions(pictures: Any, arguments: argparse.Namespace) -> "Figure":
    if arguments.model is None:
        return pictures.positions(pictures.sinusoidal_code(arguments.dim, arguments.length))
    model = open_model(arguments.model)
    code, kind = pictures.position_code(model, arguments.length)
    return pictures.positions(code, f"{pictures.model_name(model)}: {kind}")


def _attention(pictures: Any, arguments: argparse.Namespace) -> "Figure":
    model, tokenizer = open_model(arguments.model), open_tokenizer(arguments.model)
    weights = pictures.attention_weights(model, tokenizer, arguments.text, arguments.target, arguments.of)
    return pictures.attention(weights, arguments.layer, arguments.head)


def _embedding_shift(pictures: Any, arguments: argparse.Namespace) -> "Figure":
    model, tokenizer = open_model(arguments.model), open_tokenizer(arguments.model)
    vectors = pictures.word_vectors(model, tokenizer, arguments.word, arguments.sentences, arguments.neighbours)
    return pictures.embedding_shift(vectors)


def _curves(pictures: Any, arguments: argparse.Namespace) -> "Figure":
    folders = [Path(run).parent if Path(run).is_file() else Path(run) for run in arguments.runs]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = arguments.runs
    return pictures.curves({name: pictures.read_metrics(run) for name, run in zip(names, arguments.runs, strict=True)})


def _parameters(pictures: Any, arguments: argparse.Namespace) -> "Figure":
    counts = pictures.parameter_counts(build(read_config(arguments.model)))
    return pictures.parameters(counts, "/".join(Path(arguments.model).parts[-2:]))


def open_model(source: str, auto_class: Any = None, attention: str | None = "eager", **options: Any) -> Any:
    """A model in evaluation mode, ours or native, from a folder or the Hub; unless `auto_class` says otherwise, an
    encoder-decoder with the head that writes, others without. Nothing is unpickled, and no code of a repository is run
    or asked about, unless `trust_remote_code` is among the options.

    Raises:
        ValueError: there is no such model, its files cannot be read, or weights are missing from them.
    """
    if Path(source).is_file():  # which transformers would take for weights, and unpickle
        raise ValueError(f"{source}: a file; weights are wanted, so give a model's folder or its id on the Hub")
    auto_class = auto_class or (AutoModelForSeq2SeqLM if read_config(source).is_encoder_decoder else AutoModel)
    # transformers' faster attentions never form the weights that are drawn.
    options |= {"use_safetensors": True, "attn_implementation": attention, "output_loading_info": True}
    model, found = _open(auto_class, source, **options)
    # Drawn at random if missing, which a picture would not show. Only a pooler, behind all that is drawn, may be.
    if missing := sorted(name for name in found["missing_keys"] if "pooler" not in name):
        raise ValueError(f"{source}: {len(missing)} weights of {type(model).__name__} are missing, {missing[0]} first")
    if model.can_generate():
        check_settings(f"{source}: {GENERATION_CONFIG_NAME}", vars(model.generation_config))
    return model.eval()


NUMBERS = {  # settings of generation
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences"),
    *("temperature", "top_k", "top_p", "length_penalty", "repetition_penalty", "no_repeat_ngram_size"),
}


def check_settings(where: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of generation of a type that transformers fails at only when it generates."""
    for name, value in settings.items():
        ids = value if isinstance(value, list) else [value]
        if name.startswith("output_") and not isinstance(value, bool | None):
            raise ValueError(f"{where}: {name}={value!r} must be true or false")
        if name.endswith("_token_id") and not all(isinstance(each, int | None) for each in ids):
            raise ValueError(f"{where}: {name}={value!r} must be the number of a token, or several")
        if name in NUMBERS and not isinstance(value, int | float | None):
            raise ValueError(f"{where}: {name}={value!r} must be a number")


def open_tokenizer(source: str, **options: Any) -> Any:
    """The tokenizer beside a model. Raises a `ValueError` if there is none, or one that does not work."""
    tokenizer = _open(AutoTokenizer, source, **options)
    with reading(f"{source}: its tokenizer does not work"):
        tokenizer(["a"], padding=tokenizer.pad_token is not None)
        check_unknown(tokenizer)
    return tokenizer


def _open(auto_class: Any, source: str, **options: Any) -> Any:
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # a head that is left out is no news here
    logging.disable_progress_bar()
    try:
        with reading(f"{source}: {auto_class.__name__} cannot open it"):
            return auto_class.from_pretrained(source, **{"trust_remote_code": False} | options)
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
