"""Ideas that no option of a recipe says: what they change in training, for `python -m benchmarks ablations`.

    python -m benchmarks variation NAME RECIPE.yaml [--key value ...]

is `python -m training RECIPE.yaml` with one of them. One that gains enough becomes an option; until then none of it is
in what users train with, and a model that has parameters of it opens with it alone.
"""

import gzip
import json
import os
import subprocess
import sys
import zlib
from abc import abstractmethod
from functools import partial, reduce
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from hf_scratch_transformer import layers_scratch, stack_scratch
from hf_scratch_transformer.files import write_text
from hf_scratch_transformer.layers_scratch import ScratchAttention, ScratchBlock
from training import folder, metrics, optimisation, publication
from training.__main__ import command
from training.batches import CONTENT, POOL, Draws, Key
from training.cards import outcome
from training.corpus import Corpus, Sequences, digest, load, read_tokenizer, tokenise
from training.objectives import OBJECTIVES, Batch, CausalLM, Objective, Translation
from training.publication import target_flops
from training.recipe import Recipe, parse
from training.run import Run, TrainingError
from training.sections import RecipeError

from .gpu import terminable
from .shapes import unknown


def _beside(kind: type[Objective], objective: Objective, **data: int) -> Objective:
    """The plain objective of a recipe whose `data` differs."""
    recipe = objective.recipe
    return kind(recipe.model_copy(update={"data": recipe.data.model_copy(update=data)}), objective.tokenizer)


class GrowingBatch(Translation):
    """Batches that double after each second pass, twice, from `data.batch_tokens` to four times: Smith et al. (2018)
    have them grow in place of a learning rate that falls, which here falls as well, by the recipe's schedule of steps.
    """

    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        if key is None:
            return super().plan(corpus, key, pool)
        size = self.recipe.data.batch_tokens * 2 ** min(key[2] // 2, 2)
        return _beside(Translation, self, batch_tokens=size).plan(corpus, key, pool)


class ShortFirst(Translation):
    """A first pass over the shortest quarter of the pairs, a second over half, a third over three quarters, then all
    (a curriculum by length, in steps as coarse as passes; Platanios et al. 2019 let more in at each step)."""

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

    The draws are those of `tokenizers`, which takes no seed. For one vocabulary of both languages, and texts that have
    no special tokens written out.
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


class Preceded(Translation):
    """After another run, which is trained first, once for all seeds, and counted.

    Raises RecipeError for what it does not go with: several processes, a corpus that is streamed, mixed or larger than
    what is put in order at once, and no validation split, with which FLOPs are counted.
    """

    RUNS = Path("runs")
    NAME: ClassVar[str]
    SEED = 4
    given: ClassVar[list[str]]  # a recipe, and what is changed in it
    spent: float  # FLOPs before the run

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(recipe, tokenizer)
        for field, is_so in (
            ("processes: more than one", int(os.environ.get("WORLD_SIZE", 1)) > 1),
            ("data.streaming: true", recipe.data.streaming),
            ("data.sources", recipe.data.sources),
            ("data.splits.validation: none", "validation" not in recipe.data.splits),
        ):
            if is_so:
                raise RecipeError(f"{field}: does not go with a run that another one precedes")
        self.corpus = load(recipe, "train", self.encode, keep_texts=True)
        if (count := self.examples(self.corpus)) > POOL:
            raise RecipeError(f"data.splits.train: {count} pairs, where this is for {POOL} at most")

    @abstractmethod
    def words(self) -> list[str]:
        """What the other changes in the recipe, as of a command line."""

    def complete(self, run: Path) -> None:
        """Make of the other what is needed beside its model."""

    def reads(self) -> str:
        """A digest of all that it comes of but its recipe."""
        return self.corpus.fingerprint

    def preceding(self) -> Path:
        """The other, under a name of what it is trained with. Raises TrainingError where it fails."""
        words = [*self.given, *self.words(), "--seed", str(self.SEED), "--model_card", "null", "--push_to_hub", "null"]
        about = json.dumps([parse(words).identity(), self.reads()])
        run = self.RUNS / f"{self.NAME}-{digest(about.encode())[:8]}"
        run.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(run.with_suffix(".lock")):
            if not (run / "model").exists():
                whole = [sys.executable, "-m", "training", *words, "--output_dir", str(run), "--overwrite"]
                try:
                    with terminable():
                        subprocess.run(whole, check=True)
                except subprocess.CalledProcessError as error:
                    raise TrainingError(f"the {self.NAME}, {run}, has ended with {error.returncode}") from error
            self.complete(run)
        return run


class Distillation(Preceded):
    """Half of the loss is the cross-entropy with what a larger model of our own predicts for each target (Hinton et al.
    2015; Kim & Rush 2016, word by word), which was trained with the recipe's smoothed labels. Its predictions are
    counted, too."""

    NAME = "teacher"
    WORDS = (
        *("--model.hidden_size", "128", "--model.intermediate_size", "344", "--model.dropout", "0.1"),
        *("--data.batch_tokens", "2048", "--optimisation.max_steps", "1450"),
    )

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(recipe, tokenizer)
        teacher = self.preceding()
        self.teacher = AutoModelForSeq2SeqLM.from_pretrained(teacher / "model").eval()
        self.spent = outcome(teacher / "metrics.jsonl")["flops"]

    def words(self) -> list[str]:
        return [*self.WORDS]

    def loss(self, model: torch.nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        if not model.training:
            return super().loss(model, batch, label_smoothing)
        logits, targets = self.predict(model, batch)
        with torch.no_grad():
            theirs, _ = self.predict(self.teacher.to(logits.device), batch)
        told = F.cross_entropy(logits, theirs.softmax(-1), reduction="sum")
        return (F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing) + told) / 2


class BackTranslation(Preceded):
    """As many pairs again in each pass, others as long as there are any: texts of the target's language alone, beside
    what a model that is trained the other way round makes of them (Sennrich et al. 2016), greedily. What it writes is
    counted, too, at a third of what training it on as many tokens takes.

    The texts are the lines of `descriptions/*.de.gz`, where the target is `de`, in the folder of the corpus. Each is
    taken once, and none that a split of the recipe has. Raises RecipeError where there is none, or that is no text.
    """

    NAME = "reverse"

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(recipe, tokenizer)
        self.lines = self._lines()
        pairs = self.preceding() / "pairs.json"
        further = json.loads(pairs.read_text(encoding="utf-8"))
        self.spent = further["flops"]
        self.further = tokenise(recipe, {side: further[side] for side in recipe.data.columns}, self.encode).columns
        if not len(self.further["target"].lengths):
            raise TrainingError(f"back_translation: {pairs} has no pair to train on; the model has learnt too little")
        self.both: dict[str, Sequences] = {}

    def _lines(self) -> list[str]:
        folder, lines = Path(self.recipe.data.path, "descriptions"), dict[str, None]()
        names = [f"*.{name}.gz" for name in self.recipe.data.columns["target"]]
        for file in sorted(path for name in names for path in folder.glob(name)):
            try:
                lines |= dict.fromkeys(gzip.decompress(file.read_bytes()).decode().split("\n"))
            except (ValueError, OSError, EOFError, zlib.error) as error:
                raise RecipeError(f"data.path: {file}: {error}") from error
        known = {text for role in self.recipe.data.splits for text in self._split(role).texts["target"]}
        if not (further := [line for line in lines if line.strip() and line not in known]):
            raise RecipeError(f"data.path: no further text in {folder}, {' or '.join(names)}")
        return further

    def _split(self, role: str) -> Corpus:
        return self.corpus if role == "train" else load(self.recipe, role, self.encode, keep_texts=True)

    def reads(self) -> str:
        return digest((super().reads() + "\n".join(self.lines)).encode())

    def words(self) -> list[str]:
        named = self.recipe.data.columns
        sides = {"source": named["target"], "target": named["source"]}
        return ["--data.columns", json.dumps(sides), "--data.languages", json.dumps(self.recipe.data.languages[::-1])]

    def complete(self, run: Path) -> None:
        finished = metrics.last(run / "metrics.jsonl")["finished"]
        weights, path = finished["weights"], run / "pairs.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["weights"] == weights:
            return
        reverse = Translation(parse([*self.given, *self.words()]), read_tokenizer(run / "model", "tokenizer"))
        model = AutoModelForSeq2SeqLM.from_pretrained(run / "model").eval()
        corpus = tokenise(
            reverse.recipe, dict.fromkeys(("source", "target"), self.lines), reverse.encode, keep_texts=True
        )
        target = np.array(corpus.texts["target"], object)
        source = np.full(len(target), "", object)
        for rows in tqdm(reverse.alike(corpus, np.arange(len(target)), num_beams=1), desc="translating back"):
            source[rows] = reverse.translate(model, corpus, rows, num_beams=1)
        written = sum(map(len, reverse.encode([*source], "target")))
        flops = finished["flops"] * (1 + written / finished["targets"] / 3)
        pairs = {"source": [*source], "target": [*target], "flops": flops, "weights": weights}
        write_text(path, json.dumps(pairs))

    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        if key is None:
            return super().plan(corpus, key, pool)
        whole, count = self._with_further(corpus), self.examples(corpus)
        others = self.examples(whole) - count
        drawn = np.random.default_rng(0).permutation(others)[np.arange(key[2] * count, (key[2] + 1) * count) % others]
        return self._batches(whole, np.concatenate([np.arange(count), count + drawn]), np.random.default_rng(key))

    def collate(self, corpus: Corpus, item: np.ndarray, draws: Draws, step: int) -> Batch:
        is_training = draws.key[1:2] == (CONTENT,)
        return super().collate(self._with_further(corpus) if is_training else corpus, item, draws, step)

    def _with_further(self, corpus: Corpus) -> Corpus:
        self.both = self.both or {
            side: Sequences.join([known, self.further[side]]) for side, known in corpus.columns.items()
        }
        return Corpus(self.both)


class GrowingWindows(CausalLM):
    """A first pass in windows of a quarter, a second in those of half of `data.window`, then whole ones (staged
    training, Press et al. 2021); their attention is counted as that of whole ones."""

    def plan(self, corpus: Corpus, key: Key | None, pool: int = 0) -> list[np.ndarray]:
        if key is None:
            return super().plan(corpus, key, pool)
        size = self.window * min(2 ** key[2], 4) // 4
        return _beside(CausalLM, self, window=size).plan(corpus, key, pool)


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
    """What each head gives times a gate, twice a sigmoid of what attention reads: Qiu et al. (2025) take it once, twice
    it is about 1 at first."""

    gates: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate_proj = nn.Linear(self.config.hidden_size, self.config.num_attention_heads, bias=False)
        self.o_proj.register_forward_pre_hook(self._gate)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        self.gates = 2 * self.gate_proj(hidden_states).sigmoid()
        return super().forward(hidden_states, *args, **kwargs)

    def _gate(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        assert (gates := self.gates) is not None
        self.gates = None
        return ((args[0].unflatten(-1, (-1, self.value_head_dim)) * gates[..., None]).flatten(-2),)


class SkippingBlock(ScratchBlock):
    """The later half of the layers also reads what the earlier half gave, the last what the first did, at weights that
    are learnt (U-net, Ronneberger et al. 2015, as in the speed runs of modded-nanoGPT). The first of an even number's
    later half so reads what is before it twice."""

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
    """Steps of neurons, the rows of a matrix, made as long as one another by a mean of the squares of earlier ones (Li
    et al. 2025), and the step of the matrix as long as it was. Weight decay is a part of the step."""

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


class Variation(NamedTuple):
    """What stands where, by what name, in trainings that the entries of a recipe say."""

    place: dict[str, Any]
    name: str
    part: type
    needs: dict[str, str]


def _objective(part: type) -> Variation:
    name = next(name for name, known in OBJECTIVES.items() if issubclass(part, known))
    return Variation(OBJECTIVES, name, part, {"objective": name})


DECODER = {"objective": "causal_lm", "model.model_type": "scratch_decoder"}
VARIATIONS = {
    "growing_batch": _objective(GrowingBatch),
    "short_first": _objective(ShortFirst),
    "token_dropout": _objective(TokenDropout),
    "distillation": _objective(Distillation),
    "back_translation": _objective(BackTranslation),
    "growing_windows": _objective(GrowingWindows),
    "value_residuals": Variation(vars(layers_scratch), "ScratchAttention", ValueResiduals, DECODER),
    "gated_heads": Variation(vars(layers_scratch), "ScratchAttention", GatedHeads, DECODER),
    "unet_skips": Variation(vars(stack_scratch), "ScratchBlock", SkippingBlock, DECODER),
    "normuon": Variation(vars(optimisation), "Muon", NorMuon, {"optimisation.optimizer": "muon"}),
}


def check(name: Any) -> None:
    """Raises ValueError where there is none of this name."""
    if name not in list(VARIATIONS):  # which may be a list
        raise ValueError(unknown("variation", str(name), VARIATIONS))


def counted(run: Run) -> float | None:
    """As `target_flops`, with those that an objective has `spent` before the run."""
    flops = target_flops(run)
    return None if flops is None else flops + getattr(run.objective, "spent", 0.0) / max(run.state.targets, 1)


def main(argv: list[str]) -> None:
    """Train with the variation that the first word names, in place of what it varies.

    Raises ValueError for another word, and a recipe that it does not fit.
    """
    check(argv[0] if argv else "")
    variation = VARIATIONS[argv[0]]
    recipe = parse(argv[1:]).model_dump()
    for field, value in variation.needs.items():
        if (given := reduce(lambda tree, key: tree.get(key, {}), field.split("."), recipe)) != value:
            raise ValueError(f"variation {argv[0]!r} is for {field}: {value}, not {given!r}")
    if recipe["model_card"] is not None:  # it might join one whose other seeds were trained without the variation
        raise ValueError(f"model_card: {recipe['model_card']!r} is for what a recipe alone says, not for a variation")
    variation.place[variation.name] = variation.part
    publication.target_flops = counted
    folder.environment = partial(folder.environment, module="benchmarks")  # which writes down the command
    identity = Recipe.identity  # of which the variation is part: neither goes on with the other's run
    Recipe.identity = lambda self: identity(self) | {"variation": argv[0]}  # type: ignore[method-assign]
    Preceded.given = argv[1:]
    command(argv[1:])
