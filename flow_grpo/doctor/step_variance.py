"""Which sampling steps move the reward: its variance when one step alone is stochastic, per transition and noise level."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.stepwise_objectives import Stepwise, stochastic_transitions
from flow_grpo.data.prompts import PromptSet, sampler_of
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.figures import draw_or_warn, new_figure, save_figure
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.threads import call_interruptibly
from flow_grpo.text import counted
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.rollouts import ImageSampler


@dataclass(frozen=True)
class StepVariance:
    """Reward variance from the noise of one sampling step, all else being the same for the images of a prompt."""

    transition: str
    noise_level: float
    step: int
    sigma: float
    variance: float  # of the reward within a group, mean over the prompts


def step_reward_variance(
    policy: Policy,
    args: FlowGRPOConfig,
    prompts: PromptSet,
    rewards: WeightedSum,
    *,
    transition: str,
    noise_level: float,
    processes: Processes | None = None,
) -> list[StepVariance]:
    """Measure each trainable step: the images of a prompt share all noise but that step's.

    Uses prompts_per_step prompts with images_per_prompt images, the same for all steps, transitions and noise levels.

    Args:
        processes: as in `ImageSampler`.

    Raises:
        FlowGRPOError: no prompt's images could all be scored.
    """
    changes = {"shared_initial_noise": True, "transition": transition, "noise_level": noise_level}
    objective, processes = args.objective.model_copy(update=changes), processes or Processes()
    assert isinstance(objective, Stepwise)
    sampler = ImageSampler(policy, args.model_copy(update={"objective": objective}), rewards, processes)
    batch = sampler_of(prompts, args.seed).sample(0, args.prompts_per_step, args.images_per_prompt)
    variances = []
    for step in range(objective.window.first_step, objective.window.last_of(args.sampling.steps) + 1):
        images = policy.decode(sampler.trajectory(0, batch, [step]).final, args.microbatch)
        scores = call_interruptibly(partial(sampler.score, batch, images), processes.should_stop)
        reward = scores.total.view(args.prompts_per_step, -1)
        reward = reward[reward.isfinite().all(1)]  # without groups of a reward that was dropped
        if not len(reward):
            raise FlowGRPOError("the rewards gave no finite number for any prompt, so no step's share can be measured.")
        sigma = sampler.schedule.sigmas[step].item()
        variances.append(StepVariance(transition, noise_level, step, sigma=sigma, variance=reward.var(1).mean().item()))
    return variances


def most_variable_window(measured: list[StepVariance], size: int) -> int:
    """The first of the `size` adjacent steps whose noise varies the reward most."""
    variance = torch.tensor([step.variance for step in measured])
    return measured[int(variance.unfold(0, min(size, len(measured)), 1).sum(1).argmax())].step


def check_step_variance(
    console: Console, args: FlowGRPOConfig, transitions: list[str], noise_levels: list[float], plot: Path
) -> None:
    """Measure the reward variance of each step, print a table and save a plot.

    Raises:
        FlowGRPOError: a transition is not stochastic, or the objective samples the ODE.
    """
    known = stochastic_transitions()
    if refused := [name for name in transitions if name not in known]:
        raise FlowGRPOError(f"{refused[0]} is not a stochastic transition; choose from {', '.join(known)}.")
    trainer = FlowGRPOTrainer(args=args.without_auto_compile())
    stage = trainer.stage.args
    if not stage.objective.stepwise:
        raise FlowGRPOError(
            f"objective {stage.objective.name} samples the ODE, which has no stochastic steps: give a config with an objective "
            "on sampling steps, such as tiny_grpo."
        )
    curves = [
        step_reward_variance(
            policy=trainer.policy,
            args=stage,
            prompts=trainer.train_set,
            rewards=trainer.rewards,
            transition=transition,
            noise_level=noise_level,
        )
        for transition in transitions
        for noise_level in noise_levels
    ]
    _print(console, stage, curves)
    if draw_or_warn(lambda: _save_plot(curves, plot), plot, lambda line: console.print(line, highlight=False, markup=False)):
        console.print(f"plot: {plot}", highlight=False, markup=False)


def _print(console: Console, stage: FlowGRPOConfig, curves: list[list[StepVariance]]) -> None:
    assert isinstance(stage.objective, Stepwise)
    size = min(stage.objective.window.size, len(curves[0]))
    groups = f"{counted(stage.prompts_per_step, 'prompt')} x {counted(stage.images_per_prompt, 'image')}"
    console.print(f"reward variance x 1000 from the noise of each step ({groups})")
    table = Table()
    table.add_column("step (sigma)")
    for curve in curves:
        table.add_column(f"{curve[0].transition}\n{curve[0].noise_level:g}", justify="right")
    for row in zip(*curves, strict=True):
        table.add_row(f"{row[0].step} ({row[0].sigma:.3f})", *(f"{1000 * point.variance:.2f}" for point in row))
    table.add_section()
    starts = [most_variable_window(curve, size) for curve in curves]
    table.add_row(f"best window of {size}", *(f"{start} to {start + size - 1}" for start in starts))
    console.print(table)
    console.print(
        "Columns are transitions with their noise levels. Images of a prompt differ by the noise of one step alone."
    )


def _save_plot(curves: list[list[StepVariance]], file: Path) -> Path:
    figure, (axes,) = new_figure(8, 4.5)
    names = list(dict.fromkeys(curve[0].transition for curve in curves))
    levels = sorted({curve[0].noise_level for curve in curves})
    for curve in curves:
        transition, noise_level = curve[0].transition, curve[0].noise_level
        axes.plot(
            [point.step for point in curve],
            [point.variance for point in curve],
            marker="o",
            color=f"C{names.index(transition)}",
            alpha=0.35 + 0.65 * (levels.index(noise_level) + 1) / len(levels),
            label=f"{transition}, noise level {noise_level:g}",
        )
    axes.set_xlabel("stochastic step")
    axes.set_ylabel("reward variance within a group")
    axes.set_ylim(bottom=0)
    axes.set_xticks([point.step for point in curves[0]])
    axes.legend(frameon=False)
    save_figure(figure, file)
    return file
