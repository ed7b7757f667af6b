"""CTranslate2, on folders that `scratch-transformer export` has written."""

import copy
import importlib
import random
import shutil
from pathlib import Path

import ctranslate2
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_scratch_transformer import (
    ScratchDecoderForCausalLM,
    ScratchEncoderModel,
    ScratchSeq2SeqForConditionalGeneration,
)
from hf_scratch_transformer.cli import main
from hf_scratch_transformer.tokenization import config_fields, join_tokenizers, sides, train_tokenizer
from tests import tiny

LIKE_MARIAN = {
    **{"norm_type": "layer_norm", "norm_position": "post", "layer_norm_eps": 1e-5, "num_key_value_heads": 4},
    **{"position_embedding_type": "sinusoidal_halves", "hidden_act": "silu", "scale_embedding": True},
    **{"attention_bias": True, "mlp_bias": True, "lm_head_bias": True},
}
LIKE_LLAMA = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}
NEW = 24  # tokens at most

Trained = tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]


@pytest.fixture(scope="module")
def sentences(texts) -> list[str]:
    draw, words = random.Random(0), sorted({word for text in texts for word in text.split()})
    return [" ".join(draw.choices(words, k=draw.randint(4, 12))) for _ in range(200)]


def trained(
    model_class: type[PreTrainedModel], sentences: list[str], folder: Path, separate_vocabs: bool = False, **shape
) -> Trained:
    """A model that has learnt enough for each sentence to go on in a way of its own: turned round, or by heart."""
    family = tiny.family(model_class)
    sizes = (320, 300)[: 1 + separate_vocabs]
    alone = [train_tokenizer(sentences, family=family, vocab_size=size, min_frequency=1) for size in sizes]
    tokenizer = join_tokenizers(*alone) if separate_vocabs else alone[0]
    tensors = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False}
    inputs = tokenizer(sentences, **tensors)
    turned = sides(tokenizer)[1]([" ".join(reversed(text.split())) for text in sentences], **tensors)
    target = turned if family == "seq2seq" else inputs
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
    model = tiny.model(model_class, **config_fields(tokenizer, family) | shape, initializer_range=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        model(**inputs, labels=labels, loss_only=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


@pytest.fixture(scope="module", params=[False, True], ids=["one vocabulary", "one for each side"])
def translator(request, sentences, tmp_path_factory) -> Trained:
    shape = LIKE_MARIAN | {"max_position_embeddings": 64}
    folder = tmp_path_factory.mktemp("translator")
    return trained(ScratchSeq2SeqForConditionalGeneration, sentences, folder, request.param, **shape)


@pytest.fixture(scope="module")
def language_model(sentences, tmp_path_factory) -> Trained:
    shape = LIKE_LLAMA | {"max_position_embeddings": 64}
    return trained(ScratchDecoderForCausalLM, sentences, tmp_path_factory.mktemp("decoder"), **shape)


@pytest.fixture(scope="module")
def with_norms(sentences, tmp_path_factory) -> Trained:
    shape = LIKE_LLAMA | {"max_position_embeddings": 64, "use_qk_norm": True, "head_dim": 16}
    return trained(ScratchDecoderForCausalLM, sentences, tmp_path_factory.mktemp("norms"), **shape)


def until_end(row: Tensor, model: PreTrainedModel) -> list[int]:
    ids = row.tolist()
    return ids[: ids.index(model.config.eos_token_id)] if model.config.eos_token_id in ids else ids


def generate(model: PreTrainedModel, beams: int, **inputs: Tensor) -> Tensor:
    # Its beams stop once as many texts have ended as there are beams.
    how = {"num_beams": beams, "early_stopping": True} if beams > 1 else {}
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **how)


@pytest.mark.parametrize("beams", [1, 4])
def test_translator(beams, translator, sentences, tmp_path):
    """a translator, of one vocabulary and of two, greedy and 4 beams: tokens of 200 sentences, its own = ours"""
    model, tokenizer, folder = translator
    assert main(["export", str(folder), str(tmp_path / "engine"), "--to", "ctranslate2"]) == 0
    engine = ctranslate2.Translator(str(tmp_path / "engine"), compute_type="float32")
    tokens = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in sentences]
    limits = {"max_decoding_length": NEW, "min_decoding_length": 0}
    theirs = [
        sides(tokenizer)[1].convert_tokens_to_ids(result.hypotheses[0])
        for result in engine.translate_batch(tokens, beam_size=beams, **limits)
    ]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt", return_token_type_ids=False)
    ours = [until_end(row[1:], model) for row in generate(model, beams, **inputs)]
    assert len({tuple(ids) for ids in ours}) > 100
    assert theirs == ours


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("export", ["ctranslate2", "llama", "with query-key norm"])
def test_language_model(export, beams, language_model, with_norms, sentences, tmp_path):
    """a decoder, and its Llama export, greedy and 4 beams: tokens after 200 prompts, its own = ours"""
    model, tokenizer, folder = with_norms if export == "with query-key norm" else language_model
    engine = tmp_path / "engine"
    if export == "llama":
        assert main(["export", str(folder), str(tmp_path / "llama"), "--to", "llama"]) == 0
        ctranslate2.converters.TransformersConverter(str(tmp_path / "llama")).convert(str(engine))
    else:
        assert main(["export", str(folder), str(engine), "--to", "ctranslate2"]) == 0
    generator = ctranslate2.Generator(str(engine), compute_type="float32")
    prompts = [tokenizer(text)["input_ids"][:4] for text in sentences]
    results = generator.generate_batch(
        [tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts],
        beam_size=beams,
        max_length=NEW,
        include_prompt_in_result=False,
    )
    theirs = [result.sequences_ids[0] for result in results]
    ids = torch.tensor(prompts)
    ours = [until_end(row[4:], model) for row in generate(model, beams, input_ids=ids)]
    assert len({tuple(ids) for ids in ours}) > 50
    assert theirs == ours


def test_refused(translator, tmp_path, capsys, monkeypatch):
    """no counterpart, no model, a folder that is there or computes something else: refused in a line"""
    model, tokenizer, folder = translator
    tiny.model(ScratchEncoderModel).save_pretrained(tmp_path / "encoder")
    tiny.model(ScratchSeq2SeqForConditionalGeneration).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare/tokenizer_config.json").unlink()
    for source, target, message in (
        (tmp_path / "bare", tmp_path / "new", "its tokenizer has no "),
        (tmp_path / "encoder", tmp_path / "new", "is a ScratchEncoderModel; translators and"),
        (tmp_path / "other", tmp_path / "new", "norm_position='pre'"),
        (tmp_path, tmp_path / "new", "holds no config.json"),
        (folder, tmp_path / "other", "exists already"),
    ):
        capsys.readouterr()
        assert main(["export", str(source), str(target), "--to", "ctranslate2"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))
    another = copy.deepcopy(model)
    with torch.no_grad():
        another.model.decoder.layers[1].mlp.up_proj.weight += 0.1
    loader = importlib.import_module("hf_scratch_transformer.conversion.ctranslate2")
    monkeypatch.setattr(loader._Converter, "load_model", lambda self, *args, **options: another)
    assert main(["export", str(folder), str(tmp_path / "deep" / "new"), "--to", "ctranslate2"]) == 2
    assert "would compute something else by ctranslate2" in capsys.readouterr().err
    assert not (tmp_path / "deep").exists()
