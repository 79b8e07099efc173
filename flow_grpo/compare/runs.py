"""Several configs on the same budget: runs take turns on the machine, so that a change of its speed affects all of them.

Each run trains in its own process until its next evaluation. Only finished evaluations count, so a comparison that was stopped continues
where it was.
"""

import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.console import Console

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.group_dependence import group_dependence_warnings
from flow_grpo.evaluation.image_metrics import NUM_DISTANCE_PROMPTS, distance_from_base
from flow_grpo.files import MAX_JSON, regular_bytes, write_atomic
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.memory import peak_memory
from flow_grpo.progress import phase, show_phases
from flow_grpo.rewards.interrupt import exit_with_parent
from flow_grpo.run_folder import checkpoint, layout
from flow_grpo.text import counted

CURVE, BUDGET = "curve.jsonl", "budget.json"
FORMER_NAMES = {"slice": "evaluation", "slices": "evaluations", "critic": "extra_parameters"}  # in these files, of 0.3


@dataclass(frozen=True)
class Budget:
    """Seconds of training or generated images for each run, between equally distant evaluations. The fields are those of budget.json."""

    amount: float
    unit: str  # seconds or images
    evaluations: int  # after that before training

    def until(self, evaluation: int) -> float:
        """What is spent before an evaluation, the first after training being 1."""
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
        return target is not None and self.values[metric] >= target


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
        """The finished evaluations, up to the first that can't be read."""
        points: list[CurvePoint] = []
        file = self.folder / CURVE
        for line in file.read_bytes().splitlines() if file.is_file() else []:
            try:
                point = TypeAdapter(CurvePoint).validate_python(_with_current_names(json.loads(line)))
            except (ValueError, RecursionError):  # cut off, or written by another program
                continue
            if point.evaluation == len(points):
                points.append(point)
        return points

    def add(self, point: CurvePoint) -> None:
        """Write a finished evaluation."""
        write_atomic(
            self.folder / CURVE, "".join(json.dumps(asdict(curve_point)) + "\n" for curve_point in [*self.points(), point])
        )

    def settings(self, overrides: list[str]) -> FlowGRPOConfig:
        own = [f"seed={self.seed}", f"output_dir={self.folder}", "keep_checkpoints=3"]
        return FlowGRPOConfig.from_yaml(self.config, [*overrides, *own])


def _with_current_names(content: Any) -> Any:
    return {FORMER_NAMES.get(key, key): value for key, value in content.items()} if isinstance(content, dict) else content


def parse_budget(text: str, evaluations: int) -> Budget:
    """Parse `120s`, `20m` or `images=5000`."""
    unit, equals, number = text.partition("=")
    try:
        if equals and unit == "images":
            return Budget(_positive(float(number)), "images", evaluations)
        if not equals and text.endswith(("s", "m")):
            return Budget(_positive(float(text[:-1]) * (60 if text.endswith("m") else 1)), "seconds", evaluations)
    except ValueError:
        pass
    raise FlowGRPOError(f"--budget {text} is none of 120s, 20m or images=5000.")


def _positive(number: float) -> float:
    if not 0 < number < math.inf:
        raise FlowGRPOError
    return number


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

    Args:
        stop: end a run when its `metric` reaches the `target`.
    """
    _check_configs(configs, overrides, budget)
    _check_budget(out / BUDGET, budget)
    runs = [
        ComparedRun(config, seed, out / Path(config).stem / f"seed{seed}") for seed in range(seeds) for config in configs
    ]
    for run in runs:
        _check_settings(run, overrides)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flow_grpo.trainer"])
    for number in range(budget.evaluations + 1):
        for run in runs:
            points = run.points()
            if points and metric not in points[-1].values:
                raise FlowGRPOError(f"{run.config} has no held-out metric {metric}; it has {', '.join(points[-1].values)}.")
            if len(points) > number or (stop and points and points[-1].reaches(metric, target)):
                continue
            point = _train_in_process(context, run, number, budget, overrides)
            metric_text = f", {metric} {point.values[metric]:.3f}" if metric in point.values else ""
            log(f"{run.name} seed {run.seed}: {point.seconds:.0f} s, {counted(point.images, 'image')}{metric_text}")
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
        raise FlowGRPOError(f"the run {run.folder} failed; its last lines are above. The other runs are kept.")
    return points[-1]


def train_to_evaluation(run: ComparedRun, number: int, budget: Budget, overrides: list[str]) -> None:
    """Train one run from its last evaluation to evaluation `number`, and evaluate it. Number 0 is before training."""
    quiet_libraries()
    _exit_if_orphaned()
    try:
        with show_phases(Console(stderr=True)):
            run.add(_train_and_evaluate(run, number, budget, overrides))
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        _print_error_line(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:  # the parent process gets it too
        sys.exit(130)


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
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _exit_if_orphaned() -> None:
    """End this process when its parent ends: the comparison that continues in its place trains anew from the last evaluation."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        exit_with_parent(parent.sentinel)


def _check_configs(configs: list[str], overrides: list[str], budget: Budget) -> None:
    if len({Path(config).stem for config in configs}) < len(configs):
        raise FlowGRPOError("two of the configs have one file name: rename one, since runs are kept by that name.")
    for config in configs:
        _, last_stage = FlowGRPOConfig.from_yaml(config, overrides).resolved_stages()[-1]
        if budget.unit == "images" and last_stage.dataset is not None:
            raise FlowGRPOError(
                f"{config} ends with a stage on given images, which generates none: give a budget in seconds, such as --budget 120s."
            )


def _check_settings(run: ComparedRun, overrides: list[str]) -> None:
    """Write the run's settings to its folder. FlowGRPOError if it was started with others."""
    args, file = run.settings(overrides), run.folder / layout.CONFIG
    if args.evaluation.prompts is None:
        raise FlowGRPOError(f"{run.config} names no held-out prompts to compare on: set evaluation.prompts.")
    same_folder = {"output_dir": args.output_dir}  # the folder may have been moved, or be named from another one
    if run.points() and file.exists() and FlowGRPOConfig.from_yaml(file).model_copy(update=same_folder) != args:
        raise FlowGRPOError(f"{run.folder} was started with other settings: give another folder by --out.")
    run.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, args.to_yaml())


def _check_budget(file: Path, budget: Budget) -> None:
    """Write the budget to the folder. FlowGRPOError if the comparison began with another distance of evaluations; their number may grow."""
    if file.exists():
        try:
            former = Budget(**_with_current_names(json.loads(regular_bytes(file, MAX_JSON))))
        except (ValueError, TypeError, RecursionError) as error:
            raise FlowGRPOError(f"{file} is damaged: give another folder by --out.") from error
        if former.unit != budget.unit or not math.isclose(former.until(1), budget.until(1)):
            raise FlowGRPOError(
                f"{file.parent} was started with {former.until(1):g} {former.unit} between evaluations, not {budget.until(1):g} "
                f"{budget.unit}: give a --budget and --evaluations that result in the same, or another folder by --out."
            )
    write_atomic(file, json.dumps(asdict(budget)))
