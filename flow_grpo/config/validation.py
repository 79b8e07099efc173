"""Checks across the settings of a config. Each raises ValueError: one sentence on the conflict and what to set instead."""

from collections.abc import Iterable

from flow_grpo.config.memory_checks import check_cuda_graphs, check_layerwise_casting, check_offloading
from flow_grpo.config.objective_checks import check_objective, check_sampling_is_read
from flow_grpo.config.sampling import SamplingConfig, transitions
from flow_grpo.config.sections import PromptSkippingConfig
from flow_grpo.config.settings import RunSettings
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")


def check_run(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings of a run, or of one of its stages, conflict."""
    check_sampling_is_read(args)
    check_objective(args)
    check_sizes(args)
    check_window(args.sampling)
    check_kept_graphs(args)
    check_offloading(args)
    check_cuda_graphs(args)
    check_layerwise_casting(args)
    check_full_finetuning(args)
    check_anchors(args)


def check_trackers(names: Iterable[str]) -> None:
    """Raise ValueError for a tracker that does not exist."""
    for name in names:
        if name not in TRACKERS:
            raise FlowGRPOError(
                f"there is no tracker {name}.{suggest(name, list(TRACKERS))} Choose of {', '.join(TRACKERS)}, or trackers=[] for none."
            )


def check_total_steps(args: RunSettings, total: int) -> None:
    """Raise FlowGRPOError if `steps` is given beside `stages` and is not their total, as which a run's config.yaml has it."""
    if "steps" in args.model_fields_set and args.steps != total:
        raise FlowGRPOError(
            f"steps={args.steps}, but the stages have {total} steps in all: leave steps out, and change those of the stages."
        )


def check_prompt_skipping(skipping: PromptSkippingConfig, stages: Iterable[RunSettings]) -> None:
    """Raise FlowGRPOError if prompts are to be skipped by a run whose stages all train on given images."""
    if skipping.patience and all(stage.dataset is not None for stage in stages):
        raise FlowGRPOError(
            f"prompt_skipping.patience={skipping.patience} with objective.dataset: given images have prompts of their own, which are "
            "not skipped; set patience=0."
        )


def check_sizes(args: RunSettings) -> None:
    """Raise FlowGRPOError if the sizes of a step do not fit together."""
    rows = args.prompts_per_step * args.images_per_prompt
    if args.prompts_per_step % args.updates:
        raise FlowGRPOError(
            f"updates={args.updates} does not divide prompts_per_step={args.prompts_per_step}: every update takes an equal "
            "share of the prompts."
        )
    if rows % min(args.microbatch, rows):
        raise FlowGRPOError(
            f"microbatch={args.microbatch} does not divide prompts_per_step x images_per_prompt = {rows}: all forward passes "
            "need one shape."
        )
    objective, passes = args.objective, args.updates * args.epochs
    pairs = objective.needs.rows_per_pair == 2
    if pairs and args.dataset is not None and (rows // 2) % args.updates:
        raise FlowGRPOError(f"updates={args.updates} does not divide the {rows // 2} pairs of a step.")
    if objective.needs.single_update and passes > 1:
        raise FlowGRPOError(
            f"objective {objective.name} has no ratio, so it is for one update on a rollout: set updates=1 and epochs=1."
        )
    if objective.has_auto_clip and passes == 1:
        raise FlowGRPOError(
            "objective.clip_low=auto has no ratios to learn from: with one update on a rollout they are all 1."
        )
    if args.dataset is not None and args.dynamic_sampling_rounds:
        raise FlowGRPOError(
            f"dynamic_sampling_rounds={args.dynamic_sampling_rounds} with objective.dataset: given images are not sampled again; "
            "set dynamic_sampling_rounds=0."
        )
    if pairs and min(args.microbatch, rows) % 2:
        raise FlowGRPOError(f"microbatch={args.microbatch} is odd, but {objective.name} compares pairs: set an even one.")


def check_kept_graphs(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with `sampling.keep_graphs`."""
    if not args.sampling.keep_graphs:
        return
    if args.updates * args.epochs > 1:
        raise FlowGRPOError(
            f"sampling.keep_graphs with updates={args.updates} and epochs={args.epochs}: after one update a rollout's graphs are of "
            "former weights; set updates=1 and epochs=1, or keep_graphs=false."
        )
    if args.dynamic_sampling_rounds:
        raise FlowGRPOError(
            f"sampling.keep_graphs with dynamic_sampling_rounds={args.dynamic_sampling_rounds}: the graphs of all rounds would stay "
            "in memory; set dynamic_sampling_rounds=0, or keep_graphs=false."
        )
    if args.memory.shard is not None:
        raise FlowGRPOError(
            f"sampling.keep_graphs with memory.shard={args.memory.shard}: processes that share weights or gradients run backward "
            "equally often, but have different numbers of graphs with signal; set keep_graphs=false."
        )
    if args.memory.offload is not None and not args.memory.gradient_checkpointing:
        raise FlowGRPOError(
            f"sampling.keep_graphs with memory.offload={args.memory.offload}: each graph would hold copies of blocks' weights on "
            "the device; set memory.gradient_checkpointing=true, or keep_graphs=false."
        )


def check_full_finetuning(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with `lora: null`, which trains all weights."""
    if args.lora is not None:
        return
    if args.objective.needs.old_policy:
        raise FlowGRPOError(
            f"objective {args.objective.name} keeps its old policy as a second LoRA, and lora=null has none: set lora={{rank: 32}}."
        )
    if args.memory.quantize is not None:
        raise FlowGRPOError(
            f"memory.quantize={args.memory.quantize} is for base weights that are not trained, and lora=null trains all of them: "
            "leave one of the two out."
        )
    if args.memory.shard == "fsdp2" and args.optimizer.name == "adamw_8bit":
        raise FlowGRPOError(
            "optimizer.name=adamw_8bit does not support sharded weights: with lora=null set memory.shard=false, or adamw."
        )


def check_anchors(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with the anchors of the objective."""
    if args.lora is None and any(anchor.to == "ema" for anchor in args.objective.anchors):
        raise FlowGRPOError(
            "objective.anchors: ema is a second LoRA, and lora=null has none: set lora={rank: 32}, or to: base."
        )


def check_window(sampling: SamplingConfig) -> None:
    """Raise FlowGRPOError if the window does not fit into the schedule."""
    window = sampling.window
    transition = transitions()[sampling.transition]
    if not transition.stochastic:
        return
    last = sampling.last_trainable_step
    latest = sampling.steps - 1 if transition.noise_at_end else sampling.steps - 2
    if not window.first_step <= last <= latest:
        raise FlowGRPOError(
            f"sampling.window trains steps {window.first_step} to {last}, but with {sampling.steps} sampling steps of "
            f"{sampling.transition} the trainable ones are 0 to {latest}."
        )
    if window.schedule != "all" and window.first_step + window.size - 1 > last:
        raise FlowGRPOError(f"sampling.window.size={window.size} does not fit into steps {window.first_step} to {last}.")
