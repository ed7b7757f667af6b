"""Blocks and backbones against torch's and transformers' own, and against themselves where two ways must agree."""

import json
import logging

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AttentionInterface, LlamaConfig, LlamaModel, MistralConfig, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_scratch_transformer import (
    ScratchDecoderConfig,
    ScratchDecoderModel,
    ScratchEncoderConfig,
    ScratchEncoderModel,
    ScratchSeq2SeqConfig,
    ScratchSeq2SeqForConditionalGeneration,
    ScratchSeq2SeqModel,
    unpadding_scratch,
)
from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.layers_scratch import ScratchBlock

from . import tiny
from .test_layers_scratch import attention_with_loops

ARTICLE = {  # the options of "Attention Is All You Need"
    "hidden_act": "relu",
    "position_embedding_type": "sinusoidal",
    "norm_type": "layer_norm",
    "norm_position": "post",
    "layer_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
    "num_key_value_heads": 4,
}
VARIANTS = {
    "article": ARTICLE,
    "llama": {"hidden_act": "swiglu"},
    "learned": {"position_embedding_type": "learned", "scale_embedding": True},
    "none": {"position_embedding_type": "none", "use_qk_norm": True},
    "heads": {"head_dim": 6, "value_head_dim": 10, "num_key_value_heads": 1},
    "bart": {
        "position_embedding_type": "learned",
        "position_offset": 2,
        "embedding_norm": True,
        "attention_bias": True,
        "attention_output_bias": False,
        "hidden_act": "silu",
    },
    "halves": {"position_embedding_type": "sinusoidal_halves", "hidden_act": "gelu_new"},
}


def test_a_lookup_is_one_hot_times_the_table():
    model = tiny.model(ScratchEncoderModel, position_embedding_type="none", scale_embedding=True)
    ids = tiny.tokens(40, 2, 5)
    table = model.embeddings.word_embeddings.weight
    one_hot = nn.functional.one_hot(ids, 40).float()
    assert_close(model.embeddings.word_embeddings(ids), one_hot @ table)
    embedded = model(ids, output_hidden_states=True).hidden_states[0]
    assert_close(embedded, one_hot @ table * 32**0.5)
    assert (table[model.config.pad_token_id] == 0).all()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_only_a_tied_head_trains_the_row_of_padding(head, tie):
    model = tiny.model(head, tie_word_embeddings=tie).train()
    inputs = tiny.inputs(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs, **tiny.labels(model, inputs)).loss.backward()
    optimizer.step()
    table = model.get_input_embeddings().weight
    assert table.grad[3:].any(dim=1).any()
    assert bool(table[model.config.pad_token_id].any()) == tie


def test_embeddings_are_a_normalised_sum_of_three_tables():
    options = {"position_embedding_type": "learned", "position_offset": 3, "type_vocab_size": 2, "embedding_norm": True}
    model = tiny.model(ScratchEncoderModel, **options)
    ids, types = tiny.tokens(40, 2, 5), torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 1, 0]])
    tables = model.embeddings
    assert tables.position_embeddings.weight.shape == (32 + 3, 32)
    nn.init.normal_(tables.norm.weight)
    positions = tables.position_embeddings.weight[3:8]
    expected = tables.norm(tables.word_embeddings.weight[ids] + positions + tables.token_type_embeddings.weight[types])
    states = model(ids, token_type_ids=types, output_hidden_states=True)
    assert_close(states.hidden_states[0], expected)
    of_type_0 = model(ids, token_type_ids=torch.zeros_like(ids)).last_hidden_state
    assert torch.equal(model(ids).last_hidden_state, of_type_0)
    assert not torch.allclose(of_type_0, states.last_hidden_state, atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_pooler_reads_the_first_real_token(side):
    model = tiny.model(ScratchEncoderModel, pooler_act="tanh")
    inputs = tiny.inputs(model, padding=side)
    outputs = model(**inputs)
    first = [row[mask.bool()][0] for row, mask in zip(outputs.last_hidden_state, inputs["attention_mask"], strict=True)]
    assert_close(outputs.pooler_output, torch.tanh(model.pooler.dense(torch.stack(first))))
    assert "pooler_output" not in tiny.model(ScratchEncoderModel)(**inputs)


@pytest.mark.parametrize(
    ("options", "biased"),
    [
        ({}, set()),
        ({"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"attention_bias": True, "attention_output_bias": False}, {"q_proj", "k_proj", "v_proj"}),
        ({"attention_output_bias": True}, {"o_proj"}),
    ],
)
def test_biases_of_attention(options, biased):
    attention = tiny.model(ScratchDecoderModel, **options).layers[0].self_attn
    assert {name for name, module in attention.named_children() if getattr(module, "bias", None) is not None} == biased


def copy_torch_attention(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
    linears = (ours.q_proj, ours.k_proj, ours.v_proj)
    parts = zip(linears, theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
    for linear, weight, bias in parts:
        linear.weight.data, linear.bias.data = weight.data, bias.data
    ours.o_proj.load_state_dict(theirs.out_proj.state_dict())


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("has_source", [False, True])
def test_a_block_is_torchs_own_layer(norm_position, has_source):
    config = tiny.config("decoder", **ARTICLE | {"norm_position": norm_position})
    config._attn_implementation = "sdpa"
    block = ScratchBlock(config, 0, is_causal=has_source, has_encoder=has_source).eval()
    layer_type = nn.TransformerDecoderLayer if has_source else nn.TransformerEncoderLayer
    theirs = layer_type(32, 4, 48, batch_first=True, norm_first=norm_position == "pre").eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    copy_torch_attention(theirs.self_attn, block.self_attn)
    norms = [block.self_attn_norm, block.mlp_norm]
    if has_source:
        copy_torch_attention(theirs.multihead_attn, block.cross_attn)
        norms.insert(1, block.cross_attn_norm)
    for index, norm in enumerate(norms, start=1):
        norm.load_state_dict(getattr(theirs, f"norm{index}").state_dict())
    block.mlp.up_proj.load_state_dict(theirs.linear1.state_dict())
    block.mlp.down_proj.load_state_dict(theirs.linear2.state_dict())
    x, source = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    if has_source:
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        assert_close(block(x, None, source), theirs(x, source, tgt_mask=causal), atol=1e-5, rtol=1e-5)
    else:
        assert_close(block(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_the_decoder_with_llamas_options_is_llama():
    sizes = {**tiny.SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "rope_theta": 500.0}
    theirs = LlamaModel(LlamaConfig(**sizes, rms_norm_eps=1e-6)).eval()
    ours = ScratchDecoderModel(ScratchDecoderConfig(**sizes, hidden_act="swiglu")).eval()
    names = {
        "embed_tokens": "embeddings.word_embeddings",
        "input_layernorm": "self_attn_norm",
        "post_attention_layernorm": "mlp_norm",
    }
    state = theirs.state_dict()
    for old, new in names.items():
        state = {key.replace(old, new): tensor for key, tensor in state.items()}
    ours.load_state_dict(state)
    ids, mask = tiny.tokens(40, 3, 9), tiny.padding_mask(3, 9)
    a = theirs(ids, attention_mask=mask, output_hidden_states=True)
    b = ours(ids, attention_mask=mask, output_hidden_states=True)
    for left, right in zip(a.hidden_states, b.hidden_states, strict=True):
        assert_close(left[mask.bool()], right[mask.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", ["article", "heads"])
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_attention_of_a_model_is_the_formula(implementation, variant, family):
    """From the first layer's input to its attention weights and output, with padding, by explicit loops."""
    overrides = {"position_embedding_type": "none"} | {
        key: value for key, value in VARIANTS[variant].items() if key != "position_embedding_type"
    }
    model = tiny.model(ScratchEncoderModel if family == "encoder" else ScratchDecoderModel, **overrides)
    model.set_attn_implementation(implementation)
    ids, mask = tiny.tokens(40, 2, 5), tiny.padding_mask(2, 5)
    attention, config = model.layers[0].self_attn, model.config
    seen = {}
    attention.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output[0]))
    weights = model(ids, mask, output_attentions=True).attentions[0]
    model(ids, mask)  # now through the backend itself
    x = seen["x"]
    heads = [
        linear(x).view(2, 5, -1, dim).transpose(1, 2)
        for linear, dim in (
            (attention.q_proj, config.head_dim),
            (attention.k_proj, config.head_dim),
            (attention.v_proj, config.value_head_dim),
        )
    ]
    allowed = mask.bool()[:, None, None, :].expand(2, config.num_attention_heads, 5, 5)
    if family == "decoder":
        allowed = allowed & torch.ones(5, 5, dtype=torch.bool).tril()
    output, expected_weights = attention_with_loops(*heads, allowed, config.head_dim**-0.5)
    assert_close(weights, expected_weights, atol=1e-5, rtol=1e-5)
    assert_close(seen["y"], attention.o_proj(output.flatten(2)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_encoder_sees_both_sides_and_the_decoder_one(variant):
    ids = tiny.tokens(40, 1, 8)
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 30 + 3
    for model_class, earlier_differ in ((ScratchEncoderModel, True), (ScratchDecoderModel, False)):
        model = tiny.model(model_class, **VARIANTS[variant])
        a, b = model(ids).last_hidden_state, model(changed).last_hidden_state
        assert torch.equal(a[:, :5], b[:, :5]) is not earlier_differ
        assert not torch.allclose(a[:, 5:], b[:, 5:], atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel])
def test_padding_changes_nothing(variant, side, model_class):
    model = tiny.model(model_class, **VARIANTS[variant])
    inputs = tiny.inputs(model, batch=4, length=9, padding=side)
    padded = model(**inputs).last_hidden_state
    for row, (ids, mask) in enumerate(zip(*inputs.values(), strict=True)):
        alone = model(ids[mask.bool()][None]).last_hidden_state[0]
        assert_close(padded[row][mask.bool()], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_source_and_target_changes_nothing(variant, side):
    model = tiny.model(ScratchSeq2SeqModel, **VARIANTS[variant])
    source = tiny.inputs(model, batch=4, length=9, padding=side)
    target = tiny.inputs(model, batch=4, length=6, padding=side, seed=5)
    padded = model(
        **source, decoder_input_ids=target["input_ids"], decoder_attention_mask=target["attention_mask"]
    ).last_hidden_state
    for row in range(4):
        real = source["attention_mask"][row].bool(), target["attention_mask"][row].bool()
        alone = model(
            source["input_ids"][row][real[0]][None], decoder_input_ids=target["input_ids"][row][real[1]][None]
        )
        assert_close(padded[row][real[1]], alone.last_hidden_state[0], atol=1e-5, rtol=1e-5)


def test_source_and_target_lengths_differ_freely():
    model = tiny.model(ScratchSeq2SeqModel)
    outputs = model(tiny.tokens(40, 2, 9), decoder_input_ids=tiny.tokens(40, 2, 4), output_attentions=True)
    assert outputs.last_hidden_state.shape == (2, 4, 32)
    assert [w.shape for w in outputs.cross_attentions] == [(2, 4, 4, 9)] * 2  # (B, H, T_D, T_E) for each decoder layer
    assert [w.shape for w in outputs.encoder_attentions] == [(2, 4, 9, 9)]
    assert_close(outputs.cross_attentions[0].sum(-1), torch.ones(2, 4, 4))


def test_a_mask_prepared_in_full_is_used_as_it_is():
    model = tiny.model(ScratchDecoderModel)
    ids, mask = tiny.tokens(40, 2, 5), tiny.padding_mask(2, 5)
    full = create_causal_mask(
        config=model.config, inputs_embeds=torch.empty(2, 5, 32), attention_mask=mask, past_key_values=None
    )
    assert full.shape == (2, 1, 5, 5)
    assert torch.equal(model(ids, full).last_hidden_state, model(ids, mask).last_hidden_state)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("base", [None, 16])
@pytest.mark.parametrize("initialization", ["xavier_uniform", "normal", "normal_zero_output"])
def test_initialisation(family, initialization, base):
    model_class = {"encoder": ScratchEncoderModel, "decoder": ScratchDecoderModel, "seq2seq": ScratchSeq2SeqModel}[
        family
    ]
    biases = {"attention_bias": True, "mlp_bias": True, "norm_type": "layer_norm"}
    model = tiny.model(
        model_class,
        **biases,
        hidden_size=64,
        initialization=initialization,
        position_embedding_type="learned",
        mup_base_width=base,
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif initialization == "normal_zero_output" and ("o_proj" in name or "down_proj" in name):
            assert (parameter == 0).all(), name
        else:
            fan_out, fan_in = parameter.shape
            std = (2 / (fan_in + fan_out)) ** 0.5 if initialization == "xavier_uniform" else 0.2
            if base and initialization != "xavier_uniform" and "layers." in name:
                std /= 2  # the root of 64 / 16
            assert parameter.std().item() == pytest.approx(std, rel=0.15), name
            if initialization == "xavier_uniform":
                assert parameter.abs().max() <= 3**0.5 * std + 1e-6, name
        if name.endswith("word_embeddings.weight"):
            assert (parameter[0] == 0).all(), name


def test_zero_outputs_are_refused_where_the_gradient_of_a_row_of_zeros_would_explode(tmp_path):
    """The padding token may be one of the text. What a released version saved goes on loading."""
    options = {"initialization": "normal_zero_output", "num_hidden_layers": 6}
    with pytest.raises(ValueError, match="norm_position='post' does not go with initialization='normal_zero_output'"):
        tiny.model(ScratchEncoderModel, **options, norm_position="post")
    model = tiny.model(ScratchEncoderModel, **options, norm_position="pre")
    model(torch.tensor([[3, 0, 5]])).last_hidden_state.sum().backward()
    assert all(parameter.grad.abs().max() < 1e5 for parameter in model.parameters() if parameter.grad is not None)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"norm_position": "post"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ScratchEncoderModel.from_pretrained(tmp_path).config.norm_position == "post"


@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel])
def test_input_longer_than_meant_is_said_once_where_nothing_ends_it(model_class, caplog, monkeypatch):
    """A table of positions ends, which is refused; others go on where the model was not trained."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # to where pytest listens
    for options, expected in [
        ({"position_embedding_type": "rotary"}, 1),
        ({"position_embedding_type": "sinusoidal"}, 1),
        ({"position_embedding_type": "none"}, 1),
        ({"position_embedding_type": "rotary", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 0),
    ]:
        model = tiny.model(model_class, **options, max_position_embeddings=8)
        caplog.clear()
        model(tiny.tokens(40, 1, 8))
        model(tiny.tokens(40, 1, 16), position_ids=torch.arange(8).repeat(1, 2))  # packed documents
        assert not caplog.records
        for _ in range(2):
            model(tiny.tokens(40, 1, 9))
        assert [record.getMessage() for record in caplog.records] == [
            f"input of 9 tokens is longer than max_position_embeddings=8, for which {model_class.__name__} is meant"
        ] * expected


def test_zero_outputs_make_every_block_the_identity():
    model = tiny.model(ScratchDecoderModel, initialization="normal_zero_output")
    states = model(tiny.tokens(40, 2, 5), output_hidden_states=True).hidden_states
    assert torch.equal(states[0], states[1])


def test_the_base_model_of_the_paper_has_the_parameters_of_its_formulas():
    """SPEC section 4: 44,070,912 in the layers by formulas that leave out norms and attention biases."""
    article = {key: value for key, value in ARTICLE.items() if key != "num_key_value_heads"}
    config = ScratchSeq2SeqConfig(
        vocab_size=37000, hidden_size=512, intermediate_size=2048, num_attention_heads=8, **article
    )
    with torch.device("meta"):
        model = ScratchSeq2SeqForConditionalGeneration(config)
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    formulas = sum(
        count
        for name, count in parameters.items()
        if ".layers." in name and "norm" not in name and not ("_attn" in name and name.endswith("bias"))
    )
    assert formulas == 44_070_912
    assert formulas + 37000 * 512 == 63_014_912
    extra = 18 * 4 * 512 + 30 * 2 * 512  # attention biases; scale and shift of each norm
    assert model.num_parameters() == 63_014_912 + extra


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"input_ids": torch.zeros(5, dtype=torch.long)},
            ValueError,
            r"input_ids must be integers of shape \(batch, len",
        ),
        ({"input_ids": torch.zeros(2, 5)}, ValueError, "input_ids must be integers"),
        ({}, ValueError, "one of input_ids and inputs_embeds"),
        ({"inputs_embeds": torch.zeros(2, 5, 31)}, ValueError, "hidden_size=32"),
        (
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 4)},
            ValueError,
            r"attention_mask of shape \(2, 4\) does not fit input of \(2, 5\)",
        ),
        (
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(3, 5)},
            ValueError,
            "attention_mask",
        ),
        (
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "position_ids": torch.ones(2, 4, dtype=torch.long)},
            ValueError,
            r"position_ids of shape \(2, 4\)",
        ),
        (
            {"input_ids": torch.ones(1, 33, dtype=torch.long)},
            ValueError,
            "33 tokens is longer than max_position_emb.*=32",
        ),
        (
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "atention_mask": torch.ones(2, 5)},
            TypeError,
            "'atention_mask': did you mean 'attention_mask'",
        ),
    ],
)
@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel])
def test_bad_input_is_refused_before_any_matrix_is_multiplied(arguments, error, message, model_class, monkeypatch):
    model = tiny.model(model_class, position_embedding_type="learned")

    def refuse(*args, **kwargs):
        raise AssertionError("a matrix was multiplied")

    monkeypatch.setattr(nn.functional, "linear", refuse)
    monkeypatch.setattr(nn.functional, "embedding", refuse)
    with pytest.raises(error, match=message):
        model(**arguments)


def test_names_of_serving_engines_pass_through():
    model = tiny.model(ScratchDecoderModel)
    ids = tiny.tokens(40, 2, 5)
    assert torch.equal(model(ids, attn_metadata=None, kv_caches=None).last_hidden_state, model(ids).last_hidden_state)


def test_an_attention_backend_of_a_serving_engine_takes_over():
    """Such a backend makes no masks, keeps its own cache, and returns a row for each token of the batch."""
    seen = []

    def engine(module, query, key, value, attention_mask, scaling, **kwargs):
        seen.append((module.layer_idx, attention_mask, kwargs["attn_metadata"]))
        output, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        return output.flatten(0, 1).flatten(1), None

    model = tiny.model(ScratchDecoderModel)
    ids, positions = tiny.tokens(40, 1, 6), torch.arange(6)[None]
    expected = model(ids).last_hidden_state
    AttentionInterface.register("engine", engine)
    model.set_attn_implementation("engine")
    output = model(ids, position_ids=positions, use_cache=False, attn_metadata="its own")
    assert_close(output.last_hidden_state, expected)
    assert seen == [(0, None, "its own"), (1, None, "its own")]


def test_positions_beyond_the_longest_meant_are_refused_for_learned_tables_only():
    ids = tiny.tokens(40, 1, 40)
    for kind in ("sinusoidal", "rotary", "none"):
        assert tiny.model(ScratchEncoderModel, position_embedding_type=kind)(ids).last_hidden_state.isfinite().all()
    model = tiny.model(ScratchEncoderModel, position_embedding_type="learned")
    model.resize_position_embeddings(40)
    assert model(ids).last_hidden_state.isfinite().all() and model.config.max_position_embeddings == 40


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_resized_positions_keep_the_old_rows(family):
    model_class = {"encoder": ScratchEncoderModel, "decoder": ScratchDecoderModel, "seq2seq": ScratchSeq2SeqModel}[
        family
    ]
    model = tiny.model(model_class, position_embedding_type="learned")
    old = model.get_position_embeddings().weight.clone()
    model.resize_position_embeddings(50)
    grown = model.get_position_embeddings().weight
    assert grown.shape == (50, 32) and torch.equal(grown[:32], old) and grown[32:].std() > 0.1
    model.resize_position_embeddings(10)
    assert torch.equal(model.get_position_embeddings().weight, old[:10])
    shifted = tiny.model(model_class, position_embedding_type="learned", position_offset=2)
    shifted.resize_position_embeddings(50)
    assert shifted.get_position_embeddings().weight.shape == (52, 32)
    with pytest.raises(ValueError, match="position_embedding_type='rotary' has no table"):
        tiny.model(model_class).get_position_embeddings()
    with pytest.raises(ValueError, match="must be at least 1"):
        model.resize_position_embeddings(0)


def test_an_encoder_is_not_made_causal_by_a_keyword():
    model = tiny.model(ScratchEncoderModel)
    with pytest.raises(
        ValueError, match="is_causal=True: an encoder sees both sides.*ScratchEncoderModel has is_causal=False"
    ):
        model(tiny.tokens(40, 2, 5), is_causal=True)


def test_only_a_translators_decoder_reads_an_encoders_output():
    model = tiny.model(ScratchDecoderModel)
    with pytest.raises(ValueError, match="encoder_hidden_states: ScratchDecoderModel has no cross-attention"):
        model(tiny.tokens(40, 2, 5), encoder_hidden_states=torch.zeros(2, 3, 32))


def test_depths_of_a_translator_differ_freely():
    for encoder_layers, decoder_layers in ((1, 3), (3, 1)):
        config = ScratchSeq2SeqConfig(**tiny.SIZES, encoder_layers=encoder_layers, decoder_layers=decoder_layers)
        model = ScratchSeq2SeqModel(config)
        assert (len(model.encoder.layers), len(model.decoder.layers)) == (encoder_layers, decoder_layers)


def test_positional_arguments_and_tuples():
    config = ScratchEncoderConfig(**tiny.SIZES, num_hidden_layers=2)
    model = ScratchEncoderModel(config).eval()
    ids, mask = tiny.tokens(40, 2, 5), tiny.padding_mask(2, 5)
    by_name = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(model(ids, mask)[0], by_name)
    as_tuple = model(ids, mask, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], by_name)
    with_types = model(ids, mask, token_type_ids=torch.zeros_like(ids))
    assert torch.equal(with_types.last_hidden_state, by_name)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
    assert torch.equal(embedded.last_hidden_state, by_name)


# A mask for each kind of layer

SEES = {  # by whether a stack is causal: which keys j a query i sees in a layer with a window of 3
    True: lambda i, j: (i - 3 < j) & (j <= i),
    False: lambda i, j: abs(i - j) <= 3,
}


def mistral_and_ours(window: int = 3):
    """A Mistral with a sliding window, and ours of the same weights with the same window in every layer."""
    torch.manual_seed(0)
    sizes = {name: tiny.SIZES[name] for name in tiny.SIZES if name != "initializer_range"}
    config = MistralConfig(
        **sizes, num_hidden_layers=2, head_dim=8, sliding_window=window, initializer_range=0.5, pad_token_id=0
    )
    theirs = MistralForCausalLM(config).eval()
    ours = convert_from(theirs)
    assert ours.config.layer_types == ours.model.layer_types == ["sliding_attention"] * 2
    return theirs, ours


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_a_decoder_of_sliding_layers_is_mistral(side, backend):
    theirs, ours = mistral_and_ours()
    theirs.set_attn_implementation(backend)
    ours.set_attn_implementation(backend)
    mask = torch.ones(4, 9, dtype=torch.long) if side is None else tiny.padding_mask(4, 9, side)
    inputs = {"input_ids": tiny.tokens(40, 4, 9), "attention_mask": None if side is None else mask}
    expected = theirs(**inputs).logits[mask == 1]
    for unpad_inputs in (False, True):
        logits = ours(**inputs, unpad_inputs=unpad_inputs, use_cache=False).logits
        assert_close(logits[mask == 1], expected, atol=5e-5, rtol=1e-5)
    ours.model.layer_types = ["full_attention"] * 2
    assert not torch.allclose(ours(**inputs).logits[mask == 1], expected, atol=1e-2)


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
def test_a_decoder_of_sliding_layers_writes_what_mistral_writes(cache):
    theirs, ours = mistral_and_ours()
    inputs = {"input_ids": tiny.tokens(40, 3, 7), "attention_mask": tiny.padding_mask(3, 7, "left")}
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    written = [model.generate(**inputs, **options, cache_implementation=cache) for model in (theirs, ours)]
    assert torch.equal(*written)
    assert torch.equal(ours.generate(**inputs, **options, use_cache=False), written[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel], ids=tiny.family)
def test_each_layer_sees_what_its_kind_sees(model_class, backend, packed):
    """Gradients from one position of a layer's output to all positions of its input."""
    model = tiny.model(model_class, num_hidden_layers=4, attn_implementation=backend)
    model.config.sliding_window = 3
    model.layer_types = ["full_attention", "sliding_attention"] * 2
    length, is_causal = 10, model_class is ScratchDecoderModel
    document = torch.tensor([0] * 6 + [1] * 4 if packed else [0] * length)
    positions = {"position_ids": torch.cat([torch.arange(6), torch.arange(4)])[None]} if packed else {}
    states = model(tiny.tokens(40, 1, length), **positions, output_hidden_states=True).hidden_states
    i, j = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    for kind, read, written in zip(model.layer_types, states[:-1], states[1:], strict=True):
        sees = SEES[is_causal](i, j) if kind == "sliding_attention" else (j <= i) | (not is_causal)
        reached = []
        for position in range(length):
            (gradient,) = torch.autograd.grad(written[0, position].sin().sum(), read, retain_graph=True)
            reached.append(gradient[0].abs().sum(-1) > 0)
        assert torch.equal(torch.stack(reached), sees & (document[i] == document[j]))


@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel], ids=tiny.family)
def test_kernels_are_told_of_a_window_as_masks_are(model_class, monkeypatch):
    """Those that make no mask (FlashAttention's) count the token itself in a window, to either side."""
    seen, length = [], 10

    def kernel(module, query, key, value, attention_mask, sliding_window=None, **kwargs):
        i, j = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
        seen.append((i - j < sliding_window) & (j <= i) if module.is_causal else abs(i - j) < sliding_window)
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "a_kernel", kernel)
    model = tiny.model(model_class, layer_types=["sliding_attention"] * 2, sliding_window=3)
    model.config._attn_implementation = "a_kernel"
    model(tiny.tokens(40, 1, length))
    i, j = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    assert len(seen) == 2 and all(torch.equal(each, SEES[model.is_causal](i, j)) for each in seen)


@pytest.mark.parametrize("model_class", [ScratchEncoderModel, ScratchDecoderModel], ids=tiny.family)
def test_packed_documents_in_sliding_layers_equal_each_alone(model_class):
    model = tiny.model(model_class)
    model.config.sliding_window = 3
    model.layer_types = ["sliding_attention", "full_attention"]
    options = {} if model_class is ScratchEncoderModel else {"use_cache": False}
    documents = tiny.tokens(40, 1, 15).split([6, 5, 4], dim=1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    alone = torch.cat([model(document, **options).last_hidden_state for document in documents], dim=1)
    together = model(torch.cat(documents, dim=1), position_ids=positions, **options).last_hidden_state
    assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_for_layers_of_two_kinds(cache):
    """Caches learn the kinds from the configuration; for a static one `generate` makes a mask for each."""
    _, model = mistral_and_ours()
    model.config.layer_types = model.model.layer_types = ["full_attention", "sliding_attention"]
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    ids = tiny.tokens(40, 3, 7)
    expected = model.generate(ids, **options, use_cache=False)
    assert torch.equal(model.generate(ids, **options, cache_implementation=cache), expected)


# Without padding

MASKS = {
    "right": tiny.padding_mask(4, 9),
    "left": tiny.padding_mask(4, 9, "left"),
    "holes": torch.tensor(
        [[1, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0, 0], [1] * 9]
    ),
}


def real_states_and_gradients(model, mask, unpad_inputs):
    """Non-padding states (N, D), all states, gradients of a loss of the former, and how many tokens layers saw."""
    inputs = {"input_ids": tiny.tokens(40, *mask.shape), "attention_mask": mask}
    if model.config.is_encoder_decoder:
        target = tiny.padding_mask(len(mask), 6)
        inputs |= {"decoder_input_ids": tiny.tokens(40, *target.shape, seed=1), "decoder_attention_mask": target}
    seen = []
    block = next(module for module in reversed(list(model.modules())) if isinstance(module, ScratchBlock))
    handle = block.register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
    states = model(**inputs, unpad_inputs=unpad_inputs, use_cache=False).last_hidden_state
    handle.remove()
    real = inputs.get("decoder_attention_mask", mask) == 1
    model.zero_grad()
    states[real].sin().sum().backward()
    return states[real], states, real, {n: p.grad.clone() for n, p in model.named_parameters()}, seen[0]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_class", tiny.BACKBONES, ids=tiny.family)
def test_without_padding_real_tokens_are_the_same(model_class, variant, side, backend):
    model = tiny.model(model_class, attn_implementation=backend, **VARIANTS[variant])
    expected, _, _, gradients, all_tokens = real_states_and_gradients(model, MASKS[side], unpad_inputs=False)
    states, everywhere, real, ours, seen = real_states_and_gradients(model, MASKS[side], unpad_inputs=True)
    assert seen == real.sum() < all_tokens == real.numel()
    assert not everywhere[~real].any()
    assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert_close(ours, gradients, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_text_without_tokens_among_others_is_no_obstacle(backend):
    model = tiny.model(ScratchSeq2SeqModel, attn_implementation=backend)
    mask = MASKS["right"].clone()
    mask[2] = 0
    states, _, _, gradients, _ = real_states_and_gradients(model, mask, unpad_inputs=True)
    assert states.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_angles_that_follow_the_length_are_those_of_the_padded_rows(rope_type):
    """Of which no row need be full: others have asked for the width of their device."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 8}
    rope = {"rope_type": rope_type, "factor": 4.0, **(factors if rope_type == "longrope" else {})}
    model = tiny.model(ScratchEncoderModel, rope_parameters=rope, max_position_embeddings=8, num_attention_heads=4)
    ids = tiny.tokens(40, 2, 14)
    mask = (torch.arange(14) < torch.tensor([[7], [3]])).long()
    padded, unpadded = (model(ids, mask, unpad_inputs=unpad).last_hidden_state for unpad in (False, True))
    assert_close(unpadded[mask == 1], padded[mask == 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": True}, {"use_reentrant": False}])
@pytest.mark.parametrize("model_class", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_padding_is_skipped_while_layers_are_checkpointed(model_class, checkpointing):
    model = tiny.model(model_class).train()
    inputs = tiny.inputs(model, batch=4, length=9)
    inputs |= tiny.labels(model, inputs)

    def gradients():
        model.zero_grad()
        model(**inputs, loss_only=True).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    assert_close(gradients(), expected)


def test_states_and_weights_are_shown_with_their_padding():
    model = tiny.model(ScratchEncoderModel)
    inputs = tiny.inputs(model, batch=4, length=9)
    shown = model(**inputs, unpad_inputs=True, output_hidden_states=True, output_attentions=True)
    assert {states.shape for states in shown.hidden_states} == {(4, 9, 32)}
    assert {weights.shape for weights in shown.attentions} == {(4, 4, 9, 9)}


def test_a_cache_holds_padding_too():
    model = tiny.model(ScratchDecoderModel)
    inputs = tiny.inputs(model, batch=4, length=9)
    cache = model(**inputs, unpad_inputs=True, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (4, 2, 9, 8)


def varlen_by_loops(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """What torch's kernel computes, which runs on GPUs only: text by text."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert window_size in ((-1, -1), (-1, 0))
    outputs = []
    for row in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[row] : cu_seq_q[row + 1]].transpose(0, 1)
        k, v = (x[cu_seq_k[row] : cu_seq_k[row + 1]].transpose(0, 1) for x in (key, value))
        assert q.shape[1] <= max_q and k.shape[1] <= max_k
        scores = q @ k.transpose(1, 2) * scale
        if window_size[1] == 0:
            scores = scores.masked_fill(torch.ones(q.shape[1], k.shape[1]).triu(1).bool(), float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("model_class", tiny.BACKBONES, ids=tiny.family)
def test_the_varlen_kernel_is_asked_for_the_same(model_class, monkeypatch):
    model = tiny.model(model_class)
    expected, _, _, gradients, _ = real_states_and_gradients(model, MASKS["right"], unpad_inputs=True)
    monkeypatch.setattr(unpadding_scratch, "has_varlen_kernel", lambda *_: True)
    monkeypatch.setattr(unpadding_scratch, "varlen_attn", varlen_by_loops)
    states, _, _, ours, _ = real_states_and_gradients(model, MASKS["right"], unpad_inputs=True)
    assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert_close(ours, gradients, atol=5e-5, rtol=1e-4)


def test_documents_of_very_unequal_lengths_stay_in_their_row(monkeypatch):
    """Padded they would take more room than the matrix of all tokens by all tokens."""
    model = tiny.model(ScratchEncoderModel)
    lengths = (12, 1, 1, 1, 1, 1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = tiny.tokens(40, 1, sum(lengths))
    monkeypatch.setattr(unpadding_scratch, "_scatter", None)
    alone = torch.cat([model(document).last_hidden_state for document in ids.split(lengths, dim=1)], dim=1)
    assert_close(model(ids, position_ids=positions).last_hidden_state, alone, atol=1e-5, rtol=1e-5)
