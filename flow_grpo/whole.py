"""A transformer whose weights are all other than the base model's, which are kept beside them."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from flow_grpo.memory import gathered

NAMED = "diffusion_pytorch_model"  # how diffusers begins the names of a transformer's files


class Whole:
    """All weights of a transformer, in place of a LoRA on it.

    Args:
        dtype: in which they are written: that of the base model.

    Attributes:
        base: the base model's weights by name, once they were kept; while `swap` has exchanged them, the others.
    """

    def __init__(self, transformer: Any, dtype: torch.dtype) -> None:
        self.transformer, self.dtype = transformer, dtype
        self.base: dict[str, Tensor] = {}

    @staticmethod
    def lies_in(folder: Path) -> bool:
        return folder.is_dir() and any(folder.glob(f"{NAMED}*.safetensors"))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.transformer.named_parameters())

    def keep_base(self, device: torch.device | str | None) -> None:
        """Keeps the weights as they are now, as those of the base model: there, or where they are."""
        parameters = self.parameters().items()
        self.base = {n: p.detach().clone() if device is None else p.detach().to(device, copy=True) for n, p in parameters}

    @torch.no_grad()
    def swap(self) -> None:
        """The base model's weights in place of these, or back. Past autograd, which would not go back through weights that were
        touched: when it does, they are what they were."""
        parameters = self.parameters()
        for name, kept in self.base.items():
            here = parameters[name].data.clone()
            parameters[name].data.copy_(kept)
            kept.copy_(here)

    def leave(self) -> None:
        """Puts the base model's weights back, for good."""
        self.swap()
        self.base = {}
        self.transformer.to(self.dtype).requires_grad_(False)

    def save(self, folder: Path, write: bool) -> Path:
        """Writes it as diffusers reads it. Where it lies in shares on all processes, all must ask, and one writes."""
        state = {name: gathered(value).cpu() for name, value in self.transformer.state_dict().items()}
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            self.transformer.save_config(folder)
            state = {n: v.to(self.dtype) if v.is_floating_point() else v for n, v in state.items()}
            save_torch_state_dict(state, folder, filename_pattern=NAMED + "{suffix}.safetensors")
        return folder

    def load(self, folder: Path) -> None:
        """Puts saved weights in place of these, which are kept on the CPU. ValueError if they are another model's."""
        own = self.transformer.state_dict()
        loaded = type(self.transformer).from_pretrained(folder, torch_dtype=self.transformer.dtype).state_dict()
        if {n: v.shape for n, v in loaded.items()} != {n: v.shape for n, v in own.items()}:
            raise ValueError("it is of another model")
        self.keep_base("cpu")
        self.transformer.load_state_dict(loaded)
