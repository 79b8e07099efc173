"""Count what a computation on the meta device would take: bytes allocated at once, and floating point operations."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flow_grpo.policy.step_meter import ModelFlopCounter

# How many times the bytes of its input and output cuDNN takes for a convolution in 16 bits: it copies both to the order channels-last.
# Measured on an H200 for the VAE of SD3 and FLUX, at three sizes.
CUDNN_WORKSPACE = 1.25


class LiveBytesCounter(TorchDispatchMode):
    """Counts the bytes of live tensors, each storage once, and their peak.

    Args:
        cuda: whether convolutions take what cuDNN takes.
    """

    def __init__(self, cuda: bool = False) -> None:
        super().__init__()
        self.now, self.peak = 0, 0.0
        self.cuda = cuda
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = _storages((args, kwargs))  # a view allocates nothing
        for key, storage in _storages(output).items():
            if key not in inputs:
                self._count(key, storage)
        if self.cuda and func is torch.ops.aten.convolution.default and output.element_size() == 2:
            self.peak = max(self.peak, self.now + CUDNN_WORKSPACE * (args[0].nbytes + output.nbytes))
        return output

    def _count(self, key: int, storage: Any) -> None:
        size = storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _storages(values: Any) -> dict[int, Any]:
    leaves = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in leaves}


class FlopCounter:
    """Counts floating point operations. Do not combine it with `LiveBytesCounter`: torch's counter holds on to tensors.

    Attributes:
        total: all operations.
        recomputed: those among them that gradient checkpointing computes again.
    """

    def __init__(self) -> None:
        self.total, self.recomputed = 0, 0

    def __enter__(self) -> None:
        self._counter = ModelFlopCounter()  # a new one, since entering clears it
        self._counter.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)
        self.recomputed += self._counter.recomputed
        self.total += self._counter.get_total_flops() + self._counter.recomputed
