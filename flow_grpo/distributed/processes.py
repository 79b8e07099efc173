"""The processes that share a run: whose groups are whose, and what all of them know together.

torchrun, `accelerate launch` or `flow-grpo train --num-processes` start them; a process by itself is all of them. Groups live whole
on a process. All processes hold the same adapter and optimizer, take the same decisions and differ in their rows alone: so a run
does not depend on how many there are, up to the order in which numbers are added.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from flow_grpo.distributed.parent import end_with_launcher

PEER_LOST = 75  # exit status of a process that has lost another one
Value = TypeVar("Value")
BUCKET_NUMEL = 2**26  # numbers in a message between processes, about, which is copied once


class Processes:
    """This process among `world_size`, the first having `rank` 0. Made once, by `from_environment`, or `Processes()` for one by itself."""

    def __init__(self, rank: int = 0, world_size: int = 1, device: str | None = None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device

    @classmethod
    def from_environment(cls, device: str | None = None) -> "Processes":
        """As the launcher's environment says; joins the others, on a device of its own. Ends with the launcher.

        Raises:
            ValueError: the processes don't find each other.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls(device=device)
        end_with_launcher()
        from accelerate import PartialState

        try:
            state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        except RuntimeError as error:
            address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            said = str(error).strip().splitlines()[0].rstrip(".")
            raise ValueError(
                f"the {os.environ['WORLD_SIZE']} processes of the run don't meet at {address} ({said}): set MASTER_PORT to a port "
                "that no other program uses, and MASTER_ADDR to the machine of rank 0."
            ) from error
        return cls(state.process_index, state.num_processes, str(state.device))

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def owner(self, group: Tensor) -> Tensor:
        """Rank of the process that each group belongs to: taken in turns, so that all shares of a step are even."""
        return group % self.world_size

    def owns(self, group: Tensor) -> Tensor:
        """Whether each group is this process's own."""
        return self.owner(group) == self.rank

    def all_gather(self, value: Value) -> list[Value]:
        """The value that each process gives, by rank. All must ask."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(found, value)
        return found

    def gather_or_raise(self, call: Callable[[], Value], errors: tuple[type[Exception], ...] = (ValueError,)) -> list[Value]:
        """What `call` returns in each process, by rank; an error of one of these kinds is raised by all, so that none waits for it."""
        if self.world_size == 1:
            return [call()]
        made, error, said = None, None, None
        try:
            made = call()
        except errors as raised:
            error, said = raised, (next(kind for kind in errors if isinstance(raised, kind)), str(raised))
        parts = self.all_gather((made, said))
        failed = next((found for _, found in parts if found is not None), None)
        if failed is not None:
            kind, text = failed
            raise kind(text) from error
        return [value for value, _ in parts]  # type: ignore[misc]

    def destroy(self) -> None:
        """At the end of a run."""
        if self.world_size > 1:
            torch.distributed.destroy_process_group()

    def any(self, value: bool) -> bool:
        return any(self.all_gather(value))

    @torch.no_grad()
    def all_reduce_gradients(self, parameters: list[torch.nn.Parameter], is_sharded: bool = False) -> None:
        """Each gradient becomes the sum of all processes' ones; one that is missing counts as 0.

        Args:
            is_sharded: each process holds shares of the parameters, whose gradients are the mean of all processes' ones already.
        """
        if self.world_size == 1:
            return
        if is_sharded:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.world_size)
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for some in _buckets(gradients):
            whole = torch.cat([gradient.flatten() for gradient in some])
            torch.distributed.all_reduce(whole)
            for gradient, part in zip(some, whole.split([g.numel() for g in some]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def local_microbatch(self, prompts: int, images: int, microbatch: int, updates: int, pairs: bool = False) -> int:
        """The micro-batch of a process: the largest that divides its rows, at most `microbatch`, even for pairs of rows.

        ValueError if a step can't be shared evenly.
        """
        if self.world_size > 1 and prompts % (updates * self.world_size):
            raise ValueError(
                f"prompts_per_step={prompts} is not divisible by updates x processes = {updates} x {self.world_size}: every process takes "
                "an equal share of each update."
            )
        rows = prompts * images // self.world_size
        fitting = [n for n in range(1, min(microbatch, rows) + 1) if rows % n == 0 and not (pairs and n % 2)]
        if not fitting:
            raise ValueError(f"dpo compares pairs of rows, but a process has {rows} of them: set other sizes of a step.")
        return fitting[-1]


def is_peer_lost(error: RuntimeError) -> bool:
    """Whether an error of torch says that another process of the run is gone."""
    return any(word in str(error) for word in ("gloo", "NCCL", "onnection"))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """A few messages in place of hundreds, none much larger than its largest part."""
    some: list[Tensor] = []
    for gradient in gradients:
        if some and sum(g.numel() for g in some) + gradient.numel() > BUCKET_NUMEL:
            yield some
            some = []
        some.append(gradient)
    yield some
