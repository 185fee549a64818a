"""Statistics of loss gaps between paired runs with a few seeds.

The runs of a pair have the same seed: the same first weights and the same samples in the same
order. Their losses at the same step differ by the precision and by chance. Chance acts through
rounding: two runs of the same precision with other rounding drift apart too. Losses of neighboring
steps are correlated. Each step as a sample would make the noise far too small, so a run counts
once:

    gap of a seed      mean over the last quarter of the steps of (loss - loss of the baseline)
    gap                mean over the seeds
    noise              t * sd / sqrt(seeds), with sd the standard deviation of the gaps of the seeds
    detectable gap     max(noise, tolerance) + t80 * sd / sqrt(seeds)

t is the 95 % quantile of Student's t distribution with seeds - 1 degrees of freedom, t80 its 80 %
quantile. This is the one-sided paired t test. One-sided, because a lower loss never fails. Without
any difference between the precisions, a gap exceeds the noise in one of twenty studies. A true gap
of the detectable size exceeds both noise and tolerance in about four of five studies.

The baseline's own seeds give the noise band: the distance by chance between the means of two groups
of baseline runs with different seeds. It includes the variance of weights and data. This variance
cancels in a pair, so the band is wider than the noise. It is a scale for readers. No verdict uses
it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Losses = Mapping[int, float]
"""Training losses by step."""
T_95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
    *(1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697),
)
"""95 % quantiles of Student's t distribution, for 1 to 30 degrees of freedom.

A table, because only scipy has the function, and fp8cfg does not depend on it."""
T_80 = (
    *(1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879),
    *(0.876, 0.873, 0.870, 0.868, 0.866, 0.865, 0.863, 0.862, 0.861, 0.860),
    *(0.859, 0.858, 0.858, 0.857, 0.856, 0.856, 0.855, 0.855, 0.854, 0.854),
)
"""80 % quantiles of Student's t distribution, for 1 to 30 degrees of freedom."""
MOST_SEEDS = 30
"""Largest suggested number of seeds. Beyond it, longer runs or a larger tolerance help more."""


def window_length(num_steps: int) -> int:
    """Returns the steps of the last window: a quarter of all steps, at least one."""
    # Long enough to average out single batches, short enough to ignore the start of training.
    return max(1, num_steps // 4)


@dataclass(frozen=True)
class GapAtStep:
    """Gap of the losses in a window of steps.

    Attributes:
        step: Last step of the window.
        mean: Mean over the seeds in nats per token. Positive if the baseline's loss is lower.
        noise: Largest gap by chance (95 %). None with one seed.
    """

    step: int
    mean: float
    noise: float | None

    def is_worse(self, tolerance: float) -> bool:
        """Whether the gap exceeds both the noise and the tolerance."""
        # One seed has no noise: only the tolerance counts.
        return self.mean > max(tolerance, self.noise or 0.0)

    @property
    def is_lower(self) -> bool:
        """Whether the loss is lower than the baseline's by more than the noise."""
        return self.noise is not None and self.mean < -self.noise


@dataclass(frozen=True)
class Gaps:
    """Gaps of one precision to the baseline.

    Attributes:
        seeds: Gap of each seed in the last window.
        curve: Gap of the window up to each step. The first windows are shorter.
    """

    seeds: Mapping[int, float]
    curve: Sequence[GapAtStep]

    @property
    def last(self) -> GapAtStep:
        """The gap in the last window. It decides the verdict."""
        return self.curve[-1]

    @property
    def largest(self) -> GapAtStep:
        """The largest gap in any window."""
        return max(self.curve, key=lambda gap: gap.mean)

    def worse_from(self, tolerance: float) -> int | None:
        """Returns the first step of the last stretch of worse gaps. None if the last gap passes."""
        # Backwards: a passing spike in the middle of a run is no verdict.
        first = None
        for gap in reversed(self.curve):
            if not gap.is_worse(tolerance):
                break
            first = gap.step
        return first

    def detectable(self, tolerance: float) -> float | None:
        """Returns the true gap that fails in four of five studies. None with one seed."""
        count = len(self.seeds)
        if count < 2:
            return None
        return _detectable(statistics.stdev(self.seeds.values()), count, tolerance)

    def seeds_needed(self, tolerance: float) -> int | None:
        """Returns the number of seeds to detect a gap of twice the tolerance.

        None if it is above MOST_SEEDS, or with one seed. No number of seeds detects a gap of just
        the tolerance: half of all estimates are below the true gap.
        """
        if len(self.seeds) < 2:
            return None
        # Assumes that more seeds have the same standard deviation.
        deviation = statistics.stdev(self.seeds.values())
        for count in range(2, MOST_SEEDS + 1):
            if _detectable(deviation, count, tolerance) <= 2 * tolerance:
                return count
        return None


def _detectable(deviation: float, count: int, tolerance: float) -> float:
    """Returns the detectable gap.

    Args:
        deviation: Standard deviation of the gaps of the seeds.
        count: Number of seeds.
        tolerance: See `GapAtStep.is_worse`.
    """
    error = deviation / math.sqrt(count)
    return max(student_t(T_95, count) * error, tolerance) + student_t(T_80, count) * error


def student_t(quantiles: Sequence[float], count: int) -> float:
    """Returns the quantile for the mean of `count` values.

    Args:
        quantiles: T_95 or T_80.
        count: Number of values, at least 2. Above 31 values, the last quantile is returned. It is
            at most 3 % larger than the quantile of the normal distribution.
    """
    # n values have n - 1 degrees of freedom, and index 0 is for 1 degree.
    return quantiles[min(count - 1, len(quantiles)) - 1]


def paired_gaps(
    baseline: Mapping[int, Losses], other: Mapping[int, Losses], length: int | None = None
) -> Gaps:
    """Computes the gaps between two precisions.

    Args:
        baseline: Losses of the baseline by seed.
        other: Losses of the other precision, of the same seeds.
        length: Steps of a window. Defaults to a quarter of the common steps.

    Returns:
        The gaps at the common steps of all runs.

    Raises:
        ValueError: The runs have no step in common.
    """
    steps = common_steps([*baseline.values(), *other.values()])
    if not steps:
        raise ValueError("the runs have no step in common")
    length = length or window_length(len(steps))
    smooth = smoothed(baseline, other, steps, length)
    means = smooth.mean(0)
    noise = noise_of_means(smooth)
    curve = []
    for index, step in enumerate(steps):
        noise_at_step = None if noise is None else float(noise[index])
        curve.append(GapAtStep(step, float(means[index]), noise_at_step))
    last = {seed: float(smooth[row, -1]) for row, seed in enumerate(baseline)}
    return Gaps(last, curve)


def common_steps(runs: Sequence[Losses]) -> list[int]:
    """Returns the common steps of all runs, in order."""
    steps = set(runs[0]).intersection(*runs[1:])
    return sorted(steps)


def smoothed(
    baseline: Mapping[int, Losses], other: Mapping[int, Losses], steps: Sequence[int], length: int
) -> Array:
    """Returns the smoothed differences of two precisions, float64 [seeds, steps]."""
    # Differences within a seed first: the variance of weights and data cancels in a pair.
    differences = [
        [other[seed][step] - losses[step] for step in steps] for seed, losses in baseline.items()
    ]
    return trailing_means(np.array(differences, dtype=np.float64), length)


def trailing_means(values: Array, length: int) -> Array:
    """Returns trailing means: of each value and the values before it.

    Args:
        values: float64 [seeds, steps].
        length: Values of a mean. The first means have fewer.

    Returns:
        float64 [seeds, steps].
    """
    sums = np.cumsum(values, axis=1)
    # A copy, because the slices overlap.
    sums[:, length:] -= sums[:, :-length].copy()
    counts = np.minimum(np.arange(1, values.shape[1] + 1), length)
    return sums / counts


def noise_of_means(values: Array) -> Array | None:
    """Returns the one-sided 95 % bounds of means over seeds.

    Args:
        values: float64 [seeds, steps]. Rows are independent.

    Returns:
        float64 [steps]. None with one seed.
    """
    count = len(values)
    if count < 2:
        return None
    # ddof=1: the deviation of a sample, as the t distribution expects.
    errors: Array = values.std(0, ddof=1) / math.sqrt(count)
    return student_t(T_95, count) * errors


def seed_band(baseline: Mapping[int, Losses], steps: Sequence[int], length: int) -> Array | None:
    """Returns the noise band from the baseline's seeds.

    Args:
        baseline: Losses of the baseline by seed.
        steps: The steps.
        length: Steps of a window.

    Returns:
        float64 [steps]: the distance by chance (95 %) between the means of two groups of baseline
        runs. Both groups have as many seeds as `baseline`, and no common seed. None with one seed.
    """
    losses = [[run[step] for step in steps] for run in baseline.values()]
    noise = noise_of_means(trailing_means(np.array(losses, dtype=np.float64), length))
    # The variance of a difference is the sum of both variances.
    return None if noise is None else noise * math.sqrt(2)
