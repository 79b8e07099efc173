"""`train --dry-run`: checks settings, prompts, model files and rewards as the run would, and estimates a step. It trains nothing."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from flow_grpo import rewards as reward_kit
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import PromptSetConfig, RewardConfig
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.data.prompts import PromptSet
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.fit import rates_of, run_time
from flow_grpo.plan.hardware import GB, Hardware
from flow_grpo.plan.meta_pipeline import FOLDERS
from flow_grpo.plan.trace import UntraceableModel
from flow_grpo.policy import hub
from flow_grpo.policy.devices import usable_device
from flow_grpo.policy.hub import check_weight_files
from flow_grpo.policy.loading import check_generated
from flow_grpo.progress import phase
from flow_grpo.rewards.downloads import hub_is_reachable, is_missing_download, offline_mode
from flow_grpo.rewards.gradients import NoGradient
from flow_grpo.rewards.scopes import ALL, frames_of
from flow_grpo.text import step_time
from flow_grpo.training.setup import COSTLY, HUMAN, load_reward, reason_not_to_call
from flow_grpo.training.start_checks import Start, check_writable, make_checks, prompts_with, sentences

NUM_NOISE_IMAGES = 2  # on which a dry run calls each reward
DEFAULT_SIZE = 512  # of images where the model's size is unknown


@dataclass
class DryRunReport:
    """The findings of a dry run.

    Attributes:
        found: what the checks of the run's start found, by their names.
        rewards: those that returned valid values.
        missing: what is not downloaded yet, so that it could not be checked.
        notes: sentences on the cost of a step, and warnings.
    """

    checked: list[str] = field(default_factory=list)
    found: dict[str, list[str]] = field(default_factory=dict)
    rewards: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text, the verdict last."""
        called = f"; rewards {', '.join(self.rewards)}, each on {NUM_NOISE_IMAGES} images of noise" if self.rewards else ""
        lines = [f"checked: {', '.join(self.checked)}{called}", *self.notes]
        if not self.missing:
            return [*lines, "The settings go together; nothing was trained."]
        reason = "the run will download it" if hub_is_reachable() else "the hub can't be reached"
        lines.append(f"not checked, as it is not in the cache and {reason}: {', '.join(self.missing)}")
        return [*lines, "The settings go together, as far as they could be checked; nothing was trained."]


def dry_run(args: FlowGRPOConfig, num_processes: int = 1) -> list[str]:
    """Check everything that a run of `num_processes` processes starts with, as far as it needs no weights of the model.

    It downloads nothing but prompts and the model's configs. Whether the run folder holds a run already is not checked.

    Returns:
        Lines for the user: what was checked, what a step costs, warnings.

    Raises:
        FlowGRPOError: the run would fail, with the same sentence.
    """
    report = DryRunReport(["settings"])
    check_writable(Path(args.output_dir))
    start = Start(args, num_processes, source=args.prompts if isinstance(args.prompts, str) else None)
    report.found |= make_checks("settings", start)
    prompts, held_out = _check_prompts(start, report)
    start = replace(start, train_set=prompts, eval_set=held_out)
    estimator = check_model(start, report, estimate=prompts is not None)
    check_rewards(start, None if estimator is None else estimator.trace.image_shape, report)
    report.notes += [f"warning: {sentence}" for sentence in sentences(report.found)]
    if estimator is not None:  # after what may fail, as it takes seconds
        report.notes += cost_lines(estimator, args, num_processes, len(held_out or []))
    return report.lines()


def _check_prompts(start: Start, report: DryRunReport) -> tuple[PromptSet | None, PromptSet | None]:
    """Return the training prompts and the held-out ones, None for those that are not downloaded or not set."""
    args = start.args
    prompts = _load_prompts(args.training_prompts, report)
    held_out = None if args.evaluation.prompts is None else _load_prompts(args.evaluation.prompts, report)
    held_out = held_out and held_out.head(args.evaluation.max_prompts)
    start = replace(start, train_set=prompts, eval_set=held_out)
    report.found |= make_checks("prompts", start)
    if prompts is not None:
        report.checked.append(f"{len(prompts)} prompts")
        report.notes += dict.fromkeys([*prompts.notes, *(held_out.notes if held_out else ())])
    if held_out is not None:
        report.checked.append(f"{len(held_out)} held-out prompts")
    report.checked += [f"{len(examples.prompts)} given images" for examples in start.given]
    return prompts, held_out


def _load_prompts(source: str | list[PromptSetConfig], report: DryRunReport) -> PromptSet | None:
    try:
        return load_run_prompts(source)
    except ValueError as error:
        if not is_missing_download(error):
            raise
        report.missing.append(f"the prompts {source}")
        return None


def check_model(start: Start, report: DryRunReport, estimate: bool) -> StepEstimator | None:
    """Check the model's files and, if `estimate`, its code; return what estimates a step.

    None for a model whose code can't be traced, or whose configs are not downloaded.
    """
    args = start.args
    try:
        has_configs = args.model in FOLDERS and not hub_is_reachable()  # those in the package do then
        source = args.model if has_configs else hub.resolve_model(args.model)
        if Path(source).is_dir():
            check_weight_files(source, file=hub.single_file(args.model))
            report.checked.append("the model's files")
        if not estimate:
            report.found |= make_checks("model", start)
            return None
        estimator = StepEstimator(args, torch.device(usable_device(args.device)).type == "cuda", start.num_processes)
        name = type(estimator.trace.policy.pipe).__name__
        check_generated(name, (args.height, args.width), estimator.image_size)
        report.found |= make_checks("model", replace(start, policy=estimator.trace.policy))
    except UntraceableModel as error:
        report.found |= make_checks("model", start)
        report.notes.append(f"the cost of a step is unknown: {error}")
        return None
    except ValueError as error:
        if not is_missing_download(error):
            raise
        report.found |= make_checks("model", start)
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
    """The cost of a run with that many held-out prompts, measured on this machine, and warnings about it."""
    hardware = Hardware.of_this_machine(usable_device(args.device), count=num_processes)
    whole, estimator = estimator, estimator.heaviest_stage()
    args, name = estimator.args, "a step of the stage that takes most memory" if args.stages else "a step"
    estimate, rates = estimator.estimate(args.microbatch), rates_of(estimator, hardware, args.microbatch)
    seconds = estimate.seconds(rates) / hardware.count
    images, (height, width) = args.prompts_per_step * args.images_per_prompt, estimator.image_size
    frames = estimator.trace.image_shape[:-3]
    step_images = f"{images} videos of {frames[0]} frames" if frames else f"{images} images"
    memory_scope = "of the GPU in addition to rewards" if estimator.cuda else "in addition to libraries and rewards"
    lines = [
        f"{name}: {step_images} of {height} x {width} in {step_time(seconds)} without rewards, {estimate.peak / GB:.2f} GB {memory_scope}"
    ]
    largest = max(1, estimator.largest_microbatch(hardware.memory))
    lines.append(f"the run, without rewards: {run_time(whole, hardware, rates, largest, held_out)}")
    if estimate.peak > hardware.memory:
        lines.append(f"warning: {hardware.name} has {hardware.memory / GB:.0f} GB: `flow-grpo plan` shows what would fit.")
    return lines


def check_rewards(start: Start, image_shape: torch.Size | None, report: DryRunReport) -> None:
    """Call every reward of the run, except those that cost a person's time or money, or whose prompts are not downloaded.

    Args:
        image_shape: of the model's images or videos; None if it is unknown.
    """
    args, prompts = start.args, start.train_set
    monitored = {} if args.evaluation.prompts is None else args.evaluation.rewards
    names = reward_kit.metric_names(args.rewards)
    reward_kit.row_weights(  # raises if a set names a reward that is not there
        None if prompts is None else prompts.repeat(1).metadata_columns().get("rewards"),
        {names[name]: setting.weight for name, setting in args.rewards.items() if setting.weight},
        {**{name: name for name in names.values()}, **names},
    )
    shape = image_shape or (3, args.height or DEFAULT_SIZE, args.width or DEFAULT_SIZE)
    images = torch.rand(NUM_NOISE_IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    for name, setting in {**monitored, **args.rewards}.items():
        try:
            with phase(f"calling reward {name}"), offline_mode():
                reason = _call(name, setting, images, start, report, is_known=image_shape is not None)
        except ValueError as error:
            _report_failure(name, setting, error, report)
            continue
        if reason is None:
            report.rewards.append(name)
        else:
            report.notes.append(f"the reward {name} {reason}")


def _report_failure(name: str, setting: RewardConfig, error: ValueError, report: DryRunReport) -> None:
    """Add a reward that could not be called to the report. Raises the error if a run would stop at it."""
    if is_missing_download(error):
        report.missing.append(f"the reward {name}")
    elif setting.on_error == "stop" or isinstance(error, NoGradient):
        raise error
    else:
        report.notes.append(f"warning: {error}")


def _call(
    name: str, setting: RewardConfig, images: torch.Tensor, start: Start, report: DryRunReport, *, is_known: bool
) -> str | None:
    """Call the reward; returns why it was not called, if so.

    If it is not known what the model makes, a reward of videos gets still ones.
    """
    if name == HUMAN and setting.remote is None:
        reward_kit.check_options(name, **setting.options)  # building it would open a page
        return f"was not called: {COSTLY[HUMAN]}"
    reward = load_reward(name, setting)
    trained = reward_kit.WeightedSum({name: reward}, {name: setting.weight}) if name in start.args.rewards else None
    measured = {} if start.args.evaluation.prompts is None else {name: reward}
    for check, found in make_checks("rewards", replace(start, trained=trained, measured=measured)).items():
        report.found[check] = report.found.get(check, []) + found
    prompts = start.train_set if name in start.args.rewards else start.eval_set
    if reason := reason_not_to_call(name, reward):
        return f"was not called: {reason}"
    if prompts is None:
        return "was not called, as its prompts are not downloaded"
    if frames_of(reward) == ALL and not is_known:
        images = torch.stack([images, images], 1)
    by_gradient = any(stage.objective.needs.reward_gradient for stage in start.stages)
    _score(name, reward, images, prompts, with_gradient=by_gradient and trained is not None and setting.weight != 0)
    return None


def _score(name: str, reward: reward_kit.Reward, images: torch.Tensor, prompts: PromptSet, *, with_gradient: bool) -> None:
    """Score the images of the first prompts that have the reward, or of the first one if the reward sees several images of a prompt."""
    rows = (prompts_with(name, prompts) or list(range(len(prompts))))[: len(images)]
    batch = (
        prompts.take((rows * len(images))[: len(images)], 1)
        if reward_kit.scope_of(reward) == "image"
        else prompts.take(rows[:1], len(images))
    )
    reward_kit.score(name, reward, images, batch.prompts, **batch.columns())
    if with_gradient:
        reward_kit.value_and_gradient(name, reward, images, batch.prompts, batch.columns())
