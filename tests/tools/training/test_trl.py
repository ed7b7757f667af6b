"""TRL, told nothing but the folder: beside the Llama that the model is exported to, a native one with equal weights."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from pytest import approx
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchDecoderForSequenceClassification
from hf_scratch_transformer.conversion import convert_folder
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

LIKE_LLAMA = {"hidden_act": "swiglu", "norm_type": "rms_norm", "position_embedding_type": "rotary"}
STEPS = 3


@pytest.fixture(scope="module")
def folders(texts, tmp_path_factory) -> dict[str, dict[str, str]]:
    """{task: {"ours": folder, "llama": folder}}"""
    found: dict[str, dict[str, str]] = {}
    tokenizer = train_tokenizer(texts, family="decoder", vocab_size=320, min_frequency=1)
    fields = config_fields(tokenizer, "decoder") | LIKE_LLAMA | {"max_position_embeddings": 64}
    for head, others in (
        (ScratchDecoderForCausalLM, {}),
        (ScratchDecoderForSequenceClassification, {"num_labels": 1, "classifier_bias": False}),
    ):
        ours, llama = (tmp_path_factory.mktemp(tiny.task(head)) / name for name in ("ours", "llama"))
        tiny.model(head, **fields, **others).save_pretrained(ours)
        tokenizer.save_pretrained(ours)
        convert_folder(ours, llama, "llama")
        found[tiny.task(head)] = {"ours": str(ours), "llama": str(llama)}
    return found


def length_of_each(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def losses(
    trainer_class: Any, config_class: Any, model: str, data: Dataset, folder: Path, **options: Any
) -> list[float]:
    rewards = {"reward_funcs": length_of_each} if trainer_class is GRPOTrainer else {}
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
    trainer = trainer_class(model, args=arguments, train_dataset=data, **rewards)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


RUNS = {
    "SFT": ("CausalLM", SFTTrainer, SFTConfig, {}),
    "SFT packed": ("CausalLM", SFTTrainer, SFTConfig, {"packing": True, "max_length": 16}),
    "DPO": ("CausalLM", DPOTrainer, DPOConfig, {}),
    "GRPO": ("CausalLM", GRPOTrainer, GRPOConfig, {"num_generations": 4, "max_completion_length": 6}),
    "Reward": ("SequenceClassification", RewardTrainer, RewardConfig, {}),
}


@pytest.mark.parametrize("run", RUNS)
def test_losses(run, folders, texts, tmp_path):
    """SFT, packed too, DPO, GRPO, Reward: losses of each step, ours = Llama's"""
    task, trainer, config, options = RUNS[run]
    answers = {"chosen": [f" {text}" for text in texts], "rejected": [f" {text}" for text in texts[::-1]]}
    columns = {"SFT": {"text": texts}, "GRPO": {"prompt": texts}}.get(run.split()[0], {"prompt": texts} | answers)
    data = Dataset.from_dict({name: values * 4 for name, values in columns.items()})
    ours, llama = (losses(trainer, config, model, data, tmp_path, **options) for model in folders[task].values())
    assert len(ours) == STEPS and len(set(ours)) > 1
    assert ours == approx(llama, rel=1e-4, abs=1e-6)
