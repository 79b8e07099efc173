"""Checks before a model is loaded, by a run and by `--dry-run`: none needs weights, each raises ValueError with one sentence."""

import importlib.util
import tempfile
from collections.abc import Iterable
from pathlib import Path

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSet, sampler_of
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.devices import usable_device
from flow_grpo.policy.hub import resolve_lora
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.rewards import Reward, WeightedSum
from flow_grpo.rewards.scopes import GROUP, IMAGE, scope_of
from flow_grpo.run_folder.opening import check_begun, how_to_resume
from flow_grpo.training.losses import check_options, load_custom_function


def check_settings(args: FlowGRPOConfig, num_processes: int) -> None:
    """Check installed packages, the device, custom functions, that teachers are there, and that the processes can share a step evenly."""
    check_installed(args.trackers)
    usable_device(args.device)
    for _, stage in args.resolved_stages():
        check_options(stage.objective)
        load_custom_function("advantage", stage.objective.advantage)
        for anchor in stage.objective.anchors:
            if anchor.lora is not None:
                resolve_lora(anchor.lora)
        local_microbatch(stage, num_processes, stage.microbatch)
        if stage.objective.needs.critic and num_processes > 1:
            raise FlowGRPOError(
                f"objective {stage.objective.name} trains its critic on one process, not on {num_processes}: start one."
            )


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
    if args.memory.shard and args.objective.stepwise and args.objective.shared_initial_noise:
        whole.append("objective.shared_initial_noise with memory.shard")  # all processes must have as many shared starts
    return Processes(0, num_processes).local_microbatch(
        args.prompts_per_step,
        args.images_per_prompt,
        microbatch=microbatch,
        updates=args.updates,
        pairs=needs.rows_per_pair == 2,
        whole=next(iter(whole), None),
    )


def small_microbatches(args: FlowGRPOConfig, num_processes: int) -> list[str]:
    """A sentence for each stage whose micro-batches are smaller than half of what is set, since they divide a process's images."""
    sentences = {}
    for _, stage in args.resolved_stages():
        size = local_microbatch(stage, num_processes, stage.microbatch)
        images = stage.prompts_per_step * stage.images_per_prompt
        if 2 * size < stage.microbatch and (num_processes > 1 or size < images):
            sentences[size] = (
                f"micro-batches have {size} images, not microbatch={stage.microbatch}: they divide the {images // num_processes} images "
                "that a process has of a step."
            )
    return list(sentences.values())


def check_installed(trackers: Iterable[str]) -> None:
    """Check that these tracking services are installed."""
    for name in trackers:
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # it is only a folder of that name
            raise FlowGRPOError(
                f"trackers: {name} needs the package {name}, which is not installed: pip install {name}, or name others, such "
                "as trackers=[] for none."
            )


def check_prompts(args: FlowGRPOConfig, prompts: PromptSet) -> None:
    """Check that a step has enough prompts."""
    for _, stage in args.resolved_stages():
        if stage.dataset is None:
            sampler_of(prompts, stage.seed).sample(0, stage.prompts_per_step, 1)


def check_scope(name: str, reward: Reward, args: FlowGRPOConfig) -> None:
    """Check that an evaluation has groups for a reward that sees groups."""
    if scope_of(reward) == GROUP and args.evaluation.images_per_prompt < 2:
        raise FlowGRPOError(
            f"reward {name} sees the images of a prompt together, and an evaluation has one of each: set "
            "evaluation.images_per_prompt to 2 or more."
        )


def check_frames(args: FlowGRPOConfig, policy: FlowPipeline) -> None:
    """Check that `frames` of a reward is set only for a model that makes videos."""
    settings = {f"rewards.{name}": reward for name, reward in args.rewards.items()}
    settings |= {f"evaluation.rewards.{name}": reward for name, reward in args.evaluation.rewards.items()}
    for name, reward in settings.items():
        if reward.frames is not None and not policy.makes_videos:
            raise FlowGRPOError(
                f"{name}.frames={reward.frames} is for videos, and {type(policy.pipe).__name__} makes images: leave it out."
            )


def check_output(folder: Path, resume: bool | str | None) -> None:
    """Check that the run folder can be written, and that it holds a run exactly if one is to be resumed."""
    check_writable(folder)
    check_begun(folder, how_to_resume(folder, resume)[0])


def check_writable(folder: Path) -> None:
    """Check that something can be written to the folder, or where it would be created."""
    path = folder.absolute()
    try:
        while not path.exists():
            path = path.parent
        with tempfile.TemporaryDirectory(dir=path):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FlowGRPOError(
            f"output_dir={folder}: nothing can be written to {path} ({reason}); set another folder by output_dir=..."
        ) from error
