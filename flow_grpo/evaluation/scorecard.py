"""What measured targets come to: means, how each differs from what it is compared with, by category and by prompt."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flow_grpo.data.image_sets import ImageRecords
from flow_grpo.evaluation import significance
from flow_grpo.evaluation.significance import Estimate
from flow_grpo.text import counted

FREQUENCIES, DIVERSITY, DISTANCE = "high-frequency power", "diversity", "distance from base"
LEVEL = 1 - significance.LEVEL  # of a p-value that counts
CATEGORIES = ("category", "challenge", "tag")  # columns of prompt sets that are categories, in capitals or not
MOST = 40  # different values beyond which a column is no category


@dataclass(frozen=True)
class Measured:
    """A target, and B values by measure. NaN where a measure says nothing of a picture, diversity of a single one for example."""

    name: str
    what: str
    rows: ImageRecords
    values: dict[str, list[float]]


@dataclass(frozen=True)
class Mean:
    """A measure of a target: the mean over prompts of each prompt's mean."""

    estimate: Estimate
    prompts: int
    pictures: int


@dataclass(frozen=True)
class Change:
    """How a measure of a target differs from the one it is compared with."""

    difference: Estimate
    p: float
    adjusted: float  # for all tests of the scorecard, by Holm
    prompts: int  # paired, or 0
    pairs: int  # of one prompt and seed, with a number each, or 0

    @property
    def significant(self) -> bool:
        return self.adjusted < LEVEL


@dataclass(frozen=True)
class Scorecard:
    """Targets in their order.

    Attributes:
        against: name of the target that each is compared with; the first is compared with nothing.
        means, changes: by target and measure.
        pairing: by target, how its prompts were paired for the tests, in words.
        categories: by column, category, target and measure.
    """

    measured: list[Measured]
    against: dict[str, str]
    means: dict[str, dict[str, Mean]]
    changes: dict[str, dict[str, Change]]
    pairing: dict[str, str]
    categories: dict[str, dict[str, dict[str, dict[str, Estimate]]]]

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(name for found in self.means.values() for name in found))

    @property
    def tests(self) -> int:
        return sum(len(found) for found in self.changes.values())

    def over_categories(self, column: str, target: str, measure: str) -> float | None:
        """The mean of the categories' means, each counting the same whatever its number of prompts: GenEval's overall score."""
        found = [of[target][measure].mean for of in self.categories[column].values() if measure in of.get(target, {})]
        return statistics.fmean(found) if found else None


def compile_card(measured: list[Measured], against: dict[str, str]) -> Scorecard:
    """The scorecard of targets measured; `against` is by target the name of the one it is compared with."""
    by_name = {target.name: target for target in measured}
    assert len(by_name) == len(measured), "two targets of one name"
    means = {target.name: {name: _mean(target, name) for name in target.values} for target in measured}
    changes, pairing = {}, {}
    for name, other in against.items():
        shared, pairing[name] = _pairing(by_name[name], by_name[other])
        common = [m for m in by_name[name].values if m in by_name[other].values and m != DISTANCE]
        changes[name] = {m: _change(by_name[name], by_name[other], m, shared) for m in common}
    categories = {column: _by_category(measured, column) for column in category_columns(measured)}
    return Scorecard(measured, against, means, _adjusted(changes), pairing, categories)


def by_prompt(target: Measured, measure: str, rows: Iterable[int] | None = None) -> dict[str, float]:
    """The mean of each prompt's pictures, of these rows or of all; prompts without a number are left out."""
    found: dict[str, list[float]] = {}
    values = target.values[measure]
    for row in range(len(values)) if rows is None else rows:
        if math.isfinite(values[row]):
            found.setdefault(target.rows.prompts[row], []).append(values[row])
    return {prompt: statistics.fmean(numbers) for prompt, numbers in found.items()}


def category_columns(measured: list[Measured]) -> list[str]:
    """The metadata columns that sort prompts into a few categories."""
    found: dict[str, set] = {}
    cells = (cell for target in measured for row in target.rows.metadata for cell in row.items())
    for column, value in cells:
        if column.lower() in CATEGORIES and isinstance(value, str):
            found.setdefault(column, set()).add(value)
    return [column for column, values in found.items() if 1 < len(values) <= MOST]


def _mean(target: Measured, measure: str) -> Mean:
    of_prompts = by_prompt(target, measure)
    pictures = sum(math.isfinite(value) for value in target.values[measure])
    return Mean(significance.estimate([*of_prompts.values()]), len(of_prompts), pictures)


def _keys(target: Measured) -> dict[tuple[str, int | None], int]:
    """The row of each prompt and seed."""
    return {key: row for row, key in enumerate(zip(target.rows.prompts, target.rows.seeds, strict=True))}


@dataclass(frozen=True)
class Pairs:
    """The rows of a target and of the other one that are compared, prompt by prompt; by seed, they go together one by one."""

    mine: list[int]
    theirs: list[int]
    by_seed: bool

    def with_numbers(self, mine: list[float], theirs: list[float]) -> "Pairs":
        """By seed, those where both values are numbers: a prompt's mean is of the same noise on both sides."""
        if not self.by_seed:
            return self
        rows = zip(self.mine, self.theirs, strict=True)
        kept = [(one, two) for one, two in rows if math.isfinite(mine[one]) and math.isfinite(theirs[two])]
        return Pairs([one for one, _ in kept], [two for _, two in kept], True)


def _pairing(target: Measured, other: Measured) -> tuple[Pairs | None, str]:
    """Which rows of two targets are paired, None if no prompts are shared, and that in words."""
    mine, theirs = _keys(target), _keys(other)
    both = [key for key in mine if key in theirs and key[1] is not None]
    prompts = len({prompt for prompt, _ in both})
    if both:
        rows = [mine[key] for key in both], [theirs[key] for key in both]
        return Pairs(
            *rows, by_seed=True
        ), f"{counted(prompts, 'prompt')}, {counted(len(both), 'pair')} of one prompt and seed"
    shared = set(target.rows.prompts) & set(other.rows.prompts)
    if shared:
        one, two = ([i for i, prompt in enumerate(t.rows.prompts) if prompt in shared] for t in (target, other))
        return Pairs(one, two, by_seed=False), f"{counted(len(shared), 'prompt')}, not by seed: they share none"
    return None, "unpaired: no prompt is in both"


def _change(target: Measured, other: Measured, measure: str, shared: Pairs | None) -> Change:
    if shared is None:
        mine, theirs = by_prompt(target, measure), by_prompt(other, measure)
        found = significance.unpaired([*mine.values()], [*theirs.values()])
        return Change(found.difference, found.p, found.p, prompts=0, pairs=0)
    kept = shared.with_numbers(target.values[measure], other.values[measure])
    mine, theirs = by_prompt(target, measure, kept.mine), by_prompt(other, measure, kept.theirs)
    prompts = [prompt for prompt in mine if prompt in theirs]
    if not prompts:
        return Change(Estimate(math.nan, math.nan, math.nan), 1.0, 1.0, prompts=0, pairs=0)
    found = significance.paired([mine[p] for p in prompts], [theirs[p] for p in prompts])
    return Change(found.difference, found.p, found.p, len(prompts), len(kept.mine) if kept.by_seed else 0)


def _adjusted(changes: dict[str, dict[str, Change]]) -> dict[str, dict[str, Change]]:
    keys = [(name, measure) for name, found in changes.items() for measure in found]
    p = significance.holm([changes[name][measure].p for name, measure in keys])
    adjusted = {key: replace(changes[key[0]][key[1]], adjusted=value) for key, value in zip(keys, p, strict=True)}
    return {name: {measure: adjusted[name, measure] for measure in found} for name, found in changes.items()}


def _rows_of(target: Measured, column: str) -> dict[str, list[int]]:
    """The rows of each category that a column of the metadata names."""
    found: dict[str, list[int]] = {}
    for row, metadata in enumerate(target.rows.metadata):
        if isinstance(metadata.get(column), str):
            found.setdefault(metadata[column], []).append(row)
    return found


def _by_category(measured: Sequence[Measured], column: str) -> dict[str, dict[str, dict[str, Estimate]]]:
    found: dict[str, dict[str, dict[str, Estimate]]] = {}
    for target in measured:
        for category, rows in _rows_of(target, column).items():
            values = {measure: [*by_prompt(target, measure, rows).values()] for measure in target.values}
            known = {measure: significance.estimate(of_prompts) for measure, of_prompts in values.items() if of_prompts}
            if known:
                found.setdefault(category, {})[target.name] = known
    return found
