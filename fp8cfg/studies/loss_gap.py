"""Loss gaps between paired runs, and what a few seeds can tell about them.

The runs of a pair have the same seed: the same first weights and the same samples in the same
order. Their losses at the same step differ by the precision, and by chance: rounding changes, and
the runs drift apart as two runs of the same precision would. Steps of one run are correlated, so a
run counts once:

    gap of a seed      mean over the last quarter of the steps of (loss - loss of the baseline)
    gap                mean over the seeds
    noise              t * sd / sqrt(seeds), with sd the standard deviation of the gaps of the seeds
    detectable gap     max(noise, tolerance) + t80 * sd / sqrt(seeds)

t is the 95 % quantile of Student's t distribution with seeds - 1 degrees of freedom, t80 its 80 %
quantile. This is the one-sided paired t test: without any difference between the precisions, a
gap exceeds the noise in one of twenty studies. The detectable gap exceeds both noise and tolerance
in about four of five studies.

The baseline's own seeds give the noise band: how far two means of as many baseline runs with other
seeds are apart by chance. It has the variance of weights and data in it, which cancels in a pair, so
it is wider than the noise. It is the scale to read a gap on, and no verdict depends on it.
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
"""95 % quantiles of Student's t distribution, from 1 degree of freedom on."""
T_80 = (
    *(1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879),
    *(0.876, 0.873, 0.870, 0.868, 0.866, 0.865, 0.863, 0.862, 0.861, 0.860),
    *(0.859, 0.858, 0.858, 0.857, 0.856, 0.856, 0.855, 0.855, 0.854, 0.854),
)
"""80 % quantiles."""
MOST_SEEDS = 30
"""Largest number of seeds that is suggested. Beyond it, longer runs or a larger tolerance help."""


def window_length(num_steps: int) -> int:
    """Returns the number of last steps that are averaged: a quarter, at least one."""
    return max(1, num_steps // 4)


@dataclass(frozen=True)
class GapAtStep:
    """Gap of the losses in the steps up to one step.

    Attributes:
        step: The last step of the window.
        mean: Mean over the seeds. Positive if the loss is higher than the baseline's.
        noise: Largest gap that chance explains (95 %). None with one seed.
    """

    step: int
    mean: float
    noise: float | None

    def is_worse(self, tolerance: float) -> bool:
        """Whether the gap exceeds both the noise and the tolerance."""
        return self.mean > max(tolerance, self.noise or 0.0)

    @property
    def is_lower(self) -> bool:
        """Whether the loss is lower than the baseline's, beyond the noise."""
        return self.noise is not None and self.mean < -self.noise


@dataclass(frozen=True)
class Gaps:
    """Gaps of one precision to the baseline.

    Attributes:
        seeds: Gap of each seed in the last window.
        curve: Gaps at each step, in windows of the same length that end there. Windows are shorter
            at the beginning.
    """

    seeds: Mapping[int, float]
    curve: Sequence[GapAtStep]

    @property
    def last(self) -> GapAtStep:
        """The gap in the last window, which decides."""
        return self.curve[-1]

    @property
    def largest(self) -> GapAtStep:
        """The largest gap in any window."""
        return max(self.curve, key=lambda gap: gap.mean)

    def worse_from(self, tolerance: float) -> int | None:
        """Returns the step from which on all gaps are worse, or None if the last one is not."""
        first = None
        for gap in reversed(self.curve):
            if not gap.is_worse(tolerance):
                break
            first = gap.step
        return first

    def detectable(self, tolerance: float) -> float | None:
        """Returns the gap that is called worse in four of five studies. None with one seed."""
        count = len(self.seeds)
        if count < 2:
            return None
        return _detectable(statistics.stdev(self.seeds.values()), count, tolerance)

    def seeds_needed(self, tolerance: float) -> int | None:
        """Returns the number of seeds that would detect a gap of twice the tolerance.

        None if it takes more than MOST_SEEDS, or with one seed. No number of seeds detects a gap of
        just the tolerance: half of all estimates are below the true gap.
        """
        if len(self.seeds) < 2:
            return None
        deviation = statistics.stdev(self.seeds.values())
        for count in range(2, MOST_SEEDS + 1):
            if _detectable(deviation, count, tolerance) <= 2 * tolerance:
                return count
        return None


def _detectable(deviation: float, count: int, tolerance: float) -> float:
    """Returns the detectable gap of `count` seeds whose gaps have a standard deviation."""
    error = deviation / math.sqrt(count)
    return max(student_t(T_95, count) * error, tolerance) + student_t(T_80, count) * error


def student_t(quantiles: Sequence[float], count: int) -> float:
    """Returns the quantile for `count` values. Above 31 values, the last one of the table."""
    return quantiles[min(count - 1, len(quantiles)) - 1]


def paired_gaps(
    baseline: Mapping[int, Losses], other: Mapping[int, Losses], length: int | None = None
) -> Gaps:
    """Computes the gaps between two precisions.

    Args:
        baseline: Losses of the baseline by seed.
        other: Losses of the other precision, of the same seeds.
        length: Steps of a window. Defaults to a quarter of the steps that all runs have.

    Returns:
        The gaps at the steps that all runs have.

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
    """Returns the steps that all runs have, in order."""
    steps = set(runs[0]).intersection(*runs[1:])
    return sorted(steps)


def smoothed(
    baseline: Mapping[int, Losses], other: Mapping[int, Losses], steps: Sequence[int], length: int
) -> Array:
    """Returns the smoothed differences of two precisions, of shape [seeds, steps]."""
    differences = [
        [other[seed][step] - losses[step] for step in steps] for seed, losses in baseline.items()
    ]
    return trailing_means(np.array(differences, dtype=np.float64), length)


def trailing_means(values: Array, length: int) -> Array:
    """Returns the mean of each value and the values before it, `length` values in all.

    Args:
        values: Of shape [seeds, steps].
        length: Number of values. The first means have fewer.
    """
    sums = np.cumsum(values, axis=1)
    sums[:, length:] -= sums[:, :-length].copy()
    counts = np.minimum(np.arange(1, values.shape[1] + 1), length)
    return sums / counts


def noise_of_means(values: Array) -> Array | None:
    """Returns the one-sided 95 % bounds for means over seeds.

    Args:
        values: Of shape [seeds, steps]. Rows are independent.

    Returns:
        Of shape [steps]. None with one seed.
    """
    count = len(values)
    if count < 2:
        return None
    errors: Array = values.std(0, ddof=1) / math.sqrt(count)
    return student_t(T_95, count) * errors


def seed_band(baseline: Mapping[int, Losses], steps: Sequence[int], length: int) -> Array | None:
    """Returns the noise band from the baseline's seeds.

    Args:
        baseline: Losses of the baseline by seed.
        steps: The steps.
        length: Steps of a window.

    Returns:
        At each step, how far the means of two groups of baseline runs are apart by chance (95 %),
        if each group has as many seeds as `baseline` and none in common. None with one seed.
    """
    losses = [[run[step] for step in steps] for run in baseline.values()]
    noise = noise_of_means(trailing_means(np.array(losses, dtype=np.float64), length))
    return None if noise is None else noise * math.sqrt(2)
