"""Checks of the section `objective`, and of the settings of `sampling` that an objective reads. Each raises ValueError."""

from flow_grpo.config.objective import NoiseLevels, Objective, StepWeight, is_custom, readers, section_types
from flow_grpo.config.sampling import STEPWISE_SETTINGS, SamplingConfig, transitions
from flow_grpo.config.settings import RunSettings
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest


def check_objective(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with the objective."""
    from flow_grpo.advantages import ADVANTAGES  # here, since it loads torch

    objective, advantage = args.objective, args.objective.advantage
    if not is_custom(advantage) and advantage not in ADVANTAGES:
        close = suggest(advantage, list(ADVANTAGES))
        raise FlowGRPOError(f"there is no advantage {advantage}.{close} Choose one of {', '.join(ADVANTAGES)}.")
    if args.stepwise:
        _check_stepwise(objective, args.sampling)
    else:
        _check_on_final_latents(objective, args.sampling)
    if objective.has_auto_clip and objective.auto_clip_quantile is None:
        raise FlowGRPOError(
            f"objective.clip_low=auto is calibrated at each trained step, for {', '.join(readers('clip_quantile'))}, not "
            f"{objective.name}."
        )
    _check_advantage_is_read(objective)
    if is_custom(objective.name):
        _check_custom_settings(args)


def _check_custom_settings(args: RunSettings) -> None:
    """Raise ValueError for a setting that a user's own function does not read where it is computed, on steps or on final latents."""
    objective, is_stepwise = args.objective, args.stepwise
    unread = NoiseLevels if is_stepwise else StepWeight
    names = unread.model_fields.keys() - Objective.model_fields.keys()
    changed = next((name for name in objective.changed() if name in names), None)
    if changed is not None:
        raise FlowGRPOError(
            f"objective {objective.name} does not use {changed}: with sampling.transition={args.sampling.transition} it is computed on "
            f"{'steps' if is_stepwise else 'final latents'}. Remove it."
        )


def _check_advantage_is_read(objective: Objective) -> None:
    """Raise FlowGRPOError if an advantage is chosen that the objective does not use."""
    if not objective.needs.takes_advantage and "advantage" in objective.changed():
        instead = (
            "its critic makes the advantages"
            if objective.needs.critic
            else "it trains on the best of a group, without advantages"
        )
        raise FlowGRPOError(f"objective {objective.name} does not use advantage: {instead}. Remove it.")


def _check_stepwise(objective: Objective, sampling: SamplingConfig) -> None:
    """Raise FlowGRPOError if settings conflict with an objective on the log-probabilities of steps."""
    transition = transitions()[sampling.transition]
    if not transition.stochastic:
        raise FlowGRPOError(f"objective {objective.name} needs a stochastic transition: set sampling.transition=flow_sde.")
    if sampling.noise_level == 0:
        raise FlowGRPOError("sampling.noise_level=0 is the ODE, which has no log-probability to train: set it above 0.")
    if sampling.noise_level > transition.max_noise_level:
        raise FlowGRPOError(
            f"sampling.noise_level={sampling.noise_level}, but for {sampling.transition} it is at most {transition.max_noise_level:g}."
        )
    kinds = {objective.kl, *(anchor.kl for anchor in objective.anchors)}
    if "flow_grpo" in kinds and not transition.has_g:
        with_g = " or ".join(name for name, row in transitions().items() if row.has_g)
        raise FlowGRPOError(f"objective.kl=flow_grpo divides by the g of {with_g}; {sampling.transition} has none.")


def _check_on_final_latents(objective: Objective, sampling: SamplingConfig) -> None:
    """Raise FlowGRPOError if settings conflict with a forward-process objective, on the final latents of ODE rollouts."""
    if transitions()[sampling.transition].stochastic:
        raise FlowGRPOError(f"objective {objective.name} trains on final latents of the ODE: set sampling.transition=ode.")
    stepwise_kl = next(
        (kl for kl in (objective.kl, *(anchor.kl for anchor in objective.anchors)) if kl not in (None, "velocity")), None
    )
    if stepwise_kl is not None:
        raise FlowGRPOError(
            f"objective.kl={stepwise_kl} needs trained steps, {objective.name} has none: set objective.kl=velocity."
        )
    if objective.sigma_range[0] >= objective.sigma_range[1]:
        raise FlowGRPOError("objective.sigma_range must rise, for example [0, 1].")
    num_in_range = len(objective.steps_in_range(sampling.steps))
    if objective.sigma_distribution == "schedule" and num_in_range < objective.num_noise_levels:
        raise FlowGRPOError(
            f"objective.num_noise_levels={objective.num_noise_levels} with sigma_distribution=schedule, but sigma_range has "
            f"{num_in_range} of the {sampling.steps} sampling steps: set a wider sigma_range"
            f"{', or fewer noise levels' if num_in_range else ''}."
        )
    if objective.needs.rows_per_pair == 2 and not objective.shared_noise:
        raise FlowGRPOError(
            f"objective {objective.name} compares a pair at the same noise: set objective.shared_noise=true."
        )


def check_sampling_is_read(args: RunSettings) -> None:
    """Raise FlowGRPOError for a setting of `sampling` that is not the default and that the objective does not read."""
    if args.stepwise:
        return
    defaults = SamplingConfig(transition=args.sampling.transition)
    changed = (name for name in STEPWISE_SETTINGS if getattr(args.sampling, name) != getattr(defaults, name))
    if (setting := next(changed, None)) is not None:
        others = [name for name, section in section_types().items() if section.stepwise]
        raise FlowGRPOError(
            f"objective {args.objective.name} does not use sampling.{setting}; {', '.join(others[:-1])} and {others[-1]} do: remove "
            "it, or choose one of them by objective.name."
        )
