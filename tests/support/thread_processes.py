"""Several processes of a run as threads of this one: each has a rank, and they exchange values as real ones do.

They take turns, since some of what they call changes settings of the whole process while it runs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flow_grpo.distributed.processes import Processes


class ThreadProcesses(Processes):
    """The process of one thread. `shared` has a place for the value of each, `barrier` waits for all, `turn` is held by one."""

    def __init__(self, rank: int, shared: list, barrier: threading.Barrier, turn: threading.Lock) -> None:
        super().__init__(rank, len(shared))
        self.shared, self.barrier, self.turn = shared, barrier, turn

    def all_gather(self, value: Any) -> list:
        self.shared[self.rank] = value
        self._wait()
        values = list(self.shared)
        self._wait()
        return values

    def gather_on_main(self, value: Any) -> list:
        values = self.all_gather(value)
        return values if self.is_main else []

    def all_reduce_gradients(self, parameters: list, is_sharded: bool = False) -> None:
        assert not is_sharded
        parts = self.all_gather([None if parameter.grad is None else parameter.grad.clone() for parameter in parameters])
        for parameter, *gradients in zip(parameters, *parts, strict=True):
            found = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = torch.stack(found).sum(0) if found else None

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def gather_or_raise(self, call: Any, errors: Any = ()) -> list:
        return self.all_gather(call())


def run_as_processes(count: int, work: Callable[[Processes], Any]) -> list[Any]:
    """What `work(processes)` returns on each of them, by rank."""
    shared, barrier, turn = [None] * count, threading.Barrier(count), threading.Lock()

    def run(rank: int) -> Any:
        with turn:
            try:
                return work(ThreadProcesses(rank, shared, barrier, turn))
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))
