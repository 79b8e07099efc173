"""A scorecard of measured targets: means, differences from the target each is compared with, by category and by prompt."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flow_grpo.data.image_sets import ImageRecords
from flow_grpo.evaluation import significance
from flow_grpo.evaluation.image_metrics import BASE_DISTANCE
from flow_grpo.evaluation.significance import Estimate
from flow_grpo.text import counted

MAX_P = 1 - significance.LEVEL  # of a significant difference
CATEGORY_COLUMNS = ("category", "challenge", "tag")  # columns of prompt sets that are categories, in upper or lower case
MAX_CATEGORIES = 40  # a column with more values is not a category


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
    prompts: int  # paired, or 0
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
        changes[name] = {m: _change(target, other, m, shared) for m in common}
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


@dataclass(frozen=True)
class PairedRows:
    """The rows of a target and of the other one that are compared prompt by prompt or, `by_seed`, row by row."""

    rows: list[int]
    other_rows: list[int]
    by_seed: bool

    def with_finite_values(self, values: list[float], other_values: list[float]) -> "PairedRows":
        """If paired by seed, the pairs with two finite values: a prompt's means are then over the same noise on both sides."""
        if not self.by_seed:
            return self
        pairs = zip(self.rows, self.other_rows, strict=True)
        finite = [
            (row, other_row)
            for row, other_row in pairs
            if math.isfinite(values[row]) and math.isfinite(other_values[other_row])
        ]
        return PairedRows([row for row, _ in finite], [other_row for _, other_row in finite], True)


def _pairing(target: TargetResult, other: TargetResult) -> tuple[PairedRows | None, str]:
    """The paired rows of two targets, None if they share no prompt, and a description of the pairing."""
    rows_by_key, other_rows_by_key = _keys(target), _keys(other)
    both = [key for key in rows_by_key if key in other_rows_by_key and key[1] is not None]
    prompts = len({prompt for prompt, _ in both})
    if both:
        rows = [rows_by_key[key] for key in both], [other_rows_by_key[key] for key in both]
        description = f"{counted(prompts, 'prompt')}, {counted(len(both), 'pair')} of one prompt and seed"
        return PairedRows(rows[0], rows[1], by_seed=True), description
    shared = set(target.rows.prompts) & set(other.rows.prompts)
    if shared:
        target_rows, other_rows = (
            [i for i, prompt in enumerate(t.rows.prompts) if prompt in shared] for t in (target, other)
        )
        description = f"{counted(len(shared), 'prompt')}, compared by their means: no seed is in both"
        return PairedRows(target_rows, other_rows, by_seed=False), description
    return None, "unpaired: no prompt is in both"


def _change(target: TargetResult, other: TargetResult, metric: str, shared: PairedRows | None) -> MetricChange:
    if shared is None:
        means, other_means = by_prompt(target, metric), by_prompt(other, metric)
        test = significance.unpaired([*means.values()], [*other_means.values()])
        return MetricChange(test.difference, test.p, test.p, prompts=0, pairs=0)
    finite = shared.with_finite_values(target.values[metric], other.values[metric])
    means = by_prompt(target, metric, finite.rows)
    other_means = by_prompt(other, metric, finite.other_rows)
    prompts = [prompt for prompt in means if prompt in other_means]
    if not prompts:
        return MetricChange(Estimate(math.nan, math.nan, math.nan), 1.0, 1.0, prompts=0, pairs=0)
    test = significance.paired([means[p] for p in prompts], [other_means[p] for p in prompts])
    return MetricChange(test.difference, test.p, test.p, len(prompts), len(finite.rows) if finite.by_seed else 0)


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
