"""The layout of a grid of images: as the user says, or as it is detected."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from flow_grpo.errors import FlowGRPOError

JPEG_TOLERANCE = 64  # of 255: largest deviation of a JPEG's background from its color
LOSSY = (".jpg", ".jpeg", ".jfif", ".webp", ".avif")  # files that are compressed so
MIN_EDGE_CONTRAST = 4  # of 255: a smaller difference from the background is no edge
JPEG_BLUR = 2  # pixels by which JPEG compression blurs an edge
MIN_IMAGE_SIZE = 8  # pixels, of height and width
MAX_LETTER_SIZE = 32  # pixels: letters of a title are no larger
MIN_EDGE_CONTENT = 0.5  # share of an image's outermost lines that is not background, at least
MAX_PARTS = 4000
NUM_BACKGROUND_COLORS = 3  # most frequent colors that are tried as background
ADVICE = (
    "Give --rows and --columns, --padding for what is between the images, captions included (0 if nothing is), and --crop for what is "
    "around all; --rows 1 --columns 1 reads it as one image"
)
PLAIN = 4  # of 255: largest difference within a line of a margin


@dataclass(frozen=True)
class Box:
    """Part of an image, in pixels; bottom and right are exclusive."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left

    def crop(self, pixels: np.ndarray) -> np.ndarray:
        """The pixels (height, width, ...) inside the box."""
        return pixels[self.top : self.bottom, self.left : self.right]

    def overlaps(self, other: "Box") -> bool:
        """Whether the boxes share a pixel."""
        rows = self.top < other.bottom and other.top < self.bottom
        return rows and self.left < other.right and other.left < self.right

    def is_within(self, other: "Box", slack: int = 0) -> bool:
        rows = other.top - slack <= self.top and self.bottom <= other.bottom + slack
        return rows and other.left - slack <= self.left and self.right <= other.right + slack


@dataclass(frozen=True)
class GridLayout:
    """The cells of a grid image.

    Attributes:
        size: height and width of the grid image.
        tops, lefts: the first pixel of each row and each column of cells.
        height, width: of a cell.
        filled: number of cells up to the last one with an image; the cells after it are the empty end of the last row.
    """

    size: tuple[int, int]
    tops: tuple[int, ...]
    lefts: tuple[int, ...]
    height: int
    width: int
    filled: int

    @property
    def rows(self) -> int:
        return len(self.tops)

    @property
    def columns(self) -> int:
        return len(self.lefts)

    def boxes(self) -> list[Box]:
        """All cells, row by row."""
        return [Box(y, x, y + self.height, x + self.width) for y in self.tops for x in self.lefts]

    def margins(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom."""
        bottom, right = self.tops[-1] + self.height, self.lefts[-1] + self.width
        return self.lefts[0], self.tops[0], self.size[1] - right, self.size[0] - bottom

    def gutters(self) -> tuple[int | None, int | None]:
        """Pixels between columns and between rows; None for a single column or row."""
        column_gap = self.lefts[1] - self.lefts[0] - self.width if self.columns > 1 else None
        return column_gap, self.tops[1] - self.tops[0] - self.height if self.rows > 1 else None

    def crop_cells(self, pixels: np.ndarray) -> np.ndarray:
        """(H, W, 3) -> (rows * columns, height, width, 3), row by row."""
        return np.stack([box.crop(pixels) for box in self.boxes()])

    def shifted(self, top: int, left: int, size: tuple[int, int]) -> "GridLayout":
        """The same cells in a larger image, in which this layout's image begins at (top, left)."""
        tops, lefts = tuple(y + top for y in self.tops), tuple(x + left for x in self.lefts)
        return replace(self, size=size, tops=tops, lefts=lefts)

    def __str__(self) -> str:
        column_gap, row_gap = self.gutters()
        between = [f"{column_gap} between columns"] * (column_gap is not None)
        between += [f"{row_gap} between rows"] * (row_gap is not None)
        left, top, right, bottom = self.margins()
        counts = f"{self.rows} row{'s' * (self.rows > 1)} x {self.columns} column{'s' * (self.columns > 1)}"
        margins = f"margins of {left} left, {top} top, {right} right, {bottom} bottom"
        gutters = f", gutters of {' and '.join(between)}" if between else ""
        return f"{counts} of images with {self.width} x {self.height} pixels, {margins}{gutters}"


def single_image(size: tuple[int, int]) -> GridLayout:
    """The layout of an image that is not a grid."""
    return GridLayout(size, tops=(0,), lefts=(0,), height=size[0], width=size[1], filled=1)


class NotAGrid(FlowGRPOError):
    """The image has several parts, but they may not be the images of a grid.

    Attributes:
        has_images: whether several of the parts are certainly images.
    """

    def __init__(self, problem: str, has_images: bool = True) -> None:
        super().__init__(problem)
        self.has_images = has_images


def detect(pixels: np.ndarray, is_lossy: bool = False) -> GridLayout | None:
    """The layout of a grid image (H, W, 3) uint8 with at least two images; None if it has no gutters.

    Args:
        is_lossy: whether the file's compression may have changed the background. Other files too may have soft edges, but only those
            without a grid of sharp edges are read so.

    Raises:
        NotAGrid: it has several parts, but they are not images of one size at equal distances.
    """
    problem = None
    for tolerance in (JPEG_TOLERANCE,) if is_lossy else (0, JPEG_TOLERANCE):
        try:
            layout = _detect_with_tolerance(pixels, tolerance)
        except NotAGrid as error:
            if error.has_images:
                raise
            problem = error
        else:
            if layout is not None:
                return layout
    if problem is not None:
        raise problem
    return None


def _detect_with_tolerance(pixels: np.ndarray, tolerance: int) -> GridLayout | None:
    """The layout if the background deviates from one color by at most `tolerance`.

    An image can have sides of one color as well: of several layouts it is the one whose images cover most.
    """
    layouts, problems = [], []
    for color in _background_colors(pixels, tolerance):
        try:
            layouts.append(_detect_on_background(pixels, color, tolerance))
        except NotAGrid as error:
            problems.append(error)
    found = [layout for layout in layouts if layout is not None]
    if not found and problems:
        raise max(problems, key=lambda problem: problem.has_images)
    return max(found, key=lambda layout: layout.filled * layout.height * layout.width, default=None)


def _background_colors(pixels: np.ndarray, tolerance: int) -> list[np.ndarray]:
    """The most frequent colors of single-color lines across the whole image."""
    counts: Counter[tuple[int, ...]] = Counter()
    for axis in (0, 1):
        plain = np.ptp(pixels, axis=axis).max(-1) <= tolerance
        means = pixels.compress(plain, axis=1 - axis).mean(axis, dtype=np.float32)
        counts.update(tuple(int(value) for value in color) for color in means.round())
    return [np.array(color, np.uint8) for color, _ in counts.most_common(NUM_BACKGROUND_COLORS)]


def _detect_on_background(pixels: np.ndarray, color: np.ndarray, tolerance: int) -> GridLayout | None:
    """The layout on a background of that color. None if there is a single part."""
    contrast = (np.maximum(pixels, color) - np.minimum(pixels, color)).max(-1)
    parts = _xy_cut(contrast <= tolerance)
    if len(parts) < 2:
        return None
    images = _find_images(parts, contrast > max(tolerance, MIN_EDGE_CONTRAST), JPEG_BLUR if tolerance else 0)
    textured = [image for image in images if np.ptp(image.crop(pixels), axis=(0, 1)).any()]  # a letter may have one color
    if len(textured) < 2:
        raise NotAGrid("its parts have no straight edges as images have", has_images=False)
    tops, height = _regular_spacing([(i.top, i.bottom) for i in images], "rows")
    lefts, width = _regular_spacing([(i.left, i.right) for i in images], "columns")
    size, count = (pixels.shape[0], pixels.shape[1]), len(tops) * len(lefts)
    layout = GridLayout(size, tops=tops, lefts=lefts, height=height, width=width, filled=count)
    _check_parts(layout, images, parts)
    _check_room(layout, contrast)
    _check_borders(layout, [part for part in parts if not any(part.overlaps(box) for box in layout.boxes())])
    full = [i for i, box in enumerate(layout.boxes()) if (box.crop(contrast) > tolerance).any()]
    return replace(layout, filled=full[-1] + 1)


def _xy_cut(background: np.ndarray) -> list[Box]:
    """The parts of a grid image, cut along lines of background, and cut again until no such line crosses a part."""
    height, width = background.shape
    area = Box(0, 0, height, width)
    boxes: list[Box] = []
    # a part, the axis of its next cut, and whether its last cut found nothing
    waiting: list[tuple[Box, Literal[0, 1], bool]] = [(area, 0, False)]
    while waiting:
        box, axis, settled = waiting.pop()
        runs = _runs(np.logical_not(box.crop(background).all(axis=1 - axis)))
        uncut = runs == [(0, box.height if axis == 0 else box.width)]
        if uncut and settled:
            boxes.append(box)
            continue
        for begin, end in runs:
            if axis == 0:
                part = Box(box.top + begin, box.left, box.top + end, box.right)
            else:
                part = Box(box.top, box.left + begin, box.bottom, box.left + end)
            waiting.append((part, 1 if axis == 0 else 0, uncut))
        if len(boxes) + len(waiting) > MAX_PARTS:
            raise NotAGrid("it has thousands of parts", has_images=False)
    return boxes


def _runs(lines: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of each run of true values."""
    steps = np.diff(np.concatenate([[0], lines.astype(np.int8), [0]]))
    return list(zip(np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist(), strict=True))


def _find_images(parts: list[Box], content: np.ndarray, blur: int) -> list[Box]:
    """The parts with four straight edges, and images of the same size inside parts that include a title.

    Small parts next to much larger ones are letters, even if they have straight edges.

    Args:
        content: (H, W), True where the pixel is not background.
        blur: largest distance in pixels between a straight edge and the part's.
    """
    cores = [(part, core) for part in parts if (core := _trim(part, content)) is not None]
    plain = [core for part, core in cores if part.is_within(core, slack=blur)]
    largest = max((min(image.height, image.width) for image in plain), default=0)
    plain = [image for image in plain if min(image.height, image.width) >= min(MAX_LETTER_SIZE, largest / 3)]
    sizes = {(image.height, image.width) for image in plain}
    return plain + [core for _, core in cores if core not in plain and (core.height, core.width) in sizes]


def _trim(part: Box, content: np.ndarray) -> Box | None:
    """The part without its outer lines that are mostly background; None if it is then too small for an image."""
    while min(part.height, part.width) >= MIN_IMAGE_SIZE:
        inside = part.crop(content)
        ragged = [edge.mean() < MIN_EDGE_CONTENT for edge in (inside[0], inside[:, 0], inside[-1], inside[:, -1])]
        if not any(ragged):
            return part
        top, left, bottom, right = ragged
        part = Box(part.top + top, part.left + left, part.bottom - bottom, part.right - right)
    return None


def _regular_spacing(spans: Iterable[tuple[int, int]], what: str) -> tuple[tuple[int, ...], int]:
    """The first pixels of all rows (or columns), and their size. Both may differ by one pixel, from rounding.

    Raises:
        NotAGrid: they have different sizes, or are not at equal distances.
    """
    groups: list[list[tuple[int, int]]] = []
    for span in sorted(set(spans)):
        if groups and span[0] - groups[-1][0][0] <= 1:
            groups[-1].append(span)
        else:
            groups.append([span])
    sizes = {end - begin for group in groups for begin, end in group}
    if max(sizes) - min(sizes) > 1:
        raise NotAGrid(f"its {what} have different sizes, {min(sizes)} to {max(sizes)} pixels")
    starts = tuple(max(begin for begin, _ in group) for group in groups)
    ends = [min(end for _, end in group) for group in groups]
    steps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    if steps and max(steps) - min(steps) > 1:
        raise NotAGrid(f"its {what} are not at equal distances, {min(steps)} to {max(steps)} pixels apart")
    return starts, min(end - start for start, end in zip(starts, ends, strict=True))


def _check_parts(layout: GridLayout, images: Sequence[Box], parts: Sequence[Box]) -> None:
    """NotAGrid if a part crosses the edge of a cell without an image, or is outside all cells and as large as an image."""
    boxes = layout.boxes()
    for part in parts:
        cell = next((box for box in boxes if part.overlaps(box)), None)
        if cell is not None and not part.is_within(cell, slack=1) and not any(image.is_within(part) for image in images):
            raise NotAGrid("a part of it crosses the edges of the cells, such as a title within them")
        if cell is None and part.height > layout.height / 2 and part.width > layout.width / 2:
            raise NotAGrid("a part of it outside the cells is as large as an image")


def _check_room(layout: GridLayout, contrast: np.ndarray) -> None:
    """NotAGrid if there is content where the grid has room for one more row or column of images.

    Titles stand above and below images: content beside a cell, also between two columns, is rather an image.
    """
    content = contrast > MIN_EDGE_CONTRAST
    column_gap, row_gap = layout.gutters()
    left, top, right, bottom = layout.margins()
    (height, width), gap = layout.size, row_gap if column_gap is None else column_gap
    assert gap is not None, "a grid has two images"
    is_beside = np.any(np.concatenate([content[y : y + layout.height] for y in layout.tops]), axis=0)
    margins = [(0, left, layout.width + gap), (width - right, width, layout.width + gap)]
    gutters = [(x + layout.width, following, layout.width) for x, following in pairwise(layout.lefts)]
    found = [end - begin >= room and is_beside[begin:end].any() for begin, end, room in margins + gutters]
    if row_gap is not None:
        room = layout.height + row_gap
        found += [top >= room and content[:top].any(), bottom >= room and content[height - bottom :].any()]
    if any(found):
        raise NotAGrid("it has other content where there is room for another row or column of images")


def _check_borders(layout: GridLayout, captions: Sequence[Box]) -> None:
    """NotAGrid if it could also be torchvision's `make_grid` of images that have borders in the gutters' color.

    Args:
        captions: the parts outside the cells; if there are any, the cells are the images.
    """
    if captions:
        return
    left, top, right, bottom = layout.margins()
    column_gap, row_gap = layout.gutters()
    paddings = {
        before + after - gutter
        for before, after, gutter in ((left, right, column_gap), (top, bottom, row_gap))
        if gutter is not None
    }
    padding = paddings.pop()
    if paddings or padding < 1 or min(left, top, right, bottom) < padding or {left, top, right, bottom} == {padding}:
        return
    width, height = (left + right - 2 * padding + layout.width, top + bottom - 2 * padding + layout.height)
    gaps = f"{row_gap if column_gap is None else column_gap},{column_gap if row_gap is None else row_gap}"
    raise NotAGrid(
        f"its images have {layout.width} x {layout.height} pixels or, with borders of the gutters' color, {width} x {height}; "
        f"for these give --rows {layout.rows} --columns {layout.columns} --padding {padding}, else --rows {layout.rows} "
        f"--columns {layout.columns} --crop {left},{top},{right},{bottom} --padding {gaps}"
    )


@dataclass(frozen=True)
class GridOptions:
    """The user's settings for a grid image; the rest is detected.

    Attributes:
        padding: pixels between columns and between rows; also around all images, as in torchvision's `make_grid`, unless `crop` is
            given.
        crop: pixels to remove at the left, top, right and bottom, so that the first image begins in the corner.
    """

    rows: int | None = None
    columns: int | None = None
    padding: tuple[int, ...] | None = None
    crop: tuple[int, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is specified."""
        return self == GridOptions()


def layout_of(pixels: np.ndarray, options: GridOptions, name: str, allow_single: bool) -> GridLayout:
    """The layout of a grid image (H, W, 3) uint8.

    Args:
        name: of the file, for errors.
        allow_single: whether it may be a single image, if no options are given and no grid is found.

    Raises:
        FlowGRPOError: no grid of equal images is found, or not the one that the options specify; names the options that help.
    """
    height, width = pixels.shape[:2]
    left, top, right, bottom = options.crop or (0, 0, 0, 0)
    if left + right >= width or top + bottom >= height:
        raise FlowGRPOError(
            f"{name} has {width} x {height} pixels, of which --crop {left},{top},{right},{bottom} leaves none."
        )
    area = pixels[top : height - bottom, left : width - right]
    return _find(area, options, name, allow_single and options.is_empty).shifted(top, left, (height, width))


def _find(area: np.ndarray, options: GridOptions, name: str, allow_single: bool) -> GridLayout:
    known = options.rows is not None and options.columns is not None
    if known and (options.padding is not None or options.rows == options.columns == 1):
        return _cut_as_given(area, options, name)
    try:
        layout = detect(area, is_lossy=Path(name).suffix.lower() in LOSSY)
    except NotAGrid as problem:
        if allow_single and not problem.has_images:
            return single_image((area.shape[0], area.shape[1]))
        # letters and forms of images without gutters look like parts of a grid
        if not known or _has_margin(area):
            advice = "" if "--rows" in str(problem) else f" {ADVICE}."
            raise FlowGRPOError(f"{name} can't be cut into images: {problem}.{advice}") from problem
        layout = None
    if layout is None and known:
        return _cut_as_given(area, options, name)
    if layout is None and allow_single:
        return single_image((area.shape[0], area.shape[1]))
    if layout is None:
        raise FlowGRPOError(f"{name} has no gutters between images. {ADVICE}.")
    if options.rows not in (None, layout.rows) or options.columns not in (None, layout.columns):
        raise FlowGRPOError(f"{name} has {layout}, but --rows and --columns give other numbers. {ADVICE}.")
    if options.padding is not None:
        return _cut_as_given(area, GridOptions(layout.rows, layout.columns, options.padding, options.crop), name)
    return layout


def _has_margin(area: np.ndarray) -> bool:
    """Whether one of the four outermost lines has one colour, as where a margin, a title or labels are."""
    return any(np.ptp(line, axis=0).max() <= PLAIN for line in (area[0], area[-1], area[:, 0], area[:, -1]))


def _cut_as_given(area: np.ndarray, options: GridOptions, name: str) -> GridLayout:
    """Cells of equal size with the given padding between them, which is around all too unless the image was cropped."""
    assert options.rows
    assert options.columns
    padding = options.padding or (0, 0)
    starts: list[tuple[int, ...]] = []
    sides = []
    for total, count, pad in ((area.shape[0], options.rows, padding[1]), (area.shape[1], options.columns, padding[0])):
        begin = pad if options.crop is None else 0
        side, rest = divmod(total - 2 * begin - pad * (count - 1), count)
        if side < 1 or rest:
            where, left = ("between", ", cropped,") if options.crop else ("around", "")
            raise FlowGRPOError(
                f"{name}{left} has {area.shape[1]} x {area.shape[0]} pixels, which are not {options.columns} columns x "
                f"{options.rows} rows of equal images with {padding[0]} and {padding[1]} pixels {where} them. {ADVICE}."
            )
        starts.append(tuple(begin + i * (side + pad) for i in range(count)))
        sides.append(side)
    (tops, lefts), (height, width) = starts, sides
    layout = GridLayout((area.shape[0], area.shape[1]), tops=tops, lefts=lefts, height=height, width=width, filled=0)
    return replace(layout, filled=_count_filled(layout, area))


def _count_filled(layout: GridLayout, area: np.ndarray) -> int:
    """The number of cells, not counting those at the end of the last row that have the color of the gutters."""
    boxes, between = layout.boxes(), np.ones(area.shape[:2], bool)
    for box in boxes:
        box.crop(between)[:] = False
    gutters = area[between]
    count = len(boxes)
    if len(gutters) and not np.ptp(gutters, axis=0).any():
        while count > len(boxes) - layout.columns + 1 and (boxes[count - 1].crop(area) == gutters[0]).all():
            count -= 1
    return count
