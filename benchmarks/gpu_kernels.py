"""Other kernels for a transformer's calls without a gradient, which the package does not use, and how far they change its images."""

import functools
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flow_grpo.policy.interception import eager
from flow_grpo.policy.memory import repeated_blocks
from flow_grpo.trainer import FlowGRPOTrainer

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


def use(kernels: tuple[str, ...], trainer: FlowGRPOTrainer) -> float:
    """Set kernels of `KERNELS`. Returns the relative RMS difference that they make to the final latents of a group's images."""
    before = final_latents(trainer)
    for name in kernels:
        KERNELS[name](trainer.policy.pipe.transformer)
    after = final_latents(trainer)
    return ((after - before).square().mean() / before.square().mean()).sqrt().item()


def final_latents(trainer: FlowGRPOTrainer) -> torch.Tensor:
    """The final latents (B, ...) of a group of the first prompt, without compiled blocks, whose rounding differs too."""
    batch = trainer.train_set.take([0], trainer.args.images_per_prompt)
    with eager():
        return trainer.stage.sampler.trajectory(0, batch, window=[]).final.float()


def use_cudnn_attention(transformer: Any) -> None:
    """Compute attention by cuDNN."""
    forward = transformer.forward
    backend = SDPBackend.CUDNN_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH

    @functools.wraps(forward)  # the package looks at the names of its arguments
    def with_backend(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if torch.is_grad_enabled() else sdpa_kernel(backend):
            return forward(*args, **kwargs)

    transformer.forward = with_backend


def use_float8(transformer: Any) -> None:
    """Compute the blocks' linear layers in float8, with a scale for each row of the input and of the weight."""
    for block in repeated_blocks(transformer, "float8"):
        for name, layer in block.named_modules():
            if isinstance(layer, torch.nn.Linear) and "lora_" not in name:
                layer.float8, layer.scale = to_float8(layer.weight.detach())
                layer.forward = MethodType(_linear, layer)


def to_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (N, K) in float8, and the scales (N, 1) by which they are to be multiplied."""
    scale = rows.abs().amax(1, keepdim=True).float().clamp_min(1e-6) / LARGEST
    return (rows / scale).to(FLOAT8), scale


def _linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() or x.ndim < 3:  # one row an image: there is nothing to gain
        return F.linear(x, layer.weight, layer.bias)
    rows, scale = to_float8(x.flatten(0, -2))
    product = torch._scaled_mm(rows, layer.float8.T, scale_a=scale, scale_b=layer.scale.T, out_dtype=layer.weight.dtype)
    return (product if layer.bias is None else product + layer.bias).unflatten(0, x.shape[:-1])


KERNELS = {"cuDNN attention": use_cudnn_attention, "float8": use_float8}
