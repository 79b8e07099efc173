"""Looks before a run: what two training steps say of a config, and which sampling steps explore. Nothing is written."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flow_grpo import contract
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.explore import Owned, best_window, owned_variance
from flow_grpo.policy import Policy
from flow_grpo.sde import TRANSITIONS
from flow_grpo.train import FlowGRPOTrainer


def examine(console: Console, args: FlowGRPOConfig) -> None:
    """Two training steps, and a verdict on each of their numbers. The first warms the machine up."""
    trainer = FlowGRPOTrainer(args=args)
    args = trainer.part
    trainer.training_step()
    metrics = trainer.training_step()
    rows: list[tuple[str, str, str]] = []
    deviation = metrics.get("ratio/first_update_max_deviation")
    if deviation is not None:
        rows.append(
            ("ratio before the first update, deviation from 1", f"{deviation:.1e}", "exact" if deviation == 0 else "wrong")
        )
    if "grad_rms" in metrics:
        rms, eps = metrics["grad_rms"], args.optimizer.eps
        fine = rms > 10 * eps
        rows.append(
            ("gradient RMS", f"{rms:.1e}", f"above Adam's eps of {eps:.0e}" if fine else "set optimizer.eps below it")
        )
    silent = metrics.get("frac_reward_zero_std", 0.0)
    advice = "fine" if silent < 0.5 else "most groups say nothing: more noise, harder prompts, or resample"
    rows.append(("groups without signal", f"{silent:.0%}", advice))
    seconds = metrics["time/step"]
    rows.append(
        ("seconds a step", f"{seconds:.1f}", f"about {seconds * args.steps / 60:.0f} minutes for {args.steps} steps")
    )
    table = Table("check", "number", "verdict", title=f"{args.model}, {args.objective.name}", title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def model(console: Console, policy: Policy) -> bool:
    """Whether a model can be trained, check by check: a table. Returns whether all are fine."""
    table = Table("check", "number", "verdict", title=type(policy.pipe).__name__, title_justify="left")
    found = []
    for check in contract.examine(policy):
        found.append(check.fine)
        table.add_row(check.name, check.number, escape(check.verdict), style=None if check.fine else "bold red")
    console.print(table)
    console.print("It can be trained." if all(found) else "It can't be trained as it is.")
    return all(found)


def explore(console: Console, args: FlowGRPOConfig, transitions: list[str], noise_levels: list[float], out: Path) -> None:
    """The reward variance that each step owns, per transition and noise level: a table and a picture."""
    known = [name for name in TRANSITIONS if name != "ode"]
    unknown = next((name for name in transitions if name not in known), None)
    if unknown is not None:
        raise ValueError(f"{unknown} is no stochastic transition; choose from {', '.join(known)}.")
    trainer = FlowGRPOTrainer(args=args)
    args = trainer.part
    if args.sampling.transition == "ode":
        raise ValueError(
            f"objective {args.objective.name} samples the ODE, where no step explores: give a config of trained steps."
        )
    found = [
        owned_variance(trainer.policy, args, trainer.train_set, trainer.rewards, name, level)
        for name in transitions
        for level in noise_levels
    ]
    size = args.sampling.window.size
    prompts = f"{args.prompts_per_step} prompts x {args.images_per_prompt} images"
    console.print(f"reward variance owned by each step, x 1000 ({prompts})")
    table = Table()
    table.add_column("step (sigma)")
    for row in found:
        table.add_column(f"{row[0].transition}\n{row[0].noise_level:g}", justify="right")
    for place, one in enumerate(found[0]):
        table.add_row(f"{one.step} ({one.sigma:.3f})", *(f"{1000 * row[place].variance:.2f}" for row in found))
    table.add_section()
    starts = [best_window(row, size) for row in found]
    table.add_row(f"best window of {size}", *(f"{start} to {start + size - 1}" for start in starts))
    console.print(table)
    console.print(
        "A column is a transition and its noise level; the images of a prompt differ by the noise of one step alone."
    )
    _plot(found, out)
    console.print(f"picture: {out}", highlight=False, markup=False)


def _plot(found: list[list[Owned]], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row[0].transition for row in found))
    levels = sorted({row[0].noise_level for row in found})
    for row in found:
        color = f"C{names.index(row[0].transition)}"
        share = 0.35 + 0.65 * (levels.index(row[0].noise_level) + 1) / len(levels)
        label = f"{row[0].transition}, noise level {row[0].noise_level:g}"
        axes.plot([o.step for o in row], [o.variance for o in row], marker="o", color=color, alpha=share, label=label)
    axes.set_xlabel("the one stochastic step")
    axes.set_ylabel("reward variance within a group")
    axes.set_ylim(bottom=0)
    axes.set_xticks([o.step for o in found[0]])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
