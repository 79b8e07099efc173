"""The rewards of a run: which are trained on, which are only measured, and where each of them runs."""

from typing import Any

import rewards as reward_kit
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import RewardConfig
from rewards import Reward, WeightedSum

MEASURES = ("reward", "diversity")  # what is measured beside the rewards, and might be the name of a function


def build_rewards(args: FlowGRPOConfig, given: Any = None, held_out: bool | None = None) -> tuple[WeightedSum, list[str]]:
    """All rewards that a run measures, and the names of those that are trained on, as metrics have them. Each is built once.

    The sum is the trained reward: the others have weight 0 in it.

    Args:
        given: a trainer's `reward_funcs`.
        held_out: whether there are prompts to evaluate on, by default whether `args` names some; else rewards that are only measured
            are left out.
    """
    held_out = args.evaluation.prompts is not None if held_out is None else held_out
    if given is None:
        trained: dict[str, Any] = {name: (name, setting) for name, setting in args.rewards.items()}
    else:
        items = given if isinstance(given, list) else [given]
        trained = {i if isinstance(i, str) else getattr(i, "__name__", type(i).__name__): (i, RewardConfig()) for i in items}
        if len(trained) < len(items):
            raise ValueError("two of reward_funcs have one name: give each function or class a name of its own.")
    measured = {name: (name, setting) for name, setting in args.evaluation.rewards.items() if held_out}
    short = reward_kit.metric_names([*trained, *measured], MEASURES)
    loaded = {
        short[name]: placed(item, setting) if isinstance(item, str) else item
        for name, (item, setting) in {**measured, **trained}.items()
    }
    weights = dict.fromkeys(loaded, 0.0)
    weights |= {short[name]: args.rewards[name].weight if name in args.rewards else 1.0 for name in trained}
    settings = {**args.evaluation.rewards, **args.rewards}
    drop = [short[name] for name, setting in settings.items() if setting.on_error == "drop" and name in short]
    return WeightedSum(loaded, weights, drop), [short[name] for name in trained]


def placed(name: str, setting: RewardConfig) -> Reward:
    """A reward where its setting wants it: on other machines, in a process of its own, or here."""
    if setting.isolate:
        from rewards.serving.subprocess import Isolated

        return Isolated(name, setting.options, setting.python, **({"timeout": setting.timeout} if setting.timeout else {}))
    return reward_kit.load(name, **{"remote": setting.remote, **setting.options})
