"""A profile of training steps: a trace of torch's profiler, and a page with phases, operators, gaps and memory.

The trace opens in chrome://tracing or at ui.perfetto.dev. The profiler costs time itself, about a tenth on a CPU.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from flow_grpo.figures import draw_or_warn, new_figure, save_figure
from flow_grpo.files import atomic_file, write_atomic
from flow_grpo.run_folder import layout
from flow_grpo.text import gigabytes, markdown_table

# ranges that the training step records, and that are shown; the last one is in `update`
PHASES = ("rollout", "decode", "reward", "update", "optimizer")
MAX_OPERATORS = 15
NUM_SKIPPED = 1  # training steps that are not profiled, as the first one also loads libraries


class TrainingProfiler:
    """Callback that profiles `steps` training steps of a run and writes RUN/profile.

    Attributes:
        written: the page, once it is there.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.skipped = steps, 0, 0
        self.written: Path | None = None
        self._profile: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Start the profiler, after the first step if the run has enough."""
        left = state.max_steps - state.global_step
        if self.written or self._profile is not None or (self.skipped < NUM_SKIPPED and left > self.steps):
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self.first, self.started = state.global_step + 1, time.perf_counter()
        self._profile = profile(activities=activities, profile_memory=True, with_flops=True)
        self._profile.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Count the step, and write the profile after the last one."""
        if self._profile is None:
            self.skipped += 1
            return
        self.done += 1
        if self.done == self.steps:
            self._write(Path(args.output_dir) / layout.PROFILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Write the profile of a run that ended early."""
        if self._profile is not None:
            self._write(Path(args.output_dir) / layout.PROFILE)

    def _write(self, folder: Path) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, measured = time.perf_counter() - self.started, self._profile
        self._profile = None
        measured.__exit__(None, None, None)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / layout.TRACE) as file:
            measured.export_chrome_trace(str(file))
        timeline = memory_timeline(measured.profiler.kineto_results.events())
        picture = folder / layout.MEMORY_TIMELINE
        draw_or_warn(lambda: plot_memory(picture, timeline), picture, print)
        self.written = folder / layout.PROFILE_PAGE
        write_atomic(self.written, page(measured, self.first, self.done, seconds=seconds, timeline=timeline))


def page(measured: Any, first: int, steps: int, seconds: float, timeline: list[tuple[float, float]]) -> str:
    """The summary as Markdown.

    Args:
        first, steps: the first training step that was profiled, and how many were.
        seconds: of all of them.
        timeline: as of `memory_timeline`.
    """
    events = measured.events()
    last = "" if steps == 1 else f" to {first + steps - 1}"
    # CUDA's profiler repeats each range on the GPU, where it is neither a phase nor a kernel
    on_cpu = [e for e in events if e.device_type == DeviceType.CPU]
    phases = [(name, sum(e.time_range.elapsed_us() for e in on_cpu if e.name == name) / 1e6) for name in PHASES]
    kernels = [e.time_range for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    working = kernels or [e.time_range for e in on_cpu if not e.is_user_annotation]
    phases.append(("the rest", seconds - sum(spent for name, spent in phases if name != PHASES[-1])))
    busy = busy_seconds((interval.start, interval.end) for interval in working)
    what = (
        "of the time no kernel runs on the GPU" if kernels else "of the time no operator of torch runs: Python, and rewards"
    )
    rows = operator_rows(measured.key_averages(), on_gpu=bool(kernels))
    peak = max((size for _, size in timeline), default=0.0)
    return "\n".join(
        [
            f"# Profile of training step {first}{last}",
            "",
            f"{seconds / steps:.2f} s a step with the profiler; {max(0.0, 1 - busy / seconds):.0%} {what}.",
            f"At most {gigabytes(peak)} were allocated beyond what was there before: {layout.MEMORY_TIMELINE}. The whole trace is",
            f"{layout.TRACE}, for ui.perfetto.dev.",
            "",
            "## Phases",
            "",
            markdown_table(
                ("phase", "seconds", "share"),
                [(name, f"{spent:.2f}", f"{spent / seconds:.0%}") for name, spent in phases if spent],
            ),
            "",
            "`optimizer` is a part of `update`. `reward` is the time that the loop waits for rewards, which run in a thread.",
            "",
            f"## The {min(MAX_OPERATORS, len(rows))} operators with the most time of their own",
            "",
            markdown_table(("operator", "calls", "seconds", "GFLOP"), rows[:MAX_OPERATORS]),
            "",
        ]
    )


def operator_rows(averages: Iterable[Any], on_gpu: bool) -> list[tuple[str, str, str, str]]:
    """Name, calls, seconds and GFLOP of the operators, those with the most time of their own first.

    Args:
        averages: as of the profiler's `key_averages`, which also have the kernels, whose time is their operator's.
        on_gpu: take an operator's time on the GPU instead of that on the CPU.
    """
    operators = [e for e in averages if e.device_type == DeviceType.CPU and not e.is_user_annotation]
    timed = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e) for e in operators]
    return [
        (f"`{e.key}`", str(e.count), f"{spent / 1e6:.3f}", f"{e.flops / 1e9:.2f}" if e.flops else "")
        for spent, e in sorted(timed, key=lambda pair: pair[0], reverse=True)
        if spent > 0
    ]


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that are covered by intervals in microseconds, which may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6


def memory_timeline(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Seconds since the start, and the bytes that were allocated since then, at each allocation on the GPU or, without one, the CPU."""
    changes = [(e.start_ns(), e.nbytes(), e.device_type()) for e in events if e.name() == "[memory]"]
    on_gpu = [(at, size) for at, size, device in changes if device == DeviceType.CUDA]
    used = sorted(on_gpu or [(at, size) for at, size, _ in changes])
    points, now = [], 0.0
    for at, size in used:
        now += size
        points.append(((at - used[0][0]) / 1e9, now))
    return points


def plot_memory(file: Path, timeline: list[tuple[float, float]]) -> Path:
    """Write the curve of allocated memory as a PNG."""
    figure, (axes,) = new_figure(9, 3)
    axes.step([at for at, _ in timeline], [size / 1e6 for _, size in timeline], where="post", linewidth=0.8)
    axes.set(
        xlabel="seconds since the profile began", ylabel="MB allocated since then", title="Memory of the profiled steps"
    )
    save_figure(figure, file)
    return file
