"""The results of a comparison: a table of the configs, and their learning curves."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flow_grpo.compare.runs import ComparedRun, CurvePoint
from flow_grpo.figures import new_figure, save_figure
from flow_grpo.text import markdown_table

Rows = dict[str, dict[str, float | None]]  # by config, then by column
CONSOLE_COLUMNS = ("end", "spread", "reached", "to target, s", "per 100 s", "peak MB")  # the files have all columns


def summarize(runs: list[ComparedRun], metric: str, target: float | None) -> Rows:
    """For each config, over its seeds: what it reached, how fast, and at what cost."""
    rows = {}
    for name in dict.fromkeys(run.name for run in runs):
        curves = [run.points() for run in runs if run.name == name]
        rows[name] = {**_results(curves, metric), **_changes(curves, metric), **_times_to_target(curves, metric, target)}
    return rows


def _results(curves: list[list[CurvePoint]], metric: str) -> dict[str, float | None]:
    first, last = [curve[0] for curve in curves], [curve[-1] for curve in curves]
    ends = [point.values[metric] for point in last]
    gain = sum(end - point.values[metric] for end, point in zip(ends, first, strict=True))
    falls = [a.values[metric] - b.values[metric] for curve in curves for a, b in zip(curve, curve[1:], strict=False)]
    return {
        "seeds": len(curves),
        "end": statistics.mean(ends),
        "spread": max(ends) - min(ends),
        "worst fall": max([0.0, *falls]),
        "per 100 s": _rate(100 * gain, sum(point.seconds for point in last)),
        "per 1000 images": _rate(1000 * gain, sum(point.images for point in last)),
        "per KL": _rate(gain, sum(point.kl for point in last)),
        "seconds a step": _rate(sum(point.seconds for point in last), sum(point.step for point in last)),
        "peak MB": max(point.memory_mb for curve in curves for point in curve),
        "extra parameters": max(point.extra_parameters for point in last),
    }


def _rate(gain: float, cost: float) -> float | None:
    return gain / cost if cost else None


def _changes(curves: list[list[CurvePoint]], metric: str) -> dict[str, float | None]:
    """Changes of the other metrics from the start."""
    return {
        f"{name} change": statistics.mean(curve[-1].values[name] for curve in curves) - before
        for name, before in curves[0][0].values.items()
        if name not in (metric, "reward")
    }


def _times_to_target(curves: list[list[CurvePoint]], metric: str, target: float | None) -> dict[str, float | None]:
    """The number of seeds that reached the target, and the median of their seconds if all did."""
    if target is None:
        return {}
    first = [next((point.seconds for point in curve if point.reaches(metric, target)), None) for curve in curves]
    times = [seconds for seconds in first if seconds is not None]
    return {"reached": len(times), "to target, s": statistics.median(times) if len(times) == len(first) else None}


def print_summary(console: Console, rows: Rows, metric: str, target: float | None) -> None:
    """Print the comparison's table with the columns that fit a console."""
    table = Table(title=metric + (f", target {target}" if target is not None else ""), title_justify="left")
    table.add_column("config", no_wrap=True)
    columns = [name for name in CONSOLE_COLUMNS if any(name in row for row in rows.values())]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *(_cell(row.get(column)) for column in columns))
    console.print(table)


def markdown(rows: Rows) -> str:
    """The comparison's table in Markdown, with all columns."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [[name, *(_cell(row.get(column)) for column in columns)] for name, row in rows.items()]
    return markdown_table(["config", *columns], lines) + "\n"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3f}"


def save_plot(runs: list[ComparedRun], metric: str, target: float | None, file: Path) -> Path:
    """Learning curves over seconds, images and distance from the base model: each seed, and the mean of the seeds."""
    figure, panels = new_figure(13, 4.6, columns=3, sharey=True)
    x_axes: dict[str, Callable[[CurvePoint], float]] = {
        "seconds of training": lambda point: point.seconds,
        "images generated": lambda point: point.images,
        "squared distance from the base model": lambda point: point.kl,
    }
    for axes, (label, x) in zip(panels, x_axes.items(), strict=True):
        _plot_curves(axes, runs, x, lambda point: point.values[metric])
        if target is not None:
            axes.axhline(target, color="0.5", linewidth=0.8, linestyle=":")
        axes.set_xlabel(label)
    panels[0].set_ylabel(f"held out: {metric}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    save_figure(figure, file)
    return file


def _plot_curves(
    axes: Any, runs: list[ComparedRun], x: Callable[[CurvePoint], float], y: Callable[[CurvePoint], float]
) -> None:
    names = list(dict.fromkeys(run.name for run in runs))
    for number, name in enumerate(names):
        curves = [run.points() for run in runs if run.name == name]
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", "-.", ":")[number % 4]}
        for points in curves:
            axes.plot([x(p) for p in points], [y(p) for p in points], linewidth=0.8, alpha=0.35, **style)
        by_evaluation = list(zip(*curves, strict=False))  # as far as the shortest curve
        means = [[statistics.mean(value(p) for p in points) for points in by_evaluation] for value in (x, y)]
        width = 1.6 + 4 * (1 - (number + 1) / len(names))  # the first are wider, so that no curve hides another
        axes.plot(*means, label=name, linewidth=width, **style)
