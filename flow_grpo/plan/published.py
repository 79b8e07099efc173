"""Config files of published models in the package, for a plan where the hub's can't be read."""

from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from flow_grpo.policy import hub
from flow_grpo.policy.meta_pipeline import load_meta_pipeline

# In the hub's layout, with small tokenizers, which make prompts of several hundred tokens where a model does not pad them.
FOLDER = Path(__file__).parent / "model_configs"
FOLDERS = {
    "stabilityai/stable-diffusion-3.5-medium": "sd35_medium",
    "stabilityai/stable-diffusion-3.5-large": "sd35_large",
    "black-forest-labs/FLUX.1-dev": "flux_dev",
    "black-forest-labs/FLUX.2-klein-base-4B": "flux2_klein",
    "Qwen/Qwen-Image": "qwen_image",
    "Tongyi-MAI/Z-Image": "z_image",
    "Efficient-Large-Model/Sana_1600M_512px_diffusers": "sana",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan21",
}


def load_for_plan(name: str, dtype: torch.dtype, cuda: bool) -> tuple[DiffusionPipeline, str]:
    """The pipeline of a model without its weights, and a sentence if its config files are the package's; arguments as of
    `load_meta_pipeline`.

    Raises:
        FlowGRPOError: there is no such model, or its configs are damaged or can't be read and are not in the package.
    """
    try:
        return load_meta_pipeline(hub.resolve_model(name), dtype, cuda), ""
    except ValueError as error:
        if name not in FOLDERS or Path(name).is_dir():
            raise
        pipe = load_meta_pipeline(str(FOLDER / FOLDERS[name]), dtype, cuda)
        return pipe, f"The config files are those in the package: {error}"
