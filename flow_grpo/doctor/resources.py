"""What the machine offers and what the run costs: device, threads, time, memory, disk."""

import importlib.metadata
import os
import shutil
import time
from pathlib import Path

import psutil
import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor.result import ERROR, OK, WARNING, CheckResult
from flow_grpo.evaluation.generate import generate_images
from flow_grpo.plan.estimate import StepEstimate, StepEstimator
from flow_grpo.policy.devices import DTYPES, machine_memory, matmul_speed
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.step_meter import PHASES
from flow_grpo.run_folder.opening import is_begun
from flow_grpo.text import duration, gigabytes
from flow_grpo.tracking.tracker import RunTime

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
MAX_SLOWDOWN = 3.0  # times the estimated seconds of a step
MAX_USE = 0.9  # share of the memory or disk space that a run should need at most
GB = 1e9


def check_machine(device: torch.device, dtype: torch.dtype) -> list[CheckResult]:
    """Check the device, its speed and its threads."""
    speed = matmul_speed(device, dtype)
    speed_fp32 = speed if dtype == torch.float32 else matmul_speed(device, torch.float32)
    name = next(name for name, value in DTYPES.items() if value == dtype)
    results = [device_speed(device.type, name, speed, speed_fp32, torch.cuda.is_available())]
    if device.type == "cpu":
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        results.append(threads(torch.get_num_threads(), allowed, psutil.cpu_count(logical=False)))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return [*results, CheckResult("packages", "", OK, versions)]


def estimate(stage: FlowGRPOConfig, cuda: bool) -> tuple[StepEstimate, float] | None:
    """The estimate of `flow-grpo plan` for a training step, and the step's seconds. None if it can't trace the model."""
    try:
        estimator = StepEstimator(stage, cuda)
    except (ValueError, OSError):
        return None
    step_estimate = estimator.estimate(stage.microbatch)
    return step_estimate, step_estimate.seconds(estimator.rates(stage.microbatch))


def sampling_seconds(model: FlowPipeline, prompts: list[str], steps: int) -> float:
    """Seconds that an evaluation takes for each image, without rewards: extrapolated from runs of 1 and 3 sampling steps."""
    seconds = {}
    for count in (1, 1, 3):  # the first run encodes the prompts
        started = time.perf_counter()
        generate_images(model, prompts, seeds=list(range(len(prompts))), steps=count, microbatch=len(prompts))
        seconds[count] = time.perf_counter() - started
    return (seconds[1] + (steps - 1) * (seconds[3] - seconds[1]) / 2) / len(prompts)


def run_time(args: FlowGRPOConfig, step_metrics: list[dict[str, float]], per_evaluation: float) -> CheckResult:
    """Time of the run, from one step's metrics of each stage and the seconds of an evaluation."""
    seconds = iter([metrics["time/step"] for metrics in step_metrics])
    time_of_run = RunTime.of(args, lambda stage: next(seconds), per_evaluation)
    return CheckResult("the run", duration(time_of_run.seconds), OK, f"{time_of_run}, on one process")


def check_memory(
    device: torch.device, step_metrics: list[dict[str, float]], estimates: list[tuple[StepEstimate, float] | None]
) -> CheckResult:
    """Check that a step fits into memory, from one step's metrics and estimate of each stage."""
    cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if cuda else machine_memory()
    estimated = [
        stage_estimate[0].peak - stage_estimate[0].persistent.get("CUDA", 0.0)
        for stage_estimate in estimates
        if stage_estimate is not None
    ]
    measured = 1e9 * max(metrics["memory/peak_gb"] for metrics in step_metrics)
    return memory(measured, total, max(estimated, default=None), model_alone=not cuda)


def check_disk(policy: Policy, keep: int, folder: Path) -> CheckResult:
    """Disk space for `keep` checkpoints and the one that is being written."""
    adapter = 4 * sum(parameter.numel() for parameter in policy.trainable_parameters().values())
    copies = 3 + bool(policy.ema.average) + max(0, len(policy.lora.adapters) - 1)  # with Adam's two moments
    existing = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
    return disk(adapter * (copies * (keep + 1) + 2), shutil.disk_usage(existing).free)


# -- evaluating -------------------------------------------------------------------------------------------------------


def device_speed(kind: str, dtype: str, speed: float, speed_fp32: float, has_gpu: bool) -> CheckResult:
    """The device's speed in the run's dtype and in float32: floating point operations per second of a large matrix product."""
    name, value, message = "device", f"{kind} in {dtype}", f"{speed / 1e12:.3g} TFLOP/s in large matrix products"
    if has_gpu and kind == "cpu":
        return CheckResult(name, value, WARNING, "there is a GPU: leave out `device`.")
    if speed < speed_fp32 / 2:
        faster = f"{message}; fp32 is {speed_fp32 / speed:.0f} times as fast here: set dtype=fp32."
        return CheckResult(name, value, WARNING, faster)
    return CheckResult(name, value, OK, message)


def threads(count: int, allowed: int, physical: int | None) -> CheckResult:
    """Threads of torch on a CPU.

    Args:
        allowed: logical cores that the process may use.
        physical: cores of the machine, if they are known: two threads on one core compute no faster than one.
    """
    cores = min(allowed, physical or allowed)
    value = f"{count} on {cores} cores"
    if count >= cores:
        return CheckResult("threads", value, OK)
    return CheckResult("threads", value, WARNING, f"set the environment variable OMP_NUM_THREADS={cores}.")


def step_time(name: str, metrics: dict[str, float], estimated: float | None) -> CheckResult:
    """Time of a training step, from its metrics; `estimated` are the seconds by `flow-grpo plan`, without the rewards."""
    total = metrics["time/step"]
    seconds = {phase: metrics[f"time/{phase}"] for phase in PHASES if f"time/{phase}" in metrics}
    shares = ", ".join(f"{phase} {value / total:.0%}" for phase, value in seconds.items() if value > 0.005 * total)
    if "speed/mfu" in metrics:
        shares += f"; {metrics['speed/tflop_per_second']:.3g} TFLOP/s, MFU {metrics['speed/mfu']:.0%}"
    if estimated is None or total - seconds.get("reward", 0.0) < MAX_SLOWDOWN * estimated:
        return CheckResult(name, f"{total:.1f} s", OK, shares)
    message = (
        f"without rewards {estimated:.1f} s were estimated ({shares}): check what else runs on this machine, or set a larger "
        "microbatch."
    )
    return CheckResult(name, f"{total:.1f} s", WARNING, message)


def memory(used: float, total: float, estimated: float | None, model_alone: bool) -> CheckResult:
    """Bytes: a step's peak, the device's memory, the estimate of `flow-grpo plan`.

    Args:
        model_alone: whether the estimate leaves out everything but the model.
    """
    value = f"{used / 1e9:.2f} of {gigabytes(total, 0)}"
    of_model = " for the model alone" if model_alone else ""
    message = "" if estimated is None else f"estimated{of_model}: {gigabytes(estimated)}"
    if used < MAX_USE * total:
        return CheckResult("memory", value, OK, message)
    return CheckResult(
        "memory", value, WARNING, "almost none is left: set a smaller microbatch, or memory.gradient_checkpointing."
    )


def disk(needed: float, free: float) -> CheckResult:
    """Bytes that the checkpoints and the saved weights need, and that are free."""
    name, value = "disk for checkpoints", f"{needed / 1e9:.2f} of {gigabytes(free, 0)}"
    if needed < MAX_USE * free:
        return CheckResult(name, value, OK)
    return CheckResult(name, value, ERROR, "not enough: set output_dir to another disk, or a smaller keep_checkpoints.")


def run_folder(folder: Path) -> CheckResult:
    """Whether the run folder is free."""
    if not is_begun(folder):
        return CheckResult("run folder", str(folder), OK, "is free")
    message = "already holds a run: continue it with --resume, or set another output_dir."
    return CheckResult("run folder", str(folder), WARNING, message)
