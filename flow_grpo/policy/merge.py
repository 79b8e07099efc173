"""What was trained as a whole diffusers model: the LoRA within its weights, the other parts as the base model has them."""

import shutil
from pathlib import Path

from diffusers import DiffusionPipeline
from diffusers.utils.peft_utils import recurse_remove_peft_layers

from flow_grpo.files import normalize_safetensors
from flow_grpo.policy import hub
from flow_grpo.policy.policy import Policy


def save_whole(policy: Policy, folder: Path, base: str) -> None:
    """Writes the policy's pipeline to `folder` as `from_pretrained` takes it; a LoRA is merged, and gone from the policy afterwards.

    The parts beside the transformer are copied from `base`, which the pipeline was loaded from: what diffusers saves of a part is not
    always what it loads. ValueError if a LoRA is on quantised weights.
    """
    if policy.is_full_finetuning:
        policy.save(folder / "transformer")
    else:
        merge(policy)
        policy.pipe.transformer.save_pretrained(folder / "transformer")
        for file in (folder / "transformer").glob("*.safetensors"):
            normalize_safetensors(file)
    source = hub.resolve_model(base)
    place = Path(source if Path(source).is_dir() else DiffusionPipeline.download(source))
    shutil.copyfile(place / hub.INDEX, folder / hub.INDEX)
    for part in hub.component_names(str(place), ("",)):
        if part != "transformer" and (place / part).is_dir():
            shutil.copytree(place / part, folder / part, copy_function=shutil.copyfile)


def merge(policy: Policy) -> None:
    """Adds the LoRA to the base weights, with one rounding to their dtype."""
    transformer = policy.pipe.transformer
    if transformer.config.get("quantization_config") is not None:
        raise ValueError(
            "the base weights are quantised, and a LoRA can't be added to them: export the LoRA without merging."
        )
    for layer in policy.lora.layers():
        linear = layer.get_base_layer()
        dtype = linear.weight.dtype
        linear.float()
        layer.merge(safe_merge=True)
        linear.to(dtype)
    recurse_remove_peft_layers(transformer)
    del transformer.peft_config
    transformer._hf_peft_config_loaded = False  # else diffusers would save an adapter
