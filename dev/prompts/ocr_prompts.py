"""Make prompts with a quoted text for the reward `ocr`: signs, covers, screens, cakes and other scenes.

    python -m dev.prompts.ocr_prompts 4096 train.txt 512 test.txt

They are in the style of Flow-GRPO's OCR prompts (arXiv 2505.05470). Every text occurs once, so no text is in both files, and has
one to six words. The vocabulary is ocr_scenes.yaml.
"""

import argparse
import random
import re
from pathlib import Path
from typing import Any

from flow_grpo.errors import FlowGRPOError

VOCABULARY = Path(__file__).with_name("ocr_scenes.yaml")
SAYS = "that reads / that says / with the words / reading / saying / with the text"
FRAMES = (  # the words around the thing, the place and the text; `on` fits only where the thing is a surface
    "{thing} {where} {says} {text}",
    "{thing} {says} {text} {where}",
    "{thing} {says} {text} {how}, {where}",
    "{thing} {where}, with {text} {made} {how}",
    "{thing} {says} {text} {where}, {light}",
    "{thing} {where} {says} {text}, {after}",
    "{where}, {thing} {says} {text}",
    "{where}, {thing} {says} {text} {how}",
    "{before} of {thing} {where} {says} {text}",
    "{before} of {thing} {says} {text} {how}, {where}",
    "{thing} {where}, {light}. The text {text} is {made} {how}.",
    "{text} {made} {how} on {thing} {where}",
    "{before} of {text} {made} {how} on {thing}, {light}",
)
ARTICLE = re.compile(r"\b(A|a)n? (?=([\w-]+))")
AN = re.compile(r"(?!one|uni|euro|use)[aeiou8]|honest|hour", re.IGNORECASE)
IRREGULAR = {"Wolf": "Wolves", "Moose": "Moose", "Salmon": "Salmon", "Mango": "Mangoes", "Echo": "Echoes"}


def prompts(count: int, seed: int) -> list[str]:
    """Make `count` prompts, taking the scenes in turn, and shuffle them. FlowGRPOError if the vocabulary has fewer texts."""
    import yaml

    words = yaml.safe_load(VOCABULARY.read_text(encoding="utf-8"))
    rng, rows, texts = random.Random(seed), list[str](), set[str]()
    while len(rows) < count:
        before = len(rows)
        for scene in words["scenes"].values():
            text = _new_text(rng, scene["texts"], words["words"], texts)
            if text is not None:
                rows.append(_prompt(rng, scene, text, words))
        if len(rows) == before:
            raise FlowGRPOError(f"the vocabulary has only {len(rows)} different texts, not {count}.")
    rows = rows[:count]
    rng.shuffle(rows)
    return rows


def same_text(text: str) -> str:
    """Normalise a text to its letters and digits in lower case, which are equal if readers can't tell two texts apart."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _new_text(rng: random.Random, texts: str, words: dict[str, str], known: set[str]) -> str | None:
    """Draw a text of varying length that is not in `known`, and add it; None after 30 failures."""
    for _ in range(30):
        candidates = [_articles(_fill(rng, _choose(rng, texts), words)) for _ in range(6)]
        text = sorted(candidates, key=lambda text: len(text.split()))[rng.choice((0, 2, 3, 5))]
        if same_text(text) not in known:
            known.add(same_text(text))
            return text
    return None


def _prompt(rng: random.Random, scene: dict[str, Any], text: str, words: dict[str, Any]) -> str:
    frames = [frame for frame in FRAMES if scene.get("surface", True) or " on {thing}" not in frame]
    says = _choose(rng, scene.get("says", SAYS))
    parts = {
        "thing": _choose(rng, scene["things"]),
        "where": _choose(rng, scene["where"]),
        "says": says if " " in text else says.replace("the words", "the word"),
        "how": _choose(rng, scene["how"]),
        "made": _choose(rng, scene["made"]),
        "light": _choose(rng, words["light"][scene["light"]]),
        "before": _choose(rng, words["styles"]["before"]),
        "after": _choose(rng, words["styles"]["after"]),
        "text": "{}",  # the quoted text has articles and capitals of its own
    }
    prompt = _articles(rng.choice(frames).format(**parts))
    return (prompt[0].upper() + prompt[1:]).replace("{}", f'"{text}"')


def _choose(rng: random.Random, alternatives: str) -> str:
    """One of the alternatives, and one of each [a|b] in it."""
    chosen = rng.choice(alternatives.split(" / ")).strip()
    return re.sub(r"\[([^]]*)\]", lambda match: rng.choice(match[1].split("|")), chosen)


def _fill(rng: random.Random, template: str, words: dict[str, str]) -> str:
    """The template with a word in place of each {slot}, no word twice; {slot}s is its plural."""
    used: set[str] = set()

    def word(match: re.Match) -> str:
        chosen = rng.choice([candidate for candidate in words[match[1]].split(" / ") if candidate not in used])
        used.add(chosen)
        return plural(chosen) if match[2] else chosen

    return re.sub(r"\{(\w+)\}(s\b)?", word, template)


def plural(noun: str) -> str:
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "z", "ch", "sh")) else "s")


def _articles(text: str) -> str:
    """`an` where the next word sounds like a vowel, else `a`."""
    return ARTICLE.sub(lambda match: match[1] + ("n " if AN.match(match[2]) else " "), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("train", "test"):
        parser.add_argument(f"{name}_count", type=int)
        parser.add_argument(f"{name}_file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = prompts(args.train_count + args.test_count, args.seed)
    for file, part in ((args.train_file, rows[: args.train_count]), (args.test_file, rows[args.train_count :])):
        file.write_text("".join(f"{prompt}\n" for prompt in part), encoding="utf-8")


if __name__ == "__main__":
    main()
