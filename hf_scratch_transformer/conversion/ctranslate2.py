"""Our translators and language models as folders of CTranslate2, an engine that serves them on processors.

Importing this module teaches CTranslate2's own converter our configurations, for its command and for other programs.
"""

import os
from pathlib import Path
from typing import Any

from ctranslate2.converters import TransformersConverter
from ctranslate2.converters.transformers import BartLoader, LlamaLoader, register_loader

from ..configuration_scratch import ScratchDecoderConfig, ScratchSeq2SeqConfig
from ..files import new_folder, reading, replacing
from ..stack_scratch import ScratchPreTrainedModel
from .folders import convert_to, open_saved, read_config


def to_ctranslate2(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write a folder for `ctranslate2.Translator` or `ctranslate2.Generator`; it appears once all of it is there.

    Greedy text is that of `generate`, and so is that of beams, which stop as with `early_stopping=True`; for targets
    without a token it has to be told `min_decoding_length=0`.

    Args:
        source: a folder of a translator that has a counterpart in Marian, or a language model that has one in Llama,
            with its tokenizer.
        target: a folder that does not exist yet.

    Raises:
        ValueError: as `convert_to`, and if `source` is another model or `target` exists.
    """
    target = new_folder(target)
    config = read_config(Path(source))
    if not isinstance(config, ScratchSeq2SeqConfig | ScratchDecoderConfig):
        raise ValueError(
            f"{source} is a {config.model_type} model; translators and decoders of ours become ctranslate2"
        )
    open_saved(source)  # of which nothing is missing; its own loader would draw that at random
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as new, reading(source):
        TransformersConverter(os.fspath(source)).convert(os.fspath(new))


class _Vocabulary:
    def set_config(self, config: Any, model: Any, tokenizer: Any) -> None:
        super().set_config(config, model, tokenizer)  # type: ignore[misc]
        config.unk_token = tokenizer.unk_token or tokenizer.pad_token  # over bytes there is none, and one is asked for


@register_loader(ScratchSeq2SeqConfig.__name__)
class TranslatorLoader(_Vocabulary, BartLoader):
    """CTranslate2's loader of Marian, less what that takes for granted: that padding ends the vocabulary, and that
    targets start from a vector of zeros."""

    architecture_name = "AutoModelForSeq2SeqLM"

    def get_model_spec(self, model: ScratchPreTrainedModel) -> Any:
        native = convert_to(model, "marian")
        native.config.normalize_before = native.config.normalize_embedding = False
        return super().get_model_spec(native)


@register_loader(ScratchDecoderConfig.__name__)
class LanguageModelLoader(_Vocabulary, LlamaLoader):
    architecture_name = "AutoModelForCausalLM"

    def get_model_spec(self, model: ScratchPreTrainedModel) -> Any:
        return super().get_model_spec(convert_to(model, "llama"))
