"""What in a config goes together: each check says in one sentence what does not, and what to set instead."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.sections import ObjectiveConfig, SamplingConfig

ON_STEPS = ("grpo", "reinforce", "grpo_guard", "dppo", "ppo")
ON_FINALS = ("awm", "nft", "sft", "dpo")
ZERO_WITHOUT_ADVANTAGE = (
    "grpo",
    "reinforce",
    "grpo_guard",
    "dppo",
    "awm",
)  # the loss of a row is 0 where its advantage is 0
ADVANTAGES = ("grpo", "batch_std", "dr_grpo", "rloo", "reinforce_pp", "gdpo", "rank")
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
    o, passes = args.objective, args.updates * args.epochs
    if o.name == "dpo" and o.data is not None and (rows // 2) % args.updates:
        raise ValueError(f"updates={args.updates} does not divide the {rows // 2} pairs of a step.")
    if o.name == "reinforce" and passes > 1:
        raise ValueError(
            "objective reinforce has no ratio, so it is for one update on a rollout: set updates=1 and epochs=1."
        )
    if "auto" in (o.clip_low, o.clip_high) and passes == 1:
        raise ValueError("objective.clip_low=auto has no ratios to learn from: with one update on a rollout they are all 1.")
    if o.data is not None and args.resample:
        raise ValueError(f"resample={args.resample} with objective.data: given images are not drawn again; set resample=0.")
    if args.objective.name == "dpo" and min(args.microbatch, rows) % 2:
        raise ValueError(f"microbatch={args.microbatch} is odd, but dpo compares pairs of rows: set an even one.")


def check_objective(o: "ObjectiveConfig", s: "SamplingConfig") -> None:
    """What an objective needs of the sampler, and which of its settings go together."""
    known = (*ON_STEPS, *ON_FINALS)
    if ":" not in o.name and o.name not in known:
        raise ValueError(f"there is no objective {o.name}.{suggest(o.name, list(known))} Choose one of {', '.join(known)}.")
    if ":" not in o.advantage and o.advantage not in ADVANTAGES:
        close = suggest(o.advantage, list(ADVANTAGES))
        raise ValueError(f"there is no advantage {o.advantage}.{close} Choose one of {', '.join(ADVANTAGES)}.")
    on_steps = o.on_steps if o.on_steps is not None else s.transition != "ode"
    if on_steps and s.transition == "ode":
        raise ValueError(f"objective {o.name} needs a stochastic transition: set sampling.transition to cps or flow_sde.")
    if on_steps and s.noise_level == 0:
        raise ValueError("sampling.noise_level=0 is the ODE, which has no log-probability to train: set it above 0.")
    if s.transition == "cps" and s.noise_level > 1:
        raise ValueError(f"sampling.noise_level={s.noise_level}, but for cps it is at most 1.")
    if not on_steps and s.transition != "ode":
        raise ValueError(f"objective {o.name} trains on final latents, which the ODE draws: set sampling.transition=ode.")
    if not on_steps and s.shared_start:
        raise ValueError(
            f"sampling.shared_start=true with objective {o.name}: the ODE would draw the same image for a whole group."
        )
    if on_steps and s.solver != "euler":
        raise ValueError(
            f"sampling.solver={s.solver} with objective {o.name}: the steps around the trained ones are Euler's."
        )
    if o.data is not None and o.name not in ("sft", "dpo"):
        raise ValueError(f"objective.data is for sft and dpo; {o.name} draws its own images: leave it out.")
    if on_steps and o.name in ("grpo_guard", "dppo") and s.log_prob != "gaussian":
        raise ValueError(f"objective {o.name} is made for Gaussian log-probabilities: set sampling.log_prob=gaussian.")
    if on_steps and o.kl == "k3" and s.log_prob != "gaussian":
        raise ValueError("objective.kl=k3 is an estimate from log-probabilities: set sampling.log_prob=gaussian.")
    if on_steps and o.step_weight == "std" and s.log_prob != "gaussian":
        raise ValueError("objective.step_weight=std makes up for a Gaussian's 1 / std: set sampling.log_prob=gaussian.")
    if on_steps and o.kl == "flow_grpo" and s.transition not in ("flow_sde", "dance_sde"):
        raise ValueError(f"objective.kl=flow_grpo divides by the g of flow_sde or dance_sde; {s.transition} has none.")
    if o.name == "grpo_guard" and o.step_weight != "uniform":
        raise ValueError("objective.step_weight=std with grpo_guard: its loss is of one scale at every step already.")
    if not on_steps and o.kl not in (None, "velocity"):
        raise ValueError(f"objective.kl={o.kl} is of trained steps, and {o.name} has none: set objective.kl=velocity.")
    clipped = o.name in ("grpo", "grpo_guard", "ppo")
    if "auto" in (o.clip_low, o.clip_high) and not clipped:
        raise ValueError(
            f"objective.clip_low=auto is calibrated at each trained step, for grpo, grpo_guard and ppo, not {o.name}."
        )
    if o.name == "ppo" and o.advantage != "grpo":
        raise ValueError(f"objective.advantage={o.advantage} with ppo: its critic makes the advantages; leave it out.")
    if o.sigma_range[0] >= o.sigma_range[1]:
        raise ValueError("objective.sigma_range must rise, for example [0, 1].")


def check_whole(args: "FlowGRPOConfig") -> None:
    """What does not go with `lora: null`, which trains all weights."""
    if args.lora is not None:
        return
    if args.objective.name == "nft":
        raise ValueError("objective nft keeps its old policy as a second LoRA, and lora=null has none: set lora={rank: 32}.")
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
    if s.transition == "ode":
        return
    last = s.steps - 2 if w.last is None else w.last
    latest = s.steps - 2 if s.transition in ("cps", "exact_sde") else s.steps - 1
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
