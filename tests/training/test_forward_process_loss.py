"""Objectives that need a number of the whole group, images drawn by the old policy, and whether the newer objectives learn at all."""

from dataclasses import replace

import pytest
import torch
from support import small_policy as small

from flow_grpo.config.anchor_config import DecayRamp
from flow_grpo.distributed.processes import Processes
from flow_grpo.training.update import PolicyUpdate

ODE = {}
ADVANTAGE = torch.tensor([[1.0, -0.5, -0.7, 0.2], [0.3, 0.4, -0.8, 0.1], [-0.9, 0.6, 0.5, -0.2]])
SETTINGS = {"crd": {"beta": 0.7, "advantage_max": 0.8}, "dgpo": {"beta": 20.0}, "pepg": {}, "awm": {}}


def settings(name, microbatch=4, **changes):
    objective = {"name": name, "num_noise_levels": 2, **SETTINGS[name], **changes.pop("objective", {})}
    more = {"prompts_per_step": 3, "images_per_prompt": 4, "ema_decay": 0, "optimizer": {"eps": 0.05, "lr": 0.05}, **changes}
    return small.settings(sampling=ODE, objective=objective, microbatch=microbatch, **more)


def policy_with_old():
    policy = small.policy()
    policy.lora.add_adapter_copy("old")
    small.move(policy, 0.3, seed=7, adapter="old")
    return policy


def collected(name, microbatch=4, advantage=ADVANTAGE, **changes):
    policy, args = policy_with_old(), settings(name, microbatch, **changes)
    experience = small.experience(policy, args, advantage, [])
    return (
        policy,
        args,
        experience,
        small.forward_process_loss(policy, args, experience, policy.encode(experience.batch.prompts), 3),
    )


def trained(policy, adapter="default"):
    return torch.cat([p.detach().flatten() for p in policy.trainable_parameters(adapter).values()]).clone()


def gradient(policy, value):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(policy.trainable_parameters().values()))])


def by_hand(name, policy, experience, terms, draw):
    """The loss of each row in float64, its group's number from all of the group's rows at once."""
    level = terms.noise_levels[draw]
    place, rows = level.sigma.view(-1, 1, 1, 1), torch.arange(len(level.sigma))
    x, advantage = (1 - place) * terms.x0 + place * level.eps, experience.advantage.double()

    def error(adaptive):
        one = policy.velocity(x, level.timestep, terms.conditioning, rows).double() - (level.eps - terms.x0).double()
        size = one.detach().abs().flatten(1).mean(1) if adaptive else 1.0
        return one.square().flatten(1).mean(1) / size

    def centre(value):
        return value.view(3, 4).mean(1).repeat_interleave(4).detach()

    now = error(name == "crd")
    with torch.no_grad(), policy.lora.use("old") if name == "crd" else policy.base_model():
        before = error(name == "crd")
    if name == "dgpo":
        return torch.sigmoid(centre(20.0 * advantage * (now - before))) * advantage * now
    reward, wanted = before - now, 0.5 + 0.5 * (advantage / 0.8).clamp(-1, 1)
    return 0.8 / 0.7 * (0.7 * (reward - centre(reward)) - (wanted - centre(wanted))) ** 2


@pytest.mark.parametrize("name", ["crd", "dgpo"])
@pytest.mark.parametrize("chunks", [[[0, 1, 2, 3], [8, 9, 10, 11]], [[0, 1, 2], [3, 8, 9], [10, 11, 10]]])
def test_a_groups_number_is_that_of_all_its_images_whatever_chunk_they_are_in(name, chunks):
    """The second group takes no part; the last row of the last small chunk is padding."""
    policy, _, experience, terms = collected(name, microbatch=len(chunks[0]))
    pairs = [(torch.tensor(rows), torch.ones(len(rows))) for rows in chunks]
    if len(chunks) == 3:
        pairs[-1][1][-1] = 0
    small.move(policy, 0.1, seed=2)  # since the images were drawn
    terms.before_update(pairs)
    for rows, weight in pairs:
        for draw, loss in enumerate(terms.losses(rows, weight > 0)):
            expected = by_hand(name, policy, experience, terms, draw)[rows]
            torch.testing.assert_close(loss.value.double(), expected, rtol=1e-3, atol=1e-5)
            ours, theirs = (gradient(policy, (one * weight).sum()) for one in (loss.value, expected))
            assert theirs.abs().max() > 0
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["crd", "dgpo"])
def test_the_micro_batch_changes_nothing_where_groups_are_compared(name):
    """Three updates, of a group each, of which one has no signal: with padding, and split up."""
    ends = []
    for microbatch in (12, 3):
        policy, args, experience, _ = collected(name, microbatch, ADVANTAGE * torch.tensor([[1.0], [0.0], [1.0]]), updates=3)
        metrics = PolicyUpdate(policy, args, 0, Processes())(experience, 0)
        ends.append((trained(policy), metrics["loss"]))
    for end, loss in ends[1:]:
        torch.testing.assert_close(end, ends[0][0], rtol=1e-4, atol=1e-5)
        assert loss == pytest.approx(ends[0][1], rel=1e-4)


def test_each_update_compares_with_the_policy_that_it_finds():
    policy, _, _, terms = collected("dgpo", 3)
    chunks = [(torch.arange(12)[i : i + 3], torch.ones(3)) for i in (0, 3, 6, 9)]
    terms.before_update(chunks)
    first = [mean.clone() for mean in terms.group_means]
    small.move(policy, 0.3, seed=3)
    terms.before_update(chunks)
    assert all((now - then).abs().max() > 1e-3 for now, then in zip(terms.group_means, first, strict=True))


def test_a_groups_mean_is_over_the_rows_of_the_update_without_those_that_fill_chunks():
    _, _, _, terms = collected("dgpo", 3)
    everything = [(torch.arange(12)[i : i + 3], torch.ones(3)) for i in (0, 3, 6, 9)]
    numbers = []
    terms._group_statistic = lambda image, rows, number=terms._group_statistic: (
        numbers.append((rows, number(image, rows))) or numbers[-1][1]
    )
    terms.before_update(everything)
    by_row = torch.zeros(12)
    for rows, values in numbers[:4]:  # at the first noise level
        by_row[rows] = values
    fill = torch.tensor([1.0, 1.0, 0.0])
    terms.before_update([(torch.tensor([0, 1, 2]), fill), (torch.tensor([4, 5, 6]), 1 - fill), (torch.arange(3), 0 * fill)])
    mean = terms.group_means[0]
    torch.testing.assert_close(mean[:4], by_row[:2].mean().expand(4))
    torch.testing.assert_close(mean[4:8], by_row[6].expand(4))
    assert mean[8:].eq(0).all(), "no row of the third group is in the update"


def test_nothing_is_computed_before_an_update_where_micro_batches_hold_whole_groups():
    for name, microbatch, calls in (("dgpo", 4, 0), ("dgpo", 12, 0), ("dgpo", 3, 16), ("awm", 3, 0)):
        policy, _, _, terms = collected(name, microbatch)
        seen, velocity = [], policy.velocity
        policy.velocity = lambda *given, seen=seen, v=velocity: seen.append(torch.is_grad_enabled()) or v(*given)
        rows = torch.arange(12).split(microbatch)
        terms.before_update([(chunk, torch.ones(len(chunk))) for chunk in rows])
        assert seen == [False] * calls, "of the policy and of the base model, without gradients"


@pytest.mark.parametrize("name", ["crd", "dgpo"])
def test_a_process_computes_for_its_groups_what_one_process_computes_for_all(name):
    """Of three groups it has the first and the last, whose numbers have a gap."""
    policy, args, experience, terms = collected(name, 4)
    rows = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    own = replace(
        experience,
        batch=experience.batch.take(rows),
        trajectory=experience.trajectory.take(rows),
        advantage=experience.advantage[rows],
        rows=rows,
    )
    args.microbatch = 3
    part = small.forward_process_loss(policy, args, own, policy.encode(own.batch.prompts), 3)
    chunks = [(torch.tensor(one), torch.ones(len(one))) for one in ([0, 1, 2], [3, 4, 5], [6, 7])]
    part.before_update(chunks)
    for chunk, weight in chunks:
        whole = terms.losses(torch.arange(12), torch.ones(12) > 0)
        for loss, expected in zip(part.losses(chunk, weight > 0), whole, strict=True):
            torch.testing.assert_close(loss.value, expected.value[rows[chunk]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_good_images_become_likelier_and_bad_ones_less_so(name):
    """The matching error at the noise that the update draws: three updates on one set of images."""
    changes = {"objective": {"loss_weight": "adaptive", "clip_low": 1.0, "clip_high": 1.0}} if name == "awm" else {}
    policy, args, experience, terms = collected(name, 12, epochs=3, **changes)
    if name == "crd":
        policy.lora.update_copy("old", 0.0)

    def errors():
        with torch.no_grad():
            images = [terms._image(draw, terms._noised(draw, torch.arange(12)), {}) for draw in range(2)]
        return torch.stack([image.adaptive_error(image.v) for image in images]).mean(0)

    before = errors()
    metrics = PolicyUpdate(policy, args, 0, Processes())(experience, 3)
    gain = before - errors()
    assert (gain * experience.advantage).mean() > 3e-4
    if terms.needs.ratio:
        assert metrics["ratio/first_update_max_deviation"] == 0
        assert metrics["ratio/max_deviation"] > 1e-4


def test_the_second_update_compares_with_the_policy_of_the_rollout():
    policy, args, experience, _ = collected("awm", 4, epochs=2)
    metrics = PolicyUpdate(policy, args, 0, Processes())(experience, 3)
    assert metrics["ratio/first_update_max_deviation"] == 0
    assert metrics["ratio/max_deviation"] > 0


# -- the old policy ---------------------------------------------------------------------------------------------------------


def test_images_are_drawn_by_the_old_policy_where_that_is_asked_for():
    def finals(policy, **objective):
        args = small.settings(sampling=ODE, objective={"name": "nft", **objective})
        return small.experience(policy, args, torch.ones(2, 3), []).trajectory.final

    policy = policy_with_old()
    by_trained, by_old = finals(policy), finals(policy, rollout_policy="old")
    assert (by_trained - by_old).abs().max() > 1e-3
    with policy.lora.use("old"):
        assert torch.equal(finals(policy), by_old)
    assert torch.equal(finals(policy), by_trained), "the trained policy is active again"
    assert all(p.requires_grad for p in policy.trainable_parameters().values())


def test_the_published_decay_of_crds_old_policy():
    ramp = DecayRamp(start=0.25, rate=0.005, max=0.999)
    assert [ramp.at(steps) for steps in (0, 1, 100, 149, 150, 9000)] == pytest.approx(
        [0.25, 0.255, 0.75, 0.995, 0.999, 0.999]
    )
    later = DecayRamp(start=0.25, after=10, rate=0.1, max=0.9)
    assert [later.at(steps) for steps in (0, 10, 12)] == pytest.approx([0.25, 0.25, 0.45])


def test_crd_follows_the_trained_policy_with_its_old_one():
    policy, args, experience, _ = collected(
        "crd", objective={"old_policy_decay": {"start": 0.3, "rate": 0.1, "max": 0.9}}, updates=3
    )
    before = trained(policy, "old")
    PolicyUpdate(policy, args, 0, Processes())(experience, 0)
    torch.testing.assert_close(trained(policy, "old"), 0.6 * before + 0.4 * trained(policy), rtol=1e-5, atol=1e-6)
