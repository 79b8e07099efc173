"""A server on this machine that takes uploads as the Hugging Face hub does and keeps what it was sent, or serves a model."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from flow_grpo.export import model_card
from flow_grpo.run_folder import layout

# of a merged export that was pushed there before
FORMER = [layout.EXPORT_MANIFEST, model_card.CARD, "transformer/m[1].safetensors"]


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP as an upload asks for."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        if self.path == "/api/repos/create":
            self.answer({"url": f"http://{self.headers['Host']}/{json.loads(body).get('organization', 'me')}/signs"})
        elif "/them/" in self.path:
            self.answer({"error": "not yours"}, 403)
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
            self.answer({"files": files})
        else:
            self.answer({"commitOid": "1", "commitUrl": f"http://{self.headers['Host']}/me/signs/commit/1", "success": True})

    def do_GET(self):
        if "/resolve/" in self.path:
            self.answer({"files": FORMER})
            return
        if "/tree/" in self.path:
            there = [*FORMER, "notes.md", "transformer/m1.safetensors"]
            self.answer([{"type": "file", "path": name, "size": 1, "oid": "0"} for name in there])
            return
        who = {"id": "me/signs", "sha": "0", "siblings": [], "name": "me", "type": "user", "auth": {}}
        self.answer({**who, "private": "/known" not in self.path})

    do_HEAD = do_GET

    def answer(self, content: dict | list, status: int = 200, headers: dict[str, str] | None = None):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1"')
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_):
        pass


class ModelHub(Hub):
    """As much as a download of the model in `server.folder` asks for, under any id."""

    def do_GET(self):
        folder, path = self.server.folder, self.path.partition("?")[0]
        names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        if "/resolve/" in path:
            self.send_file(path.split("/resolve/")[1].split("/", 1)[1], names)
        elif "/tree/" in path:
            self.answer([{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "0" * 40} for n in names])
        else:
            files = [{"rfilename": name} for name in names]
            self.answer({"id": "/".join(path.split("/")[3:5]), "sha": "0" * 40, "siblings": files, "private": False})

    do_HEAD = do_GET

    def send_file(self, name: str, names: list[str]):
        if name not in names:
            self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content = (self.server.folder / name).read_bytes()
        if self.command == "GET":
            self.server.asked.append(name)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def local_hub(folder: Path | None = None) -> Iterator[ThreadingHTTPServer]:
    """A hub within the block.

    Its `asked` holds the path, the authorization and the body of each POST; if it serves the model of a folder, the files that were sent.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), ModelHub if folder else Hub) as server:
        server.asked, server.folder = [], folder
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def settings(server: ThreadingHTTPServer) -> dict[str, str]:
    """The environment of a process that is to use this hub."""
    address = f"http://127.0.0.1:{server.server_port}"
    return {"HF_ENDPOINT": address, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}


def uploaded(server: ThreadingHTTPServer) -> dict[str, bytes]:
    """The content of each file that was uploaded, by name."""
    return {c["value"]["path"]: base64.b64decode(c["value"]["content"]) for c in _commits(server) if c["key"] == "file"}


def deleted(server: ThreadingHTTPServer) -> list[str]:
    """The files that were deleted."""
    return [c["value"]["path"] for c in _commits(server) if c["key"] == "deletedFile"]


def _commits(server: ThreadingHTTPServer) -> list[dict]:
    return [json.loads(line) for path, _, body in server.asked if "/commit/" in path for line in body.splitlines()]
