"""Several configs on the same budget: runs take turns on the machine, so that a change of its speed affects all of them.

Each run trains in its own process until its next evaluation. Only finished evaluations count, so a comparison that was stopped continues
where it was.
"""

import json
import math
import multiprocessing
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import read_text
from flow_grpo.errors import INTERRUPTED, TEMPORARY, USER_ERROR, FlowGRPOError, RetryableError, is_retryable
from flow_grpo.evaluation.group_dependence import group_dependence_warnings
from flow_grpo.evaluation.image_metrics import NUM_DISTANCE_PROMPTS, distance_from_base
from flow_grpo.figures import new_figure, save_figure
from flow_grpo.files import write_atomic
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.step_meter import peak_memory
from flow_grpo.progress import phase, show_phases
from flow_grpo.rewards.threads import exit_with_parent
from flow_grpo.run_folder import checkpoint, layout
from flow_grpo.text import counted, markdown_table

CURVE, BUDGET = "curve.jsonl", "budget.json"
SECONDS = {"s": 1, "m": 60}
Saved = TypeVar("Saved")
Rows = dict[str, dict[str, float | None]]  # by config, then by column
CONSOLE_COLUMNS = ("end", "range", "reached", "to target, s", "gain per 100 s", "peak MB")  # the files have all columns


@dataclass(frozen=True)
class Budget:
    """Seconds of training or generated images for each run, between equally distant evaluations. The fields are those of budget.json."""

    amount: PositiveFloat
    unit: Literal["seconds", "images"]
    evaluations: PositiveInt  # after that before training

    def until(self, evaluation: int) -> float:
        """The budget that is spent before an evaluation; the first one after training is number 1."""
        return self.amount * evaluation / self.evaluations


@dataclass(frozen=True)
class CurvePoint:
    """An evaluation of a run. The fields are those of a line of curve.jsonl."""

    evaluation: int  # 0 is before training
    step: int
    seconds: float  # of training: rollouts, rewards and updates, without evaluations
    images: int  # generated and scored
    kl: float  # mean squared distance of the velocity from the base model's
    memory_mb: float  # peak of the process so far, or of the GPU since the last evaluation
    extra_parameters: int  # of a critic, which is trained in addition
    values: dict[str, float]  # held-out metrics, means over the prompts

    def reaches(self, metric: str, target: float | None) -> bool:
        """Whether a metric is at least the target."""
        return target is not None and self.values.get(metric, -math.inf) >= target


@dataclass(frozen=True)
class ComparedRun:
    """One config with one seed."""

    config: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return Path(self.config).stem

    def points(self) -> list[CurvePoint]:
        """The finished evaluations. FlowGRPOError if they are damaged."""
        file = self.folder / CURVE
        lines = read_text(file).splitlines() if file.exists() else []
        return [_parsed(CurvePoint, line, f"line {number} of {file}") for number, line in enumerate(lines, 1)]

    def add(self, point: CurvePoint) -> None:
        """Write a finished evaluation."""
        lines = [json.dumps(asdict(one)) for one in (*self.points(), point)]
        write_atomic(self.folder / CURVE, "".join(f"{line}\n" for line in lines))

    def settings(self, overrides: list[str]) -> FlowGRPOConfig:
        own = [f"seed={self.seed}", f"output_dir={self.folder}", "keep_checkpoints=3"]
        # each part of the run is a process of its own, which would compile anew
        return FlowGRPOConfig.from_yaml(self.config, [*overrides, *own]).without_auto_compile()


def _parsed(kind: type[Saved], text: str, source: str) -> Saved:
    """Read a dataclass from JSON. FlowGRPOError, which names the source, if the text is something else."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FlowGRPOError(
            f"{source} is damaged ({where and f'{where}: '}{first['msg']}): restore it, or give another folder by --out."
        ) from error


def parse_budget(text: str, evaluations: int) -> Budget:
    """Parse `120s`, `20m` or `images=5000`. FlowGRPOError if it is none of them."""
    images, duration = re.fullmatch(r"images=(\d+)", text), re.fullmatch(r"(\d+\.?\d*)([sm])", text)
    amount = float(images[1]) if images else float(duration[1]) * SECONDS[duration[2]] if duration else 0.0
    if amount == 0:
        raise FlowGRPOError(
            f"--budget {text} is no budget of each run: give seconds, minutes or images, as 120s, 20m or images=5000."
        )
    return Budget(amount, "images" if images else "seconds", evaluations)


def compare(
    configs: list[str],
    seeds: int,
    budget: Budget,
    out: Path,
    *,
    overrides: list[str],
    metric: str,
    target: float | None = None,
    stop: bool = False,
    log: Callable[[str], None] = print,
) -> list[ComparedRun]:
    """Train every config with every seed on the budget, in turns; returns the runs, whose points are in their folders.

    Call `check_configs` first.

    Args:
        stop: end a run when its `metric` reaches the `target`.
    """
    runs = [
        ComparedRun(config, seed, out / Path(config).stem / f"seed{seed}") for seed in range(seeds) for config in configs
    ]
    if any(run.points() for run in runs):
        _check_budget(out / BUDGET, budget)
    for run in runs:
        _check_settings(run, overrides)
    write_atomic(out / BUDGET, json.dumps(asdict(budget)))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flow_grpo.trainer"])
    for number in range(budget.evaluations + 1):
        for run in runs:
            points = run.points()
            is_done = len(points) > number or bool(stop and points and points[-1].reaches(metric, target))
            point = points[-1] if is_done else _train_in_process(context, run, number, budget, overrides)
            if metric not in point.values:
                raise FlowGRPOError(f"{run.config} has no held-out metric {metric}; it has {', '.join(point.values)}.")
            if not is_done:
                images, value = counted(point.images, "image"), f"{metric} {point.values[metric]:.3f}"
                log(f"{run.name} seed {run.seed}: {point.seconds:.0f} s, {images}, {value}")
    return runs


def _train_in_process(
    context: ForkServerContext, run: ComparedRun, number: int, budget: Budget, overrides: list[str]
) -> CurvePoint:
    process = context.Process(target=train_to_evaluation, args=(run, number, budget, overrides))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.kill()  # it may hang; what it trained does not count
        raise
    points = run.points()
    if process.exitcode or len(points) <= number:
        kind = RetryableError if process.exitcode == TEMPORARY else FlowGRPOError
        raise kind(f"the run {run.folder} failed; its last lines are above. The other runs are kept.")
    return points[-1]


def train_to_evaluation(run: ComparedRun, number: int, budget: Budget, overrides: list[str]) -> None:
    """Train one run from its last evaluation to evaluation `number`, and evaluate it. Number 0 is before training."""
    quiet_libraries()
    parent = multiprocessing.parent_process()
    if parent is not None:  # the comparison that continues in its place trains anew from the last evaluation
        exit_with_parent(parent.sentinel)
    try:
        with show_phases(Console(stderr=True, emoji=False)):
            run.add(_train_and_evaluate(run, number, budget, overrides))
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        _print_error_line(f"error: {error}")
        sys.exit(TEMPORARY if is_retryable(error) else USER_ERROR)
    except KeyboardInterrupt:  # the parent process gets it too
        sys.exit(INTERRUPTED)


def _train_and_evaluate(run: ComparedRun, number: int, budget: Budget, overrides: list[str]) -> CurvePoint:
    from flow_grpo.trainer import FlowGRPOTrainer

    trainer = FlowGRPOTrainer(args=run.settings(overrides))
    points = run.points()
    spent, peak_gb = {"seconds": 0.0, "images": 0.0}, 0.0
    if points:
        spent = {"seconds": points[-1].seconds, "images": float(points[-1].images)}
        trainer.state.load_state_dict(checkpoint.read(run.folder / layout.CHECKPOINTS, points[-1].step))
        checkpoint.delete_after(run.folder / layout.CHECKPOINTS, points[-1].step)
    with phase(f"training {run.name} seed {run.seed}", total=round(budget.until(number)), unit=budget.unit) as training:
        while spent[budget.unit] < budget.until(number):
            metrics = trainer.training_step()
            spent["seconds"] += metrics["time/step"]
            spent["images"] += metrics["images"]
            peak_gb = max(peak_gb, metrics["memory/peak_gb"])
            training.done = round(spent[budget.unit])
    trainer.save()
    evaluation = trainer.evaluate()
    if number == 0 and run.seed == 0 and trainer.eval_set:
        for sentence in group_dependence_warnings(trainer.eval_rewards.rewards, trainer.eval_set, evaluation.images):
            _print_error_line(f"warning: {run.name}: {sentence}")
    with trainer.policy.ema.applied():
        assert trainer.eval_set
        prompts, steps = trainer.eval_set.prompts[:NUM_DISTANCE_PROMPTS], trainer.args.evaluation.steps
        kl = statistics.mean(distance_from_base(trainer.policy, prompts, steps, trainer.args.microbatch))
    critic = trainer.stage.critic
    return CurvePoint(
        evaluation=number,
        step=trainer.step,
        seconds=spent["seconds"],
        images=int(spent["images"]),
        kl=kl,
        memory_mb=max(1e3 * peak_gb, peak_memory(trainer.policy.device) / 1e6),
        extra_parameters=0 if critic is None else sum(p.numel() for p in critic.parameters()),
        values=evaluation.means(),
    )


def _print_error_line(line: str) -> None:
    Console(stderr=True, emoji=False).print(line, highlight=False, markup=False, soft_wrap=True)


def check_configs(configs: list[str], overrides: list[str], budget: Budget) -> None:
    """Check, before a folder is made, that these configs can be compared. FlowGRPOError if not."""
    if len(set(configs)) < len(configs):
        raise FlowGRPOError("one config is given twice: give each once; --seeds repeats its runs.")
    if len({Path(config).stem for config in configs}) < len(configs):
        raise FlowGRPOError("two of the configs have one file name: rename one, since runs are kept by that name.")
    for config in configs:
        args = FlowGRPOConfig.from_yaml(config, overrides)
        _, last_stage = args.resolved_stages()[-1]
        if args.evaluation.prompts is None:
            raise FlowGRPOError(f"{config} names no held-out prompts to compare on: set evaluation.prompts.")
        if budget.unit == "images" and last_stage.dataset is not None:
            raise FlowGRPOError(
                f"{config} ends with a stage on given images, which generates none: give a budget in seconds, such as --budget 120s."
            )


def _check_settings(run: ComparedRun, overrides: list[str]) -> None:
    """Write the run's settings to its folder. FlowGRPOError if it was started with others."""
    args, file = run.settings(overrides), run.folder / layout.CONFIG
    same_folder = {"output_dir": args.output_dir}  # the folder may have been moved, or be named from another one
    if run.points() and file.exists() and FlowGRPOConfig.from_yaml(file).model_copy(update=same_folder) != args:
        raise FlowGRPOError(f"{run.folder} was started with other settings: give another folder by --out.")
    run.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, args.to_yaml())


def _check_budget(file: Path, budget: Budget) -> None:
    """FlowGRPOError if the comparison began with another distance of evaluations; their number may grow."""
    previous = _parsed(Budget, read_text(file), str(file)) if file.exists() else budget
    if previous.unit != budget.unit or not math.isclose(previous.until(1), budget.until(1)):
        raise FlowGRPOError(
            f"{file.parent} was started with {previous.until(1):g} {previous.unit} between evaluations, not {budget.until(1):g} "
            f"{budget.unit}: give a --budget and --evaluations that result in the same, or another folder by --out."
        )


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
        "range": max(ends) - min(ends) if len(ends) > 1 else None,
        "worst fall": max([0.0, *falls]),
        "gain per 100 s": _rate(100 * gain, sum(point.seconds for point in last)),
        "gain per 1000 images": _rate(1000 * gain, sum(point.images for point in last)),
        "gain per KL": _rate(gain, sum(point.kl for point in last)),
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
