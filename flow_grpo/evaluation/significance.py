"""Statistics over prompts: how uncertain a mean is, and whether two means differ.

The unit is a prompt: images of one prompt are alike, so that they count as one.

Intervals are closed forms: Wilson's (1927) for a share, Bonett and Price's (2012) for a difference of paired shares, Agresti and Caffo's
(2000) for one of independent shares, which do not shrink to nothing where all prompts agree; for other values Hall's (1992) transformed t
interval, which allows for skewness, and Welch's (1947) for a difference of independent means. Fewer than 8 prompts have none, nor have
equal values that are no shares.

Tests: where prompts are paired, the signs of their differences are permuted (Fisher, 1935). Independent means are compared by Welch's
t-test, for which unequal spreads are no difference of means; shares, whose spread is their mean's, by a permutation of the prompts.
Several tests are adjusted together by Holm (1979). Permutations are seeded, so that the same numbers give the same result.

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
MIN_PROMPTS_FOR_TEST = 2  # fewer have no test
MIN_PROMPTS_FOR_INTERVAL = 8  # fewer have no interval and no standard error
BATCH_NUMEL = 2_000_000  # numbers that are resampled at once


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval at LEVEL, which may reach further to one side; NaN where there are too few prompts for an interval."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class MeanDifference:
    """A difference of two means, its interval, and the two-sided p-value of no difference, which is 1 for a single prompt."""

    difference: Estimate
    p: float


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over prompts of (P,) finite values, with its interval."""
    from scipy import stats

    sample = _finite(values)
    mean, n = float(sample.mean()), len(sample)
    if n < MIN_PROMPTS_FOR_INTERVAL:
        return _without_interval(mean)
    if _are_shares(sample):
        interval = stats.binomtest(round(sample.sum()), n).proportion_ci(LEVEL, method="wilson")
        return Estimate(mean, float(interval.low), float(interval.high))
    return _skewed_interval(sample)


def mean_of_independent(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent means: to each side, the root of the sum of the squared arms of their intervals over their number.

    There is no interval if one of them has none.
    """
    mean, n = statistics.fmean(e.mean for e in estimates), len(estimates)
    below, above = (
        math.hypot(*arms) / n for arms in zip(*((e.mean - e.low, e.high - e.mean) for e in estimates), strict=True)
    )
    return Estimate(mean, mean - below, mean + above)


def paired(values: Sequence[float], base: Sequence[float]) -> MeanDifference:
    """Test whether (P,) values differ from (P,) others of the same prompts."""
    new, old = _finite(values), _finite(base)
    differences = new - old
    mean, n = float(differences.mean()), len(differences)
    if n < MIN_PROMPTS_FOR_INTERVAL:
        interval = _without_interval(mean)
    elif _are_shares(new) and _are_shares(old):
        better, worse = ((int((differences == sign).sum()) + 1) / (n + 2) for sign in (1, -1))
        interval = _normal_interval(mean, better - worse, (better + worse - (better - worse) ** 2) / (n + 2))
    else:
        interval = _skewed_interval(differences)
    return MeanDifference(interval, _permutation_p((differences,), np.mean, "samples"))


def unpaired(values: Sequence[float], base: Sequence[float]) -> MeanDifference:
    """Test whether values of some prompts differ from those of other prompts; their numbers and spreads may differ."""
    from scipy import stats

    new, old = _finite(values), _finite(base)
    mean, fewest = float(new.mean() - old.mean()), min(len(new), len(old))
    if fewest < MIN_PROMPTS_FOR_TEST:
        return MeanDifference(_without_interval(mean), 1.0)
    are_shares, interval = _are_shares(new) and _are_shares(old), _without_interval(mean)
    if are_shares or (not new.std() and not old.std()):  # exchangeable if they are equal
        if are_shares and fewest >= MIN_PROMPTS_FOR_INTERVAL:
            interval = _agresti_caffo(mean, new, old)
        return MeanDifference(interval, _permutation_p((new, old), _difference_of_means, "independent"))
    welch = stats.ttest_ind(new, old, equal_var=False)
    if fewest >= MIN_PROMPTS_FOR_INTERVAL:
        low, high = welch.confidence_interval(LEVEL)
        interval = Estimate(mean, float(low), float(high))
    return MeanDifference(interval, float(welch.pvalue))


def paired_difference(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The mean difference of the same prompts' values and its standard error, infinite for fewer than 8 prompts.

    Prompts without a finite value on both sides are left out.
    """
    differences = [a - b for a, b in zip(values, base, strict=False) if math.isfinite(a - b)]
    if len(differences) < MIN_PROMPTS_FOR_INTERVAL:
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
    return np.where(n < MIN_PROMPTS_FOR_INTERVAL, 1.0, stats.t.sf(t, np.maximum(n - 1, 1)))


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


def _finite(values: Sequence[float]) -> Float[np.ndarray, " P"]:
    sample = np.asarray(values, dtype=float)
    assert len(sample)
    assert np.isfinite(sample).all()
    return sample


def _are_shares(sample: Float[np.ndarray, " P"]) -> bool:
    """Whether all values are 0 or 1, so that their mean is a share of the prompts."""
    return bool(np.isin(sample, (0.0, 1.0)).all())


def _without_interval(mean: float) -> Estimate:
    return Estimate(mean, math.nan, math.nan)


def _normal_interval(mean: float, centre: float, variance: float) -> Estimate:
    """The interval of a difference of shares; `centre` and its variance are of the sample with a few added prompts."""
    half = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) * math.sqrt(variance)
    return Estimate(mean, max(-1.0, centre - half), min(1.0, centre + half))


def _skewed_interval(sample: Float[np.ndarray, " P"]) -> Estimate:
    """Hall's interval (Annals of Statistics 20, 1992) with quantiles of t: his third transformation, inverted, in closed form."""
    from scipy import stats

    n, mean, spread = len(sample), float(sample.mean()), float(sample.std(ddof=1))
    if spread <= 1e-12 * abs(mean):
        return _without_interval(mean)
    skewness = float(stats.skew(sample, bias=False))
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) / math.sqrt(n)

    def untransformed(t: float) -> float:
        if abs(skewness) < 1e-6:
            return t
        return 3 / skewness * (float(np.cbrt(1 + skewness * (t - skewness / (6 * n)))) - 1)

    return Estimate(mean, mean - spread * untransformed(quantile), mean - spread * untransformed(-quantile))


def _agresti_caffo(mean: float, values: Float[np.ndarray, " P"], base: Float[np.ndarray, " Q"]) -> Estimate:
    new, old = ((float(one.sum()) + 1) / (len(one) + 2) for one in (values, base))
    return _normal_interval(mean, new - old, new * (1 - new) / (len(values) + 2) + old * (1 - old) / (len(base) + 2))


def _difference_of_means(values: np.ndarray, base: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.mean(values, axis=axis) - np.mean(base, axis=axis)


def _permutation_p(samples: tuple[np.ndarray, ...], statistic: object, kind: str) -> float:
    """The two-sided p-value; 1 for fewer than 2 prompts."""
    from scipy import stats

    if min(len(sample) for sample in samples) < MIN_PROMPTS_FOR_TEST:
        return 1.0
    result = stats.permutation_test(
        samples,
        statistic,
        permutation_type=kind,
        n_resamples=RESAMPLES,
        batch=max(1, BATCH_NUMEL // sum(map(len, samples))),
        random_state=np.random.default_rng(0),
    )
    return float(result.pvalue)
