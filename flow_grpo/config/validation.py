"""What in a config goes together: each check says in one sentence what does not, and what to set instead."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from flow_grpo import methods

if TYPE_CHECKING:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.config.sections import ObjectiveConfig, SamplingConfig

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")


def check_trackers(names: Iterable[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"there is no tracker {name}.{suggest(name, list(TRACKERS))} Choose of {', '.join(TRACKERS)}, or trackers=[] for none."
            )


def check_sizes(args: "FlowGRPOConfig") -> None:
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
    if pairs and o.data is not None and (rows // 2) % args.updates:
        raise ValueError(f"updates={args.updates} does not divide the {rows // 2} pairs of a step.")
    if method.single_update and passes > 1:
        raise ValueError(
            f"objective {o.name} has no ratio, so it is for one update on a rollout: set updates=1 and epochs=1."
        )
    if "auto" in (o.clip_low, o.clip_high) and passes == 1:
        raise ValueError("objective.clip_low=auto has no ratios to learn from: with one update on a rollout they are all 1.")
    if o.data is not None and args.resample:
        raise ValueError(f"resample={args.resample} with objective.data: given images are not drawn again; set resample=0.")
    if pairs and min(args.microbatch, rows) % 2:
        raise ValueError(f"microbatch={args.microbatch} is odd, but {o.name} compares pairs of rows: set an even one.")


def check_objective(o: "ObjectiveConfig", s: "SamplingConfig") -> None:
    """What an objective needs of the sampler, and which of its settings go together."""
    for kind, name, table in (("objective", o.name, methods.OBJECTIVES), ("advantage", o.advantage, methods.ADVANTAGES)):
        if ":" not in name and name not in table:
            close = suggest(name, list(table))
            raise ValueError(f"there is no {kind} {name}.{close} Choose one of {', '.join(table)}.")
    transition = methods.TRANSITIONS[s.transition]
    method = methods.objective(o.name, transition.stochastic)
    on_steps = method.stepwise
    if on_steps and not transition.stochastic:
        raise ValueError(f"objective {o.name} needs a stochastic transition: set sampling.transition to cps or flow_sde.")
    if on_steps and s.noise_level == 0:
        raise ValueError("sampling.noise_level=0 is the ODE, which has no log-probability to train: set it above 0.")
    if transition.stochastic and s.noise_level > transition.max_noise_level:
        raise ValueError(
            f"sampling.noise_level={s.noise_level}, but for {s.transition} it is at most {transition.max_noise_level:g}."
        )
    if not on_steps and transition.stochastic:
        raise ValueError(f"objective {o.name} trains on final latents, which the ODE draws: set sampling.transition=ode.")
    if not on_steps and s.shared_start:
        raise ValueError(
            f"sampling.shared_start=true with objective {o.name}: the ODE would draw the same image for a whole group."
        )
    if on_steps and s.solver != "euler":
        raise ValueError(
            f"sampling.solver={s.solver} with objective {o.name}: the steps around the trained ones are Euler's."
        )
    if o.data is not None and not method.offline:
        raise ValueError(f"objective.data is {_readers('objective', 'data')}; {o.name} draws its own images: leave it out.")
    if method.gaussian and s.log_prob != "gaussian":
        raise ValueError(f"objective {o.name} is made for Gaussian log-probabilities: set sampling.log_prob=gaussian.")
    if on_steps and o.kl == "k3" and s.log_prob != "gaussian":
        raise ValueError("objective.kl=k3 is an estimate from log-probabilities: set sampling.log_prob=gaussian.")
    if on_steps and o.step_weight == "std" and s.log_prob != "gaussian":
        raise ValueError("objective.step_weight=std makes up for a Gaussian's 1 / std: set sampling.log_prob=gaussian.")
    if on_steps and o.kl == "flow_grpo" and not transition.has_g:
        with_g = " or ".join(name for name, one in methods.TRANSITIONS.items() if one.has_g)
        raise ValueError(f"objective.kl=flow_grpo divides by the g of {with_g}; {s.transition} has none.")
    if on_steps and o.step_weight != "uniform" and not methods.reads(method, "objective", "step_weight"):
        raise ValueError(
            f"objective.step_weight is {_readers('objective', 'step_weight')}, and {o.name} does not read it: leave it out."
        )
    if not on_steps and o.kl not in (None, "velocity"):
        raise ValueError(f"objective.kl={o.kl} is of trained steps, and {o.name} has none: set objective.kl=velocity.")
    if "auto" in (o.clip_low, o.clip_high) and not method.auto_clip:
        readers = _readers("objective", "clip_quantile")
        raise ValueError(f"objective.clip_low=auto is calibrated at each trained step, {readers}, not {o.name}.")
    if method.critic and o.advantage != "grpo":
        raise ValueError(f"objective.advantage={o.advantage} with {o.name}: its critic makes the advantages; leave it out.")
    if o.sigma_range[0] >= o.sigma_range[1]:
        raise ValueError("objective.sigma_range must rise, for example [0, 1].")


def check_unused_settings(args: "FlowGRPOConfig") -> None:
    """Refuse a setting of `objective` or `sampling` that is not the default and that the objective does not read (ValueError).

    One's own function is not asked, as its name is often set over the config of another objective.
    """
    if args.stages:
        given = [(part, stage) for stage, (_, part) in zip(args.stages, args.resolved_stages(), strict=True)]
    else:
        given = [(args, {"objective": args.objective.changed(), "sampling": args.sampling.changed()})]
    for part, sections in given:
        name, method = part.objective.name, part.method
        pairs = [(section, setting) for section in ("objective", "sampling") for setting in sections.get(section) or ()]
        unread = next((pair for pair in pairs if ":" not in name and not methods.reads(method, *pair)), None)
        if unread is not None:
            section, setting = unread
            first = f"name: {name}" if section == "objective" else f"transition: {part.sampling.transition}"
            raise ValueError(
                f"{section}.{setting} is {_readers(section, setting)}, and {name} does not read it: leave it out, or give the whole "
                f"section, {section}={{{first}}}."
            )


def _readers(section: str, setting: str) -> str:
    """For which objectives a setting is."""
    if section == "sampling":
        where = "trained steps" if setting in methods.STEPWISE_SAMPLING else "the ODE of objectives on final latents"
        return f"a setting of {where}"
    names = list(methods.readers(setting))
    if not names:
        return "for one's own function"
    return f"for {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"for {names[0]}"


def check_whole(args: "FlowGRPOConfig") -> None:
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


def check_zero(args: "FlowGRPOConfig") -> None:
    """What does not go with DeepSpeed's ZeRO."""
    if args.memory.shard not in ("zero1", "zero2"):
        return
    if args.optimizer.name != "adamw":
        raise ValueError(
            f"memory.shard={args.memory.shard} shares out AdamW's moments in float32: set optimizer.name=adamw."
        )
    if args.dtype == "fp16":
        raise ValueError(f"memory.shard={args.memory.shard} has no loss scale, which dtype=fp16 needs: set bf16, or fsdp2.")


def check_window(o: "ObjectiveConfig", s: "SamplingConfig") -> None:
    w = s.window
    transition = methods.TRANSITIONS[s.transition]
    if not transition.stochastic:
        return
    last = s.steps - 2 if w.last is None else w.last
    latest = s.steps - 1 if transition.noise_at_end else s.steps - 2
    if not w.first <= last <= latest:
        raise ValueError(
            f"sampling.window trains steps {w.first} to {last}, but with {s.steps} sampling steps of {s.transition} the "
            f"trainable ones are 0 to {latest}."
        )
    if w.kind != "all" and w.first + w.size - 1 > last:
        raise ValueError(f"sampling.window.size={w.size} does not fit into steps {w.first} to {last}.")


def suggest(word: str, known: Mapping[str, str] | Collection[str]) -> str:
    """A question with the known word that is most like this one; a mapping says what to call it."""
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f" Did you mean {known[close[0]] if isinstance(known, Mapping) else close[0]}?" if close else ""
