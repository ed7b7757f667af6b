"""PEFT: nobody names the layers, which it has to know of a model by itself."""

import warnings
from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch.testing import assert_close
from transformers import PreTrainedModel

from hf_scratch_transformer.conversion import convert_to
from tests import tiny

STEPS = 3
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
# Where the default is meant for layers wider than ours.
SMALL: dict[str, dict[str, Any]] = {
    **{"ADALORA": {"total_step": 10}, "C3A": {"block_size": 8}, "FOURIERFT": {"n_frequency": 50}, "MISS": {"r": 8}},
    **{"PSOFT": {"r": 8}, "ROAD": {"group_size": 8}, "SHIRA": {"r": 2}, "WAVEFT": {"n_frequency": 50}},
    **{"VBLORA": {"vector_length": 8, "num_vectors": 16}, "TRAINABLE_TOKENS": {"token_indices": [3, 4]}},
}
UNMERGED = ("LILY", "SHADOW")  # depend on the input, and cannot be merged
TASKED = ("POLY",)  # are told which task a row belongs to
INPUTS = {
    "PREFIX_TUNING": {},
    "PROMPT_TUNING": {},
    "P_TUNING": {},
    "CARTRIDGE": {},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2, "num_ranks": 1},
    "CPT": {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]},
}
REFUSED = ("ADAPTION_PROMPT",)
MIXED = ("XLORA",)
MERGED = sorted({kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - {*UNMERGED, *TASKED, *INPUTS, *REFUSED, *MIXED})
TASKS = {
    "CausalLM": "CAUSAL_LM",
    "ConditionalGeneration": "SEQ_2_SEQ_LM",
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
    "QuestionAnswering": "QUESTION_ANS",
}


def adapted(model: PreTrainedModel, method: Any, **others: Any) -> tuple[Any, dict[str, Any]]:
    """The model after three steps of what the method trains, and inputs with labels and what else it takes."""
    torch.manual_seed(0)
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs) | others
    wrapped = peft.get_peft_model(model, method(task_type=TASKS.get(tiny.task(type(model))))).train()
    frozen = {name: value.clone() for name, value in wrapped.named_parameters() if not value.requires_grad}
    optimizer = torch.optim.AdamW([value for value in wrapped.parameters() if value.requires_grad], lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = wrapped(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(losses[1:]) < losses[0] or method is METHODS["AdaLoRA"]  # whose loss has a term of its own
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


def named(kind: str, **options: Any) -> Any:
    """A method by its name in `peft.PeftType`."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]]
    return lambda task_type: config(task_type=task_type, **SMALL.get(kind, {}) | INPUTS.get(kind, {}) | options)


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def saved_and_loaded(wrapped: Any, fresh: PreTrainedModel, folder: Any) -> Any:
    """AdaLoRA gives a loss only where it goes on training."""
    wrapped.save_pretrained(folder)
    goes_on = wrapped.peft_type == "ADALORA"
    return peft.PeftModel.from_pretrained(fresh, folder, is_trainable=goes_on).eval()


@pytest.mark.parametrize("kind", MERGED)
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_every_method(head, kind, tmp_path):
    """every method that changes weights, three families: merged = unmerged; saved and loaded = trained"""
    shape = sizes(head) | ({"attention_bias": True} if kind == "BEFT" else {})
    wrapped, inputs = adapted(tiny.model(head, **shape), named(kind))
    expected = logits(wrapped, inputs)
    assert (expected - logits(tiny.model(head, **shape), inputs)).abs().max() > 0.01
    loaded = saved_and_loaded(wrapped, tiny.model(head, **shape), tmp_path)
    assert_close(logits(loaded, inputs), expected)
    assert_close(logits(wrapped.merge_and_unload(), inputs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [*UNMERGED, *TASKED])
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_unmerged(head, kind, tmp_path):
    """Lily, Poly, Shadow, three families: saved and loaded = trained"""
    others = {"task_ids": torch.tensor([0, 1, 1])} if kind in TASKED else {}
    options = {"n_tasks": 2, "n_splits": 1} if kind in TASKED else {}
    try:
        wrapped, inputs = adapted(tiny.model(head, **sizes(head)), named(kind, **options), **others)
    except ValueError as error:
        refused = (kind, tiny.family(head)) in (("POLY", "encoder"), ("SHADOW", "seq2seq"))
        pytest.skip(f"{kind}, {tiny.family(head)}: {error}") if refused else pytest.fail(str(error))
    expected = logits(wrapped, inputs)
    plain = {name: value for name, value in inputs.items() if name not in others}
    assert (expected - logits(tiny.model(head, **sizes(head)), plain)).abs().max() > 0.01
    assert_close(logits(saved_and_loaded(wrapped, tiny.model(head, **sizes(head)), tmp_path), inputs), expected)


@pytest.mark.parametrize("kind", [kind for kind in INPUTS if kind not in ("PREFIX_TUNING", "PROMPT_TUNING")])
@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS[1:])
def test_every_prompt(head, kind, tmp_path):
    """P-tuning, multitask, cartridge, CPT, decoder and translator: saved and loaded = trained"""
    if (kind, tiny.family(head)) == ("CPT", "seq2seq"):
        with pytest.raises(ValueError, match="only supports task_type = CAUSAL_LM") as refusal:
            named(kind)(task_type="SEQ_2_SEQ_LM")
        pytest.skip(f"{kind}, seq2seq: {refusal.value}")
    model = tiny.model(head, **sizes(head))
    others = {"task_ids": torch.tensor([0, 1, 1])} if kind == "MULTITASK_PROMPT_TUNING" else {}
    options = {} if kind == "CPT" else {"num_virtual_tokens": 3}
    wrapped, inputs = adapted(model, named(kind, **options), **others)
    expected = logits(wrapped, inputs)
    loaded = saved_and_loaded(wrapped, tiny.model(head, **sizes(head)), tmp_path)
    assert_close(logits(loaded, inputs), expected)


def test_mixture(tmp_path):
    """X-LoRA over two LoRAs, a decoder: losses = its Llama export's"""
    like_llama = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}
    ours = tiny.model(tiny.LANGUAGE_MODELS[1], **like_llama, use_cache=False)
    ids = tiny.tokens(ours.config.vocab_size, 3, 7)
    losses: list[list[float]] = []
    for model in (ours, convert_to(ours, "llama")):
        kind = tmp_path / type(model).__name__
        adapters = {}
        for name in ("0", "1"):
            torch.manual_seed(int(name))
            adapter = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
            peft.get_peft_model(deepcopy(model), adapter).save_pretrained(kind / name)
            adapters[name] = str(kind / name)
        torch.manual_seed(0)
        options = {"hidden_size": tiny.SIZES["hidden_size"], "adapters": adapters, "layerwise_scalings": True}
        wrapped = peft.get_peft_model(model, named("XLORA", **options)("CAUSAL_LM")).train()
        optimizer = torch.optim.AdamW([value for value in wrapped.parameters() if value.requires_grad], lr=0.05)
        losses.append([])
        for _ in range(STEPS):
            loss = wrapped(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert_close(*losses, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", tiny.LANGUAGE_MODELS)
def test_adaption_prompt(head):
    """AdaptionPrompt, which knows Llama, Mistral and GPT-2 only: outputs before training = ours"""
    model = tiny.model(head)
    inputs = tiny.inputs(model)
    inputs |= tiny.labels(model, inputs)
    before = logits(model, inputs)
    try:
        config = peft.AdaptionPromptConfig(task_type=TASKS.get(tiny.task(head)), adapter_len=3, adapter_layers=2)
        wrapped = peft.get_peft_model(model, config)
    except ValueError as error:
        pytest.skip(str(error))
    assert_close(logits(wrapped, inputs), before)
