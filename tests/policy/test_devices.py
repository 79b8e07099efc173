"""The device and the dtype that `auto` chooses."""

import pytest
import torch
from support.embedded import tiny_policy

from flow_grpo.policy.devices import default_device, default_dtype
from flow_grpo.policy.loading import load_policy


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
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert default_dtype("cpu") == torch.float32, "a torch that can't tell"


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_only_on_a_cpu_with_matrix_units(monkeypatch, native, dtype):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: native)
    assert tiny_policy("auto").dtype == tiny_policy("auto").pipe.transformer.dtype == dtype
