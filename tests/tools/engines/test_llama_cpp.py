"""llama.cpp, on files that `scratch-transformer export --to gguf` has written."""

import ctypes

import llama_cpp
import numpy as np
import pytest
import torch

from benchmarks.engines import weights_as_stored
from hf_scratch_transformer import ScratchDecoderForCausalLM
from hf_scratch_transformer.cli import main
from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

PACKAGE = "llama-cpp-python"
NEW = 20
BIASES = ("attention_bias", "mlp_bias")
LIKE_LLAMA = {"norm_type": "rms_norm", "hidden_act": "swiglu"}
OPTIONS = {
    "llama": LIKE_LLAMA,
    "qwen2": LIKE_LLAMA | {"attention_bias": True, "attention_output_bias": False},
    "qwen3": LIKE_LLAMA | {"use_qk_norm": True, "head_dim": 16},
    "starcoder2": {
        "norm_type": "layer_norm",
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
        "mlp_bias": True,
    },
}
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # the blocks of four bits are of 256 numbers
NEAR = {"rtol": 0, "atol": 1e-4}
BY_TABLE = {"rtol": 0, "atol": 2e-3}  # it looks GELU up in a table in half precision
FILE_TYPES = {"Q8_0": 1.0625, "Q4_K_S": 0.5625}  # bytes for a number, with the scales of its block


def written(folder, texts, **options):
    """A model of ours, its tokenizer, and the file."""
    tokenizer = train_tokenizer(texts, family="decoder", vocab_size=320, min_frequency=1)
    fields = config_fields(tokenizer, "decoder") | {"max_position_embeddings": 64, "tie_word_embeddings": False}
    model = tiny.model(ScratchDecoderForCausalLM, **fields | {"initializer_range": 0.15} | options)
    model.save_pretrained(folder / "ours")
    tokenizer.save_pretrained(folder / "ours")
    assert main(["export", str(folder / "ours"), str(folder / "model.gguf"), "--to", "gguf"]) == 0
    return model, tokenizer, folder / "model.gguf"


def opened(file):
    single = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)  # of what the cache holds; else half
    with weights_as_stored():
        return llama_cpp.Llama(str(file), n_ctx=64, n_threads=1, logits_all=True, verbose=False, **single)


def logits(engine, ids):
    engine.reset()
    engine.eval(ids)
    return torch.from_numpy(np.array(engine.scores[: len(ids)]))


@pytest.mark.parametrize("form", OPTIONS)
def test_decoder(form, texts, tmp_path):
    """a decoder as each of 4 architectures: tokens of texts and greedy ones = ours, logits within 1e-4 (GELU: 0.002)"""
    model, tokenizer, file = written(tmp_path, texts, **OPTIONS[form])
    engine = opened(file)
    assert engine.metadata["general.architecture"] == form
    followed = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert engine.tokenize(text.encode(), special=True) == ids
        with torch.no_grad():
            near = BY_TABLE if form == "starcoder2" else NEAR
            torch.testing.assert_close(logits(engine, ids), model(torch.tensor([ids])).logits[0], **near)
        theirs = list(ids)
        for _ in range(NEW):
            theirs.append(int(logits(engine, theirs)[-1].argmax()))
        ours = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
        assert theirs == ours[0].tolist()
        followed.append(tuple(theirs[len(ids) :]))
    assert len(set(followed)) > len(texts) // 2


@pytest.mark.parametrize("name", FILE_TYPES)
def test_quantised(name, texts, tmp_path):
    """a decoder, its file quantised to 8 and 4 bits: size as it should, logits = ours with the numbers read from it"""
    model, tokenizer, file = written(tmp_path, texts, **LIKE_LLAMA | WIDE)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}"), 1, True
    small = tmp_path / "small.gguf"
    assert llama_cpp.llama_model_quantize(bytes(file), bytes(small), ctypes.byref(params)) == 0
    matrices = sum(each.numel() for each in model.parameters() if each.ndim == 2)
    saved = matrices * (4 - FILE_TYPES[name])
    assert abs(file.stat().st_size - small.stat().st_size - saved) < 0.01 * saved
    again = convert_from(small)
    steps = [
        (one - two).abs().max() / one.abs().max()
        for one, two in zip(model.parameters(), again.parameters(), strict=True)
        if one.ndim == 2
    ]
    bits = int(name[1])
    assert 0 < max(steps) < 2 ** -(bits - 1)
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    whole = tmp_path / "whole.gguf"
    assert llama_cpp.llama_model_quantize(bytes(small), bytes(whole), ctypes.byref(params)) == 0
    ids = tokenizer(" ".join(texts))["input_ids"][:60]
    with torch.no_grad():
        ours = again(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(opened(whole), ids), ours, **NEAR)
    # From the small file itself it multiplies activations rounded to 8 bits.
    assert (logits(opened(small), ids) - ours).norm() < 0.1 * ours.norm()
