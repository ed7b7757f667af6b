"""Models of ours with the files that `scratch-transformer export --to onnx` makes of them, once for all engines."""

from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from transformers import PreTrainedModel

from hf_scratch_transformer import (
    ScratchDecoderForCausalLM,
    ScratchEncoderForMaskedLM,
    ScratchEncoderModel,
    ScratchSeq2SeqForConditionalGeneration,
)
from hf_scratch_transformer.cli import main
from tests import tiny

ENDLESS = {"eos_token_id": None, "max_position_embeddings": 64}
LIKE_LLAMA = {"position_embedding_type": "rotary", "hidden_act": "swiglu", "norm_type": "rms_norm"}
UNTIED = {"tie_word_embeddings": False, "initializer_range": 0.3}  # or one token would follow itself
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
MODELS = {
    "encoder": (ScratchEncoderForMaskedLM, {"position_embedding_type": "learned", "norm_position": "post"}),
    "rotary encoder": (ScratchEncoderModel, LIKE_LLAMA | {"pooler_act": "tanh", "type_vocab_size": 2}),
    "decoder": (ScratchDecoderForCausalLM, LIKE_LLAMA),
    "learned decoder": (ScratchDecoderForCausalLM, {"position_embedding_type": "learned", "hidden_act": "gelu"}),
    "window decoder": (ScratchDecoderForCausalLM, LIKE_LLAMA | WINDOWS | {"value_head_dim": 12}),
    "seq2seq": (ScratchSeq2SeqForConditionalGeneration, LIKE_LLAMA | UNTIED),
    "learned seq2seq": (
        ScratchSeq2SeqForConditionalGeneration,
        LIKE_LLAMA | UNTIED | {"position_embedding_type": "learned"},
    ),
    "seq2seq of two vocabularies": (
        ScratchSeq2SeqForConditionalGeneration,
        LIKE_LLAMA | UNTIED | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37},
    ),
}


class Exported(NamedTuple):
    model: PreTrainedModel  # opened as a user would
    folder: Path  # of the files


@pytest.fixture(scope="session")
def exported(request, tmp_path_factory) -> Exported:
    model_class, options = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    tiny.model(model_class, **ENDLESS | options).save_pretrained(folder / "ours")
    assert main(["export", str(folder / "ours"), str(folder / "onnx"), "--to", "onnx"]) == 0
    auto = getattr(transformers, tiny.auto_class(model_class))
    return Exported(auto.from_pretrained(folder / "ours", trust_remote_code=True).eval(), folder / "onnx")
