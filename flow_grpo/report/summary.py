"""What a run came to, in words and tables: the first sentence of the report, its evaluations, its cost, its settings."""

import math
import statistics
from typing import Any

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import flatten
from flow_grpo.config.sections import RewardConfig
from flow_grpo.evaluation.hacking import DIVERSITY, HIGH_FREQUENCY_POWER, limits
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import counted, duration, format_value, number, short_name

ERRORS = 2.0  # standard errors from which on a change is called one
LEAST = 0.06  # share of the time from which on a part of it is named
TOLD = 0.1  # share of its best value from which on a fall of the images' own metrics is mentioned
LOOKS = {"monitor/sharpness": HIGH_FREQUENCY_POWER, "monitor/diversity": DIVERSITY}
PARTS = {"rollout": "drawing", "decode": "decoding", "reward": "scoring", "update": "updating"}


def headline(run: RunReader) -> str:
    """What was trained, and what came of it."""
    steps, wanted = max([row["step"] for row in run.steps], default=0), run.config.get("steps", 0)
    names = [short_name(name) for name in run.trained]
    rewards = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "given pictures"
    done = counted(steps, "step") if steps >= wanted else f"{steps} of {counted(wanted, 'step')} so far"
    start = f"{short_name(run.config.get('model', 'A model'))} was trained on {rewards} for {done}"
    if len(run.held_out) < 2:
        return f"{start}{_in_training([row['reward'] for row in run.steps if 'reward' in row])}."
    measure = run.metrics[0]
    changed = change(run, measure)
    what = (
        "the sum of its rewards" if measure == "reward" else "it" if short_name(measure) == rewards else short_name(measure)
    )
    count = len(run.evaluations[-1]["prompts"]) if run.evaluations else None
    on = f"on {counted(count, 'held-out prompt')}" if count else "on held-out prompts"
    if changed["verb"] == "held":
        return f"{start}: {on} {what} stayed at {number(changed['last'])}."
    return f"{start}: {on} {what} {changed['verb']} from {number(changed['first'])} to {number(changed['last'])}."


def untrained_metrics(run: RunReader) -> list[dict[str, Any]]:
    """How the measures that it was not trained on changed."""
    names = [name for name in run.metrics[1:] if name not in run.trained] if len(run.held_out) > 1 else []
    return [{"name": short_name(name), **change(run, name)} for name in names]


def change(run: RunReader, measure: str) -> dict[str, Any]:
    """First and last value of a held-out measure, the difference, its standard error, and a word for it."""
    values = [row[f"eval/{measure}"] for row in run.held_out if f"eval/{measure}" in row]
    first, last = values[0], values[-1]
    error = paired_error(run, measure)
    least = ERRORS * error if error is not None else 0.01 * max(abs(first), abs(last))
    verb = "rose" if last - first > least else "fell" if first - last > least else "held"
    return {"first": first, "last": last, "by": last - first, "error": error, "verb": verb}


def paired_error(run: RunReader, measure: str) -> float | None:
    """Standard error of the change from the first to the last evaluation, from the prompts' own changes."""
    if len(run.evaluations) < 2:
        return None
    first, last = (e["values"].get(measure, []) for e in (run.evaluations[0], run.evaluations[-1]))
    found = [b - a for a, b in zip(first, last, strict=False) if math.isfinite(b - a)]
    return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None


def table(run: RunReader) -> dict[str, Any]:
    """The evaluations: a row for each, a column for each measure, and the change in the last row."""
    names = run.metrics
    looks = [key for key in LOOKS if any(key in row for row in run.held_out)]
    rows = [
        {
            "step": row["step"],
            "best": row["step"] == run.best_step,
            "values": [number(row.get(f"eval/{name}", math.nan)) for name in names]
            + [number(row.get(key), decimals=4) for key in looks],
        }
        for row in run.held_out
    ]
    changes = [change(run, name) for name in names] if len(rows) > 1 else []
    return {
        "columns": [{"name": short_name(name), "trained": name in run.trained or name == "reward"} for name in names]
        + [{"name": LOOKS[key].removesuffix(" of the images"), "trained": False} for key in looks],
        "rows": rows,
        "changes": [
            number(c["by"], sign=True) + (f" ± {number(c['error'])}" if c["error"] is not None else "") for c in changes
        ]
        + [number(_gain(run.held_out, key), decimals=4, sign=True) for key in looks if changes],
    }


def cost(run: RunReader) -> dict[str, Any]:
    """Seconds, pictures, and where the time went."""
    training, images, evaluating = run.sum_of("time/step"), run.sum_of("images"), run.sum_of("time/evaluation")
    parts = {label: run.sum_of(f"time/{key}") for key, label in PARTS.items()}
    parts["evaluating"] = evaluating
    whole = training + evaluating
    parts = {label: seconds for label, seconds in parts.items() if seconds >= LEAST * whole > 0}
    parts["the rest"] = max(0.0, whole - sum(parts.values()))
    facts = {
        "time": duration(training + evaluating),
        "steps": f"{len(run.steps):,}",
        "seconds a step": number(training / len(run.steps)) if run.steps else "–",
        "training images": f"{images:,.0f}",
        "images a second": number(images / training) if training else "–",
    }
    machine = run.machine
    if machine:
        processes = f" x {machine['processes']}" if machine.get("processes", 1) > 1 else ""
        facts["machine"] = f"{machine.get('device')}{processes}, {machine.get('cores')} cores, {machine.get('dtype')}"
        facts["software"] = f"flow-grpo {machine.get('flow_grpo')}, torch {machine.get('torch')}"
    shares = [{"name": name, "share": 100 * value / whole} for name, value in parts.items() if value > 0.001 * whole]
    return {"facts": facts, "shares": shares, "images": images, "seconds": training}


def comparison(runs: list[RunReader]) -> list[dict[str, Any]]:
    """A row for each measure and cost, with what each run has of it."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in ["reward", *run.metrics]):
        cells = []
        for run in runs:
            there = len(run.held_out) > 1 and f"eval/{name}" in run.held_out[0]
            c = change(run, name) if there else None
            cells.append({"text": f"{number(c['first'])} → {number(c['last'])}", "value": c["last"]} if c else {"text": "–"})
        if any("value" in cell for cell in cells):
            found.append({"name": "trained reward" if name == "reward" else short_name(name), "cells": cells})
    costs = [cost(run)["facts"] for run in runs]
    for label in ("steps", "time", "training images", "images a second"):
        found.append({"name": label, "cells": [{"text": facts[label]} for facts in costs]})
    return found


def settings(runs: list[RunReader]) -> list[dict[str, Any]]:
    """The settings in which a run differs from the default."""

    default = flatten(FlowGRPOConfig().model_dump(mode="json"))
    usual = RewardConfig().model_dump(mode="json")  # of a reward that the default does not have, its weight says enough
    own = [flatten(run.config) for run in runs]
    found = []
    for key in dict.fromkeys(key for settings in own for key in settings):
        values = [settings.get(key) for settings in own]
        last = key.rpartition(".")[2]
        detail = "rewards." in key and last in ("options", "on_error")
        standard = usual[last] if detail else default.get(key)
        if any(value != standard for value in values if value is not None or (key in default and not detail)):
            differ = len({str(value) for value in values}) > 1
            cells = [format_value(value) for value in values]
            found.append({"name": key, "cells": cells, "default": format_value(default.get(key)), "differ": differ})
    return found


def _gain(rows: list[dict], key: str) -> float:
    return rows[-1].get(key, math.nan) - rows[0].get(key, math.nan)


def _in_training(rewards: list[float]) -> str:
    """What the rewards of the training steps say: each step has prompts of its own, so single steps can't be compared."""
    if len(rewards) < 2:
        return f": the mean reward in training was {number(rewards[0])}" if rewards else ""
    part = max(1, len(rewards) // 4)
    first, last = statistics.fmean(rewards[:part]), statistics.fmean(rewards[-part:])
    steps = f"{part} steps" if part > 1 else "step"
    return (
        f": without held-out prompts, only the mean reward in training is known, on prompts that differ from step to step: {number(first)} "
        f"in the first {steps}, {number(last)} in the last {steps}"
    )


def monitored(run: RunReader) -> str:
    """What the monitor has to say of a run that it did not warn of."""
    if len(run.held_out) < 2:
        return ""
    said = [f"{limits()} It has not warned."]
    for key, name in LOOKS.items():
        values = [row[key] for row in run.held_out if key in row]
        if len(values) > 1 and values[-1] < (1 - TOLD) * max(values):
            said.append(f"The {name} fell by {1 - values[-1] / max(values):.0%}.")
    return " ".join(said)
