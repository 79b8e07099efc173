"""`train --dry-run`: the run's own checks, its prompts, rewards and model files, and what a step takes; nothing is trained."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

import rewards as reward_kit
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import RewardConfig
from flow_grpo.data import prompt_overlap
from flow_grpo.data.prompts import PromptSet, load_prompts
from flow_grpo.doctor.rewards import HUMAN
from flow_grpo.evaluation.group_dependence import COSTLY
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.fit import rates_of, slower_dtype
from flow_grpo.plan.hardware import GB, Hardware
from flow_grpo.plan.trace import UntraceableModel
from flow_grpo.policy import hub
from flow_grpo.policy.devices import usable_device
from flow_grpo.policy.model_files import check_weights
from flow_grpo.progress import phase
from flow_grpo.training import early_checks
from flow_grpo.training.offline import load_examples
from flow_grpo.training.rewards import load_reward
from flow_grpo.types import PromptBatch
from rewards.downloads import hub_is_reachable, is_missing_download, offline_mode

IMAGES, UNKNOWN = 2, 512  # that each reward gets, and their pixels where the model's are not known


@dataclass
class Findings:
    """What was checked, which rewards gave numbers, what is neither cached nor may be downloaded, and sentences on what a step takes."""

    checked: list[str] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        called = [f"rewards {', '.join(self.rewards)}, each on {IMAGES} images of noise"] if self.rewards else []
        found = [f"checked: {', '.join(self.checked)}; {'; '.join(called)}".removesuffix("; "), *self.notes]
        if not self.missing:
            return [*found, "The settings go together; nothing was trained."]
        hub_there = "the run will download it" if hub_is_reachable() else "the hub can't be reached"
        found.append(f"not checked, as it is not in the cache and {hub_there}: {', '.join(self.missing)}")
        return [*found, "The settings go together, as far as they could be checked; nothing was trained."]


def dry_run(args: FlowGRPOConfig, count: int = 1, resume: bool = False) -> list[str]:
    """Checks all that a run of `count` processes would begin with, and builds of it what needs no weights of the model.

    Nothing is downloaded but prompts and the model's configs.

    Returns:
        Lines for the user: what was checked, what a step takes, warnings.

    Raises:
        ValueError: the run would fail, in the sentence that the run itself would say.
    """
    found = Findings(["settings"])
    early_checks.check_output(Path(args.output_dir), resume)
    early_checks.check_settings(args, count)
    found.checked.append(f"the run folder {args.output_dir}")
    prompts = _prompts(args, count, found)
    plan = _model(args, count, found, prompts)
    size = (args.height or UNKNOWN, args.width or UNKNOWN) if plan is None else (plan.image_size[0], plan.image_size[1])
    _rewards(args, prompts, size, found)
    return found.lines()


def _prompts(args: FlowGRPOConfig, count: int, found: Findings) -> PromptSet | None:
    sets: list[PromptSet | None] = []
    for source in (args.training_prompts, args.evaluation.prompts):
        try:
            sets.append(None if source is None else load_prompts(source))
        except ValueError as error:
            if not is_missing_download(error):
                raise
            found.missing.append(f"the prompts {source}")
            sets.append(None)
    prompts, held_out = sets[0], sets[1] and sets[1].head(args.evaluation.max_prompts)
    if prompts is not None:
        early_checks.check_prompts(args, prompts, held_out, count)
        found.checked.append(f"{len(prompts)} prompts")
        overlap = prompt_overlap.sentences(prompts.prompts, held_out.prompts if held_out else [], args.prompts)
        found.notes += [f"warning: {sentence}" for sentence in overlap]
    if held_out is not None:
        found.checked.append(f"{len(held_out)} held-out prompts")
    for _, part in args.resolved_stages():
        if part.dataset is not None:
            given = load_examples(part.dataset, part.method.rows_per_pair)
            found.checked.append(f"{len(given.prompts)} given images")
    return prompts


def _model(args: FlowGRPOConfig, count: int, found: Findings, prompts: PromptSet | None) -> StepEstimator | None:
    """Checks the model's files and sizes, and says what a step takes. None if its code could not be followed."""
    try:
        source = hub.resolve_model(args.model)
        if Path(source).is_dir():
            check_weights(source)
            found.checked.append("the model's files")
        if prompts is None:
            return None
        plan = StepEstimator(args, torch.device(usable_device(args.device)).type == "cuda", count)
    except UntraceableModel as error:
        found.notes.append(f"what a step takes is not known: {error}")
        return None
    except ValueError as error:
        if not is_missing_download(error):
            raise
        found.missing.append(f"the model {args.model}")
        return None
    if not Path(source).is_dir() and not _is_cached(plan):
        found.missing.append(f"the weights of {args.model}")
    found.notes += _takes(plan, args, Hardware.of_this_machine(usable_device(args.device), count=count))
    return plan


def _is_cached(plan: StepEstimator) -> bool:
    try:
        check_weights(plan.trace.policy.pipe.name_or_path)
    except ValueError:
        return False
    return True


def _takes(plan: StepEstimator, args: FlowGRPOConfig, machine: Hardware) -> list[str]:
    """What a step takes on this machine, and what deserves a warning."""
    forecast, rates = plan.estimate(args.microbatch), rates_of(plan, machine, args.microbatch)
    seconds = forecast.seconds(rates[plan.dtype]) / machine.count
    images, (height, width) = args.prompts_per_step * args.images_per_prompt, plan.image_size
    place = "of the GPU" if plan.cuda else "beside libraries and rewards"
    lines = [
        f"a step: {images} images of {height} x {width} in {seconds:.3g} s without rewards, {forecast.peak / GB:.2f} GB {place}"
    ]
    asked = (args.height or height, args.width or width)
    if asked != (height, width):
        lines.append(
            f"warning: the model draws {height} x {width} pixels, not {asked[0]} x {asked[1]}: set height and width so."
        )
    if forecast.peak > machine.memory:
        lines.append(f"warning: {machine.name} has {machine.memory / GB:.0f} GB: `flow-grpo plan` says what would fit.")
    if slower := slower_dtype(rates, plan.dtype):
        lines.append(f"warning: {slower}")
    return lines


def _rewards(args: FlowGRPOConfig, prompts: PromptSet | None, size: tuple[int, int], found: Findings) -> None:
    """Builds each reward and calls it once, on images of noise."""
    measured = {} if args.evaluation.prompts is None else args.evaluation.rewards
    batch = (prompts or PromptSet(["a photo"] * IMAGES, [{}] * IMAGES)).take(range(IMAGES), 1)
    images = torch.rand(IMAGES, 3, *size, generator=torch.Generator().manual_seed(0))
    for name, setting in {**measured, **args.rewards}.items():
        try:
            with phase(f"calling reward {name}"), offline_mode():
                called = _call(name, setting, images, batch)
        except ValueError as error:
            if is_missing_download(error):
                found.missing.append(f"the reward {name}")
            elif setting.on_error == "stop":
                raise
            else:
                found.notes.append(f"warning: {error}")
            continue
        if called:
            found.rewards.append(name)
        else:
            found.notes.append(f"the reward {name} was not called: {COSTLY[name]}")


def _call(name: str, setting: RewardConfig, images: torch.Tensor, batch: PromptBatch) -> bool:
    """Whether the reward was called."""
    if name == HUMAN and setting.remote is None:
        reward_kit.check_options(name, **setting.options)  # building it would open a page
        return False
    reward = load_reward(name, setting)
    if name in COSTLY:
        return False
    reward_kit.score(name, reward, images, batch.prompts, **batch.columns())
    return True
