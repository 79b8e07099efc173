"""Looks before a run, shown: whether a config will train, whether a model can be trained, which sampling steps explore."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor import model as contract
from flow_grpo.doctor import result
from flow_grpo.doctor import run as checkup
from flow_grpo.methods import TRANSITIONS
from flow_grpo.policy.policy import Policy
from flow_grpo.text import counted, visible
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.windows import StepVariance, most_variable_window, step_reward_variance

STYLES = {result.FINE: None, result.WARNING: "yellow", result.WRONG: "bold red"}
WIDEST = 110  # columns of a table
CHECK, NUMBER = 37, 24  # of a hundred, the first two columns


def examine(console: Console, args: FlowGRPOConfig, file: Path | None = None) -> bool:
    """A look at a run before it starts: a table of verdicts, and a JSON file if one is given. Returns whether nothing is wrong."""
    return _show(console, f"{args.model}, {args.objective.name}", checkup.examine(args), file)


def model(console: Console, policy: Policy, file: Path | None = None) -> bool:
    """Whether a model can be trained, check by check, likewise."""

    def found() -> Iterator[checkup.Section]:
        for check in contract.examine(policy):
            level, says = (result.FINE, "") if check.fine else (result.WRONG, check.verdict)
            yield "", [result.Verdict(check.name, check.number, level, says)]

    return _show(console, type(policy.pipe).__name__, found(), file)


def _show(console: Console, title: str, sections: Iterator[checkup.Section], file: Path | None) -> bool:
    """Each section as soon as it is there, and a sentence at the end."""
    console.print(visible(title), style="bold", highlight=False, markup=False)
    seen: list[dict[str, str]] = []
    everything: list[result.Verdict] = []
    sentence = "The look was not finished."
    try:
        for section, found in sections:
            console.print(_table(console, section, found))
            if section:
                console.print()
            seen += [{"section": section, **dataclasses.asdict(verdict)} for verdict in found]
            everything += found
        sentence = result.conclusion(everything)
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    finally:  # whatever ended the look, what it found is kept
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"title": title, "conclusion": sentence, "verdicts": seen}, indent=2))
    if file is not None:
        console.print(f"verdicts: {file}", highlight=False, markup=False, soft_wrap=True)
    return all(verdict.level != result.WRONG for verdict in everything)


def _table(console: Console, section: str, found: list[result.Verdict]) -> Table:
    """A section in columns of one width, so that all of them stand under each other."""
    table = Table(box=None, pad_edge=False, show_header=bool(section), header_style="bold", width=min(console.width, WIDEST))
    table.add_column(_shown(section), ratio=CHECK)
    table.add_column("", ratio=NUMBER, overflow="fold")
    table.add_column("", ratio=100 - CHECK - NUMBER, overflow="fold")
    for verdict in found:
        word = verdict.level.upper() if verdict.level == result.WRONG else verdict.level
        says = f"{word}: {verdict.says}" if verdict.says else word
        table.add_row(_shown(verdict.check), _shown(verdict.number), _shown(says), style=STYLES[verdict.level])
    return table


def _shown(text: str) -> str:
    """Text from anybody in a cell: neither markup nor what a terminal would do."""
    return escape(visible(text))


def explore(console: Console, args: FlowGRPOConfig, transitions: list[str], noise_levels: list[float], out: Path) -> None:
    """The reward variance that each step owns, per transition and noise level: a table and a picture."""
    known = [name for name, transition in TRANSITIONS.items() if transition.stochastic]
    unknown = next((name for name in transitions if name not in known), None)
    if unknown is not None:
        raise ValueError(f"{unknown} is no stochastic transition; choose from {', '.join(known)}.")
    trainer = FlowGRPOTrainer(args=args)
    args = trainer.stage.args
    if not args.method.stepwise:
        raise ValueError(
            f"objective {args.objective.name} samples the ODE, where no step explores: give a config of trained steps."
        )
    found = [
        step_reward_variance(trainer.policy, args, trainer.train_set, trainer.rewards, transition=name, noise_level=level)
        for name in transitions
        for level in noise_levels
    ]
    size = args.sampling.window.size
    prompts = f"{counted(args.prompts_per_step, 'prompt')} x {counted(args.images_per_prompt, 'image')}"
    console.print(f"reward variance owned by each step, x 1000 ({prompts})")
    table = Table()
    table.add_column("step (sigma)")
    for row in found:
        table.add_column(f"{row[0].transition}\n{row[0].noise_level:g}", justify="right")
    for place, one in enumerate(found[0]):
        table.add_row(f"{one.step} ({one.sigma:.3f})", *(f"{1000 * row[place].variance:.2f}" for row in found))
    table.add_section()
    starts = [most_variable_window(row, size) for row in found]
    table.add_row(f"best window of {size}", *(f"{start} to {start + size - 1}" for start in starts))
    console.print(table)
    console.print(
        "A column is a transition and its noise level; the images of a prompt differ by the noise of one step alone."
    )
    _plot(found, out)
    console.print(f"picture: {out}", highlight=False, markup=False)


def _plot(found: list[list[StepVariance]], out: Path) -> None:
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
