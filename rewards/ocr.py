"""How much of the quoted text in the prompt can be read in the image, by the PP-OCR models that RapidOCR ships."""

import functools
import os
import re
import threading
import unicodedata
import weakref
from typing import Any

import cv2
import numpy as np
import onnxruntime
import torch
from rapidfuzz.distance import Levenshtein

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import to_bytes
from flow_grpo.rewards.networks import with_index

LINE_HEIGHT = 48  # pixels: height that PP-OCR's recogniser scales every line to
DETECTOR_SIDE = 736  # pixels: the least shorter side that PP-OCR's detector is given; smaller images are scaled up
SMALLER_SIDES = (368, 184)  # at which an image without a detected line is read again
ENGINES = 8  # that are kept, of 35 MB each: one for each shape of images with a single line
SINGLE_LINE = 64  # pixels: an image at most this high is one line of text, read without detection

onnxruntime.disable_telemetry_events()  # where it was imported before, or reads no such variable (Windows)

# Engines take a second to load and are not made for several threads. `ocr` and `ocr_exact` share them, and what was read last.
_LOCK = threading.Lock()
_last_read: dict[str, Any] = {}
# The first kind that a prompt has counts: with straight ones it is read as ever, and single ones may be apostrophes.
KINDS = (
    re.compile(r'"([^"]+)"'),
    re.compile(
        r"[“”„‟]([^“”„‟]+)[“”]|«([^«»]+)»|»([^«»]+)«|「([^「」]+)」|『([^『』]+)』|＂([^＂]+)＂|‹([^‹›]+)›|〝([^〝〞〟]+)[〞〟]"
    ),
    re.compile(r"(?<!\w)['‘‚]([^'‘‚]+?)['’‘](?!\w)"),
)
WHAT_COUNTS = "text in quotation marks, such as \"OPEN\", “OPEN”, „OPEN“, « OPEN », 「OPEN」 or 'OPEN'"


class OCR:
    """Flow-GRPO's OCR reward (arXiv 2505.05470): 1 - min(levenshtein(read, target), len(target)) / len(target).

    The target is the first quoted text in the prompt. Case and spaces do not count, and a target found within what was read
    scores 1. case_sensitive, keep_spaces and substring=False make it stricter, the last one so that additional text costs
    as much as any other edit. several_lines: the target is all quoted texts of the prompt in their order, and small images
    are searched for lines, too.

    Range [0, 1]. Weights: PP-OCR over onnxruntime, inside the `rapidocr` package (Apache-2.0), about 100 MB of memory on the
    CPU; device="cuda" needs the package onnxruntime-gpu. Gamed by repeating the text, and by plain images with nothing but
    the text.
    """

    def __init__(
        self,
        device: str = "cpu",
        case_sensitive: bool = False,
        keep_spaces: bool = False,
        substring: bool = True,
        several_lines: bool = False,
    ) -> None:
        self.device = torch.device(with_index(device))
        if self.device.type == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise FlowGRPOError(
                "ocr: device=cuda needs the package onnxruntime-gpu in place of onnxruntime; or set device=cpu."
            )
        self.case_sensitive, self.keep_spaces = case_sensitive, keep_spaces
        self.substring, self.several_lines = substring, several_lines

    def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: object) -> torch.Tensor:
        """images (B, 3, H, W) in [0, 1], prompts (B) with quoted text; returns (B,). FlowGRPOError for an unquoted prompt."""
        targets = [self._target(prompt) for prompt in prompts]
        reads = self.read(images)
        return torch.tensor([self.score(self._plain(read), target) for read, target in zip(reads, targets, strict=True)])

    def score(self, read: str, target: str) -> float:
        """The score of one text; case and spaces were removed from both if they do not count."""
        distance = 0 if self.substring and target in read else Levenshtein.distance(read, target)
        return 1 - min(distance, len(target)) / len(target)

    def read(self, images: torch.Tensor) -> list[str]:
        """Read the text in each of images (B, 3, H, W) in [0, 1]. Two rewards that are given the same tensor read it once."""
        with _LOCK:
            if images.is_inference():  # it has no version, which tells whether it was changed
                return self._read(images)
            key = (images._version, self.several_lines, self.device, os.getpid())
            last = _last_read.get("images")
            if last is None or last() is not images or _last_read["key"] != key:
                _last_read.update(texts=self._read(images), images=weakref.ref(images), key=key)
            return list(_last_read["texts"])

    def _read(self, images: torch.Tensor) -> list[str]:
        height, width = images.shape[-2:]
        arrays = [np.ascontiguousarray(p.permute(1, 2, 0).numpy()[:, :, ::-1]) for p in to_bytes(images)]  # RGB -> BGR
        if height > SINGLE_LINE or self.several_lines:
            return self._read_lines(arrays)
        from rapidocr.ch_ppocr_rec.typings import TextRecInput

        # The recogniser pads every line to the width it was built for: a width that fits is three times as fast.
        engine = _engine(round(LINE_HEIGHT * width / height) + 16, self.device, os.getpid())
        return list(engine.text_rec(TextRecInput(img=arrays, return_word_box=False)).txts)

    def _read_lines(self, arrays: list[np.ndarray]) -> list[str]:
        """Detect the lines in each image (H, W, 3), then read the lines of all images in batches.

        Letters that are large beside the image are not detected. Where nothing is read, the image is read again at smaller sizes.
        """
        texts = self._read_detected(arrays)
        for side in SMALLER_SIDES:
            empty = [i for i, text in enumerate(texts) if not text and min(arrays[i].shape[:2]) > SINGLE_LINE]
            again = self._read_detected([_shrunk(arrays[i], side) for i in empty], side)
            for index, text in zip(empty, again, strict=True):
                texts[index] = text
        return texts

    def _read_detected(self, arrays: list[np.ndarray], side: int = DETECTOR_SIDE) -> list[str]:
        """Read the lines that are detected in each image, whose shorter side is scaled up to `side` for that."""
        from rapidocr.main import RapidOCRError

        engine = _engine(320, self.device, os.getpid(), side)
        lines: list[np.ndarray] = []
        image_indices: list[int] = []
        for index, array in enumerate(arrays):
            try:
                crops, _ = engine.detect_and_crop(*engine.preprocess_img(array))
            except RapidOCRError:  # there is no text in it
                continue
            lines += crops
            image_indices += [index] * len(crops)
        texts: list[list[str]] = [[] for _ in arrays]
        if lines:
            read = engine.recognize_txt(lines)
            for index, text, score in zip(image_indices, read.txts, read.scores, strict=True):
                if text.strip() and score >= engine.text_score:
                    texts[index].append(text)
        return [" ".join(text) for text in texts]

    def _target(self, prompt: str) -> str:
        quoted = quoted_texts(prompt)
        target = self._plain(" ".join(quoted if self.several_lines else quoted[:1]))
        if not target:
            raise FlowGRPOError(f"the prompt {prompt!r} has nothing to read: it needs a {WHAT_COUNTS}.")
        return target

    def _plain(self, text: str) -> str:
        text = (" " if self.keep_spaces else "").join(unicodedata.normalize("NFC", text).split())
        return text if self.case_sensitive else text.lower()


class ExactOCR(OCR):
    """Exact accuracy: 1 for an image that reads as the quoted text and nothing else, otherwise 0. Options as for ocr.

    Range {0, 1}. Weights, licence and memory as ocr. Gamed by plain images with nothing but the text.
    """

    def score(self, read: str, target: str) -> float:
        """1.0 if the text is exactly the asked one, else 0.0."""
        return float(read == target)


def _shrunk(array: np.ndarray, side: int) -> np.ndarray:
    """The image (H, W, 3) with a shorter side of `side` pixels; itself if it is no larger."""
    height, width = array.shape[:2]
    scale = side / min(height, width)
    if scale >= 1:
        return array
    return cv2.resize(array, (round(width * scale), round(height * scale)), interpolation=cv2.INTER_AREA)


@functools.lru_cache(ENGINES)
def _engine(width: int, device: torch.device, process: int, side: int = DETECTOR_SIDE) -> Any:
    """RapidOCR whose recogniser takes lines of LINE_HEIGHT x width pixels, and whose detector scales shorter sides up to `side`.

    A forked process needs one of its own.
    """
    from rapidocr import RapidOCR

    engine = RapidOCR(
        params={
            "Global.log_level": "critical",
            "Rec.rec_img_shape": [3, LINE_HEIGHT, width],
            "Rec.rec_batch_num": 32,
            "Det.limit_side_len": side,
            "Det.limit_type": "min",
            "EngineConfig.onnxruntime.use_cuda": device.type == "cuda",
            "EngineConfig.onnxruntime.cuda_ep_cfg.device_id": device.index or 0,
        }
    )
    engine(np.zeros((LINE_HEIGHT, width, 3), np.uint8), use_det=False, use_cls=False)  # loads the recogniser
    return engine


def quoted_texts(prompt: str) -> list[str]:
    """The texts in quotation marks, in their order and without spaces around them; [] if there are none."""
    for kind in KINDS:
        found = (next(text for text in match.groups() if text) for match in kind.finditer(prompt))
        texts = [text.strip() for text in found if text.strip()]
        if texts:
            return texts
    return []
