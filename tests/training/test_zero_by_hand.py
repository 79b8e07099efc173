"""ZeRO's optimizer in this process, with all shares its own: AdamW by hand, forgetting, and states to and from the plain one's."""

import copy
import math
import os

import pytest
import torch
from support import by_hand
from support import small_policy as small
from torch import distributed

from flow_grpo.config.sections import OptimizerConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.training import zero
from flow_grpo.training.optimizer import Optimizer
from flow_grpo.training.zero import ZeroOptimizer

SETTINGS = OptimizerConfig(lr=9.0, betas=(0.6, 0.8), eps=0.02, weight_decay=0.3, max_grad_norm=1.5)


@pytest.fixture(autouse=True, scope="module")
def _group():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}.items():  # as a launcher sets them
            patch.setenv(name, value)
        yield
    if ZeroOptimizer._active is not None:
        ZeroOptimizer._active.close()
        ZeroOptimizer._active = None
    distributed.destroy_process_group()


def made(shard, processes=None, policy=None):
    return ZeroOptimizer(policy or small.policy(), SETTINGS, processes or Processes(), shard)


def gradients(optimizer, norm, seed):
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(p.shape, generator=generator) for p in optimizer.parameters]
    return [g * norm / math.sqrt(sum(float(g.square().sum()) for g in grads)) for g in grads]


def towards(optimizer, grads):
    """A loss that has these gradients."""
    return sum((p * g).sum() for p, g in zip(optimizer.parameters, grads, strict=True))


def close(optimizer, expected):
    for p, hand in zip(optimizer.parameters, expected.weights, strict=True):
        torch.testing.assert_close(p.detach().double(), hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shard", ["zero1", "zero2"])
def test_steps_are_adamw_by_hand(shard):
    """Two processes' losses are a sum, where DeepSpeed takes a mean: of which there is one here, so gradients are doubled."""
    optimizer = made(shard, small.Two())
    assert (optimizer.is_sharded, optimizer.synchronous_backward) == (True, True)
    expected = by_hand.AdamW(optimizer.parameters, (0.6, 0.8), 0.02, 0.3, 1.5)
    for step, (norm, lr) in enumerate([(1.0, 0.1), (6.0, 0.02), (0.2, 0.3)]):
        parts = gradients(optimizer, norm, step), gradients(optimizer, norm / 3, step + 100)
        for part in parts:
            optimizer.backward(towards(optimizer, part))
        measured = optimizer.step(lr)
        assert isinstance(measured, float)
        assert measured == pytest.approx(expected.step([2 * (a + b) for a, b in zip(*parts, strict=True)], lr), rel=1e-4)
        close(optimizer, expected)


@pytest.mark.parametrize("shard", ["zero1", "zero2"])
def test_discarded_gradients_and_ones_that_are_not_finite_leave_no_trace(shard):
    optimizer = made(shard)
    expected = by_hand.AdamW(optimizer.parameters, (0.6, 0.8), 0.02, 0.3, 1.5)
    optimizer.backward(towards(optimizer, gradients(optimizer, 5.0, 0)))
    optimizer.zero_grad()
    optimizer.backward(towards(optimizer, gradients(optimizer, math.nan, 0)))
    assert not math.isfinite(optimizer.step(0.1))
    close(optimizer, expected)
    for step in (1, 2):
        grads = gradients(optimizer, 1.0, step)
        optimizer.backward(towards(optimizer, grads))
        assert optimizer.step(0.1) == pytest.approx(expected.step(grads, 0.1), rel=1e-4)
    close(optimizer, expected)


@pytest.mark.parametrize("shard", ["zero1", "zero2"])
@pytest.mark.parametrize(("of", "to"), [("plain", "zero"), ("zero", "plain"), ("zero", "zero")])
def test_each_goes_on_from_the_others_state(shard, of, to):
    def optimizer(kind):
        return made(shard) if kind == "zero" else Optimizer(small.policy(), SETTINGS, Processes())

    one = optimizer(of)
    expected = by_hand.AdamW(one.parameters, (0.6, 0.8), 0.02, 0.3, 1.5)
    for step in (0, 1):
        grads = gradients(one, 1.0, step)
        one.backward(towards(one, grads))
        one.step(0.1)
        expected.step(grads, 0.1)
    state = copy.deepcopy(one.state_dict())
    assert [float(values["step"]) for values in state["optimizer"]["state"].values()] == [2.0] * len(one.parameters)
    for name, hand in (("exp_avg", expected.first), ("exp_avg_sq", expected.second)):
        for values, value in zip(state["optimizer"]["state"].values(), hand, strict=True):
            torch.testing.assert_close(values[name].double(), value, rtol=1e-4, atol=1e-7)
            assert values[name].device.type == "cpu"
    assert state["optimizer"]["param_groups"][0]["params"] == list(range(len(one.parameters)))
    values, scaler = [p.detach().clone() for p in one.parameters], state["scaler"]
    other = optimizer(to)
    with torch.no_grad():
        for p, value in zip(other.parameters, values, strict=True):
            p.copy_(value)
    other.load_state_dict({**state, "scaler": scaler})
    for step in (2, 3):
        grads = gradients(other, 1.0, step)
        other.backward(towards(other, grads))
        other.step(0.1)
        expected.step(grads, 0.1)
    close(other, expected)


def test_a_state_without_moments_and_one_of_some_weights_alone_are_taken():
    """As the plain optimizer's are before its first step, or of a weight that had no gradient."""
    plain = Optimizer(small.policy(), SETTINGS, Processes())
    empty = plain.state_dict()
    plain.backward(plain.parameters[2].sum())
    plain.step(0.1)
    some = plain.state_dict()
    assert list(some["optimizer"]["state"]) == [2]
    for state, before in ((empty, 0), (some, 1)):
        optimizer = made("zero1")
        assert not optimizer.state_dict()["optimizer"]["state"], "before the first step there are none"
        optimizer.load_state_dict(state)
        moments = optimizer.state_dict()["optimizer"]["state"]
        assert {float(values["step"]) for values in moments.values()} == {float(before)}
        assert [bool(values["exp_avg"].any()) for values in moments.values()] == [
            before == 1 and i == 2 for i in range(len(moments))
        ]
        if before:
            torch.testing.assert_close(moments[2]["exp_avg"], some["optimizer"]["state"][2]["exp_avg"])
            torch.testing.assert_close(moments[2]["exp_avg_sq"], some["optimizer"]["state"][2]["exp_avg_sq"])


def test_a_process_that_only_helps_to_gather_keeps_no_moments():
    optimizer = made("zero1")
    optimizer.backward(towards(optimizer, gradients(optimizer, 1.0, 0)))
    optimizer.step(0.1)
    assert optimizer.state_dict(keep_on_this_rank=False)["optimizer"]["state"] == {}
    assert len(optimizer.state_dict()["optimizer"]["state"]) == len(optimizer.parameters)


def test_a_new_one_takes_the_weights_over_from_the_last():
    policy = small.policy()
    first = made("zero2", policy=policy)
    second = made("zero2", policy=policy)
    assert not hasattr(first, "engine")
    expected = by_hand.AdamW(second.parameters, (0.6, 0.8), 0.02, 0.3, 1.5)
    grads = gradients(second, 1.0, 0)
    second.backward(towards(second, grads))
    assert second.step(0.1) == pytest.approx(expected.step(grads, 0.1), rel=1e-4)
    close(second, expected)


def test_fp16_is_refused():
    with pytest.raises(
        ValueError, match=r"memory\.shard=zero1 scales no loss, as fp16 needs: load the policy in bf16 or fp32"
    ):
        made("zero1", policy=small.policy(torch.float16))


def test_the_library_is_quiet_compiles_nothing_and_stays_on_the_policys_device(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    zero.import_deepspeed("zero1", torch.device("cuda"))
    assert "DS_ACCELERATOR" not in os.environ
    deepspeed = zero.import_deepspeed("zero1", torch.device("cpu"))
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert deepspeed.ops.__compatible_ops__ == {}
    assert deepspeed.utils.logger.level == 40
    assert zero.STAGES == {"zero1": 1, "zero2": 2}
    for shard, stage in zero.STAGES.items():
        assert made(shard).engine.zero_optimization_stage() == stage
