"""`sampling.guidance`: rollouts with a guidance that the trained velocity has not."""

import pytest
import torch
from support import small_policy as small

from flow_grpo import sampling, sde
from flow_grpo.data.prompts import PromptSet
from flow_grpo.training.start_checks import sentences

REWARDS = {"jpeg_size": 1.0}
FAMILIES = {
    "steps": {"transition": "flow_sde", "noise_level": 0.7},
    "kept graphs": {"transition": "flow_sde", "noise_level": 0.7, "keep_graphs": True},
    "final latents": {"name": "awm"},
}


def settings(family, rollout=4.0, **changes):
    return small.settings(
        objective=FAMILIES[family], sampling={"guidance": rollout, "steps": 4}, rewards=REWARDS, prompts=None, **changes
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_images_are_those_of_the_rollouts_guidance(family):
    apart, both, none = (
        small.rollouts(small.policy(guidance=own), settings(family, rollout), []).image_sampler
        for own, rollout in ((1.0, 4.0), (4.0, None), (1.0, None))
    )
    batch = small.PROMPTS.repeat(2)
    guided, same, plain = (sampler.trajectory(0, batch, []).final for sampler in (apart, both, none))
    assert torch.equal(guided, same)
    assert not torch.allclose(guided, plain, atol=1e-2)


def test_a_step_records_the_probability_that_the_trained_velocity_gives_the_guided_state():
    policy = small.policy()
    args = settings("steps")
    batch, window = small.PROMPTS.repeat(1), [0, 1]
    found = small.rollouts(policy, args, window).image_sampler.trajectory(0, batch, window)
    rows, sigmas = torch.arange(len(batch.prompts)), found.schedule.sigmas
    for k, i in enumerate(window):
        of_scale = {}
        for scale in (1.0, 4.0):
            model = policy.with_guidance(scale)
            with torch.no_grad():
                v = model.velocity(found.x[:, k], found.schedule.timesteps[i], model.encode(batch.prompts), rows)
            of_scale[scale] = sde.transition("flow_sde", found.x[:, k], v, sigmas[i], sigmas[i + 1], 0.7, sigmas[1])
        mean, std = of_scale[1.0]
        torch.testing.assert_close(found.mean[:, k], mean)
        torch.testing.assert_close(found.log_prob[:, k], sde.log_prob(found.x_next[:, k], mean, std))
        noise = sampling.batch_noise(small.SHAPE, batch, args.seed, "step", 0, i)
        torch.testing.assert_close(found.x_next[:, k], of_scale[4.0][0] + std * noise)


@pytest.mark.parametrize("family", ["steps", "kept graphs"])
def test_the_ratio_of_the_first_update_is_exactly_1(family, tmp_path):
    trainer = small.trainer(settings(family, output_dir=str(tmp_path)), train_dataset=small.PROMPTS)
    assert trainer.training_step()["ratio/first_update_max_deviation"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_says_that_its_steps_are_off_policy(family, tmp_path):
    trainer = small.trainer(settings(family, output_dir=str(tmp_path)), train_dataset=small.PROMPTS)
    said = [sentence for sentence in sentences(trainer.start_checks) if "off-policy" in sentence]
    assert len(said) == (family != "final latents")
    unguided = small.trainer(settings(family, None, output_dir=str(tmp_path)), train_dataset=small.PROMPTS)
    assert not sentences(unguided.start_checks)


def test_the_update_is_that_of_the_unguided_velocity_on_the_guided_images():
    guided, plain = settings("final latents"), settings("final latents", None)
    advantage = torch.tensor([[1.0, -1.0], [0.5, -0.5]])
    experience = small.experience(small.policy(), guided, advantage, [])
    losses = []
    for args in (guided, plain):
        policy = small.policy()
        small.move(policy, 0.2, seed=7)
        terms = small.forward_process_loss(policy, args, experience, policy.encode(experience.batch.prompts), 0)
        losses.append(next(iter(terms.losses(torch.arange(4), torch.ones(4, dtype=torch.bool)))).value.detach())
    assert torch.equal(*losses)
    assert losses[0].any()


def test_evaluation_has_the_rollouts_guidance_unless_it_has_its_own(tmp_path):
    for own, expected in ((None, 4.0), (2.0, 2.0)):
        args = settings("final latents", output_dir=str(tmp_path), evaluation={"guidance": own, "steps": 2})
        assert args.held_out.guidance == expected
        assert args.evaluation_call_kwargs()["guidance"] == expected
        trainer = small.trainer(args, train_dataset=small.PROMPTS, eval_dataset=PromptSet(["a cat"], [{}]))
        seen = []
        encode = trainer.policy.with_guidance(expected).encode
        trainer.policy.with_guidance(expected).encode = lambda prompts, encode=encode: (
            seen.append(prompts) or encode(prompts)
        )
        trainer.evaluate()
        assert seen
    assert settings("final latents", None).held_out.guidance is None


def test_a_pipeline_without_guidance_has_none_in_its_rollouts(monkeypatch, tmp_path):
    policy = small.policy(lora=False)
    monkeypatch.setattr(type(policy), "with_guidance", lambda self, scale: self)
    with pytest.raises(ValueError, match=r"has no guidance: leave sampling\.guidance out"):
        small.FlowGRPOTrainer(policy, args=settings("final latents", output_dir=str(tmp_path)), train_dataset=small.PROMPTS)
