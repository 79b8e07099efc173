"""The curves of a run as a picture, reward.png."""

from pathlib import Path
from typing import TYPE_CHECKING

from flow_grpo.figures import new_figure, save_figure
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_curves(folder: Path) -> Path | None:
    """Plots the reward in training, the held-out scores, and below them the reward's std within a group; None without rewards."""
    rows = read_metrics(folder)
    if not any("reward" in row for row in rows):
        return None
    figure, (above, below) = new_figure(8, 5.5, rows=2, sharex=True, height_ratios=(4, 1))
    from matplotlib.ticker import MaxNLocator

    title = f"{folder.resolve().name}: the trained reward, and what is measured on held-out prompts"
    above.set_title(title, loc="left", fontsize=10)
    _plot_rewards(above, below, rows)
    below.set_ylabel("std within\na group", fontsize=8)
    below.set_ylim(bottom=0)
    below.set_xlabel("training step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.legend(frameon=False, loc="lower right")
    save_figure(figure, folder / layout.CURVES)
    return folder / layout.CURVES


def _plot_rewards(above: "Axes", below: "Axes", rows: list[dict]) -> None:
    train = [row for row in rows if "reward" in row]
    steps = [row["step"] for row in train]
    above.plot(steps, [row["reward"] for row in train], color="C0", linewidth=1.2, label="reward in training")
    below.plot(steps, [row.get("reward_std", 0.0) for row in train], color="C0", linewidth=1.2)
    names = dict.fromkeys(key for row in rows for key in row if key.startswith("eval/") and key != "eval/reward")
    for i, name in enumerate(names):
        points = [(row["step"], row[name]) for row in rows if name in row]
        above.plot(*zip(*points, strict=True), marker="o", color=f"C{i + 1}", label=f"held out: {name[5:]}")
