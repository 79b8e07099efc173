"""The checks of a run's start: one list, which a run, `train --dry-run` and `doctor` share.

A check takes what is known of the run. It raises FlowGRPOError, one sentence, where the run can't start, and returns sentences where it
can, but the user should know something. A run makes the checks of each part as soon as it is loaded, so that a wrong setting is found
before a model is. `--dry-run` makes them with what needs no weights, those of the part `rewards` for one reward at a time: there a check
can't compare two rewards. `doctor` shows what each found, once all have passed.
"""

import importlib.util
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.forward_process_objectives import ForwardProcess
from flow_grpo.config.stepwise_objectives import Stepwise
from flow_grpo.data.prompt_sources import benchmark_overlap, held_out_overlap, syntax_warnings
from flow_grpo.data.prompts import PromptSet, sampler_of
from flow_grpo.distributed.processes import shared_microbatch
from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import ImagePrompt
from flow_grpo.policy.devices import usable_device
from flow_grpo.policy.hub import resolve_lora
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import Reward, WeightedSum
from flow_grpo.rewards.calls import check_signature
from flow_grpo.rewards.images import SOURCE, SOURCES
from flow_grpo.rewards.scopes import GROUP, IMAGE, scope_of
from flow_grpo.rewards.scoring import REWARDS_COLUMN
from flow_grpo.run_folder.opening import check_begun, check_free, how_to_resume
from flow_grpo.training.custom_functions import check_custom_functions
from flow_grpo.training.offline import OfflineExamples, image_size, load_examples

FEW_STEPS = re.compile(r"turbo|schnell|lightning|flash|hyper-?sd|[48]-?steps?|distill|klein(?!.*base)", re.IGNORECASE)
FEW_STEP_SCHEDULERS = re.compile("LCM|SCM|TCD|FlowMap|PiFlow")
Part = Literal["settings", "prompts", "rewards", "model"]


@dataclass
class Start:
    """What is known of a run before its first step.

    Attributes:
        trained: the rewards that are trained on.
        measured: those that evaluations measure.
        policy: the model, or in a dry run its code without weights; None if it is not here.
        source: the file or name that the training prompts come from; None for several sets, and for prompts in memory.
    """

    args: FlowGRPOConfig
    num_processes: int = 1
    train_set: PromptSet | None = None
    eval_set: PromptSet | None = None
    source: str | None = None
    trained: WeightedSum | None = None
    measured: Mapping[str, Reward] = field(default_factory=dict)
    policy: Policy | None = None

    @cached_property
    def stages(self) -> list[FlowGRPOConfig]:
        """The settings of each stage."""
        return [stage for _, stage in self.args.resolved_stages()]

    @cached_property
    def given(self) -> list[OfflineExamples]:
        """The given images of the stages that train on some. FlowGRPOError if they can't be read."""
        return [
            load_examples(stage.dataset, stage.objective.needs.rows_per_pair)
            for stage in self.stages
            if stage.dataset is not None
        ]

    @property
    def sampled_prompts(self) -> list[str]:
        """The prompts that images are sampled for."""
        return [] if self.train_set is None or len(self.given) == len(self.stages) else self.train_set.prompts

    @property
    def trained_prompts(self) -> list[str]:
        """The prompts of all images that are trained on."""
        return [*self.sampled_prompts, *(prompt for examples in self.given for prompt in examples.prompts)]

    @property
    def held_out_prompts(self) -> list[str]:
        """The prompts of evaluations."""
        return [] if self.eval_set is None else self.eval_set.prompts


Check = Callable[[Start], list[str]]


def make_checks(part: Part, start: Start) -> dict[str, list[str]]:
    """Make the checks of one part of a run. Returns what each found by its name. FlowGRPOError if the run can't start."""
    return {name: check(start) for name, check in CHECKS[part].items()}


def sentences(found: Mapping[str, list[str]]) -> list[str]:
    """All that was found, each sentence once."""
    return list(dict.fromkeys(sentence for one in found.values() for sentence in one))


# -- settings ---------------------------------------------------------------------------------------------------------


def tracking_services(start: Start) -> list[str]:
    """Are the tracking services installed?"""
    for name in start.args.trackers:
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # it is only a folder of that name
            raise FlowGRPOError(
                f"trackers: {name} needs the package {name}, which is not installed: pip install {name}, or name others, such "
                "as trackers=[] for none."
            )
    return []


def eight_bit(start: Start) -> list[str]:
    """Is bitsandbytes installed, if weights or moments are to be in 4 or 8 bit?"""
    stages = [("optimizer.name=adamw_8bit", stage.optimizer.name == "adamw_8bit") for stage in start.stages]
    for setting, is_set in [("memory.quantize=nf4", start.args.memory.quantize == "nf4"), *stages]:
        if is_set and importlib.util.find_spec("bitsandbytes") is None:
            raise FlowGRPOError(f"{setting} needs bitsandbytes, which is not installed: pip install bitsandbytes.")
    return []


def embedding_cache(start: Start) -> list[str]:
    """Can the folder of the embeddings be written?"""
    if start.args.memory.embedding_cache_dir is not None:
        check_writable(Path(start.args.memory.embedding_cache_dir), "memory.embedding_cache_dir")
    return []


def device(start: Start) -> list[str]:
    """Can the device be used?"""
    usable_device(start.args.device)
    return []


def custom_functions(start: Start) -> list[str]:
    """Are the user's objectives and advantages there, and do they take their arguments?"""
    for stage in start.stages:
        check_custom_functions(stage.objective)
    return []


def teachers(start: Start) -> list[str]:
    """Are the LoRAs of anchors there?"""
    for anchor in (anchor for stage in start.stages for anchor in stage.objective.anchors):
        if anchor.lora is not None:
            resolve_lora(anchor.lora)
    return []


def shares(start: Start) -> list[str]:
    """Can the processes share a step evenly?"""
    for stage in start.stages:
        local_microbatch(stage, start.num_processes, stage.microbatch, start.trained)
        if stage.objective.needs.critic and start.num_processes > 1:
            raise FlowGRPOError(
                f"objective {stage.objective.name} trains its critic on one process, not on {start.num_processes}: start one."
            )
    return []


def small_microbatches(start: Start) -> list[str]:
    """Are micro-batches about as large as they are set? They divide the images of a process."""
    found = {}
    for stage in start.stages:
        size = local_microbatch(stage, start.num_processes, stage.microbatch)
        images = stage.prompts_per_step * stage.images_per_prompt
        if 2 * size < stage.microbatch and (start.num_processes > 1 or size < images):
            found[size] = (
                f"micro-batches have {size} images, not microbatch={stage.microbatch}: they divide the {images // start.num_processes} "
                "images that a process has of a step."
            )
    return list(found.values())


def off_policy_steps(start: Start) -> list[str]:
    """Are the steps sampled with the guidance whose probability is trained?"""
    return [
        f"sampling.guidance={stage.sampling.guidance:g} samples steps of which {stage.objective.name} trains the probability at "
        f"guidance={stage.guidance:g}: the run is off-policy. Objectives on final latents, such as awm, are not."
        for stage in start.stages
        if stage.objective.stepwise and stage.sampling.guidance not in (None, stage.guidance)
    ]


# -- prompts ----------------------------------------------------------------------------------------------------------


def enough_prompts(start: Start) -> list[str]:
    """Are there as many prompts as a step needs?"""
    for stage in start.stages:
        if stage.dataset is None and start.train_set is not None:
            sampler_of(start.train_set, stage.seed).sample(0, stage.prompts_per_step, 1)
    return []


def prompt_syntax(start: Start) -> list[str]:
    """Do prompts have marks of another program's syntax?"""
    return syntax_warnings([*start.sampled_prompts, *start.held_out_prompts]) if start.sampled_prompts else []


def held_out_prompts(start: Start) -> list[str]:
    """Are held-out prompts trained on?"""
    held_out = start.held_out_prompts
    shared = held_out_overlap(start.trained_prompts, held_out)
    sentence = (
        f"the training prompts include {shared} of the {len(held_out)} held-out prompts, which then measure memorization."
    )
    return [sentence] if shared else []


def test_sets(start: Start) -> list[str]:
    """Are prompts of a published test set trained on?"""
    source = start.source if start.sampled_prompts else None
    return [
        f"the training prompts include {count} of the test set {name}: results on it can't be compared with published ones."
        for name, count in benchmark_overlap(start.trained_prompts, start.held_out_prompts, source).items()
    ]


# -- rewards ----------------------------------------------------------------------------------------------------------


def columns_of_rewards(start: Start) -> list[str]:
    """Have the prompts the columns that rewards need?"""
    if start.trained is not None and start.sampled_prompts:
        _check_columns(start.trained.rewards, start.train_set)
    _check_columns(start.measured, start.eval_set)
    return []


def _check_columns(rewards: Mapping[str, Reward], prompts: PromptSet | None) -> None:
    if prompts is None:
        return
    columns = {key for row in prompts.metadata for key in row}
    if any(isinstance(prompt, ImagePrompt) for prompt in prompts.prompts):
        columns |= {SOURCE, SOURCES}
    for name, reward in rewards.items():
        if prompts_with(name, prompts):
            check_signature(name, reward, columns)


def prompts_with(reward: str, prompts: PromptSet) -> list[int]:
    """The indices of the prompts whose images the reward scores, as far as their sets name rewards."""
    named = [row.get(REWARDS_COLUMN) for row in prompts.metadata]
    short = reward.rpartition(":")[2]
    return [i for i, own in enumerate(named) if own is None or short in {name.rpartition(":")[2] for name in own}]


def groups_of_evaluations(start: Start) -> list[str]:
    """Has an evaluation groups for a reward that sees groups?"""
    for name, reward in start.measured.items():
        if scope_of(reward) == GROUP and start.args.evaluation.images_per_prompt < 2:
            raise FlowGRPOError(
                f"reward {name} sees the images of a prompt together, and an evaluation has one of each: set "
                "evaluation.images_per_prompt to 2 or more."
            )
    return []


def reward_gradients(start: Start) -> list[str]:
    """Have the trained rewards a gradient, where one is needed?"""
    if start.trained is not None and any(stage.objective.needs.reward_gradient for stage in start.stages):
        start.trained.check_differentiable()
    return []


# -- the model --------------------------------------------------------------------------------------------------------


def few_step_model(start: Start) -> list[str]:
    """Does the objective suit a model that is made for few steps?"""
    pipe = start.policy and start.policy.pipe
    return [
        f"{start.args.model} is made for few steps, and {stage.objective.name}, which trains on noised images, blurs such a model: "
        "train its steps by grpo, or by the gradient of a reward by flowbp or mend, with the steps that it is made for (sampling.steps)."
        for stage in start.stages
        if isinstance(stage.objective, ForwardProcess) and is_few_step(start.args.model, pipe)
    ]


def images_of_prompts(start: Start) -> list[str]:
    """Can the model take the images of the prompts?"""
    if start.policy is not None:
        start.policy.check_images([*(start.train_set.prompts if start.train_set else []), *start.held_out_prompts])
    return []


def frames_of_rewards(start: Start) -> list[str]:
    """Does the model make videos, if a reward's `frames` is set?"""
    settings = {f"rewards.{name}": reward for name, reward in start.args.rewards.items()}
    settings |= {f"evaluation.rewards.{name}": reward for name, reward in start.args.evaluation.rewards.items()}
    for name, reward in settings.items():
        if reward.frames is not None and start.policy is not None and not start.policy.makes_videos:
            raise FlowGRPOError(
                f"{name}.frames={reward.frames} is for videos, and {type(start.policy.pipe).__name__} makes images: leave it out."
            )
    return []


def encoding_of_images(start: Start) -> list[str]:
    """Can the model encode images, if some are given?"""
    for stage in start.stages:
        if stage.dataset is not None and start.policy is not None:
            image_size(start.policy, stage.sampling.steps)
    return []


# -- the run folder, and sizes ----------------------------------------------------------------------------------------


def check_output(folder: Path, resume: bool | str | None) -> None:
    """Check that the run folder can be written, and that it holds a run exactly if one is to be resumed; first that none trains there."""
    check_writable(folder)
    check_free(folder)
    check_begun(folder, how_to_resume(folder, resume)[0])


def check_writable(folder: Path, setting: str = "output_dir") -> None:
    """Check that something can be written to the folder of a setting, or where it would be created."""
    path = folder.absolute()
    try:
        while not path.exists():
            path = path.parent
        with tempfile.TemporaryDirectory(dir=path):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FlowGRPOError(
            f"{setting}={folder}: nothing can be written to {path} ({reason}); set another folder by {setting}=..."
        ) from error


def local_microbatch(args: FlowGRPOConfig, num_processes: int, microbatch: int, rewards: WeightedSum | None = None) -> int:
    """The micro-batch of one process in a stage, at most that large.

    Args:
        rewards: the trained ones; None if they are not loaded or have been checked.

    Raises:
        FlowGRPOError: the processes can't share a step evenly.
    """
    needs = args.objective.needs
    compared = [name for name, reward in (rewards.rewards.items() if rewards else ()) if scope_of(reward) != IMAGE]
    whole = [*([f"objective {args.objective.name}"] if needs.whole_groups else []), *(f"reward {name}" for name in compared)]
    if args.memory.shard and isinstance(args.objective, Stepwise) and args.objective.shared_initial_noise:
        whole.append("objective.shared_initial_noise with memory.shard")  # all processes must have as many shared starts
    return shared_microbatch(
        num_processes,
        args.prompts_per_step,
        args.images_per_prompt,
        microbatch,
        updates=args.updates,
        pairs=needs.rows_per_pair == 2,
        whole=next(iter(whole), None),
    )


def is_few_step(model: str, pipe: Any | None) -> bool:
    """Whether a model was distilled to few steps, as its name, its pipeline's `is_distilled` or the kind of its scheduler says."""
    if FEW_STEPS.search(model.rstrip("/").rpartition("/")[2]):
        return True
    if pipe is None:
        return False
    by_scheduler = FEW_STEP_SCHEDULERS.search(type(pipe.scheduler).__name__)
    return bool(by_scheduler or pipe.config.get("is_distilled"))


# -- the list ------------------------------------------------------------------------------------------------------------


CHECKS: dict[Part, dict[str, Check]] = {
    "settings": {
        "tracking services": tracking_services,
        "4 and 8 bit": eight_bit,
        "cache of embeddings": embedding_cache,
        "device": device,
        "custom functions": custom_functions,
        "teachers": teachers,
        "shares of processes": shares,
        "micro-batches": small_microbatches,
        "off-policy steps": off_policy_steps,
    },
    "prompts": {
        "prompts of a step": enough_prompts,
        "prompt syntax": prompt_syntax,
        "held-out prompts trained on": held_out_prompts,
        "test sets trained on": test_sets,
    },
    "rewards": {
        "groups on one process": shares,
        "columns of rewards": columns_of_rewards,
        "groups of evaluations": groups_of_evaluations,
        "gradients of rewards": reward_gradients,
    },
    "model": {
        "few-step model": few_step_model,
        "images of prompts": images_of_prompts,
        "frames of rewards": frames_of_rewards,
        "encoding of images": encoding_of_images,
    },
}
