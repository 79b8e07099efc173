"""The rollout's own graphs in place of a replay: the same numbers and gradients to the last bit, used once, and let go."""

import gc
import weakref

import pytest
import torch
from support import small_policy as small
from support.cli_process import FORKS
from support.method_names import ON_STEPS

from flow_grpo.config.sections import MemoryConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.memory import apply_memory_settings
from flow_grpo.training.anchors import add_references, copied_references
from flow_grpo.training.update import PolicyUpdate
from flow_grpo.types import Trajectory

WINDOW = [0, 1]
ADVANTAGE = torch.tensor([[1.0, -0.5, -0.7], [0.0, 0.0, 0.0], [-1.2, 0.9, 0.1], [0.3, 0.4, -0.8]])
SILENT = torch.tensor([[0.0] * 3, [0.0] * 3, [0.0] * 3, [0.5, 0.5, -1.0]])
SOME, NONE = ADVANTAGE, torch.zeros(4, 3)
OF_RANKS = SOME, SILENT


def settings(keep, **changes):
    both = {"prompts_per_step": 4, "images_per_prompt": 3, "microbatch": 4, **changes}
    return small.settings(**{**both, "objective": {"keep_graphs": keep, **changes.get("objective", {})}})


def updated(keep, advantage=SOME, calls=None, before=lambda experience: None, policy=None, processes=None, **changes):
    """The metrics and the gradient of an update on images with these advantages, the rollout's graphs kept or not.

    Copies that anchors refer to are moved before it, so that they pull.
    """
    policy, args = policy or small.policy(), settings(keep, **changes)
    add_references(policy, [args.objective])
    experience = small.experience(policy, args, advantage, WINDOW)
    before(experience)
    policy.ema.start()
    ours, seen, velocity = PolicyUpdate(policy, args, 0, processes or Processes()), [], policy.velocity
    for adapter in copied_references(args.objective):
        small.move(policy, seed=5, adapter=adapter)
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
    kept, replayed = (updated(keep, microbatch=microbatch, objective={"transition": transition}) for keep in (True, False))
    assert kept[0] == replayed[0]
    assert kept[0]["ratio/first_update_max_deviation"] == 0
    assert replayed[1].abs().max() > 0
    assert torch.equal(kept[1], replayed[1])


def check_equal(kept, replayed, *others):
    """Two updates with the same numbers to the last bit, and a gradient that is none of the others'."""
    assert kept[0] == replayed[0]
    assert replayed[1].abs().max() > 0
    assert torch.equal(kept[1], replayed[1])
    assert not any(torch.equal(kept[1], gradient) for gradient in others)


BY_STEP = SOME[..., None] * torch.tensor([1.0, -0.5])  # as a critic has it
EMA = {"to": "ema", "weight": 2.0, "decay": 0.3}
GUIDED = {"to": "guided", "weight": 0.7, "guidance": 4.5}


@pytest.mark.parametrize(("objective", "advantage"), [
    ({"name": "reinforce", "step_weight": "std"}, SOME),
    ({"name": "grpo_guard"}, SOME),
    ({"name": "dppo"}, SOME),
    ({"name": "ppo"}, BY_STEP),
    ({"kl": "gaussian", "kl_weight": 3.0}, SOME),
    ({"kl": "velocity", "kl_weight": 3.0}, SOME),
    ({"kl": "k3", "kl_weight": 1e4}, SOME),
    ({"transition": "flow_sde", "kl": "flow_grpo", "kl_weight": 3.0}, SOME),
    ({"anchors": [EMA, GUIDED], "kl": "velocity"}, SOME),
])  # fmt: skip
def test_kept_graphs_equal_the_replay_for_each_objective_and_anchor(objective, advantage):
    kept, replayed = (updated(k, advantage, objective=objective) for k in (True, False))
    without = {key: value for key, value in objective.items() if key == "transition"}
    check_equal(kept, replayed, *([] if "name" in objective else [updated(True, objective=without)[1]]))


def test_every_objective_on_steps_is_compared_with_its_replay():
    compared = {"grpo", "reinforce", "grpo_guard", "dppo", "ppo"}
    assert set(ON_STEPS) == compared, "add the new one to the test above"


@pytest.mark.parametrize("objective", [{}, {"kl": "velocity", "kl_weight": 3.0}])
def test_so_it_is_of_all_weights_also_if_the_base_model_takes_their_place_before_the_gradient(objective):
    def whole():
        policy = small.policy(lora=False)
        policy.enable_full_finetuning()
        policy.store_base_weights("cpu")
        small.move(policy, 0.01)
        return policy

    check_equal(*(updated(k, policy=whole(), lora=None, objective=objective) for k in (True, False)))


def test_so_it_is_with_gradient_checkpointing():
    def checkpointed():
        policy = small.policy()
        apply_memory_settings(policy.pipe, MemoryConfig(gradient_checkpointing=True))
        return policy

    kept, replayed = (updated(k, policy=checkpointed()) for k in (True, False))
    check_equal(kept, replayed)
    assert torch.equal(kept[1], updated(True)[1])


def _rank(rank, folder):
    """The gradients of one process of two, with its own images' advantages, kept and replayed."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    processes = Processes(rank, 2)
    found = [updated(keep, OF_RANKS[rank], processes=processes, microbatch=3)[1] for keep in (True, False)]
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_with_different_numbers_of_graphs_have_the_sum_of_their_gradients(tmp_path):
    ranks = [FORKS.Process(target=_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    (kept, replayed), (other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(kept, replayed)
    assert torch.equal(kept, other)
    alone = [updated(True, advantage, microbatch=3)[1] for advantage in OF_RANKS]
    assert all(gradient.abs().max() > 0 for gradient in alone)
    torch.testing.assert_close(kept, sum(alone))


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_sampled_is_the_same_and_has_no_gradient(shared):
    policy, trajectories = small.policy(), []
    for keep in (True, False):
        args = settings(keep, objective={"shared_initial_noise": shared})
        trajectories.append(small.experience(policy, args, SOME, [1, 2]).trajectory)
    for name in ("x", "x_next", "mean", "log_prob", "final"):
        assert torch.equal(getattr(trajectories[0], name), getattr(trajectories[1], name))
        assert not getattr(trajectories[0], name).requires_grad
    assert sorted(trajectories[0].graphs) == [0, 4, 8]
    assert not trajectories[1].graphs
    for graph, k in zip(trajectories[0].graphs[4], (0, 1), strict=True):
        assert torch.equal(graph.mean, trajectories[0].mean[4:8, k])
        assert torch.equal(graph.log_prob, trajectories[0].log_prob[4:8, k])
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
    backward = []

    def before(experience):
        for steps in experience.trajectory.graphs.values():
            for graph in steps:
                graph.v.register_hook(lambda g: backward.append(len(g)))

    kept, replayed = updated(True, SILENT, microbatch=3, before=before), updated(False, SILENT, microbatch=3)
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
        experience.trajectory.log_prob[0, 0] = float("nan")

    with pytest.raises(ValueError, match="ratio of new to old probability is nan"):
        updated(True, before=before)


def test_graphs_of_joined_parts_keep_their_places_and_chosen_rows_have_none():
    policy, args = small.policy(), settings(True)
    whole = small.experience(policy, args, SOME, WINDOW).trajectory
    joined = Trajectory.join([whole, whole])
    assert sorted(joined.graphs) == [0, 4, 8, 12, 16, 20]
    assert joined.graphs[16] is whole.graphs[4]
    assert not whole.take(torch.arange(4)).graphs


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"updates": 2}, "after one update a rollout's graphs belong to earlier weights; set updates=1"),
        ({"epochs": 2}, "epochs=2: after one update"),
        ({"memory": {"shard": "fsdp2"}}, "keep_graphs with memory.shard=fsdp2"),
        (
            {"memory": {"offload": "groups"}},
            "graph would hold copies of blocks' weights on the device; set memory.gradient_checkpointing=true, or keep_graphs",
        ),
        (
            {"objective": {"name": "sft"}},
            "does not use keep_graphs",
        ),
    ],
)
def test_what_does_not_go_with_kept_graphs_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings(True, **changes)


def test_offloaded_blocks_that_are_checkpointed_go_with_kept_graphs():
    settings(True, memory={"offload": "groups", "gradient_checkpointing": True})
