"""Writes a scorecard to the console and to eval.json, eval.md and eval.csv."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flow_grpo.evaluation import significance
from flow_grpo.evaluation.scorecard import Scorecard, by_prompt, category_columns
from flow_grpo.evaluation.significance import MIN_PROMPTS_FOR_ERROR as MIN_PROMPTS
from flow_grpo.evaluation.significance import Estimate
from flow_grpo.files import new_files
from flow_grpo.text import counted, escape_formula, escape_markdown, markdown_table, number, short_name, visible

JSON, CSV, MARKDOWN = "eval.json", "eval.csv", "eval.md"
MAX_PROMPT_ROWS = 100  # in the Markdown table: the prompts that differ most
MAX_COLUMNS = 3  # targets side by side on the console
NAME_WIDTH, COLUMN_WIDTH = 24, 17  # characters on the console
OVERALL = "mean of categories"


def show(console: Console, scorecard: Scorecard) -> None:
    """Print every metric of every target in 80 columns: mean, difference (marked if significant) and p-value."""
    table = Table(title=title(scorecard), title_justify="left", box=None, padding=(0, 1), show_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH)
    headings = ("mean", "difference", "p") if scorecard.num_tests else ("mean",)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for metric in scorecard.metrics:
        table.add_row(Text(visible(short_name(metric)), style="bold"))
        for name, *numbers in _lines(scorecard, metric):
            table.add_row(Text("  " + visible(name)), *numbers[: len(headings)])
    console.print(table)
    for column in scorecard.categories:
        _show_categories(console, scorecard, column)
    for line in notes(scorecard):
        console.print(Text(visible(line)))


def write(folder: Path, scorecard: Scorecard, settings: dict[str, Any]) -> None:
    """Write eval.json, eval.md and eval.csv.

    Args:
        settings: also go to eval.json: the prompt set, seeds and steps.
    """
    content = json.dumps(as_json(scorecard, settings), indent=2, allow_nan=False)
    files = {JSON: content + "\n", MARKDOWN: as_markdown(scorecard), CSV: as_csv(scorecard)}
    with new_files(folder, "eval", files) as new_folder:
        for name, text in files.items():
            (new_folder / name).write_bytes(text.encode())


def title(scorecard: Scorecard) -> str:
    """The number of prompts and images, as the tables' title."""
    counts = {len(set(target.rows.prompts)) for target in scorecard.results}
    images = {len(target.rows) for target in scorecard.results}
    return f"{_span(counts, 'prompt')}, {_span(images, 'image')} of each target"


def notes(scorecard: Scorecard) -> list[str]:
    """Footnotes: what each target is, what it is compared with, and what the numbers mean."""
    lines = [f"{target.name}: {target.description}" for target in scorecard.results]
    lines += [f"{name} against {scorecard.against[name]}: {pairing}" for name, pairing in scorecard.pairing.items()]
    fewest = min((mean.prompts for means in scorecard.means.values() for mean in means.values()), default=0)
    few = f" Fewer than {MIN_PROMPTS} prompts have none." if fewest < MIN_PROMPTS else ""
    lines.append(f"± is half of a {significance.LEVEL:.0%} interval over prompts.{few}")
    if scorecard.num_tests:
        lines.append(f"* p < {1 - significance.LEVEL:.2g}, adjusted for {scorecard.num_tests} tests by Holm.")
    return lines


def as_json(scorecard: Scorecard, settings: dict[str, Any]) -> dict[str, Any]:
    """The content of eval.json: `settings`, and everything except single images; a missing number is null."""
    targets = {}
    for target in scorecard.results:
        means = {
            m: {**_numbers(v.estimate), "prompts": v.prompts, "pictures": v.images}
            for m, v in scorecard.means[target.name].items()
        }
        entry: dict[str, Any] = {"what": target.description, "measures": means}
        if target.name in scorecard.against:
            changes = {
                m: {
                    **_numbers(c.difference),
                    "p": c.p,
                    "p_adjusted": c.p_adjusted,
                    "paired_prompts": c.prompts,
                    "pairs": c.pairs,
                }
                for m, c in scorecard.changes[target.name].items()
            }
            entry |= {
                "against": scorecard.against[target.name],
                "pairing": scorecard.pairing[target.name],
                "differences": changes,
            }
        targets[target.name] = entry
    categories = {
        column: {c: {t: {m: _numbers(e) for m, e in ms.items()} for t, ms in ts.items()} for c, ts in cs.items()}
        for column, cs in scorecard.categories.items()
    }
    prompts = [
        {
            "prompt": prompt,
            "targets": {name: {m: _number(v) for m, v in values.items()} for name, values in by_target.items()},
        }
        for prompt, by_target in _of_prompts(scorecard).items()
    ]
    interval = {"level": significance.LEVEL, "resamples": significance.RESAMPLES, "tests": scorecard.num_tests}
    overall = {
        column: {
            t.name: {m: None if (e := scorecard.macro_average(column, t.name, m)) is None else _numbers(e) for m in t.values}
            for t in scorecard.results
        }
        for column in scorecard.categories
    }
    content = {
        "interval": interval,
        "targets": targets,
        "categories": categories,
        "over_categories": overall,
        "prompts": prompts,
    }
    assert not settings.keys() & content.keys()
    return {**settings, **content}


def as_markdown(scorecard: Scorecard) -> str:
    """Tables of all metrics, of metrics by category, and of the prompts that differ most."""
    parts = [f"# {title(scorecard)}", ""]
    rows = [(metric, *line) for metric in scorecard.metrics for line in _lines(scorecard, metric)]
    parts += [_escaped_table(("measure", "target", "mean", "difference", "p"), rows)]
    parts += ["", *(f"- {escape_markdown(line)}" for line in notes(scorecard))]
    names = [target.name for target in scorecard.results]
    for column in scorecard.categories:
        parts += ["", f"## By {escape_markdown(column)}", ""]
        lines = [
            (metric, *line) for metric in scorecard.metrics for line in _category_lines(scorecard, column, metric, names)
        ]
        parts += [_escaped_table(("measure", column, *names), lines)]
    return "\n".join([*parts, *_prompt_table(scorecard)]) + "\n"


def as_csv(scorecard: Scorecard) -> str:
    """A row for each image of each target, with its categories and metrics."""
    file, columns = io.StringIO(), category_columns(scorecard.results)
    writer = csv.writer(file)
    writer.writerow(map(escape_formula, ("target", "picture", "prompt", "seed", *columns, *scorecard.metrics)))
    for target in scorecard.results:
        rows = target.rows
        for i in range(len(rows)):
            categories = [rows.metadata[i].get(column) for column in columns]
            values = [_number(target.values.get(metric, [math.nan] * len(rows))[i]) for metric in scorecard.metrics]
            texts = (target.name, rows.labels[i], rows.prompts[i], rows.seeds[i], *categories)
            writer.writerow([*map(escape_formula, texts), *values])
    return file.getvalue()


def _show_categories(console: Console, scorecard: Scorecard, column: str) -> None:
    """Print the first metric by category; the files have all metrics."""
    metric, names = scorecard.metrics[0], [target.name for target in scorecard.results][:MAX_COLUMNS]
    more = "" if len(scorecard.results) <= MAX_COLUMNS else f", the first {MAX_COLUMNS} targets"
    heading = f"{visible(short_name(metric))} by {visible(column)}{more}"
    table = Table(title=Text(heading), title_justify="left", box=None, padding=(0, 1), show_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH)
    for name in names:
        table.add_column(Text(visible(name)), justify="right", no_wrap=True, overflow="ellipsis", max_width=COLUMN_WIDTH)
    for category, *cells in _category_lines(scorecard, column, metric, names):
        table.add_row(Text(visible(category)), *cells)
    console.print(table)


def _category_lines(scorecard: Scorecard, column: str, metric: str, names: list[str]) -> Iterable[list[str]]:
    """For each category its name and the targets' means; last, the mean of the categories' means."""
    for category, estimates in scorecard.categories[column].items():
        yield [category, *(_estimate(estimates.get(name, {}).get(metric)) for name in names)]
    yield [OVERALL, *(_estimate(scorecard.macro_average(column, name, metric)) for name in names)]


def _lines(scorecard: Scorecard, metric: str) -> Iterable[tuple[str, str, str, str]]:
    """For each target its name, mean, difference with its mark, and adjusted p-value."""
    for target in scorecard.results:
        mean = scorecard.means[target.name].get(metric)
        if mean is None:
            continue
        change = scorecard.changes.get(target.name, {}).get(metric)
        if change is None:
            yield target.name, _estimate(mean.estimate), "", ""
            continue
        mark = "*" if change.significant else " "
        p = "<0.001" if change.p_adjusted < 0.001 else f"{change.p_adjusted:.3f}"
        yield target.name, _estimate(mean.estimate), f"{_estimate(change.difference, sign=True)} {mark}", p


def _prompt_table(scorecard: Scorecard) -> list[str]:
    """A table of the prompts whose first metric differs most between targets, with that metric."""
    metric, names = scorecard.metrics[0], [target.name for target in scorecard.results]

    def largest_difference(values: dict[str, dict[str, float]]) -> float:
        numbers = [means[metric] for means in values.values() if metric in means]
        return max(numbers) - min(numbers) if numbers else -1.0

    prompts = sorted(_of_prompts(scorecard).items(), key=lambda pair: -largest_difference(pair[1]))
    more = f", {MAX_PROMPT_ROWS} of {len(prompts)}; {CSV} has all" if len(prompts) > MAX_PROMPT_ROWS else ""
    lines = [
        (prompt, *(_score(by_target.get(name, {}).get(metric)) for name in names))
        for prompt, by_target in prompts[:MAX_PROMPT_ROWS]
    ]
    return ["", f"## {escape_markdown(metric)} by prompt{more}", "", _escaped_table(("prompt", *names), lines)]


def _of_prompts(scorecard: Scorecard) -> dict[str, dict[str, dict[str, float]]]:
    """Means by prompt, target and metric."""
    means: dict[str, dict[str, dict[str, float]]] = {}
    for target in scorecard.results:
        for metric in target.values:
            for prompt, value in by_prompt(target, metric).items():
                means.setdefault(prompt, {}).setdefault(target.name, {})[metric] = value
    return means


def _escaped_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_table([*map(escape_markdown, heading)], ([*map(escape_markdown, row)] for row in rows))


def _score(value: float | None, sign: bool = False) -> str:
    return number(value, decimals=4, large=100.0, sign=sign)


def _estimate(estimate: Estimate | None, sign: bool = False) -> str:
    if estimate is None:
        return "–"
    width = "" if math.isnan(estimate.half) else f" ± {_score(estimate.half)}"
    return f"{_score(estimate.mean, sign)}{width}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(estimate: Estimate) -> dict[str, float | None]:
    return {"mean": _number(estimate.mean), "low": _number(estimate.low), "high": _number(estimate.high)}


def _span(counts: set[int], noun: str) -> str:
    return ("" if len(counts) == 1 else f"{min(counts)} to ") + counted(max(counts), noun)
