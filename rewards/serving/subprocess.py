"""A reward in a subprocess, which may use the Python interpreter of another environment."""

import concurrent.futures
import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import weakref
from typing import Any

from torch import Tensor

import flow_grpo
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import expanded
from flow_grpo.rewards.serving.client import NoServer, Remote
from flow_grpo.rewards.serving.retry import Refused
from flow_grpo.rewards.threads import DaemonThread, current_gpu

# Only this package is imported from here: with its folder on sys.path, everything installed next to it could be imported too.
START = """
import json, os, sys
os.dup2(int(sys.argv[2]), 2)
try:
    import importlib.util
    spec = importlib.util.spec_from_file_location("flow_grpo", sys.argv[1])
    sys.modules["flow_grpo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["flow_grpo"])
    from flow_grpo.rewards.serving.server import serve_parent
except Exception as error:
    print(json.dumps({"unable": "%s: %s" % (type(error).__name__, error)}))
    sys.exit(1)
serve_parent()
"""
NEEDS = "`isolate` must name an interpreter whose environment has torch, safetensors, pillow, fastapi, uvicorn and what the reward needs"
EXIT_TIMEOUT = 2.0  # seconds that the process has to exit after its connection broke, before it is killed


class Isolated(Remote):
    """A reward in a subprocess, which keeps its dependencies and its changes of global settings out of this process.

    The subprocess serves on a loopback port with a random token, gets all images at once as float32, and exits with this process.
    Its interpreter needs torch, safetensors, pillow, fastapi, uvicorn and what the reward needs, but not this package. It is killed
    if it hangs; if it has ended, the next call starts another.

    Range, weights, licence, memory and how it is gamed: those of the reward.

    Args:
        reward: a reward by name, import path or file.
        options: its options.
        python: interpreter of another environment; by default the current one.
        timeout: seconds that loading the reward, and each call, may take.
    """

    concurrent = False  # a call may start another process
    keep_alive = False  # a new connection for each call, so that no old one can be broken

    def __init__(
        self, reward: str, options: dict[str, Any] | None = None, python: str | None = None, timeout: float = 3600.0
    ) -> None:
        if not 0 < timeout < math.inf:
            raise FlowGRPOError(f"reward {reward}: timeout={timeout} must be a positive number of seconds.")
        self.name, self.options, self.seconds = reward, options or {}, timeout
        self.python = str(expanded(python)) if python else sys.executable
        self._start()

    def _run(self, *request: Any) -> Tensor:
        """Like `Remote`'s. FlowGRPOError if the process hangs, has ended, or reports that the reward failed."""
        if self.process is None:
            self._start()
        try:
            return super()._run(*request)
        except Refused as error:
            raise FlowGRPOError(error.detail) from None  # without the address of its own server
        except NoServer:
            raise FlowGRPOError(f"{self._ended(self._silence())}.") from None  # a crash would happen again: nothing to retry

    def _start(self) -> None:
        token, shown = secrets.token_hex(16), os.dup(2)
        try:
            process = subprocess.Popen(
                [self.python, "-c", START, str(flow_grpo.__file__), str(shown)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # until it is known to be Python: another program would complain of its arguments
                pass_fds=(shown,),
                bufsize=0,
                start_new_session=True,  # so that Ctrl-C does not reach it: this process may still have images to score
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise FlowGRPOError(
                f"reward {self.name}: {self.python} can't be run: {reason}; name an interpreter that can."
            ) from error
        finally:
            os.close(shown)
        self.process: subprocess.Popen | None = process
        self._kill = weakref.finalize(self, _end, process)
        url = self._handshake({"reward": self.name, "options": self.options, "token": token, "gpu": current_gpu()})
        try:
            super().__init__(url, self.name, token, batch_size=sys.maxsize, timeout=self.seconds, attempts=1)
        except NoServer:
            raise FlowGRPOError(f"{self._ended('did not serve')}.") from None

    def _handshake(self, request: dict[str, Any]) -> str:
        """Send the request and return the URL in the answer. FlowGRPOError if the answer is not one, or missing."""
        process = self.process
        assert process

        def exchange() -> bytes:
            assert process.stdin
            assert process.stdout
            process.stdin.write(json.dumps(request).encode() + b"\n")
            return process.stdout.readline(2**16)

        thread = DaemonThread()
        answer = thread.submit(exchange)
        answered = concurrent.futures.wait([answer], self.seconds).done
        thread.close()
        if not answered:
            raise FlowGRPOError(f"{self._ended(self._silence())} before it could serve.")
        try:
            message = json.loads(answer.result())
            if "error" in message:  # a sentence on the reward
                raise FlowGRPOError(message["error"])
            if "unable" in message:
                raise FlowGRPOError(f"reward {self.name}: {self.python} can't serve it: {message['unable']}; {NEEDS}.")
            return message["url"]
        except (OSError, json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
            raise FlowGRPOError(f"{self._ended('is not a Python interpreter')} before it could serve; {NEEDS}.") from error

    def _silence(self) -> str:
        return f"gave no answer in {self.seconds:g} seconds"

    def _ended(self, alive: str) -> str:
        """A sentence on how the process ended. If it is still running, it is killed for the reason `alive`."""
        process = self.process
        assert process
        try:
            code = process.wait(EXIT_TIMEOUT)
            how = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code} ({signal.strsignal(-code)})"
        except subprocess.TimeoutExpired:
            how = f"{alive} and was killed"
        self._kill()
        self.process = None
        return f"reward {self.name}: its process {how}"


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and its own subprocesses
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
