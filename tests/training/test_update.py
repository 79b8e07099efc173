"""The update against one by hand: each step's gradient, learning rate, moving average and numbers, and what it leaves when it fails."""

import math
import time

import pytest
import torch
from support import by_hand
from support import small_policy as small

from flow_grpo import sde
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.training.update import PolicyUpdate

WINDOW = [0, 1]
ADVANTAGE = torch.tensor([[1.0, -0.5, -0.7], [0.3, 0.4, -0.8], [-1.2, 0.9, 0.1], [0.0, 0.0, 0.0]])
SMOOTH = {"eps": 0.05}  # of Adam, whose first steps would else be the gradient's sign alone and hide its size


def settings(**changes):
    both = {"prompts_per_step": 4, "images_per_prompt": 3, "microbatch": 4, **changes}
    return small.settings(**{**both, "optimizer": {**SMOOTH, **changes.get("optimizer", {})}})


def trained(policy):
    return torch.cat([p.detach().flatten() for p in policy.trainable_parameters().values()]).clone()


def made(stage_start=0, policy=None, processes=None, **changes):
    policy = policy or small.policy()
    args = settings(**changes)
    if args.ema_decay:
        policy.ema.start()
    return policy, args, PolicyUpdate(policy, args, stage_start, processes or Processes())


def gradients_of(policy_update):
    """The gradients, clipped, of all optimizer steps from here on."""
    seen, adamw = [], policy_update.optimizer.adamw

    def look(*_):
        seen.append(torch.cat([p.grad.flatten() for group in adamw.param_groups for p in group["params"]]).clone())

    adamw.register_step_pre_hook(look)
    return seen


def surrogate(policy, args, experience, rows):
    """The clipped surrogate of rows (n,), (n, K), and the ratios (n, K), all by hand and in one pass."""
    t, conditioning, columns, ratios = experience.trajectory, policy.encode(experience.batch.prompts), [], []
    for k, i in enumerate(t.steps):
        sigma, after = t.schedule.sigmas[i : i + 2].tolist()
        v = policy.velocity(t.x[rows, k], t.schedule.timesteps[i], conditioning, rows).double()
        mean, std = sde.transition("cps", t.x[rows, k].double(), v, sigma, after, 0.8)
        residual = (t.x_next[rows, k].double() - mean).square().flatten(1).mean(1)
        log_prob = -residual / (2 * float(std) ** 2) - math.log(float(std)) - 0.5 * math.log(2 * math.pi)
        ratio, advantage = (log_prob - t.log_prob[rows, k].double()).exp(), experience.advantage[rows].double()
        clipped = ratio.clamp(1 - args.objective.clip_low, 1 + args.objective.clip_high)
        columns.append(-torch.minimum(ratio * advantage, clipped * advantage))
        ratios.append(ratio.detach())
    return torch.stack(columns, 1), torch.stack(ratios, 1)


def gradient(policy, value):
    return [g.double() for g in torch.autograd.grad(value, list(policy.trainable_parameters().values()))]


# -- the whole of it ------------------------------------------------------------------------------------------------------


def test_an_update_is_measured_by_phase_and_named_in_a_profile():
    policy, args, ours = made()
    experience = small.experience(policy, args, ADVANTAGE, WINDOW)
    with policy.meter.step(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        ours(experience, 0)
        assert 0 < ours.seconds <= time.perf_counter() - started
    phases = policy.meter.seconds()
    assert phases.keys() == {"encode", "forward", "backward", "optimizer"}
    assert all(seconds > 0 for seconds in phases.values())
    assert {"update", *phases} <= {event.key for event in profiler.key_averages()}


def test_several_steps_are_the_ones_by_hand():
    """Two updates and two epochs a step, of which each takes half of the prompts; one prompt of four has no signal."""
    o = {
        "lr": 0.04,
        "warmup_steps": 3,
        "final_lr_ratio": 0.25,
        "weight_decay": 0.2,
        "max_grad_norm": 0.012,
        "eps": 0.005,
    }
    changes = {"updates": 2, "epochs": 2, "optimizer": o, "ema_decay": 0.6, "steps": 5}
    policy, args, ours = made(stage_start=2, **changes, objective={"clip_low": 0.0005, "clip_high": 0.002})
    theirs = small.policy()
    weights = list(theirs.trainable_parameters().values())
    adamw = by_hand.AdamW(weights, (0.9, 0.999), 0.005, 0.2, 0.012)
    average, clips, beyond = [w.detach().double() for w in weights], [], 0
    rates = [0.04 / 3, 0.04 * 2 / 3 * (1 - 0.75 / 4), 0.04 * (1 - 0.75 * 2 / 4), 0.04 * (1 - 0.75 * 3 / 4), 0.01, 0.01]
    for step, lr in enumerate(rates, start=2):
        experience = small.experience(policy, args, ADVANTAGE.roll(step, 0), WINDOW, step)
        metrics = ours(experience, step)
        losses, seen, shares = [], [], []
        for groups in [torch.arange(0, 6), torch.arange(6, 12)] * 2:
            rows = groups[torch.isin(groups, experience.rows)]
            values, ratios = surrogate(theirs, args, experience, rows)
            losses.append(values.sum() / (6 * 2))  # rows without signal count in the mean
            norm = adamw.step(gradient(theirs, losses[-1]), lr)
            clips.append(norm > 0.012)
            beyond += int(((ratios < 0.9995) | (ratios > 1.002)).sum())
            seen.append(ratios.flatten())
            decay = min(0.6, (1 + step) / (10 + step))
            average = [decay * mean + (1 - decay) * value for mean, value in zip(average, adamw.weights, strict=True)]
            for weight, value in zip(weights, adamw.weights, strict=True):
                weight.data.copy_(value)
        shares = torch.cat(seen)
        assert metrics["loss"] == pytest.approx(float(sum(losses)) / 4, rel=2e-3, abs=1e-5)
        assert metrics["lr"] == pytest.approx(lr, rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=2e-3), "of the last update, before clipping"
        assert metrics["grad_rms"] == pytest.approx(norm / math.sqrt(len(trained(policy))), rel=2e-3)
        assert metrics["ratio/first_update_max_deviation"] == 0
        assert metrics["ratio/mean"] == pytest.approx(float(shares.mean()), rel=1e-4)
        assert metrics["ratio/max_deviation"] == pytest.approx(float((shares - 1).abs().max()), rel=2e-3)
        hand = torch.cat([w.flatten() for w in adamw.weights])
        torch.testing.assert_close(trained(policy).double(), hand, rtol=1e-3, atol=2e-5)
        mean = torch.cat([policy.ema.average[name].flatten() for name in policy.trainable_parameters()])
        torch.testing.assert_close(mean.double(), torch.cat([a.flatten() for a in average]), rtol=1e-3, atol=2e-5)
    assert any(clips)
    assert not all(clips)
    assert beyond > 3, "the clip range matters"
    assert not ours.mid_step


def test_the_average_follows_every_nth_optimizer_step_of_its_stage(monkeypatch):
    policy, args, ours = made(stage_start=2, ema_decay=0.9, ema_every=3, updates=2, epochs=2, optimizer={"lr": 0.01})
    steps, averaged = [], []
    step, average = ours.optimizer.step, policy.ema.update
    monkeypatch.setattr(ours.optimizer, "step", lambda lr, norm: steps.append(lr) or step(lr, norm))
    monkeypatch.setattr(policy.ema, "update", lambda decay: averaged.append(len(steps)) or average(decay))
    for number in (2, 3, 4):
        ours(small.experience(policy, args, ADVANTAGE, WINDOW, number), number)
    assert len(steps) == 12
    assert averaged == [3, 6, 9, 12]


def test_the_learning_rate_rises_to_lr_then_falls_in_a_line_to_the_last_step_of_its_part():
    policy, args, ours = made(stage_start=3, steps=11, optimizer={"lr": 2.0, "warmup_steps": 4, "final_lr_ratio": 0.2})
    silent = small.experience(policy, args, torch.zeros(4, 3), WINDOW)
    rates = [ours(silent, step)["lr"] for step in (3, 4, 6, 7, 8, 12, 13, 20)]
    assert rates == pytest.approx([0.5, 0.92, 1.52, 1.36, 1.2, 0.56, 0.4, 0.4])
    for steps, expected in ((1, 2.0), (2, 2.0)):
        _, _, alone = made(policy=policy, steps=steps, optimizer={"lr": 2.0, "final_lr_ratio": 0.5})
        assert alone(silent, 0)["lr"] == expected
    assert alone(silent, 1)["lr"] == 1.0


@pytest.mark.parametrize("decay", [0.05, 0.9])
def test_the_moving_average_follows_faster_at_the_beginning(decay):
    policy, args, ours = made(ema_decay=decay, optimizer={"lr": 0.01})
    average = trained(policy)
    for step in (0, 1, 30, 200):
        ours(small.experience(policy, args, ADVANTAGE, WINDOW, step), step)
        share = min(decay, (1 + step) / (10 + step))
        average = share * average + (1 - share) * trained(policy)
        mean = torch.cat([policy.ema.average[name].flatten() for name in policy.trainable_parameters()])
        torch.testing.assert_close(mean, average, rtol=1e-5, atol=1e-6)


def test_without_a_moving_average_none_is_made():
    policy, args, ours = made(ema_decay=0)
    ours(small.experience(policy, args, ADVANTAGE, WINDOW), 0)
    assert not policy.ema.average


# -- which rows, and what they weigh ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [1, 2, 3, 6, 12])
def test_the_micro_batch_changes_nothing(microbatch):
    results = []
    for size in (4, microbatch):
        policy, args, ours = made(microbatch=size, updates=2)
        given, seen = small.experience(policy, args, ADVANTAGE, WINDOW), gradients_of(ours)
        metrics = ours(given, 0)
        results.append((metrics, torch.stack(seen)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3, abs=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-5)


def test_the_gradient_is_the_mean_over_all_groups_of_the_update_and_all_trained_steps():
    """Also of those without signal, which keep their places with weight 0."""
    advantage = torch.zeros(6, 4)  # 24 rows, of which 12 have signal
    advantage[[1, 3, 5]] = torch.cat([ADVANTAGE[:3], ADVANTAGE[:3, :1].flip(0)], 1)
    policy, args, ours = made(prompts_per_step=6, images_per_prompt=4, microbatch=8)
    given, sizes, velocity = small.experience(policy, args, advantage, WINDOW), [], policy.velocity
    values, _ = surrogate(policy, args, given, torch.arange(24))
    expected = torch.cat([g.flatten() for g in gradient(policy, values.sum() / 24 / 2)])

    def counted(x, *rest):
        sizes.append(len(x))
        return velocity(x, *rest)

    policy.velocity = counted
    seen = gradients_of(ours)
    metrics = ours(given, 0)
    assert metrics["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-3)
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-3, atol=1e-6)
    assert sizes == [8] * 6, "three chunks for both trained steps"


def test_a_chunk_without_any_signal_is_not_computed_where_rows_keep_their_places():
    policy, args, ours = made(microbatch=3)
    given, sizes, velocity = small.experience(policy, args, ADVANTAGE.roll(1, 0), WINDOW), [], policy.velocity
    policy.velocity = lambda x, *rest: sizes.append(len(x)) or velocity(x, *rest)
    ours(given, 0)
    assert sizes == [3] * 6


def test_rows_that_fill_up_a_chunk_count_in_no_number():
    auto = {"clip_low": "auto", "clip_high": "auto"}
    changes = {"epochs": 3, "objective": auto, "optimizer": {"lr": 0.1}}
    policy, args, ours = made(microbatch=4, **changes)
    given = small.experience(policy, args, ADVANTAGE, WINDOW)
    assert len(given.rows) == 9
    metrics = ours(given, 0)
    assert metrics["clip_range/step_0"] > 1e-5
    _, whole = made(microbatch=3, **changes)[1:]
    expected = whole(small.experience(whole.policy, whole.args, ADVANTAGE, WINDOW), 0)
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_updates_share_the_groups_evenly_and_what_is_missing_is_no_update():
    """Three groups of which one was dropped: two updates on one group each, the mean of a loss over those."""
    policy, args, ours = made(updates=4, optimizer={"lr": 1e-9})
    given = small.experience(policy, args, ADVANTAGE[:3], WINDOW)
    kept = given.rows[given.rows >= 3]
    given = given.__class__(**{**vars(given), "groups": torch.tensor([1, 2]), "rows": kept})
    values, _ = surrogate(policy, args, given, kept)
    expected = [float(values[rows].sum()) / 3 / 2 for rows in (slice(0, 3), slice(3, 6))]
    seen = gradients_of(ours)
    assert not ours.mid_step, "it has not begun"
    metrics = ours(given, 0)
    assert len(seen) == 2
    assert metrics["loss"] == pytest.approx(sum(expected) / 2, abs=1e-5)
    norms = [torch.cat([g.flatten() for g in gradient(policy, v.sum() / 6)]).norm() for v in (
        surrogate(policy, args, given, rows)[0] for rows in (kept[:3], kept[3:])
    )]  # fmt: skip
    assert [float(g.norm()) for g in seen] == pytest.approx([float(norm) for norm in norms], rel=1e-3)


def test_three_groups_in_two_updates_are_two_and_one():
    policy, args, ours = made(prompts_per_step=4, updates=2, optimizer={"lr": 1e-9})
    given = small.experience(policy, args, ADVANTAGE[:3], WINDOW)
    expected = [
        torch.cat([g.flatten() for g in gradient(policy, surrogate(policy, args, given, rows)[0].sum() / len(rows) / 2)])
        for rows in (torch.arange(6), torch.arange(6, 9))
    ]
    seen = gradients_of(ours)
    ours(given, 0)
    torch.testing.assert_close(torch.stack(seen).double(), torch.stack(expected), rtol=1e-3, atol=1e-6)


def test_an_update_without_signal_moves_nothing_and_is_counted_in_the_loss():
    policy, args, ours = made(updates=2)
    before, seen = trained(policy), gradients_of(ours)
    metrics = ours(small.experience(policy, args, torch.zeros(4, 3), WINDOW), 0)
    assert metrics == {"loss": 0.0, "lr": args.optimizer.lr}
    assert torch.equal(trained(policy), before)
    assert torch.equal(torch.cat([policy.ema.average[name].flatten() for name in policy.trainable_parameters()]), before)
    assert not seen
    half = small.experience(policy, args, torch.cat([ADVANTAGE[:2], torch.zeros(2, 3)]), WINDOW)
    values, _ = surrogate(policy, args, half, torch.arange(6))
    assert ours(half, 0)["loss"] == pytest.approx(float(values.sum()) / 12 / 2, abs=1e-5)
    assert len(seen) == 1
    dropped = half.__class__(**{**vars(half), "groups": torch.arange(0), "rows": torch.arange(0)})
    assert ours(dropped, 0)["loss"] == 0, "every group was dropped"


def test_the_loss_of_several_noise_levels_is_their_mean():
    policy, args, ours = made(objective={"name": "awm", "num_noise_levels": 3})
    given = small.experience(policy, args, ADVANTAGE, [])
    terms = small.forward_process_loss(policy, args, given, policy.encode(given.batch.prompts), 4)
    values = torch.stack([loss.value for loss in terms.losses(torch.arange(12), torch.ones(12, dtype=torch.bool))])
    expected = torch.cat([g.flatten() for g in gradient(policy, values.mean())])
    seen = gradients_of(ours)
    metrics = ours(given, 4)
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-3, atol=1e-5)
    assert metrics["loss"] == pytest.approx(float(values.mean()), abs=1e-5)
    assert metrics["ratio/mean"] == pytest.approx(1)


def test_the_noise_of_an_objective_on_images_is_that_of_its_training_step():
    losses = []
    for step in (0, 1):
        policy, args, ours = made(objective={"name": "sft"})
        losses.append(ours(small.experience(policy, args, ADVANTAGE, []), step)["sft/error"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


# -- the old policy of nft --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.25, 0.0, 1.0])
def test_the_old_policy_of_nft_follows_once_a_step_after_its_updates(decay):
    policy = small.policy()
    policy.lora.add_adapter_copy("old")
    small.move(policy, 0.3, seed=9, adapter="old")
    objective = {"name": "nft", "old_policy_decay": decay}
    _, args, ours = made(policy=policy, objective=objective, updates=2, optimizer={"lr": 0.1})
    old = torch.cat([p.detach().flatten() for p in policy.trainable_parameters("old").values()]).clone()
    for step in (0, 1):
        before = trained(policy)
        ours(small.experience(policy, args, ADVANTAGE, [], step), step)
        assert (trained(policy) - before).abs().max() > 0.01
        old = decay * old + (1 - decay) * trained(policy)
        now = torch.cat([p.detach().flatten() for p in policy.trainable_parameters("old").values()])
        torch.testing.assert_close(now, old, rtol=1e-5, atol=1e-6)


def test_other_objectives_leave_an_old_policy_alone():
    policy = small.policy()
    policy.lora.add_adapter_copy("old")
    _, args, ours = made(policy=policy, objective={"name": "awm"}, optimizer={"lr": 0.1})
    old = torch.cat([p.detach().flatten() for p in policy.trainable_parameters("old").values()]).clone()
    ours(small.experience(policy, args, ADVANTAGE, []), 0)
    assert torch.equal(torch.cat([p.detach().flatten() for p in policy.trainable_parameters("old").values()]), old)


# -- the ratio before the first update ----------------------------------------------------------------------------------------


def depends_on_place(policy, by=1e-4):
    velocity = policy.velocity
    policy.velocity = lambda x, *rest: velocity(x, *rest) + by * torch.arange(len(x)).view(-1, 1, 1, 1)


def test_a_ratio_that_is_not_1_in_its_place_is_an_error_that_leaves_nothing():
    policy, args, ours = made()
    given, before = small.experience(policy, args, ADVANTAGE, WINDOW), trained(policy)
    small.move(policy, 1e-3, seed=3)
    moved = trained(policy)
    with pytest.raises(ValueError, match=r"ratio of new to old probability deviates from 1 by [1-9]\.\de-0\d: the update"):
        ours(given, 0)
    assert torch.equal(trained(policy), moved)
    assert not torch.equal(before, moved)
    assert not ours.mid_step


def test_another_processs_ratio_is_ones_own():
    for ratio in (0.5, math.nan):
        policy, args, ours = made(processes=small.Two(lambda value, ratio=ratio: ratio if value == 0.0 else value))
        with pytest.raises(ValueError, match=r"(deviates from 1 by 5.0e-01|new to old probability is nan)"):
            ours(small.experience(policy, args, ADVANTAGE, WINDOW), 0)


def test_an_objective_that_compares_with_nothing_has_no_ratio_to_check():
    policy, args, ours = made(objective={"name": "sft"})
    depends_on_place(policy)
    metrics = ours(small.experience(policy, args, ADVANTAGE, []), 0)
    assert "ratio/first_update_max_deviation" not in metrics
    assert metrics["grad_norm"] > 0


def test_a_single_row_is_enough_for_an_update():
    policy, args, ours = made(objective={"name": "sft"})
    given = small.experience(policy, args, ADVANTAGE, [])
    given = given.__class__(**{**vars(given), "rows": torch.tensor([5]), "rows_per_group": 1})
    assert ours(given, 0)["grad_norm"] > 0


def test_rows_are_adjacent_where_nothing_is_compared():
    policy, args, ours = made(objective={"name": "sft"}, microbatch=3)
    given, sizes, velocity = small.experience(policy, args, ADVANTAGE, []), [], policy.velocity
    given = given.__class__(**{**vars(given), "rows": torch.tensor([0, 4, 8]), "rows_per_group": 1})
    policy.velocity = lambda x, *rest: sizes.append(len(x)) or velocity(x, *rest)
    ours(given, 0)
    assert sizes == [3]


# -- when it fails ----------------------------------------------------------------------------------------------------------


def spoiled(ours, at, value=math.nan):
    """The gradient of the `at`-th optimizer step is no number."""
    reduce, calls = ours.optimizer.reduce_gradients, []

    def spoiling():
        calls.append(1)
        if len(calls) == at:
            ours.optimizer.parameters[0].grad.fill_(value)
        return reduce()

    ours.optimizer.reduce_gradients = spoiling


def test_a_gradient_that_is_not_finite_stops_before_anything_has_moved():
    policy, args, ours = made()
    before = trained(policy)
    spoiled(ours, 1)
    with pytest.raises(ValueError, match=r"the gradient of step 4 is not finite: look at the last lines of metrics\.jsonl"):
        ours(small.experience(policy, args, ADVANTAGE, WINDOW), 3)
    assert torch.equal(trained(policy), before)
    assert not ours.mid_step, "the step has not begun"
    assert torch.equal(torch.cat([policy.ema.average[name].flatten() for name in policy.trainable_parameters()]), before)
    ours(small.experience(policy, args, ADVANTAGE, WINDOW), 3)
    assert not ours.mid_step


def test_what_fails_in_the_second_update_leaves_half_a_step():
    policy, args, ours = made(updates=2)
    spoiled(ours, 2)
    with pytest.raises(ValueError, match="is not finite"):
        ours(small.experience(policy, args, ADVANTAGE, WINDOW), 0)
    assert ours.mid_step


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), ValueError("of a library"), FlowGRPOError("no scale")]
)
def test_an_error_within_a_move_that_is_not_ours_leaves_half_a_step(error):
    policy, args, ours = made()

    def fail(lr, norm):
        raise error

    ours.optimizer.step = fail
    with pytest.raises(type(error)):
        ours(small.experience(policy, args, ADVANTAGE, WINDOW), 0)
    assert ours.mid_step != isinstance(error, FlowGRPOError)


def test_an_overflow_in_fp16_is_counted_and_passed_over():
    policy, args, ours = made(policy=small.policy(torch.float16), dtype="fp16", ema_decay=0.5)
    before = trained(policy)
    spoiled(ours, 1, math.inf)
    metrics = ours(small.experience(policy, args, ADVANTAGE, WINDOW), 0)
    assert metrics["grad_overflow"] == 1
    assert "grad_norm" not in metrics
    assert torch.equal(trained(policy), before)
    assert torch.equal(torch.cat([policy.ema.average[name].flatten() for name in policy.trainable_parameters()]), before)


def test_giving_up_forgets_gradients_and_ratios():
    policy, _, ours = made(objective={"clip_low": "auto", "clip_high": "auto"}, epochs=2)
    ours.optimizer.backward(sum(p.sum() for p in policy.trainable_parameters().values()))
    ours.clip.observe(1, torch.ones(3))
    ours.discard()
    assert all(p.grad is None for p in policy.trainable_parameters().values())
    ours.clip.update(Processes())
    assert not ours.clip.state


def test_clip_ranges_adapt_after_each_update_and_are_logged():
    policy, args, ours = made(objective={"clip_low": "auto", "clip_high": "auto"}, epochs=3)
    states, learn = [], ours.clip.update
    ours.clip.update = lambda processes: (learn(processes), states.append(dict(ours.clip.state)))
    metrics = ours(small.experience(policy, args, ADVANTAGE, WINDOW), 0)
    assert [sorted(state) for state in states] == [[], [0, 1], [0, 1]]
    assert states[1] != states[2]
    assert {k: v for k, v in metrics.items() if "clip_range" in k} == {
        f"clip_range/step_{k}": v for k, v in states[2].items()
    }


# -- state, and several processes -------------------------------------------------------------------------------------------


def test_an_update_goes_on_from_a_state():
    policy, args, ours = made(optimizer={"lr": 0.05})
    ours(small.experience(policy, args, ADVANTAGE, WINDOW), 0)
    state = ours.optimizer.state_dict()
    kept = state["optimizer"]["state"][0]["exp_avg"].clone()
    _, _, other = made(policy=policy, optimizer={"lr": 0.05})
    other.optimizer.load_state_dict(state)
    moments = zip(*(one.optimizer.adamw.state_dict()["state"].values() for one in (ours, other)), strict=True)
    assert all(torch.equal(a[name], b[name]) for a, b in moments for name in ("exp_avg", "exp_avg_sq", "step"))
    ours(small.experience(policy, args, ADVANTAGE, WINDOW), 0)
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], kept), "it is a copy"


def test_the_rows_of_other_processes_count_in_the_mean_and_in_the_numbers():
    """The other process has the same rows once more, with gradients three times as large."""
    policy, args, _ = made(optimizer={"max_grad_norm": 1e9})
    given = small.experience(policy, args, ADVANTAGE, WINDOW)
    alone = made(optimizer={"max_grad_norm": 1e9})[2](given, 0)
    pair = PolicyUpdate(policy, args, 0, small.Two())
    metrics = pair(given, 0)
    assert metrics["grad_norm"] == pytest.approx(4 * alone["grad_norm"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(2 * alone["loss"], abs=1e-6)
    assert metrics["ratio/mean"] == pytest.approx(1)


def test_a_process_without_signal_takes_part_in_the_step_of_the_others():
    policy, args, ours = made(processes=small.Two(lambda value: True if value is False else value))
    before = trained(policy)
    moves = []
    ours.optimizer.step = lambda lr, norm: moves.append(lr)
    metrics = ours(small.experience(policy, args, torch.zeros(4, 3), WINDOW), 0)
    assert len(moves) == 1
    assert metrics["grad_norm"] == 0
    assert torch.equal(trained(policy), before)


@pytest.mark.parametrize("synchronous_backward", [True, False])
def test_processes_in_step_go_backward_as_often_as_the_one_with_most_rows(synchronous_backward):
    policy, args, ours = made(processes=small.Two(lambda value: 5 if type(value) is int else value), microbatch=3)
    given, sizes, velocity = small.experience(policy, args, ADVANTAGE, WINDOW), [], policy.velocity
    values, _ = surrogate(policy, args, given, torch.arange(12))
    expected = torch.cat([g.flatten() for g in gradient(policy, values.sum() / 12 / 2)])
    policy.velocity = lambda x, *rest: sizes.append(len(x)) or velocity(x, *rest)
    ours.optimizer.synchronous_backward = synchronous_backward
    metrics = ours(given, 0)
    assert sizes == [3] * 2 * (5 if synchronous_backward else 3), (
        "two more chunks, which weigh nothing, for both trained steps"
    )
    assert metrics["grad_norm"] == pytest.approx(4 * float(expected.norm()), rel=1e-3)
    assert metrics["ratio/mean"] == pytest.approx(1)


def test_the_settings_of_a_part_reach_its_optimizer():
    _, _, ours = made(optimizer={"weight_decay": 0.7, "max_grad_norm": 0.4})
    [group] = ours.optimizer.adamw.param_groups
    assert (group["weight_decay"], group["eps"]) == (0.7, 0.05)
    assert ours.optimizer.max_norm == 0.4
