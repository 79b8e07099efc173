"""Save a policy as a complete diffusers model: the LoRA is merged, the other parts are copied from the base model."""

import shutil
from pathlib import Path

from diffusers import DiffusionPipeline
from diffusers.utils.peft_utils import recurse_remove_peft_layers

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy import hub
from flow_grpo.policy.families import denoisers
from flow_grpo.policy.memory import cast_layers
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.weights import write_transformer


def save_merged(policy: Policy, folder: Path, base: str) -> None:
    """Write the policy's pipeline to `folder` as `from_pretrained` reads it. A LoRA is merged and removed from the policy.

    The other parts are copied from `base`, the model that the pipeline was loaded from, as diffusers does not save all parts as it loads
    them. FlowGRPOError if a LoRA is on quantised weights.
    """
    if policy.is_full_finetuning:
        policy.save(folder / "transformer")
    else:
        merge(policy)
        for name in denoisers(policy.pipe):
            transformer = getattr(policy.pipe, name)
            write_transformer(transformer, type(transformer).__name__, transformer.state_dict(), folder / name)
    source = hub.resolve_model(base)
    base_folder = Path(source if Path(source).is_dir() else DiffusionPipeline.download(source))
    shutil.copyfile(base_folder / hub.INDEX, folder / hub.INDEX)
    for part in hub.component_names(str(base_folder), ("",)):
        if part not in denoisers(policy.pipe) and (base_folder / part).is_dir():
            shutil.copytree(base_folder / part, folder / part, copy_function=shutil.copyfile)


def merge(policy: Policy) -> None:
    """Add the LoRA to the base weights, with one rounding to their dtype."""
    transformers = policy.lora.transformers.values()
    quantised = policy.pipe.transformer.config.get("quantization_config") is not None
    if quantised or cast_layers(policy.pipe.transformer):
        raise FlowGRPOError(
            "the base weights are quantised, and a LoRA can't be added to them: export the LoRA without merging."
        )
    for layer in policy.lora.lora_layers():
        linear = layer.get_base_layer()
        dtype = linear.weight.dtype
        linear.float()
        layer.merge(safe_merge=True)
        linear.to(dtype)
    for transformer in transformers:
        recurse_remove_peft_layers(transformer)
        del transformer.peft_config
        transformer._hf_peft_config_loaded = False  # else diffusers would save an adapter
