"""Add what a run trains to a policy: a LoRA, or all weights of the transformer."""

from flow_grpo.config.sections import LoraConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.policy import Policy


def add_trainable_weights(policy: Policy, lora: LoraConfig | None, seed: int) -> None:
    """Add a LoRA, its weights drawn from `seed`; or train all weights if `lora` is None. A LoRA that the policy already has stays.

    Raises:
        FlowGRPOError: the policy carries what the settings do not ask for.
    """
    if lora is None and policy.has_lora:
        raise FlowGRPOError("lora=null trains all weights, but the policy that was given carries a LoRA: give one without.")
    if lora is None:
        policy.enable_full_finetuning()
        return
    if policy.is_full_finetuning and lora.init_from is None:
        raise FlowGRPOError("the policy that was given trains all weights: set lora=null, or give one that does not.")
    if policy.is_full_finetuning:
        raise FlowGRPOError(
            f"lora.init_from={lora.init_from} holds a whole transformer: merge it into a model by `flow-grpo export`, and set model."
        )
    if not policy.has_lora:
        policy.add_lora(lora.rank, lora.alpha, lora.targets, seed)
