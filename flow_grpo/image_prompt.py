"""Prompts that carry images: what an editing pipeline is asked to change, or to take as a reference."""

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from pathlib import Path

from PIL import Image

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import read_image, regular_content, to_rgb

MAX_OPEN_IMAGES = 64  # decoded images that are kept in memory


@dataclass(frozen=True)
class SourceImage:
    """An image of a prompt: a file, or its content. Two are equal if their contents are.

    Attributes:
        digest: of the file's content, 32 hexadecimal digits.
        size: width and height in pixels.
    """

    name: str = field(compare=False)  # of the file, for errors
    digest: str
    size: tuple[int, int] = field(compare=False)
    path: Path | None = field(default=None, compare=False)
    content: bytes | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def read(source: Path | bytes, name: str) -> "SourceImage":
        """Read and decode an image once. FlowGRPOError if there is no such file, or it is damaged, too large or no image."""
        content = regular_content(source, name) if isinstance(source, Path) else source
        image = read_image(content, name)
        path, stored_content = (source, None) if isinstance(source, Path) else (None, source)
        return SourceImage(name, hashlib.sha256(content).hexdigest()[:32], image.size, path, stored_content)

    @staticmethod
    def from_pil(image: Image.Image, name: str = "an image") -> "SourceImage":
        """An image in memory."""
        content = io.BytesIO()
        to_rgb(image).save(content, "PNG")
        return SourceImage.read(content.getvalue(), name)

    def open(self) -> Image.Image:
        """The 8-bit RGB image. FlowGRPOError if its file is gone or has changed since it was read."""
        return _opened(self)


class ImagePrompt(str):
    """A prompt with images, at least one: paths, PIL images or `SourceImage`s. FlowGRPOError if one can't be used.

    It is a text, but equal only to prompts with the same text and the same images.
    """

    images: tuple[SourceImage, ...]

    def __new__(cls, text: str, images: "Sequence[SourceImage | Image.Image | str | Path]") -> "ImagePrompt":
        if isinstance(images, str) or not isinstance(images, Iterable) or not (given := list(images)):
            raise FlowGRPOError(f"the prompt {text[:80]!r}: give a list of its images.")
        prompt = super().__new__(cls, text)
        prompt.images = tuple(_source(image, text) for image in given)
        return prompt

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImagePrompt) and prompt_key(self) == prompt_key(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(prompt_key(self))

    def __getnewargs__(self) -> tuple[str, tuple[SourceImage, ...]]:  # type: ignore[override]
        return str.__str__(self), self.images


def images_of(prompt: str) -> tuple[SourceImage, ...]:
    """The images of a prompt; a plain text has none."""
    return prompt.images if isinstance(prompt, ImagePrompt) else ()


def prompt_key(prompt: str) -> str:
    """A plain text that names a prompt and the contents of its images."""
    return "\0".join([str.__str__(prompt), *(image.digest for image in images_of(prompt))])


def with_images(text: str, images: Sequence[SourceImage]) -> str:
    """The prompt with these images; the text itself if there are none."""
    return ImagePrompt(text, images) if images else text


def _source(image: SourceImage | Image.Image | str | Path, text: str) -> SourceImage:
    if isinstance(image, SourceImage):
        return image
    if isinstance(image, Image.Image):
        return SourceImage.from_pil(image, f"of the prompt {text[:80]!r}")
    if not isinstance(image, str | PathLike):
        raise FlowGRPOError(
            f"the prompt {text[:80]!r} has an image of type {type(image).__name__}: give a path or a PIL image."
        )
    return SourceImage.read(Path(image), str(image))


@lru_cache(maxsize=MAX_OPEN_IMAGES)
def _opened(source: SourceImage) -> Image.Image:
    content = source.content if source.content is not None else regular_content(source.path or Path(), source.name)
    if hashlib.sha256(content).hexdigest()[:32] != source.digest:
        raise FlowGRPOError(f"the image {source.name} has changed since the prompts were read: start again.")
    return read_image(content, source.name)
