"""A profile of training steps: a trace of torch's profiler, and a page with phases and operators.

The trace opens in chrome://tracing or at ui.perfetto.dev. The profiler costs time itself, about a tenth on a CPU.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, schedule

from flow_grpo.files import atomic_file, write_atomic
from flow_grpo.run_folder import layout
from flow_grpo.text import counted, markdown_table

# ranges that the training step records, and that are shown; the last one is in `update`
PHASES = ("rollout", "decode", "reward", "update", "optimizer")
MAX_OPERATORS = 15


class TrainingProfiler:
    """Callback that profiles `steps` training steps of a run, after its first one, and writes RUN/profile.

    Attributes:
        written: the page, once it is there.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.written: Path | None = None
        self._profile: profile | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Start the profiler before the first step."""
        if self._profile is not None or self.written:
            return
        self._folder, self._first = Path(args.output_dir) / layout.PROFILE, state.global_step + 2
        when = schedule(wait=0, warmup=1, active=self.steps, repeat=1)  # the first step also loads libraries
        self._profile = profile(schedule=when, on_trace_ready=self._write, profile_memory=True, with_flops=True)
        self._profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Go on to the next step, if there is one."""
        if self._profile is None or self.written or state.global_step == state.max_steps:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Write the profile of a run that ends within the profiled steps."""
        if self._profile is not None and not self.written:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profile.stop()

    def _write(self, measured: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._folder / layout.TRACE) as file:
            measured.export_chrome_trace(str(file))
        self.written = self._folder / layout.PROFILE_PAGE
        write_atomic(self.written, page(measured, self._first))


def page(measured: Any, first: int) -> str:
    """The summary as Markdown.

    Args:
        measured: torch's profiler, after its last step.
        first: the number of the first training step that was profiled.
    """
    # CUDA's profiler repeats each range on the GPU, where it is neither a phase nor a kernel
    on_cpu = [e for e in measured.events() if e.device_type == DeviceType.CPU]
    on_gpu = [e for e in measured.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    steps = [e.time_range.elapsed_us() / 1e6 for e in on_cpu if e.name == "ProfilerStep*"]
    seconds = sum(steps)
    phases = {name: sum(e.time_range.elapsed_us() for e in on_cpu if e.name == name) / 1e6 for name in PHASES}
    phases["the rest"] = seconds - sum(spent for name, spent in phases.items() if name != PHASES[-1])
    working = on_gpu or [e for e in on_cpu if not e.is_user_annotation]
    busy = busy_seconds((e.time_range.start, e.time_range.end) for e in working)
    idle = "no kernel runs on the GPU" if on_gpu else "no operator of torch runs: Python, and rewards"
    shares = [(name, f"{spent:.2f}", f"{spent / seconds:.0%}") for name, spent in phases.items() if spent]
    operators = measured.key_averages().table(
        sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total", row_limit=MAX_OPERATORS
    )
    return "\n".join(
        [
            f"# Profile of {counted(len(steps), 'training step')} from step {first} on",
            "",
            f"{seconds / len(steps):.2f} s a step with the profiler; {max(0.0, 1 - busy / seconds):.0%} of the time {idle}.",
            f"The whole trace is {layout.TRACE}, for ui.perfetto.dev.",
            "",
            markdown_table(("phase", "seconds", "share"), shares),
            "",
            "`optimizer` is a part of `update`. `reward` is the time that the loop waits for rewards, which run in a thread.",
            "",
            f"The {MAX_OPERATORS} operators with the most time of their own:",
            "",
            f"```\n{operators}\n```",
            "",
        ]
    )


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that are covered by intervals in microseconds, which may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6
