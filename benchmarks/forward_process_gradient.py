"""How near the update of `awm` is to the gradient of the ODE sampler's expected reward, where both can be computed.

    python benchmarks/forward_process_gradient.py

The data are 16 independent coordinates, each of 0.7 N(-1.5, 0.3^2) + 0.3 N(1.5, 0.3^2), whose velocity is known; the reward is the mean
of sigmoid(2 x). The model is that velocity plus a sum of bumps over (x, sigma) with weights of 0. Two vectors with an entry for each bump:
the gradient of the expected reward through 200 Euler steps, by the chain rule, and the expected update of `awm` at noise levels drawn
uniformly. It prints their cosine for each weight of the loss, also with sigma shifted by 3. numpy alone, a minute on one core.
"""

import numpy as np

MEANS, SHARES, SPREAD = np.array([-1.5, 1.5]), np.array([0.7, 0.3]), 0.3
DIMENSIONS, IMAGES, STEPS = 16, 60_000, 200
CENTRES, LEVELS = np.linspace(-3, 3, 13), np.linspace(0.02, 0.98, 10)
BATCH = 2_000


def velocity(x: np.ndarray, sigma: np.ndarray | float) -> np.ndarray:
    """E[eps - x0 | x] in each coordinate."""
    x, sigma = x[..., None], np.asarray(sigma)[..., None]
    variance = (1 - sigma) ** 2 * SPREAD**2 + sigma**2
    off = x - (1 - sigma) * MEANS
    log_share = np.log(SHARES) - off**2 / (2 * variance)
    share = np.exp(log_share - log_share.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    x0 = MEANS + (1 - sigma) * SPREAD**2 / variance * off
    return (share * (sigma / variance * off - x0)).sum(-1)


def projected(values: np.ndarray, x: np.ndarray, sigma: np.ndarray | float) -> np.ndarray:
    """The sum over all coordinates of values times each bump."""
    sigma = np.broadcast_to(sigma, x.shape).ravel()
    of_x = np.exp(-(((x.ravel()[:, None] - CENTRES) / 0.5) ** 2) / 2)
    of_sigma = np.exp(-(((sigma[:, None] - LEVELS) / 0.1) ** 2) / 2)
    return (of_x * values.ravel()[:, None]).T @ of_sigma


def sampler_gradient(draw: np.random.Generator) -> np.ndarray:
    """The gradient of the expected reward of the Euler sampler."""
    sigmas, total = np.linspace(1, 0, STEPS + 1), 0.0
    x, states, slopes = draw.standard_normal(60_000), [], []
    for sigma, after in zip(sigmas, sigmas[1:], strict=False):
        v = velocity(x, sigma)
        states.append(x)
        slopes.append(1 + (after - sigma) * (velocity(x + 1e-4, sigma) - velocity(x - 1e-4, sigma)) / 2e-4)
        x = x + (after - sigma) * v
    r = 1 / (1 + np.exp(-2 * x))
    sensitivity = 2 * r * (1 - r)
    for i in range(STEPS - 1, -1, -1):
        total = total + projected((sigmas[i + 1] - sigmas[i]) * sensitivity, states[i], sigmas[i])
        sensitivity = sensitivity * slopes[i]
    return total


def awm_updates(draw: np.random.Generator, shift: float) -> dict[str, np.ndarray]:
    """The expected update of awm by weight: minus the gradient of advantage times weighted squared error."""
    totals: dict[str, np.ndarray | float] = dict.fromkeys(("uniform", "adaptive", "ghuber", "(1 - sigma) / sigma"), 0.0)
    component = draw.random((IMAGES, DIMENSIONS)) < SHARES[1]
    x0 = MEANS[component.astype(int)] + SPREAD * draw.standard_normal(component.shape)
    reward = (1 / (1 + np.exp(-2 * x0))).mean(1)
    advantage = reward - reward.mean()
    for start in range(0, IMAGES, BATCH):
        rows = slice(start, start + BATCH)
        level = draw.uniform(0.02, 1, (BATCH, 1))
        sigma = shift * level / (1 + (shift - 1) * level)
        eps = draw.standard_normal((BATCH, DIMENSIONS))
        x = (1 - sigma) * x0[rows] + sigma * eps
        error = velocity(x, np.broadcast_to(sigma, x.shape)) - (eps - x0[rows])
        loss = (error**2).mean(1, keepdims=True)
        weights = {
            "uniform": 1.0,
            "adaptive": 1 / np.abs(error).mean(1, keepdims=True),
            "ghuber": sigma * (loss + 1e-10) ** (0.25 - 1),
            "(1 - sigma) / sigma": (1 - sigma) / sigma,
        }
        for name, weight in weights.items():
            totals[name] = totals[name] - projected(advantage[rows, None] * weight * error, x, sigma)
    return {name: np.asarray(total) for name, total in totals.items()}


def main() -> None:
    true = sampler_gradient(np.random.default_rng(0))
    for shift in (1.0, 3.0):
        for name, update in awm_updates(np.random.default_rng(1), shift).items():
            cosine = (true * update).sum() / np.sqrt((true**2).sum() * (update**2).sum())
            print(f"shift {shift:g}, weight {name}: cosine {cosine:.2f}")


if __name__ == "__main__":
    main()
