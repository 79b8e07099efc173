"""Emoji with names and tags: one picture in each of two styles, 64 x 64 pixels on white, and twelve sizes and places of each.

Noto Color Emoji (OFL-1.1) is the style "flat", Fluent 3D (MIT) is "3d"; names and tags are from emojibase-data (MIT).
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE, FULL, VARIANTS = 64, 160, 12
STYLES = ("flat", "3d")
# emojibase's subgroups of animals to household objects
GROUPS = {*range(34, 49), 50, 51, *range(53, 57), 59, 60, *range(62, 83)}
OTHERS = """grinning face, face with tears of joy, smiling face with sunglasses, sleeping face, angry face, crying face, nauseated face,
cowboy hat face, robot, ghost, alien, clown face, skull, pile of poo, face with monocle, red heart, broken heart, green heart, blue heart,
grinning cat, monkey face, zipper-mouth face, hugging face, cold face, hot face, face screaming in fear, nerd face, star-struck,
pouting face, money-mouth face"""
LEFT_OUT = ("clock", "moon", "medal", "thirty", "camera with", "mailbox with", "input", "speaker ", "bell with")
Emoji = tuple[str, str, str, list[str]]  # name, character, code points, tags that are one word


def emoji(folder: Path) -> list[Emoji]:
    """Single objects that both styles have, with names of at most three words."""
    others = {name.strip() for name in OTHERS.replace("\n", " ").split(",")}
    found = []
    for entry in json.loads((folder / "base/package/en/data.json").read_text()):
        name = entry["label"].lower().replace("’", "'")
        words = name.replace("-", " ").split()
        is_wanted = entry.get("subgroup") in GROUPS or name in others
        if not is_wanted or len(words) > 3 or any(part in name for part in LEFT_OUT) or any(c.isdigit() for c in name):
            continue
        if "-200D-" in entry["hexcode"] or not fluent_file(folder, entry["hexcode"]).exists():
            continue
        tags = [tag for tag in entry.get("tags", []) if tag not in name and tag.isalpha()]
        found.append((name, entry["emoji"], entry["hexcode"], tags))
    return found


def fluent_file(folder: Path, code: str) -> Path:
    """The picture in the style "3d"."""
    return folder / f"fluent/package/assets/{code.lower()}.webp"


def caption(name: str, style: int, tag: str = "") -> str:
    """Such as `a red apple in 3d style`, with a tag after the name where one is given."""
    described = f"{name} {tag}".strip()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {described} in {STYLES[style]} style"


def on_white(image: Image.Image) -> Image.Image:
    """What is not transparent, centred on a white square with a margin of 4 %."""
    image = image.convert("RGBA")
    image = image.crop(image.getchannel("A").point(lambda alpha: 255 * (alpha > 24)).getbbox())
    square = Image.new("RGBA", (round(max(image.size) * 1.08),) * 2, "white")
    square.alpha_composite(image, ((square.width - image.width) // 2, (square.height - image.height) // 2))
    return square.convert("RGB").resize((FULL, FULL), Image.Resampling.LANCZOS)


def moved(image: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """Scaled to 0.8 to 1 of the side and put at a random place: (64, 64, 3). Not mirrored: names can say left or right."""
    side = int(rng.integers(52, SIDE + 1))
    square = Image.new("RGB", (SIDE, SIDE), "white")
    left, top = (int(v) for v in rng.integers(0, SIDE - side + 1, 2))
    square.paste(image.resize((side, side), Image.Resampling.LANCZOS), (left, top))
    return np.asarray(square)


def main(folder: Path) -> None:
    """Write pictures.npz, `centred` (N, 2, 64, 64, 3) and `moved` (N, 2, 12, 64, 64, 3), and names.json beside the sources."""
    font = ImageFont.truetype(str(folder / "noto/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"), 109)  # its only size
    rng = np.random.default_rng(0)
    found = emoji(folder)
    centred, variants = [], []
    for _, character, code, _ in found:
        flat = Image.new("RGBA", (200, 200), (255, 255, 255, 0))
        ImageDraw.Draw(flat).text((20, 20), character, font=font, embedded_color=True)
        styles = [on_white(flat), on_white(Image.open(fluent_file(folder, code)))]
        centred.append([np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)) for image in styles])
        variants.append([[moved(image, rng) for _ in range(VARIANTS)] for image in styles])
    np.savez(folder / "pictures.npz", centred=np.array(centred), moved=np.array(variants))
    (folder / "names.json").write_text(json.dumps([[name, tags] for name, _, _, tags in found]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
