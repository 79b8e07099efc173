"""Prompts of GenEval's harder tasks with the metadata that the reward `geneval` reads, by its templates (arXiv 2310.11513).

    python -m rewards.geneval_prompts 2000 train.jsonl 240 eval.jsonl

GenEval's own 553 prompts are its benchmark; these are others of the same kind, to train and to evaluate on, none in both files.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewards.detection import CLASSES, COLORS

NUMBERS = {2: "two", 3: "three", 4: "four"}
POSITIONS = ("left of", "right of", "above", "below")
NOT_COUNTED = ("skis", "scissors", "computer mouse")  # their plurals are not formed by a rule
NOT_COLORED = ("person",)
Row = dict[str, Any]


def rows(count: int, seed: int) -> list[Row]:
    """So many different prompts, the tasks in turns."""
    draw = random.Random(seed)
    found: dict[str, Row] = {}
    for attempt in itertools.count():  # there are few things to count, so the other tasks fill up
        row = TASKS[attempt % len(TASKS)](draw)
        found.setdefault(row["prompt"], row)
        if len(found) == count:
            break
    return list(found.values())


def two_object(draw: random.Random) -> Row:
    one, other = draw.sample(CLASSES, 2)
    return {"tag": "two_object", "include": [thing(one), thing(other)], "prompt": f"a photo of {a(one)} and {a(other)}"}


def counting(draw: random.Random) -> Row:
    name, number = draw.choice([c for c in CLASSES if c not in NOT_COUNTED]), draw.choice(list(NUMBERS))
    more = [{"class": name, "count": number + 1}]
    return {
        "tag": "counting",
        "include": [thing(name, number)],
        "exclude": more,
        "prompt": f"a photo of {NUMBERS[number]} {plural(name)}",
    }


def colors(draw: random.Random) -> Row:
    name, color = draw.choice([c for c in CLASSES if c not in NOT_COLORED]), draw.choice(COLORS)
    return {"tag": "colors", "include": [thing(name, color=color)], "prompt": f"a photo of {a(f'{color} {name}')}"}


def position(draw: random.Random) -> Row:
    (one, other), where = draw.sample(CLASSES, 2), draw.choice(POSITIONS)
    include = [thing(other), thing(one, position=[where, 0])]
    return {"tag": "position", "include": include, "prompt": f"a photo of {a(one)} {where} {a(other)}"}


def color_attr(draw: random.Random) -> Row:
    names, (one, other) = draw.sample([c for c in CLASSES if c not in NOT_COLORED], 2), draw.sample(COLORS, 2)
    include = [thing(names[0], color=one), thing(names[1], color=other)]
    return {
        "tag": "color_attr",
        "include": include,
        "prompt": f"a photo of {a(f'{one} {names[0]}')} and {a(f'{other} {names[1]}')}",
    }


TASKS: list[Callable[[random.Random], Row]] = [two_object, counting, colors, position, color_attr]


def thing(name: str, count: int = 1, **more: Any) -> Row:
    return {"class": name, "count": count, **more}


def a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(name: str) -> str:
    if name == "person":
        return "people"
    if name.endswith("knife"):
        return name[:-2] + "ves"
    return name + ("es" if name.endswith(("s", "sh", "ch", "x")) else "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("train", "eval"):
        parser.add_argument(f"{name}_count", type=int)
        parser.add_argument(f"{name}_file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    made = rows(words.train_count + words.eval_count, words.seed)
    for file, part in ((words.train_file, made[: words.train_count]), (words.eval_file, made[words.train_count :])):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
