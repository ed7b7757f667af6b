"""Compiled decoding writes the tokens that `generate` writes without it."""

import shutil
import threading
from functools import partial

import pytest
import torch
from torch.ao.quantization import quantize_dynamic
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_scratch_transformer import (
    ScratchDecoderConfig,
    ScratchDecoderForCausalLM,
    ScratchEncoderModel,
    ScratchSeq2SeqForConditionalGeneration,
    decoding,
    generation_scratch,
)
from hf_scratch_transformer.decoding import CompiledDecoding

from . import tiny
from .test_compilation import Graphs, shallow

OPTIONS = {
    "learned, biases": {"position_embedding_type": "learned", "attention_bias": True, "mlp_bias": True},
    "relative": {"position_embedding_type": "relative_bias"},
    "as the article": {"position_embedding_type": "sinusoidal", "norm_position": "post", "norm_type": "layer_norm"},
}
COMPILERS = [
    "eager",
    pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="no g++")]),
]


MODELS = {
    "decoder": lambda: tiny.model(ScratchDecoderForCausalLM),
    "seq2seq": lambda: tiny.model(ScratchSeq2SeqForConditionalGeneration),
}
OTHERS = {
    **{name: lambda each=each: tiny.model(ScratchDecoderForCausalLM, **each) for name, each in OPTIONS.items()},
}


@pytest.fixture(autouse=True)
def a_compiler(monkeypatch):
    """The one that only follows the graph needs none of C++; of caches there are more sizes."""
    monkeypatch.setattr(decoding.shutil, "which", lambda name: name)
    monkeypatch.setattr(decoding, "LEAST_SLOTS", 16)
    torch._dynamo.reset()


def prompts(model, rows, length, side):
    return tiny.inputs(model, rows, length, padding=side if rows > 1 else None, seed=length)


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_greedy_tokens_are_those_of_generate(name, backend):
    model = (MODELS | OTHERS)[name]()
    model.generation_config.eos_token_id = None
    side = "right" if model.config.is_encoder_decoder else "left"
    decode = CompiledDecoding(backend)
    for rows, length, new in ((1, 5, 10), (1, 9, 6), (3, 7, 8), (1, 5, 20)):
        inputs = prompts(model, rows, length, side)
        options = {"max_new_tokens": new, "do_sample": False}
        expected = model.generate(**inputs, **options)
        assert model.generate(**inputs, **options, custom_generate=decode).tolist() == expected.tolist()
    assert len(decode.steps) == 3  # one row, three, and one of more than 16 tokens
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_greedy_search_without_generate_writes_what_that_does(name, backend):
    """Of sources of any length one graph is made for each number of rows, also where that is the length."""
    model = (MODELS | OTHERS)[name]()
    decode, ends = CompiledDecoding(backend), None
    side = "right" if model.config.is_encoder_decoder else "left"
    for rows, length in ((3, 3), (1, 5), (1, 1), (1, 9), (3, 7), (1, 2), (3, 1)):
        inputs = prompts(model, rows, length, side)
        for model.generation_config.eos_token_id in (None, ends or 0):
            expected = model.generate(**inputs, max_new_tokens=7, do_sample=False)
            assert decode.greedy(model, **inputs, max_new_tokens=7).tolist() == expected.tolist()
            ends = ends or sorted({int(row[-3]) for row in expected})  # rows end one after the other
    ids = prompts(model, 1, 4, side)["input_ids"]
    assert decode.greedy(model, ids, max_new_tokens=5).equal(model.generate(ids, max_new_tokens=5, do_sample=False))
    assert len(decode.steps) == 2 and len(decode.sources) == 2 * model.config.is_encoder_decoder


def test_a_row_that_has_ended_is_padded_and_generation_ends_with_the_last():
    model = shallow(ScratchDecoderForCausalLM)
    inputs = prompts(model, 4, 6, "left")
    free = model.generate(**inputs, max_new_tokens=25, do_sample=False)[:, 6:]
    options = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = sorted({int(row[5]) for row in free})
    expected = model.generate(**inputs, **options)
    assert (expected[:, 6:] != free[:, : expected.shape[1] - 6]).any()
    assert model.generate(**inputs, **options, custom_generate=CompiledDecoding("eager")).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 5},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"do_sample": False, "min_new_tokens": 12, "eos_token_id": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS[1:], ids=tiny.family)
def test_processors_and_sampling(model_class, options):
    """The same draws: both draw once for each token, from the same scores."""
    model, decode, written = shallow(model_class), CompiledDecoding("eager"), []
    for more in ({}, {"custom_generate": decode}):
        torch.manual_seed(3)
        written.append(model.generate(**prompts(model, 1, 5, "left"), max_new_tokens=20, **options, **more).tolist())
    assert written[0] == written[1]


def test_a_criterion_of_the_callers_own_ends_it():
    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert scores.shape == (1, model.config.vocab_size)
            return torch.tensor([input_ids.shape[1] >= 9])

    model = shallow(ScratchDecoderForCausalLM)
    options = {"stopping_criteria": StoppingCriteriaList([After()]), "custom_generate": CompiledDecoding("eager")}
    assert model.generate(**prompts(model, 1, 5, "left"), max_new_tokens=20, **options).shape == (1, 9)


def test_rows_that_a_criterion_ends_are_not_padded_without_an_end_of_text():
    class Once(StoppingCriteria):
        """Ends each row after another length, as `generate` sees it: it asks for every row at every step."""

        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 8 + 3 * row for row in range(len(input_ids))])

    model = shallow(ScratchDecoderForCausalLM)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    options = {"stopping_criteria": StoppingCriteriaList([Once()]), "max_new_tokens": 20, "do_sample": False}
    inputs = prompts(model, 2, 5, "left")
    expected = model.generate(**inputs, **options)
    assert model.generate(**inputs, **options, custom_generate=CompiledDecoding("eager")).equal(expected)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_positions_are_those_of_the_caller_or_of_the_mask(padding):
    model, decode = shallow(ScratchDecoderForCausalLM), CompiledDecoding("eager")
    inputs = tiny.inputs(model, 3, 6, padding=padding, seed=6)
    for more in ({}, {"position_ids": torch.arange(6).expand(3, -1) + 2}):
        expected = model.generate(**inputs, **more, max_new_tokens=8, do_sample=False)
        written = model.generate(**inputs, **more, max_new_tokens=8, do_sample=False, custom_generate=decode)
        assert written.equal(expected)


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS[1:], ids=tiny.family)
def test_masks_of_any_type_are_read(model_class, backend):
    model, decode = shallow(model_class), CompiledDecoding(backend)
    inputs = prompts(model, 2, 6, "right" if model.config.is_encoder_decoder else "left")
    prompt = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    inputs[prompt] = inputs["input_ids"][:, :1] * 0 + 3 if model.config.is_encoder_decoder else inputs["input_ids"]
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    for dtype in (torch.bool, torch.int64, torch.int32, torch.float32):
        given = inputs | {"attention_mask": inputs["attention_mask"].to(dtype)}
        given |= {prompt: inputs[prompt].int()} if dtype == torch.int32 else {}
        written = model.generate(**given, max_new_tokens=8, do_sample=False, custom_generate=decode)
        assert written.equal(expected), dtype
    assert len(decode.steps) == 1


def test_weights_that_are_replaced_are_heeded():
    model, other = shallow(ScratchDecoderForCausalLM), shallow(ScratchDecoderForCausalLM)
    with torch.no_grad():
        for weight in other.parameters():
            weight.normal_()
    decode, inputs = CompiledDecoding("eager"), prompts(model, 1, 5, "left")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    model.generate(**inputs, **options, custom_generate=decode)
    model.load_state_dict(other.state_dict(), assign=True)
    model.tie_weights()
    expected = model.generate(**inputs, **options)
    assert model.generate(**inputs, **options, custom_generate=decode).equal(expected)


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS[1:], ids=tiny.family)
def test_others_generate_while_a_step_is_compiled(model_class):
    """By the model whose products are others meanwhile."""
    model, seen = shallow(model_class), []
    inputs, options = prompts(model, 1, 7, "left"), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **options)

    def backend(graph, examples):
        if not seen:
            seen.append(None)
            worker = threading.Thread(target=lambda: seen.append(model.generate(**inputs, **options)))
            worker.start()
            worker.join()
        return graph.forward

    decode = CompiledDecoding(backend)
    assert model.generate(**inputs, **options, custom_generate=decode).equal(expected)
    assert len(seen) == 2 and seen[1].equal(expected)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_source_is_read_by_one_graph_and_not_marked():
    model, graphs = shallow(ScratchSeq2SeqForConditionalGeneration), Graphs()
    decode, ids = CompiledDecoding(graphs), prompts(model, 1, 8, "right")["input_ids"].contiguous()
    for length in (8, 3, 2, 12, 1, 5):
        decode.greedy(model, ids[:, :length], max_new_tokens=3)
    assert graphs.count == 2 and not hasattr(ids, "_dynamo_dynamic_indices")  # of the source, and of a step


@pytest.mark.parametrize("masked", [torch.bool, torch.float32, None])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_of_one_query_is_that_of_the_kernel(groups, masked):
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 4 // groups, 9, 8)
    value = torch.randn(1, 4 // groups, 9, 6)
    mask = None if masked is None else torch.rand(1, 1, 1, 9) > 0.4
    if masked is torch.float32:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for scale in (None, 0.3):
        options = {"attn_mask": mask, "scale": scale, "enable_gqa": groups > 1}
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        torch.testing.assert_close(decoding.attend(query, key, value, **options), expected)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"repetition_penalty": 1.3, "min_length": 4}, "min_length=4, repetition_penalty=1.3 of generation_config"),
        ({"forced_bos_token_id": 0}, "forced_bos_token_id=0 of"),
        ({"output_scores": True}, "output_scores=True of"),
    ],
    ids=str,
)
def test_what_would_change_greedy_search_is_refused(settings, message):
    model, decode = tiny.model(ScratchDecoderForCausalLM), CompiledDecoding("eager")
    inputs = prompts(model, 1, 5, "left")
    model.generation_config.update(**settings)
    with pytest.raises(ValueError, match=f"CompiledDecoding: {message}"):
        decode.greedy(model, **inputs, max_new_tokens=4)
    with pytest.raises(ValueError, match="max_new_tokens=0 must be a whole number, at least 1"):
        decode.greedy(model, **inputs, max_new_tokens=0)


def test_a_model_that_writes_nothing_or_knows_no_beginning_is_refused():
    decode, encoder = CompiledDecoding("eager"), tiny.model(ScratchEncoderModel)
    with pytest.raises(ValueError, match="ScratchEncoderModel writes no text"):
        decode.greedy(encoder, **tiny.inputs(encoder, 1, 5), max_new_tokens=4)
    translator = tiny.model(ScratchSeq2SeqForConditionalGeneration)
    translator.generation_config.decoder_start_token_id = translator.generation_config.bos_token_id = None
    with pytest.raises(ValueError, match="needs one decoder_start_token_id, or bos_token_id"):
        decode.greedy(translator, **tiny.inputs(translator, 1, 5), max_new_tokens=4)


def test_settings_of_other_searches_are_not_heeded():
    model = shallow(ScratchDecoderForCausalLM)
    inputs = prompts(model, 1, 5, "left")
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    settings = {"num_beams": 5, "temperature": 0.3, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    model.generation_config.update(**settings)
    assert CompiledDecoding("eager").greedy(model, **inputs, max_new_tokens=4).equal(expected)


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS[1:], ids=tiny.family)
def test_a_call_inside_a_call_has_a_cache_of_its_own(model_class):
    """As two threads of a server have."""

    class Inside(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            model.generate(**prompts(model, 1, 5, "left"), **options)
            return torch.tensor([False])

    model, decode = shallow(model_class), CompiledDecoding("eager")
    options = {"max_new_tokens": 12, "do_sample": False, "custom_generate": decode}
    inputs = prompts(model, 1, 6, "left")
    expected = model.generate(**inputs, **options)
    assert model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([Inside()])).equal(expected)
    assert expected.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False)) and len(decode.steps) == 1


def test_autocast_is_refused():
    model = tiny.model(ScratchDecoderForCausalLM)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast: load the model in the pre"):
        model.generate(**prompts(model, 1, 5, "left"), max_new_tokens=5, custom_generate=CompiledDecoding("eager"))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS[1:], ids=tiny.family)
def test_a_graph_is_made_once_and_kept(model_class, rows, monkeypatch):
    """Also while `generate` shares out products of its own, new ones in each call."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(generation_scratch, "sharing", lambda: (range(1, 65), 0))
    model, graphs = shallow(model_class), Graphs()
    model.generation_config.eos_token_id = None
    decode = CompiledDecoding(graphs)
    for length in range(2, 9):
        inputs = prompts(model, rows, length, "right" if model.config.is_encoder_decoder else "left")
        options = {"max_new_tokens": 6, "do_sample": False}
        expected = model.generate(**inputs, **options)
        assert model.generate(**inputs, **options, custom_generate=decode).tolist() == expected.tolist()
    assert graphs.count == len(decode.steps) == 1


def test_two_models_share_no_graph():
    """Nor do those of equal shapes, with other options."""
    decode = CompiledDecoding("eager")
    for activation in ("relu", "gelu"):
        model = shallow(ScratchDecoderForCausalLM, hidden_act=activation)
        inputs = prompts(model, 1, 5, "left")
        expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        assert model.generate(**inputs, max_new_tokens=20, do_sample=False, custom_generate=decode).equal(expected)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 3}, "beam_search must be one of greedy_search, sample"),
        ({"use_cache": False}, "use_cache=False must be True"),
        ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate, output_scores: it gives"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_refused(settings, message):
    model = tiny.model(ScratchDecoderForCausalLM)
    with pytest.raises(ValueError, match=message):
        model.generate(**prompts(model, 1, 5, "left"), max_new_tokens=5, **settings, custom_generate=CompiledDecoding())


def test_models_and_machines_that_it_cannot_use_are_refused(monkeypatch):
    inputs = tiny.inputs(tiny.model(ScratchDecoderForCausalLM), 1, 5)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    model = ScratchDecoderForCausalLM(ScratchDecoderConfig(**tiny.SIZES, num_hidden_layers=2, **windows))
    monkeypatch.setattr(decoding.shutil, "which", lambda name: None)
    message = "sliding_attention: use .*; .* is in training: .*; no C\\+\\+ compiler"
    with pytest.raises(ValueError, match=message):
        model.train().generate(**inputs, max_new_tokens=5, custom_generate=CompiledDecoding())


def test_parts_in_training_and_quantised_layers_are_refused():
    decode, ids = CompiledDecoding("eager"), tiny.tokens(40, 1, 5)
    model = tiny.model(ScratchDecoderForCausalLM, dropout=0.1)
    model.model.layers[1].train()
    quantised = quantize_dynamic(tiny.model(ScratchDecoderForCausalLM), {torch.nn.Linear})
    for refused, said in ((model, "or a part of it, is in training"), (quantised, "layers quantised by torch.ao")):
        for call in (partial(refused.generate, custom_generate=decode), partial(decode.greedy, refused)):
            with pytest.raises(ValueError, match=said):
                call(ids, max_new_tokens=2)


def test_layers_that_no_graph_can_have_are_refused():
    class Branching(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) if input.sum() > 0 else super().forward(input)

    model = tiny.model(ScratchDecoderForCausalLM)
    old = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = Branching(old.in_features, old.out_features, bias=old.bias is not None)
    with pytest.raises(ValueError, match="ScratchDecoderForCausalLM cannot be one graph: .*branching"):
        CompiledDecoding("eager").greedy(model.eval(), tiny.tokens(40, 1, 5), max_new_tokens=2)


def test_native_models_and_inputs_that_it_does_not_read_are_refused():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=16, **sizes)).eval()
    decode, ids = CompiledDecoding("eager"), tiny.tokens(40, 1, 5)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not one of ours"):
        llama.generate(ids, max_new_tokens=5, custom_generate=decode)
    message = "max_length=60 must be at most max_position_embeddings=32"
    learned = tiny.model(ScratchDecoderForCausalLM, position_embedding_type="learned", max_position_embeddings=32)
    with pytest.raises(ValueError, match=message):
        learned.generate(ids, max_length=60, custom_generate=decode)
    translator = tiny.model(ScratchSeq2SeqForConditionalGeneration)
    with pytest.raises(ValueError, match="decoder_attention_mask: it reads"):
        mask = torch.tensor([[0, 1, 1]])
        start = {"decoder_input_ids": ids[:, :3], "decoder_attention_mask": mask}
        translator.generate(ids, **start, max_new_tokens=5, custom_generate=decode)


def test_prompts_are_padded_on_the_left_and_padding_is_known_by_its_token():
    model = MODELS["decoder"]()
    model.generation_config.eos_token_id = None
    inputs = prompts(model, 3, 6, "left")
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 0)
    inputs["input_ids"][inputs["attention_mask"] == 1] = inputs["input_ids"][inputs["attention_mask"] == 1].clamp(min=1)
    model.generation_config.pad_token_id = 0
    decode, bare = CompiledDecoding("eager"), inputs["input_ids"]
    expected = model.generate(bare, max_new_tokens=8, do_sample=False)
    assert decode.greedy(model, bare, max_new_tokens=8).equal(expected)
    for wrong in ({"input_ids": bare.flip(1)}, {"input_ids": bare, "attention_mask": inputs["attention_mask"].flip(1)}):
        with pytest.raises(ValueError, match="must be on the left"):
            decode.greedy(model, **wrong, max_new_tokens=8)


@pytest.mark.parametrize(
    "options",
    [{"attn_implementation": "eager"}, {"position_embedding_type": "relative_bias"}],
    ids=["eager", "relative"],
)
def test_translators_whose_masks_are_numbers(options):
    model = shallow(ScratchSeq2SeqForConditionalGeneration, **options)
    model.generation_config.eos_token_id = None
    inputs = prompts(model, 2, 6, "right")
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, num_beams=1)
    assert CompiledDecoding("eager").greedy(model, **inputs, max_new_tokens=8).equal(expected)


class Switched(torch.nn.Linear):
    """Of what PEFT's layers have, that which says whether an adapter is added."""

    merged_adapters: list[str] = []  # noqa: RUF012
    _disable_adapters = False

    def forward(self, x):
        return super().forward(x) if self._disable_adapters else super().forward(x) + 3 * x.flip(-1)


@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS[1:], ids=tiny.family)
def test_adapters_that_are_switched_off(model_class):
    model, decode = tiny.model(model_class), CompiledDecoding("eager")
    model.generation_config.eos_token_id = None
    attention = model.get_decoder().layers[0].self_attn
    old, width = attention.q_proj, attention.q_proj.in_features
    attention.q_proj = Switched(width, width)
    attention.q_proj.load_state_dict(old.state_dict() | {"bias": torch.zeros(width)})
    inputs, written = prompts(model, 1, 6, "left"), []
    for is_off in (False, True, False):
        attention.q_proj._disable_adapters = is_off
        written.append(model.generate(**inputs, max_new_tokens=12, do_sample=False, num_beams=1))
        assert decode.greedy(model, **inputs, max_new_tokens=12).equal(written[-1])
    assert not written[0].equal(written[1])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number"),
        ({"input_ids": torch.ones(1, 4)}, "input_ids must be integers"),
        (
            {"attention_mask": torch.ones(1, 3)},
            r"attention_mask of shape \(1, 3\) must have that of input_ids, \(1, 4\)",
        ),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_inputs_that_do_not_fit(name, wrong, says):
    given = {"input_ids": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 3} | wrong
    with pytest.raises(ValueError, match=says):
        CompiledDecoding("eager").greedy(MODELS[name](), **given)


def test_sources_longer_than_a_table_of_positions():
    model = tiny.model(ScratchSeq2SeqForConditionalGeneration, position_embedding_type="learned")
    source = torch.ones(1, model.config.max_position_embeddings + 1, dtype=torch.long)
    with pytest.raises(ValueError, match="a source of .* tokens must be at most max_position_embeddings"):
        CompiledDecoding("eager").greedy(model, source, max_new_tokens=3)


def test_native_translators_are_refused():
    sizes = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1}
    model = MarianMTModel(MarianConfig(**sizes, **heads, forced_eos_token_id=None)).eval()
    with pytest.raises(ValueError, match="MarianMTModel is not one of ours: convert it"):
        CompiledDecoding("eager").greedy(model, torch.ones(1, 4, dtype=torch.long), max_new_tokens=3)


def test_what_was_read_before_the_prompt_is_refused():
    model, prompt = MODELS["decoder"](), torch.ones(1, 4, dtype=torch.long)
    asked = {"max_new_tokens": 3, "do_sample": False, "custom_generate": CompiledDecoding("eager")}
    cache = model(prompt[:, :2], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values holds 2 tokens"):
        model.generate(prompt, past_key_values=cache, **asked)
    # As PEFT does for prompts that are vectors.
    model.prepare_inputs_for_generation = MODELS["decoder"]().prepare_inputs_for_generation
    with pytest.raises(ValueError, match="inputs are prepared by ScratchDecoderForCausalLM"):
        model.generate(prompt, **asked)
