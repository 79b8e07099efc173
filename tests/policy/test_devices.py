"""The device and the dtype that `auto` chooses."""

import pytest
import torch
from support.embedded import tiny_policy

from flow_grpo.policy import devices
from flow_grpo.policy.devices import default_device, default_dtype
from flow_grpo.policy.loading import load_policy


def test_the_memory_of_a_container_is_its_limit(tmp_path, monkeypatch):
    total = devices.machine_memory()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(devices, "MEMORY_LIMITS", [limit, tmp_path / "missing"])
    for content, memory in (("1000000000\n", 10**9), (str(2**62), total), ("max\n", total)):
        limit.write_text(content)
        assert devices.machine_memory() == memory


def test_a_device_that_is_not_there_is_a_clear_error(monkeypatch):
    with pytest.raises(ValueError, match="device=warp can't be used here"):
        load_policy("tiny", "warp")
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(ValueError, match="device=cuda can't be used here"):
            load_policy("tiny")


@pytest.mark.parametrize(
    ("cuda", "mps", "device"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu"), (True, False, "cuda")]
)
def test_the_device_is_cuda_then_mps_then_the_cpu(monkeypatch, cuda, mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert default_device() == device


def test_a_dtype_is_asked_for_by_its_short_name():
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {name: tiny_policy(name).pipe.transformer.dtype for name in dtypes} == dtypes


def test_auto_is_bf16_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert default_dtype("cuda") == torch.float32, "emulation is slower"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert default_dtype("cuda:1") == torch.bfloat16
    assert default_dtype("mps") == torch.float32


@pytest.mark.parametrize(("speedup", "dtype"), [(4.0, torch.bfloat16), (1.1, torch.float32), (0.0, torch.float32)])
def test_auto_is_bf16_only_on_a_cpu_that_is_faster_in_it(monkeypatch, speedup, dtype):
    monkeypatch.setattr(devices, "bf16_speedup", lambda: speedup)
    assert tiny_policy("auto").dtype == tiny_policy("auto").pipe.transformer.dtype == dtype


def test_a_cpu_is_measured_once_and_in_turns(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CACHE", tmp_path / "speed.json")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    order = []

    def seconds(work, device, least):
        dtype = torch.bfloat16 if len(order) % 2 else torch.float32
        order.append(dtype)
        return (0.3 if dtype == torch.bfloat16 else 1.2) * (3 if len(order) < 5 else 1)  # the machine was busy at first

    monkeypatch.setattr(devices, "fastest", seconds)
    before = torch.get_rng_state()
    assert devices.bf16_speedup.__wrapped__() == pytest.approx(4)
    measured = len(order)
    assert devices.bf16_speedup.__wrapped__() == pytest.approx(4)
    assert len(order) == measured == 2 * devices.ROUNDS, "the second process reads the file"
    assert torch.equal(before, torch.get_rng_state()), "a run's random numbers do not depend on a measurement"
    (tmp_path / "speed.json").write_text("{torn")
    assert devices.bf16_speedup.__wrapped__() == pytest.approx(4)


def test_a_cpu_without_bf16_is_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CACHE", tmp_path / "speed.json")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert devices.bf16_speedup.__wrapped__() == 0
    assert not (tmp_path / "speed.json").exists()


def test_a_layer_is_computed_in_each_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        devices._layer(dtype)()
    assert devices._measure_bf16_speedup() > 0
