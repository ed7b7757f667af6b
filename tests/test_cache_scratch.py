"""A cache with capacity ahead holds what a dynamic one holds."""

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration, cache_scratch
from hf_scratch_transformer.cache_scratch import BLOCK, PreallocatedLayer, preallocate

from . import tiny


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    """Without gradients, and however little is held."""
    monkeypatch.setattr(cache_scratch, "FEW", 1)
    with torch.no_grad():
        yield


def new_states(length: int, seed: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, length, 4, generator=generator), torch.randn(batch, 3, length, 5, generator=generator)


def both_layers() -> tuple[PreallocatedLayer, DynamicLayer]:
    """Ours and transformers' after a prompt and a token."""
    layers = PreallocatedLayer(), DynamicLayer()
    for layer in layers:
        layer.update(*new_states(6, 0))
        layer.update(*new_states(1, 1))
    return layers


def assert_same(layers: tuple[DynamicLayer, DynamicLayer], rows: int = 2) -> None:
    """Now, and after more tokens than there was capacity for."""
    for step in range(80):
        one, other = (layer.update(*new_states(1, 10 + step, rows)) for layer in layers)
        assert all(map(torch.equal, one, other))
    assert layers[0].get_seq_length() == layers[1].get_seq_length()


@pytest.mark.parametrize("few", [1, 400])  # from the first token, or from where there are so many numbers
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda layer: None, 2),
        (lambda layer: layer.crop(-2), 2),
        (lambda layer: layer.reorder_cache(torch.tensor([1, 1])), 2),
        (lambda layer: layer.batch_repeat_interleave(3), 6),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), 1),
        (lambda layer: layer.reset(), 2),
    ],
    ids=["none", "crop", "reorder", "repeat", "select", "reset"],
)
def test_a_preallocated_layer_holds_what_a_dynamic_one_holds(change, rows, few, monkeypatch):
    monkeypatch.setattr(cache_scratch, "FEW", few)
    layers = both_layers()
    for layer in layers:
        change(layer)
    assert_same(layers, rows)


def test_what_is_there_is_not_copied_for_each_token():
    layer, _ = both_layers()
    places = set()
    for step in range(2 * BLOCK):
        keys, values = layer.update(*new_states(1, step))
        places.add((keys.data_ptr(), values.data_ptr()))
    assert len(places) <= 3


def test_a_deep_copy_of_a_layer_goes_its_own_way():
    """As prompts are shared: filled once, copied for each continuation."""
    layer, expected = both_layers()
    copies = copy.deepcopy(layer), copy.deepcopy(expected)
    layer.update(*new_states(1, 99))
    assert_same(copies)


@torch.enable_grad()
def test_gradients_flow_through_a_cache():
    layer = PreallocatedLayer()
    first, second = (tuple(x.requires_grad_() for x in new_states(2, seed)) for seed in (0, 1))
    layer.update(*first)
    keys, values = layer.update(*second)
    (keys.sum() + values.sum()).backward()
    assert all(bool((x.grad == 1).all()) for x in (*first, *second))


def test_states_of_another_type_or_number_of_rows_are_treated_as_a_dynamic_layer_does():
    layers = both_layers()
    states = new_states(1, 2)
    for layer in layers:
        layer.update(*states)
        layer.update(*(x.double() for x in states))
    assert layers[0].keys.dtype == layers[1].keys.dtype == torch.float64
    assert torch.equal(layers[0].keys, layers[1].keys)
    for layer in layers:
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            layer.update(*(x.double() for x in new_states(1, 3, batch=1)))


def test_a_step_with_a_cache_can_be_transformed():
    layer, expected = both_layers()
    keys, values = new_states(1, 2)

    def step(keys: Tensor) -> Tensor:
        held = copy.copy(layer)
        return held.update(keys, values)[0].sum()

    batch = torch.stack([keys, 2 * keys])
    got = torch.func.vmap(step)(batch)
    assert_close(got, torch.stack([expected.keys.sum() + each.sum() for each in batch]))


def test_a_shallow_copy_of_a_layer_goes_its_own_way():
    layer, other = both_layers()
    copied = copy.copy(layer)
    layer.update(*new_states(1, 2))
    for each in (copied, other):
        each.update(*new_states(1, 3))
    assert torch.equal(copied.keys, other.keys)
    assert torch.equal(layer.keys[:, :, -1:], new_states(1, 2)[0])


@torch.enable_grad()
@pytest.mark.parametrize("trained", [("q_proj", "v_proj"), ("v_proj",), ("q_proj",), ("lm_head",)], ids=str)
@pytest.mark.parametrize(
    "model_class", [ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration], ids=tiny.family
)
def test_few_trained_matrices_learn_through_a_cache(model_class, trained):
    """As LoRA leaves them: keys then need no gradient, values and queries do."""
    model = tiny.model(model_class, tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[-2] in trained)
    ids, source = tiny.tokens(40, 2, 9), {"input_ids": tiny.tokens(40, 2, 5, seed=1)}
    is_translator = model_class is ScratchSeq2SeqForConditionalGeneration

    def run(tokens: Tensor, **cache):
        return model(**source, decoder_input_ids=tokens, **cache) if is_translator else model(tokens, **cache)

    def gradients(logits: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        logits.log_softmax(-1)[..., 5].sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}

    expected = gradients(run(ids, use_cache=False).logits)
    cache, logits = None, []
    for tokens in ids.split([4, 1, 1, 2, 1], dim=1):
        outputs = run(tokens, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        logits.append(outputs.logits)
    assert_close(gradients(torch.cat(logits, dim=1)), expected, atol=1e-5, rtol=1e-5)
    # A cache filled without gradients is only read then.
    with torch.no_grad():
        cache = run(ids[:, :8], use_cache=True).past_key_values
    continued = run(ids[:, 8:], past_key_values=cache).logits
    assert_close(continued, run(ids, use_cache=False).logits[:, 8:], atol=1e-5, rtol=1e-5)
    continued.sum().backward()


def test_a_cache_filled_in_inference_mode_is_continued_outside_of_it():
    with torch.inference_mode():
        layers = both_layers()
    with torch.no_grad():
        assert_same(layers)


def test_only_new_dynamic_caches_are_preallocated():
    filled = DynamicCache()
    filled.update(*new_states(2, 0), 0)
    preallocate(filled)
    assert type(filled.layers[0]) is DynamicLayer
    new = DynamicCache()
    preallocate(new)
    new.update(*new_states(2, 0), 0)
    assert type(new.layers[0]) is PreallocatedLayer
    offloaded = DynamicCache(offloading=True) if torch.accelerator.is_available() else None
    assert offloaded is None or (preallocate(offloaded) or offloaded.layer_class_to_replicate) is DynamicLayer
