"""The report of one run or several: a single HTML file that loads nothing from the network.

Prompts are untrusted text: the template escapes them, the script sets them as text, and the page's Content-Security-Policy allows
no other script and no request.
"""

import base64
import hashlib
import math
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import write_atomic
from flow_grpo.report import summary
from flow_grpo.report.charts import run_charts
from flow_grpo.rewards.image_files import open_header, regular_content
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader, check_links, value_of
from flow_grpo.text import number, plain, short_name, six_digits

TEMPLATES = Path(__file__).parent / "templates"
MAX_FRAMES = 24  # evaluations whose images are shown for each prompt
DIGEST = re.compile("[0-9a-f]{8,64}")  # hexadecimal digest of an image's content
MAX_PROMPTS = 8  # held-out prompts whose images are shown over training
MAX_GROUP_STEPS = 6  # training steps whose groups are shown


def write(folders: list[Path], out: Path) -> Path:
    """Write the report of these runs as one file. FlowGRPOError if one of the folders holds no run, or links out of it."""
    for folder in folders:
        check_links(folder)
    return _write(folders, out)


def _write(folders: list[Path], out: Path) -> Path:
    page = render([RunReader(folder) for folder in folders])
    write_atomic(out, page)  # it may be read while the run is training
    return out


def write_report(run: Path) -> Path:
    """Write the report of one run, of this process, into its folder; returns the file."""
    return _write([run], run / layout.REPORT)


def render(runs: list[RunReader]) -> str:
    """The page as HTML."""
    names = run_names(runs)
    style, script = (Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("report.css", "report.js"))
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plain": plain, "number": number, "short": short_name}
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
        "data": json_safe({"runs": data}),
    }
    return environment.get_template("report.html.jinja").render(content)


def run_context(run: RunReader, name: str) -> dict[str, Any]:
    """What the template needs of a run."""
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
    """What the script needs of a run: the images of the first held-out prompts over training, and the groups of some steps."""
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
                "strips": [strip(e["folder"], i) for i in indices],
                "values": six_digits(value_of(e, metric, i) for i in indices),
            }
            for e in frames
        ],
        "groups": [
            {"step": g["step"], "groups": [group(run, g["folder"], n, c) for n, c in enumerate(g["groups"])]} for g in shown
        ],
    }


def strip(folder: Path, index: int) -> str | None:
    """The strip of a held-out prompt's video as a data URI; None if it is an image."""
    return data_uri(folder / layout.strip_of(layout.prompt_image(index)))


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
    if len(rows) == 1:
        return [{"title": "The only prompt with a reward", "note": "", "rows": rows}]
    half = len(rows) // 2
    if half and rows[0]["now"] == rows[-1]["now"]:
        return [
            {"title": f"All {len(now)} prompts have the reward {number(rows[0]['now'])}", "note": "", "rows": rows[:half]}
        ]
    parts = {"Best": rows[:half], "Worst": rows[half:][::-1]} if half else {}
    return [{"title": title, "note": _tied(part, now), "rows": part} for title, part in parts.items()]


def _tied(rows: list[dict[str, Any]], values: list[float]) -> str:
    """The number of prompts that share the last row's reward, if not all of them are shown; else empty."""
    reward = rows[-1]["now"]
    count, shown = sum(value == reward for value in values), sum(row["now"] == reward for row in rows)
    return f"{count} prompts have {number(reward)}; {shown} of them are shown" if count > shown else ""


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


def json_safe(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
