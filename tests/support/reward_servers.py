"""Real reward servers for the tests, processes on loopback ports that a test may kill, and stubs that say what it wants."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import uvicorn


class Server:
    """`flow-grpo serve` with these words. It loads while the test goes on; `url` waits for it."""

    def __init__(self, *words: str, folder: Path | None = None, token: str | None = None) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "REWARD_TOKEN"} | (
            {"REWARD_TOKEN": token} if token else {}
        )
        command = [sys.executable, "-m", "flow_grpo", "serve", *words, "--port", "0"]
        self.folder = folder
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        self._url = ""

    @property
    def url(self) -> str:
        if not self._url:
            line = self.process.stdout.readline()
            match = re.search(r"http://\S+", line)
            assert match, line
            self._url = match[0]
        return self._url

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(*servers: Server):
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()
            server.process.stdout.close()


@contextmanager
def threaded(app, **settings):
    """The address of an HTTP application, in a thread."""
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1, **settings)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class Stub(ThreadingHTTPServer):
    """A server on loopback that answers as its subclass does; `close` makes it unreachable, `close_all` all of them."""

    daemon_threads = True
    open: ClassVar[list["Stub"]] = []

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.open.append(self)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: bytes) -> tuple[int, dict | str]:
        raise NotImplementedError

    def close(self) -> None:
        self.open.remove(self)
        self.shutdown()
        self.server_close()

    @classmethod
    def close_all(cls) -> None:
        for stub in list(cls.open):
            stub.close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        status, said = self.server.answer(self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
        body = (said if isinstance(said, str) else json.dumps(said)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass
