"""Weights in shards, one on each process (FSDP2): splitting a network, and tensors that may be sharded or not."""

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


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
