"""Settings of 0.4 that are gone or have moved.

A run folder of 0.4 has all of them with their defaults. Of those that are gone the defaults are dropped and another value is refused.
Those that moved are read in both places.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from flow_grpo.config.objective import Objective, is_custom
from flow_grpo.config.objective_by_name import section_type
from flow_grpo.config.stepwise_objectives import Stepwise, WindowConfig
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


KL_ADVICE = "hold the policy near the base model by objective.kl_weight, or near a reference by objective.anchors"
LEVELS_ADVICE = "choose uniform or schedule as objective.sigma_distribution"
RESET_ADVICE = "use an anchor to ema, {to: ema, weight: 1, decay: 0.3}"
WINDOW_ADVICE = "choose fixed or random; flow-grpo doctor --step-variance says which steps move the reward"
FSDP_ADVICE = "set memory.shard=fsdp2, which shards weights, gradients and moments; a LoRA's moments are small"
ATTRIBUTE_ADVICE = "set the attribute {} of the reward's class or function, or of judge options.{}"
NO_GAIN_ADVICE = "remove it: no config of this package sets it, and no measurement speaks for another value"
UNIFORM_ADVICE = "remove it: at the same number of images, scenes were learned as well without it (dev/LOG.md)"
GRAPHS_ADVICE = "set memory.compile=true, which was measured on a GPU (docs/performance.md)"
RETIRED = [
    Retired("dynamic_sampling_rounds", 0, UNIFORM_ADVICE),
    Retired("prompt_skipping.patience", 0, UNIFORM_ADVICE),
    Retired(
        "objective.name",
        None,
        "choose pepg, which has the same gradient with one update on a rollout",
        values=("epg", "par"),
    ),
    Retired("objective.norm_guard", 0.0, KL_ADVICE),
    Retired("objective.reward_cap", None, "clip the values in your own reward function, or " + KL_ADVICE),
    Retired("objective.diversity_weight", None, "give the reward least_distance a weight of its own"),
    Retired("objective.logit_location", 0.0, LEVELS_ADVICE),
    Retired("objective.logit_scale", 1.0, LEVELS_ADVICE),
    Retired("objective.sigma_distribution", None, LEVELS_ADVICE, values=("logit_normal",)),
    Retired("objective.rollout_policy", None, "choose old, the slowly moving copy, or trained", values=("average",)),
    Retired("objective.rollout_policy_decay", {"rate": 0.0075, "max": 0.999, "after": 75, "start": 0.0}, "remove it"),
    Retired("objective.anchors.*.gate", "none", "remove it: the KL is of all images"),
    Retired("objective.anchors.*.every", None, RESET_ADVICE),
    Retired("objective.anchors.*.threshold", None, RESET_ADVICE),
    Retired("objective.anchors.*.to", None, RESET_ADVICE, values=("reset",)),
    Retired("sampling.branches", [], "set objective.shared_initial_noise=true, a start that the images of a group share"),
    Retired("sampling.log_prob", "gaussian", "remove it: log-probabilities are Gaussian"),
    Retired("sampling.solver", None, "choose dpm_2m, which has order 2 with one velocity a step", values=("heun", "ab2")),
    Retired("sampling.transition", None, "choose cps or flow_sde by objective.transition", values=("difference",)),
    Retired("sampling.window.shift_every", 25, WINDOW_ADVICE),
    Retired("sampling.window.schedule", None, WINDOW_ADVICE, values=("auto", "sliding")),
    *(
        Retired(f"{rewards}.*.{name}", None, ATTRIBUTE_ADVICE.format(name, name))
        for rewards in ("rewards", "evaluation.rewards")
        for name in ("scope", "opponents")
    ),
    *(
        Retired(f"evaluation.{name}", default, "run flow-grpo eval RUN height=HEIGHT width=WIDTH for images of another size")
        for name, default in (("sizes", []), ("height", None), ("width", None))
    ),
    Retired("memory.attention_backend", None, "set the environment variable DIFFUSERS_ATTN_BACKEND, which diffusers reads"),
    Retired("evaluation.seed", 1234, "remove it; flow-grpo eval --seeds 4 draws 4 images of each prompt, from other noise"),
    *(
        Retired(f"objective.critic.{name}", default, NO_GAIN_ADVICE)
        for name, default in (("lr", 1e-3), ("width", 128), ("gae_lambda", 0.95))
    ),
    Retired("objective.clip_quantile", 0.9, NO_GAIN_ADVICE),
    Retired("optimizer.betas", [0.9, 0.999], NO_GAIN_ADVICE),
    Retired("objective.anchors.*.kl", None, "set objective.kl, which is of all anchors"),
    Retired("sample_every", 0, "set evaluation.every and evaluation.prompts; each evaluation keeps images in RUN/pictures"),
    *(
        Retired(
            f"{rewards}.*.timeout",
            None,
            "remove it: loading the reward, and each call, may take an hour; a reward that takes longer is for flow-grpo serve, as "
            "a remote one with options.timeout",
        )
        for rewards in ("rewards", "evaluation.rewards")
    ),
    Retired("memory.cuda_graphs", False, GRAPHS_ADVICE),
    Retired("memory.quantize", None, "choose nf4 or fp8_layerwise", values=("int8", "fp8", "int4")),
    Retired("memory.shard", None, FSDP_ADVICE, values=("zero1", "zero2", "zero3")),
]


def drop_retired(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that are gone, in stages too.

    Raises:
        FlowGRPOError: one of them is set, with what to do instead.
    """
    for retired in RETIRED:
        values = _dropped(values, retired.path.split("."), retired, ())
    values = {key: value for key, value in values.items() if key != "prompt_skipping"}  # without patience, it skips none
    if isinstance(objective := values.get("objective"), dict):
        values = {**values, "objective": {key: value for key, value in objective.items() if (key, value) != ("critic", {})}}
    if isinstance(stages := values.get("stages"), list):
        values = {**values, "stages": [drop_retired(stage) if isinstance(stage, dict) else stage for stage in stages]}
    return values


def _dropped(values: Any, path: list[str], retired: Retired, parents: tuple[str, ...]) -> Any:
    """`values`, the settings below `parents`, without the one at `path`."""
    key, *rest = path
    if key == "*" and isinstance(values, list):
        return [_dropped(entry, rest, retired, parents) for entry in values]
    if key == "*" and isinstance(values, dict):
        return {name: _dropped(entry, rest, retired, (*parents, str(name))) for name, entry in values.items()}
    if not isinstance(values, dict) or key not in values:
        return values
    if rest:
        return {**values, key: _dropped(values[key], rest, retired, (*parents, key))}
    value = values[key]
    if value in retired.values if retired.values else value != retired.default:
        stays = retired.values or retired.instead.startswith("remove it")
        do = retired.instead if stays else f"leave it out, and {retired.instead}"
        raise FlowGRPOError(f"{'.'.join((*parents, key))}={value} is no longer supported: {do}.")
    return values if retired.values else {name: entry for name, entry in values.items() if name != key}


# from `sampling` to stepwise objectives
MOVED = ("transition", "noise_level", "window", "shared_initial_noise", "keep_graphs")
DEFAULTS = {key: Stepwise.model_fields[key].get_default() for key in MOVED} | {"window": WindowConfig().model_dump()}


def move_to_objective(values: dict[str, Any]) -> dict[str, Any]:
    """Move the settings of `sampling` that 0.5 has in stepwise objectives, in stages too. Returns all settings.

    Defaults are left out. A forward-process objective had the transition `ode`, and a user's own function was of final latents with it.
    """
    stages, old, objective = values.get("stages"), _moved_settings(values), _objective(values)
    if isinstance(stages, list) and stages:
        moved = [
            _with_moved(stage, {**objective, **_objective(stage)}, old) if isinstance(stage, dict) else stage
            for stage in stages
        ]
        return {**_without_moved(values), "stages": moved}
    return _with_moved(values, objective, {})


def replace_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Settings whose whole section `sampling` was replaced by one of 0.4, without what the objective has in its place."""
    if not _moved_settings(values):
        return values
    return {**values, "objective": {key: value for key, value in _objective(values).items() if key not in MOVED}}


def _with_moved(values: dict[str, Any], objective: dict[str, Any], inherited: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run or stage with those that moved, section by section, without defaults that nobody has set before.

    Args:
        objective: the one that it has, or has from the run.
        inherited: those of the run that moved, of a stage.
    """
    own, given = _objective(values), _moved_settings(values)
    name, transition = objective.get("name", "grpo"), {**inherited, **given}.get("transition")
    if not (given or inherited) or not isinstance(name, str):
        return values
    family = {"family": "forward_process"} if is_custom(name) and transition == "ode" else {}
    if issubclass(section_type(name, **family), Stepwise):
        from_run = {key: value for key, value in inherited.items() if (key, value) != ("transition", "ode")}
        moved = _without_defaults(merged(merged(from_run, {key: own[key] for key in MOVED if key in own}), given), own)
    else:  # a setting that the objective does not read is refused if it was given; a run folder of 0.4 has the defaults
        kept = {key: value for key, value in given.items() if key != "transition"}
        moved = {**_without_defaults(kept, own), **family}
        if given.get("transition", "ode") != "ode":
            moved["transition"] = transition
    values = _without_moved(values)
    return {**values, "objective": {**own, **moved}} if moved else values


def _without_defaults(moved: dict[str, Any], own: Any, defaults: dict[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Settings without those that have the default, unless the objective has set them itself (`own`), section by section."""
    given, kept = own if isinstance(own, dict) else {}, {}
    for key, value in moved.items():
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            value = _without_defaults(value, given.get(key), defaults[key])
            is_kept = bool(value)
        else:
            is_kept = key not in defaults or value != defaults[key]
        if is_kept or key in given:
            kept[key] = value
    return kept


def merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`base` with the settings of `overrides`, section by section."""
    result = dict(base)
    for key, value in overrides.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return result


def _moved_settings(values: dict[str, Any]) -> dict[str, Any]:
    sampling = values.get("sampling")
    return {key: sampling[key] for key in MOVED if key in sampling} if isinstance(sampling, dict) else {}


def _without_moved(values: dict[str, Any]) -> dict[str, Any]:
    sampling = values.get("sampling")
    if not isinstance(sampling, dict):
        return dict(values)
    return {**values, "sampling": {key: value for key, value in sampling.items() if key not in MOVED}}


def _objective(values: dict[str, Any]) -> dict[str, Any]:
    objective = values.get("objective")
    if isinstance(objective, Objective):
        return objective.given()
    return objective if isinstance(objective, dict) else {}


def documented() -> Iterator[tuple[str, str]]:
    """Each retired setting, with its values if the setting stays, and what to do instead: the migration table."""
    for retired in RETIRED:
        values = f": {', '.join(retired.values)}" if retired.values else ""
        yield f"{retired.path.replace('.*', '')}{values}", retired.instead
