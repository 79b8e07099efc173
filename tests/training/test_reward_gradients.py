"""Objectives by the gradient of rewards: which states they train, that the gradient is backpropagation's, and what is refused."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support import small_policy as small
from support.run_contents import MEASURED

from flow_grpo import objectives, sampling
from flow_grpo.config.reward_gradient_objectives import Draft, FlowBp, Refl
from flow_grpo.data.prompts import join_sets
from flow_grpo.report.summary import headline
from flow_grpo.run_folder.metrics_file import read_metrics
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.sde import predict_x0
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.reward_gradients import Endpoint
from flow_grpo.types import GradientState

NAMES = ["refl", "draft", "flowbp"]
SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.1, 0.0]
LENGTHS = [after - before for before, after in pairwise(SIGMAS)]


def redness(images, prompts):
    return 0.1 * (images[:, 0] - images[:, 1]).mean((1, 2))


def detail(images, prompts):
    return 3 * (images[..., 1:] - images[..., :-1]).square().mean((1, 2, 3))


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def hundred(images, prompts):
    return 100 + redness(images, prompts)


def steep(images, prompts):
    return brightness(images, prompts).mul(1e3).round() + 0 * redness(images, prompts)


steep.differentiable = redness.differentiable = detail.differentiable = hundred.differentiable = True


def settings(name, **changes):
    objective = {"name": name, "smoothing": 0.0, "kl_weight": 0.0, **changes.pop("objective", {})}
    return small.settings(objective=objective, **{"prompts_per_step": 2, "images_per_prompt": 3, "microbatch": 6, **changes})


def trainer(name, reward_funcs=redness, policy=None, **changes):
    return FlowGRPOTrainer(policy or small.policy(), reward_funcs, settings(name, **changes), small.PROMPTS)


def numbers(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


def lora(policy):
    return torch.cat([p.detach().flatten() for p in policy.trainable_parameters().values()]).clone()


def states(objective, step=0):
    """What a training step trains by Euler's steps."""
    generator = sampling.generator(0, "trained states", step)
    return objective.trained_states(
        SIGMAS, LENGTHS, lambda weights, count: torch.multinomial(torch.tensor(weights), count, generator=generator).tolist()
    )


# -- which states are trained -----------------------------------------------------------------------------------------------


def test_refl_trains_one_step_of_the_late_ones_equally_often(monkeypatch):
    monkeypatch.setattr(Refl, "LATE_SHARE", 0.6)
    drawn = [states(Refl(), step) for step in range(600)]
    assert all(len(one) == 1 and one[0].predicted and one[0].factor == -SIGMAS[one[0].step] for one in drawn)
    counts = [sum(one[0].step == i for one in drawn) for i in range(5)]
    assert counts[:2] == [0, 0]
    assert all(abs(count - 200) < 4 * math.sqrt(600 * 2 / 9) for count in counts[2:])


def test_draft_trains_the_last_step_and_noised_copies():
    last, *copies = states(Draft())
    assert (last.step, last.factor, last.predicted, last.copy_number) == (4, -0.1, False, None)
    assert [(one.step, one.factor, one.predicted, one.copy_number) for one in copies] == [
        (4, -0.1, True, 1),
        (4, -0.1, True, 2),
    ]


def test_flowbp_trains_different_steps_by_their_corrected_length(monkeypatch):
    monkeypatch.setattr(FlowBp, "TRAINED_STEPS", 2)
    drawn = [states(FlowBp(), step) for step in range(3000)]
    for one in drawn[:50]:
        steps = [state.step for state in one]
        assert len(set(steps)) == 2
        correction = 1 + 0.5 * (-1 / sum(LENGTHS[i] for i in steps) - 1)
        assert [state.factor for state in one] == pytest.approx([correction * LENGTHS[i] for i in steps])
    first = [sum(any(state.step == i for state in one) for one in drawn) / 3000 for i in range(5)]
    chance = [(i + 1) / 15 for i in range(5)]
    both = [p + sum(q * p / (1 - q) for k, q in enumerate(chance) if k != i) for i, p in enumerate(chance)]
    assert first == pytest.approx(both, abs=4 * 0.5 / math.sqrt(3000))
    assert FlowBp().num_losses(1) == 1, "no more than there are"


@pytest.mark.parametrize("solver", sampling.SOLVERS)
def test_a_solvers_derivatives_are_those_of_autograd(solver):
    schedule = small.policy().schedule(5)[0]
    start, velocities = torch.randn(3), [torch.randn(3, requires_grad=True) for _ in range(5)]
    with torch.enable_grad():
        x, history = start, None
        for i, v in enumerate(velocities):
            history = None if i == 4 else history
            x, history = sampling.SOLVERS[solver](x, v, schedule.sigmas[i], schedule.sigmas[i + 1], history)
    found = [torch.autograd.grad(x.sum(), v, retain_graph=True)[0][0].item() for v in velocities]
    assert sampling.endpoint_derivatives(schedule, sampling.SOLVERS[solver]) == pytest.approx(found, rel=1e-4)


# -- the gradient -----------------------------------------------------------------------------------------------------------


def test_the_linear_loss_has_the_gradient_of_backpropagation_through_composition_decoder_and_reward():
    """In float64, for a small network: the endpoint is composed of detached velocities but for two."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    decoder = torch.randn(6, 9, generator=generator, dtype=torch.float64)

    def network(x, i):
        return torch.tanh(x @ weight) * (1 + i)

    def reward(image):
        return image.sin().sum(1) + image.square().mean(1)

    x, visited, lengths = torch.randn(4, 6, generator=generator, dtype=torch.float64), [], [-0.1, -0.2, -0.3, -0.4]
    for i, length in enumerate(lengths):
        visited.append(x)
        x = (x + length * network(x, i)).detach()
    trained = {1: 0.7 * lengths[1], 3: 0.7 * lengths[3]}
    composed = x + sum(c * (network(visited[i], i) - network(visited[i], i).detach()) for i, c in trained.items())
    (expected,) = torch.autograd.grad(-reward(composed @ decoder).sum(), weight)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reward(leaf @ decoder).sum(), leaf)
    losses = [
        objectives.reward_gradient(GradientState(network(visited[i], i), gradient, c)).value.sum()
        for i, c in trained.items()
    ]
    (found,) = torch.autograd.grad(sum(losses), weight)
    torch.testing.assert_close(6 * found, expected, rtol=1e-10, atol=1e-12)


def by_backpropagation(policy, args, experience):
    """The gradient of the mean reward, its parts weighed as the run does, through velocities, decoder and reward at once."""
    states, schedule = experience.trajectory.gradient_states, experience.trajectory.schedule
    conditioning, rows = policy.encode(experience.batch.prompts), torch.arange(len(experience.batch.prompts))
    total = torch.zeros(())
    for k, (i, factor) in enumerate(zip(states.steps, states.factor, strict=True)):
        x = states.x[:, k]
        v = policy.velocity(x, schedule.timesteps[i], conditioning, rows)
        end = predict_x0(x, v, float(schedule.sigmas[i]))
        if not (factor == -float(schedule.sigmas[i]) and states.endpoint[k] != 0) and args.objective.name != "refl":
            end = experience.trajectory.final + factor * (v - v.detach())
        total = total + redness(policy.decode_with_grad(end), None).mean() / len(states.steps)
    return torch.autograd.grad(-total, list(policy.trainable_parameters().values()))


@pytest.mark.parametrize("solver", sampling.SOLVERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_update_has_the_gradient_of_backpropagation(name, solver):
    run = trainer(name, sampling={"steps": 4, "solver": solver})
    experience = run.experience()
    rms = experience.metrics["reward_gradient/redness/rms"]
    seen = []
    run.stage.update.optimizer.reduce_gradients = lambda: (
        seen.append(torch.cat([p.grad.flatten() for p in run.policy.trainable_parameters().values()]).clone())
        or torch.tensor(1.0)
    )
    expected = torch.cat([g.flatten() for g in by_backpropagation(run.policy, run.args, experience)])
    run.stage.update(experience, 0)
    elements = experience.trajectory.final[0].numel()
    torch.testing.assert_close(seen[0] * elements * rms, expected, rtol=2e-3, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", [*NAMES, "mend", "opsd"])
def test_the_reward_rises(name):
    """Of the images of one noise, all of them."""
    run = trainer(name, optimizer={"lr": 0.05}, prompts_per_step=4)
    before = small.collect(run, 0).scores.total
    for _ in range(10):
        run.training_step()
    assert (small.collect(run, 0).scores.total > before + 3e-4).all()


def test_units_of_rewards_and_their_weights_count_by_their_share():
    """Each gradient is divided by its own rms: a reward in other units trains the same, and weights are shares."""

    def thousandfold(images, prompts):
        return 1000 * redness(images, prompts)

    thousandfold.differentiable = True
    one, other = (trainer("flowbp", [reward, detail]) for reward in (redness, thousandfold))
    torch.testing.assert_close(one.experience().reward_gradient, other.experience().reward_gradient, rtol=1e-4, atol=1e-5)
    both = trainer("flowbp", [redness, detail]).experience()
    states = both.trajectory.gradient_states
    parts = {name: g / g.square().mean().sqrt() for name, g in states.gradient.items()}
    torch.testing.assert_close(both.reward_gradient, parts["redness"] + parts["detail"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["flowbp", "mend", "opsd"])
def test_a_resumed_run_goes_on_to_the_same_numbers(tmp_path, name):
    args = {"steps": 4, "save_every": 1, "output_dir": str(tmp_path / "whole")}
    trainer(name, **args).train()
    parts = {**args, "output_dir": str(tmp_path / "parts")}
    trainer(name, **{**parts, "steps": 2}).train()
    trainer(name, **parts).train(resume=True)
    whole, resumed = ([numbers(row) for row in read_metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == resumed


@pytest.mark.parametrize("name", [*NAMES, "mend", "opsd"])
def test_neither_the_micro_batch_nor_parts_change_anything(name):
    whole, parts = (trainer(name, microbatch=size, objective={"smoothing": 0.01}) for size in (6, 3))
    parts.stage.sampler.score_in_background = True
    for _ in range(2):
        first, second = numbers(whole.training_step()), numbers(parts.training_step())
        assert first == pytest.approx(second, rel=2e-3, abs=1e-5)
    torch.testing.assert_close(lora(whole.policy), lora(parts.policy), rtol=0, atol=2e-4)


def test_two_processes_have_the_gradients_of_one():
    """The first of two has its groups' gradients, weighed by the mean square of both."""
    alone = trainer("flowbp", prompts_per_step=4)
    whole = alone.experience()
    gradient = whole.trajectory.gradient_states.gradient["redness"]
    own = torch.tensor([row for row in range(12) if row // 3 % 2 == 0])
    others = torch.tensor([row for row in range(12) if row // 3 % 2])
    pair = trainer("flowbp", prompts_per_step=4)
    square, count = gradient[others].double().square().flatten(1).mean(1).sum().item(), len(others)

    def other(value):
        if hasattr(value, "by_name"):
            return whole.scores.take(others)
        return (square, count, 0.0, 0) if len(value) == 4 else (0, count)

    pair.processes = pair.stage.processes = pair.stage.sampler.processes = pair.stage.compare.processes = small.Two(other)
    half = pair.experience()
    torch.testing.assert_close(half.reward_gradient, whole.reward_gradient[own], rtol=1e-4, atol=1e-5)
    assert half.metrics["reward_gradient/redness/rms"] == pytest.approx(
        whole.metrics["reward_gradient/redness/rms"], rel=1e-6
    )


def test_smoothing_measures_how_sharp_the_reward_is():
    metrics = trainer("flowbp", objective={"smoothing": 0.05}).training_step()
    assert metrics["reward_gradient/redness/S1"] == pytest.approx(0.05 * 0.1 * math.sqrt(2 / 64), rel=1e-3), (
        "rho times |gradient|"
    )
    assert "reward_gradient/redness/S1" not in trainer("flowbp").training_step()


def test_opsd_moves_a_predicted_image_both_ways_and_weighs_the_two_by_the_advantage():
    """By calls of its own, for each image: two steps of a twentieth of the norm, each along the gradient where it is."""
    run = trainer("opsd", [redness, detail], prompts_per_step=4)
    policy, experience = run.policy, run.experience()
    states, batch = experience.trajectory.gradient_states, experience.batch
    [step], sigma, moves = states.steps, -states.factor[0], states.moves
    conditioning, rows = policy.encode(batch.prompts), torch.arange(len(batch.prompts))
    timestep = experience.trajectory.schedule.timesteps[step]
    with policy.lora.use("old"), torch.no_grad():
        v_old = policy.velocity(states.x[:, 0], timestep, conditioning, rows)
    torch.testing.assert_close(moves.v_old, v_old, rtol=1e-3, atol=1e-4)

    def unit(latents):
        leaf = latents[None].clone().requires_grad_()
        image = policy.decode_with_grad(leaf)
        (g,) = torch.autograd.grad((redness(image, None) + detail(image, None)).sum(), leaf)
        return g[0] / g.norm()

    ends = []
    for sign, velocity in ((1, moves.target), (-1, moves.away)):
        end = states.x[:, 0] - sigma * velocity
        for z, v, y in zip(states.x[:, 0], v_old, end, strict=True):
            image = z - sigma * v
            moved, length = image, 0.05 * image.norm()
            for _ in range(2):
                moved = moved + sign * length * unit(moved)
            torch.testing.assert_close(y, moved, rtol=1e-3, atol=1e-3)
        ends.append(end)
    small.move(policy, 0.2, seed=3)
    with torch.no_grad():
        v = policy.velocity(states.x[:, 0], timestep, conditioning, rows)

    def weighted(error):
        return error.square().flatten(1).mean(1) / error.abs().flatten(1).mean(1)

    predicted = [states.x[:, 0] - sigma * velocity for velocity in (v, 2 * v_old - v)]
    up, down = (weighted(image - end) for image, end in zip(predicted, ends, strict=True))
    share = 0.5 + 0.5 * (experience.advantage / 5).clamp(-1, 1)
    assert share.std() > 0.01
    expected = (5 * (share * up + (1 - share) * down)).mean().item()
    assert run.stage.update(experience, 0)["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_mend_moves_an_image_as_far_as_its_capped_reward_gains_and_regresses_on_it(tau):
    """By calls of its own, for each image and each length of a move."""
    run = trainer("mend", [redness, detail], prompts_per_step=4, objective={"smoothing": 0.0})
    mending, policy = run.stage.sampler.mover, run.policy
    mending.tau, mending.ceilings = tau, {"": -1.0}
    experience = run.experience()
    states, batch, reward = experience.trajectory.gradient_states, experience.batch, experience.scores.total
    [step], sigma = states.steps, -states.factor[0]
    assert sigma == min(experience.trajectory.schedule.sigmas[:-1].tolist(), key=lambda s: abs(s - 0.28))
    conditioning, rows = policy.encode(batch.prompts), torch.arange(len(batch.prompts))
    with policy.lora.use("old"), torch.no_grad():
        v = policy.velocity(states.x[:, 0], experience.trajectory.schedule.timesteps[step], conditioning, rows)
    kinds = []
    for i, final in enumerate(experience.trajectory.final):
        leaf = final[None].clone().requires_grad_()
        image = policy.decode_with_grad(leaf)
        (g,) = torch.autograd.grad((redness(image, None) + detail(image, None)).sum(), leaf)
        direction = g[0] / g.square().mean().sqrt()
        of_group = reward[batch.group == batch.group[i]]
        cap, unit = max(of_group.quantile(0.75).item(), -1.0), of_group.std(correction=0).item()
        options = {0.0: 0.0}
        for length in (0.1, 0.2, 0.4) if reward[i] < cap else ():
            image = policy.decode((final + length * direction)[None])
            moved = (redness(image, None) + detail(image, None)).item()
            options[length] = (min(moved, cap) - reward[i].item()) / unit - length**2 / (2 * tau)
        best = max(options, key=options.get)
        kinds.append(best)
        assert states.moves.moved[i] == (best > 0)
        torch.testing.assert_close(states.moves.target[i], v[i] - best * direction / sigma, rtol=1e-3, atol=1e-3)
    kept = torch.tensor(kinds) == 0
    assert kept.any()
    assert (~kept).any()
    small.move(policy, 0.2, seed=3)
    now = policy.velocity(states.x[:, 0], experience.trajectory.schedule.timesteps[step], conditioning, rows)
    apart = (sigma * (now - states.moves.target)).square().flatten(1).mean(1)
    expected = apart[~kept].mean() + 10 * apart[kept].mean()
    assert run.stage.update(experience, 0)["loss"] == pytest.approx(expected.item(), rel=1e-3)


def test_mend_moves_images_of_one_reward_by_what_gains_most():
    run = trainer("mend")
    mending, states = run.stage.sampler.mover, run.experience().trajectory.gradient_states
    mending.ceilings = {"": 10.0}
    final, v = torch.zeros_like(states.x[:, 0]), torch.zeros_like(states.x[:, 0])

    def rewards_of(latents, rows):
        return latents.flatten(1).square().mean(1).sqrt()

    end = Endpoint(run.experience().batch, final, v, torch.zeros(6), rewards_of, lambda latents: latents)
    moves = mending.moves(states, end)
    assert moves.moved.all()
    moved_by = (states.factor[0] * moves.target).flatten(1).square().mean(1).sqrt()
    torch.testing.assert_close(moved_by, torch.full((6,), 0.4))


def test_mend_adapts_how_long_moves_may_be_and_its_ceiling_never_falls():
    run = trainer("mend", prompts_per_step=4)
    mending, experience = run.stage.sampler.mover, small.collect(run, 0)
    moves, medians, ceilings = experience.trajectory.gradient_states.moves, [], []
    mending.ceilings = {}
    for share, rise in ((0.0, 0.0), (1.0, 10.0), (0.5, -50.0)):
        moved = moves.tried & (torch.arange(12) < share * 12)
        share = moved.sum().item() / moves.tried.sum().item()
        states = replace(experience.trajectory.gradient_states, moves=replace(moves, moved=moved))
        scores, tau = replace(experience.scores, total=experience.scores.total + rise), mending.tau
        compared = mending(experience.batch, replace(experience.trajectory, gradient_states=states), scores)
        assert compared.metrics["mend/frac_moved"] == pytest.approx(share)
        assert mending.tau == pytest.approx(tau * (1.5 if share < 0.3 else 1 / 1.5 if share > 0.6 else 1.0))
        medians.append(scores.total.median().item())
        ceilings.append(mending.ceilings[""])
    assert ceilings == pytest.approx([medians[0], 0.9 * medians[0] + 0.1 * medians[1], ceilings[1]], rel=1e-4)
    for share, tau, limit in ((1.0, 1.2e-3, 1e-3), (0.0, 9.0, 10.0)):
        mending.tau = tau
        moved = replace(moves, moved=moves.tried & (torch.arange(12) < share * 12))
        states = replace(experience.trajectory.gradient_states, moves=moved)
        mending(experience.batch, replace(experience.trajectory, gradient_states=states), experience.scores)
        assert mending.tau == limit


def test_mend_has_a_ceiling_for_each_prompt_set():
    """Rewards of two sets have no common scale: in both, no image of the best quarter of its group is moved."""
    own = {"cats": {"redness": None}, "dogs": {"hundred": None}}
    metadata = {name: {"prompt_set": name, "rewards": rewards} for name, rewards in own.items()}
    sets = [small.PromptSet([f"{name} {i}" for i in range(4)], [row] * 4) for name, row in metadata.items()]
    args = settings("mend", seed=2, prompts_per_step=4, images_per_prompt=4, microbatch=16, optimizer={"lr": 1e-9})
    run = FlowGRPOTrainer(small.policy(), [redness, hundred], args, join_sets(list(own), sets, [1.0, 1.0]))
    metrics = run.training_step()
    assert metrics["mend/reward_ceiling/cats"] < 1 < 90 < metrics["mend/reward_ceiling/dogs"]
    experience = run.experience()
    tried = experience.trajectory.gradient_states.moves.tried.view(4, 4)
    is_cat = torch.tensor([row["prompt_set"] == "cats" for row in experience.batch.metadata]).view(4, 4)[:, 0]
    assert is_cat.any()
    for of_group, reward in zip(tried[is_cat], experience.scores.total.view(4, 4)[is_cat], strict=True):
        ceiling = max(metrics["mend/reward_ceiling/cats"], reward.quantile(0.75).item())
        assert of_group.tolist() == (reward < ceiling).tolist()


def test_two_processes_weigh_moved_and_kept_images_as_one():
    alone = trainer("mend", prompts_per_step=4)
    whole = alone.experience()
    own = torch.tensor([row for row in range(12) if row // 3 % 2 == 0])
    others = torch.tensor([row for row in range(12) if row // 3 % 2])
    moves = whole.trajectory.gradient_states.moves
    pair = trainer("mend", prompts_per_step=4)

    def other(value):
        if hasattr(value, "by_name"):
            return whole.scores.take(others)
        return (others, moves.tried[others], moves.moved[others]) if len(value) == 3 else (0, len(others))

    sampler = pair.stage.sampler
    pair.processes = pair.stage.processes = sampler.processes = sampler.mover.processes = small.Two(other)
    half = pair.experience()
    torch.testing.assert_close(half.advantage, whole.advantage[own])
    torch.testing.assert_close(half.trajectory.gradient_states.moves.target, moves.target[own], rtol=1e-4, atol=1e-4)
    ours, theirs = (run.stage.sampler.mover for run in (pair, alone))
    assert ours.ceilings == pytest.approx(theirs.ceilings, rel=1e-5)
    assert ours.tau == pytest.approx(theirs.tau, rel=1e-5)


def test_a_group_whose_reward_failed_is_left_out():
    def sometimes(images, prompts):
        return torch.where(torch.tensor([p == prompts[0] for p in prompts]), torch.nan, redness(images, prompts))

    sometimes.differentiable = True
    run = trainer("flowbp", sometimes)
    run.stage.sampler.rewards.drop_on_error |= {"sometimes"}
    experience = run.experience()
    assert experience.metrics["frac_reward_dropped"] == 0.5
    assert experience.rows.tolist() == [3, 4, 5]


def test_each_prompt_is_trained_by_the_rewards_of_its_set():
    own = {"cats": {"redness": None}, "dogs": {"detail": 2.0}}
    metadata = {name: {"prompt_set": name, "rewards": rewards} for name, rewards in own.items()}
    sets = [small.PromptSet([f"{name} {i}" for i in range(2)], [row] * 2) for name, row in metadata.items()]
    prompts = join_sets(list(own), sets, [1.0, 1.0])
    run = FlowGRPOTrainer(small.policy(), [redness, detail], settings("flowbp", seed=2), prompts)
    experience = run.experience()
    gradient = experience.trajectory.gradient_states.gradient
    of_cat = torch.tensor([row["prompt_set"] == "cats" for row in experience.batch.metadata])
    assert len(of_cat.unique()) == 2
    assert not gradient["redness"][~of_cat].any()
    assert not gradient["detail"][of_cat].any()
    values = experience.scores.by_name
    assert values["redness"].isfinite().tolist() == of_cat.tolist()
    expected = torch.where(of_cat, values["redness"].nan_to_num(), 2 * values["detail"].nan_to_num())
    torch.testing.assert_close(experience.scores.total, expected)
    assert experience.reward_gradient.square().mean() == pytest.approx((1 + 4) / 2, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_scores_are_those_of_the_final_images_by_all_rewards(name):
    """Also with refl, which takes gradients at a predicted image; a reward of weight 0 is measured."""
    run = trainer(name, [redness, brightness], rewards={"redness": {"weight": 1.0}, "brightness": {"weight": 0.0}})
    experience = run.experience()
    images = run.policy.decode(experience.trajectory.final)
    for reward in (redness, brightness):
        torch.testing.assert_close(experience.scores.by_name[reward.__name__], reward(images, None), rtol=1e-4, atol=1e-6)
    assert experience.trajectory.gradient_states.gradient.keys() == {"redness"}


def test_a_step_that_fails_leaves_the_running_rms(monkeypatch):
    run = trainer("flowbp")
    run.training_step()
    before = run.stage.compare.state_dict()
    monkeypatch.setattr(run.stage.update.optimizer, "reduce_gradients", lambda: torch.tensor(math.nan))
    with pytest.raises(ValueError, match="not finite"):
        run.training_step()
    assert run.stage.compare.state_dict() == before != {}


def test_all_weights_of_a_model_can_be_trained():
    policy = small.policy(lora=False)
    run = FlowGRPOTrainer(policy, redness, settings("refl", lora=None), small.PROMPTS)
    before = lora(run.policy)
    run.training_step()
    assert not torch.equal(before, lora(run.policy))


def test_the_kl_is_the_distance_of_the_velocities_at_the_trained_state():
    policy = small.policy()
    small.move(policy, 0.2, seed=3)
    run = trainer("refl", policy=policy, objective={"kl_weight": 0.5})
    experience = run.experience()
    trajectory, batch = experience.trajectory, experience.batch
    [step], x = trajectory.gradient_states.steps, trajectory.gradient_states.x[:, 0]

    def velocity():
        with torch.no_grad():
            return policy.velocity(x, trajectory.schedule.timesteps[step], policy.encode(batch.prompts), torch.arange(6))

    with policy.base_model():
        base = velocity()
    expected = (velocity() - base).square().mean().item()
    assert expected > 1e-4
    assert run.stage.update(experience, 0)["kl"] == pytest.approx(expected, rel=1e-3)


def test_a_stage_has_the_default_kl_of_its_objective():
    stages = [{"steps": 1, "objective": "refl"}, {"steps": 1, "objective": "grpo"}]
    args = small.FlowGRPOConfig(prompts="p.txt", stages=stages)
    assert [part.objective.kl_weight for _, part in args.resolved_stages()] == [0.03, 0.0]


@pytest.mark.parametrize("name", ["refl", "mend", "opsd"])
def test_a_run_says_that_nothing_was_learned_where_the_gradient_is_0(tmp_path, name):
    trainer(name, steep, steps=2, output_dir=str(tmp_path / "run")).train()
    run = RunReader(tmp_path / "run")
    (warning,) = run.warnings
    assert warning["step"] == 1
    assert warning["warning"].startswith("in step 1 the gradient of the rewards was 0, so nothing was learned.")
    assert headline(run).endswith("but nothing was learned: in every step the gradient of the rewards was 0.")
    both = trainer(name, [steep, redness])
    assert "frac_gradient_zero" not in both.training_step(), "one of the rewards has a gradient"
    assert both.stage.has_advantage


# -- what is refused --------------------------------------------------------------------------------------------------------


def plain(images, prompts):
    return [0.0] * len(prompts)


def claims(images, prompts):
    return redness(images.detach(), prompts)


def far(images, prompts):
    return redness(images, prompts)


claims.differentiable = True
far.elsewhere = True  # as a remote or isolated reward has it


def test_a_reward_without_a_gradient_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="reward plain has no gradient: take a differentiable one"):
        trainer("refl", plain)
    with pytest.raises(ValueError, match=r"reward far runs in another process, .* leave remote and isolate out"):
        trainer("refl", far)
    with pytest.raises(ValueError, match="returned values without a gradient of the images"):
        trainer("refl", claims).training_step()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"objective": {"advantage": "rloo"}}, "does not use advantage: it trains by the gradient of the rewards"),
        ({"objective": {"kl": "gaussian"}}, "set objective.kl=velocity"),
        ({"objective": {"noise_level": 0.5}}, "refl does not use noise_level"),
        ({"epochs": 2}, "one update on a rollout: set updates=1 and epochs=1"),
    ],
)
def test_settings_of_other_families_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings("refl", **changes)
