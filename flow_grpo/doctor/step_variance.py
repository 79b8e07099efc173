"""Which sampling steps move the reward: its variance when one step alone is stochastic, per transition and noise level."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.figures import draw_or_warn, new_figure, save_figure
from flow_grpo.sde import TRANSITIONS
from flow_grpo.text import counted
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.windows import StepVariance, most_variable_window, step_reward_variance


def check_step_variance(
    console: Console, args: FlowGRPOConfig, transitions: list[str], noise_levels: list[float], plot: Path
) -> None:
    """Measure the reward variance of each step, print a table and save a plot.

    Raises:
        FlowGRPOError: a transition is not stochastic, or the objective samples the ODE.
    """
    known = [name for name, row in TRANSITIONS.items() if row.stochastic]
    refused = next((name for name in transitions if name not in known), None)
    if refused is not None:
        raise FlowGRPOError(f"{refused} is not a stochastic transition; choose from {', '.join(known)}.")
    trainer = FlowGRPOTrainer(args=args)
    stage = trainer.stage.args
    if not stage.stepwise:
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
    size = stage.sampling.window.size
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
