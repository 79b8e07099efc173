"""Calls that may hang, in daemon threads, so that they block neither Ctrl-C nor an exit; and processes that exit with their parent."""

import atexit
import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from flow_grpo.errors import Interrupted

Result = TypeVar("Result")
POLL = 0.2  # seconds between two looks at whether a wait is to end
LAST_CALLS = 5.0  # seconds that a script's end waits for calls that run


def current_gpu() -> int | None:
    """The index of this thread's GPU; None if this process has not used one yet."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


class DaemonThread:
    """A thread that makes calls one after another, on the GPU of the thread that made it.

    Unlike a `ThreadPoolExecutor`, it does not delay the exit of the process.
    """

    threads: "weakref.WeakSet[DaemonThread]" = weakref.WeakSet()

    def __init__(self) -> None:
        self.busy, self._gpu = False, current_gpu()
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self.threads.add(self)
        threading.Thread(target=self._run, name="rewards", daemon=True).start()

    @classmethod
    def any_busy(cls) -> bool:
        """Whether any of these threads is making a call."""
        return any(thread.busy for thread in cls.threads)

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Queue a call, which runs after the earlier ones."""
        future: Future[Result] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> "Future[None]":
        """Cancel the queued calls and end the thread after the running call; the returned future is done then."""
        with contextlib.suppress(queue.Empty):
            while waiting := self._calls.get_nowait():
                waiting[0].cancel()
        idle = self.submit(lambda: None)
        self._calls.put(None)
        return idle

    def _run(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # else a new thread is on GPU 0
        while (job := self._calls.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                self.busy = True
                try:
                    result, error = call(), None
                except BaseException as raised:  # passed on to the waiting thread, SystemExit too
                    result, error = None, raised
                self.busy = False
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
                del result, error
            del job, future, call  # so that no image is kept in memory while it waits


def in_thread(call: Callable[[], Result]) -> "Future[Result]":
    """Make a call in a daemon thread of its own, on the GPU of this thread."""
    thread = DaemonThread()
    future = thread.submit(call)
    future.add_done_callback(lambda _: thread.close())
    return future


def wait_for(future: "Future[Result]", should_stop: Callable[[], bool]) -> Result:
    """Return the future's result. `Interrupted` if `should_stop` says so before there is one."""
    while not wait([future], POLL).done:
        if should_stop():
            raise Interrupted
    return future.result()


@contextmanager
def background(should_stop: Callable[[], bool]) -> Iterator[DaemonThread]:
    """A thread for calls that may hang. Leaving waits for it, unless the run was interrupted."""
    thread = DaemonThread()
    try:
        yield thread
    except (Interrupted, KeyboardInterrupt):
        thread.close()
        raise
    except BaseException:
        wait_for(thread.close(), should_stop)  # no reward is called twice at a time
        raise
    wait_for(thread.close(), should_stop)


def call_interruptibly(function: Callable[[], Result], should_stop: Callable[[], bool]) -> Result:
    """Call a function that may hang, in a thread, and return its result. Raises `Interrupted` like `wait_for`."""
    with background(should_stop) as thread:
        return wait_for(thread.submit(function), should_stop)


@atexit.register
def wait_for_last_calls() -> None:
    """Let running calls end, for some seconds: a thread that is in C++ when the interpreter ends would abort the process."""
    wait([thread.close() for thread in list(DaemonThread.threads) if thread.busy], LAST_CALLS)


def exit_with_parent(pipe: int) -> None:
    """Exit this process when the other end of a pipe is closed, which happens whenever and however the parent ends."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(pipe, 1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":  # the kernel's SIGIO ends it even if a call keeps every other thread from running
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
