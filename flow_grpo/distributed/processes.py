"""The processes that share a run: which process has which groups, and the communication between them.

torchrun, `accelerate launch` or `flow-grpo train --num-processes` start them. A group is complete on one process, or split if there
are too few of them and nothing needs it whole. All processes hold the same adapter and optimizer and take the same decisions; only
their rows differ. So a run does not depend on the number of processes, up to the order in which numbers are added.
"""

import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from flow_grpo.distributed.launchers import adopt, end_with_launcher, number_in_environment
from flow_grpo.distributed.peers import Peers, meet
from flow_grpo.errors import FlowGRPOError, Interrupted, PeerLost, RetryableError, is_retryable
from flow_grpo.text import first_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")
BUCKET_NUMEL = 2**26  # approximate size of a message between processes, which is copied once
# How long a process waits for another one that lives, as its peers see: between devices for what all compute alike, and for a value for
# as long as rewards may take, of which `human` waits for a person.
DEVICE_TIMEOUT, VALUE_TIMEOUT = timedelta(hours=1), timedelta(days=7)


class Processes:
    """This process among `world_size`, the first having `rank` 0. Made once, by `from_environment`, or `Processes()` for one by itself.

    Values are exchanged by gloo, so that no device is waited for; gradients by the backend of the device.

    Args:
        value_group: the process group in which values are exchanged; by default that of the gradients.

    Attributes:
        stop_requested: whether this process was asked to stop the run, by Ctrl-C or SIGTERM.
        in_callback: whether a user's callback runs, on the main process alone: the others do not answer.
    """

    current: "Processes | None" = None  # the group that this process has joined, until it leaves it
    has_left = False  # whether this process has left it

    def __init__(self, rank: int = 0, world_size: int = 1, device: str | None = None, value_group: Any = None) -> None:
        self.rank, self.world_size, self.device, self.value_group = rank, world_size, device, value_group
        self.stop_requested = self.in_callback = False
        self.peers: Peers | None = None

    @classmethod
    def from_environment(cls, device: str | None = None) -> "Processes":
        """Join the processes that the launcher's environment names, each on its own device. The process ends with the launcher.

        A second call returns those that the first one joined. A process group that is there already is used as it is; whoever made it
        ends all processes if one fails.

        Raises:
            FlowGRPOError: the processes can't connect.
        """
        processes = cls.meet()
        if processes.world_size < 2:
            return cls(device=device)
        if processes.value_group is None:
            processes._join(cpu=device == "cpu" or not torch.cuda.is_available())
        return processes

    @classmethod
    def meet(cls) -> "Processes":
        """Meet the processes that the launcher's environment names, before anything can fail on one machine alone.

        Until `from_environment`, which goes on with them, they can only be ended `together`.

        Raises:
            FlowGRPOError: they don't meet, or the environment names none.
        """
        if cls.current is not None:
            return cls.current
        is_found = torch.distributed.is_initialized()
        rank, world_size = (
            (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_found else _place_in_environment()
        )
        processes = cls(rank, world_size)
        if world_size > 1:
            end_with_launcher()
            processes.peers = None if is_found else meet(rank, world_size)
            cls.current = processes
        return processes

    def _join(self, cpu: bool) -> None:
        """Connect to the processes that this one has met."""
        from accelerate import PartialState

        if self.peers is None:
            state = PartialState(cpu=cpu)
        else:
            self.peers.wait_for_all()  # the group's own way to wait knows nothing of failures
            store = self.peers.store
            try:
                state = PartialState(
                    cpu=cpu, store=store, rank=self.rank, world_size=self.world_size, timeout=DEVICE_TIMEOUT
                )
            except RuntimeError as error:
                self.peers.tell(error)
                raise RetryableError(
                    f"the {self.world_size} processes on {', '.join(sorted(set(self.peers.hosts)))} can't connect "
                    f"({first_line(error)}): set GLOO_SOCKET_IFNAME to the network interface by which they reach each other."
                ) from error
            store.set_timeout(DEVICE_TIMEOUT)  # NCCL connects later
        self.device = str(state.device)
        self.value_group = torch.distributed.new_group(backend="gloo", timeout=VALUE_TIMEOUT)

    @contextmanager
    def together(self, to_the_end: bool = False) -> Iterator[None]:
        """End all processes by an error of this one within the block, and this one by an error of another.

        Args:
            to_the_end: leave the process group after the block also without an error.

        Raises:
            PeerLost: another process has failed or is gone.
        """
        try:
            yield
        except BaseException as error:
            lost = self._end_by(error)
            self.destroy()
            if lost is not None and lost is not error:
                raise lost from error
            raise
        if to_the_end:
            self.destroy()

    def _end_by(self, error: BaseException) -> PeerLost | None:
        """Tell the peers of an error that is this process's own; else return what ended the run."""
        if self.peers is None or getattr(error, "is_shared", False) or isinstance(error, Interrupted):
            return None
        if isinstance(error, PeerLost):
            return error
        if isinstance(error, RuntimeError) and is_peer_lost(error):
            return self.peers.reason()
        self.peers.tell(error)
        return None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def should_stop(self) -> bool:
        """Whether this process was asked to stop, for waits after which processes exchange their results and errors.

        PeerLost if another process has failed or is gone.
        """
        self._check_peers()
        return self.stop_requested

    def should_stop_alone(self) -> bool:
        """Whether the only process was asked to stop, for work that several processes would share, such as a forward pass.

        Several processes stop later, where they communicate.

        PeerLost if another process has failed or is gone.
        """
        self._check_peers()
        return self.world_size == 1 and self.stop_requested

    def owner(self, group: Tensor, updates: int) -> Tensor:
        """Rank of the process that each image of a step (B,) belongs to: all have equally many of each of the step's updates.

        Groups are whole, and dealt in turns. If they are too few for that, the images of an update are cut into equal parts.
        """
        if len(group.unique()) % (updates * self.world_size) == 0:
            return group % self.world_size
        images = len(group) // updates
        return torch.arange(len(group)) % images * self.world_size // images

    def owns(self, group: Tensor, updates: int) -> Tensor:
        """Whether each image belongs to this process."""
        return self.owner(group, updates) == self.rank

    def all_gather(self, value: Value) -> list[Value]:
        """The values of all processes, by rank. Every process must call this."""
        if self.world_size == 1:
            return [value]
        if self.has_left:
            raise FlowGRPOError(
                "the process group of the run was left at the end of train(): make another trainer for what its processes do together."
            )
        if self.in_callback:
            raise FlowGRPOError(
                "a callback runs on the main process alone and called what all processes do together: ask for it by "
                "control.should_evaluate or control.should_save."
            )
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, self.value_group)
        return values

    def gather_on_main(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, in the main process; an empty list in the others. Every process must call this."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size if self.is_main else []
        torch.distributed.gather_object(value, values if self.is_main else None, dst=0, group=self.value_group)
        return values

    def on_main(self, call: Callable[[], Value]) -> Value:
        """Run `call` in the main process alone, and return its value in all. Its error is raised in all."""
        return self.gather_or_raise(lambda: call() if self.is_main else None)[0]  # type: ignore[return-value]

    def gather_or_raise(
        self, call: Callable[[], Value], errors: tuple[type[Exception], ...] = (FlowGRPOError,)
    ) -> list[Value]:
        """Run `call` in each process, and return the values by rank. An error of one of these types is raised in all, so that none waits.

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
        """Leave the process group at the end of a run, and destroy it if it was made for it."""
        if Processes.current is not self or self.value_group is None:
            return
        Processes.current, self.has_left = None, True
        is_found = self.peers is None
        if self.peers is not None:
            self.peers.leave()
        # with torch 2.6 this hangs where a thread of gloo still waits for the GIL after its last message
        time.sleep(0.2)
        torch.distributed.destroy_process_group(self.value_group if is_found else None)
        if not is_found:
            from accelerate import PartialState

            PartialState._reset_state()  # it would take the group for one that is there

    def mesh_by_machine(self, device: str) -> "DeviceMesh":
        """The processes as machines x processes of a machine. Every process must call this.

        Raises:
            FlowGRPOError: the ranks of a machine are not adjacent, or machines have different numbers of them.
        """
        from torch.distributed.device_mesh import init_device_mesh

        hosts = self.all_gather(socket.gethostname())
        size = hosts.count(hosts[0])
        if hosts != [host for host in dict.fromkeys(hosts) for _ in range(size)]:
            raise FlowGRPOError(
                f"memory.shard=hsdp needs the same number of processes on each machine, with adjacent ranks, not {', '.join(hosts)}."
            )
        return init_device_mesh(device, (len(hosts) // size, size), mesh_dim_names=("machine", "process"))

    def _check_peers(self) -> None:
        if self.peers is not None:
            self.peers.raise_end()

    def any_process(self, value: bool) -> bool:
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


def shared_microbatch(
    num_processes: int,
    prompts: int,
    images: int,
    microbatch: int,
    *,
    updates: int,
    pairs: bool = False,
    whole: str | None = None,
) -> int:
    """The micro-batch of a process: the largest that divides its rows, at most `microbatch`, even for pairs of rows.

    Args:
        whole: what needs all images of a prompt on one process; None if a group may be split.

    Raises:
        FlowGRPOError: a step can't be shared evenly.
    """
    shares = updates * num_processes
    if num_processes > 1 and prompts % shares and (whole or prompts % updates or prompts * images % shares):
        why = f"{whole} needs all images of a prompt on one" if whole else f"neither are its {prompts * images} images"
        raise FlowGRPOError(
            f"prompts_per_step={prompts} is not divisible by updates x processes = {updates} x {num_processes}, and {why}: every "
            "process takes an equal share of each update."
        )
    rows = prompts * images // num_processes
    fitting = [n for n in range(1, min(microbatch, rows) + 1) if rows % n == 0 and not (pairs and n % 2)]
    if not fitting:
        raise FlowGRPOError(f"dpo compares pairs of rows, but a process has {rows} of them: set other sizes of a step.")
    return fitting[-1]


def _place_in_environment() -> tuple[int, int]:
    """Rank and number of processes, as the launcher has set them."""
    adopt()
    world_size = number_in_environment("WORLD_SIZE", "1", 1, 1_000_000)
    return number_in_environment("RANK", "0", 0, world_size - 1), world_size


def is_peer_lost(error: RuntimeError) -> bool:
    """Whether an error means that another process of the run is gone: one of torch's, not of a callback's or a library's own network."""
    *_, last = traceback.walk_tb(error.__traceback__)
    raised_in = Path(last[0].f_code.co_filename)
    is_of_torch = Path(torch.__file__).parent in raised_in.parents or Path(__file__).parent == raised_in.parent
    words = ("gloo", "NCCL", "onnection")
    return isinstance(error, torch.distributed.DistError) or (is_of_torch and any(word in str(error) for word in words))


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
