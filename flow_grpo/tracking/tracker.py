"""The output of a run: console messages, metrics.jsonl, the curves, and other tracking services. Nothing else logs."""

import math
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.figures import draw_or_warn, new_figure, save_figure
from flow_grpo.progress import PhaseProgress, replace_unprintable, show_phases
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.metrics_file import NO_GRADIENT, NO_SIGNAL, append_row, read_metrics
from flow_grpo.run_folder.reader import RunReader, value_of
from flow_grpo.text import counted, duration, number, short_name

if TYPE_CHECKING:
    from flow_grpo.tracking.services import TrackingService

LONG = 600.0  # seconds of a run whose time is printed after its first step
MAX_SILENCE = 20.0  # seconds after which the next training step is printed, even if it is not a tenth one
TRAINED: dict[str, Any] = {"color": "C0", "linewidth": 1.2}
MAX_PROMPT = 120  # characters of a prompt that a command is printed with


@dataclass(frozen=True)
class RunTime:
    """The time that a run takes, or the rest of one.

    Attributes:
        steps, evaluations: how many there are.
        seconds: until the end.
        evaluated: the training step of the first evaluation among them after step 0; None if there is none.
        seconds_to_evaluation: until that evaluation has ended.
    """

    steps: int
    evaluations: int
    seconds: float
    evaluated: int | None
    seconds_to_evaluation: float

    @classmethod
    def of(
        cls,
        args: FlowGRPOConfig,
        step_seconds: Callable[[FlowGRPOConfig], float],
        evaluation_seconds: float,
        done: int | None = None,
    ) -> "RunTime":
        """The time of a config's run.

        Args:
            step_seconds: returns the seconds of a training step of a stage.
            evaluation_seconds: of an evaluation; 0 if the run has no held-out prompts.
            done: training steps that are done, with their evaluations but that of the last one; None before the first evaluation.
        """
        stages = [(stage.steps, step_seconds(stage)) for _, stage in args.resolved_stages()]
        first = done or 0
        due = [step for step in args.evaluated_steps if done is None or step >= max(done, 1)]
        evaluated = due if evaluation_seconds else []
        after_start = [step for step in evaluated if step > 0]

        def seconds_until(step: int) -> float:
            """Of the training steps from the first one on, and of the evaluations up to that of `step`."""
            training = _seconds_of(stages, step) - _seconds_of(stages, first)
            return training + evaluation_seconds * sum(place <= step for place in evaluated)

        return cls(
            steps=args.steps - first,
            evaluations=len(evaluated),
            seconds=seconds_until(args.steps),
            evaluated=after_start[0] if after_start else None,
            seconds_to_evaluation=seconds_until(after_start[0]) if after_start else 0.0,
        )

    def __str__(self) -> str:
        evaluations = f" and {counted(self.evaluations, 'evaluation')}" if self.evaluations else ""
        verb = "takes" if self.steps == 1 and not evaluations else "take"
        text = f"{counted(self.steps, 'step')}{evaluations} {verb} {duration(self.seconds)}"
        if self.evaluations < 2 or self.evaluated is None:
            return text
        return f"{text}; the evaluation at step {self.evaluated} ends after {duration(self.seconds_to_evaluation)}"


def _seconds_of(stages: list[tuple[int, float]], steps: int) -> float:
    """Seconds of the first `steps` training steps; stages are given by their number of steps and the seconds of each."""
    total = 0.0
    for count, seconds in stages:
        total += seconds * min(steps, count)
        steps = max(0, steps - count)
    return total


class Tracker:
    """The console and metrics of one run. Use it as a context manager, which shows the progress bar.

    Args:
        silent: print and write nothing, as all processes but the main one.

    Attributes:
        on_log: called with each row's step and metrics, and whether they are of an evaluation.
    """

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        console: Console | None = None,
        silent: bool = False,
        on_log: Callable[[int, dict[str, float], bool], None] | None = None,
    ) -> None:
        replace_unprintable()
        self.folder, self.console, self.silent = folder, console or Console(quiet=silent, emoji=False), silent
        self.total_steps = total_steps
        self._progress = PhaseProgress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("training", total=total_steps, numbers="")
        self._started, self._first_step, self._printed = time.monotonic(), 0, time.monotonic()
        self._phases = ExitStack()
        self._services: list[TrackingService] = []
        self.on_log = on_log

    def __enter__(self) -> "Tracker":
        has_bar = self.console.is_terminal or self.console.is_jupyter
        if not self.silent:
            self._phases.enter_context(show_phases(self.console, self._progress if has_bar else None))
        if has_bar:
            self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._phases.close()
        if self._progress.live.is_started:  # else it would print an empty line
            with suppress(OSError):  # the console may be a file on a full disk, which was reported already
                self._progress.stop()
        self._notify(lambda service: service.finish())

    def attach(self, services: "list[TrackingService]") -> None:
        """Send the metrics to these services as well, from here on."""
        self._services = services

    def open_services(self, args: FlowGRPOConfig, step: int | None = None) -> None:
        """Open the run's tracking services, which get the metrics from here on; `step` is where a resumed run continues."""
        from flow_grpo.tracking import services  # here: it imports accelerate

        self.attach(services.open_services(self.folder, args, self.info, step))

    def info(self, message: str) -> None:
        """Print a message."""
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def resume(self, step: int) -> None:
        """Show the progress from the checkpoint on from which the run continues."""
        self._progress.update(self._task, completed=step)
        self._started, self._first_step = time.monotonic(), step

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a finished training step (1 is the first) or of an evaluation (`eval/...`)."""
        self._append({"step": step, **metrics})
        self._notify(lambda service: service.log(step, metrics))
        if self.on_log is not None:
            self.on_log(step, metrics, "eval/reward" in metrics)
        if "time/step" in metrics:
            scored = "reward" in metrics  # offline data has none
            numbers = (
                f"reward {metrics['reward']:.3f} ± {metrics['reward_std']:.3f}" if scored else f"loss {metrics['loss']:.4f}"
            )
            self._progress.update(self._task, completed=step, numbers=numbers)
            due = step % 10 == 0 or step == self.total_steps or time.monotonic() - self._printed > MAX_SILENCE
            if not self.console.is_terminal and due:
                self._printed = time.monotonic()
                done = step - self._first_step
                left = (time.monotonic() - self._started) / done * (self.total_steps - step)
                # the first step may compile, and says nothing of the others
                rest = f", {left:.0f} s left" if done > 1 or not left else ""
                self.info(f"step {step}/{self.total_steps}  {numbers}  {metrics['time/step']:.1f} s a step{rest}")

    def say_run_time(self, args: FlowGRPOConfig, step: int, times: list[float]) -> None:
        """Print how long the rest of a long run takes if all steps take as long as this one.

        Args:
            times: seconds of the steps since the start. If there are two, the first one compiled, and the time of that is printed.
        """
        seconds = times[-1]
        if len(times) > 1:
            self.info(f"compiling took about {duration(max(times[0] - seconds, 0.0))} of the first step.")
            # the time that is left is estimated without the first step
            self._started, self._first_step = time.monotonic() - seconds, step - 1
        evaluating = [row["time/evaluation"] for row in read_metrics(self.folder) if "time/evaluation" in row]
        rest = RunTime.of(args, lambda stage: seconds, evaluating[-1] if evaluating else 0.0, done=step)
        if rest.seconds > LONG:
            self.info(f"step {step} took {duration(seconds)}, rewards included. At this speed the next {rest}.")

    def log_evaluation(
        self, step: int, scores: dict[str, float], more: dict[str, float], images: list[tuple[str, Path]]
    ) -> None:
        """Log an evaluation.

        Args:
            scores: logged as `eval/...`, and printed.
            more: metrics of which the diversity alone is printed.
            images: prompts with their images, for the tracking services.
        """
        self._notify(lambda service: service.log_images(step, images))
        self.log(step, {**{f"eval/{name}": value for name, value in scores.items()}, **more})
        printed = {**scores, **({"diversity": more["monitor/diversity"]} if "monitor/diversity" in more else {})}
        self.info(f"step {step}  held out: " + "  ".join(f"{name} {value:.3f}" for name, value in printed.items()))

    def warn(self, step: int, message: str, fallen: str | None = None) -> None:
        """Print and log a warning. A warning that the metric `fallen` has dropped is given once in a run."""
        if fallen is not None and any(row.get("fallen") == fallen for row in read_metrics(self.folder)):
            return
        self.info(f"warning: {message}")
        self._append({"step": step, "warning": message, **({"fallen": fallen} if fallen else {})})
        self._notify(lambda service: service.warn(step, message))

    def warn_no_signal(self, step: int, by_gradient: bool = False) -> None:
        """Warn, once in a run, that no image of this step had an advantage, or a gradient of the rewards if that is missing."""
        doctor = shlex.join(["flow-grpo", "doctor", str(self.folder / layout.CONFIG)])
        cause = "the gradient of the rewards was 0" if by_gradient else "all images of each prompt got the same reward"
        sentence = f"in step {step} {cause}, so nothing was learned. If this continues, run `{doctor}` to find the cause."
        self.warn(step, sentence, fallen=NO_GRADIENT if by_gradient else NO_SIGNAL)

    def has_evaluation(self, step: int) -> bool:
        """Whether the metrics hold an evaluation of that step."""
        return any(row["step"] == step and "eval/reward" in row for row in read_metrics(self.folder))

    def finish(self, trained: Path, report: Path) -> dict[str, float]:
        """Plot the curves, print the result and its paths, and return the scores of the last evaluation."""
        curve = draw_or_warn(lambda: plot_curves(self.folder), self.folder / layout.CURVES, self.info)
        run = RunReader(self.folder)
        if shown := shown_scores(run):
            first = run.evaluation_rows[0]["step"]  # 0 unless metrics were lost
            print_table(
                self.console, "held-out prompts", {f"step {first}" if first else "before": shown[0], "after": shown[-1]}
            )
        if reason := run.nothing_learned:
            self.info(f"warning: nothing was learned: {reason}.")
        elif constant := run.without_effect:
            same = "gave all images of each prompt the same value in every step, and had no effect"
            self.info(f"warning: {' and '.join(constant)} {same}.")
        for line in weights_lines(run, trained):
            self.info(line)
        if (self.folder / layout.BEFORE_AFTER).exists():
            self.info(f"images: {self.folder / layout.BEFORE_AFTER}")
        if curve:
            self.info(f"curve: {curve}")
        self.info(f"report: {report}")
        if command := next_command(run):
            self.info(f"try it: {command}")
        last = run.evaluation_rows[-1] if run.evaluation_rows else {}
        return {key[5:]: value for key, value in last.items() if key.startswith("eval/")}

    def _notify(self, call: "Callable[[TrackingService], None]") -> None:
        """Call each service. One that fails is not called again, and the run continues."""
        for service in list(self._services):
            try:
                call(service)
            except Exception as error:  # services raise errors of their own
                self._services.remove(service)
                reason = " ".join(str(error).split())
                self.info(
                    f"warning: the tracker {service.name} failed and is off from here on ({type(error).__name__}: {reason})."
                )

    def _append(self, row: dict[str, Any]) -> None:
        if not self.silent:
            append_row(self.folder, row)


def print_table(console: Console, title: str, columns: dict[str, dict[str, float]]) -> None:
    """Print a table of numbers: columns by name, each with its values by row."""
    table = Table(title=escape(title), title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(escape(name), justify="right", no_wrap=True)
    for row in dict.fromkeys(key for values in columns.values() for key in values):
        table.add_row(escape(row), *(f"{values[row]:.4f}" if row in values else "" for values in columns.values()))
    console.print(table)


def shown_scores(run: RunReader) -> list[dict[str, float]]:
    """The held-out scores of each evaluation, without the sum of rewards where it is a single reward, which is there by its name."""
    rows = [{key[5:]: value for key, value in row.items() if key.startswith("eval/")} for row in run.evaluation_rows]
    has_sum = "reward" in run.score_names
    return [{name: value for name, value in row.items() if has_sum or name != "reward"} for row in rows]


def weights_lines(run: RunReader, trained: Path) -> list[str]:
    """The folder of the last weights, and that of the best evaluation if it is another one, each with its step and scores.

    Those of the best evaluation are the ones that it was chosen by.
    """
    kind = "transformer" if trained.is_dir() else "LoRA"
    last = run.evaluation_rows[-1]["step"] if run.evaluation_rows else None
    lines = [f"{kind}: {trained}{_scores(run, last, [run.main_metric])}"]
    best = run.folder / layout.BEST
    measured = {row["step"] for row in run.evaluation_rows if not math.isnan(row["eval/reward"])}
    if run.best_step in measured - {last} and best.is_dir():
        untrained = [n for n in run.score_names if n not in ("reward", *run.trained)]
        scores = _scores(run, run.best_step, untrained or [run.main_metric], ", not trained on" if untrained else "")
        lines.append(f"{kind} of the best evaluation: {best}{scores}")
    return lines


def _scores(run: RunReader, step: int | None, metrics: list[str], note: str = "") -> str:
    """The step and held-out scores of weights, in brackets; "" without evaluations."""
    row: dict = next((row for row in reversed(run.evaluation_rows) if row["step"] == step), {})
    scores = [f"{short_name(m)} {number(row[key])}" for m in metrics if (key := f"eval/{m}") in row]
    return f" (step {step}, {', '.join(scores)}{note})" if scores else ""


def next_command(run: RunReader) -> str | None:
    """A command that generates images of one of the run's prompts with its weights; None without a short prompt of text alone.

    The prompt is the one whose held-out reward has risen most.
    """
    if not run.evaluations:
        return None
    first, last = run.evaluations[0], run.evaluations[-1]
    sources = last.get("sources") or [None] * len(last["prompts"])
    texts = [
        i
        for i, prompt in enumerate(last["prompts"])
        if len(prompt) <= MAX_PROMPT and prompt.isprintable() and not sources[i]
    ]
    if not texts:
        return None
    best = max(texts, key=lambda i: value_of(last, "reward", i) - value_of(first, "reward", i))
    return shlex.join(["flow-grpo", "sample", last["prompts"][best], "--lora", str(run.folder)])


def plot_curves(folder: Path) -> Path | None:
    """Plot the reward in training, the held-out scores, and below them the reward's std within a group; None without rewards."""
    rows = read_metrics(folder)
    if not any("reward" in row for row in rows):
        return None
    panels = _panels(_curves(rows))
    ratios = [*(4 if place == 0 else 2 for place in range(len(panels))), 1]
    figure, axes = new_figure(8, 1.5 + 0.8 * sum(ratios), rows=len(ratios), sharex=True, height_ratios=ratios)
    from matplotlib.ticker import MaxNLocator

    title = f"run {folder.resolve().name}: the trained reward, and what is measured on held-out prompts"
    axes[0].set_title(title, loc="left", fontsize=10)
    for panel, curves in zip(axes[:-1], panels, strict=True):
        for curve in curves:
            panel.plot(*zip(*curve.points, strict=True), **curve.style, label=curve.label)
        panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # beside the curves, which may be anywhere
    below = axes[-1]
    spread = [(row["step"], row.get("reward_std", 0.0)) for row in rows if "reward" in row]
    below.plot(*zip(*spread, strict=True), **_style_in_training(len(spread)))
    below.set_ylabel("std within\na group", fontsize=8)
    below.set_ylim(bottom=0)
    below.set_xlabel("training step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    save_figure(figure, folder / layout.CURVES)
    return folder / layout.CURVES


@dataclass(frozen=True)
class _Curve:
    label: str
    points: list[tuple[int, float]]
    style: dict[str, Any]

    @property
    def size(self) -> float:
        return max([1.0, *(abs(value) for _, value in self.points if math.isfinite(value))])


def _style_in_training(points: int) -> dict[str, Any]:
    return TRAINED | ({"marker": "o"} if points == 1 else {})  # a line through one point can't be seen


def _curves(rows: list[dict]) -> list[_Curve]:
    """The reward in training, and each measure of held-out prompts."""
    trained = [(row["step"], row["reward"]) for row in rows if "reward" in row]
    curves = [_Curve("reward in training", trained, _style_in_training(len(trained)))]
    names = list(dict.fromkeys(key for row in rows for key in row if key.startswith("eval/")))
    of = {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}
    if any(of[name] == of.get("eval/reward") for name in names if name != "eval/reward"):
        del of["eval/reward"]  # it is a single reward, which has its own name
    for i, (name, points) in enumerate(of.items()):
        curves.append(_Curve(f"held out: {name[5:]}", points, {"marker": "o", "color": f"C{i + 1}"}))
    return curves


def _panels(curves: list[_Curve]) -> list[list[_Curve]]:
    """Curves that share an axis: a measure from 0 to 1 would be a line beside one from 0 to 20. The reward's axis is the first."""
    panels: list[list[_Curve]] = []
    for curve in sorted(curves, key=lambda curve: curve.size):
        if panels and curve.size <= 4 * panels[-1][0].size:
            panels[-1].append(curve)
        else:
            panels.append([curve])
    in_order = [[curve for curve in curves if curve in panel] for panel in panels]
    return sorted(in_order, key=lambda panel: curves[0] not in panel)
