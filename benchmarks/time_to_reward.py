"""Seconds of training until exact OCR accuracy on held-out words reaches a bar, for several configs and seeds.

`python benchmarks/time_to_reward.py tiny_ocr tiny_grpo tiny_paper --seeds 3 --minutes 15` trains each config with each
seed, in turns, each in a process of its own, until the bar is reached or the time is over. Resumable: what stands in the
output file is not run again. Seconds count from the first training step and include evaluations.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch.multiprocessing as multiprocessing
import typer
from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.tracking import read_metrics

MEASURE = "eval/ocr_exact"


def one_run(config: str, seed: int, bar: float, minutes: float, every: int, folder: str) -> None:
    """Trains step by step and leaves metrics.jsonl with the seconds since the start."""
    from flow_grpo.evaluate import evaluate
    from flow_grpo.policy import quiet_libraries
    from flow_grpo.train import FlowGRPOTrainer

    quiet_libraries()
    args = FlowGRPOConfig.read(config, [f"seed={seed}", f"output={folder}"])
    trainer = FlowGRPOTrainer(args=args)
    file = Path(folder) / "metrics.jsonl"
    started = time.perf_counter()
    while True:
        if trainer.step % every == 0 or trainer.step == args.steps:
            with trainer.policy.averaged():
                settings = args.evaluation
                _, values = evaluate(
                    trainer.policy, trainer.eval_set, trainer.held_out, settings.steps, settings.seed, args.microbatch
                )
            seconds = time.perf_counter() - started
            row = {"step": trainer.step, "seconds": seconds, **{f"eval/{k}": v.mean().item() for k, v in values.items()}}
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
            if row[MEASURE] >= bar or seconds > 60 * minutes or trainer.step >= args.steps:
                return
        trainer.training_step()


def main(
    configs: Annotated[list[str], typer.Argument(help="Config names or files.")],
    seeds: Annotated[int, typer.Option(help="Seeds of each config.")] = 3,
    bar: Annotated[float, typer.Option(help="Exact accuracy to reach.")] = 0.92,
    minutes: Annotated[float, typer.Option(help="Longest run.")] = 15,
    every: Annotated[int, typer.Option(help="Training steps between evaluations.")] = 10,
    out: Annotated[Path, typer.Option(help="Results, a line per run.")] = Path("runs/time_to_reward.jsonl"),
) -> None:
    """Time to reward, config by config and seed by seed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    context = multiprocessing.get_context("spawn")
    for seed in range(seeds):
        for config in configs:
            if any((row["config"], row["seed"], row["bar"]) == (config, seed, bar) for row in rows):
                continue
            with tempfile.TemporaryDirectory() as folder:
                process = context.Process(target=one_run, args=(config, seed, bar, minutes, every, folder))
                process.start()
                process.join()
                curve = read_metrics(Path(folder))
            if process.exitcode or not curve:
                raise SystemExit(f"{config} with seed {seed} failed; its error stands above.")
            reached = curve[-1][MEASURE] >= bar
            row = {
                "config": config,
                "seed": seed,
                "bar": bar,
                "seconds": round(curve[-1]["seconds"], 1) if reached else None,
                "steps": curve[-1]["step"],
                "first": curve[0],
                "last": curve[-1],
                "best": max(r[MEASURE] for r in curve),
                "curve": [[r["step"], round(r["seconds"], 1), round(r[MEASURE], 4)] for r in curve],
            }
            rows.append(row)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    table = Table(title=f"seconds to exact accuracy {bar} on held-out words")
    for column in ("config", "seed", "seconds", "steps", "exact", "clip"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        if row["config"] in configs and row["bar"] == bar:
            first, last = row["first"], row["last"]
            seconds = f"{row['seconds']:.0f}" if row["seconds"] else f"> {last['seconds']:.0f}"
            exact, clip = (f"{first[name]:.3f} -> {last[name]:.3f}" for name in (MEASURE, "eval/clip"))
            table.add_row(row["config"], str(row["seed"]), seconds, str(row["steps"]), exact, clip)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
