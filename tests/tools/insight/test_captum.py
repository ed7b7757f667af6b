"""Captum: what each embedding contributes to an output."""

import pytest
import torch
from captum.attr import IntegratedGradients, LayerIntegratedGradients
from torch.testing import assert_close

from tests import tiny

UNKNOWN = 2  # in place of every token; zeros are where norms jump
TASKS = ("SequenceClassification", "CausalLM", "MaskedLM")
HEADS = [head for head in tiny.HEADS if tiny.task(head) in TASKS and tiny.family(head) != "seq2seq"]


def score(model, **inputs):
    """(B,): the first class, or of the last token's logits the first word's."""
    logits = model(**inputs).logits
    return logits[:, 0] if logits.dim() == 2 else logits[:, -1, tiny.FIRST_WORD]


@pytest.mark.parametrize("head", HEADS)
def test_integrated_gradients(head):
    """integrated gradients of embeddings, of encoder's and decoder's heads: their sum = the difference of outputs"""
    model = tiny.model(head)
    ids = tiny.tokens(40, 3, 7)
    embedded = model.get_input_embeddings()(ids).detach()
    nothing = model.get_input_embeddings()(torch.full_like(ids, UNKNOWN)).detach()
    gradients = IntegratedGradients(lambda each: score(model, inputs_embeds=each))
    parts = gradients.attribute(embedded, nothing, n_steps=400, internal_batch_size=3)
    with torch.no_grad():
        change = score(model, inputs_embeds=embedded) - score(model, inputs_embeds=nothing)
    assert change.abs().min() > 0.01
    assert_close(parts.sum((1, 2)), change, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("head", HEADS)
def test_layer(head):
    """the same of the layer of embeddings, from ids: attributions = those by hand, of gradients along the way"""
    model = tiny.model(head)
    steps = 20
    ids = tiny.tokens(40, 3, 7)
    unknown = torch.full_like(ids, UNKNOWN)
    layer = model.get_input_embeddings()
    gradients = LayerIntegratedGradients(lambda each: score(model, input_ids=each), layer)
    parts = gradients.attribute(ids, unknown, n_steps=steps, method="riemann_right")
    start, end = layer(unknown).detach(), layer(ids).detach()
    total = torch.zeros_like(end)
    for step in range(1, steps + 1):
        between = (start + (end - start) * step / steps).requires_grad_()
        total += torch.autograd.grad(score(model, inputs_embeds=between).sum(), between)[0]
    assert parts.abs().max() > 0.01
    assert_close(parts, total / steps * (end - start), atol=1e-4, rtol=1e-4)
