"""Add what a run trains to a policy: a LoRA, or all weights of the transformer."""

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy.policy import Policy


def add_trainable_weights(policy: Policy, args: FlowGRPOConfig) -> None:
    """Add what the config trains. A LoRA that the policy already has stays."""
    if args.lora is None and policy.has_lora:
        raise ValueError("lora=null trains all weights, but the policy that was given carries a LoRA: give one without.")
    if args.lora is None:
        policy.enable_full_finetuning()
        return
    if policy.is_full_finetuning and args.lora.init_from is None:
        raise ValueError("the policy that was given trains all weights: set lora=null, or give one that does not.")
    if policy.is_full_finetuning:
        raise ValueError(
            f"lora.init_from={args.lora.init_from} holds a whole transformer: merge it into a model by `flow-grpo export`, and set model."
        )
    if not policy.has_lora:
        policy.add_lora(args.lora.rank, args.lora.alpha, args.lora.targets, args.seed)
