"""On one of several GPUs: a reward stays on that of its process, in the thread that calls it and in a process of its own."""

import threading

import onnxruntime
import pytest
import torch

import rewards
from rewards.devices import current_gpu, with_index
from rewards.interrupt import DaemonThread
from rewards.ocr import OCR

INDEX = """
class Index:
    def __init__(self, device):
        self.index = int(str(device).removeprefix("cuda:"))

    def __call__(self, images, prompts):
        return [self.index] * len(prompts)
"""


@pytest.fixture
def gpus(monkeypatch):
    """CUDA's rule, without a GPU: each thread has a current device, which is 0 until the thread sets it."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(current, "index", index))


def test_a_thread_calls_on_the_gpu_of_the_thread_that_made_it(gpus):
    torch.cuda.set_device(3)
    thread = DaemonThread()
    torch.cuda.set_device(1)
    assert thread.submit(torch.cuda.current_device).result() == 3
    thread.close()


@pytest.mark.parametrize("isolate", [False, True])
def test_a_reward_on_cuda_is_on_the_gpu_of_its_process(gpus, tmp_path, isolate):
    (tmp_path / "mine.py").write_text(INDEX)
    torch.cuda.set_device(2)
    name, images = f"{tmp_path / 'mine.py'}:Index", torch.zeros(2, 3, 4, 4)
    assert rewards.load(name, isolate=isolate, device="cuda")(images, ["a", "b"]) == pytest.approx([2, 2])
    assert rewards.load(name, device="cuda:1")(images, ["a", "b"]) == [1, 1]


def test_ocr_has_an_engine_on_the_gpu_of_its_process(gpus, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    torch.cuda.set_device(2)
    assert OCR(device="cuda").device == torch.device("cuda:2")


def test_other_devices_stay_as_they_are(gpus):
    torch.cuda.set_device(2)
    assert [with_index(device) for device in ("cpu", "cuda:0", "cuda")] == ["cpu", "cuda:0", "cuda:2"]
    assert str(with_index(torch.device("cuda"))) == "cuda:2"


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a GPU is in use")
def test_no_gpu_is_asked_for_before_the_process_uses_one():
    assert current_gpu() is None
    assert with_index("cuda") == "cuda"
