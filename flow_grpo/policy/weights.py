"""The weights of a transformer: all of them trained, checked after they were loaded, or in shards, one on each process (FSDP2)."""

import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import CHECKSUM, UNKNOWN_HASH, check_safetensors, seal_safetensors, write_errors
from flow_grpo.policy.memory import cast_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

WEIGHTS_PREFIX = "diffusion_pytorch_model"  # of the names of a transformer's files in diffusers
CONFIG = "config.json"


def write_transformer(transformer: Any, class_name: str, state: dict[str, Tensor], folder: Path) -> None:
    """Write a transformer with these weights as diffusers reads it, with a checksum in each file."""
    pattern, header = WEIGHTS_PREFIX + "{suffix}.safetensors", {"format": "pt", CHECKSUM: UNKNOWN_HASH}
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        transformer.save_config(folder)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        (folder / CONFIG).write_text(json.dumps({**config, "_class_name": class_name}, indent=2), encoding="utf-8")
        save_torch_state_dict(state, folder, filename_pattern=pattern, metadata=header)
        for file in folder.glob(f"{WEIGHTS_PREFIX}*.safetensors"):
            seal_safetensors(file)


class FullWeights:
    """All weights of a transformer, trained in place of a LoRA.

    Attributes:
        base: the base model's weights by name, once they were stored. While `swap_base` has exchanged them, the trained ones.

    Raises:
        FlowGRPOError: the weights are stored in float8, or the transformer can't be saved.
    """

    def __init__(self, transformer: Any) -> None:
        if not hasattr(transformer, "save_pretrained"):
            raise FlowGRPOError(
                f"lora=null trains all weights, and {type(transformer).__name__} is no ModelMixin of diffusers, which could save "
                "them: set lora, or make it one."
            )
        if cast_layers(transformer):
            raise FlowGRPOError(
                "memory.quantize=fp8_layerwise stores base weights in float8, and here all of them are trained: leave it out"
            )
        self.transformer, self.class_name = transformer, type(transformer).__name__  # sharding changes the class
        self.base: dict[str, Tensor] = {}
        self._dtypes = {name: value.dtype for name, value in self._values()}  # some families keep a few modules in float32

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters of the transformer by name."""
        return dict(self.transformer.named_parameters())

    def train(self) -> None:
        """Make all weights trainable, in float32. Stored base weights become float32 too, as the two are swapped."""
        self.transformer.float().requires_grad_(True)
        self.base = {name: value.float() for name, value in self.base.items()}

    # -- the base model -----------------------------------------------------------------------------------------------

    def store_base_weights(self, device: torch.device | str) -> None:
        """Store the base model's weights on a device: those stored already, else the current ones. Shards stay sharded."""
        own = self.parameters()
        for name, value in (self.base or own).items():
            full = value.detach() if value.shape != own[name].shape else shard_like(value.detach(), own[name])
            self.base[name] = local_shard(full).to(device, copy=True)

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Context in which the transformer has the base model's weights."""
        self.swap_base()
        try:
            yield
        finally:
            self.swap_base()

    def swap_base(self) -> None:
        """Exchange the trained and the base weights: all of them, or none if that fails, as when memory runs out."""
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
        """Swap one weight via `.data`, so that autograd's version counter stays: it is restored before backward runs."""
        own, stored = local_shard(self.transformer.get_parameter(name).data), self.base[name]
        current = own.to(stored.device, copy=True)
        own.copy_(stored)
        stored.copy_(current)

    def remove(self) -> None:
        """Put the base model's weights back for good, in the dtypes they were loaded in."""
        self.swap_base()
        self.base = {}
        self.transformer.requires_grad_(False)
        for name, value in self._values():
            value.data = value.data.to(self._dtypes[name])

    # -- files --------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_saved_in(folder: Path) -> bool:
        """Whether a folder holds a transformer's weights as `save` writes them."""
        return folder.is_dir() and any(folder.glob(f"{WEIGHTS_PREFIX}*.safetensors"))

    def save(self, folder: Path, write: bool = True) -> Path:
        """Write the transformer as diffusers reads it, and return the folder.

        If it is sharded, every process must call this, with write=False on all but one.
        """
        state = gather_to_cpu(self.transformer.state_dict(), write)
        if write:
            state = {name: value.to(self._dtypes[name]) for name, value in state.items()}
            write_transformer(self.transformer, self.class_name, state, folder)
        return folder

    def load(self, folder: Path) -> None:
        """Load saved weights and keep the current ones as the base model's, on the CPU. FlowGRPOError if the shapes differ."""
        for file in folder.glob(f"{WEIGHTS_PREFIX}*.safetensors"):
            check_safetensors(file)
        own = self.transformer.state_dict()
        loaded = type(self.transformer).from_pretrained(folder, torch_dtype=self.transformer.dtype).state_dict()
        if {n: v.shape for n, v in loaded.items()} != {n: v.shape for n, v in own.items()}:
            raise FlowGRPOError(f"the transformer {folder} is of another model than {type(self.transformer).__name__}.")
        self.store_base_weights("cpu")
        self.transformer.load_state_dict(loaded)

    def _values(self) -> list[tuple[str, Tensor]]:
        return [*self.transformer.named_parameters(), *self.transformer.named_buffers()]


def check_weights(weights: Mapping[str, Tensor], source: str) -> None:
    """Raise FlowGRPOError, which begins with the source, if there are no weights, or some are missing, NaN or infinite."""
    if not any(value.numel() for value in weights.values()):
        raise FlowGRPOError(f"{source} holds no weights for the transformer of this model.")
    missing = [name for name, value in weights.items() if value.is_meta]
    if missing:
        raise FlowGRPOError(f"{source} lacks {len(missing)} of {len(weights)} tensors; the first is {missing[0]}.")
    broken = [name for name, value in weights.items() if value.is_floating_point() and not bool(value.isfinite().all())]
    if broken:
        raise FlowGRPOError(
            f"{source} holds values that are not finite, in {len(broken)} of {len(weights)} tensors; the first is {broken[0]}: "
            "take an earlier checkpoint of the run."
        )


def damaged_file(folder: Path, name: str | None = None) -> Path | None:
    """The first .safetensors file of a folder, or the one with this name, that is damaged or holds something else."""
    for file in [folder / name] if name else sorted(folder.glob("*.safetensors")):
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError):
            return file
    return None


def check_shapes(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise FlowGRPOError if a checkpoint's tensors have other names or shapes than the expected ones."""
    if {name: value.shape for name, value in state.items()} != {name: value.shape for name, value in expected.items()}:
        raise FlowGRPOError("the checkpoint's weights have other names or shapes than the config asks for.")


def fully_shard_blocks(
    network: torch.nn.Module,
    blocks: Iterable[torch.nn.Module],
    replicated: set[torch.nn.Parameter],
    mesh: "DeviceMesh | None" = None,
) -> None:
    """Shard a network's weights over the processes (FSDP2, arXiv 2304.11277). A block is gathered while it computes.

    Args:
        blocks: the repeated blocks of the network.
        replicated: parameters that every process keeps in full, such as those of a LoRA, which is small.
        mesh: the processes; with two dimensions, the weights are sharded over the second one, and copied over the first (HSDP).

    Raises:
        FlowGRPOError: this torch cannot leave single parameters out.
    """
    from torch.distributed.fsdp import fully_shard

    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise FlowGRPOError(f"memory.shard needs torch 2.7 or later, and this is {torch.__version__}.")
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params=replicated)
    # shard again after each pass: a process that saves a LoRA alone must not leave the others in another state
    fully_shard(network, mesh=mesh, ignored_params=replicated, reshard_after_forward=True)


def is_sharded(value: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is one of FSDP2's. Whoever made one has imported its module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def full_tensor(value: Tensor) -> Tensor:
    """The full tensor. If it is sharded, every process must call this."""
    return value.full_tensor() if is_sharded(value) else value


def local_shard(value: Tensor) -> Tensor:
    """This process's shard; the tensor itself if it is not sharded."""
    return value.to_local() if is_sharded(value) else value


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """A full tensor sharded as `like` is. A tensor that is sharded already is returned as it is."""
    if is_sharded(like) and not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


def gather_to_cpu(values: Mapping[str, Tensor], keep_on_this_rank: bool = True) -> dict[str, Tensor]:
    """Full copies on the CPU, made one after another.

    If the tensors are sharded, every process must call this; pass keep_on_this_rank=False on processes that discard the result.
    """
    tensors = {}
    for name, value in values.items():
        full = full_tensor(value.detach())
        if keep_on_this_rank:
            tensors[name] = full.to("cpu", copy=True)
    return tensors


@torch.no_grad()
def copy_into(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values, full or sharded, into the parameters of the same names."""
    for name, value in values.items():
        parameters[name].copy_(shard_like(value, parameters[name]))
