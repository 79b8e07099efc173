"""Curves for the report, as paths of an SVG that stretches with the page while its lines keep their width.

Paths lie in a box of 1000 x 1000; ticks come as shares of the box with their labels, which the page sets as text beside it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flow_grpo.text import number, six_digits

Point = tuple[float, float]
BOX = 1000.0
MAX_POINTS = 300  # points of a line
FLAT_TOLERANCE = 1e-3  # of its size, within which a line does not move


@dataclass(frozen=True)
class Line:
    """`kind`: `line`, `faint` behind another, or `dots`, linked. `run` is the number of the run, which has a colour."""

    label: str
    points: list[Point]
    kind: str = "line"
    run: int = 0


def draw(title: str, lines: Iterable[Line], note: str = "", marks: Iterable[tuple[int, int]] = ()) -> dict | None:
    """What the page needs of a chart, or None if there is nothing to see: fewer than two points, or a line that does not move.

    Args:
        marks: pairs of run and step at which something is to be seen.
    """
    lines = [line for line in lines if line.points]
    ys = [y for line in lines for _, y in line.points]
    if max((len(line.points) for line in lines), default=0) < 2 or max(ys) - min(ys) <= FLAT_TOLERANCE * max(map(abs, ys)):
        return None
    left, right = 0.0, max(x for line in lines for x, _ in line.points)
    low, high = _room(min(ys), max(ys))

    def place(x: float, y: float) -> str:
        return f"{BOX * (x - left) / (right - left):.1f} {BOX * (high - y) / (high - low):.1f}"

    drawn = []
    for line in lines:
        points = downsample(line.points)
        shape = {"kind": line.kind, "run": line.run, "path": "M" + "L".join(place(x, y) for x, y in points)}
        if line.kind == "dots":
            shape["dots"] = "".join(f"M{place(x, y)}h0" for x, y in points)
        drawn.append(shape)
    read = [line for line in lines if line.kind != "faint"]
    ends = [f"{line.label} from {number(line.points[0][1])} to {number(line.points[-1][1])}" for line in read]
    return {
        "title": title,
        "note": note,
        "label": f"{title}, steps {left:.0f} to {right:.0f}: {'; '.join(ends)}",
        "lines": drawn,
        "marks": [{"run": run, "x": _percent(step, left, right)} for run, step in marks],
        "x": [
            {"at": _percent(x, left, right), "text": text}
            for x, text in ticks(left, right, max(1, min(4, int(right - left))))
        ],
        "y": [{"at": _percent(y, high, low), "text": text} for y, text in ticks(low, high, 4)],
        "last": right,
        "data": [
            {"label": line.label, "run": line.run, "points": [six_digits(p) for p in downsample(line.points)]}
            for line in read
        ],
    }


def ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """About `count` round numbers from `low` to `high`, as numbers and as text of equally many decimals."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= 0.999 * rough)
    places = -math.floor(math.log10(step) + 1e-9) + (round(step / power, 3) == 2.5)
    values = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    if places <= 5 and abs(high) < 1e6:
        return [(v, f"{v + 0.0:,.{max(0, places)}f}") for v in values]
    digits = max(0, math.floor(math.log10(max(abs(low), abs(high)))) + places)  # after the point, before the power of ten
    return [(v, f"{v:.{digits}e}".replace("e+0", "e").replace("e-0", "e-") if v else "0") for v in values]


def smooth(points: list[Point]) -> list[Point]:
    """Each point the mean of those around it, about a twentieth of the line."""
    reach = len(points) // 40
    found = []
    for i, (x, _) in enumerate(points):
        near = points[max(0, i - reach) : i + reach + 1]
        found.append((x, sum(y for _, y in near) / len(near)))
    return found


def downsample(points: list[Point]) -> list[Point]:
    """At most 300 points, each the mean of its neighbours; the first and the last stay."""
    if len(points) <= MAX_POINTS:
        return points
    inner, count = points[1:-1], MAX_POINTS - 2
    parts = [inner[len(inner) * i // count : len(inner) * (i + 1) // count] for i in range(count)]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts if part]
    return [points[0], *means, points[-1]]


def _room(low: float, high: float) -> tuple[float, float]:
    gap = 0.08 * (high - low)
    return low - gap if low < 0 or low - gap >= 0 else 0.0, high + gap


def _percent(value: float, first: float, last: float) -> float:
    return round(100 * (value - first) / (last - first), 2)
