"""Checks of the section `objective`, and of the settings of `sampling` that an objective reads. Each raises ValueError."""

from flow_grpo import methods
from flow_grpo.config.objective import SETTINGS, ObjectiveConfig
from flow_grpo.config.objective_types import readers
from flow_grpo.config.sampling import SamplingConfig
from flow_grpo.config.settings import RunSettings
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest


def check_objective(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with the objective."""
    objective, advantage, method = args.objective, args.objective.advantage, args.method
    if not methods.is_custom(advantage) and advantage not in methods.ADVANTAGES:
        close = suggest(advantage, list(methods.ADVANTAGES))
        raise FlowGRPOError(f"there is no advantage {advantage}.{close} Choose one of {', '.join(methods.ADVANTAGES)}.")
    if method.stepwise:
        _check_stepwise(objective, method, args.sampling)
    else:
        _check_on_final_latents(objective, method, args.sampling)
    if objective.has_auto_clip and not method.auto_clip:
        raise FlowGRPOError(
            f"objective.clip_low=auto is calibrated at each trained step, for {', '.join(readers('clip_quantile'))}, not "
            f"{objective.name}."
        )
    _check_reward_shaping(args)
    if methods.is_custom(objective.name):
        _check_custom_settings(args)


def _check_custom_settings(args: RunSettings) -> None:
    """Raise ValueError for a setting that a user's own function does not read where it is computed, on steps or on final latents."""
    objective, is_stepwise = args.objective, args.method.stepwise
    unread = methods.CUSTOM_FORWARD if is_stepwise else methods.CUSTOM_STEPWISE
    names = {name for group in unread for name in SETTINGS[group].model_fields} - set(ObjectiveConfig.model_fields)
    changed = next((name for name in objective.changed() if name in names), None)
    if changed is not None:
        raise FlowGRPOError(
            f"objective {objective.name} does not use {changed}: with sampling.transition={args.sampling.transition} it is computed on "
            f"{'steps' if is_stepwise else 'final latents'}. Remove it."
        )


def _check_reward_shaping(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with `advantage`, `reward_cap` or `diversity_weight`."""
    objective, method = args.objective, args.method
    unread = next((name for name in objective.changed() if name in methods.ADVANTAGE_SETTINGS), None)
    if unread and not method.takes_advantage:
        instead = (
            "its critic makes the advantages" if method.critic else "it trains on the best of a group, without advantages"
        )
        raise FlowGRPOError(f"objective {objective.name} does not use {unread}: {instead}. Remove it.")
    if objective.diversity_weight is None:
        return
    if args.sampling.branches:
        raise FlowGRPOError(
            "objective.diversity_weight is of images, and sampling.branches compares branches: leave one of them out."
        )
    name = objective.diversity_weight
    reward = args.rewards.get(name)
    if reward is None or reward.weight:
        raise FlowGRPOError(f"objective.diversity_weight={name} is no reward of weight 0: add it by rewards.{name}=0.")


def _check_stepwise(objective: ObjectiveConfig, method: methods.Objective, sampling: SamplingConfig) -> None:
    """Raise FlowGRPOError if settings conflict with an objective on the log-probabilities of steps."""
    transition = methods.TRANSITIONS[sampling.transition]
    if not transition.stochastic:
        raise FlowGRPOError(f"objective {objective.name} needs a stochastic transition: set sampling.transition=flow_sde.")
    if sampling.noise_level == 0:
        raise FlowGRPOError("sampling.noise_level=0 is the ODE, which has no log-probability to train: set it above 0.")
    if sampling.noise_level > transition.max_noise_level:
        raise FlowGRPOError(
            f"sampling.noise_level={sampling.noise_level}, but for {sampling.transition} it is at most {transition.max_noise_level:g}."
        )
    if sampling.solver == "heun":
        raise FlowGRPOError(
            f"sampling.solver=heun takes two velocities a step, too many for the few steps outside the window of {objective.name}: "
            "set dpm_2m, ab2 or euler."
        )
    kinds = {objective.kl, *(anchor.kl for anchor in objective.anchors)}
    if "flow_grpo" in kinds and not transition.has_g:
        with_g = " or ".join(name for name, row in methods.TRANSITIONS.items() if row.has_g)
        raise FlowGRPOError(f"objective.kl=flow_grpo divides by the g of {with_g}; {sampling.transition} has none.")
    if sampling.log_prob == "gaussian":
        return
    if method.gaussian:
        raise FlowGRPOError(f"objective {objective.name} needs Gaussian log-probabilities: set sampling.log_prob=gaussian.")
    if "k3" in kinds:
        raise FlowGRPOError("objective.kl=k3 is an estimate from log-probabilities: set sampling.log_prob=gaussian.")
    if objective.weighs_by_std:
        raise FlowGRPOError("objective.step_weight=std makes up for a Gaussian's 1 / std: set sampling.log_prob=gaussian.")


def _check_on_final_latents(objective: ObjectiveConfig, method: methods.Objective, sampling: SamplingConfig) -> None:
    """Raise FlowGRPOError if settings conflict with a forward-process objective, on the final latents of ODE rollouts."""
    if methods.TRANSITIONS[sampling.transition].stochastic:
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
    if objective.sigma_distribution != "logit_normal" and (objective.logit_location, objective.logit_scale) != (0, 1):
        raise FlowGRPOError(
            f"objective.logit_location and logit_scale are for sigma_distribution=logit_normal, not "
            f"{objective.sigma_distribution}: remove them."
        )
    num_in_range = len(objective.steps_in_range(sampling.steps))
    if objective.sigma_distribution == "schedule" and num_in_range < objective.num_noise_levels:
        raise FlowGRPOError(
            f"objective.num_noise_levels={objective.num_noise_levels} with sigma_distribution=schedule, but sigma_range has "
            f"{num_in_range} of the {sampling.steps} sampling steps: set a wider sigma_range"
            f"{', or fewer noise levels' if num_in_range else ''}."
        )
    if method.rows_per_pair == 2 and not objective.shared_noise:
        raise FlowGRPOError(
            f"objective {objective.name} compares a pair at the same noise: set objective.shared_noise=true."
        )


def check_sampling_is_read(args: RunSettings) -> None:
    """Raise ValueError for a setting of `sampling` that is not the default and that the objective does not read."""
    defaults = SamplingConfig(transition=args.sampling.transition)
    for setting in SamplingConfig.model_fields:
        changed = getattr(args.sampling, setting) != getattr(defaults, setting)
        if changed and not methods.reads_sampling(args.method, setting):
            others = [name for name, row in methods.OBJECTIVES.items() if methods.reads_sampling(row, setting)]
            raise FlowGRPOError(
                f"objective {args.objective.name} does not use sampling.{setting}; {', '.join(others[:-1])} and {others[-1]} do: remove "
                "it, or choose one of them by objective.name."
            )
