"""Embeddings of a batch of prompts, whatever the pipeline's `encode_prompt` returns."""

from typing import Any

import torch
from torch import Tensor


class Conditioning:
    """Embeddings of B rows: what the pipeline's `encode_prompt` returned for the distinct prompts, and who has which."""

    def __init__(self, prompts: list[str], outputs: list, batched: list[bool], index: Tensor) -> None:
        self.prompts, self.outputs, self.batched, self.index = prompts, outputs, batched, index

    def take(self, rows: Tensor) -> "Conditioning":
        """The conditioning of `rows`, one embedding per row."""
        index = self.index[rows]
        outputs = [_pick(o, index) if b else o for o, b in zip(self.outputs, self.batched, strict=True)]
        return Conditioning([self.prompts[r] for r in rows.tolist()], outputs, self.batched, torch.arange(len(rows)))

    def pooled(self) -> Tensor:
        """(B, D) float32: each row's mean embedding."""
        pairs = zip(self.outputs, self.batched, strict=True)
        whole = next((o for o, b in pairs if b and isinstance(o, Tensor) and o.ndim == 3), None)
        if whole is None:
            raise ValueError("objective ppo reads prompt embeddings of one length, which this pipeline does not have.")
        return whole.float().mean(1).cpu()[self.index]


def join(parts: list) -> Any:
    return [item for part in parts for item in part] if isinstance(parts[0], list) else torch.cat(parts)


def _pick(output: Any, index: Tensor) -> Any:
    return [output[i] for i in index.tolist()] if isinstance(output, list) else output[index.to(output.device)]
