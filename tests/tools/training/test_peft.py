"""PEFT: nobody names the layers, which it has to know of a model by itself."""

import warnings
from typing import Any

import peft
import pytest
import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from tests import tiny

METHODS: dict[str, Any] = {
    "LoRA": peft.LoraConfig,
    "IA3": peft.IA3Config,
    "AdaLoRA": lambda task_type: peft.AdaLoraConfig(task_type=task_type, total_step=10),
    "LN": peft.LNTuningConfig,
    "LoRA and two tokens": lambda task_type: peft.LoraConfig(task_type=task_type, trainable_token_indices=[3, 4]),
    "LoRA and head": lambda task_type: peft.LoraConfig(task_type=task_type, modules_to_save=["lm_head"]),
}
PROMPTS: dict[str, Any] = {
    "prefix": lambda task_type: peft.PrefixTuningConfig(task_type=task_type, num_virtual_tokens=3),
    "prompt": lambda task_type: peft.PromptTuningConfig(task_type=task_type, num_virtual_tokens=3),
}
TASKS = {
    "CausalLM": "CAUSAL_LM",
    "ConditionalGeneration": "SEQ_2_SEQ_LM",
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
    "QuestionAnswering": "QUESTION_ANS",
}


def adapted(model: PreTrainedModel, method: Any) -> tuple[Any, dict[str, Any]]:
    """The model after three steps of what the method trains, and inputs with labels."""
    torch.manual_seed(0)
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    wrapped = peft.get_peft_model(model, method(task_type=TASKS.get(tiny.task(type(model))))).train()
    frozen = {name: value.clone() for name, value in wrapped.named_parameters() if not value.requires_grad}
    optimizer = torch.optim.AdamW([value for value in wrapped.parameters() if value.requires_grad], lr=0.05)
    losses = []
    for _ in range(3):
        loss = wrapped(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] or method is METHODS["AdaLoRA"]  # whose loss has a term of its own
    parameters = dict(wrapped.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in frozen.items())
    return wrapped.eval(), inputs


def sizes(head: type[PreTrainedModel], tie: bool = True) -> dict[str, Any]:
    """For PEFT a prefix is as deep on both sides of a translator, whose tables are all tied, or none."""
    return {"encoder_layers": 2, "share_encoder_decoder_embeddings": tie} if tiny.family(head) == "seq2seq" else {}


CASES = [
    pytest.param(head, method, tie, id=f"{head.__name__}-{method}-{'tied' if tie else 'untied'}")
    for head in tiny.HEADS
    for method in METHODS
    for tie in ((True, False) if head in tiny.LANGUAGE_MODELS else (True,))
    if head in tiny.LANGUAGE_MODELS or method != "LoRA and head"
]


@pytest.mark.parametrize(("head", "method", "tie"), CASES)
@torch.no_grad()
def test_merged(head, method, tie):
    """LoRA, IA3, AdaLoRA and others by default, every head, tied and untied: outputs merged = unmerged"""
    model = tiny.model(head, tie_word_embeddings=tie, **sizes(head, tie))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a head of its own unties
        wrapped, inputs = adapted(model, METHODS[method])
    expected = wrapped(**inputs)
    merged = wrapped.merge_and_unload()
    assert any(not torch.equal(value, before[name]) for name, value in merged.state_dict().items() if name in before)
    assert_close(merged(**inputs)[1], expected[1], atol=1e-5, rtol=1e-5)


PROMPTED = [
    pytest.param(head, method, id=f"{head.__name__}-{method}")
    for head in tiny.HEADS
    for method in PROMPTS
    if tiny.task(head) in TASKS
    and (tiny.task(head), method) != ("TokenClassification", "prompt")  # PEFT leaves the labels too short, of any model
]


@pytest.mark.parametrize(("head", "method"), PROMPTED)
@torch.no_grad()
def test_prompted(head, method, tmp_path):
    """prefix and prompt, every head that has a task: outputs saved and loaded = trained"""
    with torch.enable_grad():
        wrapped, inputs = adapted(tiny.model(head, **sizes(head)), PROMPTS[method])
    expected = wrapped(**inputs)
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.model(head, **sizes(head)), tmp_path)
    if method == "prefix" and tiny.task(head) not in ("CausalLM", "ConditionalGeneration"):
        # The head is trained too.
        assert not torch.equal(expected[1], tiny.model(head, **sizes(head))(**inputs)[1])
    assert_close(loaded(**inputs)[1], expected[1], atol=1e-5, rtol=1e-5)
