"""The rewards of a run: which are trained on, which are only measured, and where each of them runs."""

from collections.abc import Callable
from typing import Any

import torch

from flow_grpo import rewards as reward_kit
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import RewardConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.progress import phase
from flow_grpo.rewards import Reward, WeightedSum
from flow_grpo.rewards.loading import import_path, with_frames
from flow_grpo.text import suggest

RESERVED_NAMES = ("reward", "diversity")  # other metrics, which a reward function might be named like
HUMAN = "human"  # the reward that asks a person
# Packaged rewards that are not called only to probe them, also when remote or isolated. See `reason_not_to_call`.
COSTLY = {HUMAN: "a person ranks its images", "judge": "each answer may cost money"}


def load_reward(name: str, setting: RewardConfig) -> Reward:
    """A reward that runs where its settings say: on other machines, in a process of its own, or in this process."""
    comparison = {"scope": setting.scope, "opponents": setting.opponents}
    if setting.isolate:
        from flow_grpo.rewards.serving.subprocess import Isolated

        options = {**setting.options, **{key: value for key, value in comparison.items() if value is not None}}
        isolated = Isolated(name, options, setting.python, **({"timeout": setting.timeout} if setting.timeout else {}))
        return with_frames(name, isolated, setting.frames)
    return reward_kit.load(name, **{"remote": setting.remote, **comparison, "frames": setting.frames, **setting.options})


def reason_not_to_call(name: str, reward: Reward) -> str | None:
    """Why a reward is not called only to probe it, if it is not: it is in `COSTLY`, or has the attribute `costly`."""
    own = "its attribute `costly` is set" if getattr(reward, "costly", False) else None
    return COSTLY.get(name, own)


def load_unless_costly(name: str, setting: RewardConfig) -> Reward:
    """As `load_reward`, but `unscored` in place of a reward that costs a person's time or money. A page of `human` is not opened."""
    if name == HUMAN and setting.remote is None:
        reward_kit.check_options(name, **setting.options)
        return unscored
    reward = load_reward(name, setting)
    return unscored if reason_not_to_call(name, reward) else reward


def unscored(images: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor:
    """The value 0 for every image, (B,), in place of a reward that is not called."""
    return torch.zeros(len(prompts))


def build_rewards(
    args: FlowGRPOConfig,
    reward_funcs: Any = None,
    monitored: bool | None = None,
    load: Callable[[str, RewardConfig], Reward] = load_reward,
) -> tuple[WeightedSum, list[str]]:
    """All rewards that a run measures, and the names of the trained ones, as in the metrics. Each reward is built once.

    The weighted sum is the trained reward: rewards that are only measured have weight 0.

    Args:
        reward_funcs: as given to the trainer; by default `args.rewards`.
        monitored: whether to build `args.evaluation.rewards` too, which are measured on held-out prompts. By default, if the config
            names such prompts.
        load: builds a reward from its name and settings.
    """
    if monitored is None:
        monitored = args.evaluation.prompts is not None
    trained = _trained_rewards(args, reward_funcs)
    measured = {name: (name, setting) for name, setting in args.evaluation.rewards.items() if monitored}
    metric_name = reward_kit.metric_names([*trained, *measured], RESERVED_NAMES)
    functions = {}
    for name, (item, setting) in {**measured, **trained}.items():
        with phase(f"loading reward {name}"):
            functions[metric_name[name]] = load(item, setting) if isinstance(item, str) else item
    weights = dict.fromkeys(functions, 0.0)
    weights |= {metric_name[name]: setting.weight for name, (_, setting) in trained.items()}
    settings = {**args.evaluation.rewards, **args.rewards}
    drop = [metric_name[name] for name, setting in settings.items() if setting.on_error == "drop" and name in metric_name]
    return WeightedSum(functions, weights, drop, names=metric_name), [metric_name[name] for name in trained]


def _trained_rewards(args: FlowGRPOConfig, reward_funcs: Any) -> dict[str, tuple[Any, RewardConfig]]:
    """Name -> function, class or importable name, and its settings."""
    if reward_funcs is None:
        return {name: (name, setting) for name, setting in args.rewards.items()}
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    names = [_name_of(function) for function in functions]
    trained = {n: (f, args.rewards.get(n, RewardConfig())) for n, f in zip(names, functions, strict=True)}
    unused = [name for name in args.rewards if name not in trained] if "rewards" in args.model_fields_set else []
    unset = [name for name in trained if name not in args.rewards]
    if misspelt := next((name for name in unused if suggest(name, unset)), None):
        raise FlowGRPOError(f"rewards.{misspelt} is for none of reward_funcs.{suggest(misspelt, unset)}")
    if len(trained) < len(functions):
        raise FlowGRPOError("two of reward_funcs have the same name: give each function or class its own name.")
    return trained


def _name_of(function: Any) -> str:
    if isinstance(function, str):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    if name not in reward_kit.REGISTRY:
        return name
    path = import_path(function)
    if path is None:
        raise FlowGRPOError(f"reward_funcs has a function {name}, but {name} is an included reward: give it another name.")
    return path


def recorded_rewards(args: FlowGRPOConfig, reward_funcs: Any) -> dict[str, RewardConfig]:
    """What the config of a run says of the rewards that it trains on: each under a name by which it can be loaded again.

    A function that no import path leads to keeps its own name.
    """
    return {
        import_path(function) or name: setting for name, (function, setting) in _trained_rewards(args, reward_funcs).items()
    }
