"""The gradient through a pipeline's decoder, against finite differences in float64."""

import pytest
import torch
from support.embedded import PROMPTS, tiny_policy
from support.families import TINY, awake

from flow_grpo import rewards
from flow_grpo.policy.policy import Policy

FAMILIES = ["sd3", "flux", "flux2", "qwen_image", "sana", "wan"]
CHECKPOINTED = {"sd3", "flux", "flux2"}  # diffusers has no gradient checkpointing for the VAEs of the others
STEP = 1e-6


@pytest.fixture(scope="module")
def built():
    """The policy of a family in float64, its states, and a gradient of its images; built when it is first asked for."""
    made = {}

    def build(name: str):
        if name not in made:
            made[name] = in_float64(name)
        return made[name]

    return build


def in_float64(name: str):
    torch.manual_seed(0)
    height, width = TINY[name].size
    pipe = awake(TINY[name].build()).to(torch.float64)
    if name in ("sana", "wan"):  # their states are float32, whatever the model's dtype is
        own = pipe.prepare_latents
        pipe.prepare_latents = lambda *args, **kwargs: own(*args, **kwargs).double()
    policy = Policy(pipe, height=height, width=width, **TINY[name].call)
    _, shape = policy.schedule(2)
    states = 0.5 * torch.randn(3, *shape, dtype=torch.float64)
    images = policy.decode_with_grad(states).detach()
    inside = (images > 1e-3) & (images < 1 - 1e-3)  # a value that a step clips has no derivative there
    assert inside.double().mean() > 0.5
    return policy, states, torch.randn(images.shape, dtype=torch.float64) * inside


@pytest.fixture
def all_float64(monkeypatch):
    """The VAEs of Qwen-Image, Wan and Sana go through float32, by these two."""
    to_float32, to = torch.Tensor.float, torch.Tensor.to

    def stays(x, *args):
        return x.dtype == torch.float64 and args in ((), (torch.float32,))

    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if stays(x) else to_float32(x))
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: x if a and stays(x, *a) else to(x, *a, **k))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_through_the_decoder_is_the_finite_difference(built, all_float64, name):
    policy, states, weights = built(name)
    seen = []

    def image_gradient(images, rows):
        assert not images.requires_grad
        seen.append(images)
        return weights[rows]

    gradient = policy.decode_vjp(states, image_gradient)
    assert gradient.shape == states.shape
    assert gradient.dtype == torch.float64
    images = torch.cat(seen)
    torch.testing.assert_close(policy.decode(states), images)
    direction = torch.randn(states.shape, dtype=torch.float64)
    ends = [(policy.decode_with_grad(states + sign * STEP * direction) * weights).flatten(1).sum(1) for sign in (1, -1)]
    slope = (gradient * direction).flatten(1).sum(1)
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * STEP), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", FAMILIES)
def test_slices_of_any_size_have_the_same_gradient(built, name):
    policy, states, weights = built(name)
    alone, all_at_once = (policy.decode_vjp(states, lambda _, rows: weights[rows], size) for size in (1, 3))
    torch.testing.assert_close(alone, all_at_once, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["flux", "sana"])
def test_the_decoder_is_checkpointed_gets_no_gradient_and_is_left_as_it_was(built, name):
    policy, states, weights = built(name)
    vae, calls, frozen = policy.pipe.vae, [], []
    next(vae.decoder.parameters()).requires_grad_(False)
    before = [weight.requires_grad for weight in vae.parameters()]
    with_inputs = vae.decoder.up_blocks[-1].register_forward_pre_hook(lambda *_: calls.append(1))
    policy.decode_vjp(states, lambda _, rows: frozen.append({w.requires_grad for w in vae.parameters()}) or weights[rows])
    with_inputs.remove()
    assert len(calls) == (6 if name in CHECKPOINTED else 3)
    assert frozen == [{False}] * 3
    assert [weight.requires_grad for weight in vae.parameters()] == before
    assert not vae.is_gradient_checkpointing
    assert all(weight.grad is None for part in policy.pipe.components.values() if isinstance(part, torch.nn.Module)
               for weight in part.parameters())  # fmt: skip


def test_a_gradient_beyond_white_is_zero(built):
    policy, states, _ = built("flux")
    last, seen = policy.pipe.vae.decoder.conv_out, []
    last.weight.data *= 1e3  # the norm before it bounds what it gets

    def of_clipped_values(images, rows):
        seen.append((images == 0) | (images == 1))
        return seen[-1].double()

    gradient = policy.decode_vjp(states, of_clipped_values)
    last.weight.data /= 1e3
    assert torch.cat(seen).double().mean() > 0.5
    assert not gradient.any()


def test_a_pipeline_that_returns_no_tensor_is_refused(built, monkeypatch):
    policy, states, weights = built("flux")
    monkeypatch.setattr("flow_grpo.policy.pipeline.images_to_tensor", lambda images: images.detach())
    with pytest.raises(ValueError, match=r"FluxPipeline returns images without a gradient: .* such as grpo\."):
        policy.decode_vjp(states, lambda _, rows: weights[rows])


def test_the_gradient_of_a_reward_goes_back_to_the_states_that_it_scores():
    policy, clip = tiny_policy(), rewards.load("clip", device="cpu")
    total, (_, shape) = rewards.WeightedSum({"clip": clip}, {"clip": 2.0}), policy.schedule(2)
    states, values = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)), torch.zeros(2)

    def image_gradient(images, rows):
        result = total.gradients(images, [PROMPTS[row] for row in rows])["clip"]
        values[rows] = result.value
        return 2 * result.gradient

    gradient = policy.decode_vjp(states, image_gradient)
    leaf = states.clone().requires_grad_()
    scores = clip(policy.decode_with_grad(leaf), PROMPTS)
    torch.testing.assert_close(values, scores.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(2 * scores.sum(), leaf)[0], rtol=1e-3, atol=1e-6)
    step = 0.5 * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    assert (clip(policy.decode(states + step), PROMPTS) > clip(policy.decode(states), PROMPTS)).all()
