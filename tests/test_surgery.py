"""Layers kept and copied, vocabularies fitted, models averaged: what is computed afterwards, and that it trains on."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_scratch_transformer as scratch
from hf_scratch_transformer import cli
from hf_scratch_transformer.conversion import convert_from, convert_to
from hf_scratch_transformer.surgery import average, fit_vocabulary, select_layers
from hf_scratch_transformer.tokenization import config_fields, join_tokenizers, train_tokenizer

from . import tiny
from .test_conversion import native


def learns(model) -> bool:
    model.train()
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-1] < losses[0]


def run_by_hand(model, layers: list[int], ids: torch.Tensor) -> torch.Tensor:
    """The states after these layers of a model, one call for each."""
    states = model.model(ids, output_hidden_states=True).hidden_states[0]
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    places = torch.arange(ids.shape[1])[None]
    for index in layers:
        turn = model.model.turned_as[index]
        angles = None if turn is None else model.model.rotary[turn](places, states.dtype)
        states = model.model.layers[index](states, mask, position_embeddings=angles)
    return model.lm_head(model.model.norm(states))


@pytest.mark.parametrize("layers", [[0, 2], [2, 0], [0, 0, 1, 1, 2, 2], [1]])
def test_a_model_of_some_layers_runs_those(layers):
    ours = convert_from(native("smollm3", size=1, sliding_window=50))
    made, ids = select_layers(ours, layers), tiny.tokens(41, 2, 7)
    assert made.config.num_hidden_layers == len(layers) == len(made.config.layer_types)
    assert_close(made(ids).logits, run_by_hand(ours, layers, ids), atol=1e-5, rtol=1e-5)
    back = convert_to(made, "smollm3")
    assert_close(back(ids).logits, made(ids).logits, atol=1e-5, rtol=1e-5)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    assert learns(made)
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())


def test_layers_of_a_translator():
    ours = convert_from(native("bart", size=0))  # one and two layers
    made = select_layers(ours, [0, 0, 0], [1])
    assert (made.config.encoder_layers, made.config.decoder_layers) == (3, 1)
    assert torch.equal(made.model.encoder.layers[2].mlp.up_proj.weight, ours.model.encoder.layers[0].mlp.up_proj.weight)
    assert torch.equal(made.model.decoder.layers[0].mlp.up_proj.weight, ours.model.decoder.layers[1].mlp.up_proj.weight)
    assert select_layers(ours, [0]).config.decoder_layers == 2
    assert learns(made)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_relative_biases_go_with_their_layers_or_with_the_stack(name):
    ours = convert_from(native(name))  # two and two layers
    made = select_layers(ours, [1, 1, 0], [1])
    source, target = tiny.tokens(41, 2, 7), tiny.tokens(41, 2, 5)
    inputs = {"input_ids": source, "decoder_input_ids": target}
    back = convert_to(made, name)
    assert_close(back(**inputs).logits, made(**inputs).logits, atol=1e-5, rtol=1e-5)
    tables = {"encoder": [0], "decoder": [0]} if name == "t5" else {"encoder": [1, 1, 0], "decoder": [1]}
    for stack, indices in tables.items():
        old, new = (getattr(model.model, stack).position_bias for model in (ours, made))
        assert all(torch.equal(each.table.weight, old[i].table.weight) for each, i in zip(new, indices, strict=True))


def test_a_first_layer_without_a_norm_stays_the_first():
    ours = convert_from(native("modernbert"))
    made = select_layers(ours, [0, 2, 2])
    ids = tiny.tokens(41, 2, 7)
    assert_close(convert_to(made, "modernbert")(ids).logits, made(ids).logits, atol=1e-5, rtol=1e-5)
    for layers in ([1, 2], [0, 0, 1]):
        with pytest.raises(ValueError, match=r"layers \[.*\]: first_norm=False, so layer 0 must stay the first"):
            select_layers(ours, layers)


def test_kinds_of_layers_go_with_those_of_a_translator():
    made = select_layers(convert_from(native("t5gemma")), [1, 0, 0], [2])
    assert made.config.encoder_layer_types == ["full_attention", *["sliding_attention"] * 2]
    assert made.config.decoder_layer_types == ["sliding_attention"]
    inputs = {"input_ids": tiny.tokens(41, 2, 7), "decoder_input_ids": tiny.tokens(41, 2, 5)}
    assert_close(convert_to(made, "t5gemma")(**inputs).logits, made(**inputs).logits, atol=1e-5, rtol=1e-5)


def test_layers_that_there_are_not():
    ours = convert_from(native("llama"))
    for layers in ([], [2], [-1]):
        with pytest.raises(ValueError, match=r"layers \[.*\] must be some of 0 to 1"):
            select_layers(ours, layers)
    with pytest.raises(ValueError, match="has one stack of layers"):
        select_layers(ours, [0], [0])


def test_an_average_is_the_mean():
    models = [tiny.model(scratch.ScratchDecoderForCausalLM) for _ in range(3)]
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    made = average(models)
    for name, tensor in made.state_dict().items():
        assert_close(tensor, torch.stack([model.state_dict()[name] for model in models]).mean(0))
    assert torch.equal(average(models[:1]).lm_head.weight, models[0].lm_head.weight)
    assert learns(made)
    with pytest.raises(ValueError, match="cannot be averaged with a ScratchDecoderForCausalLM"):
        average([models[0], tiny.model(scratch.ScratchEncoderForMaskedLM)])
    with pytest.raises(ValueError, match="parameters differ in shape, .* among them"):
        average([models[0], tiny.model(scratch.ScratchDecoderForCausalLM, intermediate_size=10)])
    rope = {"rope_type": "default", "rope_theta": 7.0}
    with pytest.raises(ValueError, match="cannot be averaged with a ScratchDecoderForCausalLM; rope_parameters=.*7.0"):
        average([models[0], tiny.model(scratch.ScratchDecoderForCausalLM, rope_parameters=rope)])
    with torch.no_grad():
        models[1].model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="model.norm.weight: not all numbers are finite"):
        average(models)
    with pytest.raises(ValueError, match="nothing to average"):
        average([])


TEXT = ["the cat sat on the mat", "a dog ate the cat", "der Hund sah die Katze"] * 10


@pytest.fixture(scope="module")
def tokenizers():
    return [train_tokenizer(TEXT[:count], family="decoder", vocab_size=size) for count, size in ((2, 280), (30, 300))]


def test_a_tokenizer_that_is_another_models_is_refused(tokenizers):
    model = tiny.model(scratch.ScratchDecoderForCausalLM, vocab_size=100)
    with pytest.raises(ValueError, match=r"a tokenizer of \d+ tokens is not that of a model with 100 rows"):
        fit_vocabulary(model, *tokenizers)


def test_what_the_new_tokenizer_has_not_ends_no_text(tokenizers):
    model = tiny.model(scratch.ScratchDecoderForCausalLM, vocab_size=len(tokenizers[0]))
    words = train_tokenizer(TEXT, family="encoder", vocab_size=60)
    made = fit_vocabulary(model, tokenizers[0], words)
    assert made.config.eos_token_id is made.generation_config.eos_token_id is words.eos_token_id is None
    assert made.config.pad_token_id == words.pad_token_id


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("widen", [True, False])
def test_a_vocabulary_fits_its_tokenizer(tokenizers, widen, tie_word_embeddings):
    old, new = tokenizers if widen else tokenizers[::-1]
    options = {"tie_word_embeddings": tie_word_embeddings, "lm_head_bias": True, "vocab_size": len(old)}
    model = tiny.model(scratch.ScratchDecoderForCausalLM, **options)
    torch.nn.init.normal_(model.lm_head.bias)
    made = fit_vocabulary(model, old, new)
    assert made.config.vocab_size == len(new) == len(made.lm_head.bias) == len(made.get_input_embeddings().weight)
    before, after = old.get_vocab(), new.get_vocab()
    shared, added = before.keys() & after.keys(), after.keys() - before.keys()
    assert len(shared) > 200 and bool(added) == widen
    for token in shared:
        for part in ("weight", "bias"):
            assert torch.equal(getattr(made.lm_head, part)[after[token]], getattr(model.lm_head, part)[before[token]])
    table = model.get_input_embeddings().weight
    for token in added:
        ids = old(new.convert_tokens_to_string([token]), add_special_tokens=False)["input_ids"]
        assert_close(made.get_input_embeddings().weight[after[token]], table[ids].mean(0))
    assert (made.get_input_embeddings().weight is made.lm_head.weight) == tie_word_embeddings
    assert learns(made)


def test_a_translator_with_two_vocabularies_is_refused(tokenizers):
    model = tiny.model(
        scratch.ScratchSeq2SeqForConditionalGeneration, share_encoder_decoder_embeddings=False, decoder_vocab_size=50
    )
    with pytest.raises(ValueError, match="ScratchSeq2SeqForConditionalGeneration has a vocabulary for each side"):
        fit_vocabulary(model, *tokenizers)


def test_a_tokenizer_of_two_vocabularies_is_refused():
    sizes = (263, 264)
    alone = [train_tokenizer(["the cat ate the dog"], family="seq2seq", vocab_size=size) for size in sizes]
    model = tiny.model(scratch.ScratchSeq2SeqForConditionalGeneration, **config_fields(alone[0], "seq2seq"))
    for old, new in ((alone[0], join_tokenizers(*alone)), (join_tokenizers(*alone), alone[1])):
        with pytest.raises(ValueError, match="Tokenizer has a vocabulary for each side, the model one"):
            fit_vocabulary(model, old, new)


def test_the_commands(tmp_path, capsys, tokenizers):
    theirs = native("llama", vocab_size=len(tokenizers[0]))
    theirs.save_pretrained(tmp_path / "native")
    tokenizers[0].save_pretrained(tmp_path / "native")
    tokenizers[1].save_pretrained(tmp_path / "new")
    run = lambda *words: cli.main([str(tmp_path / word[1:]) if word[0] == "@" else word for word in words])  # noqa: E731
    assert run("layers", "@native", "@grown", "--keep", "0", "1", "1") == 0
    assert "grown: ScratchDecoderForCausalLM" in capsys.readouterr().out
    assert run("average", "@grown", "@grown", "--output", "@mean") == 0
    assert run("vocabulary", "@mean", "@new", "@fitted") == 0
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "fitted")
    assert made.config.num_hidden_layers == 3 and made.config.vocab_size == len(tokenizers[1])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "fitted")) == len(tokenizers[1])
    capsys.readouterr()
    for words, message in (
        (("layers", "@native", "@fitted", "--keep", "0"), "fitted exists already: name a new folder"),
        (("layers", "@native", "@other", "--keep", "7"), "layers [7] must be some of 0 to 1"),
        (("average", "@native", "@fitted", "--output", "@other"), "parameters differ in shape"),
        (("vocabulary", "@native", "@nowhere", "@other"), "nowhere"),
    ):
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1] and "Traceback" not in error
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("family", "kept"),
    [("qwen2", "full_attention"), ("cohere2", "sliding_attention"), ("exaone4", "sliding_attention")],
)
def test_layers_of_one_kind_go_back_to_where_they_came_from(family, kept):
    ours = convert_from(native(family, size=1))
    layers = [index for index, kind in enumerate(ours.config.layer_types) if kind == kept]
    small = select_layers(ours, layers)
    ids = torch.randint(3, 40, (2, 9))
    assert_close(convert_to(small.eval(), family).eval()(ids)[0], small(ids)[0])


def test_classifiers_with_other_labels_are_not_averaged():
    one, other = (tiny.model(scratch.ScratchEncoderForSequenceClassification) for _ in range(2))
    one.config.id2label, other.config.id2label = {0: "no", 1: "yes"}, {0: "yes", 1: "no"}
    with pytest.raises(ValueError, match="id2label="):
        average([one, other])
