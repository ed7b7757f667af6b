"""Train a model from a recipe, measure it, and leave a folder that is a complete Hub repository.

    accelerate launch -m training RECIPE.yaml [--key value ...]

A run's folder (`--output_dir`) holds `recipe.yaml`, `environment.json`, `tokenizer/`, `metrics.jsonl`, `curves.png`,
`checkpoints/` and `model/`. Exit codes: 0 done, 1 failed, 2 the recipe or its data cannot be used, 130 and 143 stopped
by SIGINT and SIGTERM (saved; `--resume` goes on). `accelerate launch` makes 1 of all but 0, with a traceback of its own
unless it is told `--quiet`; `python -m training` gives them as they are.
"""

import copy
import json
import logging
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedTokenizerFast

from hf_scratch_transformer import hub
from hf_scratch_transformer.tokenization import check_tokenizer, config_fields

from . import checkpoints, data, loop, metrics, sharding
from .arguments import Recipe, RecipeError, dump, environment, parse
from .objectives import OBJECTIVES, Objective
from .optimisation import autocasts, optimizers

# What a run writes into its folder.
CONTENTS = (
    "recipe.yaml",
    "environment.json",
    "tokenizer",
    "metrics.jsonl",
    "curves.png",
    "tensorboard",
    "test_outputs.txt",
    "checkpoints",
    "model",
)

# Runs of several processes, never freed: gloo's process group, once nothing refers to it, waits for its threads while
# it holds the interpreter lock that these may be waiting for.
KEPT: list[loop.Run] = []


def main(arguments: list[str]) -> int:
    """Run a recipe from the command line; returns the exit code."""
    try:
        train(parse(arguments))
    except RecipeError as error:
        return _complain(error, 2)
    except (loop.TrainingError, checkpoints.CheckpointError, OSError) as error:
        return _complain(error, 1)
    except loop.Interrupted as stop:
        return _complain(stop, 128 + stop.number)
    return 0


def train(recipe: Recipe) -> None:
    """A whole run: open its folder, read the corpus, train, test, save."""
    started = time.monotonic()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    bf16 = autocasts(recipe.optimisation.precision, device.type)
    accelerator = Accelerator(
        cpu=device.type == "cpu",  # else several processes on a CPU would not find each other
        mixed_precision="bf16" if bf16 else "no",
        log_with=list(recipe.trackers) or None,
        project_config=ProjectConfiguration(logging_dir=os.path.join(recipe.output_dir, "tensorboard")),
    )
    shards = sharding.settings(accelerator)
    if recipe.optimisation.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    folder = open_folder(recipe, accelerator)
    tokenizer = open_tokenizer(recipe, folder, accelerator)
    objective = OBJECTIVES[recipe.objective](recipe, tokenizer)
    run = prepare(recipe, accelerator, shards, objective, folder, started)
    if accelerator.num_processes > 1:
        KEPT.append(run)
    accelerator.init_trackers(folder.name)
    if recipe.resume:
        go_on(run)
    loop.train(run)
    loop.finish(run)
    results = loop.test(run)
    save_model(run, folder / "model")
    if accelerator.is_main_process:
        summarise(results, folder)
        if recipe.model_card is not None:
            metrics.copy_card(folder, Path(recipe.model_card))
        if recipe.push_to_hub is not None:
            push(folder / "model", recipe.push_to_hub)
    accelerator.end_training()


def open_folder(recipe: Recipe, accelerator: Accelerator) -> Path:
    """The run's folder, with the recipe and the environment in it.

    Raises RecipeError when it holds another run that is neither resumed nor to be replaced, or cannot be written.
    """
    folder = Path(recipe.output_dir)
    if accelerator.is_main_process:
        try:
            if not recipe.resume:
                measured = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "model"))
                if measured and not recipe.overwrite:
                    raise RecipeError(f"output_dir: {folder} holds a run; --resume goes on, --overwrite replaces it")
                if recipe.overwrite or (folder / "recipe.yaml").exists():  # or a run that never started
                    for name in CONTENTS:  # and nothing else that lies there
                        checkpoints.remove(folder / name)
            folder.mkdir(parents=True, exist_ok=True)
            checkpoints.write_text(folder / "recipe.yaml", dump(recipe))
            about = environment(accelerator.device, accelerator.num_processes)
            checkpoints.write_text(folder / "environment.json", json.dumps(about, indent=1) + "\n")
        except OSError as error:
            raise RecipeError(f"output_dir: {folder} cannot be written: {error}") from error
    accelerator.wait_for_everyone()
    return folder


def open_tokenizer(recipe: Recipe, folder: Path, accelerator: Accelerator) -> PreTrainedTokenizerFast:
    """The run's tokenizer: trained or loaded by the main process once, read from the run's folder by all."""
    if accelerator.is_main_process and not (folder / "tokenizer").exists():
        tokenizer = data.make_tokenizer(recipe)
        with checkpoints.replacing(folder / "tokenizer") as temporary:
            tokenizer.save_pretrained(temporary)
    accelerator.wait_for_everyone()
    return data.read_tokenizer(folder / "tokenizer", "output_dir")


def prepare(
    recipe: Recipe,
    accelerator: Accelerator,
    shards: FullyShardedDataParallelPlugin | None,
    objective: Objective,
    folder: Path,
    started: float,
) -> loop.Run:
    """Corpus, model and optimisers of a run at its first step, whose clock counts from `started` (monotonic)."""
    tokenizer = objective.tokenizer
    fields = config_fields(tokenizer, data.FAMILIES[recipe.objective])
    config = recipe.model_config(**fields)
    try:
        check_tokenizer(tokenizer, config)
    except ValueError as error:
        raise RecipeError(f"model, tokenizer: {error}") from error
    set_seed(recipe.seed)
    # On a CPU, torch's fused attention goes backward in bf16 some twenty times slower than the formula written out.
    slow_fused = accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16"
    model = objective.auto_model.from_config(config, attn_implementation="eager" if slow_fused else None)
    parts = data.Parts(recipe, objective.encode)
    train = parts.first
    splits = {
        role: data.load(recipe, role, objective.encode, keep_texts=True) if role in recipe.data.splits else None
        for role in ("validation", "test")
    }
    if accelerator.is_main_process:
        for role, corpus in {"train": train, **splits}.items():
            if corpus is not None:
                left_out = f", left out {data.describe(corpus.refused)}" if corpus.refused else ""
                print(f"{role}: {objective.examples(corpus):,} rows of {corpus.rows:,}{left_out}", file=sys.stderr)
        cores = (os.cpu_count() or 1) // accelerator.num_processes
        if accelerator.device.type == "cpu" and torch.get_num_threads() < cores:
            # What `accelerate launch` does unless told otherwise.
            print(f"{torch.get_num_threads()} thread(s) of {cores}: accelerate launch --cpu uses all", file=sys.stderr)
        count = model.num_parameters()
        spread = f", spread over {accelerator.num_processes} processes" if shards is not None else ""
        print(f"{type(model).__name__}: {count:,} parameters, {len(tokenizer):,} tokens{spread}", file=sys.stderr)
    spec, average, bare = recipe.optimisation, None, model
    prepared = accelerator.prepare(model) if shards is None else model
    if spec.final_weights == "ema":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(spec.ema_decay))
    if shards is not None:
        bare = copy.deepcopy(model)
        for module in (model, average.module) if average is not None else (model,):
            sharding.shard(module, shards, accelerator)
    prepared.train()
    if spec.compile:
        prepared = torch.compile(prepared, dynamic=True)
    return loop.Run(
        recipe=recipe,
        accelerator=accelerator,
        objective=objective,
        model=prepared,
        trained=model,
        bare=bare,
        average=average,
        optimizers=optimizers(model, spec),
        parts=parts,
        rows=objective.examples(train),
        validation=splits["validation"],
        test=splits["test"],
        store=checkpoints.Store(folder / "checkpoints", recipe.checkpoints),
        log=metrics.Log(folder / "metrics.jsonl"),
        identity={
            "recipe": recipe.identity(),
            "tokenizer": data.digest(tokenizer.backend_tokenizer.to_str().encode()),
            "corpus": train.fingerprint(),
        },
        started=started,
    )


def go_on(run: loop.Run) -> None:
    """Continue from the newest complete checkpoint, saying which; damaged ones are named and set aside."""
    if run.main:
        newest, complaints = run.store.newest()
        for complaint in complaints:
            print(complaint, file=sys.stderr)
        print(f"resuming {newest}" if newest else "no checkpoint to resume: starting at step 0", file=sys.stderr)
    run.accelerator.wait_for_everyone()
    newest = next(iter(run.store.complete()), None)
    if newest is not None:
        loop.resume(run, newest)
    if run.main:
        run.log.cut(run.state.step)


def save_model(run: loop.Run, folder: Path) -> None:
    """The finished model as a Hub repository: weights, code, tokenizer, generation settings."""
    if not run.main:
        return
    if run.recipe.objective == "translation":
        spec = run.recipe.evaluation
        settings: dict[str, Any] = {"max_new_tokens": run.recipe.data.max_length, "num_beams": spec.num_beams}
        if spec.num_beams > 1:
            settings["length_penalty"] = spec.length_penalty
        run.bare.generation_config.update(**settings)
    run.objective.tokenizer.model_max_length = run.bare.config.max_position_embeddings
    loop.draw(run)
    with checkpoints.replacing(folder) as temporary:
        run.bare.save_pretrained(temporary)
        run.objective.tokenizer.save_pretrained(temporary)
        shutil.copy(run.log.path.with_name("curves.png"), temporary)
        hub.write_model_card(temporary, records(run), run.recipe.push_to_hub)


def push(folder: Path, repo_id: str) -> None:
    """Upload the finished model. Raises TrainingError if that fails: the model is there all the same."""
    try:
        commit = hub.push(folder, repo_id)
    except Exception as error:  # whatever the network, the Hub or their library say
        raise loop.TrainingError(f"push_to_hub: {repo_id} was not pushed, but {folder} is complete: {error}") from error
    print(f"pushed: {commit.commit_url}")


def records(run: loop.Run) -> hub.RunRecords:
    """What the run wrote down about itself, for the model card."""
    recipe, folder = run.recipe, run.log.path.parent
    lines = metrics.read(run.log.path)
    is_file = Path(recipe.data.path).exists()
    last = {line["event"]: line for line in lines}
    about = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    evaluated = min(recipe.evaluation.generate_rows, run.objective.examples(run.validation)) if run.validation else 0
    example = (run.test or run.validation or data.Corpus({})).texts.get("source", ())
    return hub.RunRecords(
        name=folder.name,
        command=shlex.join(about.pop("command")),
        dataset=Path(recipe.data.path).name if is_file else recipe.data.path,
        dataset_id=None if is_file else recipe.data.path,
        dataset_config=recipe.data.name,
        dataset_revision=recipe.data.revision,
        data={"training rows": run.rows, "target tokens predicted in training": run.state.targets}
        | ({"validation rows translated, greedily": evaluated} if recipe.objective == "translation" else {}),
        languages=recipe.data.languages,
        recipe=yaml.safe_load(dump(recipe)),
        environment=about,
        metrics=lines,
        results={
            "test" if event == "test" else "validation": last[event]
            for event in ("evaluation", "test")
            if event in last
        },
        **({"example": example[0]} if example else {}),
    )


def summarise(results: dict[str, Any], folder: Path) -> None:
    """The test's results and where everything is, on the terminal."""
    for name, value in results.items():
        if isinstance(value, float):
            signature = results.get(f"{name}_signature")
            print(f"test {name}: {value:.4g}" + (f"  ({signature})" if signature else ""))
    for column, groups in results.get("groups", {}).items():
        for group, scores in groups.items():
            print(f"test {column}, {group}: " + ", ".join(f"{name} {value:.4g}" for name, value in scores.items()))
    print(f"the run is in {folder}, the model in {folder / 'model'}")


def _complain(error: BaseException, code: int) -> int:
    print(f"training: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    logging.captureWarnings(True)
    transformers.utils.logging.disable_progress_bar()
    code = main(sys.argv[1:])
    if KEPT:  # the end of the interpreter would free them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
