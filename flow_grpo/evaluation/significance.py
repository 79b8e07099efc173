"""Statistics over prompts: how uncertain a mean is, and whether two means differ.

The unit is a prompt: images of one prompt are alike, so that they count as one.

Intervals are closed forms: Wilson's (1927) for a share, Bonett and Price's (2012) for a difference of paired shares, which do not shrink to
nothing where all prompts agree; for other values Hall's (1992) transformed t interval, which allows for skewness. Fewer than 8 prompts have
none, nor have equal values that are no shares. Of values from 0 to 1, no interval leaves this range.

The test is of paired prompts: the signs of their differences are permuted (Fisher, 1935), in all ways where at most 13 prompts differ, else
in 9,999 random ways. These are seeded, so that the same numbers give the same result. Several tests are adjusted together by Holm (1979).

The monitor of a run, which compares evaluations again and again, needs the standard error of a paired difference only.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

LEVEL = 0.95
RESAMPLES = 9999
MIN_PROMPTS_FOR_INTERVAL = 8  # fewer have no interval and no standard error
BATCH_NUMEL = 2_000_000  # numbers that are resampled at once


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval at LEVEL, which may reach further to one side; NaN where there are too few prompts for an interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class MeanDifference:
    """A difference of two means, its interval, and the two-sided p-value of no difference, which is 1 if at most one prompt differs."""

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
    return _within(_skewed_interval(sample), (0.0, 1.0) if _are_from_0_to_1(sample) else (-math.inf, math.inf))


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
    from scipy import stats

    new, old = _finite(values), _finite(base)
    differences = new - old
    mean, n = float(differences.mean()), len(differences)
    if n < MIN_PROMPTS_FOR_INTERVAL:
        interval = _without_interval(mean)
    elif _are_shares(new) and _are_shares(old):
        interval = _interval_of_paired_shares(differences)
    else:
        both = _are_from_0_to_1(new) and _are_from_0_to_1(old)
        interval = _within(_skewed_interval(differences), (-1.0, 1.0) if both else (-math.inf, math.inf))
    differing = differences[differences != 0]  # a tie has no sign
    if len(differing) < 2:
        return MeanDifference(interval, 1.0)
    test = stats.permutation_test(
        (differing,),
        np.sum,
        permutation_type="samples",
        n_resamples=RESAMPLES,  # all of them if there are no more
        batch=max(1, BATCH_NUMEL // len(differing)),
        random_state=np.random.default_rng(0),
    )
    return MeanDifference(interval, float(test.pvalue))


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


def _are_from_0_to_1(sample: Float[np.ndarray, " P"]) -> bool:
    """Whether the values lie in the range of shares of images, probabilities and most rewards."""
    return bool(((sample >= 0) & (sample <= 1)).all())


def _within(estimate: Estimate, bounds: tuple[float, float]) -> Estimate:
    return replace(estimate, low=max(estimate.low, bounds[0]), high=min(estimate.high, bounds[1]))


def _without_interval(mean: float) -> Estimate:
    return Estimate(mean, math.nan, math.nan)


def _interval_of_paired_shares(differences: Float[np.ndarray, " P"]) -> Estimate:
    """Bonett and Price's interval: a prompt is added to those that got better, and one to those that got worse."""
    n = len(differences) + 2
    better, worse = ((int((differences == sign).sum()) + 1) / n for sign in (1, -1))
    centre, variance = better - worse, (better + worse - (better - worse) ** 2) / n
    half = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) * math.sqrt(variance)
    return Estimate(float(differences.mean()), max(-1.0, centre - half), min(1.0, centre + half))


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
