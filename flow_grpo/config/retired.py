"""Settings of 0.4 that are gone. A run folder of 0.4 has them all with their defaults, which are dropped; another value is refused."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from flow_grpo.errors import FlowGRPOError


class Retired(NamedTuple):
    """A setting that is gone, or some values of one that stays.

    Attributes:
        path: keys that lead to it; `*` is every entry of a list or mapping.
        default: the value that is dropped without a word. Unused if `values` is given.
        instead: what to do, as the end of a sentence.
        values: the values that are gone, of a setting that stays.
    """

    path: str
    default: Any
    instead: str
    values: tuple[str, ...] = ()


KL = "hold the policy near the base model by objective.kl_weight, or near a reference by objective.anchors"
LEVELS = "choose uniform or schedule as objective.sigma_distribution"
RESET = "use an anchor to ema, {to: ema, weight: 1, decay: 0.3}"
WINDOW = "choose fixed or random; flow-grpo doctor --step-variance says which steps move the reward"
FSDP = "set memory.shard=fsdp2, which shards weights, gradients and moments; a LoRA's moments are small"
RETIRED = [
    Retired(
        "objective.name",
        None,
        "choose pepg, which has the same gradient with one update on a rollout",
        values=("epg", "par"),
    ),
    Retired("objective.norm_guard", 0.0, KL),
    Retired("objective.reward_cap", None, "clip the values in your own reward function, or " + KL),
    Retired("objective.diversity_weight", None, "give the reward least_distance a weight of its own"),
    Retired("objective.logit_location", 0.0, LEVELS),
    Retired("objective.logit_scale", 1.0, LEVELS),
    Retired("objective.sigma_distribution", None, LEVELS, values=("logit_normal",)),
    Retired("objective.rollout_policy", None, "choose old, the slowly moving copy, or trained", values=("average",)),
    Retired("objective.rollout_policy_decay", {"rate": 0.0075, "max": 0.999, "after": 75, "start": 0.0}, "remove it"),
    Retired("objective.anchors.*.gate", "none", "remove it: the KL is of all images"),
    Retired("objective.anchors.*.every", None, RESET),
    Retired("objective.anchors.*.threshold", None, RESET),
    Retired("objective.anchors.*.to", None, RESET, values=("reset",)),
    Retired("sampling.branches", [], "set sampling.shared_initial_noise=true, a start that the images of a group share"),
    Retired("sampling.log_prob", "gaussian", "remove it: log-probabilities are Gaussian"),
    Retired("sampling.solver", None, "choose dpm_2m, which has order 2 with one velocity a step", values=("heun", "ab2")),
    Retired("sampling.transition", None, "choose cps or flow_sde", values=("difference",)),
    Retired("sampling.window.shift_every", 25, WINDOW),
    Retired("sampling.window.schedule", None, WINDOW, values=("auto", "sliding")),
    Retired("evaluation.sizes", [], "run flow-grpo eval with evaluation.height and evaluation.width"),
    Retired("memory.quantize", None, "choose nf4 or fp8_layerwise", values=("int8", "fp8", "int4")),
    Retired("memory.shard", None, FSDP, values=("zero1", "zero2", "zero3")),
]


def drop_retired(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that are gone, in stages too.

    Raises:
        FlowGRPOError: one of them is set, with what to do instead.
    """
    for retired in RETIRED:
        values = _dropped(values, retired.path.split("."), retired)
    if isinstance(stages := values.get("stages"), list):
        values = {**values, "stages": [drop_retired(stage) if isinstance(stage, dict) else stage for stage in stages]}
    return values


def _dropped(values: Any, path: list[str], retired: Retired) -> Any:
    """`values` without the setting at `path`."""
    key, *rest = path
    if key == "*":
        if isinstance(values, list):
            return [_dropped(entry, rest, retired) for entry in values]
        return (
            {name: _dropped(entry, rest, retired) for name, entry in values.items()} if isinstance(values, dict) else values
        )
    if not isinstance(values, dict) or key not in values:
        return values
    if rest:
        return {**values, key: _dropped(values[key], rest, retired)}
    value = values[key]
    if value in retired.values if retired.values else value != retired.default:
        raise FlowGRPOError(f"{_shown(retired.path)}={value} is no longer supported: {retired.instead}.")
    return values if retired.values else {name: entry for name, entry in values.items() if name != key}


def _shown(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != "*")


def documented() -> Iterator[tuple[str, str]]:
    """Each retired setting, with its values if the setting stays, and what to do instead: the migration table."""
    for retired in RETIRED:
        values = f": {', '.join(retired.values)}" if retired.values else ""
        yield f"{_shown(retired.path)}{values}", retired.instead
