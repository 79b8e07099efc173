"""Seconds of training until exact OCR accuracy on held-out words reaches a bar, for several configs and seeds.

`python benchmarks/time_to_reward.py tiny_ocr tiny_grpo tiny_paper --seeds 3 --minutes 10` is `flow-grpo compare` with runs that
end at the bar: seeds and configs take turns on the machine, and what was stopped goes on where it was.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flow_grpo.compare import Budget, compare, plot, print_summary, summary

MEASURE = "ocr_exact"


def main(
    configs: Annotated[list[str], typer.Argument(help="Config names or files.")],
    seeds: Annotated[int, typer.Option(help="Seeds of each config.")] = 3,
    bar: Annotated[float, typer.Option(help="Exact accuracy to reach.")] = 0.92,
    minutes: Annotated[float, typer.Option(help="Longest run.")] = 10,
    every: Annotated[float, typer.Option(help="Seconds of training between evaluations.")] = 30,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/time_to_reward"),
) -> None:
    """Time to reward, config by config and seed by seed."""
    budget = Budget(60 * minutes, "seconds", round(60 * minutes / every))
    runs = compare(configs, seeds, budget, out, [], MEASURE, bar, stop=True)
    plot(runs, MEASURE, bar, out / "time_to_reward.png")
    for run in runs:
        last = run.points()[-1]
        reached = f"{last.seconds:.0f} s" if last.values[MEASURE] >= bar else f"not in {last.seconds:.0f} s"
        print(f"{run.name} seed {run.seed}: {reached}, {last.step} steps, exact {last.values[MEASURE]:.3f}")
    print_summary(Console(), summary(runs, MEASURE, bar), MEASURE, bar)


if __name__ == "__main__":
    typer.run(main)
