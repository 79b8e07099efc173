"""A reward in a process of its own, by the python of an environment of its own."""

import json
import secrets
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

from rewards.remote import Remote

# This package alone is handed over: were its folder on the path, everything installed beside it would come along.
START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("rewards", sys.argv[1])
sys.modules["rewards"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rewards"])
from rewards.server import serve_parent
serve_parent()
"""


class Isolated(Remote):
    """A reward by name in a subprocess, so that what it needs installed and what it does to its process stay there.

    The process serves on a loopback port with a random token, gets all images at once as float32, and ends with this one. Its
    python needs torch, safetensors, pillow, fastapi, uvicorn and what the reward itself needs, but not this package.

    Range, weights, licence, memory and how it is gamed: those of the reward.

    Args:
        reward: a reward by name, import path or file.
        options: its options.
        python: the interpreter of another environment, by default this one.
    """

    def __init__(self, reward: str, options: dict[str, Any] | None = None, python: str | None = None) -> None:
        token = secrets.token_hex(16)
        order = {"reward": reward, "options": options or {}, "token": token}
        package = Path(__file__).parent / "__init__.py"
        try:
            self.process = subprocess.Popen(
                [python or sys.executable, "-c", START, str(package)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process, which may still have images to score
            )
        except OSError as error:
            raise ValueError(
                f"reward {reward}: {python} can't be run: {error.strerror}; set `python` to an interpreter."
            ) from error
        assert self.process.stdin
        assert self.process.stdout
        weakref.finalize(self, _end, self.process)
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            said = json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"reward {reward}: its process ended with code {self.process.wait()} before it could serve; its environment needs "
                "torch, safetensors, pillow, fastapi, uvicorn and what the reward needs."
            ) from error
        if "error" in said:
            raise ValueError(said["error"])
        super().__init__(said["url"], reward, token, batch_size=sys.maxsize, timeout=3600.0, attempts=2)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
