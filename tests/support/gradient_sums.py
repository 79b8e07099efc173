"""What each of two ranks asserts of gradients and errors that they share: in a module of its own, so that a forked rank can import it."""

import pytest
import torch

from flow_grpo.distributed.processes import Processes


def add_up_gradients() -> None:
    processes = Processes.from_environment("cpu")
    assert processes.world_size == 2
    one, other = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))
    one.grad = torch.full((3,), float(processes.rank + 1))
    if processes.rank == 1:
        other.grad = torch.ones(2, 2)
    processes.all_reduce_gradients([one, other])
    assert one.grad.tolist() == [3, 3, 3]
    assert other.grad is not None
    assert other.grad.tolist() == [[1, 1], [1, 1]]
    assert processes.all_gather(processes.rank) == [0, 1]
    assert processes.any(processes.rank == 1)
    with pytest.raises(ValueError, match="invalid literal"):
        processes.gather_or_raise(lambda: int("x") if processes.rank else 0)
    processes.destroy()
