"""Check whether an image has the objects that a GenEval prompt asks for, in number, colour and position.

Mask2Former finds the objects and CLIP names their colours. The rules are functions of detections, so that they can be tested without a
model.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.clip import OpenCLIP
from flow_grpo.rewards.downloads import downloads
from flow_grpo.rewards.images import to_pil
from flow_grpo.rewards.networks import AUTO, usable_device

# COCO's 80 classes in their order, as GenEval calls them: computer mouse, tv remote, computer keyboard.
CLASSES = (  # noqa: SIM905
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,parking meter,bench,bird,"
    "cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,frisbee,skis,snowboard,"
    "sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,cup,fork,knife,spoon,"
    "bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,potted plant,bed,dining table,"
    "toilet,tv,laptop,computer mouse,tv remote,computer keyboard,cell phone,microwave,oven,toaster,sink,refrigerator,book,"
    "clock,vase,scissors,teddy bear,hair drier,toothbrush"
).split(",")
COLORS = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
GREY = 0x99 / 255  # the grey that replaces everything but the object
THRESHOLD = 0.3  # minimum score of a detection
COUNTING_THRESHOLD = 0.9  # the same, in counting prompts
MAX_DETECTIONS = 16  # maximum number of detections of a class
MIN_DISTANCE = 0.1  # minimum distance of centres, as a share of the sum of both sizes


@dataclass(frozen=True)
class Detection:
    """One object that a detector has found."""

    name: str
    score: float
    box: tuple[int, int, int, int]  # left, top, right, bottom in pixels, the last two just outside
    mask: Tensor  # (H, W) bool


class Detector:
    """Mask2Former's instances (arXiv 2112.01527): the 100 likeliest pairs of query and class, scored as mmdet does."""

    def __init__(self, model: str, device: str, batch_size: int) -> None:
        self.device, self.batch_size = usable_device("geneval", device), batch_size
        with downloads(model):
            self.processor = Mask2FormerImageProcessor.from_pretrained(model)
            found = Mask2FormerForUniversalSegmentation.from_pretrained(model, dtype=torch.float32)
            self.model = found.to(self.device).eval()
        if self.model.config.num_labels != len(CLASSES):
            raise FlowGRPOError(f"geneval: {model} has {self.model.config.num_labels} classes, not COCO's {len(CLASSES)}.")

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        """Detect the objects in each of images (B, 3, H, W) in [0, 1]."""
        detections = []
        for part in images.detach().float().clamp(0, 1).split(self.batch_size):
            inputs = self.processor(list(part.cpu()), do_rescale=False, return_tensors="pt").to(self.device)
            output = self.model(pixel_values=inputs["pixel_values"])
            rows = zip(output.class_queries_logits, output.masks_queries_logits, strict=True)
            detections += [instances(classes, masks, (images.shape[-2], images.shape[-1])) for classes, masks in rows]
        return detections


def instances(class_logits: Tensor, mask_logits: Tensor, size: tuple[int, int]) -> list[Detection]:
    """Detections of one image, from the logits of classes (Q, 81), the last of which is "nothing", and of masks (Q, h, w).

    The score is the class's probability times the mean probability of the pixels in the mask; the box is that of the mask.
    """
    probabilities = class_logits.softmax(-1)[:, :-1]
    best, indices = probabilities.flatten().topk(min(100, probabilities.numel()))
    masks = F.interpolate(mask_logits[None], size=size, mode="bilinear", align_corners=False)[0]
    detections = []
    for probability, index in zip(best.tolist(), indices.tolist(), strict=True):
        query, label = divmod(index, probabilities.shape[1])
        mask = masks[query] > 0
        if mask.any():
            score = probability * masks[query][mask].sigmoid().mean().item()
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
            detections.append(Detection(CLASSES[label], score, box, mask.cpu()))
    return detections


class ColorNames:
    """The colour of an object by zero-shot CLIP, as in GenEval: on its box, with everything around the object grey."""

    def __init__(self, model: str, weights: str, device: str) -> None:
        self.embed, self.texts = OpenCLIP("geneval", model, weights, device), dict[str, Tensor]()

    @torch.no_grad()
    def __call__(self, image: Tensor, detections: list[Detection], name: str) -> list[str]:
        """One of COLORS for each detection of the class `name` in image (3, H, W) in [0, 1]."""
        if not detections:
            return []
        features = self.embed.encode_images([crop(image, detection) for detection in detections])
        return [COLORS[i] for i in (features @ self._classes(name).T).argmax(1).tolist()]

    def _classes(self, name: str) -> Tensor:
        """Text embeddings (10, D): for each colour, the mean of three sentences."""
        if name not in self.texts:
            means = []
            for color in COLORS:
                sentences = [
                    f"a photo of a {color} {name}",
                    f"a photo of a {color}-colored {name}",
                    f"a photo of a {color} object",
                ]
                means.append(self.embed.encode_prompts(sentences).mean(0))
            self.texts[name] = F.normalize(torch.stack(means), dim=-1)
        return self.texts[name]


def crop(image: Tensor, detection: Detection) -> Image.Image:
    """Crop the box of an object from image (3, H, W), with grey around the object."""
    left, top, right, bottom = detection.box
    alone = image.detach().float().cpu().where(detection.mask, torch.tensor(GREY))[:, top:bottom, left:right]
    return to_pil(alone[None])[0]


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
        """images (B, 3, H, W) in [0, 1]; returns (B,). FlowGRPOError for a class or a colour that is none of GenEval's."""
        check_demands(itertools.chain(*include, *(forbidden or [] for forbidden in exclude or [])))
        scores = []
        wanted = zip(images, self.detector(images), tag, include, exclude or [None] * len(tag), strict=True)
        for image, detections, kind, asked, forbidden in wanted:
            things = confident(detections, COUNTING_THRESHOLD if kind == "counting" else THRESHOLD)
            scores.append(self.scoring(things, asked, forbidden or [], partial(self.names, image)))
        return torch.tensor(scores)


class ExactGenEval(GenEval):
    """GenEval's published score (arXiv 2310.11513), to evaluate a run that trains on the partial score.

    Range: 0 or 1. Weights, licence, memory and options are those of `geneval`, without `scoring`. Gamed as `geneval` is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(scoring="published", **options)


def check_demands(demands: Iterable[dict[str, Any]]) -> None:
    """Raise FlowGRPOError for a class or a colour that is never found, whatever the image shows."""
    for demand in demands:
        for kind, known in (("class", CLASSES), ("color", COLORS)):
            if demand.get(kind) and demand[kind] not in known:
                close = [name for name in known if demand[kind] in name.split()] or get_close_matches(demand[kind], known)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise FlowGRPOError(f"geneval: the {kind} {demand[kind]!r} is none of GenEval's {len(known)}.{hint}")


def confident(detections: list[Detection], threshold: float) -> dict[str, list[Detection]]:
    """Detections by class above the threshold, the most confident first and at most MAX_DETECTIONS."""
    things: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        members = things.setdefault(detection.name, [])
        if detection.score > threshold and len(members) < MAX_DETECTIONS:
            members.append(detection)
    return things


def relation(a: Detection, b: Detection) -> set[str]:
    """The position of a relative to b: up to two of left of, right of, above, below; none if their centres are too close."""
    offset, clear = [], []
    for axis in (0, 1):
        centre = [(d.box[axis] + d.box[axis + 2]) / 2 for d in (a, b)]
        sizes = sum(abs(d.box[axis + 2] - d.box[axis]) for d in (a, b))
        offset.append(centre[0] - centre[1])
        clear.append(math.copysign(max(abs(offset[axis]) - MIN_DISTANCE * sizes, 0), offset[axis]))
    if max(abs(c) for c in clear) < 1e-3:
        return set()
    x, y = (c / math.hypot(*offset) for c in clear)
    held = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in held.items() if holds}


Colors = Callable[[list[Detection], str], list[str]]  # the colour of each detection of a class


def published_score(things: dict[str, list[Detection]], include: list[dict], exclude: list[dict], colors: Colors) -> float:
    """1.0 if an image has what is asked by GenEval's published rules (arXiv 2310.11513), else 0.0."""
    # detections for each requirement, None if it is not met; positions refer to them
    groups: list[list[Detection] | None] = []
    for demand in include:
        count = demand["count"]
        matches = things.get(demand["class"], [])[:count]
        is_met = len(matches) == count
        if is_met and demand.get("color"):
            is_met = colors(matches, demand["class"]).count(demand["color"]) == count
        if is_met and demand.get("position"):
            is_met = _has_position(matches, demand["position"], groups)
        groups.append(matches if is_met else None)
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
