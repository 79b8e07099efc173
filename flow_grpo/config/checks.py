"""Checks across the settings of a config. Each raises FlowGRPOError: one sentence on the conflict and what to set instead."""

from collections.abc import Iterable

from flow_grpo.config.settings import RunSettings
from flow_grpo.config.stepwise_objectives import Stepwise
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")


def check_run(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings of a run, or of one of its stages, conflict."""
    args.objective.check_steps(args.sampling.steps)
    check_sizes(args)
    check_teachers(args)
    check_kept_graphs(args)
    check_memory(args)
    check_full_finetuning(args)


def check_trackers(names: Iterable[str]) -> None:
    """Raise FlowGRPOError for a tracker that does not exist."""
    for name in names:
        if name not in TRACKERS:
            raise FlowGRPOError(
                f"there is no tracker {name}.{suggest(name, list(TRACKERS))} Choose from {', '.join(TRACKERS)}, or trackers=[] for none."
            )


def check_total_steps(args: RunSettings, total: int) -> None:
    """Raise FlowGRPOError if `steps` is given beside `stages` and is not their total, as which a run's config.yaml has it."""
    if "steps" in args.model_fields_set and args.steps != total:
        raise FlowGRPOError(
            f"steps={args.steps}, but the stages have {total} steps in all: leave steps out, and change those of the stages."
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
    if pairs and min(args.microbatch, rows) % 2:
        raise FlowGRPOError(f"microbatch={args.microbatch} is odd, but {objective.name} compares pairs: set an even one.")


def check_kept_graphs(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with `objective.keep_graphs`."""
    if not (isinstance(args.objective, Stepwise) and args.objective.keep_graphs):
        return
    if args.updates * args.epochs > 1:
        raise FlowGRPOError(
            f"objective.keep_graphs with updates={args.updates} and epochs={args.epochs}: after one update a rollout's graphs "
            "belong to earlier weights; set updates=1 and epochs=1, or keep_graphs=false."
        )
    if args.memory.shard is not None:
        raise FlowGRPOError(
            f"objective.keep_graphs with memory.shard={args.memory.shard}: processes that share weights or gradients run backward "
            "equally often, but have different numbers of graphs with signal; set keep_graphs=false."
        )
    if args.memory.offload is not None and not args.memory.gradient_checkpointing:
        raise FlowGRPOError(
            f"objective.keep_graphs with memory.offload={args.memory.offload}: each graph would hold copies of blocks' weights on "
            "the device; set memory.gradient_checkpointing=true, or keep_graphs=false."
        )


def check_full_finetuning(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with `lora: null`, which trains all weights."""
    if args.lora is not None:
        return
    if args.objective.policy_copies:
        raise FlowGRPOError(
            f"objective {args.objective.name} keeps a slow copy of the policy as a second LoRA, and lora=null has none: set "
            "lora={rank: 32}."
        )
    if args.memory.quantize is not None:
        raise FlowGRPOError(
            f"memory.quantize={args.memory.quantize} is for base weights that are not trained, and lora=null trains all of them: "
            "leave one of the two out."
        )
    if args.memory.shard is not None and args.optimizer.name == "adamw_8bit":
        raise FlowGRPOError(
            "optimizer.name=adamw_8bit does not support sharded weights: with lora=null set memory.shard=false, or adamw."
        )
    if any(anchor.to == "ema" for anchor in args.objective.anchors):
        raise FlowGRPOError(
            "objective.anchors: ema is a second LoRA, and lora=null has none: set lora={rank: 32}, or to: base."
        )


def check_memory(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings of `memory` conflict."""
    memory, conflicts = args.memory, {}
    if memory.offload is not None:
        conflicts["memory.offload=groups"] = {
            "lora=null": args.lora is None,
            "memory.compile": memory.compile is True,
            f"memory.shard={memory.shard}": memory.shard is not None,
            f"memory.quantize={memory.quantize}": memory.quantize not in (None, "fp8_layerwise"),
        }
    if memory.quantize == "fp8_layerwise":
        conflicts["memory.quantize=fp8_layerwise"] = {
            "memory.compile, which can't trace the casts": memory.compile is True,
            f"memory.shard={memory.shard}, which casts the weights itself": memory.shard is not None,
        }
    for setting, others in conflicts.items():
        if conflict := next((name for name, is_set in others.items() if is_set), None):
            raise FlowGRPOError(f"{setting} does not go with {conflict}: leave one of them out.")


def check_prompt_sets(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with several prompt sets. A run checks their rewards once they are built."""
    for setting, sets in (("prompts", args.prompts), ("evaluation.prompts", args.evaluation.prompts)):
        if not isinstance(sets, list):
            continue
        if not sets:
            raise FlowGRPOError(
                f"{setting} is an empty list: give a file, or a list of sets such as [{{file: prompts.txt}}]."
            )
        names = [prompt_set.label for prompt_set in sets]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise FlowGRPOError(f"two sets of {setting} are called {repeated}: give each a name of its own by `name`.")
        for prompt_set in sets:
            if setting == "evaluation.prompts" and prompt_set.weight != 1:
                raise FlowGRPOError(f"evaluation.prompts measures all prompts of {prompt_set.label}: leave its weight out.")


def check_teachers(args: RunSettings) -> None:
    """Raise FlowGRPOError if a teacher is missing, or names a prompt set that the run does not have."""
    if args.objective.needs.anchors and not args.objective.anchors:
        raise FlowGRPOError(
            f"objective {args.objective.name} learns from its anchors: give it one, such as {{to: teacher, lora: edits.safetensors, "
            "weight: 1}."
        )
    labels = [prompt_set.label for prompt_set in args.prompts] if isinstance(args.prompts, list) else []
    for anchor in args.objective.anchors:
        if anchor.prompts is not None and anchor.prompts not in labels:
            found = (
                f"{suggest(anchor.prompts, labels)} The sets are {', '.join(labels)}."
                if labels
                else " `prompts` is one set."
            )
            raise FlowGRPOError(f"objective.anchors: there is no prompt set {anchor.prompts} for a teacher.{found}")
