"""Transitions of a flow-matching sampler: each step from sigma to sigma_next < sigma is a Gaussian N(mean, std^2).

Notation: `x_sigma = (1 - sigma) x0 + sigma eps`, so sigma is 1 for noise and 0 for an image, and the network predicts
`v = eps - x0`. `delta = sigma_next - sigma < 0`. Two predictions follow from v:

    x0_hat = x - sigma v            eps_hat = x + (1 - sigma) v

All arithmetic is in float32 or better. Every transition with noise_level 0 is the Euler step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.types import at_least_float32, broadcast_rows

Sigma = Float[Tensor, " B"] | Float[Tensor, ""] | float
State = Float[Tensor, "B *state"]
Column = Float[Tensor, "#B ..."]  # a number for each row, or one for all, broadcastable to the state
Std = Column
Step = tuple[State, Std]  # mean and std


@dataclass(frozen=True)
class Transition:
    """A row of `TRANSITIONS`.

    Attributes:
        step: (x, v, sigma, sigma_next, noise_level=, sigma_max=) -> mean and std.
        stochastic: it adds noise, so that it has a log-probability.
        noise_at_end: also the step to sigma 0 adds noise.
        max_noise_level: the largest that it is defined for.
        infinite_at_1: its noise is infinite at sigma = 1, so that a first step takes the schedule's second sigma.
        has_g: it is an Euler step of an SDE with a diffusion coefficient g.
    """

    step: Callable[..., Step]
    stochastic: bool = True
    noise_at_end: bool = False
    max_noise_level: float = math.inf
    infinite_at_1: bool = False
    has_g: bool = False


def transition(
    name: str,
    x: Float[Tensor, "B *state"],
    v: Float[Tensor, "B *state"],
    sigma: Sigma,
    sigma_next: Sigma,
    noise_level: float,
    sigma_max: Sigma | None = None,
) -> tuple[Float[Tensor, "B *state"], Std]:
    """Mean and std of x_next given x, by the transition of that name.

    Args:
        name: one of `TRANSITIONS`.
        x: state.
        v: velocity.
        sigma: noise level in [0, 1] before the step.
        sigma_next: noise level after it, below sigma.
        noise_level: how much noise a step adds, 0 (none, the ODE) upwards; at most 1 for `cps`.
        sigma_max: the schedule's second sigma. `flow_sde` needs it at sigma = 1, where its noise would be infinite.

    Raises:
        FlowGRPOError: an unknown name, a noise level out of range, or sigma = 1 without sigma_max for `flow_sde`.
    """
    if name not in TRANSITIONS:
        raise FlowGRPOError(f"unknown transition {name!r}; choose one of {', '.join(TRANSITIONS)}.")
    if not 0 <= noise_level <= TRANSITIONS[name].max_noise_level:
        largest = TRANSITIONS[name].max_noise_level
        at_most = f", at most {largest:g}" if largest < math.inf else ""
        raise FlowGRPOError(f"noise_level {noise_level} is out of range for {name}: it is 0 or more{at_most}.")
    x = at_least_float32(x)
    v = at_least_float32(v)
    sigmas = [torch.as_tensor(s, dtype=x.dtype) for s in (sigma, sigma_next, math.nan if sigma_max is None else sigma_max)]
    # checked before they are on a GPU
    if TRANSITIONS[name].infinite_at_1 and (sigmas[0] == 1).any() and sigmas[2].isnan().any():
        raise FlowGRPOError(f"{name} is infinite at sigma = 1: give sigma_max, the second sigma of the schedule.")
    to_gpu = x.device.type != "cpu"  # a copy to the CPU must be waited for
    sigma, sigma_next, sigma_max = (broadcast_rows(s, x).to(x.device, non_blocking=to_gpu) for s in sigmas)
    return TRANSITIONS[name].step(x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=sigma_max)


def ode(x: State, v: State, sigma: Column, sigma_next: Column, noise_level: float, sigma_max: Column) -> Step:
    """Euler's step of the deterministic flow."""
    return x + (sigma_next - sigma) * v, torch.zeros_like(sigma)


def flow_sde(x: State, v: State, sigma: Column, sigma_next: Column, noise_level: float, sigma_max: Column) -> Step:
    """Flow-GRPO, arXiv 2505.05470: Euler-Maruyama with g = noise_level sqrt(sigma / (1 - sigma)).

    Its samples have more noise than sigma_next, most with few steps; rewards then measure this noise.
    """
    g = noise_level * (sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))).sqrt()
    return _euler_maruyama(x, v, sigma, sigma_next, g)


def dance_sde(x: State, v: State, sigma: Column, sigma_next: Column, noise_level: float, sigma_max: Column) -> Step:
    """DanceGRPO, arXiv 2505.07818: the same with a constant g."""
    return _euler_maruyama(x, v, sigma, sigma_next, torch.full_like(sigma, noise_level))


def cps(x: State, v: State, sigma: Column, sigma_next: Column, noise_level: float, sigma_max: Column) -> Step:
    """Flow-CPS, arXiv 2509.05952: coefficients-preserving, so x_next has exactly the noise that sigma_next says.

    A step replaces the same share of the noise however short it is: with more steps, samples do not come closer to the data's
    distribution. See docs/methods.md.
    """
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    kept = (sigma_next**2 - std**2).clamp_min(0).sqrt()
    return (1 - sigma_next) * predict_x0(x, v, sigma) + kept * _eps_hat(x, v, sigma), std


def exact_sde(x: State, v: State, sigma: Column, sigma_next: Column, noise_level: float, sigma_max: Column) -> Step:
    """The exact counterpart of flow_sde (cf. arXiv 2605.23522): x0_hat frozen over the step, the rest is an OU process.

    As long as x0_hat is the same all the way, as for data of a single point, marginals are exact and, for a given noise_level, do not
    depend on the number of steps. Of other data, freezing it is an error, which vanishes with more steps.
    """
    rho = (sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))) ** (noise_level**2 / 2)
    mean = (1 - sigma_next) * predict_x0(x, v, sigma) + sigma_next * rho * _eps_hat(x, v, sigma)
    return mean, sigma_next * (1 - rho**2).clamp_min(0).sqrt()


TRANSITIONS: dict[str, Transition] = {
    "ode": Transition(ode, stochastic=False),
    "flow_sde": Transition(flow_sde, noise_at_end=True, infinite_at_1=True, has_g=True),
    "dance_sde": Transition(dance_sde, noise_at_end=True, has_g=True),
    "cps": Transition(cps, max_noise_level=1.0),
    "exact_sde": Transition(exact_sde),
}


def log_prob(x_next: Float[Tensor, "B *state"], mean: Float[Tensor, "B *state"], std: Std) -> Float[Tensor, " B"]:
    """Mean over the latent dimensions of log N(x_next; mean, std^2).

    The mean, not the sum: published clip ranges (1e-4 and below) are in that unit. std > 0.
    """
    x_next, mean, std = (at_least_float32(t) for t in (x_next, mean, std))
    density = -((x_next - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)


def kl(mean: Float[Tensor, "B *state"], mean_ref: Float[Tensor, "B *state"], std: Std) -> Float[Tensor, " B"]:
    """KL divergence of two Gaussians of the same std, mean over the latent dimensions.

    It is differentiated with respect to `mean`; `mean_ref` is fixed.
    """
    mean, mean_ref, std = (at_least_float32(t) for t in (mean, mean_ref, std))
    return ((mean - mean_ref) ** 2 / (2 * std**2)).flatten(1).mean(1)


def _euler_maruyama(x: State, v: State, sigma: Column, sigma_next: Column, g: Column) -> Step:
    delta = sigma_next - sigma
    drift = g**2 / (2 * sigma)
    mean = x * (1 + drift * delta) + v * (1 + drift * (1 - sigma)) * delta
    return mean, g * (-delta).sqrt()


def predict_x0(x: State, v: State, sigma: Column | float) -> State:
    """The image that a velocity predicts."""
    return x - sigma * v


def _eps_hat(x: State, v: State, sigma: Column) -> State:
    return x + (1 - sigma) * v
