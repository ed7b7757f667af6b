"""Fine-tune an encoder with nothing but transformers' `Trainer`: tell the senses of words apart, each a token's label.

python -m training.finetune RECIPE.yaml [--key value ...]

A recipe holds the fields of `Task` and of `transformers.TrainingArguments`. The run's folder has the layout of
`python -m training`: `recipe.yaml`, `metrics.jsonl`, `curves.png`, `model/`.
"""

import contextlib
import json
import shlex
import shutil
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers
import yaml
from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from hf_scratch_transformer import hub
from hf_scratch_transformer.embedding import longest_input
from hf_scratch_transformer.files import possible_path, reading, replacing, write_text
from hf_scratch_transformer.insight import senses
from hf_scratch_transformer.tokenization import check_unknown

from . import cards, metrics
from .folder import check, claimed, environment
from .publication import say_where
from .run import TrainingError, check_weights
from .sections import RecipeError, read_yaml

IGNORED = -100  # label of a token that is not the word in question


@dataclass
class Task:
    """What is fine-tuned, and on what."""

    model: str = field(metadata={"help": "folder or Hub id of an encoder with its tokenizer"})
    data: str = field(metadata={"help": "labelled sentences, as `scratch-transformer senses` reads them"})
    validation: float = field(default=0.1, metadata={"help": "share of the training sentences kept for evaluation"})
    languages: list[str] = field(default_factory=list, metadata={"help": "ISO 639 codes of them, for the model card"})
    license: str | None = field(default=None, metadata={"help": "of the weights, for the model card"})
    model_card: str | None = field(default=None, metadata={"help": "folder for the card and the records, no weights"})

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise RecipeError(f"validation: {self.validation} must be above 0 and below 1")
        check_paths(self, "model", "data", "model_card")


def check_paths(entries: Any, *fields: str) -> None:
    """Raises RecipeError, with the field's name, for what cannot be a path."""
    for name in fields:
        try:
            possible_path(getattr(entries, name) or "")
        except ValueError as error:
            raise RecipeError(f"{name}: {error}") from error


def main(argv: list[str]) -> int:
    """Run a recipe; returns the exit code: 0, or after one line 1 (failed), 2 (cannot be run), 130 (by SIGINT)."""
    try:
        task, arguments = parse(argv)
        with claimed(Path(arguments.output_dir)) if arguments.process_index == 0 else contextlib.nullcontext():
            finetune(task, arguments, Path(argv[0]))
    except TrainingError as error:
        return _complain(error, 1)
    except (ValueError, OSError) as error:
        return _complain(error, 2)
    except KeyboardInterrupt:
        return _complain("stopped by SIGINT", 130)
    return 0


def _complain(error: object, code: int) -> int:
    print(f"training.finetune: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def parse(argv: list[str]) -> tuple[Task, TrainingArguments]:
    """The recipe's entries, and after them the command line's, which win."""
    if not argv or argv[0].startswith("-"):
        raise RecipeError(f"usage: python -m {__package__}.finetune RECIPE.yaml [--key value ...]")
    entries, repeated = read_yaml(Path(argv[0]))
    if repeated:
        raise RecipeError(f"{argv[0]}: {'; '.join(repeated)}")
    listed = {key: value if isinstance(value, list) else [value] for key, value in entries.items()}
    words: list[str] = []
    for key, values in listed.items():  # a single one may begin with a dash
        words += [f"--{key}={values[0]}"] if len(values) == 1 else [f"--{key}", *map(str, values)]
    parser = HfArgumentParser((Task, TrainingArguments))
    *parsed, unknown = parser.parse_args_into_dataclasses([*words, *argv[1:]], return_remaining_strings=True)
    if unknown:
        several = [key for key, values in listed.items() if len(values) > 1 and {*map(str, values[1:])} & {*unknown}]
        hint = f"; {', '.join(several)}: takes one value" if several else ""
        raise RecipeError(f"unknown: {' '.join(unknown)}{hint}")
    check_paths(parsed[1], "output_dir")
    if not 0 <= parsed[1].seed < 2**32:
        raise RecipeError(f"seed: must be a whole number, at least 0 and below {2**32}, got {parsed[1].seed}")
    if parsed[1].push_to_hub:
        raise RecipeError(
            "push_to_hub: Trainer uploads all of output_dir; give False, and model/ to hub.push in the end"
        )
    return parsed[0], parsed[1]


def finetune(task: Task, arguments: TrainingArguments, source: Path) -> None:
    """Train as the recipe in the file `source` says, measure on the test sentences, and write the run's folder."""
    folder = Path(arguments.output_dir)
    if (folder / "model").exists():
        raise RecipeError(f"output_dir: {folder} holds a finished run")
    named = {"the recipe": source, "model": Path(task.model), "data": Path(task.data)}
    check(folder, named.items(), resume=False, overwrite=True)  # of what a run wrote that was not finished
    if task.model_card is not None:
        cards.check(Path(task.model_card), source, folder)
    words = senses.read(task.data)
    names = sorted({f"{word}/{sense}" for word, some in words.items() for _, sense in some.train})
    label_of = {name: label for label, name in enumerate(names)}
    with reading(f"model: {task.model}"):
        options = {"id2label": dict(enumerate(names)), "trust_remote_code": False, "output_loading_info": True}
        tokenizer = AutoTokenizer.from_pretrained(task.model, trust_remote_code=False)
        check_unknown(tokenizer)
        model, found = AutoModelForTokenClassification.from_pretrained(task.model, **options)
    # Drawn at random if missing, which only the new head may be.
    if missing := sorted(name for name in found["missing_keys"] if name.startswith(f"{model.base_model_prefix}.")):
        raise RecipeError(
            f"model: {task.model}: {len(missing)} weights of its backbone are missing, {missing[0]} first"
        )
    limit = longest_input(model, tokenizer)
    whole = rows(words, "train", label_of, tokenizer, limit).train_test_split(task.validation, seed=arguments.seed)
    test = rows(words, "test", label_of, tokenizer, limit)
    trainer = Trainer(
        model,
        arguments,
        DataCollatorForTokenClassification(tokenizer),
        train_dataset=whole["train"],
        eval_dataset=whole["test"],
        compute_metrics=lambda prediction: scores(prediction, names),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.train()
    check_weights(trainer.model, trainer.state.global_step)
    results = {key.removeprefix("test_"): value for key, value in trainer.predict(test).metrics.items()}
    results = {key: results[key] for key in ("accuracy", "f1", "loss")}
    print(", ".join(f"test {key}: {value:.4g}" for key, value in results.items()))
    if trainer.is_world_process_zero():
        write(task, arguments, trainer, tokenizer, results, rows={name: len(part) for name, part in whole.items()})


def rows(
    words: dict[str, senses.Examples],
    split: str,
    label_of: dict[str, int],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
) -> Dataset:
    """Tokens and labels of each sentence, cut around the word to `limit` tokens; its first piece alone has a label."""

    def encode(word: str, occurrence: senses.Occurrence, sense: str) -> dict[str, list[int]]:
        if f"{word}/{sense}" not in label_of:
            raise ValueError(f"the sense {sense!r} of {word!r} is tested and not in the training sentences")
        near = senses.cut(tokenizer, occurrence, limit)
        encoded = tokenizer(list(near.words), is_split_into_words=True)
        labels = [IGNORED] * len(encoded["input_ids"])
        labels[encoded.word_ids().index(near.position)] = label_of[f"{word}/{sense}"]
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}

    return Dataset.from_list(
        [encode(word, *example) for word, some in words.items() for example in getattr(some, split)]
    )


def scores(prediction: EvalPrediction, names: list[str]) -> dict[str, float]:
    """Accuracy over all sentences, and macro-F1 averaged over words, both in percent."""
    real = prediction.label_ids != IGNORED
    predicted, gold = np.asarray(prediction.predictions)[real], prediction.label_ids[real]
    by_word: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for guess, right in zip(predicted.tolist(), gold.tolist(), strict=True):
        by_word[names[right].partition("/")[0]].append((names[guess], names[right]))
    macro = [senses.macro_f1(*zip(*pairs, strict=True)) for pairs in by_word.values()]
    return {"accuracy": 100 * float((predicted == gold).mean()), "f1": 100 * statistics.mean(macro)}


def write(
    task: Task,
    arguments: TrainingArguments,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    results: dict[str, float],
    rows: dict[str, int],
) -> None:
    """The run's folder: what was done, what came of it, and a complete Hub repository in `model/`."""
    folder = Path(arguments.output_dir)
    recipe = {name: value for name, value in vars(task).items() if name != "model_card"} | arguments.to_sanitized_dict()
    about = environment(arguments.device, arguments.world_size, f"{__package__}.finetune")
    lines = [dict(line, event="evaluation" if "eval_loss" in line else "train") for line in trainer.state.log_history]
    lines = [
        {key.removeprefix("eval_"): value for key, value in line.items()}
        for line in lines
        if "loss" in line or "eval_loss" in line
    ] + [{"event": "test", "step": trainer.state.global_step, **results}]
    write_text(folder / "recipe.yaml", yaml.safe_dump(recipe, sort_keys=False))
    write_text(folder / "environment.json", json.dumps(about, indent=1) + "\n")
    write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    metrics.draw(lines, folder / "curves.png")
    command = shlex.join(metrics.public(about.pop("command")))
    records = hub.RunRecords(
        name=folder.name,
        command=command,
        dataset=Path(task.data).name,
        data={
            "training rows": rows["train"],
            "evaluation rows": rows["test"],
            "fine-tuned from": metrics.public(task.model),
        },
        languages=task.languages,
        license=task.license,
        example="the fisherman sat on the bank of the river .",
        recipe=metrics.public(recipe),
        environment=about,
        metrics=lines,
        results={"test": results},
    )
    with replacing(folder / "model") as temporary:
        trainer.model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        shutil.copy(folder / "curves.png", temporary)
        hub.write_model_card(temporary, records)
    if task.model_card is not None:
        cards.copy(folder, Path(task.model_card))
    say_where(folder)


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
