"""A run: what it is made of and how far it is; set up from a recipe, saved, resumed, and finished."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    ProjectConfiguration,
    broadcast_object_list,
    set_seed,
)
from pydantic import ConfigDict, Field, TypeAdapter
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from hf_scratch_transformer.files import replacing, write_text
from hf_scratch_transformer.tokenization import check_tokenizer, config_fields, sides

from . import cards, checkpoints, corpus, folder, launcher, metrics, preparation, sharding, sources
from .base_model import PATH, fingerprint, open_base
from .objectives import OBJECTIVES, Objective
from .optimisation import autocasts, lr_factor, optimizers
from .recipe import ADJUSTABLE, Recipe, changes, dump
from .sections import RecipeError, reason


class TrainingError(RuntimeError):
    """A run that cannot go on. The message is meant for the terminal, without a traceback."""


class Interrupted(Exception):
    """The run was asked to stop by a signal."""

    def __init__(self, number: int, what_is_left: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{what_is_left}")
        self.number = number


Count = Annotated[int, Field(ge=0)]


@dataclass
class State:
    """How far a run is: everything, beside weights and optimisers, that the next step depends on."""

    step: Count = 0  # optimiser steps done
    epoch: Count = 0
    part: Count = 0  # of the epoch, where it has several
    batch: Count = 0  # batches of the part that are used up
    seconds: Annotated[float, Field(ge=0)] = 0.0  # of wall clock, over all the processes that worked on the run
    targets: Count = 0  # tokens predicted
    window_loss_sum: float = 0.0  # nats since the last line of the log
    window_targets: Count = 0
    window_start: float = 0.0
    best_score: float | None = None  # best evaluation so far, lower is better
    bad_evals: Count = 0  # evaluations since then
    lr_reductions: Count = 0  # by the plateau schedule
    plateau_evals: Count = 0  # evaluations without progress since the last reduction
    last_done: dict[str, float] = field(default_factory=dict)  # seconds at the last evaluation and checkpoint
    n_averaged: Count = 0  # steps in the moving average
    skipped_steps: Count = 0  # left out, since their gradients were not finite
    skipped_in_row: Count = 0  # of them, the last ones
    unmeasured: bool = False  # whether an evaluation is due that a signal forestalled

    __pydantic_config__ = ConfigDict(extra="forbid")

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "State":
        """From the entries of a checkpoint, whose names may be those of version 0.1.

        Raises ValueError for an entry that no state has, or of another type.
        """
        return TypeAdapter(cls).validate_python({RENAMED.get(name, name): value for name, value in record.items()})


RENAMED = {
    "window_nats": "window_loss_sum",
    "score": "best_score",
    "stale": "bad_evals",
    "cuts": "lr_reductions",
    "uncut": "plateau_evals",
    "done": "last_done",
    "averaged": "n_averaged",
}


@dataclass(kw_only=True)
class Session:
    """What it takes to measure a model."""

    recipe: Recipe
    accelerator: Accelerator
    objective: Objective
    share: tuple[int, int]  # which of the batches are this process's, and of how many shares
    signal: Callable[[], int] = lambda: 0  # that this process has received

    @property
    def sharers(self) -> int:
        """How many processes work on the same batches, in a tensor-parallel group."""
        return self.accelerator.num_processes // self.share[1]


@dataclass(kw_only=True)
class Run(Session):
    """A run in progress."""

    model: torch.nn.Module  # as it is trained: compiled, inside DistributedDataParallel
    unwrapped_model: PreTrainedModel  # the same weights, maybe sharded
    ema_model: AveragedModel | None  # moving average of the weights, sharded as they are
    optimizers: list[Optimizer]
    parts: Callable[[int, int], Iterator[corpus.Part]]  # (epoch, first part)
    rows: int  # of the training split, or of its first part
    validation: corpus.Corpus | None
    test: corpus.Corpus | None
    store: checkpoints.Store
    log: metrics.Log
    identity: dict[str, Any]
    state: State = field(default_factory=State)
    loss_sum: torch.Tensor = field(init=False)  # nats of this process since the last line of the log
    started: float = field(default_factory=time.monotonic)
    last_drawn: float = field(default_factory=time.monotonic)
    mfu: float = 0.0  # of one target a second: the share of what the devices do at best; 0 where it is not known
    data_seconds: float = 0.0  # that this process has waited for batches since the last line of the log

    def __post_init__(self) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.log.path.parent

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are spread over the processes."""
        return sharding.is_sharded(self.unwrapped_model)

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.accelerator.is_main_process

    def clock(self) -> float:
        """Seconds this run has taken, earlier processes included."""
        return time.monotonic() - self.started

    def progress(self) -> float:
        """The share of the run's steps that are done, which its schedules follow: never the clock, since a slower
        machine would train another model."""
        return self.state.step / self.recipe.optimisation.max_steps

    def limit(self) -> str:
        """The limit that the run has reached, in words; empty while there is none."""
        spec, state = self.recipe.optimisation, self.state
        if state.step >= spec.max_steps:
            return f"{state.step} steps are done"
        if spec.max_minutes is not None and state.seconds >= 60 * spec.max_minutes:
            return f"optimisation.max_minutes {spec.max_minutes:g} is over at step {state.step} of {spec.max_steps}"
        return ""

    def finished(self) -> str:
        """Why the run is over, in words; empty while it is not."""
        patience = self.recipe.evaluation.early_stopping
        if self.state.unmeasured:
            return ""
        if patience is not None and self.state.bad_evals >= patience:
            return f"{self.state.bad_evals} evaluations without progress"
        return self.limit()

    def collect_loss(self) -> None:
        """Bring the loss that has gathered on the devices into the state."""
        self.state.window_loss_sum += float(self.accelerator.reduce(self.loss_sum, "sum")) / self.sharers
        self.loss_sum.zero_()

    def measured_model(self) -> PreTrainedModel:
        """The model with the weights to measure, averaged where the run keeps an average."""
        return self.unwrapped_model if self.ema_model is None else self.ema_model.module

    def draw(self) -> None:
        """Bring `curves.png` up to date."""
        self.last_drawn = time.monotonic()
        metrics.draw(metrics.read(self.log.path), self.folder / "curves.png")


# --- Setting up -----------------------------------------------------------------------------------------------------

# oneDNN keeps the programs it has made for products, of which each new number of tokens in a batch needs some, of a
# megabyte or more each: by its own default 1,024, which are gigabytes. A step's own are fewer than these.
KEPT_PRIMITIVES = "128"
LARGEST_KEPT, KEPT = 2**25, 2**28  # bytes: of a tensor, as much as glibc takes; at the end of its heap
# Runs with a process group, never freed: gloo's process group, once nothing refers to it, waits for its threads while
# it holds the interpreter lock that these may be waiting for.
KEPT_RUNS: list[Run] = []


def open_accelerator(recipe: Recipe) -> Accelerator:
    """The processes of the run and their devices."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    bf16 = autocasts(recipe.optimisation.precision, device.type)
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # read at the first product
        os.environ.setdefault(name, KEPT_PRIMITIVES)
    AcceleratorState._reset_state()  # of an earlier run of this process, whose precision need not be this one's
    with sharding.unmeshed():
        return Accelerator(
            cpu=device.type == "cpu",  # else several processes on a CPU would not find each other
            mixed_precision="bf16" if bf16 else "no",
            log_with=list(recipe.trackers) or None,
            kwargs_handlers=[launcher.meeting(), DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            project_config=ProjectConfiguration(logging_dir=os.path.join(recipe.output_dir, "tensorboard")),
        )


def open_run(recipe: Recipe, accelerator: Accelerator, source: Path) -> Run:
    """The run of the recipe in the file `source`: its corpus read, its model built, its checkpoint loaded if it is
    resumed; and once nothing can be refused any more, its folder opened.

    Raises RecipeError when the folder, the corpus or the tokenizer cannot be used, CheckpointError when the checkpoint
    is another run's. The folder is then as it was.
    """
    started = time.monotonic()
    where = Path(recipe.output_dir)
    # Whatever it was told to make of an earlier run: this one would be its victim.
    if broadcast_object_list([launcher.has_written(where / "recipe.yaml")])[0]:
        recipe = recipe.model_copy(update={"resume": True, "overwrite": False})
    if accelerator.is_main_process:
        views = (recipe.data, *sources.views(recipe.data))
        paths: list[str | Path] = [*(each.path for each in views), *sources.local_files(recipe.data)]
        named = [("the recipe", source), *(("data", Path(path)) for path in paths)]
        models = {"tokenizer.path": recipe.tokenizer.path, f"model.{PATH}": recipe.model.get(PATH)}
        named += [(name, Path(path)) for name, path in models.items() if path]
        folder.check(where, named, resume=recipe.resume, overwrite=recipe.overwrite)
        if recipe.model_card is not None:
            cards.check(Path(recipe.model_card), source, where)
    run = prepare(recipe, accelerator, where, started)
    if recipe.resume:
        resume(run)
    if run.is_main:
        begin(run)
    accelerator.wait_for_everyone()
    return run


def begin(run: Run) -> None:
    """Open the run's folder: earlier runs out of it, the recipe, the environment and the tokenizer into it."""
    accelerator, where = run.accelerator, run.folder
    folder.clear(where, resume=run.recipe.resume)
    run.store.sweep()
    write_text(where / "recipe.yaml", dump(run.recipe))
    about = folder.environment(accelerator.device, accelerator.num_processes)
    write_text(where / "environment.json", json.dumps(about, indent=1) + "\n")
    if not (where / "tokenizer").exists():
        with replacing(where / "tokenizer") as temporary:
            run.objective.tokenizer.save_pretrained(temporary)
    run.log.truncate(run.state.step)


def open_tokenizer(recipe: Recipe, where: Path, accelerator: Accelerator) -> PreTrainedTokenizerFast:
    """The tokenizer: that of the run's folder if it is resumed, else trained or loaded; all get the main process's."""
    with tempfile.TemporaryDirectory() as temporary:
        files: dict[str, bytes] = {}
        if accelerator.is_main_process:
            saved = where / "tokenizer"
            if recipe.resume and saved.exists():
                corpus.read_tokenizer(saved, "output_dir")  # which would name another folder below
            else:
                saved = Path(temporary, "made")
                preparation.tokenizer(recipe).save_pretrained(saved)
            files = {path.name: path.read_bytes() for path in saved.iterdir()}
        read = Path(temporary, "tokenizer")
        read.mkdir()
        for name, content in broadcast_object_list([files])[0].items():
            (read / name).write_bytes(content)
        return corpus.read_tokenizer(read, "output_dir")


def prepare(recipe: Recipe, accelerator: Accelerator, where: Path, started: float) -> Run:
    """Tokenizer, corpus, model and optimisers of a run at its first step; its clock counts from `started` (monotonic).
    Nothing is written into its folder `where`.

    Raises RecipeError when one of them cannot be had.
    """
    plugin = sharding.plugin(accelerator)
    share = sharding.share(accelerator, plugin)
    if recipe.optimisation.compile and share[1] < accelerator.num_processes:
        raise RecipeError("optimisation.compile: torch cannot compile a tensor-parallel model: leave it out")
    if recipe.optimisation.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    sources.check_splits(recipe.data)
    objective = OBJECTIVES[recipe.objective](recipe, open_tokenizer(recipe, where, accelerator))
    config = recipe.build_config(**config_fields(objective.tokenizer, corpus.FAMILIES[recipe.objective]))
    # Rows of new tokens are drawn around the mean of all that a model has: it is read whole then.
    grows = PATH in recipe.model and len(objective.tokenizer) > config.vocab_size
    unfilled = sharding.Unfilled() if plugin is not None and not grows else None
    with unfilled or contextlib.nullcontext():
        model, saved = build_model(recipe, accelerator, objective, config)
    if recipe.optimisation.gradient_checkpointing or (plugin is not None and plugin.activation_checkpointing):
        try:
            with warnings.catch_warnings():  # its name in every version that we take
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise RecipeError(f"optimisation.gradient_checkpointing: {reason(error)}") from error
    base = {}
    if saved:  # which is all of a large model
        base["base_model"] = broadcast_object_list([fingerprint(saved) if accelerator.is_main_process else ""])[0]
    say = partial(print, file=sys.stderr) if accelerator.is_main_process else str
    whole = partial(preparation.prepared, recipe, objective, say)
    parts = corpus.Parts(recipe, objective.encode, objective.end, say, whole, objective.pools)
    train = parts.first
    held_out = {
        role: corpus.load(recipe, role, objective.encode, keep_texts=True) if role in recipe.data.splits else None
        for role in ("validation", "test")
    }
    sharding.glibc("malloc_trim", 0)  # what tokenising has freed goes back to the system: 2 GB of ten million words
    for role, split in held_out.items():
        if split is not None and objective.end(split) < 1:
            raise RecipeError(f"data.splits.{role}: too short for a single prediction")
    if accelerator.is_main_process:
        announce(accelerator, objective, model, {"train": train, **held_out}, is_sharded=plugin is not None)
    spec, ema_model = recipe.optimisation, None
    prepared = accelerator.prepare(model) if plugin is None else model
    if spec.final_weights == "ema":
        ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(spec.ema_decay))
    if plugin is not None:
        for module in (model, ema_model.module) if ema_model is not None else (model,):
            sharding.shard(module, plugin, accelerator, unfilled)
        if saved and unfilled is not None:
            checkpoints.load_weights(model, saved)
        if ema_model is not None:
            checkpoints.load_weights(ema_model.module, sharding.weights(model))
    prepared.train()
    if spec.compile:
        prepared = torch.compile(prepared, dynamic=True)
    if saved and not math.isfinite(norm := weight_norm(model)):
        raise RecipeError(f"model.{PATH}: {recipe.model[PATH]}: the norm of its weights is {norm}")
    if accelerator.device.type == "cpu" and plugin is None:  # which has told it to keep nothing
        keep_memory()
    return Run(
        recipe=recipe,
        accelerator=accelerator,
        objective=objective,
        share=share,
        model=prepared,
        unwrapped_model=model,
        ema_model=ema_model,
        optimizers=optimizers(model, spec),
        parts=parts,
        rows=objective.examples(train),
        validation=held_out["validation"],
        test=held_out["test"],
        store=checkpoints.Store(where / "checkpoints", recipe.checkpoints),
        log=metrics.Log(where / "metrics.jsonl"),
        identity={
            "recipe": recipe.identity(),
            "tokenizer": corpus.vocabularies(objective.tokenizer),
            "corpus": train.fingerprint,
            **base,
        },
        started=started,
    )


def keep_memory() -> None:
    """Have glibc keep some of what is freed for what is asked for next, in this process from now on, unless its user
    has told it otherwise (`MALLOC_TRIM_THRESHOLD_` and the like).

    What it gives back after a step is had again by a page fault for each 4 KB, which the kernel fills with zeros: for a
    small translator 28,000 a step, 5% of its time. Larger tensors come from the system each time, and go back.
    """
    if not any(name.startswith("MALLOC_") for name in os.environ):
        # Either alone would end glibc's own choice of the other, which grows with what is freed up to this.
        sharding.glibc("mallopt", sharding.M_MMAP_THRESHOLD, LARGEST_KEPT)
        sharding.glibc("mallopt", sharding.M_TRIM_THRESHOLD, KEPT)


def build_model(
    recipe: Recipe, accelerator: Accelerator, objective: Objective, config: PreTrainedConfig
) -> tuple[PreTrainedModel, Mapping[str, torch.Tensor]]:
    """A recipe's model of that configuration, its parameters drawn from the seed, and those of the model that it goes
    on from, which it has if it has memory.

    Raises RecipeError when it does not fit the tokenizer, or there is no such model.
    """
    tokenizer, base = objective.tokenizer, recipe.model.get(PATH)
    saved: Mapping[str, torch.Tensor] = {}
    set_seed(recipe.seed)
    # On a CPU, torch's fused attention goes backward in bf16 some twenty times slower than the formula written out.
    slow_fused = accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16"
    if base is None and objective.auto_model._model_mapping.get(type(config), None) is None:
        ours = f"scratch_{corpus.FAMILIES[recipe.objective]}"
        raise RecipeError(f"model: {config.model_type} is not for {recipe.objective}; {ours} is")
    try:
        if base is None:
            model = objective.auto_model.from_config(config)
        else:
            model, saved = open_base(base, config, objective.auto_model)
            if model.device.type != "meta":
                checkpoints.load_weights(model, saved)
            if len(tokenizer) > config.vocab_size:
                model.resize_token_embeddings(len(tokenizer))
        for side, name in zip(sides(tokenizer), (False, True), strict=True):
            check_tokenizer(side, model.config, target=name)
    except Exception as error:  # of sizes that are not to be had, and whatever a native class makes of its fields
        raise RecipeError(f"model{'' if base is None else f'.{PATH}'}, tokenizer: {reason(error)}") from error
    if slow_fused:
        model.set_attn_implementation("eager")
    return model, saved


def announce(
    accelerator: Accelerator,
    objective: Objective,
    model: PreTrainedModel,
    splits: Mapping[str, corpus.Corpus | None],
    is_sharded: bool,
) -> None:
    """On the terminal: what is trained, on what, with how many threads."""
    known: dict[str, corpus.Corpus] = {}
    for role, split in splits.items():
        if split is not None:
            for several in sources.named(objective.recipe.data, role):
                print(f"{role}: {several}", file=sys.stderr)
            print(corpus.account(role, split, objective.examples(split), objective.tokenizer), file=sys.stderr)
            parts = corpus.mixed(split, objective.recipe) if role == "train" else []
            total = sum(source.weight for source, _ in parts)
            for source, held in parts:
                path = source.path or objective.recipe.data.path
                share = f"{source.weight / total:.1%} of its tokens from {path}"
                print(f"{role}: {share}, which has {held.tokens:,}", file=sys.stderr)
            for other, text in known.items():
                if text.fingerprint == split.fingerprint:
                    print(f"{role}: the same text as {other}", file=sys.stderr)
                elif shared := split.shared(text):
                    part = "the first part of " if other == "train" and objective.recipe.data.streaming else ""
                    print(f"{role}: {shared:,} of its rows are in {part}{other} as well", file=sys.stderr)
            known[role] = split
    share = folder.cores() // accelerator.num_processes
    if accelerator.device.type == "cpu" and torch.get_num_threads() < share:
        # What `accelerate launch` does unless told otherwise.
        print(f"{torch.get_num_threads()} thread(s) of {share}: accelerate launch --cpu uses all", file=sys.stderr)
    tokens = " + ".join(f"{len(side):,}" for side in dict.fromkeys(sides(objective.tokenizer)))
    size = f"{model.num_parameters():,} parameters, {tokens} tokens"
    spread = f", spread over {accelerator.num_processes} processes" if is_sharded else ""
    print(f"{type(model).__name__}: {size}{spread}", file=sys.stderr)


# --- Saving and resuming --------------------------------------------------------------------------------------------


def weight_norm(model: torch.nn.Module) -> float:
    """Of all weights as one vector; all processes call it."""
    return float(sharding.total_norm(weight.detach() for weight in model.parameters()))


def check_weights(model: torch.nn.Module, step: int) -> None:
    """Raises TrainingError when the weights of a model are not finite; all processes call it."""
    norm = weight_norm(model)
    if not math.isfinite(norm):
        raise TrainingError(
            f"step {step}: the norm of the weights is {norm}, so they are neither saved nor published; lower the "
            "learning rate. The last checkpoint is from before"
        )


def save(run: Run, score: float | None = None, by_signal: bool = False) -> None:
    """Begin to write a checkpoint of the run; all processes call it. The main one writes, or each its part of sharded
    weights.

    Args:
        score: of the evaluation at this step; lower is better.
        by_signal: whether a run that nobody stops has no checkpoint here.

    Raises TrainingError, with nothing written, when weights are not finite, CheckpointError when this checkpoint or the
    one before cannot be written.
    """
    run.collect_loss()
    state = run.state
    check_weights(run.unwrapped_model, state.step)
    if run.ema_model is not None:
        check_weights(run.ema_model.module, state.step)
        state.n_averaged = int(run.ema_model.n_averaged)
    files: dict[str, dict[str, sharding.Part]] = {}
    if (place := sharding.place(run.unwrapped_model)) is not None:
        saved = saved_tensors(run).items()
        files = {checkpoints.part_name(name, *place): sharding.part(tensors, place[0]) for name, tensors in saved}
    # By now evaluations have been timed by a later clock than the step.
    elapsed = {"seconds": max(state.seconds, run.clock())}
    record = {"state": dataclasses.asdict(state) | elapsed, "identity": run.identity, "score": score}
    record["by_signal"] = by_signal
    run.store.start(state.step, files, record, "-unmeasured" if state.unmeasured else "")


def saved_tensors(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """What a checkpoint holds of tensors, by its files; maybe sharded."""
    files = {
        "model.safetensors": sharding.weights(run.unwrapped_model),
        "optimizer.safetensors": checkpoints.optimizer_tensors(run.optimizers, run.unwrapped_model),
    }
    if run.ema_model is not None:
        files["average.safetensors"] = sharding.weights(run.ema_model.module)
    return files


def resume(run: Run) -> None:
    """Continue from the newest complete checkpoint, saying which; damaged ones are named and set aside.

    Raises RecipeError when it is another run's (unless the recipe says force), CheckpointError when it does not fit.
    """
    found, damaged = choose(run, run.store.complete, 1)
    newest = next(iter(found), None)
    if newest is not None:
        load(run, newest)
    if run.is_main:
        run.log.until(run.state.step)  # which must be readable before anything is changed
        run.store.set_aside(damaged)
        why = run.finished()
        print(f"resuming {newest}" if newest else "no checkpoint to resume: starting at step 0", file=sys.stderr)
        if why:
            print(f"this run is finished ({why}): its model is measured and written again", file=sys.stderr)


def choose(run: Run, candidates: Callable[[], list[Path]], count: int) -> tuple[list[Path], dict[Path, str]]:
    """The first so many checkpoints that verify, and what is wrong with others before them; all processes agree."""
    found = [run.store.sound(candidates(), count)] if run.is_main else [([], {})]
    return broadcast_object_list(found)[0]


def load(run: Run, folder: Path) -> None:
    """Take weights, optimisers and state from a checkpoint, as if the run had never stopped.

    What of the recipe is adjusted is said. Raises RecipeError when it is another run's (unless the recipe says force),
    CheckpointError when it does not fit.
    """
    record = checkpoints.read_state(folder)
    with checkpoints.readable(folder / "state.json"):
        found = dict(changes(record["identity"], run.identity))
    other = [line for name, line in found.items() if name.removeprefix("recipe.") not in ADJUSTABLE]
    if other and not run.recipe.force:
        raise RecipeError(
            f"{folder}: not resumed, this is another run ({'; '.join(other[:5])}); --force does it all the same"
        )
    checkpoints.load_weights(run.unwrapped_model, checkpoints.read_tensors(folder, "model.safetensors"))
    tensors = checkpoints.read_tensors(folder, "optimizer.safetensors")
    with checkpoints.readable(folder / "optimizer.safetensors"):
        checkpoints.load_optimizers(run.optimizers, run.unwrapped_model, tensors)
    with checkpoints.readable(folder / "state.json"):
        run.state = State.read(record["state"])
    if run.is_main and found:
        print(f"other than before: {'; '.join(found.values())}{_new_rate(run, record['identity'])}", file=sys.stderr)
    if run.ema_model is not None:
        checkpoints.load_weights(run.ema_model.module, checkpoints.read_tensors(folder, "average.safetensors"))
        run.ema_model.n_averaged.fill_(run.state.n_averaged)
    run.started = time.monotonic() - run.state.seconds


def _new_rate(run: Run, identity: Mapping[str, Any]) -> str:
    """How the learning rate jumps where a run is made longer or shorter, and with it its schedule."""
    spec, state = run.recipe.optimisation, run.state
    before = identity["recipe"]["optimisation"].get("max_steps", spec.max_steps)
    old, new = (
        spec.learning_rate * lr_factor(spec, state.step, state.step / steps, state.lr_reductions)
        for steps in (before, spec.max_steps)
    )
    return f"; so the learning rate goes on at {new:.3g}, where it was {old:.3g}" if old != new else ""


def finish(run: Run) -> None:
    """Put the weights that the recipe asks for into the model: the last, the best, or an average.

    Damaged checkpoints are named and set aside. Raises CheckpointError when none is left of those that are needed,
    TrainingError when weights are not finite, or every step was left out.
    """
    choice, spec, model = run.recipe.optimisation.final_weights, run.recipe.optimisation, run.unwrapped_model
    if 0 < run.state.step == run.state.skipped_steps:
        raise TrainingError(f"the gradient of none of the {run.state.step} steps was finite: nothing was learned")
    if choice in ("best", "mean"):
        count = 1 if choice == "best" else spec.mean_of
        found, damaged = choose(run, run.store.by_score if choice == "best" else run.store.scheduled, count)
        if run.is_main:
            run.store.set_aside(damaged)
        if not found:
            raise checkpoints.CheckpointError(f"optimisation.final_weights: no sound checkpoint is left for {choice}")
        checkpoints.load_weights(model, *(checkpoints.read_tensors(path, "model.safetensors") for path in found))
    elif (measured := run.measured_model()) is not model:
        checkpoints.load_weights(model, sharding.weights(measured))
    check_weights(model, run.state.step)
