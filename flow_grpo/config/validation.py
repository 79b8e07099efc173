"""Checks across the settings of a config. Each raises ValueError: one sentence on the conflict and what to set instead."""

import math
from collections.abc import Iterable

from flow_grpo import methods
from flow_grpo.config.anchors import COPIES
from flow_grpo.config.memory_checks import check_offloading, check_zero
from flow_grpo.config.objective import ObjectiveConfig, readers
from flow_grpo.config.sections import SamplingConfig
from flow_grpo.config.settings import RunSettings
from flow_grpo.text import suggest

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")


def check_run(args: RunSettings) -> None:
    """Raise ValueError if settings of a run, or of one of its stages, conflict."""
    check_objective(args)
    check_sizes(args)
    check_window(args.sampling)
    check_kept_graphs(args)
    check_offloading(args)
    check_branches(args)
    check_sampling_is_read(args)
    check_full_finetuning(args)
    check_anchors(args)
    check_zero(args)


def check_trackers(names: Iterable[str]) -> None:
    """Raise ValueError for a tracker that does not exist."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"there is no tracker {name}.{suggest(name, list(TRACKERS))} Choose of {', '.join(TRACKERS)}, or trackers=[] for none."
            )


def check_sizes(args: RunSettings) -> None:
    """Raise ValueError if the sizes of a step do not fit together."""
    rows = args.prompts_per_step * args.images_per_prompt
    if args.prompts_per_step % args.updates:
        raise ValueError(
            f"updates={args.updates} does not divide prompts_per_step={args.prompts_per_step}: every update takes an equal "
            "share of the prompts."
        )
    if rows % min(args.microbatch, rows):
        raise ValueError(
            f"microbatch={args.microbatch} does not divide prompts_per_step x images_per_prompt = {rows}: all forward passes "
            "need one shape."
        )
    objective, passes, method = args.objective, args.updates * args.epochs, args.method
    pairs = method.rows_per_pair == 2
    if pairs and args.dataset is not None and (rows // 2) % args.updates:
        raise ValueError(f"updates={args.updates} does not divide the {rows // 2} pairs of a step.")
    if method.single_update and passes > 1:
        raise ValueError(
            f"objective {objective.name} has no ratio, so it is for one update on a rollout: set updates=1 and epochs=1."
        )
    if objective.has_auto_clip and passes == 1:
        raise ValueError("objective.clip_low=auto has no ratios to learn from: with one update on a rollout they are all 1.")
    if args.dataset is not None and args.dynamic_sampling_rounds:
        raise ValueError(
            f"dynamic_sampling_rounds={args.dynamic_sampling_rounds} with objective.dataset: given images are not drawn again; "
            "set dynamic_sampling_rounds=0."
        )
    if pairs and min(args.microbatch, rows) % 2:
        raise ValueError(f"microbatch={args.microbatch} is odd, but {objective.name} compares pairs: set an even one.")


def check_objective(args: RunSettings) -> None:
    """Raise ValueError if settings conflict with the objective."""
    objective, advantage, method = args.objective, args.objective.advantage, args.method
    if ":" not in advantage and advantage not in methods.ADVANTAGES:
        close = suggest(advantage, list(methods.ADVANTAGES))
        raise ValueError(f"there is no advantage {advantage}.{close} Choose one of {', '.join(methods.ADVANTAGES)}.")
    if method.stepwise:
        _check_stepwise(objective, method, args.sampling)
    else:
        _check_on_final_latents(objective, method, args.sampling)
    if objective.has_auto_clip and not method.auto_clip:
        raise ValueError(
            f"objective.clip_low=auto is calibrated at each trained step, for {', '.join(readers('clip_quantile'))}, not "
            f"{objective.name}."
        )
    _check_reward_shaping(args)
    if method.critic and advantage != "grpo":
        raise ValueError(
            f"objective.advantage={advantage} with {objective.name}: its critic makes the advantages; remove it."
        )


def _check_reward_shaping(args: RunSettings) -> None:
    """Raise ValueError if settings conflict with `reward_cap` or `diversity_weight`."""
    objective, method = args.objective, args.method
    unread = next((name for name in ("reward_cap", "diversity_weight") if getattr(objective, name) is not None), None)
    if unread and (method.critic or method.rows != "all"):
        raise ValueError(
            f"objective.{unread} is for advantages within a group, which {objective.name} does not train on: remove it."
        )
    if objective.diversity_weight is None:
        return
    if args.sampling.branches:
        raise ValueError(
            "objective.diversity_weight is of images, and sampling.branches compares branches: leave one of them out."
        )
    name = objective.diversity_weight
    reward = args.rewards.get(name)
    if reward is None or reward.weight:
        raise ValueError(f"objective.diversity_weight={name} is no reward of weight 0: add it by rewards.{name}=0.")


def _check_stepwise(objective: ObjectiveConfig, method: methods.Objective, s: SamplingConfig) -> None:
    """Raise ValueError if settings conflict with an objective on the log-probabilities of steps."""
    transition = methods.TRANSITIONS[s.transition]
    if not transition.stochastic:
        raise ValueError(f"objective {objective.name} needs a stochastic transition: set sampling.transition=flow_sde.")
    if s.noise_level == 0:
        raise ValueError("sampling.noise_level=0 is the ODE, which has no log-probability to train: set it above 0.")
    if s.noise_level > transition.max_noise_level:
        raise ValueError(
            f"sampling.noise_level={s.noise_level}, but for {s.transition} it is at most {transition.max_noise_level:g}."
        )
    if s.solver != "euler":
        raise ValueError(
            f"sampling.solver={s.solver} with objective {objective.name}: the steps around the trained ones are Euler's; "
            "set sampling.solver=euler, or a forward-process objective by objective.name."
        )
    kinds = {objective.kl, *(anchor.kl for anchor in objective.anchors)}
    if "flow_grpo" in kinds and not transition.has_g:
        with_g = " or ".join(name for name, one in methods.TRANSITIONS.items() if one.has_g)
        raise ValueError(f"objective.kl=flow_grpo divides by the g of {with_g}; {s.transition} has none.")
    if s.log_prob == "gaussian":
        return
    if method.gaussian:
        raise ValueError(f"objective {objective.name} needs Gaussian log-probabilities: set sampling.log_prob=gaussian.")
    if "k3" in kinds:
        raise ValueError("objective.kl=k3 is an estimate from log-probabilities: set sampling.log_prob=gaussian.")
    if objective.weighs_by_std:
        raise ValueError("objective.step_weight=std makes up for a Gaussian's 1 / std: set sampling.log_prob=gaussian.")


def _check_on_final_latents(objective: ObjectiveConfig, method: methods.Objective, s: SamplingConfig) -> None:
    """Raise ValueError if settings conflict with a forward-process objective, on the final latents of ODE rollouts."""
    if methods.TRANSITIONS[s.transition].stochastic:
        raise ValueError(f"objective {objective.name} trains on final latents of the ODE: set sampling.transition=ode.")
    if s.shared_initial_noise:
        raise ValueError(
            f"sampling.shared_initial_noise=true with objective {objective.name}: the ODE would draw the same "
            "image for a whole group."
        )
    other = next(
        (kl for kl in (objective.kl, *(anchor.kl for anchor in objective.anchors)) if kl not in (None, "velocity")), None
    )
    if other is not None:
        raise ValueError(f"objective.kl={other} needs trained steps, {objective.name} has none: set objective.kl=velocity.")
    if objective.sigma_range[0] >= objective.sigma_range[1]:
        raise ValueError("objective.sigma_range must rise, for example [0, 1].")
    if objective.sigma_distribution != "logit_normal" and (objective.logit_location, objective.logit_scale) != (0, 1):
        raise ValueError(
            f"objective.logit_location and logit_scale are for sigma_distribution=logit_normal, not "
            f"{objective.sigma_distribution}: remove them."
        )
    num_in_range = len(objective.steps_in_range(s.steps))
    if objective.sigma_distribution == "schedule" and num_in_range < objective.num_noise_levels:
        raise ValueError(
            f"objective.num_noise_levels={objective.num_noise_levels} with sigma_distribution=schedule, but sigma_range has "
            f"{num_in_range} of the {s.steps} sampling steps: set a wider sigma_range"
            f"{', or fewer noise levels' if num_in_range else ''}."
        )
    if method.rows_per_pair == 2 and not objective.shared_noise:
        raise ValueError(f"objective {objective.name} compares a pair at the same noise: set objective.shared_noise=true.")


def check_sampling_is_read(args: RunSettings) -> None:
    """Raise ValueError for a setting of `sampling` that is not the default and that the objective does not read."""
    defaults = SamplingConfig()
    for setting in SamplingConfig.model_fields:
        changed = getattr(args.sampling, setting) != getattr(defaults, setting)
        if changed and not methods.reads_sampling(args.method, setting):
            kind = "objectives on steps" if setting in methods.STEPWISE_SAMPLING else "objectives on final latents"
            raise ValueError(
                f"objective {args.objective.name} does not use sampling.{setting}, which is for {kind}: remove it, or choose one by "
                "objective.name."
            )


def check_kept_graphs(args: RunSettings) -> None:
    """Raise ValueError if settings conflict with `sampling.keep_graphs`."""
    if not args.sampling.keep_graphs:
        return
    if args.updates * args.epochs > 1:
        raise ValueError(
            f"sampling.keep_graphs with updates={args.updates} and epochs={args.epochs}: after one update a rollout's graphs are of "
            "former weights; set updates=1 and epochs=1, or keep_graphs=false."
        )
    if args.dynamic_sampling_rounds:
        raise ValueError(
            f"sampling.keep_graphs with dynamic_sampling_rounds={args.dynamic_sampling_rounds}: the graphs of all rounds would stay "
            "in memory; set dynamic_sampling_rounds=0, or keep_graphs=false."
        )
    if args.memory.shard is not None:
        raise ValueError(
            f"sampling.keep_graphs with memory.shard={args.memory.shard}: processes that share weights or gradients run backward "
            "equally often, but have different numbers of graphs with signal; set keep_graphs=false."
        )


def check_branches(args: RunSettings) -> None:
    """Raise ValueError if settings conflict with `sampling.branches`."""
    sampling = args.sampling
    if not sampling.branches:
        return
    if math.prod(sampling.branches) != args.images_per_prompt:
        raise ValueError(
            f"sampling.branches={sampling.branches} make {math.prod(sampling.branches)} images of a prompt, but images_per_prompt is "
            f"{args.images_per_prompt}: set images_per_prompt={math.prod(sampling.branches)}."
        )
    if len(sampling.branches) > sampling.num_trained_steps:
        raise ValueError(
            f"sampling.branches={sampling.branches} part at {len(sampling.branches)} steps, but the window has "
            f"{sampling.num_trained_steps}: set sampling.window.size={len(sampling.branches)}."
        )
    if sampling.shared_initial_noise:
        raise ValueError(
            f"sampling.shared_initial_noise is branches=[{args.images_per_prompt}]: leave out one of it and branches={sampling.branches}."
        )
    if args.method.critic:
        raise ValueError(
            f"sampling.branches={sampling.branches} with {args.objective.name}: its critic makes the advantages of steps; leave it out."
        )


def check_full_finetuning(args: RunSettings) -> None:
    """Raise ValueError if settings conflict with `lora: null`, which trains all weights."""
    if args.lora is not None:
        return
    if args.method.old_policy:
        raise ValueError(
            f"objective {args.objective.name} keeps its old policy as a second LoRA, and lora=null has none: set lora={{rank: 32}}."
        )
    if args.memory.quantize is not None:
        raise ValueError(
            f"memory.quantize={args.memory.quantize} is for base weights that are not trained, and lora=null trains all of them: "
            "leave one of the two out."
        )
    if args.memory.shard == "fsdp2" and args.optimizer.name == "adamw_8bit":
        raise ValueError(
            "optimizer.name=adamw_8bit does not support sharded weights: with lora=null set memory.shard=false, or adamw."
        )


def check_anchors(args: RunSettings) -> None:
    """Raise ValueError if settings conflict with the anchors of the objective."""
    objective, kinds = args.objective, {anchor.to for anchor in args.objective.anchors}
    gates = {anchor.gate for anchor in objective.anchors} - {"none"}
    copied = sorted(kinds & set(COPIES))
    if copied and args.lora is None:
        raise ValueError(
            f"objective.anchors: {copied[0]} is a second LoRA, and lora=null has none: set lora={{rank: 32}}, or to: base."
        )
    if gates and args.dataset is not None:
        raise ValueError(
            f"objective.anchors: gate={min(gates)} needs rewards; images from a dataset have none: set gate=none."
        )
    if "advantage" in gates and args.method.critic:
        raise ValueError(
            f"objective.anchors: gate=advantage needs an advantage for each image, {objective.name} has one for each step: "
            "set gate=none."
        )
    if "advantage" in gates and args.sampling.branches:
        raise ValueError(
            "objective.anchors: gate=advantage needs an advantage for each image, sampling.branches has one for each step: "
            "set gate=none."
        )
    if "disagreement" in gates and all(r.weight or name == objective.diversity_weight for name, r in args.rewards.items()):
        raise ValueError(
            "objective.anchors: gate=disagreement compares the trained reward with rewards of weight 0: add one, such as "
            "rewards.clip=0."
        )


def check_window(sampling: SamplingConfig) -> None:
    """Raise ValueError if the window does not fit into the schedule."""
    window = sampling.window
    transition = methods.TRANSITIONS[sampling.transition]
    if not transition.stochastic:
        return
    last = sampling.steps - 2 if window.last_step is None else window.last_step
    latest = sampling.steps - 1 if transition.noise_at_end else sampling.steps - 2
    if not window.first_step <= last <= latest:
        raise ValueError(
            f"sampling.window trains steps {window.first_step} to {last}, but with {sampling.steps} sampling steps of "
            f"{sampling.transition} the trainable ones are 0 to {latest}."
        )
    if window.schedule != "all" and window.first_step + window.size - 1 > last:
        raise ValueError(f"sampling.window.size={window.size} does not fit into steps {window.first_step} to {last}.")
