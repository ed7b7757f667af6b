"""Every way of choosing tokens that transformers documents: ours beside a native model with equal weights."""

import re
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkDetector,
    WatermarkingConfig,
)
from transformers.cache_utils import DynamicCache, QuantizedCache

from tests import tiny

PACKAGE = "transformers"
NEW = 24  # tokens at most


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], **how: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, "disable_compile": True} | how)


def same(pair, inputs: dict[str, Tensor] | None = None, **how: Any) -> Tensor:
    """The tokens, if they are those of the native model."""
    ours, native = (generate(model, inputs or pair.inputs, **how) for model in (pair.ours, pair.native))
    assert ours.tolist() == native.tolist()
    return ours


def changes(pair, tokens: Tensor, inputs: dict[str, Tensor] | None = None, **how: Any) -> bool:
    """Whether others come out without the option: else it was not heeded, or had nothing to do."""
    return tokens.tolist() != generate(pair.ours, inputs or pair.inputs, **how).tolist()


@torch.no_grad()
def next_logits(model: PreTrainedModel, source: Tensor, written: Tensor) -> Tensor:  # (B, V)
    """After `written`, by one call without a cache."""
    of_two = {"input_ids": source, "decoder_input_ids": written}
    given = of_two if model.config.is_encoder_decoder else {"input_ids": written}
    return model(**given, use_cache=False).logits[:, -1]


def start(pair) -> Tensor:
    """What is written before the first new token."""
    source = pair.row["input_ids"]
    return torch.tensor([[pair.ours.config.decoder_start_token_id]]) if pair.family == "seq2seq" else source


def written_by(pair, choose) -> list[list[int]]:
    """A loop of our own: what `choose` makes of the logits of each step."""
    source, written = pair.row["input_ids"], start(pair)
    torch.manual_seed(0)
    for _ in range(NEW):
        token = choose(next_logits(pair.ours, source, written), written)
        written = torch.cat([written, token], dim=1)
        if token.item() == pair.ours.config.eos_token_id:
            break
    return written.tolist()


def drawn(logits: Tensor) -> Tensor:
    return logits.softmax(-1).multinomial(1)


CHOICES = {
    "greedy": ({}, lambda logits, _: logits.argmax(-1, keepdim=True)),
    "sampling": ({"do_sample": True, "top_k": 0}, lambda logits, _: drawn(logits)),
    "temperature": ({"do_sample": True, "top_k": 0, "temperature": 2.0}, lambda logits, _: drawn(logits / 2)),
    "min_p": (
        {"do_sample": True, "top_k": 0, "min_p": 0.2},
        lambda logits, _: drawn(logits.masked_fill(logits.exp() < 0.2 * logits.exp().max(), -torch.inf)),
    ),
    "repetition": (
        {"repetition_penalty": 2.0},
        lambda logits, written: torch.where(
            torch.zeros_like(logits).scatter(1, written, 1.0) > 0,
            torch.where(logits < 0, logits * 2, logits / 2),
            logits,
        ).argmax(-1, keepdim=True),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_loop(name, pair):
    """greedy, sampling, temperature, min_p, repetition penalty; both families: tokens = a loop of our own"""
    how, choose = CHOICES[name]
    assert generate(pair.ours, pair.row, **how).tolist() == written_by(pair, choose)


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "several beams": {"num_beams": 4, "num_return_sequences": 4},
    "beams, short": {"num_beams": 4, "length_penalty": -2.0, "early_stopping": True},
    "beams, thorough": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    "beam sampling": {"num_beams": 4, "do_sample": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, pair):
    """greedy, sampling, beams, beam sampling; both families: tokens = Llama's and Marian's"""
    tokens = same(pair, **MODES[mode])
    assert mode == "greedy" or changes(pair, tokens)


NARROWED = [
    *({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_h": 0.3}, {"typical_p": 0.3}),
    *({"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.3}, {"temperature": 0.5}),
]


@pytest.mark.parametrize("how", NARROWED, ids=lambda how: next(iter(how)))
def test_narrowed(how, pair):
    """top-k, top-p, min-p, top-h, typical, epsilon, eta, temperature: seeded tokens = Llama's and Marian's"""
    sampled = {"do_sample": True, "top_k": 0}
    assert changes(pair, same(pair, **sampled | how), **sampled)


STEERED = {
    "repetition_penalty": 3.0,
    "encoder_repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "exponential_decay_length_penalty": (4, 3.0),
    "forced_eos_token_id": 7,
    "min_new_tokens": NEW,
    "begin_suppress_tokens": list(range(200)),
    "suppress_tokens": list(range(100, 200)),
    "prefix_allowed_tokens_fn": lambda row, written: [(written[-1].item() * 7 + k) % 300 for k in range(9)],
}


@pytest.mark.parametrize("name", STEERED)
def test_steered(name, pair):
    """penalties, n-grams, lengths, suppressed, forced and allowed tokens: tokens = Llama's and Marian's"""
    # So many that tokens of the source come back.
    inputs = {"input_ids": tiny.tokens(pair.ours.config.vocab_size, 64, 11)}
    # So many ends that rows would be short.
    ends = {"eos_token_id": list(range(50))} if name == "min_new_tokens" else {}
    assert changes(pair, same(pair, inputs, **ends, **{name: STEERED[name]}), inputs, **ends)


@pytest.mark.parametrize("option", ["bad_words_ids", "sequence_bias"])
def test_words(option, pair):
    """bad_words_ids, sequence_bias: tokens = Llama's and Marian's, words away or there as told"""
    greedy = generate(pair.ours, pair.row)[0].tolist()
    word = greedy[-6:-4]
    if option == "bad_words_ids":
        tokens, expected = same(pair, pair.row, bad_words_ids=[word]), False
    else:
        word = [word[0], 5]
        tokens, expected = same(pair, pair.row, sequence_bias=[[word, 100.0]]), True
    written = tokens[0].tolist()
    assert (word in [written[at : at + 2] for at in range(len(written))]) == expected
    assert written != greedy


def test_stop_strings(pair):
    """stop_strings: ends with the token that completes the string, tokens = Llama's and Marian's"""
    whole = generate(pair.ours, pair.row)[0].tolist()
    texts = [pair.tokenizer.decode(whole[: length + 1]) for length in range(len(whole))]
    new = texts[-1][len(texts[start(pair).shape[1] - 1]) :]
    pieces = (new[at : at + 2] for at in range(len(new) - 1))
    stop = next(
        piece for piece in pieces if piece.isascii() and piece.isprintable() and piece not in texts[-1][: -len(new)]
    )
    end = next(length for length, text in enumerate(texts, 1) if stop in text)
    assert same(pair, pair.row, stop_strings=[stop], tokenizer=pair.tokenizer)[0].tolist() == whole[:end]
    assert end < len(whole)


def test_guidance(decoder):
    """classifier-free guidance of a decoder: tokens = a loop of our own over both prompts, and Llama's"""
    prompt, other = decoder.row["input_ids"], decoder.tokenizer("trout swim", return_tensors="pt").input_ids
    expected = prompt
    for _ in range(NEW):
        written = expected[:, prompt.shape[1] :]
        with_it, without = (
            next_logits(decoder.ours, prompt, torch.cat([text, written], dim=1)).log_softmax(-1)
            for text in (prompt, other)
        )
        expected = torch.cat([expected, (without + 2.5 * (with_it - without)).argmax(-1, keepdim=True)], dim=1)
    tokens = same(decoder, decoder.row, guidance_scale=2.5, negative_prompt_ids=other, eos_token_id=None)
    assert torch.equal(tokens, expected)
    assert not torch.equal(tokens, generate(decoder.ours, decoder.row, eos_token_id=None))


@pytest.mark.parametrize("how", [{}, {"do_sample": True}], ids=["greedy", "sampling"])
def test_assisted(how, pair, assistants):
    """assisted by a smaller model: greedy tokens = those without, seeded samples = Llama's and Marian's"""
    tokens = [
        generate(model, pair.row, assistant_model=getattr(assistants[pair.family], name), **how).tolist()
        for name, model in (("ours", pair.ours), ("native", pair.native))
    ]
    assert tokens[0] == tokens[1]
    assert how or tokens[0] == generate(pair.ours, pair.row).tolist()


def test_universal_assisted(decoder, foreigner):
    """assisted by a model with another tokenizer: tokens = those without"""
    both = {"tokenizer": decoder.tokenizer, "assistant_tokenizer": foreigner.tokenizer}
    assert decoder.tokenizer.get_vocab() != foreigner.tokenizer.get_vocab()
    tokens = same(decoder, decoder.row, assistant_model=foreigner.ours, **both)
    assert torch.equal(tokens, generate(decoder.ours, decoder.row))


@pytest.mark.parametrize(
    "how", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}], ids=lambda how: [*how][0]
)
def test_self_assisted(how, pair):
    """prompt lookup, early exit: tokens = greedy's"""
    assert torch.equal(generate(pair.ours, pair.row, **how), generate(pair.ours, pair.row))


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
def test_watermark(scheme, pair):
    """a watermark: tokens = Llama's and Marian's, WatermarkDetector finds it there and not elsewhere"""
    config = WatermarkingConfig(bias=8.0, seeding_scheme=scheme)
    detect = WatermarkDetector(pair.ours.config, "cpu", config)
    length = {"max_new_tokens": 48, "eos_token_id": None, "do_sample": True, "top_k": 0, "temperature": 3.0}
    marked = same(pair, watermarking_config=config, **length)
    assert detect(marked[:, -48:], return_dict=True).prediction.all()
    assert not detect(generate(pair.ours, pair.inputs, **length)[:, -48:], return_dict=True).prediction.any()


def test_synthid(pair):
    """SynthID's watermark: seeded tokens = Llama's and Marian's, g-values above those of other text"""
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123, 340, 443, 597, 160])
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": 48, "eos_token_id": None}
    marked, plain = same(pair, watermarking_config=config, **how), generate(pair.ours, pair.inputs, **how)
    values = config.construct_processor(pair.ours.config.vocab_size, "cpu").compute_g_values
    means = [values(tokens[:, -48:]).float().mean().item() for tokens in (marked, plain)]
    assert means[0] > means[1] + 0.05


CACHES = {
    "none": {"use_cache": False},
    **{kind: {"cache_implementation": kind} for kind in ("dynamic", "static")},
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", CACHES)
def test_caches(cache, beams, pair):
    """no cache, dynamic, static; greedy and 3 beams: tokens = those of the default"""
    how = {"num_beams": beams}
    assert torch.equal(
        generate(pair.ours, pair.inputs, **CACHES[cache], **how), generate(pair.ours, pair.inputs, **how)
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_prefill_in_chunks(beams, decoder):
    """a decoder's prompt in chunks of 3 tokens; greedy and 3 beams: tokens = those of the default"""
    how = {"num_beams": beams}
    tokens = generate(decoder.ours, decoder.inputs, prefill_chunk_size=3, **how)
    assert torch.equal(tokens, generate(decoder.ours, decoder.inputs, **how))


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_caches(kind, pair):
    """caches offloaded, dynamic and static: tokens = those of the default"""
    try:
        tokens = generate(pair.ours, pair.inputs, cache_implementation=kind)
    except AssertionError as error:
        pytest.skip(f"AssertionError: {error}")
    assert torch.equal(tokens, generate(pair.ours, pair.inputs))


GROUPS = {"nbits": 4, "q_group_size": 16, "residual_length": 4}


@pytest.mark.parametrize("settings", [GROUPS | {"backend": name} for name in ("quanto", "hqq")] + [{"backend": "fp8"}])
def test_quantised_caches(settings, decoder):
    """caches of 4 bits by quanto and hqq, of fp8: tokens = Llama's with them"""
    how = {"cache_implementation": "quantized", "cache_config": settings}
    assert changes(decoder, same(decoder, **how))


def test_quantised_cache_of_a_translator(pairs):
    """a quantised cache of a translator: tokens = Marian's with it"""
    how = {"cache_implementation": "quantized", "cache_config": GROUPS | {"backend": "hqq"}}
    try:
        tokens = generate(pairs["seq2seq"].ours, pairs["seq2seq"].inputs, **how)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            generate(pairs["seq2seq"].native, pairs["seq2seq"].inputs, **how)
        pytest.skip(f"Marian's and ours: {error}")
    assert torch.equal(tokens, generate(pairs["seq2seq"].native, pairs["seq2seq"].inputs, **how))


@torch.no_grad()
def test_quantised_cache(decoder):
    """a cache of 4 bits by quanto, of a prompt: every key and value within half a step"""
    cache = QuantizedCache("quanto", config=decoder.ours.config, **GROUPS)
    plain = DynamicCache(config=decoder.ours.config)
    for each in (cache, plain):
        decoder.ours(**decoder.inputs, past_key_values=each)
    for layer, exact in zip(cache.layers, plain.layers, strict=True):
        for name in ("keys", "values"):
            rounded = layer._dequantize(getattr(layer, f"_quantized_{name}"))
            groups = getattr(exact, name).reshape(-1, GROUPS["q_group_size"])
            step = (groups.amax(1) - groups.amin(1)) / (2**4 - 1)
            error = (rounded.reshape(groups.shape) - groups).abs().amax(1)
            assert (error <= step * 0.51).all() and (error > 0).any()


@pytest.mark.parametrize("streamer_class", [TextStreamer, TextIteratorStreamer])
def test_streaming(streamer_class, pair, capsys):
    """TextStreamer, TextIteratorStreamer: the text = that of the whole"""
    options = {"skip_prompt": pair.family == "decoder", "skip_special_tokens": True}
    streamer = streamer_class(pair.tokenizer, **options)
    whole = generate(pair.ours, pair.row)[0, start(pair).shape[1] :]
    if streamer_class is TextStreamer:
        generate(pair.ours, pair.row, streamer=streamer)
        text = capsys.readouterr().out.removesuffix("\n")
    else:
        thread = Thread(target=generate, args=(pair.ours, pair.row), kwargs={"streamer": streamer})
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text and text == pair.tokenizer.decode(whole, skip_special_tokens=True)


def from_the_hub(pair, **how: Any) -> None:
    """What has moved there is run, or its refusal is the row's reason."""
    try:
        tokens = same(pair, trust_remote_code=True, **how)
    except OSError as error:
        pytest.skip(str(error))
    assert changes(pair, tokens)


def test_contrastive(pair):
    """contrastive search, from the Hub: tokens = Llama's and Marian's"""
    from_the_hub(pair, penalty_alpha=0.6, top_k=4)


def test_dola(decoder):
    """DoLa, from the Hub: tokens = Llama's"""
    from_the_hub(decoder, dola_layers="low")


def test_group_beams(pair):
    """diverse beams, from the Hub: tokens = Llama's and Marian's"""
    from_the_hub(pair, num_beams=4, num_beam_groups=2, diversity_penalty=1.0)


def test_constrained(pair):
    """beams with words that must be there, from the Hub: tokens = Llama's and Marian's"""
    from_the_hub(pair, num_beams=4, force_words_ids=[[20, 21]])


CONTRASTIVE = '''
import torch


def generate(model, input_ids, max_new_tokens, penalty_alpha, top_k, **_):
    """Su et al., 2022, for one row: a likely token whose hidden state is unlike all before it."""
    cache, hidden, written = None, None, input_ids
    for _ in range(max_new_tokens):
        new = written if cache is None else written[:, -1:]
        out = model(new, past_key_values=cache, use_cache=True, output_hidden_states=True)
        cache, last = out.past_key_values, out.hidden_states[-1]
        hidden = last if hidden is None else torch.cat([hidden, last], dim=1)
        chances, tokens = out.logits[0, -1].softmax(-1).topk(top_k)
        scores = []
        for chance, token in zip(chances, tokens):
            ahead = model(torch.cat([written, token.view(1, 1)], dim=1), output_hidden_states=True, use_cache=False)
            likeness = torch.cosine_similarity(ahead.hidden_states[-1][:, -1:], hidden, dim=-1).max()
            scores.append((1 - penalty_alpha) * chance - penalty_alpha * likeness)
        written = torch.cat([written, tokens[torch.stack(scores).argmax()].view(1, 1)], dim=1)
    return written
'''


def test_custom(decoder, tmp_path):
    """contrastive search as custom_generate, in a local folder: tokens = Llama's, greedy's without penalty"""
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate/generate.py").write_text(CONTRASTIVE)
    how = {"custom_generate": str(tmp_path), "trust_remote_code": True, "top_k": 4}
    inputs = {"input_ids": decoder.row["input_ids"]}
    greedy = generate(decoder.ours, inputs, eos_token_id=None)
    assert not torch.equal(same(decoder, inputs, penalty_alpha=0.6, **how), greedy)
    assert torch.equal(same(decoder, inputs, penalty_alpha=0.0, **how), greedy)
