"""Fills disks: `python tests/campaigns/disk_full.py` (Linux, as root, for a tmpfs of a few MB; elsewhere it says so).

Training on disks of several sizes ends with one sentence that names a path, and no traceback, whatever was being written. Then the
disk grows, as if somebody had cleared it, and `--resume` (or the same command, where no checkpoint had been written) must lead to the
LoRA and the metrics of an undisturbed run.

Every other verb that writes is given over an earlier result of its own, on a disk with a little room, and with a limit on the size of
a file (RLIMIT_FSIZE). It ends well with the new result, or says one sentence and leaves the earlier one, byte by byte, and no temporary
file. With more room the same command leads to the new result.
"""

import argparse
import json
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from hostile_inputs import world
from kills import differences, started
from kills_while_writing import VERBS, Written, contents_without_run, finished
from support.cli_process import begin

SIZES = [100, 300, 600, 1000, 1500, 2000, 2500, 3000, 4000, 5000]  # KB; the run leaves about 2 MB with the settings below
ROOMS = [0, 8, 40, 200, 1000]  # KB beside an earlier result
LIMITS = [1, 20, 200]  # KB of a file
LARGE = 200_000  # KB


def mount(folder: Path, kilobytes: int, remount: bool = False) -> bool:
    options = f"size={kilobytes}k" + (",remount" if remount else "")
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(words, capture_output=True).returncode == 0


def run_on_a_disk(folder: Path, size: int, reference: Path) -> tuple[bool, list[str]]:
    """Train on a disk of `size` KB, and go on once it is larger. Returns whether it was full, and what is not as it must be."""
    disk, wrong = folder / f"disk_{size}", []
    disk.mkdir()
    assert mount(disk, size)
    try:
        config, output = started(folder, f"disk_{size}/run", [])
    except OSError:
        config = folder / f"run_{size}.yaml"  # not even the config fits: it lies elsewhere
        config.write_text((folder / "reference.yaml").read_text().replace(str(reference), str(disk / "run")))
        output = disk / "run"
    try:
        command = begin("train", str(config), cwd=folder)
        command.process.join(3600)
        code = command.process.exitcode
        if code != 0:
            if "Traceback" in command.output or str(disk) not in command.output or code not in (1, 2):
                wrong.append(f"exit {code}: {command.output[-800:]}")
            assert mount(disk, 50_000, remount=True)
            resume = ["--resume"] if list(output.glob("checkpoints/step_*/checkpoint.json")) else []
            begin("train", str(config), *resume, cwd=folder).finish(0, 3600)
        return code != 0, [*wrong, *differences(output, reference)]
    except AssertionError as error:
        return True, [*wrong, str(error)]
    finally:
        subprocess.run(["umount", str(disk)], check=False)


@contextmanager
def disk_with(disk: Path, start: Path) -> Iterator[Path]:
    """A large disk that holds a copy of a folder."""
    assert mount(disk, LARGE)
    try:
        yield shutil.copytree(start, disk / "home", symlinks=True)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def one_verb(folder: Path, valid: Path, verb: Written, rooms: list[int], limits: list[int]) -> tuple[int, list[str]]:
    """How often a verb had to stop, and what is wrong."""
    disk, start, stops, wrong = folder / "disk", folder / "start", 0, list[str]()
    words = shlex.split(verb.words)
    with disk_with(disk, valid) as home:
        begin(*shlex.split(verb.earlier), cwd=home).finish(0, 3600)
        if verb.others:
            (home / verb.result / "mine.txt").write_text("mine")
        shutil.copytree(home, start, symlinks=True)
        old = contents_without_run(finished(home, verb))
        begin(*words, cwd=home).finish(0, 3600)
        new = contents_without_run(finished(home, verb))
    for room, limit in [*((room, None) for room in rooms), *((None, limit) for limit in limits)]:
        where = f"{room} KB of room" if limit is None else f"files of {limit} KB"
        with disk_with(disk, start) as home:
            if room is not None:
                assert mount(disk, shutil.disk_usage(disk).used // 1024 + room, remount=True)
            command = begin(*words, cwd=home, environment={"TMPDIR": str(home)})
            if limit is not None:
                resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (limit << 10, limit << 10))
            command.process.join(3600)
            assert mount(disk, LARGE, remount=True)
            code, output = command.process.exitcode, command.output
            if code == 1 and "of the checks failed" in output and "Traceback" not in output:
                # the doctor's: a LoRA that can't be written is a failed check
                json.loads((home / "out" / "a.json").read_text())
                continue
            if "Traceback" in output or code not in (0, 2, 75) or (code and "error:" not in output):
                wrong.append(f"{where}: exit {code}: {output[-800:]}")
            left = contents_without_run(finished(home, verb))
            if left not in ((new,) if code == 0 else (old, new)):
                wrong.append(f"{where}: exit {code}, a mixture: {sorted(left)}: {output[-300:]}")
            wrong += [f"{where}: left over: {path.relative_to(home)}" for path in home.rglob("*.partial*")]
            begin(*words, cwd=home).finish(0, 3600)
            if contents_without_run(finished(home, verb)) != new:
                wrong.append(f"{where}: with more room, the command does not lead to the new result")
            stops += code != 0
    shutil.rmtree(start)
    return stops, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="of the disks, in KB")
    parser.add_argument("--verbs", nargs="*", choices=VERBS, default=list(VERBS), help="beside training")
    parser.add_argument("--rooms", type=int, nargs="*", default=ROOMS, help="beside an earlier result, in KB")
    parser.add_argument("--limits", type=int, nargs="*", default=LIMITS, help="of the size of a file, in KB")
    given = parser.parse_args()
    sizes, lost, refused = given.sizes, list[str](), 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "disk").mkdir()
        if not mount(folder / "disk", LARGE):
            print("no tmpfs can be mounted here: run this as root on Linux.")
            sys.exit(77)
        subprocess.run(["umount", str(folder / "disk")], check=False)
        config, reference = started(folder, "reference", [])
        begin("train", str(config), cwd=folder).finish(0, 3600)
        for size in sizes:
            was_full, wrong = run_on_a_disk(folder, size, reference)
            refused += was_full
            lost += [f"{size} KB: {what}" for what in wrong]
        valid = folder / "valid"
        valid.mkdir()
        world(valid)
        shutil.rmtree(valid / "model")
        for name in given.verbs:
            stops, wrong = one_verb(folder, valid, VERBS[name], given.rooms, given.limits)
            print(f"{name}: {stops} of {len(given.rooms) + len(given.limits)} stopped, {len(wrong)} wrong", flush=True)
            lost += [f"{name}, {what}" for what in wrong]
    tried = len(given.verbs) * (len(given.rooms) + len(given.limits))
    print(f"{len(sizes)} disks, {refused} of them full, {tried} commands with little room, {len(lost)} differences")
    print("\n".join(lost) or "nothing lost")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
