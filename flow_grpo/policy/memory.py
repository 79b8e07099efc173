"""What of a model is where, and in how many bits: the settings of `memory`, applied to a pipeline."""

import resource
import sys
from typing import Any

import torch
from diffusers import BitsAndBytesConfig as BitsAndBytes
from diffusers import DiffusionPipeline, PipelineQuantizationConfig, TorchAoConfig

from flow_grpo.config.sections import MemoryConfig


def quantization(kind: str, dtype: torch.dtype) -> PipelineQuantizationConfig:
    """How `from_pretrained` quantises the base weights of the transformer: int8 and int4 by torchao, nf4 by bitsandbytes."""
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
    return PipelineQuantizationConfig(quant_mapping={"transformer": how})


def apply_memory_settings(pipe: DiffusionPipeline, memory: MemoryConfig) -> None:
    """Checkpointing, attention backend, slicing and tiling of a loaded pipeline.

    Raises:
        ValueError: the transformer or the VAE cannot do what is asked for.
    """
    transformer, name = pipe.transformer, type(pipe.transformer).__name__
    if memory.gradient_checkpointing:
        if not getattr(transformer, "_supports_gradient_checkpointing", False):
            raise ValueError(f"memory.gradient_checkpointing: {name} has no gradient checkpointing.")
        transformer.enable_gradient_checkpointing()
    if memory.attention_backend is not None:
        try:
            transformer.set_attention_backend(memory.attention_backend)
        except (ValueError, RuntimeError, ImportError, AttributeError) as error:
            raise ValueError(f"memory.attention_backend={memory.attention_backend}: {str(error).splitlines()[0]}") from error
    for wanted, method in ((memory.vae_slicing, "enable_slicing"), (memory.vae_tiling, "enable_tiling")):
        if wanted:
            if not hasattr(pipe.vae, method):
                raise ValueError(f"{type(pipe.vae).__name__} has no {method}: leave memory.vae_slicing and vae_tiling out.")
            getattr(pipe.vae, method)()


def compile_blocks(transformer: torch.nn.Module) -> None:
    """torch.compile of the blocks that repeat. ValueError if diffusers does not say which those are."""
    for block in repeated_blocks(transformer, "memory.compile"):
        block.compile()


def repeated_blocks(transformer: torch.nn.Module, setting: str) -> list[torch.nn.Module]:
    """The modules that repeat, as diffusers names their classes."""
    names = getattr(transformer, "_repeated_blocks", None) or getattr(transformer, "_no_split_modules", None) or []
    found = [module for module in transformer.modules() if type(module).__name__ in names]
    if not found:
        raise ValueError(f"{setting}: diffusers does not say which blocks of {type(transformer).__name__} repeat.")
    return found


def peak_memory(device: torch.device) -> float:
    """The most that this process has had on the GPU or, on a CPU, in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
