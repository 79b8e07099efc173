"""Find shapes in an image with OpenCV, without a model: where they are, of which kind and colour.

Connected pixels that are not ground are a shape, whatever their colours, if they have the form of one. Its kind is that of the figure
which encloses it most closely: circle, rectangle or triangle, whatever their angle; a cross fills little of its convex hull. Others
are parted by the colours of the palette, and shapes of one colour that touch are cut apart where they are thin.
"""

from dataclasses import dataclass

import cv2
import numpy as np
from PIL import Image

from rewards.shapes.drawing import BACKGROUND, PALETTE

SCALE = 4  # a shape is enlarged so many times before its contour is measured
FOREGROUND = 22.0  # distance from the ground's colour in Lab from which a pixel is part of a shape
CLEAN = 14.0  # distance up to which it is surely that colour
PURE = 40.0  # distance from a colour of the palette in Lab up to which a pixel is no mixture at an edge
SMALLEST_CORE = 4  # pure pixels of a shape, at least
SMALLEST = 20.0  # area of a shape in pixels; a small cross has 38
HULL_OF_BLURRED_CROSS = 0.925  # of a blurred one, whose notches are filled, less than this
HULL_OF_CROSS = 0.89  # a cross fills less of its convex hull, the other shapes more
CLOSEST = 0.66  # share of the enclosing figure that a shape fills at least; less is no known shape
DEPTHS = (0.25, 0.4, 0.5, 0.62)  # two shapes that touch are joined by less than the last share of their thickness
PART = 0.3  # share of the larger of two touching shapes that the smaller one has at least


@dataclass(frozen=True)
class DetectedShape:
    """A shape in an image: centre and longer side of its upright box, in pixels. Kind and colour are "" if they are none of them."""

    shape: str
    color: str
    x: float
    y: float
    extent: float


def to_lab(pixels: np.ndarray) -> np.ndarray:
    """(..., 3) uint8 RGB -> float32 CIE Lab."""
    flat = (pixels.reshape(1, -1, 3) / 255).astype(np.float32)
    return cv2.cvtColor(flat, cv2.COLOR_RGB2LAB).reshape(pixels.shape)


NAMES = tuple(PALETTE)
COLORS_LAB = to_lab(np.array(list(PALETTE.values()), dtype=np.uint8))
GROUND_LAB = to_lab(np.array([BACKGROUND], dtype=np.uint8))[0]


def find_shapes(image: Image.Image) -> list[DetectedShape]:
    """The shapes of an image, from left to right."""
    lab = to_lab(np.asarray(image))
    contrast = np.linalg.norm(lab - GROUND_LAB, axis=-1)
    found = []
    for whole in _components(contrast > FOREGROUND):
        blobs = _by_color(whole, lab, CLEAN)
        if len(blobs) < 2 and not _is_shape(whole, lab, contrast):
            blobs = _by_color(whole, lab, PURE)
        found += [shape for blob in blobs for shape in _shapes(blob, lab, contrast)]
    return sorted(found, key=lambda one: (one.x, one.y))


def _components(mask: np.ndarray) -> list[np.ndarray]:
    """The connected parts of a mask."""
    count, labels = cv2.connectedComponents(mask.astype(np.uint8), connectivity=4)
    return [labels == label for label in range(1, count)]


def _by_color(blob: np.ndarray, lab: np.ndarray, purity: float) -> list[np.ndarray]:
    """The parts of a blob that have different colours of the palette, each with the mixed pixels around it; else the blob itself."""
    distances = np.linalg.norm(lab[:, :, None] - COLORS_LAB, axis=-1)
    nearest, pure = distances.argmin(-1), blob & (distances.min(-1) < purity)
    cores = [core for color in np.unique(nearest[pure]) for core in _components(pure & (nearest == color))]
    cores = [core for core in cores if core.sum() >= max(SMALLEST_CORE, PART * max(map(np.sum, cores)))]
    if len({nearest[core][0] for core in cores}) < 2:
        return [blob]
    markers = np.zeros(blob.shape, np.int32)
    for label, core in enumerate(cores, 1):
        markers[core] = label
    grown = _grow(markers, blob, steps=blob.sum())
    return [grown == label for label in range(1, len(cores) + 1)]


def _shapes(blob: np.ndarray, lab: np.ndarray, contrast: np.ndarray) -> list[DetectedShape]:
    """The shapes of a blob of one colour, which may touch."""
    color = _color(blob, lab)
    mask, left, top = _enlarged(np.where(blob, contrast / np.linalg.norm(color - GROUND_LAB), 0.0))
    found = [_describe(part, left, top, color) for part in _separated(mask)]
    return [one for one in found if one is not None]


def _is_shape(blob: np.ndarray, lab: np.ndarray, contrast: np.ndarray) -> bool:
    """Whether the blob has the form of one shape, whatever its colours."""
    color = _color(blob, lab)
    mask, left, top = _enlarged(np.where(blob, contrast / np.linalg.norm(color - GROUND_LAB), 0.0))
    shape = _describe(mask, left, top, color)
    return shape is not None and bool(shape.shape)


def _color(blob: np.ndarray, lab: np.ndarray) -> np.ndarray:
    """The median colour in Lab of the pixels that are not at the edge."""
    inner = cv2.erode(blob.astype(np.uint8), np.ones((3, 3), np.uint8)).astype(bool)
    return np.median(lab[inner if inner.any() else blob], axis=0)


def _grow(markers: np.ndarray, solid: np.ndarray, steps: int) -> np.ndarray:
    """The markers extended over solid pixels, so many pixels far."""
    grown, kernel = markers.copy(), np.ones((3, 3), np.uint8)
    for _ in range(steps):
        if grown[solid].all():
            break
        spread = cv2.dilate(grown.astype(np.float32), kernel).astype(np.int32)
        grown = np.where((grown == 0) & solid, spread, grown)
    return grown


def _enlarged(share: np.ndarray) -> tuple[np.ndarray, int, int]:
    """The share of each pixel that is covered -> a mask `SCALE` times as large, of the covered part alone, and where that begins."""
    rows, columns = np.nonzero(share)
    top, left = max(rows.min() - 1, 0), max(columns.min() - 1, 0)
    part = np.pad(share[top : rows.max() + 2, left : columns.max() + 2], 1).astype(np.float32)
    size = (part.shape[1] * SCALE, part.shape[0] * SCALE)
    return cv2.resize(part.clip(0, 1), size, interpolation=cv2.INTER_CUBIC) > 0.5, left - 1, top - 1


def _separated(blob: np.ndarray) -> list[np.ndarray]:
    """The blob, or its parts if it is several shapes that touch: those into which erosion cuts it before it is worn off."""
    mask = blob.astype(np.uint8)
    if not blob.any() or _is_convex(blob):
        return [blob]
    depth = cv2.distanceTransform(mask, cv2.DIST_L2, 5)
    for share in DEPTHS:
        count, labels, stats, _ = cv2.connectedComponentsWithStats((depth > share * depth.max()).astype(np.uint8))
        areas = stats[1:, cv2.CC_STAT_AREA]
        if count > 2 and areas.min() >= PART * areas.max():
            grown = _grow(labels.astype(np.int32), blob, steps=int(depth.max()) + 2)
            parts = [grown == label for label in range(1, count)]
            return parts if all(map(_is_convex, parts)) else [blob]
    return [blob]


def _is_convex(blob: np.ndarray) -> bool:
    contour = _contour(blob)
    return cv2.contourArea(contour) >= 0.9 * cv2.contourArea(cv2.convexHull(contour))


def _contour(blob: np.ndarray) -> np.ndarray:
    contours, _ = cv2.findContours(blob.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    return max(contours, key=cv2.contourArea)


def _describe(blob: np.ndarray, left: int, top: int, lab: np.ndarray) -> DetectedShape | None:
    """The shape of an enlarged mask that begins at pixel (left, top), of that colour; None if it is too small for one."""
    if blob.sum() < SMALLEST * SCALE**2:
        return None
    contour, distances = _contour(blob), np.linalg.norm(lab - COLORS_LAB, axis=-1)
    x, y, width, height = cv2.boundingRect(contour)
    color = NAMES[int(distances.argmin())] if distances.min() < PURE else ""
    return DetectedShape(
        _kind(contour), color, left + (x + width / 2) / SCALE, top + (y + height / 2) / SCALE, max(width, height) / SCALE
    )


def _kind(contour: np.ndarray) -> str:
    """Circle, square, triangle or cross; "" if it is none of them."""
    area, hull = cv2.contourArea(contour), cv2.convexHull(contour)
    (_, (width, height), _), (_, radius) = cv2.minAreaRect(contour), cv2.minEnclosingCircle(contour)
    filled = {
        "circle": area / (np.pi * radius**2),
        "square": area / max(width * height, 1e-6),
        "triangle": area / max(cv2.minEnclosingTriangle(hull)[0], 1e-6),
    }
    long = max(width, height) / max(min(width, height), 1e-6)
    hull_filled = area / max(cv2.contourArea(hull), 1e-6)
    is_blurred_cross = hull_filled < HULL_OF_BLURRED_CROSS and filled["triangle"] < 0.7 and filled["square"] < 0.9
    if hull_filled < HULL_OF_CROSS or is_blurred_cross:
        return "cross" if long < 1.5 and 0.35 < filled["square"] < 0.9 else ""
    kind = max(filled, key=lambda name: filled[name])
    return kind if filled[kind] >= CLOSEST and long < 1.7 else ""
