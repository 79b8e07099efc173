"""Objectives: what an update minimises, one pure function each. Rows in, `Loss` per row out; the trainer averages.

On the per-step log-probabilities of a trajectory:
    grpo        PPO's clipped ratio, arXiv 2402.03300 and 2505.05470
    reinforce   the same without ratio and clip
    grpo_guard  a centred ratio of one scale at every step, arXiv 2510.22319
    dppo        a divergence mask in place of the clip, arXiv 2606.11025
On the final latents, noised afresh, for a noise level sigma and noise eps shared within a group:
    awm         Advantage Weighted Matching, arXiv 2509.25050
    nft         DiffusionNFT, arXiv 2509.16117
    sft         the best image of a group, or given ones, as targets, arXiv 2210.02747
    dpo         the best image of a group against the worst, or given pairs, arXiv 2311.12908
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flow_grpo import sde
from flow_grpo.types import Loss, NoisedImage, TrainedStep


def grpo(step: TrainedStep, advantage: Float[Tensor, " n"], clip_low: float, clip_high: float) -> Loss:
    """`-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)` with `rho = exp(log_prob - old_log_prob)`.

    Log-probabilities are means over the latent dimensions, so useful clip ranges are 1e-4 or below on
    large latents. DAPO's clip-higher (arXiv 2503.14476) is clip_high > clip_low.
    """
    return _clipped((step.log_prob - step.old_log_prob).exp(), advantage, clip_low, clip_high)


def reinforce(step: TrainedStep, advantage: Float[Tensor, " n"]) -> Loss:
    """`-A log_prob`: no ratio, no clip. Right for one update on a rollout."""
    ratio = (step.log_prob - step.old_log_prob).exp().detach()
    return Loss(-advantage * step.log_prob, _ratio_metrics(ratio))


def grpo_guard(step: TrainedStep, advantage: Float[Tensor, " n"], clip_low: float, clip_high: float) -> Loss:
    """GRPO-Guard, arXiv 2510.22319: grpo with a ratio that is centred and of one scale at every step.

    `rho = exp{[log_prob - old_log_prob + mean((mean - old_mean)^2) / (2 std^2)] std}`, which is the mean over the latent
    dimensions of noise times the move of the mean; the loss is divided by -delta, the length of the step. Clip ranges
    are in that unit: a 1/std times grpo's.
    """
    std = step.std.flatten(1)[:, 0]
    centred = step.log_prob - step.old_log_prob + sde.kl(step.mean, step.old_mean, step.std)
    loss = _clipped((centred * std).exp(), advantage, clip_low, clip_high)
    return Loss(loss.value / -step.delta, loss.metrics)


def dppo(step: TrainedStep, advantage: Float[Tensor, " n"], threshold: float) -> Loss:
    """DPPO, arXiv 2606.11025: `-A rho`, left out where the policy has moved enough and the update would push it further.

    Moved enough: the divergence `mean((mean - old_mean)^2) / (2 std^2)` is at least `threshold`; further: A > 0 and rho > 1,
    or A < 0 and rho < 1. The divergence is the Gaussians' own, so there is no clip on a ratio that noise alone can move.
    """
    ratio = (step.log_prob - step.old_log_prob).exp()
    divergence = sde.kl(step.mean, step.old_mean, step.std).detach()
    further = (advantage * (ratio.detach() - 1)) > 0
    masked = (divergence >= threshold) & further
    value = torch.where(masked, 0.0, -advantage * ratio)
    metrics = {"dppo/divergence": divergence, "dppo/masked": masked.float()}
    return Loss(value, {**_ratio_metrics(ratio.detach()), **metrics})


def awm(
    image: NoisedImage, advantage: Float[Tensor, " n"], clip_low: float, clip_high: float, loss_weight: str = "uniform"
) -> Loss:
    """Advantage Weighted Matching, arXiv 2509.25050: PPO's clip on `awm_log_prob` at one (sigma, eps)."""
    log_prob = awm_log_prob(image.error(image.v), image.sigma, loss_weight)
    before = awm_log_prob(image.error(image.v_rollout), image.sigma, loss_weight)
    return _clipped((log_prob - before).exp(), advantage, clip_low, clip_high)


def awm_log_prob(error: Float[Tensor, " n"], sigma: Float[Tensor, " n"], weight: str = "uniform") -> Float[Tensor, " n"]:
    """The forward process's stand-in for a log-probability: minus the weighted matching error at sigma.

    `uniform` is the error itself; `ghuber` is `(sigma / p) [(l + 1e-10)^p - 1e-10^p]` of that error l with p = 0.25.
    """
    if weight == "uniform":
        return -error
    if weight == "ghuber":
        p, floor = 0.25, 1e-10
        return -(sigma / p) * ((error + floor) ** p - floor**p)
    raise ValueError(f"unknown weight {weight!r} for awm; choose uniform or ghuber.")


def nft(image: NoisedImage, advantage: Float[Tensor, " n"], beta: float, advantage_max: float) -> Loss:
    """DiffusionNFT, arXiv 2509.16117: pull an implicit positive policy to good images and a negative one to bad ones.

    beta > 0 is how far the implicit policies lie from v_old.

        r = 1/2 + 1/2 clip(A / advantage_max, -1, 1)
        v+ = beta v + (1 - beta) v_old          v- = (1 + beta) v_old - beta v
        advantage_max / beta [r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w-],  w = stop_grad mean |x0_hat - x0|

    The loss is the published one. Runs of this package depart from the published code in these:
        - images are drawn by the trained adapter, not by its slow copy v_old, and by Euler or Heun, not by DPM-Solver;
        - the copy's decay is constant by default, not a ramp (`old_policy_decay`);
        - an image is noised to `draws` levels, one by default, drawn uniformly from `sigma_range`, not to nine of its rollout's ten;
        - eps and sigma are shared by the images of a group, and by all epochs, not drawn for each image;
        - the term 1e-4 |v - v_ref|^2 is there only if `kl_weight` says so.
    """
    assert image.v_old is not None
    v, v_old = image.v.float(), image.v_old.float()

    def distance(velocity: Tensor) -> Float[Tensor, " n"]:
        error = (image.x - image.column * velocity) - image.x0
        weight = error.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
        return error.square().flatten(1).mean(1) / weight

    positive = distance(beta * v + (1 - beta) * v_old)
    negative = distance((1 + beta) * v_old - beta * v)
    r = 0.5 + 0.5 * (advantage / advantage_max).clamp(-1, 1)
    value = advantage_max / beta * (r * positive + (1 - r) * negative)
    return Loss(value, {"nft/positive": positive.detach(), "nft/negative": negative.detach()})


def sft(image: NoisedImage) -> Loss:
    """Supervised fine-tuning, the flow-matching loss `mean (v - (eps - x0))^2` (arXiv 2210.02747) of images worth copying."""
    error = image.error(image.v)
    return Loss(error, {"sft/error": error.detach()})


def dpo(image: NoisedImage, beta: float) -> Loss:
    """Diffusion-DPO in flow form, arXiv 2311.12908: rows 2j and 2j + 1 are the better and the worse image of a pair.

        -log sigmoid(-beta [(e_better - e_ref_better) - (e_worse - e_ref_worse)])

    e is the mean squared error of the velocity, at the (sigma, eps) that a pair shares; the paper's T omega(lambda) is in
    beta. Both rows of a pair carry its loss, half each.
    """
    assert image.v_ref is not None
    gain = (image.error(image.v) - image.error(image.v_ref)).view(-1, 2)
    margin = -beta * (gain[:, 0] - gain[:, 1])
    value = -torch.nn.functional.logsigmoid(margin).repeat_interleave(2)
    right = (margin.detach() > 0).float().repeat_interleave(2)
    return Loss(value, {"dpo/margin": margin.detach().repeat_interleave(2), "dpo/accuracy": right})


def k3(log_prob: Float[Tensor, " n"], log_prob_ref: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """DeepSeekMath's estimator of the KL, `exp(d) - d - 1` with `d = log_prob_ref - log_prob`, arXiv 2402.03300."""
    d = log_prob_ref - log_prob
    return torch.expm1(d) - d  # d is small, and 1 would swallow it


def velocity_kl(v: Float[Tensor, "n *latent"], v_ref: Float[Tensor, "n *latent"]) -> Float[Tensor, " n"]:
    """Mean squared distance of two velocities: the KL of every noise level up to its weight."""
    return (v.float() - v_ref.float()).square().flatten(1).mean(1)


def _clipped(ratio: Float[Tensor, " n"], advantage: Float[Tensor, " n"], clip_low: float, clip_high: float) -> Loss:
    """PPO's pessimistic surrogate, arXiv 1707.06347."""
    value = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    clipped = {
        "clip_ratio/low_mean": ((ratio < 1 - clip_low) & (advantage < 0)).float(),
        "clip_ratio/high_mean": ((ratio > 1 + clip_high) & (advantage > 0)).float(),
    }
    return Loss(value, {**_ratio_metrics(ratio.detach()), **clipped})


def _ratio_metrics(ratio: Float[Tensor, " n"]) -> dict[str, Float[Tensor, " n"]]:
    return {"ratio/mean": ratio, "ratio/max_deviation": (ratio - 1).abs()}
