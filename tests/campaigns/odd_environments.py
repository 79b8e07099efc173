"""Runs every verb in odd environments: `python tests/campaigns/odd_environments.py` (Linux).

A case is one command that works, in a new interpreter and a folder of its own: without HOME or TMPDIR, with an ASCII locale, with closed
or full streams, few file descriptors, a working folder that is gone, an unusual umask, time zone, terminal, name of the folder, user or
switch of Python. Most must not matter: the exit status is 0, and the result is there. In the others the command may refuse, by exit
status 1, 2 or 75 and a sentence. A traceback or a hang is wrong everywhere.

Environments with another user need root, and are left out without it. Prints what went wrong and a line of counts; exits with 1 if
anything did.
"""

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from hostile_inputs import VERBS, world

NOBODY = 12345  # a user without an entry in /etc/passwd
# the interpreter may lie where only root may read
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
AS_NOBODY += [
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
    "--bounding-set=-all,+dac_read_search",
]
SECONDS = 600
RESULTS = {
    "train": "runs/new/lora/pytorch_lora_weights.safetensors",
    "sample": "out.png/grid.png",
    "compare": "compared/compare.json",
    "score": "scores.json",
    "report": "runs/short/report.html",
    "export": "runs/short/export/README.md",
    "init": "new.yaml",
}


def close(*descriptors: int) -> Callable[[], None]:
    """Closes standard streams before the command begins."""
    return lambda: [os.close(one) for one in descriptors] and None


def limit(kind: int, number: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (number, number))


def to_a_full_device() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def to_nobody() -> None:
    """Stdout is a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)


def remove_working_folder() -> None:
    shutil.rmtree(os.getcwd())


@dataclass
class Environment:
    """What is odd.

    Attributes:
        variables: of the environment; None takes one away, and `{}` stands for the folder of the case.
        start: called in the new process before the command.
        name: of the working folder.
        as_nobody: whether the command runs as a user without a name, who owns the folder.
        may_refuse: whether a sentence and an exit status other than 0 is right, too.
    """

    variables: dict[str, str | None] = field(default_factory=dict)
    start: Callable[[], object] | None = None
    name: str = "here"
    as_nobody: bool = False
    may_refuse: bool = False


ENVIRONMENTS = {
    "as it should be": Environment(),
    "no HOME": Environment({"HOME": None}),
    "HOME is not there": Environment({"HOME": "{}/nowhere/at/all"}),
    "HOME is a file": Environment({"HOME": "{}/short.yaml"}),
    "HOME that can't be written": Environment({"HOME": "/"}, as_nobody=True),
    "no variables": Environment(dict.fromkeys([key for key in os.environ if key not in ("PYTHONPATH", "OMP_NUM_THREADS")])),
    "LANG=C": Environment({"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "LC_ALL=POSIX": Environment({"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "ASCII streams": Environment({"PYTHONIOENCODING": "ascii:strict"}),
    "TMPDIR is not there": Environment({"TMPDIR": "{}/nowhere"}),
    "stdin is closed": Environment(start=close(0)),
    "stdout is closed": Environment(start=close(1)),
    "all streams are closed": Environment(start=close(0, 1, 2)),
    "stdout is full": Environment(start=to_a_full_device, may_refuse=True),
    "nobody reads stdout": Environment(start=to_nobody),
    "COLUMNS=0": Environment({"COLUMNS": "0"}),
    "COLUMNS=1": Environment({"COLUMNS": "1", "LINES": "1"}),
    "COLUMNS is no number": Environment({"COLUMNS": "wide"}),
    "TERM=dumb": Environment({"TERM": "dumb", "FORCE_COLOR": "1"}),
    "NO_COLOR": Environment({"NO_COLOR": "1", "TERM": ""}),
    "PYTHONWARNINGS=error": Environment({"PYTHONWARNINGS": "error"}),
    "PYTHONHASHSEED": Environment({"PYTHONHASHSEED": "4294967295"}),
    "PYTHONOPTIMIZE=2": Environment({"PYTHONOPTIMIZE": "2"}, may_refuse=True),
    "PYTHONDEVMODE": Environment({"PYTHONDEVMODE": "1"}),
    "PYTHONSAFEPATH": Environment({"PYTHONSAFEPATH": "1"}),
    "MPLBACKEND of a notebook": Environment({"MPLBACKEND": "module://matplotlib_inline.backend_inline"}),
    "working folder is gone": Environment(start=remove_working_folder, may_refuse=True),
    "64 file descriptors": Environment(start=limit(resource.RLIMIT_NOFILE, 64)),
    "16 file descriptors": Environment(start=limit(resource.RLIMIT_NOFILE, 16), may_refuse=True),
    "files of 100 KB at most": Environment(start=limit(resource.RLIMIT_FSIZE, 100_000), may_refuse=True),
    "umask 077": Environment(start=lambda: os.umask(0o077)),
    "umask 777": Environment(start=lambda: os.umask(0o777), as_nobody=True, may_refuse=True),
    "umask 000": Environment(start=lambda: os.umask(0)),
    "TZ is odd": Environment({"TZ": "<+1345>-13:45"}),
    "TZ is nonsense": Environment({"TZ": "Nowhere/At All"}),
    "a user without a name": Environment({"HOME": None, "USER": None, "LOGNAME": None}, as_nobody=True),
    "spaces and quotes": Environment(name="a folder's \"name\" [1] *"),
    "not ASCII": Environment(name="Bilder für 画像 🖼️"),
    "a line break": Environment(name="two\nlines"),
    "a percent sign and braces": Environment(name="100% {x} $HOME ~"),
    "no UTF-8": Environment(name=os.fsdecode(b"caf\xe9")),
    "CUDA is asked for": Environment({"CUDA_VISIBLE_DEVICES": "7"}),
    "threads are no number": Environment({"OMP_NUM_THREADS": "many"}),
}  # fmt: skip


def case(verb: str, environment: Environment, valid: Path) -> str:
    """What was wrong with a command, or ""."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place) / environment.name
        shutil.copytree(valid, folder, symlinks=True)
        written = Path(place) / "output.txt"
        variables = {**os.environ, "HOME": f"{place}/home"}
        for name, value in environment.variables.items():
            variables.pop(name, None)
            if value is not None:
                variables[name] = value.replace("{}", str(folder))
        (Path(place) / "home").mkdir()
        if environment.as_nobody:
            for path in [Path(place), *Path(place).rglob("*")]:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        code, output = ended(verb, environment, folder, written, variables)
        return verdict(verb, environment, folder, code, output)


def ended(
    verb: str, environment: Environment, folder: Path, written: Path, variables: dict[str, str]
) -> tuple[int | None, str]:
    """The exit status of a command, None if it did not end, and its output."""
    with written.open("wb") as stream:
        process = subprocess.Popen(
            [*(AS_NOBODY if environment.as_nobody else []), sys.executable, "-m", "flow_grpo", *verb.split(), *VERBS[verb]],
            cwd=folder, env=variables, stdout=stream, stderr=stream, preexec_fn=environment.start, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + (60 if verb == "serve" else SECONDS)
    while process.poll() is None and time.monotonic() < deadline:
        if verb == "serve" and b"http://" in written.read_bytes():
            break
        time.sleep(0.05)
    if verb == "serve" and process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        code: int | None = process.wait(60)
    except subprocess.TimeoutExpired:
        code = None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, written.read_bytes().decode("utf-8", "replace")


def verdict(verb: str, environment: Environment, folder: Path, code: int | None, output: str) -> str:
    if "Traceback (most recent" in output or "Exception ignored" in output:
        return f"traceback: {output[-1500:]}"
    if code is None:
        return f"still ran: {output[-500:]}"
    right = {0, 143, -signal.SIGTERM} if verb == "serve" else {0}
    right |= {1, 2, 75} if environment.may_refuse else {1} if verb == "doctor" else set()  # its advice
    if code not in right:
        return f"exit status {code}: {output[-800:]}"
    if code and verb != "serve" and environment.start is not to_a_full_device and not output.strip():
        return f"exit status {code} without a word"
    leaves_a_result = code == 0 and verb in RESULTS and environment.start is not remove_working_folder
    if leaves_a_result and not (folder / RESULTS[verb]).is_file():
        return f"no {RESULTS[verb]}: {output[-500:]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS), metavar="NAME")
    parser.add_argument("--each", type=int, help="so many verbs in each environment, drawn at random; by default all")
    parser.add_argument("--seed", type=int, default=0, help="of these draws")
    given, wrong, count = parser.parse_args(), list[str](), 0
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as place:
        valid = Path(place) / "valid"
        valid.mkdir()
        world(valid)
        for name in given.environments:
            if ENVIRONMENTS[name].as_nobody and os.geteuid() != 0:
                print(f"{name}: left out, it needs root", flush=True)
                continue
            verbs = rng.sample(given.verbs, given.each) if given.each else given.verbs
            found = [f"{name}, {verb}: {what}" for verb in verbs if (what := case(verb, ENVIRONMENTS[name], valid))]
            count, wrong = count + len(verbs), wrong + found
            print("\n".join([f"{name}: {len(verbs)} commands, {len(found)} wrong", *found]), flush=True)
    print(f"{count} commands in {len(given.environments)} environments, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
