"""Gaps of paired runs, next to scipy's paired t test and to simulated studies whose gap is known."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from fp8cfg.studies.loss_gap import (
    T_80,
    T_95,
    Gaps,
    noise_of_means,
    paired_gaps,
    seed_band,
    student_t,
    trailing_means,
    window_length,
)

stats = pytest.importorskip("scipy.stats")
TOLERANCE = 0.01


def losses(values: Sequence[float], first: int = 1) -> dict[int, float]:
    return dict(enumerate(values, first))


def test_the_quantiles_are_scipys() -> None:
    for degrees in range(1, len(T_95) + 1):
        assert T_95[degrees - 1] == pytest.approx(stats.t.ppf(0.95, degrees), abs=6e-4)
        assert T_80[degrees - 1] == pytest.approx(stats.t.ppf(0.80, degrees), abs=6e-4)
    assert student_t(T_95, 2) == T_95[0]
    assert student_t(T_95, 1000) == pytest.approx(stats.norm.ppf(0.95), abs=0.06)


@pytest.mark.parametrize("seeds", [2, 3, 5, 9])
def test_a_gap_exceeds_the_noise_where_scipys_paired_t_test_is_significant(seeds: int) -> None:
    draw = random.Random(seeds)
    significant = 0
    for _ in range(200):
        baseline = [draw.gauss(3, 0.1) for _ in range(seeds)]
        other = [loss + draw.gauss(0.01, 0.01) for loss in baseline]
        result = stats.ttest_rel(other, baseline, alternative="greater")
        gaps = [b - a for a, b in zip(baseline, other, strict=True)]
        noise = noise_of_means(np.array(gaps)[:, None])
        assert noise is not None
        if abs(result.pvalue - 0.05) > 1e-4:
            assert (statistics.fmean(gaps) > noise[0]) == (result.pvalue < 0.05)
        significant += result.pvalue < 0.05
    assert 20 < significant < 200


def drifting(draw: random.Random, steps: int, gap: float) -> list[float]:
    """Gaps of the steps of a pair of runs: correlated, as the losses of runs that drift apart."""
    value = draw.gauss(0, 0.01)
    values = []
    for _ in range(steps):
        value = 0.95 * value + draw.gauss(0, 0.01 * math.sqrt(1 - 0.95**2))
        values.append(value + gap)
    return values


def simulated(draw: random.Random, gap: float, seeds: int = 3, steps: int = 40) -> Gaps:
    baseline = {seed: losses([3.0] * steps) for seed in range(seeds)}
    other = {seed: losses([3.0 + d for d in drifting(draw, steps, gap)]) for seed in range(seeds)}
    return paired_gaps(baseline, other, steps // 4)


@pytest.mark.parametrize("seeds", [3, 5])
def test_one_in_twenty_studies_without_a_gap_exceeds_the_noise(seeds: int) -> None:
    draw = random.Random(7)
    alarms = sum(simulated(draw, 0.0, seeds).last.is_worse(0.0) for _ in range(1000))
    assert 30 <= alarms <= 70  # 50 expected; the standard deviation is 7


@pytest.mark.parametrize(("seeds", "tolerance"), [(3, 0.0), (5, 0.0), (3, 0.05)])
def test_four_in_five_studies_find_the_detectable_gap(seeds: int, tolerance: float) -> None:
    draw = random.Random(11)
    # The true standard deviation of a seed's gap, from many seeds.
    many = simulated(draw, 0.0, seeds=400)
    deviation = statistics.stdev(many.seeds.values())
    error = deviation / math.sqrt(seeds)
    gap = max(student_t(T_95, seeds) * error, tolerance) + student_t(T_80, seeds) * error
    worse = sum(simulated(draw, gap, seeds).last.is_worse(tolerance) for _ in range(500))
    assert 350 <= worse <= 450

    # The estimate of one study scatters, but not its median.
    estimates = [simulated(draw, gap, seeds).detectable(tolerance) for _ in range(200)]
    assert statistics.median(e for e in estimates if e is not None) == pytest.approx(gap, rel=0.25)


def test_windows_are_trailing_means() -> None:
    assert [window_length(steps) for steps in (1, 3, 4, 40, 41)] == [1, 1, 1, 10, 10]
    values = np.array([[1.0, 3.0, 5.0, 7.0], [0.0, 0.0, 4.0, 0.0]])
    assert trailing_means(values, 2).tolist() == [[1.0, 2.0, 4.0, 6.0], [0.0, 0.0, 2.0, 2.0]]
    assert trailing_means(values, 9)[0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_only_steps_that_all_runs_have_are_matched() -> None:
    baseline = {1: losses([3.0, 2.0, 1.0]), 2: losses([3.0, 2.0])}
    other = {1: losses([2.5, 1.5], first=2), 2: losses([3.5, 2.5, 9.0])}
    gaps = paired_gaps(baseline, other, 1)
    assert [gap.step for gap in gaps.curve] == [2]
    assert gaps.seeds == {1: 0.5, 2: 0.5}
    with pytest.raises(ValueError, match="no step in common"):
        paired_gaps({1: losses([1.0])}, {1: losses([1.0], first=5)})


def test_a_precision_is_worse_from_the_step_at_which_it_falls_behind_for_good() -> None:
    wobble = {1: 0.001, 2: -0.001, 3: 0.0005}

    def gaps(by_step: Sequence[float]) -> Gaps:
        baseline = {seed: losses([2.0] * len(by_step)) for seed in wobble}
        other = {
            seed: losses([2.0 + gap + offset for gap in by_step]) for seed, offset in wobble.items()
        }
        return paired_gaps(baseline, other, 4)

    late = gaps([0.0] * 10 + [0.1] * 10)
    assert late.worse_from(TOLERANCE) == 11 and late.last.is_worse(TOLERANCE)
    recovered = gaps([0.1] * 10 + [0.0] * 10)
    assert recovered.worse_from(TOLERANCE) is None and recovered.largest.mean > 0.09
    relapsed = gaps([0.1] * 6 + [0.0] * 6 + [0.1] * 8)
    assert relapsed.worse_from(TOLERANCE) == 13
    lower = gaps([-0.1] * 20)
    assert lower.last.is_lower and not lower.last.is_worse(TOLERANCE)


def test_one_seed_has_no_noise() -> None:
    one = paired_gaps({1: losses([2.0] * 8)}, {1: losses([2.02] * 8)})
    assert one.last.noise is None and one.last.is_worse(0.01) and not one.last.is_worse(0.03)
    assert one.detectable(0.01) is None and one.seeds_needed(0.01) is None
    assert not one.last.is_lower


def test_the_number_of_seeds_follows_the_spread_of_the_gaps() -> None:
    def needed(spread: float) -> int | None:
        offsets = {1: -spread, 2: 0.0, 3: spread}
        other = {seed: losses([2.0 + offset] * 4) for seed, offset in offsets.items()}
        return paired_gaps(dict.fromkeys(other, losses([2.0] * 4)), other).seeds_needed(TOLERANCE)

    assert needed(1e-6) == 2
    few, many = needed(0.01), needed(0.03)
    assert few is not None and many is not None and 2 < few < many
    assert needed(1.0) is None


def test_the_band_holds_two_groups_of_baseline_runs() -> None:
    """Two groups from one distribution are within the band of one in about nine of ten cases."""
    draw = random.Random(3)
    inside = 0
    for _ in range(500):
        groups = [[draw.gauss(3, 0.1) for _ in range(5)] for _ in range(2)]
        band = seed_band({seed: {1: loss} for seed, loss in enumerate(groups[0])}, [1], 1)
        assert band is not None
        inside += abs(statistics.fmean(groups[0]) - statistics.fmean(groups[1])) <= band[0]
    assert 425 <= inside <= 475
