"""Several hosts on this machine: Linux namespaces with addresses, names, links and mounts of their own, that share all other files.

`inside()` runs a script again in namespaces of its own, where it may make hosts. Nothing of them is left when it ends, in any way.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from support.cli_process import Command, begin

WITHIN = "FLOW_GRPO_TEST_HOSTS"
OUTER = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
KINDS = ("net", "uts", "mnt")


def inside() -> str | None:
    """Run this script again where it may make hosts, and exit with its status. None if this is there; else why it can't be done."""
    if WITHIN in os.environ:
        return None
    outer = OUTER if os.getuid() == 0 else [*OUTER, "--user", "--map-root-user"]
    trial = "ip link add switch type bridge && ip link add one type veth peer name other && unshare --net --uts --mount true"
    try:
        tried = subprocess.run([*outer, "sh", "-c", trial], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    if tried.returncode:
        return f"namespaces can't be made: {tried.stderr.strip()}"
    sys.exit(subprocess.run([*outer, sys.executable, *sys.argv], env={**os.environ, WITHIN: "1"}).returncode)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Host:
    """A machine with one network interface, eth0, at 10.0.0.`number`. It is called node`number`."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address = f"node{number}", f"10.0.0.{number}"
        self.etc_hosts = folder / f"hosts_{number}"
        script = (
            f"hostname {self.name}; mount --bind {self.etc_hosts} /etc/hosts; ip link set lo up; echo up; exec sleep inf"
        )
        self.knows({})
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline()
        if subprocess.run(["ip", "link", "show", "switch"], capture_output=True).returncode:
            run("ip", "link", "add", "switch", "type", "bridge")
            run("ip", "link", "set", "switch", "up")
        run("ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid))
        run("ip", "link", "set", self.name, "master", "switch", "up")
        self.shell(f"ip addr add {self.address}/24 dev eth0; ip link set eth0 up")
        self._started: list[subprocess.Popen | Command] = []
        self._mounted: set[Path] = set()

    def knows(self, addresses: Mapping[str, str]) -> None:
        """Write its /etc/hosts: the names of all hosts, but for these."""
        known = {"localhost": "127.0.0.1", **{f"node{n}": f"10.0.0.{n}" for n in range(1, 5)}, **addresses}
        self.etc_hosts.write_text("".join(f"{address} {name}\n" for name, address in known.items() if address))

    def shell(self, command: str) -> str:
        """What a shell command on this host prints."""
        words = [*self.enter, "sh", "-ec", command]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def mount(self, place: Path, options: str) -> None:
        """Mount something on a folder, as this host sees it."""
        self.shell(f"mount {options} {place}")
        self._mounted.add(place)

    def begin(self, *words: str, cwd: Path, environment: Mapping[str, str]) -> Command:
        """Start flow-grpo with these words."""
        command = begin(*words, cwd=cwd, environment=environment, before=partial(_enter, self._holder.pid))
        self._started.append(command)
        return command

    def popen(self, words: Sequence[str], cwd: Path, environment: Mapping[str, str], output: Path) -> subprocess.Popen:
        """Start another command, which writes to a file."""
        with output.open("w") as stream:
            process = subprocess.Popen(
                [*self.enter, *words], cwd=cwd, env={**os.environ, **environment}, stdout=stream, stderr=subprocess.STDOUT
            )
        self._started.append(process)
        return process

    def cut(self) -> None:
        """Take the cable out: nothing arrives, and nobody is told."""
        run("ip", "link", "set", self.name, "down")

    def lose_power(self) -> None:
        """End everything at once, so that no connection is closed."""
        self.cut()
        self.signal(signal.SIGKILL)

    def repair(self) -> None:
        """Bring the host to where it began, without processes."""
        self.signal(signal.SIGKILL)
        for process in self._started:
            process.process.join() if isinstance(process, Command) else process.wait()
        self._started.clear()
        self.knows({})
        for place in self._mounted:
            self.shell(f"while mountpoint -q {place}; do umount -l {place}; done")
        self._mounted.clear()
        run("ip", "link", "set", self.name, "up")

    def signal(self, number: int) -> None:
        """Send a signal to all its processes, but for the one that holds it."""
        for process in self.processes():
            os.kill(process, number)

    def processes(self) -> list[int]:
        """Ids of its processes, but for the one that holds it."""
        own = os.stat(f"/proc/{self._holder.pid}/ns/uts").st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.stat(folder / "ns" / "uts").st_ino == own and int(folder.name) != self._holder.pid:
                    found.append(int(folder.name))
            except FileNotFoundError:
                continue
        return found

    def bytes_sent(self) -> int:
        """Bytes that have left by eth0, with the headers of their packets."""
        return json.loads(self.shell("ip -s -j link show eth0"))[0]["stats64"]["tx"]["bytes"]

    @property
    def enter(self) -> list[str]:
        """The words before a command that run it on this host."""
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--uts", "--mount"]


def _enter(holder: int) -> None:
    """Move this process to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in KINDS:
        namespace = os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY)
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(namespace)
