"""A group as a tree: who shares a state, what is computed once, which noise a branch has, and what its advantage is."""

import dataclasses

import pytest
import torch
from support import small_policy as small

from flow_grpo import advantages, sampling, tree
from flow_grpo.distributed.processes import Processes
from flow_grpo.training.step_loss import ClipRange
from flow_grpo.training.update import PolicyUpdate
from flow_grpo.types import Experience, StepDistribution

WINDOW = [0, 1, 2]
TREE = {"prompts_per_step": 2, "images_per_prompt": 4, "microbatch": 8}
ADVANTAGE = torch.tensor([[1.0, -0.5, -0.7, 0.2], [0.3, 0.4, -0.8, 0.1]])


def settings(branches=(2, 2), **changes):
    both = {**TREE, **changes}
    return small.settings(**{**both, "sampling": {"steps": 5, "branches": list(branches), **changes.get("sampling", {})}})


def sampled(policy, args, batch, window=WINDOW, step=0):
    sampler = small.rollouts(policy, args, window).image_sampler
    return sampler.trajectory(step, batch, window, args.sampling.keep_graphs)


def gradient(policy, args, experience):
    """The metrics of an update, and the gradient before it is clipped to 1."""
    policy.ema.start()
    ours, seen = PolicyUpdate(policy, args, 0, Processes()), []
    ours.optimizer.adamw.register_step_pre_hook(
        lambda adamw, *_: seen.extend(p.grad.clone().flatten() for group in adamw.param_groups for p in group["params"])
    )
    return ours(experience, 0), torch.cat(seen)


@pytest.mark.parametrize(
    ("branches", "steps", "expected"),
    [
        ([2, 2, 2], 3, [8, 4, 2, 1]),
        ([2, 3], 4, [6, 3, 1, 1, 1]),
        ([4], 2, [4, 1, 1]),
        ([], 2, [1, 1, 1]),
        ([2, 2], 0, [4]),
    ],
)
def test_the_images_of_each_state(branches, steps, expected):
    assert tree.images_per_state(branches, steps) == expected


def test_neighbours_share_states_and_have_the_noise_of_their_first():
    batch = small.PROMPTS.head(2).repeat(4)
    states = tree.state_ids(batch, [2, 2], 3)
    assert states[:, 0].tolist() == [0] * 4 + [4] * 4
    assert states[:, 1].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert states[:, 2].tolist() == list(range(8))
    assert [taken.image.tolist() for taken in tree.noise_batches(batch, [2, 2], 3)] == [
        [0, 0, 2, 2] * 2,
        [0, 1, 2, 3] * 2,
        [0, 1, 2, 3] * 2,
    ]


def test_a_tree_is_what_its_paths_would_be_one_by_one_and_each_state_asks_once():
    """A path by hand: from the prompt's start, by each step's noise of the first image on its branch."""
    policy, args, asked = small.policy(), settings(), []
    batch, velocity = small.PROMPTS.take([4, 2], 4), policy.velocity

    def counting(x, timestep, conditioning, rows):
        asked.append(len(rows))
        return velocity(x, timestep, conditioning, rows)

    policy.velocity = counting
    trajectory = sampled(policy, args, batch)
    assert asked == [2, 4, 8, 8, 8], "1, 2, 4, 4 and 4 states of each prompt"
    policy.velocity = velocity
    for row, (group, image) in enumerate(zip(batch.group.tolist(), batch.image.tolist(), strict=True)):
        start = sampling.noise(small.SHAPE, args.seed, "start", 0, group)[None]
        names = {0: image // 2 * 2, 1: image, 2: image}
        alone = sampling.rollout(
            policy.velocity_fn(trajectory.schedule, policy.encode([batch.prompts[row]])),
            trajectory.schedule,
            start,
            microbatch=1,
            stochastic=sampling.StochasticSteps(
                WINDOW,
                StepDistribution("cps", noise_level=0.8),
                noise=lambda i, g=group, of=names: sampling.noise(small.SHAPE, args.seed, "step", 0, i, g, of[i])[None],
            ),
        )
        for name in ("x", "x_next", "mean", "log_prob_BK", "final"):
            torch.testing.assert_close(getattr(trajectory, name)[row], getattr(alone, name)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("microbatch", [1, 2, 8])
def test_neither_the_micro_batch_nor_who_else_is_sampled_changes_a_tree(microbatch):
    policy, batch = small.policy(), small.PROMPTS.take([4, 2, 1], 4)
    whole = sampled(policy, settings(prompts_per_step=4), batch)
    rows = torch.arange(4, 12)
    part = sampled(policy, settings(prompts_per_step=4, microbatch=microbatch), batch.take(rows))
    torch.testing.assert_close(part.final, whole.final[rows], rtol=0, atol=1e-5)
    torch.testing.assert_close(part.log_prob_BK, whole.log_prob_BK[rows], rtol=0, atol=1e-5)


def test_one_branching_is_a_shared_initial_noise_to_the_last_bit():
    trajectories = []
    for sharing in ({"branches": [4]}, {"branches": [], "shared_initial_noise": True}):
        policy, args = small.policy(), settings(sampling=sharing)
        batch = small.PROMPTS.head(2).repeat(4)
        trajectory = sampled(policy, args, batch, [1, 2])
        groups, rows = torch.arange(2), torch.arange(8)
        experience = Experience(batch, trajectory, ADVANTAGE.flatten(), rows, 4, groups, {})
        trajectories.append((trajectory, *gradient(policy, args, experience)))
    one, other = trajectories
    for name in ("x", "x_next", "mean", "log_prob_BK", "final"):
        assert torch.equal(getattr(one[0], name), getattr(other[0], name))
    assert one[1] == other[1]
    assert torch.equal(one[2], other[2])


@pytest.mark.parametrize("microbatch", [2, 4, 8])
@pytest.mark.parametrize("keep", [True, False])
def test_the_update_of_a_tree_is_that_of_its_paths(microbatch, keep):
    """The same gradient as if each image had computed its own states, with a ratio of exactly 1 and fewer velocities."""
    policy, args = small.policy(), settings(microbatch=microbatch, sampling={"keep_graphs": keep})
    batch, advantage = small.PROMPTS.head(2).repeat(4), torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    trajectory = sampled(policy, args, batch)
    groups, rows = torch.arange(2), torch.arange(8)
    apart = dataclasses.replace(trajectory, state_ids=None, graphs={})
    metrics, of_tree = gradient(policy, args, Experience(batch, trajectory, advantage, rows, 4, groups, {}))
    assert metrics["ratio/first_update_max_deviation"] == 0
    other = small.policy()
    conditioning = other.encode(batch.prompts)
    experience = Experience(batch, apart, advantage, rows, 4, groups, {})
    args = settings(microbatch=microbatch, objective={"name": "reinforce"})
    loss = small.step_loss(other, args, experience, conditioning, ClipRange(None))
    value = sum(one.value.mean() for one in loss.losses(rows, rows >= 0)) / 3
    of_paths = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(other.trainable_parameters().values()))])
    torch.testing.assert_close(of_tree, of_paths, rtol=1e-3, atol=1e-5 * float(of_paths.abs().max()))


def test_kept_graphs_of_a_tree_have_the_replays_gradient_to_the_last_bit():
    results = []
    for keep in (True, False):
        policy, args = small.policy(), settings(microbatch=4, sampling={"keep_graphs": keep})
        batch = small.PROMPTS.head(2).repeat(4)
        advantage = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
        trajectory = sampled(policy, args, batch)
        results.append(
            gradient(policy, args, Experience(batch, trajectory, advantage, torch.arange(8), 4, torch.arange(2), {}))
        )
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


class Table:
    """A reward of given values by the prompt's place and the image's."""

    def __init__(self, values):
        self.values, self.calls = values, 0

    def __call__(self, images, prompts):
        return self.values.flatten().tolist()


@pytest.mark.parametrize("method", ["grpo", "batch_std", "rank"])
def test_a_step_has_the_advantage_of_the_branch_it_led_to(method):
    values = torch.tensor([[0.1, 0.5, 0.2, 0.9], [1.0, 0.0, 0.5, 0.5]])
    policy, args = small.policy(), settings(objective={"advantage": method}, rewards={"main": {"weight": 1.0}})
    rewards = small.WeightedSum({"main": Table(values)}, {"main": 1.0})
    experience = small.rollouts(policy, args, WINDOW, rewards).collect(0)
    assert experience.advantage.shape == (8, 3)
    group = torch.arange(2).repeat_interleave(4)
    halves = values.view(2, 2, 2).mean(2).repeat_interleave(2, 1)
    for k, reward in enumerate((halves, values, values)):
        expected = advantages.group_advantages(reward.flatten(), group, method)
        torch.testing.assert_close(experience.advantage[:, k], expected)
    assert not experience.advantage[4:, 0].any(), "both halves of the second prompt are alike"
    assert experience.advantage[4:, 1].any()
    assert experience.rows.tolist() == list(range(8))


def test_a_mean_over_branches_of_several_rewards():
    batch, value = small.PROMPTS.head(2).repeat(4), torch.arange(16.0).view(8, 2)
    means = tree.branch_rewards(value, batch, [2, 2], 2)
    assert means[0].tolist() == [[1, 2], [1, 2], [5, 6], [5, 6], [9, 10], [9, 10], [13, 14], [13, 14]]
    assert torch.equal(means[1], value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"branches": [2, 3]}, "make 6 images of a prompt, but images_per_prompt is 4: set images_per_prompt=6"),
        ({"sampling": {"window": {"schedule": "fixed", "size": 1}}}, "part at 2 steps, but the window has 1"),
        ({"sampling": {"shared_initial_noise": True}}, r"is branches=\[4\]: leave out one"),
        ({"objective": {"name": "ppo"}}, "its critic makes the advantages of steps"),
        (
            {"sampling": {"transition": "ode", "branches": [4]}, "objective": {"name": "sft"}},
            "does not use sampling.branches",
        ),
    ],
)
def test_what_does_not_go_with_a_tree_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings(**changes)
