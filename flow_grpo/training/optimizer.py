"""The optimizer: gradients of all processes are summed, clipped and passed to AdamW."""

import math
from typing import Any

import torch
from torch import Tensor

from flow_grpo.config.sections import OptimizerConfig
from flow_grpo.distributed.processes import Processes
from flow_grpo.distributed.sharding import full_tensor, gather_to_cpu, shard_like
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.policy import Policy


class Optimizer:
    """AdamW, identical on every process, or on each process's shard of the weights (FSDP2).

    Attributes:
        is_sharded: whether `state_dict` gathers shards, so that every process must call it.
        synchronous_backward: whether all processes must run backward equally often.
    """

    def __init__(self, policy: Policy, config: OptimizerConfig, processes: Processes) -> None:
        self.parameters = list(policy.trainable_parameters().values())
        self.max_norm, self.processes = config.max_grad_norm, processes
        self.is_sharded, self.synchronous_backward = policy.is_sharded, policy.uses_fsdp
        self.adamw = adamw(self.parameters, config)
        self.scaler = torch.amp.GradScaler(policy.device.type, enabled=policy.dtype == torch.float16)
        self.scaler.scale(torch.zeros((), device=policy.device))  # initialised here, as there may be no row with signal

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a part of the loss."""
        self.scaler.scale(loss).backward()

    def reduce_gradients(self) -> Tensor:
        """Sum the gradients of all processes and clip them. Returns the norm before clipping, (), on the device, without a wait."""
        self.processes.all_reduce_gradients(self.parameters, self.is_sharded)
        self.scaler.unscale_(self.adamw)
        return full_tensor(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm))

    def step(self, lr: float, norm: float) -> None:
        """Update the weights and clear the gradients. If their norm is not finite, no weight is changed.

        Args:
            norm: the value that `reduce_gradients` returned.

        Raises:
            FlowGRPOError: fp16 gradients keep overflowing.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if math.isfinite(norm) or self.scaler.is_enabled():
            self.scaler.step(self.adamw)  # skips the step if fp16 gradients overflowed
            self.scaler.update()
        self.adamw.zero_grad()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise FlowGRPOError("gradients in fp16 overflow however small the loss is scaled: set dtype=bf16 or fp32.")

    def zero_grad(self) -> None:
        """Clear accumulated gradients."""
        self.adamw.zero_grad()
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale())  # the same scale; allows `reduce_gradients` to be called again

    def state_dict(self, keep_on_this_rank: bool = True) -> dict[str, Any]:
        """The full (unsharded) state. If sharded, every process must call this; keep_on_this_rank=False on those that discard it."""
        optimizer, moments = self.adamw.state_dict(), {}
        for index, values in optimizer["state"].items():
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            moments[index] = {**values, **gather_to_cpu(tensors, keep_on_this_rank)}
        return {"optimizer": {**optimizer, "state": moments}, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, on any number of processes."""
        parameters = self.parameters
        moments = {
            index: {
                n: shard_like(v, parameters[index]) if _same_shape(v, parameters[index]) else v for n, v in values.items()
            }
            for index, values in state["optimizer"]["state"].items()
        }
        self.adamw.load_state_dict({**state["optimizer"], "state": moments})
        self.scaler.load_state_dict(state["scaler"])


def _same_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def adamw(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the config names. FlowGRPOError if its package is not installed."""
    settings: Any = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise FlowGRPOError(
            "optimizer.name=adamw_8bit needs bitsandbytes, which is not installed: pip install bitsandbytes."
        ) from error
    return AdamW8bit(parameters, **settings)
