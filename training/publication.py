"""What a finished run hands on: the model's folder as a Hub repository, its card, the results on the terminal."""

import json
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hf_scratch_transformer import hub
from hf_scratch_transformer.files import replacing, weights
from hf_scratch_transformer.insight.trace import count_flops

from . import cards, metrics, sharding
from .base_model import PATH
from .batches import IGNORED, Draws
from .corpus import Corpus
from .objectives import Batch
from .recipe import ORDERS, OURS, Data, Source, dump
from .run import Run, TrainingError

COSTS = {
    "targets": "target tokens predicted in training",
    "flops": "training FLOPs, about",
    "memory_mb": "memory of a process while training, MB",
    "corpus": "SHA-256 of the training tokens",
}
EXAMPLE = 60  # characters of the text that the card shows how to use the model on
COUNTED = 4  # batches, from whose operations those of the whole run are told


def publish(run: Run, results: dict[str, Any]) -> None:
    """Save the model, say what came of the test, and put card and model where the recipe wants them.

    Raises TrainingError when the Hub does not take the model.
    """
    recipe, folder = run.recipe, run.folder / "model"
    save_model(run, folder)
    if not run.is_main:
        return
    summarise(results)
    say_where(run.folder)
    if recipe.model_card is not None:
        cards.copy(run.folder, Path(recipe.model_card))
    if recipe.push_to_hub is not None:
        push(folder, recipe.push_to_hub)


def save_model(run: Run, folder: Path) -> None:
    """Weights, code, tokenizer, generation settings and card; a native model has no code and no card. The log is told
    what the run took, and its weights. All processes call it, since each may have a part of them; the main one writes.
    """
    if not run.is_main:
        for _ in sharding.hub_files(run.unwrapped_model, keep=False) if run.is_sharded else ():
            pass
        return
    model, tokenizer, spec = run.unwrapped_model, run.objective.tokenizer, run.recipe.evaluation
    if run.recipe.objective == "translation":
        settings: dict[str, Any] = {"max_new_tokens": run.recipe.data.max_length, "num_beams": spec.num_beams}
        if spec.num_beams > 1:
            settings["length_penalty"] = spec.length_penalty
        model.generation_config.update(**settings)
    tokenizer.model_max_length = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    took = {"step": run.state.step, "seconds": round(run.clock(), 2), **cost(run)}
    run.draw()
    with replacing(folder) as temporary:
        if run.is_sharded:
            sharding.save_pretrained(model, temporary)
        else:
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        run.log.write("finished", **took, weights=weights(temporary))
        shutil.copy(run.folder / "curves.png", temporary)
        if model.config.model_type in OURS:
            hub.write_model_card(temporary, records(run), run.recipe.push_to_hub)


def again(words: Sequence[str]) -> list[str]:
    """The words of a command line that make a run from its beginning, without what they said of an earlier one."""
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_order = word.removeprefix("--").partition("=")[0] in ORDERS
        is_its_value = before.removeprefix("--") in ORDERS and not word.startswith("--")
        kept += [] if is_order or is_its_value else [word]
    return kept


def records(run: Run) -> hub.RunRecords:
    """What the run wrote down about itself, for the card of the model that it has saved."""
    recipe = run.recipe
    lines = metrics.read(run.log.path)
    is_file, base = Path(recipe.data.path).exists(), recipe.model.get(PATH)
    last = {line["event"]: line for line in lines}
    about = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    evaluated = min(recipe.evaluation.generate_rows, run.objective.examples(run.validation)) if run.validation else 0
    texts = (run.test or run.validation or Corpus({})).texts
    every = (text[:1000] for name in ("source", "text") for text in texts.get(name, ()))
    example = next(filter(None, (textwrap.shorten(text, EXAMPLE, placeholder="") for text in every)), None)
    return hub.RunRecords(
        name=Path(recipe.model_card or run.folder).name,
        command=shlex.join(again(metrics.public(about.pop("command")))),
        dataset=corpora(recipe.data),
        dataset_id=None if is_file else recipe.data.path,
        dataset_config=recipe.data.name,
        dataset_revision=recipe.data.revision,
        base_model=None if base is None or Path(base).exists() else base,
        data={"training rows": run.rows}
        | {title: last["finished"][name] for name, title in COSTS.items()}
        | {f"SHA-256 of {name}": digest for name, digest in last["finished"]["weights"].items()}
        | ({"validation rows translated, greedily": evaluated} if recipe.objective == "translation" else {}),
        languages=recipe.data.languages,
        license=recipe.license,
        recipe=metrics.public(yaml.safe_load(dump(recipe))),
        environment=about,
        metrics=lines,
        results={
            "test" if event == "test" else "validation": last[event]
            for event in ("evaluation", "test")
            if event in last
        },
        **({"example": example} if example else {}),
    )


def corpora(data: Data) -> str:
    """What is trained on, for a reader: ids on the Hub, or files and folders by their last names."""
    names = []
    for source in data.sources or (Source(),):
        path, parts = source.path or data.path, Path(source.split[0]).parts
        # Of several in one folder, each in its own.
        inner = parts[0] if data.sources and source.path is None and len(parts) > 1 else None
        names.append(inner or (Path(path).name if Path(path).exists() else path))
    return ", ".join(dict.fromkeys(names))


def cost(run: Run) -> dict[str, Any]:
    """What the steps of a run took, by the names of `COSTS`, as far as it is known, of what model and what text."""
    flops = target_flops(run)
    return {
        "parameters": run.unwrapped_model.num_parameters(),
        "targets": run.state.targets,
        "flops": None if flops is None else float(f"{flops * run.state.targets:.3g}"),
        "memory_mb": max((line.get("memory_mb", 0) for line in metrics.read(run.log.path)), default=0) or None,
        "corpus": run.identity.get("corpus"),
    }


def target_flops(run: Run) -> float | None:
    """Floating-point operations that a target takes in a few batches of the validation text, forward and backward;
    `None` of a run without such a text, or whose weights are spread over processes."""
    if not run.validation or run.is_sharded:
        return None
    objective, model = run.objective, run.unwrapped_model
    plan = objective.plan(run.validation, None)
    flops, targets, was_training = 0, 0, model.training
    model.train()
    count = min(COUNTED, len(plan))
    # Over all steps so far: there may have been fewer and fewer targets among as many tokens.
    steps = np.linspace(0, run.state.step, count).astype(int)
    for index, step_done in zip(np.linspace(0, len(plan) - 1, count).astype(int), steps, strict=True):
        draws = Draws((index,), np.arange(len(plan[index])))
        batch = objective.collate(run.validation, plan[index], draws, int(step_done))
        targets += int((batch[objective.targets] != IGNORED).sum())
        batch = {name: values.to(model.device) for name, values in batch.items()}

        def step(batch: Batch = batch) -> None:
            objective.loss(model, batch, run.recipe.optimisation.label_smoothing).backward()

        flops += count_flops(step, model.device.type)
    model.zero_grad()
    model.train(was_training)
    return flops / max(targets, 1)


def summarise(results: dict[str, Any], as_json: bool = False) -> None:
    """The test's results, on the terminal, for a person or for a machine."""
    if as_json:
        print(json.dumps(results, indent=1))
        return
    for name, value in results.items():
        if isinstance(value, float):
            signature, interval = (results.get(f"{name}_{what}") for what in ("signature", "interval"))
            likely = " (95%: {:.4g} to {:.4g})".format(*interval) if interval else ""
            print(f"test {name}: {value:.4g}{likely}" + (f"  ({signature})" if signature else ""))
    for column, groups in results.get("groups", {}).items():
        exact = {group: scores["exact_match"] for group, scores in groups.items() if group != metrics.ANY_GROUP}
        if exact:  # the card has them all
            worst = min(exact, key=lambda group: exact[group])
            print(f"test by {column}: {len(exact)} groups, exact_match {exact[worst]:.4g} ({worst}) or better")


def say_where(folder: Path) -> None:
    """What a finished run has left in its folder for a person, on the terminal."""
    for name, path in {"model": "model", "card": "model/README.md", "curves": "curves.png"}.items():
        if (folder / path).exists():
            print(f"{name:7} {folder / path}")


def push(folder: Path, repo_id: str) -> None:
    """Upload the finished model. Raises TrainingError if that fails: the model is there all the same."""
    try:
        commit = hub.push(folder, repo_id)
    except Exception as error:  # whatever the network, the Hub or their library say
        raise TrainingError(f"push_to_hub: {repo_id} was not pushed, but {folder} is complete: {error}") from error
    print(f"pushed: {commit.commit_url}")
