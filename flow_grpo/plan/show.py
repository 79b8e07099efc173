"""What `flow-grpo plan` prints: memory by part, seconds per step, and sizes that fit and divide."""

from rich.console import Console
from rich.table import Table

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.plan.estimate import StepEstimate, StepEstimator
from flow_grpo.plan.fit import fit_batch_sizes, num_held_out, rates_of, run_time, slower_dtype
from flow_grpo.plan.hardware import GB, TERA, Hardware
from flow_grpo.plan.savings import Fit, Savings
from flow_grpo.text import gigabytes

PHASE_NAMES = {
    "encoding": "prompts are encoded",
    "rollout": "images are sampled",
    "update": "the weights are trained",
    "decoding": "images are decoded",
    "loading": "the model is loaded",
}


def print_plan(console: Console, args: FlowGRPOConfig, machine: Hardware, base: float = 0.0) -> bool:
    """Print what the run takes on a machine. Returns False if it does not fit."""
    estimator = StepEstimator(args, machine.cuda, machine.count)
    largest = estimator.largest_microbatch(machine.memory, base)
    devices = f"{machine.count} x {machine.name}" if machine.count > 1 else machine.name
    peak = "" if machine.peak_flops is None else f" and {machine.peak_flops / TERA:.3g} TFLOP/s"
    _say(console, f"{args.model} on {devices}, {gigabytes(machine.memory, 0)}{peak}{' each' if machine.count > 1 else ''}")
    for note in estimator.trace.notes:
        _say(console, note)
    if machine.assumption:
        _say(console, machine.assumption)
    if not largest:
        for line in _advice(Savings(estimator, machine.memory, base).fit(), machine.memory):
            _say(console, line)
        return False
    sizes, largest_sizes = (
        fit_batch_sizes(args, min(args.microbatch, largest), machine.count),
        fit_batch_sizes(args, largest, machine.count),
    )
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
    _say(
        console,
        f"the run, without rewards: {run_time(estimator, machine, rates[estimator.dtype], largest, num_held_out(args))}",
    )
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
    """What is missing, and what would make the run fit."""
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
