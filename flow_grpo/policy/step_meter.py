"""What a training step costs: seconds of each phase, floating point operations, memory."""

import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from flow_grpo.policy.devices import matmul_peak
from flow_grpo.policy.interception import eager
from flow_grpo.policy.lora import Lora

Result = TypeVar("Result")
Arguments = tuple[Any, ...]
# the phases, as the metrics `time/PHASE` name them: text (and image) encoders, sampling, VAE decoding, rewards, advantages, waiting for
# other processes, and of the update the losses, their backward passes and the optimizer's steps
PHASES = ("encode", "rollout", "decode", "reward", "advantage", "wait", "forward", "backward", "optimizer")


class ModelFlopCounter(FlopCounterMode):
    """Torch's counter of floating point operations, without those that gradient checkpointing computes again.

    It also counts the attention of a CPU, which some versions of torch count as 0.

    Attributes:
        recomputed: operations that were computed again, of all the counter's contexts.
    """

    def __init__(self) -> None:
        forward, backward = (
            getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{direction}")
            for direction in ("", "_backward")
        )
        counts = {
            forward: lambda query, key, value, *args, **kwargs: sdpa_flop_count(query, key, value),
            backward: lambda grad, query, key, value, *args, **kwargs: sdpa_backward_flop_count(grad, query, key, value),
        }
        super().__init__(display=False, custom_mapping=counts)
        self.recomputed = 0

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # a backward pass enables gradients for nothing but a forward pass that is computed again
        if not (torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1):
            return super()._count_flops(func_packet, out, args, kwargs)
        if func_packet in self.flop_registry:
            self.recomputed += self.flop_registry[func_packet](*args, **kwargs, out_val=out)
        return out


class StepMeter:
    """Measures what a policy's training step costs.

    Operations are counted by torch's counter, each shape of a call once: before the first call of the transformer with arguments of new
    shapes, one more such call is made under the counter, with a backward pass if the call has gradients, and discarded. Later calls
    are counted by their shapes. A backward pass counts when it runs, so kept graphs and rows without a loss are right. What gradient
    checkpointing computes again does not count.

    Args:
        lora: knows the transformers, and whether they compute with an adapter.

    Attributes:
        flops: operations of the transformer and the VAE in this step so far.
        counts_flops: whether they are counted.
    """

    def __init__(self, lora: Lora, device: torch.device) -> None:
        self.lora, self.device = lora, device
        self.flops, self.counts_flops = 0, True
        self._has_events = device.type == "cuda"
        self._open: list[str] = []
        self._marks: list[tuple[str | None, Any]] = []
        self._flops_of_call: dict[Any, tuple[int, int]] = {}  # operations of a forward and of a backward pass
        self._is_measuring = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step, starting from 0. On a GPU the peak of its memory is reset too."""
        self.flops, self._open, self._marks = 0, [], []
        if self.device.type == "cuda":  # without the loading, an evaluation, or the measuring of the device
            torch.cuda.reset_peak_memory_stats(self.device)
        with ExitStack() as hooks:
            for transformer in self.lora.transformers.values() if self.counts_flops else ():
                before = transformer.register_forward_pre_hook(self._before, with_kwargs=True)
                after = transformer.register_forward_hook(self._after, with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of this context for one of `PHASES`. The time of an inner phase does not count for the outer one.

        On a GPU a phase ends when its kernels do: CUDA events are recorded, and read once, by `seconds`. A profiler shows the phase.
        """
        self._open.append(name)
        self._mark()
        try:
            with record_function(name):
                yield
        finally:
            self._open.pop()
            self._mark()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase of this step."""
        spent: dict[str, float] = {}
        if self._has_events and self._marks:
            self._marks[-1][1].synchronize()
        for (name, start), (_, end) in itertools.pairwise(self._marks):
            if name is not None:
                seconds = start.elapsed_time(end) / 1e3 if self._has_events else end - start
                spent[name] = spent.get(name, 0.0) + seconds
        return spent

    def decoding(self, latents: Tensor, decode: Callable[[], Result]) -> Result:
        """Call `decode`, and count its operations by the shape of the latents."""
        key = ("decode", latents.shape)
        if not self.counts_flops:
            return decode()
        if key in self._flops_of_call:
            self.flops += self._flops_of_call[key][0]
            return decode()
        with ModelFlopCounter() as counter:
            result = decode()
        self._flops_of_call[key] = counter.get_total_flops(), 0
        self.flops += self._flops_of_call[key][0]
        return result

    def speed(self, seconds: float, images: float, tflop: float, dtype: torch.dtype, processes: int) -> dict[str, float]:
        """The metrics of a step that took these seconds.

        MFU is the model FLOPs utilisation of arXiv 2204.02311, without what gradient checkpointing computes again: the operations of all
        processes over what their devices could do in this time, at the highest speed measured of a large matrix product in the run's
        dtype.

        Args:
            images: sampled by all processes; 0 if they were given.
            tflop: operations of all processes in 1e12; 0 if they were not counted.
        """
        metrics = {"memory/peak_gb": peak_memory(self.device) / 1e9}
        if images:
            metrics["speed/images_per_second"] = images / seconds
        if tflop:
            speed = metrics["speed/tflop_per_second"] = tflop / seconds
            if peak := matmul_peak(self.device, dtype):
                metrics["speed/mfu"] = 1e12 * speed / (peak * processes)
        return metrics

    def _mark(self) -> None:
        """Note that from now on the innermost open phase counts."""
        now: Any = torch.cuda.Event(enable_timing=True) if self._has_events else time.perf_counter()
        if self._has_events:
            now.record(torch.cuda.current_stream(self.device))  # `self.device` need not be the current one
        self._marks.append((self._open[-1] if self._open else None, now))

    def _before(self, transformer: torch.nn.Module, args: Arguments, kwargs: dict[str, Any]) -> None:
        if self._is_measuring:
            return
        key = self._key(transformer, args, kwargs)
        if key not in self._flops_of_call:
            self._is_measuring = True
            try:
                self._flops_of_call[key] = self._measure(transformer, args, kwargs)
            finally:
                self._is_measuring = False

    def _after(self, transformer: torch.nn.Module, args: Arguments, kwargs: dict[str, Any], output: Any) -> None:
        if self._is_measuring:
            return
        forward, backward = self._flops_of_call[self._key(transformer, args, kwargs)]
        self.flops += forward
        predicted = tree_leaves(output)[0]
        if predicted.requires_grad:
            predicted.register_hook(lambda gradient: self._add(backward))

    def _add(self, operations: int) -> None:
        self.flops += operations

    def _measure(self, transformer: torch.nn.Module, args: Arguments, kwargs: dict[str, Any]) -> tuple[int, int]:
        """Operations of a forward pass, and of its backward pass where gradients are enabled."""
        args, kwargs = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
        call = partial(transformer, *args, **kwargs)
        # a compiled function or a graph would hide its operations from the counter
        with eager(), ModelFlopCounter() as counter:
            predicted = tree_leaves(call())[0]
            forward = counter.get_total_flops()
            if predicted.requires_grad:
                torch.autograd.grad(predicted.float().square().sum(), trained, allow_unused=True)
            return forward, counter.get_total_flops() - forward

    def _key(self, transformer: torch.nn.Module, args: Arguments, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """A key of the number of operations: the model, with the LoRA or without it, with gradients or not, and the shapes."""
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return id(transformer), self.lora.is_enabled, torch.is_grad_enabled(), shapes


def peak_memory(device: torch.device) -> float:
    """The most bytes allocated on the GPU since the last training step began or, on a CPU, by this process altogether."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
