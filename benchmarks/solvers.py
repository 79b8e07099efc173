"""What a model generates with few sampling steps, by each ODE solver.

`python benchmarks/solvers.py [run folder or LoRA]` generates the held-out prompts of `tiny_ocr` from fixed noise, by the base model or with
that LoRA. By solver and number of steps: the mean of ocr and ocr_exact, and the root mean square distance of the latents from those of
200 steps of dpm_2m, where the ODE is solved.
"""

import sys

import torch
from rich.console import Console
from rich.table import Table

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.evaluation.generate import SEED, image_seed
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.loading import load_policy
from flow_grpo.rewards import load
from flow_grpo.run_folder.weights import load_trained_weights

STEPS = (3, 4, 5, 6, 8, 10, 14, 20)


def main() -> None:
    quiet_libraries()
    args = FlowGRPOConfig.from_yaml("tiny_ocr")
    policy = load_policy(args.model, "cpu", args.dtype, **args.pipeline_call_kwargs())
    if len(sys.argv) > 1:
        load_trained_weights(policy, sys.argv[1])
    held_out = load_prompts(args.evaluation.prompts)
    columns = held_out.repeat(1).columns()
    conditioning = policy.encode(held_out.prompts)
    rewards = {name: load(name) for name in ("ocr", "ocr_exact")}

    def sample(solver: str, steps: int) -> torch.Tensor:
        schedule, shape = policy.schedule(steps)
        start = torch.stack([sampling.noise(shape, image_seed(SEED, i), "sample") for i in range(len(held_out))])

        def latents(rows: torch.Tensor) -> torch.Tensor:
            velocity = policy.velocity_fn(schedule, conditioning, rows)
            return sampling.rollout(velocity, schedule, start[rows], solver=sampling.SOLVERS[solver]).final

        return torch.cat([latents(rows) for rows in torch.arange(len(start)).split(64)])

    solved = sample("dpm_2m", 200)
    table = Table("solver", "steps", "ocr", "ocr_exact", "distance")
    for solver in sampling.SOLVERS:
        for steps in STEPS:
            latents = sample(solver, steps)
            images = policy.decode(latents)
            means = [f"{float(reward(images, held_out.prompts, **columns).mean()):.3f}" for reward in rewards.values()]
            distance = float((latents - solved).square().mean().sqrt())
            table.add_row(solver, str(steps), *means, f"{distance:.3f}")
            print(solver, steps, *means, f"{distance:.3f}", file=sys.stderr, flush=True)
    Console(emoji=False).print(table)


if __name__ == "__main__":
    main()
