"""Prompt sets by name, for `evaluation.prompts=geneval` or `eval --prompts geneval`.

Shipped is what its licence allows and could be had whole. The others are loaded from where their authors or the hub keep them, and
a copy is kept; without a network or a copy, give a local file of the same columns.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptSource:
    """Where a prompt set is, and what it is.

    Attributes:
        source: what `load_prompts` takes: a shipped file, a hub data set or an address.
        about: how many prompts, their source, and the licence.
    """

    source: str
    about: str


PROMPT_SETS = {
    "ocr": PromptSource("prompts/signs_eval.txt", "256 signs for the embedded model; ours, Apache-2.0"),
    "ocr_test": PromptSource("prompts/ocr_test.txt", "512 scenes with a text in quotes; ours, Apache-2.0"),
    "ocr_paper": PromptSource(
        "https://raw.githubusercontent.com/yifan123/flow_grpo/main/dataset/ocr/test.txt",
        "the OCR test prompts of Flow-GRPO (arXiv 2505.05470); github.com/yifan123/flow_grpo, MIT",
    ),
    "geneval": PromptSource(
        "prompts/geneval.jsonl",
        "GenEval's 553 prompts in six tasks (arXiv 2310.11513); github.com/djghosh13/geneval, MIT",
    ),
    "partiprompts": PromptSource(
        "nateraw/parti-prompts",
        "PartiPrompts, 1632 prompts by category and challenge (arXiv 2206.10789); github.com/google-research/parti, Apache-2.0",
    ),
    "drawbench": PromptSource(
        "sayakpaul/drawbench",
        "DrawBench, 200 prompts in eleven categories (arXiv 2205.11487); its authors name no licence, so that it is not shipped",
    ),
}


def source_of(name: str) -> str:
    """Where the set of that name is, in capitals or not; a name that stands for no set is returned as it is."""
    known = PROMPT_SETS.get(name.lower())
    return name if known is None else known.source


def sentence() -> str:
    """The names, for an error."""
    return ", ".join(PROMPT_SETS)
