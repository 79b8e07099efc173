"""The dry run's check of rewards: each is built and called once, on images of noise."""

import torch

from flow_grpo import rewards as reward_kit
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import RewardConfig
from flow_grpo.data.prompts import PromptSet
from flow_grpo.doctor.dry_run_report import NUM_NOISE_IMAGES, DryRunReport
from flow_grpo.progress import phase
from flow_grpo.rewards.downloads import is_missing_download, offline_mode
from flow_grpo.rewards.scopes import ALL, frames_of
from flow_grpo.training.early_checks import check_scope
from flow_grpo.training.setup import COSTLY, HUMAN, load_reward, reason_not_to_call

DEFAULT_SIZE = 512  # of images where the model's size is unknown
ANY_PROMPT = "a photo"  # in place of prompts that are not downloaded


def check_rewards(
    args: FlowGRPOConfig,
    prompts: PromptSet | None,
    held_out: PromptSet | None,
    image_shape: torch.Size | None,
    report: DryRunReport,
) -> None:
    """Call every reward of the run, except those that cost a person's time or money.

    Args:
        prompts: of training; None if they are not downloaded. A reward may need what only they have: then its error is a note.
        held_out: the prompts of rewards that only evaluations measure; None if they are not set or not downloaded.
        image_shape: of the model's images or videos; None if it is unknown.
    """
    monitored = {} if args.evaluation.prompts is None else args.evaluation.rewards
    names = reward_kit.metric_names(args.rewards)
    reward_kit.row_weights(  # raises if a prompt names a reward that is not there
        None if prompts is None else prompts.repeat(1).metadata_columns().get("rewards"),
        {names[name]: setting.weight for name, setting in args.rewards.items() if setting.weight},
        {**{name: name for name in names.values()}, **names},
    )
    shape = image_shape or (3, args.height or DEFAULT_SIZE, args.width or DEFAULT_SIZE)
    images = torch.rand(NUM_NOISE_IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    for name, setting in {**monitored, **args.rewards}.items():
        try:
            with phase(f"calling reward {name}"), offline_mode():
                asked = prompts if name in args.rewards else held_out
                reason = _call(name, setting, images, asked, args, is_known=image_shape is not None)
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
    elif setting.on_error == "stop":
        raise error
    else:
        report.notes.append(f"warning: {error}")


def _call(
    name: str,
    setting: RewardConfig,
    images: torch.Tensor,
    prompts: PromptSet | None,
    args: FlowGRPOConfig,
    *,
    is_known: bool,
) -> str | None:
    """Call the reward. If it is not known what the model makes, a reward of videos gets still ones.

    Returns why it was not called or could not be checked, if so.
    """
    if name == HUMAN and setting.remote is None:
        reward_kit.check_options(name, **setting.options)  # building it would open a page
        return f"was not called: {COSTLY[HUMAN]}"
    reward = load_reward(name, setting)
    if args.evaluation.prompts is not None:
        check_scope(name, reward, args)
    if reason := reason_not_to_call(name, reward):
        return f"was not called: {reason}"
    if frames_of(reward) == ALL and not is_known:
        images = torch.stack([images, images], 1)
    if prompts is not None:
        _score(name, reward, images, prompts)
        return None
    try:
        _score(name, reward, images, PromptSet([ANY_PROMPT] * len(images), [{}] * len(images)))
    except ValueError as error:
        if is_missing_download(error):
            raise
        return f"was not checked, as the prompts are not downloaded; on {ANY_PROMPT!r} in their place: {error}"
    return None


def _score(name: str, reward: reward_kit.Reward, images: torch.Tensor, prompts: PromptSet) -> None:
    """Score the images of the first prompts that have the reward, or of the first one if the reward sees several images of a prompt."""
    rows = _rows_of(name, prompts)[: len(images)]
    batch = (
        prompts.take((rows * len(images))[: len(images)], 1)
        if reward_kit.scope_of(reward) == "image"
        else prompts.take(rows[:1], len(images))
    )
    reward_kit.score(name, reward, images, batch.prompts, **batch.columns())


def _rows_of(name: str, prompts: PromptSet) -> list[int]:
    """The prompts whose images the reward scores, as far as they name their rewards; all if no prompt names this one."""
    own = [i for i, row in enumerate(prompts.metadata) if reward_kit.names_reward(row.get("rewards"), name)]
    return own or list(range(len(prompts)))
