"""Generation: every way transformers has of choosing tokens, with every kind of cache and padding, on models whose
choices change from token to token."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration
from hf_scratch_transformer.configuration_scratch import CHOICES
from tests import tiny

GENERATORS = (ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration)
POSITIONS = CHOICES["position_embedding_type"]
# What changes how keys and values are made, stored or read.
VARIANTS: dict[str, dict[str, Any]] = {
    **{positions: {"position_embedding_type": positions} for positions in POSITIONS},
    "one head each": {"num_key_value_heads": 4},
    "one group": {"num_key_value_heads": 1},
    "d_v above d_k": {"head_dim": 6, "value_head_dim": 10},
    "d_v below d_k": {"head_dim": 10, "value_head_dim": 3},
    "query-key norm": {"use_qk_norm": True},
    "query-key norm, no positions": {"use_qk_norm": True, "position_embedding_type": "none"},
    "as the paper": {
        "norm_position": "post",
        "norm_type": "layer_norm",
        "position_embedding_type": "sinusoidal",
        "scale_embedding": True,
        "attention_bias": True,
    },
}


def talkative(model_class: type[PreTrainedModel], seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model that does not repeat one token for ever, and ends at the number of tokens asked for."""
    wide = {"initializer_range": 0.7, "tie_word_embeddings": False, "eos_token_id": None}
    return tiny.model(model_class, seed, **wide | overrides)


def generate(model: PreTrainedModel, input_ids: Tensor, new: int = 8, **kwargs: Any) -> Tensor:
    """The new tokens alone, greedy unless told otherwise."""
    options = {"do_sample": False, "disable_compile": True} | kwargs
    return model.generate(input_ids, max_new_tokens=new, **options)[:, -new:]


def prompt_length(model: PreTrainedModel, source: Tensor) -> int:
    """How many tokens precede the new ones: the prompt, or the token that every target starts with."""
    return 1 if model.config.is_encoder_decoder else source.shape[1]


def full_logits(model: PreTrainedModel, source: Tensor, new: Tensor) -> Tensor:
    """Logits of every token of `new` after `source`, by one forward call without a cache."""
    start = model.config.decoder_start_token_id if model.config.is_encoder_decoder else None
    with torch.no_grad():
        if start is not None:
            decoder_input_ids = torch.cat([torch.full((len(new), 1), start), new[:, :-1]], dim=1)
            return model(source, decoder_input_ids=decoder_input_ids, use_cache=False).logits
        whole = torch.cat([source, new], dim=1)
        return model(whole, use_cache=False).logits[:, source.shape[1] - 1 : -1]


def token_log_probabilities(model: PreTrainedModel, source: Tensor, new: Tensor) -> Tensor:  # (B, T)
    return full_logits(model, source, new).log_softmax(-1).gather(-1, new[..., None])[..., 0]


@pytest.fixture(params=GENERATORS, ids=lambda model_class: tiny.family(model_class))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return talkative(request.param)


@pytest.fixture
def source(model: PreTrainedModel) -> Tensor:
    return tiny.tokens(model.config.vocab_size, 3, 7)


# Ways of choosing


def test_greedy_takes_the_likeliest_token_each_time(model: PreTrainedModel, source: Tensor) -> None:
    new = generate(model, source)
    assert torch.equal(new, full_logits(model, source, new).argmax(-1))
    # A model that says the same whatever it is given would pass every test of this file.
    assert len(new.unique()) > 6 and len(new.unique(dim=0)) == len(source)


def test_no_cache_static_cache_and_prefill_in_chunks_change_nothing(model: PreTrainedModel, source: Tensor) -> None:
    expected = generate(model, source)
    assert torch.equal(generate(model, source, use_cache=False), expected)
    assert torch.equal(generate(model, source, cache_implementation="static"), expected)
    if not model.config.is_encoder_decoder:
        assert torch.equal(generate(model, source, prefill_chunk_size=3), expected)


def test_sampling_follows_the_seed(model: PreTrainedModel, source: Tensor) -> None:
    def sample(seed: int, **kwargs: Any) -> Tensor:
        torch.manual_seed(seed)
        return generate(model, source, do_sample=True, **{"top_k": 0, "temperature": 2.0} | kwargs)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    assert torch.equal(sample(1), sample(1, cache_implementation="static"))
    assert torch.equal(sample(1, top_k=1), generate(model, source))


def test_sampling_draws_from_the_softmax(model: PreTrainedModel, source: Tensor) -> None:
    torch.manual_seed(0)
    draws, temperature = 4000, 3.0
    sampled = generate(
        model, source[:1], new=1, do_sample=True, top_k=0, temperature=temperature, num_return_sequences=draws
    )
    logits = full_logits(model, source[:1], sampled[:1])[0, 0]
    frequencies = sampled[:, 0].bincount(minlength=len(logits)) / draws
    # Total variation; of 4000 draws from 40 tokens it is about 0.04.
    assert (frequencies - (logits / temperature).softmax(-1)).abs().sum() / 2 < 0.07
    assert (frequencies - logits.softmax(-1)).abs().sum() / 2 > 0.2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_class", GENERATORS, ids=tiny.family)
def test_beams_wide_enough_find_the_best_of_all_sequences(model_class: type[PreTrainedModel], cache: str) -> None:
    vocab_size, length, batch = 6, 3, 6
    model = talkative(model_class, vocab_size=vocab_size)
    source = tiny.tokens(vocab_size, batch, 5)
    everything = torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))
    scores = token_log_probabilities(
        model, source.repeat_interleave(len(everything), dim=0), everything.repeat(batch, 1)
    ).sum(-1)
    best = everything[scores.view(batch, -1).argmax(-1)]
    widest = vocab_size ** (length - 1)
    assert torch.equal(generate(model, source, new=length, num_beams=widest, cache_implementation=cache), best)
    assert not torch.equal(generate(model, source, new=length), best), "choose a model for which greedy is not enough"


def test_beams_of_width_three_report_their_own_likelihood(model: PreTrainedModel, source: Tensor) -> None:
    output = model.generate(
        source,
        max_new_tokens=6,
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    new = output.sequences[:, -6:]
    assert len(new.unique(dim=0)) == 9
    mean = token_log_probabilities(model, source.repeat_interleave(3, dim=0), new).mean(-1)
    torch.testing.assert_close(output.sequences_scores, mean, atol=1e-4, rtol=1e-4)
    of_each_row = output.sequences_scores.view(3, 3)
    assert torch.equal(of_each_row, of_each_row.sort(dim=1, descending=True).values)
    assert torch.equal(new[::3], generate(model, source, new=6, num_beams=3, use_cache=False))


def test_beams_trade_what_they_wrote_and_keep_the_source_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(ScratchSeq2SeqForConditionalGeneration)
    source, traded, places = tiny.tokens(40, 3, 6), [], set()
    reorder = ScratchSeq2SeqForConditionalGeneration._reorder_cache

    def watched(self: Any, cache: EncoderDecoderCache, beams: Tensor) -> EncoderDecoderCache:
        traded.append(not torch.equal(beams, torch.arange(len(beams))))
        own, other = (part.layers[0].keys.clone() for part in (cache.self_attention_cache, cache.cross_attention_cache))
        cache = reorder(self, cache, beams)
        assert torch.equal(cache.self_attention_cache.layers[0].keys, own[beams])
        assert torch.equal(cache.cross_attention_cache.layers[0].keys, other[beams])  # as if they had been traded too
        places.add(cache.cross_attention_cache.layers[0].keys.data_ptr())
        return cache

    monkeypatch.setattr(ScratchSeq2SeqForConditionalGeneration, "_reorder_cache", watched)
    generate(model, source, new=6, num_beams=3)
    assert any(traded) and len(places) == 1


def test_an_assistant_changes_speed_only(model: PreTrainedModel, source: Tensor) -> None:
    source = source[:1]
    expected = generate(model, source, new=12)
    stranger = talkative(type(model), seed=1, num_attention_heads=2)
    assert torch.equal(generate(model, source, new=12, assistant_model=stranger), expected)

    twin = copy.deepcopy(model)
    calls: list[None] = []
    hook = model.get_decoder().register_forward_pre_hook(lambda *_: calls.append(None))
    assert torch.equal(generate(model, source, new=12, assistant_model=twin), expected)
    hook.remove()
    assert len(calls) < 12, "an assistant that always guesses right saved no call"


@pytest.mark.parametrize("model_class", GENERATORS, ids=tiny.family)
def test_a_models_own_first_layer_is_an_assistant_that_changes_speed_only(model_class: type[PreTrainedModel]) -> None:
    """transformers lowers `config.num_hidden_layers` for a while."""
    depths = {"encoder_layers": 2, "decoder_layers": 3} if model_class is GENERATORS[1] else {"num_hidden_layers": 3}
    model = talkative(model_class, **depths)
    source = tiny.tokens(40, 1, 5)
    expected = generate(model, source, new=12)
    assert torch.equal(generate(model, source, new=12, assistant_early_exit=1), expected)
    assert {name: getattr(model.config, name) for name in depths} == depths
    for cache in (None, "dynamic", "static"):
        assert torch.equal(generate(model, source, new=12, cache_implementation=cache), expected)


def test_an_early_exit_runs_the_first_layers_only() -> None:
    model = talkative(ScratchDecoderForCausalLM, num_hidden_layers=3)
    calls: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    generate(model, tiny.tokens(40, 1, 5), new=12, assistant_early_exit=1)
    assert calls.count(0) > calls.count(1) == calls.count(2) > 0


def test_prompt_lookup_changes_nothing(model: PreTrainedModel, source: Tensor) -> None:
    source = source[:1, :4].repeat(1, 3)
    assert torch.equal(generate(model, source, new=12, prompt_lookup_num_tokens=3), generate(model, source, new=12))


def test_each_row_ends_at_its_own_end_token(model: PreTrainedModel, source: Tensor) -> None:
    unbounded = generate(model, source, new=10)
    end = int(unbounded[0, 4])
    ended = model.generate(source, max_new_tokens=10, do_sample=False, eos_token_id=end, pad_token_id=0)
    lengths = []
    for row, whole in zip(ended[:, prompt_length(model, source) :], unbounded, strict=True):
        lengths.append((whole == end).long().argmax().item() + 1 if end in whole else len(whole))
        assert torch.equal(row[: lengths[-1]], whole[: lengths[-1]])
        assert not row[lengths[-1] :].any()
    assert len(set(lengths)) > 1


def test_steps_can_be_looked_into(model: PreTrainedModel, source: Tensor) -> None:
    """Attention weights, hidden states and scores of every step, with the backend that does not form weights."""
    output = model.generate(
        source,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
        output_logits=True,
    )
    new = output.sequences[:, -4:]
    torch.testing.assert_close(torch.stack(output.logits, dim=1), full_logits(model, source, new), atol=1e-4, rtol=1e-5)
    translates = model.config.is_encoder_decoder
    attentions = output.decoder_attentions if translates else output.attentions
    hidden_states = output.decoder_hidden_states if translates else output.hidden_states
    assert len(attentions) == len(hidden_states) == 4
    for step, (weights, states) in enumerate(zip(attentions, hidden_states, strict=True)):
        queries = prompt_length(model, source) if step == 0 else 1
        keys = prompt_length(model, source) + step
        assert [tuple(w.shape) for w in weights] == [(3, 4, queries, keys)] * 2
        assert [tuple(s.shape) for s in states] == [(3, queries, model.config.hidden_size)] * 3
        torch.testing.assert_close(weights[-1].sum(-1), torch.ones(3, 4, queries))
    if translates:
        assert [tuple(w.shape) for step in output.cross_attentions for w in step] == [(3, 4, 1, 7)] * 8
        assert [tuple(w.shape) for w in output.encoder_attentions] == [(3, 4, 7, 7)]


def test_embeddings_can_stand_in_for_tokens(model: PreTrainedModel, source: Tensor) -> None:
    embeddings = model.get_input_embeddings()(source)
    assert torch.equal(generate(model, None, inputs_embeds=embeddings), generate(model, source))


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
def test_a_translator_with_windows_writes_what_it_writes_without_a_cache(how: dict[str, Any]) -> None:
    """Windows of the target are shorter than it gets; the source is longer than a window, and read as a whole."""
    kinds = {f"{side}_layer_types": ["sliding_attention", "full_attention"] for side in ("encoder", "decoder")}
    model = talkative(ScratchSeq2SeqForConditionalGeneration, **kinds, sliding_window=3, encoder_layers=2)
    source = {"input_ids": tiny.tokens(40, 3, 9), "attention_mask": tiny.padding_mask(3, 9)}
    expected = generate(model, **source, new=10, use_cache=False, num_beams=how.get("num_beams", 1))
    assert torch.equal(generate(model, **source, new=10, **how), expected)
    assert len(expected.unique()) > 3
    model.config.decoder_layer_types = model.model.decoder.layer_types = ["full_attention"] * 2
    assert not torch.equal(generate(model, **source, new=10, **how), expected)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_a_translator_with_two_vocabularies_has_static_caches(how: dict[str, Any]) -> None:
    """Which transformers asks a side's configuration for, and that one of its own text again."""
    apart = {"decoder_vocab_size": 50, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    model = talkative(ScratchSeq2SeqForConditionalGeneration, **apart)
    source = {"input_ids": tiny.tokens(40, 3, 9), "attention_mask": tiny.padding_mask(3, 9)}
    expected = generate(model, **source, new=8, **how)
    assert torch.equal(generate(model, **source, new=8, cache_implementation="static", **how), expected)


# Continuous batching


def generate_batch(model: PreTrainedModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        # Without these it takes what memory there is.
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
    )
    assert len(outputs) == len(prompts)
    by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            {"position_embedding_type": positions, "attn_implementation": "sdpa"}
            for positions in POSITIONS
            if "bias" not in positions  # which is refused below
        ),
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "attn_implementation": "sdpa"},
        {"attn_implementation": "eager", "num_key_value_heads": 1, "use_qk_norm": True, "head_dim": 6},
    ],
    ids=lambda overrides: "-".join(map(str, overrides.values())),
)
def test_continuous_batching_generates_what_each_prompt_generates_alone(overrides: dict[str, Any]) -> None:
    model = talkative(ScratchDecoderForCausalLM, **overrides)
    # Together longer than `max_position_embeddings`: no prompt is.
    prompts = [tiny.tokens(model.config.vocab_size, length, seed=length).tolist() for length in (3, 8, 5, 20, 12)]
    alone = [generate(model, torch.tensor([prompt]), new=6)[0].tolist() for prompt in prompts]
    assert generate_batch(model, prompts, new=6) == alone


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # Its cache holds keys and values of one width; left to itself it would log an error and return no tokens.
        ({"head_dim": 6, "value_head_dim": 10}, r"value_head_dim=10.*head_dim=6"),
        # Its kernels would answer without them.
        ({"position_embedding_type": "relative_bias"}, r"position_embedding_type='relative_bias'"),
        ({"attn_logit_softcapping": 2.0}, r"attn_logit_softcapping=2\.0"),
    ],
)
def test_continuous_batching_refuses_what_it_would_leave_out(overrides: dict[str, Any], message: str) -> None:
    model = talkative(ScratchDecoderForCausalLM, **overrides)
    with pytest.raises(ValueError, match=message):
        generate_batch(model, [[3, 4, 5], [6, 7]], new=2)


# Padding


def masked_words(model: PreTrainedModel, side: str) -> dict[str, Tensor]:
    """Rows of 7, 6 and 5 tokens. Behind the mask are words, not pads, whose vector of zeros might go unnoticed."""
    return {
        "input_ids": tiny.tokens(model.config.vocab_size, 3, 7),
        "attention_mask": tiny.padding_mask(3, 7, side),
    }


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}, {"num_beams": 2}])
@pytest.mark.parametrize("positions", POSITIONS)
def test_left_padded_rows_continue_as_each_row_alone(positions: str, how: dict[str, Any]) -> None:
    model = talkative(ScratchDecoderForCausalLM, position_embedding_type=positions)
    batch = masked_words(model, "left")
    together = generate(model, **batch, **how)
    for row, ids, mask in zip(together, *batch.values(), strict=True):
        assert torch.equal(row[None], generate(model, ids[mask == 1][None], **how))
    ignored = generate(model, batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]), **how)
    assert not torch.equal(together, ignored)


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_padded_sources_are_translated_as_each_alone(positions: str, side: str, how: dict[str, Any]) -> None:
    model = talkative(ScratchSeq2SeqForConditionalGeneration, position_embedding_type=positions)
    batch = masked_words(model, side)
    together = generate(model, **batch, **how)
    for row, ids, mask in zip(together, *batch.values(), strict=True):
        assert torch.equal(row[None], generate(model, ids[mask == 1][None], **how))
    ignored = generate(model, batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]), **how)
    assert not torch.equal(together, ignored)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_padded_logits_are_those_of_each_row_alone(
    model_class: type[PreTrainedModel], positions: str, side: str
) -> None:
    model = tiny.model(model_class, position_embedding_type=positions)
    batch = tiny.inputs(model, batch=3, length=7, padding=side)
    target: dict[str, Tensor] = {}
    if model.config.is_encoder_decoder:
        # Padded the other way and to another length, so that neither mask can stand in for the other.
        other = tiny.inputs(model, batch=3, length=5, padding="right" if side == "left" else "left", seed=1)
        target = {f"decoder_{name}": value for name, value in other.items()}
    with torch.no_grad():
        together = model(**batch, **target).logits
        read = target.get("decoder_attention_mask", batch["attention_mask"]) == 1
        for index in range(3):
            row = {"input_ids": batch["input_ids"][index][batch["attention_mask"][index] == 1][None]}
            if target:
                row["decoder_input_ids"] = target["decoder_input_ids"][index][read[index]][None]
            torch.testing.assert_close(together[index, read[index]], model(**row).logits[0], atol=1e-5, rtol=1e-5)


# Caches


def cached_logits(
    model: PreTrainedModel, inputs: dict[str, Tensor], steps: list[int], cache: Any = None, slots: int = 0
) -> Tensor:
    """Logits of every token, given in portions of `steps` tokens, with a mask of at least so many slots. An encoder
    runs once, before the first."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    ids, mask = inputs[f"{prefix}input_ids"], inputs.get(f"{prefix}attention_mask")
    fixed: dict[str, Any] = {}
    if prefix:
        fixed = {"encoder_outputs": model.model.encoder(inputs["input_ids"], inputs.get("attention_mask"))}
        fixed["attention_mask"] = inputs.get("attention_mask")
    logits, start = [], 0
    for step in steps:
        portion = {f"{prefix}input_ids": ids[:, start : start + step]}
        if mask is not None:
            read = mask[:, : start + step]
            portion[f"{prefix}attention_mask"] = F.pad(read, (0, max(0, slots - read.shape[1])))
        output = model(**fixed, **portion, past_key_values=cache, use_cache=True)
        cache, start = output.past_key_values, start + step
        logits.append(output.logits)
        if prefix:
            # What the encoder said is remembered: the decoder must not read it again.
            fixed["encoder_outputs"] = (torch.full_like(fixed["encoder_outputs"][0], torch.nan),)
    assert start == ids.shape[1] == cache.get_seq_length()
    return torch.cat(logits, dim=1)


def cache_inputs(model: PreTrainedModel, padding: str | None) -> dict[str, Tensor]:
    inputs = tiny.inputs(model, length=9, padding=padding)
    if model.config.is_encoder_decoder:
        inputs |= {f"decoder_{name}": x for name, x in tiny.inputs(model, length=9, padding=padding, seed=1).items()}
    return inputs


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("model_class", GENERATORS, ids=tiny.family)
@torch.no_grad()
def test_cached_equals_uncached(
    model_class: type[PreTrainedModel], overrides: dict[str, Any], padding: str | None
) -> None:
    model = tiny.model(model_class, **overrides)
    inputs = cache_inputs(model, padding)
    expected = model(**inputs, use_cache=False).logits
    # Rows that are all padding so far say nothing that counts.
    counts = (
        inputs.get("decoder_attention_mask", inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))) == 1
    )
    for steps in ([1] * 9, [4, 1, 3, 1]):
        for cache, slots in ((None, 0), (static_cache(model), 0), (static_cache(model), 16)):
            got = cached_logits(model, inputs, steps, cache, slots)
            torch.testing.assert_close(got[counts], expected[counts], atol=1e-5, rtol=1e-5)


def static_cache(model: PreTrainedModel) -> StaticCache | EncoderDecoderCache:
    """Room for more tokens than there will be."""
    own = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=16)
    return EncoderDecoderCache(own, DynamicCache()) if model.config.is_encoder_decoder else own


def test_a_prefix_is_computed_once_and_continued_twice() -> None:
    model = talkative(ScratchDecoderForCausalLM)
    prefix = tiny.tokens(model.config.vocab_size, 2, 6)
    with torch.no_grad():
        cache = model(prefix, use_cache=True).past_key_values
    lengths: list[int] = []
    hook = model.model.embeddings.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    continued = []
    for seed in (1, 2):
        prompt = torch.cat([prefix, tiny.tokens(model.config.vocab_size, 2, 4, seed=seed)], dim=1)
        continued.append((prompt, generate(model, prompt, past_key_values=copy.deepcopy(cache))))
        assert lengths[0] == 4, "the prefix was computed again"
        lengths.clear()
    hook.remove()
    assert cache.get_seq_length() == 6
    for prompt, new in continued:
        assert torch.equal(new, generate(model, prompt))
    assert not torch.equal(continued[0][1], continued[1][1])


def test_a_dialogue_goes_on_from_the_cache_of_its_last_turn() -> None:
    model = talkative(ScratchDecoderForCausalLM)
    question = tiny.tokens(model.config.vocab_size, 1, 5)
    turn = model.generate(question, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    prompt = torch.cat([turn.sequences, tiny.tokens(model.config.vocab_size, 1, 3, seed=1)], dim=1)
    assert torch.equal(generate(model, prompt, past_key_values=turn.past_key_values), generate(model, prompt))


def test_more_tokens_than_learned_positions_are_refused_while_generating() -> None:
    for model_class in GENERATORS:
        model = talkative(model_class, position_embedding_type="learned", max_position_embeddings=10)
        source = tiny.tokens(model.config.vocab_size, 1, 8)
        room = 10 - prompt_length(model, source) + 1  # the last token is never read
        assert generate(model, source, new=room).shape == (1, room)
        static = {"cache_implementation": "static", "disable_compile": True}
        for how in ({}, {"use_cache": False}, static):
            with pytest.raises(ValueError, match="max_position_embeddings=10"):
                generate(model, source, new=room + 1, **how)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("model_class", GENERATORS, ids=tiny.family)
@torch.no_grad()
def test_more_tokens_than_a_static_cache_holds_are_refused(model_class: type[PreTrainedModel], positions: str) -> None:
    """At once or a call at a time; layers with a window forget what does not fit."""
    model = tiny.model(model_class, position_embedding_type=positions)
    is_translator = model.config.is_encoder_decoder
    message = "past_key_values: 17 tokens do not fit a static cache of max_cache_len=16"
    for steps in ([17], [16, 1], [8, 9]):
        cache = static_cache(model)
        for step in steps:
            ids = {"input_ids": tiny.tokens(40, 1, step)}
            inputs = ids | {"decoder_input_ids": ids["input_ids"]} if is_translator else ids
            if cache.get_seq_length() + step <= 16:
                model(**inputs, past_key_values=cache)
                continue
            with tiny.no_multiplication(), pytest.raises(ValueError, match=message):
                (model.model.decoder if is_translator else model)(**ids, past_key_values=cache)
    if not is_translator:
        model.config.sliding_window, model.config.layer_types = 3, ["sliding_attention"] * 2
        model.model.layer_types = model.config.layer_types
        cache, ids = static_cache(model), tiny.tokens(40, 1, 20)
        got = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([17, 3], dim=1)], dim=1)
        torch.testing.assert_close(got, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("columns", [3, 6])
@pytest.mark.parametrize("model_class", GENERATORS, ids=tiny.family)
@torch.no_grad()
def test_a_mask_covers_what_is_in_the_cache(model_class: type[PreTrainedModel], columns: int) -> None:
    """One of the new tokens alone was taken for one of the first, in silence."""
    model = tiny.model(model_class).eval()
    source = {"input_ids": tiny.tokens(40, 2, 4)} if model.config.is_encoder_decoder else {}
    ids, mask = ("decoder_input_ids", "decoder_attention_mask") if source else ("input_ids", "attention_mask")
    cache = model(**source, **{ids: tiny.tokens(40, 2, 5)}, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=rf"attention_mask of shape \(2, {columns}\) does not fit"):
        model(**source, **{ids: tiny.tokens(40, 2, 3), mask: torch.ones(2, columns).long()}, past_key_values=cache)


@pytest.mark.parametrize("slots", [4, 9])
@torch.no_grad()
def test_a_static_cache_holds_a_source_of_its_length_only(slots: int) -> None:
    """Of a longer one the empty slots were read as tokens, in silence; a shorter one was an IndexError."""
    model = tiny.model(ScratchSeq2SeqForConditionalGeneration).eval()
    own, cross = (StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=n) for n in (12, slots))
    source, target = tiny.tokens(40, 2, 6), tiny.tokens(40, 2, 3)
    with pytest.raises(ValueError, match=f"past_key_values: cross-attention has max_cache_len={slots}, not 6"):
        model(source, decoder_input_ids=target, past_key_values=EncoderDecoderCache(own, cross))


# Encoder-decoders whose two sides differ


@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
def test_stacks_of_different_depth(encoder_layers: int, decoder_layers: int, how: dict[str, Any]) -> None:
    model = talkative(
        ScratchSeq2SeqForConditionalGeneration, encoder_layers=encoder_layers, decoder_layers=decoder_layers
    )
    source = tiny.tokens(model.config.vocab_size, 3, 7)
    output = model.generate(source, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, **how)
    without_cache = {name: value for name, value in how.items() if name != "cache_implementation"}
    assert torch.equal(output.sequences[:, -8:], generate(model, source, use_cache=False, **without_cache))
    assert len(output.past_key_values.self_attention_cache.layers) == decoder_layers
    assert len(output.past_key_values.cross_attention_cache.layers) == decoder_layers


@pytest.mark.parametrize(("source_size", "target_size"), [(20, 60), (60, 20)])
@pytest.mark.parametrize("tied", [True, False])
def test_source_and_target_with_a_vocabulary_each(source_size: int, target_size: int, tied: bool) -> None:
    model = talkative(
        ScratchSeq2SeqForConditionalGeneration,
        vocab_size=source_size,
        decoder_vocab_size=target_size,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=tied,
        scale_embedding=not tied,
    )
    source = tiny.tokens(source_size, 4, 7)
    source[0, 0] = source_size - 1
    new = generate(model, source)
    assert torch.equal(new, full_logits(model, source, new).argmax(-1))
    assert new.max() < target_size and (new.max() >= source_size) == (target_size > source_size)
    assert torch.equal(generate(model, source, num_beams=3), generate(model, source, num_beams=3, use_cache=False))
    assert torch.equal(generate(model, source[:1], prompt_lookup_num_tokens=2), new[:1])

    output = model.generate(
        source, max_new_tokens=5, num_beams=3, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    steps = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    expected = token_log_probabilities(model, source, output.sequences[:, 1:])
    torch.testing.assert_close(steps, expected, atol=1e-4, rtol=1e-4)
