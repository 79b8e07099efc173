"""The exponential moving average of what is trained: it is what a run evaluates and saves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flow_grpo.distributed.sharding import copy_into, gather_to_cpu, shard_like
from flow_grpo.policy.weight_checks import check_shapes


class MovingAverage:
    """The exponential moving average of parameters.

    Args:
        parameters: returns the parameters by name.

    Attributes:
        average: the averaged parameters by name; empty unless `start` was called.
    """

    def __init__(self, parameters: Callable[[], dict[str, torch.nn.Parameter]]) -> None:
        self.parameters = parameters
        self.average: dict[str, Tensor] = {}

    def start(self) -> None:
        """Begin the average with the current parameters."""
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters().items()}

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set the average to decay x itself + (1 - decay) x the parameters."""
        for name, parameter in self.parameters().items():
            self.average[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the parameters have the values of the average, if there is one."""
        parameters = self.parameters()
        current = {name: p.detach().clone() for name, p in parameters.items() if name in self.average}
        copy_into(parameters, self.average)
        try:
            yield
        finally:
            copy_into(parameters, current)

    def state_dict(self, keep_on_this_rank: bool = True) -> dict[str, Tensor]:
        """The full (unsharded) average on the CPU, empty if there is none.

        If the parameters are sharded, every process must call this; pass keep_on_this_rank=False on processes that discard the result.
        """
        return gather_to_cpu(self.average, keep_on_this_rank)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore an average. FlowGRPOError if it is of other parameters, or there should be none."""
        parameters = self.parameters()
        check_shapes(state, parameters if self.average else {})
        self.average = {
            name: shard_like(value.to(parameters[name].device), parameters[name].detach()) for name, value in state.items()
        }
