"""Decimation of long series for figures. Spikes stay visible."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Reduction = Callable[..., Any]


def keep_extremes(values: Floats, limit: int) -> NDArray[np.int64]:
    """Chooses points of a curve so that every spike stays.

    A plain stride would drop most spikes of a loss. Instead the curve is cut into equal parts. Four
    points of each part stay: the first, the smallest, the largest and the first non-finite one. The
    last point of the curve stays too.

    Args:
        values: Values of shape [N]. NaN and infinity are gaps.
        limit: Most points, at least 5.

    Returns:
        Increasing indices, int64. All of them if there are at most `limit` values.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    indices = {count - 1}
    # Up to four points of each part and the last point of the curve: at most `limit` points.
    edges = np.linspace(0, count, max((limit - 1) // 4, 1) + 1).astype(np.int64)
    for start, end in pairwise(edges):
        part = values[start:end]
        is_finite = np.isfinite(part)
        indices.add(int(start))
        if is_finite.any():
            indices.add(int(start + np.where(is_finite, part, np.inf).argmin()))
            indices.add(int(start + np.where(is_finite, part, -np.inf).argmax()))
        if not is_finite.all():
            # Otherwise a line would bridge the gap. argmin finds the first False.
            indices.add(int(start + is_finite.argmin()))
    return np.array(sorted(indices))


def running_mean(values: Floats, window: int) -> Floats:
    """Returns the mean of a centered window around each value.

    The window is smaller at both ends. Non-finite values do not count.

    Args:
        values: Values of shape [N].
        window: Number of values in the window.

    Returns:
        Means of shape [N]. NaN if a window has no finite value.
    """
    # Differences of cumulative sums: linear in N for any window.
    is_finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    index = np.arange(len(values))
    start = np.maximum(index - window // 2, 0)
    end = np.minimum(index + (window + 1) // 2, len(values))
    size = counts[end] - counts[start]
    return np.where(size > 0, (sums[end] - sums[start]) / np.maximum(size, 1), np.nan)


def merge_columns(values: Floats, num_columns: int, reduction: Reduction) -> Floats:
    """Merges neighboring columns of a matrix.

    Args:
        values: Matrix [rows, columns]. NaN is a missing value.
        num_columns: Columns of the result. A smaller matrix stays as it is.
        reduction: np.fmax, np.fmin or np.nanmean. All of them skip NaN.

    Returns:
        Matrix [rows, num_columns].
    """
    columns = values.shape[1]
    if columns <= num_columns:
        return values
    starts = (np.arange(num_columns) * columns) // num_columns
    if reduction is np.nanmean:
        # Not a ufunc, so it has no reduceat. It would also warn about columns without a value.
        is_value = ~np.isnan(values)
        sums = np.add.reduceat(np.where(is_value, values, 0.0), starts, axis=1)
        counts = np.add.reduceat(is_value.astype(np.int64), starts, axis=1)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    merged: Floats = reduction.reduceat(values, starts, axis=1)  # type: ignore[attr-defined]
    return merged
