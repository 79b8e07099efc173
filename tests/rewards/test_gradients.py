"""Gradients of rewards: their values, what is refused, and the closed forms of the smoothed gradient and of S1."""

import math

import pytest
import torch

from flow_grpo import rewards
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.gradients import RHO, ValueAndGradient, against, energy_share, smoothed
from flow_grpo.rewards.serving.client import Remote
from flow_grpo.rewards.serving.subprocess import Isolated

IMAGES = torch.rand(3, 3, 4, 5, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "b", "c"]


def redness(images, prompts):
    """The mean of the squared red values, so that the gradient is 2 / 20 of them."""
    return images[:, 0].square().mean((1, 2))


def in_place(images, prompts, factor):
    images.mul_(2).sub_(1)
    prompts.sort()
    return (images.mean((1, 2, 3)) * torch.tensor(factor), {"details": 1})


def plain(images, prompts):
    return images.mean((1, 2, 3))


def differentiable(function, scope="image"):
    """The function under the same name with the attribute."""

    def reward(*inputs, **metadata):
        return function(*inputs, **metadata)

    reward.__signature__ = rewards.scopes.signature(function)
    reward.differentiable, reward.scope = True, scope
    return reward


def total(weights=None, drop=(), **by_name) -> WeightedSum:
    return WeightedSum(by_name, {**dict.fromkeys(by_name, 1.0), **(weights or {})}, drop)


def test_each_trained_reward_has_its_value_and_its_gradient():
    both = total({"measured": 0.0}, redness=differentiable(redness), in_place=differentiable(in_place), measured=plain)
    images, prompts, factor = IMAGES.clone(), list(PROMPTS), [1.0, 2.0, 3.0]
    result = both.gradients(images, prompts, factor=factor)
    assert list(result) == ["redness", "in_place"], "a reward of weight 0 needs no gradient and is not called"
    value, gradient, fall = result["redness"]
    torch.testing.assert_close(value, redness(IMAGES, PROMPTS))
    torch.testing.assert_close(gradient[:, 0], IMAGES[:, 0] / 10)
    assert not gradient[:, 1:].any()
    assert fall is None
    expected = torch.tensor(factor) * 2 / 60
    torch.testing.assert_close(result["in_place"].gradient, expected.view(3, 1, 1, 1).expand_as(IMAGES))
    assert torch.equal(images, IMAGES)
    assert prompts == PROMPTS
    assert not any(part.requires_grad for part in (value, gradient))
    _, scored = both(IMAGES, PROMPTS, factor=factor)
    assert torch.equal(scored["redness"], value)


def test_no_grad_around_it_and_graphs_within_it_change_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    one = total(r=differentiable(lambda images, prompts: redness(images, prompts) * weight))
    expected = one.gradients(IMAGES, PROMPTS)["r"].gradient
    with torch.no_grad():
        assert torch.equal(one.gradients(IMAGES, PROMPTS)["r"].gradient, expected)
        assert not torch.is_grad_enabled()
    assert weight.grad is None, "a parameter of the reward gets none"


def test_frames_of_a_video_share_the_gradient():
    videos = torch.rand(2, 6, 3, 4, 5)
    reward = differentiable(plain)
    reward.frames = 2
    gradient = total(r=reward).gradients(videos, PROMPTS[:2])["r"].gradient
    assert torch.equal(gradient.any(4).any(3).any(2), torch.tensor([[True] + [False] * 4 + [True]] * 2))
    torch.testing.assert_close(gradient[:, 0], torch.full((2, 3, 4, 5), 1 / 120))


def test_a_prompt_whose_set_does_not_name_a_reward_has_gradient_zero():
    chosen = total(redness=differentiable(redness), plain=differentiable(plain), other=differentiable(plain))
    own_rewards = [["redness"], ["plain"], ["redness", "plain"]]
    result = chosen.gradients(IMAGES, PROMPTS, RHO, rewards=[dict.fromkeys(own) for own in own_rewards])
    assert result["redness"].value.isnan().tolist() == [False, True, False]
    assert result["redness"].gradient.flatten(1).any(1).tolist() == [True, False, True]
    assert result["plain"].fall.isnan().tolist() == [True, False, False]
    assert result["other"].value.isnan().all()
    assert not result["other"].gradient.any()


def first_is_nan(images, prompts):
    return (images - images[0]).mean((1, 2, 3)).log()


def fails(images, prompts):
    raise RuntimeError("the camera is off")


def backward_fails(images, prompts):
    images.register_hook(lambda gradient: 1 / 0)
    return plain(images, prompts)


def of_numpy(images, prompts):
    return images.numpy().mean((1, 2, 3))


def steep(images, prompts):
    return (images - images).square().sum((1, 2, 3)).sqrt()


@pytest.mark.parametrize("rho", [0.0, 0.01])
@pytest.mark.parametrize(
    ("reward", "words", "lost"),
    [
        (first_is_nan, "returned (nan|-inf) for the prompt 'a'", [True, False, False]),
        (fails, "raised RuntimeError .*the camera is off", [True] * 3),
        (backward_fails, "raised ZeroDivisionError in its backward pass", [True] * 3),
        (of_numpy, "without NumPy and PIL", [True] * 3),
        (steep, "a gradient that is not finite for the prompt 'a'", [True] * 3),
    ],
)
def test_a_failed_reward_raises_or_has_gradient_zero_and_says_so(reward, words, lost, rho):
    ordered = IMAGES + torch.arange(3).view(3, 1, 1, 1)
    with pytest.raises(ValueError, match=f"reward r .*{words}|reward r {words}"):
        total(r=differentiable(reward)).gradients(ordered, PROMPTS, rho)
    dropping = total(r=differentiable(reward), drop=["r"])
    value, gradient, _ = dropping.gradients(ordered, PROMPTS, rho)["r"]
    assert value.isnan().tolist() == lost
    assert gradient.isfinite().all()
    assert gradient.flatten(1).any(1).tolist() == [not one for one in lost]
    (message,) = dropping.drop_messages
    assert message.startswith("reward r ")


def group_of_images(images, prompts):
    return images.mean((1, 2, 3))


group_of_images.scope = "group"


def detached(images, prompts):
    return images.detach().mean((1, 2, 3))


def in_list(images, prompts):
    return [image.mean() for image in images]


def of_parameters(images, prompts):
    return torch.nn.Parameter(torch.ones(3)) * 2


@rewards.takes_pil
def of_pil(images, prompts):
    return torch.tensor([float(image.width) for image in images], requires_grad=True)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (plain, "has no gradient: take a differentiable one, such as clip"),
        *((object.__new__(kind), "runs in another process.* leave remote and isolate out") for kind in (Remote, Isolated)),
        (group_of_images, "compares images of a group"),
        (differentiable(plain, scope="group"), "compares images of a group.*: take such a reward"),
        *(
            (differentiable(f), "has the attribute .*without a gradient of the images")
            for f in (detached, in_list, of_parameters, of_pil)
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_a_reward_without_a_gradient_is_refused_and_never_dropped(reward, words):
    with pytest.raises(ValueError, match=f"^reward mine {words}"):
        total(mine=reward, drop=["mine"]).gradients(IMAGES, PROMPTS)


def test_options_and_settings_keep_the_attribute():
    redness.differentiable = True
    try:
        with_options = rewards.loading._with_options(redness, {"factor": 1})
        framed = rewards.loading.Framed(redness, 2)
        assert with_options.differentiable
        assert framed.differentiable
    finally:
        del redness.differentiable


# -- smoothing ------------------------------------------------------------------------------------------------------------


def test_the_smoothed_gradient_of_a_quadratic_is_its_closed_form():
    """r = b x - x A x / 2 has g = b - A x; at x - rho g/|g| it is g + rho A g/|g|, and r falls by rho |g| + rho^2 g A g / (2 |g|^2)."""
    random = torch.Generator().manual_seed(1)
    b, root, x = (torch.randn(*size, generator=random, dtype=torch.float64) for size in ((12,), (12, 12), (4, 3, 2, 2)))
    a = root @ root.T

    def at(images):
        flat = images.flatten(1)
        return ValueAndGradient(flat @ b - (flat @ a * flat).sum(1) / 2, (b - flat @ a).view_as(images))

    value, gradient, _ = at(x)
    for rho in (RHO, 0.5):
        result = smoothed(at, x, rho)
        unit = gradient.flatten(1) / gradient.flatten(1).norm(dim=1, keepdim=True)
        torch.testing.assert_close(result.value, value)
        torch.testing.assert_close(result.gradient.flatten(1), gradient.flatten(1) + rho * unit @ a)
        expected = rho * gradient.flatten(1).norm(dim=1) + rho**2 / 2 * (unit @ a * unit).sum(1)
        torch.testing.assert_close(result.fall, expected)
        penalty = smoothed(at, x, -rho)  # what is maximised is -r
        torch.testing.assert_close(penalty.gradient.flatten(1), gradient.flatten(1) - rho * unit @ a)
        torch.testing.assert_close(penalty.fall, at(x + rho * unit.view_as(x)).value - value)
        each = smoothed(at, x, torch.tensor([rho, -rho, rho, -rho]))
        torch.testing.assert_close(each.gradient[::2], result.gradient[::2])
        torch.testing.assert_close(each.fall[1::2], penalty.fall[1::2])
    assert not against(torch.zeros(2, 3, 4, 4)).any(), "where there is no gradient, there is no step"


def test_a_weighted_sum_smooths_each_reward_by_its_own_gradient():
    both = total(redness=differentiable(redness), plain=differentiable(plain))
    result = both.gradients(IMAGES, PROMPTS, 0.1)
    red = IMAGES[:, 0]
    norm = red.flatten(1).norm(dim=1)
    torch.testing.assert_close(result["redness"].gradient[:, 0], (red - 0.1 * red / norm.view(3, 1, 1)) / 10)
    torch.testing.assert_close(result["redness"].value, redness(IMAGES, PROMPTS))
    torch.testing.assert_close(result["plain"].fall, torch.full((3,), 0.1 / math.sqrt(60)))


@pytest.mark.parametrize("by_sets", [False, True])
def test_a_penalty_is_smoothed_at_its_largest_value_near_by(by_sets):
    """What is maximised is the negative: its lowest point lies along the gradient of the penalty."""
    both = rewards.WeightedSum({"redness": differentiable(redness)}, {"redness": 2.0 if by_sets else -2.0})
    columns = {"rewards": [{"redness": -2.0}] * 3} if by_sets else {}
    result = both.gradients(IMAGES, PROMPTS, 0.1, **columns)["redness"]
    red = IMAGES[:, 0]
    unit = red / red.flatten(1).norm(dim=1).view(3, 1, 1)
    torch.testing.assert_close(result.gradient[:, 0], (red + 0.1 * unit) / 10)
    assert (result.fall > 0).all()


def test_energy_is_the_share_of_the_strongest_positions():
    flat = torch.ones(1, 3, 20, 10)
    peak = torch.full((1, 3, 20, 10), 1e-3)
    peak[0, 1, 4, 4] = 10
    torch.testing.assert_close(energy_share(flat), torch.tensor([0.01]))
    assert energy_share(peak).item() > 0.99
    assert energy_share(torch.cat([flat, peak]), 0.5)[0].item() == pytest.approx(0.5)
    assert energy_share(torch.zeros(1, 3, 8, 8)).isnan().all()
