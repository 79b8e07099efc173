"""A scorecard on the console, and as eval.json, eval.md and eval.csv."""

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
from flow_grpo.evaluation.significance import Estimate
from flow_grpo.text import counted, escape_formula, escape_markdown, markdown_table, number, short_name, visible

JSON, CSV, MARKDOWN = "eval.json", "eval.csv", "eval.md"
PROMPTS = 100  # of the Markdown table, those that differ most
FEW = 10  # prompts, of which a bootstrap says too little
NAME, WIDE, BESIDE = 24, 17, 3  # characters of a name and of a number, and targets beside each other, on the console
OVERALL = "mean of categories"


def show(console: Console, card: Scorecard) -> None:
    """Every measure of every target on 80 columns: the mean, the difference with a mark where it is significant, and its p."""
    table = Table(title=title(card), title_justify="left", box=None, padding=(0, 1), show_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=NAME)
    headings = ("mean", "difference", "p") if card.tests else ("mean",)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for measure in card.measures:
        table.add_row(Text(visible(short_name(measure)), style="bold"))
        for name, *numbers in _lines(card, measure):
            table.add_row(Text("  " + visible(name)), *numbers[: len(headings)])
    console.print(table)
    for column in card.categories:
        _show_categories(console, card, column)
    for line in notes(card):
        console.print(Text(visible(line)))


def write(folder: Path, card: Scorecard, settings: dict[str, Any]) -> None:
    """Writes eval.json, eval.md and eval.csv; `settings` are noted in the first."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(as_json(card, settings), indent=2, allow_nan=False)
    (folder / JSON).write_text(content + "\n", encoding="utf-8")
    (folder / MARKDOWN).write_text(as_markdown(card), encoding="utf-8")
    (folder / CSV).write_text(as_csv(card), encoding="utf-8", newline="")


def title(card: Scorecard) -> str:
    counts = {len(set(target.rows.prompts)) for target in card.measured}
    pictures = {len(target.rows) for target in card.measured}
    return f"{_span(counts, 'prompt')}, {_span(pictures, 'picture')} of each target"


def notes(card: Scorecard) -> list[str]:
    """What the numbers mean, and what each target is and is compared with."""
    lines = [f"{target.name}: {target.what}" for target in card.measured]
    lines += [f"{name} against {card.against[name]}: {how}" for name, how in card.pairing.items()]
    fewest = min((mean.prompts for found in card.means.values() for mean in found.values()), default=0)
    few = f" It is too narrow for so few as {fewest}." if fewest < FEW else ""
    lines.append(f"± is half of a {significance.LEVEL:.0%} interval, a bootstrap over prompts.{few}")
    if card.tests:
        lines.append(f"* p < {1 - significance.LEVEL:.2g} in a permutation test, adjusted for {card.tests} tests by Holm.")
    return lines


def as_json(card: Scorecard, settings: dict[str, Any]) -> dict[str, Any]:
    """All of it but single pictures; a number that is not there is null."""
    targets = {}
    for target in card.measured:
        means = {
            m: {**_numbers(v.estimate), "prompts": v.prompts, "pictures": v.pictures}
            for m, v in card.means[target.name].items()
        }
        found: dict[str, Any] = {"what": target.what, "measures": means}
        if target.name in card.against:
            changes = {
                m: {
                    **_numbers(c.difference),
                    "p": c.p,
                    "p_adjusted": c.adjusted,
                    "paired_prompts": c.prompts,
                    "pairs": c.pairs,
                }
                for m, c in card.changes[target.name].items()
            }
            found |= {"against": card.against[target.name], "pairing": card.pairing[target.name], "differences": changes}
        targets[target.name] = found
    categories = {
        column: {c: {t: {m: _numbers(e) for m, e in ms.items()} for t, ms in ts.items()} for c, ts in of.items()}
        for column, of in card.categories.items()
    }
    prompts = [
        {"prompt": prompt, "targets": {name: {m: _number(v) for m, v in values.items()} for name, values in found.items()}}
        for prompt, found in _of_prompts(card).items()
    ]
    interval = {"level": significance.LEVEL, "resamples": significance.RESAMPLES, "tests": card.tests}
    overall = {
        column: {t.name: {m: card.over_categories(column, t.name, m) for m in t.values} for t in card.measured}
        for column in card.categories
    }
    return {
        **settings,
        "interval": interval,
        "targets": targets,
        "categories": categories,
        "over_categories": overall,
        "prompts": prompts,
    }


def as_markdown(card: Scorecard) -> str:
    """Tables for people: all measures, then by category, then the prompts that differ most."""
    parts = [f"# {title(card)}", ""]
    rows = [(measure, *line) for measure in card.measures for line in _lines(card, measure)]
    parts += [_escaped_table(("measure", "target", "mean", "difference", "p"), rows)]
    parts += ["", *(f"- {escape_markdown(line)}" for line in notes(card))]
    names = [target.name for target in card.measured]
    for column in card.categories:
        parts += ["", f"## By {escape_markdown(column)}", ""]
        lines = [(measure, *line) for measure in card.measures for line in _category_lines(card, column, measure, names)]
        parts += [_escaped_table(("measure", column, *names), lines)]
    return "\n".join([*parts, *_prompt_table(card)]) + "\n"


def as_csv(card: Scorecard) -> str:
    """A line for each picture of each target, its categories and all its numbers."""
    file, columns = io.StringIO(), category_columns(card.measured)
    writer = csv.writer(file)
    writer.writerow(map(escape_formula, ("target", "picture", "prompt", "seed", *columns, *card.measures)))
    for target in card.measured:
        rows = target.rows
        for i in range(len(rows)):
            categories = [rows.metadata[i].get(column) for column in columns]
            values = [_number(target.values.get(measure, [math.nan] * len(rows))[i]) for measure in card.measures]
            texts = (target.name, rows.labels[i], rows.prompts[i], rows.seeds[i], *categories)
            writer.writerow([*map(escape_formula, texts), *values])
    return file.getvalue()


def _show_categories(console: Console, card: Scorecard, column: str) -> None:
    """The first measure by category; the files have them all."""
    measure, names = card.measures[0], [target.name for target in card.measured][:BESIDE]
    more = "" if len(card.measured) <= BESIDE else f", the first {BESIDE} targets"
    heading = f"{visible(short_name(measure))} by {visible(column)}{more}"
    table = Table(title=Text(heading), title_justify="left", box=None, padding=(0, 1), show_edge=False)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=NAME)
    for name in names:
        table.add_column(Text(visible(name)), justify="right", no_wrap=True, overflow="ellipsis", max_width=WIDE)
    for category, *cells in _category_lines(card, column, measure, names):
        table.add_row(Text(visible(category)), *cells)
    console.print(table)


def _category_lines(card: Scorecard, column: str, measure: str, names: list[str]) -> Iterable[list[str]]:
    """By category: its name and these targets' means; at the end the mean of the categories' means."""
    for category, found in card.categories[column].items():
        yield [category, *(_estimate(found.get(name, {}).get(measure)) for name in names)]
    yield [OVERALL, *(_score(card.over_categories(column, name, measure)) for name in names)]


def _lines(card: Scorecard, measure: str) -> Iterable[tuple[str, str, str, str]]:
    """By target: its name, mean, difference with its mark, and adjusted p."""
    for target in card.measured:
        mean = card.means[target.name].get(measure)
        if mean is None:
            continue
        change = card.changes.get(target.name, {}).get(measure)
        if change is None:
            yield target.name, _estimate(mean.estimate), "", ""
            continue
        mark = "*" if change.significant else " "
        p = "<0.001" if change.adjusted < 0.001 else f"{change.adjusted:.3f}"
        yield target.name, _estimate(mean.estimate), f"{_estimate(change.difference, sign=True)} {mark}", p


def _prompt_table(card: Scorecard) -> list[str]:
    """The prompts whose first measure differs most between targets, with that measure."""
    measure, names = card.measures[0], [target.name for target in card.measured]

    def spread(values: dict[str, dict[str, float]]) -> float:
        numbers = [found[measure] for found in values.values() if measure in found]
        return max(numbers) - min(numbers) if numbers else -1.0

    found = sorted(_of_prompts(card).items(), key=lambda pair: -spread(pair[1]))
    more = f", {PROMPTS} of {len(found)}; {CSV} has all" if len(found) > PROMPTS else ""
    lines = [(prompt, *(_score(of.get(name, {}).get(measure)) for name in names)) for prompt, of in found[:PROMPTS]]
    return ["", f"## {escape_markdown(measure)} by prompt{more}", "", _escaped_table(("prompt", *names), lines)]


def _of_prompts(card: Scorecard) -> dict[str, dict[str, dict[str, float]]]:
    """Means by prompt, target and measure."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for target in card.measured:
        for measure in target.values:
            for prompt, value in by_prompt(target, measure).items():
                found.setdefault(prompt, {}).setdefault(target.name, {})[measure] = value
    return found


def _escaped_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_table([*map(escape_markdown, heading)], ([*map(escape_markdown, row)] for row in rows))


def _score(value: float | None, sign: bool = False) -> str:
    return number(value, decimals=4, large=100.0, sign=sign)


def _estimate(found: Estimate | None, sign: bool = False) -> str:
    if found is None:
        return "–"
    width = "" if math.isnan(found.half) else f" ± {_score(found.half)}"
    return f"{_score(found.mean, sign)}{width}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(found: Estimate) -> dict[str, float | None]:
    return {"mean": _number(found.mean), "low": _number(found.low), "high": _number(found.high)}


def _span(counts: set[int], noun: str) -> str:
    return ("" if len(counts) == 1 else f"{min(counts)} to ") + counted(max(counts), noun)
