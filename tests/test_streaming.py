"""A text is seen while it is written, ends as `generate` ends it, and leaves no thread behind."""

import threading
import time

import pytest
import torch

from hf_scratch_transformer.insight import streaming
from tests.test_pictures import RIVER, native, ours


@pytest.fixture
def slow(monkeypatch):
    """A model takes its time for each token, so that there is something to see."""

    def take_time(self, *_, ask=streaming.Watch.__call__):
        time.sleep(0.03)
        return ask(self, *_)

    monkeypatch.setattr(streaming.Watch, "__call__", take_time)


def prompt(name, text=RIVER, **overrides):
    model, tokenizer = ours(name, **overrides) if name in ("decoder", "seq2seq") else native(name, **overrides)
    return model, tokenizer, tokenizer([text], return_tensors="pt")


def at_work():
    return [thread for thread in threading.enumerate() if thread.name.startswith("generate")]


@pytest.mark.parametrize("name", ["decoder", "seq2seq", "gpt2", "bart"])
def test_a_text_grows_to_what_generate_returns(slow, name):
    model, tokenizer, inputs = prompt(name, eos_token_id=None)
    whole = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    *growing, (last, note) = streaming.written(model, tokenizer, inputs, max_new_tokens=12, do_sample=False)
    assert last == tokenizer.decode(whole, skip_special_tokens=True)
    texts = [text for text, _ in growing]
    assert len(set(texts)) > 3 and all(last.startswith(text) for text in texts)
    assert sorted(texts, key=len) == texts
    assert at_work() == []


def test_the_speed_is_that_of_its_tokens(slow):
    model, tokenizer, inputs = prompt("decoder", eos_token_id=None)
    *_, (_, note) = streaming.written(model, tokenizer, inputs, max_new_tokens=10)
    first, rate = note.removeprefix("first token after ").removesuffix(" tokens/s").split(" s, ")
    assert float(first) >= 0.03 and 1 < float(rate) < 1 / 0.03
    *_, (_, note) = streaming.written(model, tokenizer, inputs, max_new_tokens=1)
    assert "first token" in note and "tokens/s" not in note


def test_beams_show_the_best_of_them_and_say_so(slow):
    model, tokenizer, inputs = prompt("seq2seq", eos_token_id=None)
    whole = model.generate(**inputs, max_new_tokens=12, num_beams=3)[0]
    *growing, (last, note) = streaming.written(model, tokenizer, inputs, max_new_tokens=12, num_beams=3)
    assert last == tokenizer.decode(whole, skip_special_tokens=True)
    assert note.startswith("beam search, 3 beams; first token after")
    assert len({text for text, _ in growing}) > 3
    assert all(note.startswith("beam search, 3 beams: the best so far") for _, note in growing)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("end", ["close", "stop_all"])
def test_who_looks_away_ends_it(slow, beams, end):
    model, tokenizer, inputs = prompt("decoder", eos_token_id=None)
    texts = streaming.written(model, tokenizer, inputs, max_new_tokens=120, num_beams=beams)
    next(texts), next(texts)
    assert len(at_work()) == 1
    started = time.monotonic()
    if end == "close":
        texts.close()
    else:
        streaming.stop_all()
        *_, (last, _) = texts
        assert last.startswith(RIVER)
    assert at_work() == [] and time.monotonic() - started < 1, "120 tokens take 3.6 seconds"


def test_what_generate_raises_is_raised():
    model, tokenizer, inputs = prompt("decoder")
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(streaming.written(model, tokenizer, inputs, max_new_tokens=0))
    assert at_work() == []


def test_a_draw_is_of_the_softmax_at_its_temperature():
    scores = torch.tensor([[1.0, 0.0, -1.0, -torch.inf]])
    noise = streaming.GumbelNoise(0.5, seed=1)
    drawn = torch.cat([noise(None, scores).argmax(-1) for _ in range(4000)]).bincount(minlength=4) / 4000
    assert torch.allclose(drawn, (scores[0] / 0.5).softmax(-1), atol=0.03)


def test_texts_that_are_drawn_at_the_same_time_do_not_disturb_each_other(slow):
    model, tokenizer, inputs = prompt("decoder", eos_token_id=None)

    def drawn(seed):
        noise = {"logits_processor": [streaming.GumbelNoise(1.0, seed)]}
        return streaming.written(model, tokenizer, inputs, max_new_tokens=15, **noise)

    alone = [list(drawn(seed))[-1][0] for seed in (1, 2)]
    assert alone[0] != alone[1]
    first, second = drawn(1), drawn(2)
    next(first), next(second)
    assert len(at_work()) == 2
    assert [list(first)[-1][0], list(second)[-1][0]] == alone
