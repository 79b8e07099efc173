"""Encoded prompts, cached: the most recent ones in memory, and all of them on disk if a folder is given."""

import hashlib
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from flow_grpo.files import write_atomic
from flow_grpo.image_prompt import images_of, prompt_key

MAX_IN_MEMORY = 512  # prompts: 3 MB each for SD3.5
LAYOUT = "\0layout"  # the key of what applies to all prompts: their batch axes, and whether they are padded to one length


def layout_key(prompt: str) -> str:
    """The key of what applies to all prompts with as many images as this one."""
    images = images_of(prompt)
    return f"{LAYOUT} {len(images)}" if images else LAYOUT


class EmbeddingCache:
    """Encoder outputs by prompt: by its text and the contents of its images.

    Args:
        folder: where they are stored for later runs; None for in memory only.
        key: everything that the outputs depend on, such as the model; each key has a folder of its own.
    """

    def __init__(self, folder: str | Path | None = None, key: Any = None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser() / _digest(repr(key))
        self._in_memory: OrderedDict[str, Any] = OrderedDict()

    def get(self, prompt: str) -> Any:
        """The outputs of a prompt, or None, also if the file is damaged: a single other bit is seen."""
        key = _key(prompt)
        if key in self._in_memory:
            self._in_memory.move_to_end(key)
        elif self.folder is not None and (file := self._file(key)).exists():
            try:
                self._add_to_memory(key, _read(file.read_bytes()))
            except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError):
                return None
        return self._in_memory.get(key)

    def put(self, prompt: str, outputs: Any) -> None:
        """Keep what the encoders returned for a prompt."""
        key = _key(prompt)
        self._add_to_memory(key, outputs)
        if self.folder is None:
            return
        content = io.BytesIO()
        torch.save(outputs, content)
        write_atomic(self._file(key), hashlib.sha256(content.getvalue()).digest() + content.getvalue())

    def complete(self, prompts: list[str]) -> bool:
        """Whether all of them are on disk, so that no encoder is needed."""
        keys = {*prompts, *map(layout_key, prompts)}
        return self.folder is not None and all(self.get(key) is not None for key in keys)

    def _add_to_memory(self, key: str, outputs: Any) -> None:
        self._in_memory[key] = outputs
        if len(self._in_memory) > MAX_IN_MEMORY:
            self._in_memory.popitem(last=False)

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_digest(key)}.pt"


def _key(prompt: str) -> str:
    """Of a prompt in the cache. 0.4 decoded some images otherwise, so what it stored of prompts with images is not found."""
    return prompt_key(prompt) + ("\0upright, on white" if images_of(prompt) else "")


def _read(content: bytes) -> Any:
    """What `put` has written: a checksum of 32 bytes, and what torch saves. ValueError if they don't fit, as in a file of 0.4."""
    checksum, saved = content[:32], content[32:]
    if hashlib.sha256(saved).digest() != checksum:
        raise ValueError("the checksum is wrong")
    return torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
