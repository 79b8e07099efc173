"""Prompts of GenEval's harder tasks from its templates (arXiv 2310.11513), with the metadata that the reward `geneval` reads.

    python -m dev.prompts.geneval_prompts 1500 train.jsonl 240 eval.jsonl --without geneval.jsonl

GenEval's own 553 prompts are the benchmark. These are other prompts of the same kind, for training and evaluation: no prompt is in two
files, not even with its objects in another order.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flow_grpo.rewards.geneval import CLASSES, COLORS

NUMBERS = {2: "two", 3: "three", 4: "four"}
POSITIONS = ("left of", "right of", "above", "below")
OPPOSITE = {"right of": "left of", "below": "above"}
NOT_COUNTED = ("skis", "scissors", "computer mouse")  # their plurals are not formed by a rule
NOT_COLORED = ("person",)
Row = dict[str, Any]
Meaning = frozenset | tuple


def rows(count: int, seed: int, without: list[Row]) -> list[Row]:
    """Make `count` prompts that differ from each other and from `without`, with equal numbers of each task where possible."""
    rng, taken = random.Random(seed), {meaning(row) for row in without}
    distinct: dict[Meaning, Row] = {}
    for attempt in itertools.count():  # there are few counting prompts, so the other tasks fill up
        row = TASKS[attempt % len(TASKS)](rng)
        if meaning(row) not in taken:
            distinct.setdefault(meaning(row), row)
        if len(distinct) == count:
            break
    mixed = list(distinct.values())
    rng.shuffle(mixed)
    return mixed


def meaning(row: Row) -> Meaning:
    """The meaning of a prompt: equal for `a cat and a dog` and `a dog and a cat`, and for `left of` and its mirrored `right of`."""
    things = [(thing["class"], thing.get("color"), thing["count"]) for thing in row["include"]]
    where = row["include"][-1].get("position")
    if where is None:
        return frozenset(things)
    reference, subject = things if where[0] not in OPPOSITE else reversed(things)
    return OPPOSITE.get(where[0], where[0]), subject, reference


def two_object(rng: random.Random) -> Row:
    first, second = rng.sample(CLASSES, 2)
    return {
        "tag": "two_object",
        "include": [thing(first), thing(second)],
        "prompt": f"a photo of {a(first)} and {a(second)}",
    }


def counting(rng: random.Random) -> Row:
    name, number = rng.choice([c for c in CLASSES if c not in NOT_COUNTED]), rng.choice(list(NUMBERS))
    more = [{"class": name, "count": number + 1}]
    return {
        "tag": "counting",
        "include": [thing(name, number)],
        "exclude": more,
        "prompt": f"a photo of {NUMBERS[number]} {plural(name)}",
    }


def colors(rng: random.Random) -> Row:
    name, color = rng.choice([c for c in CLASSES if c not in NOT_COLORED]), rng.choice(COLORS)
    return {"tag": "colors", "include": [thing(name, color=color)], "prompt": f"a photo of {a(f'{color} {name}')}"}


def position(rng: random.Random) -> Row:
    (subject, reference), where = rng.sample(CLASSES, 2), rng.choice(POSITIONS)
    include = [thing(reference), thing(subject, position=[where, 0])]
    return {"tag": "position", "include": include, "prompt": f"a photo of {a(subject)} {where} {a(reference)}"}


def color_attr(rng: random.Random) -> Row:
    names, (first_color, second_color) = rng.sample([c for c in CLASSES if c not in NOT_COLORED], 2), rng.sample(COLORS, 2)
    include = [thing(names[0], color=first_color), thing(names[1], color=second_color)]
    return {
        "tag": "color_attr",
        "include": include,
        "prompt": f"a photo of {a(f'{first_color} {names[0]}')} and {a(f'{second_color} {names[1]}')}",
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
    parser.add_argument("--without", type=Path, action="append", default=[], help="Prompts to leave out, a .jsonl file.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    without = [json.loads(line) for file in args.without for line in file.read_text().splitlines()]
    made = rows(args.train_count + args.eval_count, args.seed, without)
    for file, part in ((args.train_file, made[: args.train_count]), (args.eval_file, made[args.train_count :])):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
