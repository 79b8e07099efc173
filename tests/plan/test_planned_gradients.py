"""What a plan says of objectives by reward gradients: the decoder's backward pass, in bytes and in decoded images."""

from collections import Counter

import pytest
import support.small_policy as small
import torch
from support.embedded import tiny_policy

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.objective import OBJECTIVES
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.trace import REWARD_GRADIENT, LiveBytesCounter
from flow_grpo.trainer import FlowGRPOTrainer

BY_GRADIENTS = [name for name, kind in OBJECTIVES.items() if kind.needs.reward_gradient]


@pytest.mark.parametrize("sliced", [False, True])
def test_the_decoders_backward_pass_takes_what_it_takes_of_a_real_decoder(sliced):
    config = FlowGRPOConfig.from_yaml("compare/flowbp", [f"memory.vae_slicing={str(sliced).lower()}", "dtype=fp32"])
    planned, policy = StepEstimator(config, cuda=False).trace.bytes, tiny_policy()
    for rows in (2, 4):
        x, counter = torch.randn(rows, *policy.schedule(2)[1]), LiveBytesCounter()
        with counter:
            policy.decode_vjp(x, lambda images, of_rows: torch.ones_like(images), 1 if sliced else rows)
        assert planned[rows][REWARD_GRADIENT] == pytest.approx(counter.peak, rel=0.03)


def test_a_step_by_gradients_takes_more_memory_and_time_than_one_without():
    by_gradient, without = (
        StepEstimator(FlowGRPOConfig.from_yaml("compare/flowbp", [f"objective={name}"]), cuda=False).estimate(32)
        for name in ("flowbp", "distill")
    )
    assert by_gradient.transient[REWARD_GRADIENT] > without.transient["decoding"]
    assert REWARD_GRADIENT not in without.transient


@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_the_decoded_images_are_those_of_a_real_step(name, monkeypatch):
    def redness(images, prompts):
        return (images[:, 0] - images[:, 1]).mean((1, 2))

    redness.differentiable = True
    settings = small.settings(objective={"name": name}, prompts_per_step=2, images_per_prompt=3, microbatch=6)
    trainer, counts = FlowGRPOTrainer(small.policy(), redness, settings, small.PROMPTS), Counter()

    def counted(method, call):
        def counting(latents, *rest):
            counts[method] += len(latents)
            return call(latents, *rest)

        monkeypatch.setattr(trainer.policy, method, counting)

    counted("decode", trainer.policy.decode)
    counted("decode_with_grad", trainer.policy.decode_with_grad)  # decode calls it too
    trainer.experience()
    gradients, images = settings.objective.decoded_images(settings.sampling.steps)
    assert counts["decode_with_grad"] - counts["decode"] == 6 * gradients
    assert counts["decode"] == 6 * images if name != "mend" else 0 < counts["decode"] <= 6 * images
