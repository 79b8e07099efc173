"""What anchors hold: two adversarial runs of the embedded model, with and without anchors, by held-out measures.

    python benchmarks/anchors.py --seeds 3

The runs are `tiny_ocr` for twice its steps without its KL: on the reward `jpeg_size` alone, which flat images satisfy, and on `ocr` with
four times its learning rate. Finished runs are kept, so the same command goes on. Values are means over the seeds, the lowest and
the highest in brackets; they depend on no time, so other work may run beside it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from checkout import ROOT

STEPS = 16
RUNS = {
    "`jpeg_size`, lr 1e-3": ["rewards={jpeg_size: 1}", "optimizer.lr=1e-3"],
    "`ocr`, lr 5e-3": ["optimizer.lr=5e-3"],
}
WITHOUT = ["objective.kl_weight=0"]
ANCHORS = "[{to: base, weight: 0.1}, {to: ema, weight: 1, decay: 0.3}]"
WITH = [*WITHOUT, f"objective.anchors={ANCHORS}"]
SETTINGS = [
    f"steps={STEPS}",
    "evaluation.max_prompts=256",
    f"evaluation.every={STEPS}",
    "evaluation.rewards=[ocr, ocr_exact, clip, jpeg_size]",
]
MEASURES = {  # name in the table: in metrics.jsonl
    **{name: f"eval/{name}" for name in ("ocr", "ocr_exact", "clip", "jpeg_size")},
    "diversity": "monitor/diversity",
}


def train(folder: Path, settings: list[str]) -> list[dict[str, float]]:
    """The held-out measures before and after a run."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() or len(evaluations(metrics)) < 2:
        command = [sys.executable, "-m", "flow_grpo", "train", "tiny_ocr", *SETTINGS, *settings, f"output_dir={folder}"]
        resume = ["--resume"] if (folder / "checkpoints").is_dir() else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, *resume], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{folder.name} did not train:\n{done.stderr}")
    return evaluations(metrics)


def evaluations(metrics: Path) -> list[dict[str, float]]:
    """The held-out measures of each evaluation in a run's metrics.jsonl."""
    rows = (json.loads(line) for line in metrics.read_text().splitlines())
    return [{name: row[key] for name, key in MEASURES.items() if key in row} for row in rows if "eval/reward" in row]


def cell(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/anchors"))
    args = parser.parse_args()
    print("| run | anchors | " + " | ".join(f"`{name}`" for name in MEASURES) + " |\n" + "|---" * (len(MEASURES) + 2) + "|")
    for index, (title, settings) in enumerate(RUNS.items()):
        for anchors, extra in (("no", WITHOUT), ("yes", WITH)):
            runs = [
                train(args.out.resolve() / f"{index}_{anchors}_seed{seed}", [*settings, *extra, f"seed={seed}"])
                for seed in range(args.seeds)
            ]
            if anchors == "no":
                print(f"| {title} | before | {' | '.join(f'{runs[0][0][name]:.3f}' for name in MEASURES)} |")
            after = (cell([run[-1][name] for run in runs]) for name in MEASURES)
            print(f"| | {anchors} | {' | '.join(after)} |", flush=True)


if __name__ == "__main__":
    main()
