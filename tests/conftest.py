"""What the tests share: the embedded model as users load it, and short run configs."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.policy import Policy, load_policy

quiet_libraries()
# A job that a shell starts in the background ignores Ctrl-C, and so would every command that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores, and the processes that they start share theirs
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
settings.register_profile("ours", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")  # as fast as the machine is, and the same examples each time
CALL = {"height": 32, "width": 80, "guidance_scale": 1.0, "max_sequence_length": 14}
PROMPTS = ['red text "CAT" on a blue background', 'white text "HORSE" on a black background']


def tiny_policy(dtype: str = "fp32", **call) -> Policy:
    return load_policy("tiny", "cpu", dtype, **{**CALL, **call})


@pytest.fixture
def policy() -> Policy:
    """The embedded model with a LoRA that already does something."""
    policy = tiny_policy()
    policy.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
    stir(policy)
    return policy


def stir(policy: Policy, seed: int = 0) -> None:
    """Moves every LoRA parameter, so that the adapter changes the velocity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def short_run(output: Path, *overrides: str) -> FlowGRPOConfig:
    """The shipped config cut down to seconds; brightness as reward, so that no OCR runs."""
    reward = f"{Path(__file__).parent / 'sample_rewards.py'}:brightness"
    common = [
        f"output={output}",
        "steps=2",
        "prompts_per_step=2",
        "images_per_prompt=4",
        "microbatch=8",
        f"rewards={{{reward}: 1}}",
        "evaluation={prompts: prompts/signs_eval.txt, limit: 2, every: 0, steps: 3}",
        "sampling={steps: 4, transition: cps, noise_level: 0.8, window: {kind: all}}",
        "objective={name: grpo, clip_low: 1.0e-3, clip_high: 1.0e-3}",
        "lora={rank: 4, alpha: 8, targets: [to_q, to_out.0]}",
        "optimizer={lr: 1.0e-3}",
        "dtype=fp32",
    ]
    return FlowGRPOConfig.read("tiny_ocr", [*common, *overrides])
