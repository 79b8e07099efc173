"""Several configs on the same budget: seeds and configs take turns on the machine, so that its drift is shared by all.

Each run goes on for a slice of the budget at a time, in a process of its own, and is evaluated at the end of each slice.
Nothing but finished slices counts, so a comparison that was stopped goes on where it was.
"""

import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from rich.console import Console

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.evaluation.image_metrics import distance_from_base
from flow_grpo.files import write_atomic
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.memory import peak_memory
from flow_grpo.run_folder import checkpoint, layout
from flow_grpo.text import counted
from rewards.interrupt import exit_with_parent

CURVE = "curve.jsonl"
PROBED = 32  # held-out prompts on whose way from noise to image the distance from the base model is measured


@dataclass(frozen=True)
class Budget:
    """So many seconds of training, or so many images drawn, for each run, in equal slices."""

    amount: float
    unit: str  # seconds or images
    slices: int

    def mark(self, number: int) -> float:
        """What is spent at the end of slice `number`, the first being 1."""
        return self.amount * number / self.slices


@dataclass(frozen=True)
class Point:
    """A run at the end of a slice; `values` are the held-out measures, means over the prompts."""

    slice: int
    step: int
    seconds: float  # of training: rollouts, rewards and updates, without evaluations
    images: int  # drawn and scored
    kl: float  # mean squared distance of the velocity from the base model's
    memory_mb: float  # peak of the process, or of the GPU
    critic: int  # parameters that are trained beside the adapter's
    values: dict[str, float]


@dataclass(frozen=True)
class Run:
    config: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return Path(self.config).stem

    def points(self) -> list[Point]:
        """The finished slices, up to the first that can't be read."""
        found: list[Point] = []
        file = self.folder / CURVE
        for line in file.read_bytes().splitlines() if file.is_file() else []:
            try:
                point = TypeAdapter(Point).validate_json(line)
            except ValueError:  # cut off, or written by something else
                continue
            if point.slice == len(found):
                found.append(point)
        return found

    def add(self, point: Point) -> None:
        """Notes a finished slice."""
        write_atomic(self.folder / CURVE, "".join(json.dumps(asdict(one)) + "\n" for one in [*self.points(), point]))


def parse_budget(text: str, slices: int) -> Budget:
    """`120s`, `20m` or `images=5000`."""
    kind, equals, number = text.partition("=")
    try:
        if equals and kind == "images":
            return Budget(_positive(float(number)), "images", slices)
        if not equals and text.endswith(("s", "m")):
            return Budget(_positive(float(text[:-1]) * (60 if text.endswith("m") else 1)), "seconds", slices)
    except ValueError:
        pass
    raise ValueError(f"--budget {text} is none of 120s, 20m or images=5000.")


def compare(
    configs: list[str],
    seeds: int,
    budget: Budget,
    out: Path,
    overrides: list[str],
    measure: str,
    target: float | None = None,
    stop: bool = False,
    say: Callable[[str], None] = print,
) -> list[Run]:
    """Runs every config with every seed on the budget, in turns; returns the runs, whose points lie in their folders.

    Args:
        stop: end a run once its `measure` has reached the `target`.
    """
    if len({Path(config).stem for config in configs}) < len(configs):
        raise ValueError("two of the configs have one file name: rename one, since runs are kept by that name.")
    for config in configs:
        if (
            budget.unit == "images"
            and FlowGRPOConfig.from_yaml(config, overrides).resolved_stages()[-1][1].dataset is not None
        ):
            raise ValueError(
                f"{config} ends on given images, which are not drawn: give a budget in seconds, such as --budget 120s."
            )
    _same_budget(out / "budget.json", budget)
    runs = [Run(config, seed, out / Path(config).stem / f"seed{seed}") for seed in range(seeds) for config in configs]
    for run in runs:
        _same_as_before(run, overrides)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flow_grpo.trainer"])
    for number in range(budget.slices + 1):
        for run in runs:
            points = run.points()
            if points and measure not in points[-1].values:
                raise ValueError(f"{run.config} has no held-out measure {measure}; it has {', '.join(points[-1].values)}.")
            if len(points) > number or (stop and points and reached(points[-1], measure, target)):
                continue
            process = context.Process(target=run_slice, args=(run, number, budget, overrides))
            process.start()
            try:
                process.join()
            except KeyboardInterrupt:
                process.kill()  # it may hang; its slice has not happened
                raise
            points = run.points()
            if process.exitcode or len(points) <= number:
                raise ValueError(f"the run {run.folder} failed; its last lines stand above. The others are kept.")
            now = ", ".join(f"{name} {value:.3f}" for name, value in points[-1].values.items() if name == measure)
            say(f"{run.name} seed {run.seed}: {points[-1].seconds:.0f} s, {counted(points[-1].images, 'image')}, {now}")
    return runs


def run_slice(run: Run, number: int, budget: Budget, overrides: list[str]) -> None:
    """Trains one run from the end of slice number - 1 to that of slice `number`, and measures it. 0 measures the start."""
    from flow_grpo.trainer import FlowGRPOTrainer

    quiet_libraries()
    parent = multiprocessing.parent_process()
    if parent is not None:  # were it killed, the comparison that goes on in its place would do the slice anew
        exit_with_parent(parent.sentinel)
    try:
        trainer = FlowGRPOTrainer(args=_settings(run, overrides))
        points = run.points()
        seconds, images = (points[-1].seconds, points[-1].images) if points else (0.0, 0)
        if points:
            trainer.state.load_state_dict(checkpoint.read(run.folder / layout.CHECKPOINTS, points[-1].step))
            checkpoint.delete_after(run.folder / layout.CHECKPOINTS, points[-1].step)
        spent = {"seconds": seconds, "images": float(images)}
        while spent[budget.unit] < budget.mark(number):
            metrics = trainer.training_step()
            spent["seconds"] += metrics["time/step"]
            spent["images"] += metrics["images"]
        trainer.save()
        values = trainer.evaluate().means()
        with trainer.policy.ema.applied():
            assert trainer.eval_set
            prompts, steps = trainer.eval_set.prompts[:PROBED], trainer.args.evaluation.steps
            kl = statistics.mean(distance_from_base(trainer.policy, prompts, steps, trainer.args.microbatch))
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        Console(stderr=True).print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:  # the parent process gets it too
        sys.exit(130)
    peak = peak_memory(trainer.policy.device) / 1e6
    critic = 0 if trainer.stage.critic is None else sum(p.numel() for p in trainer.stage.critic.parameters())
    run.add(Point(number, trainer.step, spent["seconds"], int(spent["images"]), kl, peak, critic, values))


def _settings(run: Run, overrides: list[str]) -> FlowGRPOConfig:
    return FlowGRPOConfig.from_yaml(
        run.config, [*overrides, f"seed={run.seed}", f"output_dir={run.folder}", "keep_checkpoints=3"]
    )


def _same_as_before(run: Run, overrides: list[str]) -> None:
    """Notes the run's settings in its folder, or ValueError if it was begun with others."""
    args, file = _settings(run, overrides), run.folder / layout.CONFIG
    if args.evaluation.prompts is None:
        raise ValueError(f"{run.config} names no held-out prompts to compare on: set evaluation.prompts.")
    elsewhere = {"output_dir": args.output_dir}  # the folder may have been moved, or be named from another one
    if run.points() and file.exists() and FlowGRPOConfig.from_yaml(file).model_copy(update=elsewhere) != args:
        raise ValueError(f"{run.folder} was begun with other settings: give another folder by --out.")
    run.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, args.to_yaml())


def _same_budget(file: Path, budget: Budget) -> None:
    """Notes the slices in the folder, or ValueError if the comparison was begun with others. More of them go on with it."""
    if file.exists():
        former = Budget(**json.loads(file.read_text()))
        if former.unit != budget.unit or not math.isclose(former.mark(1), budget.mark(1)):
            raise ValueError(
                f"{file.parent} was begun with slices of {former.mark(1):g} {former.unit}, not {budget.mark(1):g} {budget.unit}: "
                "give a --budget and --slices that make them so, or another folder by --out."
            )
    write_atomic(file, json.dumps(asdict(budget)))


def reached(point: Point, measure: str, target: float | None) -> bool:
    return target is not None and point.values[measure] >= target


def _positive(number: float) -> float:
    if not 0 < number < math.inf:
        raise ValueError
    return number
