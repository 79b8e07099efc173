"""Seconds of training until a held-out metric reaches a target, for several configs and several versions of the package, in turns.

    python benchmarks/time_to_target.py tiny_ocr tiny_grpo/4 c0ccec3:tiny_ocr --seeds 5 --metric ocr_exact --target 0.92

`COMMIT:CONFIG` is a config of an earlier commit, which runs from a checkout of it; c0ccec3 is version 0.3. A config without a commit
runs from this checkout. `CONFIG/N` is evaluated after every Nth training step, by default each, and a run ends where it reaches the
target. Seconds are the sum of `time/step`: sampling, rewards and updates, without evaluations. With `--jobs N`, N runs at a time have
a processor core each (`taskset`) and one thread. Finished runs are kept, so the same command goes on. The curves are OUT/curves.png.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from checkout import checkout

from flow_grpo.figures import new_figure, save_figure


@dataclass(frozen=True)
class Result:
    """The seconds at which a run reached the target (None if it did not), those it spent, and what it measured."""

    seconds: float | None
    spent: float
    steps: int  # training steps that it did
    curve: list[tuple[float, dict[str, float]]]  # seconds, held-out metrics


def read(metrics: Path, metric: str, target: float) -> Result:
    """What a run's metrics say so far."""
    spent, steps, curve = 0.0, 0, []
    for line in metrics.read_text().splitlines() if metrics.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:  # half a line: the run is writing it
            break
        spent, steps = spent + row.get("time/step", 0.0), steps + ("time/step" in row)
        if f"eval/{metric}" in row:
            curve.append((spent, {key: row[key] for key in row if key.startswith(("eval/", "monitor/"))}))
            if row[f"eval/{metric}"] >= target:
                return Result(spent, spent, steps, curve)
    return Result(None, spent, steps, curve)


@dataclass(frozen=True)
class Config:
    """A config as named on the command line, `[COMMIT:]NAME[/EVERY]`."""

    text: str

    @property
    def commit(self) -> str:
        return self.text.rpartition(":")[0]

    @property
    def name(self) -> str:
        name = self.text.rpartition(":")[2]
        return name.rpartition("/")[0] if self.every > 1 else name

    @property
    def every(self) -> int:
        """Training steps from one evaluation to the next."""
        last = self.text.rpartition("/")[2]
        return int(last) if last.isdecimal() else 1

    @property
    def folder(self) -> str:
        return f"{self.commit}_{self.name}".strip("_").replace("/", "_")


def run(config: Config, seed: int, args: argparse.Namespace, cores: Queue) -> Result:
    """Train until the target is reached, the budget is spent or the run ends."""
    folder = args.out / config.folder / f"seed{seed}"
    done = folder / "done"
    metrics = folder / "runs" / Path(config.name).stem / "metrics.jsonl"
    if not done.is_file():
        core = cores.get()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        words = [sys.executable, "-m", "flow_grpo", "train", config.name, f"seed={seed}", f"evaluation.every={config.every}"]
        if core is not None:
            words = ["taskset", "--cpu-list", str(core), *words]
        environment = {**os.environ, "PYTHONPATH": str(checkout(config.commit, args.out / "checkouts"))}
        if core is not None:
            environment["OMP_NUM_THREADS"] = "1"
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen([*words, *args.set], cwd=folder, env=environment, stdout=log, stderr=log)
        is_stopped = False
        while process.poll() is None:
            time.sleep(1)
            result = read(metrics, args.metric, args.target)
            if result.seconds is not None or result.spent > args.budget:
                is_stopped = True
                process.send_signal(signal.SIGTERM)
                process.wait()
        cores.put(core)
        if not metrics.is_file() or (process.returncode and not is_stopped):
            raise SystemExit(f"{config.text} seed {seed} ended with an error: see {folder / 'log.txt'}.")
        done.touch()
    return read(metrics, args.metric, args.target)


def describe(config: Config, seed: int, result: Result) -> str:
    reached = "not reached" if result.seconds is None else f"{result.seconds:.0f} s"
    first, last = (
        ", ".join(f"{key.partition('/')[2]} {values[key]:.3f}" for key in sorted(values))
        for _, values in (result.curve[0], result.curve[-1])
    )
    return f"{config.text} seed {seed}: {reached} of {result.spent:.0f} s; at first {first}; at last {last}"


def table(results: dict[Config, list[Result]], metric: str, target: float) -> str:
    """Per config: the seconds of each seed and their median, seconds a step, and means of what else was held out, before and after."""
    lines = [
        f"| config | a step, s | seconds to {metric} {target:g}, each seed | median | clip | diversity |",
        "|---|---|---|---|---|---|",
    ]
    for config, runs in results.items():
        each = [math.inf if result.seconds is None else result.seconds for result in runs]
        texts = [f"not in {result.spent:.0f}" if result.seconds is None else f"{result.seconds:.0f}" for result in runs]
        median = statistics.median(each)
        step = statistics.mean(result.spent / result.steps for result in runs)
        held_out = (_change(runs, key) for key in ("eval/clip", "monitor/diversity"))
        cells = [
            f"`{config.text}`",
            f"{step:.1f}",
            ", ".join(texts),
            "-" if math.isinf(median) else f"{median:.0f}",
            *held_out,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(runs: list[Result], key: str) -> str:
    ends = [
        (result.curve[0][1][key], result.curve[-1][1][key])
        for result in runs
        if key in result.curve[0][1] and key in result.curve[-1][1]
    ]
    return " to ".join(f"{statistics.mean(values):.3f}" for values in zip(*ends, strict=True)) or "-"


def plot(results: dict[Config, list[Result]], metric: str, target: float, file: Path) -> None:
    """The metric over the seconds of training, a line per run and a colour per config."""
    figure, (axes,) = new_figure(10, 5)
    axes.axhline(target, color="0.5", linewidth=0.8, linestyle=":")
    for number, (config, runs) in enumerate(results.items()):
        for index, result in enumerate(runs):
            points = [(seconds, values[f"eval/{metric}"]) for seconds, values in result.curve]
            label = config.text if index == 0 else None
            axes.plot(*zip(*points, strict=True), color=f"C{number}", marker=".", linewidth=1, alpha=0.8, label=label)
    axes.set_xscale("symlog", linthresh=10)  # linear up to 10 s
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("seconds of sampling, rewards and updates (logarithmic from 10 s on)")
    axes.set_ylabel(f"held-out {metric}")
    figure.legend(loc="outside right center", frameon=False)
    save_figure(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Config, metavar="CONFIG")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--metric", default="ocr_exact")
    parser.add_argument("--target", type=float, default=0.92)
    parser.add_argument("--budget", type=float, default=400.0, help="seconds of training after which a run is given up")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time, with a core each; 0: one, with all cores")
    parser.add_argument("--set", nargs="*", default=[], help="key.sub=value, for all configs")
    parser.add_argument("--out", type=Path, default=Path("runs/time_to_target"))
    args = parser.parse_args()
    args.out = args.out.resolve()
    for config in args.configs:
        checkout(config.commit, args.out / "checkouts")
    cores: Queue = Queue()
    for core in sorted(os.sched_getaffinity(0))[: args.jobs] or [None]:
        cores.put(core)
    turns = [(config, seed) for seed in range(args.seeds) for config in args.configs]
    results: dict[Config, list[Result]] = {config: [] for config in args.configs}
    with ThreadPoolExecutor(cores.qsize()) as pool:
        finished = pool.map(lambda turn: run(turn[0], turn[1], args, cores), turns)
        for (config, seed), result in zip(turns, finished, strict=True):
            results[config].append(result)
            print(describe(config, seed, result), flush=True)
    print(f"\n{table(results, args.metric, args.target)}")
    plot(results, args.metric, args.target, args.out / "curves.png")


if __name__ == "__main__":
    main()
