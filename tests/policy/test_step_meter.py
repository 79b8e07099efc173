"""What a training step costs: seconds by phase, and operations against torch's own counter and against `plan`."""

import json
from contextlib import nullcontext

import pytest
import torch
from support import small_policy as small
from support.embedded import short_run
from torch.utils.checkpoint import checkpoint

from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.policy.devices import fastest, matmul_peak, matmul_speed
from flow_grpo.policy.step_meter import ModelFlopCounter, StepMeter
from flow_grpo.trainer import FlowGRPOTrainer

WINDOW = "sampling={steps: 4, transition: flow_sde, window: {schedule: fixed, size: 2, first_step: 0}"
ODE = "sampling={steps: 3}"
TEXT_ENCODERS = "CLIPTextModelWithProjection", "T5EncoderModel"
METHODS = {
    "grpo": [WINDOW + "}"],
    "kept graphs": [WINDOW + ", keep_graphs: true}"],
    "a KL towards the base model": [WINDOW + "}", "objective={name: grpo, kl_weight: 0.1, kl: velocity}"],
    "awm with several noise levels": [ODE, "objective={name: awm, num_noise_levels: 2, kl_weight: 0.1}"],
    "nft with its old policy": [ODE, "objective={name: nft}"],
    "checkpointed": [ODE, "objective={name: awm}", "memory.gradient_checkpointing=true"],
    "several updates": [ODE, "objective={name: awm}", "updates=2", "microbatch=4"],
    "the best of each group": [ODE, "objective={name: sft}", "microbatch=1"],
    "the best and the worst of each group": [ODE, "objective={name: dpo}", "updates=2", "microbatch=4"],
}
QUICK = ("grpo", "the best of each group")


def run(tmp_path, name):
    return FlowGRPOTrainer(args=short_run(tmp_path / "run", *METHODS[name]))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in METHODS])
def test_a_steps_operations_are_those_that_torch_counts_of_all_of_it_and_those_of_plan(tmp_path, name):
    trainer, same = (run(tmp_path, name) for _ in range(2))
    for step in (0, 1):  # the second one is counted by what is known
        with ModelFlopCounter() as counter:
            same.stage.update(small.collect(same, step), step)
        of_texts = sum(sum(counter.get_flop_counts()[name].values()) for name in TEXT_ENCODERS)
        assert of_texts > 0
        tflop = trainer.training_step()["speed/tflop"]
        assert tflop == (counter.get_total_flops() - of_texts) / 1e12 > 0
    # of the second step: the first one also finds out what the model can do. Plan takes the base model to cost as much as with a LoRA
    planned = StepEstimator(trainer.args, cuda=False).estimate(trainer.args.microbatch).operations
    assert 1e12 * tflop == pytest.approx(planned, rel=1e-3)


def test_operations_of_a_step_are_the_same_with_and_without_checkpointing(tmp_path):
    """What a backward pass computes again is no operation of the model (arXiv 2204.02311)."""
    counted = {}
    for checkpoints in (False, True):
        more = ["objective={name: awm}", f"memory.gradient_checkpointing={str(checkpoints).lower()}"]
        trainer = FlowGRPOTrainer(args=short_run(tmp_path / str(checkpoints), ODE, *more))
        counted[checkpoints] = [trainer.training_step()["speed/tflop"] for _ in range(2)]
    assert counted[False] == counted[True]
    assert min(counted[True]) > 0


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_counted_apart(is_reentrant):
    x, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    product = 2 * 8**3
    with ModelFlopCounter() as counter:
        checkpoint(lambda y: (y @ weight).sigmoid() @ weight, x, use_reentrant=is_reentrant).sum().backward()
    assert counter.get_total_flops() == 6 * product
    assert counter.recomputed == (2 if is_reentrant else 1) * product, (
        "without reentry it stops at the last tensor that is needed"
    )


def test_attention_on_a_cpu_counts_its_two_products_and_the_five_of_its_backward_pass():
    batch, heads, length, width = 2, 3, 16, 8
    query, key, value = (torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3))
    product = 2 * batch * heads * length * length * width
    with ModelFlopCounter() as counter:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert counter.get_total_flops() == 2 * product
    with ModelFlopCounter() as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * product


def test_counting_changes_no_number(tmp_path, monkeypatch):
    trainer = run(tmp_path, "grpo")
    counted = [trainer.training_step() for _ in range(2)]
    monkeypatch.setattr(StepMeter, "_measure", lambda *given: (0, 0))
    other = run(tmp_path, "grpo")
    plain = [other.training_step() for _ in range(2)]
    assert [step["loss"] for step in counted] == [step["loss"] for step in plain]
    ours, theirs = trainer.policy.trainable_parameters(), other.policy.trainable_parameters()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert torch.equal(
        trainer.policy.pipe.transformer.pos_embed.proj.weight, other.policy.pipe.transformer.pos_embed.proj.weight
    )


def test_what_has_no_backward_pass_counts_forward_alone():
    policy = small.policy()
    counter, (schedule, shape) = policy.meter, policy.schedule(2)
    conditioning, rows = policy.encode(["a", "b"]), torch.arange(2)

    def velocity():
        return policy.velocity(torch.zeros(2, *shape), schedule.timesteps[0], conditioning, rows)

    with counter.step():
        with torch.no_grad():
            velocity()
        forward = counter.flops
        discarded, used = velocity(), velocity()
        assert counter.flops == 3 * forward > 0
        used.square().sum().backward()
        once = counter.flops
        assert 4 * forward < once
        del discarded
    velocity()
    assert counter.flops == once, "what is called outside of a step does not count"


@pytest.mark.parametrize(("speed", "sizes"), [(2e9, [256]), (1e11, [256, 1024])])
def test_a_dtype_without_units_in_the_cpu_is_measured_by_a_small_product(monkeypatch, speed, sizes):
    """A large one takes seconds: it made the first step of a run in fp16 on a CPU that much longer."""
    measured = []
    monkeypatch.setattr("flow_grpo.policy.devices._product_speed", lambda n, *more: measured.append(n) or speed)
    assert matmul_speed(torch.device("cpu"), torch.float16) == speed
    assert measured == sizes


def test_a_product_of_n_rows_takes_2_n_cubed_operations(monkeypatch):
    monkeypatch.setattr("flow_grpo.policy.devices.fastest", lambda work, device, seconds: len(work()) / 100)
    # of 256 and 1024 rows, in 2.56 and 10.24 seconds; the larger one is the faster one
    monkeypatch.setattr("flow_grpo.policy.devices.SLOW", 1000.0)
    assert matmul_speed(torch.device("cpu"), torch.float32) == pytest.approx(2 * 1024**3 / 10.24)


def test_the_peak_is_the_highest_of_all_runs_and_a_damaged_file_is_none(tmp_path, monkeypatch):
    file = tmp_path / "kept" / "speed.json"
    monkeypatch.setattr("flow_grpo.policy.devices.CACHE", file)
    speeds = iter([3.0, 2.0, 5.0, 4.0])
    monkeypatch.setattr("flow_grpo.policy.devices.matmul_speed", lambda *given: next(speeds))

    def measured():
        matmul_peak.cache_clear()  # a process of its own
        return matmul_peak(torch.device("cpu"), torch.float32)

    try:
        assert [measured(), measured(), measured()] == [3.0, 3.0, 5.0]
        assert matmul_peak(torch.device("cpu"), torch.float32) == 5.0, "once in a process"
        file.write_text("[1, ")
        assert measured() == 4.0
    finally:
        matmul_peak.cache_clear()


def test_the_peak_is_measured_by_a_user_without_a_home_folder(no_home, monkeypatch):
    monkeypatch.setattr("flow_grpo.policy.devices.matmul_speed", lambda *given: 3.0)
    matmul_peak.cache_clear()
    assert matmul_peak(torch.device("cpu"), torch.float32) == 3.0
    matmul_peak.cache_clear()


def test_a_step_of_a_full_device_is_reported_without_its_mfu(tmp_path, monkeypatch):
    """The weights have moved then: an error would repeat the step."""
    monkeypatch.setattr("flow_grpo.policy.devices.CACHE", tmp_path / "speed.json")

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("flow_grpo.policy.devices.matmul_speed", full)
    matmul_peak.cache_clear()
    speed = StepMeter(None, torch.device("cpu")).speed(2.0, 4, 6.0, dtype=torch.float32, processes=1)
    matmul_peak.cache_clear()
    assert {name: value for name, value in speed.items() if name.startswith("speed/")} == {
        "speed/images_per_second": 2.0,
        "speed/tflop_per_second": 3.0,
    }


def test_measuring_the_peak_moves_no_random_number(tmp_path, monkeypatch):
    monkeypatch.setattr("flow_grpo.policy.devices.CACHE", tmp_path / "speed.json")
    matmul_peak.cache_clear()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    matmul_peak(torch.device("cpu"), torch.float32)
    matmul_peak.cache_clear()
    assert torch.equal(torch.rand(1), expected)


def test_what_is_timed_on_a_gpu_is_waited_for_on_that_gpu(monkeypatch):
    """Without an index, CUDA waits for the current device and records on its stream: device 0, wherever the model is."""
    device, waits, streams = torch.device("cuda:1"), [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream=None):
            streams.append(stream)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    fastest(lambda: None, device, 0.0)
    assert set(waits) == {device}
    meter = StepMeter(None, device)
    with meter.timed("rollout"):
        pass
    assert streams == ["stream of cuda:1"] * 2


def test_a_speed_that_was_measured_without_waiting_for_the_gpu_is_not_read(tmp_path, monkeypatch):
    file, device = tmp_path / "speed.json", torch.device("cuda:1")
    file.write_text(json.dumps({f"a GPU, bfloat16, torch {torch.__version__}": 1e18}))
    monkeypatch.setattr("flow_grpo.policy.devices.CACHE", file)
    monkeypatch.setattr("flow_grpo.policy.devices.device_name", lambda device: "a GPU")
    monkeypatch.setattr("flow_grpo.policy.devices.matmul_speed", lambda *given: 1e15)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    matmul_peak.cache_clear()
    assert matmul_peak(device, torch.bfloat16) == 1e15
    matmul_peak.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("flow_grpo.policy.step_meter.time.perf_counter", lambda: now[0])
    return now


def test_a_phase_within_another_counts_for_itself_alone(clock):
    meter = StepMeter(None, torch.device("cpu"))
    with meter.timed("rollout"):
        clock[0] += 2
        with meter.timed("encode"):
            clock[0] += 3
        clock[0] += 5
    clock[0] += 11  # of no phase
    with meter.timed("encode"):
        clock[0] += 7
    assert meter.seconds() == {"rollout": 7.0, "encode": 10.0}


def test_the_time_before_an_error_counts_and_the_phase_ends(clock):
    meter = StepMeter(None, torch.device("cpu"))

    def fails():
        clock[0] += 2
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), meter.timed("reward"):
        fails()
    clock[0] += 3
    with meter.timed("reward"):
        clock[0] += 5
    assert meter.seconds() == {"reward": 7.0}


def test_a_step_begins_at_zero(clock):
    meter = StepMeter(None, torch.device("cpu"))
    with meter.timed("reward"):
        clock[0] += 2
    meter.counts_flops = False
    with meter.step():
        assert meter.seconds() == {}
