"""A Transformer from scratch that the Hugging Face ecosystem takes for a native one: encoder, decoder, translator.

Importing the package registers its configurations and models with transformers' Auto classes, and with PEFT.
"""

import transformers

from . import adapters
from .configuration_scratch import ScratchConfig, ScratchDecoderConfig, ScratchEncoderConfig, ScratchSeq2SeqConfig
from .modeling_scratch_decoder import (
    ScratchDecoderForCausalLM,
    ScratchDecoderForQuestionAnswering,
    ScratchDecoderForSequenceClassification,
    ScratchDecoderForTokenClassification,
    ScratchDecoderModel,
)
from .modeling_scratch_encoder import (
    ScratchEncoderForMaskedLM,
    ScratchEncoderForMultipleChoice,
    ScratchEncoderForQuestionAnswering,
    ScratchEncoderForSequenceClassification,
    ScratchEncoderForTokenClassification,
    ScratchEncoderModel,
)
from .modeling_scratch_seq2seq import ScratchSeq2SeqForConditionalGeneration, ScratchSeq2SeqModel
from .tokenization_scratch import ScratchTranslationTokenizer

__version__ = "0.2.0.dev0"

for _config in (ScratchEncoderConfig, ScratchDecoderConfig, ScratchSeq2SeqConfig):
    transformers.AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto_class, _reference in _config._auto_map.items():
        if _auto_class != "AutoConfig":
            _model = globals()[_reference.split(".")[1]]
            getattr(transformers, _auto_class).register(_config, _model, exist_ok=True)
# For folders that name it: a translator's tokenizer is an ordinary one otherwise.
transformers.AutoTokenizer.register(
    ScratchSeq2SeqConfig, fast_tokenizer_class=ScratchTranslationTokenizer, exist_ok=True
)
adapters.register(
    *(_config.model_type for _config in (ScratchEncoderConfig, ScratchDecoderConfig, ScratchSeq2SeqConfig))
)

__all__ = [
    "ScratchConfig",
    "ScratchDecoderConfig",
    "ScratchDecoderForCausalLM",
    "ScratchDecoderForQuestionAnswering",
    "ScratchDecoderForSequenceClassification",
    "ScratchDecoderForTokenClassification",
    "ScratchDecoderModel",
    "ScratchEncoderConfig",
    "ScratchEncoderForMaskedLM",
    "ScratchEncoderForMultipleChoice",
    "ScratchEncoderForQuestionAnswering",
    "ScratchEncoderForSequenceClassification",
    "ScratchEncoderForTokenClassification",
    "ScratchEncoderModel",
    "ScratchSeq2SeqConfig",
    "ScratchSeq2SeqForConditionalGeneration",
    "ScratchSeq2SeqModel",
    "ScratchTranslationTokenizer",
]
