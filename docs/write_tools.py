"""`python -m docs.write_tools`, which `make test-tools` ends with: docs/TOOLS.md from what its tests have recorded."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/TOOLS.md"
HEAD = """# Tools

What `make test-tools` ran, each tool at the version named, on small models of ours; written from the record that it
leaves in each folder of [tests/tools](../tests/tools). A row is a test: what was run, what was compared with what, in
how many cases. {yes} rows say yes. What cannot be run says why, in the words of the refusal. Of the servers vLLM,
SGLang and Text Embeddings Inference, which do not run here, the tests have the rules by which they build and call a
model, written out after their source, on the model itself: such a row says *not run* beside its version.
"""
TITLES = {
    "engines": "Engines",
    "evaluation": "Evaluation and quantisation",
    "insight": "Looking inside",
    "training": "Training elsewhere",
    "transformers": "Generation and serving by transformers",
}


def table(record: dict) -> str:
    """A line for each row of a record."""
    lines = ["| Tool | Version | Run | Compared | Result |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        cells = (row["tool"], row["version"], row["run"], row["compared"], result(row))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def result(row: dict) -> str:
    """Yes where every case passed, else what happened."""
    counts = dict(row["result"])
    passed, count = counts.pop("passed", 0), sum(row["result"].values())
    if passed == count:
        return f"yes ({count})" if count > 1 else "yes"
    others = ", ".join(f"{number} {what}" for what, number in counts.items())
    words = f": {row['refusal']}" if "refusal" in row else ""
    return f"{passed} of {count} passed, {others}{words}" if passed else f"no, {others}{words}"


def page() -> str:
    """The whole page."""
    paths = sorted(ROOT.glob("tests/tools/*/record.json"))
    records = {path.parent.name: json.loads(path.read_text()) for path in paths}
    yes = sum(result(row).startswith("yes") for record in records.values() for row in record["rows"])
    parts = [HEAD.format(yes=yes)]
    for name, record in records.items():
        at = f"Python {record['python']}, torch {record['torch']}, transformers {record['transformers']}"
        parts.append(f"## {TITLES[name]}\n\n`make test-tools-{name}`, with {at}.\n\n{table(record)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)} is written")
