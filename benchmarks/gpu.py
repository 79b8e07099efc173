"""Speed and memory of whole training steps on one NVIDIA GPU, with models of the real shapes and random weights.

    python benchmarks/gpu.py NAME [ROW ...]     # all rows of a measurement, or those whose name is or contains a ROW

NAME is one of these; each takes at most ten minutes, and its tables are for docs/performance.md:

    tests         tests/test_cuda.py
    paper         SD3.5-M at 512 px by the paper's recipe
    ours          SD3.5-M at 512 px, grpo and awm without guidance; attention, compile, checkpointing
    flux          FLUX.1-dev at 512 px with a LoRA
    small_cards   SD3.5-M, FLUX.2-klein, Z-Image, FLUX.1-dev and Qwen-Image within 8, 12, 16 and 24 GB
    memory        each memory option, against what `flow-grpo plan` says
    waits         how often a training step waits for the GPU, and the ratio before the first update
    rewards       `ours`, compiled, with PickScore's and HPSv3's shapes, OCR on the CPU, or a server that takes 0.2 s
    gradients     the gradient of PickScore's shape: flowbp and mend, against what `flow-grpo plan` says
    compile       the first step with an empty cache of torch's compiler, and in a second process with that cache
    kernels       awm's rollout with cuDNN's attention and in float8, which the package does not use

A row runs in a process of its own: a step to warm up, then two that are measured. The short rows come first; a row that
the time does not suffice for, or whose package is missing, is named as skipped. A goal is in brackets beside its value. The exit
status is 1 if a row failed; a missed goal is no failure. `--jobs 2` runs two rows at once, if the GPU's memory holds them: a row is
measured while no other row, of this command or another, runs. `--keep FILE` writes each measured row to a JSON file, and the same
command then measures only the others; take another file for another version of the package. `--small` tries a measurement out with
small models, on a CPU too; its numbers mean nothing. The learning run, the spelling world at 256 px, is learning_256.py.

Packages that a machine without network needs as wheels, if it has torch, torchvision, transformers, accelerate, peft, jaxtyping, pytest
and hypothesis: diffusers, pydantic, pydantic-core, annotated-types, typing-inspection; for the quantised rows and the 8-bit AdamW
bitsandbytes; for the rows of `rewards` with OCR rapidocr and for those with a server fastapi, uvicorn, httpx and typer, with what these
need. The last command is for that machine; add to the others `--python-version` and `--platform` of it.

    python -m pip download --only-binary=:all: -d wheels pydantic
    python -m pip download --only-binary=:all: --no-deps -d wheels diffusers bitsandbytes
    python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site
"""

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # the package need not be installed
from gpu_rows import MEASUREMENTS, Measurement, Row  # noqa: E402

SECONDS = 540  # for a command
LONGEST = 300  # for a row
# shared by the rows that get ready, and held by the one that is measured
LOCK = Path(tempfile.gettempdir()) / "flow_grpo_gpu_benchmark.lock"
FILES = 45e9  # bytes for a model's files, at most
CACHE = Path(tempfile.gettempdir()) / "flow_grpo_gpu_benchmark_compiled"
PYTEST = ["-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q", "-rs", "--durations=5", "tests/test_cuda.py"]


def environment(small: bool = False) -> dict[str, str]:
    """Of the processes that are started: this package, no look at a network, and for small models no compiler, which takes minutes."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    slow = {"TORCH_COMPILE_DISABLE": "1"} if small else {}
    return {**os.environ, **slow, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}


def run_tests() -> bool:
    """Whether tests/test_cuda.py passes; its tests are shared by four processes if pytest-xdist is there."""
    parallel = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    try:
        command = [sys.executable, *PYTEST, *parallel]
        return not subprocess.run(command, cwd=ROOT, env=environment(), timeout=SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"stopped after {SECONDS} s", flush=True)
        return False


def run_rows(
    name: str, measurement: Measurement, rows: dict[str, Row], small: bool, jobs: int = 1, *, keep: Path | None = None
) -> bool:
    """Print a table with a line for each row, in the order of their time. Whether none failed.

    Args:
        jobs: rows that are run at once, which wait for each other before they are measured.
        keep: a JSON file of the rows that were measured, to which others are added.
    """
    started, failed, notes, kept = time.monotonic(), False, [], Kept(keep, name, small)
    print(f"Goal: {measurement.goal}.\n")
    print(
        "| setting | " + " | ".join(measurement.columns) + " |\n" + "|---" * (len(measurement.columns) + 1) + "|", flush=True
    )

    def result_of(title: str) -> dict:
        row, remaining = rows[title], SECONDS - (time.monotonic() - started)
        if title in kept.results:
            return kept.results[title]
        if row.package and not importlib.util.find_spec(row.package):
            return {"skipped": f"{row.package} is not installed"}
        if remaining < row.seconds:
            return {"skipped": f"{remaining:.0f} s are left; give its name to measure it alone"}
        return run_row(name, title, small, min(remaining, LONGEST))

    titles = sorted(rows, key=lambda title: rows[title].seconds)
    with ThreadPoolExecutor(jobs) as pool:
        for title, result in zip(titles, pool.map(result_of, titles), strict=True):
            failed |= "failed" in result
            kept.add(title, result)
            print(line(title, rows[title], result), flush=True)
            notes += [f"{title}: {note}" for note in result.get("notes", ())]
    print("\n".join(["", *(f"- {note}" for note in notes)]) if notes else "")
    return not failed


class Kept:
    """The measured rows of a measurement in a JSON file, of this machine's card and versions.

    Attributes:
        results: what `run_row` returned, by the row's name.
    """

    def __init__(self, file: Path | None, name: str, small: bool) -> None:
        self.file = file
        self.content = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self.results = self.content.setdefault(machine(small), {}).setdefault(name, {}) if file is not None else {}

    def add(self, title: str, result: dict) -> None:
        """Add the result of a row that was measured, and write the file."""
        if self.file is None or "values" not in result or title in self.results:
            return
        note = f"measured on {time.strftime('%Y-%m-%d')}"
        self.results[title] = {**result, "notes": [*result.get("notes", ()), note]}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1))
        part.replace(self.file)


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()


def run_row(name: str, title: str, small: bool, seconds: float) -> dict:
    """What `measure` returns in a process of its own, or {"failed": why}. Its standard error goes through."""
    command = [sys.executable, __file__, name, title, "--measure", *(["--small"] if small else [])]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=environment(small), timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {seconds:.0f} s, in which it may have waited for other rows"}
    if done.returncode:
        return {"failed": f"exit status {done.returncode}, see the error above"}
    return json.loads(done.stdout.splitlines()[-1])


def used_bytes() -> int:
    """Bytes of the GPU that are in use; before this process uses it, those of other programs. 0 where nvidia-smi can't tell."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={device}"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


def keep_peak_speed() -> None:
    """Measure and keep the GPU's highest speed while nothing else runs: rows that run at once would measure a share of it."""
    code = "import torch; from flow_grpo.policy.devices import *; matmul_peak(torch.device('cuda'), torch.bfloat16)"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def line(title: str, row: Row, result: dict) -> str:
    """A row of the table, with the goals in brackets."""
    for word in ("failed", "skipped"):
        if word in result:
            return f"| {title} | {word}: {result[word]} |"
    cells = (f"{value:.3g}" + goal(value, row.goals.get(column)) for column, value in result["values"].items())
    return f"| {title} | " + " | ".join(cells) + " |"


def goal(value: float, wanted: str | None) -> str:
    """The goal of a value, and whether it is reached."""
    if wanted is None:
        return ""
    sign, *numbers = wanted.split()
    if sign in (">=", "<=", "="):
        number = float(numbers[0])
        reached = {">=": value >= number, "<=": value <= number, "=": value == number}[sign]
    else:
        reached = float(sign) <= value <= float(numbers[-1])
    return f" ({wanted}: {'yes' if reached else 'no'})"


def print_measured(name: str, title: str, small: bool) -> None:
    """Measure a row in this process and print what it came to as JSON."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder, LOCK.open("w") as lock:
        row = MEASUREMENTS[name].rows[title]
        # before the imports, which take seconds of a core; what a row takes of a card is measured against what is in use before
        fcntl.flock(lock, fcntl.LOCK_EX if row.is_alone else fcntl.LOCK_SH)
        if row.cache is not None:
            use_cache(row.cache, empty=row.cache == title)
        other_bytes = 0 if row.card is None else used_bytes()
        from gpu_step import measure

        from flow_grpo.policy.library_logging import quiet_libraries

        quiet_libraries()
        alone = partial(fcntl.flock, lock, fcntl.LOCK_EX)
        print(json.dumps(measure(row, MEASUREMENTS[name].columns, folder, small, alone, other_bytes)))


def use_cache(title: str, empty: bool) -> None:
    """Let torch's compiler use the cache of the row with that title, emptied or as that row left it on this machine."""
    folder = CACHE / title.replace(" ", "_")
    if empty:
        shutil.rmtree(folder, ignore_errors=True)
    elif not folder.is_dir():
        sys.exit(f"there is no cache here: measure the row {title!r} first, without --keep if it was measured elsewhere.")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ.pop("TRITON_CACHE_DIR", None)  # else that of all rows; by default it is within the other one


def fast_folder() -> str | None:
    """A folder in the machine's memory for the files of a model, 24 GB of FLUX, where it has one that large."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > FILES else None


def heading(name: str, small: bool) -> str:
    """What was measured, on what."""
    return f"## {name}\n\n`python benchmarks/gpu.py {name}` on {machine(small)}, {time.strftime('%Y-%m-%d')}."


def machine(small: bool) -> str:
    """The card and the versions, and whether models are small."""
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    return f"{card}, torch {torch.__version__}, diffusers {version('diffusers')}{', small models' if small else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["tests", *MEASUREMENTS])
    parser.add_argument("row", nargs="*")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.measure:
        print_measured(args.name, args.row[0], args.small)
        return
    if not args.small and not has_gpu():
        sys.exit("This needs a CUDA GPU; --small tries it out on a CPU.")
    print(heading(args.name, args.small) + "\n", flush=True)
    if args.name == "tests":
        sys.exit(not run_tests())
    measurement = MEASUREMENTS[args.name]
    words = [word for word in args.row if word not in measurement.rows] or [""] * (not args.row)
    rows = {
        title: row for title, row in measurement.rows.items() if title in args.row or any(word in title for word in words)
    }
    if not rows:
        sys.exit(f"no row has such a name; {args.name} has: {'; '.join(measurement.rows)}")
    if args.jobs > 1 and any(row.is_alone for row in rows.values()):
        sys.exit(f"{args.name} has rows beside which no other one may run: leave --jobs out.")
    if args.jobs > 1 and has_gpu():
        keep_peak_speed()
    sys.exit(not run_rows(args.name, measurement, rows, args.small, args.jobs, keep=args.keep))


if __name__ == "__main__":
    main()
