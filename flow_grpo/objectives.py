"""Objectives: what an update minimises, one pure function each. Rows in, `Loss` per row out; the trainer averages.

On the per-step log-probabilities of a trajectory (`ON_STEPS`):
    grpo    PPO's clipped ratio, arXiv 2402.03300 and 2505.05470
On the final latents, noised afresh, for a noise level sigma and noise eps shared within a group:
    awm     Advantage Weighted Matching, arXiv 2509.25050
    nft     DiffusionNFT, arXiv 2509.16117
"""

import torch
from torch import Tensor

from flow_grpo.types import Loss


def grpo(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Loss:
    """`-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)` with `rho = exp(log_prob - old_log_prob)`.

    All (B,). Log-probabilities are means over the latent dimensions, so useful clip ranges are 1e-4 or below on
    large latents. DAPO's clip-higher (arXiv 2503.14476) is clip_high > clip_low.
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    value = -torch.minimum(ratio * advantage, clipped * advantage)
    return Loss(
        value,
        {
            "ratio/mean": ratio.detach(),
            "ratio/max_deviation": (ratio.detach() - 1).abs(),
            "clip_ratio/low_mean": ((ratio < 1 - clip_low) & (advantage < 0)).float(),
            "clip_ratio/high_mean": ((ratio > 1 + clip_high) & (advantage > 0)).float(),
        },
    )


def awm_log_prob(v: Tensor, target: Tensor, sigma: Tensor, weight: str = "uniform") -> Tensor:
    """The forward process's stand-in for a log-probability, (B,): minus the weighted matching loss of v (B, ...).

    `target = eps - x0`, sigma (B,). `uniform` is the mean squared error; `ghuber` is
    `(sigma / p) [(l + 1e-10)^p - 1e-10^p]` of that error l with p = 0.25.
    """
    error = (v.float() - target).square().flatten(1).mean(1)
    if weight == "uniform":
        return -error
    if weight == "ghuber":
        p, floor = 0.25, 1e-10
        return -(sigma.flatten() / p) * ((error + floor) ** p - floor**p)
    raise ValueError(f"unknown weight {weight!r} for awm; choose uniform or ghuber.")


def awm(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Loss:
    """Advantage Weighted Matching, arXiv 2509.25050: PPO's clip on `awm_log_prob` at one (sigma, eps). All (B,)."""
    return grpo(log_prob, old_log_prob, advantage, clip_low, clip_high)


def nft(
    v: Tensor,
    v_old: Tensor,
    x: Tensor,
    x0: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    beta: float,
    advantage_max: float,
) -> Loss:
    """DiffusionNFT, arXiv 2509.16117: pull an implicit positive policy to good images and a negative one to bad ones.

    v, v_old, x, x0 (B, ...): velocity, that of the slowly moving copy of the adapter, the noised and the clean latent.
    sigma (B,), advantage (B,); beta > 0 is how far the implicit policies lie from v_old.

        r  = 1/2 + 1/2 clip(A / advantage_max, -1, 1)
        v+ = beta v + (1 - beta) v_old          v- = (1 + beta) v_old - beta v
        L  = advantage_max / beta [r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w-],  w = stop_grad mean |x0_hat - x0|

    Two departures of this package's runs from the published ones: rollouts are drawn by the trained adapter, not by its slow
    copy, and the published term 1e-4 |v - v_ref|^2 is there only if kl_weight says so.
    """
    v, v_old = v.float(), v_old.float()
    sigma = sigma.reshape((-1,) + (1,) * (x.ndim - 1))

    def distance(velocity: Tensor) -> Tensor:
        error = (x - sigma * velocity) - x0
        weight = error.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
        return error.square().flatten(1).mean(1) / weight

    positive = distance(beta * v + (1 - beta) * v_old)
    negative = distance((1 + beta) * v_old - beta * v)
    r = 0.5 + 0.5 * (advantage / advantage_max).clamp(-1, 1)
    value = advantage_max / beta * (r * positive + (1 - r) * negative)
    return Loss(value, {"nft/positive": positive.detach(), "nft/negative": negative.detach()})


def velocity_kl(v: Tensor, v_ref: Tensor) -> Tensor:
    """Mean squared distance of two velocities (B, ...), (B,): the KL of every noise level up to its weight."""
    return (v.float() - v_ref.float()).square().flatten(1).mean(1)


ON_STEPS = ("grpo",)  # the others take final latents
