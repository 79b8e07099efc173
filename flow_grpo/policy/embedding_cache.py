"""Recordings of prompts, kept: the last ones in memory, and all of them on disk if a folder is given."""

import hashlib
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from flow_grpo.files import write_atomic

IN_MEMORY = 512  # recordings: 3 MB each for SD3.5
LAYOUT = "\0layout"  # what is known of all recordings: their batch axes, and whether they are of one length


class EmbeddingCache:
    """What prompts became, by their text.

    Args:
        folder: where they stay from one run to the next; None keeps them in memory alone.
        key: all that decides what a prompt becomes, such as the model and the length of its text; another key is another place.
    """

    def __init__(self, folder: str | Path | None = None, key: Any = None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser() / _digest(repr(key))
        self._held: OrderedDict[str, Any] = OrderedDict()

    def get(self, text: str) -> Any:
        """The recording of a prompt, or None. A damaged file is as good as none."""
        if text in self._held:
            self._held.move_to_end(text)
        elif self.folder is not None and (file := self._file(text)).exists():
            try:
                self._hold(text, torch.load(file, weights_only=True, map_location="cpu"))
            except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError):
                return None
        return self._held.get(text)

    def put(self, text: str, recording: Any) -> None:
        self._hold(text, recording)
        if self.folder is None:
            return
        content = io.BytesIO()
        torch.save(recording, content)
        write_atomic(self._file(text), content.getvalue())

    def complete(self, texts: list[str]) -> bool:
        """Whether all of them can be read from disk, so that no encoder is needed."""
        return self.folder is not None and all(self.get(text) is not None for text in {LAYOUT, *texts})

    def _hold(self, text: str, recording: Any) -> None:
        self._held[text] = recording
        if len(self._held) > IN_MEMORY:
            self._held.popitem(last=False)

    def _file(self, text: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_digest(text)}.pt"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
