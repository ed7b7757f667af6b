"""Our translators and language models as folders of CTranslate2, an engine that serves them on processors.

Importing this module teaches CTranslate2's own converter our configurations, for its command and for other programs.
"""

import os
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from ctranslate2.converters.transformers import BartLoader, LlamaLoader, Qwen3Loader, register_loader
from torch import Tensor

from ..configuration_scratch import ScratchDecoderConfig, ScratchSeq2SeqConfig
from ..files import reading
from ..stack_scratch import ScratchPreTrainedModel
from ..tokenization import sides
from .comparison import Comparison, follow
from .folders import Saved, convert_to


def write(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> None:
    """Write a folder for `ctranslate2.Translator` or `ctranslate2.Generator`.

    Greedy text is that of `generate`, and so is that of beams, which stop as with `early_stopping=True`; for targets
    without a token it has to be told `min_decoding_length=0`.

    Raises:
        ValueError: as `convert_to` to Marian or Llama, and if the model is neither a translator nor a language model.
    """
    if not model.can_generate():
        raise ValueError(
            f"{saved.folder} is a {type(model).__name__}; translators and language models become ctranslate2"
        )
    with reading(saved.folder):
        _Converter(model, os.fspath(saved.folder)).convert(os.fspath(new))


def run(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> Comparison:
    """What CTranslate2 computes by this folder, and writes, beside the model."""
    source_side, target_side = sides(saved.tokenizer())
    model_class = ctranslate2.Translator if model.config.is_encoder_decoder else ctranslate2.Generator
    with reading(f"{new.name}, which CTranslate2 cannot open"):
        engine = model_class(os.fspath(new), compute_type="float32")

    def write(source: Tensor | None, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
        given = [source_side.convert_ids_to_tokens(row) for row in (text if source is None else source).tolist()]
        if source is None:
            lengths = {"min_length": count, "max_length": count, "include_prompt_in_result": False}
            results = engine.generate_batch(given, **lengths, return_logits_vocab=True)
            written = [result.sequences[0] for result in results]
        else:
            lengths = {"min_decoding_length": count, "max_decoding_length": count}
            results = engine.translate_batch(given, beam_size=1, **lengths, return_logits_vocab=True)
            written = [result.hypotheses[0] for result in results]
        logits = [[np.array(step) for step in result.logits[0]] for result in results]
        return torch.tensor([target_side.convert_tokens_to_ids(row) for row in written]), torch.tensor(np.array(logits))

    # Until the text is as long as it was told to be, it leaves out the token that ends it.
    words = min(len(source_side), model.config.vocab_size)
    return follow(model, write, words=words, barred=[target_side.eos_token_id])


class _Converter(TransformersConverter):
    """Of a model that has been read: its own reading would draw at random what is missing."""

    def __init__(self, model: ScratchPreTrainedModel, folder: str):
        super().__init__(folder)
        self.model = model

    def load_model(self, *args: Any, **options: Any) -> ScratchPreTrainedModel:
        return self.model


class _Vocabulary:
    def set_config(self, config: Any, model: Any, tokenizer: Any) -> None:
        super().set_config(config, model, tokenizer)  # type: ignore[misc]
        config.unk_token = tokenizer.unk_token or tokenizer.pad_token  # over bytes there is none, and one is asked for
        for name in ("bos_token", "eos_token", "unk_token"):
            if getattr(config, name) is None:
                raise ValueError(f"its tokenizer has no {name}, which ctranslate2 needs")


@register_loader(ScratchSeq2SeqConfig.__name__)
class TranslatorLoader(_Vocabulary, BartLoader):
    """CTranslate2's loader of Marian, less what that takes for granted: that padding ends the vocabulary, and that
    targets start from a vector of zeros."""

    architecture_name = "AutoModelForSeq2SeqLM"

    def get_vocabulary(self, model: ScratchPreTrainedModel, tokenizer: Any) -> tuple[list[str], list[str]]:
        every = super(BartLoader, self).get_vocabulary  # BART's leaves out what the source has no row for
        source, target = (every(model, side) for side in sides(tokenizer))
        return source[: model.config.vocab_size], target[: model.config.decoder_vocab_size]

    def set_vocabulary(self, spec: Any, tokens: tuple[list[str], list[str]]) -> None:
        source, target = tokens
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)

    def get_model_spec(self, model: ScratchPreTrainedModel) -> Any:
        native = convert_to(model, "marian")
        native.config.normalize_before = native.config.normalize_embedding = False
        return super().get_model_spec(native)


@register_loader(ScratchDecoderConfig.__name__)
class LanguageModelLoader(_Vocabulary, LlamaLoader):
    """Its loader of Llama or, with query-key norm, of Qwen3."""

    architecture_name = "AutoModelForCausalLM"

    def get_model_spec(self, model: ScratchPreTrainedModel) -> Any:
        if model.config.use_qk_norm:
            return Qwen3Loader().get_model_spec(convert_to(model, "qwen3"))
        return super().get_model_spec(convert_to(model, "llama"))
