"""The results of a run in words and tables: the headline of the report, evaluations, cost, settings."""

import math
import statistics
from typing import Any

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import flatten
from flow_grpo.config.sections import RewardConfig
from flow_grpo.evaluation import hacking
from flow_grpo.evaluation.hacking import DIVERSITY, HIGH_FREQUENCY_POWER, IMAGE_DROPS, limits, of_images
from flow_grpo.evaluation.significance import paired_difference
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import counted, duration, format_value, number, short_name

MIN_ERRORS = 2.0  # standard errors of a change that counts as a rise or fall
MIN_SHARE = 0.09  # of the time that a phase must take to be named in the bar, where smaller parts have no room for a name
MIN_DROP = 0.1  # share of its best value by which an image metric must fall to be mentioned
IMAGE_METRICS = {"monitor/high_frequency_power": HIGH_FREQUENCY_POWER, "monitor/diversity": DIVERSITY}
PHASES = {
    "encode": "encoding texts",
    "rollout": "sampling",
    "decode": "decoding",
    "reward": "scoring",
    "wait": "waiting for processes",
    "forward": "losses",
    "backward": "backward passes",
    "optimizer": "optimizer",
}


def headline(run: RunReader) -> str:
    """A sentence on what was trained, and with which result."""
    names = [short_name(name) for name in run.trained]
    rewards = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "given images"
    start = f"{short_name(run.config.get('model', 'A model'))} was trained on {rewards} for {_progress(run)}"
    if reason := run.nothing_learned:
        return f"{start}, but nothing was learned: {reason}."
    if len(run.evaluation_rows) < 2:
        return f"{start}{_in_training(run)}."
    metric = run.score_names[0]
    changed = change(run, metric)
    what = "the sum of its rewards" if metric == "reward" else "it" if short_name(metric) == rewards else short_name(metric)
    count = len(run.evaluations[-1]["prompts"]) if run.evaluations else None
    on = f"on {counted(count, 'held-out prompt')}" if count else "on held-out prompts"
    before, after = number(changed["first"]), number(changed["last"])
    if changed["verb"] != "held":
        result = f"{changed['verb']} by {number(abs(changed['by']))}, from {before} to {after}"
    elif before == after:
        result = f"stayed at {after}"
    else:
        result = f"stayed the same within the error, {before} before and {after} after"
    return f"{start}: {on} {what} {result}.{_hacking(run)}"


def _hacking(run: RunReader) -> str:
    """The monitor's findings at the last evaluation, after a space; "" if there are none."""
    drops = hacking.detect_drops(hacking.read_history(run.evaluations)) if len(run.evaluations) > 1 else {}
    sentences = [
        f" Possible reward hacking: {short_name(name)} fell by {drop.share:.0%} after step {drop.since} while "
        f"{short_name(drop.risen)} rose."
        for name, drop in drops.items()
    ]
    return "".join(sentences)


def _progress(run: RunReader) -> str:
    """The number of steps. A run that a callback has ended is finished before its last step; others can be continued."""
    steps, wanted = max([row["step"] for row in run.step_rows], default=0), run.num_steps
    if steps >= wanted:
        return counted(steps, "step")
    has_ended = layout.trained_weights(run.folder) is not None
    return f"{steps} of {wanted} planned steps" if has_ended else f"{steps} of {counted(wanted, 'step')} so far"


def untrained_metrics(run: RunReader) -> list[dict[str, Any]]:
    """The changes of the rewards that the run was not trained on."""
    names = [n for n in run.score_names[1:] if n not in ("reward", *run.trained)] if len(run.evaluation_rows) > 1 else []
    return [{"name": short_name(name), **change(run, name)} for name in names]


def change(run: RunReader, metric: str) -> dict[str, Any]:
    """The first and last value of a held-out score, the difference, its standard error, and a verb for it.

    A change below the shown precision counts as none.
    """
    values = [row[f"eval/{metric}"] for row in run.evaluation_rows if f"eval/{metric}" in row]
    first, last = values[0], values[-1]
    error = paired_error(run, metric)
    threshold = MIN_ERRORS * error if error is not None else 0.01 * max(abs(first), abs(last))
    threshold = math.inf if number(first) == number(last) else threshold
    verb = "rose" if last - first > threshold else "fell" if first - last > threshold else "held"
    return {"first": first, "last": last, "by": last - first, "error": error, "verb": verb}


def paired_error(run: RunReader, metric: str) -> float | None:
    """The standard error of the change from the first to the last evaluation; None if the prompts are too few for one."""
    if len(run.evaluations) < 2:
        return None
    first, last = (e["values"].get(metric, []) for e in (run.evaluations[0], run.evaluations[-1]))
    _, error = paired_difference(last, first)
    return error if math.isfinite(error) else None


def table(run: RunReader) -> dict[str, Any]:
    """The evaluations: a row for each, a column for each metric, and the change in the last row."""
    names = run.score_names
    image_metrics = [key for key in IMAGE_METRICS if any(key in row for row in run.evaluation_rows)]
    rows = [
        {
            "step": row["step"],
            "best": row["step"] == run.best_step,
            "values": [number(row.get(f"eval/{name}", math.nan)) for name in names]
            + [number(row.get(key), decimals=4) for key in image_metrics],
        }
        for row in run.evaluation_rows
    ]
    changes = [change(run, name) for name in names] if len(rows) > 1 else []
    return {
        "columns": [{"name": short_name(name), "trained": name in ("reward", *run.trained)} for name in names]
        + [{"name": IMAGE_METRICS[key], "trained": False} for key in image_metrics],
        "rows": rows,
        "changes": [change_text(c) for c in changes]
        + [number(_gain(run.evaluation_rows, key), decimals=4, sign=True) for key in image_metrics if changes],
    }


def change_text(changed: dict[str, Any]) -> str:
    """A `change` with its standard error, if that is known."""
    error = "" if changed["error"] is None else f" ± {number(changed['error'])}"
    return number(changed["by"], sign=True) + error


def cost(run: RunReader) -> dict[str, Any]:
    """Time, images, machine, and the share of each phase in the time."""
    training, images, evaluating = run.sum_of("time/step"), run.sum_of("images"), run.sum_of("time/evaluation")
    phases = {label: run.sum_of(f"time/{key}") for key, label in PHASES.items()}
    phases["evaluating"] = evaluating
    total = training + evaluating
    phases = {label: seconds for label, seconds in phases.items() if seconds >= MIN_SHARE * total > 0}
    phases["other"] = max(0.0, total - sum(phases.values()))
    facts = {
        "time": duration(training + evaluating),
        "steps": f"{len(run.step_rows):,}",
        "seconds a step": number(training / len(run.step_rows)) if run.step_rows else "–",
        "training images": f"{images:,.0f}",
        "images a second": number(images / training) if training else "–",
    }
    flops = run.sum_of("speed/tflop")
    if flops and training:
        facts["TFLOP a step"] = number(flops / len(run.step_rows))
        facts["TFLOP/s"] = number(flops / training)
    shares_of_peak = [row["speed/mfu"] for row in run.step_rows if "speed/mfu" in row]
    if shares_of_peak:
        facts["MFU"] = f"{100 * statistics.fmean(shares_of_peak):.0f} % of this device's measured speed"
    peaks = [row["memory/peak_gb"] for row in run.step_rows if "memory/peak_gb" in row]
    if peaks:
        facts["peak memory"] = f"{number(max(peaks))} GB"
    machine = run.machine
    if machine:
        processes = f" x {machine['processes']}" if machine.get("processes", 1) > 1 else ""
        facts["machine"] = f"{machine.get('device')}{processes}, {machine.get('cores')} cores, {machine.get('dtype')}"
        facts["software"] = f"flow-grpo {machine.get('flow_grpo')}, torch {machine.get('torch')}"
    shares = [{"name": name, "share": 100 * value / total} for name, value in phases.items() if value > 0.001 * total]
    return {"facts": facts, "shares": shares, "images": images, "seconds": training}


def comparison(runs: list[RunReader]) -> list[dict[str, Any]]:
    """A row for each metric and cost, with what each run has of it."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in ["reward", *run.score_names]):
        cells = []
        for run in runs:
            is_measured = len(run.evaluation_rows) > 1 and f"eval/{name}" in run.evaluation_rows[0]
            c = change(run, name) if is_measured else None
            cells.append({"text": f"{number(c['first'])} → {number(c['last'])}", "value": c["last"]} if c else {"text": "–"})
        if any("value" in cell for cell in cells):
            rows.append({"name": "trained reward" if name == "reward" else short_name(name), "cells": cells})
    costs = [cost(run)["facts"] for run in runs]
    for label in ("steps", "time", "training images", "images a second"):
        rows.append({"name": label, "cells": [{"text": facts[label]} for facts in costs]})
    return rows


def settings(runs: list[RunReader]) -> list[dict[str, Any]]:
    """The settings in which a run differs from the default."""
    default = flatten(FlowGRPOConfig().model_dump(mode="json"))
    reward = RewardConfig().model_dump(mode="json")  # a reward that is not in the default is shown by its weight alone
    configs = [_current_config(run) for run in runs]
    for config in configs:
        own = type(config.objective).model_construct() if isinstance(config, FlowGRPOConfig) else None
        default = {**flatten({"objective": own.model_dump(mode="json")} if own else {}), **default}
    flat = [flatten(c.model_dump(mode="json") if isinstance(c, FlowGRPOConfig) else c) for c in configs]
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key) for settings in flat]
        last = key.rpartition(".")[2]
        detail = "rewards." in key and last in reward and last != "weight"
        standard = reward[last] if detail else default.get(key)
        if any(value != standard for value in values if value is not None or (key in default and not detail)):
            differ = len({str(value) for value in values}) > 1
            cells = [format_value(value) for value in values]
            rows.append({"name": key, "cells": cells, "default": format_value(standard), "differ": differ})
    return rows


def _current_config(run: RunReader) -> FlowGRPOConfig | dict[str, Any]:
    """A run's config as this version reads it, with the fields of this version; as it was written if it can't be read."""
    try:
        return FlowGRPOConfig(**run.config)
    except (ValueError, TypeError):
        return run.config


def _gain(rows: list[dict], key: str) -> float:
    return rows[-1].get(key, math.nan) - rows[0].get(key, math.nan)


def _in_training(run: RunReader) -> str:
    """The rewards of the first and last training steps. Each step has other prompts, so single steps can't be compared."""
    rewards = [row["reward"] for row in run.step_rows if "reward" in row]
    if len(rewards) < 2:
        return f": the mean reward in training was {number(rewards[0])}" if rewards else ""
    part = max(1, len(rewards) // 4)
    first, last = statistics.fmean(rewards[:part]), statistics.fmean(rewards[-part:])
    steps = f"{part} steps" if part > 1 else "step"
    reason = "with a single evaluation" if run.evaluation_rows else "without held-out prompts"
    return (
        f": {reason}, only the mean reward in training is known, on prompts that differ from step to step: "
        f"{number(first)} in the first {steps}, {number(last)} in the last {steps}"
    )


def monitor_status(run: RunReader) -> str:
    """The metrics that the monitor watches, and drops of image metrics that were too small for a warning."""
    if len(run.evaluation_rows) < 2:
        return ""
    sentences = [f"{limits()} It has not warned."]
    for key, name in IMAGE_METRICS.items():
        values = [row[key] for row in run.evaluation_rows if key in row]
        if len(values) > 1 and values[-1] < (1 - MIN_DROP) * max(values):
            fall = 1 - values[-1] / max(values)
            sentences.append(f"The {of_images(name)} fell by {fall:.0%}; the monitor warns from {IMAGE_DROPS[name]:.0%} on.")
    return " ".join(sentences)
