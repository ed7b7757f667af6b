"""The measurements that a run wrote down: `metrics.jsonl`, a line of JSON for each."""

import json
import os
from pathlib import Path
from typing import Any

# Scores of which more is better; for everything else (losses, perplexities) less is. Most telling first.
RISING = ("bleu", "bleu_lowercase", "chrf", "exact_match", "masked_accuracy")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The measurements of a run, oldest first, from its folder or its `metrics.jsonl`; a last line cut off by a kill is
    left out.

    Raises:
        ValueError: no such file, or a line that is no record.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no metrics of a run to read there ({error})") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line else None
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if record is not None:
            if not isinstance(record, dict) or not {"event", "step"} <= record.keys():
                raise ValueError(f"{path}, line {number}: a record needs 'event' and 'step', found {line:.80}")
            if not isinstance(record["event"], str):
                raise ValueError(f"{path}, line {number}: event={record['event']!r} must be a name")
            for name in {"step", "loss", *RISING} & record.keys():
                if type(record[name]) not in (int, float):
                    raise ValueError(f"{path}, line {number}: {name}={record[name]!r} must be a number")
            records.append(record)
    return records
