"""Seconds of the whole default command, `flow-grpo train`, in turns with version 0.3; and of starting it.

    python benchmarks/default_run.py                     # three turns in the dtype that each version takes here
    python benchmarks/default_run.py --turns 1 dtype=fp32

Nothing else may run beside it. Seconds are those of the process, from its start to its end, with imports, evaluations and the report.
`to the first line` ends where the run prints its model and device. A share is the quotient of one turn; the last line has the medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from checkout import VERSION_03, checkout

PACKAGE = [sys.executable, "-m", "flow_grpo"]


@dataclass(frozen=True)
class Run:
    """What one command took, and what its last evaluation measured."""

    seconds: float
    first_line: float  # seconds until it printed something
    score: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s ({self.first_line:.1f} to the first line, ocr_exact {self.score:.3f})"


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}


def train(tree: Path, folder: Path, overrides: list[str]) -> Run:
    """Run the default command of a tree in `folder`."""
    folder.mkdir(parents=True)
    started = time.perf_counter()
    with subprocess.Popen(
        [*PACKAGE, "train", "tiny_ocr", *overrides],
        cwd=folder,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first_line = time.perf_counter() - started
        rest = process.stdout.read()
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"the run of {tree} failed:\n{rest.decode()[-2000:]}")
    rows = [json.loads(line) for line in (folder / "runs" / "tiny_ocr" / "metrics.jsonl").read_text().splitlines()]
    return Run(seconds, first_line, [row["eval/ocr_exact"] for row in rows if "eval/ocr_exact" in row][-1])


def seconds_of_help(tree: Path) -> float:
    """The median of five `flow-grpo --help`."""
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([*PACKAGE, "--help"], env=environment(tree), check=True, capture_output=True)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key.sub=value, for both versions")
    parser.add_argument("--commit", default=VERSION_03)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--checkouts", type=Path, default=Path("runs/default_run"))
    args = parser.parse_args()
    trees = [checkout(args.commit, args.checkouts.resolve()), checkout("", args.checkouts)]
    print(f"flow-grpo --help: {' and '.join(f'{seconds_of_help(tree):.2f} s' for tree in trees)}", flush=True)
    turns: list[tuple[Run, Run]] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            before, now = (train(tree, Path(folder) / f"{turn}_{i}", args.overrides) for i, tree in enumerate(trees))
            turns.append((before, now))
            print(f"{args.commit}: {before}; now: {now}; share {now.seconds / before.seconds:.2f}", flush=True)
    before, now = (statistics.median(run.seconds for run in runs) for runs in zip(*turns, strict=True))
    print(f"medians: {before:.1f} and {now:.1f} s, share {now / before:.2f}")


if __name__ == "__main__":
    main()
