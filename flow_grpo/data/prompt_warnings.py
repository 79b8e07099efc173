"""What prompts are warned of: training prompts that are tested on, and syntax of other programs."""

import functools
import json
import re
from collections.abc import Sequence

from flow_grpo.config.loading import bundled_file
from flow_grpo.data.prompt_sources import PROMPT_SETS, source_of
from flow_grpo.image_prompt import images_of, prompt_key, with_images

ARTICLES = {"a", "an", "the"}
BUNDLED = {name: known.source for name, known in PROMPT_SETS.items() if known.source.startswith("prompts/")}
# kohya's `# comment` and `--w 512`, A1111's `--steps 20`, `<lora:name:0.8>` and `(word:1.2)`, Midjourney's `--ar 16:9`
SYNTAX = re.compile(r"^#\s|(?<!\S)--[A-Za-z][\w-]*(?=\s|=|$)|<(?:lora|lyco|hypernet):[^<>]+>|\([^()]*[^():\s\d]:\d*\.\d+\)")


def normal_form(prompt: str) -> str:
    """The same text for equivalent prompts."""
    return prompt_key(with_images(_normal_text(str(prompt)), images_of(prompt)))


@functools.lru_cache(maxsize=1 << 16)  # each prompt is compared with several sets
def _normal_text(text: str) -> str:
    words = [word for word in text.casefold().rstrip(". \n").split() if word not in ARTICLES]
    before, of, things = " ".join(words).rpartition(" of ")
    return before + of + " and ".join(sorted(things.split(" and ")))


def held_out_overlap(trained: list[str], held_out: list[str]) -> int:
    """The number of held-out prompts that are among the training prompts."""
    known = {normal_form(prompt) for prompt in trained}
    return sum(normal_form(prompt) in known for prompt in held_out)


def benchmark_overlap(trained: list[str], held_out: list[str], source: str | None = None) -> dict[str, int]:
    """For each named prompt set: how many of its prompts are trained on, not counting those that are held out too.

    Sets that are not part of the package are recognised by their name or address only.

    Args:
        source: of the training prompts, as in the config.
    """
    known = {normal_form(prompt) for prompt in trained} - {normal_form(prompt) for prompt in held_out}
    shared = {name: sum(normal_form(prompt) in known for prompt in _bundled_prompts(file)) for name, file in BUNDLED.items()}
    named = {
        name: len(trained) for name, prompt_set in PROMPT_SETS.items() if source and prompt_set.source == source_of(source)
    }
    return {name: count for name, count in {**named, **shared}.items() if count}


def _bundled_prompts(source: str) -> list[str]:
    file = bundled_file(source)
    lines = file.read_text(encoding="utf-8").splitlines()
    return lines if file.suffix == ".txt" else [json.loads(line)["prompt"] for line in lines]


def syntax_warnings(prompts: Sequence[str]) -> list[str]:
    """A sentence on prompts with marks of another program's syntax; [] if there are none."""
    found = {prompt: marks for prompt in dict.fromkeys(prompts) if (marks := SYNTAX.findall(prompt))}
    if not found:
        return []
    prompt, marks = next(iter(found.items()))
    shown = prompt if len(prompt) <= 60 else f"{prompt[:57]}..."
    return [
        f"{len(found)} of {len(set(prompts))} prompts have marks of another program's syntax, such as `{marks[0].strip()}` in "
        f"{shown!r}: comments, options and weights are words here, which the model reads like the rest. Remove them from the prompts "
        "if they are not meant so."
    ]
