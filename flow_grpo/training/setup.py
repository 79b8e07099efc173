"""The parts of a run: prompts, rewards, and the policy with what is trained."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from flow_grpo import rewards as reward_kit
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import FROM_PYTHON, PromptSetConfig, RewardConfig
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.data.prompts import Prompts, PromptSampler, PromptSet, sampler_of
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy import hub
from flow_grpo.policy.devices import (
    DTYPES,
    bf16_speedup,
    compile_error,
    compile_seconds,
    default_dtype,
    fastest,
    usable_device,
)
from flow_grpo.policy.loading import add_trainable_weights, check_guidance, check_size, load_policy, pipeline_of
from flow_grpo.policy.lora import TRAINED
from flow_grpo.policy.memory import repeated_blocks
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.rewards import Reward, WeightedSum
from flow_grpo.rewards.loading import import_path, load_given
from flow_grpo.run_folder.opening import changes, is_begun
from flow_grpo.run_folder.reader import compiled_of, dtype_of
from flow_grpo.text import counted, duration, suggest
from flow_grpo.training.anchors import add_references
from flow_grpo.training.custom_functions import load_custom_function
from flow_grpo.training.inputs import digests_of_inputs, digests_of_model
from flow_grpo.training.start_checks import Start, make_checks

RESERVED_NAMES = ("reward", "diversity")  # other metrics, which a reward function might be named like
# of `memory.compile: auto`: where it compiles; the share of a step's time that this saves, the smaller of two that were measured on an H200
# (docs/performance.md); and the images whose velocity is timed
COMPILED_DEVICES, COMPILING_SAVES, TIMED_ROWS = ("cuda",), 0.39, 4
# settings that may have another value on each machine
PER_MACHINE = ("model", "device", "output_dir", "trackers", "memory.embedding_cache_dir")
HUMAN = "human"  # the reward that asks a person
# Packaged rewards that are not called only to probe them, also when remote or isolated. See `reason_not_to_call`.
COSTLY = {HUMAN: "a person ranks its images", "judge": "each answer may cost money"}


def load_reward(name: str, setting: RewardConfig, given: Any = None) -> Reward:
    """A reward that runs where its settings say: on other machines, in a process of its own, or in this process.

    Args:
        given: the function or class, if it is not to be found by its name.
    """
    settings = {"remote": setting.remote, "isolate": setting.isolate, "frames": setting.frames, **setting.options}
    return reward_kit.load(name, **settings) if given is None else load_given(name, given, **settings)


def reason_not_to_call(name: str, reward: Reward) -> str | None:
    """Why a reward is not called only to probe it, if it is not: it is in `COSTLY`, or has the attribute `costly`."""
    own = "its attribute `costly` is set" if getattr(reward, "costly", False) else None
    return COSTLY.get(name, own)


def load_unless_costly(name: str, setting: RewardConfig) -> Reward:
    """As `load_reward`, but `unscored` in place of a reward that costs a person's time or money. A page of `human` is not opened."""
    if name == HUMAN and setting.remote is None:
        reward_kit.check_options(name, **setting.options)
        return unscored
    reward = load_reward(name, setting)
    return unscored if reason_not_to_call(name, reward) else reward


def unscored(images: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor:
    """The value 0 for every image, (B,), in place of a reward that is not called."""
    return torch.zeros(len(prompts))


def build_rewards(
    args: FlowGRPOConfig,
    reward_funcs: Any = None,
    monitored: bool | None = None,
    load: Callable[[str, RewardConfig], Reward] = load_reward,
) -> tuple[WeightedSum, list[str]]:
    """All rewards that a run measures, and the names of the trained ones, as in the metrics. Each reward is built once.

    The weighted sum is the trained reward: rewards that are only measured have weight 0.

    Args:
        reward_funcs: as given to the trainer; by default `args.rewards`.
        monitored: whether to build `args.evaluation.rewards` too, which are measured on held-out prompts. By default, if the config
            names such prompts.
        load: builds a reward from its name and settings.
    """
    if monitored is None:
        monitored = args.evaluation.prompts is not None
    trained = _trained_rewards(args, reward_funcs)
    measured = {name: (name, setting) for name, setting in args.evaluation.rewards.items() if monitored}
    metric_name = reward_kit.metric_names([*trained, *measured], RESERVED_NAMES)
    functions = {}
    for name, (item, setting) in {**measured, **trained}.items():
        with phase(f"loading reward {name}"):
            functions[metric_name[name]] = (
                load(item, setting) if isinstance(item, str) else load_reward(name, setting, given=item)
            )
    weights = dict.fromkeys(functions, 0.0)
    weights |= {metric_name[name]: setting.weight for name, (_, setting) in trained.items()}
    settings = {**args.evaluation.rewards, **args.rewards}
    drop = [metric_name[name] for name, setting in settings.items() if setting.on_error == "drop" and name in metric_name]
    return WeightedSum(functions, weights, drop, names=metric_name), [metric_name[name] for name in trained]


def _trained_rewards(args: FlowGRPOConfig, reward_funcs: Any) -> dict[str, tuple[Any, RewardConfig]]:
    """Name -> function, class or importable name, and its settings."""
    if reward_funcs is None:
        return {name: (name, setting) for name, setting in args.rewards.items()}
    functions = _listed(reward_funcs)
    if wrong := next((type(item).__name__ for item in functions if not (callable(item) or isinstance(item, str))), None):
        raise FlowGRPOError(f"reward_funcs has an object of type {wrong}: give names, functions or classes.")
    if not functions:
        raise FlowGRPOError(
            "reward_funcs is empty: give a name, a function or a class, or None for the rewards of the config."
        )
    names = [_name_of(function) for function in functions]
    trained = {n: (f, args.rewards.get(n, RewardConfig())) for n, f in zip(names, functions, strict=True)}
    unused = [name for name in args.rewards if name not in trained] if "rewards" in args.model_fields_set else []
    unset = [name for name in trained if name not in args.rewards]
    if misspelt := next((name for name in unused if suggest(name, unset)), None):
        raise FlowGRPOError(f"rewards.{misspelt} is for none of reward_funcs.{suggest(misspelt, unset)}")
    if len(trained) < len(functions):
        raise FlowGRPOError("two of reward_funcs have the same name: give each function or class its own name.")
    return trained


def _listed(reward_funcs: Any) -> list[Any]:
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


def _name_of(function: Any) -> str:
    if isinstance(function, str):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    if name not in reward_kit.REGISTRY:
        return name
    path = import_path(function)
    if path is None:
        raise FlowGRPOError(f"reward_funcs has a function {name}, but {name} is an included reward: give it another name.")
    return path


def recorded_rewards(args: FlowGRPOConfig, reward_funcs: Any) -> dict[str, RewardConfig]:
    """The trained rewards as config entries that can be loaded again.

    A function that no import path leads to keeps its own name.
    """
    return {
        import_path(function) or name: setting for name, (function, setting) in _trained_rewards(args, reward_funcs).items()
    }


def load_run_policy(args: FlowGRPOConfig, processes: Processes, prompts: list[str], pipe: Any = None) -> Policy:
    """The policy of the config's model or of a loaded pipeline. It need only encode these prompts, unless the run has given images."""
    has_dataset = any(stage.dataset is not None for _, stage in args.resolved_stages())
    init_from = args.lora.init_from if args.lora else None
    has_guided = any(
        anchor.guidance is not None for _, stage in args.resolved_stages() for anchor in stage.objective.anchors
    )
    rollouts = [stage.sampling.guidance for _, stage in args.resolved_stages()]
    has_guided = has_guided or any(scale not in (None, args.guidance) for scale in (args.held_out.guidance, *rollouts))
    prompts_to_encode = None if has_dataset or has_guided else prompts  # another guidance encodes them again
    dtype = run_dtype(args, processes) if pipe is None else args.dtype
    return load_policy(
        args.model if pipe is None else pipe,
        processes.device,
        dtype,
        init_from,
        memory=args.memory,
        prompts=prompts_to_encode,
        **args.pipeline_call_kwargs(),
    )


def settings_of(policy: Policy, args: FlowGRPOConfig) -> FlowGRPOConfig:
    """The settings with the size, guidance, dtype and LoRA that a given policy has, in place of those that are not applied to it."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    own: dict[str, Any] = {name: policy.call.get(name) for name in ("height", "width")}
    own |= {"guidance": policy.guidance, "dtype": names.get(policy.dtype, args.dtype)}
    if policy.has_lora and args.lora is not None:
        lora = policy.lora.transformer.peft_config[TRAINED]
        values = {"rank": lora.r, "alpha": float(lora.lora_alpha), "targets": policy.lora.targets}
        own["lora"] = args.lora.model_copy(update=values)
    return args.model_copy(update=own)


def run_dtype(args: FlowGRPOConfig, processes: Processes) -> str:
    """The config's dtype; for `auto` the one that the run in the folder began with, else the one that is faster here.

    A resumed run goes on to the same numbers on another machine, and all processes have one dtype.
    """
    if args.dtype != "auto":
        return args.dtype
    names = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}

    def local_dtype() -> str:
        begun = dtype_of(Path(args.output_dir))
        return begun if begun in names else str(default_dtype(usable_device(processes.device))).removeprefix("torch.")

    return names[processes.gather_or_raise(local_dtype)[0]]


def dtype_and_reason(args: FlowGRPOConfig, policy: Policy) -> str:
    """The dtype of a run, and on a CPU why `dtype: auto` is bfloat16."""
    name = str(policy.dtype).removeprefix("torch.")
    is_chosen = args.dtype == "auto" and policy.device.type == "cpu" and policy.dtype == torch.bfloat16
    return f"{name} ({bf16_speedup():.1f} times as fast as float32 at a layer here)" if is_chosen else name


def compile_and_reason(
    args: FlowGRPOConfig, policy: Policy, processes: Processes, prompt: str
) -> tuple[bool | Literal["auto"], str]:
    """Whether to compile the policy's blocks, and why, for the first line of a run; all processes do as the main one decides.

    On other devices than CUDA `memory.compile: auto` stays as it is, and compiles nothing. On CUDA it compiles if that saves more time
    than it takes, unless a setting is against it that was not measured. A resumed run goes on as it began.

    Args:
        prompt: whose velocity is timed.
    """
    if args.memory.compile != "auto" or policy.device.type not in COMPILED_DEVICES:
        return args.memory.compile, ""

    def decide() -> tuple[bool, str]:
        if reason := _reason_not_to_compile(args, policy, processes, prompt):
            return False, reason
        folder = Path(args.output_dir)
        begun = compiled_of(folder) if is_begun(folder) else None
        if begun is not None:
            return begun, "as the run began"
        seconds = _seconds_of_steps(args, policy, processes, prompt)
        saved, needed = COMPILING_SAVES * seconds, compile_seconds(args.model, policy.device)
        reason = f"compiling saves about {duration(saved)} of {duration(seconds)} and takes about {duration(needed)}"
        return saved > needed, reason

    return processes.gather_or_raise(decide)[0]


def _reason_not_to_compile(args: FlowGRPOConfig, policy: Policy, processes: Processes, prompt: str) -> str:
    """Why `memory.compile: auto` compiles nothing, whatever it would save: it was not measured so, or it fails here. Else ""."""
    memory = args.memory
    shard = memory.shard if processes.world_size > 1 else None
    for name, value in (("quantize", memory.quantize), ("offload", memory.offload), ("shard", shard)):
        if value is not None:
            return f"memory.{name}={value}"
    policy.encode([prompt])  # finds out the shapes of prompts
    if not policy.encoder.pads_to_one_length:
        return "its prompts differ in length"
    try:
        repeated_blocks(policy.pipe.transformer, "memory.compile")
    except FlowGRPOError as error:
        return str(error).rstrip(".")
    with phase("trying torch.compile"):
        failure = compile_error(policy.device)
    return "" if failure is None else f"torch.compile fails here: {failure}"


def _seconds_of_steps(args: FlowGRPOConfig, policy: Policy, processes: Processes, prompt: str) -> float:
    """About how long all training steps take without rewards, by the measured velocity of a few images."""
    rows = min(args.microbatch, TIMED_ROWS)
    schedule, shape = policy.schedule(args.sampling.steps)
    x, conditioning = torch.zeros(rows, *shape, device=policy.device), policy.encode([prompt] * rows)
    with torch.no_grad(), phase("timing a velocity"):
        velocity = partial(policy.velocity, x, schedule.timesteps[0], conditioning, torch.arange(rows))
        seconds = fastest(velocity, policy.device, 0.0) / rows / processes.world_size

    def of_a_step(stage: FlowGRPOConfig) -> float:
        images = 0 if stage.dataset is not None else stage.prompts_per_step * stage.images_per_prompt
        trained = stage.epochs * stage.objective.num_losses(stage.sampling.steps)
        # with its gradient, a velocity takes about three times as long
        return seconds * (images * stage.sampling.steps + 3 * stage.updated_images * trained)

    return sum(stage.steps * of_a_step(stage) for _, stage in args.resolved_stages())


def prepare_policy(policy: Policy, args: FlowGRPOConfig, processes: Processes) -> None:
    """Add a LoRA or train the whole transformer; shard and average it as the config says.

    Raises:
        FlowGRPOError: the policy carries something else already, or has no guidance where settings ask for it.
    """
    stages = [stage for _, stage in args.resolved_stages()]
    add_trainable_weights(policy, args.lora, args.seed)
    for name in dict.fromkeys(name for stage in stages for name in stage.objective.policy_copies):
        policy.lora.add_adapter_copy(name)
    add_references(policy, [stage.objective for stage in stages])
    scales = [("evaluation", args.evaluation.guidance), *(("sampling", stage.sampling.guidance) for stage in stages)]
    for section, guidance in scales:
        if guidance not in (None, policy.guidance):
            check_guidance(policy, guidance, f"leave {section}.guidance out.")
    if args.memory.shard is not None and processes.world_size > 1:
        policy.shard(processes, within_machines=args.memory.shard == "hsdp")
    if args.ema_decay:
        policy.ema.start()
    needs_base = any(stage.objective.references for stage in stages)
    policy.store_base_weights(policy.device if needs_base else "cpu")


@dataclass(frozen=True)
class RunParts:
    """The parts of a run.

    Attributes:
        eval_rewards: all rewards that are measured; those that are not trained on have weight 0.
        rewards: the trained ones.
        start_checks: what the checks of the run's start found, by their names.
        inputs: digests of what the run depends on besides its settings.
        headline: the first line of the run.
    """

    args: FlowGRPOConfig
    processes: Processes
    policy: Policy
    train_set: PromptSet
    eval_set: PromptSet | None
    prompt_sampler: PromptSampler
    eval_rewards: WeightedSum
    rewards: WeightedSum
    start_checks: dict[str, list[str]]
    inputs: dict[str, str]
    headline: str


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
    processes = Processes.from_environment(args.device)
    with processes.together():  # an error on one machine is reported by all
        load_custom_function.cache_clear()  # a file may have been edited since an earlier run of this process
        pipe = pipeline_of(model)
        model_args = args.with_model(str(args.model if model is None else model) if pipe is None else hub.model_name(pipe))
        prompts = model_args.training_prompts if train_dataset is None else train_dataset
        train_set = load_run_prompts(prompts)
        keeps_model = model is None or (pipe is not None and "model" in args.model_fields_set)
        run_args = args if keeps_model else model_args  # the run folder, report and export name this model
        args = run_args.with_launcher_settings()
        held_out = args.evaluation.prompts if eval_dataset is None else eval_dataset
        eval_set = None if held_out is None else load_run_prompts(held_out).head(args.evaluation.max_prompts)
        source = str(prompts) if isinstance(prompts, str | Path) else None
        start = Start(args, processes.world_size, train_set, eval_set, source=source)
        found = {**make_checks("settings", start), **make_checks("prompts", start)}
        if pipe is None:
            hub.resolve_model(args.model)  # a missing model is reported before rewards are loaded
        eval_rewards, trained = build_rewards(args, reward_funcs, monitored=eval_set is not None)
        for prompt_set in (train_set, eval_set or train_set):
            # raises if a set names a reward that is not there
            eval_rewards.row_weights(prompt_set.repeat(1).metadata_columns())
        rewards = eval_rewards.subset(trained)
        args = args.model_copy(
            update={"rewards": recorded_rewards(args, reward_funcs), **recorded_prompts(args, prompts, held_out)}
        )
        start = replace(start, args=args, trained=rewards, measured={} if eval_set is None else eval_rewards.rewards)
        found |= make_checks("rewards", start)
        inputs = digests_of_inputs(args, train_set, eval_set, _listed(reward_funcs or ""))
        check_same_settings(processes, args, inputs)
        all_prompts = [*train_set.prompts, *start.held_out_prompts]
        policy = model if isinstance(model, Policy) else load_run_policy(args, processes, all_prompts, pipe)
        args = settings_of(policy, args) if policy is model else args
        found |= make_checks("model", replace(start, args=args, policy=policy))
        check_size(policy, policy.call.get("height"), policy.call.get("width"))
        prepare_policy(policy, args, processes)
        compiles, reason = compile_and_reason(args, policy, processes, all_prompts[0])
        if compiles is True:
            policy.compile(falls_back=args.memory.compile == "auto")
        args = args.model_copy(update={"memory": args.memory.model_copy(update={"compile": compiles})})
        return RunParts(
            args=args,
            processes=processes,
            policy=policy,
            train_set=train_set,
            eval_set=eval_set,
            prompt_sampler=sampler_of(train_set, args.seed),
            eval_rewards=eval_rewards,
            rewards=rewards,
            start_checks=found,
            inputs={**digests_of_model(policy.pipe.name_or_path, policy.dtype), **inputs},
            headline=run_headline(args, policy, reason),
        )


def check_same_settings(processes: Processes, args: FlowGRPOConfig, inputs: dict[str, str]) -> None:
    """Check that all processes have the same settings, and the same prompts, code and LoRA of these names. Every process must call it.

    Raises:
        FlowGRPOError: one has another value or content than rank 0, as where a command or a file of another machine was not updated.
    """
    (first, first_inputs), *others = processes.all_gather((args, inputs))
    for rank, (other, other_inputs) in enumerate(others, 1):
        for change in changes(first, other, first_inputs, other_inputs):
            name = change.name
            if name.startswith(PER_MACHINE):
                continue
            what = f"rank {rank} has {name}={change.now}, and rank 0 has {change.then}"
            if change.is_of_content:
                what = f"the content of {name} of rank {rank} is not that of rank 0"
            raise FlowGRPOError(f"{what}: give all machines the same command and files.")


def recorded_prompts(args: FlowGRPOConfig, train_dataset: Prompts, eval_dataset: Prompts | None) -> dict[str, Any]:
    """An update of a run's config for its prompts: where they can be read again, or that no file has them."""

    def recorded(source: Prompts | None) -> Any:
        is_sets = isinstance(source, list) and source and all(isinstance(entry, PromptSetConfig) for entry in source)
        if source is None or is_sets:
            return source
        return str(source) if isinstance(source, str | Path) else FROM_PYTHON

    evaluation = args.evaluation.model_copy(update={"prompts": recorded(eval_dataset)})
    return {"prompts": recorded(train_dataset), "evaluation": evaluation}


def run_headline(args: FlowGRPOConfig, policy: Policy, compile_reason: str) -> str:
    """The first line of a run: its model, device, dtype, size and folder, and why its blocks are compiled or not."""
    where = f"{args.model} on {policy.device} in {dtype_and_reason(args, policy)}"
    if policy.compiled or compile_reason:
        where += f", {'' if policy.compiled else 'not '}compiled ({compile_reason or 'in the first step'})"
    size = f"{counted(args.prompts_per_step, 'prompt')} x {counted(args.images_per_prompt, 'image')}"
    own = policy.has_lora and not policy.lora.is_zero and not (args.lora and args.lora.init_from)
    start = "; it goes on from the LoRA that the policy has" if own else ""
    return f"{where}: {counted(args.steps, 'step')} of {size}; run folder {args.output_dir}{start}"
