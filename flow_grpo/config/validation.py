"""What in a config goes together: each check says in one sentence what does not, and what to set instead."""

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
    """All checks across the settings of a run, or of one of its stages. ValueError: what does not go together."""
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
    o, passes, method = args.objective, args.updates * args.epochs, args.method
    pairs = method.rows_per_pair == 2
    if pairs and args.dataset is not None and (rows // 2) % args.updates:
        raise ValueError(f"updates={args.updates} does not divide the {rows // 2} pairs of a step.")
    if method.single_update and passes > 1:
        raise ValueError(
            f"objective {o.name} has no ratio, so it is for one update on a rollout: set updates=1 and epochs=1."
        )
    if o.has_auto_clip and passes == 1:
        raise ValueError("objective.clip_low=auto has no ratios to learn from: with one update on a rollout they are all 1.")
    if args.dataset is not None and args.dynamic_sampling_rounds:
        raise ValueError(
            f"dynamic_sampling_rounds={args.dynamic_sampling_rounds} with objective.dataset: given images are not drawn again; "
            "set dynamic_sampling_rounds=0."
        )
    if pairs and min(args.microbatch, rows) % 2:
        raise ValueError(f"microbatch={args.microbatch} is odd, but {o.name} compares pairs of rows: set an even one.")


def check_objective(args: RunSettings) -> None:
    """What an objective needs of the sampler, and which of its settings go together."""
    o, method = args.objective, args.method
    if ":" not in o.advantage and o.advantage not in methods.ADVANTAGES:
        close = suggest(o.advantage, list(methods.ADVANTAGES))
        raise ValueError(f"there is no advantage {o.advantage}.{close} Choose one of {', '.join(methods.ADVANTAGES)}.")
    if method.stepwise:
        _check_stepwise(o, method, args.sampling)
    else:
        _check_on_final_latents(o, method, args.sampling)
    if o.has_auto_clip and not method.auto_clip:
        raise ValueError(
            f"objective.clip_low=auto is calibrated at each trained step, for {', '.join(readers('clip_quantile'))}, not {o.name}."
        )
    _check_reward_shaping(args)
    if method.critic and o.advantage != "grpo":
        raise ValueError(f"objective.advantage={o.advantage} with {o.name}: its critic makes the advantages; leave it out.")


def _check_reward_shaping(args: RunSettings) -> None:
    """What is done to rewards and advantages within a group."""
    o, method = args.objective, args.method
    unread = "reward_cap" if o.reward_cap is not None else "diversity_weight" if o.diversity_weight is not None else None
    if unread and (method.critic or method.rows != "all"):
        raise ValueError(
            f"objective.{unread} is for advantages within a group, which {o.name} does not train on: leave it out, or choose grpo."
        )
    if o.diversity_weight is None:
        return
    if args.sampling.branches:
        raise ValueError(
            "objective.diversity_weight is of images, and sampling.branches compares branches: leave one of them out."
        )
    reward = args.rewards.get(o.diversity_weight)
    if reward is None or reward.weight:
        raise ValueError(
            f"objective.diversity_weight={o.diversity_weight} is no reward of weight 0: add it by rewards.{o.diversity_weight}=0."
        )


def _check_stepwise(o: ObjectiveConfig, method: methods.Objective, s: SamplingConfig) -> None:
    """An objective on the log-probabilities of steps."""
    transition = methods.TRANSITIONS[s.transition]
    if not transition.stochastic:
        raise ValueError(f"objective {o.name} needs a stochastic transition: set sampling.transition to cps or flow_sde.")
    if s.noise_level == 0:
        raise ValueError("sampling.noise_level=0 is the ODE, which has no log-probability to train: set it above 0.")
    if s.noise_level > transition.max_noise_level:
        raise ValueError(
            f"sampling.noise_level={s.noise_level}, but for {s.transition} it is at most {transition.max_noise_level:g}."
        )
    if s.solver != "euler":
        raise ValueError(
            f"sampling.solver={s.solver} with objective {o.name}: the steps around the trained ones are Euler's; set "
            "sampling.solver=euler, or a forward-process objective by objective.name."
        )
    kinds = {o.kl, *(anchor.kl for anchor in o.anchors)}
    if "flow_grpo" in kinds and not transition.has_g:
        with_g = " or ".join(name for name, one in methods.TRANSITIONS.items() if one.has_g)
        raise ValueError(f"objective.kl=flow_grpo divides by the g of {with_g}; {s.transition} has none.")
    if s.log_prob == "gaussian":
        return
    if method.gaussian:
        raise ValueError(f"objective {o.name} is made for Gaussian log-probabilities: set sampling.log_prob=gaussian.")
    if "k3" in kinds:
        raise ValueError("objective.kl=k3 is an estimate from log-probabilities: set sampling.log_prob=gaussian.")
    if o.weighs_by_std:
        raise ValueError("objective.step_weight=std makes up for a Gaussian's 1 / std: set sampling.log_prob=gaussian.")


def _check_on_final_latents(o: ObjectiveConfig, method: methods.Objective, s: SamplingConfig) -> None:
    """A forward-process objective, on the final latents of ODE rollouts."""
    if methods.TRANSITIONS[s.transition].stochastic:
        raise ValueError(f"objective {o.name} trains on final latents, which the ODE draws: set sampling.transition=ode.")
    if s.shared_initial_noise:
        raise ValueError(
            f"sampling.shared_initial_noise=true with objective {o.name}: the ODE would draw the same image for a whole group."
        )
    other = next((kl for kl in (o.kl, *(anchor.kl for anchor in o.anchors)) if kl not in (None, "velocity")), None)
    if other is not None:
        raise ValueError(f"objective.kl={other} is of trained steps, and {o.name} has none: set objective.kl=velocity.")
    if o.sigma_range[0] >= o.sigma_range[1]:
        raise ValueError("objective.sigma_range must rise, for example [0, 1].")
    if o.sigma_distribution != "logit_normal" and (o.logit_location, o.logit_scale) != (0, 1):
        raise ValueError(
            f"objective.logit_location and logit_scale are for sigma_distribution=logit_normal, not {o.sigma_distribution}: remove them."
        )
    num_in_range = len(o.steps_in_range(s.steps))
    if o.sigma_distribution == "schedule" and num_in_range < o.num_noise_levels:
        raise ValueError(
            f"objective.num_noise_levels={o.num_noise_levels} with sigma_distribution=schedule, but sigma_range has {num_in_range} of the "
            f"{s.steps} sampling steps: set a wider sigma_range{', or fewer noise levels' if num_in_range else ''}."
        )
    if method.rows_per_pair == 2 and not o.shared_noise:
        raise ValueError(f"objective {o.name} compares a pair at the same noise: set objective.shared_noise=true.")


def check_sampling_is_read(args: RunSettings) -> None:
    """Refuse a setting of `sampling` that is not the default and that the objective does not read."""
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
    """What does not go with graphs that are kept from the rollout to the update."""
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
    """What does not go with a group that is a tree."""
    s = args.sampling
    if not s.branches:
        return
    if math.prod(s.branches) != args.images_per_prompt:
        raise ValueError(
            f"sampling.branches={s.branches} make {math.prod(s.branches)} images of a prompt, but images_per_prompt is "
            f"{args.images_per_prompt}: set images_per_prompt={math.prod(s.branches)}."
        )
    if len(s.branches) > s.num_trained_steps:
        raise ValueError(
            f"sampling.branches={s.branches} part at {len(s.branches)} steps, but the window has {s.num_trained_steps}: set "
            f"sampling.window.size={len(s.branches)}."
        )
    if s.shared_initial_noise:
        raise ValueError(
            f"sampling.shared_initial_noise is branches=[{args.images_per_prompt}]: leave out one of it and branches={s.branches}."
        )
    if args.method.critic:
        raise ValueError(
            f"sampling.branches={s.branches} with {args.objective.name}: its critic makes the advantages of steps; leave it out."
        )


def check_full_finetuning(args: RunSettings) -> None:
    """What does not go with `lora: null`, which trains all weights."""
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
            "optimizer.name=adamw_8bit can't take weights in shares: with lora=null set memory.shard=false, or adamw."
        )


def check_anchors(args: RunSettings) -> None:
    """What does not go with the anchors of an objective."""
    o, kinds = args.objective, {anchor.to for anchor in args.objective.anchors}
    gates = {anchor.gate for anchor in o.anchors} - {"none"}
    copied = sorted(kinds & set(COPIES))
    if copied and args.lora is None:
        raise ValueError(
            f"objective.anchors: {copied[0]} is a second LoRA, and lora=null has none: set lora={{rank: 32}}, or to: base."
        )
    if gates and args.dataset is not None:
        raise ValueError(
            f"objective.anchors: gate={min(gates)} goes by rewards, which given images have none of: set gate=none."
        )
    if "advantage" in gates and args.method.critic:
        raise ValueError(
            f"objective.anchors: gate=advantage is of an advantage for each image, and {o.name} has one for each step: set gate=none."
        )
    if "advantage" in gates and args.sampling.branches:
        raise ValueError(
            "objective.anchors: gate=advantage is of an advantage for each image, and sampling.branches has one for each step: set "
            "gate=none."
        )
    if "disagreement" in gates and all(r.weight or name == o.diversity_weight for name, r in args.rewards.items()):
        raise ValueError(
            "objective.anchors: gate=disagreement compares the trained reward with rewards of weight 0: add one, such as "
            "rewards.clip=0."
        )


def check_window(s: SamplingConfig) -> None:
    """Raise ValueError if the window does not fit into the schedule."""
    w = s.window
    transition = methods.TRANSITIONS[s.transition]
    if not transition.stochastic:
        return
    last = s.steps - 2 if w.last_step is None else w.last_step
    latest = s.steps - 1 if transition.noise_at_end else s.steps - 2
    if not w.first_step <= last <= latest:
        raise ValueError(
            f"sampling.window trains steps {w.first_step} to {last}, but with {s.steps} sampling steps of {s.transition} the "
            f"trainable ones are 0 to {latest}."
        )
    if w.schedule != "all" and w.first_step + w.size - 1 > last:
        raise ValueError(f"sampling.window.size={w.size} does not fit into steps {w.first_step} to {last}.")
