"""Images as tensors, bytes, PIL images and files.

Files are read as viewers show them: the first image, upright, 8-bit RGB, on white. They may be a stranger's. Only `FORMATS` are decoded,
whatever a file is called: other decoders of Pillow do more than that, and the one for EPS starts Ghostscript. Devices, pipes and files or
images that are too large are refused before they are read.
"""

import functools
import io
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import check_regular
from flow_grpo.rewards.scopes import is_video

BACKGROUND = (255, 255, 255, 255)  # of transparent images
TURNS = {  # by the Exif orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
Images = list[Image.Image] | Tensor  # PIL images, or (B, 3, H, W) in [0, 1] where a gradient is wanted
SOURCES, SOURCE = "sources", "source"  # the images of each prompt, and the first of them as rewards receive it
Image.init()
# Pillow may be built without the last
FORMATS = tuple(kind for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF") if kind in Image.OPEN)
SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
MAX_PIXELS = 178_956_970  # Pillow's limit
MAX_BYTES = 1 << 30
ANIMATED = ("GIF", "PNG", "WEBP", "AVIF")  # the second image of another format is a small one, a mask or a page
_opening = threading.Lock()  # filters of warnings are the process's


def to_bytes(images: Tensor) -> Tensor:
    """Return images (B, 3, H, W) in [0, 1] as uint8 on the CPU."""
    return (images.detach().float().clamp(0, 1) * 255).round().byte().cpu()


def to_pil(images: Tensor) -> list[Image.Image]:
    """Return images (B, 3, H, W) in [0, 1] as 8-bit RGB PIL images, the input of every published transform."""
    return [Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in to_bytes(images)]


def to_png(image: Image.Image) -> bytes:
    """Encode a PIL image as PNG."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a PIL image of any mode to 8-bit RGB as viewers show it: upright by its Exif orientation, on white where it is transparent.

    16-bit greys are scaled, [0, 65535] to [0, 255], and so are floats in [0, 1]. Colour profiles are not applied.

    Raises:
        FlowGRPOError: values of 32 bits are outside these ranges, so that nothing says what is white.
    """
    image.load()  # a TIFF turns itself here
    turn = TURNS.get(_orientation(image) or 1)
    if turn is not None:
        image = image.transpose(turn)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _scaled(image)
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, BACKGROUND)
        ground.alpha_composite(image.convert("RGBA"))
        image = ground
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int | None:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a damaged tag of an image that is whole; its decoder raises many types
        return None


def _scaled(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits, or of 32 whose values have a known range, as 8-bit grey."""
    values, top = np.asarray(image).astype(np.float64), 1.0 if image.mode == "F" else 65535.0
    if not (values.min() >= 0 and values.max() <= top):
        raise FlowGRPOError(
            f"its values are from {values.min():g} to {values.max():g}, and those of such an image have to be from 0 to {top:g}: save "
            "it with 8 bits"
        )
    return Image.fromarray((values * (255 / top)).round().astype(np.uint8))


def in_batches(score: Callable[[Images, list[str]], Tensor], images: Tensor, prompts: list[str], batch_size: int) -> Tensor:
    """Call score(images, prompts) on batch_size rows at a time; returns (B,) float32 on the CPU.

    `score` gets PIL images, the input of the published transforms. If a gradient of the images is wanted, it gets them as a tensor
    (b, 3, H, W), and the values keep their graph.
    """
    wants_gradient = images.requires_grad and torch.is_grad_enabled()
    chunks = []
    with torch.set_grad_enabled(wants_gradient):
        for i in range(0, len(prompts), batch_size):
            part = images[i : i + batch_size]
            chunks.append(score(part if wants_gradient else to_pil(part), prompts[i : i + batch_size]))
    return torch.cat([at_least_float32(chunk).cpu() for chunk in chunks])


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32; float64 stays, for finite differences."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def has_sources(metadata: dict[str, Any]) -> bool:
    """Whether the metadata has the images of prompts, and no column of the user's by that name."""
    return any(
        isinstance(row, list) and row and all(isinstance(image, Image.Image) for image in row)
        for row in metadata.get(SOURCES, ())
    )


def first_sources(sources: list[list[Image.Image]], images: Tensor) -> Tensor:
    """The first image of each prompt (B, 3, H, W) in [0, 1], resized to the size of `images`. FlowGRPOError if a prompt has none."""
    if not all(sources):
        raise FlowGRPOError(
            "some of the prompts have images and some have none: a reward that takes `source` needs one for each."
        )
    size = (images.shape[-1], images.shape[-2])
    pixels: dict[int, Tensor] = {}
    for image in (of_prompt[0] for of_prompt in sources):
        if id(image) not in pixels:  # those of a group are one object
            fitted = image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)
            pixels[id(image)] = torch.from_numpy(np.asarray(fitted).copy()).permute(2, 0, 1).float() / 255
    return torch.stack([pixels[id(of_prompt[0])] for of_prompt in sources]).to(images.device)


def unique(prompts: list[str]) -> tuple[list[str], list[int]]:
    """Return the prompts without duplicates, and the index of each prompt among them."""
    index_of = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    return list(index_of), [index_of[prompt] for prompt in prompts]


def takes_pil(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a reward, or a class's `__call__`, that takes lists of 8-bit RGB PIL images instead of tensors.

    A reward of whole videos gets a list of frames for each.

    @rewards.takes_pil
    def reward(images, prompts, **metadata):
        return [image.getpixel((0, 0))[0] / 255 for image in images]
    """
    if isinstance(function, type):
        raise FlowGRPOError(f"takes_pil decorates a function: write it above the method __call__ of {function.__name__}.")

    @functools.wraps(function)  # keeps the signature, which says what metadata it takes
    def reward(*arguments: Any, **metadata: Any) -> Tensor | list[float]:
        return function(*map(_shown, arguments), **{name: _shown(value) for name, value in metadata.items()})

    return reward


def _shown(value: Any) -> Any:
    """PIL images in place of a tensor of images, lists of them in place of one of videos; anything else itself."""
    if not isinstance(value, Tensor):
        return value
    return [to_pil(video) for video in value] if is_video(value) else to_pil(value)


class ImageFile(NamedTuple):
    """The content of a file: the image as 8-bit RGB, its text fields by name (PNG alone), and whether more frames follow."""

    pixels: Image.Image
    text: dict[str, str]
    is_animation: bool


class Vote(NamedTuple):
    """A vote: the better and the worse of two images of a prompt, each a file or its content."""

    prompt: str
    better: Path | bytes
    worse: Path | bytes


def read_image(source: Path | bytes, name: str | None = None) -> Image.Image:
    """The 8-bit RGB image of a file, or of its content; see `read_image_file`."""
    return read_image_file(source, name).pixels


def read_image_file(source: Path | bytes, name: str | None = None) -> ImageFile:
    """Read the first image of a file, or of a file's content.

    Args:
        name: of the file, for errors.

    Raises:
        FlowGRPOError: no such file, no regular file, damaged, too large, or no image of `FORMATS`.
    """
    name = name or (str(source) if isinstance(source, Path) else "the image")
    opened = open_header(source, name)
    try:
        with opened:
            is_animation = opened.format in ANIMATED and bool(getattr(opened, "is_animated", False))
            pixels = to_rgb(opened)
            text = {key: str(value) for key, value in getattr(opened, "text", {}).items()}
    except Exception as error:  # decoders raise many types on damaged files
        advice = "" if isinstance(error, FlowGRPOError) else " Replace or remove it."
        raise FlowGRPOError(f"the image {name} could not be read: {_reason(error)}.{advice}") from error
    return ImageFile(pixels, text, is_animation)


def open_header(source: Path | bytes, name: str) -> Image.Image:
    """Open a file without decoding its pixels. FlowGRPOError as in `read_image_file`."""
    content = regular_content(source, name) if isinstance(source, Path) else source
    try:
        with _opening, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # at half the limit
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _too_large(name) from error
    except UnidentifiedImageError as error:
        raise FlowGRPOError(f"{name} is not an image: give a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file.") from error
    except Exception as error:  # decoders raise many types on damaged files
        raise FlowGRPOError(f"the image {name} could not be read: {_reason(error)}. Replace or remove it.") from error
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(name)
    return image


def regular_content(file: Path, name: str) -> bytes:
    """The bytes of an image's file. FlowGRPOError if it is missing, a folder, a device or a pipe, or too large."""
    try:
        if not file.exists():
            raise FlowGRPOError(f"there is no image {name}.")
        check_regular(file, f"the image {name}", MAX_BYTES)
        return file.read_bytes()
    except OSError as error:
        raise FlowGRPOError(f"the image {name} could not be read: {(error.strerror or str(error)).lower()}.") from error


def _too_large(name: str) -> FlowGRPOError:
    return FlowGRPOError(f"the image {name} has more than {MAX_PIXELS // 1_000_000} million pixels: make it smaller.")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
