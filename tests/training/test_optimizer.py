"""The optimizer by itself, on a policy's weights: AdamW by hand, clipping, forgetting, scaling in fp16, going on from a state."""

import copy
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support import by_hand
from support import small_policy as small
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flow_grpo.config.sections import OptimizerConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.training.update import Optimizer, adamw

SETTINGS = OptimizerConfig(lr=9.0, eps=0.02, weight_decay=0.3, max_grad_norm=1.5)


def made(o: OptimizerConfig = SETTINGS, dtype: torch.dtype = torch.float32, processes: Processes | None = None) -> Optimizer:
    return Optimizer(small.policy(dtype), o, processes or Processes())


def move(optimizer: Optimizer, lr: float) -> float:
    """One step; returns the norm of its gradient."""
    norm = optimizer.reduce_gradients().item()
    optimizer.step(lr, norm)
    return norm


def gradients(optimizer: Optimizer, norm: float, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(p.shape, generator=generator) for p in optimizer.parameters]
    return [g * norm / math.sqrt(sum(float(g.square().sum()) for g in grads)) for g in grads]


def towards(optimizer: Optimizer, grads: list[torch.Tensor]) -> torch.Tensor:
    """A loss that has these gradients."""
    return sum((p * g).sum() for p, g in zip(optimizer.parameters, grads, strict=True))


def test_steps_are_adamw_by_hand_with_the_gradient_clipped_and_the_rate_of_each_step():
    optimizer = made()
    expected = by_hand.AdamW(optimizer.parameters, (0.9, 0.999), 0.02, 0.3, 1.5)
    for step, (norm, lr) in enumerate([(1.0, 0.1), (6.0, 0.02), (0.2, 0.3), (1.4, 0.05), (1.6, 0.1)]):
        parts = gradients(optimizer, norm, step), gradients(optimizer, norm / 3, step + 100)
        for part in parts:
            optimizer.backward(towards(optimizer, part))
        whole = [a + b for a, b in zip(*parts, strict=True)]
        assert move(optimizer, lr) == pytest.approx(expected.step(whole, lr), rel=1e-5)
        assert all(p.grad is None for p in optimizer.parameters), "the next step begins without them"
        for p, hand in zip(optimizer.parameters, expected.weights, strict=True):
            torch.testing.assert_close(p.detach().double(), hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_discarded_gradients_leave_no_trace_in_the_next_step(is_reduced, dtype):
    one, other = made(dtype=dtype), made(dtype=dtype)
    one.backward(towards(one, gradients(one, 5.0, 0)))
    if is_reduced:
        assert one.reduce_gradients().item() == pytest.approx(5.0, rel=1e-5)
    one.zero_grad()
    for optimizer in (one, other):
        optimizer.backward(towards(optimizer, gradients(optimizer, 1.0, 1)))
        move(optimizer, 0.1)
    assert one.scaler.state_dict() == other.scaler.state_dict()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters, other.parameters, strict=True))


def test_what_no_loss_depends_on_keeps_its_value_and_has_no_moments():
    optimizer = made()
    still = optimizer.parameters[1].detach().clone()
    optimizer.backward(optimizer.parameters[0].sum())
    move(optimizer, 0.1)
    assert torch.equal(optimizer.parameters[1], still)
    assert list(optimizer.state_dict()["optimizer"]["state"]) == [0]


def test_the_gradients_of_all_processes_are_added_up_before_they_are_clipped():
    optimizer = made(processes=small.Two())
    expected = by_hand.AdamW(optimizer.parameters, (0.9, 0.999), 0.02, 0.3, 1.5)
    grads = gradients(optimizer, 1.0, 0)
    optimizer.backward(towards(optimizer, grads))
    assert move(optimizer, 0.1) == pytest.approx(4.0, rel=1e-5)
    expected.step([4 * g for g in grads], 0.1)
    for p, hand in zip(optimizer.parameters, expected.weights, strict=True):
        torch.testing.assert_close(p.detach().double(), hand, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_no_number_moves_nothing_and_is_dropped():
    optimizer, plain = made(), made()
    before = [p.detach().clone() for p in optimizer.parameters]
    optimizer.backward(towards(optimizer, gradients(optimizer, math.nan, 0)))
    assert math.isnan(move(optimizer, 0.1))
    assert all(torch.equal(p, former) for p, former in zip(optimizer.parameters, before, strict=True))
    assert not optimizer.state_dict()["optimizer"]["state"], "its moments are not spoiled either"
    for one in (optimizer, plain):
        one.backward(towards(one, gradients(one, 1.0, 1)))
        assert move(one, 0.1) == pytest.approx(1.0, rel=1e-5)
    assert all(torch.equal(p, q) for p, q in zip(optimizer.parameters, plain.parameters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_optimizer_goes_on_from_a_state_as_if_nothing_had_been(dtype):
    one, other = made(dtype=dtype), made(dtype=dtype)
    assert one.scaler.is_enabled() == (dtype == torch.float16)
    for step, norm in enumerate((1.0, math.inf, 2.0) if dtype == torch.float16 else (1.0, 2.0)):
        one.backward(towards(one, gradients(one, 1.0, step)) * norm)
        move(one, 0.1)
    state = copy.deepcopy(one.state_dict())
    with torch.no_grad():
        for p, q in zip(one.parameters, other.parameters, strict=True):
            q.copy_(p)
    other.load_state_dict(state)
    assert other.scaler.state_dict() == one.scaler.state_dict()
    assert all(v["exp_avg"].device.type == "cpu" for v in state["optimizer"]["state"].values())
    for step in (3, 4):
        for optimizer in (one, other):
            optimizer.backward(towards(optimizer, gradients(optimizer, 1.0, step)))
            move(optimizer, 0.1)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters, other.parameters, strict=True))


def test_a_state_is_a_copy():
    optimizer = made()
    optimizer.backward(towards(optimizer, gradients(optimizer, 1.0, 0)))
    move(optimizer, 0.1)
    kept = optimizer.state_dict()
    former = copy.deepcopy(kept)
    optimizer.backward(towards(optimizer, gradients(optimizer, 1.0, 1)))
    move(optimizer, 0.1)
    for place, values in former["optimizer"]["state"].items():
        assert all(torch.equal(value, kept["optimizer"]["state"][place][name]) for name, value in values.items())


def test_losses_in_fp16_are_scaled_and_an_overflow_halves_the_scale_and_moves_nothing():
    optimizer = made(dtype=torch.float16)
    before, grads = [p.detach().clone() for p in optimizer.parameters], gradients(optimizer, 1.0, 0)
    optimizer.backward(towards(optimizer, grads))
    torch.testing.assert_close(optimizer.parameters[0].grad, 65536 * grads[0])
    optimizer.backward(towards(optimizer, grads) * math.inf)
    assert not math.isfinite(move(optimizer, 0.1))
    assert optimizer.scaler.get_scale() == 32768
    assert all(torch.equal(p, former) for p, former in zip(optimizer.parameters, before, strict=True))
    expected = by_hand.AdamW(optimizer.parameters, (0.9, 0.999), 0.02, 0.3, 1.5)
    optimizer.backward(towards(optimizer, grads) * 2)
    assert move(optimizer, 0.1) == pytest.approx(expected.step([2 * g for g in grads], 0.1), rel=1e-5)
    for p, hand in zip(optimizer.parameters, expected.weights, strict=True):
        torch.testing.assert_close(p.detach().double(), hand, rtol=1e-5, atol=1e-6)


def test_the_last_scale_in_fp16_is_1():
    optimizer = made(dtype=torch.float16)
    for _ in range(16):
        optimizer.backward(optimizer.parameters[0].sum() * math.inf)
        move(optimizer, 0.1)
    assert optimizer.scaler.get_scale() == 1
    optimizer.backward(optimizer.parameters[0].sum() * math.inf)
    with pytest.raises(ValueError, match="overflow however small the loss is scaled: set dtype=bf16 or fp32"):
        move(optimizer, 0.1)
    assert optimizer.parameters[0].grad is None


def test_a_process_whose_groups_are_all_silent_moves_as_the_others_do_also_in_fp16():
    class Others(small.Two):
        def all_reduce_gradients(self, parameters: list, is_sharded: bool = False) -> None:
            for p, g in zip(parameters, grads, strict=True):
                p.grad = 65536 * g

    optimizer = made(dtype=torch.float16, processes=Others())
    expected, grads = by_hand.AdamW(optimizer.parameters, (0.9, 0.999), 0.02, 0.3, 1.5), gradients(optimizer, 1.0, 0)
    assert move(optimizer, 0.1) == pytest.approx(1.0, rel=1e-5)
    expected.step(grads, 0.1)
    for p, hand in zip(optimizer.parameters, expected.weights, strict=True):
        torch.testing.assert_close(p.detach().double(), hand, rtol=1e-5, atol=1e-6)


def test_processes_go_in_step_where_weights_lie_in_shares():
    policy = small.policy()
    assert not Optimizer(policy, SETTINGS, Processes()).synchronous_backward
    policy.uses_fsdp = True
    optimizer = Optimizer(policy, SETTINGS, Processes())
    assert (optimizer.synchronous_backward, optimizer.is_sharded) == (True, False), "a LoRA is whole on each"


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    distributed.destroy_process_group()


def test_weights_in_shares_give_their_moments_whole_and_take_them_back(mesh):
    def sharded(seed):
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(4, 3, generator=generator), torch.randn(1, generator=generator)]
        weights = {str(i): torch.nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for i, v in enumerate(values)}
        device, dtype = torch.device("cpu"), torch.float32
        meter = SimpleNamespace(timed=lambda name: nullcontext())
        kind = {"is_sharded": True, "uses_fsdp": True, "device": device, "dtype": dtype}
        policy = SimpleNamespace(trainable_parameters=lambda: weights, meter=meter, **kind)
        return Optimizer(policy, SETTINGS, Processes())

    def stepped(optimizer, seed):
        optimizer.backward(sum((p * float(seed + 1)).square().sum().full_tensor() for p in optimizer.parameters))
        return move(optimizer, 0.1)

    one, other = sharded(0), sharded(0)
    assert (one.is_sharded, one.synchronous_backward) == (True, True)
    assert isinstance(stepped(one, 0), float)
    state = one.state_dict()
    moments = [value for values in state["optimizer"]["state"].values() for value in values.values()]
    assert len(moments) == 6
    assert not any(isinstance(value, DTensor) for value in moments)
    with torch.no_grad():
        for p, q in zip(one.parameters, other.parameters, strict=True):
            q.copy_(p)
    other.load_state_dict(copy.deepcopy(state))
    kept = list(other.adamw.state_dict()["state"].values())
    for values, p in zip(kept, other.parameters, strict=True):
        assert values["exp_avg"].placements == values["exp_avg_sq"].placements == p.placements
        assert not isinstance(values["step"], DTensor)
    assert stepped(one, 1) == stepped(other, 1)
    assert all(torch.equal(p.to_local(), q.to_local()) for p, q in zip(one.parameters, other.parameters, strict=True))


def test_adamw_in_8_bit_is_the_librarys_with_the_same_settings(monkeypatch):
    class AdamW8bit(torch.optim.AdamW):
        pass

    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", SimpleNamespace(AdamW8bit=AdamW8bit))
    weight = torch.nn.Parameter(torch.ones(1))
    actual = adamw([weight], SETTINGS.model_copy(update={"name": "adamw_8bit"}))
    assert isinstance(actual, AdamW8bit)
    [group], [plain] = actual.param_groups, adamw([weight], SETTINGS).param_groups
    assert group == plain
    assert not isinstance(adamw([weight], SETTINGS), AdamW8bit)


def test_the_settings_reach_adamw():
    [group] = adamw([torch.nn.Parameter(torch.ones(1))], SETTINGS).param_groups
    assert (group["lr"], group["eps"], group["weight_decay"]) == (9.0, 0.02, 0.3)
