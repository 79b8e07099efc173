"""The geometry of a grid image: cells of one size in rows and columns."""

from dataclasses import dataclass, replace

import numpy as np


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


def equal_cells(size: tuple[int, int], rows: int, columns: int, padding: tuple[int, ...], around: bool) -> GridLayout | None:
    """Cells of equal size, or None if `size` can't be divided into them.

    Args:
        padding: pixels between columns and between rows.
        around: whether the same padding is around all cells too.
    """
    starts: list[tuple[int, ...]] = []
    sides = []
    for total, count, pad in ((size[0], rows, padding[1]), (size[1], columns, padding[0])):
        begin = pad if around else 0
        side, rest = divmod(total - 2 * begin - pad * (count - 1), count)
        if side < 1 or rest:
            return None
        starts.append(tuple(begin + i * (side + pad) for i in range(count)))
        sides.append(side)
    (tops, lefts), (height, width) = starts, sides
    return GridLayout(size, tops=tops, lefts=lefts, height=height, width=width, filled=rows * columns)
