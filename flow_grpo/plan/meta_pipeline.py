"""A pipeline without its weights, built from its config files on torch's meta device.

Text encoders, transformer and VAE return zeros. Transformer and VAE run their own code on meta tensors of the shapes that they are called
with, so that memory and floating point operations can be counted.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from huggingface_hub import snapshot_download
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from flow_grpo.policy import hub
from flow_grpo.policy.encoding import ENCODER_PREFIXES
from flow_grpo.policy.hub import load_errors, read_index
from flow_grpo.policy.memory import repeated_blocks
from flow_grpo.rewards.downloads import downloads

NO_WEIGHTS = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
# In the hub's layout, with small tokenizers, which make prompts of several hundred tokens where a model does not pad them.
FOLDER = Path(__file__).parent / "model_configs"
FOLDERS = {
    "stabilityai/stable-diffusion-3.5-medium": "sd35_medium",
    "stabilityai/stable-diffusion-3.5-large": "sd35_large",
    "black-forest-labs/FLUX.1-dev": "flux_dev",
    "black-forest-labs/FLUX.2-klein-base-4B": "flux2_klein",
    "Qwen/Qwen-Image": "qwen_image",
    "Tongyi-MAI/Z-Image": "z_image",
    "Efficient-Large-Model/Sana_1600M_512px_diffusers": "sana",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan21",
}


@dataclass(frozen=True)
class BlockCall:
    """A block on the meta device and the arguments that it was called with; `count` blocks of the model are of its kind."""

    block: torch.nn.Module
    args: Any
    kwargs: Any
    count: int


def load_meta_pipeline(source: str, dtype: torch.dtype, cuda: bool) -> DiffusionPipeline:
    """The pipeline of a folder or hub id: its encoders are `MetaTextEncoder`s, its networks `MetaModule`.

    Args:
        cuda: do what CUDA's autocast does, which computes some operations in float32 that the CPU's does not.

    Raises:
        FlowGRPOError: its configs are damaged, name a class that is not installed, or cannot be downloaded.
    """
    folder = Path(source)
    if not folder.is_dir():
        with downloads(source):
            folder = Path(snapshot_download(source, allow_patterns=NO_WEIGHTS))
    index = read_index(folder)
    parts = {
        name: part_class and _load_part(folder, name, part_class, dtype, cuda) for name, part_class in index.parts.items()
    }
    with load_errors(folder):
        pipe = index.pipeline_class(**parts, **index.settings)
    pipe.register_to_config(_name_or_path=str(folder))
    return pipe


def _load_part(folder: Path, name: str, part_class: Any, dtype: torch.dtype, cuda: bool) -> Any:
    with load_errors(folder, name):
        if name.startswith(ENCODER_PREFIXES):
            return MetaTextEncoder(
                part_class, json.loads((folder / name / "config.json").read_text(encoding="utf-8")), dtype
            )
        if not issubclass(part_class, ModelMixin):
            return part_class.from_pretrained(folder, subfolder=name)
        with torch.device("meta"):
            network = part_class.from_config(part_class.load_config(folder, subfolder=name)).to(dtype)
        return MetaModule(network.requires_grad_(False).eval(), dtype, cuda)


class MetaTextEncoder(torch.nn.Module):
    """Returns zeros of the right shape in place of a text encoder, from its config alone.

    Attributes:
        bytes: the size of the encoder's weights.
    """

    def __init__(self, encoder_class: Any, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("meta"):
            network = encoder_class(encoder_class.config_class.from_dict(config))
        self.bytes = sum(p.numel() for p in network.parameters()) * dtype.itemsize
        text = config.get("text_config", config)
        self.config, self.dtype, self.device = SimpleNamespace(**config), dtype, torch.device("cpu")
        self.projected = encoder_class.__name__.endswith("WithProjection")
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


class MetaModule:
    """Stands in for a network: runs its code on the meta device with the shapes of its arguments, and returns zeros.

    Attributes:
        cast: the context in which its code runs on the meta device.
    """

    device = torch.device("cpu")  # the pipeline's own tensors have values

    def __init__(self, network: torch.nn.Module, dtype: torch.dtype, cuda: bool) -> None:
        self._network: Any = network
        self.cast = _Cast(dtype, cuda)
        self._counter: Any = nullcontext()
        self._outputs: list[Tensor] = []
        self._backward = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._network, args, kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._network.decode, args, kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """The VAE's, of a prompt's images."""
        output = self._run(self._network.encode, args, kwargs)
        if "latent_dist" in output:
            output.latent_dist = DiagonalGaussianDistribution(torch.zeros(output.latent_dist.parameters.shape))
        return output

    def enable_gradient_checkpointing(self) -> None:
        def checkpointed(block: Any, *args: Any) -> Any:
            # what is computed again is cast too
            return checkpoint(block, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), self.cast))

        self._network.enable_gradient_checkpointing(checkpointed)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._network, name)  # a module or a buffer, when the pipeline computes with it itself
        if isinstance(value, Tensor):
            return torch.ones(value.shape, dtype=value.dtype)
        return copy.deepcopy(value).to_empty(device="cpu") if isinstance(value, torch.nn.Module) else value

    @contextmanager
    def counting(self, counter: Any, backward: bool, release_gradients: bool = False) -> Iterator[None]:
        """Context in which the network's calls are counted; at its end comes a backward pass through all of them.

        Args:
            release_gradients: drop each gradient as soon as it is computed, as where it is reduced to the other processes.
        """
        self._counter, self._outputs, self._backward = counter, [], backward
        trained = [parameter for parameter in self._network.parameters() if release_gradients and parameter.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(_drop_gradient) for parameter in trained]
        try:
            with torch.set_grad_enabled(backward):
                yield
            if backward:
                with counter:
                    loss = torch.stack([output.float().square().mean() for output in self._outputs]).sum()
                    torch.autograd.backward(loss)
        finally:
            self._counter, self._outputs, self._backward = nullcontext(), [], False
            for hook in hooks:
                hook.remove()
            for parameter in self._network.parameters():
                _drop_gradient(parameter)

    @contextmanager
    def block_calls(self) -> Iterator[list[BlockCall]]:
        """Context in which the first call of one repeated block of each kind is added to the list. FlowGRPOError if none are known."""
        blocks_by_class: dict[type, list[torch.nn.Module]] = {}
        for block in repeated_blocks(self._network, "plan"):
            blocks_by_class.setdefault(type(block), []).append(block)
        calls: list[BlockCall] = []
        counts = {blocks[len(blocks) // 2]: len(blocks) for blocks in blocks_by_class.values()}

        def record_call(block: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if all(call.block is not block for call in calls):
                detached_args, detached_kwargs = tree_map(_detached, (args, kwargs))
                calls.append(BlockCall(block, detached_args, detached_kwargs, counts[block]))

        hooks = [block.register_forward_pre_hook(record_call, with_kwargs=True) for block in counts]
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()

    def _run(self, call: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(_to_meta, (args, kwargs))
        if self._backward and not any(parameter.requires_grad for parameter in self._network.parameters()):
            args, kwargs = tree_map(_with_gradient, (args, kwargs))  # of a frozen network, the gradient is that of its input
        with self._counter, self.cast:
            output = call(*args, **kwargs)
        self._outputs += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return tree_map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf, output)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _detached(value: Any) -> Any:
    """A tensor without its graph, that requires a gradient if it did."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _with_gradient(value: Any) -> Any:
    return value.requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


class _Cast(TorchFunctionMode):
    """Autocast for the meta device, and attention kernels that do not materialise the attention matrix."""

    LOWER_PRECISION_OPS = (F.linear, F.conv2d, torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__)
    # on CUDA, not on a CPU
    FLOAT32_OPS = (F.layer_norm, F.group_norm, F.interpolate, F.softmax, torch.softmax, Tensor.softmax)

    def __init__(self, dtype: torch.dtype, cuda: bool) -> None:
        super().__init__()
        self.dtype, self.float32_ops = dtype, self.FLOAT32_OPS if cuda else ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if self.dtype != torch.float32 and func in self.LOWER_PRECISION_OPS:
            args, kwargs = self._all_to_dtype(self.dtype, args, kwargs)
        elif self.dtype != torch.float32 and func in self.float32_ops:
            args, kwargs = self._all_to_dtype(torch.float32, args, kwargs)
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        heads = [self._to_dtype(self.dtype, t) if self.dtype != torch.float32 else t for t in (query, key, value)]
        if enable_gqa:
            heads[1:] = [t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in heads[1:]]
        mask = attn_mask.to(heads[0].dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(*heads, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]

    def _all_to_dtype(self, dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
        cast = self._to_dtype
        return tuple(cast(dtype, value) for value in args), {name: cast(dtype, value) for name, value in kwargs.items()}

    @staticmethod
    def _to_dtype(dtype: torch.dtype, value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def load_for_plan(name: str, dtype: torch.dtype, cuda: bool) -> tuple[DiffusionPipeline, str]:
    """The pipeline of a model without its weights, and a sentence if its config files are the package's; arguments as in
    `load_meta_pipeline`.

    Raises:
        FlowGRPOError: there is no such model, or its configs are damaged or can't be read and are not in the package.
    """
    try:
        return load_meta_pipeline(hub.resolve_model(name), dtype, cuda), ""
    except ValueError as error:
        if name not in FOLDERS or Path(name).is_dir():
            raise
        pipe = load_meta_pipeline(str(FOLDER / FOLDERS[name]), dtype, cuda)
        return pipe, f"The config files are those in the package: {error}"
