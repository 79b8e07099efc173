"""The device of a reward: the GPU if there is one; of several, that of its process, in any thread and in a process of its own."""

import inspect
import threading

import onnxruntime
import pytest
import torch

from flow_grpo import rewards
from flow_grpo.rewards.networks import AUTO, current_gpu, usable_device, with_index
from flow_grpo.rewards.ocr import OCR
from flow_grpo.rewards.threads import DaemonThread

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


def test_every_network_is_on_the_gpu_if_there_is_one_unless_its_options_say_otherwise():
    targets = [rewards.locate("reward", name, rewards.REGISTRY) for name in rewards.REGISTRY]
    options = {target.__name__: inspect.signature(target).parameters.get("device") for target in targets}
    defaults = {name: option.default for name, option in options.items() if option is not None}
    assert len(defaults) >= 10
    assert {name for name, device in defaults.items() if device != AUTO} == {"OCR", "ExactOCR"}, (
        "whose GPU needs another package"
    )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    clip = rewards.load("clip")
    assert {clip.embed.device.type, *(values.device.type for values in clip.parameters())} == {kind}
    assert {values.device.type for values in rewards.load("clip", device="cpu").parameters()} == {"cpu"}


def test_auto_is_the_gpu_of_its_process(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda size, device: None)  # without a GPU it can't be tried out
    torch.cuda.set_device(2)
    assert usable_device("clip", AUTO) == torch.device("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("isolate", [False, True])
def test_a_gpu_that_is_not_there_is_one_sentence(isolate):
    with pytest.raises(ValueError, match=r"clip: device=cuda can't be used here: .*; set device=cpu, or leave it out\.$"):
        rewards.load("clip", isolate=isolate, device="cuda")
