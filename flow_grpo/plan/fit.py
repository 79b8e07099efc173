"""How a run fits on a machine, as `flow-grpo plan` prints it: memory by part, seconds per step, sizes that fit and divide."""

import math
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import RewardConfig
from flow_grpo.data.prompts import load_run_prompts
from flow_grpo.distributed.processes import shared_microbatch
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.image_metrics import NUM_DIVERSITY_PROMPTS
from flow_grpo.plan.estimate import StepEstimate, StepEstimator
from flow_grpo.plan.hardware import GB, TERA, Hardware, Rates
from flow_grpo.plan.trace import REWARD_GRADIENT
from flow_grpo.policy import hub
from flow_grpo.policy.devices import DTYPES, default_dtype
from flow_grpo.policy.families import makes_videos
from flow_grpo.policy.step_meter import peak_memory
from flow_grpo.progress import phase, tell
from flow_grpo.rewards import Reward
from flow_grpo.rewards.downloads import is_missing_download, offline_mode
from flow_grpo.text import gigabytes
from flow_grpo.tracking.tracker import RunTime
from flow_grpo.training.setup import build_rewards, load_unless_costly, unscored

MAX_SCORED = 128  # images that the rewards get while their memory is measured
MAX_SLOWDOWN = 3.0  # of a dtype, before there is a warning
PHASE_NAMES = {
    "encoding": "prompts are encoded",
    "rollout": "images are sampled",
    "update": "the weights are trained",
    "decoding": "images are decoded",
    REWARD_GRADIENT: "gradients go back through the decoder",
    "loading": "the model is loaded",
}
# cheap settings first; the last two exclude each other
SETTINGS = (
    "objective.keep_graphs=false",
    "memory.offload_text_encoders=true",
    "memory.gradient_checkpointing=true",
    "memory.offload_trajectories=true",
    "optimizer.name=adamw_8bit",
)
SMALLER_WEIGHTS = ("memory.quantize=nf4", "memory.offload=groups")
DAY = 24 * 3600  # seconds
LEAST = 0.01  # share of the peak that a setting must save to be named, unless the run fits with it


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


def run_time(estimator: StepEstimator, machine: Hardware, rates: Rates, largest: int, held_out: int) -> RunTime:
    """The time of the estimator's run on a machine, without rewards.

    Args:
        largest: the largest micro-batch.
        held_out: the number of held-out prompts.
    """
    args, settings = estimator.args, estimator.args.held_out

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


@dataclass(frozen=True)
class Fit:
    """Settings that make a run fit, each with a micro-batch of one.

    Attributes:
        missing: bytes that the run takes beyond the memory.
        savings: settings that are not on, each with the bytes that it saves alone; the largest first.
        together: settings with which it fits; if it fits with none of ours, those with which it takes least.
        left: bytes that are missing with these; 0 if it fits.
    """

    missing: float
    savings: dict[str, float]
    together: list[str]
    left: float


class Savings:
    """Tries settings on a config that does not fit.

    Args:
        estimator: of the config.
        memory, base: bytes of the device, and of what else is in it.
    """

    def __init__(self, estimator: StepEstimator, memory: float, base: float = 0.0) -> None:
        self.estimator, self.memory, self.base = estimator, memory, base
        # all that the model's code depends on here
        self._traces = {estimator.args.memory.gradient_checkpointing: estimator.trace}
        self.usable = [setting for setting in (*SETTINGS, *SMALLER_WEIGHTS) if self._changes(setting)]

    def fit(self) -> Fit:
        """The memory that each setting saves, and the settings that make the run fit."""
        peak = self._peak([])
        assert peak is not None
        saved = {setting: peak - (self._peak([setting]) or peak) for setting in self.usable}
        together, left = self._together()
        by_size = sorted(saved.items(), key=lambda item: -item[1])
        named = {name: size for name, size in by_size if name in together or size > LEAST * peak}
        return Fit(peak - self.memory, named, together, left)

    def _together(self) -> tuple[list[str], float]:
        """The fewest of the settings with which it fits, and the bytes that are missing with them."""
        cheap = [setting for setting in SETTINGS if setting in self.usable]
        choices = [cheap, *([*cheap, setting] for setting in SMALLER_WEIGHTS if setting in self.usable)]
        peaks = {tuple(choice): peak for choice in choices if (peak := self._peak(choice)) is not None}
        chosen = next(
            (choice for choice, peak in peaks.items() if peak <= self.memory), min(peaks, key=lambda choice: peaks[choice])
        )
        target, kept = max(peaks[chosen], self.memory), list(chosen)
        for setting in reversed(chosen):
            fewer = [other for other in kept if other != setting]
            peak = self._peak(fewer)
            if peak is not None and peak <= target:
                kept = fewer
        return kept, max(0.0, target - self.memory)

    def _changes(self, setting: str) -> bool:
        """Whether the config goes together with a setting that it does not have."""
        try:
            changed = self.estimator.args.with_overrides([setting])
        except FlowGRPOError:
            return False
        return changed.model_dump() != self.estimator.args.model_dump()

    def _peak(self, settings: list[str]) -> float | None:
        """Bytes of the peak with these settings; None if they do not go together."""
        try:
            args = self.estimator.args.with_overrides(settings)
            checkpointing = args.memory.gradient_checkpointing
            changed = StepEstimator(args, self.estimator.cuda, self.estimator.count, self._traces.get(checkpointing))
        except FlowGRPOError:
            return None
        self._traces[checkpointing] = changed.trace
        return changed.estimate(1, self.base).peak


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
        for line in _advice(Savings(estimator, machine.memory, base).fit(), machine.memory):
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
    seconds = estimate.seconds(rates[estimator.dtype]) * sizes.prompts_per_step / args.prompts_per_step / machine.count
    how = rates[estimator.dtype].how
    _say(console, f"a step: {seconds:.3g} s, without rewards, if every group has signal ({how})")
    if estimator.dtype == torch.float32 and machine.peak_flops is not None:
        _say(
            console,
            "the peak is that of bf16, and a GPU is slower in fp32: set dtype=bf16, or --gpu-tflops to its peak in fp32",
        )
    time = run_time(whole, machine, rates[estimator.dtype], largest, num_held_out(args))
    _say(console, f"the run, without rewards: {time}")
    if time.seconds > DAY:
        _say(console, "a shorter run: the time is in proportion to steps, prompts_per_step and images_per_prompt")
    if slower := slower_dtype(rates, estimator.dtype):
        _say(console, slower)
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
        if name == "loading" and not size:
            continue
        table.add_row(f"while {PHASE_NAMES[name]}", f"{size / GB:.2f}", style="dim")
    table.add_row("peak", f"{estimate.peak / GB:.2f}", style="bold")
    return table


def _advice(fit: Fit, memory: float) -> list[str]:
    """The missing memory, and the settings that would make the run fit."""
    lines = [
        f"It does not fit: with microbatch=1, {gigabytes(fit.missing, 1)} are missing. Settings that are not on, each alone:"
    ]
    lines += [f"  {setting} saves {gigabytes(size, 1)}" for setting, size in fit.savings.items()]
    smaller = "smaller images by height and width, a smaller model, or memory.shard=fsdp2 on several GPUs"
    if not fit.savings:
        return [lines[0].split(" Settings")[0], f"No setting of ours saves more; what is left are {smaller}."]
    words = " ".join(fit.together)
    if not fit.left:
        return [*lines, f"It fits with: {words}"]
    return [
        *lines,
        f"With {words} {gigabytes(fit.left, 1)} of {gigabytes(memory, 0)} are still missing; what is left are {smaller}.",
    ]


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
