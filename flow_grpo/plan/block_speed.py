"""The speed of this machine at a model's own blocks: one of each kind is timed on random numbers."""

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flow_grpo.plan.hardware import TERA, Rates
from flow_grpo.policy.devices import fastest
from flow_grpo.policy.memory import FLOAT8, cast_layers
from flow_grpo.policy.meta_pipeline import BlockCall
from flow_grpo.policy.step_meter import ModelFlopCounter

SECONDS = 0.2  # of each measurement, at least


def measure_rates(calls: list[BlockCall], device: torch.device, dtype: torch.dtype, meta: AbstractContextManager) -> Rates:
    """The rates of all blocks together, in forward passes and in those with a backward pass.

    Args:
        dtype: of autocast, and of all tensors that are not float32.
        meta: a context in which the blocks run on the meta device, where their operations are counted.
    """
    operations, seconds = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for call in calls:
        with ModelFlopCounter() as counter, meta:
            _run(call, False)
        forward = counter.get_total_flops()
        with counter, meta:
            _run(call, True)
        real_call = _real(call, device, dtype)
        for training, count in ((False, forward), (True, counter.get_total_flops())):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                elapsed = fastest(lambda: _run(real_call, training), device, SECONDS)  # noqa: B023
            operations[training] += call.count * count
            seconds[training] += call.count * elapsed
    rates = {training: operations[training] / seconds[training] for training in operations}
    how = f"{rates[True] / TERA:.3g} TFLOP/s, measured on blocks of the model"
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return Rates(rates[False], rates[True], how + threads)


def _run(call: BlockCall, training: bool) -> None:
    """Run a forward pass, and a backward pass if something requires gradients."""
    with torch.set_grad_enabled(training):
        result = call.block(*call.args, **call.kwargs)
    outputs = [leaf for leaf in _tensors(result) if leaf.requires_grad]
    if training and outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    for leaf in (*call.block.parameters(), *_tensors((call.args, call.kwargs))):
        leaf.grad = None


def _real(call: BlockCall, device: torch.device, dtype: torch.dtype) -> BlockCall:
    """The call with random numbers on a device."""

    def numbers(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return torch.ones(leaf.shape, dtype=leaf.dtype, device=device)
        target_dtype = leaf.dtype if leaf.dtype == torch.float32 or leaf.is_complex() else dtype
        return torch.randn(leaf.shape, dtype=target_dtype, device=device).requires_grad_(leaf.requires_grad)

    block = copy.deepcopy(call.block).to_empty(device=device)
    for value in (*block.parameters(), *block.buffers()):
        if value.is_floating_point():
            target_dtype = value.dtype if value.dtype in (torch.float32, FLOAT8) else dtype
            value.data = torch.empty(value.shape, device=device).normal_(std=0.02).to(target_dtype)
    for layer in cast_layers(block):
        layer.compute_dtype = dtype
    args, kwargs = tree_map(numbers, (call.args, call.kwargs))
    return BlockCall(block, args, kwargs, call.count)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
