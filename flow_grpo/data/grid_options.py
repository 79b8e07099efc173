"""How a grid image that `sample` did not write is cut into images: as detected in its pixels, or as the user specifies."""

from dataclasses import dataclass, replace

import numpy as np

from flow_grpo.data.grid_detection import NotAGrid, detect
from flow_grpo.data.grid_layout import GridLayout, equal_cells, single_image
from flow_grpo.errors import FlowGRPOError

ADVICE = (
    "Give --rows and --columns, --padding for what is between the images, captions included, and --crop for what is around all; "
    "--rows 1 --columns 1 reads it as one image"
)
PLAIN = 4  # of 255: largest difference within a line of a margin


@dataclass(frozen=True)
class GridOptions:
    """What the user specifies about a grid image; the rest is detected.

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
        layout = detect(area)
    except NotAGrid as problem:
        if allow_single and not problem.has_images:
            return single_image((area.shape[0], area.shape[1]))
        has_own_advice = "--rows" in str(problem)
        if known and not has_own_advice and not _has_margin(area):
            return _cut_as_given(
                area, options, name
            )  # letters and forms of images without gutters look like parts of a grid
        no_gutters = "; --padding 0 says that nothing is between the images" if known else ""
        advice = "" if has_own_advice else f" {ADVICE}{no_gutters}."
        raise FlowGRPOError(f"{name} can't be cut into images: {problem}.{advice}") from problem
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
    assert options.rows
    assert options.columns
    padding = options.padding or (0, 0)
    height, width = area.shape[:2]
    layout = equal_cells((height, width), options.rows, options.columns, padding, around=options.crop is None)
    if layout is None:
        where, left = ("between", ", cropped,") if options.crop else ("around", "")
        raise FlowGRPOError(
            f"{name}{left} has {width} x {height} pixels, which are not {options.columns} columns x {options.rows} rows of equal "
            f"images with {padding[0]} and {padding[1]} pixels {where} them. {ADVICE}."
        )
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
