"""What a run reports: lines of JSON, a bar on the terminal, scores of translations, a picture of the curves."""

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from tqdm import tqdm

from hf_scratch_transformer.files import write_text
from hf_scratch_transformer.insight.records import read_metrics

from .sections import RecipeError

RESAMPLED = 1000  # times, for an interval
# Beyond which 5% of Student's t lie, by degrees of freedom, and of a normal distribution.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NORMAL = 1.960
ANY_GROUP = "any group"
SHARPNESS = 0.2  # the power to which beams count by their probabilities; to the first hardly more than one would
AFTERWARDS = ("test", "finished")  # events of a run whose steps are done


class Log:
    """`metrics.jsonl`: one line for each measurement, written at once, so that a killed run has its history."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def until(self, step: int) -> list[dict[str, Any]]:
        """What was measured until a step, not after the last. Raises RecipeError when the log cannot be read."""
        try:
            return [line for line in read(self.path) if line["step"] <= step and line["event"] not in AFTERWARDS]
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise RecipeError(f"output_dir: {self.path} is no log of a run: {error}") from error

    def truncate(self, step: int) -> None:
        """Forget what was measured after a step: it will be done again."""
        write_text(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.until(step)))

    def write(self, event: str, **values: Any) -> None:
        """Add `{"event": event, **values}`."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}, ensure_ascii=False) + "\n")


class ProgressBar:
    """Share done, loss, tokens a second, time left; and what evaluations found."""

    def __init__(self, total: int, position: int, is_shown: bool) -> None:
        self.bar = tqdm(
            total=total,
            initial=position,
            disable=not is_shown,
            dynamic_ncols=True,
            # Into a file, a line every half minute is enough.
            mininterval=0.1 if sys.stderr.isatty() else 30.0,
            maxinterval=10.0 if sys.stderr.isatty() else math.inf,  # after which it would print the same again
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}",
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, position: int, **values: str) -> None:
        """Show how far the run is, and these values."""
        self.bar.set_postfix(values, refresh=False)
        self.bar.update(min(position, int(self.bar.total or 0)) - self.bar.n)

    def say(self, text: str) -> None:
        """Some lines above the bar."""
        self.bar.write(text, file=sys.stderr)

    def show(self, title: str, values: dict[str, Any]) -> None:
        """An evaluation above the bar, with sample outputs."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, float))
        lines = [f"{title}: {numbers}"]
        for sample in values.get("samples", ()):
            shown = {name: text.strip().replace("\n", " ↵ ") for name, text in sample.items()}
            lines += [f"    {name:9} {' '.join(text.split())}" for name, text in shown.items()]
        self.say("\n".join(lines))


def read(path: Path) -> list[dict[str, Any]]:
    """The measurements of a log, oldest first; a last line cut off by a kill is left out."""
    return read_metrics(path) if path.exists() else []


def last(path: Path) -> dict[str, dict[str, Any]]:
    """Of each kind of event in a log the last measurement, as `{"finished": ...}`."""
    return {line["event"]: line for line in read(path)}


def resampled(parts: np.ndarray) -> np.ndarray:  # (parts, ...) -> (times, ...)
    """Totals of as many parts, drawn from these again and again: the bootstrap (Efron 1979). None, 0 times, of a single
    part, which says nothing of others."""
    times, count, rng = RESAMPLED * (len(parts) > 1), len(parts), np.random.default_rng(0)
    return np.array([rng.multinomial(count, [1 / count] * count) @ parts for _ in range(times)])


def likely(
    drawn: Sequence[float] | np.ndarray, value: float, parts: int, least: float = 0.0, most: float = math.inf
) -> list[float] | None:
    """Between which 95 of 100 other values would be, from those of `resampled` parts; None if there are none. Few parts
    tell little of how far they lie apart, for which Student (1908) widens the interval about the value itself, but not
    beyond what is possible, `least` and `most`."""
    if not len(drawn):
        return None
    wider = student(parts) / NORMAL * math.sqrt(parts / (parts - 1))
    ends = value + wider * (np.quantile(drawn, (0.025, 0.975)) - value)
    return [float(each) for each in ends.clip(least, most)]


def student(count: int) -> float:
    """How many standard deviations, told from so many values, hold 95 of 100."""
    return STUDENT[count - 2] if count - 2 < len(STUDENT) else NORMAL * (1 + 1.2 / (count - 1))


def _metrics() -> dict[str, Metric]:
    return {"bleu": BLEU(), "bleu_lowercase": BLEU(lowercase=True), "chrf": CHRF()}


def translation_scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """sacreBLEU (13a; mixed case and lower-cased), chrF, their signatures, and the percentage of exact matches."""
    scores: dict[str, Any] = {}
    for name, metric in _metrics().items():
        scores[name] = metric.corpus_score(list(outputs), [list(references)]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores | {"exact_match": float(np.mean(_matches(outputs, references)))}


def translation_intervals(outputs: Sequence[str], references: Sequence[str]) -> dict[str, list[float] | None]:
    """Of these scores, by sacreBLEU's own bootstrap of the rows."""
    matches = np.array(_matches(outputs, references))
    drawn = resampled(matches) / len(matches)
    found = {"exact_match_interval": likely(drawn, float(matches.mean()), len(matches), most=100.0)}
    for name, metric in _metrics().items() if len(matches) > 1 else ():
        try:
            score = metric.corpus_score(list(outputs), [list(references)], n_bootstrap=RESAMPLED)
        except TypeError:  # it cannot add up scores of which some are nothing at all
            continue
        said = json.loads(score.format(width=6, signature=str(metric.get_signature()), is_json=True))
        if "confidence_mean" in said:
            middle, half = said["confidence_mean"], said["confidence_var"]
            found[f"{name}_interval"] = [max(0.0, middle - half), min(100.0, middle + half)]  # it takes them for normal
    return found


def _matches(outputs: Sequence[str], references: Sequence[str]) -> list[float]:
    return [100.0 * (out.strip() == reference.strip()) for out, reference in zip(outputs, references, strict=True)]


def grouped_scores(
    outputs: Sequence[str], references: Sequence[str], groups: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """BLEU, exact match and size of each group of rows, and of all together; null and empty are no group."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        if group is not None and group != "":
            rows[ANY_GROUP].append(row)
            rows[str(group)].append(row)
    result = {}
    for group, members in rows.items():
        scores = translation_scores([outputs[row] for row in members], [references[row] for row in members])
        result[group] = {"rows": len(members), "exact_match": scores["exact_match"], "bleu": scores["bleu"]}
    return result


def least_risk(texts: Sequence[str], log_probabilities: Sequence[float]) -> str:
    """Of several translations of a text the one that is most like all of them, each as often as it is probable, by the
    BLEU of sentences: minimum Bayes risk (Kumar & Byrne 2004)."""
    scores = SHARPNESS * np.array(log_probabilities)
    weights, metric = defaultdict[str, float](float), BLEU(effective_order=True)
    for text, score in zip(texts, np.exp(scores - scores.max()), strict=True):
        weights[text] += score

    def gain(text: str) -> float:
        return sum(weight * metric.sentence_score(text, [other]).score for other, weight in weights.items())

    return max(weights, key=gain)


def used_memory(device: torch.device) -> float:
    """MB that this process holds: the most that tensors have taken on a GPU, elsewhere what is resident now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return psutil.Process().memory_info().rss / 1e6


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves of a run as a PNG: training loss red, evaluation loss blue, and beside it the score that rises."""
    from hf_scratch_transformer.insight.pictures import curves, save  # matplotlib is loaded once there is a picture

    save(curves({path.parent.name: lines}), path)


def public(value: Any) -> Any:
    """A record as others may read it: of a path from the root or a home folder the last part, the rest is nobody's."""
    if isinstance(value, Mapping):
        return {key: public(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [public(each) for each in value]
    if not isinstance(value, str):
        return value
    key, _, rest = value.partition("=")
    if value.startswith("--") and rest:
        return f"{key}={public(rest)}"
    if value.startswith(("/", "~")):
        return Path(value).name or value
    return re.sub(r"""(?<=["'])[/~][^"']*/(?=[^"'/])""", "", value)
