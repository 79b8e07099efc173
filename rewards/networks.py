"""The network of a reward: its device, its published weights without missing or unused tensors, and its transforms on tensors.

The published transforms are of PIL images; on tensors, a gradient of the image passes through them. Values differ a little from the ones
on PIL images: PIL rounds to 8 bits before and after it resizes.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchvision.transforms.functional as pixels
from safetensors.torch import load_file
from torch import Tensor
from torchvision.transforms import Compose, InterpolationMode, Resize, ToTensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.threads import current_gpu

AUTO = "auto"  # the GPU if there is one, else the CPU


def with_index(device: Any) -> Any:
    """The device, `cuda` with the index of this thread's GPU, so that other threads and processes take it for the same one."""
    gpu = current_gpu()
    return f"cuda:{gpu}" if str(device) == "cuda" and gpu is not None else device


def usable_device(reward: str, name: str) -> torch.device:
    """The device by its name or `auto`; a GPU with the index of this thread's one, if the name has none.

    Raises:
        FlowGRPOError: torch can't use it here. The message begins with `reward`.
    """
    try:
        device = ("cuda" if torch.cuda.is_available() else "cpu") if name == AUTO else name
        torch.empty(0, device=device)
        return torch.device(with_index(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise FlowGRPOError(
            f"{reward}: device={name} can't be used here: {reason}; set device=cpu, or leave it out."
        ) from error


def load_tensors(reward: str, file: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors, .pt or .pth file by name.

    Raises:
        FlowGRPOError: there is no such file, or it holds no tensors by name.
    """
    if not Path(file).is_file():
        raise FlowGRPOError(f"{reward}: there is no weights file {file}; give weights= an existing one.")
    try:
        if Path(file).suffix == ".safetensors":
            return load_file(file)
        tensors: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FlowGRPOError(
            f"{reward}: {file} can't be read as weights ({type(error).__name__}); download it again."
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise FlowGRPOError(f"{reward}: {file} is not a table of tensors by name; give weights= the published file.")
    return tensors


def load_exactly(reward: str, module: torch.nn.Module, state: dict[str, Tensor], file: str | Path) -> None:
    """Load a state dict into a module whose tensors it must match exactly, in names and shapes.

    Raises:
        FlowGRPOError: tensors are missing, unused or of another shape.
    """
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    shapes = {name: value.shape for name, value in state.items()}
    check_keys(reward, file, missing=wanted.keys() - shapes.keys(), unknown=shapes.keys() - wanted.keys())
    check_keys(reward, file, missing={f"{name} {tuple(wanted[name])}" for name in wanted if wanted[name] != shapes[name]})
    module.load_state_dict(state)


def check_keys(reward: str, file: str | Path, missing: set[str], unknown: set[str] | None = None) -> None:
    """Raise FlowGRPOError if tensors are missing from a file or unknown."""
    for verb, names in (("lacks", missing), ("has unknown", unknown or set())):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise FlowGRPOError(
                f"{reward}: {file} {verb} {len(names)} tensors ({some}{', ...' if len(names) > 3 else ''}), so it is "
                "not this reward's weights; give weights= the published file, or one of the same format."
            )


def resized(images: Tensor, size: list[int], interpolation: InterpolationMode = InterpolationMode.BICUBIC) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] in another size, antialiased as PIL does it: [height, width], or [shorter side].

    Bicubic values beyond [0, 1] are clipped, as PIL's 8 bits are; there the gradient is 0.
    """
    return pixels.resize(images, size, interpolation, antialias=True).clamp(0, 1)


# for transformers' processors: `prepared` has done it
PREPARED = {"do_resize": False, "do_rescale": False, "do_normalize": False}


def prepared(images: Tensor, size: list[int], processor: Any) -> Tensor:
    """Images (B, 3, H, W) in [0, 1], resized and normalised with an image processor's numbers.

    They keep their dtype; the processor itself makes float32 only.
    """
    return pixels.normalize(resized(images, size), processor.image_mean, processor.image_std)


def on_tensors(transform: Compose, images: Tensor) -> Tensor:
    """Apply a transform of PIL images, of torchvision or open_clip, to images (B, 3, H, W) in [0, 1]. Returns (B, 3, h, w)."""
    for step in transform.transforms:
        images = _apply(step, images)
    return images


def _apply(step: Any, images: Tensor) -> Tensor:
    if isinstance(step, ToTensor):
        return images
    if isinstance(step, Resize):
        size = [step.size] if isinstance(step.size, int) else list(step.size)
        return resized(images, size, step.interpolation)
    if hasattr(step, "longest"):  # open_clip's ResizeKeepRatio, which asks a PIL image for its size
        shape = SimpleNamespace(size=(images.shape[-1], images.shape[-2]))
        return resized(images, step.get_params(shape, step.size, step.longest), step.interpolation)
    return step(images)
