"""Contenders that are whole training runs: a recipe of ours, and transformers' Trainer on the same corpus."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from hf_scratch_transformer.onednn import onednn_products
from hf_scratch_transformer.tokenization import config_fields
from training import checkpoints, loop
from training.corpus import FAMILIES, Sequences
from training.objectives import Batch
from training.optimisation import autocasts
from training.recipe import parse
from training.run import prepare

from .contenders import Contender, Options, count_tokens
from .peers import NATIVES, OURS, count_parameters, match_parameters
from .shapes import Shape


class RecipeRun(Contender):
    """Our training of a recipe; a step of the comparison is some of its steps, through all of the loop."""

    def __init__(self, options: Options, steps: int, folder: Path) -> None:
        self.name, self.batches = OURS, (None,)
        self.options, self.steps, self.folder = options, steps, folder
        # Ends are set by `step`; Trainer too is told neither to evaluate nor to save.
        quiet = {
            "output_dir": folder,
            "optimisation.max_steps": 1,
            "optimisation.max_minutes": "null",
            "optimisation.final_weights": "last",
            "evaluation.every_steps": "null",
            "evaluation.every_minutes": "null",
            "trackers": "[]",
        }
        self.recipe = parse([str(options.recipe), *(f"--{key}={quiet[key]}" for key in quiet), *options.overrides])
        self.family = FAMILIES[self.recipe.objective]

    def build(self) -> None:
        recipe, device = self.recipe, self.options.device
        self.bf16 = autocasts(recipe.optimisation.precision, device.type)
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if self.bf16 else "no")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = prepare(recipe, accelerator, self.folder, time.monotonic())
        objective: Any = self.run.objective
        self.run.store = NoStore(self.folder, recipe.checkpoints)
        self.collate = objective.collate = CountingCollator(objective.collate, self.family == "seq2seq")
        self.model = self.run.unwrapped_model

    def step(self, batch: None) -> Tensor:
        run, before = self.run, self.run.state.targets
        self.collate.counts.clear()
        optimisation = self.recipe.optimisation.model_copy(update={"max_steps": run.state.step + self.steps})
        run.recipe = self.recipe.model_copy(update={"optimisation": optimisation})
        with onednn_products():
            loop.train(run)
        return torch.tensor(run.state.targets - before)

    def tokens(self, batch: None) -> int:
        return sum(self.collate.counts[: self.steps * self.recipe.optimisation.accumulation])


class NoStore(checkpoints.Store):
    """Saves no checkpoint."""

    def start(self, *_: Any) -> None:
        pass


class CountingCollator:
    """Counts the non-padding tokens of each batch. Loaders may read ahead: only the first were trained on."""

    def __init__(self, collate: Callable[..., Batch], of_target: bool) -> None:
        self.collate, self.of_target = collate, of_target
        self.counts: list[int] = []

    def __call__(self, *arguments: Any) -> Batch:
        batch = self.collate(*arguments)
        self.counts.append(count_tokens(batch, self.of_target))
        return batch


class TrainerRun(Contender):
    """transformers' Trainer on the corpus, tokenizer and optimisation settings of our run, with a native model of the
    same size, set up as its example scripts do: batches of a fixed number of rows, padded to their longest. The number
    is chosen so that a batch holds as many non-padding tokens as ours."""

    def __init__(
        self, name: str, native: str, recipe_run: RecipeRun, by_line: bool = False, **arguments: Any
    ) -> None:  # of Trainer
        self.name, self.batches = name, (None,)
        self.native, self.ours, self.by_line = NATIVES[native], recipe_run, by_line
        self.arguments = {"learning_rate": 1e-4, **arguments}
        self.timer = LoopTimer()

    def build(self) -> None:
        run, recipe = self.ours.run, self.ours.recipe
        config, tokenizer = run.unwrapped_model.config, run.objective.tokenizer
        corpus = next(run.parts(0, 0)).corpus
        window, of_target = recipe.data.window, self.native.family == "seq2seq"
        if of_target:
            rows = Rows(input_ids=unjoined(corpus.columns["source"]), labels=unjoined(corpus.columns["target"]))
        elif self.by_line:
            rows = Rows(input_ids=[ids[:window] for ids in unjoined(corpus.columns["text"])])
        else:
            stream = corpus.columns["text"].tokens
            rows = Rows(input_ids=[stream[start : start + window] for start in range(0, len(stream), window)])
        plan = run.objective.plan(corpus, (0,))
        # Non-padding tokens in a batch of ours, and in a row here.
        tokens_per_batch = len(corpus.columns["target" if of_target else "text"].tokens) / len(plan)
        tokens_per_row = np.mean([len(ids) for ids in rows.columns["labels" if of_target else "input_ids"]])
        shape = Shape(
            family=self.native.family,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            feed_forward=config.intermediate_size,
            vocabulary=len(tokenizer),
            length=config.max_position_embeddings,
            batch=max(1, round(tokens_per_batch / tokens_per_row)),
        )
        fields: dict[str, Any] = config_fields(tokenizer, self.native.family)

        def make(shape: Shape) -> PreTrainedModel:
            return self.native.make(shape, config.dropout, **fields)

        torch.manual_seed(0)
        self.model: Any = make(match_parameters(make, shape, count_parameters(run.unwrapped_model)))
        # Ours was given what is faster on this device and in this precision.
        self.model.set_attn_implementation(config._attn_implementation)
        if of_target:
            collate: Any = DataCollatorForSeq2Seq(tokenizer, self.model)
        else:
            share = recipe.optimisation.mask_fraction[0] if recipe.objective == "masked_lm" else None
            collate = DataCollatorForLanguageModeling(tokenizer, mlm=share is not None, mlm_probability=share)
        self.collate = CountingCollator(collate, of_target)
        spec = recipe.optimisation
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(self.ours.folder / "trainer"),
            max_steps=self.ours.steps,
            per_device_train_batch_size=shape.batch,
            gradient_accumulation_steps=spec.accumulation,
            label_smoothing_factor=spec.label_smoothing,
            max_grad_norm=spec.clip_norm,
            bf16=self.ours.bf16,
            torch_compile=spec.compile,
            use_cpu=self.ours.options.device.type == "cpu",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=recipe.seed,
            **self.arguments,
        )
        self.trainer = Seq2SeqTrainer(self.model, arguments, self.collate, rows)
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.add_callback(self.timer)

    def step(self, batch: None) -> Tensor:
        self.collate.counts.clear()
        start = time.perf_counter()
        loss = self.trainer.train().training_loss
        self.setup_seconds = time.perf_counter() - start - self.timer.seconds
        return torch.tensor(loss)

    def tokens(self, batch: None) -> int:
        return sum(self.collate.counts[: self.ours.steps * self.ours.recipe.optimisation.accumulation])


class LoopTimer(TrainerCallback):
    """How long Trainer's loop took, without what it does before its first step and after its last."""

    seconds = start = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.start


class Rows:
    """A dataset from columns of arrays."""

    def __init__(self, **columns: list[np.ndarray]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        return {name: values[row].tolist() for name, values in self.columns.items()}


def unjoined(sequences: Sequences) -> list[np.ndarray]:
    """Each sequence by itself."""
    return np.split(sequences.tokens, sequences.offsets[1:-1])
