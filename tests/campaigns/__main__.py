"""Runs all campaigns one after another: `python tests/campaigns`, or `python -m campaigns` in tests/; `--full` for the large counts.

Prints a line for each, and exits with 1 if any of them lost something. A campaign that can't run here, such as full disks without root,
is skipped: it ends with exit status 77.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
SKIPPED = 77
CAMPAIGNS = {  # the options for each count
    "kills": {
        "smallest": ["--kills", "1", "--rounds", "0"],
        "small": ["--kills", "9", "--rounds", "1"],
        "full": ["--kills", "100", "--rounds", "3"],
    },
    "reward_servers": {
        "smallest": ["--rounds", "1", "--kinds", "replaced"],
        "small": ["--rounds", "1"],
        "full": ["--rounds", "3"],
    },
    "clusters": {"smallest": ["--rows", "srun"], "small": ["--rows", "torchrun", "lost"], "full": []},
    "kills_while_writing": {"smallest": ["--smallest", "--real", "0"], "small": ["--smallest"], "full": []},
    "disk_full": {
        "smallest": ["--sizes", "300", "--verbs", "score", "--rooms", "0", "--limits"],
        "small": ["--sizes", "300", "1500", "--rooms", "8", "--limits", "1"],
        "full": [],
    },
    "odd_environments": {
        "smallest": ["--environments", "no HOME", "--verbs", "schema"],
        "small": ["--each", "1"],
        "full": [],
    },
    "hostile_inputs": {"smallest": ["--cases", "2"], "small": ["--cases", "30"], "full": ["--cases", "1000"]},
}


def outcome(name: str, options: list[str]) -> tuple[int, str]:
    """The exit status of a campaign, and its output."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.returncode, done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(count="small")
    parser.add_argument("--full", dest="count", action="store_const", const="full", help="large counts, which take hours")
    parser.add_argument(
        "--smallest", dest="count", action="store_const", const="smallest", help="for a test of this command"
    )
    given = parser.parse_args()
    failed = False
    for name, options in CAMPAIGNS.items():
        started = time.monotonic()
        code, output = outcome(name, options[given.count])
        word = "skipped" if code == SKIPPED else "failed" if code else "passed"
        last = output.rpartition("\n")[2]
        print(f"{name}: {word} in {time.monotonic() - started:.0f} s: {last[:200]}", flush=True)
        if word == "failed":
            failed = True
            print(output, file=sys.stderr, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
