"""What `plan` says of a CPU, beside what a run takes: the most memory of the process, and the seconds of a step.

    python benchmarks/memory.py              # six runs of the embedded model
    python benchmarks/memory.py sd3_450m     # an SD3 of 0.45 B random numbers, saved in bf16, trained in float32; 7 GB
    python benchmarks/memory.py sd35_medium  # the shape of SD3.5-M, 2.2 B random numbers, trained in bf16 at 256 x 256; 20 GB

Each prediction and each run is a process of its own. Seconds are predicted by the run's process, between its steps.
"""

import json
import subprocess
import sys
import tempfile

CONFIGS = {
    "tiny_ocr": ["tiny_ocr"],
    "tiny_grpo, all graphs kept": ["tiny_grpo"],
    "tiny_grpo, 128 rows at once": ["tiny_grpo", "prompts_per_step=16", "microbatch=128", "objective.keep_graphs=false"],
    "tiny_paper, 192 rows at once": ["tiny_paper", "microbatch=192", "updates=1"],
    "all weights": ["tiny_ocr", "lora=null", "optimizer.lr=1e-4"],
    "pictures of 64 x 160, checkpointing": ["tiny_ocr", "height=64", "width=160", "memory.gradient_checkpointing=true"],
}
LARGE = [
    "pipeline_kwargs={max_sequence_length: 32}", "guidance=1.0", "rewards={jpeg_size: 1}",
    "prompts_per_step=1", "images_per_prompt=2", "microbatch=2", "updates=1", "lora={rank: 32, alpha: 64}",
    "evaluation.prompts=null", "trackers=[]",
    "sampling={steps: 2}",
    "objective={name: grpo, transition: cps, noise_level: 0.8, window: {schedule: fixed, size: 1, first_step: 0, last_step: 0}}",
]  # fmt: skip
SIZES = {
    "sd3_450m": ["dtype=fp32", "height=128", "width=128"],
    "sd35_medium": ["dtype=bf16", "height=256", "width=256"],
}


def predicted(arguments: list[str]) -> dict[str, float]:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.plan.estimate import StepEstimator
    from flow_grpo.plan.fit import baseline_memory

    args = FlowGRPOConfig.from_yaml(arguments[0], arguments[1:])
    base = baseline_memory(args)
    return {"bytes": StepEstimator(args, cuda=False).estimate(args.microbatch, base).peak}


def measured(arguments: list[str]) -> dict[str, float]:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.plan.estimate import StepEstimator
    from flow_grpo.policy.step_meter import peak_memory
    from flow_grpo.trainer import FlowGRPOTrainer

    args = FlowGRPOConfig.from_yaml(arguments[0], arguments[1:])
    trainer = FlowGRPOTrainer(args=args)
    steps = [trainer.training_step() for _ in range(2)]
    peak = peak_memory(trainer.policy.device)
    plan = StepEstimator(args, cuda=False)
    seconds = plan.estimate(args.microbatch).seconds(plan.rates(args.microbatch))
    steps.append(trainer.training_step())
    taken = min(step["time/step"] - step["time/reward"] for step in steps[1:])
    return {"bytes": peak, "predicted seconds": seconds, "seconds": taken}


def compare(name: str, arguments: list[str]) -> None:
    costs: dict[str, float] = {}
    for what in ("predicted", "measured"):
        ran = subprocess.run([sys.executable, __file__, what, *arguments], capture_output=True, text=True, check=True)
        costs |= {
            f"{what} {key}".replace("measured predicted", "predicted"): v
            for key, v in json.loads(ran.stdout.splitlines()[-1]).items()
        }
    print(name + ": " + "; ".join(_ratio(costs, unit) for unit in ("bytes", "seconds")), flush=True)


def _ratio(costs: dict[str, float], unit: str) -> str:
    predicted, measured = costs[f"predicted {unit}"], costs[f"measured {unit}"]
    scale, name = (1e6, "MB") if unit == "bytes" else (1, "s")
    return (
        f"predicted {predicted / scale:.4g} {name}, measured {measured / scale:.4g} {name}, ratio {predicted / measured:.3f}"
    )


def large(kind: str) -> None:
    """A checkpoint of random numbers, for as long as it is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "build", kind, folder], check=True)
        compare(kind, ["tiny_grpo", f"model={folder}", f"output_dir={folder}/run", *LARGE, *SIZES[kind]])


def build(arguments: list[str]) -> None:
    from random_models import build as pipeline

    pipeline(arguments[0], False).save_pretrained(arguments[1])


def main() -> None:
    if len(sys.argv) > 2:
        print(json.dumps(globals()[sys.argv[1]](sys.argv[2:])))
    elif len(sys.argv) > 1:
        large(sys.argv[1])
    else:
        for name, arguments in CONFIGS.items():
            compare(name, arguments)


if __name__ == "__main__":
    main()
