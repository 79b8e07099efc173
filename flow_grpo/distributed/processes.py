"""The processes that share a run: which process has which groups, and the communication between them.

torchrun, `accelerate launch` or `flow-grpo train --num-processes` start them. A group is complete on one process. All processes hold
the same adapter and optimizer and take the same decisions; only their rows differ. So a run does not depend on the number of
processes, up to the order in which numbers are added.
"""

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from flow_grpo.distributed.parent import end_with_launcher
from flow_grpo.errors import FlowGRPOError, RetryableError, is_retryable
from flow_grpo.text import first_line

PEER_LOST = 76  # exit status of a process that lost its connection to another one
Value = TypeVar("Value")
BUCKET_NUMEL = 2**26  # approximate size of a message between processes, which is copied once
# How long a process waits for another one that runs: between devices for what all compute alike, and for a value for as long as rewards
# may take, of which `human` waits for a person. A process that has ended breaks its connections at once.
DEVICE_TIMEOUT, VALUE_TIMEOUT = timedelta(hours=1), timedelta(days=7)


class Processes:
    """This process among `world_size`, the first having `rank` 0. Made once, by `from_environment`, or `Processes()` for one by itself.

    Values are exchanged by gloo, so that no device is waited for; gradients by the backend of the device.

    Args:
        value_group: the process group in which values are exchanged; by default that of the gradients.

    Attributes:
        stop_requested: whether this process was asked to stop the run, by Ctrl-C or SIGTERM.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, device: str | None = None, value_group: Any = None) -> None:
        self.rank, self.world_size, self.device, self.value_group = rank, world_size, device, value_group
        self.stop_requested = False

    @classmethod
    def from_environment(cls, device: str | None = None) -> "Processes":
        """Join the processes that the launcher's environment names, each on its own device. The process ends with the launcher.

        Raises:
            FlowGRPOError: the processes can't connect.
        """
        rank, world_size = (_whole_number(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        if not 0 <= rank < max(world_size, 1):
            raise FlowGRPOError(
                f"RANK={rank}, but WORLD_SIZE={world_size} processes have the ranks 0 to {world_size - 1}: start them by torchrun, "
                "`accelerate launch` or --num-processes, or unset RANK and WORLD_SIZE."
            )
        if world_size < 2:
            return cls(device=device)
        end_with_launcher()
        from accelerate import PartialState

        try:
            state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), timeout=DEVICE_TIMEOUT)
            value_group = torch.distributed.new_group(backend="gloo", timeout=VALUE_TIMEOUT)
        except RuntimeError as error:
            address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            reason = first_line(error).rstrip(".")
            raise RetryableError(
                f"the {os.environ['WORLD_SIZE']} processes of the run don't meet at {address} ({reason}): set MASTER_PORT to a port "
                "that no other program uses, MASTER_ADDR to the machine of rank 0, and GLOO_SOCKET_IFNAME to the network interface."
            ) from error
        return cls(state.process_index, state.num_processes, str(state.device), value_group)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def should_stop(self) -> bool:
        """Whether to leave a wait that all processes end together."""
        return self.stop_requested

    def should_stop_alone(self) -> bool:
        """Whether to leave what other processes take part in, such as a forward pass. Several stop where they communicate."""
        return self.world_size == 1 and self.stop_requested

    def owner(self, group: Tensor) -> Tensor:
        """Rank of the process that each group belongs to: round robin, so that all get equally many."""
        return group % self.world_size

    def owns(self, group: Tensor) -> Tensor:
        """Whether each group belongs to this process."""
        return self.owner(group) == self.rank

    def all_gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank. Every process must call this."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, self.value_group)
        return values

    def gather_or_raise(
        self, call: Callable[[], Value], errors: tuple[type[Exception], ...] = (FlowGRPOError,)
    ) -> list[Value]:
        """What `call` returns in each process, by rank. An error of one of these types is raised in all of them, so that none waits.

        The error has the attribute `is_shared`.
        """
        if self.world_size == 1:
            return [call()]
        result, error, failure = None, None, None
        try:
            result = call()
        except errors as raised:
            kind = next(kind for kind in errors if isinstance(raised, kind))
            error, failure = raised, (RetryableError if is_retryable(raised) else kind, str(raised))
        parts = self.all_gather((result, failure))
        failed = next((rank_failure for _, rank_failure in parts if rank_failure is not None), None)
        if failed is not None:
            kind, text = failed
            shared = kind(text)
            shared.is_shared = True  # type: ignore[attr-defined]
            raise shared from error
        return [value for value, _ in parts]  # type: ignore[misc]

    def destroy(self) -> None:
        """Leave the process group, at the end of a run."""
        if self.world_size > 1:
            # with torch 2.6 this hangs where a thread of gloo still waits for the GIL after its last message
            time.sleep(0.2)
            torch.distributed.destroy_process_group()

    def any(self, value: bool) -> bool:
        """Whether a flag is true on any process. Every process must call it."""
        return any(self.all_gather(value))

    @torch.no_grad()
    def all_reduce_gradients(self, parameters: list[torch.nn.Parameter], is_sharded: bool = False) -> None:
        """Replace each gradient by the sum over all processes; a missing one counts as 0, unless all processes miss it.

        Then it stays None, as in one process: the optimizer passes over an expert that no step has called.

        Args:
            is_sharded: each process holds shards of the parameters, whose gradients are already means over all processes.
        """
        if self.world_size == 1:
            return
        if is_sharded:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.world_size)
            return
        ranks = self.all_gather([parameter.grad is not None for parameter in parameters])
        for parameter, exists in zip(parameters, zip(*ranks, strict=True), strict=True):
            if parameter.grad is None and any(exists):
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            torch.distributed.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def local_microbatch(self, prompts: int, images: int, microbatch: int, updates: int, pairs: bool = False) -> int:
        """The micro-batch of a process: the largest that divides its rows, at most `microbatch`, even for pairs of rows.

        FlowGRPOError if a step can't be shared evenly.
        """
        if self.world_size > 1 and prompts % (updates * self.world_size):
            raise FlowGRPOError(
                f"prompts_per_step={prompts} is not divisible by updates x processes = {updates} x {self.world_size}: every process takes "
                "an equal share of each update."
            )
        rows = prompts * images // self.world_size
        fitting = [n for n in range(1, min(microbatch, rows) + 1) if rows % n == 0 and not (pairs and n % 2)]
        if not fitting:
            raise FlowGRPOError(f"dpo compares pairs of rows, but a process has {rows} of them: set other sizes of a step.")
        return fitting[-1]


def _whole_number(name: str, default: str) -> int:
    """An environment variable of a launcher."""
    value = os.environ.get(name, default)
    if not value.isascii() or not value.isdecimal():
        raise FlowGRPOError(f"{name}={value} in the environment is no number: start processes by torchrun, or unset it.")
    return int(value)


def is_peer_lost(error: RuntimeError) -> bool:
    """Whether an error of torch means that another process of the run is gone."""
    return any(word in str(error) for word in ("gloo", "NCCL", "onnection"))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients into few messages of at most BUCKET_NUMEL numbers each; a larger gradient is one by itself."""
    bucket: list[Tensor] = []
    numel = 0
    for gradient in gradients:
        if bucket and numel + gradient.numel() > BUCKET_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append(gradient)
        numel += gradient.numel()
    if bucket:
        yield bucket
