"""The articles' numbers, and equality with the model itself: parameters, operations, optimiser states."""

import dataclasses
import json
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig

import hf_scratch_transformer as scratch
from hf_scratch_transformer.configuration_scratch import CHOICES
from hf_scratch_transformer.insight import sizes, trace
from tests import tiny
from training.optimisation import optimizers
from training.recipe import Optimisation

INHERITED = {field.name for field in dataclasses.fields(PreTrainedConfig)}


def random_config(seed: int) -> PreTrainedConfig:
    """Any configuration of any family and head: every switch and choice that the family has, at random sizes."""
    draw = random.Random(seed)
    model_class = tiny.MODELS[seed % len(tiny.MODELS)]
    family, width = model_class.config_class, draw.choice((12, 24, 36))
    while True:
        heads = draw.choice((1, 2, 3, 6))
        fields = {
            "architectures": [model_class.__name__],
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": draw.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
            "head_dim": draw.choice((None, 2, 8)),
            "value_head_dim": draw.choice((None, 3, 10)),
            "intermediate_size": draw.choice((7, 20)),
            "vocab_size": draw.choice((11, 30)),
            "max_position_embeddings": 16,
            "num_labels": draw.choice((1, 4)),
        }
        depths = ("num_hidden_layers",) if "Seq2Seq" not in family.__name__ else ("encoder_layers", "decoder_layers")
        fields |= {name: draw.choice((1, 2, 4)) for name in depths}
        fields |= {name: draw.choice(values) for name, values in CHOICES.items()}
        fields |= {
            field.name: draw.random() < 0.5
            for field in dataclasses.fields(family)
            if field.type is bool and field.name not in INHERITED | {"is_encoder_decoder"}
        }
        if not fields.get("share_encoder_decoder_embeddings", True):
            fields["decoder_vocab_size"] = draw.choice((None, 17))
        try:
            return family(**fields)
        except ValueError:  # a combination that the family refuses
            continue


def test_the_articles_base_model():
    report = sizes.inspect("attention-is-all-you-need-base", length=20, source_length=30)
    assert report.article_parameters == (44_070_912, 37_000 * 512)
    assert report.matrices == 501 == 6 * (9 * 8 + 11) + 3
    per_layer = {stack: sum(p.matrices for p in report.parts if p.in_article and f"{stack}.layers" in p.path)
                 for stack in ("encoder", "decoder")}  # fmt: skip
    assert per_layer == {"encoder": 3 * 8 + 5, "decoder": 6 * 8 + 6}
    # What is beyond the articles is the norms, a scale and a shift each: two in an encoder layer, three in a decoder's.
    beyond = [part for part in report.parts if not part.in_article]
    assert all(part.path.endswith("_norm") and part.formula == "2·d_m" for part in beyond)
    assert sum(part.total for part in beyond) == 6 * (2 + 3) * 2 * 512 == report.parameters - 63_014_912
    by_path = {part.path: part for part in report.parts}
    attention = by_path["model.decoder.layers.*.cross_attn"]
    assert attention.parameters == (512 * 64 + 512 * 64 + 512 * 64) * 8 + 8 * 64 * 512
    assert attention.formula == "2·h·d_m·d_k + h·d_m·d_v + h·d_v·d_m"
    assert by_path["model.encoder.layers.*.mlp"].formula == "d_m·d_ff + d_ff + d_ff·d_m + d_m"
    assert by_path["lm_head"].tied_to == "model.encoder.embeddings.word_embeddings.weight"
    assert by_path["lm_head"].parameters == by_path["model.decoder.embeddings.word_embeddings"].parameters == 0


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_parameters_are_those_of_the_model(start):
    for seed in range(start, start + 50):
        config = random_config(seed)
        model = trace.build(config)
        symbols = sizes._symbols(config, 1, 1, None)
        parts = sizes.parts(model, symbols)
        assert sum(part.total for part in parts) == model.num_parameters(), (seed, config)
        for part in parts:
            assert part.tied_to or sizes.evaluate(part.formula, symbols) == part.parameters, (seed, part)
        named = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
        assert sum(part.times * len(part.shapes) for part in parts) == len(named)
        assert sum(part.times * len(part.shapes) for part in parts if part.tied_to) == len(named) - len(
            dict(model.named_parameters())
        )


@pytest.mark.parametrize("seed", range(0, 200, 14))
def test_operations_are_those_that_torch_counts_and_that_the_formulas_give(seed):
    config = random_config(seed)
    is_pair = config.is_encoder_decoder
    report = sizes.inspect(config, 2, 5, 7 if is_pair else None, attention="eager", checkpointing=True)
    model = getattr(scratch, report.model)._from_config(config, attn_implementation="eager")
    inputs = {name: torch.randint(3, 11, tensor.shape) for name, tensor in
              trace.make_inputs(model, 2, 5, report.source_length).items()}  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        outputs = model(**inputs)
        assert report.forward_flops == counter.get_total_flops()
        sum(out.sum() for out in outputs.values() if isinstance(out, torch.Tensor) and out.requires_grad).backward()
    assert report.training_flops == counter.get_total_flops()
    assert report.forward_flops == sum(row.times * row.flops for row in report.sublayers)
    for row in report.sublayers:
        by_formula = sizes.evaluate(row.flops_formula, report.symbols) if row.flops_formula else 0
        # Heads that score rows of tokens in other numbers than B·T have no formula.
        assert by_formula == row.flops or "MultipleChoice" in report.model, row
    assert report.training_flops < report.checkpointed_flops <= report.training_flops + report.forward_flops


def test_gpt_2_costs_what_its_formulas_give():
    """Known by hand: 12 layers of 24 T d² + 4 T² d, and a head of 2 T d V."""
    length, width = 1024, 768
    report = sizes.inspect("gpt-2", length=length)
    layer = 24 * length * width**2 + 4 * length**2 * width
    assert report.forward_flops == 12 * layer + 2 * length * width * 50257 == 291_648_307_200


@pytest.mark.parametrize("name", sizes.OPTIMIZERS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_optimiser_states_are_those_of_the_recipes(name, family):
    model = tiny.model(next(m for m in tiny.LANGUAGE_MODELS if tiny.family(m) == family), use_qk_norm=True)
    used = optimizers(model, Optimisation(max_steps=1, optimizer=name))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    held = 0
    for optimizer in used:
        optimizer.step()
        held += sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    assert sizes.optimizer_bytes(model, name) == held


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_memory_adds_up(family):
    config = tiny.config(family, **{"hidden_size": 64, "max_position_embeddings": 512})
    report = sizes.inspect(config, batch=3, length=256, dtype="bfloat16", checkpointing=True)
    memory = report.memory
    assert memory.weights == memory.gradients == 2 * report.parameters
    assert memory.checkpointed_activations < memory.activations / 2
    assert memory.checkpointed_peak < memory.training_peak
    assert memory.training_peak > memory.weights + memory.optimizer + memory.activations
    assert memory.weights + memory.cache < memory.inference_peak < memory.training_peak
    # Keys and values of 2 heads of 16, in 2 layers: for an encoder-decoder, of the source too.
    layers = {"encoder": 0, "decoder": 2, "seq2seq": 2 + 2}[family]
    assert memory.cache == 2 * 2 * 3 * 256 * layers * 2 * 16


def test_a_report_is_json():
    report = sizes.inspect(tiny.config("seq2seq"), length=5, loss_only=True)
    read = json.loads(json.dumps(report.to_dict()))
    assert read["parameters"] == report.parameters
    assert read["article"]["matrices"] == report.matrices
    assert read["training_flops_per_token"] * 5 == report.training_flops
    assert {tuple(row) for row in read["sublayers"]} == {
        ("path", "kind", "times", "inputs", "weights", "outputs", "scores", "flops", "flops_formula")
    }


@pytest.mark.parametrize(
    ("source", "options", "complaint"),
    [
        ("gpt-2", {"length": 1025}, "length=1025 is longer than max_position_embeddings=1024"),
        ("gpt-2", {"length": 0}, "length=0 must be at least 1"),
        ("gpt-2", {"batch": -1}, "batch=-1 must be at least 1"),
        ("gpt-2", {"batch": 10**20}, "must be at least 1 and below 2.*31"),
        ("gpt-2", {"source_length": 5}, "source_length=5: scratch_decoder has no source"),
        ("gpt-2", {"optimizer": "sgd"}, "optimizer='sgd' must be one of adamw, muon"),
        ("gpt-2", {"dtype": "int8"}, "dtype='int8' must be a floating-point type"),
        ("gpt-2", {"dtype": "zork"}, "dtype='zork' must be a floating-point type"),
        ("attention-is-all-you-need-base", {"source_length": -3}, "source_length=-3 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(source, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        sizes.inspect(source, **options)


def test_positions_without_a_table_have_no_end():
    assert sizes.inspect("attention-is-all-you-need-base", length=600).length == 600
