"""A plan with `lora.init_from`: it is of the LoRA that is trained, which keeps its own rank and layers."""

from collections import defaultdict
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.embedded import CALL, short_model

from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.plan.trace import ModelTrace
from flow_grpo.policy.loading import load_policy

SHAPES = ["lora.rank=3", "lora.targets=[to_q, to_out.0]"]
FILE = "pytorch_lora_weights.safetensors"


def traced(*overrides):
    args = FlowGRPOConfig.from_yaml("tiny_ocr", [f"model={short_model()}", *overrides])
    return ModelTrace(args, torch.float32, cuda=True, release_gradients=False)


def shapes(trace):
    return {name: parameter.shape for name, parameter in trace.policy.trainable_parameters().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    policy = load_policy(str(short_model()), "cpu", "fp32", **CALL)
    policy.add_lora(3, 6, ["to_q", "to_out.0"], seed=0)
    folder = tmp_path_factory.mktemp("lora")
    policy.save(folder)
    return folder


@pytest.fixture
def without_counting(monkeypatch):
    """Builds a model with its LoRA and does not trace it, which takes seconds."""

    def built(*overrides):
        with monkeypatch.context() as patch:
            patch.setattr(ModelTrace, "_count", lambda *given: defaultdict(Mock))
            patch.setattr(ModelTrace, "_forward_operations", lambda *given: 0.0)
            return traced(*overrides)

    return built


def test_a_saved_lora_is_traced_with_its_own_rank_and_layers(folder, tmp_path, without_counting):
    expected = traced(*SHAPES)
    tensors = load_file(folder / FILE)
    peft = {f"base_model.model.{name.removeprefix('transformer.')}": value for name, value in tensors.items()}
    save_file(peft, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 3}')
    trace = traced(f"lora.init_from={folder}")
    assert (trace.bytes, trace.operations) == (expected.bytes, expected.operations)
    for one in (trace, *(without_counting(f"lora.init_from={path}") for path in (folder / FILE, tmp_path))):
        assert one.notes == []
        assert shapes(one) == shapes(expected)
    assert shapes(without_counting()) != shapes(expected)


@pytest.mark.slow
def test_a_lora_whose_shapes_are_not_known_here_has_a_note():
    trace = traced(*SHAPES, "lora.init_from=someone/a-lora")
    assert trace.notes == [
        "The rank and targets of the LoRA someone/a-lora are not known from a file here: the estimate has those of the config."
    ]
    assert shapes(trace) == shapes(traced(*SHAPES))


def test_a_damaged_lora_or_one_of_another_model_is_refused(folder, tmp_path):
    (tmp_path / FILE).write_bytes((folder / FILE).read_bytes()[:20])
    with pytest.raises(ValueError, match=f"could not be loaded: .*{FILE} is damaged"):
        traced(f"lora.init_from={tmp_path}")
    elsewhere = {
        "transformer.elsewhere.lora_A.weight": torch.zeros(2, 4),
        "transformer.elsewhere.lora_B.weight": torch.zeros(4, 2),
    }
    save_file(elsewhere, tmp_path / FILE)
    with pytest.raises(ValueError, match="has 1 layer, of which 0 have a place in StableDiffusion3Pipeline"):
        traced(f"lora.init_from={tmp_path}")
