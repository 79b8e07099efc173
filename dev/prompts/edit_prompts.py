"""Prompts that ask to change the text of a sign, with the image of the sign: python -m dev.prompts.edit_prompts FOLDER.

Writes FOLDER/edits_train.jsonl, FOLDER/edits_test.jsonl and their images in FOLDER/edits. The format is that of any prompt file with
images: a line for each prompt, with the columns prompt and image.
"""

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIDE = 256  # pixels
COUNTS = {"train": 64, "test": 24}
SIGNS = (
    "OPEN CLOSED EXIT SALE COFFEE BAKERY HOTEL MUSEUM LIBRARY GARDEN STATION MARKET BOOKS FLOWERS PIZZA CINEMA SCHOOL PHARMACY "
    "FERRY AIRPORT TAXI PARKING WELCOME DANGER CAUTION PRIVATE TICKETS LOUNGE STUDIO GALLERY HARBOUR BRIDGE FOREST MEADOW RIVER "
    "CASTLE TOWER VALLEY ISLAND SUMMER WINTER AUTUMN SPRING MORNING EVENING MIDNIGHT SUNDAY FRIDAY"
)
WORDS = SIGNS.split()
REQUESTS = (
    'Change the text on the sign to "{}"',
    'Make the sign say "{}" and leave the rest as it is',
    'Replace the word on the sign by "{}"',
    'The sign should read "{}"',
)
COLOURS = {
    "paper": ((238, 232, 213), (250, 250, 245), (255, 224, 130), (187, 222, 251)),
    "wall": ((94, 53, 41), (69, 90, 100), (51, 80, 60), (96, 76, 120)),
}


def sign(word: str, generator: random.Random) -> Image.Image:
    """An image of a sign with that word on a wall."""
    image = Image.new("RGB", (SIDE, SIDE), generator.choice(COLOURS["wall"]))
    pen, top = ImageDraw.Draw(image), generator.randint(60, 110)
    pen.rectangle((20, top, SIDE - 20, top + 80), fill=generator.choice(COLOURS["paper"]), outline=(30, 30, 30), width=4)
    size = 52
    while pen.textlength(word, ImageFont.load_default(size)) > SIDE - 64:
        size -= 2
    pen.text((SIDE / 2, top + 40), word, fill=(25, 25, 30), font=ImageFont.load_default(size), anchor="mm")
    return image


def write(folder: Path, seed: int = 0) -> None:
    """Write the prompt files and images. The words that train asks for and shows are not those of test."""
    generator = random.Random(seed)
    words = WORDS[:]
    generator.shuffle(words)
    parts = {"train": words[: 2 * len(words) // 3], "test": words[2 * len(words) // 3 :]}
    (folder / "edits").mkdir(parents=True, exist_ok=True)
    for part, count in COUNTS.items():
        rows = []
        for number in range(count):
            shown, asked = generator.sample(parts[part], 2)
            name = f"edits/{part}_{number:03d}.png"
            sign(shown, generator).quantize(32).save(folder / name, optimize=True)
            rows.append(json.dumps({"prompt": generator.choice(REQUESTS).format(asked), "image": name}))
        (folder / f"edits_{part}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
