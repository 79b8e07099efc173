"""Detect objects with Mask2Former and classify their colours with CLIP, as input of GenEval's rules."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.clip import OpenCLIP
from flow_grpo.rewards.downloads import downloads
from flow_grpo.rewards.images import to_pil
from flow_grpo.rewards.networks import usable_device

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
AROUND = 0x99 / 255  # the grey that replaces everything but the object


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
            self.model = Mask2FormerForUniversalSegmentation.from_pretrained(model).to(self.device).eval()
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
    alone = image.detach().float().cpu().where(detection.mask, torch.tensor(AROUND))[:, top:bottom, left:right]
    return to_pil(alone[None])[0]
