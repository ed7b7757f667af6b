"""Who is compared, and at what size: shapes and batches of them, models of a shape by name, and contenders, which put
models to work."""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.embedding import mean_vectors
from hf_scratch_transformer.tokenization import Family, config_fields

from . import checkpoints, loop
from .corpus import FAMILIES, Sequences
from .objectives import IGNORED, OBJECTIVES, Batch
from .optimisation import autocasts, optimizers
from .recipe import Optimisation, parse
from .run import open_folder, open_tokenizer, prepare

OURS = "ours"
PAD, BOS, EOS, MASK, FIRST_WORD = range(5)
PRECISIONS = ("fp32", "tf32", "bf16")  # bf16: autocast in training, weights of that type elsewhere


@dataclass(frozen=True)
class Shape:
    """The size of a model and of the batches it is given. The tokens are drawn at random."""

    family: Family
    layers: int  # of each stack
    width: int
    heads: int
    feed_forward: int  # of the family's first peer; the others' makes up for what they have more or less elsewhere
    vocabulary: int
    length: int  # of the rows of a batch, padding included; of each side of a pair
    batch: int  # rows
    precision: str = "fp32"
    compile: bool = False

    def __post_init__(self) -> None:
        least = {"vocabulary": FIRST_WORD + 1, "length": 4}
        wrong = [
            f"{spec.name}={value!r} must be at least {least.get(spec.name, 1)}"
            for spec in dataclasses.fields(self)
            if spec.type is int and (value := getattr(self, spec.name)) < least.get(spec.name, 1)
        ]
        if not wrong and self.width % self.heads:
            wrong.append(f"heads={self.heads} must divide width={self.width}")
        if self.precision not in PRECISIONS:
            wrong.append(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        if wrong:
            raise ValueError("; ".join(wrong))


SHAPES = {
    "decoder": Shape("decoder", 6, 384, 6, 1024, 32000, 256, 8),
    "encoder": Shape("encoder", 6, 384, 6, 1536, 32000, 128, 16),
    "seq2seq": Shape("seq2seq", 4, 256, 4, 1024, 32000, 64, 32),
    "gpt2-124m": Shape("decoder", 12, 768, 12, 2048, 50304, 1024, 32, "bf16", True),
    "bert-110m": Shape("encoder", 12, 768, 12, 3072, 30528, 512, 32, "bf16", True),
    "transformer-63m": Shape("seq2seq", 6, 512, 8, 2048, 37056, 128, 128, "bf16", True),
    "tiny-decoder": Shape("decoder", 2, 16, 2, 32, 64, 16, 4),
    "tiny-encoder": Shape("encoder", 2, 16, 2, 32, 64, 16, 4),
    "tiny-seq2seq": Shape("seq2seq", 2, 16, 2, 32, 64, 16, 4),
}


def find_shapes(names: Iterable[str], **overrides: Any) -> dict[str, Shape]:
    """Shapes by name, with some fields replaced; `tiny` stands for all whose name starts with `tiny-`.

    Raises ValueError for an unknown name, with the nearest, or a field that cannot be.
    """
    found: dict[str, Shape] = {}
    for name in names:
        some = [key for key in SHAPES if key == name or key.startswith(f"{name}-")]
        if not some:
            raise ValueError(unknown("shape", name, SHAPES))
        found |= {key: dataclasses.replace(SHAPES[key], **overrides) for key in some}
    return found


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A message for a name that is not known, with the one that was meant, perhaps."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"{what} {name!r} is not known: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")


# --- Batches --------------------------------------------------------------------------------------------------------


def draw_lengths(rng: np.random.Generator, rows: int, longest: int) -> np.ndarray:
    """Lengths of sentences [rows]: log-normal, as in real text, some four tenths of the longest, which is the first."""
    lengths = np.exp(rng.normal(np.log(0.35 * longest), 0.6, rows)).round().clip(2, longest).astype(np.int64)
    lengths[0] = longest
    return lengths


def batches(shape: Shape, count: int, device: torch.device) -> list[Batch]:
    """Batches for training, in the terms of transformers: full rows for a decoder; padding on the right and 15% of the
    tokens masked for an encoder; sources and targets, both padded, for a seq2seq."""
    rng = np.random.default_rng(0)
    size = (shape.batch, shape.length)
    made = []
    for _ in range(count):
        ids = rng.integers(FIRST_WORD, shape.vocabulary, size)
        labels = ids
        batch = {}
        if shape.family != "decoder":
            real = np.arange(shape.length) < draw_lengths(rng, *size)[:, None]
            batch["attention_mask"] = real.astype(np.int64)
            if shape.family == "encoder":
                hidden = real & (rng.random(size) < 0.15)
                hidden[0, 0] = True
                labels, ids = np.where(hidden, ids, IGNORED), np.where(hidden, MASK, ids)
            else:
                targets = np.arange(shape.length) < draw_lengths(rng, *size)[:, None]
                labels = np.where(targets, rng.integers(FIRST_WORD, shape.vocabulary, size), IGNORED)
            ids = np.where(real, ids, PAD)
        batch |= {"input_ids": ids, "labels": labels}
        made.append({name: torch.from_numpy(values).to(device) for name, values in batch.items()})
    return made


# --- Models ---------------------------------------------------------------------------------------------------------


class Peer(NamedTuple):
    """A model of others. `make` takes a shape; what it returns is called as transformers' models are: to train, with
    `input_ids`, `attention_mask` where there is padding, and `labels`, for a `loss`; `generate`; to embed, its
    `base_model`, for a `last_hidden_state`."""

    make: Callable[[Shape], nn.Module]
    families: tuple[str, ...]
    kinds: tuple[str, ...] = ("train",)
    is_native: bool = False
    is_sized: bool = True  # whether it heeds `feed_forward`


# Names under which configurations keep the dropout of embeddings and sub-layers.
RESIDUAL_DROPOUTS = ("dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop")


@dataclass(frozen=True)
class Native:
    """A model of transformers."""

    family: Family
    model_type: str
    widths: tuple[str, ...]  # the fields that hold the width of the feed-forward layers
    fields: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("train", "generate", "embed")

    def make(self, shape: Shape, dropout: float = 0.0, **fields: Any) -> PreTrainedModel:
        """A new model of a shape; `fields` of its configuration win."""
        stacks = ("encoder", "decoder") if self.family == "seq2seq" else ("num",)
        layers = {"num": "num_hidden_layers", "encoder": "encoder_layers", "decoder": "decoder_layers"}
        values = {
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.width,
            "max_position_embeddings": shape.length,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            **{layers[stack]: shape.layers for stack in stacks},
            **{f"{stack}_attention_heads": shape.heads for stack in stacks},
            **dict.fromkeys(self.widths, shape.feed_forward),
        }
        config = AutoConfig.for_model(self.model_type, **{**values, **self.fields, **fields})
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, dropout if name in RESIDUAL_DROPOUTS else 0.0)
        return AUTO_MODELS[self.family].from_config(config)


AUTO_MODELS: dict[str, Any] = {family: OBJECTIVES[name].auto_model for name, family in FAMILIES.items()}
# Both sides of a pair speak one language here, and every output is as long as is asked for.
PAIRS = {"decoder_start_token_id": BOS, "forced_bos_token_id": None, "forced_eos_token_id": None}
FFN = ("encoder_ffn_dim", "decoder_ffn_dim")
CLS = {"cls_token_id": BOS, "sep_token_id": EOS}
# The first of a family is the one whose architecture ours takes, unless another is asked for.
NATIVES = {
    "llama": Native("decoder", "llama", ("intermediate_size",), {"tie_word_embeddings": True}),
    "gpt2": Native("decoder", "gpt2", ("n_inner",)),
    "distilbert": Native("encoder", "distilbert", ("hidden_dim",)),
    "bert": Native("encoder", "bert", ("intermediate_size",)),
    "modernbert": Native("encoder", "modernbert", ("intermediate_size",), CLS),
    "modernbert-sparse": Native(
        "encoder", "modernbert", ("intermediate_size",), CLS | {"sparse_prediction": True}, ("train",)
    ),
    "marian": Native("seq2seq", "marian", FFN, PAIRS | {"activation_function": "swish", "scale_embedding": True}),
    "bart": Native("seq2seq", "bart", FFN, PAIRS),
}


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer`, or its encoder, as its documentation uses it, with what it takes to train it: token and
    position tables, a tied head, a loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_causal = shape.family == "decoder"
        sizes = (shape.width, shape.heads)
        options: dict[str, Any] = {"dropout": 0.0, "activation": F.gelu, "batch_first": True}
        if shape.family == "seq2seq":
            self.core: nn.Module = nn.Transformer(*sizes, shape.layers, shape.layers, shape.feed_forward, **options)
        else:
            layer = nn.TransformerEncoderLayer(*sizes, shape.feed_forward, **options)
            self.core = nn.TransformerEncoder(layer, shape.layers)
        self.tokens = nn.Embedding(shape.vocabulary, shape.width, padding_idx=PAD)
        self.positions = nn.Embedding(shape.length, shape.width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)  # as everybody's; the default, 1, makes for a loss of hundreds
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def embed(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        padding = None if attention_mask is None else attention_mask == 0
        ahead = torch.ones(labels.shape[1], labels.shape[1], dtype=torch.bool, device=labels.device).triu(1)
        if isinstance(self.core, nn.Transformer):
            targets = F.pad(labels.masked_fill(labels == IGNORED, PAD)[:, :-1], (1, 0), value=BOS)
            hidden_states = self.core(
                self.embed(input_ids),
                self.embed(targets),
                tgt_mask=ahead,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
                tgt_is_causal=True,
            )
        else:
            mask = ahead if self.is_causal else None
            hidden_states = self.core(self.embed(input_ids), mask, padding, is_causal=self.is_causal)
        logits = self.head(hidden_states)
        if self.is_causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class NanoGPT(nn.Module):
    """The model of a checkout of nanoGPT, called as the others are."""

    def __init__(self, module: ModuleType, shape: Shape) -> None:
        super().__init__()
        config = module.GPTConfig(
            block_size=shape.length,
            vocab_size=shape.vocabulary,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.width,
            dropout=0.0,
        )
        self.gpt = module.GPT(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        _, loss = self.gpt(input_ids, F.pad(labels[:, 1:], (0, 1), value=-1))  # its label of nothing
        return SimpleNamespace(loss=loss)


PEERS = {name: Peer(native.make, (native.family,), native.kinds, True) for name, native in NATIVES.items()}
PEERS["torch"] = Peer(TorchTransformer, get_args(Family))


def find_peer(name: str) -> Peer:
    """A peer by its name, `nanogpt=PATH` of a checkout, or `module:function`, which is given a `Shape`.

    Raises ValueError for what is not there, with the nearest name.
    """
    if name in PEERS:
        return PEERS[name]
    kind, _, place = name.partition("=")
    if kind == "nanogpt":
        path = Path(place).expanduser() / "model.py"
        spec = importlib.util.spec_from_file_location("nanogpt_model", path)
        if not place or not path.is_file() or spec is None or spec.loader is None:
            raise ValueError(f"peer {name!r}: there is no {path}; give nanogpt=PATH of a checkout")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return Peer(functools.partial(NanoGPT, module), ("decoder",), is_sized=False)
    where, _, function = name.partition(":")
    if not function:
        raise ValueError(unknown("peer", name, [*PEERS, "nanogpt=PATH", "module:function"]))
    try:
        make = getattr(importlib.import_module(where), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"peer {name!r}: {error}") from error
    return Peer(make, get_args(Family), ("train", "generate", "embed"), is_sized=False)


def reference(family: str) -> str:
    """The peer whose architecture ours takes, and whose number of parameters all others are given."""
    return next(name for name, native in NATIVES.items() if native.family == family)


def ours(shape: Shape, like: str) -> PreTrainedModel:
    """Our model in the architecture of a native one."""
    return convert_from(NATIVES[like].make(shape))


def parameters(model: nn.Module) -> int:
    """How many are trained; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def sized(make: Callable[[Shape], nn.Module], shape: Shape, target: int) -> Shape:
    """The shape whose feed-forward width brings the parameters nearest to `target`. They grow linearly with it."""
    width = shape.feed_forward
    with torch.device("meta"):
        one, two = (parameters(make(dataclasses.replace(shape, feed_forward=k * width))) for k in (1, 2))
    unit = 64 if width % 64 == 0 else 1  # as round as it was: GPUs multiply round sizes faster
    best = round((width + (target - one) * width / (two - one)) / unit) * unit
    return dataclasses.replace(shape, feed_forward=max(best, unit))


# --- Contenders -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What the command line says beside kinds, shapes and peers."""

    device: torch.device
    rounds: int
    steps: int | None  # of a round
    warmup: int | None
    new_tokens: int | None
    texts: int
    axes: tuple[str, ...]
    values: tuple[int, ...]
    optimizer: str
    like: str | None
    recipe: str | None
    overrides: tuple[str, ...]


class Contender(ABC):
    """One side of a comparison: `build` once, then `step` on one batch after another."""

    name: str
    batches: Sequence[Any]
    # Seconds of the last step that do not count, since a longer one would spend no more on them.
    once: float = 0.0

    @abstractmethod
    def build(self) -> None:
        """Make what `step` needs."""

    @abstractmethod
    def step(self, batch: Any) -> Tensor:
        """The work that is timed; returns what came of it, by which contenders can be compared."""

    @abstractmethod
    def tokens(self, batch: Any) -> int:
        """Real tokens, without padding, in the last step, which was on this batch."""

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


@dataclass
class ModelContender(Contender):
    """A model of a shape, ours or another's."""

    name: str
    make: Callable[[], nn.Module]
    batches: Sequence[Any]
    shape: Shape
    options: Options
    is_ours: bool
    arguments: dict[str, Any] = field(default_factory=dict)  # of every call, beside the batch
    model: Any = field(init=False)

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = self.make().to(self.options.device)

    def traffic(self, batch: Any) -> float:
        """Bytes of weights that one reading of all of them moves."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


class Training(ModelContender):
    """Forward, backward and AdamW."""

    def build(self) -> None:
        super().build()
        self.model.train()
        if self.is_ours:
            (self.optimizer,) = optimizers(self.model, Optimisation(learning_rate=1e-4))
        else:
            if isinstance(self.model, PreTrainedModel):
                self.model.config.use_cache = False  # as Trainer does
            options: dict[str, Any] = {"betas": Optimisation().betas, self.options.optimizer: True}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, **options)
        if self.shape.compile:
            self.model.compile()

    def step(self, batch: Batch) -> Tensor:
        bf16 = self.shape.precision == "bf16"
        with torch.autocast(self.options.device.type, torch.bfloat16, enabled=bf16):
            loss = self.model(**batch, **self.arguments).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def tokens(self, batch: Batch) -> int:
        return real_tokens(batch, self.shape.family == "seq2seq")

    def traffic(self, batch: Batch) -> float:
        # Weights read forward and backward, the gradient written and read, AdamW's three tensors read and written.
        return 10 * super().traffic(batch)


def real_tokens(batch: Batch, of_target: bool) -> int:
    """Tokens of a batch without padding: of the target, or of the text."""
    if of_target:
        return int((batch["labels"] != IGNORED).sum())
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


class Inference(ModelContender):
    """A model that is not trained: bf16 is the type of its weights."""

    def build(self) -> None:
        super().build()
        self.model.eval()
        if self.shape.precision == "bf16":
            self.model.to(torch.bfloat16)


class Generation(Inference):
    """As many tokens as asked for, no fewer, through `generate`."""

    def step(self, batch: Batch) -> Tensor:
        return self.model.generate(**batch, do_sample=False, **self.arguments)[:, -self.arguments["max_new_tokens"] :]

    def tokens(self, batch: Batch) -> int:
        return len(batch["input_ids"]) * self.arguments["max_new_tokens"]

    def traffic(self, batch: Batch) -> float:
        once = self.model.get_encoder().layers if self.shape.family == "seq2seq" else nn.Identity()
        encoder = sum(parameter.numel() * parameter.element_size() for parameter in once.parameters())
        return encoder + (super().traffic(batch) - encoder) * self.arguments["max_new_tokens"]


class Embedding(Inference):
    """One vector a text, the mean over its tokens, in the order given. Others take the texts as they come and pad each
    batch to its longest; ours puts texts of like length together."""

    @torch.inference_mode()
    def step(self, batch: Sequences) -> Tensor:
        rows, lengths, device = self.shape.batch, batch.lengths, self.options.device
        if self.is_ours:
            texts = [ids.tolist() for ids in np.split(batch.tokens, batch.offsets[1:-1])]
            return mean_vectors(self.model.base_model, texts, rows * int(lengths.max()))
        vectors = torch.empty(len(lengths), self.shape.width, device=device)
        for start in range(0, len(lengths), rows):
            chosen = np.arange(start, min(start + rows, len(lengths)))
            ids = torch.from_numpy(batch.padded(chosen, PAD))
            mask = (torch.arange(ids.shape[1]) < torch.from_numpy(lengths[chosen])[:, None]).long().to(device)
            states = self.model.base_model(input_ids=ids.to(device), attention_mask=mask).last_hidden_state  # (B, T, D)
            vectors[torch.from_numpy(chosen)] = (states * mask[..., None]).sum(1).float() / mask.sum(1, keepdim=True)
        return vectors

    def tokens(self, batch: Sequences) -> int:
        return len(batch.tokens)

    def traffic(self, batch: Sequences) -> float:
        return super().traffic(batch) * math.ceil(len(batch.tokens) / (self.shape.batch * self.shape.length))


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

    def build(self) -> None:
        recipe, device = self.recipe, self.options.device
        self.bf16 = autocasts(recipe.optimisation.precision, device.type)
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if self.bf16 else "no")
        open_folder(recipe, accelerator)
        tokenizer = open_tokenizer(recipe, self.folder, accelerator)
        objective: Any = OBJECTIVES[recipe.objective](recipe, tokenizer)
        self.run = prepare(recipe, accelerator, None, objective, self.folder, time.monotonic())
        self.run.store = NoStore(self.folder, recipe.checkpoints)
        self.collate = objective.collate = Counting(objective.collate, recipe.objective == "translation")
        self.model = self.run.eval_model

    def step(self, batch: None) -> Tensor:
        run, before = self.run, self.run.state.targets
        self.collate.counts.clear()
        optimisation = self.recipe.optimisation.model_copy(update={"max_steps": run.state.step + self.steps})
        run.recipe = self.recipe.model_copy(update={"optimisation": optimisation})
        loop.train(run)
        return torch.tensor(run.state.targets - before)

    def tokens(self, batch: None) -> int:
        return sum(self.collate.counts[: self.steps * self.recipe.optimisation.accumulation])


class NoStore(checkpoints.Store):
    """Keeps nothing."""

    def save(self, *_: Any) -> Path:
        return self.folder


class Counting:
    """A collator that notes the real tokens of each batch. Loaders may read ahead: only the first were trained on."""

    def __init__(self, collate: Callable[..., Batch], of_target: bool) -> None:
        self.collate, self.of_target = collate, of_target
        self.counts: list[int] = []

    def __call__(self, *arguments: Any) -> Batch:
        batch = self.collate(*arguments)
        self.counts.append(real_tokens(batch, self.of_target))
        return batch


class TrainerRun(Contender):
    """transformers' Trainer on the corpus, tokenizer and optimisation settings of our run, with a native model of the
    same size, set up as its example scripts do: batches of a fixed number of rows, padded to their longest. The number
    is chosen so that a batch holds as many real tokens as ours."""

    def __init__(self, name: str, native: str, recipe_run: RecipeRun, by_line: bool = False) -> None:
        self.name, self.batches = name, (None,)
        self.native, self.ours, self.by_line = NATIVES[native], recipe_run, by_line
        self.watch = Watch()

    def build(self) -> None:
        run, recipe = self.ours.run, self.ours.recipe
        config, tokenizer = run.eval_model.config, run.objective.tokenizer
        corpus = next(iter(run.parts(0, 0)))
        size, of_target = recipe.data.window, recipe.objective == "translation"
        if of_target:
            rows = Rows(input_ids=cut(corpus.columns["source"]), labels=cut(corpus.columns["target"]))
        elif self.by_line:
            rows = Rows(input_ids=[ids[:size] for ids in cut(corpus.columns["text"])])
        else:
            stream = corpus.columns["text"].tokens
            rows = Rows(input_ids=[stream[start : start + size] for start in range(0, len(stream), size)])
        plan = run.objective.plan(corpus, np.random.default_rng(0))
        # Real tokens in a batch of ours, and in a row here.
        of_batch = len(corpus.columns["target" if of_target else "text"].tokens) / len(plan)
        of_row = np.mean([len(ids) for ids in rows.columns["labels" if of_target else "input_ids"]])
        shape = Shape(
            family=self.native.family,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            feed_forward=config.intermediate_size,
            vocabulary=len(tokenizer),
            length=config.max_position_embeddings,
            batch=max(1, round(of_batch / of_row)),
        )
        fields: dict[str, Any] = config_fields(tokenizer, self.native.family)

        def make(shape: Shape) -> PreTrainedModel:
            return self.native.make(shape, config.dropout, **fields)

        torch.manual_seed(0)
        self.model: Any = make(sized(make, shape, parameters(run.eval_model)))
        # Ours was given what is quicker on this device and in this precision.
        self.model.set_attn_implementation(config._attn_implementation)
        if of_target:
            collate: Any = DataCollatorForSeq2Seq(tokenizer, self.model)
        else:
            share = recipe.optimisation.mask_fraction[0] if recipe.objective == "masked_lm" else None
            collate = DataCollatorForLanguageModeling(tokenizer, mlm=share is not None, mlm_probability=share)
        self.collate = Counting(collate, of_target)
        spec = recipe.optimisation
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(self.ours.folder / "trainer"),
            max_steps=self.ours.steps,
            per_device_train_batch_size=shape.batch,
            gradient_accumulation_steps=spec.accumulation,
            learning_rate=1e-4,
            label_smoothing_factor=spec.label_smoothing,
            max_grad_norm=spec.clip_norm,
            bf16=self.ours.bf16,
            torch_compile=spec.compile,
            use_cpu=self.ours.options.device.type == "cpu",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=recipe.seed,
        )
        self.trainer = Seq2SeqTrainer(self.model, arguments, self.collate, rows)
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.add_callback(self.watch)

    def step(self, batch: None) -> Tensor:
        self.collate.counts.clear()
        start = time.perf_counter()
        loss = self.trainer.train().training_loss
        self.once = time.perf_counter() - start - self.watch.seconds
        return torch.tensor(loss)

    def tokens(self, batch: None) -> int:
        return sum(self.collate.counts[: self.ours.steps * self.ours.recipe.optimisation.accumulation])


class Watch(TrainerCallback):
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


def cut(sequences: Sequences) -> list[np.ndarray]:
    """Each sequence by itself."""
    return np.split(sequences.tokens, sequences.offsets[1:-1])
