"""Models made of others: layers kept or copied, a vocabulary fitted to a tokenizer, several averaged. What comes out is
a model that trains on at once; of ours, and of whatever converts into ours."""

import argparse
import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from .conversion.folders import open_saved
from .conversion.tables import TRAINING_ONLY
from .files import making, new_folder, reading
from .stack_scratch import ScratchPreTrainedModel
from .tokenization import config_fields, sides

LAYER = re.compile(
    r"(?P<stack>|.*?\b(?P<side>encoder|decoder)\.|model\.)(?P<parts>layers|position_bias)\.(?P<index>\d+)\.(?P<rest>.*)"
)
NOT_COMPUTED = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
PER_LAYER = {  # fields with an entry for each, of a stack of so many
    "num_hidden_layers": ("layer_types", "no_rope_layers"),
    "encoder_layers": ("encoder_layer_types",),
    "decoder_layers": ("decoder_layer_types",),
}


def select_layers(
    model: ScratchPreTrainedModel, layers: Sequence[int], decoder_layers: Sequence[int] | None = None
) -> ScratchPreTrainedModel:
    """A model of those layers, in that order: fewer, to be distilled (Sanh et al., 2019), or some of them twice, to
    grow in depth (Kim et al., 2023).

    Args:
        model: any of ours.
        layers: numbers from 0, each as often as it is wanted; of a translator those of its encoder.
        decoder_layers: of a translator's decoder. Default: all.

    Raises:
        ValueError: on layers that there are not, and on none.
    """
    config, is_translator = copy.deepcopy(model.config), model.config.is_encoder_decoder
    if decoder_layers is not None and not is_translator:
        raise ValueError(f"decoder_layers={list(decoder_layers)}: {type(model).__name__} has one stack of layers")
    depths = ("encoder_layers", "decoder_layers") if is_translator else ("num_hidden_layers",)
    chosen = {}
    for depth, given in zip(depths, (layers, decoder_layers), strict=False):
        count = getattr(config, depth)
        picked = list(range(count)) if given is None else list(given)
        if not picked or not all(0 <= each < count for each in picked):
            raise ValueError(f"layers {picked} must be some of 0 to {count - 1}")
        chosen[depth] = picked
        for name in PER_LAYER[depth]:
            if (each := getattr(config, name, None)) is not None:
                setattr(config, name, [each[index] for index in picked])
        setattr(config, depth, len(picked))
        if not config.first_norm and (picked[0] or picked.count(0) > 1):
            raise ValueError(f"layers {picked}: first_norm=False, so layer 0 must stay the first, and be there once")

    # What no layer is left that needs it would keep it from going back to where it came from.
    if not any(
        "sliding_attention" in (getattr(config, name, None) or ()) for names in PER_LAYER.values() for name in names
    ):
        config.sliding_window = None
    if all(getattr(config, "no_rope_layers", None) or (0,)):
        config.no_rope_layers = None

    def old_name(name: str) -> str:
        found = LAYER.fullmatch(name)
        if found is None or (found["parts"] == "position_bias" and config.share_relative_attention_bias):
            return name
        picked = chosen[f"{found['side']}_layers" if is_translator else depths[0]]
        return f"{found['stack']}{found['parts']}.{picked[int(found['index'])]}.{found['rest']}"

    state = model.state_dict()
    return _like(model, config, lambda names: {name: state[old_name(name)] for name in names})


def average(models: Sequence[ScratchPreTrainedModel]) -> ScratchPreTrainedModel:
    """The model whose parameters are the mean of theirs: a model soup (Wortsman et al., 2022), or the last checkpoints
    of a run (section 6.1 of the paper).

    Raises:
        ValueError: if they differ in class, shapes or options, if there are none, and if numbers are not finite.
    """
    if not models:
        raise ValueError("there is nothing to average")
    first, states = models[0], [model.state_dict() for model in models]
    for model, state in zip(models, states, strict=True):
        shapes = [name for name in states[0].keys() | state.keys() if _shape(states[0], name) != _shape(state, name)]
        reasons = [f"{len(shapes)} parameters differ in shape, {min(shapes)} among them"] if shapes else []
        if type(model) is type(first) and not shapes:
            mine, others = (each.config.to_dict() for each in (model, first))
            names = [*_computed(first.config), *({"id2label"} & mine.keys() & others.keys())]
            reasons = [f"{name}={mine[name]!r}" for name in names if mine[name] != others[name]]
        if type(model) is not type(first) or reasons:
            kinds = f"a {type(model).__name__} cannot be averaged with a {type(first).__name__}"
            raise ValueError("; ".join([kinds, *reasons]))

    def mean(name: str) -> Tensor:
        total = torch.stack([state[name].double() for state in states]).sum(0)
        if not total.isfinite().all():
            raise ValueError(f"{name}: not all numbers are finite")
        return (total / len(states)).to(states[0][name].dtype)

    return _like(first, copy.deepcopy(first.config), lambda names: {name: mean(name) for name in names})


def fit_vocabulary(
    model: ScratchPreTrainedModel, old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase
) -> ScratchPreTrainedModel:
    """A model for another tokenizer: tokens that both have keep their vectors, others begin as the mean of those that
    the old tokenizer makes of their text (Gee et al., 2022). The head and its bias follow.

    Args:
        model: one of ours with one vocabulary.
        old: its tokenizer.
        new: the one it shall have; fewer tokens or more.

    Raises:
        ValueError: for a translator, or a tokenizer, with a vocabulary on each side.
    """
    if not getattr(model.config, "share_encoder_decoder_embeddings", True):
        kind = type(model).__name__
        raise ValueError(f"share_encoder_decoder_embeddings=False: {kind} has a vocabulary for each side")
    for tokenizer in (old, new):
        source, target = sides(tokenizer)
        if target is not source:
            kind = type(tokenizer).__name__
            raise ValueError(f"separate_vocabs=True: {kind} has a vocabulary for each side, the model one for both")
    if len(old) > model.config.vocab_size:
        raise ValueError(f"a tokenizer of {len(old)} tokens is not that of a model with {model.config.vocab_size} rows")
    rows = _rows(old, new)
    fitted = copy.deepcopy(model)
    fitted.resize_token_embeddings(len(new), mean_resizing=False)
    before, after = model.state_dict(), fitted.state_dict()
    with torch.no_grad():
        for name, tensor in after.items():
            if name.endswith(("word_embeddings.weight", "lm_head.weight", "lm_head.bias")):
                source = before[name].double()
                vectors = [source[ids].mean(0) if ids else source.mean(0) for ids in rows]
                tensor.copy_(torch.stack(vectors))
    family = "seq2seq" if model.config.is_encoder_decoder else "decoder"
    none = dict.fromkeys(("bos_token_id", "eos_token_id"))  # what the new tokenizer has not, nothing means any more
    for name, value in (none | config_fields(new, family)).items():  # type: ignore[arg-type]
        for config in (fitted.config, fitted.generation_config) if fitted.can_generate() else (fitted.config,):
            if name != "vocab_size" and config is not None:
                setattr(config, name, value)
    for module in fitted.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == len(new):
            module.padding_idx = None if fitted.config.train_padding_embedding else fitted.config.pad_token_id
    fitted.config.validate_architecture()
    return fitted


def _rows(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> list[list[int]]:
    """For each token of the new vocabulary, the ids of the old one that its vector is the mean of."""
    known, rows = old.get_vocab(), []
    special = {token: getattr(old, f"{name}_id") for name, token in _special(new).items() if name in _special(old)}
    for token, _ in sorted(new.get_vocab().items(), key=lambda pair: pair[1]):
        if token in special:
            rows.append([special[token]])
        elif token in known:
            rows.append([known[token]])
        else:
            text = new.convert_tokens_to_string([token])
            rows.append(old(text, add_special_tokens=False)["input_ids"])
    return rows


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """{its purpose: the token}"""
    return {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}


def _computed(config: Any) -> list[str]:
    """The fields that say what a model computes."""
    return [field.name for field in dataclasses.fields(config) if field.name not in {*TRAINING_ONLY, *NOT_COMPUTED}]


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def _like(model: ScratchPreTrainedModel, config: Any, state_of: Any) -> ScratchPreTrainedModel:
    """A model of the same class with another configuration and other parameters."""
    with torch.device("meta"):
        names = type(model)(config).state_dict().keys()
    state = {name: tensor.clone() for name, tensor in state_of(names).items()}
    made = type(model).from_pretrained(None, config=config, state_dict=state, dtype=model.dtype)
    if made.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
    return made.to(model.device).train(model.training)


# --- From folder to folder --------------------------------------------------------------------------------------------


def add_commands(subparsers: Any) -> None:
    layers = subparsers.add_parser("layers", help="a model of some layers of another, or of some of them twice")
    layers.add_argument("source", metavar="SRC", help="folder or id on the Hub, of ours or of what converts into ours")
    layers.add_argument("target", metavar="DST", help="new folder")
    layers.add_argument("--keep", metavar="N", type=int, nargs="+", required=True, help="layers from 0, in their order")
    layers.add_argument(
        "--keep-decoder", metavar="N", type=int, nargs="+", help="of a translator's decoder; default: all"
    )
    layers.set_defaults(run=_layers)
    mean = subparsers.add_parser("average", help="the mean of several models of one shape")
    mean.add_argument("sources", metavar="SRC", nargs="+", help="folders, or ids on the Hub")
    mean.add_argument("--output", metavar="DST", required=True, help="new folder")
    mean.set_defaults(run=_average)
    vocabulary = subparsers.add_parser("vocabulary", help="a model for another tokenizer")
    vocabulary.add_argument("source", metavar="SRC", help="folder or id on the Hub, with its tokenizer")
    vocabulary.add_argument("tokenizer", metavar="TOKENIZER", help="folder or id on the Hub, of the one it shall have")
    vocabulary.add_argument("target", metavar="DST", help="new folder")
    vocabulary.set_defaults(run=_vocabulary)


def _tokenizer(source: str, is_needed: bool) -> PreTrainedTokenizerBase | None:
    if not is_needed and Path(source).is_dir() and not (Path(source) / "tokenizer_config.json").is_file():
        return None
    with reading(source):
        return AutoTokenizer.from_pretrained(source)


def _write(model: ScratchPreTrainedModel, target: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    with making(target) as new:
        model.save_pretrained(new)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
    print(f"wrote {target}: {type(model).__name__}, {model.num_parameters():,} parameters")


def _layers(arguments: argparse.Namespace) -> None:
    target = new_folder(arguments.target)
    model = select_layers(open_saved(arguments.source).whole(), arguments.keep, arguments.keep_decoder)
    _write(model, target, _tokenizer(arguments.source, is_needed=False))


def _average(arguments: argparse.Namespace) -> None:
    target = new_folder(arguments.output)
    model = average([open_saved(source).whole() for source in arguments.sources])
    _write(model, target, _tokenizer(arguments.sources[0], is_needed=False))


def _vocabulary(arguments: argparse.Namespace) -> None:
    target = new_folder(arguments.target)
    old, new = (_tokenizer(each, is_needed=True) for each in (arguments.source, arguments.tokenizer))
    _write(fit_vocabulary(open_saved(arguments.source).whole(), old, new), target, new)
