"""The curves of a run as a picture."""

from pathlib import Path

from flow_grpo.files import atomic_file
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.metrics_file import read_metrics


def plot_curves(folder: Path) -> Path | None:
    """Draws reward.png: the trained reward, the held-out measures, and below them the spread within a group, over the training steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = read_metrics(folder)
    train = [row for row in rows if "reward" in row]
    held_out = [row for row in rows if any(key.startswith("eval/") for key in row)]
    if not train:
        return None
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    steps = [row["step"] for row in train]
    axes.set_title(
        f"{folder.resolve().name}: the trained reward, and what is measured on held-out prompts", loc="left", fontsize=10
    )
    axes.plot(steps, [row["reward"] for row in train], color="C0", linewidth=1.2, label="reward in training")
    below.plot(steps, [row.get("reward_std", 0.0) for row in train], color="C0", linewidth=1.2)
    below.set_ylabel("std within\na group", fontsize=8)
    below.set_ylim(bottom=0)
    names = [
        k for k in dict.fromkeys(key for row in held_out for key in row) if k.startswith("eval/") and k != "eval/reward"
    ]
    for i, name in enumerate(names):
        points = [(row["step"], row[name]) for row in held_out if name in row]
        axes.plot(*zip(*points, strict=True), marker="o", color=f"C{i + 1}", label=f"held out: {name[5:]}")
    below.set_xlabel("training step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in (axes, below):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    with atomic_file(folder / layout.CURVES) as file:
        figure.savefig(file, dpi=120)
    return folder / layout.CURVES
