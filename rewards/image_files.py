"""Image files as viewers show them: the first image, upright, 8-bit RGB, on white.

Files may be a stranger's. Only `FORMATS` are decoded, whatever a file is called: other decoders of Pillow do more than that, and the one
for EPS starts Ghostscript. Devices, pipes and files or images that are too large are refused before they are read.
"""

import io
import stat
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import to_rgb

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")  # Pillow may be built without the last
SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
MAX_PIXELS = 178_956_970  # Pillow's limit
MAX_BYTES = 1 << 30
ANIMATED = ("GIF", "PNG", "WEBP", "AVIF")  # the second image of another format is a small one, a mask or a page
_opening = threading.Lock()  # filters of warnings are the process's


class ImageFile(NamedTuple):
    """What a file holds: the image as 8-bit RGB, its text fields by name (PNG alone), and whether more frames follow."""

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
    """Open a file without decoding its pixels. FlowGRPOError as of `read_image_file`."""
    content = regular_content(source, name) if isinstance(source, Path) else source
    formats = [kind for kind in FORMATS if kind != "AVIF" or _has_avif()]
    try:
        with _opening, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # at half the limit
            image = Image.open(io.BytesIO(content), formats=formats)
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
    too_large = FlowGRPOError(f"the image {name} has more than {MAX_BYTES >> 20:,} MB: make it smaller.")
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # before it is opened: a pipe would wait for its other end
            raise FlowGRPOError(f"the image {name} could not be read: it is not a regular file.")
        if found.st_size > MAX_BYTES:
            raise too_large
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise FlowGRPOError(f"there is no image {name}.") from error
    except OSError as error:
        raise FlowGRPOError(f"the image {name} could not be read: {(error.strerror or str(error)).lower()}.") from error
    if len(content) > MAX_BYTES:
        raise too_large
    return content


def _too_large(name: str) -> FlowGRPOError:
    return FlowGRPOError(f"the image {name} has more than {MAX_PIXELS // 1_000_000} million pixels: make it smaller.")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _has_avif() -> bool:
    Image.init()
    return "AVIF" in Image.OPEN
