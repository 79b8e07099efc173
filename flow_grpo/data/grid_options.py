"""How a sheet that `sample` did not write is cut into images: as its pixels show, or as its user says."""

from dataclasses import dataclass, replace

import numpy as np

from flow_grpo.data.grid_detection import NotAGrid, detect
from flow_grpo.data.grid_layout import GridLayout, split, whole

ADVICE = (
    "Give --rows and --columns with --padding, or with --crop, as it was made; --rows 1 --columns 1 takes it as one image"
)


@dataclass(frozen=True)
class GridOptions:
    """What a user says of a sheet; the rest is found.

    Attributes:
        padding: pixels between columns and between rows; around the images too, as torchvision's `make_grid` leaves them, unless
            `crop` is given.
        crop: pixels to leave out at the left, top, right and bottom, so that the images begin in the corner.
    """

    rows: int | None = None
    columns: int | None = None
    padding: tuple[int, ...] | None = None
    crop: tuple[int, ...] | None = None

    @property
    def is_open(self) -> bool:
        """Whether nothing is said."""
        return self == GridOptions()


def layout_of(pixels: np.ndarray, said: GridOptions, name: str, single: bool) -> GridLayout:
    """Where the images of a sheet (H, W, 3) uint8 are.

    Args:
        name: of the sheet in errors.
        single: whether it may be one image, when nothing is said and no grid is found.

    Raises:
        ValueError: no grid of equal images is found, or it is none as the user says; and which options help.
    """
    height, width = pixels.shape[:2]
    left, top, right, bottom = said.crop or (0, 0, 0, 0)
    if left + right >= width or top + bottom >= height:
        raise ValueError(f"{name} has {width} x {height} pixels, of which --crop {left},{top},{right},{bottom} leaves none.")
    area = pixels[top : height - bottom, left : width - right]
    return _within(area, said, name, single and said.is_open).shifted(top, left, (height, width))


def _within(area: np.ndarray, said: GridOptions, name: str, single: bool) -> GridLayout:
    known = said.rows is not None and said.columns is not None
    if known and (said.padding is not None or said.rows == said.columns == 1):
        return _split(area, said, name)
    try:
        found = detect(area)
    except NotAGrid as problem:
        if single and not problem.images:
            return whole((area.shape[0], area.shape[1]))
        advice = "" if "--rows" in str(problem) else f" {ADVICE}."
        raise ValueError(f"{name} can't be cut into images: {problem}.{advice}") from problem
    if found is None and known:
        return _split(area, said, name)
    if found is None and single:
        return whole((area.shape[0], area.shape[1]))
    if found is None:
        raise ValueError(f"{name} has no gutters between images. {ADVICE}.")
    if said.rows not in (None, found.rows) or said.columns not in (None, found.columns):
        raise ValueError(f"{name} has {found}, which is not the number that --rows and --columns say. {ADVICE}.")
    if said.padding is not None:
        return _split(area, GridOptions(found.rows, found.columns, said.padding, said.crop), name)
    return found


def _split(area: np.ndarray, said: GridOptions, name: str) -> GridLayout:
    assert said.rows
    assert said.columns
    padding = said.padding or (0, 0)
    height, width = area.shape[:2]
    found = split((height, width), said.rows, said.columns, padding, around=said.crop is None)
    if found is None:
        where = "between" if said.crop else "around"
        raise ValueError(
            f"{name} has {width} x {height} pixels, which are not {said.columns} columns x {said.rows} rows of equal images with "
            f"{padding[0]} and {padding[1]} pixels {where} them. {ADVICE}."
        )
    return replace(found, filled=_filled(found, area))


def _filled(found: GridLayout, area: np.ndarray) -> int:
    """The number of cells without those at the end of the last row that have the gutters' one color."""
    boxes, between = found.boxes(), np.ones(area.shape[:2], bool)
    for box in boxes:
        box.of(between)[:] = False
    gutters = area[between]
    count = len(boxes)
    if len(gutters) and not np.ptp(gutters, axis=0).any():
        while count > len(boxes) - found.columns + 1 and (boxes[count - 1].of(area) == gutters[0]).all():
            count -= 1
    return count
