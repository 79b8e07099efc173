"""CUDA graphs of a transformer's forward passes: all kernels of a pass are launched at once."""

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from flow_grpo.policy.lora import Lora
from flow_grpo.policy.probes import is_eager
from flow_grpo.text import first_line

MAX_GRAPHS = 32  # of a transformer; calls of further shapes run without one
Call = Callable[[], Any]
# a call -> a function that runs its kernels again, and what the call returned, which that function overwrites
Capture = Callable[[Call], tuple[Callable[[], None], Any]]


class CudaCapture:
    """Captures calls as CUDA graphs of one device, which share their memory: they are replayed one after the other.

    Raises:
        ValueError: the device is not an NVIDIA GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"memory.cuda_graphs needs an NVIDIA GPU, and the model is on {device}: leave it out.")
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._newest: Callable[[], torch.cuda.CUDAGraph | None] = lambda: None  # a weak reference

    def __call__(self, call: Call) -> tuple[Callable[[], None], Any]:
        """Run the call twice, and keep the kernels of the second time."""
        with torch.cuda.device(self.device):
            graph, newest, current = torch.cuda.CUDAGraph(), self._newest(), torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                call()  # libraries allocate their workspaces, which they can't in a capture
            current.wait_stream(self.stream)
            pool = None if newest is None else newest.pool()  # of a graph that is there: else torch has given it up
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
    runs without a graph, since some happen only once. Calls with tensors of another device always do.

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
        """The module's output. ValueError if a call can't be captured."""
        leaves, structure = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if is_eager.get() or torch.is_grad_enabled() or any(value.device != self._device for value in inputs):
            return self._call(*args, **kwargs)
        key = self._key(leaves, str(structure))
        graph = self.graphs.get(key)
        if graph is None or graph.addresses != _addresses(graph.weights):
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
        # of those that a quantisation made, which have no address, none moves
        weights = [value for value in (*self.module.parameters(), *self.active_weights()) if _is_plain(value)]
        was_cached = torch.is_autocast_cache_enabled()
        # else the graph would read a copy of weights that autocast frees, and that an update does not change
        torch.set_autocast_cache_enabled(False)
        try:
            replay, output = self.capture(functools.partial(self._call, *args, **kwargs))
        except RuntimeError as error:
            # torch then fails to end the capture too, and that is what it raises
            cause = error.__context__ if isinstance(error.__context__, Exception) else error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            name = type(self.module).__name__
            raise ValueError(f"memory.cuda_graphs: {name} can't be captured, leave it out: {first_line(cause)}") from error
        finally:
            torch.set_autocast_cache_enabled(was_cached)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return _Graph(replay, inputs, output, weights, _addresses(weights))


def _is_plain(value: Tensor) -> bool:
    return type(value.data) is Tensor


def _addresses(weights: list[Tensor]) -> list[int]:
    return [value.data_ptr() for value in weights]


def use_cuda_graphs(lora: Lora, device: torch.device) -> None:
    """Replay the transformers' passes without gradients from CUDA graphs. ValueError if they are not on an NVIDIA GPU."""
    capture = CudaCapture(device)
    for transformer in lora.transformers.values():
        transformer.forward = ForwardGraphs(transformer, functools.partial(_active_weights, lora), capture)


def _active_weights(lora: Lora) -> list[Tensor]:
    """Weights of one layer in the adapters that a transformer computes with."""
    layer: Any = next(iter(lora.lora_layers()), None)
    is_on = layer is not None and not layer.disable_adapters
    return [layer.lora_A[name].weight for name in layer.active_adapters] if is_on else []
