"""Results as a table, a record and a picture."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hf_scratch_transformer.files import replacing, write_text

from .measures import TOLERANCE


def print_result(result: dict[str, Any], console: Console) -> None:
    """A comparison as a table, without the columns for which nothing was measured."""
    shape = result["shape"]
    about = f", {shape['precision']}{', compiled' if shape['compile'] else ''}" if shape else ""
    title = " ".join(filter(None, (result["kind"], result["name"])))
    console.print(f"{title}: {result['title']}{about}", style="italic", highlight=False)
    table = Table()
    rows = [cells(name, row, result.get("ratios", {}).get(name, {})) for name, row in result["contenders"].items()]
    heads = [head for head in rows[0] if any(row[head] for row in rows)] if rows else []
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[head] for head in heads))
    console.print(table)
    if grown := result.get("exponents"):
        time = grown["seconds"]
        console.print(
            f"  grows with the power of {result['title']}: time {time['median']:.2f} [{time['q1']:.2f}, "
            f"{time['q3']:.2f}], operations {grown['operations']:.2f}, peak memory {grown['peak_bytes']:.2f}; in the "
            f"limit operations {grown['in_the_limit']}",
            highlight=False,
        )
    same = [name for name, row in result["contenders"].items() if row.get("difference", 1) <= TOLERANCE]
    if same:
        console.print(f"  the same numbers from the same weights: {', '.join(same)}")
    for note in result["notes"]:
        console.print(f"  {note}", highlight=False)


def cells(name: str, row: dict[str, Any], ratio: dict[str, Any]) -> dict[str, str]:
    """What a table says of a contender, by the heads of the columns."""
    speed = ratio.get("speed")
    return {
        "": name,
        "parameters": f"{row['parameters']:,}",
        "ms": number(row.get("seconds", {}).get("median"), 1000, ",.1f"),
        "tokens/s": number(row.get("tokens_per_second", {}).get("median"), 1, ",.0f"),
        "ours faster": f"{speed['median']:.2f}× [{speed['q1']:.2f}, {speed['q3']:.2f}]" if speed else "",
        "peak MB": number(row.get("peak_bytes"), 1e-6, ",.1f"),
        "of its memory": number(ratio.get("memory"), 1, ".2f", "×"),
        "of predicted": number(row.get("peak_of_predicted"), 1, ".2f", "×"),
        "kept MB": number(row.get("kept_bytes"), 1e-6, ",.1f"),
        "kept, of predicted": number(row.get("kept_of_predicted"), 1, ".2f", "×"),
        "calls/token": number(row.get("calls_per_token"), 1, ",.1f"),
        "of its calls": number(ratio.get("calls"), 1, ".2f", "×"),
        "GFLOP/s": number(row.get("flops_per_second"), 1e-9, ",.1f"),
        "of matmul": number(row.get("of_matmul_rate"), 100, ".1f", "%"),
        "of data sheet": number(row.get("of_sheet"), 100, ".1f", "%"),
        "of bandwidth": number(row.get("of_bandwidth"), 100, ".1f", "%"),
        "× roofline": number(row.get("times_roofline"), 1, ".2f"),
        "graphs": str(row["graphs"] or ""),
    }


def number(value: float | None, factor: float, form: str, unit: str = "") -> str:
    """Nothing, where nothing was measured."""
    return "" if value is None else f"{value * factor:{form}}{unit}"


def write(record: dict[str, Any], folder: Path) -> None:
    """The record as `benchmark.json`, and its ratios of speed as `benchmark.png` where there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "benchmark.json", json.dumps(record, indent=1) + "\n")
    speeds = {
        f"{result['name'] or result['kind']}, {result['title']}: {name}": ratio["speed"]
        for result in record["results"]
        for name, ratio in result.get("ratios", {}).items()
        if "speed" in ratio
    }
    if speeds:
        with replacing(folder / "benchmark.png") as temporary:
            plot(speeds).savefig(temporary, dpi=120, format="png")


def plot(speeds: dict[str, dict[str, float]]) -> Figure:
    """A bar for each peer, whiskers at the quartiles, a line at equal speed."""
    figure = Figure(figsize=(10, 1.2 + 0.32 * len(speeds)), layout="constrained")
    axes = figure.subplots()
    for place, speed in enumerate(speeds.values()):
        whiskers = [[speed["median"] - speed["q1"]], [speed["q3"] - speed["median"]]]
        axes.barh(place, speed["median"], color="tab:blue" if speed["median"] >= 1 else "tab:red", alpha=0.8)
        axes.errorbar(speed["median"], place, xerr=whiskers, color="black", capsize=3)
        axes.annotate(
            f"{speed['median']:.2f}×", (speed["q3"], place), (6, 0), textcoords="offset points", va="center", size=8
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="times as fast as the peer", yticks=range(len(speeds)), yticklabels=list(speeds))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return figure
