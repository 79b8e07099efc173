"""Gradients of rewards with respect to the image.

A reward offers them by its attribute `differentiable = True`. Its call then gets images (B, 3, H, W) in [0, 1] that require a gradient,
and returns a tensor (B,) with a graph. `WeightedSum.gradients` has those of several rewards.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.calls import MAX_PROMPT_LENGTH, Reward, call_reward
from flow_grpo.rewards.scopes import IMAGE, scope_of
from flow_grpo.rewards.user_code import guarded

RHO = 1e-2  # the best of .1, .01 and .001 in RSA-FT


class NoGradient(FlowGRPOError):
    """A reward has no gradient, whatever it is called with."""


class ValueAndGradient(NamedTuple):
    """The values of a reward for B images, and its gradients.

    Attributes:
        value: (B,) float32 on the CPU.
        gradient: of each value with respect to its image, of the images' shape, dtype and device.
        fall: (B,), how much the maximised value falls on the step of `against`; its mean is S1. None if not asked for.
    """

    value: Tensor
    gradient: Tensor
    fall: Tensor | None = None


def without_gradient(images: Tensor, rho: float | Tensor) -> ValueAndGradient:
    """Of B images without a value: values NaN, gradients 0."""
    missing = torch.full((len(images),), math.nan)
    return ValueAndGradient(missing, torch.zeros_like(images), missing.clone() if torch.as_tensor(rho).any() else None)


def value_and_gradient(
    name: str, reward: Reward, images: Tensor, prompts: list[str], metadata: dict[str, Any], rho: float | Tensor = 0.0
) -> ValueAndGradient:
    """The values of a differentiable reward and their gradients, by one call and one backward pass; values may be NaN, as in `call_reward`.

    Args:
        images: (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1].
        rho: if it is not 0, the gradient is that of the flattened reward (`gradients.smoothed`), by two calls and backward passes.

    Raises:
        FlowGRPOError: the reward raised, offers no gradient (NoGradient), or has one that is not finite where its value is.
    """
    check_differentiable(name, reward)

    def at(images: Tensor) -> ValueAndGradient:
        leaf = images.detach().clone().requires_grad_()
        with torch.enable_grad():
            values = call_reward(name, reward, leaf, prompts, metadata, graph=True)
        gradient = gradient_of(name, values, leaf)
        broken = (~gradient.flatten(1).isfinite().all(1)).nonzero()
        if len(broken):  # here, since a step along it would make images that no reward has a value for
            prompt = prompts[int(broken[0])][:MAX_PROMPT_LENGTH]
            raise FlowGRPOError(f"reward {name} has a gradient that is not finite for the prompt {prompt!r}.")
        return ValueAndGradient(values.detach(), gradient)

    return smoothed(at, images, rho) if torch.as_tensor(rho).any() else at(images)


def check_differentiable(name: str, reward: Any) -> None:
    """Raise NoGradient, a FlowGRPOError, if a reward offers no gradient. The message says what to use instead."""
    if getattr(reward, "elsewhere", False):
        raise NoGradient(
            f"reward {name} runs in another process, which returns values without gradients: leave remote and isolate out, so that it "
            "runs in this process, or give it weight 0, so that it is only measured."
        )
    if scope_of(reward) != IMAGE:
        raise NoGradient(
            f"reward {name} compares images of a group, and gradients are of rewards that see one image: take such a reward, or train by "
            "an objective that needs values only, such as grpo."
        )
    if not getattr(reward, "differentiable", False):
        raise NoGradient(
            f"reward {name} has no gradient: take a differentiable one, such as clip, pickscore or hpsv2, set `differentiable = True` "
            "on one of your own that torch computes from the images, or train by an objective that needs values only, such as grpo."
        )


def gradient_of(name: str, values: Tensor, images: Tensor) -> Tensor:
    """The gradient of each value (B,) of a reward with respect to its image, 0 where the value is not finite.

    A value is taken to depend on its own image only.

    Args:
        images: the leaf (B, ...) that the values were computed from.

    Raises:
        NoGradient: the values have no graph that leads to the images.
        FlowGRPOError: the backward pass failed.
    """
    finite, gradient = values.isfinite(), None
    if values.requires_grad:
        with guarded(f"reward {name}", lambda error: f"reward {name} raised {error} in its backward pass"):
            (gradient,) = torch.autograd.grad(values, images, finite.to(values), allow_unused=True)
    if gradient is None:
        raise NoGradient(
            f"reward {name} has the attribute differentiable = True, but returned values without a gradient of the images: return one "
            "tensor that torch computes from them, without .detach(), .item(), NumPy or PIL, or take the attribute away."
        )
    return gradient.where(_per_image(finite.to(gradient.device), gradient), 0)


def against(gradient: Tensor, rho: float | Tensor = RHO) -> Tensor:
    """The step of length |rho| against the gradient (B, ...) of each image: -rho g / |g|, 0 where g is 0; along it for a rho below 0."""
    norm = _per_image(gradient.flatten(1).norm(dim=1), gradient)
    of_image = _per_image(rho.to(gradient), gradient) if isinstance(rho, Tensor) else rho
    return -of_image * gradient / norm.clamp(min=torch.finfo(gradient.dtype).tiny)


def smoothed(at: Callable[[Tensor], ValueAndGradient], images: Tensor, rho: float | Tensor = RHO) -> ValueAndGradient:
    """The gradient of a flattened reward, and how sharp the reward is: RSA-FT's smoothing in image space (arXiv 2603.21175).

    The flattened reward is the lowest one within a distance `rho`, by one step: r(x + d), d = -rho g / |g|, g the gradient at x (eq. 15).
    Its gradient is that at x + d, since d counts as a constant. The mean of `fall` is the sharpness S1 = mean[r(x) - r(x + d)] (eq. 10);
    the paper measured a correlation of -.80 with PickScore over models that DRaFT trained on HPSv2.

    Assumed, since no code was published: |g| is the Euclidean norm over one image whose values are in [0, 1], and x + d is not clipped.

    Args:
        at: the values and gradients at images (B, ...). It is called twice.
        rho: of all images or of each, (B,); below 0 for a reward whose weight is, of which r is the negative.
    """
    here = at(images)
    moved = at(images + against(here.gradient, rho))
    value = here.value.where(moved.value.isfinite(), torch.nan)
    return ValueAndGradient(value, moved.gradient, (value - moved.value) * torch.as_tensor(rho).sign().to(value))


def energy_share(gradient: Tensor, share: float = 0.01) -> Tensor:
    """The part (B,) of the squared gradient (B, C, ...) that lies in the `share` of positions with most of it; NaN where it is 0.

    It is `share` for a gradient that is as large everywhere, and 1 for one in a few positions. At least one position counts.
    """
    energy = gradient.square().sum(1).flatten(1)
    most = energy.topk(max(1, round(share * energy.shape[1])), dim=1).values
    return most.sum(1) / energy.sum(1)


def _per_image(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))
