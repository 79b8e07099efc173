"""Notices prompts written in the syntax of other programs: comments, options and weights, which are words here."""

import re
from collections.abc import Sequence

# kohya's `# comment` and `--w 512`, A1111's `--steps 20`, `<lora:name:0.8>` and `(word:1.2)`, Midjourney's `--ar 16:9`
SYNTAX = re.compile(r"^#\s|(?<!\S)--[A-Za-z][\w-]*(?=\s|=|$)|<(?:lora|lyco|hypernet):[^<>]+>|\([^()]*[^():\s\d]:\d*\.\d+\)")


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
