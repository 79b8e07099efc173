"""The report of one run or several: a single HTML file that loads nothing from the network.

Prompts are untrusted text: the template escapes them, the script sets them as text, and the page's Content-Security-Policy allows
no other script and no request.
"""

import base64
import functools
import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup
from pydantic_core import to_json

from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.hacking import of_images
from flow_grpo.files import write_atomic
from flow_grpo.report import summary
from flow_grpo.rewards.images import open_header, regular_content
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader, check_links, value_of
from flow_grpo.text import number, plain, short_name, six_digits

TEMPLATES = Path(__file__).parent / "templates"
MAX_FRAMES = 24  # evaluations whose images are shown for each prompt
DIGEST = re.compile("[0-9a-f]{8,64}")  # hexadecimal digest of an image's content
MAX_PROMPTS = 8  # held-out prompts whose images are shown over training
MAX_GROUP_STEPS = 6  # training steps whose groups are shown
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


def write(folders: list[Path], out: Path) -> Path:
    """Write the report of these runs as one file. FlowGRPOError if one of the folders holds no run, or links out of it."""
    for folder in folders:
        check_links(folder)
    write_atomic(out, render([RunReader(folder) for folder in folders]))
    return out


def write_report(run: Path) -> Path:
    """Write the report of one run, of this process, into its folder; returns the file."""
    out = run / layout.REPORT
    write_atomic(out, render([RunReader(run)]))  # it may be read while the run is training
    return out


def render(runs: list[RunReader]) -> str:
    """The page as HTML."""
    names = run_names(runs)
    style, script = (Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("report.css", "report.js"))
    curves, signals, constant = run_charts(runs, names)
    warnings = [
        {"run": n, "step": w["step"], "text": w["warning"]} for run, n in zip(runs, names, strict=True) for w in run.warnings
    ]
    data = [script_data(run, name) for run, name in zip(runs, names, strict=True)]
    content = {
        "style": style,
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "title": f"{' against '.join(names)} · flow-grpo",
        "runs": [run_context(run, name) for run, name in zip(runs, names, strict=True)],
        "warnings": warnings,
        "curves": curves,
        "signals": signals,
        "constant": constant,
        "comparison": summary.comparison(runs) if len(runs) > 1 else None,
        "settings": summary.settings(runs),
        "has_rows": any(run.step_rows or run.evaluation_rows for run in runs),
        "has_images": [len(entry["frames"]) > 1 and bool(entry["prompts"]) for entry in data],
        "has_groups": [any(step["groups"] for step in entry["groups"]) for entry in data],
        "data": {"runs": data},
    }
    return template().render(content)


@functools.cache  # compiling it takes most of the time
def template() -> Template:
    """The page's template."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_function"] = lambda value, **_: to_json(value, inf_nan_mode="null").decode()
    environment.filters |= {"plain": plain, "number": number, "short": short_name}
    return environment.get_template("report.html.jinja")


def run_context(run: RunReader, name: str) -> dict[str, Any]:
    """The values of a run for the template."""
    return {
        "name": name,
        "headline": summary.headline(run),
        "untrained": summary.untrained_metrics(run),
        "monitor": "" if any("fallen" in row for row in run.warnings) else summary.monitor_status(run),
        "cost": summary.cost(run),
        "table": summary.table(run),
        "best_and_worst": best_and_worst(run),
        "config": "\n".join(plain(line) for line in run.config_text.splitlines()),
    }


def run_names(runs: list[RunReader]) -> list[str]:
    """The runs' folder names, with as many parent folders as it takes to tell them apart."""
    paths = [run.folder.resolve() for run in runs]
    for count in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [plain(name) for name in names]


def script_data(run: RunReader, name: str) -> dict[str, Any]:
    """The images of a run for the script: those of the first held-out prompts over training, and the groups of some steps."""
    evaluations = [e for e in run.evaluations if data_uri(e["folder"] / layout.prompt_image(0))]
    frames = [evaluations[i] for i in evenly_spaced(len(evaluations), MAX_FRAMES)]
    num_prompts = min([MAX_PROMPTS, *(len(e["prompts"]) for e in frames)]) if frames else 0
    indices = [i for i in range(num_prompts) if all((e["folder"] / layout.prompt_image(i)).is_file() for e in frames)]
    metric = run.main_metric
    first = frames[0]["folder"] / layout.prompt_image(0) if frames else Path()
    size = open_header(first, str(first)).size if frames else (1, 1)
    shown = [run.groups[i] for i in evenly_spaced(len(run.groups), MAX_GROUP_STEPS)]
    return {
        "name": name,
        "size": size,
        "measure": short_name(metric),
        "prompts": [plain(frames[0]["prompts"][i]) for i in indices],
        "sources": [source(run, frames[0], i) for i in indices],
        "frames": [
            {
                "step": e["step"],
                "pictures": [data_uri(e["folder"] / layout.prompt_image(i)) for i in indices],
                "strips": [data_uri(e["folder"] / layout.strip_of(layout.prompt_image(i))) for i in indices],  # of videos
                "values": six_digits(value_of(e, metric, i) for i in indices),
            }
            for e in frames
        ],
        "groups": [
            {"step": g["step"], "groups": [group(run, g["folder"], n, c) for n, c in enumerate(g["groups"])]} for g in shown
        ],
    }


def group(run: RunReader, folder: Path, index: int, content: dict[str, Any]) -> dict[str, Any]:
    """A group of training images, as the script needs it."""
    return {
        "prompt": plain(content["prompt"]),
        "source": source_uri(run, content.get("source")),
        "images": content["images"],
        "items": [
            {
                "picture": data_uri(folder / layout.group_image(index, i)),
                "reward": reward,
                "advantage": content["advantage"][i],
                "rewards": {plain(short_name(name)): values[i] for name, values in content["rewards"].items()},
            }
            for i, reward in enumerate(content["reward"])
        ],
    }


def source(run: RunReader, evaluation: dict[str, Any], index: int) -> str | None:
    """The first image of a held-out prompt as a data URI; None if it has none, or it was not kept."""
    return source_uri(run, evaluation["sources"][index]) if evaluation.get("sources") else None


def source_uri(run: RunReader, digest: Any) -> str | None:
    """A prompt's image as a data URI, by the digest of its content; None if there is none."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        return None
    return data_uri(run.folder / layout.PICTURES / layout.source_image(digest))


def best_and_worst(run: RunReader) -> list[dict[str, Any]]:
    """The best and the worst held-out prompts of the last evaluation, with their rewards at the first, each under a title."""
    if not run.evaluations:
        return []
    first, last = run.evaluations[0], run.evaluations[-1]
    order, now = last["extremes"], last["values"]["reward"]
    rows = [
        {
            "prompt": last["prompts"][i],
            "source": source(run, last, i),
            "picture": data_uri(last["folder"] / layout.prompt_image(i)),
            "now": now[i],
            "then": value_of(first, "reward", i) if first is not last else None,
        }
        for i in order
    ]
    half = (len(rows) + 1) // 2
    parts = {"Best": rows[:half], "Worst": rows[half:][::-1]}
    return [{"title": title, "rows": part} for title, part in parts.items() if part]


def data_uri(file: Path) -> str | None:
    """An image file as a data URI; None if it is missing or no image."""
    try:
        content = regular_content(file, str(file))
        kind = open_header(content, str(file)).format
    except FlowGRPOError:
        return None
    return f"data:image/{str(kind).lower()};base64,{base64.b64encode(content).decode()}"


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


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
    for name in dict.fromkeys(name for run in runs for name in run.score_names if name != "reward"):
        trained = [i for i, run in enumerate(runs) if name in run.trained]
        if same_rewards and trained and all(name == run.score_names[0] for run in runs if run.score_names):
            continue  # it is the reward
        lines = [
            Line(labels[i] or "held out", series(run.evaluation_rows, f"eval/{name}"), "dots", i)
            for i, run in enumerate(runs)
        ]
        note = "trained on" if same_rewards else f"trained on by {' and '.join(names[i] for i in trained)}"
        chart = draw(short_name(name), lines, note if trained else "not trained on", marks.get(name, ()))
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
            rows, style = (run.evaluation_rows, "dots") if evaluated else (run.step_rows, "line")
            lines.append(Line(label, series(rows, key), style, i))
        dropped = [key, of_images(title.lower())]
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
        lines.append(Line(f"{labels[i]} held out".strip(), series(run.evaluation_rows, f"eval/{key}"), "dots", i))
    return lines


def series(rows: list[dict], key: str) -> list[Point]:
    """A metric over the steps; `clip_ratio` is the sum of what is clipped below and above."""
    parts = ("clip_ratio/low_mean", "clip_ratio/high_mean") if key == "clip_ratio" else (key,)
    finite = [row for row in rows if all(math.isfinite(row.get(part, math.nan)) for part in parts)]
    return [(float(row["step"]), float(sum(row[part] for part in parts))) for row in finite]


def draw(title: str, lines: Iterable[Line], note: str = "", marks: Iterable[tuple[int, int]] = ()) -> dict | None:
    """The values of a chart for the template; None with fewer than two points, or if all lines are flat.

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
