"""TRL, told nothing but the folder: beside the Llama that the model is exported to, a native one with equal weights."""

import os
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
from datasets import Dataset
from pytest import approx
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchDecoderForSequenceClassification
from hf_scratch_transformer.conversion import convert_folder
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"
LIKE_LLAMA = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}
STEPS = 3


@pytest.fixture(scope="module")
def folders(texts, tmp_path_factory) -> dict[str, dict[str, str]]:
    """{what for: {"ours": folder, "llama": folder}}"""
    found: dict[str, dict[str, str]] = {}
    tokenizer = train_tokenizer(texts, family="decoder", vocab_size=320, min_frequency=1)
    tokenizer.chat_template = TEMPLATE
    fields = config_fields(tokenizer, "decoder") | LIKE_LLAMA | {"max_position_embeddings": 64}
    for task, head, others in (
        ("CausalLM", ScratchDecoderForCausalLM, {}),
        ("teacher", ScratchDecoderForCausalLM, {"seed": 1}),
        (
            "SequenceClassification",
            ScratchDecoderForSequenceClassification,
            {"num_labels": 1, "classifier_bias": False},
        ),
    ):
        ours, llama = (tmp_path_factory.mktemp(task) / name for name in ("ours", "llama"))
        tiny.model(head, **fields, **others).save_pretrained(ours)
        tokenizer.save_pretrained(ours)
        convert_folder(ours, llama, "llama")
        found[task] = {"ours": str(ours), "llama": str(llama)}
    return found


def length_of_each(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def losses(
    trainer_class: Any, config_class: Any, data: Dataset, folder: Path, options: Any, **given: Any
) -> list[float]:
    """What a trainer reports after each step."""
    arguments = config_class(
        str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = trainer_class(args=arguments, train_dataset=data, **given)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def columns(texts: list[str]) -> dict[str, dict[str, Any]]:
    """The kinds of rows that trainers want."""
    good, bad = [f" {text}" for text in texts], [f" {text}" for text in texts[::-1]]
    turns = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        for text, answer in zip(texts, bad, strict=True)
    ]
    answers = {"prompt": texts, "chosen": good, "rejected": bad}
    return {
        "texts": {"text": texts},
        "prompts": {"prompt": texts},
        "pairs": answers,
        "triples": answers | {"reference": good[1:] + good[:1]},
        "judged": {"prompt": texts, "completion": good, "label": [index % 2 == 0 for index in range(len(texts))]},
        "chats": {"messages": turns},
    }


REWARDED = {"num_generations": 4, "max_completion_length": 6}
RUNS: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "SFT": ("texts", SFTTrainer, SFTConfig, {}),
    "SFT packed": ("texts", SFTTrainer, SFTConfig, {"packing": True, "max_length": 16}),
    "DPO": ("pairs", DPOTrainer, DPOConfig, {}),
    "KTO": ("judged", KTOTrainer, KTOConfig, {}),
    "GRPO": ("prompts", GRPOTrainer, GRPOConfig, REWARDED),
    "RLOO": ("prompts", RLOOTrainer, RLOOConfig, REWARDED),
    "Reward": ("pairs", RewardTrainer, RewardConfig, {}),
}
EXPERIMENTAL: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "ORPO": ("pairs", ORPOTrainer, ORPOConfig, {"max_length": 48}),
    "CPO": ("pairs", CPOTrainer, CPOConfig, {"max_length": 48}),
    "SimPO": ("pairs", CPOTrainer, CPOConfig, {"max_length": 48, "loss_type": "simpo", "cpo_alpha": 0.0}),
    "TPO": ("triples", TPOTrainer, TPOConfig, {}),
    "Online DPO": ("prompts", OnlineDPOTrainer, OnlineDPOConfig, {"max_new_tokens": 6, "max_length": 48}),
}
DISTILLED: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "Distillation": ("prompts", DistillationTrainer, DistillationConfig, {"max_completion_length": 6}),
    "GKD of data": ("chats", GKDTrainer, GKDConfig, {"lmbda": 0.0, "max_length": 48}),
    "GKD of its own": ("chats", GKDTrainer, GKDConfig, {"lmbda": 1.0, "max_new_tokens": 6, "max_length": 48}),
}


def same_losses(run: tuple[str, Any, Any, dict[str, Any]], folders: dict, texts: list[str], path: Path) -> None:
    kind, trainer, config, options = run
    data = Dataset.from_dict({name: values * 4 for name, values in columns(texts)[kind].items()})
    given: dict[str, Any] = {"reward_funcs": length_of_each} if trainer in REWARDING else {}
    reported = []
    for name in ("ours", "llama"):
        model = folders["SequenceClassification" if trainer is RewardTrainer else "CausalLM"][name]
        if "Online" in trainer.__name__ or trainer is GKDTrainer:
            given["processing_class"] = AutoTokenizer.from_pretrained(model)
        if trainer in (GKDTrainer, DistillationTrainer):
            given["teacher_model"] = AutoModelForCausalLM.from_pretrained(folders["teacher"][name])
        reported.append(losses(trainer, config, data, path / name, options, model=model, **given))
    ours, llama = reported
    assert len(ours) == STEPS and len(set(ours)) > 1
    assert ours == approx(llama, rel=1e-4, abs=1e-6)


REWARDING = (GRPOTrainer, RLOOTrainer, OnlineDPOTrainer)


@pytest.mark.parametrize("run", RUNS)
def test_losses(run, folders, texts, tmp_path):
    """SFT, packed too, DPO, KTO, GRPO, RLOO, Reward: losses of each step, ours = Llama's"""
    same_losses(RUNS[run], folders, texts, tmp_path)


@pytest.mark.parametrize("run", EXPERIMENTAL)
def test_experimental(run, folders, texts, tmp_path):
    """ORPO, CPO, SimPO, TPO, online DPO of trl.experimental: losses of each step, ours = Llama's"""
    same_losses(EXPERIMENTAL[run], folders, texts, tmp_path)


@pytest.mark.parametrize("run", DISTILLED)
def test_distilled(run, folders, texts, tmp_path):
    """distillation, and GKD of texts and of what the student writes: losses beside the teacher's, ours = Llama's"""
    same_losses(DISTILLED[run], folders, texts, tmp_path)
