"""The processes of a run as peers: they meet at a store, show each other that they live, and end together.

Each process sets a counter in the store every `BEAT` seconds, in a thread, so that a reward may take days and a lost machine is found
in minutes. Rank 0 reads the counters of all, the others read that of rank 0. An error of one rank is shown by all nodes.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from os import _exit
from typing import Any

import psutil
import torch

from flow_grpo.distributed.launchers import LAUNCHER, go_on, number_in_environment
from flow_grpo.errors import PEER_LOST, PeerLost, RetryableError
from flow_grpo.text import first_line

INTERFACE = "GLOO_SOCKET_IFNAME"  # environment variable of gloo: the network interface that it uses
PATIENCE = "FLOW_GRPO_PEER_TIMEOUT"  # environment variable, in seconds: see `patience`
BEAT = 2.0  # seconds between two signs of life
SOON = 10.0  # seconds without one that name a lost peer when its connections have broken
GRACE = 30.0  # seconds that a process has to save and end by itself when a peer is lost, unless it is on its way out


def patience() -> float:
    """Seconds that processes wait for each other to appear, and for a sign of life."""
    return number_in_environment(PATIENCE, "300", 0.1, 1_000_000, kind=float)


@dataclass
class End:
    """Why the run ends: the error of a rank, or None if the rank gives no sign of life."""

    rank: int
    error: str | None


class Peers:
    """The processes of a run, as seen from one of them.

    Args:
        hosts: the host of each rank.
        own_store: a connection of its own to the store, which the threads alone use, with keys that only this run has.
        store: the store that these processes have met at, for their process group. That of rank 0 may be its server.

    Attributes:
        end: why the run ends; None while all is well.
        is_leaving: this process knows it and ends by itself.
    """

    def __init__(self, rank: int, hosts: list[str], own_store: Any, store: Any = None) -> None:
        self.rank, self.hosts, self._store, self.store = rank, hosts, own_store, store
        self.end: End | None = None
        self.is_leaving = False
        self._sign: str | None = None  # the last one, on leaving
        self._limit = patience()
        watched = [other for other in range(len(hosts)) if (other == 0) != (rank == 0)]
        self._silence, self._last = dict.fromkeys(watched, 0.0), dict.fromkeys(watched, b"")
        self._wake, self._closed, self._told = threading.Event(), threading.Event(), threading.Event()
        for work in (self._exchange, self._watch):
            threading.Thread(target=work, name="peers", daemon=True).start()

    def tell(self, error: BaseException) -> None:
        """Let all others end by this error, unless the run ends already."""
        if self.end is None:
            self.end = End(self.rank, first_line(error))
        self.is_leaving = True
        self._wake.set()
        self._told.wait(3 * BEAT)
        if self.rank == 0 and len(set(self.hosts)) > 1:
            time.sleep(2 * BEAT)  # the store ends with this process, and the others read it once in a beat

    def wait_for_all(self) -> None:
        """Wait until all processes have come to this point, or raise PeerLost if one of them has failed or is gone."""
        self.store.set(f"ready/{self.rank}", "1")
        while not self.store.check([f"ready/{rank}" for rank in range(len(self.hosts))]):
            self.raise_end()
            time.sleep(0.05)

    def reason(self) -> PeerLost:
        """The error of a process whose connection to another one broke. Waits some seconds until it is known whose process is gone."""
        self.is_leaving, self._limit = True, min(self._limit, SOON)
        if LAUNCHER in os.environ:  # the launcher names the rank that died first, which takes it a moment
            time.sleep(1)
            return PeerLost("another process of the run is gone.")
        with _sigterm_ignored():  # the launcher ends all processes of a node when one fails, and waits 30 s
            deadline = time.monotonic() + 2 * SOON
            while self.end is None and time.monotonic() < deadline:
                time.sleep(0.1)
        return PeerLost(self._sentence(), prints_error=self._speaks())

    def raise_end(self) -> None:
        """Raise PeerLost if the run ends because of another process."""
        if self.end is not None and self.end.rank != self.rank:
            raise self.reason()

    def leave(self) -> None:
        """This process has ended its part, and gives no sign any more."""
        self._sign = "done"
        self._wake.set()
        self._told.wait(2 * BEAT)
        self._closed.set()

    def _sentence(self) -> str:
        if self.end is None:
            return f"another process of the run is gone. Go on, when it is back, with: {go_on()}"
        name = f"rank {self.end.rank} of {len(self.hosts)} on {self.hosts[self.end.rank]}"
        if self.end.error is not None:
            return f"{name} ended the run: {self.end.error}"
        return f"{name} is gone: no sign of life for {self._limit:.0f} s. Go on, when it is back, with: {go_on()}"

    def _speaks(self) -> bool:
        """Whether this process prints why the run ends: one for each host, unless the rank that failed is there and has printed it."""
        host, end = self.hosts[self.rank], self.end
        failed = None if end is None else end.rank
        if LAUNCHER in os.environ or (end is not None and end.error is not None and self.hosts[end.rank] == host):
            return False
        return self.rank == next(rank for rank, other in enumerate(self.hosts) if other == host and rank != failed)

    def _exchange(self) -> None:
        """Write this process's signs, and read those of the others, until the store is gone, and rank 0 with it, or all parts."""
        beat = 0
        with suppress(RuntimeError):
            while not self._closed.is_set():
                self._wake.clear()
                beat += 1
                is_last = bool(self._sign or self.end)
                self._write(self._sign or str(beat))
                self._read()
                if is_last:
                    self._told.set()
                self._wake.wait(BEAT)
        self._limit = min(self._limit, SOON)
        self._told.set()

    def _write(self, sign: str) -> None:
        self._store.set(f"sign/{self.rank}", sign)
        if self.is_leaving and self.end is None and self._sign is None:
            self._store.set("broken", "1")
        if self.end is not None:
            self._store.compare_set("end", "", json.dumps([self.end.rank, self.end.error]))  # the first one stays

    def _read(self) -> None:
        for rank in self._silence:
            sign = self._get(f"sign/{rank}")
            if sign != self._last[rank]:
                self._silence[rank], self._last[rank] = 0.0, sign
        if self.end is None and (end := self._get("end")):
            rank, sentence = json.loads(end)
            self.end = End(rank, sentence)
        if self._get("broken"):
            self._limit = min(self._limit, SOON)

    def _get(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def _watch(self) -> None:
        """Count the seconds of silence, and end a process that is stuck when a peer is lost.

        Seconds are counted by this thread, so that a process that was stopped itself does not take the others for lost.
        """
        grace = GRACE
        while not self._closed.wait(1.0):
            silent = {rank: seconds for rank, seconds in self._silence.items() if self._last[rank] != b"done"}
            self._silence.update({rank: seconds + 1.0 for rank, seconds in silent.items()})
            rank = max(silent, key=lambda other: silent[other], default=None)
            if self.end is None and rank is not None and silent[rank] > self._limit:
                self.end = End(rank, None)
                self._wake.set()
            if self.end is not None and not self.is_leaving:
                grace -= 1.0
                if grace < 0:
                    self._exit()

    def _exit(self) -> None:
        if self._speaks():
            print(f"error: {self._sentence()}", file=sys.stderr, flush=True)
        _exit(PEER_LOST)


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM, if this is the main thread; the handler before is set again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def meet(rank: int, world_size: int) -> Peers:
    """Meet the other processes at MASTER_ADDR:MASTER_PORT.

    A launcher that restarts its processes keeps the store, with the addresses of the former ones. So each process says a word of its
    own, and rank 0 answers it with the name of this round; only then do the keys of the round count.

    Raises:
        FlowGRPOError: MASTER_PORT is no port, or as RetryableError: they don't meet within `patience()` seconds.
    """
    address, port = os.environ.get("MASTER_ADDR", "localhost"), number_in_environment("MASTER_PORT", "29500", 1, 2**16 - 1)
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        store = _connect(address, port, is_server=rank == 0 and not agent_has_store)
        reached = _route(address, port)[0]
        name = _begin_round(store, world_size, reached) if rank == 0 else _join_round(store, rank, reached)
        hosts, missing, reached = json.loads(store.get(f"{name}/hosts"))
        if missing:
            raise TimeoutError(
                f"without rank {missing} after {patience():.0f} s, only with those on {', '.join(sorted(set(hosts)))}"
            )
        # a process that waits in the store's get, as NCCL does, keeps the connection to itself
        own = torch.distributed.PrefixStore(f"{name}/peers", _connect(address, port))
    except (RuntimeError, TimeoutError) as error:
        raise RetryableError(
            f"the {world_size} processes of the run don't meet at {address}:{port} ({first_line(error).rstrip('.')}): set "
            "MASTER_PORT to a port that no other program uses, and MASTER_ADDR to the machine of rank 0."
        ) from error
    if interface := _interface(_route(reached, port)[1]):
        os.environ.setdefault(INTERFACE, interface)
    return Peers(rank, hosts, own, torch.distributed.PrefixStore(name, store))


def _connect(address: str, port: int, is_server: bool = False) -> Any:
    """A connection to the store, in a thread: torch waits for ever for another program that has the port and says nothing."""
    found: queue.Queue[Any] = queue.Queue()

    def connect() -> None:
        try:
            timeout = timedelta(seconds=patience())
            store = torch.distributed.TCPStore(
                address, port, is_master=is_server, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )
            found.put(store)
        except (RuntimeError, TimeoutError) as error:
            found.put(error)

    threading.Thread(target=connect, name="store", daemon=True).start()
    try:
        result = found.get(timeout=2 * patience())
    except queue.Empty:
        raise TimeoutError("what listens there is no store of torch") from None
    if isinstance(result, Exception):
        raise result
    return result


def _route(host: str, port: int) -> tuple[str, str]:
    """The address of a host, and that of this machine on the way there. Both are empty if there is no way."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # sends nothing
                return str(place[0]), probe.getsockname()[0]
    return "", ""


def _interface(address: str) -> str | None:
    """The network interface of this machine that has an address."""
    found = psutil.net_if_addrs().items()
    return next((name for name, its in found if address in (one.address.partition("%")[0] for one in its)), None)


def _begin_round(store: Any, world_size: int, reached: str) -> str:
    """Answer all other processes, and show them who is there and how other machines reach this one; on rank 0.

    A machine may know itself by a loopback address, as after Debian's installer, which no other machine can reach.

    Args:
        reached: the address by which this process reaches rank 0.

    Returns:
        The name of the round.
    """
    name, hosts, addresses = uuid.uuid4().hex, {0: socket.gethostname()}, {0: reached}
    others = range(1, world_size)

    def answered() -> bool:
        for rank in others:
            if store.check([f"hello/{rank}"]):
                word, hosts[rank], addresses[rank] = json.loads(store.get(f"hello/{rank}"))
                store.set(f"answer/{word}", name)
        return all(store.check([f"{name}/here/{rank}"]) for rank in others)

    with suppress(TimeoutError):
        _wait(answered, "")
    missing = [rank for rank in others if not store.check([f"{name}/here/{rank}"])]
    named = [hosts[rank] for rank in range(world_size) if rank not in missing]
    outer = [found for _, found in sorted(addresses.items()) if found and not ip_address(found).is_loopback]
    store.set(f"{name}/hosts", json.dumps([named, ", ".join(map(str, missing)), [*outer, reached][0]]))
    return name


def _join_round(store: Any, rank: int, reached: str) -> str:
    """Greet rank 0 until it answers; the same, on the other ranks."""
    word = uuid.uuid4().hex
    store.set(f"hello/{rank}", json.dumps([word, socket.gethostname(), reached]))
    _wait(lambda: store.check([f"answer/{word}"]), "rank 0 does not answer")
    name = store.get(f"answer/{word}").decode()
    store.set(f"{name}/here/{rank}", "1")
    return name


def _wait(condition: Callable[[], bool], reason: str) -> None:
    deadline = time.monotonic() + patience()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{reason} within {patience():.0f} s")
        time.sleep(0.1)
