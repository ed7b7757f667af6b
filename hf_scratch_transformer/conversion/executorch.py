"""Our models as programs of ExecuTorch, for phones and small devices, by the exporter of transformers for XNNPACK.

`transformers.exporters.ExportedModel.from_pretrained(FOLDER)` opens a program. That of a decoder has a static cache
within: it takes new tokens and, as `cache_position`, the number of those before them.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache, StaticLayer
from transformers.utils import logging as transformers_logging

from ..files import reading
from ..stack_scratch import ScratchPreTrainedModel
from .comparison import Comparison, Writer, follow, furthest, greedily, row_by_row, tokens_for
from .folders import Saved, write_rest

try:
    from transformers.exporters import ExportedModel
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter
except (ImportError, OSError) as error:  # older versions of transformers, and libraries that this machine lacks
    raise ValueError(f"--to executorch: {str(error).splitlines()[0]}") from error

LONGEST = 512  # tokens at once, where a model sets no limit
CACHED = ("keys", "values", "cumulative_length")  # of each layer of a static cache

# With inputs to trace, and which of their sizes vary.
Program = tuple[nn.Module, dict[str, Tensor], dict[str, Any]]


class _Decoder(nn.Module):
    """One row of new tokens, with a static cache whose tensors are buffers, so that they are part of the program."""

    def __init__(self, model: ScratchPreTrainedModel, inputs: dict[str, Tensor], longest: int):
        super().__init__()
        self.model, self.config = model, model.config
        self.cache = StaticCache(config=model.config, max_cache_len=longest)
        # A layer that holds no more than its window decides by numbers what to forget; the mask says the same.
        self.cache.layers = [StaticLayer(longest) for _ in self.cache.layers]
        self(**inputs)
        for index, layer in enumerate(self.cache.layers):
            for name in CACHED:
                self.register_buffer(f"{name}_{index}", getattr(layer, name).zero_(), persistent=False)

    def forward(self, input_ids: Tensor, cache_position: Tensor, **source: Tensor) -> Tensor:
        for index, layer in enumerate(self.cache.layers):
            if layer.is_initialized:
                for name in CACHED:
                    setattr(layer, name, getattr(self, f"{name}_{index}"))
                layer.cumulative_length.copy_(cache_position[0])
        options: dict[str, Any] = {"input_ids": input_ids, "past_key_values": self.cache}
        if source:
            options = {
                "decoder_input_ids": input_ids,
                "encoder_outputs": (source["encoder_hidden_states"],),
                "attention_mask": source["encoder_attention_mask"],
                "past_key_values": EncoderDecoderCache(self.cache, DynamicCache()),
            }
        return self.model(**options, use_cache=True).logits


class _Encoder(nn.Module):
    def __init__(self, model: ScratchPreTrainedModel):
        super().__init__()
        self.encoder, self.config = model.get_encoder(), model.config

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return {"encoder_hidden_states": self.encoder(**inputs).last_hidden_state}


def programs(model: ScratchPreTrainedModel) -> dict[str, Program]:
    """What a model becomes, each program for any number of tokens up to the model's limit; batches of decoders and
    translators are of one row."""
    longest = getattr(model.config, "max_position_embeddings", None) or LONGEST
    text, batch = Dim("text", min=1, max=longest - 1), Dim("batch", min=1, max=64)
    given = tokens_for(model)
    ids = given["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not model.can_generate():
        if model.config.type_vocab_size:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        inputs |= {name: each for name, each in given.items() if name not in inputs}
        return {"model": (model, inputs, dict.fromkeys(inputs, {0: batch, ids.ndim - 1: text}))}
    inputs = {name: each[:1] for name, each in inputs.items()}
    new = {"input_ids": ids[:1, :2], "cache_position": torch.tensor([0])}
    sizes: dict[str, Any] = {"input_ids": {1: text}, "cache_position": None}
    if not model.config.is_encoder_decoder:
        return {"model": (_Decoder(model, new, longest), new, sizes)}
    encoder, source = _Encoder(model), Dim("source", min=1, max=longest - 1)
    new |= encoder(**inputs) | {"encoder_attention_mask": inputs["attention_mask"]}
    sizes |= dict.fromkeys(("encoder_hidden_states", "encoder_attention_mask"), {1: source})
    return {
        "encoder_model": (encoder, inputs, dict.fromkeys(inputs, {1: text})),
        "decoder_model": (_Decoder(model, new, longest), new, sizes),
    }


@torch.no_grad()
def write(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> None:
    """Write a folder with a folder for each program, `model`, or `encoder_model` and `decoder_model`; with tokenizer.

    Raises:
        ValueError: if ExecuTorch cannot say what the model computes.
    """
    new.mkdir()
    with reading(f"{saved.folder}, which cannot be exported"), _quiet():
        for name, (module, inputs, sizes) in programs(model).items():
            config = ExecutorchConfig(dynamic_shapes=sizes)
            ExecutorchExporter().export(module.eval(), dict(inputs), config=config).save_pretrained(new / name)
    write_rest(saved, model, new)


@torch.no_grad()
def run(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> Comparison:
    """What ExecuTorch's runtime computes by these programs, and writes, beside the model."""
    with reading(f"{new.name}, which ExecuTorch cannot run"):
        run = {path.parent.name: ExportedModel.from_pretrained(path.parent) for path in new.glob("*/export.json")}
        if model.can_generate():
            return follow(model, row_by_row(_writer(run)))
        _, inputs, _ = programs(model)["model"]
        inputs = {name: each[:1, ..., :-1] for name, each in inputs.items()}
        actual = run["model"](**inputs)
    expected = model(**inputs)
    return furthest((name, each, actual[name]) for name, each in expected.items() if isinstance(each, Tensor))


def _writer(run: dict[str, Any]) -> Writer:
    def write(source: Tensor | None, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
        given: dict[str, Tensor] = {}
        if source is not None:
            mask = torch.ones_like(source)
            given = run["encoder_model"](input_ids=source, attention_mask=mask) | {"encoder_attention_mask": mask}
        decoder, seen = run["model" if source is None else "decoder_model"], 0

        def step(new: Tensor) -> Tensor:
            nonlocal seen
            logits = decoder(input_ids=new, cache_position=torch.tensor([seen]), **given)
            seen += new.shape[1]
            return logits

        return greedily(step, text, count)

    return write


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say of versions and of sizes."""
    before, level = logging.root.manager.disable, transformers_logging.get_verbosity()
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.disable(before)
        transformers_logging.set_verbosity(level)
