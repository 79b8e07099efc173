"""A scorecard of measured targets, as tables: means, differences from the target each is compared with, by category and by prompt."""

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flow_grpo.data.image_sets import ImageRecords
from flow_grpo.evaluation import significance
from flow_grpo.evaluation.image_metrics import BASE_DISTANCE
from flow_grpo.evaluation.significance import MIN_PROMPTS_FOR_INTERVAL, Estimate
from flow_grpo.files import new_files
from flow_grpo.text import counted, escape_formula, escape_markdown, markdown_table, number, short_name, visible

MAX_P = 1 - significance.LEVEL  # of a significant difference
CATEGORY_COLUMNS = ("category", "challenge", "tag")  # columns of prompt sets that are categories, in upper or lower case
MAX_CATEGORIES = 40  # a column with more values is not a category
JSON, CSV, MARKDOWN = "eval.json", "eval.csv", "eval.md"
MAX_PROMPT_ROWS = 100  # in the Markdown table: the prompts that differ most
MAX_COLUMNS = 2  # targets side by side on the console
NAME_WIDTH, COLUMN_WIDTH = 20, 26  # characters on the console
OVERALL = "mean of categories"


@dataclass(frozen=True)
class TargetResult:
    """A target's B values by metric. NaN where a metric is undefined for an image, as diversity is for a single image of a prompt."""

    name: str
    description: str
    rows: ImageRecords
    values: dict[str, list[float]]


@dataclass(frozen=True)
class MetricMean:
    """A metric of a target: the mean over prompts of each prompt's mean."""

    estimate: Estimate
    prompts: int
    images: int


@dataclass(frozen=True)
class MetricChange:
    """How a metric of a target differs from that of the target it is compared with."""

    difference: Estimate
    p: float
    p_adjusted: float  # for all tests of the scorecard, by Holm
    prompts: int  # paired
    pairs: int  # of images with the same prompt and seed, or 0

    @property
    def significant(self) -> bool:
        """Whether the change is significant after correction for the number of tests."""
        return self.p_adjusted < MAX_P


@dataclass(frozen=True)
class Scorecard:
    """The results of several targets.

    Attributes:
        against: by target, the name of the one it is compared with; the first is not compared.
        means, changes: by target and metric.
        pairing: by target, a description of how its prompts were paired for the tests.
        categories: by column, category, target and metric.
    """

    results: list[TargetResult]
    against: dict[str, str]
    means: dict[str, dict[str, MetricMean]]
    changes: dict[str, dict[str, MetricChange]]
    pairing: dict[str, str]
    categories: dict[str, dict[str, dict[str, dict[str, Estimate]]]]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics, in the order of the table."""
        return list(dict.fromkeys(name for means in self.means.values() for name in means))

    @property
    def num_tests(self) -> int:
        """Number of tests that the p values are corrected for."""
        return sum(len(changes) for changes in self.changes.values())

    def macro_average(self, column: str, target: str, metric: str) -> Estimate | None:
        """The mean of the categories' means, whatever their numbers of prompts: GenEval's overall score.

        Its interval takes categories as independent, as they are if no prompt is in two of them.
        """
        estimates = [
            by_target[target][metric]
            for by_target in self.categories[column].values()
            if metric in by_target.get(target, {})
        ]
        return significance.mean_of_independent(estimates) if estimates else None


def build_scorecard(results: list[TargetResult], against: dict[str, str]) -> Scorecard:
    """Compare the results of targets; `against` has for each target the name of the one it is compared with."""
    by_name = {target.name: target for target in results}
    assert len(by_name) == len(results), "two targets of one name"
    means = {target.name: {name: _mean(target, name) for name in target.values} for target in results}
    changes, pairing = {}, {}
    for name, other_name in against.items():
        target, other = by_name[name], by_name[other_name]
        shared, pairing[name] = _pairing(target, other)
        common = [m for m in target.values if m in other.values and m != BASE_DISTANCE]
        compared = {m: _change(target, other, m, shared) for m in common}
        changes[name] = {m: change for m, change in compared.items() if change is not None}
    categories = {column: _by_category(results, column) for column in category_columns(results)}
    return Scorecard(results, against, means, changes=_adjusted(changes), pairing=pairing, categories=categories)


def by_prompt(target: TargetResult, metric: str, rows: Iterable[int] | None = None) -> dict[str, float]:
    """The mean over each prompt's images, of these rows or of all; prompts without a finite value are left out."""
    finite: dict[str, list[float]] = {}
    values = target.values[metric]
    for row in range(len(values)) if rows is None else rows:
        if math.isfinite(values[row]):
            finite.setdefault(target.rows.prompts[row], []).append(values[row])
    return {prompt: statistics.fmean(numbers) for prompt, numbers in finite.items()}


def category_columns(results: list[TargetResult]) -> list[str]:
    """The metadata columns that divide prompts into a few categories."""
    categories: dict[str, set] = {}
    cells = (cell for target in results for row in target.rows.metadata for cell in row.items())
    for column, value in cells:
        if column.lower() in CATEGORY_COLUMNS and isinstance(value, str):
            categories.setdefault(column, set()).add(value)
    return [column for column, values in categories.items() if 1 < len(values) <= MAX_CATEGORIES]


def _mean(target: TargetResult, metric: str) -> MetricMean:
    of_prompts = by_prompt(target, metric)
    images = sum(math.isfinite(value) for value in target.values[metric])
    return MetricMean(_estimate(metric, [*of_prompts.values()]), len(of_prompts), images)


def _estimate(metric: str, of_prompts: list[float]) -> Estimate:
    if metric == BASE_DISTANCE and not any(of_prompts):  # the base model's distance from itself, which is no share
        return Estimate(0.0, math.nan, math.nan)
    return significance.estimate(of_prompts)


def _keys(target: TargetResult) -> dict[tuple[str, int | None], int]:
    """The row of each prompt and seed."""
    return {key: row for row, key in enumerate(zip(target.rows.prompts, target.rows.seeds, strict=True))}


class PairedRows(NamedTuple):
    """The rows of a target and of the other one that are compared prompt by prompt or, `by_seed`, row by row."""

    rows: list[int]
    other_rows: list[int]
    by_seed: bool


def _pairing(target: TargetResult, other: TargetResult) -> tuple[PairedRows, str]:
    """The paired rows of two targets, none if they share no prompt, and a description of the pairing."""
    rows_by_key, other_rows_by_key = _keys(target), _keys(other)
    both = [key for key in rows_by_key if key in other_rows_by_key and key[1] is not None]
    if both:
        rows = [rows_by_key[key] for key in both], [other_rows_by_key[key] for key in both]
        prompts = counted(len({prompt for prompt, _ in both}), "prompt")
        return PairedRows(rows[0], rows[1], True), f"{prompts}, {counted(len(both), 'pair')} of one prompt and seed"
    shared = set(target.rows.prompts) & set(other.rows.prompts)
    own, others = ([i for i, prompt in enumerate(t.rows.prompts) if prompt in shared] for t in (target, other))
    how = f"{counted(len(shared), 'prompt')}, compared by their means: no seed is in both"
    return PairedRows(own, others, False), how if shared else "not compared: no prompt is in both"


def _change(target: TargetResult, other: TargetResult, metric: str, shared: PairedRows) -> MetricChange | None:
    """The difference of a metric; None if no prompt has values on both sides."""
    rows, other_rows, by_seed = shared
    if by_seed:  # pairs with two finite values: a prompt's means are then over the same noise on both sides
        values, other_values = target.values[metric], other.values[metric]
        finite = [
            (row, other_row)
            for row, other_row in zip(rows, other_rows, strict=True)
            if math.isfinite(values[row]) and math.isfinite(other_values[other_row])
        ]
        rows, other_rows = [row for row, _ in finite], [other_row for _, other_row in finite]
    means, other_means = by_prompt(target, metric, rows), by_prompt(other, metric, other_rows)
    prompts = [prompt for prompt in means if prompt in other_means]
    if not prompts:
        return None
    test = significance.paired([means[p] for p in prompts], [other_means[p] for p in prompts])
    return MetricChange(test.difference, test.p, test.p, len(prompts), len(rows) if by_seed else 0)


def _adjusted(changes: dict[str, dict[str, MetricChange]]) -> dict[str, dict[str, MetricChange]]:
    keys = [(name, metric) for name, by_metric in changes.items() for metric in by_metric]
    p = significance.holm([changes[name][metric].p for name, metric in keys])
    adjusted = {key: replace(changes[key[0]][key[1]], p_adjusted=value) for key, value in zip(keys, p, strict=True)}
    return {name: {metric: adjusted[name, metric] for metric in by_metric} for name, by_metric in changes.items()}


def _rows_of(target: TargetResult, column: str) -> dict[str, list[int]]:
    """The rows of each category in a metadata column."""
    rows: dict[str, list[int]] = {}
    for row, metadata in enumerate(target.rows.metadata):
        if isinstance(metadata.get(column), str):
            rows.setdefault(metadata[column], []).append(row)
    return rows


def _by_category(results: Sequence[TargetResult], column: str) -> dict[str, dict[str, dict[str, Estimate]]]:
    estimates: dict[str, dict[str, dict[str, Estimate]]] = {}
    for target in results:
        for category, rows in _rows_of(target, column).items():
            values = {metric: [*by_prompt(target, metric, rows).values()] for metric in target.values}
            known = {metric: _estimate(metric, of_prompts) for metric, of_prompts in values.items() if of_prompts}
            if known:
                estimates.setdefault(category, {})[target.name] = known
    return estimates


def show(console: Console, scorecard: Scorecard) -> None:
    """Print every metric of every target in 80 columns: mean, difference (marked if significant) and p-value."""
    table = Table(title=title(scorecard), title_justify="left", box=None, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("")  # the only one that wraps where numbers are long
    headings = ("mean", "difference", "p") if scorecard.num_tests else ("mean",)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for metric in scorecard.metrics:
        table.add_row(Text(visible(short_name(metric)), style="bold"))
        for name, *numbers in _lines(scorecard, metric):
            table.add_row(Text("  " + _cut(visible(name), NAME_WIDTH - 2)), *numbers[: len(headings)])
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
    lines += [
        f"{name} against {scorecard.against[name]}: {pairing}{_means_of_others(scorecard, name)}"
        for name, pairing in scorecard.pairing.items()
    ]
    fewest = min((mean.prompts for means in scorecard.means.values() for mean in means.values()), default=0)
    few = f" Fewer than {MIN_PROMPTS_FOR_INTERVAL} prompts have none." if fewest < MIN_PROMPTS_FOR_INTERVAL else ""
    lines.append(f"[low, high] is a {significance.LEVEL:.0%} interval over prompts.{few}")
    if scorecard.num_tests:
        lines.append(f"* p < {1 - significance.LEVEL:.2g}, adjusted for {scorecard.num_tests} tests by Holm.")
    return lines


def _means_of_others(scorecard: Scorecard, name: str) -> str:
    """The end of a footnote if means are of more prompts than the difference, so that it is not that of the means."""
    other = scorecard.against[name]
    changes, means = scorecard.changes[name], scorecard.means
    differs = any(change.prompts < max(means[n][m].prompts for n in (name, other)) for m, change in changes.items())
    return "; the means are of all prompts, the difference is of these" if differs else ""


def as_json(scorecard: Scorecard, settings: dict[str, Any]) -> dict[str, Any]:
    """The content of eval.json: `settings`, and everything except single images; a missing number is null."""
    targets = {}
    for target in scorecard.results:
        means = {
            m: {**asdict(mean.estimate), "prompts": mean.prompts, "pictures": mean.images}
            for m, mean in scorecard.means[target.name].items()
        }
        entry: dict[str, Any] = {"what": target.description, "measures": means}
        if target.name in scorecard.against:
            entry["against"] = scorecard.against[target.name]
            entry["pairing"] = scorecard.pairing[target.name]
            entry["differences"] = {
                m: {
                    **asdict(change.difference),
                    "p": change.p,
                    "p_adjusted": change.p_adjusted,
                    "paired_prompts": change.prompts,
                    "pairs": change.pairs,
                }
                for m, change in scorecard.changes[target.name].items()
            }
        targets[target.name] = entry
    overall = {
        column: {t.name: {m: scorecard.macro_average(column, t.name, m) for m in t.values} for t in scorecard.results}
        for column in scorecard.categories
    }
    prompts = [{"prompt": prompt, "targets": by_target} for prompt, by_target in _of_prompts(scorecard).items()]
    content = {
        "interval": {"level": significance.LEVEL, "resamples": significance.RESAMPLES, "tests": scorecard.num_tests},
        "targets": targets,
        "categories": scorecard.categories,
        "over_categories": overall,
        "prompts": prompts,
    }
    assert not settings.keys() & content.keys()
    return {**settings, **_json_value(content)}


def _json_value(value: Any) -> Any:
    """A value as JSON has it: an estimate is an object, and a number that is not finite is null."""
    if isinstance(value, Estimate):
        return _json_value(asdict(value))
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
            values = [
                _json_value(target.values[metric][i]) if metric in target.values else None for metric in scorecard.metrics
            ]
            texts = (target.name, rows.labels[i], rows.prompts[i], rows.seeds[i], *categories)
            writer.writerow([*map(escape_formula, texts), *values])
    return file.getvalue()


def _cut(name: str, width: int) -> str:
    """The name, without its middle if it is longer: names often differ in their last characters."""
    end = width // 2
    return name if len(name) <= width else f"{name[: width - end - 1]}…{name[-end:]}"


def _show_categories(console: Console, scorecard: Scorecard, column: str) -> None:
    """Print the first metric by category; the files have all metrics."""
    metric, names = scorecard.metrics[0], [target.name for target in scorecard.results][:MAX_COLUMNS]
    more = "" if len(scorecard.results) <= MAX_COLUMNS else f", the first {MAX_COLUMNS} targets"
    heading = f"{visible(short_name(metric))} by {visible(column)}{more}"
    table = Table(title=Text(heading), title_justify="left", box=None, padding=(0, 1), show_edge=False)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(Text(_cut(visible(name), COLUMN_WIDTH)), justify="right", no_wrap=True)
    for category, *cells in _category_lines(scorecard, column, metric, names):
        table.add_row(Text(_cut(visible(category), NAME_WIDTH)), *cells)
    console.print(table)


def _category_lines(scorecard: Scorecard, column: str, metric: str, names: list[str]) -> Iterable[list[str]]:
    """For each category its name and the targets' means; last, the mean of the categories' means."""
    for category, estimates in scorecard.categories[column].items():
        yield [category, *(_shown(estimates.get(name, {}).get(metric)) for name in names)]
    yield [OVERALL, *(_shown(scorecard.macro_average(column, name, metric)) for name in names)]


def _lines(scorecard: Scorecard, metric: str) -> Iterable[tuple[str, str, str, str]]:
    """For each target its name, mean, difference with its mark, and adjusted p-value."""
    for target in scorecard.results:
        mean = scorecard.means[target.name].get(metric)
        if mean is None:
            continue
        change = scorecard.changes.get(target.name, {}).get(metric)
        if change is None:
            yield target.name, _shown(mean.estimate), "", ""
            continue
        mark = "*" if change.significant else " "
        p = "<.001" if change.p_adjusted < 0.001 else f"{change.p_adjusted:.3f}"
        yield target.name, _shown(mean.estimate), f"{_shown(change.difference, sign=True)} {mark}", p


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


def _score(value: float | None) -> str:
    return number(value, decimals=4, large=100.0)


def _shown(estimate: Estimate | None, sign: bool = False) -> str:
    """A mean with its interval, which may reach further to one side: `0.969 [0.922, 0.988]`."""
    if estimate is None:
        return "–"
    has_interval = not math.isnan(estimate.low)
    largest = max(map(abs, (estimate.mean, estimate.low, estimate.high) if has_interval else (estimate.mean,)))
    show = partial(number, decimals=3 if largest >= 0.1 else 4, large=100.0)
    return show(estimate.mean, sign=sign) + (f" [{show(estimate.low)}, {show(estimate.high)}]" if has_interval else "")


def _span(counts: set[int], noun: str) -> str:
    return ("" if len(counts) == 1 else f"{min(counts)} to ") + counted(max(counts), noun)
