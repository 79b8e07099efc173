"""The settings of `memory` applied to a pipeline: quantisation, gradient checkpointing, attention backend, VAE slicing."""

import resource
import sys
from typing import Any

import torch
from diffusers import BitsAndBytesConfig as BitsAndBytes
from diffusers import DiffusionPipeline, PipelineQuantizationConfig, TorchAoConfig

from flow_grpo.config.sections import MemoryConfig
from flow_grpo.policy.families import denoisers, family


def quantization(kind: str, dtype: torch.dtype, pipeline: str) -> PipelineQuantizationConfig:
    """The quantisation config of the transformers of a pipeline class: int8 and int4 by torchao, nf4 by bitsandbytes."""
    try:
        if kind == "nf4":
            import bitsandbytes  # noqa: F401

            how: Any = BitsAndBytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        else:
            from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

            how = TorchAoConfig(Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig())
    except ImportError as error:
        package = "bitsandbytes" if kind == "nf4" else "torchao"
        raise ValueError(
            f"memory.quantize={kind} needs {package}, which is not installed: pip install {package}."
        ) from error
    return PipelineQuantizationConfig(quant_mapping=dict.fromkeys(["transformer", *family(pipeline).experts], how))


def apply_memory_settings(pipe: DiffusionPipeline, memory: MemoryConfig) -> None:
    """Set gradient checkpointing and attention backend of the transformers, VAE slicing and tiling of a loaded pipeline.

    Raises:
        ValueError: a transformer or the VAE does not support a setting.
    """
    for transformer in (getattr(pipe, name) for name in denoisers(pipe)):
        if memory.gradient_checkpointing:
            if not getattr(transformer, "_supports_gradient_checkpointing", False):
                raise ValueError(
                    f"memory.gradient_checkpointing: {type(transformer).__name__} has no gradient checkpointing."
                )
            transformer.enable_gradient_checkpointing()
        if memory.attention_backend is not None:
            _set_attention_backend(transformer, memory.attention_backend)
    for wanted, method in ((memory.vae_slicing, "enable_slicing"), (memory.vae_tiling, "enable_tiling")):
        if wanted:
            if not hasattr(pipe.vae, method):
                raise ValueError(f"{type(pipe.vae).__name__} has no {method}: leave memory.vae_slicing and vae_tiling out.")
            getattr(pipe.vae, method)()


def _set_attention_backend(transformer: Any, name: str) -> None:
    try:
        transformer.set_attention_backend(name)
    except (ValueError, RuntimeError, ImportError, AttributeError) as error:
        raise ValueError(f"memory.attention_backend={name}: {str(error).splitlines()[0]}") from error


def compile_blocks(transformer: torch.nn.Module) -> None:
    """Compile each repeated block by torch.compile. ValueError if diffusers does not name them."""
    for block in repeated_blocks(transformer, "memory.compile"):
        block.compile()


def repeated_blocks(transformer: torch.nn.Module, setting: str) -> list[torch.nn.Module]:
    """The transformer's repeated blocks, whose classes diffusers names. ValueError if it does not, for that setting."""
    names = getattr(transformer, "_repeated_blocks", None) or getattr(transformer, "_no_split_modules", None) or []
    blocks = [module for module in transformer.modules() if type(module).__name__ in names]
    if not blocks:
        raise ValueError(f"{setting}: diffusers does not name the repeated blocks of {type(transformer).__name__}.")
    return blocks


def peak_memory(device: torch.device) -> float:
    """The most bytes that this process has allocated on the GPU or, on a CPU, altogether."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
