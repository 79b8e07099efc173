"""The parts of a run: prompts, rewards, and the policy with what is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import FROM_PYTHON, PromptSetConfig
from flow_grpo.data import prompt_overlap
from flow_grpo.data.prompt_mixture import PromptSampler, PromptSet, load_run_prompts, sampler_of
from flow_grpo.data.prompt_syntax import syntax_warnings
from flow_grpo.data.prompts import Prompts
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy import hub
from flow_grpo.policy.loading import check_size, pipeline_of
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.text import counted
from flow_grpo.training import early_checks
from flow_grpo.training.inputs import digests_of_inputs
from flow_grpo.training.rewards import build_rewards, recorded_rewards
from flow_grpo.training.run_policy import dtype_and_reason, load_run_policy, prepare_policy, settings_of


@dataclass(frozen=True)
class RunParts:
    """What a run is made of.

    Attributes:
        eval_rewards: all rewards that are measured; those that are not trained on have weight 0.
        rewards: the trained ones.
        train_source: the file or name that the training prompts come from; None for several sets, and for prompts in memory.
        prompt_warnings: sentences on prompts that the run both trains on and is measured by, or that have another program's syntax.
        inputs: digests of what the run depends on besides its settings.
    """

    args: FlowGRPOConfig
    processes: Processes
    policy: Policy
    train_set: PromptSet
    eval_set: PromptSet | None
    prompt_sampler: PromptSampler
    eval_rewards: WeightedSum
    rewards: WeightedSum
    prompt_warnings: list[str]
    train_source: str | None
    inputs: dict[str, str]


def build_run(
    model: Any,
    reward_funcs: Any,
    args: FlowGRPOConfig,
    train_dataset: Prompts | None,
    eval_dataset: Prompts | None,
) -> RunParts:
    """Check the settings, then load prompts, rewards and the policy, and prepare what is trained.

    Raises:
        FlowGRPOError: whatever does not fit, in one sentence.
    """
    pipe = pipeline_of(model)
    model_args = args.with_model(str(model or args.model) if pipe is None else hub.model_name(pipe))
    prompts = model_args.training_prompts if train_dataset is None else train_dataset
    train_set = load_run_prompts(prompts)
    keeps_model = model is None or (pipe is not None and "model" in args.model_fields_set)
    run_args = args if keeps_model else model_args  # the run folder, report and export name this model
    args = run_args.with_launcher_settings()
    held_out = args.evaluation.prompts if eval_dataset is None else eval_dataset
    eval_set = None if held_out is None else load_run_prompts(held_out).head(args.evaluation.max_prompts)
    processes = Processes.from_environment(args.device)
    early_checks.check_settings(args, processes.world_size)
    early_checks.check_prompts(args, train_set, eval_set, processes.world_size)
    eval_rewards, trained = build_rewards(args, reward_funcs, monitored=eval_set is not None)
    for prompt_set in (train_set, eval_set or train_set):
        eval_rewards.row_weights(
            prompt_set.repeat(1).metadata_columns()
        )  # raises if a prompt names a reward that is not there
    rewards = eval_rewards.subset(trained)
    args = args.model_copy(
        update={"rewards": recorded_rewards(args, reward_funcs), **recorded_prompts(args, prompts, held_out)}
    )
    for name, reward in eval_rewards.rewards.items() if eval_set is not None else ():
        early_checks.check_scope(name, reward, args)
    eval_prompts = [] if eval_set is None else eval_set.prompts
    all_prompts = [*train_set.prompts, *eval_prompts]
    policy = model if isinstance(model, Policy) else load_run_policy(args, processes, all_prompts, pipe)
    args = settings_of(policy, args) if policy is model else args
    policy.check_images(all_prompts)
    early_checks.check_frames(args, policy)
    check_size(policy, "height and width", policy.call.get("height"), policy.call.get("width"))
    prepare_policy(policy, args, processes)
    given_images = all(stage.dataset is not None for _, stage in args.resolved_stages())  # with prompts of their own
    source = str(prompts) if isinstance(prompts, str | Path) else None
    inputs = digests_of_inputs(
        args,
        train_set,
        eval_set,
        model=policy.pipe.name_or_path,
        dtype=policy.dtype,
        reward_funcs=reward_funcs if isinstance(reward_funcs, list) else [reward_funcs or ""],
    )
    return RunParts(
        args=args,
        processes=processes,
        policy=policy,
        train_set=train_set,
        eval_set=eval_set,
        prompt_sampler=sampler_of(train_set, args.seed, args.prompt_weights == "variance"),
        eval_rewards=eval_rewards,
        rewards=rewards,
        prompt_warnings=[]
        if given_images
        else [*syntax_warnings(all_prompts), *prompt_overlap.overlap_warnings(train_set.prompts, eval_prompts, source)],
        train_source=source,
        inputs=inputs,
    )


def recorded_prompts(args: FlowGRPOConfig, train_dataset: Prompts, eval_dataset: Prompts | None) -> dict[str, Any]:
    """What the config of a run says of its prompts, as an update of it: where they can be read again, or that no file has them."""

    def recorded(source: Prompts | None) -> Any:
        is_sets = isinstance(source, list) and source and all(isinstance(entry, PromptSetConfig) for entry in source)
        if source is None or is_sets:
            return source
        return str(source) if isinstance(source, str | Path) else FROM_PYTHON

    evaluation = args.evaluation.model_copy(update={"prompts": recorded(eval_dataset)})
    return {"prompts": recorded(train_dataset), "evaluation": evaluation}


def run_headline(args: FlowGRPOConfig, policy: Policy) -> str:
    """What a run prints first: its model, device, dtype, size and folder."""
    where = f"{args.model} on {policy.device} in {dtype_and_reason(args, policy)}"
    size = f"{counted(args.prompts_per_step, 'prompt')} x {counted(args.images_per_prompt, 'image')}"
    own = policy.has_lora and not policy.lora.is_zero and not (args.lora and args.lora.init_from)
    start = "; it goes on from the LoRA that the policy has" if own else ""
    return f"{where}: {counted(args.steps, 'step')} of {size}; run folder {args.output_dir}{start}"
