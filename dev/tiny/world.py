"""The embedded model's world: coloured signs with one word of three to five capital letters.

A prompt has exactly the form `red text "CAT" on a blue background`, with `a` before `orange` too: the model was trained on
nothing else, and misspelt all of 32 signs whose prompt said `an orange`. An image is 32 x 80 pixels (height x width), or
the same sign in the middle of an 80 x 80 square, which is what a diffusers user gets who names no size.
"""

import functools
import re
import string
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.pixels import PALETTE as COLORS

HEIGHT, WIDTH = 32, 80
CELL = 16  # pixels: a letter has a cell of its own, two of the transformer's tokens wide
LETTERS = string.ascii_uppercase
FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono-Bold.ttf"
FONT_SIZE = 24
BASELINE = 25  # pixels from the top of a 32 pixel high sign: capitals stand in its vertical middle
PATTERN = re.compile(r'^(\w+) text "([A-Z]{3,5})" on a (\w+) background$')


@dataclass(frozen=True)
class Sign:
    """The content of a prompt: the word, and the names of its colour and of the background's."""

    word: str
    color: str
    background: str

    @property
    def prompt(self) -> str:
        """The prompt that asks for the sign."""
        return f'{self.color} text "{self.word}" on a {self.background} background'

    def draw(self, height: int = HEIGHT) -> Image.Image:
        """The sign as an RGB image of `height` x 80 pixels, letter by letter from the left."""
        image = Image.new("RGB", (WIDTH, height), COLORS[self.background])
        pen, baseline = ImageDraw.Draw(image), (height - HEIGHT) // 2 + BASELINE
        for i, letter in enumerate(self.word):
            position = (CELL * i + CELL // 2, baseline)
            pen.text(position, letter, fill=COLORS[self.color], font=_font(), anchor="ms")
        return image


def parse(prompt: str) -> Sign:
    """The sign that a prompt asks for. Raises FlowGRPOError if the prompt is not one of this world."""
    match = PATTERN.match(prompt)
    if not match or match[1] not in COLORS or match[3] not in COLORS or match[1] == match[3]:
        raise FlowGRPOError(
            f'{prompt!r} is not a prompt of the embedded model: it generates `red text "CAT" on a blue background`, '
            f"3 to 5 capital letters in two different colours of {', '.join(COLORS)}."
        )
    return Sign(match[2], match[1], match[3])


def random_word(rng: np.random.Generator) -> str:
    """A word of three to five letters."""
    return "".join(rng.choice(list(LETTERS), size=rng.integers(3, 6)))


def random_sign(rng: np.random.Generator) -> Sign:
    """A sign with two different colours, uniformly, and a random string of 3 to 5 letters."""
    color, background = rng.choice(list(COLORS), size=2, replace=False)
    return Sign(random_word(rng), str(color), str(background))


def misspell(sign: Sign, rng: np.random.Generator, probability: float) -> Sign:
    """The sign with each letter replaced, with the given probability, by another letter."""
    wrong = rng.random(len(sign.word)) < probability
    shift = rng.integers(1, 26, size=len(sign.word))
    word = "".join(
        LETTERS[(LETTERS.index(letter) + int(step)) % 26] if flip else letter
        for letter, flip, step in zip(sign.word, wrong, shift, strict=True)
    )
    return Sign(word, sign.color, sign.background)


@functools.cache
def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(FONT), FONT_SIZE)
