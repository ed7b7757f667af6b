"""What the page answers is what the model computes, and what is wrong is said in words."""

import copy
import functools
import threading

import numpy as np
import pytest
import torch

from hf_scratch_transformer.insight import answers, pictures
from tests import tiny
from tests.test_pictures import LONG, MONEY, RIVER, image, native, ours

MASKED = "She sat on the river [MASK]."
make = functools.cache(lambda name: ours(name) if name in tiny.FAMILIES else native(name))


def greatest(logits, count):
    probabilities = logits.softmax(-1)
    return probabilities.topk(count).values.tolist()


def whole(texts):
    """Of a text given bit by bit."""
    *_, (text, _) = texts
    return text


# What the model computes


@pytest.mark.parametrize("name", ["seq2seq", "marian"])
def test_a_translation_is_what_generate_writes(name):
    model, tokenizer = make(name)
    inputs = tokenizer([RIVER], return_tensors="pt")
    longest = 2 * inputs["input_ids"].shape[1] + 10
    written = model.generate(**inputs, max_new_tokens=longest)[0]
    assert whole(answers.translate(model, tokenizer, RIVER)) == tokenizer.decode(written, skip_special_tokens=True)


def test_a_translation_is_made_as_the_model_is_set_to_generate(monkeypatch):
    model, tokenizer = make("seq2seq")
    greedy = whole(answers.translate(model, tokenizer, RIVER))
    monkeypatch.setattr(model.generation_config, "num_beams", 4)
    assert greedy != whole(answers.translate(model, tokenizer, RIVER))
    monkeypatch.setattr(model.generation_config, "num_beams", 1)
    monkeypatch.setattr(model.generation_config, "do_sample", True)
    monkeypatch.setattr(model.generation_config, "temperature", 3.0)
    first, again = (whole(answers.translate(model, tokenizer, RIVER)) for _ in range(2))
    assert greedy != first == again, "the draw is the same for every model"


KINDS = {"seq2seq": ("cross", "encoder", "decoder"), "marian": ("cross", "encoder", "decoder")}


@pytest.mark.parametrize("name", ["encoder", "bert", "decoder", "gpt2", "seq2seq", "marian"])
def test_attention_is_shown_of_every_family_by_layer_and_head(name):
    model, tokenizer = make(name)
    for of in KINDS.get(name, ("self",)):
        target = MONEY if name in KINDS else ""
        weights = pictures.attention_weights(model, tokenizer, RIVER, target or None, of).weights
        one = answers.attended(model, tokenizer, RIVER, 0, 1, of, target)
        assert np.allclose(image(one.axes[0]), weights[0, 1])
        every = answers.attended(model, tokenizer, RIVER, of=of, translation=target)
        assert len([axes for axes in every.axes if axes.images]) == weights[:, :, 0, 0].numel()


def test_attention_without_a_translation_is_of_the_models_own():
    model, tokenizer = make("seq2seq")
    weights = pictures.attention_weights(model, tokenizer, RIVER).weights
    assert np.allclose(image(answers.attended(model, tokenizer, RIVER, 1, 0).axes[0]), weights[1, 0])


@pytest.mark.parametrize("name", ["decoder", "gpt2"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_distribution_of_the_next_token_is_the_models(name, temperature):
    model, tokenizer = make(name)
    logits = model(**tokenizer([RIVER], return_tensors="pt")).logits[0, -1].detach()
    shown = answers.next_token(model, tokenizer, RIVER, temperature)
    assert list(shown.values()) == pytest.approx(greatest(logits / temperature, answers.CANDIDATES))


def test_a_token_with_and_without_a_space_before_it_are_two(monkeypatch):
    _, tokenizer = make("decoder")
    vocabulary = tokenizer.get_vocab()
    token = next(token for token in sorted(vocabulary) if token.isalpha() and f"Ġ{token}" in vocabulary)
    logits = torch.full((len(tokenizer),), -torch.inf)
    logits[[vocabulary[token], vocabulary[f"Ġ{token}"], vocabulary["Ġriver"]]] = torch.tensor([0.5, 0.3, 0.2]).log()
    monkeypatch.setattr(answers, "CANDIDATES", 3)
    assert answers._likeliest(tokenizer, logits) == pytest.approx({token: 0.5, f"Ġ{token}": 0.3, "river": 0.2})


def test_a_continuation_is_drawn_from_the_distribution_that_is_shown():
    model, tokenizer = make("decoder")
    inputs = tokenizer([RIVER], return_tensors="pt")
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=9)[0]
    # So cold that only the likeliest token is ever drawn.
    cold = whole(answers.continuation(model, tokenizer, RIVER, 1e-4, 9))
    assert cold == tokenizer.decode(greedy, skip_special_tokens=True)
    drawn = {whole(answers.continuation(model, tokenizer, RIVER, 2.0, 1, seed)) for seed in range(150)}
    assert all(text.startswith(RIVER) for text in drawn)
    assert len(drawn) > 50, "transformers' default is to cut the distribution off after 50 tokens"


def test_a_continuation_ends_where_the_positions_do(monkeypatch):
    model, tokenizer = ours("decoder", max_position_embeddings=16, eos_token_id=None)
    lengths = []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: lengths.append(len(ids)) or "")
    list(answers.continuation(model, tokenizer, "the bank", new_tokens=500))
    assert lengths[-1] == 16
    text = "x" * 16
    assert len(tokenizer(text)["input_ids"]) == 16
    with pytest.raises(ValueError, match="16 tokens, all that the model has positions for"):
        list(answers.continuation(model, tokenizer, text))


@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_the_candidates_for_a_masked_word_are_the_models(name):
    model, tokenizer = make(name)
    inputs = tokenizer([MASKED], return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    logits = model(**inputs).logits[0, place].detach()
    shown = answers.masked_word(model, tokenizer, MASKED)
    assert list(shown.values()) == pytest.approx(greatest(logits, answers.CANDIDATES))
    assert next(iter(shown)) == pictures.readable(tokenizer, logits.argmax()[None])[0]


def test_a_mask_is_typed_alike_whatever_the_tokenizer_calls_it():
    model, tokenizer = ours("encoder")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.mask_token = "river"  # as BERT's [MASK] is <mask> to RoBERTa
    place = tokenizer("She sat on the river.")["input_ids"].index(tokenizer.mask_token_id)
    logits = model(**tokenizer(["She sat on the river."], return_tensors="pt")).logits[0, place].detach()
    shown = answers.masked_word(model, tokenizer, "She sat on the [MASK].")
    assert list(shown.values()) == pytest.approx(greatest(logits, answers.CANDIDATES))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_word_is_shown_in_both_sentences(family):
    figure = answers.moved_word(*make(family), " bank ", RIVER, MONEY)
    assert [axes.get_title() for axes in figure.axes] == [RIVER, MONEY]


# What is wrong


@pytest.mark.parametrize(
    ("name", "function", "words", "message"),
    [
        ("seq2seq", answers.translate, [" \n"], "text is empty"),
        ("seq2seq", answers.translate, [LONG * 9], "more than max_position_embeddings=128"),
        ("seq2seq", answers.attended, [RIVER, 9], "layer=9"),
        ("decoder", answers.attended, [RIVER, 0, 4], "head=4"),
        ("encoder", answers.attended, [""], "text is empty"),
        ("decoder", answers.next_token, [""], "text is empty"),
        ("decoder", answers.next_token, [LONG * 9], "more than max_position_embeddings=128"),
        ("decoder", answers.continuation, [LONG * 9], "more than max_position_embeddings=128"),
        ("encoder", answers.masked_word, [""], "text is empty"),
        ("encoder", answers.masked_word, [RIVER], r"one \[MASK\], where the word is to be guessed; it has 0"),
        ("encoder", answers.masked_word, [MASKED * 2], "it has 2"),
        ("encoder", answers.moved_word, ["sea", RIVER, MONEY], "word='sea' is not in the sentence 'She sat"),
        ("encoder", answers.moved_word, ["", RIVER, MONEY], "word='' is not in the sentence"),
        ("encoder", answers.moved_word, ["bank", RIVER, ""], "word='bank' is not in the sentence ''"),
    ],
)
def test_what_cannot_be_shown_is_said(name, function, words, message):
    with pytest.raises(ValueError, match=message):
        answer = function(*make(name), *words)
        list(answer)  # of one that is given bit by bit


# Two models


MODELS = {"ours": make("decoder"), "native": make("gpt2")}


def test_two_models_answer_the_same_one_after_the_other():
    both = answers.side_by_side(answers.continuation, MODELS)
    seen = list(both("ours", "native", RIVER, 1.0, 20, 7))
    alone = [whole(answers.continuation(*MODELS[name], RIVER, 1.0, 20, 7)) for name in MODELS]
    assert [seen[-1][0], seen[-1][2]] == alone and alone[0] != alone[1]
    assert all("first token after" in note for note in seen[-1][1::2])
    first = [answer for answer in seen if answer[2] is None]
    assert first[-1][0] == alone[0], "the second begins when the first is whole"


def test_who_looks_away_ends_both():
    both = answers.side_by_side(answers.continuation, MODELS)("ours", "native", RIVER, 1.0, 90, 7)
    next(both)
    both.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("generate")]


def test_with_one_seed_a_model_beside_itself_draws_the_same():
    both = answers.side_by_side(answers.continuation, MODELS)
    first, _, second, _ = list(both("ours", "ours", RIVER, 1.5, 20, 3))[-1]
    *_, other = both("ours", "ours", RIVER, 1.5, 20, 4)
    assert first == second != other[0]


def test_two_models_give_their_distributions_side_by_side():
    both = answers.side_by_side(answers.next_token, MODELS)
    assert list(both("native", "ours", RIVER, 0.5))[-1] == [
        answers.next_token(*MODELS[name], RIVER, 0.5) for name in ("native", "ours")
    ]


def test_what_one_of_two_models_cannot_do_is_said_with_its_name():
    short = {"short": ours("decoder", max_position_embeddings=16)}
    both = answers.side_by_side(answers.continuation, MODELS | short)
    with pytest.raises(ValueError, match="^short: text has .* more than max_position_embeddings=16"):
        list(both("ours", "short", LONG[:60], 1.0, 3, 0))
