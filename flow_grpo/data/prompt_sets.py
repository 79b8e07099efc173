"""Prompt sets by name, for `evaluation.prompts=geneval` or `eval --prompts geneval`.

The package contains the sets whose licence allows it. The others are downloaded from their authors or the hub and cached; without a
network and a cached copy, give a local file with the same columns.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptSource:
    """The source of a prompt set.

    Attributes:
        source: an argument of `load_prompts`: a bundled file, a hub data set or an address.
        about: number of prompts, origin and licence.
    """

    source: str
    about: str


PROMPT_SETS = {
    "ocr": PromptSource("prompts/signs_eval.txt", "256 signs for the embedded model; ours, Apache-2.0"),
    "shapes": PromptSource(
        "prompts/shapes_eval.jsonl",
        "scenes of shapes in GenEval's six tasks, for the embedded model of shapes; ours, Apache-2.0",
    ),
    "shape_edits": PromptSource("prompts/shape_edits_eval.jsonl", "72 edits of such scenes; ours, Apache-2.0"),
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
        "DrawBench, 200 prompts in eleven categories (arXiv 2205.11487); without a licence, so that the package does not contain it",
    ),
}


def source_of(name: str) -> str:
    """The source of the set of that name, in upper or lower case; other names are returned unchanged."""
    known = PROMPT_SETS.get(name.lower())
    return name if known is None else known.source


def names_of_sets() -> str:
    """All names, for an error message."""
    return ", ".join(PROMPT_SETS)
