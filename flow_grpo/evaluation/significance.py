"""How sure a mean is, and whether two differ. The unit is a prompt: pictures of one prompt are alike and count as one.

Intervals are percentile bootstraps over prompts (Efron, 1979). Tests are permutation tests (Fisher, 1935): where prompts are paired, each
difference keeps or changes its sign; where not, prompts change sides. Several tests together are adjusted by Holm (1979). All of it
is seeded, so that the same numbers give the same answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 9999
LEAST = 2  # prompts, below which nothing is known of their spread
AT_ONCE = 2_000_000  # numbers drawn together


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval at LEVEL; NaN where there are too few prompts for one."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Contrast:
    """A difference of two means, its interval, and the two-sided p of there being none, which is 1 for a single prompt."""

    difference: Estimate
    p: float


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of (P,) prompts' finite values."""
    return _estimate((np.asarray(values, dtype=float),), np.mean, seed)


def paired(values: Sequence[float], base: Sequence[float], seed: int = 0) -> Contrast:
    """Whether (P,) values differ from the same prompts' (P,) others."""
    own = np.asarray(values, dtype=float) - np.asarray(base, dtype=float)
    return _contrast((own,), np.mean, "samples", seed)


def unpaired(values: Sequence[float], base: Sequence[float], seed: int = 0) -> Contrast:
    """Whether values of some prompts differ from those of other prompts; there need not be as many."""
    return _contrast((np.asarray(values, dtype=float), np.asarray(base, dtype=float)), _between, "independent", seed)


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted for their number: the chance of one false alarm among all of them stays below the level (Holm, 1979)."""
    adjusted, highest = [0.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[place]))
        adjusted[place] = highest
    return adjusted


def _between(values: np.ndarray, base: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.mean(values, axis=axis) - np.mean(base, axis=axis)


def _estimate(samples: tuple[np.ndarray, ...], statistic: object, seed: int) -> Estimate:
    assert all(np.isfinite(sample).all() and len(sample) for sample in samples)
    mean = float(statistic(*samples))  # type: ignore[operator]
    if min(len(sample) for sample in samples) < LEAST:
        return Estimate(mean, float("nan"), float("nan"))
    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        batch=_batch(samples),
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(mean, float(found.low), float(found.high))


def _contrast(samples: tuple[np.ndarray, ...], statistic: object, kind: str, seed: int) -> Contrast:
    if min(len(sample) for sample in samples) < LEAST:
        return Contrast(_estimate(samples, statistic, seed), 1.0)
    found = stats.permutation_test(
        samples,
        statistic,
        permutation_type=kind,
        n_resamples=RESAMPLES,
        batch=_batch(samples),
        random_state=np.random.default_rng(seed),
    )
    return Contrast(_estimate(samples, statistic, seed), float(found.pvalue))


def _batch(samples: tuple[np.ndarray, ...]) -> int:
    return max(1, AT_ONCE // sum(len(sample) for sample in samples))
