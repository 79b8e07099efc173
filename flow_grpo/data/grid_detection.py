"""Where the images of a sheet lie, from its pixels alone: cells of one size in rows and columns, with margins and gutters of one color.

The sheet is cut along lines of the background's color, again and again, into parts that no such line crosses (XY-cut). Parts with
straight edges are images; titles, captions and labels have ragged ones.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from flow_grpo.data.grid_layout import Box, GridLayout

LOSSY = 64  # of 255: how far from its color a JPEG's background may be
FAINT = 4  # what differs from the background by less makes no edge
BLUR = 2  # pixels by which a JPEG blurs an edge
SMALLEST = 8  # pixels of an image's height and width
LETTER = 32  # pixels of a title's letters at most
EDGE = 0.5  # share of an image's outermost lines that is not background
MOST_PARTS = 4000
COLORS = 3  # backgrounds that are tried


class NotAGrid(ValueError):
    """The sheet has parts, but not such that they are certainly the images of a grid.

    Attributes:
        images: whether several of the parts are certainly images.
    """

    def __init__(self, problem: str, images: bool = True) -> None:
        super().__init__(problem)
        self.images = images


def detect(pixels: np.ndarray) -> GridLayout | None:
    """The grid of a sheet (H, W, 3) uint8 with at least two images; None if nothing in it looks like gutters.

    Raises:
        NotAGrid: it has several parts, but they are not images of one size at equal distances, or may be cut in more than one way.
    """
    exact = _attempt(pixels, 0)
    if isinstance(exact, NotAGrid) and exact.images:
        raise exact
    lossy = _attempt(pixels, LOSSY)
    if isinstance(exact, GridLayout) and isinstance(lossy, GridLayout):
        return exact if exact == lossy else _sharper(pixels, exact, lossy)
    problems = []
    for attempt in (exact, lossy):
        if isinstance(attempt, GridLayout):
            return attempt
        if attempt is not None:
            problems.append(attempt)
    if problems:
        raise max(problems, key=lambda problem: problem.images)
    return None


def _attempt(pixels: np.ndarray, tolerance: int) -> "GridLayout | NotAGrid | None":
    """The grid on a background that differs so much from one color, or the most telling reason why there is none."""
    problems = []
    for color in _line_colors(pixels, tolerance):
        try:
            found = _layout(pixels, color, tolerance)
        except NotAGrid as error:
            problems.append(error)
            continue
        if found is not None:
            return found
    return max(problems, key=lambda problem: problem.images, default=None)


def _sharper(pixels: np.ndarray, exact: GridLayout, lossy: GridLayout) -> GridLayout:
    """Of two layouts the lossy one, if the other differs by what a JPEG has blurred. NotAGrid if it may be a border of the images."""
    pairs = list(zip(exact.boxes(), lossy.boxes(), strict=False))
    if (exact.rows, exact.columns) == (lossy.rows, lossy.columns) and all(
        b.within(a) and a.within(b, BLUR) for a, b in pairs
    ):
        outer = [line for a, b in pairs[: lossy.filled] for line in _outside(pixels, a, b)]
        if all(np.ptp(line, axis=0).any() for line in outer):
            return lossy
    raise NotAGrid("where its images end is not clear, as they have faint edges")


def _outside(pixels: np.ndarray, outer: Box, inner: Box) -> list[np.ndarray]:
    """The first line of the outer box at each side on which it is larger."""
    lines, cell = [], outer.of(pixels)
    sides = ((inner.top > outer.top, cell[0]), (inner.bottom < outer.bottom, cell[-1]))
    across = ((inner.left > outer.left, cell[:, 0]), (inner.right < outer.right, cell[:, -1]))
    lines += [line for larger, line in (*sides, *across) if larger]
    return lines


def _line_colors(pixels: np.ndarray, tolerance: int) -> list[np.ndarray]:
    """The colors that lines across the whole sheet have, the most frequent first."""
    counts: Counter[tuple[int, ...]] = Counter()
    for axis in (0, 1):
        plain = np.ptp(pixels, axis=axis).max(-1) <= tolerance
        means = pixels.compress(plain, axis=1 - axis).mean(axis, dtype=np.float32)
        counts.update(tuple(int(value) for value in color) for color in means.round())
    return [np.array(color, np.uint8) for color, _ in counts.most_common(COLORS)]


def _layout(pixels: np.ndarray, color: np.ndarray, tolerance: int) -> GridLayout | None:
    """The grid on a background of that color. None if the sheet has a single part."""
    apart = (np.maximum(pixels, color) - np.minimum(pixels, color)).max(-1)
    parts = _parts(apart <= tolerance)
    if len(parts) < 2:
        return None
    images = _images(parts, apart > max(tolerance, FAINT), BLUR if tolerance else 0)
    telling = [image for image in images if np.ptp(image.of(pixels), axis=(0, 1)).any()]  # a letter may be a plain rectangle
    if len(telling) < 2:
        raise NotAGrid("its parts have no straight edges as images have", images=False)
    tops, height = _regular([(i.top, i.bottom) for i in images], "rows")
    lefts, width = _regular([(i.left, i.right) for i in images], "columns")
    found = GridLayout((pixels.shape[0], pixels.shape[1]), tops, lefts, height, width, len(tops) * len(lefts))
    _check_parts(found, images, parts)
    _check_room(found, apart)
    _check_borders(found, [part for part in parts if not any(part.meets(box) for box in found.boxes())])
    full = [i for i, box in enumerate(found.boxes()) if (box.of(apart) > tolerance).any()]
    return GridLayout(found.size, tops, lefts, height, width, full[-1] + 1)


def _parts(background: np.ndarray) -> list[Box]:
    """What is left when a sheet is cut along all lines of background, and its parts again, until no line crosses one."""
    whole = Box(0, 0, *background.shape)
    found: list[Box] = []
    waiting: list[tuple[Box, Literal[0, 1], bool]] = [(whole, 0, False)]  # to be cut along this axis; the other cut nothing
    while waiting:
        box, axis, settled = waiting.pop()
        runs = _runs(np.logical_not(box.of(background).all(axis=1 - axis)))
        uncut = runs == [(0, box.height if axis == 0 else box.width)]
        if uncut and settled:
            found.append(box)
            continue
        for begin, end in runs:
            if axis == 0:
                part = Box(box.top + begin, box.left, box.top + end, box.right)
            else:
                part = Box(box.top, box.left + begin, box.bottom, box.left + end)
            waiting.append((part, 1 if axis == 0 else 0, uncut))
        if len(found) + len(waiting) > MOST_PARTS:
            raise NotAGrid("it has thousands of parts", images=False)
    return found


def _runs(lines: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of each run of true values."""
    steps = np.diff(np.concatenate([[0], lines.astype(np.int8), [0]]))
    return list(zip(np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist(), strict=True))


def _images(parts: list[Box], content: np.ndarray, blur: int) -> list[Box]:
    """The parts with four straight edges, and what has such edges in a part to which a title clings, if it is as large as one of those.

    Small parts beside much larger ones are letters, of which some have straight edges.

    Args:
        content: (H, W), True where the sheet is not background.
        blur: pixels that a straight edge may be away from the part's.
    """
    cores = [(part, core) for part in parts if (core := _core(part, content)) is not None]
    plain = [core for part, core in cores if part.within(core, slack=blur)]
    largest = max((min(image.height, image.width) for image in plain), default=0)
    plain = [image for image in plain if max(image.height, image.width) >= min(LETTER, largest / 3)]
    sizes = {(image.height, image.width) for image in plain}
    return plain + [core for _, core in cores if core not in plain and (core.height, core.width) in sizes]


def _core(part: Box, content: np.ndarray) -> Box | None:
    """The part without outer lines that are background for the most; None if too little is left for an image."""
    while min(part.height, part.width) >= SMALLEST:
        inside = part.of(content)
        ragged = [edge.mean() < EDGE for edge in (inside[0], inside[:, 0], inside[-1], inside[:, -1])]
        if not any(ragged):
            return part
        top, left, bottom, right = ragged
        part = Box(part.top + top, part.left + left, part.bottom - bottom, part.right - right)
    return None


def _regular(spans: Iterable[tuple[int, int]], what: str) -> tuple[tuple[int, ...], int]:
    """Where rows (or columns) begin, and their size; both may differ by the one pixel to which programs round.

    Raises:
        NotAGrid: they are of different sizes, or not at equal distances.
    """
    groups: list[list[tuple[int, int]]] = []
    for span in sorted(set(spans)):
        if groups and span[0] - groups[-1][0][0] <= 1:
            groups[-1].append(span)
        else:
            groups.append([span])
    sizes = {end - begin for group in groups for begin, end in group}
    if max(sizes) - min(sizes) > 1:
        raise NotAGrid(f"its {what} are of different sizes, {min(sizes)} to {max(sizes)} pixels")
    starts = tuple(max(begin for begin, _ in group) for group in groups)
    ends = [min(end for _, end in group) for group in groups]
    steps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    if steps and max(steps) - min(steps) > 1:
        raise NotAGrid(f"its {what} are not at equal distances, {min(steps)} to {max(steps)} pixels apart")
    return starts, min(end - start for start, end in zip(starts, ends, strict=True))


def _check_parts(found: GridLayout, images: Sequence[Box], parts: Sequence[Box]) -> None:
    """NotAGrid if a part crosses the edge of a cell without an image, or is outside of all cells and large enough for an image."""
    boxes = found.boxes()
    for part in parts:
        cell = next((box for box in boxes if part.meets(box)), None)
        if cell is not None and not part.within(cell, slack=1) and not any(image.within(part) for image in images):
            raise NotAGrid("a part of it crosses the edges of the cells, such as a title within them")
        if cell is None and part.height > found.height / 2 and part.width > found.width / 2:
            raise NotAGrid("a part of it beside the cells is as large as an image")


def _check_room(found: GridLayout, apart: np.ndarray) -> None:
    """NotAGrid if something is to be seen where a sheet of several rows (or columns) has room for one more."""
    left, top, right, bottom = found.margins()
    across, down = found.gutters()
    height, width = found.size
    sides = []
    if down is not None:
        room = found.height + down
        sides += [(top, room, apart[:top]), (bottom, room, apart[height - bottom :])]
    if across is not None:
        room = found.width + across
        sides += [(left, room, apart[:, :left]), (right, room, apart[:, width - right :])]
    if any(margin >= room and (side > FAINT).any() for margin, room, side in sides):
        raise NotAGrid("something else is where another row or column of images has room")


def _check_borders(found: GridLayout, others: Sequence[Box]) -> None:
    """NotAGrid if it may as well be torchvision's `make_grid` of images with borders of the gutters' color."""
    if others:
        return  # captions are not within images
    left, top, right, bottom = found.margins()
    across, down = found.gutters()
    given = {
        before + after - gutter
        for before, after, gutter in ((left, right, across), (top, bottom, down))
        if gutter is not None
    }
    padding = given.pop()
    if given or padding < 1 or min(left, top, right, bottom) < padding or {left, top, right, bottom} == {padding}:
        return
    wide, high = (left + right - 2 * padding + found.width, top + bottom - 2 * padding + found.height)
    between = f"{across if across is not None else down},{down if down is not None else across}"
    raise NotAGrid(
        f"its images have {found.width} x {found.height} pixels or, with borders of the gutters' color, {wide} x {high}; "
        f"for these give --rows {found.rows} --columns {found.columns} --padding {padding}, else --rows {found.rows} "
        f"--columns {found.columns} --crop {left},{top},{right},{bottom} --padding {between}"
    )
