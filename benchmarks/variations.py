"""Ideas that no option of a recipe says: what they change in training, for `python -m benchmarks ablations`.

    python -m benchmarks variation NAME RECIPE.yaml [--key value ...]

is `python -m training RECIPE.yaml` with one of them. One that gains enough becomes an option; until then none of it is
in what users train with.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from hf_scratch_transformer import layers_scratch, stack_scratch
from hf_scratch_transformer.layers_scratch import ScratchAttention, ScratchBlock
from training import metrics, optimisation, publication
from training.__main__ import command
from training.batches import CONTENT, Draws, Key
from training.corpus import Corpus
from training.objectives import OBJECTIVES, Batch, CausalLM, Translation
from training.recipe import Recipe

from .shapes import unknown


class GrowingBatch(Translation):
    """Batches that double after each second pass, twice (Smith et al. 2018): from `data.batch_tokens` to four times."""

    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        recipe = self.recipe
        if key is not None:
            size = recipe.data.batch_tokens * 2 ** min(key[2] // 2, 2)
            data = recipe.data.model_copy(update={"batch_tokens": size})
            self.recipe = recipe.model_copy(update={"data": data})
        try:
            return super().plan(corpus, key, pool)
        finally:
            self.recipe = recipe


class ShortFirst(Translation):
    """A first pass over the shortest quarter of the pairs, a second over half, a third over three quarters, then all
    (a curriculum by length: Kocmi & Bojar 2017, Platanios et al. 2019)."""

    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        batches = super().plan(corpus, key, pool)
        if key is None or key[2] >= 3:
            return batches
        longest = np.maximum(corpus.columns["source"].lengths, corpus.columns["target"].lengths)
        limit = np.quantile(longest, (key[2] + 1) / 4)
        # Batches are of like length, so that few hold both what is short enough and what is not.
        return [kept for batch in batches if len(kept := batch[longest[batch] <= limit])]


class TokenDropout(Translation):
    """A tenth of the merges left out at random wherever a training text is read (BPE-dropout, Provilkov et al. 2020).

    The draws are those of `tokenizers`, which takes no seed.
    """

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(recipe, tokenizer)
        self.loose = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.loose.model.dropout = 0.1

    def collate(self, corpus: Corpus, item: np.ndarray, draws: Draws, step: int) -> Batch:
        if draws.key[1:2] == (CONTENT,):
            columns = {name: corpus.columns[name].take(item) for name in ("source", "target")}
            corpus = Corpus({name: self._apart(sequences) for name, sequences in columns.items()})
            item = np.arange(len(item))
        return super().collate(corpus, item, draws, step)

    def _apart(self, sequences: Any) -> Any:
        rows = np.split(sequences.tokens, sequences.offsets[1:-1])
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return type(sequences).of([encoding.ids for encoding in self.loose.encode_batch_fast(texts)])


class Distillation(Translation):
    """Half of the loss is the cross-entropy with what a larger model of our own predicts for each target (Hinton et al.
    2015; Kim & Rush 2016, word by word). It is trained first, and its training and predictions are counted."""

    TEACHER = Path("runs/teacher")
    WORDS = (
        *("--model.hidden_size", "128", "--model.intermediate_size", "344", "--optimisation.max_steps", "1450"),
        *("--model.dropout", "0.1", "--optimisation.learning_rate", "0.016", "--data.batch_tokens", "2048"),
        *("--seed", "4", "--output_dir", str(TEACHER), "--overwrite"),
    )
    student: ClassVar[list[str]]  # the recipe and what is changed in it

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(recipe, tokenizer)
        self.TEACHER.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.TEACHER.with_suffix(".lock")):
            if not (self.TEACHER / "model").exists():
                subprocess.run([sys.executable, "-m", "training", *self.student, *self.WORDS], check=True)
        self.teacher = AutoModelForSeq2SeqLM.from_pretrained(self.TEACHER / "model").eval()
        spent = {line["event"]: line for line in metrics.read(self.TEACHER / "metrics.jsonl")}["finished"]["flops"]
        counted = publication.target_flops  # with the predictions, which are in the loss
        publication.target_flops = lambda run: (counted(run) or math.nan) + spent / run.state.targets

    def loss(self, model: torch.nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        if not model.training:
            return super().loss(model, batch, label_smoothing)
        logits, targets = self.predict(model, batch)
        with torch.no_grad():
            theirs, _ = self.predict(self.teacher.to(logits.device), batch)
        told = F.cross_entropy(logits, theirs.softmax(-1), reduction="sum")
        return (F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing) + told) / 2


class GrowingWindows(CausalLM):
    """A first pass in windows of a quarter, a second in those of half of `data.window`, then whole ones (staged
    training, Press et al. 2021)."""

    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        if key is not None:
            self.window = self.recipe.data.window * min(2 ** key[2], 4) // 4
        try:
            return super().plan(corpus, key, pool)
        finally:
            self.window = self.recipe.data.window


# --- Of the model and its optimiser -----------------------------------------------------------------------------------


class ValueResiduals(ScratchAttention):
    """Values mixed with those of the first layer, in shares that are learnt (Zhou et al. 2024)."""

    first: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shares = nn.Parameter(torch.full((2,), 0.5)) if self.layer_idx else None

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().keys_and_values(states)
        if self.shares is None:
            ValueResiduals.first = value
            return key, value
        return key, self.shares[0] * value + self.shares[1] * self.first


class GatedHeads(ScratchAttention):
    """What each head gives times a gate, which reads what attention reads (Qiu et al. 2025): at first about 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate_proj = nn.Linear(self.config.hidden_size, self.config.num_attention_heads, bias=False)
        self.o_proj.register_forward_pre_hook(self._gate)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        self.gates = 2 * self.gate_proj(hidden_states).sigmoid()
        return super().forward(hidden_states, *args, **kwargs)

    def _gate(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        heads = args[0].unflatten(-1, (-1, self.value_head_dim))
        return ((heads * self.gates[..., None]).flatten(-2),)


class SkippingBlock(ScratchBlock):
    """The later half of the layers also reads what the earlier half gave, the last what the first did, at weights that
    are learnt (U-net, Ronneberger et al. 2015, as in the speed runs of modded-nanoGPT)."""

    given: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.index, last = self.self_attn.layer_idx, self.self_attn.config.num_hidden_layers - 1
        self.mirrored = last - self.index
        self.skip = nn.Parameter(torch.ones(1)) if self.mirrored < self.index else None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.skip is not None:
            hidden_states = hidden_states + self.skip * self.given[self.mirrored]
        self.given[self.index] = super().forward(hidden_states, *args, **kwargs)
        return self.given[self.index]


class NorMuon(optimisation.Muon):
    """Steps of neurons, the rows of a matrix, made as long as one another by a mean of the squares of earlier ones, and
    the step of the matrix as long as it was (Li et al. 2025)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.squares: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = [(group, [each for each in group["params"] if each.grad is not None]) for group in self.param_groups]
        before = {parameter: parameter.clone() for _, members in groups for parameter in members}
        loss = super().step(closure)
        for group, members in groups:
            for parameter in members:
                step = (parameter - before[parameter]) / max(group["lr"], 1e-12)
                squares = step.square().mean(dim=1, keepdim=True)
                known = self.squares.setdefault(parameter, torch.zeros_like(squares)).lerp_(squares, 1 - 0.95)
                even = step / known.sqrt().clamp(min=1e-10)
                even *= step.norm() / even.norm().clamp(min=1e-10)
                parameter.copy_(before[parameter].add(even, alpha=group["lr"]))
        return loss


VARIATIONS: dict[str, tuple[dict[str, Any], str, type]] = {  # where, by what name, stands what
    "growing_batch": (OBJECTIVES, "translation", GrowingBatch),
    "short_first": (OBJECTIVES, "translation", ShortFirst),
    "token_dropout": (OBJECTIVES, "translation", TokenDropout),
    "distillation": (OBJECTIVES, "translation", Distillation),
    "growing_windows": (OBJECTIVES, "causal_lm", GrowingWindows),
    "value_residuals": (vars(layers_scratch), "ScratchAttention", ValueResiduals),
    "gated_heads": (vars(layers_scratch), "ScratchAttention", GatedHeads),
    "unet_skips": (vars(stack_scratch), "ScratchBlock", SkippingBlock),
    "normuon": (vars(optimisation), "Muon", NorMuon),
}


def check(name: str) -> None:
    """Raises ValueError where there is none of this name."""
    if name not in VARIATIONS:
        raise ValueError(unknown("variation", name, VARIATIONS))


def main(argv: list[str]) -> None:
    """Train with the variation that the first word names, in place of what it varies."""
    check(argv[0] if argv else "")
    place, name, variation = VARIATIONS[argv[0]]
    place[name] = variation
    Distillation.student = argv[1:]
    command(argv[1:])
