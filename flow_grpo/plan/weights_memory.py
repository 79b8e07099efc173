"""Bytes of a model's weights: while they stay in memory, and while they are loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flow_grpo.policy.hub import stored_bytes
from flow_grpo.policy.memory import cast_layers, repeated_blocks
from flow_grpo.policy.meta_pipeline import MetaModule, MetaTextEncoder

NF4_BITS = 4.5  # per weight, with the scales; the meta pipeline itself has the float8 weights of fp8_layerwise


def weight_bytes(network: Any, quantize: str | None) -> float:
    """Bytes of a network's weights without its LoRA; linear layers are quantised."""
    total = 0.0
    for name, parameter in [*network.named_parameters(), *network.named_buffers()]:
        if "lora_" not in name:
            linear = _is_linear(name, parameter)
            total += parameter.numel() * (NF4_BITS / 8 if linear and quantize == "nf4" else parameter.element_size())
    return total


def _is_linear(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter of that name is the weight of a base model's linear layer."""
    return parameter.ndim == 2 and name.endswith("weight") and "lora_" not in name


def offloaded_bytes(network: Any) -> tuple[float, float]:
    """Bytes of the repeated blocks' weights without their LoRA, and those of the largest block: it is recomputed as a whole."""
    sizes = [weight_bytes(block, None) for block in repeated_blocks(network, "memory.offload")]
    return sum(sizes), max(sizes)


def text_encoder_bytes(pipe: Any) -> float:
    """Bytes of the text encoders of a meta pipeline."""
    return sum(part.bytes for part in pipe.components.values() if isinstance(part, MetaTextEncoder))


@dataclass(frozen=True)
class LoadingMemory:
    """What loading a model takes of a CPU's memory. A network's files are mapped; tensors of another dtype are copied.

    Attributes:
        stays: bytes of mapped tensors that were copied and stay, as other tensors of their file are used where they are.
        peak: bytes of all weights and of what else is in memory while a network is loaded.
    """

    stays: float
    peak: float

    @classmethod
    def of(cls, pipe: Any, dtype: torch.dtype) -> "LoadingMemory":
        folder, stays, peaks, weights = Path(pipe.name_or_path), 0.0, [0.0], 0.0
        for name, part in pipe.components.items():
            if not isinstance(part, MetaModule | MetaTextEncoder):
                continue
            size, buffers = (
                (part.bytes, 0.0) if isinstance(part, MetaTextEncoder) else (weight_bytes(part, None), part.buffer_bytes)
            )
            cast = sum(p.nbytes for layer in cast_layers(part) for p in layer.parameters(recurse=False))
            size += cast * (dtype.itemsize - 1)  # float8 layers are loaded in the other dtype, and cast then
            stored = stored_bytes(folder / name, dtype)
            published = 0.0 if dtype == torch.bfloat16 else size * 2 / dtype.itemsize  # most are in 16 bits
            files: list[tuple[float, float]] = [(float(copied), float(used)) for copied, used in stored] or [
                (published, 0.0)
            ]
            weights += size + cast
            # `store_in_float8` copies what it does not cast, so no file stays mapped
            stays += sum(copied for copied, used in files if used and not cast)
            peaks.append(buffers + sum(copied for copied, used in files if cast or not used))
        return cls(stays, weights + stays + max(peaks))
