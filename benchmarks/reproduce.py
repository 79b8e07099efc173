"""A published result on real weights, in one command: plan, download, train, compare with the published numbers, a page to send back.

    python benchmarks/reproduce.py                          # the results and their published numbers
    python benchmarks/reproduce.py ocr --plan --gpu H100    # memory and hours; no weights are downloaded
    python benchmarks/reproduce.py ocr --num-processes 8    # the same command goes on after a stop
    python benchmarks/reproduce.py ocr steps=400            # other settings, which the page names

It is a script and no verb of `flow-grpo`, since few people have the weights, the cards and the days. It writes reproduction.md,
reproduction.png and reproduction.json into the run folder, also after a stop: please send the three in an issue. The published numbers
are of papers and repositories; most papers have their curves as pictures only, so that a start and an end are compared.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
import typer
from pydantic_core import to_json
from rich.console import Console

from flow_grpo import FlowGRPOConfig, __version__
from flow_grpo.cli.train import train
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.significance import Estimate, estimate, mean_of_independent
from flow_grpo.figures import new_figure, save_figure
from flow_grpo.files import write_atomic
from flow_grpo.plan.fit import baseline_memory, print_plan
from flow_grpo.plan.hardware import Hardware
from flow_grpo.policy import hub
from flow_grpo.policy.devices import usable_device
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.rewards.downloads import downloads
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import counted, inline_code, markdown_table

UPSTREAM = "https://raw.githubusercontent.com"
OCR = [
    f"prompts={UPSTREAM}/yifan123/flow_grpo/main/dataset/ocr/train.txt",
    "evaluation.prompts=ocr_paper",
    "evaluation.max_prompts=1018",
]
GENEVAL = [
    f"prompts={UPSTREAM}/NVlabs/DiffusionNFT/main/dataset/geneval/train_metadata.jsonl",
    "evaluation.prompts=geneval",
]
NO_CURVE = "No published curve was found."


@dataclass(frozen=True)
class Published:
    """A published mean of a metric: at a step, within GPU hours, or, with neither, at the end of training."""

    metric: str
    value: float
    step: int | None = None
    gpu_hours: float | None = None

    @property
    def where(self) -> str:
        return (
            f"step {self.step}"
            if self.step is not None
            else f"{self.gpu_hours:g} GPU hours"
            if self.gpu_hours
            else "the end"
        )


@dataclass(frozen=True)
class Result:
    """A published result.

    Attributes:
        config: the shipped config.
        settings: what is changed of it: the published prompts, which the package does not have, and the length of the run.
        published: its numbers.
        source: where they are.
        tasks: the column of the held-out prompts whose values are averaged first, each with equal weight.
    """

    config: str
    settings: list[str]
    published: list[Published]
    source: str
    tasks: str | None = None


RESULTS = {
    "ocr": Result(
        "sd35_medium_ocr_guided",
        [*OCR, "evaluation.every=100"],
        [Published("ocr", 0.59, step=0), Published("ocr", 0.92)],
        "Flow-GRPO, arXiv 2505.05470, abstract.",
    ),
    "geneval": Result(
        "sd35_medium_geneval_guided",
        [*GENEVAL, "steps=5000", "evaluation.every=250"],
        [Published("geneval_exact", 0.63, step=0), Published("geneval_exact", 0.95)],
        "Flow-GRPO, arXiv 2505.05470, abstract; `over 5k steps` is of arXiv 2509.16117, abstract.",
        tasks="tag",
    ),
    "pepg": Result(
        "sd35_medium_geneval_pepg",
        [*GENEVAL, "evaluation.every=100"],
        [Published("geneval_exact", 0.24, step=0), Published("geneval_exact", 0.95, gpu_hours=90)],
        "PEPG, arXiv 2602.04663, abstract.",
        tasks="tag",
    ),
    "nft": Result(
        "sd35_medium_geneval_nft",
        [*GENEVAL, "steps=1000", "evaluation.every=100"],
        [Published("geneval_exact", 0.24, step=0), Published("geneval_exact", 0.98, step=1000)],
        "DiffusionNFT, arXiv 2509.16117, abstract.",
        tasks="tag",
    ),
    "awm": Result(
        "sd35_medium_ocr_awm",
        [*OCR, "steps=400"],
        [],
        f"{NO_CURVE} AWM, arXiv 2509.25050, abstract: up to 24 times as fast as Flow-GRPO on GenEval, OCR and PickScore.",
    ),
    "flowbp": Result(
        "sd35_medium_hpsv2_flowbp",
        [],
        [
            Published("hpsv2", 0.2881, step=0),
            Published("hpsv2", 0.3939, step=300),
            Published("pickscore", 22.5004, step=0),
            Published("pickscore", 23.4104, step=300),
            Published("imagereward", 0.9504, step=0),
            Published("imagereward", 1.4299, step=300),
        ],
        "FlowBP-Sparse on SD3.5-M, README of RuoyuWang-2077/FlowBP (arXiv 2606.11075).",
    ),
}


@dataclass(frozen=True)
class Measured:
    """The held-out mean of a metric at an evaluation, with its interval, NaN below eight prompts."""

    step: int
    gpu_hours: float
    estimate: Estimate


def curve(run: RunReader, metric: str, tasks: list[str] | None) -> list[Measured]:
    """The evaluations of a metric; with the task of each prompt, means of the means of the tasks."""
    processes = run.machine.get("processes", 1)
    points = []
    for evaluation in run.evaluations:
        values = evaluation["values"].get(metric, [])
        if not any(map(math.isfinite, values)):
            continue
        hours = sum(row["time/step"] for row in run.step_rows if row["step"] <= evaluation["step"]) * processes / 3600
        points.append(Measured(evaluation["step"], hours, mean(values, tasks)))
    return points


def mean(values: Sequence[float], tasks: list[str] | None) -> Estimate:
    """The mean of the finite values, by task if there are tasks."""
    if tasks is None:
        return estimate([value for value in values if math.isfinite(value)])
    groups: dict[str, list[float]] = {}
    for task, value in zip(tasks, values, strict=True):
        groups.setdefault(task, []).extend([value] if math.isfinite(value) else [])
    return mean_of_independent([estimate(group) for group in groups.values() if group])


def measured_at(points: list[Measured], published: Published, finished: bool) -> Measured | None:
    """The last evaluation up to where a number was published; None if the run has not come so far."""
    if published.step is not None:
        past = [p for p in points if p.step <= published.step]
        reached = bool(points) and points[-1].step >= published.step
    elif published.gpu_hours is not None:
        past = [p for p in points if p.gpu_hours <= published.gpu_hours]
        reached = bool(points) and points[-1].gpu_hours >= published.gpu_hours
    else:
        past, reached = points, False
    return past[-1] if past and (reached or finished) else None


def verdict(point: Measured | None, published: Published) -> str:
    """How the measured mean stands to the published one."""
    if point is None:
        return "not reached"
    found = point.estimate
    if math.isnan(found.low):
        return "too few prompts"
    if found.low <= published.value <= found.high:
        return "within the interval"
    return "above" if found.mean > published.value else "below"


def content_of(name: str, args: FlowGRPOConfig, own: list[str]) -> dict[str, Any]:
    """What reproduction.json has: settings, machine, curves, and the comparison."""
    result, run = RESULTS[name], RunReader(Path(args.output_dir))
    prompts = load_run_prompts(args.evaluation.prompts).head(args.evaluation.max_prompts)
    tasks = [str(row.get(result.tasks)) for row in prompts.metadata] if result.tasks else None
    metrics = list(dict.fromkeys([p.metric for p in result.published] or args.rewards))
    curves = {metric: curve(run, metric, tasks) for metric in metrics}
    steps = len(run.step_rows)
    rows = []
    for published in result.published:
        point = measured_at(curves[published.metric], published, steps == args.steps)
        rows.append({**asdict(published), "where": published.where, "measured": point and asdict(point)})
        rows[-1]["verdict"] = verdict(point, published)
    return {
        "name": name,
        "config": result.config,
        "settings": result.settings,
        "changed": own,
        "source": result.source,
        "model": args.model,
        "model_commit": hub.fingerprint(hub.resolve_model(args.model))[1] if hub.looks_like_hub_id(args.model) else None,
        "machine": run.machine,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": {p.__name__: p.__version__ for p in (torch, diffusers, transformers)} | {"flow_grpo": __version__},
        "held_out_prompts": len(prompts.prompts),
        "steps": steps,
        "steps_asked": args.steps,
        "seconds_per_step": statistics.median(row["time/step"] for row in run.step_rows) if steps else None,
        "peak_gb": max((row["memory/peak_gb"] for row in run.step_rows), default=None),
        "warnings": [row["warning"] for row in run.warnings],
        "curves": {metric: [asdict(point) for point in points] for metric, points in curves.items()},
        "comparison": rows,
    }


def page_of(content: dict[str, Any]) -> str:
    """reproduction.md."""
    changed = content["changed"]
    comparison = [
        (row["metric"], row["where"], f"{row['value']:g}", _mean(row["measured"]), _place(row["measured"]), row["verdict"])
        for row in content["comparison"]
    ]
    places = sorted({(p["step"], p["gpu_hours"]) for points in content["curves"].values() for p in points})
    by_step = {metric: {p["step"]: p for p in points} for metric, points in content["curves"].items()}
    machine = content["machine"]
    facts = [
        ("config", " ".join(map(inline_code, [content["config"], *content["settings"]]))),
        ("changed settings", " ".join(map(inline_code, changed)) or "none"),
        ("model", f"{inline_code(content['model'])}, commit {content['model_commit'] or 'unknown'}"),
        ("device", f"{counted(machine.get('processes', 1), 'process')} on {machine.get('device')}, {machine.get('dtype')}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in content["packages"].items())),
        ("steps", f"{content['steps']} of {content['steps_asked']}"),
        ("a step", "none" if content["seconds_per_step"] is None else f"{content['seconds_per_step']:.1f} s (median)"),
        ("peak memory", "unknown" if content["peak_gb"] is None else f"{content['peak_gb']:.1f} GB"),
        ("held-out prompts", str(content["held_out_prompts"])),
    ]
    parts = [
        f"# Reproduction of `{content['name']}`",
        *(["**Settings were changed, so this is no reproduction.**"] if changed else []),
        f"Published: {content['source']}",
        markdown_table(["metric", "at", "published", "measured", "measured at", "verdict"], comparison)
        if comparison
        else "",
        "![The held-out means over training](reproduction.png)",
        markdown_table(
            ["step", "GPU hours", *by_step],
            [(str(step), f"{hours:.3g}", *(_mean(by_step[m].get(step)) for m in by_step)) for step, hours in places],
        ),
        markdown_table(["of the run", ""], facts),
        *(
            ["Warnings of the run:", "\n".join(f"- {warning}" for warning in content["warnings"])]
            if content["warnings"]
            else []
        ),
        f"The run's own report is {layout.REPORT}. Please send this page with reproduction.json and reproduction.png in an issue.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _mean(point: dict[str, Any] | None) -> str:
    if point is None:
        return ""
    found = point["estimate"]
    interval = "" if math.isnan(found["low"]) else f" ({found['low']:.3f} to {found['high']:.3f})"
    return f"{found['mean']:.3f}{interval}"


def _place(point: dict[str, Any] | None) -> str:
    return "" if point is None else f"step {point['step']}, {point['gpu_hours']:.3g} GPU hours"


def plot(content: dict[str, Any], file: Path) -> None:
    """The curves over GPU hours; published numbers as dashed lines."""
    figure, panels = new_figure(4.2 * len(content["curves"]), 3, columns=len(content["curves"]))
    for axes, (metric, points) in zip(panels, content["curves"].items(), strict=True):
        hours, means = [p["gpu_hours"] for p in points], [p["estimate"]["mean"] for p in points]
        if points:
            axes.plot(hours, means, marker="o", markersize=3, label="measured")
            intervals = [[p["estimate"][side] for p in points] for side in ("low", "high")]
            axes.fill_between(hours, *intervals, alpha=0.2, linewidth=0)
        for row in content["comparison"]:
            if row["metric"] == metric:
                axes.axhline(row["value"], color="0.5", linestyle="--", linewidth=1)
                axes.annotate(
                    f"published, {row['where']}", (0.02, row["value"]), xycoords=("axes fraction", "data"), va="bottom"
                )
        axes.set_xlabel("GPU hours of training")
        axes.set_title(metric, loc="left", fontsize="medium")
    save_figure(figure, file)


def write(name: str, args: FlowGRPOConfig, own: list[str]) -> Path:
    """Write the page, the figure and the JSON of a run, finished or not; returns the page."""
    content, folder = content_of(name, args, own), Path(args.output_dir)
    plot(content, folder / "reproduction.png")
    write_atomic(folder / "reproduction.json", to_json(content, indent=1, inf_nan_mode="null"))
    write_atomic(folder / "reproduction.md", page_of(content))
    return folder / "reproduction.md"


def reproduce(name: str, args: FlowGRPOConfig, settings: list[str], num_processes: int) -> int:
    """Download the pipeline, and train or go on. Returns the exit status of `flow-grpo train`."""
    source = hub.resolve_model(args.model)
    with hub.load_errors(args.model), downloads(source):
        if not Path(source).is_dir():
            print(f"downloaded to {diffusers.DiffusionPipeline.download(source)}", flush=True)
    try:
        train(RESULTS[name].config, settings, resume="auto", num_processes=num_processes)
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def table() -> str:
    """All results."""
    rows = [
        (
            name,
            result.config,
            ", ".join(f"{p.metric} {p.value:g} at {p.where}" for p in result.published),
            result.source,
        )
        for name, result in RESULTS.items()
    ]
    return markdown_table(["name", "config", "published", "source"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=list(RESULTS))
    parser.add_argument("settings", nargs="*", help="override settings, such as steps=400")
    parser.add_argument("--plan", action="store_true", help="print memory and hours, and exit")
    parser.add_argument("--gpu", help="plan for this GPU in place of this machine's")
    parser.add_argument("--num-processes", type=int, default=1, help="one for each GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    given = parser.parse_intermixed_args()
    quiet_libraries()
    if given.name is None:
        print(table())
        return 0
    settings = [*RESULTS[given.name].settings, f"output_dir={given.out / given.name}", *given.settings]
    try:
        args = FlowGRPOConfig.from_yaml(RESULTS[given.name].config, settings)
        machine = (
            Hardware.from_name(given.gpu, None, given.num_processes, None)
            if given.gpu
            else Hardware.of_this_machine(usable_device(args.device), None, given.num_processes)
        )
        if not print_plan(Console(emoji=False), args, machine, 0.0 if machine.cuda else baseline_memory(args)):
            return 1
        if given.plan:
            return 0
        status = reproduce(given.name, args, settings, given.num_processes)
        if layout.is_run(Path(args.output_dir)):
            print(f"The page is {write(given.name, args, given.settings)}.")
    except (FlowGRPOError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
