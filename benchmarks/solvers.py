"""What a model generates with few sampling steps, by each ODE solver.

`python benchmarks/solvers.py [run folder or LoRA]` generates the held-out prompts of `tiny_ocr` from fixed noise, by the base model or with
that LoRA. By solver and number of velocities: the mean of ocr and ocr_exact, and the root mean square distance of the latents from those
of 30 steps of Heun's method, where the ODE is solved.
"""

import sys

import torch
from rich.console import Console
from rich.table import Table

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import load_prompts
from flow_grpo.evaluation.generate import image_seed
from flow_grpo.methods import SOLVERS, velocities_per_rollout
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.solvers import ode_solver
from flow_grpo.rewards import load
from flow_grpo.run_folder.weights import load_trained_weights

VELOCITIES = (3, 4, 5, 6, 8, 10, 14, 20)


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
        start = torch.stack([sampling.noise(shape, image_seed(1234, i), "sample") for i in range(len(held_out))])
        velocity = policy.velocity_fn(schedule, conditioning)
        return sampling.rollout(velocity, schedule, start, microbatch=64, solver=ode_solver(solver, schedule)).final

    solved = sample("heun", 30)
    table = Table("solver", "steps", "velocities", "ocr", "ocr_exact", "distance")
    for solver in SOLVERS:
        for max_velocities in VELOCITIES:
            steps = (max_velocities + 1) // 2 if solver == "heun" else max_velocities
            latents = sample(solver, steps)
            images = policy.decode(latents)
            means = [f"{float(reward(images, held_out.prompts, **columns).mean()):.3f}" for reward in rewards.values()]
            distance = float((latents - solved).square().mean().sqrt())
            num_velocities = velocities_per_rollout(solver, steps)
            table.add_row(solver, str(steps), str(num_velocities), *means, f"{distance:.3f}")
            print(solver, steps, num_velocities, *means, f"{distance:.3f}", file=sys.stderr, flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
