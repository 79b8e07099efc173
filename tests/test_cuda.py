"""On a GPU: the ratio is exactly 1 in every dtype and setting, and memory is what the plan says."""

import gc
from functools import partial

import pytest
import torch
from support.embedded import short_run
from support.families import TINY, awake

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.policy.devices import fastest
from flow_grpo.policy.memory import on_device, pin_together
from flow_grpo.policy.step_meter import StepMeter
from flow_grpo.rewards import load
from flow_grpo.rewards.threads import call_interruptibly
from flow_grpo.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
WORKSPACES = 4 * 32 * 2**20  # bytes that cuBLAS and cuBLASLt take, in the forward and in the backward thread

INDEX = """
from flow_grpo.rewards.networks import AUTO, usable_device


class Index:
    def __init__(self):
        self.index = usable_device("index", AUTO).index

    def __call__(self, images, prompts):
        return [self.index] * len(prompts)
"""


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Trainers are in reference cycles, so their memory outlives them."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@torch.no_grad()
def move(policy):
    """Moves every LoRA parameter."""
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.trainable_parameters().values():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("flux")
    awake(TINY["flux"].build()).save_pretrained(folder)
    size = ["height=32", "width=48", "pipeline_kwargs={max_sequence_length: 16}"]
    return [*size, f"model={folder}", "lora.targets=null", "evaluation.prompts=null"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "memory",
    [
        "{}",
        "{gradient_checkpointing: true}",
        "{compile: true}",
        "{compile: true, gradient_checkpointing: true}",
    ],
)
def test_the_ratio_is_exactly_1(flux, tmp_path, dtype, memory):
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *flux, f"dtype={dtype}", f"memory={memory}"))
    for _ in range(2):
        metrics = trainer.training_step()
        assert metrics["ratio/first_update_max_deviation"] == 0
        assert "grad_norm" in metrics or dtype == "fp16", "fp16 may pass over a step whose gradients overflowed"


def test_a_long_run_is_compiled_by_itself_with_a_ratio_of_exactly_1(flux, tmp_path):
    short, long = (
        FlowGRPOTrainer(args=short_run(tmp_path / steps, *flux, "dtype=bf16", f"steps={steps}"))
        for steps in ("2", "10000000")
    )
    assert (short.policy.compiled, long.policy.compiled) == (False, True)
    for _ in range(2):
        assert long.training_step()["ratio/first_update_max_deviation"] == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_in_16_bits_are_those_of_plain_matrix_products(flux, tmp_path, dtype):
    """With cuDNN's attention, torch's own choice on Hopper, they were NaN in bf16 and wrong in fp16."""
    norms = []
    for backend in (None, "_native_math"):
        trainer = FlowGRPOTrainer(args=short_run(tmp_path / str(backend), *flux, f"dtype={dtype}"))
        if backend is not None:
            trainer.policy.pipe.transformer.set_attention_backend(backend)
        norms.append(trainer.training_step()["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_a_quantised_base_trains_with_a_ratio_of_exactly_1(flux, tmp_path):
    pytest.importorskip("bitsandbytes")
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *flux, "dtype=bf16", "memory={quantize: nf4}"))
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
        reward = trainer.training_step()["reward"]
        steps.append((reward, trainer.policy.adapter_state()))
        peaks.append(trainer.training_step()["memory/peak_gb"])  # the first step also measures the model
        del trainer
        gc.collect()
    (reward, kept), (same, offloaded) = steps
    assert reward == same
    # AdamW's first step goes by the sign of a gradient, which an attention's backward pass may round otherwise each time
    alike = torch.cat([torch.isclose(offloaded[name], value).flatten() for name, value in kept.items()])
    assert alike.float().mean() > 0.99
    assert peaks[1] < peaks[0]


def test_offloaded_weights_are_pinned_in_little_more_than_their_bytes():
    tensors = [torch.randn(3072, width) for width in (3072, 5000, 12288, 1)]
    expected = [tensor.clone() for tensor in tensors]
    requested = []
    pin_together(tensors, lambda size: requested.append(size) or torch.empty(size, dtype=torch.uint8, pin_memory=True))
    assert all(tensor.is_pinned() for tensor in tensors)
    assert sum(requested) < 1.1 * sum(tensor.nbytes for tensor in tensors)
    on_gpu = [on_device(tensor, torch.device("cuda")) for tensor in tensors]
    assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip(on_gpu, expected, strict=True))


def test_8_bit_adam_moves_the_adapter(flux, tmp_path):
    pytest.importorskip("bitsandbytes")
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *flux, "optimizer={name: adamw_8bit, lr: 1.0e-3}"))
    before = trainer.policy.adapter_state()
    trainer.training_step()
    assert any(not torch.equal(before[name], value) for name, value in trainer.policy.adapter_state().items())


def test_the_peak_of_a_step_leaves_out_what_was_freed_before_it():
    device = torch.device("cuda")
    torch.empty(2**28, device=device)
    meter = StepMeter(None, device)
    meter.counts_flops = False
    with meter.step():
        torch.empty(2**20, device=device)
    metrics = meter.speed(1.0, 1, 0.0, torch.float32, 1)
    assert 2**22 <= 1e9 * metrics["memory/peak_gb"] - torch.cuda.memory_allocated() < 2**30


@pytest.mark.parametrize("overrides", [[], ["memory.gradient_checkpointing=true"]])
def test_memory_is_what_the_plan_says(tmp_path, overrides):
    common = ["rewards={color: 1}", "evaluation.prompts=null", "prompts_per_step=64", "microbatch=256"]
    args = FlowGRPOConfig.from_yaml("tiny_grpo", [*common, f"output_dir={tmp_path}", *overrides])
    forecast = StepEstimator(args, cuda=True).estimate(args.microbatch)
    planned = forecast.peak - forecast.persistent["CUDA"]
    trainer = FlowGRPOTrainer(args=args)
    trainer.training_step()  # which also measures the model
    peak = 1e9 * trainer.training_step()["memory/peak_gb"]
    assert 0.85 * planned < peak < 1.15 * planned + WORKSPACES


@two_gpus
def test_a_reward_is_called_on_the_gpu_that_it_was_built_on():
    with torch.cuda.device(1):
        weights = torch.ones(3, device="cuda")
        assert call_interruptibly(lambda: torch.ones(3).to("cuda") + weights, lambda: False).device.index == 1


@two_gpus
def test_on_the_second_gpu_times_are_those_of_its_kernels():
    """Also where the first one is the current device."""
    device, meter = torch.device("cuda:1"), StepMeter(None, torch.device("cuda:1"))
    work = partial(torch.matmul, *torch.randn(2, 8192, 8192, device=device))
    seconds = fastest(work, device, 0.2)
    with meter.timed("rollout"):
        for _ in range(10):
            work()
    assert meter.seconds()["rollout"] == pytest.approx(10 * seconds, rel=0.5)


def test_rewards_are_on_the_gpu_by_default_with_the_values_of_the_cpu():
    images, prompts = torch.rand(6, 3, 32, 80, generator=torch.Generator().manual_seed(0)), ["a sign"] * 6
    clip = load("clip")
    assert clip.embed.device.type == "cuda"
    torch.testing.assert_close(clip(images, prompts), load("clip", device="cpu")(images, prompts), rtol=1e-3, atol=1e-4)


@two_gpus
def test_an_isolated_reward_is_on_the_gpu_of_the_process_that_starts_it(tmp_path):
    (tmp_path / "mine.py").write_text(INDEX)
    with torch.cuda.device(1):
        isolated = load(f"{tmp_path / 'mine.py'}:Index", isolate=True)
        assert isolated(torch.zeros(1, 3, 4, 4), ["a"]).tolist() == [1]
