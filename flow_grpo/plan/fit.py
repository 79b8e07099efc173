"""How a run fits on a machine: sizes of a step that divide, speed in each dtype, memory that is taken already."""

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import load_prompts
from flow_grpo.distributed.processes import Processes
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.hardware import Hardware, Rates
from flow_grpo.policy.devices import DTYPES, default_dtype
from flow_grpo.policy.memory import peak_memory
from flow_grpo.progress import phase
from flow_grpo.training.rewards import build_rewards

SCORED = 128  # images that the rewards get while their memory is measured
SLOWER = 3.0  # times, from which on another dtype is worth a sentence


def fit_batch_sizes(args: FlowGRPOConfig, largest: int, count: int) -> FlowGRPOConfig:
    """The config with sizes of a step that divide, on so many processes: prompts rounded up, and the largest micro-batch that fits."""
    share = args.updates * count
    prompts = -(-args.prompts_per_step // share) * share
    pairs = args.method.rows_per_pair == 2
    microbatch = Processes(0, count).local_microbatch(prompts, args.images_per_prompt, largest, args.updates, pairs)
    return args.model_copy(update={"prompts_per_step": prompts, "microbatch": microbatch})


def rates_of(plan: StepEstimator, machine: Hardware, microbatch: int) -> dict[torch.dtype, Rates]:
    """The machine's rates at a plan's dtype, and at float32 too if another one was asked for on a CPU."""
    if machine.peak_flops is not None:
        return {plan.dtype: Rates.of_peak(machine.peak_flops)}
    asked = plan.args.dtype != "auto" and not machine.cuda
    dtypes = dict.fromkeys((plan.dtype, torch.float32) if asked else (plan.dtype,))
    return {dtype: plan.rates(microbatch, dtype) for dtype in dtypes}


def slower_dtype(rates: dict[torch.dtype, Rates], dtype: torch.dtype) -> str:
    """A sentence for a dtype that a CPU is much slower in than in another one; "" if it is not."""
    best = max(rates, key=lambda one: rates[one].update)
    times = rates[best].update / rates[dtype].update
    if times < SLOWER:
        return ""
    names = {value: name for name, value in DTYPES.items()}
    wanted = f"auto, which is {names[best]} here" if default_dtype("cpu") == best else names[best]
    return f"{names[dtype]} is {times:.1f} times as slow as {names[best]} on this CPU: set dtype={wanted}."


def baseline_memory(args: FlowGRPOConfig) -> float:
    """Bytes that libraries and rewards take on a CPU at their most, while a step's pictures are scored.

    What they give back is not there for the model: each allocator keeps what it once had.
    """
    rewards, _ = build_rewards(args)
    images = args.prompts_per_step * args.images_per_prompt
    prompts, rows = load_prompts(args.training_prompts), range(min(images, SCORED))
    batch = prompts.take([row // args.images_per_prompt % len(prompts) for row in rows], 1)
    pictures = torch.rand(len(batch.prompts), 3, args.height or 512, args.width or 512)
    with phase("measuring the memory of the rewards"):
        rewards(pictures, batch.prompts, **batch.columns())
    return peak_memory(torch.device("cpu")) + (images / len(pictures) - 1) * pictures.nbytes
