"""How much of the quoted text in the prompt can be read in the picture: RapidOCR's packaged PP-OCR models."""

import re

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

QUOTED = re.compile(r'"([^"]+)"')
LINE_HEIGHT = 48  # pixels: what PP-OCR's recogniser scales every line to
SINGLE_LINE = 64  # pixels: a picture at most this high is one line of text, read without detection


class OCR:
    """Flow-GRPO's OCR reward (arXiv 2505.05470): 1 - min(levenshtein(read, target), len(target)) / len(target).

    The target is the quoted text in the prompt. Case and spaces do not count, and a target found within what was read
    scores 1.

    Range [0, 1]. Weights: PP-OCR over onnxruntime, inside the `rapidocr` package (Apache-2.0), about 100 MB of memory on the
    CPU. Gamed by repeating the text, and by plain pictures with nothing but the text.
    """

    def __init__(self) -> None:
        self._engines: dict[int, object] = {}

    def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: object) -> torch.Tensor:
        """images (B, 3, H, W) in [0, 1], prompts (B) with quoted text; returns (B,). ValueError for an unquoted prompt."""
        targets = [_target(prompt) for prompt in prompts]
        reads = self.read(images)
        return torch.tensor([self.score(_plain(read), target) for read, target in zip(reads, targets, strict=True)])

    @staticmethod
    def score(read: str, target: str) -> float:
        """The score of one reading; both are lower case and without spaces."""
        distance = 0 if target in read else Levenshtein.distance(read, target)
        return 1 - min(distance, len(target)) / len(target)

    def read(self, images: torch.Tensor) -> list[str]:
        """The text in each of images (B, 3, H, W) in [0, 1]."""
        height, width = images.shape[-2:]
        pixels = (images.detach().float().clamp(0, 1) * 255).round().byte().cpu()
        arrays = [np.ascontiguousarray(p.permute(1, 2, 0).numpy()[:, :, ::-1]) for p in pixels]  # RGB -> BGR
        if height > SINGLE_LINE:
            return self._read_lines(arrays)
        from rapidocr.ch_ppocr_rec.typings import TextRecInput

        # The recogniser pads every line to the width it was built for: a width that fits is three times as fast.
        engine = self._engine(round(LINE_HEIGHT * width / height) + 16)
        return list(engine.text_rec(TextRecInput(img=arrays, return_word_box=False)).txts)

    def _read_lines(self, arrays: list[np.ndarray]) -> list[str]:
        """Finds the lines in each picture (H, W, 3), then reads the lines of all pictures in batches."""
        from rapidocr.main import RapidOCRError

        engine = self._engine(320)
        lines: list[np.ndarray] = []
        owner: list[int] = []
        for place, array in enumerate(arrays):
            try:
                found, _ = engine.detect_and_crop(*engine.preprocess_img(array))
            except RapidOCRError:  # there is no text in it
                continue
            lines += found
            owner += [place] * len(found)
        texts: list[list[str]] = [[] for _ in arrays]
        if lines:
            read = engine.recognize_txt(lines)
            for place, text, score in zip(owner, read.txts, read.scores, strict=True):
                if text.strip() and score >= engine.text_score:
                    texts[place].append(text)
        return [" ".join(text) for text in texts]

    def _engine(self, width: int):
        """RapidOCR whose recogniser takes lines of LINE_HEIGHT x width pixels."""
        if width not in self._engines:
            from rapidocr import RapidOCR

            engine = RapidOCR(
                params={
                    "Global.log_level": "critical",
                    "Rec.rec_img_shape": [3, LINE_HEIGHT, width],
                    "Rec.rec_batch_num": 32,
                }
            )
            engine(np.zeros((LINE_HEIGHT, width, 3), np.uint8), use_det=False, use_cls=False)  # loads the recogniser
            self._engines[width] = engine
        return self._engines[width]


class ExactOCR(OCR):
    """Exact accuracy: 1 for a picture that reads as the quoted text and nothing else, otherwise 0. Case and spaces free."""

    @staticmethod
    def score(read: str, target: str) -> float:
        return float(read == target)


def _target(prompt: str) -> str:
    found = QUOTED.search(prompt)
    if not found or not _plain(found[1]):
        raise ValueError(f"the prompt {prompt!r} has no text in double quotes, which is what is to be read.")
    return _plain(found[1])


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()
