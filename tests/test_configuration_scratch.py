"""The configurations: derived values, refusals, and what survives a save."""

import json

import pytest
from transformers import PreTrainedConfig

from hf_scratch_transformer import ScratchDecoderConfig, ScratchEncoderConfig, ScratchEncoderModel, ScratchSeq2SeqConfig

from . import tiny


def test_derived_values():
    config = ScratchDecoderConfig(hidden_size=96, num_attention_heads=6)
    assert (config.num_key_value_heads, config.head_dim, config.value_head_dim) == (6, 16, 16)
    assert ScratchDecoderConfig(hidden_size=96, num_attention_heads=5, head_dim=10).value_head_dim == 10
    config = ScratchSeq2SeqConfig(vocab_size=77, bos_token_id=None)
    assert (config.decoder_vocab_size, config.decoder_start_token_id) == (77, config.pad_token_id)
    assert ScratchSeq2SeqConfig(bos_token_id=5).decoder_start_token_id == 5
    assert ScratchSeq2SeqConfig(encoder_layers=3).num_hidden_layers == 3


def test_rope_parameters_belong_to_rotary_positions():
    assert ScratchEncoderConfig().rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert ScratchEncoderConfig(rope_theta=500.0).rope_parameters["rope_theta"] == 500.0
    assert ScratchEncoderConfig(position_embedding_type="learned").rope_parameters is None
    with pytest.raises(ValueError, match="rope_parameters.*needs position_embedding_type='rotary'.*'learned'"):
        ScratchEncoderConfig(position_embedding_type="learned", rope_parameters={"rope_theta": 500.0})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=512"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=8"),
        ({"head_dim": 7}, "head_dim=7 must be even for position_embedding_type='rotary'"),
        ({"hidden_act": "swish"}, "hidden_act='swish' must be one of 'swiglu', 'relu', 'gelu', 'silu', 'gelu_new', "),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi' must be one of"),
        ({"norm_type": "batch_norm"}, "norm_type='batch_norm' must be one of"),
        ({"norm_position": "none"}, "norm_position='none' must be one of"),
        (
            {"layer_types": ["full_attention"]},
            r"layer_types=\['full_attention'\] must have num_hidden_layers=6 entries",
        ),
        ({"layer_types": ["conv"] * 6}, "layer_types=.*: 'conv' must be in 'full_attention', 'sliding_attention'"),
        ({"layer_types": ["sliding_attention"] * 6}, "'sliding_attention' needs sliding_window, in tokens"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\] must have num_hidden_layers=6 entries"),
        (
            {"no_rope_layers": [1, 0] * 3, "position_embedding_type": "learned"},
            "no_rope_layers needs position_embedding_type='rotary', got 'learned'",
        ),
        (
            {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.4}, "head_dim": 8},
            "head_dim=8 times partial_rotary_factor=0.4 must be even",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 9.0, "rope_type": "default"}}},
            "rope_parameters=.* must have one entry for each of layer_types=.*'full_attention'",
        ),
        (
            {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 2.0}},
            "partial_rotary_factor must be above 0 and at most 1",
        ),
        ({"no_rope_layers": [1, 0, 2, 1, 1, 1]}, "no_rope_layers=.* must be 0 or 1 for each layer"),
        (
            {"layer_types": ["sliding_attention"] * 6, "sliding_window": 1},
            "sliding_window=1 must be at least 2 in a decoder, whose cache keeps one token less",
        ),
        ({"norm_bias": False}, "norm_bias=False needs norm_type='layer_norm', got 'rms_norm', which has none"),
        ({"qk_norm_across_heads": True}, "qk_norm_across_heads=True needs use_qk_norm=True"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0 must be above 0"),
        ({"logits_scaling": -1.0}, "logits_scaling=-1.0 must be above 0"),
        ({"mup_base_width": 0}, "mup_base_width=0 must be at least 1"),
        ({"initialization": "zeros"}, "initialization='zeros' must be one of"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1 must be at least 0 and below 1"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0 must be above 0"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"intermediate_size": -4}, "intermediate_size=-4 must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0 must be at least 1"),
        ({"pad_token_id": 32000}, "pad_token_id=32000 must lie within the vocabulary, 0 to 31999"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id=\[2, -1\] must lie within the vocabulary"),
        ({"position_offset": 2}, "position_offset=2 needs position_embedding_type='sinusoidal' or .*, got 'rotary'"),
        (
            {"share_relative_attention_bias": False},
            "share_relative_attention_bias=False needs .*'learned_relative_bias' or 'relative_bias', got 'rotary'",
        ),
        ({"first_norm": False, "norm_position": "post"}, "first_norm=False needs norms before .*norm_position='post'"),
        (
            {"position_embedding_type": "sinusoidal_tensor2tensor", "hidden_size": 7, "num_attention_heads": 1},
            "hidden_size=7 must be even and at least 4 for position_embedding_type='sinusoidal_tensor2tensor'",
        ),
        ({"position_offset": -1}, "position_offset=-1 must be at least 0"),
        ({"rope_parameters": {"rope_type": "yarm"}}, "rope_type='yarm' must be 'default' or in"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta must be above 0"),
        ({"rope_parameters": {"rope_theta": 10**30}}, "numbers finite and below 2"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "numbers finite and below 2"),
    ],
)
def test_impossible_values_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ScratchDecoderConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decoder_vocab_size": 9}, "share_encoder_decoder_embeddings=True needs decoder_vocab_size=9 to equal"),
        ({"decoder_layers": 0}, "decoder_layers=0 must be at least 1"),
        ({"encoder_layer_types": ["full_attention"]}, "encoder_layer_types=.* must have encoder_layers=6 entries"),
        ({"decoder_layer_types": ["sliding_attention"] * 6}, "decoder_layer_types=.* needs sliding_window, in tokens"),
        ({"decoder_embedding_norm_first": True}, "decoder_embedding_norm_first=True needs embedding_norm=True"),
        ({"pad_token_id": None, "bos_token_id": None}, "decoder_start_token_id=None: give it"),
        (
            {"decoder_vocab_size": 9, "share_encoder_decoder_embeddings": False, "decoder_start_token_id": 9},
            "decoder_start_token_id=9 must lie within the vocabulary, 0 to 8",
        ),
    ],
)
def test_impossible_translators_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ScratchSeq2SeqConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"type_vocab_size": -1}, "type_vocab_size=-1 must be at least 0"),
        ({"pooler_act": "silu"}, "pooler_act='silu' must be one of None, 'tanh', 'relu', 'gelu'"),
    ],
)
def test_impossible_encoders_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ScratchEncoderConfig(**wrong)


def test_logits_shrink_with_the_width_beyond_that_of_the_base():
    assert ScratchDecoderConfig(hidden_size=512, mup_base_width=128).logits_scaling == 4.0
    assert ScratchDecoderConfig(hidden_size=512, mup_base_width=128, logits_scaling=3.0).logits_scaling == 3.0
    assert ScratchDecoderConfig(hidden_size=512).logits_scaling == 1.0


def test_all_complaints_come_in_one_message():
    with pytest.raises(ValueError) as error:
        ScratchEncoderConfig(num_attention_heads=3, dropout=2, hidden_act="tan")
    assert all(name in str(error.value) for name in ("num_attention_heads=3", "dropout=2", "hidden_act='tan'"))


def test_a_changed_configuration_is_checked_again_when_a_model_is_built():
    config = tiny.config("encoder")
    config.hidden_act = "tan"
    with pytest.raises(ValueError, match="hidden_act='tan'"):
        ScratchEncoderModel(config)


def test_kinds_of_layers_follow_their_number_while_they_are_one():
    config = ScratchDecoderConfig(num_hidden_layers=2)
    config.num_hidden_layers = 3
    assert config.layer_types == ["full_attention"] * 3 and config.no_rope_layers is None
    assert ScratchDecoderConfig(num_hidden_layers=2, no_rope_layers=[1, 1]).no_rope_layers is None
    config = ScratchSeq2SeqConfig(encoder_layers=2, decoder_layers=2)
    config.decoder_layers, config.num_hidden_layers = 3, 1  # the latter by its name in transformers
    assert config.decoder_layer_types == ["full_attention"] * 3 and config.encoder_layer_types == ["full_attention"]
    mixed = ["full_attention", "sliding_attention"]
    config = ScratchDecoderConfig(num_hidden_layers=2, layer_types=mixed, sliding_window=3)
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="layer_types=.* must have num_hidden_layers=3 entries"):
        config.validate_architecture()


def test_a_translator_has_no_parallel_layers():
    with pytest.raises(ValueError, match="norm_position='parallel' leaves no place for attention to the source"):
        ScratchSeq2SeqConfig(norm_position="parallel")


def test_capped_scores_are_not_for_torchs_kernels():
    """Without a wish there is another backend; a wish is refused."""
    options = {"attn_logit_softcapping": 5.0}
    assert tiny.model(ScratchEncoderModel, **options).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="does not support .*scaled_dot_product_attention"):
        tiny.model(ScratchEncoderModel, **options, attn_implementation="sdpa")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_unknown_keys_are_refused(family):
    with pytest.raises(ValueError, match="hidden_sise=8 .* did you mean 'hidden_size'"):
        tiny.config(family, hidden_sise=8)
    with pytest.raises(ValueError, match="colour='red' is not a field of"):
        tiny.config(family, colour="red")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_other_programs_write_in_a_saved_file_is_kept(family, tmp_path):
    config = tiny.config(family, num_labels=3, torch_dtype="float16")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "colour": "red"}))
    assert type(config).from_pretrained(tmp_path).colour == "red"
    (tmp_path / "config.json").write_text(json.dumps({**saved, "hidden_sise": 8}))
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        type(config).from_pretrained(tmp_path)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_saved_and_loaded_configurations_are_equal(family, tmp_path):
    config = tiny.config(family, head_dim=6, value_head_dim=10, id2label={0: "no", 1: "yes", 2: "perhaps"})
    config.save_pretrained(tmp_path)
    loaded = type(config).from_pretrained(tmp_path)
    assert loaded.to_dict() | {"_name_or_path": None} == config.to_dict() | {"_name_or_path": None}
    assert loaded.auto_map["AutoModel"].startswith(f"modeling_scratch_{family}.")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_configuration_saved_alone_brings_the_code_that_it_names(family, tmp_path):
    """As programs do that put a model together from the weights of others."""
    model = next(model for model in tiny.HEADS if tiny.family(model) == family)
    tiny.model(model).save_pretrained(tmp_path / "model")
    tiny.config(family).save_pretrained(tmp_path / "alone" / "in a new folder")
    code = {file.name: file.read_text() for file in (tmp_path / "model").glob("*.py")}
    assert {f"{name.split('.')[0]}.py" for name in tiny.config(family).auto_map.values()} <= code.keys()
    assert {file.name: file.read_text() for file in (tmp_path / "alone").rglob("*.py")} == code


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("layers", [(1, 2), (3, 1), (2, 2)])
def test_a_side_of_a_translators_configuration_is_as_transformers_makes_it(side, layers):
    """Which copies all that a configuration holds, twice: a third of the time before the first token."""
    config = ScratchSeq2SeqConfig(
        vocab_size=30, decoder_vocab_size=40, share_encoder_decoder_embeddings=False, tie_word_embeddings=False,
        encoder_layers=layers[0], decoder_layers=layers[1], sliding_window=4, pad_token_id=0, bos_token_id=1,
        decoder_layer_types=["sliding_attention"] * layers[1],
    )  # fmt: skip
    before = config.to_dict()
    ours, theirs = config.get_text_config(**{side: True}), PreTrainedConfig.get_text_config(config, **{side: True})
    skipped = (
        {"encoder_layer_types"} if side == "decoder" else set()
    )  # of the other side: theirs has the last that was set
    assert {k: v for k, v in vars(ours).items() if k not in skipped} == {
        k: v for k, v in vars(theirs).items() if k not in skipped
    }
    if side == "decoder":  # of which transformers asks the same again
        assert ours.get_text_config().vocab_size == 40
    ours.layer_types, ours.num_hidden_layers = ["full_attention"], 1
    assert config.to_dict() == before, "what is asked for is the caller's own"
