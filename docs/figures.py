"""Draw the figures of docs/concepts/sde.md: `python docs/figures.py`. They come from the package's own transitions."""

from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from flow_grpo import sde

DOCS = Path(__file__).parent
POINTS = torch.tensor([-1.0, 1.0])  # the data
STEPS, PATHS, ENDS = 200, 40, 4000
NOISE_LEVEL = 0.7
COLORS = {"ode": "#3b5bdb", "flow_sde": "#e8590c", "dance_sde": "#2b8a3e", "cps": "#9c36b5", "exact_sde": "#868e96"}


def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The exact velocity (B, 1) of data that is one of `POINTS` with equal probability."""
    log_weight = -((x - (1 - sigma) * POINTS) ** 2) / (2 * sigma**2)
    x0 = (log_weight.softmax(1) * POINTS).sum(1, keepdim=True)
    return (x - x0) / sigma


def paths(name: str, sigmas: torch.Tensor) -> torch.Tensor:
    """The states (STEPS + 1, ENDS) from the same noises on."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ENDS, 1, generator=generator)
    states = [x]
    for sigma, sigma_next in zip(sigmas, sigmas[1:], strict=False):
        v = velocity(x, sigma)
        kind = name if sigma_next > 0 else "ode"
        mean, std = sde.transition(kind, x, v, sigma, sigma_next, noise_level=NOISE_LEVEL, sigma_max=sigmas[1])
        x = mean + std * torch.randn(ENDS, 1, generator=generator)
        states.append(x)
    return torch.stack(states)[..., 0]


def draw_paths(file: Path) -> None:
    """Paths of the ODE and of the SDE, each with the histogram of where they end."""
    sigmas = torch.linspace(1, 0, STEPS + 1)
    figure, axes = plt.subplots(1, 4, figsize=(10, 3.6), width_ratios=[4, 1, 4, 1], sharey=True, layout="constrained")
    for (left, right), name, title in zip(axes.reshape(2, 2), ("ode", "flow_sde"), ("ODE", "SDE (flow_sde)"), strict=True):
        states = paths(name, sigmas)
        left.plot(sigmas, states[:, :PATHS], color=COLORS[name], linewidth=0.7, alpha=0.7)
        left.set(title=f"{title}: {PATHS} paths", xlabel="noise level sigma", xlim=(1, 0), ylim=(-3, 3))
        right.hist(states[-1], bins=60, range=(-3, 3), orientation="horizontal", color=COLORS[name])
        right.set(title="ends", xlabel="count")
    axes[0].set_ylabel("state x")
    save(figure, file)


def draw_std(file: Path) -> None:
    """The standard deviation of each step of a schedule of ten but the last, which has no noise."""
    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    sigmas, x = torch.linspace(1, 0, 11), torch.zeros(1, 1)
    for name in ("flow_sde", "dance_sde", "cps", "exact_sde"):
        stds = [
            sde.transition(name, x, x, sigma, sigma_next, noise_level=NOISE_LEVEL, sigma_max=sigmas[1])[1].item()
            for sigma, sigma_next in zip(sigmas[:-2], sigmas[1:-1], strict=True)
        ]
        style = "--" if name == "exact_sde" else "-"
        axis.plot(sigmas[:-2], stds, style, marker="o", markersize=4, color=COLORS[name], label=name)
    axis.set(
        title=f"Noise of the first nine of ten steps, noise_level {NOISE_LEVEL}",
        xlabel="noise level sigma before the step",
        ylabel="standard deviation",
        xlim=(1.03, 0.15),
        ylim=(0, None),
    )
    axis.legend()
    save(figure, file)


def save(figure: plt.Figure, file: Path) -> None:
    """Write the figure, and print where."""
    figure.savefig(file, dpi=110)
    plt.close(figure)
    print(file)


if __name__ == "__main__":
    draw_paths(DOCS / "sde_paths.png")
    draw_std(DOCS / "transition_std.png")
