"""Objectives: what an update minimises, one pure function each. Rows in, `Loss` per row out; the trainer averages.

On the per-step log-probabilities of a trajectory:
    grpo        PPO's clipped ratio, arXiv 2402.03300 and 2505.05470
    reinforce   the same without ratio and clip
    grpo_guard  a centred ratio of one scale at every step, arXiv 2510.22319
    dppo        a divergence mask in place of the clip, arXiv 2606.11025
On the final latents, noised afresh, for a noise level sigma and noise eps shared within a group by default:
    awm         Advantage Weighted Matching, arXiv 2509.25050
    pepg        the policy gradient of an adaptively weighted matching loss with a proximal term, arXiv 2602.04663
    nft         DiffusionNFT, arXiv 2509.16117
    crd         Centered Reward Distillation, arXiv 2603.14128
    dgpo        Direct Group Preference Optimization, arXiv 2510.08425
    sft         the best image of a group, or given ones, as targets, arXiv 2210.02747
    dpo         the best image of a group against the worst, or given pairs, arXiv 2311.12908
    distill     nothing but the distance to teachers, arXiv 2605.08063
By the gradient of differentiable rewards at the end of a rollout:
    reward_gradient  the linear loss of refl, draft and flowbp, arXiv 2606.11075
    mend             the distance to images that were moved along the gradient, arXiv 2610.05954
    opsd             nft towards such an image and away from one that was moved against it, arXiv 2608.24646
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flow_grpo import sde
from flow_grpo.errors import FlowGRPOError
from flow_grpo.types import RATIO_DEVIATION, GradientState, Loss, NoisedImage, TrainedStep, at_least_float32, self_weighted


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
    are in that unit: std times grpo's.
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
    image: NoisedImage,
    advantage: Float[Tensor, " n"],
    clip_low: float,
    clip_high: float,
    loss_weight: str = "uniform",
    sum_over_latents: bool = False,
) -> Loss:
    """Advantage Weighted Matching, arXiv 2509.25050: PPO's clip on `forward_log_prob` at one (sigma, eps)."""
    log_prob = forward_log_prob(image, image.v, loss_weight, sum_over_latents)
    old_log_prob = forward_log_prob(image, image.v_rollout, loss_weight, sum_over_latents)
    return _clipped((log_prob - old_log_prob).exp(), advantage, clip_low, clip_high)


def forward_log_prob(
    image: NoisedImage, v: Float[Tensor, "n *latent"], weight: str, sum_over_latents: bool = False
) -> Float[Tensor, " n"]:
    """The forward process's stand-in for a velocity's log-probability: minus its weighted matching error at (sigma, eps).

    e is the velocity's error, and l = mean(e^2). `uniform` is -l; `ghuber` is `-(sigma / p) [(l + 1e-10)^p - 1e-10^p]` with p = 0.25;
    `adaptive`, of arXiv 2602.04663, is `-sigma l / stop_grad mean|e|`; that the divisor is at least 1e-5 is an assumption, as in nft and
    crd.

    Args:
        sum_over_latents: sum, not mean, over the latent elements, as arXiv 2602.04663 has it.
    """
    unit = image.x0[0].numel() if sum_over_latents else 1
    if weight == "adaptive":
        return -image.sigma * image.adaptive_error(v) * unit
    if weight == "uniform":
        return -image.error(v) * unit
    if weight == "ghuber":
        p, floor = 0.25, 1e-10
        return -(image.sigma / p) * ((image.error(v) + floor) ** p - floor**p) * unit
    raise FlowGRPOError(f"unknown weight {weight!r} for awm; choose uniform, ghuber or adaptive.")


def pepg(image: NoisedImage, advantage: Float[Tensor, " n"], sum_over_latents: bool = False) -> Loss:
    """Proximal Exact Policy Gradient, arXiv 2602.04663: `-(A - log rho) rho l`.

    l is the adaptive `forward_log_prob` and `rho = exp(l - l_rollout)`.

    rho and log rho have no gradient, so the gradient is that of `-A rho + rho log rho - rho`: the policy gradient (the paper's `epg`)
    with the KL to the policy that sampled the images. The paper's `par` has the same gradient. Published with A the reward minus the
    group's mean (advantage dr_grpo), guidance off, a KL on the velocity, and noise levels drawn uniformly.
    """
    log_prob, log_prob_rollout = (
        forward_log_prob(image, v, "adaptive", sum_over_latents) for v in (image.v, image.v_rollout)
    )
    log_ratio = (log_prob - log_prob_rollout).detach()
    return Loss(-(advantage - log_ratio) * log_ratio.exp() * log_prob, _ratio_metrics(log_ratio.exp()))


def nft(image: NoisedImage, advantage: Float[Tensor, " n"], beta: float, advantage_max: float) -> Loss:
    """DiffusionNFT, arXiv 2509.16117: pull an implicit positive policy to good images and a negative one to bad ones.

    beta > 0 is how far the implicit policies lie from v_old.

        r = 1/2 + 1/2 clip(A / advantage_max, -1, 1)
        v+ = beta v + (1 - beta) v_old          v- = (1 + beta) v_old - beta v
        advantage_max / beta [r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w-],  w = stop_grad mean |x0_hat - x0|

    The loss is the published one. Runs of this package depart from the published code in these, unless the settings say otherwise:
        - images are sampled by the trained adapter, not by its slow copy v_old (`rollout_policy: old`), and by Euler (`sampling.solver`);
        - the copy's decay is constant, not a ramp (`old_policy_decay`);
        - an image is noised to one level, drawn uniformly from `sigma_range`, not to nine of its rollout's ten (`num_noise_levels`,
          `sigma_distribution`);
        - eps and sigma are shared by the images of a group (`shared_noise`), and by all epochs, not drawn for each image;
        - the term 1e-4 |v - v_ref|^2 is there only if `kl_weight` says so.
    """
    assert image.v_old is not None
    v, v_old = at_least_float32(image.v), at_least_float32(image.v_old)

    def distance(velocity: Tensor) -> Float[Tensor, " n"]:
        return self_weighted((image.x - image.column * velocity) - image.x0)

    positive = distance(beta * v + (1 - beta) * v_old)
    negative = distance((1 + beta) * v_old - beta * v)
    r = 0.5 + 0.5 * (advantage / advantage_max).clamp(-1, 1)
    value = advantage_max / beta * (r * positive + (1 - r) * negative)
    return Loss(value, {"nft/positive": positive.detach(), "nft/negative": negative.detach()})


def crd(image: NoisedImage, advantage: Float[Tensor, " n"], beta: float, advantage_max: float) -> Loss:
    """Centered Reward Distillation, arXiv 2603.14128: the implicit reward r is regressed on the advantage, both less the group's mean.

        r = -(mean(e^2) / w - mean(e_old^2) / w_old),  e = v - (eps - x0),  w = stop_grad mean|e|, at least 1e-5
        Z = 1/2 + 1/2 clip(A / advantage_max, -1, 1)
        advantage_max / beta (beta (r - stop_grad mean r) - (Z - mean Z))^2

    The group's means are in `image.group_mean`, the mean of `crd_residual`. Where all policies are the old one, r = 0 and the gradient is
    that of `-2 advantage_max (Z - mean Z) r`. Runs of this package depart from the published ones in these:
        - the images' sampler is the trained adapter, as it is for the first 75 steps there, not a second moving average;
        - the KL to the guided base model, weighted by Z, is no part of this function;
        - noise and noise levels as in `nft`.
    """
    assert image.group_mean is not None
    residual = crd_residual(image, advantage, beta, advantage_max)
    metrics = {"crd/reward": _implicit_reward(image).detach(), "crd/residual": (residual.detach() - image.group_mean).abs()}
    return Loss(advantage_max / beta * (residual - image.group_mean).square(), metrics)


def crd_residual(
    image: NoisedImage, advantage: Float[Tensor, " n"], beta: float, advantage_max: float
) -> Float[Tensor, " n"]:
    """`beta r - Z`, what crd centres in a group and then squares."""
    return beta * _implicit_reward(image) - (0.5 + 0.5 * (advantage / advantage_max).clamp(-1, 1))


def _implicit_reward(image: NoisedImage) -> Float[Tensor, " n"]:
    """How much smaller the adaptive error is than the old policy's."""
    assert image.v_old is not None
    return image.adaptive_error(image.v_old) - image.adaptive_error(image.v)


def dgpo(image: NoisedImage, advantage: Float[Tensor, " n"]) -> Loss:
    """Direct Group Preference Optimization, arXiv 2510.08425: `sigmoid(mean over the group of beta A (e - e_ref)) A e`.

    e is the mean squared error of the velocity, and the sigmoid has no gradient. Its argument is 0 at the base model and falls as the
    group's good images gain on it and the bad ones lose, so that a group that is learned weighs less. It is `image.group_mean`, the
    mean of `dgpo_preference`; the mean and the sign are the published code's, the paper has a sum. The gradient of beta -> 0 is half that
    of `A e`. The published code also leaves out rows whose ratio to a moving average of the policy is too far on the side to which A
    pushes; the width of that clip, whether it is on, and from which step the average samples the images differ by its configs, and without
    guidance in training its reference is the guided base model. Here all rows count, the trained policy samples the images, and the
    reference is the base model as it is called. Its beta is 100.
    """
    assert image.group_mean is not None
    weight, error = image.group_mean.sigmoid(), image.error(image.v)
    return Loss(weight * advantage * error, {"dgpo/weight": weight, "dgpo/error": error.detach()})


def dgpo_preference(image: NoisedImage, advantage: Float[Tensor, " n"], beta: float) -> Float[Tensor, " n"]:
    """`beta A (e - e_ref)`, whose mean over a group decides its weight in dgpo."""
    assert image.v_ref is not None
    return beta * advantage * (image.error(image.v) - image.error(image.v_ref))


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
    correct = (margin.detach() > 0).float().repeat_interleave(2)
    return Loss(value, {"dpo/margin": margin.detach().repeat_interleave(2), "dpo/accuracy": correct})


def k3(log_prob: Float[Tensor, " n"], log_prob_ref: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """DeepSeekMath's estimator of the KL, `exp(d) - d - 1` with `d = log_prob_ref - log_prob`, arXiv 2402.03300."""
    d = log_prob_ref - log_prob
    return torch.expm1(d) - d  # d is small, and 1 would swallow it


def velocity_kl(v: Float[Tensor, "n *latent"], v_ref: Float[Tensor, "n *latent"]) -> Float[Tensor, " n"]:
    """Mean squared distance of two velocities: the KL of every noise level up to its weight."""
    return (at_least_float32(v) - at_least_float32(v_ref)).square().flatten(1).mean(1)


def distill(image: NoisedImage) -> Loss:
    """0, with a graph: what is minimised is the distance to the teachers, which are anchors."""
    return Loss(0 * image.v.flatten(1).mean(1))


def reward_gradient(state: GradientState) -> Loss:
    """`-d mean(G v)`: G is the gradient of the rewards at the endpoint, d the derivative of the endpoint by the velocity v.

    FlowBP, arXiv 2606.11075, composes the endpoint of detached velocities, but for the trained ones, in which it is linear. So this loss
    has the gradient of backpropagation through composition, decoder and rewards, up to the number of elements, of which it takes the
    mean; no graph joins the transformer, the decoder and the rewards.
    """
    assert state.gradient is not None
    return Loss(-state.factor * (state.gradient * state.v).flatten(1).mean(1))


def mend(state: GradientState, weight: Float[Tensor, " n"]) -> Loss:
    """`weight sigma^2 mean((v - target)^2)`: the squared distance of the predicted image to the moved one, MEND, arXiv 2610.05954.

    The predicted image is x - sigma v, and the target the velocity that leads from the same state to the moved image, which counts a
    rollout's image that stays too.
    """
    assert state.target is not None
    return Loss(weight * (state.factor * (state.v - state.target)).square().flatten(1).mean(1))


def opsd(state: GradientState, advantage: Float[Tensor, " n"]) -> Loss:
    """DiffusionOPSD, arXiv 2608.24646: `nft` at a late state z, with images y+ and y- moved along and against the gradient as targets.

    r = 1/2 + 1/2 clip(A / 5, -1, 1),  v+ = v,  v- = 2 v_old - v
    5 [r |z - sigma v+ - y+|^2 / w+ + (1 - r) |z - sigma v- - y-|^2 / w-],  w = stop_grad mean|z - sigma v - y|
    """
    assert state.target is not None
    assert state.away is not None
    assert state.v_old is not None
    v, v_old = at_least_float32(state.v), at_least_float32(state.v_old)
    positive = self_weighted(state.factor * (v - state.target))
    negative = self_weighted(state.factor * (2 * v_old - v - state.away))
    r = 0.5 + 0.5 * (advantage / 5).clamp(-1, 1)
    value = 5 * (r * positive + (1 - r) * negative)
    return Loss(value, {"opsd/positive": positive.detach(), "opsd/negative": negative.detach()})


def _clipped(ratio: Float[Tensor, " n"], advantage: Float[Tensor, " n"], clip_low: float, clip_high: float) -> Loss:
    """PPO's pessimistic surrogate, arXiv 1707.06347."""
    value = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    moved = ratio.detach()
    metrics = {
        "ratio/mean": moved,
        RATIO_DEVIATION: (moved - 1).abs(),
        "clip_ratio/low_mean": ((ratio < 1 - clip_low) & (advantage < 0)).float(),
        "clip_ratio/high_mean": ((ratio > 1 + clip_high) & (advantage > 0)).float(),
    }
    return Loss(value, metrics)


def _ratio_metrics(ratio: Float[Tensor, " n"]) -> dict[str, Float[Tensor, " n"]]:
    return {"ratio/mean": ratio, RATIO_DEVIATION: (ratio - 1).abs()}
