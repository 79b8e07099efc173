"""How a run fits on a machine, as `flow-grpo plan` prints it: memory by part, seconds per step, sizes that fit and divide."""

import math

import torch
from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import RewardConfig
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.distributed.processes import shared_microbatch
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.image_metrics import NUM_DIVERSITY_PROMPTS
from flow_grpo.plan.estimate import StepEstimate, StepEstimator
from flow_grpo.plan.hardware import GB, TERA, Hardware, Rates
from flow_grpo.plan.trace import REWARD_GRADIENT
from flow_grpo.policy import hub
from flow_grpo.policy.families import makes_videos
from flow_grpo.policy.step_meter import peak_memory
from flow_grpo.progress import phase, tell
from flow_grpo.rewards import Reward
from flow_grpo.rewards.downloads import is_missing_download, offline_mode
from flow_grpo.text import gigabytes, step_time
from flow_grpo.tracking.tracker import RunTime
from flow_grpo.training.setup import build_rewards, load_unless_costly, unscored

MAX_SCORED = 128  # images that the rewards get while their memory is measured
PHASE_NAMES = {
    "encoding": "prompts are encoded",
    "rollout": "images are sampled",
    "update": "the weights are trained",
    "decoding": "images are decoded",
    REWARD_GRADIENT: "gradients go back through the decoder",
}
# that take less memory, cheap ones first; the last one takes the place of the one before
SETTINGS = (
    "objective.keep_graphs=false",
    "memory.offload_text_encoders=true",
    "memory.gradient_checkpointing=true",
    "memory.offload_trajectories=true",
    "optimizer.name=adamw_8bit",
    "memory.quantize=nf4",
    "memory.quantize=null memory.offload=groups",
)


def fit_batch_sizes(args: FlowGRPOConfig, largest: int, num_processes: int) -> FlowGRPOConfig:
    """The config with sizes of a step that divide: prompts rounded up, and the largest micro-batch up to `largest`."""
    share, prompts = args.updates * num_processes, args.prompts_per_step
    if args.objective.needs.whole_groups or prompts % args.updates or prompts * args.images_per_prompt % share:
        prompts = -(-prompts // share) * share
    pairs = args.objective.needs.rows_per_pair == 2
    microbatch = shared_microbatch(
        num_processes, prompts, args.images_per_prompt, largest, updates=args.updates, pairs=pairs
    )
    return args.model_copy(update={"prompts_per_step": prompts, "microbatch": microbatch})


def held_out_images(args: FlowGRPOConfig, prompts: int) -> int:
    """The number of images that an evaluation on so many prompts samples of a model."""
    more = min(NUM_DIVERSITY_PROMPTS, prompts) if args.held_out.images_per_prompt == 1 else 0
    return prompts * args.held_out.images_per_prompt + more


def run_time(estimator: StepEstimator, machine: Hardware, rates: Rates, largest: int, held_out: int) -> RunTime:
    """The time of the estimator's run on a machine, without rewards.

    Args:
        largest: the largest micro-batch.
        held_out: the number of held-out prompts.
    """
    args = estimator.args

    def step_seconds(stage: FlowGRPOConfig) -> float:
        sizes = fit_batch_sizes(stage, min(stage.microbatch, largest), machine.count)
        seconds = estimator.of_stage(stage).estimate(sizes.microbatch).seconds(rates)
        return seconds * sizes.prompts_per_step / stage.prompts_per_step / machine.count

    images, evaluation = held_out_images(args, held_out), 0.0
    if images:
        evaluation = images * estimator.trace.operations_per_image(args.held_out) / rates.forward / machine.count
    return RunTime.of(args, step_seconds, evaluation)


def num_held_out(args: FlowGRPOConfig) -> int:
    """The number of held-out prompts of a run."""
    prompts = args.evaluation.prompts
    return 0 if prompts is None else len(load_run_prompts(prompts).head(args.evaluation.max_prompts))


def rates_of(estimator: StepEstimator, machine: Hardware, microbatch: int) -> Rates:
    """The machine's rates: a share of a GPU's peak, or as they are measured here."""
    return estimator.rates(microbatch) if machine.peak_flops is None else Rates.of_peak(machine.peak_flops)


def baseline_memory(args: FlowGRPOConfig) -> float:
    """Bytes that libraries and rewards take on a CPU at their peak, while the images of a step are scored.

    What they free is not available to the model, as each allocator keeps its memory. Rewards that cost a person's time or money are not
    called, and nothing is downloaded.
    """
    rewards, _ = build_rewards(args, load=_load_if_here)
    images = args.prompts_per_step * args.images_per_prompt
    frames = [args.pipeline_kwargs.get("num_frames", 1)] if makes_videos(hub.pipeline_class(args.model)) else []
    max_images = max(MAX_SCORED // math.prod(frames), min(args.images_per_prompt, MAX_SCORED))
    prompts, rows = load_run_prompts(args.training_prompts), range(min(images, max_images))
    batch = prompts.take([row // args.images_per_prompt % len(prompts) for row in rows], 1)
    images_scored = torch.rand(len(batch.prompts), *frames, 3, args.height or 512, args.width or 512)
    with phase("measuring the memory of the rewards"):
        rewards(images_scored, batch.prompts, **batch.columns())
    return peak_memory(torch.device("cpu")) + (images / len(images_scored) - 1) * images_scored.nbytes


def _load_if_here(name: str, setting: RewardConfig) -> Reward:
    """As `load_unless_costly`, but `unscored` in place of a reward whose weights would have to be downloaded, with a sentence."""
    try:
        with offline_mode():
            return load_unless_costly(name, setting)
    except FlowGRPOError as error:
        if not is_missing_download(error):
            raise
    tell(f"The memory of the reward {name} is not counted: its weights are not on this machine.")
    return unscored


def advice(estimator: StepEstimator, memory: float, base: float = 0.0) -> list[str]:
    """What is missing of a run that does not fit into `memory` bytes, beside `base`, and the few settings with which it fits."""
    traces = {estimator.args.memory.gradient_checkpointing: estimator.trace}  # all that the model's code depends on here

    def peak_with(settings: list[str]) -> float:
        try:
            args = estimator.args.with_overrides(" ".join(settings).split())
            checkpointing = args.memory.gradient_checkpointing
            changed = StepEstimator(args, estimator.cuda, estimator.count, traces.get(checkpointing))
        except FlowGRPOError:  # they do not go together
            return math.inf
        traces[checkpointing] = changed.trace
        return changed.estimate(1, base).peak

    peak, chosen = peak_with([]), list[str]()
    first = f"It does not fit: with microbatch=1, {gigabytes(peak - memory, 1)} are missing."
    for setting in SETTINGS * 2:  # the second time after what others have made of the peak
        if setting not in chosen and peak > memory and (smaller := peak_with([*chosen, setting])) < peak:
            peak, chosen = smaller, [*chosen, setting]
    for setting in reversed(chosen):  # what a later one makes needless
        fewer = [other for other in chosen if other != setting]
        if peak_with(fewer) <= max(peak, memory):
            chosen = fewer
    if peak <= memory:
        return [first, f"It fits with: {' '.join(chosen)}"]
    left = "smaller images by height and width, a smaller model, or memory.shard=fsdp2 on several GPUs"
    missing = f"With {' '.join(chosen)} {gigabytes(peak - memory, 1)} are still missing; w" if chosen else "W"
    return [first, f"{missing}hat is left are {left}."]


def print_plan(console: Console, args: FlowGRPOConfig, machine: Hardware, base: float = 0.0) -> bool:
    """Print what the run takes on a machine. Returns False if it does not fit."""
    whole = StepEstimator(args, machine.cuda, machine.count)
    estimator = whole.heaviest_stage(base)
    largest = estimator.largest_microbatch(machine.memory, base)
    devices = f"{machine.count} x {machine.name}" if machine.count > 1 else machine.name
    peak = "" if machine.peak_flops is None else f" and {machine.peak_flops / TERA:.3g} TFLOP/s"
    _say(console, f"{args.model} on {devices}, {gigabytes(machine.memory, 0)}{peak}{' each' if machine.count > 1 else ''}")
    for note in estimator.trace.notes:
        _say(console, note)
    if machine.assumption:
        _say(console, machine.assumption)
    if args.stages:
        numbers = [number for number, (_, stage) in enumerate(args.resolved_stages(), 1) if stage == estimator.args]
        _say(console, f"stage {numbers[0]} of {len(args.stages)} takes most memory; its steps:")
        args = estimator.args
    if not largest:
        for line in advice(estimator, machine.memory, base):
            _say(console, line)
        return False
    sizes = fit_batch_sizes(args, min(args.microbatch, largest), machine.count)
    largest_sizes = fit_batch_sizes(args, largest, machine.count)
    estimate = estimator.estimate(sizes.microbatch, base)
    console.print(_table(estimate, "" if base else ", without rewards"))
    if args.memory.embedding_cache_dir and machine.cuda:
        _say(
            console,
            f"with all prompts in {args.memory.embedding_cache_dir}, as in a later run: {gigabytes(estimate.encoded_peak)}",
        )
    rates = rates_of(estimator, machine, sizes.microbatch)
    seconds = estimate.seconds(rates) * sizes.prompts_per_step / args.prompts_per_step / machine.count
    _say(console, f"a step: {step_time(seconds)}, without rewards, if every group has signal ({rates.how})")
    if estimator.dtype == torch.float32 and machine.peak_flops is not None:
        _say(
            console,
            "the peak is that of bf16, and a GPU is slower in fp32: set dtype=bf16, or --gpu-tflops to its peak in fp32",
        )
    _say(console, f"the run, without rewards: {run_time(whole, machine, rates, largest, num_held_out(args))}")
    _say(console, f"largest microbatch: {largest}; of those that divide: {largest_sizes.microbatch}")
    _say(
        console,
        f"sizes that divide: prompts_per_step={sizes.prompts_per_step} images_per_prompt={args.images_per_prompt} "
        f"microbatch={largest_sizes.microbatch} updates={args.updates} --num-processes {machine.count}",
    )
    return True


def _table(estimate: StepEstimate, scope: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"memory with microbatch={estimate.microbatch}{scope}")
    table.add_column("GB", justify="right")
    for name, size in estimate.persistent.items():
        table.add_row(name, f"{size / GB:.2f}")
    for name, size in estimate.transient.items():
        table.add_row(f"while {PHASE_NAMES[name]}", f"{size / GB:.2f}", style="dim")
    table.add_row("peak", f"{estimate.peak / GB:.2f}", style="bold")
    return table


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
