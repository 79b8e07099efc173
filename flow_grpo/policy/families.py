"""The little that differs from one family of pipelines to the next, as data. A family that is not here keeps the conventions."""

from dataclasses import dataclass, field
from typing import Any

ATTENTION = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)


@dataclass(frozen=True)
class Family:
    guidance: str = "guidance_scale"
    """The argument of the call that the setting `guidance` becomes."""
    unguided: float = 1.0
    """Its value without guidance."""
    call: dict[str, Any] = field(default_factory=dict)
    """Arguments of every call: what would rewrite the prompt or the size, or depend on the number of steps, is off."""
    encoders: tuple[str, ...] = ("encode_prompt",)
    """The methods whose results belong to a prompt and are kept."""
    alone: bool = False
    """Whether a prompt's numbers depend on the prompts beside it, so that each needs a call of its own."""
    targets: tuple[str, ...] = ATTENTION
    """Modules of the transformer that get a LoRA, by the end of their name."""
    refused: dict[str, str] = field(default_factory=dict)
    """Arguments that can't be used, and why."""
    guiders: tuple[str, ...] = ()
    """Components that hold the guidance in place of an argument."""


BY_STEP = "it depends on the number of the step in the run, which training does not have"
FAMILIES = {
    "StableDiffusion3Pipeline": Family(refused={"skip_guidance_layers": BY_STEP}),
    "QwenImagePipeline": Family(guidance="true_cfg_scale", call={"negative_prompt": " "}),
    "ZImagePipeline": Family(unguided=0.0),
    "Krea2Pipeline": Family(unguided=0.0),
    "SanaPipeline": Family(call={"use_resolution_binning": False}),
    "Lumina2Pipeline": Family(refused={"cfg_trunc_ratio": BY_STEP}),
    # a prompt's prior is drawn once, from seed 0, and its quoted letters would be padded by those of others
    "GlmImagePipeline": Family(encoders=("generate_prior_tokens", "encode_prompt"), alone=True),
    "HunyuanImagePipeline": Family(guidance="", guiders=("guider", "ocr_guider"), alone=True),
    "HiDreamImagePipeline": Family(targets=(*ATTENTION, "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")),
    "PRXPipeline": Family(
        call={"use_resolution_binning": False}, targets=("img_qkv_proj", "txt_kv_proj", "to_out.0", "to_out")
    ),
    "OmniGenPipeline": Family(alone=True),
    "LongCatImagePipeline": Family(call={"enable_prompt_rewrite": False}),
    "Kandinsky5T2IPipeline": Family(
        targets=("to_query", "to_key", "to_value", "self_attention.out_layer", "cross_attention.out_layer")
    ),
    "ErnieImagePipeline": Family(call={"use_pe": False}),
    "Ideogram4Pipeline": Family(call={"guidance_schedule": None}, refused={"guidance_schedule": BY_STEP}),
}


def family(pipeline: str) -> Family:
    """What is particular about a pipeline class, by its name."""
    return FAMILIES.get(pipeline, Family())
