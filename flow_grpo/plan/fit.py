"""How a run fits on a machine: sizes of a step that divide, speed in each dtype, memory that is taken already."""

import math

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompt_mixture import load_run_prompts
from flow_grpo.distributed.processes import Processes
from flow_grpo.evaluation.image_metrics import NUM_DIVERSITY_PROMPTS
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.hardware import Hardware, Rates
from flow_grpo.policy import hub
from flow_grpo.policy.devices import DTYPES, default_dtype
from flow_grpo.policy.families import makes_videos
from flow_grpo.policy.step_meter import peak_memory
from flow_grpo.progress import phase
from flow_grpo.tracking.run_time import RunTime
from flow_grpo.training.setup import build_rewards, load_unless_costly

MAX_SCORED = 128  # images that the rewards get while their memory is measured
MAX_SLOWDOWN = 3.0  # of a dtype, before there is a warning


def fit_batch_sizes(args: FlowGRPOConfig, largest: int, num_processes: int) -> FlowGRPOConfig:
    """The config with sizes of a step that divide: prompts rounded up, and the largest micro-batch up to `largest`."""
    share = args.updates * num_processes
    prompts = -(-args.prompts_per_step // share) * share
    pairs = args.objective.needs.rows_per_pair == 2
    microbatch = Processes(0, num_processes).local_microbatch(prompts, args.images_per_prompt, largest, args.updates, pairs)
    return args.model_copy(update={"prompts_per_step": prompts, "microbatch": microbatch})


def run_time(estimator: StepEstimator, machine: Hardware, rates: Rates, largest: int, held_out: int) -> RunTime:
    """The time of the estimator's run on a machine, without rewards.

    Args:
        largest: the largest micro-batch.
        held_out: the number of held-out prompts.
    """
    args, settings = estimator.args, estimator.args.evaluation

    def step_seconds(stage: FlowGRPOConfig) -> float:
        sizes = fit_batch_sizes(stage, min(stage.microbatch, largest), machine.count)
        seconds = estimator.of_stage(stage).estimate(sizes.microbatch).seconds(rates)
        return seconds * sizes.prompts_per_step / stage.prompts_per_step / machine.count

    images = held_out * settings.images_per_prompt
    if settings.images_per_prompt == 1:
        images += min(NUM_DIVERSITY_PROMPTS, held_out)
    evaluation = images * estimator.trace.operations_per_image(settings) / rates.forward / machine.count if images else 0.0
    return RunTime.of(args, step_seconds, evaluation)


def num_held_out(args: FlowGRPOConfig) -> int:
    """The number of held-out prompts of a run."""
    prompts = args.evaluation.prompts
    return 0 if prompts is None else len(load_run_prompts(prompts).head(args.evaluation.max_prompts))


def rates_of(estimator: StepEstimator, machine: Hardware, microbatch: int) -> dict[torch.dtype, Rates]:
    """The machine's rates in the estimator's dtype, and in float32 too if the config asks for another one on a CPU."""
    if machine.peak_flops is not None:
        return {estimator.dtype: Rates.of_peak(machine.peak_flops)}
    names_dtype = estimator.args.dtype != "auto" and not machine.cuda
    dtypes = dict.fromkeys((estimator.dtype, torch.float32) if names_dtype else (estimator.dtype,))
    return {dtype: estimator.rates(microbatch, dtype) for dtype in dtypes}


def slower_dtype(rates: dict[torch.dtype, Rates], dtype: torch.dtype) -> str:
    """A warning if this CPU is much slower in a dtype than in another one; else ""."""
    best = max(rates, key=lambda candidate: rates[candidate].update)
    times = rates[best].update / rates[dtype].update
    if times < MAX_SLOWDOWN:
        return ""
    names = {value: name for name, value in DTYPES.items()}
    setting = f"auto, which is {names[best]} here" if default_dtype("cpu") == best else names[best]
    return f"{names[dtype]} is {times:.1f} times as slow as {names[best]} on this CPU: set dtype={setting}."


def baseline_memory(args: FlowGRPOConfig) -> float:
    """Bytes that libraries and rewards take on a CPU at their peak, while the images of a step are scored.

    What they free is not available to the model, as each allocator keeps its memory. Rewards that cost a person's time or money are not
    called.
    """
    rewards, _ = build_rewards(args, load=load_unless_costly)
    images = args.prompts_per_step * args.images_per_prompt
    frames = [args.pipeline_kwargs.get("num_frames", 1)] if makes_videos(hub.pipeline_class(args.model)) else []
    max_images = max(MAX_SCORED // math.prod(frames), min(args.images_per_prompt, MAX_SCORED))
    prompts, rows = load_run_prompts(args.training_prompts), range(min(images, max_images))
    batch = prompts.take([row // args.images_per_prompt % len(prompts) for row in rows], 1)
    images_scored = torch.rand(len(batch.prompts), *frames, 3, args.height or 512, args.width or 512)
    with phase("measuring the memory of the rewards"):
        rewards(images_scored, batch.prompts, **batch.columns())
    return peak_memory(torch.device("cpu")) + (images / len(images_scored) - 1) * images_scored.nbytes
