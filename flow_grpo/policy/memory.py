"""The settings of `memory` applied to a pipeline: quantisation, casting, offloading, checkpointing, VAE slicing."""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from diffusers import BitsAndBytesConfig as BitsAndBytes
from diffusers import DiffusionPipeline, PipelineQuantizationConfig

from flow_grpo.config.sections import MemoryConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.encoding import ENCODER_PREFIXES
from flow_grpo.policy.families import denoisers, family

FLOAT8 = torch.float8_e4m3fn  # of weights that are stored in float8
# Most compiled variants of one function, such as the forward pass of all blocks of a class; after that, new ones run uncompiled. SD3.5-M
# needs up to 12 for each size: three kinds of blocks, with and without gradients, of the input too, and with and without the LoRA.
RECOMPILE_LIMIT = 64
# bytes of page-locked memory requested at once, and at which each tensor begins
PINNED_BUFFER, PINNED_ALIGNMENT = 2**30, 256


def quantization(dtype: torch.dtype, pipeline: str) -> PipelineQuantizationConfig:
    """The quantisation config of the transformers of a pipeline class: nf4 by bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise FlowGRPOError("memory.quantize=nf4 needs bitsandbytes, which is not installed: pip install bitsandbytes.")
    config = BitsAndBytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return PipelineQuantizationConfig(quant_mapping=dict.fromkeys(["transformer", *family(pipeline).experts], config))


def apply_memory_settings(pipe: DiffusionPipeline, memory: MemoryConfig) -> None:
    """Set float8 storage and gradient checkpointing of the transformers, VAE slicing and tiling of a loaded pipeline.

    Raises:
        FlowGRPOError: a transformer or the VAE does not support a setting.
    """
    for transformer in (getattr(pipe, name) for name in denoisers(pipe)):
        if memory.quantize == "fp8_layerwise":
            store_in_float8(transformer)
        if memory.gradient_checkpointing:
            if not getattr(transformer, "_supports_gradient_checkpointing", False):
                raise FlowGRPOError(
                    f"memory.gradient_checkpointing: {type(transformer).__name__} has no gradient checkpointing."
                )
            transformer.enable_gradient_checkpointing()
    for is_set, method in ((memory.vae_slicing, "enable_slicing"), (memory.vae_slicing == "tiles", "enable_tiling")):
        if is_set:
            if not hasattr(pipe.vae, method):
                raise FlowGRPOError(f"memory.vae_slicing={memory.vae_slicing}: {type(pipe.vae).__name__} has no {method}.")
            getattr(pipe.vae, method)()


@contextmanager
def frozen_decoder(pipe: Any) -> Iterator[None]:
    """A context for a backward pass through a pipeline's VAE: its weights get no gradient, and its activations are computed again.

    Where diffusers has no gradient checkpointing for it, as for those of Qwen-Image, Wan and Sana, the activations are kept.
    """
    vae = getattr(pipe, "vae", None)
    if vae is None:
        yield
        return
    weights = [weight for weight in vae.parameters() if weight.requires_grad]
    checkpoints = getattr(vae, "_supports_gradient_checkpointing", False) and not vae.is_gradient_checkpointing
    vae.requires_grad_(False)
    if checkpoints:
        vae.enable_gradient_checkpointing()
    try:
        yield
    finally:
        if checkpoints:
            vae.disable_gradient_checkpointing()
        for weight in weights:
            weight.requires_grad_()


def store_in_float8(transformer: Any) -> None:
    """Store the layers' weights in float8; each call of a layer casts its weights to their former dtype (layerwise casting).

    diffusers chooses the layers and converts them. Its own hooks set the weights of a layer in place: the backward pass of a convolution
    would then find float8, and until that of a linear layer a copy would stay in memory.
    """
    dtype = transformer.dtype
    transformer.enable_layerwise_casting(storage_dtype=FLOAT8, compute_dtype=dtype)
    for value in (*transformer.parameters(), *transformer.buffers()):
        if value.dtype != FLOAT8:
            value.data = value.data.clone()  # else the whole file would stay mapped
    for layer in cast_layers(transformer):
        layer.compute_dtype = dtype  # peft reads it: else it would give a LoRA the dtype of the weights
        del layer.forward  # diffusers' hook
        layer.forward = functools.partial(_with_cast_weights, _Call(layer))


def cast_layers(transformer: Any) -> list[Any]:
    """The layers whose weights are stored in float8."""
    return [layer for layer in transformer.modules() if any(p.dtype == FLOAT8 for p in layer.parameters(recurse=False))]


def _with_cast_weights(call: "_Call", *args: Any, **kwargs: Any) -> Any:
    """A layer's own forward pass with copies of its weights in the dtype it computes in."""
    layer: Any = call.block
    stored = dict(layer.named_parameters(recurse=False))
    copies = {name: value.to(layer.compute_dtype) for name, value in stored.items()}
    recast: AbstractContextManager[Any] = nullcontext()
    if isinstance(layer, torch.nn.Linear) and torch.is_grad_enabled():
        recast = _recast_for_backward(stored["weight"], copies["weight"])
    with recast:
        return torch.func.functional_call(call, {f"block.{name}": copy for name, copy in copies.items()}, args, kwargs)


def _recast_for_backward(stored: torch.Tensor, copy: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which the graph keeps the stored weight in place of its copy, which the backward pass makes again.

    It is for operations that save no other tensor: gradient checkpointing does not get to see what is saved in this context.
    """
    dtype, storage = copy.dtype, copy.untyped_storage()._cdata

    def pack(saved: torch.Tensor) -> Any:
        is_copy = saved.untyped_storage()._cdata == storage
        return (saved.size(), saved.stride(), saved.storage_offset()) if is_copy else saved

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else stored.to(dtype).as_strided(*packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def move_to_device(pipe: DiffusionPipeline, device: torch.device, memory: MemoryConfig) -> None:
    """Move a pipeline's networks to the device, but those that the settings keep on the CPU."""
    for name, part in pipe.components.items():
        if memory.offload is not None and name in denoisers(pipe):
            offload_blocks(part, device)
        elif isinstance(part, torch.nn.Module) and not (memory.offload_text_encoders and name.startswith(ENCODER_PREFIXES)):
            part.to(device)


def offload_blocks(transformer: torch.nn.Module, device: torch.device) -> None:
    """Keep the base weights of the repeated blocks in the CPU's memory, and copy the weights of a block to the device for each call.

    diffusers' group offloading takes a layer's weights away after its forward pass, where a backward pass still needs them. Here the
    graph holds the copies: until the backward pass, with gradient checkpointing that of the same block.

    Raises:
        FlowGRPOError: diffusers does not name the repeated blocks.
    """
    blocks = repeated_blocks(transformer, "memory.offload")
    in_blocks = {id(tensor): tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        if id(tensor) not in in_blocks:
            tensor.data = tensor.data.to(device)
    if device.type == "cuda":
        pin_together(list(in_blocks.values()))
    for block in blocks:
        block.forward = _with_weights_on(device, block)


def _pinned_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pin_together(tensors: list[torch.Tensor], allocate: Callable[[int], torch.Tensor] = _pinned_bytes) -> None:
    """Move tensors to page-locked memory, several to a buffer.

    Torch rounds each request up to a power of two, which one request for each tensor would make about 1.6 times the weights. Here
    each is a power of two already, and a tensor goes to the first buffer in which it fits, the largest tensors first.

    Args:
        allocate: returns that many bytes of page-locked memory.
    """
    sizes = {id(tensor): -(-max(1, tensor.nbytes) // PINNED_ALIGNMENT) * PINNED_ALIGNMENT for tensor in tensors}
    left, unused = sum(sizes.values()), list[torch.Tensor]()
    for tensor in sorted(tensors, key=lambda tensor: tensor.nbytes, reverse=True):
        size = sizes[id(tensor)]
        index = next((i for i, rest in enumerate(unused) if len(rest) >= size), len(unused))
        if index == len(unused):
            unused.append(allocate(max(1 << (size - 1).bit_length(), min(PINNED_BUFFER, 1 << (left.bit_length() - 1)))))
        place, unused[index] = unused[index][: tensor.nbytes], unused[index][size:]
        tensor.data = place.view(tensor.dtype).view(tensor.shape).copy_(tensor.data)
        left -= size


class _Call(torch.nn.Module):
    """A block's own forward pass as a module, which `functional_call` takes."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block, self.call = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _with_weights_on(device: torch.device, block: torch.nn.Module) -> Any:
    """The block's forward pass with copies of its frozen weights on that device; a LoRA that is added later is there."""
    call = _Call(block)

    @functools.wraps(block.forward)  # some pipelines look at the names of its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = (*call.named_parameters(), *call.named_buffers())
        copies = {name: on_device(tensor, device) for name, tensor in tensors if not tensor.requires_grad}
        return torch.func.functional_call(call, copies, args, kwargs)

    return forward


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on that device, copied without waiting for it."""
    return tensor.to(device, non_blocking=True)


def compile_blocks(transformer: torch.nn.Module, for_each_size: bool) -> None:
    """Compile each repeated block by torch.compile. FlowGRPOError if diffusers does not name them.

    Args:
        for_each_size: compile again for each size of the tensors. Else torch compiles for any size from the second one on, which makes
            a training step slower, and is right where there are many sizes.
    """
    settings: dict[str, Any] = {"dynamic": False if for_each_size else None}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        settings["recompile_limit"] = RECOMPILE_LIMIT  # also in the threads of a backward pass, from torch 2.14 on
    else:
        torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, RECOMPILE_LIMIT)
    for block in repeated_blocks(transformer, "memory.compile"):
        block.compile(**settings)


def repeated_blocks(transformer: torch.nn.Module, setting: str) -> list[torch.nn.Module]:
    """The transformer's repeated blocks, whose classes diffusers names. FlowGRPOError if it does not, for that setting."""
    names = getattr(transformer, "_repeated_blocks", None) or getattr(transformer, "_no_split_modules", None) or []
    blocks = [module for module in transformer.modules() if type(module).__name__ in names]
    if not blocks:
        raise FlowGRPOError(f"{setting}: diffusers does not name the repeated blocks of {type(transformer).__name__}.")
    return blocks
