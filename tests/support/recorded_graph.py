"""What a CUDA graph does, on a CPU: the operations of a call are recorded with their tensors, and run again on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, _tensors(output)))
        return output


class RecordedCapture:
    """In place of `CudaCapture`, on any device.

    As in a graph, what Python decided is fixed, and so are the addresses.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = 0

    def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.count += 1
        with _Recorder() as recorder:
            output = call()
        for leaf in _tensors(output):
            leaf.fill_(torch.nan)  # a capture computes nothing
        return lambda: _run_again(recorder.operations), output


@torch.no_grad()
def _run_again(operations: list[tuple[Any, tuple, dict, list[Tensor]]]) -> None:
    for function, args, kwargs, outputs in operations:
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for own, value in zip(outputs, _tensors(function(*args, **kwargs)), strict=True):
            if own.untyped_storage().data_ptr() not in inputs:  # else it is a view, or was changed in place
                own.copy_(value)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
