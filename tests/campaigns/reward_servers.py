"""Disturbs the reward servers of runs at random moments: `python tests/campaigns/reward_servers.py --rounds 3`.

A run whose reward one server scores is trained once without a disturbance. Then it is trained with one and with two servers, of which
the first is killed, killed and replaced, frozen for a while, or seen through a connection that drips bytes or sends garbage for a while.
With two servers the run must go on. With one it may also stop, with a sentence; resumed, when the server is there again, it must end. Its
metrics (but for the seconds), its LoRA and its last checkpoint must equal the first run's, tensor by tensor.

Everything is on 127.0.0.1. Prints a line for each kind of disturbance with its counts, and exits with 1 if anything was lost.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from kills import differences
from support.cli_process import begin
from support.embedded import short_run
from support.reward_servers import Server

REWARD = "import time\ndef mine(images, prompts):\n    time.sleep(0.1)\n    return images.mean((1, 2, 3))\n"
SETTINGS = ["steps=4", "save_every=1", "evaluation.every=2", "microbatch=4", "trackers=[]"]
CLIENT = "{batch_size: 2, timeout: 2, attempts: 2}"
KINDS = ("killed", "replaced", "frozen", "drips", "garbage")
LIMIT = 300  # seconds that a run may take


class Proxy:
    """A port on loopback that passes connections on to another one, or misbehaves as `mode` says."""

    def __init__(self, url: str) -> None:
        self.url, self.mode, self.open = url, "passes", set()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def turn(self, mode: str) -> None:
        """Also ends what goes through it."""
        self.mode = mode
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self.open.add(connection)
        with connection, contextlib.suppress(OSError):
            if self.mode == "drips":
                for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.1)
            elif self.mode == "garbage":
                connection.recv(1000)
                connection.sendall(random.randbytes(1000))
            else:
                host, port = self.url.removeprefix("http://").split(":")
                with socket.create_connection((host, int(port))) as server:
                    self.open.add(server)
                    threading.Thread(target=copied, args=[connection, server], daemon=True).start()
                    copied(server, connection)
                    self.open.discard(server)
        self.open.discard(connection)


def copied(source: socket.socket, target: socket.socket) -> None:
    """Passes bytes on until one side ends, which ends the other."""
    with contextlib.suppress(OSError):
        while part := source.recv(2**16):
            target.sendall(part)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class Disturbed:
    """A server and the proxy before it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.server = folder, Server("mine.py:mine", folder=folder)
        self.proxy = Proxy(self.server.url)

    def disturb(self, kind: str, seconds: float) -> None:
        """Does it, for so long where it passes."""
        if kind in ("killed", "replaced"):
            self.server.kill()
            if kind == "replaced":
                self.heal()
        elif kind == "frozen":
            self.server.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.server.process.send_signal(signal.SIGCONT)
        else:
            self.proxy.turn(kind)
            time.sleep(seconds)
            self.proxy.turn("passes")

    def heal(self) -> None:
        if self.server.process.poll() is not None:
            self.server = Server("mine.py:mine", folder=self.folder)
            self.proxy.url = self.server.url


def started(folder: Path, name: str, servers: list[Disturbed]) -> tuple[Path, Path]:
    """The config file and the run folder of a run."""
    config, output = folder / f"{name}.yaml", folder / name
    where = f"{{remote: [{', '.join(one.proxy.address for one in servers)}], options: {CLIENT}}}"
    config.write_text(short_run(output, "model=tiny", *SETTINGS, f"rewards={{'mine.py:mine': {where}}}").to_yaml())
    return config, output


def one_run(folder: Path, name: str, servers: list[Disturbed], kind: str, seconds: tuple[float, float]) -> str:
    """Whether a run whose first server is disturbed goes on, or stops and is resumed. AssertionError if it does neither."""
    config, output = started(folder, name, servers)
    command = begin("train", str(config), cwd=folder)
    time.sleep(seconds[0])
    servers[0].disturb(kind, seconds[1])
    stops = 0
    while True:
        command.process.join(LIMIT)
        if command.process.is_alive():
            command.process.kill()
            raise AssertionError(f"it hangs: {command.output[-500:]}")
        assert "Traceback" not in command.output, command.output
        if command.process.exitcode == 0:
            return "stopped and resumed" if stops else "went on"
        assert command.process.exitcode == 2, command.output
        assert "no server" in command.output, command.output
        assert len(servers) == 1, f"it stopped beside a server that was well: {command.output[-500:]}"
        stops += 1
        servers[0].heal()
        begun = list((output / "checkpoints").glob("step_*"))
        command = begin("train", str(config), *(["--resume"] if begun else []), cwd=folder)


def compared_run(
    run: Path, reference: Path, servers: list[Disturbed], kind: str, moments: tuple[float, float]
) -> tuple[str, list[str]]:
    """How a disturbed run ended, and what differs from the reference."""
    try:
        how = one_run(run.parent, run.name, servers, kind, moments)
        return how, differences(run, reference)
    except AssertionError as error:
        return "lost", [str(error)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind with each number of servers")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of disturbances")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    rng, lost, total = random.Random(args.seed), [], 0
    os.environ.pop("REWARD_TOKEN", None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "mine.py").write_text(REWARD)
        both = [Disturbed(folder), Disturbed(folder)]
        config, reference = started(folder, "reference", both[:1])
        begun = time.monotonic()
        begin("train", str(config), cwd=folder).finish(0, LIMIT)
        length = time.monotonic() - begun
        for kind, count in itertools.product(args.kinds, (1, 2)):
            ends: Counter[str] = Counter()
            for round_ in range(args.rounds):
                name = f"{kind}_{count}_{round_}"
                moments = rng.uniform(0, length), rng.uniform(0.5, 6)
                how, wrong = compared_run(folder / name, reference, both[:count], kind, moments)
                ends[how] += 1
                lost += [f"{name}: {what}" for what in wrong]
                both[0].heal()
            total += args.rounds
            print(f"{kind}, of {count} servers: {', '.join(f'{n} {how}' for how, n in ends.items())}", flush=True)
        for one in both:
            one.server.kill()
    print(f"{total} runs, {len(lost)} differences\n" + ("\n".join(lost) or "nothing lost"))
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
