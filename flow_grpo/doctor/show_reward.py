"""What `flow-grpo rewards test` prints and writes: a table, a histogram, the costs, a verdict, and a grid of the images, best first."""

from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.doctor.reward_probe import ORIGINAL, SAME, SATURATED, WRONG_PROMPT, GradientStats, RewardStats
from flow_grpo.evaluation.group_dependence import GROUP_DEPENDENT, RewardInputs
from flow_grpo.rewards.scopes import rows_by_group
from flow_grpo.text import escape_markup

NUM_BINS, BAR_WIDTH = 10, 32  # of the histogram


def show(console: Console, title: str, stats: RewardStats) -> None:
    """Print the values as a table and a histogram, the costs, and the conclusions."""
    original = stats.values[ORIGINAL]
    table = Table(title=escape_markup(title), title_justify="left", box=SIMPLE_HEAD)
    for column in ("", "mean", "std", "lowest", "highest", "share lower"):
        table.add_column(column, justify="right" if column else "left")
    for variant, values in stats.values.items():
        numbers = (values.mean(), values.std(correction=0), values.min(), values.max())
        lower = "" if variant == ORIGINAL else f"{(values < original).float().mean():.0%}"
        table.add_row(variant, *map(_decimals, numbers), lower)
    console.print(table)
    console.print()
    for low, high, count in histogram(original):
        bar = "█" * round(BAR_WIDTH * count / len(original)) or ("▏" if count else "")
        console.print(f"{_decimals(low):>10} … {_decimals(high):<10} [cyan]{bar}[/cyan] {count or ''}", highlight=False)
    per_second = len(original) / stats.seconds_per_batch
    lines = [
        f"{_short(stats.seconds_per_image * 1000)} ms per image one by one, {_short(per_second)} images per second in a batch",
        f"{stats.megabytes:.0f} MB more memory",
        "deterministic: " + ("yes" if stats.deterministic else "[bold]no, the same images get other values[/bold]"),
        f"largest difference between an image alone and in a batch: {stats.batch_difference:.2g}",
    ]
    if stats.depends_on_group:
        lines.append(f"[bold]warning: {GROUP_DEPENDENT}[/bold]")
    lines += prompt_lines(stats) + gradient_lines(stats.gradient)
    lines += [f"[bold]{line}[/bold]" for line in conclusions(stats)]
    console.print("\n" + "\n".join(lines), highlight=False)


def std_within_prompts(stats: RewardStats) -> float | None:
    """The mean standard deviation of the images of a prompt, which a run learns from; None if no prompt has two images."""
    groups = [rows for rows in rows_by_group(stats.prompts) if len(rows) > 1 and stats.prompts[rows[0]]]
    stds = [stats.values[ORIGINAL][rows].std(correction=0) for rows in groups]
    return torch.stack(stds).mean().item() if stds else None


def prompt_lines(stats: RewardStats) -> list[str]:
    """How much the values differ within a prompt, and whether they depend on the prompt."""
    values, within = stats.values[ORIGINAL], std_within_prompts(stats)
    lines = []
    if within is not None:
        lines.append(f"std within a prompt: {_decimals(within)} (of {_decimals(values.std(correction=0))} over all images)")
    if WRONG_PROMPT not in stats.values:
        reason = "all images have the same prompt" if any(stats.prompts) else "the images have no prompts"
        lines.append(f"{WRONG_PROMPT}: not measured, {reason}")
    elif torch.equal(stats.values[WRONG_PROMPT], values) and values.min() < values.max():
        lines.append("reads the prompt: no, wrong prompts have the same values; that is fine if another reward reads it")
    return lines


def gradient_lines(gradient: GradientStats | str | None) -> list[str]:
    """What is known of the gradient; nothing of a reward without one."""
    if gradient is None:
        return []
    if isinstance(gradient, str):
        return [f"gradient: none, {escape_markup(gradient)}"]
    return [
        f"gradient: predicts a slope of {_decimals(gradient.slope)}, measured {_decimals(gradient.measured)}",
        f"share of the gradient's energy in 1% of the image: {gradient.energy:.0%} (1% if it were the same everywhere)",
        f"sharpness S1: {_decimals(gradient.sharpness)}, which rises while a reward is hacked",
    ]


def conclusions(stats: RewardStats) -> list[str]:
    """What the values mean for training, a sentence each; none for a single image, which has nothing to be compared with."""
    values, within = stats.values[ORIGINAL], std_within_prompts(stats)
    count, low, high = len(values), values.min(), values.max()
    if count > 1 and low == high:
        return [f"constant: all {count} images have the value {_decimals(low)}, so there is nothing to learn."]
    lines = []
    for extreme, name, advice in (
        (high, "highest", "harder prompts or a stricter"),
        (low, "lowest", "easier prompts or a milder"),
    ):
        reached = int((values == extreme).sum())
        if count > 1 and reached >= SATURATED * count:
            lines.append(f"saturated: {reached} of {count} images have the {name} value; use {advice} reward.")
    if within is not None and within <= SAME * values.std(correction=0):
        lines.append("depends on the prompt only: the images of a prompt have the same value, so there is nothing to learn.")
    if within is not None and stats.deterministic and not lines:
        lines.append("The images of a prompt have different values, which a run can learn from.")
    return lines


def histogram(values: Tensor) -> list[tuple[float, float, int]]:
    """Lower end, upper end and count of each bin; one bin if all values are equal."""
    low, high = values.min().item(), values.max().item()
    bins = NUM_BINS if high > low else 1
    edges = torch.linspace(low, high, bins + 1).tolist()
    bin_indices = (
        ((values - low) / (high - low) * bins).long().clamp(max=bins - 1) if high > low else torch.zeros(len(values)).long()
    )
    counts = torch.bincount(bin_indices, minlength=bins).tolist()
    return list(zip(edges[:-1], edges[1:], counts, strict=True))


def save_ranked(path: Path, name: str, inputs: RewardInputs, labels: list[str], values: Tensor) -> None:
    """Write the images from the highest value to the lowest, each with its value, as one grid."""
    order = values.argsort(descending=True, stable=True).tolist()
    infos = [ImageInfo(inputs.prompts[i], i, labels[i]) for i in order]
    notes = [f"{name} {_decimals(values[i])}" for i in order]
    save_grid(path, inputs.images[order], infos, columns=min(8, len(order)), notes=notes)


def _decimals(value: Tensor | float) -> str:
    """Four decimals, without the sign of a zero."""
    text = f"{float(value):.4f}"
    return text if float(text) else text.removeprefix("-")


def _short(value: float) -> str:
    """One decimal, none from 100 on."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"
