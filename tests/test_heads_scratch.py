"""Every head: its shapes, its loss written out, and what surrounds a head: padding, tying, resizing, saving."""

from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedModel

import hf_scratch_transformer as scratch
from hf_scratch_transformer.configuration_scratch import POSITIONS

from . import tiny

TRANSLATOR = scratch.ScratchSeq2SeqForConditionalGeneration
CLASSIFIERS = tuple(head for head in tiny.HEADS if head not in tiny.LANGUAGE_MODELS)
TOKEN_HEADS = (*tiny.LANGUAGE_MODELS, *(head for head in CLASSIFIERS if tiny.task(head) == "TokenClassification"))
SEQUENCE_CLASSIFIERS = tuple(head for head in CLASSIFIERS if tiny.task(head) == "SequenceClassification")
APART = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50}
VOCABULARIES = {
    "shared and tied": {},
    "shared, head apart": {"tie_word_embeddings": False},
    "apart, head tied": APART,
    "all apart": APART | {"tie_word_embeddings": False},
}

# (head, options): every kind of loss there is.
LOSSES = [
    pytest.param(head, options, id="-".join([head.__name__, *map(str, options.values())]))
    for head in tiny.HEADS
    for options in (
        [
            {"problem_type": "single_label_classification", "num_labels": 3},
            {"problem_type": "multi_label_classification", "num_labels": 3},
            {"problem_type": "regression", "num_labels": 3},
            {"problem_type": "regression", "num_labels": 1},
        ]
        if head in SEQUENCE_CLASSIFIERS
        else [{}]
    )
]


def forward_inputs(model: PreTrainedModel, **kwargs: Any) -> dict[str, Tensor]:
    """What a forward pass without labels takes."""
    inputs = tiny.inputs(model, **kwargs)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny.tokens(model.config.decoder_vocab_size, len(inputs["input_ids"]), 5)
    return inputs


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int = -100, smoothing: float = 0.0) -> tuple[Tensor, int]:
    """Sum and number of the losses of targets other than -100, one at a time."""
    losses = []
    for row, target in zip(logits.flatten(0, -2), targets.flatten().tolist(), strict=True):
        if target != ignored:
            surprises = row.exp().sum().log() - row  # in nats
            losses.append((1 - smoothing) * surprises[target] + smoothing * surprises.sum() / len(row))
    return torch.stack(losses).sum(), len(losses)


def written_out_loss(
    model: PreTrainedModel, inputs: dict[str, Tensor], labels: dict[str, Tensor], smoothing: float = 0.0
) -> tuple[Tensor, int]:
    """The summed loss of any head and the number of its targets, from logits computed without labels."""
    if model.config.is_encoder_decoder:
        target = labels["labels"]
        start = torch.full((len(target), 1), model.config.decoder_start_token_id)
        inputs = inputs | {"decoder_input_ids": torch.cat([start, target[:, :-1].clamp(min=0)], dim=1)}
    outputs = model(**inputs)
    if tiny.task(type(model)) == "QuestionAnswering":
        length = outputs.start_logits.shape[1]
        (start, count), (end, _) = (
            cross_entropy(logits, positions.clamp(max=length), ignored=length)
            for logits, positions in zip(outputs[:2], labels.values(), strict=True)
        )
        return (start + end) / 2, count
    logits, targets = outputs.logits, labels["labels"]
    if model.config.problem_type == "regression":
        return ((logits - targets.reshape(logits.shape)) ** 2).sum(), logits.numel()
    if model.config.problem_type == "multi_label_classification":
        chances = 1 / (1 + (-logits).exp())
        return -(targets * chances.log() + (1 - targets) * (1 - chances).log()).sum(), logits.numel()
    if tiny.task(type(model)) == "CausalLM":
        logits, targets = logits[:, :-1], targets[:, 1:]
    return cross_entropy(logits, targets, smoothing=smoothing)


# Shapes and losses


def test_the_masked_lm_head_of_bert_is_the_formula():
    model = tiny.model(scratch.ScratchEncoderForMaskedLM, lm_head_transform=True, lm_head_bias=True, hidden_act="relu")
    torch.nn.init.normal_(model.lm_head.bias)
    inputs = tiny.inputs(model)
    states = model.model(**inputs).last_hidden_state
    states = model.lm_transform.norm(torch.relu(model.lm_transform.dense(states)))
    table = model.model.embeddings.word_embeddings.weight
    assert_close(model(**inputs).logits, states @ table.T + model.lm_head.bias)
    labels = tiny.labels(model, inputs)
    assert_close(model(**inputs, **labels, loss_only=True).loss, model(**inputs, **labels).loss)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("head", ["SequenceClassification", "MultipleChoice"])
def test_whole_texts_are_classified_by_the_pooler(head, side):
    model = tiny.model(getattr(scratch, f"ScratchEncoderFor{head}"), pooler_act="relu", classifier_bias=False)
    inputs = tiny.inputs(model, padding=side)
    rows = {name: value.reshape(-1, value.shape[-1]) for name, value in inputs.items()}
    expected = getattr(model, model.head_name)(model.model(**rows).pooler_output)
    logits = model(**inputs).logits
    assert_close(logits, expected.view(logits.shape))
    assert getattr(model, model.head_name).bias is None


def test_token_types_of_choices_are_told_apart():
    model = tiny.model(scratch.ScratchEncoderForMultipleChoice, type_vocab_size=2)
    inputs = tiny.inputs(model)
    types = (torch.arange(inputs["input_ids"].shape[-1]) > 2).long().expand_as(inputs["input_ids"])
    logits = model(**inputs, token_type_ids=types).logits
    assert not torch.allclose(logits, model(**inputs).logits, atol=1e-3)
    swapped = {name: value.flip(1) for name, value in (inputs | {"token_type_ids": types}).items()}
    assert_close(model(**swapped).logits, logits.flip(1))


def test_heads_for_single_tokens_have_no_pooler():
    for head in tiny.HEADS:
        if tiny.family(head) == "encoder":
            pooled = tiny.task(head) in ("SequenceClassification", "MultipleChoice")
            assert any("pooler" in name for name in tiny.model(head, pooler_act="tanh").state_dict()) == pooled, head


@pytest.mark.parametrize("head", tiny.HEADS)
def test_shapes(head):
    model = tiny.model(head, num_labels=3)
    outputs = model(**forward_inputs(model))
    assert outputs.loss is None
    if tiny.task(head) == "QuestionAnswering":
        assert outputs.start_logits.shape == outputs.end_logits.shape == (3, 7)
        return
    expected = {
        "MaskedLM": (3, 7, 40),
        "CausalLM": (3, 7, 40),
        "ConditionalGeneration": (3, 5, 40),
        "SequenceClassification": (3, 3),
        "TokenClassification": (3, 7, 3),
        "MultipleChoice": (3, 2),
    }
    assert outputs.logits.shape == expected[tiny.task(head)]


@pytest.mark.parametrize(("head", "options"), LOSSES)
def test_loss_is_the_formula(head, options):
    model = tiny.model(head, **options)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)
    total, count = written_out_loss(model, inputs, labels)
    assert_close(model(**inputs, **labels).loss, total / count)


@pytest.mark.parametrize("count_type", [int, torch.tensor])
@pytest.mark.parametrize(("head", "options"), LOSSES)
def test_num_items_in_batch_divides_the_summed_loss(head, options, count_type):
    model = tiny.model(head, **options)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)
    total, _ = written_out_loss(model, inputs, labels)
    assert_close(model(**inputs, **labels, num_items_in_batch=count_type(100)).loss, total / 100)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_items_in_batch", [None, 100])
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_the_head_on_real_targets_alone_gives_the_same_loss_and_gradients(head, num_items_in_batch, smoothing):
    model = tiny.model(head)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)
    total, count = written_out_loss(model, inputs, labels, smoothing)
    gradients = []
    for loss_only in (False, True):
        model.zero_grad()
        outputs = model(
            **inputs,
            **labels,
            num_items_in_batch=num_items_in_batch,
            label_smoothing=smoothing,
            loss_only=loss_only,
        )
        assert (outputs.logits is None) is loss_only
        assert_close(outputs.loss, total / (num_items_in_batch or count))
        outputs.loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(gradient is not None for gradient in gradients[0])
    for whole, lean in zip(*gradients, strict=True):
        assert_close(lean, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_the_head_on_real_targets_alone_multiplies_nothing_else(head):
    model = tiny.model(head)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)
    _, count = written_out_loss(model, inputs, labels)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[:-1].numel()))
    model(**inputs, **labels, loss_only=True)
    assert rows == [count]


@pytest.mark.parametrize(
    ("head", "arguments"),
    [(head, {}) for head in tiny.HEADS]
    + [(head, {"loss_only": True}) for head in tiny.LANGUAGE_MODELS]
    + [(head, {"label_smoothing": 0.1}) for head in tiny.LANGUAGE_MODELS],
)
def test_a_batch_without_a_target_has_no_loss_and_no_gradient(head, arguments):
    model = tiny.model(head)
    inputs = tiny.inputs(model)
    ignored = 7 if tiny.task(head) == "QuestionAnswering" else -100
    labels = {name: torch.full_like(value, ignored) for name, value in tiny.labels(model, inputs).items()}
    loss = model(**inputs, **labels, **arguments).loss
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_labels_shifted_by_the_caller():
    model = tiny.model(scratch.ScratchDecoderForCausalLM)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)["labels"]
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)
    assert_close(model(**inputs, shift_labels=shifted).loss, model(**inputs, labels=labels).loss)


def test_logits_to_keep():
    model = tiny.model(scratch.ScratchDecoderForCausalLM)
    inputs = tiny.inputs(model)
    logits = model(**inputs).logits
    assert_close(model(**inputs, logits_to_keep=2).logits, logits[:, -2:])
    assert_close(model(**inputs, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])


def test_teacher_forcing_starts_with_the_start_token_and_embeds_no_ignored_label():
    model = tiny.model(TRANSLATOR, decoder_start_token_id=2)
    labels = torch.tensor([[5, 6, 7, 2], [8, 2, -100, -100]])
    forced = model.prepare_decoder_input_ids_from_labels(labels)
    assert forced.tolist() == [[2, 5, 6, 7], [2, 8, 2, 0]]
    assert labels[1, 2] == -100  # the caller's own are left alone


def test_positions_of_answers_that_were_cut_off_are_left_out():
    model = tiny.model(scratch.ScratchEncoderForQuestionAnswering)
    inputs = tiny.inputs(model, padding=None)
    starts, ends = torch.tensor([1, 7, 30]), torch.tensor([3, 9, 31])
    first = {name: value[:1] for name, value in inputs.items()}
    assert_close(
        model(**inputs, start_positions=starts, end_positions=ends).loss,
        model(**first, start_positions=starts[:1], end_positions=ends[:1]).loss,
    )


@pytest.mark.parametrize(
    ("num_labels", "labels", "problem"),
    [
        (1, torch.tensor([0.5, 1.5, -2.0]), "regression"),
        (3, torch.tensor([0, 2, 1]), "single_label_classification"),
        (3, torch.eye(3), "multi_label_classification"),
    ],
)
@pytest.mark.parametrize("head", SEQUENCE_CLASSIFIERS)
def test_the_labels_show_the_problem(head, num_labels, labels, problem):
    model = tiny.model(head, num_labels=num_labels)
    model(**tiny.inputs(model), labels=labels)
    assert model.config.problem_type == problem


# Labels that do not fit


def longer(value: Tensor, dimension: int) -> Tensor:
    return torch.cat([value, value.narrow(dimension, 0, 1)], dim=dimension)


@pytest.mark.parametrize(("head", "options"), LOSSES)
def test_labels_of_another_length_are_refused_before_any_matrix_is_multiplied(head, options):
    model = tiny.model(head, **options)
    inputs = forward_inputs(model)
    for name, value in tiny.labels(model, tiny.inputs(model)).items():
        for dimension in range(value.ndim):
            with tiny.no_multiplication(), pytest.raises(ValueError, match=r"labels of shape|positions of shape"):
                model(**inputs, **{name: longer(value, dimension)})


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_hooks_of_the_backward_pass_hear_the_head_when_only_the_loss_is_asked_for(head):
    model, heard = tiny.model(head), []
    model.lm_head.register_full_backward_hook(lambda *_: heard.append("after"))
    model.lm_head.register_full_backward_pre_hook(lambda *_: heard.append("before"))
    inputs = tiny.inputs(model)
    model(**inputs, **tiny.labels(model, inputs), loss_only=True).loss.backward()
    assert heard == ["before", "after"]


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS, ids=tiny.family)
def test_hooks_of_all_modules_hear_the_head_when_only_the_loss_is_asked_for(head, kind):
    model, heard = tiny.model(head), []
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    register = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")
    handle = register(lambda module, *_: heard.append(module))
    try:
        loss = model(**inputs, loss_only=True).loss
        loss.backward()
    finally:
        handle.remove()
    assert heard.count(model.lm_head) == 1
    assert_close(model(**inputs, loss_only=True).loss, loss)
    assert heard.count(model.lm_head) == 1


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("head", TOKEN_HEADS, ids=lambda head: head.__name__)
def test_padding_predicts_nothing(head, loss_only):
    """Whatever labels say of it, and also where the first token after it is asked for."""
    model = tiny.model(head)
    inputs = tiny.inputs(model, padding="left")
    mask, is_shifted = inputs["attention_mask"], tiny.task(head) == "CausalLM"
    if head is TRANSLATOR:
        inputs |= {"decoder_attention_mask": mask, "decoder_input_ids": inputs["input_ids"].flip(1)}
    labels = torch.arange(mask.numel()).view(mask.shape) % 2
    # A decoder's token follows what predicts it; the first one follows nothing.
    predicted = labels.masked_fill((mask.roll(1, 1) if is_shifted else mask) == 0, -100)
    count = (predicted[:, is_shifted:] != -100).sum()
    summed = model(**inputs, labels=predicted, num_items_in_batch=1).loss
    assert_close(model(**inputs, labels=labels, num_items_in_batch=1, loss_only=loss_only).loss, summed)
    assert_close(model(**inputs, labels=labels, loss_only=loss_only).loss, summed / count)


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS, ids=tiny.family)
@pytest.mark.parametrize("loss_only", [False, True])
def test_labels_of_tokens_are_integers_of_any_size_and_of_two_dimensions(head, loss_only):
    """They may be a view, too."""
    model = tiny.model(head)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)["labels"]
    view = torch.cat([labels[:, :1], labels], dim=1)[:, 1:]
    assert not view.is_contiguous()
    same = (labels, labels.int(), view)
    expected, *losses = (model(**inputs, labels=each, loss_only=loss_only).loss for each in same)
    assert all(torch.equal(loss, expected) for loss in losses)
    whole = labels.clamp(min=0)  # unsigned ones have no room for -100
    expected, loss = (model(**inputs, labels=each, loss_only=loss_only).loss for each in (whole, whole.byte()))
    assert torch.equal(loss, expected)
    with tiny.no_multiplication(), pytest.raises(ValueError, match=r"labels of shape \(.*, 1\) do not fit"):
        model(**inputs, labels=labels[..., None], loss_only=loss_only)
    with tiny.no_multiplication(), pytest.raises(ValueError, match="do(es)? not fit .*labels|labels .*do not fit"):
        model(**inputs, labels=labels[0], loss_only=loss_only)
    for other in (labels.float(), labels > 0):
        with tiny.no_multiplication(), pytest.raises(ValueError, match="labels must be integers, got torch"):
            model(**inputs, labels=other, loss_only=loss_only)


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS, ids=tiny.family)
@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("share", [-0.2, 1.0, 1.5])
def test_label_smoothing_is_a_share(head, loss_only, share):
    """Each path had an answer of its own to others."""
    model = tiny.model(head)
    arguments = tiny.inputs(model)
    arguments |= tiny.labels(model, arguments) | {"loss_only": loss_only, "label_smoothing": share}
    with tiny.no_multiplication(), pytest.raises(ValueError, match=f"label_smoothing={share} must be at least 0"):
        model(**arguments)


def test_a_target_for_another_number_of_sources_is_refused_before_any_matrix_is_multiplied():
    model = tiny.model(TRANSLATOR)
    inputs = tiny.inputs(model)
    with tiny.no_multiplication(), pytest.raises(ValueError, match="4.*3|3.*4"):
        model(**inputs, labels=longer(tiny.labels(model, inputs)["labels"], 0))


def test_choices_without_their_dimension_are_refused():
    model = tiny.model(scratch.ScratchEncoderForMultipleChoice)
    with tiny.no_multiplication(), pytest.raises(ValueError, match=r"\(batch, choices, length\), got \(3, 7\)"):
        model(tiny.tokens(40, 3, 7))


# What goes in


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("head", CLASSIFIERS)
def test_left_and_right_padded_inputs_classify_the_same(head, positions):
    model = tiny.model(head, position_embedding_type=positions)
    right = tiny.inputs(model)
    real = right["attention_mask"].bool()
    on_the_left = real.flip(-1)
    left = {
        "input_ids": torch.zeros_like(right["input_ids"]).masked_scatter(on_the_left, right["input_ids"][real]),
        "attention_mask": on_the_left.long(),
    }
    for of_right, of_left in zip(model(**right).to_tuple(), model(**left).to_tuple(), strict=True):
        of_tokens = of_right.shape[:2] == real.shape and tiny.task(head) != "MultipleChoice"
        pair = (of_left[on_the_left], of_right[real]) if of_tokens else (of_left, of_right)
        assert_close(*pair, rtol=1e-5, atol=1e-5)


def test_a_decoder_finds_the_last_token_without_a_mask():
    model = tiny.model(scratch.ScratchDecoderForSequenceClassification)
    inputs = tiny.inputs(model)
    assert_close(model(inputs["input_ids"]).logits, model(**inputs).logits)
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    assert_close(model(inputs_embeds=embeddings).logits[0], model(**inputs).logits[0])  # the row without padding


def test_each_choice_is_scored_by_itself():
    model = tiny.model(scratch.ScratchEncoderForMultipleChoice)
    inputs = tiny.inputs(model)
    alone = [model(**{name: value[:, [choice]] for name, value in inputs.items()}).logits for choice in range(2)]
    assert_close(model(**inputs).logits, torch.cat(alone, dim=1))


@pytest.mark.parametrize("head", tiny.HEADS)
def test_embeddings_tuples_positional_arguments_and_token_types(head):
    model = tiny.model(head)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)
    expected = model(**inputs, **labels)
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    first = expected[0]
    assert_close(model(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"], **labels)[0], first)
    assert_close(model(inputs["input_ids"], inputs["attention_mask"], **labels)[0], first)
    assert_close(model(**inputs, **labels, token_type_ids=torch.zeros_like(inputs["input_ids"]))[0], first)
    as_tuple = model(**inputs, **labels, return_dict=False)
    assert isinstance(as_tuple, tuple) and len(as_tuple) == len(expected)
    assert_close(as_tuple[:2], expected[:2])


# Tied and resized vocabularies


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS[:2])
def test_the_head_is_the_token_table_or_not(head, tie):
    model = tiny.model(head, tie_word_embeddings=tie)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tie
    assert model.get_output_embeddings() is model.lm_head


@pytest.mark.parametrize("vocabularies", VOCABULARIES)
def test_the_three_tables_of_a_translator_are_one_or_not(vocabularies, tmp_path):
    options = VOCABULARIES[vocabularies]
    tiny.model(TRANSLATOR, **options).save_pretrained(tmp_path)
    for model in (tiny.model(TRANSLATOR, **options), TRANSLATOR.from_pretrained(tmp_path)):
        source, target = (
            stack.embeddings.word_embeddings.weight for stack in (model.model.encoder, model.model.decoder)
        )
        assert (source is target) is model.config.share_encoder_decoder_embeddings
        assert (model.lm_head.weight is target) is model.config.tie_word_embeddings
        assert model(**forward_inputs(model)).logits.shape[-1] == model.config.decoder_vocab_size


def assert_reopens_the_same(model: PreTrainedModel, folder: Any) -> None:
    """Saved and loaded, it holds the same bits, and the file has no tensor too few or too many."""
    model.save_pretrained(folder)
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    weights = loaded.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    inputs = forward_inputs(model)
    assert_close(loaded(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize("size", [45, 30])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_a_resized_vocabulary_keeps_its_old_tokens_and_takes_the_head_along(head, tie, size, tmp_path):
    model = tiny.model(head, tie_word_embeddings=tie)
    kept = min(size, 40)
    inputs = {name: ids.clamp(max=kept - 1) for name, ids in forward_inputs(model).items()}
    before = model(**inputs).logits
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
    assert model.lm_head.weight.shape == (size, 32)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tie
    assert_close(model(**inputs).logits[..., :kept], before[..., :kept])
    new = inputs | {name: torch.full_like(ids, size - 1) for name, ids in inputs.items() if name.endswith("ids")}
    labels = tiny.labels(model, inputs)  # drawn from the new vocabulary
    loss = model(**new).logits.sum() + model(input_ids=new["input_ids"], **labels).loss
    assert loss.isfinite()
    assert_reopens_the_same(model, tmp_path)


@pytest.mark.parametrize("backbone", tiny.BACKBONES)
def test_the_vocabulary_of_a_backbone_resizes_too(backbone, tmp_path):
    model = tiny.model(backbone)
    model.resize_token_embeddings(45)
    assert_reopens_the_same(model, tmp_path)
    if model.config.is_encoder_decoder:
        assert model.config.decoder_vocab_size == 45
        assert model.encoder.embeddings.word_embeddings.weight is model.decoder.embeddings.word_embeddings.weight


@pytest.mark.parametrize("vocabularies", ["apart, head tied", "all apart"])
def test_source_and_target_vocabularies_resize_apart(vocabularies, tmp_path):
    model = tiny.model(TRANSLATOR, **VOCABULARIES[vocabularies])
    inputs = forward_inputs(model)
    before = model(**inputs).logits

    def sizes() -> tuple[int, ...]:
        source, target = (stack.embeddings.word_embeddings for stack in (model.model.encoder, model.model.decoder))
        assert (model.config.vocab_size, model.config.decoder_vocab_size) == (len(source.weight), len(target.weight))
        return len(source.weight), len(target.weight), len(model.lm_head.weight)

    model.resize_token_embeddings(45)
    assert sizes() == (45, 50, 50)
    assert_close(model(**inputs).logits, before)
    model.resize_decoder_token_embeddings(60)
    assert sizes() == (45, 60, 60)
    assert_close(model(**inputs).logits[..., :50], before)
    tied = model.lm_head.weight is model.model.decoder.embeddings.word_embeddings.weight
    assert tied is model.config.tie_word_embeddings
    assert model(tiny.tokens(45, 2, 5), labels=torch.full((2, 4), 59)).loss.isfinite()
    assert_reopens_the_same(model, tmp_path)


def test_a_shared_vocabulary_has_no_target_side_to_resize():
    with pytest.raises(ValueError, match="share_encoder_decoder_embeddings=True: use resize_token_embeddings"):
        tiny.model(TRANSLATOR).resize_decoder_token_embeddings(60)


# From a backbone and back


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("head", tiny.HEADS)
def test_only_what_a_backbone_lacks_is_missing_from_its_checkpoint(head, tie, tmp_path):
    (backbone,) = (model for model in tiny.BACKBONES if tiny.family(model) == tiny.family(head))
    base = tiny.model(backbone, tie_word_embeddings=tie)
    base.save_pretrained(tmp_path / "base")
    model, info = head.from_pretrained(tmp_path / "base", output_loading_info=True)
    own = {name for name in model.state_dict() if not name.startswith("model.")}
    assert set(info.pop("missing_keys")) == (set() if head in tiny.LANGUAGE_MODELS and tie else own)
    assert not any(info.values()), info

    model.save_pretrained(tmp_path / "head")
    loaded, info = backbone.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert set(info.pop("unexpected_keys")) <= own
    assert not any(info.values()), info
    inputs = forward_inputs(base, padding="right")
    if tiny.task(head) == "MultipleChoice":
        assert model.model(**inputs)[0].shape == (3, 7, 32)
    assert torch.equal(loaded(**inputs)[0], base(**inputs)[0])


@pytest.mark.parametrize("head", tiny.HEADS)
def test_a_saved_head_opens_the_same_and_keeps_the_names_of_its_labels(head, tmp_path):
    names = {0: "no", 1: "perhaps", 2: "yes"}
    model = tiny.model(head, id2label=names, label2id={name: label for label, name in names.items()})
    assert_reopens_the_same(model, tmp_path)
    loaded = head.from_pretrained(tmp_path)
    assert loaded.config.id2label == names
    assert loaded.config.num_labels == 3
    assert type(loaded.config.get_text_config()) is head.config_class


# Learning


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_a_batch_is_learned_by_heart(head):
    model = tiny.model(head).train()
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = last = model(**inputs, **labels).loss.item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(**inputs, **labels).loss
        loss.backward()
        optimizer.step()
        last = loss.item()
    assert last < 0.1 * first


@pytest.mark.parametrize("head", CLASSIFIERS)
def test_dropout_before_the_classifier(head):
    model = tiny.model(head, classifier_dropout=0.5)
    inputs = tiny.inputs(model)
    assert torch.equal(model(**inputs)[0], model(**inputs)[0])
    model.train()
    assert not torch.equal(model(**inputs)[0], model(**inputs)[0])
    assert tiny.model(head, dropout=0.3).dropout.p == 0.3


@pytest.mark.parametrize("loss_only", [False, True])
def test_a_known_translation_fills_no_cache(loss_only):
    model = tiny.model(TRANSLATOR)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)["labels"]
    targets = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
    targets["decoder_inputs_embeds"] = model.get_input_embeddings()(targets["decoder_input_ids"])
    expected = model(**inputs, labels=labels)
    assert expected.past_key_values is None
    for name, target in targets.items():
        outputs = model(**inputs, labels=labels, **{name: target}, loss_only=loss_only)
        assert outputs.past_key_values is None
        assert_close(outputs.loss, expected.loss)
        assert model(**inputs, **{name: target}).past_key_values.get_seq_length() == target.shape[1]
        asked = model(**inputs, labels=labels, **{name: target}, loss_only=loss_only, use_cache=True)
        assert asked.past_key_values.get_seq_length() == target.shape[1]
        assert_close(asked.loss, expected.loss)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_source_mask_prepared_in_full_is_that_of_its_padding(kind, backend):
    """For its encoder and for its decoder, which learns as much from it without padding."""
    model = tiny.model(TRANSLATOR, attn_implementation=backend)
    inputs = tiny.inputs(model)
    labels = tiny.labels(model, inputs)["labels"]
    labels[:, 3:] = -100  # enough padding on the target's side to be left out
    prepared = inputs["attention_mask"].bool()[:, None, None]  # (B, 1, 1, S)
    if kind is torch.float32:
        prepared = torch.zeros(prepared.shape).masked_fill(~prepared, torch.finfo(kind).min)
    results = []
    for mask in (inputs["attention_mask"], prepared):
        for loss_only in (False, True):
            model.zero_grad()
            loss = model(inputs["input_ids"], mask, labels=labels, loss_only=loss_only).loss
            loss.backward()
            results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for other in results[1:]:
        assert_close(other, results[0], atol=1e-5, rtol=1e-5)
    loss = model(inputs["input_ids"], labels=labels, loss_only=True).loss
    assert not torch.allclose(loss, results[0][0], atol=1e-3)  # the mask did something


@pytest.mark.parametrize("head", tiny.HEADS, ids=lambda head: head.__name__)
def test_the_annotation_of_a_head_names_what_comes_out(head):
    """sentence-transformers reads it to learn what there is to ask for."""
    annotation = get_type_hints(head.forward)["return"]
    model = tiny.model(head)
    with torch.no_grad():
        outputs = model(**tiny.inputs(model) | tiny.labels(model, tiny.inputs(model)))
    assert type(outputs) in (get_args(annotation) or (annotation,))


PREFIXED = [head for head in CLASSIFIERS if tiny.task(head) != "MultipleChoice"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("head", PREFIXED, ids=lambda head: head.__name__)
@torch.no_grad()
def test_classifiers_see_a_prefix_in_a_cache(head, side):
    """As PEFT learns one; each row of a padded batch is as alone."""
    model = tiny.model(head, position_embedding_type="sinusoidal")  # rotary ones would see the gap before the text
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randn(2, 2, 1, 2, 4, 8, generator=generator)  # layers, keys and values, 1, heads, length, d_k

    def outputs(ids: Tensor, mask: Tensor) -> Any:
        cache = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(prefix):
            cache.update(*(each.expand(len(ids), -1, -1, -1) for each in (keys, values)), layer)
        mask = torch.cat([mask.new_ones(len(ids), 4), mask], dim=1)
        return model(ids, attention_mask=mask, past_key_values=cache)[0]

    batch = tiny.inputs(model, padding=side)
    together = outputs(**{"ids": batch["input_ids"], "mask": batch["attention_mask"]})
    assert not torch.allclose(together, model(**batch)[0], atol=1e-3)
    for row, (ids, mask) in enumerate(zip(*batch.values(), strict=True)):
        real = mask.bool()
        alone = outputs(ids[None, real], mask[None, real])[0]
        got = together[row] if tiny.task(head) == "SequenceClassification" else together[row, real]
        assert_close(got, alone, atol=1e-5, rtol=1e-5)
