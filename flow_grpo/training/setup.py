"""The policy of a run: loaded, and given what is trained and the copies of it that the run needs."""

from pathlib import Path

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.policy import Policy, load_policy
from flow_grpo.policy.weight_checks import check_weights
from flow_grpo.run_folder import checkpoint, layout


def loaded(args: FlowGRPOConfig, device: str | None, prompts: list[str]) -> Policy:
    """The config's model, for those prompts alone unless the run brings images with prompts of their own."""
    given = any(part.objective.data is not None for _, part in args.resolved_stages())
    start = args.lora.start if args.lora else None
    asked = None if given else prompts
    return load_policy(
        args.model, device, args.dtype, start, memory=args.memory, prompts=asked, **args.pipeline_call_kwargs()
    )


def make_trainable(policy: Policy, args: FlowGRPOConfig, processes: Processes) -> None:
    """A LoRA, or the whole transformer; compiled, shared among processes, averaged, as the config says.

    Raises:
        ValueError: the policy carries something else already.
    """
    parts = [part for _, part in args.resolved_stages()]
    add_trained(policy, args)
    if args.memory.compile:
        policy.compile()
    if any(part.method.old_policy for part in parts):
        policy.add_adapter_copy("old")
    if args.memory.shard == "fsdp2" and processes.world_size > 1:
        policy.shard(processes)
    if args.ema_decay:
        policy.start_ema()
    if policy.is_full_finetuning:
        often = any(part.objective.kl_weight or part.method.reference for part in parts)
        policy.store_base_weights(policy.device if often else "cpu")


def add_trained(policy: Policy, args: FlowGRPOConfig) -> None:
    """What the config trains. A LoRA that the policy carries already stays."""
    if args.lora is None and policy.has_lora:
        raise ValueError("lora=null trains all weights, but the policy that was given carries a LoRA: give one without.")
    if args.lora is None:
        policy.enable_full_finetuning()
        return
    if policy.is_full_finetuning and args.lora.start is None:
        raise ValueError("the policy that was given trains all weights: set lora=null, or give one that does not.")
    if policy.is_full_finetuning:
        raise ValueError(
            f"lora.start={args.lora.start} holds a whole transformer: merge it into a model by `flow-grpo export`, and set model."
        )
    if not policy.has_lora:
        policy.add_lora(args.lora.rank, args.lora.alpha, args.lora.targets, args.seed)


def load_trained(policy: Policy, place: str) -> None:
    """Puts on what a run has trained: whatever `Policy.load_lora` takes, or a checkpoint.

    Of a checkpoint it is the moving average, where it has one, as that is what a run evaluates and saves. ValueError as there, or
    if the checkpoint is damaged.
    """
    folder = Path(place).resolve()
    if not (folder / layout.MANIFEST).is_file():
        policy.load_lora(place)
        return
    config, step = folder.parent.parent / layout.CONFIG, layout.step_of(folder)
    if not config.is_file() or step is None:
        raise ValueError(f"the checkpoint {place} is not where its run left it, as checkpoints/step_000100 of a run folder.")
    state = checkpoint.read(folder.parent, step)
    args = FlowGRPOConfig.from_yaml(config)
    if args.lora and args.lora.start:
        policy.load_lora(args.lora.start)
    add_trained(policy, args)
    if policy.is_full_finetuning:
        policy.store_base_weights("cpu")
    if not isinstance(state.get("adapter"), dict):
        raise ValueError(f"the checkpoint {place} was not written by flow-grpo: it holds no adapter.")
    trained = state.get("ema") or state["adapter"]
    check_weights(trained, f"the checkpoint {place}")
    policy.load_adapter_state(trained)
