"""A pipeline without its weights: what can be known of it from its configs, before anything large is read.

The text encoders answer zeros. Transformer and VAE answer zeros too, and carry the shapes of what they are called with through
their own code, on torch's fake tensors: so the bytes that would be alive and the floating point operations can be counted.
"""

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers
from diffusers import DiffusionPipeline, ModelMixin
from huggingface_hub import snapshot_download
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from flow_grpo.pipeline import ENCODERS

NO_WEIGHTS = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]


def hollow(source: str, dtype: torch.dtype, cuda: bool) -> DiffusionPipeline:
    """The pipeline of a folder or hub id: its encoders are `Encoder`s, its networks `Followed`.

    Args:
        cuda: follow what CUDA's autocast does, which computes some operations in float32 where the CPU's does not.

    Raises:
        ValueError: it names a class that the installed diffusers does not have.
        OSError: the hub can't be reached.
    """
    folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=NO_WEIGHTS))
    index = json.loads((folder / "model_index.json").read_text())
    kind = getattr(diffusers, index["_class_name"], None)
    if kind is None:
        raise ValueError(f"{source} is a {index['_class_name']}, which diffusers {diffusers.__version__} does not know.")
    parts = {name: _part(folder, name, entry, dtype, cuda) for name, entry in index.items() if not name.startswith("_")}
    return kind(**parts)


def _part(folder: Path, name: str, entry: Any, dtype: torch.dtype, cuda: bool) -> Any:
    if not isinstance(entry, list) or not all(isinstance(word, str) for word in entry):
        return None if isinstance(entry, list) else entry  # an argument of the pipeline
    library, kind = entry
    made = getattr(diffusers if library == "diffusers" else transformers, kind)
    if name.startswith(ENCODERS):
        return Encoder(made, json.loads((folder / name / "config.json").read_text()), dtype)
    if not issubclass(made, ModelMixin):
        return made.from_pretrained(folder, subfolder=name)
    with torch.device("meta"):
        network = made.from_config(made.load_config(folder, subfolder=name)).to(dtype)
    return Followed(network.requires_grad_(False).eval(), cuda)


class Encoder(torch.nn.Module):
    """Says zeros of the right shape in place of a text encoder, from its config alone.

    Attributes:
        bytes: what the weights of the encoder would take.
    """

    def __init__(self, made: Any, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("meta"):
            network = made(made.config_class.from_dict(config))
        self.bytes = sum(p.numel() for p in network.parameters()) * dtype.itemsize
        text = config.get("text_config", config)
        self.config, self.dtype, self.device = SimpleNamespace(**config), dtype, torch.device("cpu")
        self.projected = made.__name__.endswith("WithProjection")
        self.width = text.get("hidden_size") or text.get("d_model")
        self.layers = text.get("num_hidden_layers") or text.get("num_layers")
        self.projection = text.get("projection_dim")

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden = torch.zeros(*input_ids.shape, self.width, dtype=self.dtype)
        states = (hidden,) * (self.layers + 1)
        if self.projected:
            pooled = torch.zeros(len(input_ids), self.projection, dtype=self.dtype)
            return CLIPTextModelOutput(text_embeds=pooled, last_hidden_state=hidden, hidden_states=states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden[:, 0], hidden_states=states)


class Followed:
    """Stands in for a network on the meta device: it follows the shapes of what it is called with, and answers zeros."""

    device = torch.device("cpu")  # the pipeline's own tensors have numbers

    def __init__(self, network: torch.nn.Module, cuda: bool) -> None:
        self._network, self._cuda = network, cuda
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._counter: Any = nullcontext()
        self._outputs: list[Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._follow(self._network, args, kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self._follow(self._network.decode, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    @contextmanager
    def counted(self, counter: Any, backward: bool) -> Iterator[None]:
        """Within it the network's calls are counted, and at its end a backward pass through all of them."""
        self._counter, self._outputs = counter, []
        try:
            with torch.set_grad_enabled(backward):
                yield
            if backward:
                with self._fake, counter:
                    sum(output.float().square().mean() for output in self._outputs).backward()
        finally:
            self._counter, self._outputs = nullcontext(), []
            for parameter in self._network.parameters():
                parameter.grad = None

    def _follow(self, call: Any, args: Any, kwargs: Any) -> Any:
        for module in self._network.modules():  # an adapter may have come since
            for held in (module._parameters, module._buffers):
                held.update({name: self._filled(value) for name, value in held.items() if value is not None})
        with self._fake, self._counter, _InFloat32() if self._cuda else nullcontext():
            found = call(*tree_map(self._faked, args), **tree_map(self._faked, kwargs))
        self._outputs += [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        return tree_map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf, found)

    def _faked(self, value: Any) -> Any:
        return self._fake.from_tensor(value) if isinstance(value, Tensor) else value

    def _filled(self, value: Tensor) -> Tensor:
        """A fake tensor on the CPU for one on the meta device, which no operation takes beside others."""
        if not value.is_meta or isinstance(value, FakeTensor):
            return value
        with self._fake:
            empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        return torch.nn.Parameter(empty, value.requires_grad) if isinstance(value, torch.nn.Parameter) else empty


class _InFloat32(TorchFunctionMode):
    """What CUDA's autocast computes in float32 and a CPU's in the lower precision."""

    RAISED = (F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.RAISED:
            args, kwargs = tree_map(_raised, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, each storage once, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def operations() -> FlopCounterMode:
    """Counts floating point operations. Not beside `Alive`: it holds on to tensors."""
    return FlopCounterMode(display=False)
