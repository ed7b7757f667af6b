"""Models of ours beside native ones with the same weights: what the tests of this folder compare."""

from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration
from hf_scratch_transformer.conversion import convert_folder
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

LIKE_LLAMA = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}
LIKE_MARIAN = {
    **{"norm_type": "layer_norm", "norm_position": "post", "layer_norm_eps": 1e-5, "num_key_value_heads": 4},
    **{"position_embedding_type": "sinusoidal_halves", "hidden_act": "silu", "scale_embedding": True},
    **{"attention_bias": True, "mlp_bias": True, "lm_head_bias": True},
}
# Of a model that says the same whatever it is given, every comparison would hold.
VARIED = {"initializer_range": 0.4, "max_position_embeddings": 128}
SPEAKERS = {
    "decoder": (ScratchDecoderForCausalLM, AutoModelForCausalLM, "llama", LIKE_LLAMA | {"tie_word_embeddings": False}),
    "seq2seq": (ScratchSeq2SeqForConditionalGeneration, AutoModelForSeq2SeqLM, "marian", LIKE_MARIAN),
}
CHAT = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


class Pair(NamedTuple):
    family: str
    ours: PreTrainedModel
    native: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    folders: dict[str, str]  # "ours" and "native"
    inputs: dict[str, Tensor]  # eight rows of unequal length, padded
    row: dict[str, Tensor]  # one, without padding


def pair_of(family: str, texts: list[str], home: Path, seed: int = 0, **others) -> Pair:
    """Both opened from their folders."""
    model_class, auto_class, kind, shape = SPEAKERS[family]
    tokenizer = train_tokenizer(texts, family=family, vocab_size=320, min_frequency=1)
    tokenizer.padding_side = "left" if family == "decoder" else "right"
    tokenizer.chat_template = CHAT
    folders = {name: str(home / name) for name in ("ours", "native")}
    tiny.model(model_class, seed, **config_fields(tokenizer, family) | shape | VARIED | others).save_pretrained(
        folders["ours"]
    )
    tokenizer.save_pretrained(folders["ours"])
    convert_folder(folders["ours"], folders["native"], kind)
    ours, native = (auto_class.from_pretrained(folder).eval() for folder in folders.values())
    assert type(ours) is model_class and type(native).__module__.startswith("transformers.models.")
    tokenizer = AutoTokenizer.from_pretrained(folders["ours"])
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    row = tokenizer(texts[:1], return_tensors="pt", return_token_type_ids=False)
    return Pair(family, ours, native, tokenizer, folders, dict(inputs), dict(row))


@pytest.fixture(scope="session")
def pairs(texts, tmp_path_factory) -> dict[str, Pair]:
    return {family: pair_of(family, texts, tmp_path_factory.mktemp(family)) for family in SPEAKERS}


@pytest.fixture(scope="session")
def assistants(texts, tmp_path_factory) -> dict[str, Pair]:
    """Smaller ones, with the same tokenizer."""
    depths = {"decoder": {"num_hidden_layers": 1}, "seq2seq": {"decoder_layers": 1}}
    return {
        family: pair_of(family, texts, tmp_path_factory.mktemp(f"assistant-{family}"), **depths[family])
        for family in SPEAKERS
    }


@pytest.fixture(scope="session")
def foreigner(texts, tmp_path_factory) -> Pair:
    """A decoder with a tokenizer of its own."""
    words = [" ".join(reversed(text.split())) for text in texts[:5]]
    return pair_of("decoder", words, tmp_path_factory.mktemp("foreigner"), seed=1)


@pytest.fixture(params=SPEAKERS)
def pair(request, pairs) -> Pair:
    return pairs[request.param]


@pytest.fixture
def decoder(pairs) -> Pair:
    return pairs["decoder"]
