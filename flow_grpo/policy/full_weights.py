"""A transformer whose weights are all other than the base model's, which are kept beside them."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from flow_grpo.distributed.sharding import gather_to_cpu, local_shard, shard_like
from flow_grpo.files import normalize_safetensors

NAMED = "diffusion_pytorch_model"  # how diffusers begins the names of a transformer's files
CONFIG = "config.json"


class FullWeights:
    """All weights of a transformer, in place of a LoRA on it.

    Attributes:
        base: the base model's weights by name, once they were kept; while `swap` has exchanged them, the others.
    """

    def __init__(self, transformer: Any) -> None:
        self.transformer, self.kind = transformer, type(transformer).__name__  # which sharding changes
        self.base: dict[str, Tensor] = {}
        self._dtypes = {name: value.dtype for name, value in self._values()}  # some families keep a few modules in float32

    @staticmethod
    def lies_in(folder: Path) -> bool:
        return folder.is_dir() and any(folder.glob(f"{NAMED}*.safetensors"))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.transformer.named_parameters())

    def train(self) -> None:
        """All weights are float32 and want gradients; so is the base, if it is kept, which changes places with them."""
        self.transformer.float().requires_grad_(True)
        self.base = {name: value.float() for name, value in self.base.items()}

    def store_base_weights(self, device: torch.device | str) -> None:
        """Keeps the base model's weights there: unless they are kept already, those of now. Of shared ones each process its own."""
        own = self.parameters()
        for name, value in (self.base or own).items():
            whole = value.detach() if value.shape != own[name].shape else shard_like(value.detach(), own[name])
            self.base[name] = local_shard(whole).to(device, copy=True)

    def swap(self) -> None:
        """The base model's weights in place of these, or back; all or, if memory runs out, none."""
        done: list[str] = []
        try:
            for name in self.base:
                self._exchange(name)
                done.append(name)
        except BaseException:
            for name in done:
                self._exchange(name)
            raise

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        """Past autograd, which would not go back through weights that were touched: when it does, they are what they were."""
        own, kept = local_shard(self.transformer.get_parameter(name).data), self.base[name]
        here = own.to(kept.device, copy=True)
        own.copy_(kept)
        kept.copy_(here)

    def leave(self) -> None:
        """Puts the base model's weights back, for good, as they were loaded."""
        self.swap()
        self.base = {}
        self.transformer.requires_grad_(False)
        for name, value in self._values():
            value.data = value.data.to(self._dtypes[name])

    def save(self, folder: Path, write: bool) -> Path:
        """Writes it as diffusers reads it. Where it lies in shares on all processes, all must ask, and one writes."""
        state = gather_to_cpu(self.transformer.state_dict(), write)
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            self.transformer.save_config(folder)
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            (folder / CONFIG).write_text(json.dumps({**config, "_class_name": self.kind}, indent=2), encoding="utf-8")
            state = {name: value.to(self._dtypes[name]) for name, value in state.items()}
            save_torch_state_dict(state, folder, filename_pattern=NAMED + "{suffix}.safetensors")
            for file in folder.glob(f"{NAMED}*.safetensors"):
                normalize_safetensors(file)
        return folder

    def load(self, folder: Path) -> None:
        """Puts saved weights in place of these, which are kept on the CPU. ValueError if they are another model's."""
        own = self.transformer.state_dict()
        loaded = type(self.transformer).from_pretrained(folder, torch_dtype=self.transformer.dtype).state_dict()
        if {n: v.shape for n, v in loaded.items()} != {n: v.shape for n, v in own.items()}:
            raise ValueError("it is of another model")
        self.store_base_weights("cpu")
        self.transformer.load_state_dict(loaded)

    def _values(self) -> list[tuple[str, Tensor]]:
        return [*self.transformer.named_parameters(), *self.transformer.named_buffers()]
