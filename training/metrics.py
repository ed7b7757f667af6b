"""What a run reports: a line of JSON per measurement, scores of translations, and a picture of the curves."""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from sacrebleu.metrics import BLEU, CHRF

from .checkpoints import write_text

# Scores of which more is better; for everything else (losses, perplexities) less is.
RISING = ("bleu", "bleu_lowercase", "chrf", "exact_match", "masked_accuracy")


class Log:
    """`metrics.jsonl`: one line for each measurement, written at once, so that a killed run has its history."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut(self, step: int) -> None:
        """Forget what was measured after a step: it will be done again."""
        lines = [line for line in read(self.path) if line["step"] <= step]
        write_text(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def write(self, event: str, **values: Any) -> None:
        """Add `{"event": event, **values}`."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}, ensure_ascii=False) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The measurements of a log, oldest first; a last line cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def translation_scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """sacreBLEU (13a; mixed case and lower-cased), chrF, their signatures, and the percentage of exact matches."""
    scores: dict[str, Any] = {}
    for name, metric in {"bleu": BLEU(), "bleu_lowercase": BLEU(lowercase=True), "chrf": CHRF()}.items():
        scores[name] = metric.corpus_score(list(outputs), [list(references)]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    matches = sum(out.strip() == reference.strip() for out, reference in zip(outputs, references, strict=True))
    return scores | {"exact_match": 100 * matches / len(references)}


def grouped_scores(
    outputs: Sequence[str], references: Sequence[str], groups: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """BLEU, exact match and size of each group of rows, and of "any group"; null and empty are no group."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        if group is not None and group != "":
            rows["any group"].append(row)
            rows[str(group)].append(row)
    result = {}
    for group, members in rows.items():
        scores = translation_scores([outputs[row] for row in members], [references[row] for row in members])
        result[group] = {"rows": len(members), "exact_match": scores["exact_match"], "bleu": scores["bleu"]}
    return result


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves of a run as a PNG: training loss red, evaluation loss blue, and beside it the score that rises."""
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    rising = next((name for name in RISING if any(name in line for line in evaluations)), None)
    figure = Figure(figsize=(10 if rising else 5.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if rising else 1, squeeze=False)[0]
    training = [line for line in lines if line["event"] == "train"]
    for name, values, color in (("training", training, "red"), ("evaluation", evaluations, "blue")):
        panels[0].plot([v["step"] for v in values], [v["loss"] for v in values], color=color, label=name)
    panels[0].set(xlabel="step", ylabel="loss, nats a token", title="Loss")
    panels[0].legend()
    if rising:
        scored = [line for line in evaluations if rising in line]
        panels[1].plot([v["step"] for v in scored], [v[rising] for v in scored], color="blue", marker=".")
        name = {"bleu": "BLEU"}.get(rising, rising.replace("_", " "))
        panels[1].set(xlabel="step", ylabel=name, title=f"{name} on the evaluation rows")
    for panel in panels:
        panel.grid(alpha=0.3)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    os.replace(temporary, path)
