"""Rewards of scenes by rules, in the manner of GenEval (arXiv 2310.11513), on shapes that OpenCV finds without a model.

Connected pixels that are not ground are parted by the palette's colours where these are clean. What is left is one shape if it has the
form of one, else it is parted by the nearest colours, and where it is thin. The kind is that of the figure which encloses a shape most
closely: circle, rectangle or triangle, whatever their angle; a cross has notches and fills little of its convex hull.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import to_pil
from flow_grpo.rewards.shapes.prompts import Edit, Group, Scene, parse_edit, parse_scene

SIDE = 64  # pixels
BACKGROUND = (244, 242, 236)
PALETTE = {
    "red": (214, 40, 40),
    "green": (30, 142, 62),
    "blue": (29, 78, 216),
    "yellow": (250, 204, 21),
    "black": (32, 32, 38),
}
SCALE = 4  # factor by which a shape is enlarged before its contour is measured
FOREGROUND = 22.0  # smallest distance in Lab from the ground's colour of a pixel of a shape
PURE = 40.0  # largest distance in Lab from a palette colour of a pixel that has this colour, not a mixture at an edge
CLEAN = 14.0  # largest distance in Lab from a palette colour of a pixel that has this colour without doubt
NEAR = 20.0  # largest distance in Lab from a shape's palette colour of a pixel that counts as of that colour
UNIFORM = 0.75  # smallest share of a shape's pixels that have its colour; below it, the shape has several colours, so none
SMALLEST_CORE = 4  # smallest number of pure pixels of one colour in a shape
SMALLEST = 30.0  # smallest area of a shape in pixels; a small cross has 101
HULL_OF_CROSS = 0.89  # largest share of its convex hull that a cross fills; other shapes fill more
HULL_OF_BLURRED_CROSS = 0.925  # largest share of its convex hull that a blurred cross, with partly filled notches, fills
NOTCH = 0.05  # smallest depth of a cross's notch, as a share of the cross's longer side
CLOSEST = 0.78  # smallest share of its enclosing figure that a known shape fills
MARGIN = 0.025  # smallest lead in that share over the second-best figure; below it, the kind is unclear
# depths of erosion that are tried to cut touching shapes apart, as shares of half their thickness
DEPTHS = (0.25, 0.4, 0.5, 0.62)
PART = 0.3  # smallest size of the smaller of two touching shapes or mixed colours, as a share of the larger
# pixels of 64: a small shape is below, a large one above. The model draws large triangles 1 pixel too small
SMALL, LARGE = 16.5, 21.5
MOST_FOUND = 8  # shapes of an image that are compared with what was asked
MOVED = 5.0  # pixels of 64 by which a shape that stays may be off
RESIZED = 1.3  # factor in size by which a shape that stays may be off


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
    for component in _components(contrast > FOREGROUND):
        if component.sum() < SMALLEST / 2:  # a speckle
            continue
        blobs = _by_color(component, lab, CLEAN, share=0.0)
        if len(blobs) < 2 and not _is_shape(component, lab, contrast):
            blobs = _by_color(component, lab, PURE, share=PART)
        found += [shape for blob in blobs for shape in _shapes(blob, lab, contrast)]
    return sorted(found, key=lambda shape: (shape.x, shape.y))


def _components(mask: np.ndarray) -> list[np.ndarray]:
    """The connected parts of a mask."""
    count, labels = cv2.connectedComponents(mask.astype(np.uint8), connectivity=4)
    return [labels == label for label in range(1, count)]


def _by_color(blob: np.ndarray, lab: np.ndarray, purity: float, share: float) -> list[np.ndarray]:
    """The parts of a blob that have different colours of the palette, each with the mixed pixels around it; else the blob itself.

    Args:
        purity: distance in Lab from a colour of the palette up to which a pixel has it.
        share: a part has at least this share of the pixels of the largest one.
    """
    distances = np.linalg.norm(lab[:, :, None] - COLORS_LAB, axis=-1)
    nearest, pure = distances.argmin(-1), blob & (distances.min(-1) < purity)
    cores = [core for color in np.unique(nearest[pure]) for core in _components(pure & (nearest == color))]
    least = max(SMALLEST_CORE, share * max(map(np.sum, cores), default=0))
    cores = [core for core in cores if core.sum() >= least]
    if len({nearest[core][0] for core in cores}) < 2:
        return [blob]
    markers = np.zeros(blob.shape, np.int32)
    for label, core in enumerate(cores, 1):
        markers[core] = label
    grown = _grow(markers, blob, steps=blob.sum())  # to the end: it stops when every pixel has a label
    return [grown == label for label in range(1, len(cores) + 1)]


def _shapes(blob: np.ndarray, lab: np.ndarray, contrast: np.ndarray) -> list[DetectedShape]:
    """The shapes of a blob of one colour, which may touch."""
    mask, left, top = _mask(blob, lab, contrast)
    color = _color_name(blob, lab)
    found = [_describe(part, left, top, color) for part in _separated(mask)]
    return [shape for shape in found if shape is not None]


def _is_shape(blob: np.ndarray, lab: np.ndarray, contrast: np.ndarray) -> bool:
    """Whether the blob has the form of one shape, whatever its colours."""
    mask, _, _ = _mask(blob, lab, contrast)
    return mask.sum() >= SMALLEST * SCALE**2 and bool(_kind(_contour(mask)))


def _mask(blob: np.ndarray, lab: np.ndarray, contrast: np.ndarray) -> tuple[np.ndarray, int, int]:
    """The enlarged mask of a blob, with the pixel where it begins."""
    color = np.median(_inner(blob, lab), axis=0)
    depth = max(float(np.linalg.norm(color - GROUND_LAB)), FOREGROUND)
    return _enlarged(np.where(blob, contrast / depth, 0.0))


def _color_name(blob: np.ndarray, lab: np.ndarray) -> str:
    """The colour of a blob; "" if that is far from the palette's or if it has several."""
    pixels = _inner(blob, lab)
    distances = np.linalg.norm(np.median(pixels, axis=0) - COLORS_LAB, axis=-1)
    nearest = int(distances.argmin())
    has_color = np.linalg.norm(pixels - COLORS_LAB[nearest], axis=-1) < NEAR
    return NAMES[nearest] if distances[nearest] < PURE and has_color.mean() >= UNIFORM else ""


def _inner(blob: np.ndarray, lab: np.ndarray) -> np.ndarray:
    """The colours (n, 3) in Lab of the pixels of a blob that are not at its edge."""
    inner = cv2.erode(blob.astype(np.uint8), np.ones((3, 3), np.uint8)).astype(bool)
    return lab[inner if inner.any() else blob]


def _grow(markers: np.ndarray, solid: np.ndarray, steps: int) -> np.ndarray:
    """The markers extended over solid pixels by `steps` pixels."""
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


def _describe(blob: np.ndarray, left: int, top: int, color: str) -> DetectedShape | None:
    """The shape of an enlarged mask that begins at pixel (left, top), of that colour; None if it is too small for one."""
    if blob.sum() < SMALLEST * SCALE**2:
        return None
    contour = _contour(blob)
    x, y, width, height = cv2.boundingRect(contour)
    return DetectedShape(
        _kind(contour), color, left + (x + width / 2) / SCALE, top + (y + height / 2) / SCALE, max(width, height) / SCALE
    )


def _kind(contour: np.ndarray) -> str:
    """Circle, square, triangle or cross; "" if it is none of them."""
    area, hull = cv2.contourArea(contour), cv2.convexHull(contour)
    (_, (width, height), _), (_, radius) = cv2.minAreaRect(contour), cv2.minEnclosingCircle(contour)
    longer, shorter = max(width, height), max(min(width, height), 1e-6)
    filled = {
        "circle": area / (np.pi * radius**2),
        "square": area / max(width * height, 1e-6),
        "triangle": area / max(cv2.minEnclosingTriangle(hull)[0], 1e-6),
    }
    of_hull = area / max(cv2.contourArea(hull), 1e-6)
    is_blurred_cross = of_hull < HULL_OF_BLURRED_CROSS and filled["triangle"] < 0.7 and filled["square"] < 0.9
    if of_hull < HULL_OF_CROSS or is_blurred_cross:
        is_cross = longer < 1.5 * shorter and filled["square"] > 0.35 and _notches(contour, longer) in (3, 4)
        return "cross" if is_cross else ""
    second, kind = sorted(filled, key=lambda name: filled[name])[-2:]
    is_clear = filled[kind] >= max(CLOSEST, filled[second] + MARGIN)
    return kind if is_clear and longer < 1.7 * shorter else ""


def _notches(contour: np.ndarray, side: float) -> int:
    """Number of notches of a contour that are deeper than `NOTCH` x `side`, its longer side."""
    hull = np.sort(cv2.convexHull(contour, returnPoints=False).ravel())[::-1, None].copy()  # OpenCV wants them in order
    defects = cv2.convexityDefects(contour, hull)
    return 0 if defects is None else int((defects.reshape(-1, 4)[:, 3] > 256 * NOTCH * side).sum())  # in 1/256 pixel


@dataclass(frozen=True)
class Requirements:
    """The requirements of a prompt by name, and whether an image meets each."""

    met: dict[str, bool]

    @property
    def share(self) -> float:
        """The share of requirements that are met."""
        return sum(self.met.values()) / len(self.met)

    @property
    def is_exact(self) -> bool:
        """Whether all are met."""
        return all(self.met.values())


def check_scene(scene: Scene, found: Sequence[DetectedShape]) -> Requirements:
    """The requirements of a scene that an image with these shapes meets, with the assignment of shapes that meets most.

    Each shape that is asked for has to be there, in its colour and size if they are named; the relation has to hold for every pair; and
    nothing else may be there.
    """
    slots = [(group, f"{number}.{i + 1}") for number, group in enumerate(scene.groups, 1) for i in range(group.count)]
    candidates: list[DetectedShape | None] = [*list(found)[:MOST_FOUND], *([None] * max(0, len(slots) - len(found)))]
    best = max(
        (_met(scene, slots, chosen) for chosen in itertools.permutations(candidates, len(slots))),
        key=lambda met: sum(met.values()),
    )
    return Requirements({**best, "nothing else": len(found) <= len(slots)})


def _met(scene: Scene, slots: list[tuple[Group, str]], chosen: Sequence[DetectedShape | None]) -> dict[str, bool]:
    met: dict[str, bool] = {}
    for (group, name), shape in zip(slots, chosen, strict=True):
        # without a colour that is asked for any of the palette is right, but not a mixture
        met[f"shape {name}"] = shape is not None and shape.shape == group.shape and bool(group.color or shape.color)
        if group.color:
            met[f"colour {name}"] = met[f"shape {name}"] and shape is not None and shape.color == group.color
        if group.size:
            met[f"size {name}"] = met[f"shape {name}"] and shape is not None and _size(shape) == group.size
    if scene.relation:
        first = [shape for (group, _), shape in zip(slots, chosen, strict=True) if group is scene.groups[0]]
        second = [shape for (group, _), shape in zip(slots, chosen, strict=True) if group is scene.groups[1]]
        pairs = list(itertools.product(first, second))
        all_right = all(value for name, value in met.items() if name.startswith("shape"))
        met["relation"] = all_right and all(a and b and is_related(scene.relation, a, b) for a, b in pairs)
    return met


def _size(shape: DetectedShape) -> str | None:
    return "small" if shape.extent < SMALL else "large" if shape.extent > LARGE else None


def is_related(relation: str, first: DetectedShape, second: DetectedShape) -> bool:
    """Whether the centres lie apart along the relation's axis by more than half of the mean size of the two."""
    return distance_along(relation, first, second) > (first.extent + second.extent) / 4


def distance_along(relation: str, first: Any, second: Any) -> float:
    """How far the centre of the first shape is left of, right of, above or below that of the second, in pixels."""
    return {
        "left of": second.x - first.x,
        "right of": first.x - second.x,
        "above": second.y - first.y,
        "below": first.y - second.y,
    }[relation]


def check_edit(edit: Edit, before: Sequence[DetectedShape], after: Sequence[DetectedShape]) -> Requirements:
    """Whether the asked change happened, and each other shape is where and as it was.

    FlowGRPOError if the image before has not exactly one shape that the edit can mean.
    """
    meant = [shape for shape in before if shape.shape == edit.shape and edit.color in (None, shape.color)]
    if len(meant) != 1:
        raise FlowGRPOError(
            f"the edit {str(edit)!r} means one shape of the source, and {len(meant)} fit: edit another image."
        )
    stay = [shape for shape in before if shape is not meant[0]]
    if edit.kind == "add":
        stay.append(meant[0])
    elif edit.kind == "make":
        changed = replace(meant[0], color=edit.new_color or "")
    remaining, met = list(after), {}
    for number, expected in enumerate(stay, 1):
        match = next((shape for shape in remaining if _is_same(expected, shape)), None)
        met[f"shape {number} stays"] = match is not None
        if match is not None:
            remaining.remove(match)
    if edit.kind == "remove":
        met["it is gone"] = not any(_is_near(meant[0], shape) for shape in remaining)
        remaining = [shape for shape in remaining if not _is_near(meant[0], shape)]
    elif edit.kind == "make":
        made = next((shape for shape in remaining if _is_same(changed, shape)), None)
        met["its new colour"] = made is not None
        remaining = [shape for shape in remaining if not _is_near(meant[0], shape)]
    else:
        fitting = [shape for shape in remaining if (shape.shape, shape.color) == (edit.new_shape, edit.new_color)]
        added = next((shape for shape in fitting if is_related(edit.relation or "", shape, meant[0])), None)
        met["the new shape"], met["its position"] = bool(fitting), added is not None
        remaining = [shape for shape in remaining if shape is not (added or next(iter(fitting), None))]
    return Requirements({**met, "nothing else": not remaining})


def _is_near(first: DetectedShape, second: DetectedShape) -> bool:
    return max(abs(first.x - second.x), abs(first.y - second.y)) <= MOVED


def _is_same(first: DetectedShape, second: DetectedShape) -> bool:
    larger, smaller = max(first.extent, second.extent), max(min(first.extent, second.extent), 1e-6)
    return (
        (first.shape, first.color) == (second.shape, second.color)
        and _is_near(first, second)
        and larger / smaller <= RESIZED
    )


def _found(image: Image.Image) -> list[DetectedShape]:
    """The shapes of an image, in pixels of a square of 64."""
    return find_shapes(image if image.size == (SIDE, SIDE) else image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


class Shapes:
    """The share of a prompt's requirements that an image of shapes meets: shapes, their number, colours, sizes and relation.

    Prompts are those of the embedded model of shapes, such as `two red circles left of a blue square`, or edits of a source, such as
    `make the square green`. Range 0 to 1. No weights: OpenCV finds the shapes. Gamed by blurred or doubled shapes whose kind the
    detector takes for another.
    """

    exact = False

    def __call__(
        self, images: torch.Tensor, prompts: list[str], sources: list | None = None, **metadata: Any
    ) -> torch.Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B,). FlowGRPOError for other prompts, or an edit without a source."""
        checked = [
            self._check(image, prompt, None if sources is None else sources[row])
            for row, (image, prompt) in enumerate(zip(to_pil(images), prompts, strict=True))
        ]
        return torch.tensor([float(requirements.is_exact) if self.exact else requirements.share for requirements in checked])

    def _check(self, image: Image.Image, prompt: str, sources: list[Image.Image] | None) -> Requirements:
        if not sources:
            return check_scene(parse_scene(str(prompt)), _found(image))
        return check_edit(parse_edit(str(prompt)), _found(sources[0]), _found(image))


class ExactShapes(Shapes):
    """Whether an image of shapes meets all requirements of its prompt, as `shapes` counts them.

    Range 0 or 1. No weights. Gamed as `shapes`.
    """

    exact = True


class ShapesEdit(Shapes):
    """Whether the asked change of an image of shapes happened and nothing else changed: the share of both, or with exact=true all.

    Prompts are edits such as `make the square green`, with a source. Range 0 to 1. No weights. Gamed as `shapes`.

    Args:
        exact: 1 if all is right, else 0.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact

    def _check(self, image: Image.Image, prompt: str, sources: list[Image.Image] | None) -> Requirements:
        if not sources:
            raise FlowGRPOError(f"the prompt {str(prompt)!r} has no source to edit: give prompts a column `image`.")
        return super()._check(image, prompt, sources)
