"""metrics.jsonl: a row of numbers for each training step and each evaluation, and a row for each warning.

    {"step": 3, "reward": 0.61, "loss": -0.02, ...}     a training step, which has `loss`
    {"step": 4, "eval/reward": 0.63, ...}               an evaluation, which has `eval/reward`
    {"step": 4, "warning": "...", "fallen": "clip"}     a warning

A crash, a full disk or another program can leave lines that are no rows. Reading skips them, and a resumed run moves them to
metrics.torn.jsonl.
"""

import json
import math
from pathlib import Path
from typing import Any

from flow_grpo.files import append_line, write_atomic
from flow_grpo.run_folder.layout import METRICS, TORN

TEXT_FIELDS = ("warning", "fallen")  # all other values are numbers
NO_SIGNAL = "reward_std"  # the metric that has fallen, to 0, where all images of each prompt got the same reward
NO_GRADIENT = "reward_gradient"  # the same, where the gradient of the rewards was 0
SHARE = "advantage/share/"  # metrics that begin so: the share of a reward, or of one in a prompt set
MAX_STEP = 10**12  # no run is longer
LARGE = 1e100  # larger values count as infinite, so that sums and squares of metrics don't overflow


def read_metrics(folder: Path) -> list[dict]:
    """All readable rows of a run's metrics, in the order of the file."""
    return [row for line in _lines(folder / METRICS) if (row := parse_row(line)) is not None]


def logged_best_step(rows: list[dict]) -> int | None:
    """The step of the best evaluation, according to the last one of these rows."""
    steps = [row["monitor/best_step"] for row in rows if math.isfinite(row.get("monitor/best_step", math.nan))]
    return int(steps[-1]) if steps else None


def has_metrics(folder: Path) -> bool:
    """Whether a run has written metrics there, readable or not."""
    return bool(_lines(folder / METRICS))


def append_row(folder: Path, row: dict[str, Any]) -> None:
    """Append a row, which is on disk when this returns."""
    append_line(folder / METRICS, json.dumps(row))


def rewind(folder: Path, step: int) -> str | None:
    """Delete the rows after a step, and move lines that are no rows to metrics.torn.jsonl.

    Returns a sentence with the number of moved lines, or None if there are none.
    """
    file, torn = folder / METRICS, folder / TORN
    rows = [(line, parse_row(line)) for line in _lines(file)]
    foreign = [line for line, row in rows if row is None]
    if foreign:
        previous = _lines(torn)
        write_atomic(torn, _joined(previous + [line for line in foreign if line not in previous]))
    write_atomic(file, _joined([line for line, row in rows if row and row["step"] <= step]))
    if not foreign:
        return None
    what = "1 line that is no row" if len(foreign) == 1 else f"{len(foreign)} lines that are no rows"
    return f"{file} had {what} of metrics, cut off or written by something else: moved to {torn}."


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The numbers and texts of a row; None for a line that is no JSON object, or has no step."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):  # ValueError: cut off, not UTF-8, or a number of thousands of digits
        return None
    step = row.get("step") if isinstance(row, dict) else None
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        return None
    numbers = {
        key: bounded(value) for key, value in row.items() if isinstance(value, int | float) and key not in TEXT_FIELDS
    }
    return {**numbers, **{key: row[key] for key in TEXT_FIELDS if isinstance(row.get(key), str)}}


def bounded(value: float) -> float:
    """The value, infinite if it is too large for sums of squares."""
    return value if not abs(value) > LARGE else math.inf if value > 0 else -math.inf


def _lines(file: Path) -> list[bytes]:
    """The lines of a file that are not blank."""
    return [line for line in file.read_bytes().split(b"\n") if line.strip()] if file.is_file() else []


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)
