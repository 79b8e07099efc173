"""Intervals and tests against closed forms, and how often they are wrong where nothing differs."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from flow_grpo.evaluation import significance
from flow_grpo.evaluation.significance import estimate, holm, paired, paired_difference


def test_the_interval_of_a_share_is_wilsons_by_hand():
    interval, z = estimate([0.0, 1.0, 1.0, 1.0] * 5), NormalDist().inv_cdf(0.975)
    centre = (15 + z**2 / 2) / (20 + z**2)
    half = z / (20 + z**2) * (20 * 0.75 * 0.25 + z**2 / 4) ** 0.5
    assert (interval.low, interval.high) == pytest.approx((centre - half, centre + half))
    assert interval.mean == 0.75
    assert estimate([1.0] * 16).low == pytest.approx(16 / (16 + z**2)), "it does not shrink to nothing"


def test_an_interval_without_skewness_is_students():
    values = np.array([-3.0, -2, -1, 0, 0, 1, 2, 3])
    expected = stats.t.interval(0.95, 7, 0, stats.sem(values))
    interval = estimate(values)
    assert (interval.low, interval.high) == pytest.approx(expected, rel=1e-6)


def test_an_interval_reaches_further_to_the_side_of_the_rare_large_values():
    interval = estimate(np.exp(np.linspace(-2, 2, 12)))
    assert interval.high - interval.mean > 1.3 * (interval.mean - interval.low)
    mirrored = estimate(-np.exp(np.linspace(-2, 2, 12)))
    assert (mirrored.low, mirrored.high) == pytest.approx((-interval.high, -interval.low))


def test_an_interval_of_values_from_0_to_1_stays_there():
    values = [1.0] * 16 + [0.5, 0.75]
    assert estimate(values).high == 1
    assert estimate([2 * value for value in values]).high > 2, "of other values the range is not known"
    assert paired(values, [0.0] * 18).difference.high == 1


def test_fewer_than_8_prompts_have_no_interval_and_one_proves_nothing():
    for few in ([1.0], [0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8]):
        assert np.isnan(estimate(few).low)
        assert np.isnan(paired(few, [0.0] * len(few)).difference.low)
    assert np.isnan(estimate([0.3] * 20).low), "equal values say nothing of the spread"
    assert paired([1.0], [0.0]).p == 1


DISTRIBUTIONS = {  # a sampler of that shape, its mean, and the least coverage: at n = 8 and 32
    "normal": (lambda draw, shape: draw.normal(size=shape), 0.0, (0.92, 0.92)),
    "skewed": (lambda draw, shape: draw.exponential(size=shape), 1.0, (0.90, 0.91)),
    "lognormal": (lambda draw, shape: draw.lognormal(size=shape), math.exp(0.5), (0.86, 0.88)),
    "share .5": (lambda draw, shape: (draw.random(shape) < 0.5) * 1.0, 0.5, (0.90, 0.92)),
    "share .95": (lambda draw, shape: (draw.random(shape) < 0.95) * 1.0, 0.95, (0.92, 0.92)),
    "mostly 1": (lambda draw, shape: np.where(draw.random(shape) < 0.3, draw.random(shape), 1.0), 0.85, (0.88, 0.92)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_an_interval_covers_the_mean_as_often_as_it_says(name):
    """Of 200 samples, whose share has a standard error of .015. The percentile bootstrap had .55 to .89."""
    sample, mean, least = DISTRIBUTIONS[name]
    for n, bound in zip((8, 32), least, strict=True):
        intervals = [estimate(values) for values in sample(np.random.default_rng(n), (200, n))]
        assert np.mean([interval.low <= mean <= interval.high for interval in intervals]) >= bound


@pytest.mark.parametrize("n", [8, 32])
def test_intervals_of_differences_of_paired_shares_cover_them(monkeypatch, n):
    monkeypatch.setattr(significance, "RESAMPLES", 9)
    draw, covered = np.random.default_rng(n), []
    for _ in range(150):
        before, kept, better = draw.random((3, n))
        base = (before < 0.8) * 1.0
        values = np.where(kept < 0.9, base, (better < 0.5) * 1.0)  # expected .9 * .8 + .1 * .5 = .77
        difference = paired(values, base).difference
        covered.append(difference.low <= -0.03 <= difference.high)
    assert np.mean(covered) >= 0.9


@pytest.mark.parametrize("prompts", [3, 8, 12])
def test_all_signs_alike_have_the_exact_p(prompts):
    rise = np.arange(1, prompts + 1) / 10
    assert paired(rise, np.zeros(prompts)).p == pytest.approx(2 / 2**prompts)


def test_pairs_see_what_prompts_hide():
    prompts = np.random.default_rng(0).normal(size=60)
    better = prompts + 0.05 + 0.01 * np.random.default_rng(1).normal(size=60)
    test = paired(better, prompts)
    assert test.p < 0.001
    assert test.difference.low < 0.05 < test.difference.high


def test_the_error_of_a_paired_difference_is_the_interval_of_its_normal_approximation():
    draw = np.random.default_rng(5)
    base, values = draw.normal(size=400), draw.normal(0.2, size=400)
    mean, error = paired_difference(values.tolist(), base.tolist())
    test = paired(values, base)
    assert mean == pytest.approx(test.difference.mean)
    half = (test.difference.high - test.difference.low) / 2
    assert stats.t.ppf(0.975, 399) * error == pytest.approx(half, rel=0.01)
    with_nan = paired_difference([*values, np.nan, 1.0], [*base, 0.0, np.inf])
    assert with_nan == pytest.approx((mean, error)), "prompts without two finite values are left out"


def test_few_prompts_have_no_error_to_trust():
    mean, error = paired_difference([1.0] * 7, [0.0] * 7)
    assert (mean, error) == (1.0, np.inf)
    assert paired_difference([1.0] * 8, [0.0] * 8) == (1.0, 0.0)
    assert paired_difference([], [])[0] == -np.inf


@pytest.mark.parametrize("distribution", ["normal", "skewed", "share .5"])
def test_paired_false_alarms_are_as_rare_as_they_say(monkeypatch, distribution):
    monkeypatch.setattr(significance, "RESAMPLES", 199)
    draw, sample = np.random.default_rng(3), DISTRIBUTIONS[distribution][0]
    found = sum(paired(sample(draw, 16), sample(draw, 16)).p < 0.05 for _ in range(200))
    assert found <= stats.binom.ppf(0.995, 200, 0.05)


def test_holm_adjusts_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([]) == []
    assert significance.LEVEL == 0.95


@pytest.mark.parametrize("ties", [0, 50])
def test_few_differences_are_tested_exactly_whatever_the_number_of_ties(ties):
    """If all 13 differ to one side, two of 2^13 permutations are as extreme."""
    assert paired([1.0 + i for i in range(13)] + [0.0] * ties, [0.0] * (13 + ties)).p == pytest.approx(2 / 2**13)
    assert paired([1.0] + [0.0] * ties, [0.0] * (1 + ties)).p == 1
