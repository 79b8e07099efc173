"""The dry run's checks of the model: its files, its image size, and what a training step costs."""

from pathlib import Path

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor.dry_run_report import DryRunReport
from flow_grpo.evaluation.held_out import check_evaluation_size
from flow_grpo.plan.estimate import StepEstimator, dtype_of
from flow_grpo.plan.fit import rates_of, run_time, slower_dtype
from flow_grpo.plan.hardware import GB, Hardware
from flow_grpo.plan.published import FOLDERS, load_for_plan
from flow_grpo.plan.trace import UntraceableModel
from flow_grpo.policy import hub
from flow_grpo.policy.devices import usable_device
from flow_grpo.policy.hub import check_weight_files
from flow_grpo.policy.loading import check_generated
from flow_grpo.policy.policy import Policy
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
        name = type(estimator.trace.policy.pipe).__name__
        check_generated(name, "height and width", (args.height, args.width), estimator.image_size)
        check_evaluation_size(estimator.trace.policy, args.evaluation)
        check_frames(args, estimator.trace.policy)
    except UntraceableModel as error:
        report.notes.append(f"the cost of a step is unknown: {error}")
        return None
    except ValueError as error:
        if not is_missing_download(error):
            raise
        report.missing.append(f"the model {args.model}")
        _check_size_by_packaged_configs(args)
        return None
    report.notes += estimator.trace.notes
    if not Path(source).is_dir() and not _is_cached(estimator):
        report.missing.append(f"the weights of {args.model}")
    return estimator


def _check_size_by_packaged_configs(args: FlowGRPOConfig) -> None:
    """Check the size of the images of a model that is not here, if the package has its configs: only the VAE's code runs."""
    if args.model not in FOLDERS or (args.height is None and args.width is None):
        return
    dtype = dtype_of(args, cuda=True)
    policy = Policy(load_for_plan(args.model, dtype, cuda=True)[0], dtype, **args.pipeline_call_kwargs())
    size = policy.decode(torch.zeros(1, *policy.schedule(2)[1])).shape[-2:]
    check_generated(type(policy.pipe).__name__, "height and width", (args.height, args.width), size)


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
    if estimate.peak > hardware.memory:
        lines.append(f"warning: {hardware.name} has {hardware.memory / GB:.0f} GB: `flow-grpo plan` shows what would fit.")
    if slower := slower_dtype(rates, estimator.dtype):
        lines.append(f"warning: {slower}")
    return lines
