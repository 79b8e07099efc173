"""The report of one run or several: one HTML file that asks nothing of the network, for a reader who has two minutes.

Prompts are untrusted text: the template escapes them, the script sets them as text, and the page's policy lets no other script
run and nothing be fetched.
"""

import base64
import hashlib
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from PIL import Image

from flow_grpo.files import write_atomic
from flow_grpo.report import summary
from flow_grpo.report.charts import Line, draw, smooth
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import number, plain, short_name, six_digits

TEMPLATES = Path(__file__).parent / "templates"
MAX_FRAMES, MAX_GROUP_STEPS = 24, 6  # of a film, and of the steps whose groups are shown
MAX_PROMPTS = 8  # prompts with a film
SIGNALS = {
    "kl": ("Distance from the base model", "KL of the trained model to the base"),
    "frac_reward_zero_std": ("Groups without signal", "share whose images all got one reward"),
    "reward_std": ("Spread within a group", "standard deviation of the rewards of a prompt's images"),
    "ratio/max_deviation": ("Largest deviation of the ratio from 1", "of new over old probability"),
    "clip_ratio": ("Clipped", "share of ratios beyond the clip range"),
    "grad_norm": ("Gradient", "its norm before clipping"),
    "monitor/sharpness": ("High-frequency power", "of the held-out images: blur loses it, grain adds it"),
    "monitor/diversity": ("Diversity", "how much two images of a prompt differ"),
}
OF_EVALUATIONS = ("monitor/sharpness", "monitor/diversity")


def write(folders: list[Path], out: Path) -> Path:
    """Writes the report of these runs as one file. ValueError if one of the folders holds no run."""
    page = render([RunReader(folder) for folder in folders])
    write_atomic(out, page)  # whoever looks during training sees a whole page
    return out


def write_report(run: Path) -> Path:
    """Write the report of one run into its folder; returns the file."""
    return write([run], run / layout.REPORT)


def render(runs: list[RunReader]) -> str:
    names = run_names(runs)
    style, script = (Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("report.css", "report.js"))
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plain": plain, "number": number, "short": short_name}
    curves, signals, flat = charts(runs, names)
    views = [run_context(run, name) for run, name in zip(runs, names, strict=True)]
    warnings = [
        {"run": n, "step": w["step"], "text": w["warning"]} for run, n in zip(runs, names, strict=True) for w in run.warnings
    ]
    content = {
        "style": style,
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "title": f"{' against '.join(names)} · flow-grpo",
        "runs": views,
        "warnings": warnings,
        "curves": curves,
        "signals": signals,
        "flat": flat,
        "comparison": summary.comparison(runs) if len(runs) > 1 else None,
        "settings": summary.settings(runs),
        "data": json_safe({"runs": [pictures(run, name) for run, name in zip(runs, names, strict=True)]}),
    }
    return environment.get_template("report.html.jinja").render(content)


def run_context(run: RunReader, name: str) -> dict[str, Any]:
    """What the template says of a run."""
    return {
        "name": name,
        "sentence": summary.headline(run),
        "others": summary.untrained_metrics(run),
        "monitored": "" if any("fallen" in row for row in run.warnings) else summary.monitored(run),
        "cost": summary.cost(run),
        "table": summary.table(run),
        "ends": best_and_worst(run),
        "config": "\n".join(plain(line) for line in run.source.splitlines()),
    }


def run_names(runs: list[RunReader]) -> list[str]:
    """Folder names, with as much of the path before them as tells them apart."""
    paths = [run.folder.resolve() for run in runs]
    for count in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [plain(name) for name in names]


def charts(runs: list[RunReader], names: list[str]) -> tuple[list[dict], list[dict], list[str]]:
    """The reward's and the measures' charts, those of the signals, and what did not move."""
    labels = names if len(runs) > 1 else [""]
    marks: dict[str, list[tuple[int, int]]] = {}
    for i, run in enumerate(runs):
        for row in run.warnings:
            marks.setdefault(row.get("fallen", ""), []).append((i, row["step"]))
    alike = all(run.trained == runs[0].trained for run in runs)  # sums of other rewards have other scales
    found = [draw(*reward_lines(runs, labels))] if alike else []
    flat: list[str] = []
    for name in dict.fromkeys(name for run in runs for name in run.metrics if name != "reward"):
        trained = [i for i, run in enumerate(runs) if name in run.trained]
        if alike and trained and all(name == run.metrics[0] for run in runs if run.metrics):
            continue  # it is the reward
        lines = [
            Line(labels[i] or "held out", series(run.held_out, f"eval/{name}"), "dots", i) for i, run in enumerate(runs)
        ]
        note = "trained on" if alike else f"trained on by {' and '.join(names[i] for i in trained)}"
        chart = draw(short_name(name), lines, note if trained else "not trained on", marks.get(name, ()))
        found.append(chart)
        if not chart and lines[0].points:
            flat.append(f"{short_name(name)}: {number(lines[0].points[-1][1])}")
    signals = []
    for key, (title, note) in SIGNALS.items():
        rows = [run.held_out if key in OF_EVALUATIONS else run.steps for run in runs]
        kind = "dots" if key in OF_EVALUATIONS else "line"
        lines = [Line(labels[i] or title.lower(), series(rows[i], key), kind, i) for i in range(len(runs))]
        fallen = [f"{title.lower()} of the {images}" for images in ("images", "pictures")]  # pictures: runs of 0.3
        chart = draw(title, lines, note, [mark for name in fallen for mark in marks.get(name, ())])
        values = {y for line in lines for _, y in line.points}
        if chart:
            signals.append(chart)
        elif len(values) == 1:
            flat.append(f"{title[0].lower()}{title[1:]}: {values.pop():g}")
    return [chart for chart in found if chart], signals, flat


def reward_lines(runs: list[RunReader], labels: list[str]) -> tuple[str, list[Line], str]:
    """Title, lines and note of the reward in training and held out; one run alone shows each step too."""
    lines = []
    for i, run in enumerate(runs):
        points = series(run.steps, "reward")
        if len(runs) == 1:
            lines.append(Line("", points, "faint", i))
        lines.append(Line(f"{labels[i]} in training".strip(), smooth(points), "soft", i))
        lines.append(Line(f"{labels[i]} held out".strip(), series(run.held_out, "eval/reward"), "dots", i))
    return "Reward", lines, "line: in training; dots: held out"


def series(rows: list[dict], key: str) -> list[tuple[float, float]]:
    """A number over the steps; `clip_ratio` is what is clipped below and above together."""
    parts = ("clip_ratio/low_mean", "clip_ratio/high_mean") if key == "clip_ratio" else (key,)
    found = [(row["step"], sum(row[part] for part in parts)) for row in rows if all(_is_number(row.get(p)) for p in parts)]
    return [(float(step), float(value)) for step, value in found]


def pictures(run: RunReader, name: str) -> dict[str, Any]:
    """What the script shows of a run: the film of the first held-out prompts, and some steps' groups."""
    evaluations = [e for e in run.evaluations if picture(e["folder"] / layout.prompt_image(0))]
    frames = [evaluations[i] for i in evenly_spaced(len(evaluations), MAX_FRAMES)]
    places = [
        p for p in range(MAX_PROMPTS) if frames and all((e["folder"] / layout.prompt_image(p)).is_file() for e in frames)
    ]
    measure = run.metrics[0] if run.metrics else "reward"
    size = Image.open(frames[0]["folder"] / layout.prompt_image(0)).size if frames else (1, 1)
    shown = [run.groups[i] for i in evenly_spaced(len(run.groups), MAX_GROUP_STEPS)]
    return {
        "name": name,
        "size": size,
        "measure": short_name(measure),
        "prompts": [plain(frames[0]["prompts"][p]) for p in places],
        "frames": [
            {
                "step": e["step"],
                "pictures": [picture(e["folder"] / layout.prompt_image(p)) for p in places],
                "values": six_digits(e["values"][measure][p] for p in places),
            }
            for e in frames
        ],
        "groups": [
            {"step": g["step"], "groups": [group(g["folder"], n, c) for n, c in enumerate(g["groups"])]} for g in shown
        ],
    }


def group(folder: Path, place: int, content: dict[str, Any]) -> dict[str, Any]:
    """A group of training images as the script takes it."""
    return {
        "prompt": plain(content["prompt"]),
        "images": content["images"],
        "items": [
            {
                "picture": picture(folder / layout.group_image(place, i)),
                "reward": reward,
                "advantage": content["advantage"][i],
                "rewards": {plain(short_name(name)): values[i] for name, values in content["rewards"].items()},
            }
            for i, reward in enumerate(content["reward"])
        ],
    }


def best_and_worst(run: RunReader) -> list[dict[str, Any]]:
    """The best and the worst held-out prompts of the last evaluation, with how they did at the first, under a title each."""
    if not run.evaluations:
        return []
    first, last = run.evaluations[0], run.evaluations[-1]
    order, now, then = last["extremes"], last["values"]["reward"], first["values"]["reward"]
    rows = [
        {
            "prompt": last["prompts"][place],
            "picture": picture(last["folder"] / layout.prompt_image(place)),
            "now": now[place],
            "then": then[place] if first is not last else None,
        }
        for place in order
    ]
    half = len(rows) // 2
    if half and rows[0]["now"] == rows[-1]["now"]:
        return [
            {"title": f"All {len(now)} prompts have the reward {number(rows[0]['now'])}", "note": "", "rows": rows[:half]}
        ]
    parts = {"Best": rows[:half], "Worst": rows[half:][::-1]} if half else {}
    return [{"title": title, "note": _tied(part, now), "rows": part} for title, part in parts.items()]


def _tied(rows: list[dict[str, Any]], values: list[float]) -> str:
    """Says how many prompts share the reward of the last row, if some of them are not shown."""
    reward = rows[-1]["now"]
    count, shown = sum(value == reward for value in values), sum(row["now"] == reward for row in rows)
    return f"{count} prompts have {number(reward)}; {shown} of them are shown" if count > shown else ""


def picture(file: Path) -> str | None:
    """A picture as a data URI; None if it is not there or no picture."""
    try:
        with Image.open(file) as image:
            kind = image.format
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return f"data:image/{str(kind).lower()};base64,{base64.b64encode(file.read_bytes()).decode()}"


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most so many places of `count`, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def json_safe(value: Any) -> Any:
    """Without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
