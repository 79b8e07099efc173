"""The dry run's checks of the model: its files, its image size, and what a training step costs."""

from pathlib import Path

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor.dry_run_report import DryRunReport
from flow_grpo.evaluation.held_out import check_evaluation_sizes
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.fit import rates_of, run_time, slower_dtype
from flow_grpo.plan.hardware import GB, Hardware
from flow_grpo.plan.trace import UntraceableModel
from flow_grpo.policy import hub
from flow_grpo.policy.devices import usable_device
from flow_grpo.policy.model_files import check_weight_files
from flow_grpo.rewards.downloads import is_missing_download
from flow_grpo.training.early_checks import check_frames


def check_model(args: FlowGRPOConfig, num_processes: int, report: DryRunReport, estimate: bool) -> StepEstimator | None:
    """Check the model's files and, if `estimate`, its code; return what estimates a step.

    None for a model whose code can't be traced, or whose configs are not downloaded.
    """
    try:
        source = hub.resolve_model(args.model)
        if Path(source).is_dir():
            check_weight_files(source)
            report.checked.append("the model's files")
        if not estimate:
            return None
        estimator = StepEstimator(args, torch.device(usable_device(args.device)).type == "cuda", num_processes)
        check_evaluation_sizes(estimator.trace.policy, args.evaluation)
        check_frames(args, estimator.trace.policy)
    except UntraceableModel as error:
        report.notes.append(f"the cost of a step is unknown: {error}")
        return None
    except ValueError as error:
        if not is_missing_download(error):
            raise
        report.missing.append(f"the model {args.model}")
        return None
    report.notes += estimator.trace.notes
    if not Path(source).is_dir() and not _is_cached(estimator):
        report.missing.append(f"the weights of {args.model}")
    return estimator


def _is_cached(estimator: StepEstimator) -> bool:
    try:
        check_weight_files(estimator.trace.policy.pipe.name_or_path)
    except ValueError:
        return False
    return True


def cost_lines(estimator: StepEstimator, args: FlowGRPOConfig, num_processes: int, held_out: int) -> list[str]:
    """What a run with that many held-out prompts costs on this machine, which is measured, and warnings about it."""
    hardware = Hardware.of_this_machine(usable_device(args.device), count=num_processes)
    estimate, rates = estimator.estimate(args.microbatch), rates_of(estimator, hardware, args.microbatch)
    seconds = estimate.seconds(rates[estimator.dtype]) / hardware.count
    images, (height, width) = args.prompts_per_step * args.images_per_prompt, estimator.image_size
    frames = estimator.trace.image_shape[:-3]
    step_images = f"{images} videos of {frames[0]} frames" if frames else f"{images} images"
    memory_scope = "of the GPU in addition to rewards" if estimator.cuda else "in addition to libraries and rewards"
    lines = [
        f"a step: {step_images} of {height} x {width} in {seconds:.3g} s without rewards, {estimate.peak / GB:.2f} GB {memory_scope}"
    ]
    largest = max(1, estimator.largest_microbatch(hardware.memory))
    lines.append(f"the run, without rewards: {run_time(estimator, hardware, rates[estimator.dtype], largest, held_out)}")
    size = (args.height or height, args.width or width)
    if size != (height, width):
        lines.append(
            f"warning: the model generates {height} x {width} pixels, not {size[0]} x {size[1]}: set height and width so."
        )
    if estimate.peak > hardware.memory:
        lines.append(f"warning: {hardware.name} has {hardware.memory / GB:.0f} GB: `flow-grpo plan` shows what would fit.")
    if slower := slower_dtype(rates, estimator.dtype):
        lines.append(f"warning: {slower}")
    return lines
