"""What a comparison found: a table, learning curves."""

import statistics
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flow_grpo.compare.runs import Point, Run, reached
from flow_grpo.text import markdown_table

SHOWN = ("end", "spread", "reached", "to target, s", "per 100 s", "peak MB")  # on the console; the files have them all


def summary(runs: list[Run], measure: str, target: float | None) -> dict[str, dict[str, float | None]]:
    """For each config, over its seeds: what it reached, how fast, and at what price."""
    found: dict[str, dict[str, float | None]] = {}
    for name in dict.fromkeys(run.name for run in runs):
        curves = [run.points() for run in runs if run.name == name]
        first, last = [c[0] for c in curves], [c[-1] for c in curves]
        gains = [b.values[measure] - a.values[measure] for a, b in zip(first, last, strict=True)]
        ends = [p.values[measure] for p in last]
        row: dict[str, float | None] = {
            "seeds": len(curves),
            "end": statistics.mean(ends),
            "spread": max(ends) - min(ends),
            "worst fall": max(max([0.0, *(a.values[measure] - b.values[measure] for a, b in _pairs(c))]) for c in curves),
            "per 100 s": _rate(100 * sum(gains), sum(p.seconds for p in last)),
            "per 1000 images": _rate(1000 * sum(gains), sum(p.images for p in last)),
            "per KL": _rate(sum(gains), sum(p.kl for p in last)),
            "seconds a step": _rate(sum(p.seconds for p in last), sum(p.step for p in last)),
            "peak MB": max(p.memory_mb for c in curves for p in c),
            "extra parameters": max(p.critic for p in last),
        }
        for name_of, before in first[0].values.items():
            if name_of not in (measure, "reward"):
                row[f"{name_of} change"] = statistics.mean(p.values[name_of] for p in last) - before
        if target is not None:
            times = [next((p.seconds for p in c if reached(p, measure, target)), None) for c in curves]
            times_reached = [t for t in times if t is not None]
            row["reached"] = len(times_reached)
            row["to target, s"] = statistics.median(times_reached) if len(times_reached) == len(times) else None
        found[name] = row
    return found


def print_summary(console: Console, rows: dict[str, dict[str, float | None]], measure: str, target: float | None) -> None:
    table = Table(title=measure + (f", target {target}" if target is not None else ""), title_justify="left")
    table.add_column("config", no_wrap=True)
    columns = [name for name in SHOWN if any(name in row for row in rows.values())]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *(_written(row.get(column)) for column in columns))
    console.print(table)


def markdown(rows: dict[str, dict[str, float | None]]) -> str:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [[name, *(_written(row.get(column)) for column in columns)] for name, row in rows.items()]
    return markdown_table(["config", *columns], lines) + "\n"


def plot(runs: list[Run], measure: str, target: float | None, file: Path) -> None:
    """Learning curves over seconds, images and distance from the base model: each seed, and the mean of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    names = list(dict.fromkeys(run.name for run in runs))
    axes_of: dict[str, Callable[[Point], float]] = {
        "seconds of training": lambda p: p.seconds,
        "images drawn": lambda p: p.images,
        "squared distance from the base model": lambda p: p.kl,
    }
    for axes, (label, x) in zip(panels, axes_of.items(), strict=True):
        for number, name in enumerate(names):
            curves = [run.points() for run in runs if run.name == name]
            style = {"color": f"C{number % 10}", "linestyle": ("-", "--", "-.", ":")[number % 4]}
            for points in curves:
                axes.plot([x(p) for p in points], [p.values[measure] for p in points], linewidth=0.8, alpha=0.35, **style)
            together = list(zip(*curves, strict=False))  # as far as the shortest goes
            xs = [statistics.mean(x(p) for p in points) for points in together]
            ys = [statistics.mean(p.values[measure] for p in points) for points in together]
            # the first ones are wider, so that a curve that lies on another one hides nothing
            axes.plot(xs, ys, label=name, linewidth=1.6 + 4 * (1 - (number + 1) / len(names)), **style)
        if target is not None:
            axes.axhline(target, color="0.5", linewidth=0.8, linestyle=":")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"held out: {measure}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(file, dpi=120)


def _pairs(points: list[Point]) -> list[tuple[Point, Point]]:
    return list(zip(points, points[1:], strict=False))


def _rate(gain: float, price: float) -> float | None:
    return gain / price if price else None


def _written(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3f}"
