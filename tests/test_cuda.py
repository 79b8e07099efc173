"""On a GPU: the ratio is exactly 1 in every dtype and setting, and memory stays below the plan's."""

import pytest
import torch
from support.embedded import short_run
from support.families import TINY, awake

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.policy.memory import peak_memory
from flow_grpo.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("flux")
    awake(TINY["flux"].build()).save_pretrained(folder)
    return ["height=32", "width=48", f"model={folder}", "pipeline_kwargs={max_sequence_length: 16}", "lora.targets=null"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "memory", ["{}", "{gradient_checkpointing: true}", "{compile: true}", "{compile: true, gradient_checkpointing: true}"]
)
def test_the_ratio_is_exactly_1(flux, tmp_path, dtype, memory):
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *flux, f"dtype={dtype}", f"memory={memory}"))
    for _ in range(2):
        metrics = trainer.training_step()
        assert metrics["ratio/first_update_max_deviation"] == 0
        assert "grad_norm" in metrics or dtype == "fp16", "fp16 may pass over a step whose gradients overflowed"


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_a_quantised_base_trains_with_a_ratio_of_exactly_1(flux, tmp_path, kind):
    pytest.importorskip("bitsandbytes" if kind == "nf4" else "torchao")
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *flux, "dtype=bf16", f"memory={{quantize: {kind}}}"))
    assert trainer.training_step()["ratio/first_update_max_deviation"] == 0
    assert all(parameter.dtype == torch.float32 for parameter in trainer.policy.trainable_parameters().values())


@pytest.mark.parametrize("offload", ["null", "groups"])
def test_a_base_in_float8_trains_with_a_ratio_of_exactly_1(flux, tmp_path, offload):
    memory = f"memory={{quantize: fp8_layerwise, gradient_checkpointing: true, offload: {offload}}}"
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *flux, "dtype=bf16", memory))
    for _ in range(2):
        assert trainer.training_step()["ratio/first_update_max_deviation"] == 0


def test_offloaded_blocks_give_the_same_step_with_less_memory(flux, tmp_path):
    steps, peaks = [], []
    for offload in ("null", "groups"):
        settings = f"memory={{gradient_checkpointing: true, offload: {offload}}}"
        trainer = FlowGRPOTrainer(args=short_run(tmp_path / offload, *flux, "dtype=fp32", settings))
        torch.cuda.reset_peak_memory_stats()
        steps.append((trainer.training_step()["reward"], trainer.policy.adapter_state()))
        peaks.append(torch.cuda.max_memory_allocated())
        del trainer
    (reward, kept), (same, offloaded) = steps
    assert reward == same
    for name, value in kept.items():
        torch.testing.assert_close(offloaded[name], value)
    assert peaks[1] < peaks[0]


def test_8_bit_adam_moves_the_adapter(flux, tmp_path):
    pytest.importorskip("bitsandbytes")
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *flux, "optimizer={name: adamw_8bit, lr: 1.0e-3}"))
    before = trainer.policy.adapter_state()
    trainer.training_step()
    assert any(not torch.equal(before[name], value) for name, value in trainer.policy.adapter_state().items())


@pytest.mark.parametrize("overrides", [["microbatch=64"], ["microbatch=64", "memory.gradient_checkpointing=true"]])
def test_memory_stays_within_the_plan(tmp_path, overrides):
    args = FlowGRPOConfig.from_yaml("tiny_grpo", ["rewards={color: 1}", f"output_dir={tmp_path}", *overrides])
    forecast = StepEstimator(args, cuda=True).estimate(args.microbatch)
    trainer = FlowGRPOTrainer(args=args)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        trainer.training_step()
    assert peak_memory(trainer.policy.device) < 1.15 * (forecast.peak - forecast.persistent["CUDA"])
