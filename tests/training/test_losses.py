"""The terms of an update against their formulas in float64: values, gradients, which numbers are drawn and which copy is asked."""

import functools
import math
import weakref

import pytest
import torch
from scipy import stats
from support import small_policy as small

from flow_grpo import sampling, sde
from flow_grpo.config.objective_by_name import section_type
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.policy import Policy
from flow_grpo.training.custom_functions import load_custom_function
from flow_grpo.training.forward_process_loss import mean_by_group
from flow_grpo.training.losses import ClipRange, LossMetrics
from flow_grpo.types import Experience, Loss, Schedule, Trajectory

OWN = "tests/support/sample_objectives.py"
WINDOW = [0, 1]
ALL = torch.ones(6, dtype=torch.bool)
ADVANTAGE = torch.tensor([[1.0, -0.5, -0.7], [0.3, 0.4, -0.8]])


def gradient(policy, value):
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(value, list(policy.trainable_parameters().values()), retain_graph=True)]
    )


# -- objectives on steps ------------------------------------------------------------------------------------------------


class Seen:
    """A trained step of all rows, computed once more: the policy's mean by its velocity and the transition's formula, in float64."""

    def __init__(self, policy, args, experience, k, reference=False):
        t, i = experience.trajectory, experience.trajectory.steps[k]
        sigma, after = (float(s) for s in t.schedule.sigmas[i : i + 2])
        conditioning = policy.encode(experience.batch.prompts)
        v = policy.velocity(t.x[:, k], t.schedule.timesteps[i], conditioning, torch.arange(len(t.x))).double()
        mean, std = sde.transition(
            args.objective.transition,
            t.x[:, k].double(),
            v,
            sigma,
            after,
            args.objective.noise_level,
            float(t.schedule.sigmas[1]),
        )
        self.v, self.mean, self.std, self.delta = v, mean, float(std), after - sigma
        residual = (t.x_next[:, k].double() - mean).square().flatten(1).mean(1)
        self.log_prob = -residual / (2 * self.std**2) - math.log(self.std) - 0.5 * math.log(2 * math.pi)
        self.old_log_prob, self.old_mean = t.log_prob[:, k].double(), t.mean[:, k].double()
        self.ratio = (self.log_prob - self.old_log_prob).exp()
        self.moved = (mean - self.old_mean).square().flatten(1).mean(1) / (2 * self.std**2)


def clipped(ratio, advantage, low, high):
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def collected(advantage=ADVANTAGE, moved=0.1, **changes):
    """A policy that has moved since it drew the images, its settings and what it drew."""
    policy, args = small.policy(), small.settings(**changes)
    experience = small.experience(policy, args, advantage, WINDOW)
    small.move(policy, moved, seed=1)
    return policy, args, experience


def step_terms(policy, args, experience, clip=None):
    conditioning = policy.encode(experience.batch.prompts)
    return small.step_loss(policy, args, experience, conditioning, clip or ClipRange())


def check(policy, loss, expected, rtol=1e-4):
    torch.testing.assert_close(loss.value.double(), expected, rtol=rtol, atol=1e-6)
    ours, theirs = gradient(policy, loss.value[1] + 2 * loss.value[-1]), gradient(policy, expected[1] + 2 * expected[-1])
    assert theirs.abs().max() > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["grpo", "ppo", "grpo_guard", "dppo", "reinforce", f"{OWN}:sigmoid"])
def test_the_losses_of_objectives_on_steps_are_their_formulas(name):
    own = {"options": {"sharpness": 3.0}} if ":" in name else {}
    objective = {"name": name, "clip_low": 0.002, "clip_high": 0.005, "threshold": 1e-3, **own}
    objective = {key: value for key, value in objective.items() if key in section_type(name).model_fields}
    policy, args, experience = collected(objective=objective)
    terms, advantage = step_terms(policy, args, experience), experience.advantage.double()
    assert terms.count == 2
    assert terms.fixed_positions
    for k, loss in enumerate(terms.losses(torch.arange(6), ALL)):
        seen = Seen(policy, args, experience, k)
        std, ratio = seen.std, seen.ratio
        assert ((ratio - 1).abs() > 0.002).any()
        guarded = (((seen.log_prob - seen.old_log_prob) + seen.moved) * std).exp()
        masked = (seen.moved >= 1e-3) & (advantage * (ratio - 1) > 0)
        expected = {
            "grpo": clipped(ratio, advantage, 0.002, 0.005),
            "ppo": clipped(ratio, advantage, 0.002, 0.005),
            "grpo_guard": clipped(guarded, advantage, 0.002, 0.005) / -seen.delta,
            "dppo": torch.where(masked, 0.0, -advantage * ratio),
            "reinforce": -advantage * seen.log_prob,
        }.get(name, -advantage * torch.sigmoid(3 * (seen.log_prob - seen.old_log_prob)))
        check(policy, loss, expected)
        deviation = ((guarded if name == "grpo_guard" else ratio) - 1).abs()
        torch.testing.assert_close(loss.metrics["ratio/max_deviation"].double(), deviation.detach(), rtol=1e-3, atol=1e-6)
        assert not any(value.requires_grad for value in loss.metrics.values())


def test_the_ratio_is_exactly_1_before_the_policy_has_moved():
    policy, args, experience = collected(moved=0.0)
    for loss in step_terms(policy, args, experience).losses(torch.arange(6), ALL):
        assert (loss.metrics["ratio/max_deviation"] == 0).all()


def test_each_trained_step_takes_its_own_advantage_and_rows_come_in_the_order_they_are_asked_in():
    advantage = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(5))
    policy, args, experience = collected(advantage, objective={"name": "reinforce"})
    assert experience.advantage.shape == (6, 2)
    rows = torch.tensor([4, 0, 5])
    for k, loss in enumerate(step_terms(policy, args, experience).losses(rows, ALL[:3])):
        expected = -experience.advantage[:, k] * Seen(policy, args, experience, k).log_prob
        check(policy, loss, expected[rows])


def test_step_weight_std_weighs_a_step_by_its_std_and_leaves_its_metrics():
    policy, args, experience = collected(objective={"step_weight": "std"})
    for k, loss in enumerate(step_terms(policy, args, experience).losses(torch.arange(6), ALL)):
        seen = Seen(policy, args, experience, k)
        check(policy, loss, seen.std * clipped(seen.ratio, experience.advantage, 0.1, 0.1))
        torch.testing.assert_close(loss.metrics["ratio/mean"].double(), seen.ratio.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kl", [None, "gaussian", "flow_grpo", "velocity", "k3"])
@pytest.mark.parametrize("weighted", ["uniform", "std"])
def test_each_kl_is_its_formula_and_its_gradient_flows_through_the_policy_of_now(kl, weighted):
    changes = {"objective": {"transition": "flow_sde", "kl": kl, "kl_weight": 3.0, "step_weight": weighted}}
    policy, args, experience = collected(**changes)
    for k, loss in enumerate(step_terms(policy, args, experience).losses(torch.arange(6), ALL)):
        seen = Seen(policy, args, experience, k)
        with torch.no_grad(), policy.base_model():
            base = Seen(policy, args, experience, k)
        gaussian = (seen.mean - base.mean).square().flatten(1).mean(1) / (2 * seen.std**2)
        apart = base.log_prob - seen.log_prob
        expected = {
            "flow_grpo": gaussian * -seen.delta,
            "velocity": (seen.v - base.v).square().flatten(1).mean(1),
            "k3": apart.exp() - apart - 1,
        }.get(str(kl), gaussian)
        assert expected.min() > 0
        torch.testing.assert_close(loss.metrics["kl"].double(), expected.detach(), rtol=1e-3, atol=1e-9)
        assert not loss.metrics["kl"].requires_grad
        weight = seen.std if weighted == "std" else 1.0
        check(policy, loss, weight * clipped(seen.ratio, experience.advantage, 0.1, 0.1) + 3 * expected, rtol=1e-3)


@pytest.mark.parametrize("auto", [("auto", 0.004), (0.004, "auto"), ("auto", "auto")])
def test_auto_clips_at_what_is_known_of_a_step_and_learns_from_the_rows_that_count(monkeypatch, auto):
    advantage = 1 - 2 * (torch.arange(6.0).view(2, 3) % 2)
    changes = {"clip_low": auto[0], "clip_high": auto[1]}
    policy, args, experience = collected(advantage, moved=0.3, objective=changes, updates=2)
    monkeypatch.setattr(ClipRange, "QUANTILE", 0.5)
    clip = ClipRange()
    clip.state = {0: 0.001}
    ranges = [{"auto": 0.001}, {"auto": math.inf}]
    seen = torch.tensor([True, False, True, True, False, False])
    for k, loss in enumerate(step_terms(policy, args, experience, clip).losses(torch.arange(6), seen)):
        low, high = (ranges[k].get(side, side) for side in auto)
        ratio = Seen(policy, args, experience, k).ratio
        expected = -torch.minimum(
            ratio * experience.advantage,
            torch.maximum(torch.minimum(ratio, ratio.new_tensor(1 + high)), ratio.new_tensor(1 - low))
            * experience.advantage,
        )
        torch.testing.assert_close(loss.value.double(), expected, rtol=1e-4, atol=1e-6)
    clip.update(small.Processes())
    for k, i in enumerate(WINDOW):
        found_there = (Seen(policy, args, experience, k).ratio - 1).abs()[seen].median()
        former = {0: 0.001}.get(i, float(found_there))
        assert clip.range_at(i) == pytest.approx(0.9 * former + 0.1 * float(found_there), rel=1e-3)


def test_clip_ranges_that_are_given_learn_nothing():
    policy, args, experience = collected()
    clip = ClipRange()
    list(step_terms(policy, args, experience, clip).losses(torch.arange(6), ALL))
    clip.update(small.Processes())
    assert not clip.state


# -- calibrated clip ranges -----------------------------------------------------------------------------------------------


def test_a_clip_range_is_the_moving_average_of_the_quantile_of_all_processes(monkeypatch):
    monkeypatch.setattr(ClipRange, "QUANTILE", 0.75)
    clip = ClipRange()
    assert clip.range_at(1) == math.inf
    clip.observe(1, torch.tensor([0.0, 0.1]))
    clip.observe(1, torch.tensor([0.2]))
    clip.update(small.Two(lambda seen: {1: [torch.tensor([0.3, 0.4])], 0: [torch.tensor([math.nan, 0.5, math.inf])]}))
    assert clip.state == pytest.approx({0: 0.5, 1: 0.3})
    assert clip.metrics() == pytest.approx({"clip_range/step_0": 0.5, "clip_range/step_1": 0.3})
    clip.observe(1, torch.tensor([1.0]))
    clip.reset()
    clip.observe(0, torch.zeros(3))
    clip.update(small.Processes())
    assert clip.state == pytest.approx({0: 0.5, 1: 0.3}), "ratios of exactly 1 and what is forgotten count for nothing"
    clip.observe(0, torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    clip.observe(1, torch.tensor([1.0]))
    clip.update(small.Processes())
    assert clip.state == pytest.approx({0: 0.45, 1: 0.9 * 0.3 + 0.1})
    clip.update(small.Processes())
    assert clip.state == pytest.approx({0: 0.45, 1: 0.9 * 0.3 + 0.1}), "what was learned from is used up"


# -- objectives on final latents --------------------------------------------------------------------------------------------


def straight(steps=4):
    """A schedule without shift."""
    sigmas = torch.linspace(1, 0, steps + 1)
    return Schedule(1000 * sigmas[:-1], sigmas)


def ended(final, schedule=None):
    none = torch.zeros(len(final), 0)
    return Trajectory(schedule or straight(), None, none, none, none, none, final)


def drawn(shape=(1,), prompts=2, images=1, step=0, seed=0, schedule=None, **objective):
    """The loss of a policy that is never called."""
    batch = small.PromptSet(["a"] * prompts, [{}] * prompts).repeat(images)
    args = small.settings(objective={"name": "sft", **objective}, seed=seed)
    final = torch.zeros(len(batch.prompts), *shape)
    rows = torch.arange(len(final))
    experience = Experience(batch, ended(final, schedule), torch.zeros(len(final)), rows, images, torch.arange(prompts), {})
    unused_policy, unused_conditioning = object.__new__(Policy), object.__new__(Conditioning)
    return small.forward_process_loss(unused_policy, args, experience, unused_conditioning, step)


def test_noise_levels_are_uniform_in_their_range_and_independent_of_the_noise():
    terms = drawn(prompts=2000, sigma_range=(0.2, 0.6))
    [level] = terms.noise_levels
    assert stats.kstest(level.sigma.numpy(), stats.uniform(0.2, 0.4).cdf).pvalue > 0.01
    assert stats.kstest(level.eps[:, 0].numpy(), "norm").pvalue > 0.01
    assert abs(stats.spearmanr(level.eps[:, 0].numpy(), level.sigma.numpy()).statistic) < 0.08
    torch.testing.assert_close(level.timestep, 1000 * level.sigma)


def test_noise_levels_are_drawn_before_the_schedules_shift():
    shifted = Schedule(torch.tensor([1000.0, 900.0, 400.0]), torch.tensor([1.0, 0.9, 0.4, 0.0]))
    [level] = drawn(prompts=500, schedule=shifted, sigma_range=(0.0, 1.0)).noise_levels
    [plain] = drawn(prompts=500, schedule=straight(3)).noise_levels
    at = (1 - plain.sigma) * 3  # the place in the schedule
    expected = torch.where(at < 1, 1 - 0.1 * at, torch.where(at < 2, 0.9 - 0.5 * (at - 1), 0.4 - 0.4 * (at - 2)))
    torch.testing.assert_close(level.sigma, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(level.timestep, 1000 * level.sigma, rtol=0, atol=1e-2)


def test_noise_belongs_to_draw_step_prompt_and_seed_and_is_shared_in_a_group():
    whole = [
        level
        for step, seed in ((0, 0), (1, 0), (0, 1))
        for level in drawn((16,), prompts=3, images=2, num_noise_levels=2, step=step, seed=seed).noise_levels
    ]
    assert len(whole) == 6
    for level in whole:
        for values in (level.eps, level.timestep, level.sigma):
            assert torch.equal(values[0::2], values[1::2]), "a group's images share it"
    noises = torch.cat([level.eps[0::2] for level in whole])
    sigmas = torch.cat([level.sigma[0::2] for level in whole])
    assert len(noises.unique(dim=0)) == len(sigmas.unique()) == 18
    assert abs(float(noises.mean())) < 0.2
    assert float(noises.std()) == pytest.approx(1, abs=0.15)


def test_noise_is_of_the_streams_by_these_names_so_that_a_run_can_be_repeated_by_another_version():
    [level] = drawn((16,), prompts=2, step=5, seed=7).noise_levels
    for p in (0, 1):
        assert torch.equal(level.eps[p], sampling.noise((16,), 7, "eps", 5, 0, p))
        u = stats.norm.cdf(float(sampling.noise((1,), 7, "sigma", 5, 0, p)))
        assert float(level.sigma[p]) == pytest.approx(u, abs=1e-6)


def finals(name, moved=0.2, kl_weight=0.0, **changes):
    """A policy that has moved since it drew the images, with an old one that is another again."""
    policy = small.policy()
    if name == "nft":
        policy.lora.add_adapter_copy("old")
        small.move(policy, 0.3, seed=7, adapter="old")
    own = {"family": "forward_process"} if ":" in name else {}
    objective = {"name": name, **own, "num_noise_levels": 2, "kl_weight": kl_weight, **changes.pop("objective", {})}
    args = small.settings(objective=objective, microbatch=4, images_per_prompt=4, **changes)
    advantage = torch.tensor([[1.0, -0.5, -0.7, 0.2], [0.3, 0.4, -0.8, 0.1]])
    experience = small.experience(policy, args, advantage, [])
    conditioning = policy.encode(experience.batch.prompts)
    terms = small.forward_process_loss(policy, args, experience, conditioning, 3)
    before = [velocity(policy, terms, draw).detach() for draw in range(2)]
    small.move(policy, moved, seed=1)
    return policy, args, experience, terms, before


def velocity(policy, terms, draw):
    """(B, ...) float64, row by row, at the noised latents."""
    level = terms.noise_levels[draw]
    place = level.sigma.view(-1, 1, 1, 1)
    x = (1 - place) * terms.x0 + place * level.eps
    rows = torch.arange(len(x)).split(1)
    return torch.cat([policy.velocity(x[row], level.timestep[row], terms.conditioning, row) for row in rows]).double()


def error(experience, terms, draw, v):
    return (v - (terms.noise_levels[draw].eps - experience.trajectory.final).double()).square().flatten(1).mean(1)


def test_awm_is_the_clipped_ratio_of_errors_now_and_before_the_updates():
    policy, _, experience, terms, before = finals("awm", updates=2, objective={"clip_low": 0.02, "clip_high": 0.04})
    assert terms.fixed_positions
    rows = torch.tensor([5, 1, 2])
    for draw, loss in enumerate(terms.losses(rows, ALL[:3])):
        ratio = (
            error(experience, terms, draw, before[draw]) - error(experience, terms, draw, velocity(policy, terms, draw))
        ).exp()
        assert ((ratio - 1).abs() > 0.02).any()
        check(policy, loss, clipped(ratio, experience.advantage, 0.02, 0.04)[rows], rtol=1e-3)


@pytest.mark.parametrize("weight", ["uniform", "ghuber"])
def test_awm_with_one_update_compares_with_itself(weight):
    policy, _, experience, terms, _ = finals("awm", objective={"loss_weight": weight})
    assert not terms.fixed_positions
    for draw, loss in enumerate(terms.losses(torch.arange(8), torch.ones(8, dtype=torch.bool))):
        e = error(experience, terms, draw, velocity(policy, terms, draw))
        sigma = terms.noise_levels[draw].sigma.double()
        weighed = e if weight == "uniform" else sigma / 0.25 * ((e + 1e-10) ** 0.25 - 1e-10**0.25)
        assert (loss.metrics["ratio/max_deviation"] == 0).all()
        check(policy, loss, -experience.advantage * (weighed.detach() - weighed).exp(), rtol=1e-3)


@pytest.mark.parametrize(("name", "updates", "epochs", "compares"), [
    ("awm", 1, 2, True), ("awm", 2, 1, True), ("nft", 2, 2, False), ("sft", 2, 1, False), (f"{OWN}:matching", 2, 1, True),
    (f"{OWN}:matching", 1, 1, False),
])  # fmt: skip
def test_the_velocity_before_the_updates_is_kept_where_an_objective_compares_with_it(name, updates, epochs, compares):
    policy, _, _, terms, before = finals(name, updates=updates, epochs=epochs)
    assert terms.fixed_positions == compares
    for draw in range(2):
        image = terms._image(draw, terms._noised(draw, torch.tensor([6, 1])), {})
        now = velocity(policy, terms, draw)
        assert (now - before[draw]).abs().max() > 0.01
        expected = before[draw] if compares else now
        torch.testing.assert_close(image.v_rollout.double(), expected[[6, 1]].detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(image.v.double(), now[[6, 1]], rtol=1e-4, atol=1e-5)
        assert not image.v_rollout.requires_grad


def test_the_velocity_before_the_updates_is_computed_by_the_kernel_that_is_compared():
    """A compiled forward pass with gradients may be another one than without."""
    policy, args, experience, _, before = finals("awm", updates=2, moved=0.0)
    calls, velocity_of = [], policy.velocity
    policy.velocity = lambda x, *rest: calls.append((len(x), torch.is_grad_enabled())) or velocity_of(x, *rest)
    for compiled in (False, True):
        policy.compiled = compiled
        calls.clear()
        terms = small.forward_process_loss(policy, args, experience, policy.encode(experience.batch.prompts), 3)
        assert calls == [(4, compiled)] * 4, "two micro-batches for each noise level"
        for draw in range(2):
            assert not terms.v_rollout[draw].requires_grad
            torch.testing.assert_close(terms.v_rollout[draw].double(), before[draw], rtol=1e-4, atol=1e-5)


def test_no_gradient_flows_to_the_base_model_where_all_weights_are_trained():
    policy = small.policy(lora=False)
    policy.enable_full_finetuning()
    policy.trained.store_base_weights("cpu")
    args = small.settings(objective={"name": "sft", "kl_weight": 1.0}, lora=None)
    experience = small.experience(policy, args, ADVANTAGE, [])
    terms = small.forward_process_loss(policy, args, experience, policy.encode(experience.batch.prompts), 0)
    noised = terms._noised(0, torch.arange(2))
    references = terms.anchors.evaluate(functools.partial(terms._velocity, noised))
    assert terms._image(0, noised, references).v.requires_grad
    assert not references["base"].v.requires_grad


def test_nft_pulls_to_the_old_adapters_velocity_and_not_to_the_trained_ones():
    policy, _, experience, terms, _ = finals("nft", objective={"beta": 0.3, "advantage_max": 0.6})
    for draw, loss in enumerate(terms.losses(torch.arange(8), torch.ones(8, dtype=torch.bool))):
        level, v = terms.noise_levels[draw], velocity(policy, terms, draw)
        with torch.no_grad(), policy.lora.use("old"):
            v_old = velocity(policy, terms, draw)
        assert (v - v_old).abs().max() > 0.01
        place, x0 = level.sigma.view(-1, 1, 1, 1).double(), experience.trajectory.final.double()
        x = (1 - place) * x0 + place * level.eps

        def distance(one):
            off = x - place * one - x0
            return off.square().flatten(1).mean(1) / off.detach().abs().flatten(1).mean(1)

        r = 0.5 + 0.5 * (experience.advantage.double() / 0.6).clamp(-1, 1)
        expected = r * distance(0.3 * v + 0.7 * v_old) + (1 - r) * distance(1.3 * v_old - 0.3 * v)
        check(policy, loss, 0.6 / 0.3 * expected, rtol=1e-3)


def test_sft_and_ones_own_objective_on_images_are_their_formulas():
    for name in ("sft", f"{OWN}:matching"):
        policy, _, experience, terms, _ = finals(name)
        for draw, loss in enumerate(terms.losses(torch.arange(8), torch.ones(8, dtype=torch.bool))):
            found_error = error(experience, terms, draw, velocity(policy, terms, draw))
            check(policy, loss, found_error if name == "sft" else experience.advantage * found_error, rtol=1e-3)


def test_dpo_compares_pairs_with_the_base_model():
    policy, _, experience, terms, _ = finals("dpo", objective={"beta": 7.0})
    rows = torch.tensor([3, 0, 5, 6])
    for draw, loss in enumerate(terms.losses(rows, ALL[:4])):
        with torch.no_grad(), policy.base_model():
            base = error(experience, terms, draw, velocity(policy, terms, draw))
        gain = (error(experience, terms, draw, velocity(policy, terms, draw)) - base)[rows].view(2, 2)
        expected = (1 + (7 * (gain[:, 0] - gain[:, 1])).exp()).log().repeat_interleave(2)
        check(policy, loss, expected, rtol=1e-3)


@pytest.mark.parametrize("name", ["awm", "sft"])
def test_the_kl_of_images_is_the_distance_from_the_base_models_velocity(name):
    policy, _, _, terms, _ = finals(name, kl_weight=2.0)
    _, _, _, without, _ = finals(name)
    rows, is_real = torch.arange(8), torch.ones(8, dtype=torch.bool)
    pairs = zip(terms.losses(rows, is_real), without.losses(rows, is_real), strict=True)
    for draw, (loss, plain) in enumerate(pairs):
        with torch.no_grad(), policy.base_model():
            base = velocity(policy, terms, draw)
        apart = (velocity(policy, terms, draw) - base).square().flatten(1).mean(1)
        assert apart.min() > 0
        torch.testing.assert_close(loss.metrics["kl"].double(), apart.detach(), rtol=1e-3, atol=1e-7)
        torch.testing.assert_close((loss.value - plain.value).double(), 2 * apart, rtol=1e-3, atol=1e-5)
        ours = gradient(policy, loss.value[1]) - 2 * gradient(policy, apart[1])
        torch.testing.assert_close(ours, gradient(without.policy, plain.value[1]), rtol=1e-3, atol=1e-4)


# -- what losses report ---------------------------------------------------------------------------------------------------


def test_means_are_weighed_and_the_largest_is_of_rows_that_count():
    means = LossMetrics()
    one = {"a": torch.tensor([1.0, 2.0, 9.0]), "ratio/max_deviation": torch.tensor([0.3, 0.2, 9.0])}
    means.add(Loss(torch.tensor([1.0, 2.0, 50.0]), one), torch.tensor([0.5, 0.25, 0.0]))
    other = {"a": torch.tensor([4.0]), "ratio/max_deviation": torch.tensor([0.1])}
    means.add(Loss(torch.tensor([3.0]), other), torch.tensor([0.25]))
    assert means.collect().loss == pytest.approx(0.5 + 0.5 + 0.75)
    assert means.metrics() == pytest.approx({"a": 0.5 + 0.5 + 1.0, "ratio/max_deviation": 0.3})
    means.numbers["grad_norm"] = 2.0
    other_process = LossMetrics()
    later = {"b": torch.tensor([7.0]), "ratio/max_deviation": torch.tensor([0.7])}
    other_process.add(Loss(torch.tensor([4.0]), later), torch.tensor([1.0]))
    other_process.numbers |= {"grad_norm": 1.0, "only": 0.5}
    whole = LossMetrics.merge([means, other_process.collect()])
    assert whole.loss == pytest.approx(1.75 + 4)
    assert whole.metrics() == pytest.approx(
        {"a": 2.0 / 2, "b": 7.0 / 2, "ratio/max_deviation": 0.7, "grad_norm": 2.0, "only": 0.5}
    )


def test_a_largest_value_that_is_no_number_stays_one():
    means = LossMetrics()
    for value in (0.1, math.nan, 0.2):
        means.add(Loss(torch.zeros(1), {"ratio/max_deviation": torch.tensor([value])}), torch.ones(1))
    assert math.isnan(means.collect().metrics()["ratio/max_deviation"])
    less = LossMetrics()
    less.add(Loss(torch.zeros(1), {"ratio/max_deviation": torch.tensor([0.5])}), torch.ones(1))
    for parts in ([means, less.collect()], [less, means]):
        assert math.isnan(LossMetrics.merge(parts).metrics()["ratio/max_deviation"])


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_what_is_reported_keeps_no_graph():
    """Otherwise the memory of an update would grow with its chunks."""
    means, kept = LossMetrics(), []

    def pack(tensor):
        saved = Saved(tensor)
        kept.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        value = (torch.ones(3, requires_grad=True) * 2).square()
    means.add(Loss(value, {"a": value}), torch.ones(3))
    assert [saved() is None for saved in kept] == [False]
    del value
    assert [saved() is None for saved in kept] == [True]


# -- functions of one's own -------------------------------------------------------------------------------------------------


def test_a_function_of_ones_own_is_found_once_and_raises_sentences(tmp_path):
    assert load_custom_function("objective", "grpo") is None
    assert load_custom_function("objective", f"{OWN}:matching") is load_custom_function("objective", f"{OWN}:matching")
    with pytest.raises(ValueError, match=r"objective .*:torch is not a function\."):
        load_custom_function("objective", f"{OWN}:torch")
    with pytest.raises(ValueError, match=r"advantage .*:raises raised KeyError: 'loss'"):
        load_custom_function("advantage", f"{OWN}:raises")(None, advantage=None)


@pytest.mark.parametrize("name", ["scalar", "short", "numbers", "still"])
def test_what_is_no_loss_of_each_row_is_a_clear_error(tmp_path, name):
    (tmp_path / "own.py").write_text(
        "def scalar(seen, advantage):\n    return (advantage * seen.log_prob).sum()\n"
        "def short(seen, advantage):\n    return seen.log_prob[1:]\n"
        "def numbers(seen, advantage):\n    return [1.0] * len(advantage)\n"
        "def still(seen, advantage):\n    return advantage\n"
    )
    policy, args, experience = collected(objective={"name": f"{tmp_path / 'own.py'}:{name}"})
    with pytest.raises(
        ValueError, match=f"own.py:{name} must return a tensor of 6 values that carries a gradient, one for each"
    ):
        next(step_terms(policy, args, experience).losses(torch.arange(6), ALL))


def test_an_error_of_ones_own_objective_names_it():
    policy, args, experience = collected(objective={"name": f"{OWN}:raises"})
    with pytest.raises(ValueError, match=r"^objective .*:raises raised KeyError: 'loss'"):
        next(step_terms(policy, args, experience).losses(torch.arange(6), ALL))


def test_a_loss_of_ones_own_keeps_its_metrics(tmp_path):
    (tmp_path / "own.py").write_text(
        "from flow_grpo.types import Loss\n\n\ndef mine(seen, advantage, by):\n"
        "    return Loss(by * seen.log_prob, {'mine/by': by * advantage})\n"
    )
    policy, args, experience = collected(objective={"name": f"{tmp_path / 'own.py'}:mine", "options": {"by": 3.0}})
    for k, loss in enumerate(step_terms(policy, args, experience).losses(torch.arange(6), ALL)):
        seen = Seen(policy, args, experience, k)
        check(policy, loss, 3 * seen.log_prob)
        assert torch.equal(loss.metrics["mine/by"], 3 * experience.advantage)
        deviation = (seen.ratio - 1).abs().detach()
        torch.testing.assert_close(loss.metrics["ratio/max_deviation"].double(), deviation, rtol=1e-3, atol=1e-6)


def test_a_metric_of_ones_own_may_be_one_number_for_all_rows(tmp_path):
    (tmp_path / "own.py").write_text(
        "from flow_grpo.types import Loss\n\n\ndef mine(seen, advantage):\n"
        "    loss = Loss(seen.log_prob * advantage)\n    loss.metrics['moved'] = advantage.abs().mean()\n    return loss\n"
    )
    policy, args, experience = collected(objective={"name": f"{tmp_path / 'own.py'}:mine"})
    loss = next(step_terms(policy, args, experience).losses(torch.arange(6), ALL))
    assert torch.equal(loss.metrics["moved"], experience.advantage.abs().mean().expand(6))


@pytest.mark.parametrize("metric", ["0.5", "advantage[:2]"])
def test_a_metric_of_ones_own_that_is_no_number_of_each_row_is_a_clear_error(tmp_path, metric):
    (tmp_path / "own.py").write_text(
        "from flow_grpo.types import Loss\n\n\ndef mine(seen, advantage):\n"
        f"    loss = Loss(seen.log_prob * advantage)\n    loss.metrics['moved'] = {metric}\n    return loss\n"
    )
    policy, args, experience = collected(objective={"name": f"{tmp_path / 'own.py'}:mine"})
    with pytest.raises(ValueError, match=r"own\.py:mine: its metric moved must be a tensor of 6 values, or of one\."):
        next(step_terms(policy, args, experience).losses(torch.arange(6), ALL))


def test_means_are_over_the_rows_of_a_group_that_count():
    value, group = torch.tensor([1.0, 9.0, 3.0, 5.0, 7.0]), torch.tensor([4, 2, 4, 4, 8])
    counts = torch.tensor([True, True, True, False, False])
    assert mean_by_group(value, group, counts).tolist() == [2.0, 9.0, 2.0, 2.0, 0.0]
