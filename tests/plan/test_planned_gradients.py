"""What a plan says of objectives by reward gradients: the decoder's backward pass, in bytes and in decoded images."""

from collections import Counter

import pytest
import support.small_policy as small
import torch
from support.embedded import tiny_policy
from support.traces import two_blocks

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.objective_by_name import OBJECTIVES
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.trace import REWARD_GRADIENT, LiveBytesCounter, ModelTrace
from flow_grpo.trainer import FlowGRPOTrainer

BY_GRADIENTS = [name for name, kind in OBJECTIVES.items() if kind.needs.reward_gradient]


@pytest.mark.parametrize("sliced", [False, True])
def test_the_decoders_backward_pass_takes_what_it_takes_of_a_real_decoder(sliced, tmp_path):
    settings = [f"memory.vae_slicing={str(sliced).lower()}", f"model={two_blocks(tmp_path / 'model')}"]
    config = FlowGRPOConfig.from_yaml("compare/flowbp", settings)
    planned, policy = ModelTrace(config, torch.float32, cuda=False, release_gradients=False).bytes, tiny_policy()
    for rows in (2, 4):
        x, counter = torch.randn(rows, *policy.schedule(2)[1]), LiveBytesCounter()
        with counter:
            policy.decode_vjp(x, lambda images, of_rows: torch.ones_like(images), 1 if sliced else rows)
        assert planned[rows][REWARD_GRADIENT] == pytest.approx(counter.peak, rel=0.03)


def test_a_step_by_gradients_takes_more_memory_and_time_than_one_without(tmp_path):
    model = f"model={two_blocks(tmp_path / 'model')}"
    by_gradient, without = (
        StepEstimator(FlowGRPOConfig.from_yaml("compare/flowbp", [model, f"objective={name}"]), cuda=True).estimate(32)
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
