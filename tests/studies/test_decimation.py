"""Decimated curves keep their spikes, and merged columns keep their maximum, minimum or mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fp8cfg.studies.decimation import keep_extremes, merge_columns, running_mean

VALUES = arrays.arrays(
    np.float64, st.integers(1, 400), elements=st.floats(-1e6, 1e6) | st.just(np.nan)
)


@given(VALUES, st.integers(5, 60))
def test_extremes_and_ends_stay(values: np.ndarray, limit: int) -> None:
    kept = keep_extremes(values, limit)
    assert len(kept) <= max(limit, 5)
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0 and kept[-1] == len(values) - 1
    finite = values[np.isfinite(values)]
    if len(finite):
        assert np.nanmax(values[kept]) == finite.max()
        assert np.nanmin(values[kept]) == finite.min()
    assert np.isnan(values[kept]).any() == np.isnan(values).any()


def test_a_single_spike_stays_and_so_does_a_short_curve() -> None:
    values = np.zeros(100_000)
    values[77_777] = 9.0
    values[12_345] = -9.0
    assert {12_345, 77_777} <= set(keep_extremes(values, 1000))
    assert keep_extremes(values[:1000], 1000).tolist() == list(range(1000))


@given(VALUES, st.integers(1, 50))
def test_running_mean_is_numpys_mean_of_each_window(values: np.ndarray, window: int) -> None:
    means = running_mean(values, window)
    for i in (0, len(values) // 2, len(values) - 1):
        part = values[max(i - window // 2, 0) : i + (window + 1) // 2]
        part = part[np.isfinite(part)]
        expected = part.mean() if len(part) else np.nan
        np.testing.assert_allclose(means[i], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("reduction", "numpys"),
    [(np.fmax, np.nanmax), (np.fmin, np.nanmin), (np.nanmean, np.nanmean)],
    ids=["max", "min", "mean"],
)
def test_merged_columns(reduction: np.ufunc, numpys: np.ufunc) -> None:
    values = np.random.default_rng(0).normal(size=(3, 10))
    values[0, 0] = np.nan
    values[1, :3] = np.nan
    merged = merge_columns(values, 4, reduction)
    edges = [0, 2, 5, 7, 10]
    for i in range(4):
        part = values[:, edges[i] : edges[i + 1]]
        for row in range(3):
            expected = np.nan if np.isnan(part[row]).all() else numpys(part[row])
            np.testing.assert_allclose(merged[row, i], expected)
    assert merge_columns(values, 10, reduction) is values
