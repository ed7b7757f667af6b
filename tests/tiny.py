"""Tiny models of the three families, with inputs and labels for any head, ours or native: what several test files need.

A head's task is the end of its class name, `ForMaskedLM` and so on, as it is to transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

import hf_scratch_transformer as scratch

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,  # wide enough that what a token sees shows in what it becomes
}
CONFIGS = {
    "encoder": (scratch.ScratchEncoderConfig, {"num_hidden_layers": 2}),
    "decoder": (scratch.ScratchDecoderConfig, {"num_hidden_layers": 2}),
    "seq2seq": (scratch.ScratchSeq2SeqConfig, {"encoder_layers": 1, "decoder_layers": 2}),
}
FAMILIES = tuple(CONFIGS)
MODELS = tuple(
    model
    for name in scratch.__all__
    if isinstance(model := getattr(scratch, name), type) and issubclass(model, PreTrainedModel)
)
BACKBONES = tuple(model for model in MODELS if model.__name__.endswith("Model"))
HEADS = tuple(model for model in MODELS if model not in BACKBONES)
LANGUAGE_MODELS = (
    scratch.ScratchEncoderForMaskedLM,
    scratch.ScratchDecoderForCausalLM,
    scratch.ScratchSeq2SeqForConditionalGeneration,
)
FIRST_WORD = 3  # ids below it are special tokens


def family(model: type[PreTrainedModel]) -> str:
    """`"encoder"`, `"decoder"` or `"seq2seq"`, of one of our classes."""
    return model.config_class.model_type.removeprefix("scratch_")


def task(model: type[PreTrainedModel]) -> str:
    """`"MaskedLM"`, `"SequenceClassification"`, ...; `""` for a backbone."""
    return model.__name__.partition("For")[2]


def auto_class(model: type[PreTrainedModel]) -> str:
    """The Auto class that opens it, by its task."""
    name = task(model)
    return "AutoModel" + {"": "", "ConditionalGeneration": "ForSeq2SeqLM"}.get(name, f"For{name}")


def config(family: str, **overrides: Any) -> PreTrainedConfig:
    config_class, depths = CONFIGS[family]
    return config_class(**SIZES | depths | overrides)


def model(model_class: type[PreTrainedModel], seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """One of our models in evaluation mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return model_class(config(family(model_class), **overrides)).eval()


def tokens(vocab_size: int, *shape: int, seed: int = 0) -> Tensor:
    """Words at random, none of them special."""
    return torch.randint(FIRST_WORD, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def padding_mask(batch: int, length: int, side: str = "right") -> Tensor:
    """(B, T): the first row is full, each later row has one token less, down to two."""
    mask = torch.arange(length) < (length - torch.arange(batch)).clamp(min=2)[:, None]
    return (mask if side == "right" else mask.flip(-1)).long()


def inputs(
    model: PreTrainedModel, batch: int = 3, length: int = 7, padding: str | None = "right", seed: int = 0
) -> dict[str, Tensor]:
    """What `forward` of any model takes beside labels. `padding`: on which side, or `None` for none.

    An encoder-decoder is given no `decoder_input_ids`, a multiple choice has two choices a row.
    """
    shape = (batch, 2, length) if task(type(model)) == "MultipleChoice" else (batch, length)
    ids = tokens(model.config.vocab_size, *shape, seed=seed)
    if padding is None:
        return {"input_ids": ids}
    mask = padding_mask(batch, length, padding).view(batch, *[1] * (len(shape) - 2), length).expand(shape).contiguous()
    return {"input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id or 0), "attention_mask": mask}


def labels(model: PreTrainedModel, inputs: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Labels of the kind that the head and its `problem_type` take, unequally many real ones in each row."""
    ids, config = inputs["input_ids"], model.config
    batch, length = len(ids), ids.shape[-1]
    real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    generator = torch.Generator().manual_seed(seed)

    def classes(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=generator)

    match task(type(model)):
        case "CausalLM":
            return {"labels": ids.masked_fill(~real, -100)}
        case "MaskedLM":
            # Row i has i + 1 masks, as far as its non-padding tokens go.
            return {"labels": ids.masked_fill(~real | (real.cumsum(-1) > torch.arange(1, batch + 1)[:, None]), -100)}
        case "ConditionalGeneration":
            words = getattr(config, "decoder_vocab_size", None) or config.vocab_size
            target = tokens(words, batch, length + 1, seed=seed)
            return {"labels": target.masked_fill(padding_mask(batch, length + 1) == 0, -100)}
        case "TokenClassification":
            return {"labels": classes(config.num_labels, batch, length).masked_fill(~real, -100)}
        case "QuestionAnswering":
            return {"start_positions": classes(length, batch), "end_positions": classes(length, batch)}
        case "MultipleChoice":
            return {"labels": classes(ids.shape[1], batch)}
        case "SequenceClassification" if config.problem_type == "regression":
            shape = (batch, config.num_labels) if config.num_labels > 1 else (batch,)
            return {"labels": torch.randn(shape, generator=generator)}
        case "SequenceClassification" if config.problem_type == "multi_label_classification":
            return {"labels": classes(2, batch, config.num_labels).float()}
        case "SequenceClassification":
            return {"labels": classes(config.num_labels, batch)}
        case other:
            raise ValueError(f"{type(model).__name__}: no labels for the task {other!r}")


@contextmanager
def no_multiplication() -> Iterator[None]:
    """Within it, no linear layer may run: for inputs that must be refused before any work is done."""
    with mock.patch("torch.nn.functional.linear", side_effect=AssertionError("a matrix was multiplied")):
        yield
