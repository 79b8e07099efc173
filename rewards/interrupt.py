"""Nothing that hangs keeps a process alive: calls in daemon threads, and processes that end with their parent."""

import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from os import _exit  # the real one, also while a reward runs, whose own os._exit is refused
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThread:
    """A thread that makes calls one after another. Unlike a `ThreadPoolExecutor`'s, no process waits for it at its end."""

    threads: "weakref.WeakSet[DaemonThread]" = weakref.WeakSet()

    def __init__(self) -> None:
        self.busy = False
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self.threads.add(self)
        threading.Thread(target=self._run, name="rewards", daemon=True).start()

    @classmethod
    def any_busy(cls) -> bool:
        """Whether one of them is within a call."""
        return any(thread.busy for thread in cls.threads)

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Make the call when those before it are over."""
        future: Future[Result] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> "Future[None]":
        """Cancel the calls that have not begun; the thread ends after the one that has. Then the returned future is done."""
        with contextlib.suppress(queue.Empty):
            while waiting := self._calls.get_nowait():
                waiting[0].cancel()
        idle = self.submit(lambda: None)
        self._calls.put(None)
        return idle

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                self.busy = True
                try:
                    result, error = call(), None
                except BaseException as raised:  # whoever waits gets it, SystemExit too
                    result, error = None, raised
                self.busy = False
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
                del result, error
            del job, future, call  # no image is kept while it waits for the next call


def exit_with_parent(pipe: int) -> None:
    """End this process when the other end of a pipe, through which nothing comes, is closed: its owner died, however it did."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(pipe, 1)
        _exit(0)

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":  # the kernel's SIGIO ends it even if a call keeps every other thread from running
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
