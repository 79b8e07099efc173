"""Check whether an image has the objects that a GenEval prompt asks for, in number, colour and position.

The rules are functions of detections, so that they can be tested without a model; `rewards.geneval.detection` makes the detections.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.geneval.detection import ColorNames, Detection, Detector
from flow_grpo.rewards.networks import AUTO

THRESHOLD = 0.3  # minimum score of a detection
COUNTING_THRESHOLD = 0.9  # the same, in counting prompts
MOST = 16  # maximum number of detections of a class
APART = 0.1  # minimum distance of centres, as a share of the sum of both sizes
Colors = Callable[[list[Detection], str], list[str]]  # the colour of each detection of a class


class GenEval:
    """GenEval (arXiv 2310.11513): objects, their number, colour and relative position, by detection.

    `scoring` is one of
    - published: GenEval's own score, 1 if every requirement is met, else 0. The most confident detections count, so additional
      objects of a class do not matter, except in counting prompts, whose `exclude` forbids them.
    - strict: 1 if the number of every class is exact as well, else 0.
    - partial: the mean of how nearly each requirement is met, on which Flow-GRPO (arXiv 2505.05470) trains: 1 - |n - wanted| / wanted
      for a number, and if it is exact, the share of correct colours, and 1 for a correct position. (Flow-GRPO's code adds a point
      for every position that is checked, correct or not; this does not.)

    Metadata as in GenEval's own jsonl: the columns tag, include and exclude.

    Range: 0 or 1; partial at most 1, and negative if there are more than twice as many objects as wanted. Weights:
    facebook/mask2former-swin-small-coco-instance (MIT, 0.3 GB) through transformers, and for colours CLIP ViT-L/14 of OpenAI
    (MIT, 1.7 GB) through open_clip; about 5 GB of memory at 512 x 512 with `batch_size` 4. The detector has the architecture
    and training data of GenEval's own mmdet weights, but was trained separately, and mmdet scales masks in two steps: scores are
    close to those of the published benchmark, not equal. Gamed by objects that are drawn plainly, large and apart, like stickers
    on a wall, and by whatever the detector mistakes for them.

    Args:
        detector: a hub id or folder of a Mask2Former with COCO's 80 classes.
        clip: model name of open_clip for the colours.
        clip_weights: its pretrained tag or checkpoint.
    """

    def __init__(
        self,
        scoring: Literal["published", "strict", "partial"] = "partial",
        detector: str = "facebook/mask2former-swin-small-coco-instance",
        clip: str = "ViT-L-14-quickgelu",
        clip_weights: str = "openai",
        device: str = AUTO,
        batch_size: int = 4,
    ) -> None:
        if scoring not in SCORINGS:
            raise FlowGRPOError(f"geneval: there is no scoring {scoring!r}; choose one of {', '.join(SCORINGS)}.")
        self.scoring = SCORINGS[scoring]
        self.detector = Detector(detector, device, batch_size)
        self.names = ColorNames(clip, clip_weights, device)

    def __call__(
        self,
        images: torch.Tensor,
        prompts: list[str],
        tag: list[str],
        include: list[list[dict[str, Any]]],
        exclude: list[list[dict[str, Any]] | None] | None = None,
    ) -> torch.Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,)."""
        scores = []
        wanted = zip(images, self.detector(images), tag, include, exclude or [None] * len(tag), strict=True)
        for image, detections, kind, asked, forbidden in wanted:
            things = confident(detections, COUNTING_THRESHOLD if kind == "counting" else THRESHOLD)

            def colors(objects: list[Detection], name: str, image: torch.Tensor = image) -> list[str]:
                return self.names(image, objects, name)

            scores.append(self.scoring(things, asked, forbidden or [], colors))
        return torch.tensor(scores)


class ExactGenEval(GenEval):
    """GenEval's published score (arXiv 2310.11513), to evaluate a run that trains on the partial score.

    Range: 0 or 1. Weights, licence, memory and options are those of `geneval`, without `scoring`. Gamed as `geneval` is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(scoring="published", **options)


def confident(detections: list[Detection], threshold: float) -> dict[str, list[Detection]]:
    """Detections by class above the threshold, the most confident first and at most MOST."""
    things: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        members = things.setdefault(detection.name, [])
        if detection.score > threshold and len(members) < MOST:
            members.append(detection)
    return things


def relation(a: Detection, b: Detection) -> set[str]:
    """The position of a relative to b: up to two of left of, right of, above, below; none if their centres are too close."""
    offset, clear = [], []
    for axis in (0, 1):
        centre = [(d.box[axis] + d.box[axis + 2]) / 2 for d in (a, b)]
        sizes = sum(abs(d.box[axis + 2] - d.box[axis]) for d in (a, b))
        offset.append(centre[0] - centre[1])
        clear.append(math.copysign(max(abs(offset[axis]) - APART * sizes, 0), offset[axis]))
    if max(abs(c) for c in clear) < 1e-3:
        return set()
    x, y = (c / math.hypot(*offset) for c in clear)
    held = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in held.items() if holds}


def published_score(things: dict[str, list[Detection]], include: list[dict], exclude: list[dict], colors: Colors) -> float:
    """1.0 if an image has what is asked by GenEval's published rules (arXiv 2310.11513), else 0.0."""
    groups: list[
        list[Detection] | None
    ] = []  # detections for each requirement, None if it is not met; positions refer to them
    for demand in include:
        count = demand["count"]
        matches: list[Detection] | None = things.get(demand["class"], [])[:count]
        if (
            len(matches or []) < count
            or (demand.get("color") and colors(matches or [], demand["class"]).count(demand["color"]) < count)
            or (demand.get("position") and not _has_position(matches or [], demand["position"], groups))
        ):
            matches = None
        groups.append(matches)
    return float(None not in groups and not _crowded(things, exclude))


def requirement_scores(things: dict[str, list[Detection]], include: list[dict], colors: Colors) -> list[float]:
    """How nearly each requirement is met, at most 1: the number of each class, and if it is exact, colours and position."""
    met: list[float] = []
    groups: list[list[Detection] | None] = []
    for demand in include:
        count, matches = demand["count"], things.get(demand["class"], [])
        parts = [1 - abs(count - len(matches)) / count]
        if demand.get("color"):
            right = colors(matches, demand["class"]).count(demand["color"]) if len(matches) == count else 0
            parts.append(right / count)
        if demand.get("position"):
            parts.append(float(min(parts) == 1 and _has_position(matches, demand["position"], groups)))
        groups.append(matches if min(parts) == 1 else None)
        met += parts
    return met


def strict_score(things: dict[str, list[Detection]], include: list[dict], exclude: list[dict], colors: Colors) -> float:
    """1.0 if every requirement is met in full and no excluded thing is there too often, else 0.0."""
    return float(all(part == 1 for part in requirement_scores(things, include, colors)) and not _crowded(things, exclude))


def partial_score(things: dict[str, list[Detection]], include: list[dict], exclude: list[dict], colors: Colors) -> float:
    """The mean of the requirements' scores: at most 1; it can be below 0 with more than twice as many objects as wanted."""
    parts = requirement_scores(things, include, colors)
    return sum(parts) / len(parts)


SCORINGS = {"published": published_score, "strict": strict_score, "partial": partial_score}


def _has_position(objects: list[Detection], position: list, groups: list[list[Detection] | None]) -> bool:
    """Whether all objects have this position relative to all of the group it refers to; False if that group's requirement is not met."""
    name, index = position
    others = groups[index]
    return others is not None and all(name in relation(a, b) for a in objects for b in others)


def _crowded(things: dict[str, list[Detection]], exclude: list[dict]) -> bool:
    """Whether a class has as many objects as `exclude` forbids."""
    return any(len(things.get(demand["class"], [])) >= demand["count"] for demand in exclude)
