"""What gpu.py measures of one row: training steps in this process."""

import gc
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import gpu_kernels
import torch
from gpu_rewards import RowRewards, rewards_of
from gpu_rows import ALWAYS, SIZE, SMALL, Row
from random_models import build, save_configs

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.plan.estimate import CUDA_CONTEXT, ENCODING, StepEstimator
from flow_grpo.policy.memory import apply_memory_settings, move_to_device
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.step_meter import PHASES
from flow_grpo.trainer import FlowGRPOTrainer

STEPS = 2  # measured ones, after one that compiles, and measures the device and the model
GIB = 2**30


def measure(
    row: Row, columns: tuple[str, ...], folder: str, small: bool, alone: Callable[[], None], other_bytes: int = 0
) -> dict[str, Any]:
    """The values of the columns, and the lines of code that wait for the GPU, if that is asked for.

    Args:
        folder: an empty one, for the models and the run.
        alone: waits until no other row runs. It is called after the first step, before those that are measured.
        other_bytes: bytes of the GPU that other programs take.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with rewards_of(row.reward, row.trains_on_gradient, Path(folder), small, device) as rewards:
        trainer = trainer_of(row, folder, small, rewards, other_bytes)
        return measured(trainer, row, columns, alone, rewards.weight_bytes, other_bytes=other_bytes)


def measured(
    trainer: FlowGRPOTrainer,
    row: Row,
    columns: tuple[str, ...],
    alone: Callable[[], None],
    reward_bytes: float,
    *,
    other_bytes: int,
) -> dict[str, Any]:
    """What `measure` returns, of a trainer.

    Args:
        reward_bytes: of the rewards' weights, which `plan` does not count.
    """
    device, args = trainer.policy.device, trainer.args
    values: dict[str, float] = {}
    locations: list[str] = []
    if "planned GB" in columns:  # not where it is not shown: to trace a large model takes time
        plan = StepEstimator(args, device.type == "cuda").estimate(args.microbatch, reward_bytes)
        steps_peak = plan.peak_without(ENCODING)  # prompts are encoded in the first step, which is not measured
        values["planned GB"] = (steps_peak - plan.persistent.get("CUDA", 0.0)) / 1e9
    if row.kernels:
        values["latents changed by"] = gpu_kernels.use(row.kernels, trainer)
    first = timed_step(trainer)
    empty_cache(device)
    alone()
    steps = [timed_step(trainer) for _ in range(STEPS)]
    values |= {share: median(step.get(f"time/{share}", 0.0) / step["time/step"] for step in steps) for share in PHASES}
    values["first step s"], values["later step s"] = first["time/step"], median(step["time/step"] for step in steps)
    values["images/s"] = median(step["images"] / step["time/step"] for step in steps)
    values["MFU"] = median(step["speed/mfu"] for step in steps)
    values["ratio off 1"] = max(abs(step.get("ratio/first_update_max_deviation", math.nan)) for step in (first, *steps))
    values["peak GB"] = max(step["memory/peak_gb"] for step in steps)
    values["reserved GB"] = max(step["reserved"] for step in steps) / 1e9
    values["planned / measured"] = values.get("planned GB", math.nan) / values["peak GB"]
    values["context GiB"] = context_bytes(other_bytes) / GIB
    if values["context GiB"] < 0:
        raise RuntimeError("another program gave memory of the GPU back during the measurement; measure this row again.")
    values["reserved + context GiB"] = values["reserved GB"] * 1e9 / GIB + values["context GiB"]
    if "waits" in columns:
        locations = waits_of_step(trainer)
        values["waits"] = len(locations) if device.type == "cuda" else math.nan
    notes = [f"{count} x {location}" for location, count in Counter(locations).most_common()] + trainer.stage.warnings
    return {"values": {name: values.get(name, math.nan) for name in columns}, "notes": notes}


def settings(row: Row, folder: str, small: bool, rewards: list[str] | None = None) -> FlowGRPOConfig:
    """The config of a row with the model in a folder, where its run is written too, and with further overrides of its rewards."""
    overrides = [*ALWAYS, *SIZE[False], *row.overrides, *(SMALL + SIZE[True] if small else []), *(rewards or [])]
    return FlowGRPOConfig.for_model(folder, [*overrides, f"output_dir={folder}/run"])


def trainer_of(row: Row, folder: str, small: bool, rewards: RowRewards, other_bytes: int) -> FlowGRPOTrainer:
    """A trainer of the row's model: built on the GPU, which takes seconds, or loaded from files, which quantises it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = build(row.model, small, device)
    args, model = settings(row, folder, small, rewards.overrides), None
    if row.is_loaded:
        pipe.save_pretrained(folder)
    else:
        save_configs(pipe, Path(folder))
        model = policy_of(pipe, args, torch.device(device))
    del pipe
    if device == "cuda":
        empty_cache(torch.device(device))
        if row.card is not None:
            limit_memory(row.card, other_bytes)
    return FlowGRPOTrainer(model, rewards.functions, args)


def policy_of(pipe: Any, args: FlowGRPOConfig, device: torch.device) -> Policy:
    """The policy that `load_policy` would make of the same pipeline in files."""
    if args.memory.offload:
        pipe.transformer.to("cpu")  # from where its blocks are copied
    apply_memory_settings(pipe, args.memory)
    move_to_device(pipe, device, args.memory)
    return Policy(pipe, torch.bfloat16, offload=args.memory.offload_text_encoders, **args.pipeline_call_kwargs())


def timed_step(trainer: FlowGRPOTrainer) -> dict[str, float]:
    """The metrics of a training step, its time with all kernels that it has started, and the memory reserved at most."""
    synchronize(trainer.policy.device)
    started = time.perf_counter()
    metrics = trainer.training_step()
    synchronize(trainer.policy.device)
    reserved = torch.cuda.max_memory_reserved() if trainer.policy.device.type == "cuda" else 0
    return {**metrics, "time/step": time.perf_counter() - started, "reserved": reserved}


def waits_of_step(trainer: FlowGRPOTrainer) -> list[str]:
    """The lines of code at which a training step waits for the GPU, once for each time, by torch's own check.

    It does not see where the program waits for an event, as the step's end does for its times.
    """
    if not torch.cuda.is_available():
        trainer.training_step()
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.training_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    return [f"{Path(wait.filename).parent.name}/{Path(wait.filename).name}:{wait.lineno}" for wait in waits]


def limit_memory(card: float, other_bytes: int) -> None:
    """Let this process take as much of the GPU as a card of that many GiB has, less the context of CUDA."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((card * GIB - max(CUDA_CONTEXT, context_bytes(other_bytes))) / total)


def context_bytes(other_bytes: int) -> float:
    """Bytes of the GPU that this process uses outside of torch's allocator: CUDA's context and kernels."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() - other_bytes


def empty_cache(device: torch.device) -> None:
    """Give back what no tensor uses, so that only what comes now is measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
