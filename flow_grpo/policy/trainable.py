"""Add what a run trains to a policy: a LoRA, or all weights of the transformer."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from flow_grpo.config.sections import LoraConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.hub import resolve_lora
from flow_grpo.policy.lora import PEFT_PREFIX
from flow_grpo.policy.policy import Policy

DOWN = ".lora_A."  # in the names of the matrices (rank, in)


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


def saved_lora(init_from: str) -> LoraConfig | None:
    """The rank, which is the largest of its layers, and the layers of a saved LoRA, by the header of its file alone.

    None if it is not on this machine under this path, or in a format of other names than diffusers' and peft's.

    Raises:
        FlowGRPOError: there is no such LoRA, or its file is damaged.
    """
    source, name = resolve_lora(init_from)
    for file in [Path(source) / name] if name else sorted(Path(source).glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                matrices = [name for name in list(tensors.keys()) if DOWN in name]
                ranks = {matrix.partition(DOWN)[0]: tensors.get_slice(matrix).get_shape()[0] for matrix in matrices}
        except (OSError, SafetensorError) as error:
            raise FlowGRPOError(f"the LoRA {init_from} could not be loaded: {file} is damaged: copy it again.") from error
        if ranks:
            layers = [layer.removeprefix(PEFT_PREFIX).removeprefix("transformer.") for layer in ranks]
            return LoraConfig(rank=max(ranks.values()), targets=layers, init_from=init_from)
    return None
