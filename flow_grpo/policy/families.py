"""What differs between families of pipelines, as data. A family that is not listed follows diffusers' conventions."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import diffusers

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
    """The needs of a kind of pipeline beyond the conventions of diffusers."""

    guidance: str = "guidance_scale"
    """The argument of the call that the setting `guidance` sets; "" if there is none."""
    no_guidance_value: float = 1.0
    """The value of that argument without guidance."""
    call_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of every call, which turn off what would change the prompt or the size, or depend on the number of steps."""
    encoders: tuple[str, ...] = ("encode_prompt",)
    """The methods that encode a prompt; what they return is recorded."""
    encode_separately: bool = False
    """Whether a prompt's embeddings depend on the other prompts of the batch, so that each needs a call of its own."""
    lora_targets: tuple[str, ...] = ATTENTION
    """Layers of the transformer that get a LoRA by default, by the end of their name."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Arguments that cannot be used, and why."""
    guiders: tuple[str, ...] = ()
    """Components that apply guidance, in place of an argument."""
    image: str = "image"
    """The argument of the call that takes the images of a prompt; the pipeline may have none."""
    needs_image: bool = False
    """Whether a prompt without an image is refused."""
    max_images: int = 1
    """How many images a prompt may have."""
    experts: tuple[str, ...] = ()
    """Further transformers, each for a part of the schedule, which a pipeline of this kind may have."""


MAX_REFERENCE_IMAGES = 10  # no published model was trained with more
STEP_DEPENDENT = "it depends on the number of the step in the run, which training does not have"
FAMILIES = {
    "StableDiffusion3Pipeline": Family(unsupported={"skip_guidance_layers": STEP_DEPENDENT}),
    "QwenImagePipeline": Family(guidance="true_cfg_scale", call_kwargs={"negative_prompt": " "}),
    "ZImagePipeline": Family(no_guidance_value=0.0),
    "Krea2Pipeline": Family(no_guidance_value=0.0),
    "SanaPipeline": Family(call_kwargs={"use_resolution_binning": False}),
    "Lumina2Pipeline": Family(unsupported={"cfg_trunc_ratio": STEP_DEPENDENT}),
    # a prompt's prior tokens are sampled once, from seed 0, and its quoted letters would be padded by those of others
    "GlmImagePipeline": Family(encoders=("generate_prior_tokens", "encode_prompt"), encode_separately=True),
    "HunyuanImagePipeline": Family(guidance="", guiders=("guider", "ocr_guider"), encode_separately=True),
    "HiDreamImagePipeline": Family(lora_targets=(*ATTENTION, "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")),
    "PRXPipeline": Family(
        call_kwargs={"use_resolution_binning": False}, lora_targets=("img_qkv_proj", "txt_kv_proj", "to_out.0", "to_out")
    ),
    "OmniGenPipeline": Family(encode_separately=True),
    "LongCatImagePipeline": Family(call_kwargs={"enable_prompt_rewrite": False}),
    "Kandinsky5T2IPipeline": Family(
        lora_targets=("to_query", "to_key", "to_value", "self_attention.out_layer", "cross_attention.out_layer")
    ),
    "ErnieImagePipeline": Family(call_kwargs={"use_pe": False}),
    "Flux2Pipeline": Family(max_images=MAX_REFERENCE_IMAGES),
    "Flux2KleinPipeline": Family(max_images=MAX_REFERENCE_IMAGES),
    "QwenImageEditPipeline": Family(guidance="true_cfg_scale", call_kwargs={"negative_prompt": " "}, needs_image=True),
    "QwenImageEditPlusPipeline": Family(
        guidance="true_cfg_scale", call_kwargs={"negative_prompt": " "}, needs_image=True, max_images=MAX_REFERENCE_IMAGES
    ),
    # without its cache of keys and values, which serves the steps after the first
    "QwenImage21Pipeline": Family(
        guidance="true_cfg_scale",
        call_kwargs={"negative_prompt": " ", "use_kv_cache": False},
        max_images=MAX_REFERENCE_IMAGES,
    ),
    "WanPipeline": Family(experts=("transformer_2",)),
    "Ideogram4Pipeline": Family(call_kwargs={"guidance_schedule": None}, unsupported={"guidance_schedule": STEP_DEPENDENT}),
}


# of a family, in the headers of LoRA files: modelspec.architecture, and ss_base_model_version of kohya's scripts
HEADER_NAMES = {
    "StableDiffusion3Pipeline": ("stable-diffusion-3", "sd3"),
    "FluxPipeline": ("flux-1-dev", "flux1"),
    "FluxKontextPipeline": ("flux-1-kontext", "flux1"),
    "Flux2Pipeline": ("flux-2", "flux2"),
    "Flux2KleinPipeline": ("flux-2-klein", "flux2_klein"),
    "QwenImagePipeline": ("qwen-image", "qwen_image"),
    "ZImagePipeline": ("z-image", "zimage"),
    "Lumina2Pipeline": ("lumina-2", "lumina2"),
    "WanPipeline": ("wan", "wan"),
    "AuraFlowPipeline": ("auraflow", "auraflow"),
    "ChromaPipeline": ("chroma", "chroma"),
    "HiDreamImagePipeline": ("hidream-i1", "hidream"),
    "HunyuanImagePipeline": ("hunyuan-image", "hunyuan_image"),
    "HunyuanVideoPipeline": ("hunyuan-video", "hunyuan_video"),
    "Kandinsky5T2IPipeline": ("kandinsky-5", "kandinsky5"),
    "Krea2Pipeline": ("krea-2", "krea2"),
    "LTXPipeline": ("ltx-video", "ltx"),
    "QwenImageEditPipeline": ("qwen-image-edit", "qwen_image_edit"),
    "QwenImageEditPlusPipeline": ("qwen-image-edit", "qwen_image_edit"),
}


def lora_header(pipeline: str) -> dict[str, str]:
    """The entries of a LoRA file's header on its model, by the class of the pipeline: modelspec's, and one of kohya's scripts."""
    header = {"modelspec.sai_model_spec": "1.0.0", "modelspec.implementation": "diffusers"}
    if pipeline not in HEADER_NAMES:
        return header
    architecture, version = HEADER_NAMES[pipeline]
    return {**header, "modelspec.architecture": f"{architecture}/lora", "ss_base_model_version": version}


def family(pipeline: str) -> Family:
    """The family of a pipeline class, by the class's name."""
    return FAMILIES.get(pipeline, Family())


def denoisers(pipe: Any) -> list[str]:
    """The components of a pipeline that denoise and can be trained: `transformer`, and its further experts."""
    experts = family(type(pipe).__name__).experts
    return ["transformer", *(name for name in experts if getattr(pipe, name, None) is not None)]


def has_lora_loader(pipeline: str) -> bool:
    """Whether a pipeline of diffusers, named by its class, has `load_lora_weights`."""
    return hasattr(getattr(diffusers, pipeline, None), "load_lora_weights")


def makes_videos(pipeline: str) -> bool:
    """Whether a pipeline of diffusers, named by its class, makes videos."""
    return takes(pipeline, "num_frames")


def takes(pipeline: str, argument: str) -> bool:
    """Whether the call of a pipeline of diffusers, named by its class, has this argument."""
    pipeline_class = getattr(diffusers, pipeline, None)
    return pipeline_class is not None and argument in inspect.signature(pipeline_class.__call__).parameters
