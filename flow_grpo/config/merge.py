"""Merges settings: a stage's into the run's, overrides into a file's."""

from collections.abc import Callable
from typing import Any

from flow_grpo.config.objective import OBJECTIVES, is_custom, section_type
from flow_grpo.config.sampling import STEPWISE_SETTINGS, transitions

Settings = dict[str, Any]  # as a YAML file has them, before validation


def merge(base: Settings, overrides: Settings) -> Settings:
    """`base` with the settings of `overrides`, section by section."""
    merged = dict(base)
    for key, value in overrides.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return merged


def merge_stage(base: Settings, stage: Settings) -> Settings:
    """The run's settings with those of a stage. Of the run's, the stage has only what its objective reads."""
    merged = merge(base, stage)
    explicit = {(section, key) for section in ("objective", "sampling") for key in stage.get(section) or ()}
    merged = _drop_unsuitable_transition(base, merged, explicit)
    return filter_settings(merged, lambda section, key: (section, key) in explicit or objective_reads(merged, section, key))


def drop_settings_of_former_objective(file: Settings, settings: Settings, explicit: set[tuple[str, str]]) -> Settings:
    """A file's settings after overrides, without those that only the file's own objective reads.

    Args:
        file: before the overrides.
        settings: after them.
        explicit: section and key of what the overrides set, which stays, to be refused if it is not read.
    """
    settings = _drop_unsuitable_transition(file, settings, explicit)
    return filter_settings(
        settings,
        lambda section, key: (
            (section, key) in explicit or objective_reads(settings, section, key) or not objective_reads(file, section, key)
        ),
    )


def with_transition(settings: Settings) -> Settings:
    """Settings with the transition `ode` if their objective trains on final latents and they name none."""
    sampling = settings.get("sampling") or {}
    if (
        not isinstance(sampling, dict)
        or "transition" in sampling
        or _suits(_chosen(settings, "objective", "name"), "flow_sde")
    ):
        return settings
    return {**settings, "sampling": {**sampling, "transition": "ode"}}


def _drop_unsuitable_transition(former: Settings, settings: Settings, explicit: set[tuple[str, str]]) -> Settings:
    """Drop the inherited transition if the newly chosen objective cannot use it."""
    name, transition = _chosen(settings, "objective", "name"), _chosen(settings, "sampling", "transition")
    is_chosen = name != _chosen(former, "objective", "name") and ("sampling", "transition") not in explicit
    if not is_chosen or transition is None or _suits(name, transition):
        return settings
    sampling = {key: value for key, value in settings["sampling"].items() if key != "transition"}
    return with_transition({**settings, "sampling": sampling})


def _suits(objective: str | None, transition: str) -> bool:
    """Whether the transition suits the objective (stepwise ones need a stochastic one). True if either name is unknown."""
    section, step = OBJECTIVES.get(objective or "grpo"), transitions().get(transition)
    return section is None or step is None or section.stepwise == step.stochastic


def filter_settings(settings: Settings, is_kept: Callable[[str, str], bool]) -> Settings:
    """Keep of `objective` and `sampling` the settings for which `is_kept(section, key)` is true, and all other sections."""
    settings_kept = dict(settings)
    for section in ("objective", "sampling"):
        if isinstance(values := settings_kept.get(section), dict):
            settings_kept[section] = {key: value for key, value in values.items() if is_kept(section, str(key))}
    return settings_kept


def objective_reads(settings: Settings, section: str, key: str) -> bool:
    """Whether the objective that is chosen in `settings` reads a setting of `objective` or `sampling`. True if it is unknown."""
    name = _chosen(settings, "objective", "name") or "grpo"
    transition = _chosen(settings, "sampling", "transition") or "flow_sde"
    if (not is_custom(name) and name not in OBJECTIVES) or transition not in transitions():
        return True
    kind = section_type(name)
    if section == "objective":
        return key in kind.model_fields and (key != "advantage" or kind.needs.takes_advantage)
    stepwise = transitions()[transition].stochastic if kind.stepwise is None else kind.stepwise
    return stepwise or key not in STEPWISE_SETTINGS


def _chosen(settings: Settings, section: str, key: str) -> str | None:
    values = settings.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, str) else None
