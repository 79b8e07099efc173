"""What a training step learns from, on a small policy: which noise draws the images, what they are worth, and which count."""

import copy
import math
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from support import small_policy as small
from support.run_contents import MEASURED

from flow_grpo import advantages, sampling
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import Interrupted
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.threads import DaemonThread, wait_for
from flow_grpo.sampling import SOLVERS
from flow_grpo.training.critic import Critic
from flow_grpo.training.group_advantages import GroupAdvantages, select_rows
from flow_grpo.training.rollouts import ImageSampler

WINDOW = [0, 2]
SCRIPT = {  # what the images of each prompt get, in their order
    "a cat": [0.1, 0.5, 0.9],
    "a dog": [0.4, 0.4, 0.4],
    "a sun": [0.9, 0.2, 0.3],
    "a owl": [0.0, 0.6, 0.8],
    "a tree": [0.7, 0.7, 0.7],
    "a boat": [0.3, math.nan, 0.1],
}


def scripted(script=SCRIPT):
    def reward(images, prompts):
        return [script[p][prompts[:i].count(p) % 3] for i, p in enumerate(prompts)]

    return reward


def source(
    policy=None, script=SCRIPT, weights=None, rewards=None, drop=("main",), window=WINDOW, prompts=small.PROMPTS, **more
):
    """Rollouts of a small policy whose main reward is scripted."""
    rewards = {"main": scripted(script), **(rewards or {})}
    weighted = WeightedSum(rewards, weights or dict.fromkeys(rewards, 1.0), drop)
    own = {name: more.pop(name) for name in ("critic", "processes") if name in more}
    args = small.settings(**{"prompts_per_step": 4, "microbatch": 6, **more})
    return small.rollouts(policy or small.policy(), args, window, weighted, prompts=prompts, **own)


def share(rolls, processes):
    """Makes these the processes of the rollouts."""
    rolls.processes = rolls.image_sampler.processes = processes


def some(*names):
    """A set of prompts, dealt in whatever order."""
    return small.PromptSet([f"a {name}" for name in names], [{} for _ in names])


FOUR = some("cat", "dog", "sun", "owl")


def columns(experience):
    """Rewards (P, 3) of a batch by the script, in its order."""
    return torch.tensor([SCRIPT[prompt] for prompt in experience.batch.prompts[::3]])


# -- noise ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3])
def test_every_image_starts_from_noise_of_its_own_and_each_trained_step_adds_noise_of_its_own(seed):
    rolls, batch = source(seed=seed), small.PROMPTS.take([4, 2], 3)
    starts, noises = [], []
    for step in (0, 1):
        t = rolls.image_sampler.trajectory(step, batch, WINDOW)
        assert t.steps == WINDOW
        for row, (p, g) in enumerate(zip(batch.group.tolist(), batch.image.tolist(), strict=True)):
            starts.append(sampling.noise(small.SHAPE, seed, "start", step, p, g))
            assert torch.equal(t.x[row, 0], starts[-1])
            for k, i in enumerate(WINDOW):
                std = t.schedule.sigmas[i + 1] * math.sin(0.8 * math.pi / 2)
                noises.append(sampling.noise(small.SHAPE, seed, "step", step, i, p, g))
                assert torch.equal(t.x_next[row, k], t.mean[row, k] + std * noises[-1])
    every = torch.stack([*starts, *noises]).flatten(1)
    assert len(every.unique(dim=0)) == len(every) == 12 + 24
    assert not (torch.corrcoef(every) - torch.eye(36)).abs().max() > 0.8


@pytest.mark.parametrize("seed", [0, 3])
def test_images_of_a_group_may_share_their_start_and_part_at_the_first_trained_step(seed):
    rolls, batch = source(seed=seed, sampling={"shared_initial_noise": True}, window=[1]), small.PROMPTS.take([4, 2], 3)
    states = torch.stack(
        [rolls.image_sampler.trajectory(step, batch, [1]).x[:, 0].view(2, 3, *small.SHAPE) for step in (0, 1)]
    )
    assert torch.equal(states, states[:, :, :1].expand_as(states))
    assert len(states.flatten(3).flatten(0, 2).unique(dim=0)) == 4
    first = rolls.image_sampler.trajectory(0, batch, [0])
    for row, p in enumerate(batch.group.tolist()):
        assert torch.equal(first.x[row, 0], sampling.noise(small.SHAPE, seed, "start", 0, p))
    assert len(first.final.flatten(1).unique(dim=0)) == 6


@pytest.mark.parametrize("shared", [True, False])
def test_a_group_is_drawn_alike_whoever_draws_it(shared):
    """Group 3 of a batch alone, as one of several processes draws it."""
    rolls, batch = source(sampling={"shared_initial_noise": shared}, microbatch=3), small.PROMPTS.take([4, 2, 1, 0], 3)
    whole, own = rolls.image_sampler.trajectory(5, batch, [1, 2]), batch.take(torch.tensor([3, 4, 5, 9, 10, 11]))
    part = rolls.image_sampler.trajectory(5, own, [1, 2])
    torch.testing.assert_close(part.final, whole.final[[3, 4, 5, 9, 10, 11]], rtol=0, atol=1e-5)


def test_a_rollout_is_scored_and_solved_as_the_settings_say():
    batch = small.PROMPTS.take([4, 2], 3)
    t = source(sampling={"noise_level": 0.3}).image_sampler.trajectory(0, batch, [1])
    residual = (t.x_next - t.mean).square().flatten(2).mean(2)
    std = t.schedule.sigmas[2] * math.sin(0.3 * math.pi / 2)
    assert float(residual.mean()) == pytest.approx(float(std**2), rel=0.3)
    ode = {"objective": {"name": "sft"}, "window": []}
    euler, *others = (source(sampling={"solver": s}, **ode) for s in SOLVERS)
    one = euler.image_sampler.trajectory(0, batch, []).final
    for rolls in others:
        assert 1e-3 < float((rolls.image_sampler.trajectory(0, batch, []).final - one).abs().mean()) < 0.5


@pytest.mark.parametrize(("which", "adapter"), [("trained", "default"), ("old", "old")])
def test_images_are_drawn_by_the_policy_that_the_settings_name(which, adapter):
    policy, batch, ode = small.policy(), small.PROMPTS.take([4, 2], 3), {"steps": 4}
    policy.lora.add_adapter_copy("old")
    small.move(policy, seed=1)
    rolls = source(policy, objective={"name": "nft", "rollout_policy": which}, sampling=ode, window=[])
    final = rolls.image_sampler.trajectory(0, batch, []).final
    alone = source(policy, objective={"name": "awm"}, sampling=ode, window=[]).image_sampler
    drawn = {}
    for name in ("default", "old"):
        with policy.lora.use(name):
            drawn[name] = alone.trajectory(0, batch, []).final
    assert {name for name in drawn if torch.equal(final, drawn[name])} == {adapter}


def test_the_forward_passes_of_a_rollout_are_micro_batches_without_gradients():
    policy, batch = small.policy(), small.PROMPTS.take([4, 2], 3)
    calls, velocity = [], policy.velocity
    policy.velocity = lambda x, *rest: calls.append((len(x), torch.is_grad_enabled())) or velocity(x, *rest)
    rolls = source(policy, microbatch=3)
    rolls.image_sampler.trajectory(0, batch, WINDOW)
    assert calls == [(3, False)] * 8
    calls.clear()
    policy.compiled = True
    trajectory = rolls.image_sampler.trajectory(0, batch, WINDOW)
    assert calls == [(3, i in WINDOW) for i in (0, 1, 2, 3, 0, 1, 2, 3)], "a compiled kernel is the one that is replayed"
    assert not trajectory.final.requires_grad


class Content:
    """What a graph keeps for its backward pass."""


class Keep(torch.autograd.Function):
    """The identity, with a graph that keeps an object."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_one_graph_at_a_time_is_in_memory_in_a_rollout_of_compiled_blocks():
    policy, batch = small.policy(), small.PROMPTS.take([4, 2], 3)
    velocity, graphs, alive = policy.velocity, [], []

    def followed(x, *rest):
        alive.append(sum(content() is not None for content in graphs))
        v, content = velocity(x, *rest), Content()
        graphs.append(weakref.ref(content))
        return Keep.apply(v, content)

    policy.velocity, policy.compiled = followed, True
    source(policy, microbatch=2).image_sampler.trajectory(0, batch, WINDOW)
    assert alive == [0] * 12, "three micro-batches in each of four steps"


def end(threads):
    """Waits for threads that have nothing more to do."""
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("after", [0, 5])
def test_a_rollout_is_left_before_its_next_forward_pass(after):
    policy, calls = small.policy(), []
    velocity = policy.velocity
    rolls, threads = source(policy), set(threading.enumerate())
    rolls.processes.stop_requested = after == 0

    def stopped(*args):
        calls.append(1)
        rolls.processes.stop_requested = len(calls) == after
        return velocity(*args)

    policy.velocity = stopped
    with pytest.raises(Interrupted):
        rolls.collect(0)
    assert len(calls) == after
    end(set(threading.enumerate()) - threads)


# -- what the images are worth ----------------------------------------------------------------------------------------------


def contrast(images, prompts):
    return images.std((1, 2, 3))


def test_the_advantage_is_the_weighted_sum_of_the_rewards_against_the_group():
    """A reward of weight 0 is measured and counts for nothing."""
    weights = {"main": 2.0, "contrast": -30.0, "noise": 0.0}
    other = {"contrast": contrast, "noise": lambda images, prompts: [float(i) for i in range(len(prompts))]}
    rolls = source(prompts=FOUR, weights=weights, rewards=other)
    experience = rolls.collect(2)
    images = rolls.policy.decode(experience.trajectory.final)
    main, apart = columns(experience), contrast(images, None).view(4, 3)
    total = (2 * main - 30 * apart).double()
    spread = total.std(1, correction=0, keepdim=True)
    expected = (total - total.mean(1, keepdim=True)) / (spread + 1e-4)
    torch.testing.assert_close(experience.advantage.double(), expected.flatten(), rtol=1e-4, atol=1e-4)
    assert experience.rows.tolist() == list(range(12))
    assert experience.rows_per_group == 3
    assert experience.groups.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(experience.scores.total.double(), total.flatten(), rtol=1e-5, atol=1e-6)
    parts = torch.stack([2 * main, -30 * apart]).double()
    parts = ((parts - parts.mean(2, keepdim=True)) / (spread + 1e-4)).flatten(1)
    products = parts @ parts.T
    assert {name: value for name, value in experience.metrics.items() if not name.startswith(MEASURED)} == pytest.approx(
        {
            "reward": float(total.mean()),
            "reward_std": float(spread.mean()),
            "frac_reward_zero_std": 0.0,
            "rewards/main/mean": float(main.mean()),
            "rewards/contrast/mean": float(apart.mean()),
            "rewards/noise/mean": 5.5,
            "images": 12.0,
            "advantage/share/main": float(products[0].sum() / products.sum()),
            "advantage/share/contrast": float(products[1].sum() / products.sum()),
            "advantage/correlation/main/contrast": float(products[0, 1] / (products[0, 0] * products[1, 1]).sqrt()),
        },
        rel=1e-3,
        abs=1e-5,
    )


def test_groups_whose_rewards_are_alike_have_no_signal_and_are_counted():
    experience = source(prompts=FOUR).collect(0)
    silent = [i for i, prompt in enumerate(experience.batch.prompts) if prompt == "a dog"]
    assert experience.rows.tolist() == [i for i in range(12) if i not in silent]
    assert (experience.advantage[silent] == 0).all()
    assert experience.groups.tolist() == [0, 1, 2, 3], "they stay in the mean"
    assert experience.metrics["frac_reward_zero_std"] == 0.25
    assert experience.metrics["reward"] == pytest.approx(float(columns(experience).mean()))
    assert experience.metrics["reward_std"] == pytest.approx(float(columns(experience).std(1, correction=0).mean()))
    assert not any(name.startswith("advantage/") for name in experience.metrics), "of one reward there are no shares"


def opposite(images, prompts):
    """Makes up for what the main reward gives to two prompts."""
    values = scripted()(images, prompts)
    return [-v if p in ("a cat", "a owl") else 0.0 for v, p in zip(values, prompts, strict=True)]


@pytest.mark.parametrize(("name", "advantage", "silent"), [
    ("grpo", "grpo", {"a cat", "a dog", "a owl"}), ("grpo", "gdpo", {"a dog"}), ("grpo", "reinforce_pp", set()),
    ("sft", "grpo", {"a cat", "a dog", "a owl"}), ("dpo", "grpo", {"a cat", "a dog", "a owl"}),
])  # fmt: skip
def test_which_groups_have_signal_is_the_advantages_own_matter(name, advantage, silent):
    """Of two rewards that cancel, gdpo sees both; reinforce_pp compares with the whole batch; sft and dpo choose by the sum."""
    ode = {"window": []} if name in ("sft", "dpo") else {}
    objective = {"name": name, "advantage": advantage}
    experience = source(prompts=FOUR, rewards={"opposite": opposite}, objective=objective, **ode).collect(0)
    assert {p for i, p in enumerate(experience.batch.prompts) if i not in experience.rows and name == "grpo"} <= silent
    speaking = {experience.batch.prompts[row] for row in experience.rows}
    assert speaking == {p for p in FOUR.prompts if p not in silent}


@pytest.mark.parametrize(("advantage", "silent"), [("grpo", {"a cat", "a dog", "a owl"}), ("gdpo", {"a dog"})])
def test_groups_without_signal_are_counted_by_the_advantages_own_rewards(advantage, silent):
    rolls = source(prompts=FOUR, rewards={"opposite": opposite}, objective={"advantage": advantage})
    assert rolls.collect(0).metrics["frac_reward_zero_std"] == len(silent) / 4


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_best_and_the_worst_of_a_group_by_the_sum_are_what_is_copied_and_compared(name):
    ode = {"window": []}
    experience = source(prompts=FOUR, objective={"name": name}, **ode).collect(0)
    values, expected = columns(experience), []
    for p, row in enumerate(values):
        if row.max() > row.min():
            expected += [3 * p + int(row.argmax())] + [3 * p + int(row.argmin())] * (name == "dpo")
    assert experience.rows.tolist() == expected
    assert experience.rows_per_group == (1 if name == "sft" else 2)


def test_select_rows_of_no_group_are_none():
    reward, group = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    for name, each in (("best", 1), ("best_and_worst", 2), ("all", 2)):
        rows, per_group = select_rows(name, reward, group, torch.zeros(4, dtype=torch.bool))
        assert (rows.tolist(), rows.dtype, per_group) == ([], torch.int64, each)


def test_a_reward_gets_the_metadata_of_each_images_prompt():
    prompts = small.PromptSet(["a cat", "a dog"], [{"answer": 3.0}, {"answer": 5.0}])
    seen = []

    def reward(images, prompts, answer):
        seen.append((prompts, answer))
        return [a + i % 3 for i, a in enumerate(answer)]

    rolls = source(prompts=prompts, prompts_per_step=2)
    rolls.rewards.rewards["main"] = reward
    experience = rolls.collect(0)
    assert seen == [(experience.batch.prompts, [3.0 if p == "a cat" else 5.0 for p in experience.batch.prompts])]
    assert experience.scores.total.tolist() == [a + i % 3 for i, a in enumerate(seen[0][1])]


def test_an_advantage_of_ones_own_gets_the_sum_and_the_groups():
    own = {"advantage": "tests/support/sample_objectives.py:sign"}
    experience = source(prompts=FOUR, weights={"main": 2.0}, objective=own).collect(0)
    values = columns(experience)
    assert experience.advantage.view(4, 3).tolist() == torch.sign(values - values.mean(1, keepdim=True)).tolist()
    assert len(experience.rows) == 12, "it may compare with the whole batch"


# -- what was dropped -------------------------------------------------------------------------------------------------------


def test_a_group_with_a_reward_that_is_no_number_is_left_out_of_all_but_the_count():
    prompts = some("cat", "dog", "sun", "boat")
    experience = source(prompts=prompts, objective={"advantage": "batch_std"}).collect(0)
    lost = [p for p in range(4) if experience.batch.prompts[3 * p] == "a boat"]
    kept = [p for p in range(4) if p not in lost]
    values = columns(experience)[kept].double()
    expected = (values - values.mean(1, keepdim=True)) / (values.std(correction=0) + 1e-4)
    torch.testing.assert_close(experience.advantage.view(4, 3)[kept].double(), expected, rtol=1e-4, atol=1e-5)
    assert (experience.advantage.view(4, 3)[lost] == 0).all()
    assert experience.groups.tolist() == kept
    silent = [p for p in kept if experience.batch.prompts[3 * p] == "a dog"]
    assert experience.rows.tolist() == [3 * p + g for p in kept if p not in silent for g in range(3)]
    numbers = {k: v for k, v in experience.metrics.items() if not k.startswith(MEASURED)}
    assert numbers == pytest.approx(
        {
            "frac_reward_dropped": 0.25,
            "frac_reward_zero_std": 1 / 3,
            "reward": float(values.mean()),
            "reward_std": float(values.std(1, correction=0).mean()),
            "rewards/main/mean": float(values.mean()),
            "images": 12.0,
        }
    )


def test_a_step_of_which_nothing_is_left_says_so():
    script = dict.fromkeys(SCRIPT, [math.nan] * 3)
    for critic in (None, Critic(torch.Size(small.SHAPE), 64, 0)):
        experience = source(prompts=FOUR, script=script, critic=critic).collect(0)
        numbers = {k: v for k, v in experience.metrics.items() if not k.startswith(MEASURED)}
        assert numbers == {"frac_reward_dropped": 1.0, "images": 12.0}
        assert (len(experience.rows), len(experience.groups)) == (0, 0)
        assert not experience.advantage.any()
        assert experience.rows_per_group == 3


# -- the critic -------------------------------------------------------------------------------------------------------------


def test_the_critic_sees_states_rewards_and_prompts_of_the_rows_that_count():
    prompts = some("cat", "dog", "sun", "boat")
    critic, policy = Critic(torch.Size(small.SHAPE), 64, 0), small.policy()
    rolls = source(policy, prompts=prompts, critic=critic, objective={"name": "ppo"})
    same = copy.deepcopy(critic)
    same.optimizer = torch.optim.AdamW(same.parameters(), lr=1e-3)
    experience = rolls.collect(0)
    rows = torch.tensor([i for i, p in enumerate(experience.batch.prompts) if p != "a boat"])
    text, total = policy.encode(experience.batch.prompts).pooled(), columns(experience).flatten()
    expected, metrics = same.advantages(experience.trajectory.take(rows), total[rows], text[rows])
    assert experience.advantage.shape == (12, 2)
    torch.testing.assert_close(experience.advantage[rows], expected)
    others = [i for i in range(12) if i not in rows]
    assert not experience.advantage[others].any()
    assert experience.rows.tolist() == rows.tolist(), "also of prompts whose rewards are alike"
    assert len(experience.groups) == 3
    assert {k: v for k, v in experience.metrics.items() if k.startswith("critic/")} == pytest.approx(metrics)
    assert all(torch.equal(a, b) for a, b in zip(critic.parameters(), same.parameters(), strict=True))


# -- several processes, and rewards scored in the background ------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_has_its_own_groups_and_knows_all_scores(rank):
    whole = source(prompts=some("cat", "dog", "sun", "boat"), microbatch=3).collect(1)
    own, others = (torch.tensor([i for i in range(12) if i // 3 % 2 == r]) for r in (rank, 1 - rank))
    rolls = source(prompts=some("cat", "dog", "sun", "boat"), microbatch=3)
    share(rolls, small.Two(lambda _: whole.scores.take(others), rank))
    experience = rolls.collect(1)
    assert experience.batch.prompts == [whole.batch.prompts[i] for i in own]
    assert experience.batch.group.tolist() == whole.batch.group[own].tolist()
    torch.testing.assert_close(experience.trajectory.final, whole.trajectory.final[own], rtol=0, atol=1e-5)
    torch.testing.assert_close(experience.advantage, whole.advantage[own])
    assert own[experience.rows].tolist() == [i for i in whole.rows.tolist() if i in own]
    assert experience.groups.tolist() == whole.groups.tolist()
    torch.testing.assert_close(experience.scores.total, whole.scores.total[own], equal_nan=True)
    assert experience.metrics["reward"] == pytest.approx(whole.metrics["reward"])


def test_images_are_scored_in_parts_of_whole_groups_and_micro_batches_where_that_saves_time():
    experiences, sizes = {}, {}
    for in_background in (False, True):
        sizes[in_background], reward = [], scripted()
        rolls = source(microbatch=6, prompts=FOUR)
        rolls.rewards.rewards["main"] = lambda x, p, s=sizes[in_background], r=reward: s.append(len(x)) or r(x, p)
        assert not rolls.image_sampler.score_in_background
        rolls.image_sampler.score_in_background = in_background
        experiences[in_background] = rolls.collect(3)
    assert sizes == {False: [12], True: [6, 6]}
    assert torch.equal(experiences[True].advantage, experiences[False].advantage)
    assert torch.equal(experiences[True].trajectory.final, experiences[False].trajectory.final)
    assert experiences[True].batch.prompts == experiences[False].batch.prompts
    rolls = source(microbatch=4, prompts=FOUR)
    rolls.image_sampler.score_in_background, whole = True, []
    rolls.rewards.rewards["main"] = lambda x, p: whole.append(len(x)) or scripted()(x, p)
    rolls.collect(3)
    assert whole == [12], "4 rows are no whole groups of 3"


def test_on_a_cpu_only_what_other_machines_score_is_scored_in_the_background():
    far, near = {"remote": "http://127.0.0.1:1"}, {"weight": 1.0}
    policy, none = small.policy(), WeightedSum({}, {})
    for rewards, expected in (({"a": far}, True), ({"a": far, "b": near}, False), ({"b": near}, False)):
        assert ImageSampler(policy, small.settings(rewards=rewards), none, Processes()).score_in_background == expected
    elsewhere = SimpleNamespace(device=torch.device("cuda"), schedule=policy.schedule)
    assert ImageSampler(elsewhere, small.settings(rewards={"b": near}), none, Processes()).score_in_background


def test_a_reward_that_fails_leaves_no_thread_behind():
    def fails(images, prompts):
        raise RuntimeError("no paper")

    rolls, before = source(drop=()), set(threading.enumerate())
    rolls.rewards.rewards["main"] = fails
    with pytest.raises(ValueError, match=r"reward main raised RuntimeError.*no paper"):
        rolls.collect(0)
    for thread in set(threading.enumerate()) - before:  # its last call is done, but it may not have ended yet
        thread.join(60)
        assert not thread.is_alive()


def test_rewards_are_called_one_after_another_and_not_at_all_after_a_failure(monkeypatch):
    """The first part is being scored and the second waits when the third can't be decoded."""
    failed, calls, close = threading.Event(), [], DaemonThread.close

    def closed(self):
        idle = close(self)
        failed.set()
        return idle

    def slow(images, prompts):
        calls.append(len(images))
        assert failed.wait(60)
        return scripted()(images, prompts)

    def broken(latents, *rest):
        decoded.append(len(latents))
        if len(decoded) == 3:
            raise torch.OutOfMemoryError("no memory")
        return decode(latents, *rest)

    monkeypatch.setattr(DaemonThread, "close", closed)
    threads = set(threading.enumerate())
    rolls, decoded = source(drop=(), microbatch=3), []
    rolls.image_sampler.score_in_background, decode = True, rolls.policy.decode
    rolls.policy.decode, rolls.rewards.rewards["main"] = broken, slow
    with pytest.raises(torch.OutOfMemoryError):
        rolls.collect(0)
    end(set(threading.enumerate()) - threads)
    assert decoded == [3, 3, 3]
    assert calls == [3]


def test_the_seconds_of_a_step_are_those_of_its_parts(monkeypatch):
    """On a clock that stands still but where the parts are at work."""
    clock = [100.0]
    monkeypatch.setattr("flow_grpo.policy.step_meter.time.perf_counter", lambda: clock[0])

    def takes(seconds, call):
        def slow(*args, **kwargs):
            clock[0] += seconds
            return call(*args, **kwargs)

        return slow

    rolls = source()
    rolls.image_sampler.trajectory = takes(5.0, rolls.image_sampler.trajectory)
    rolls.policy.decode = takes(3.0, rolls.policy.decode)
    monkeypatch.setattr("flow_grpo.training.rollouts.wait_for", takes(4.0, wait_for))
    monkeypatch.setattr(GroupAdvantages, "__call__", takes(2.0, GroupAdvantages.__call__))
    together = rolls.processes.gather_or_raise
    rolls.image_sampler.processes.gather_or_raise = takes(7.0, together)
    for step in range(2):
        with rolls.policy.meter.step():
            rolls.collect(step)
        spent = {"rollout": 5.0, "decode": 3.0, "reward": 4.0, "wait": 7.0, "advantage": 2.0}
        assert {name: seconds for name, seconds in rolls.policy.meter.seconds().items() if seconds} == spent


def test_the_advantage_is_computed_by_the_settings_method():
    for method in ("dr_grpo", "rank"):
        experience = source(prompts=FOUR, objective={"advantage": method}).collect(0)
        group = experience.batch.group
        expected = advantages.group_advantages(columns(experience).flatten(), group, method)
        torch.testing.assert_close(experience.advantage, expected)


def red(images, prompts):
    return images[:, 0].mean((1, 2))


def test_contributions_are_named_by_their_prompt_set():
    metadata = [{"prompt_set": "one"}, {"prompt_set": "one"}, {"prompt_set": "two"}, {"prompt_set": "two"}]
    prompts = small.PromptSet(["a cat", "a sun", "a owl", "a dog"], metadata)
    metrics = source(rewards={"red": red}, prompts=prompts).collect(0).metrics
    for name in ("one", "two"):
        assert metrics[f"advantage/share/{name}/main"] + metrics[f"advantage/share/{name}/red"] == pytest.approx(1)
    assert "advantage/share/main" not in metrics
