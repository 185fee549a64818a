from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cfg.data import Batches, DataError, Windows, eval_batches
from fp8cfg.data.samples import Mixture, schedule, shares

weights = st.lists(st.floats(0.01, 100).map(lambda w: float(f"{w:.3g}")), min_size=1, max_size=6)


def windows(first: int, count: int) -> Windows:
    """Windows of 4 tokens, whose numbers begin at `first`."""
    return Windows(np.arange(first, first + 4 * count + 1), 4, 10_000)


def mixed(*parts: tuple[int, float]) -> Mixture:
    return Mixture(
        [windows(1000 * n, count) for n, (count, _) in enumerate(parts)],
        [weight for _, weight in parts],
    )


@settings(deadline=None, max_examples=60)
@given(weights)
def test_every_beginning_has_the_shares_within_one_sample(given: list[float]) -> None:
    parts = shares(given)
    order = schedule(parts)
    taken = np.cumsum(order[:, None] == np.arange(len(parts)), axis=0)
    due = np.arange(1, len(order) + 1)[:, None] * np.array(parts) / sum(parts)
    assert (abs(taken - due) < 1 + 1e-9).all() and taken[-1].tolist() == parts


def test_weights_are_read_as_they_are_written() -> None:
    assert (
        shares([0.7, 0.3]) == [7, 3]
        and shares([1, 2, 3.0]) == [1, 2, 3]
        and shares([30, 70]) == [3, 7]
    )
    assert shares([1 / 3, 2 / 3]) == [1, 2] and shares([0.123456789, 0.876543211]) == [12346, 87654]
    with pytest.raises(DataError, match="less than a 200,000th"):
        shares([1e-9, 1])


def test_each_source_has_its_own_epochs() -> None:
    batches = Batches(mixed((40, 0.75), (5, 0.25)), 7, 20)
    tokens = batches.rows(0, 40)[0].numpy()
    small = tokens[tokens[:, 0] >= 1000]
    assert len(small) == 10 and len(set(small[:5].flatten().tolist())) == 20 == len(
        set(small[5:].flatten().tolist())
    )
    assert len(set(tokens[tokens[:, 0] < 1000].flatten().tolist())) == 120
    assert Batches(mixed((40, 0.75), (5, 0.25)), 8, 20).rows(0, 40)[0].tolist() != tokens.tolist()


def test_two_sources_alike_are_not_in_one_order() -> None:
    tokens = Batches(mixed((16, 1), (16, 1)), 0, 4).rows(0, 32)[0].numpy()[:, 0]
    assert (tokens[0::2] % 1000).tolist() != (tokens[1::2] % 1000).tolist()


@settings(deadline=None, max_examples=20)
@given(cursor=st.integers(0, 3000), cut=st.integers(1, 19))
def test_the_sequence_can_be_taken_up_anywhere(cursor: int, cut: int) -> None:
    whole = Batches(mixed((9, 0.2), (5, 0.5), (30, 0.3)), 3, 4)
    again = Batches(mixed((9, 0.2), (5, 0.5), (30, 0.3)), 3, 4)
    parts = [again.rows(cursor, cut)[0].tolist(), again.rows(cursor + cut, 20 - cut)[0].tolist()]
    assert parts[0] + parts[1] == whole.rows(cursor, 20)[0].tolist()


def test_the_state_is_of_sources_and_shares() -> None:
    state = json.loads(json.dumps(Batches(mixed((9, 0.2), (5, 0.8)), 3, 4).state(6)))
    assert Batches(mixed((9, 2), (5, 8)), 3, 4).resume(state) == 6
    for other in (mixed((9, 0.3), (5, 0.7)), mixed((8, 0.2), (5, 0.8)), mixed((5, 0.2), (9, 0.8))):
        with pytest.raises(DataError, match="corpus_sha256"):
            Batches(other, 3, 4).resume(state)


def test_evaluation_takes_each_source_in_its_share_and_none_twice() -> None:
    mixture = mixed((40, 0.75), (5, 0.25))
    assert len(mixture) == 22  # a sixth of the small one would be the 23rd
    tokens = np.concatenate([tokens.numpy() for tokens, _ in eval_batches(mixture, 4, 100)])
    assert (
        len(tokens) == 20 == len(set(tokens[:, 0].tolist())) and (tokens[:, 0] >= 1000).sum() == 5
    )
