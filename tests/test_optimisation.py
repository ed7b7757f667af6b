"""Update rules and schedules against torch's own, and against their formulas."""

import math

import pytest
import torch

from hf_scratch_transformer import ScratchDecoderForCausalLM
from tests import tiny
from training.optimisation import Muon, lr_factor, optimizers, orthogonalised
from training.recipe import Optimisation

MATRICES = [(8, 8), (8, 8), (24, 8), (8, 24), (24, 8)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"weight_decay": 0.0, "momentum": 0.5, "ns_steps": 3},
    ],
)
def test_muon_is_torchs_muon(options, monkeypatch):
    """torch rounds to bfloat16 inside; here it is kept from that, so that only the method is compared."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in MATRICES]
    sides = [[torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2)]
    ours, theirs = Muon(sides[0], lr=0.05, **options), torch.optim.Muon(sides[1], lr=0.05, **options)
    for _ in range(4):
        for mine, other in zip(*sides, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    for mine, other, before in zip(*sides, start, strict=True):
        assert (mine - before).abs().max() > 0.05
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_orthogonalised_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    matrices = torch.randn(3, 10, 30) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    values = torch.linalg.svdvals(orthogonalised(matrices, (3.4445, -4.7750, 2.0315), 5, 1e-7))
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize("kind", tiny.LANGUAGE_MODELS)
@pytest.mark.parametrize(("optimizer", "base"), [("adamw", None), ("adamw", 16), ("muon", None), ("muon", 16)])
def test_every_parameter_is_in_exactly_one_group(kind, optimizer, base):
    model = tiny.model(kind, mup_base_width=base)
    spec = Optimisation(optimizer=optimizer, weight_decay=0.1, max_steps=1)
    updates = optimizers(model, spec)
    owners = {}
    for update in updates:
        for group in update.param_groups:
            for parameter in group["params"]:
                assert id(parameter) not in owners
                owners[id(parameter)] = (type(update), group["weight_decay"])
    assert owners.keys() == {id(parameter) for parameter in model.parameters()}
    for name, parameter in model.named_parameters():
        owner, decay = owners[id(parameter)]
        inside = ".layers." in name and parameter.ndim == 2
        assert (owner is Muon) == (inside and optimizer == "muon"), name
        assert (decay > 0) == (inside or (parameter.ndim == 2 and optimizer == "adamw")), name


@pytest.mark.parametrize("base", [None, 32])
def test_with_a_base_width_training_changes_wide_models_as_it_does_narrow_ones(base):
    """The coordinate check of muP (Yang et al., 2022, appendix D.1): how far four steps move states and logits."""

    def moved(width: int) -> torch.Tensor:
        torch.manual_seed(0)
        heads = {"num_attention_heads": width // 8, "num_key_value_heads": width // 8, "head_dim": 8}
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "initializer_range": 0.1}
        model = tiny.model(ScratchDecoderForCausalLM, **heads, **sizes, tie_word_embeddings=False, mup_base_width=base)
        ids = tiny.tokens(40, 4, 12)
        (adamw,) = optimizers(model, Optimisation(learning_rate=0.01, weight_decay=0.1, max_steps=4))
        assert {round(group["lr"] * group["weight_decay"], 9) for group in adamw.param_groups} == {0.001, 0.0}
        seen = []
        for _ in range(5):
            outputs = model(ids, labels=ids, output_hidden_states=True)
            seen.append((outputs.hidden_states[1], outputs.logits))
            outputs.loss.backward()
            adamw.step()
            adamw.zero_grad()
        return torch.stack(
            [(last - first).detach().square().mean().sqrt() for first, last in zip(*seen[::4], strict=True)]
        )

    states, logits = (moved(256) / moved(32)).tolist()
    if base is None:
        assert states > 10 and logits > 3
    else:
        assert 0.8 < states < 1.25 and 0.5 < logits < 1.25


def factor(schedule, step, progress, **options):
    return lr_factor(
        Optimisation(schedule=schedule, **{"warmup_steps": 10, "max_steps": 100} | options), step, progress
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay", "plateau"])
def test_schedules_warm_up_and_then_never_rise(schedule):
    factors = [factor(schedule, step, step / 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1, abs=0.01) and max(factors) == pytest.approx(1, abs=0.11)
    assert all(later <= earlier for earlier, later in zip(factors[10:], factors[11:], strict=False))
    assert all(0 <= value <= 1 for value in factors)


def test_schedules_are_their_formulas():
    assert factor("linear", 50, 0.25) == 0.75
    assert factor("linear", 50, 1.0, final_fraction=0.1) == pytest.approx(0.1)
    assert factor("cosine", 50, 0.5) == pytest.approx(0.5)
    assert factor("cosine", 50, 1 / 3) == pytest.approx((1 + math.cos(math.pi / 3)) / 2)
    assert factor("inverse_sqrt", 39, 0.4) == pytest.approx(0.5)
    assert factor("warmup_stable_decay", 79, 0.79) == 1
    assert factor("warmup_stable_decay", 90, 0.9) == pytest.approx(0.5)
    assert factor("linear", 5, 3.0, warmup_steps=0) == 0, "past the end"
    spec = Optimisation(schedule="plateau", plateau_factor=0.9, warmup_steps=0, max_steps=1)
    assert [lr_factor(spec, 100, 0.5, reductions) for reductions in (0, 1, 2)] == pytest.approx([1, 0.9, 0.81])
