"""The policy of a run: loaded in the run's dtype, with what is trained and what the objectives compare with."""

from pathlib import Path
from typing import Any

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.cuda_graphs import use_cuda_graphs
from flow_grpo.policy.devices import DTYPES, bf16_speedup, default_dtype, usable_device
from flow_grpo.policy.loading import add_trainable_weights, check_guidance, load_policy
from flow_grpo.policy.lora import TRAINED
from flow_grpo.policy.policy import Policy
from flow_grpo.run_folder.reader import dtype_of
from flow_grpo.training.anchors import add_references


def load_run_policy(args: FlowGRPOConfig, processes: Processes, prompts: list[str], pipe: Any = None) -> Policy:
    """The policy of the config's model, or of a loaded pipeline, for those prompts alone unless the run has given images."""
    has_dataset = any(stage.dataset is not None for _, stage in args.resolved_stages())
    init_from = args.lora.init_from if args.lora else None
    has_guided = any(anchor.to == "guided" for _, stage in args.resolved_stages() for anchor in stage.objective.anchors)
    has_guided = has_guided or args.evaluation.guidance not in (None, args.guidance)
    prompts_to_encode = None if has_dataset or has_guided else prompts  # another guidance encodes them anew
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
        values = {"rank": lora.r, "alpha": float(lora.lora_alpha), "targets": sorted(lora.target_modules)}
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


def prepare_policy(policy: Policy, args: FlowGRPOConfig, processes: Processes) -> None:
    """Add a LoRA or train the whole transformer; compile, shard and average it as the config says.

    Raises:
        FlowGRPOError: the policy carries something else already, or has no guidance where settings ask for it.
    """
    stages = [stage for _, stage in args.resolved_stages()]
    add_trainable_weights(policy, args.lora, args.seed)
    if args.memory.compile:
        policy.compile()
    if args.memory.cuda_graphs:
        use_cuda_graphs(policy.lora, policy.device)
    for name in dict.fromkeys(name for stage in stages for name in stage.objective.policy_copies):
        policy.lora.add_adapter_copy(name)
    add_references(policy, [stage.objective for stage in stages])
    if args.evaluation.guidance not in (None, policy.guidance):
        check_guidance(policy, args.evaluation.guidance, "leave evaluation.guidance out.")
    if args.memory.shard == "fsdp2" and processes.world_size > 1:
        policy.shard(processes)
    if args.ema_decay:
        policy.ema.start()
    needs_base = any(stage.objective.references for stage in stages)
    policy.store_base_weights(policy.device if needs_base else "cpu")
