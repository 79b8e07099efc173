"""CUDA graphs of a transformer's forward passes: all kernels of a pass are launched at once."""

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.lora import Lora
from flow_grpo.policy.probes import is_eager
from flow_grpo.text import first_line

MAX_GRAPHS = 32  # of a transformer; calls of further shapes run without one
Call = Callable[[], Any]
# a call -> a function that runs its kernels again, and what the call returned, which that function overwrites
Capture = Callable[[Call], tuple[Callable[[], None], Any]]


class CudaCapture:
    """Captures calls as CUDA graphs that share a stream and memory: they are replayed one after the other, and freed together.

    When one of them is freed, torch also frees cuBLAS's workspace of their stream, which the others use (pytorch#193402).

    Raises:
        FlowGRPOError: the device is not an NVIDIA GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise FlowGRPOError(f"memory.cuda_graphs needs an NVIDIA GPU, and the model is on {device}: leave it out.")
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._newest: Callable[[], torch.cuda.CUDAGraph | None] = lambda: None  # a weak reference

    def __call__(self, call: Call) -> tuple[Callable[[], None], Any]:
        """Run the call twice, and keep the kernels of the second time."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(current):  # where a failed capture would leave another stream as the current one
            graph, newest = torch.cuda.CUDAGraph(), self._newest()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                call()  # libraries and kernels are set up, and constants are cached
            current.wait_stream(self.stream)
            pool = None if newest is None else newest.pool()  # it exists only while a graph uses it
            # other threads may use the GPU meanwhile: rewards do
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                output = call()
            self._newest = weakref.ref(graph)
        return graph.replay, output


@dataclass(frozen=True)
class _Graph:
    """A captured call. `output` is overwritten by `replay`, which reads `inputs` and the weights at their addresses."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    output: Any
    weights: list[Tensor]
    addresses: list[int]

    def run(self, inputs: list[Tensor]) -> Any:
        for own, value in zip(self.inputs, inputs, strict=True):
            own.copy_(value, non_blocking=True)
        self.replay()
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.output)


class ForwardGraphs:
    """A module's forward pass, replayed from a graph where no gradients are needed. What it returns is the same.

    A graph repeats the kernels of one call with the addresses that they had. So there is a graph for each shape, each value that is
    no tensor, each dtype of autocast and each set of adapters, and it is captured anew when weights have moved. The first call of a kind
    runs without a graph, since many calls are never repeated. Calls with tensors of another device always do.

    Args:
        active_weights: returns tensors that differ if the module computes with other adapters.
        capture: see `Capture`.
    """

    def __init__(self, module: torch.nn.Module, active_weights: Callable[[], list[Tensor]], capture: Capture) -> None:
        self.module, self.active_weights, self.capture = module, active_weights, capture
        self._call: Callable[..., Any] = module.forward
        self._device = next(module.parameters()).device
        self._seen: set[Hashable] = set()
        self.graphs: dict[Hashable, _Graph] = {}
        functools.update_wrapper(self, module.forward)  # some pipelines look at the names of its arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output. FlowGRPOError if a call can't be captured."""
        leaves, structure = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if is_eager.get() or torch.is_grad_enabled() or any(value.device != self._device for value in inputs):
            return self._call(*args, **kwargs)
        key = self._key(leaves, str(structure))
        graph = self.graphs.get(key)
        if graph is not None and graph.addresses != _addresses(graph.weights):
            self.clear()  # all of them: see `CudaCapture`
            graph = None
        if graph is None:
            with _without_autocast_cache():
                if key not in self._seen or len(self.graphs) >= MAX_GRAPHS:
                    self._seen.add(key)
                    return self._call(*args, **kwargs)
                graph = self.graphs[key] = self._captured(leaves, structure)
        return graph.run(inputs)

    def clear(self) -> None:
        """Free the graphs and their memory."""
        self.graphs.clear()

    def _key(self, leaves: list[Any], structure: str) -> Hashable:
        """What decides the kernels of a call, and where they read the weights."""
        kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        device = self._device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return structure, kinds, autocast, tuple(map(id, self.active_weights()))

    def _captured(self, leaves: list[Any], structure: Any) -> _Graph:
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, structure)
        # quantised weights have no plain address and never move
        weights = [value for value in (*self.module.parameters(), *self.active_weights()) if _is_plain(value)]
        try:
            replay, output = self.capture(functools.partial(self._call, *args, **kwargs))
        except RuntimeError as error:
            self.clear()
            # torch then fails to end the capture too, and that is what it raises
            cause = error.__context__ if isinstance(error.__context__, Exception) else error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            name = type(self.module).__name__
            raise FlowGRPOError(
                f"memory.cuda_graphs: {name} can't be captured, leave it out: {first_line(cause)}"
            ) from error
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return _Graph(replay, inputs, output, weights, _addresses(weights))


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Context for a capture: a graph would read copies of weights that autocast frees, and that an update does not change.

    Also for the call before it, since a compiled block is compiled anew when this changes.
    """
    was_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_cached)


def _is_plain(value: Tensor) -> bool:
    return type(value.data) is Tensor


def _addresses(weights: list[Tensor]) -> list[int]:
    return [value.data_ptr() for value in weights]


def use_cuda_graphs(lora: Lora, device: torch.device) -> None:
    """Replay the transformers' passes without gradients from CUDA graphs. FlowGRPOError if they are not on an NVIDIA GPU."""
    for transformer in lora.transformers.values():
        transformer.forward = ForwardGraphs(transformer, functools.partial(_active_weights, lora), CudaCapture(device))


def _active_weights(lora: Lora) -> list[Tensor]:
    """Weights of one layer in the adapters that a transformer computes with."""
    layer: Any = next(iter(lora.lora_layers()), None)
    is_on = layer is not None and not layer.disable_adapters
    return [layer.lora_A[name].weight for name in layer.active_adapters] if is_on else []
