"""The geometry of a grid image: cells of one size in rows and columns."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Box:
    """Part of a sheet, in pixels; bottom and right are exclusive."""

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

    def of(self, pixels: np.ndarray) -> np.ndarray:
        return pixels[self.top : self.bottom, self.left : self.right]

    def meets(self, other: "Box") -> bool:
        rows = self.top < other.bottom and other.top < self.bottom
        return rows and self.left < other.right and other.left < self.right

    def within(self, other: "Box", slack: int = 0) -> bool:
        rows = other.top - slack <= self.top and self.bottom <= other.bottom + slack
        return rows and other.left - slack <= self.left and self.right <= other.right + slack


@dataclass(frozen=True)
class GridLayout:
    """The cells of a sheet.

    Attributes:
        size: height and width of the sheet.
        tops, lefts: where each row and each column of cells begins.
        height, width: of a cell.
        filled: cells up to the last that holds an image; what follows is the empty end of the last row.
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
        below, beside = self.tops[-1] + self.height, self.lefts[-1] + self.width
        return self.lefts[0], self.tops[0], self.size[1] - beside, self.size[0] - below

    def gutters(self) -> tuple[int | None, int | None]:
        """Pixels between columns and between rows; None where there is one."""
        across = self.lefts[1] - self.lefts[0] - self.width if self.columns > 1 else None
        return across, self.tops[1] - self.tops[0] - self.height if self.rows > 1 else None

    def cut(self, pixels: np.ndarray) -> np.ndarray:
        """(H, W, 3) -> (rows * columns, height, width, 3), row by row."""
        return np.stack([box.of(pixels) for box in self.boxes()])

    def shifted(self, top: int, left: int, size: tuple[int, int]) -> "GridLayout":
        """The same cells in the larger sheet whose part at (top, left) this is the layout of."""
        tops, lefts = tuple(y + top for y in self.tops), tuple(x + left for x in self.lefts)
        return GridLayout(size, tops, lefts, self.height, self.width, self.filled)

    def __str__(self) -> str:
        across, down = self.gutters()
        between = [f"{across} between columns"] * (across is not None) + [f"{down} between rows"] * (down is not None)
        left, top, right, bottom = self.margins()
        counts = f"{self.rows} row{'s' * (self.rows > 1)} x {self.columns} column{'s' * (self.columns > 1)}"
        margins = f"margins of {left} left, {top} top, {right} right, {bottom} bottom"
        gutters = f", gutters of {' and '.join(between)}" if between else ""
        return f"{counts} of images with {self.width} x {self.height} pixels, {margins}{gutters}"


def whole(size: tuple[int, int]) -> GridLayout:
    """A sheet that is one image."""
    return GridLayout(size, (0,), (0,), *size, 1)


def split(size: tuple[int, int], rows: int, columns: int, padding: tuple[int, ...], around: bool) -> GridLayout | None:
    """Cells of equal size with `padding` pixels between columns and between rows, and `around` them all too; None if some are left."""
    starts: list[tuple[int, ...]] = []
    sides = []
    for whole, count, pad in ((size[0], rows, padding[1]), (size[1], columns, padding[0])):
        begin = pad if around else 0
        side, rest = divmod(whole - 2 * begin - pad * (count - 1), count)
        if side < 1 or rest:
            return None
        starts.append(tuple(begin + i * (side + pad) for i in range(count)))
        sides.append(side)
    return GridLayout(size, starts[0], starts[1], sides[0], sides[1], rows * columns)
