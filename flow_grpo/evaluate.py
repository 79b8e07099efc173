"""Held-out prompts with fixed seeds, scored: what `eval` runs, and training every so often."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rewards as reward_kit
from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.grid import Cell, read_grid, save_grid
from flow_grpo.parallel import Processes
from flow_grpo.policy import Policy
from flow_grpo.prompts import PromptSet
from flow_grpo.sections import RewardConfig
from rewards import Reward, WeightedSum


def build_rewards(args: FlowGRPOConfig, given: Any = None) -> tuple[WeightedSum, list[str]]:
    """All rewards that an evaluation measures, and the names of those that are trained on. Each is built once.

    The sum is the trained reward: the others have weight 0 in it. `given` are a trainer's `reward_funcs`.
    """
    if given is None:
        trained: dict[str, Any] = {name: (name, setting) for name, setting in args.rewards.items()}
    else:
        items = given if isinstance(given, list) else [given]
        trained = {i if isinstance(i, str) else getattr(i, "__name__", type(i).__name__): (i, RewardConfig()) for i in items}
        if len(trained) < len(items):
            raise ValueError("two of reward_funcs have one name: give each function or class a name of its own.")
    measured = {name: (name, setting) for name, setting in args.evaluation.rewards.items()}
    loaded = {
        name: _placed(item, setting) if isinstance(item, str) else item
        for name, (item, setting) in {**measured, **trained}.items()
    }
    weights = {name: args.rewards[name].weight if name in args.rewards else float(name in trained) for name in loaded}
    settings = {**args.evaluation.rewards, **args.rewards}
    drop = [name for name, setting in settings.items() if setting.on_error == "drop"]
    sums = WeightedSum(loaded, {name: weights[name] if name in trained else 0.0 for name in loaded}, drop)
    return sums, list(trained)


def _placed(name: str, setting: RewardConfig) -> Reward:
    """A reward where its setting wants it: on other machines, in a process of its own, or here."""
    if setting.remote is not None:
        return reward_kit.load("remote", urls=setting.remote, **{"reward": name, **setting.options})
    if setting.isolate:
        from rewards.isolated import Isolated

        return Isolated(name, setting.options, setting.python)
    return reward_kit.load(name, **setting.options)


@torch.no_grad()
def draw(policy: Policy, prompts: list[str], seeds: list[int], steps: int, microbatch: int = 64) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] of B prompts by the ODE, each from the noise of its seed alone."""
    schedule, shape = policy.schedule(steps)
    conditioning = policy.encode(prompts)
    start = torch.stack([sampling.noise(shape, seed, "sample") for seed in seeds])

    velocity = policy.along(schedule, conditioning)
    trajectory = sampling.rollout(velocity, schedule, start, [], "ode", 0.0, lambda i: start, microbatch)
    return policy.decode(trajectory.final, microbatch)


def evaluate(
    policy: Policy,
    prompts: PromptSet,
    rewards: WeightedSum,
    steps: int,
    seed: int,
    microbatch: int = 64,
    processes: Processes | None = None,
    keep: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Images of the first `keep` prompts, prompt i from the noise of seed + i, and every reward's values (B,), `reward` their sum.

    Several processes take the prompts in turns.
    """
    processes = processes or Processes()
    own = list(range(processes.rank, len(prompts), processes.count))
    batch = prompts.take(own, 1)
    most = -(-len(prompts) // processes.count)
    drawn = own + own[-1:] * (most - len(own))  # all processes draw as many, as they must where they share weights
    images = draw(policy, prompts.take(drawn, 1).prompts, [seed + i for i in drawn], steps, microbatch)[: len(own)]
    shown = images[: len([i for i in own if keep is None or i < keep])].clone()

    def scored() -> tuple[list[int], Tensor, dict[str, Tensor]]:
        total, by_name = rewards(images, batch.prompts, **batch.columns())
        return own, shown, {"reward": total, **by_name}

    parts = processes.agree(scored)
    order = torch.tensor([i for part in parts for i in part[0]]).argsort()
    values = {name: torch.cat([part[2][name] for part in parts])[order] for name in parts[0][2]}
    first = [i for part in parts for i in part[0][: len(part[1])]]
    return torch.cat([part[1] for part in parts])[torch.tensor(first).argsort()], values


def before_after(folder: Path, first: bool, images: Tensor, prompts: list[str], seed: int, model: str) -> None:
    """Writes before.png, or after.png and both side by side as before_after.png: the same prompts and seeds."""
    when = "before" if first else "after"
    cells = [Cell(prompt, seed + i, f"{model}, {when} training") for i, prompt in enumerate(prompts)]
    save_grid(folder / f"{when}.png", images, cells, columns=4)
    if first or not (folder / "before.png").exists():
        return
    former, former_cells = read_grid(folder / "before.png")
    pairs = [i for pair in zip(range(len(prompts)), range(len(prompts), 2 * len(prompts)), strict=True) for i in pair]
    both, both_cells = torch.cat([former, images]), former_cells + cells
    save_grid(folder / "before_after.png", both[pairs], [both_cells[i] for i in pairs], columns=4, notes=["before", "after"])
