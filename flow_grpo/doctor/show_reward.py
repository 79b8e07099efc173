"""What `flow-grpo rewards test` prints and writes: a table, a histogram, the costs, and a grid of the images, best first."""

from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.doctor.reward_probe import ORIGINAL, RewardStats
from flow_grpo.evaluation.group_dependence import GROUP_DEPENDENT, RewardInputs

NUM_BINS, BAR_WIDTH = 10, 32  # of the histogram


def show(console: Console, title: str, stats: RewardStats) -> None:
    """Print the values as a table and a histogram, and the costs."""
    original = stats.values[ORIGINAL]
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
    for column in ("", "mean", "std", "lowest", "highest", "share lower"):
        table.add_column(column, justify="right" if column else "left")
    for how, values in stats.values.items():
        numbers = (values.mean(), values.std(correction=0), values.min(), values.max())
        lower = "" if how == ORIGINAL else f"{(values < original).float().mean():.0%}"
        table.add_row(how, *(f"{number:.4f}" for number in numbers), lower)
    console.print(table)
    console.print()
    for low, high, count in histogram(original):
        bar = "█" * round(BAR_WIDTH * count / len(original)) or ("▏" if count else "")
        console.print(f"{low:10.4f} … {high:<10.4f} [cyan]{bar}[/cyan] {count or ''}", highlight=False)
    lines = [
        f"{stats.seconds_per_image * 1000:.1f} ms per image one by one, {len(original) / stats.seconds_per_batch:.1f} images per second "
        "in a batch",
        f"{stats.megabytes:.0f} MB more memory",
        "deterministic: " + ("yes" if stats.deterministic else "[bold]no, the same images get other values[/bold]"),
        f"largest difference between an image alone and in a batch: {stats.batch_difference:.2g}",
    ]
    if stats.depends_on_group:
        lines.append(f"[bold]warning: {GROUP_DEPENDENT}[/bold]")
    console.print("\n" + "\n".join(lines), highlight=False)


def histogram(values: Tensor) -> list[tuple[float, float, int]]:
    """Lower end, upper end and count of each bin; one bin if all values are equal."""
    low, high = values.min().item(), values.max().item()
    bins = NUM_BINS if high > low else 1
    edges = torch.linspace(low, high, bins + 1).tolist()
    places = (
        ((values - low) / (high - low) * bins).long().clamp(max=bins - 1) if high > low else torch.zeros(len(values)).long()
    )
    counts = torch.bincount(places, minlength=bins).tolist()
    return list(zip(edges[:-1], edges[1:], counts, strict=True))


def save_ranked(path: Path, name: str, inputs: RewardInputs, labels: list[str], values: Tensor) -> None:
    """Write the images from the highest value to the lowest, each with its value, as one grid."""
    order = values.argsort(descending=True, stable=True).tolist()
    infos = [ImageInfo(inputs.prompts[i], i, labels[i]) for i in order]
    notes = [f"{name} {values[i]:.4f}" for i in order]
    save_grid(path, inputs.images[order], infos, columns=min(8, len(order)), notes=notes)
