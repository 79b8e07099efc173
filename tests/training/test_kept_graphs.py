"""The rollout's own graphs in place of a replay: the same numbers and gradients to the last bit, used once, and let go."""

import gc
import weakref

import pytest
import torch
from support import small_policy as small

from flow_grpo.distributed.processes import Processes
from flow_grpo.training.scored_images import ScoredImages
from flow_grpo.training.update import PolicyUpdate
from flow_grpo.types import Scores, Trajectory

WINDOW = [0, 1]
ADVANTAGE = torch.tensor([[1.0, -0.5, -0.7], [0.0, 0.0, 0.0], [-1.2, 0.9, 0.1], [0.3, 0.4, -0.8]])
SOME, NONE = ADVANTAGE, torch.zeros(4, 3)


def settings(keep, **changes):
    both = {"prompts_per_step": 4, "images_per_prompt": 3, "microbatch": 4, **changes}
    return small.settings(**{**both, "sampling": {"keep_graphs": keep, **changes.get("sampling", {})}})


def updated(keep, advantage=SOME, calls=None, before=lambda experience: None, **changes):
    """The metrics and the gradient of an update on images with these advantages, the rollout's graphs kept or not."""
    policy, args = small.policy(), settings(keep, **changes)
    experience = small.experience(policy, args, advantage, WINDOW)
    before(experience)
    policy.ema.start()
    ours, seen, velocity = PolicyUpdate(policy, args, 0, Processes()), [], policy.velocity
    ours.pack_rows = keep  # rows of kept graphs are in place all the same
    ours.optimizer.adamw.register_step_pre_hook(
        lambda adamw, *_: seen.extend(p.grad.clone() for group in adamw.param_groups for p in group["params"])
    )

    def counting(*given):
        calls.append(torch.is_grad_enabled())
        return velocity(*given)

    if calls is not None:
        policy.velocity = counting
    metrics = ours(experience, 0)
    assert not experience.trajectory.graphs, "none outlives the update"
    return metrics, torch.cat([g.flatten() for g in seen]) if seen else None


@pytest.mark.parametrize("microbatch", [2, 4, 12])
@pytest.mark.parametrize("transition", ["cps", "flow_sde"])
def test_the_gradient_is_the_replays_to_the_last_bit(microbatch, transition):
    kept, replayed = (updated(keep, microbatch=microbatch, sampling={"transition": transition}) for keep in (True, False))
    assert kept[0] == replayed[0]
    assert kept[0]["ratio/first_update_max_deviation"] == 0
    assert replayed[1].abs().max() > 0
    assert torch.equal(kept[1], replayed[1])


@pytest.mark.parametrize("objective", [
    {"name": "reinforce", "step_weight": "std"},
    {"name": "grpo_guard"},
    {"name": "dppo"},
    {"kl": "gaussian", "kl_weight": 3.0},
    {"kl": "velocity", "kl_weight": 3.0},
])  # fmt: skip
def test_so_it_is_with_each_objective_and_kl(objective):
    kept, replayed = updated(True, objective=objective), updated(False, objective=objective)
    assert kept[0] == replayed[0]
    assert torch.equal(kept[1], replayed[1])


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_sampled_is_the_same_and_has_no_gradient(shared):
    policy, trajectories = small.policy(), []
    for keep in (True, False):
        args = settings(keep, sampling={"shared_initial_noise": shared})
        trajectories.append(small.experience(policy, args, SOME, [1, 2]).trajectory)
    for name in ("x", "x_next", "mean", "log_prob_BK", "final"):
        assert torch.equal(getattr(trajectories[0], name), getattr(trajectories[1], name))
        assert not getattr(trajectories[0], name).requires_grad
    assert sorted(trajectories[0].graphs) == [0, 4, 8]
    assert not trajectories[1].graphs
    for graph, k in zip(trajectories[0].graphs[4], (0, 1), strict=True):
        assert torch.equal(graph.mean, trajectories[0].mean[4:8, k])
        assert torch.equal(graph.log_prob, trajectories[0].log_prob_BK[4:8, k])
        assert graph.v.requires_grad
        assert graph.log_prob.requires_grad


def test_the_update_asks_for_no_velocity_again():
    calls = []
    updated(True, calls=calls)
    assert calls == []
    updated(True, calls=calls, objective={"kl": "velocity", "kl_weight": 1.0})
    assert calls == [False] * 2 * 3, "but the base model's"
    updated(False, calls=calls)
    assert calls[6:] == [True] * 2 * 3


def test_micro_batches_without_signal_are_let_go_and_an_update_without_any_changes_nothing():
    silent = torch.tensor([[0.0] * 3, [0.0] * 3, [0.0] * 3, [0.5, 0.5, -1.0]])
    backward = []

    def before(experience):
        for steps in experience.trajectory.graphs.values():
            for graph in steps:
                graph.v.register_hook(lambda g: backward.append(len(g)))

    kept, replayed = updated(True, silent, microbatch=3, before=before), updated(False, silent, microbatch=3)
    assert torch.equal(kept[1], replayed[1])
    assert backward == [3, 3], "both steps of the last micro-batch"
    metrics, none = updated(True, NONE)
    assert none is None
    assert metrics["loss"] == 0


def test_no_graph_is_alive_after_its_update():
    alive = []

    def before(experience):
        alive.extend(weakref.ref(graph.v) for steps in experience.trajectory.graphs.values() for graph in steps)

    gc.disable()
    try:
        updated(True, before=before)
        assert len(alive) == 6
        assert not any(one() is not None for one in alive), "without a look for reference cycles"
    finally:
        gc.enable()


def test_a_number_that_is_none_is_refused_and_not_tried_again():
    def before(experience):
        experience.trajectory.log_prob_BK[0, 0] = float("nan")

    with pytest.raises(ValueError, match="deviates from 1 by nan"):
        updated(True, before=before)


def test_graphs_of_joined_parts_keep_their_places_and_chosen_rows_have_none():
    policy, args = small.policy(), settings(True)
    whole = small.experience(policy, args, SOME, WINDOW).trajectory
    joined = Trajectory.join([whole, whole])
    assert sorted(joined.graphs) == [0, 4, 8, 12, 16, 20]
    assert joined.graphs[16] is whole.graphs[4]
    assert not whole.take(torch.arange(4)).graphs
    batch = small.PROMPTS.head(4).repeat(3)
    assert ScoredImages.join([ScoredImages(batch, whole, Scores(torch.zeros(12), {}))]).trajectory.graphs == whole.graphs


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"updates": 2}, "after one update a rollout's graphs are of former weights; set updates=1"),
        ({"epochs": 2}, "epochs=2: after one update"),
        ({"dynamic_sampling_rounds": 1}, "the graphs of all rounds would stay in memory; set dynamic_sampling_rounds=0"),
        ({"memory": {"shard": "fsdp2"}}, "keep_graphs with memory.shard=fsdp2"),
        (
            {"sampling": {"transition": "ode", "keep_graphs": True}, "objective": {"name": "sft"}},
            "does not use sampling.keep_graphs",
        ),
    ],
)
def test_what_does_not_go_with_kept_graphs_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings(True, **changes)
