"""A step shared by more processes than it has groups: the images of each update are split, and the step is that of one process."""

import pytest
import torch
from support import small_policy as small
from support.thread_processes import run_as_processes

from flow_grpo.distributed.processes import Processes, shared_microbatch
from flow_grpo.rewards import WeightedSum
from flow_grpo.training.start_checks import Start, local_microbatch, small_microbatches
from flow_grpo.training.update import PolicyUpdate

STEP = {"prompts_per_step": 4, "images_per_prompt": 4, "updates": 2, "microbatch": 4, "optimizer": {"eps": 1e-3}}
SHARED_START = {"objective": {"shared_initial_noise": True}}


def bright(images, prompts):
    return images.mean((1, 2, 3)) * 100


def brighter(first, second, prompts):
    return [0.5] * len(prompts)


brighter.scope = "pair"


def step(processes: Processes, **settings):
    """The experience of a training step, its metrics, and the weights after its two updates."""
    args = small.settings(**STEP | {"ema_decay": 0} | settings)
    args = args.model_copy(update={"microbatch": local_microbatch(args, processes.world_size, args.microbatch)})
    policy = small.policy()
    experience = small.rollouts(
        policy, args, [1, 2], WeightedSum({"bright": bright}, {"bright": 1.0}), processes=processes
    ).collect(0)
    metrics = PolicyUpdate(policy, args, 0, processes)(experience, 0)
    return experience, metrics, torch.cat([value.flatten() for value in policy.trainable_parameters().values()]).detach()


@pytest.mark.parametrize("count", [16, 32, 64])
def test_the_papers_step_gives_each_process_as_many_images_of_each_update(count):
    group = torch.arange(48).repeat_interleave(24)
    owner = Processes(0, count).owner(group, updates=2)
    for update in owner.split(24 * 24):
        assert update.bincount(minlength=count).tolist() == [24 * 24 // count] * count
    assert shared_microbatch(count, 48, 24, 9, updates=2) == 9


def test_groups_stay_whole_where_there_are_enough():
    group = torch.arange(48).repeat_interleave(24)
    owner = Processes(0, 8).owner(group, updates=2)
    assert torch.equal(owner, group % 8)


@pytest.mark.parametrize(("count", "settings"), [(4, {}), (8, SHARED_START)])
def test_a_split_step_is_that_of_one_process(count, settings):
    experience, metrics, weights = step(Processes(), **settings)
    parts = run_as_processes(count, lambda processes: step(processes, **settings))
    order = torch.cat([part.batch.group * 4 + part.batch.image for part, _, _ in parts]).argsort()
    assert len(order) == 16
    advantage = torch.cat([part.advantage for part, _, _ in parts])[order]
    torch.testing.assert_close(advantage, experience.advantage, rtol=1e-3, atol=1e-3)
    final = torch.cat([part.trajectory.final for part, _, _ in parts])[order]
    torch.testing.assert_close(final, experience.trajectory.final)
    for part, its_metrics, its_weights in parts:
        assert len(part.batch.prompts) == 16 // count
        torch.testing.assert_close(its_weights, weights, rtol=1e-4, atol=1e-6)
        assert its_metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "reward", "words"),
    [
        ({"objective": {"name": "dgpo"}}, bright, "objective dgpo needs all images of a prompt on one"),
        ({}, brighter, "reward one needs all images of a prompt on one"),
        ({"images_per_prompt": 9}, bright, "prompts_per_step=4 .* 2 x 8, and neither are its 36 images"),
    ],
)
def test_what_needs_whole_groups_or_does_not_divide_is_refused(settings, reward, words):
    with pytest.raises(ValueError, match=words):
        local_microbatch(small.settings(**STEP | settings), 8, 4, WeightedSum({"one": reward}, {"one": 1.0}))


def test_a_micro_batch_below_half_of_the_setting_is_said():
    args = small.settings(**STEP | {"microbatch": 16})
    assert small_microbatches(Start(args, 2)) == []
    (sentence,) = small_microbatches(Start(args, 4))
    assert sentence.startswith("micro-batches have 4 images, not microbatch=16: they divide the 4 images")
    assert small_microbatches(Start(small.settings(**STEP | {"microbatch": 64}))) == [], "all images of a step at once"
