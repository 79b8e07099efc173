"""Statistics over prompts: how uncertain a mean is, and whether two means differ.

The unit is a prompt: images of one prompt are alike, so that they count as one.

`eval` reports percentile bootstrap intervals over prompts (Efron, 1979) and permutation tests (Fisher, 1935): where prompts are paired,
the signs of their differences are permuted, else the prompts themselves. Several tests are adjusted together by Holm (1979). All of it
is seeded, so that the same numbers give the same result.

The monitor of a run, which compares evaluations again and again, needs the standard error of a paired difference only.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

LEVEL = 0.95
RESAMPLES = 9999
MIN_PROMPTS = 2  # fewer have no spread
MIN_PROMPTS_FOR_ERROR = 8  # the standard error of fewer is not trusted
BATCH_NUMEL = 2_000_000  # numbers that are resampled at once


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval at LEVEL; NaN where there are too few prompts for an interval."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class TestResult:
    """A difference of two means, its interval, and the two-sided p-value of no difference, which is 1 for a single prompt."""

    difference: Estimate
    p: float


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean over prompts of (P,) finite values, with its interval."""
    return _estimate((np.asarray(values, dtype=float),), np.mean, seed)


def mean_of_independent(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent means: its interval is the root of the sum of their squared half-widths over their number, to each side.

    There is no interval if one of them has none.
    """
    mean = statistics.fmean(e.mean for e in estimates)
    half = math.hypot(*(e.half for e in estimates)) / len(estimates)
    return Estimate(mean, mean - half, mean + half)


def paired(values: Sequence[float], base: Sequence[float], seed: int = 0) -> TestResult:
    """Test whether (P,) values differ from (P,) others of the same prompts."""
    differences = np.asarray(values, dtype=float) - np.asarray(base, dtype=float)
    return _test((differences,), np.mean, "samples", seed)


def unpaired(values: Sequence[float], base: Sequence[float], seed: int = 0) -> TestResult:
    """Test whether values of some prompts differ from those of other prompts; their numbers may differ."""
    return _test((np.asarray(values, dtype=float), np.asarray(base, dtype=float)), _difference_of_means, "independent", seed)


def paired_difference(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The mean difference of the same prompts' values and its standard error, infinite for fewer than 8 prompts.

    Prompts without a finite value on both sides are left out.
    """
    differences = [a - b for a, b in zip(values, base, strict=False) if math.isfinite(a - b)]
    if len(differences) < MIN_PROMPTS_FOR_ERROR:
        return finite_mean(differences), math.inf
    return finite_mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def paired_fall(base: Float[np.ndarray, "*many P"], values: Float[np.ndarray, "*#many P"]) -> Float[np.ndarray, "*many"]:
    """The p-value of a one-sided paired t-test that values of the same P prompts are below others; 1 for fewer than 8 prompts.

    Prompts without a finite value on both sides are left out.
    """
    from scipy import stats

    differences = base - values
    has_value = np.isfinite(differences)
    n = has_value.sum(-1)
    differences = np.where(has_value, differences, 0.0)
    mean = differences.sum(-1) / np.maximum(n, 1)
    squares = np.maximum(0.0, np.einsum("...p,...p->...", differences, differences) - n * mean**2)
    error = np.sqrt(squares / np.maximum(n - 1, 1) / np.maximum(n, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean > 0, mean / error, 0.0)
    return np.where(n < MIN_PROMPTS_FOR_ERROR, 1.0, stats.t.sf(t, np.maximum(n - 1, 1)))


def finite_mean(values: Sequence[float]) -> float:
    """The mean of the finite values, -inf if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else -math.inf


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted so that the chance of any false positive among all of them stays below the level (Holm, 1979)."""
    adjusted, highest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = highest
    return adjusted


def _difference_of_means(values: np.ndarray, base: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.mean(values, axis=axis) - np.mean(base, axis=axis)


def _estimate(samples: tuple[np.ndarray, ...], statistic: object, seed: int) -> Estimate:
    from scipy import stats

    assert all(np.isfinite(sample).all() and len(sample) for sample in samples)
    mean = float(statistic(*samples))  # type: ignore[operator]
    if min(len(sample) for sample in samples) < MIN_PROMPTS:
        return Estimate(mean, float("nan"), float("nan"))
    interval = stats.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        batch=_batch(samples),
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high))


def _test(samples: tuple[np.ndarray, ...], statistic: object, kind: str, seed: int) -> TestResult:
    from scipy import stats

    if min(len(sample) for sample in samples) < MIN_PROMPTS:
        return TestResult(_estimate(samples, statistic, seed), 1.0)
    result = stats.permutation_test(
        samples,
        statistic,
        permutation_type=kind,
        n_resamples=RESAMPLES,
        batch=_batch(samples),
        random_state=np.random.default_rng(seed),
    )
    return TestResult(_estimate(samples, statistic, seed), float(result.pvalue))


def _batch(samples: tuple[np.ndarray, ...]) -> int:
    return max(1, BATCH_NUMEL // sum(len(sample) for sample in samples))
