"""Trains on a disk that fills up: `python tests/campaigns/disk_full.py` (Linux, as root, for a tmpfs of a few MB; elsewhere it says so).

Runs of several sizes of disk end with one sentence that names a path, exit status 75 and no traceback, whatever was being written. Then the
disk grows, as if somebody had cleared it, and `--resume` (or the same command, where no checkpoint had been written) must lead to the
LoRA and the metrics of an undisturbed run.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from kills import differences, started
from support.cli_process import begin

SIZES = [100, 300, 600, 1000, 1500, 2000, 2500, 3000, 4000, 5000]  # KB; the run leaves about 2 MB with the settings below


def mount(folder: Path, kilobytes: int, remount: bool = False) -> bool:
    options = f"size={kilobytes}k" + (",remount" if remount else "")
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(words, capture_output=True).returncode == 0


def run_on_a_disk(folder: Path, size: int, reference: Path) -> tuple[bool, list[str]]:
    """Train on a disk of `size` KB, and go on once it is larger. Returns whether it was full, and what is not as it must be."""
    disk, wrong = folder / f"disk_{size}", []
    disk.mkdir()
    if not mount(disk, size):
        print("no tmpfs can be mounted here: run this as root on Linux.")
        sys.exit(77)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of the disks, in KB")
    sizes, lost, refused = parser.parse_args().sizes, [], 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config, reference = started(folder, "reference", [])
        begin("train", str(config), cwd=folder).finish(0, 3600)
        for size in sizes:
            was_full, wrong = run_on_a_disk(folder, size, reference)
            refused += was_full
            lost += [f"{size} KB: {what}" for what in wrong]
    print(f"{len(sizes)} disks, {refused} of them full, {len(lost)} differences")
    print("\n".join(lost) or "nothing lost")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
