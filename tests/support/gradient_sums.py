"""What two ranks assert of gradients, values and errors that they share: in a module of its own, so that a forked rank can import it."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError


def no_number() -> int:
    raise FlowGRPOError("no number")


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
    assert processes.any_process(processes.rank == 1)
    assert processes.gather_on_main(processes.rank) == ([0, 1] if processes.is_main else [])
    with pytest.raises(ValueError, match="no number"):
        processes.gather_or_raise(lambda: no_number() if processes.rank else 0)
    processes.destroy()


def step_like_one_process() -> None:
    """Two experts, of which the second has no gradient on any rank in the second step: AdamW leaves it where it is."""
    processes = Processes.from_environment("cpu")
    ours, alone = [[torch.nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2)]
    optimizers = [torch.optim.AdamW(experts, lr=0.1, weight_decay=0.1) for experts in (ours, alone)]
    for called in ([(0, 0), (0, 1), (1, 1)], [(1, 0)]):  # ranks, and the experts that they call in a step
        for rank, expert in called:
            (alone[expert] * (rank + 1.0)).sum().backward()
            if rank == processes.rank:
                (ours[expert] * (rank + 1.0)).sum().backward()
        processes.all_reduce_gradients(ours)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [expert.tolist() for expert in ours] == [expert.tolist() for expert in alone]
    processes.all_reduce_gradients(ours)
    assert all(expert.grad is None for expert in ours), "nobody has one"
    processes.destroy()


def exchange_values_apart_from_gradients() -> None:
    """A gradient of one rank is on its way, as a kernel of a GPU may be, while values are exchanged."""
    timeouts = {}

    def noting(name: str, make: Any) -> Any:
        return lambda **given: (timeouts.update({name: given["timeout"]}), make(**given))[1]

    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, noting(name, getattr(torch.distributed, name)))
    processes = Processes.from_environment("cpu")
    assert timeouts["init_process_group"] > timedelta(minutes=30), "what torch would wait"
    assert timeouts["new_group"] > timedelta(days=1), "a person may score images"
    assert torch.distributed.get_backend(processes.value_group) == "gloo"
    gradient = torch.ones(3)
    early = torch.distributed.all_reduce(gradient, async_op=True) if processes.is_main else None
    assert processes.all_gather("x" * (1 + processes.rank)) == ["x", "xx"]
    torch.distributed.all_reduce(gradient) if early is None else early.wait()
    assert gradient.tolist() == [2, 2, 2]
    processes.destroy()
