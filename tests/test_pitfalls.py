"""Where native models, or custom ones made the usual way, go wrong in silence, and ours do not.

Each pitfall has tests that ours is right, and tests, called `test_native_...`, that the others still are not: once one
of these fails, transformers has mended the pitfall and README must claim less.
"""

import copy
import gc
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_scratch_transformer as scratch
from hf_scratch_transformer.configuration_scratch import POSITIONS

from . import tiny

MENDED = "transformers has mended this: relax the claim in README"
PROBLEMS = ("single_label_classification", "regression", "multi_label_classification")

BERT = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NATIVE_SIZES: dict[str, dict[str, Any]] = {
    "Bert": BERT | NO_DROPOUT | {"max_position_embeddings": 32, "initializer_range": 0.2},
    "ModernBert": BERT
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "DistilBert": {"vocab_size": 40, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "initializer_range": 0.2}
    | {"max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "Llama": BERT | {"pad_token_id": 0, "initializer_range": 0.2},
    "GPT2": {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.2}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "Bart": {"vocab_size": 40, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    | {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None},
    "T5": {"vocab_size": 40, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    | {"decoder_start_token_id": 0},
}


class UnlistedForCausalLM(transformers.LlamaForCausalLM):
    """A causal language model of somebody's own, which no table of transformers lists."""


class InPlaceForCausalLM(transformers.LlamaForCausalLM):
    """A model that initialises in place, as the code beside many checkpoints on the Hub does."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)


def native(name: str, **overrides: Any) -> PreTrainedModel:
    """A tiny native model in evaluation mode: `native("BertForMaskedLM")`."""
    model_class = getattr(transformers, name)
    family = name.partition("For")[0].removesuffix("Model")
    torch.manual_seed(0)
    return model_class(model_class.config_class(**NATIVE_SIZES[family] | overrides)).eval()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def run(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    """The hidden states of a backbone; an encoder-decoder is fed its source as its target too."""
    targets = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **targets, **kwargs).last_hidden_state


# 1 and 11: gradient accumulation


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """Every `Trainer.train` collects garbage, which takes most of its time unless what was imported is left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def trainer(model: PreTrainedModel, folder: Path, rows: list[dict[str, Tensor]] | None = None, **arguments) -> Trainer:
    """Plain gradient descent at rate 1, one step."""
    settings = TrainingArguments(
        output_dir=str(folder),
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    return Trainer(model, settings, train_dataset=rows)


def gradient_in_trainer(model: PreTrainedModel, folder: Path, micro_batches: int) -> Tensor:
    """All gradients of 8 rows, unequally long, by how far one step of `Trainer` moves the weights."""
    inputs = tiny.inputs(model, batch=8)
    batch = inputs | tiny.labels(model, inputs)
    rows = [{name: value[index] for name, value in batch.items()} for index in range(8)]
    trained = copy.deepcopy(model)
    arguments = {"gradient_accumulation_steps": micro_batches, "per_device_train_batch_size": 8 // micro_batches}
    trainer(trained, folder, rows, **arguments).train()
    pairs = zip(model.parameters(), trained.parameters(), strict=True)
    return torch.cat([(before - after).detach().flatten() for before, after in pairs])


def with_problems(heads: Any) -> list[Any]:
    """(head, problem type): each problem type for heads that classify sequences, none for the others."""
    pairs = []
    for head in heads:
        name = head if isinstance(head, str) else head.__name__
        problems = PROBLEMS if name.endswith("SequenceClassification") else (None,)
        pairs += [pytest.param(head, problem, id=f"{name}-{problem}") for problem in problems]
    return pairs


@pytest.mark.parametrize(("head", "problem"), with_problems(tiny.HEADS))
def test_accumulated_gradients_equal_those_of_one_large_batch(head, problem, tmp_path):
    model = tiny.model(head, problem_type=problem, num_labels=3)
    assert_same(gradient_in_trainer(model, tmp_path, 4), gradient_in_trainer(model, tmp_path, 1))


@pytest.mark.parametrize(
    ("name", "problem"),
    with_problems(
        [
            "BartForConditionalGeneration",
            "T5ForConditionalGeneration",
            "DistilBertForMaskedLM",
            "BertForMaskedLM",
            "DistilBertForSequenceClassification",
            "BertForSequenceClassification",
            "ModernBertForSequenceClassification",
            "LlamaForSequenceClassification",
            "DistilBertForTokenClassification",
            "BertForTokenClassification",
            "ModernBertForTokenClassification",
            "LlamaForTokenClassification",
            "DistilBertForMultipleChoice",
            "BertForMultipleChoice",
        ]
    ),
)
def test_native_heads_multiply_gradients_by_accumulation_steps(name, problem, tmp_path):
    model = native(name, problem_type=problem, num_labels=3)
    accumulated, whole = gradient_in_trainer(model, tmp_path, 4), gradient_in_trainer(model, tmp_path, 1)
    ratio = float(accumulated @ whole / (whole @ whole))
    # Not exactly 4 where micro-batches hold unequally many targets: each then weighs the same.
    assert 3.2 < ratio < 4.8, MENDED


def test_generic_heads_are_among_them():
    assert issubclass(transformers.LlamaForSequenceClassification, GenericForSequenceClassification)
    assert issubclass(transformers.LlamaForTokenClassification, GenericForTokenClassification)


# 2: label smoothing in the Trainer


def smoothed_loss_in_trainer(model: PreTrainedModel, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of `Trainer`, the logits, and the labels."""
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)["labels"]
    if model.config.is_encoder_decoder:  # as the collator for such models does
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    smoothing = trainer(model, folder, label_smoothing_factor=0.1)
    with torch.no_grad():
        return smoothing.compute_loss(model, inputs | {"labels": labels}), model(**inputs).logits, labels


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with 0.9 of the probability on the label and 0.1 spread over the vocabulary."""
    log_probabilities = logits[labels != -100].log_softmax(-1)
    of_label = log_probabilities.gather(-1, labels[labels != -100][:, None])
    return -(0.9 * of_label[:, 0] + 0.1 * log_probabilities.mean(-1)).mean()


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_trainer_smooths_the_labels_that_the_loss_is_about(head, tmp_path):
    loss, logits, labels = smoothed_loss_in_trainer(tiny.model(head), tmp_path)
    if tiny.task(head) == "CausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    assert_same(loss, smoothed_loss(logits, labels))


def test_native_trainer_smooths_unshifted_labels_of_a_causal_model_of_ones_own(tmp_path):
    model = UnlistedForCausalLM(native("LlamaForCausalLM").config)
    loss, logits, labels = smoothed_loss_in_trainer(model, tmp_path)
    torch.testing.assert_close(loss, smoothed_loss(logits, labels), msg=MENDED)
    assert (loss - smoothed_loss(logits[:, :-1], labels[:, 1:])).abs() > 1e-3


# 3: a complete `auto_map`


@pytest.mark.parametrize("saved", tiny.MODELS)
def test_any_checkpoint_opens_with_every_auto_class_of_its_family(saved, tmp_path):
    tiny.model(saved).save_pretrained(tmp_path)
    listed = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    for opened in (model for model in tiny.MODELS if tiny.family(model) == tiny.family(saved)):
        auto_class = tiny.auto_class(opened)
        assert listed[auto_class].endswith(f".{opened.__name__}")
        assert type(getattr(transformers, auto_class).from_pretrained(tmp_path)) is opened
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is saved.config_class


def test_native_auto_map_lists_only_the_saved_class(tmp_path):
    UnlistedForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    UnlistedForCausalLM(native("LlamaForCausalLM").config).save_pretrained(tmp_path)
    listed = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert list(listed) == ["AutoModelForCausalLM"], MENDED


# 4: packed documents

# Two rows of 12 tokens: the lengths of the documents in each.
DOCUMENTS = ((4, 3, 5), (1, 11))


def packing_error(model: PreTrainedModel, **kwargs: Any) -> float:
    """How far the hidden states of packed documents are from those of each document by itself."""
    ids = tiny.tokens(model.config.vocab_size, 2, 12)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS])
    with torch.no_grad():
        packed = run(model, ids, position_ids=positions, **kwargs)
        alone = [
            torch.cat([run(model, document, **kwargs) for document in row[None].split(lengths, dim=1)], dim=1)
            for row, lengths in zip(ids, DOCUMENTS, strict=True)
        ]
    return float((packed - torch.cat(alone)).abs().max())


@pytest.mark.parametrize(
    ("positions", "implementation"),
    [
        *itertools.product(POSITIONS, ["eager", "sdpa"]),
        pytest.param("rotary", "flex_attention", marks=pytest.mark.slow),  # it compiles, for half a minute
    ],
)
@pytest.mark.parametrize(
    ("backbone", "arguments"),
    [
        (scratch.ScratchEncoderModel, {}),
        (scratch.ScratchDecoderModel, {"use_cache": True}),
        (scratch.ScratchDecoderModel, {"use_cache": False}),
    ],
)
def test_packed_documents_do_not_see_each_other(backbone, arguments, positions, implementation):
    model = tiny.model(backbone, position_embedding_type=positions)
    model.set_attn_implementation(implementation)
    assert packing_error(model, **arguments) < 1e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("BertModel", {}),
        ("DistilBertModel", {}),
        ("ModernBertModel", {}),
        ("LlamaModel", {"use_cache": True}),
        ("GPT2Model", {"use_cache": True}),
    ],
)
def test_native_packed_documents_leak(name, arguments, implementation):
    model = native(name)
    model.set_attn_implementation(implementation)
    assert packing_error(model, **arguments) > 1e-2, MENDED


# 5: attention weights at call time


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("model_class", tiny.MODELS)
def test_attention_weights_are_returned_when_asked_for(model_class, padding):
    model = tiny.model(model_class)
    assert model.config._attn_implementation == "sdpa"
    inputs = tiny.inputs(model, padding=padding)
    rows, real = len(inputs["input_ids"].flatten(0, -2)), inputs["attention_mask"].bool()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"], real = tiny.tokens(40, rows, 5), torch.ones(rows, 5).bool()
        config = model.config
        expected = {
            "encoder_attentions": (config.encoder_layers, 7, 7),
            "decoder_attentions": (config.decoder_layers, 5, 5),
            "cross_attentions": (config.decoder_layers, 5, 7),
        }
    else:
        expected = {"attentions": (model.config.num_hidden_layers, 7, 7)}
    plain, asked = model(**inputs), model(**inputs, output_attentions=True)
    for name, (layers, length, source_length) in expected.items():
        assert plain.get(name) is None
        assert len(asked[name]) == layers
        for weights in asked[name]:
            assert weights.shape == (rows, model.config.num_attention_heads, length, source_length)
            assert_same(weights.sum(-1), torch.ones(weights.shape[:-1]))
    of_tokens = plain[0].shape[: real.ndim] == real.shape
    assert_same(*(output[0][real] if of_tokens else output[0] for output in (asked, plain)))


@pytest.mark.parametrize("name", ["DistilBertModel", "BertModel", "LlamaModel"])
def test_native_attention_weights_are_not_returned_under_sdpa(name):
    model = native(name, attn_implementation="sdpa")
    assert run(model, tiny.tokens(40, 2, 5)).shape == (2, 5, 32)
    assert model(tiny.tokens(40, 2, 5), output_attentions=True).attentions == (), MENDED


# 6: misspelt names, over-length input

MISSPELT = ("atention_mask", "attention_masks", "positon_ids", "input_embeds", "output_attention")


@pytest.mark.parametrize("model_class", tiny.MODELS)
def test_misspelt_argument_is_refused(model_class):
    model = tiny.model(model_class)
    inputs = tiny.inputs(model, padding=None)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny.tokens(40, 3, 5)
    for name in MISSPELT + ("label", "num_item_in_batch") * (model_class in tiny.HEADS):
        with tiny.no_multiplication(), pytest.raises(TypeError, match=f"'{name}': did you mean"):
            model(**inputs, **{name: None})


@pytest.mark.parametrize("model_class", tiny.MODELS)
def test_names_of_serving_engines_and_kernels_pass_through(model_class):
    model = tiny.model(model_class)
    inputs = tiny.inputs(model)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny.tokens(40, 3, 5)
    assert torch.equal(model(**inputs, attention_instances=None, max_length_q=7)[0], model(**inputs)[0])


@pytest.mark.parametrize("name", ["BertModel", "DistilBertModel", "ModernBertModel", "LlamaModel", "BartModel"])
def test_native_misspelt_argument_is_swallowed(name):
    model, ids = native(name), tiny.tokens(40, 3, 7)
    for misspelt in ("atention_mask", "positon_ids"):
        assert torch.equal(run(model, ids, **{misspelt: tiny.padding_mask(3, 7)}), run(model, ids)), MENDED


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_unknown_configuration_key_is_refused(family):
    with pytest.raises(ValueError, match="hiden_size=64 is not a field .* did you mean 'hidden_size'"):
        tiny.config(family, hiden_size=64)
    with pytest.raises(ValueError, match="alibi_bias_max=8 is not a field of Scratch"):
        tiny.config(family, alibi_bias_max=8)


@pytest.mark.parametrize("name", ["BertConfig", "DistilBertConfig", "LlamaConfig", "BartConfig"])
def test_native_unknown_configuration_key_is_swallowed(name):
    assert getattr(transformers, name)(hiden_size=64).hiden_size == 64, MENDED


@pytest.mark.parametrize("model_class", tiny.MODELS)
def test_input_longer_than_the_table_of_positions_is_refused(model_class):
    model = tiny.model(model_class, position_embedding_type="learned", max_position_embeddings=8)
    inputs = tiny.inputs(model, length=9, padding=None)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny.tokens(40, 3, 5)
    with tiny.no_multiplication(), pytest.raises(ValueError, match="9 tokens .* max_position_embeddings=8"):
        model(**inputs)


def test_target_longer_than_the_table_of_positions_is_refused():
    model = tiny.model(scratch.ScratchSeq2SeqModel, position_embedding_type="learned", max_position_embeddings=8)
    with pytest.raises(ValueError, match="9 tokens .* max_position_embeddings=8"):
        model(tiny.tokens(40, 3, 5), decoder_input_ids=tiny.tokens(40, 3, 9))


@pytest.mark.parametrize("name", ["BertModel", "DistilBertModel", "GPT2Model"])
def test_native_over_length_input_dies_as_a_tensor_error(name):
    with pytest.raises(Exception, match="size|index out of range") as raised:
        run(native(name), tiny.tokens(40, 1, 40))
    assert raised.type in (RuntimeError, IndexError), MENDED


# 7: causal or not


def sees_later_tokens(model: PreTrainedModel, **kwargs: Any) -> bool:
    """Whether changing the last token changes what the first becomes."""
    ids = tiny.tokens(40, 1, 6)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] - tiny.FIRST_WORD + 1) % 37 + tiny.FIRST_WORD
    with torch.no_grad():
        first, second = (run(model, tokens, **kwargs)[0, 0] for tokens in (ids, changed))
    return not torch.allclose(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize(
    ("backbone", "expected"), [(scratch.ScratchEncoderModel, True), (scratch.ScratchDecoderModel, False)]
)
def test_no_keyword_changes_what_a_stack_sees(backbone, expected, is_causal, implementation):
    model = tiny.model(backbone)
    model.set_attn_implementation(implementation)
    try:
        seen = sees_later_tokens(model, is_causal=is_causal)
    except ValueError as error:
        assert "is_causal" in str(error) and is_causal is expected
    else:
        assert seen is expected


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_keyword_changes_what_a_translator_sees(is_causal):
    model = tiny.model(scratch.ScratchSeq2SeqModel)
    source, target = tiny.tokens(40, 2, 6), tiny.tokens(40, 2, 5, seed=1)
    plain = model(source, decoder_input_ids=target)
    for given in ({"input_ids": source}, {"encoder_outputs": (plain.encoder_last_hidden_state,)}):
        try:
            asked = model(**given, decoder_input_ids=target, is_causal=is_causal)
        except ValueError as error:
            assert "is_causal" in str(error)
        else:
            assert_same(asked.last_hidden_state, plain.last_hidden_state)


def test_a_note_in_a_saved_configuration_does_not_change_what_a_decoder_sees(tmp_path):
    tiny.model(scratch.ScratchDecoderModel).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_causal": False}))
    try:
        seen = sees_later_tokens(scratch.ScratchDecoderModel.from_pretrained(tmp_path))
    except ValueError as error:
        assert "is_causal" in str(error)
    else:
        assert not seen


def test_every_attention_says_whether_it_is_causal():
    model = tiny.model(scratch.ScratchSeq2SeqModel)
    causal = {name: module.is_causal for name, module in model.named_modules() if name.endswith("_attn")}
    assert causal == {name: name.startswith("decoder") and name.endswith("self_attn") for name in causal}
    assert len(causal) == 5


@pytest.mark.parametrize("name", ["BertModel", "DistilBertModel", "ModernBertModel"])
def test_native_encoder_is_made_causal_by_a_keyword(name):
    model = native(name, attn_implementation="sdpa")
    assert sees_later_tokens(model)
    assert not sees_later_tokens(model, is_causal=True), MENDED


def test_native_sdpa_takes_a_module_that_does_not_say_for_causal():
    query, key, value = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    changed = value.clone()
    changed[:, :, -1] += 1
    module = SimpleNamespace(num_key_value_groups=1, training=False)
    outputs = [ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, x, None)[0][:, 0] for x in (value, changed)]
    assert torch.equal(*outputs), MENDED


# 8: initialisation leaves loaded weights alone

INITIALIZATIONS = ("xavier_uniform", "normal", "normal_zero_output")


def differing(saved: dict[str, Tensor], model: PreTrainedModel) -> list[str]:
    """Names of the tensors in both, with or without the backbone's prefix, that are not equal bit by bit."""
    loaded = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    saved = {name.removeprefix("model."): value for name, value in saved.items()}
    assert saved.keys() & loaded.keys()
    return [name for name, value in saved.items() if name in loaded and not torch.equal(value, loaded[name])]


def make_distinct(model: PreTrainedModel) -> dict[str, Tensor]:
    """Give every parameter, the constant ones too, values that no initialisation would; return the weights."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) + 1
    return model.state_dict()


@pytest.fixture
def remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A place of the test's own where transformers puts the modules that it finds beside a checkpoint."""

    def forget_modules() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    folder = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.syspath_prepend(folder)
    forget_modules()
    yield
    forget_modules()


def save_backbone_of(head: type[PreTrainedModel], folder: Path, **overrides: Any) -> dict[str, Tensor]:
    (backbone,) = (model for model in tiny.BACKBONES if tiny.family(model) == tiny.family(head))
    model = tiny.model(backbone, **overrides)
    weights = make_distinct(model)
    model.save_pretrained(folder)
    return weights


def assert_nothing_is_erased(weights: dict[str, Tensor], model: PreTrainedModel) -> None:
    assert differing(weights, model) == []
    # A second round of initialisation, as some training scripts and parallel engines start one.
    model.initialize_weights()
    model.apply(model._init_weights)
    assert differing(weights, model) == []


@pytest.mark.parametrize("initialization", INITIALIZATIONS)
@pytest.mark.parametrize("opened", tiny.MODELS)
def test_loading_keeps_every_bit_of_the_weights_in_the_file(opened, initialization, tmp_path):
    weights = save_backbone_of(opened, tmp_path, initialization=initialization)
    assert_nothing_is_erased(weights, opened.from_pretrained(tmp_path))


@pytest.mark.parametrize("opened", tiny.MODELS)
def test_loading_with_the_code_beside_the_file_keeps_every_bit_too(opened, tmp_path, remote_code):
    weights = save_backbone_of(opened, tmp_path)
    remote = get_class_from_dynamic_module(opened.config_class._auto_map[tiny.auto_class(opened)], str(tmp_path))
    assert remote.__module__.startswith("transformers_modules.")
    assert_nothing_is_erased(weights, remote.from_pretrained(tmp_path))


@pytest.mark.parametrize("initialization", INITIALIZATIONS)
def test_initialisation_writes_what_the_file_did_not_hold(initialization, tmp_path):
    tiny.model(scratch.ScratchEncoderModel, initialization=initialization).save_pretrained(tmp_path)
    head, info = scratch.ScratchEncoderForTokenClassification.from_pretrained(
        tmp_path, num_labels=7, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert head.classifier.weight.std() > 0.05
    assert not head.classifier.bias.any()


def test_native_in_place_initialisation_erases_loaded_weights(tmp_path):
    model = native("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    loaded = InPlaceForCausalLM.from_pretrained(tmp_path)
    loaded.apply(loaded._init_weights)
    assert len(differing(model.state_dict(), loaded)) == 2 * 7 + 1, MENDED  # every matrix of the layers, and the head
