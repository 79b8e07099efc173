"""What a finished run prints: its scores before and after, where its weights are, and the command that tries them."""

import shlex
from pathlib import Path

from flow_grpo.run_folder import layout
from flow_grpo.run_folder.metrics_file import metric_name
from flow_grpo.run_folder.reader import RunReader, value_of
from flow_grpo.text import number, short_name

MAX_PROMPT = 120  # characters of a prompt that a command is printed with


def shown_scores(run: RunReader) -> list[dict[str, float]]:
    """The held-out scores of each evaluation, without the sum of rewards where it is a single reward, which is there by its name."""
    rows = [{key[5:]: value for key, value in row.items() if key.startswith("eval/")} for row in run.evaluation_rows]
    has_sum = "reward" in run.score_names
    return [{name: value for name, value in row.items() if has_sum or metric_name(name) != "reward"} for row in rows]


def weights_lines(run: RunReader, trained: Path) -> list[str]:
    """The folder of the last weights, and that of the best evaluation if it is another one, each with its step and score."""
    kind, last = (
        "transformer" if trained.is_dir() else "LoRA",
        run.evaluation_rows[-1]["step"] if run.evaluation_rows else None,
    )
    lines = [f"{kind}: {trained}{_score(run, last)}"]
    best = run.folder / layout.BEST
    if run.best_step is not None and run.best_step != last and best.is_dir():
        lines.append(f"{kind} of the best evaluation: {best}{_score(run, run.best_step)}")
    return lines


def _score(run: RunReader, step: int | None) -> str:
    """The step and the held-out score of weights, in brackets; "" without evaluations."""
    metric = run.main_metric
    scores = [row[f"eval/{metric}"] for row in run.evaluation_rows if row["step"] == step and f"eval/{metric}" in row]
    return f" (step {step}, {short_name(metric)} {number(scores[-1])})" if scores else ""


def next_command(run: RunReader) -> str | None:
    """A command that generates images of one of the run's prompts with its weights; None without a short prompt of text alone.

    The prompt is the one whose held-out reward has risen most.
    """
    if not run.evaluations:
        return None
    first, last = run.evaluations[0], run.evaluations[-1]
    sources = last.get("sources") or [None] * len(last["prompts"])
    texts = [
        i
        for i, prompt in enumerate(last["prompts"])
        if len(prompt) <= MAX_PROMPT and prompt.isprintable() and not sources[i]
    ]
    if not texts:
        return None
    best = max(texts, key=lambda i: value_of(last, "reward", i) - value_of(first, "reward", i))
    return shlex.join(["flow-grpo", "sample", last["prompts"][best], "--lora", str(run.folder)])
