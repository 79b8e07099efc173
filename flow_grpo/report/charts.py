"""The curves of a report, as paths of an SVG that stretches with the page while its lines keep their width.

Paths are in a box of 1000 x 1000. Ticks are shares of the box with their labels, which the page sets as text next to it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flow_grpo.run_folder.metrics_file import metric_name
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import number, short_name, six_digits

SIGNALS = {
    "kl": ("Distance from the base model", "KL of the trained model to the base"),
    "frac_reward_zero_std": ("Groups with zero reward std", "share whose images all got one reward"),
    "reward_std": ("Reward std within a group", "standard deviation of the rewards of a prompt's images"),
    "ratio/max_deviation": ("Largest deviation of the ratio from 1", "of new over old probability"),
    "clip_ratio": ("Clipped", "share of ratios outside the clip range"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "monitor/high_frequency_power": ("High-frequency power", "of the held-out images: blur lowers it, grain raises it"),
    "monitor/diversity": ("Diversity", "how much two images of a prompt differ"),
}
REWARD_NOTE = "line: in training; dots: held out"
OF_EVALUATIONS = ("monitor/high_frequency_power", "monitor/diversity")

Point = tuple[float, float]
BOX = 1000.0
MAX_POINTS = 300  # of a line
FLAT_TOLERANCE = 1e-3  # relative change up to which a line counts as flat


@dataclass(frozen=True)
class Line:
    """`kind`: `line`, `soft`, `faint` (behind another one) or `dots` (connected). `run` is the run's number, which gives the colour."""

    label: str
    points: list[Point]
    kind: str = "line"
    run: int = 0


def run_charts(runs: list[RunReader], names: list[str]) -> tuple[list[dict], list[dict], list[str]]:
    """The charts of reward and held-out scores, those of the training signals, and the name and value of each constant."""
    marks: dict[str, list[tuple[int, int]]] = {}  # of warnings, by the metric that has dropped
    for i, run in enumerate(runs):
        for row in run.warnings:
            marks.setdefault(row.get("fallen", ""), []).append((i, row["step"]))
    scores, constant_scores = _score_charts(runs, names, marks)
    signals, constant_signals = _signal_charts(runs, names, marks)
    return scores, signals, constant_scores + constant_signals


def _score_charts(
    runs: list[RunReader], names: list[str], marks: dict[str, list[tuple[int, int]]]
) -> tuple[list[dict], list[str]]:
    labels = names if len(runs) > 1 else [""]
    same_rewards = all(run.trained == runs[0].trained for run in runs)  # sums of other rewards have other scales
    charts = []
    if same_rewards:
        charts.append(draw("Reward", _reward_lines(runs, labels, "reward"), REWARD_NOTE))
        sets = dict.fromkeys(name for run in runs for name in run.prompt_sets)
        charts += [draw(f"Reward of {name}", _reward_lines(runs, labels, f"reward/{name}"), REWARD_NOTE) for name in sets]
    constant: list[str] = []
    for name in dict.fromkeys(
        metric_name(name) for run in runs for name in run.score_names if metric_name(name) != "reward"
    ):
        trained = [i for i, run in enumerate(runs) if name in run.trained]
        if same_rewards and trained and all(name == run.score_names[0] for run in runs if run.score_names):
            continue  # it is the reward
        lines = [
            line for i, run in enumerate(runs) for line in _held_out_lines(run, f"eval/{name}", labels[i] or "held out", i)
        ]
        note = "trained on" if same_rewards else f"trained on by {' and '.join(names[i] for i in trained)}"
        dropped = [mark for fallen, steps in marks.items() if metric_name(fallen) == name for mark in steps]
        chart = draw(short_name(name), lines, note if trained else "not trained on", dropped)
        charts.append(chart)
        if not chart and lines[0].points:
            constant.append(f"{short_name(name)}: {number(lines[0].points[-1][1])}")
    return [chart for chart in charts if chart], constant


def _signal_charts(
    runs: list[RunReader], names: list[str], marks: dict[str, list[tuple[int, int]]]
) -> tuple[list[dict], list[str]]:
    charts, constant = [], []
    for key, (title, note) in SIGNALS.items():
        evaluated = key in OF_EVALUATIONS
        lines = []
        for i, run in enumerate(runs):
            label = names[i] if len(runs) > 1 else title.lower()
            lines += (
                _held_out_lines(run, key, label, i) if evaluated else [Line(label, series(run.step_rows, key), "line", i)]
            )
        dropped = [key, *(f"{title.lower()} of the {images}" for images in ("images", "pictures"))]  # pictures: runs of 0.3
        chart = draw(title, lines, note, [mark for name in dropped for mark in marks.get(name, ())])
        values = {y for line in lines for _, y in line.points}
        if chart:
            charts.append(chart)
        elif len(values) == 1:
            constant.append(f"{title[0].lower()}{title[1:]}: {values.pop():g}")
    return charts, constant


def _reward_lines(runs: list[RunReader], labels: list[str], key: str) -> list[Line]:
    """The reward, or that of a prompt set, in training and held out. A single run has each step's reward too."""
    lines = []
    for i, run in enumerate(runs):
        points = series(run.step_rows, key)
        if len(runs) == 1:
            lines.append(Line("", points, "faint", i))
        lines.append(Line(f"{labels[i]} in training".strip(), smooth(points), "soft", i))
        lines += _held_out_lines(run, f"eval/{key}", f"{labels[i]} held out".strip(), i)
    return lines


def _held_out_lines(run: RunReader, key: str, label: str, number: int) -> list[Line]:
    """A metric of evaluations, and a line for each further size."""
    own = Line(label, series(run.evaluation_rows, key), "dots", number)
    return [
        own,
        *(Line(f"{label} at {size}", series(run.evaluation_rows, f"{key}@{size}"), "dots", number) for size in run.sizes),
    ]


def series(rows: list[dict], key: str) -> list[Point]:
    """A metric over the steps; `clip_ratio` is the sum of what is clipped below and above."""
    parts = ("clip_ratio/low_mean", "clip_ratio/high_mean") if key == "clip_ratio" else (key,)
    finite = [row for row in rows if all(math.isfinite(row.get(part, math.nan)) for part in parts)]
    return [(float(row["step"]), float(sum(row[part] for part in parts))) for row in finite]


def draw(title: str, lines: Iterable[Line], note: str = "", marks: Iterable[tuple[int, int]] = ()) -> dict | None:
    """What the template needs for a chart; None with fewer than two points, or if all lines are flat.

    Args:
        marks: pairs of run and step to mark.
    """
    lines = [line for line in lines if line.points]
    ys = [y for line in lines for _, y in line.points]
    if max((len(line.points) for line in lines), default=0) < 2 or max(ys) - min(ys) <= FLAT_TOLERANCE * max(map(abs, ys)):
        return None
    left, right = 0.0, max(x for line in lines for x, _ in line.points)
    low, high = _room(min(ys), max(ys))

    def coordinates(x: float, y: float) -> str:
        return f"{BOX * (x - left) / (right - left):.1f} {BOX * (high - y) / (high - low):.1f}"

    shapes = []
    for line in lines:
        points = downsample(line.points)
        shape = {"kind": line.kind, "run": line.run, "path": "M" + "L".join(coordinates(x, y) for x, y in points)}
        if line.kind == "dots":
            shape["dots"] = "".join(f"M{coordinates(x, y)}h0" for x, y in points)
        shapes.append(shape)
    readable = [line for line in lines if line.kind != "faint"]
    ends = [f"{line.label} from {number(line.points[0][1])} to {number(line.points[-1][1])}" for line in readable]
    return {
        "title": title,
        "note": note,
        "label": f"{title}, steps {left:.0f} to {right:.0f}: {'; '.join(ends)}",
        "lines": shapes,
        "marks": [{"run": run, "x": _percent(step, left, right)} for run, step in marks],
        "x": [
            {"at": _percent(x, left, right), "text": text}
            for x, text in ticks(left, right, max(1, min(4, int(right - left))))
        ],
        "y": [{"at": _percent(y, high, low), "text": text} for y, text in ticks(low, high, 4)],
        "last": right,
        "data": [
            {"label": line.label, "run": line.run, "points": [six_digits(p) for p in downsample(line.points)]}
            for line in readable
        ],
    }


def ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """About `count` round numbers from `low` to `high`, each with its text; all texts have the same number of decimals."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= 0.999 * rough)
    decimals = -math.floor(math.log10(step) + 1e-9) + (round(step / power, 3) == 2.5)
    values = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    if decimals <= 5 and abs(high) < 1e6:
        return [(v, f"{v + 0.0:,.{max(0, decimals)}f}") for v in values]
    digits = max(0, math.floor(math.log10(max(abs(low), abs(high)))) + decimals)  # after the point, before the power of ten
    return [(v, f"{v:.{digits}e}".replace("e+0", "e").replace("e-0", "e-") if v else "0") for v in values]


def smooth(points: list[Point]) -> list[Point]:
    """The moving average over about a twentieth of the line."""
    reach = len(points) // 40
    averages = []
    for i, (x, _) in enumerate(points):
        near = points[max(0, i - reach) : i + reach + 1]
        averages.append((x, sum(y for _, y in near) / len(near)))
    return averages


def downsample(points: list[Point]) -> list[Point]:
    """At most MAX_POINTS points, each the mean of its neighbours. The first and the last point stay."""
    if len(points) <= MAX_POINTS:
        return points
    inner, count = points[1:-1], MAX_POINTS - 2
    parts = [inner[len(inner) * i // count : len(inner) * (i + 1) // count] for i in range(count)]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts if part]
    return [points[0], *means, points[-1]]


def _room(low: float, high: float) -> tuple[float, float]:
    gap = 0.08 * (high - low)
    return low - gap if low < 0 or low - gap >= 0 else 0.0, high + gap


def _percent(value: float, first: float, last: float) -> float:
    return round(100 * (value - first) / (last - first), 2)
