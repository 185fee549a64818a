from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cfg.data import DataError
from fp8cfg.data.samples import offset, permute

SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**40)


@settings(deadline=None)
@given(n=st.integers(1, 3000), seed=SEEDS, epoch=EPOCHS)
def test_every_sample_comes_exactly_once(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@settings(deadline=None)
@given(n=st.integers(1, 2**62), seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_a_sample_does_not_depend_on_what_is_asked_beside_it(
    n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    index = np.array(
        data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    )
    together = permute(index, n, seed, epoch)
    assert together.min() >= 0 and together.max() < n and len(set(together.tolist())) == len(index)
    assert together.tolist() == [int(permute(int(i), n, seed, epoch)) for i in index]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(permute(np.arange(100), 100, seed, epoch))
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 400


def test_neighbours_are_parted_and_values_are_not_biased() -> None:
    """A shuffle that only looked random, such as a rotation, would pass the tests above."""
    order = permute(np.arange(10_000), 10_000, 0, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert len(set(np.diff(order).tolist())) > 5_000
    for n in (2, 3, 5, 7, 12):
        seen = np.bincount([int(permute(n - 1, n, 0, epoch)) for epoch in range(600)], minlength=n)
        chi2 = ((seen - 600 / n) ** 2 / (600 / n)).sum()
        assert chi2 < 3 * n + 12, (n, seen)


def test_the_order_is_the_same_for_ever() -> None:
    """A resumed run counts on it: these numbers may not change with a platform or a release."""
    assert permute(np.arange(10), 10, 1234, 0).tolist() == [3, 1, 4, 6, 0, 5, 9, 8, 2, 7]
    assert permute(np.arange(5, 7), 2**40 + 1, 1234, 3).tolist() == [564749961855, 389499941915]
    assert offset(1_000_000, 1234, 5) == 473105


def test_offsets_cover_the_range() -> None:
    drawn = [offset(1_000, 7, epoch) for epoch in range(500)]
    assert len(set(drawn)) > 300 and min(drawn) < 50 and max(drawn) > 950


@pytest.mark.parametrize(("index", "n"), [(5, 5), (-1, 5), (0, 0), (0, 2**63)])
def test_outside_of_the_range_is_refused(index: int, n: int) -> None:
    with pytest.raises(DataError):
        permute(index, n, 0, 0)


def test_shape_is_kept() -> None:
    assert permute(np.arange(6).reshape(2, 3), 9, 0, 0).shape == (2, 3)
    assert permute(np.array([], dtype=np.int64), 9, 0, 0).shape == (0,)
