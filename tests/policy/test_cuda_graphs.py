"""Forward passes that are replayed from graphs, on a CPU by operations that are recorded and repeated on the same memory."""

import pytest
import torch
from support import small_policy as small
from support.recorded_graph import RecordedCapture

from flow_grpo.policy import cuda_graphs
from flow_grpo.policy.cuda_graphs import ForwardGraphs, use_cuda_graphs
from flow_grpo.policy.probes import eager

GRAPHS = {"memory": {"cuda_graphs": True}}
ODE = {"steps": 4}
METHODS = {
    "grpo": {},
    "a KL towards the base model": {"objective": {"kl_weight": 0.1, "kl": "velocity"}},
    "nft with its old policy": {"sampling": ODE, "objective": {"name": "nft"}},
    "all weights": {"sampling": ODE, "objective": {"name": "awm", "kl_weight": 0.1}, "lora": None},
    "guidance": {"guidance": 3.0},
    "bf16": {"dtype": "bf16", "sampling": ODE, "objective": {"name": "awm"}},
}


@pytest.fixture
def graphs(monkeypatch):
    """Makes the graphs of all models recorded ones. Returns them."""
    made = []

    def capture(device):
        made.append(RecordedCapture(device))
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "CudaCapture", capture)
    return made


@pytest.fixture
def policy(graphs):
    policy = small.policy()
    use_cuda_graphs(policy.lora, policy.device)
    return policy


@torch.no_grad()
def velocity(policy, seed=0, rows=2, step=1):
    schedule, shape = policy.schedule(4)
    x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))
    return policy.velocity(
        x, schedule.timesteps[step], policy.encode(["a cat", "a dog", "a sun"][:rows]), torch.arange(rows)
    )


@pytest.mark.parametrize("name", METHODS)
def test_steps_are_those_without_graphs(graphs, tmp_path, name):
    metrics, weights = [], []
    for more in ({}, GRAPHS):
        settings = {
            "rewards": {"jpeg_size": 1.0},
            "prompts": "prompts/ocr_train.txt",
            "evaluation": {"prompts": None},
            "output_dir": str(tmp_path),
            **METHODS[name],
        }
        trainer = small.trainer(small.settings(**settings, **more))
        steps = [trainer.training_step() for _ in range(3)]
        metrics.append([{key: step[key] for key in ("loss", "grad_norm", "reward")} for step in steps])
        weights.append(trainer.policy.adapter_state())
    assert metrics[0] == metrics[1]
    assert metrics[0][2]["grad_norm"] > 0
    assert all(torch.equal(weights[1][key], value) for key, value in weights[0].items())
    assert [made.count > 0 for made in graphs] == [True]


def test_a_call_is_captured_when_it_comes_again_and_replayed_with_other_states_and_timesteps(policy, graphs):
    plain = small.policy()
    for count, (seed, step) in enumerate([(0, 1), (1, 1), (2, 2), (3, 0)]):
        assert torch.equal(velocity(policy, seed, step=step), velocity(plain, seed, step=step))
        assert graphs[0].count == min(count, 1)


def test_what_a_call_returned_is_not_overwritten_by_the_next_one(policy):
    velocity(policy)
    first = velocity(policy)
    kept = first.clone()
    velocity(policy, seed=1)
    assert torch.equal(first, kept)


def test_weights_that_are_updated_in_place_are_seen(policy):
    plain = small.policy()
    for _ in range(2):
        velocity(policy)
    for each in (policy, plain):
        small.move(each, seed=1)
    assert torch.equal(velocity(policy), velocity(plain))


def test_weights_that_moved_are_captured_anew(policy, graphs):
    plain = small.policy()
    for _ in range(2):
        velocity(policy)
    for each in (policy, plain):
        for parameter in each.trainable_parameters().values():
            parameter.data = 2 * parameter.data
    assert torch.equal(velocity(policy), velocity(plain))
    assert graphs[0].count == 2


def switched(policy):
    """Velocities with the LoRA, without it, and by a copy that moved, each of them twice."""
    policy.lora.add_adapter_copy("old")
    small.move(policy, seed=1, adapter="old")
    velocities = []
    for _ in range(3):
        velocities.append(velocity(policy))
        with policy.base_model():
            velocities.append(velocity(policy))
        with policy.lora.use("old"):
            velocities.append(velocity(policy))
    return velocities


def test_each_adapter_has_a_graph_of_its_own(policy, graphs):
    ours, plain = switched(policy), switched(small.policy())
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert graphs[0].count == 3


def test_a_graph_that_did_not_know_the_adapter_would_be_found_out(policy):
    """The test above can fail."""
    policy.pipe.transformer.forward.active_weights = list
    ours, plain = switched(policy), switched(small.policy())
    assert not all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_another_lora_in_place_of_the_first_is_captured_anew(policy, tmp_path):
    for _ in range(2):
        velocity(policy)
    other = small.policy()
    small.move(other, seed=3)
    other.save(tmp_path)
    policy.lora.remove()
    policy.load_lora(tmp_path)
    assert torch.equal(velocity(policy), velocity(other))
    assert torch.equal(velocity(policy, seed=5), velocity(other, seed=5))


def test_passes_with_gradients_and_counted_ones_are_not_captured(policy, graphs):
    schedule, shape = policy.schedule(4)
    conditioning, rows = policy.encode(["a cat"]), torch.zeros(2, dtype=torch.long)
    for _ in range(3):
        assert policy.velocity(torch.zeros(2, *shape), schedule.timesteps[1], conditioning, rows).requires_grad
        with eager():
            velocity(policy)
    assert graphs[0].count == 0


def test_further_shapes_run_without_a_graph(policy, graphs, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    for _ in range(3):
        for rows in (1, 2, 3):
            velocity(policy, rows=rows)
    assert graphs[0].count == 1
    policy.free_memory()
    for _ in range(2):
        velocity(policy, rows=3)
    assert graphs[0].count == 2, "memory was freed for another one"


@pytest.mark.parametrize(
    ("cause", "kind", "message"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nmore"),
            ValueError,
            r"^memory.cuda_graphs: Linear can't be captured, leave it out: .*capturing$",
        ),
        (torch.OutOfMemoryError("there is none left"), torch.OutOfMemoryError, "^there is none left$"),
    ],
)
def test_why_a_call_cannot_be_captured_is_told(cause, kind, message):
    """A sentence, or that memory ran out, after which a smaller micro-batch is tried."""

    def refuse(call):
        """As torch does: what went wrong, and then that the capture can't be ended."""
        try:
            raise cause
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    module = torch.nn.Linear(2, 2)
    module.forward = ForwardGraphs(module, list, refuse)
    with torch.no_grad():
        module(torch.zeros(1, 2))
        with pytest.raises(kind, match=message):
            module(torch.zeros(1, 2))


@pytest.mark.parametrize("setting", ["offload=groups", "shard=fsdp2"])
def test_settings_that_move_weights_are_refused(setting):
    name, value = setting.split("=")
    with pytest.raises(
        ValueError, match=f"memory.cuda_graphs does not go with memory.{setting}, which moves weights: leave one"
    ):
        small.settings(memory={"cuda_graphs": True, "gradient_checkpointing": True, name: value})


def test_without_a_gpu_it_is_one_sentence():
    with pytest.raises(
        ValueError, match=r"^memory.cuda_graphs needs an NVIDIA GPU, and the model is on cpu: leave it out.$"
    ):
        small.trainer(small.settings(prompts="prompts/ocr_train.txt", rewards={"jpeg_size": 1.0}, **GRAPHS))
