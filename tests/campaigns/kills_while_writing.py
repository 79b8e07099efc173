"""Kills every verb that writes before each call to the file system: `python tests/campaigns/kills_while_writing.py`.

Each verb writes over an earlier result of its own. A process that is killed before a call leaves the files as they were at that moment, so
the verb runs once, and the folder is copied before each call (see tests/support/kill_points.py). Each copy must hold the earlier result or
the new one, byte by byte, once what waits in `.NAME.complete` or `.NAME.former` is put in its place, as the next command does it; other
files are untouched. Of the copies of each verb, some are made by a real SIGKILL before a random call, in a forked process, and there the
same command is given again: it must lead to the new result, and leave no temporary file.

Prints a line for each verb, and exits with 1 if anything was lost.
"""

import argparse
import contextlib
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch
from hostile_inputs import world
from support.kill_points import before_each_call, contents, states

from flow_grpo import files
from flow_grpo.cli import app as cli
from flow_grpo.policy.library_logging import quiet_libraries


@dataclass
class Written:
    """A verb over an earlier result.

    Attributes:
        earlier, words: the command that wrote the earlier result, and the one that is killed.
        result: the folder that the result is in.
        name: of the result, in `.NAME.complete`.
        others: whether a file of the user's is put beside the earlier result.
    """

    earlier: str
    words: str
    result: str
    name: str = ""
    others: bool = False


EXPORT = "export runs/short --out out"
FIT = "rewards fit votes/votes.jsonl --out out"
SAMPLE = "sample a --steps 1 --config short.yaml --out out"
VERBS = {
    "export": Written(f"{EXPORT} --checkpoint 1", EXPORT, "out", "export"),
    "export over another kind": Written(f"{EXPORT} --merge", EXPORT, "out", "export"),
    "export --merge": Written(EXPORT, f"{EXPORT} --merge", "out", "export"),
    "export beside others": Written(f"{EXPORT} --checkpoint 1", EXPORT, "out", "export", others=True),
    "rewards fit": Written(f"{FIT} --seed 1", f"{FIT} --seed 2 --weight-decay 1", "out", "head"),
    "rewards fit beside others": Written(f"{FIT} --seed 1", f"{FIT} --seed 2 --weight-decay 1", "out", "head", others=True),
    "eval": Written("eval grid.png --reward color --out out", "eval grid.png --reward jpeg_size --out out", "out", "eval"),
    "eval in a run": Written(
        "eval runs/short --reward color --steps 1 --limit 8",
        "eval runs/short --reward jpeg_size --steps 1 --limit 8",
        "runs/short",
        "eval",
    ),
    "compare": Written(
        "compare short.yaml --seeds 1 --budget 1s --evaluations 1 --out out",
        "compare short.yaml --seeds 1 --budget 1s --evaluations 1 --target 0.1 --out out",
        "out",
        "compare",
    ),
    "report": Written("report runs/short --out out/a.html", "report runs/short runs/short --out out/a.html", "out"),
    "score": Written(
        "score grid.png --reward color --out out/a.json", "score grid.png --reward jpeg_size --out out/a.json", "out"
    ),
    "score, csv": Written(
        "score grid.png --reward color --out out/a.csv", "score grid.png --reward jpeg_size --out out/a.csv", "out"
    ),
    "sample": Written(f"{SAMPLE} --seeds 6", f"{SAMPLE} --seeds 4 --first-seed 3", "out", "sample"),
    "sample beside others": Written(
        f"{SAMPLE} --seeds 6", f"{SAMPLE} --seeds 4 --first-seed 3", "out", "sample", others=True
    ),
    "rewards test": Written(
        "rewards test color --images grid.png --out out/a.png",
        "rewards test jpeg_size --images grid.png --out out/a.png",
        "out",
    ),
    "init": Written("init out/a.yaml", "init out/a.yaml --force --reward color", "out"),
    "doctor --json": Written(
        "doctor --model tiny dtype=bf16 --json out/a.json", "doctor --model tiny dtype=fp32 --json out/a.json", "out"
    ),
}
SMALLEST = ("export beside others", "rewards fit", "score")


def command(words: str) -> None:
    """Run a command in this process, without its output. Its errors are raised."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        cli.app(shlex.split(words), standalone_mode=False)


def dead(*_: object) -> bool:
    """Every process that has left something is taken for dead, this one included."""
    return False


def finished(state: Path, verb: Written) -> dict[str, bytes]:
    """The result in a folder that a killed process has left, after what the next command does first."""
    if verb.name:
        files.finish_files(state / verb.result, verb.name)
    return contents(state / verb.result)


def killed(folder: Path, words: str, call: int) -> None:
    """Run a command in a forked process, and kill it before that call."""
    child = os.fork()
    if child == 0:
        count = iter(range(call))
        os.chdir(folder)
        with before_each_call(lambda: None if next(count, None) is not None else os.kill(os.getpid(), signal.SIGKILL)):
            command(words)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the process ended by itself, status {status}"


@contextlib.contextmanager
def at(folder: Path) -> Iterator[None]:
    """Within the block, the folder is the working folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def real_kills(
    start: Path, copy: Path, verb: Written, calls: int, count: int, results: list[dict[str, bytes]], rng: random.Random
) -> list[str]:
    """What is wrong after real kills, and after the same command was given again.

    Each is in a copy of `start` at `copy`, where the results were made: some, such as a report, contain the path.
    """
    wrong = []
    for call in rng.sample(range(calls), min(count, calls)):
        shutil.rmtree(copy)
        shutil.copytree(start, copy, symlinks=True)
        killed(copy, verb.words, call)
        if contents_without_run(finished(copy, verb)) not in map(contents_without_run, results):
            wrong.append(f"a kill before call {call} leaves a mixture")
        files._swept.clear()
        with at(copy):
            command(verb.words)
        if contents_without_run(contents(copy / verb.result)) != contents_without_run(results[1]):
            wrong.append(f"the command again, after a kill before call {call}, does not lead to the new result")
        wrong += [f"left over after a kill before call {call}: {path}" for path in copy.rglob("*.partial*")]
    return wrong


def contents_without_run(result: dict[str, bytes]) -> dict[str, bytes]:
    """Without files that say when they were written."""
    return {name: data for name, data in result.items() if not name.endswith((".lock", "curve.jsonl"))}


def kill_verb(valid: Path, place: Path, verb: Written, real: int, rng: random.Random) -> tuple[int, int, list[str]]:
    """The number of calls before which a verb was killed, that of real kills, and what was lost."""
    home = place / "home"
    shutil.copytree(valid, home, symlinks=True)
    with at(home):
        command(verb.earlier)
        if verb.others:
            (home / verb.result / "mine.txt").write_text("mine")
    start = place / "start"
    shutil.copytree(home, start, symlinks=True)
    old = contents(home / verb.result)
    files._swept.clear()
    with at(home):
        found = states(home, place / "states", lambda: command(verb.words))
    new = contents(home / verb.result)
    assert old != new, "the two commands write different results"
    results = [old, new]
    mixed = [
        i
        for i, state in enumerate(found)
        if contents_without_run(finished(state, verb)) not in map(contents_without_run, results)
    ]
    wrong = [f"a kill before call {i} of {len(found)} leaves a mixture" for i in mixed]
    wrong += real_kills(start, home, verb, len(found) - 1, real, results, rng)
    return len(found) - 1, min(real, len(found) - 1), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--smallest", dest="verbs", action="store_const", const=SMALLEST)
    parser.add_argument("--real", type=int, default=4, help="real kills of each verb")
    parser.add_argument("--seed", type=int, default=0, help="of the calls before which they are")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a process with threads can't fork
    quiet_libraries()
    files.psutil.pid_exists = dead
    rng, lost, total, total_real = random.Random(given.seed), list[str](), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        valid = Path(folder) / "valid"
        valid.mkdir()
        world(valid)
        shutil.rmtree(valid / "model")
        for name in given.verbs:
            place = Path(folder) / name
            place.mkdir()
            calls, real, wrong = kill_verb(valid, place, VERBS[name], given.real, rng)
            shutil.rmtree(place)
            total, total_real = total + calls, total_real + real
            lost += [f"{name}: {what}" for what in wrong]
            print(f"{name}: {calls} calls, {real} real kills, {f'{len(wrong)} LOST' if wrong else 'whole'}", flush=True)
    print("\n".join(lost) or "nothing lost")
    print(f"{total} kills before calls, {total_real} more by SIGKILL, {len(lost)} losses")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
