from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cfg.data import Batches, DataError, Windows, eval_batches

LENGTH = 1_000
TOKENS = np.arange(LENGTH, dtype=np.int32)
WINDOWS = Windows(TOKENS, 10, LENGTH)


def make(length: int = LENGTH, seq_length: int = 8, seed: int = 0, size: int = 16) -> Batches:
    return Batches(
        Windows(np.arange(length, dtype=np.int32), seq_length, vocab_size=length), seed, size
    )


def test_targets_are_the_next_tokens_on_the_ring() -> None:
    tokens, targets = make().batch(0)
    assert tokens.dtype == targets.dtype == torch.int64 and tokens.shape == targets.shape == (16, 8)
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    assert torch.equal(targets, (tokens + 1) % LENGTH)
    assert tokens.is_contiguous() and targets.is_contiguous()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("num_micro", [1, 2, 4])
def test_pieces_of_a_global_batch_make_the_whole_in_order(world: int, num_micro: int) -> None:
    batches = make()
    for step in (0, 3, 100):
        pieces = [
            batches.batch(step, r, world, m, num_micro)
            for r in range(world)
            for m in range(num_micro)
        ]
        for piece, whole in zip(zip(*pieces, strict=True), batches.batch(step), strict=True):
            assert torch.equal(torch.cat(piece), whole)


@settings(deadline=None, max_examples=50)
@given(
    length=st.integers(9, 400),
    seq_length=st.integers(1, 8),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
)
def test_an_epoch_visits_each_window_once(
    length: int, seq_length: int, seed: int, epoch: int
) -> None:
    batches = make(length, seq_length, seed)
    n = len(batches.samples)
    assert n == (length - 1) // seq_length
    tokens, _ = batches.rows(epoch * n, n)
    assert len(set(tokens.flatten().tolist())) == n * seq_length, (
        "no token is an input twice in an epoch"
    )
    first = tokens[:, 0]
    assert len(set(((first - first[0]) % length % seq_length).tolist()) | {0}) <= 2, (
        "windows lie side by side"
    )


def test_epochs_differ_in_order_and_in_borders() -> None:
    batches = make()
    epochs = [
        batches.rows(epoch * len(batches.samples), len(batches.samples))[0][:, 0].tolist()
        for epoch in range(6)
    ]
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 6
    assert len({frozenset(epoch) for epoch in epochs}) > 3
    assert make(seed=1).batch(0)[0].tolist() != make(seed=2).batch(0)[0].tolist()


@settings(deadline=None, max_examples=50)
@given(cursor=st.integers(0, 2_000), cut=st.integers(1, 39))
def test_the_sequence_can_be_taken_up_anywhere(cursor: int, cut: int) -> None:
    whole = make().rows(cursor, 40)[0]
    again = make()
    assert torch.equal(
        torch.cat([again.rows(cursor, cut)[0], again.rows(cursor + cut, 40 - cut)[0]]), whole
    )


def test_a_batch_across_epochs_is_the_same_samples() -> None:
    small = make(length=50, size=64)
    assert torch.equal(small.batch(0)[0], torch.cat([small.rows(i, 1)[0] for i in range(64)]))


def test_the_order_does_not_hang_on_the_batch_size() -> None:
    big, small = make(size=16), make(size=4)
    assert torch.equal(big.batch(5)[0], torch.cat([small.batch(20 + i)[0] for i in range(4)]))


def test_the_cursor_survives_json_and_another_batch_size() -> None:
    state = json.loads(json.dumps(make().state(7)))
    assert state["samples_seen"] == 112 and set(state) == {
        "seed",
        "seq_length",
        "samples_seen",
        "corpus_sha256",
        "tokenizer_sha256",
    }
    assert make().resume(state) == 7
    assert make(size=8).resume(state) == 14
    with pytest.raises(DataError, match="global_batch_size=32 does not divide the 112 samples"):
        make(size=32).resume(state)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"seed": 5}, "seed is 5"),
        ({"seq_length": 4}, "seq_length is 4"),
        ({"length": 999}, "corpus_sha256"),
    ],
)
def test_other_data_is_not_resumed(other: dict[str, int], says: str) -> None:
    with pytest.raises(DataError, match=says):
        make(**other).resume(make().state(7))


@pytest.mark.parametrize("seen", [-16, 1.5, "16", None, True])
def test_a_cursor_that_is_no_count_is_refused(seen: object) -> None:
    with pytest.raises(DataError, match="not a count of samples"):
        make().resume({**make().state(0), "samples_seen": seen})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: make(length=8), "less than one window of seq_length"),
        (lambda: make(seq_length=0), "seq_length=0 must be at least 1"),
        (lambda: make(size=0), "global_batch_size=0"),
        (
            lambda: make().batch(0, 0, 3),
            r"16 is not divisible by 3 \(3 ranks x 1 micro-batches\): use 15 instead",
        ),
        (lambda: make(size=2).batch(0, 0, 4), "use 4 instead"),
        (lambda: make().batch(-1), "step=-1"),
        (lambda: make().rows(-1, 4), "cursor=-1"),
        (lambda: make().rows(0, 0), "no 0 samples"),
        (lambda: make().batch(0, 2, 2), "rank 2 of 2"),
        (lambda: make().batch(0, 0, 1, 4, 4), "micro-batch 4 of 4"),
    ],
)
def test_what_cannot_be_is_refused(call: object, says: str) -> None:
    with pytest.raises(DataError, match=says):
        call()


@pytest.mark.parametrize("bad", [-1, 700])
def test_a_token_outside_of_the_vocabulary_is_found_with_its_index(bad: int) -> None:
    tokens = np.zeros(101, dtype=np.int16)
    tokens[77] = bad
    batches = Batches(Windows(tokens, 10, vocab_size=700), 0, 10)
    with pytest.raises(DataError, match=rf"token {bad} at index 77 .*vocab_size=700"):
        batches.rows(0, len(batches.samples) + 10)
    with pytest.raises(DataError, match="at index 77"):
        list(eval_batches(Windows(tokens, 10, vocab_size=700), 5, 2))


def collect(
    rank: int = 0, world: int = 1, length: int = LENGTH, limit: int = 5
) -> list[torch.Tensor]:
    batches = eval_batches(Windows(np.arange(length), 10, length), 8, limit, rank, world)
    pairs = list(batches)
    assert all(torch.equal(targets, tokens + 1) for tokens, targets in pairs)
    return [tokens for tokens, _ in pairs]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_evaluation_is_the_same_however_many_ranks(world: int) -> None:
    ranks = [collect(rank, world) for rank in range(world)]
    whole = [torch.cat(step) for step in zip(*ranks, strict=True)]
    assert torch.equal(torch.stack(whole), torch.stack(collect()))


def test_evaluation_windows_are_apart_and_spread() -> None:
    starts = torch.cat(collect())[:, 0]
    assert len(starts) == 40 and (starts.diff() >= 10).all() and (starts % 10 == 0).all()
    assert starts[0] == 0 and starts[-1] > 0.95 * LENGTH - 10 and starts.diff().max() <= 30
    everything = torch.cat(collect(limit=1_000))
    assert everything.shape == (96, 10)


def test_evaluation_that_cannot_be_is_refused_before_it_begins() -> None:
    seven = "has 7 samples of seq_length=10, less than one batch of 8: write "
    off = "trainer.val_check_interval=0 to train without validation"
    for world, smaller in ((1, 7), (2, 6), (4, 4)):
        size = f"trainer.global_batch_size={smaller}, "
        with pytest.raises(DataError, match=f"{seven}{size}{off}"):
            eval_batches(Windows(TOKENS[:80], 10, LENGTH), 8, 5, 0, world)
        assert list(eval_batches(Windows(TOKENS[:80], 10, LENGTH), smaller, 5, 0, world))
    with pytest.raises(DataError, match=f"{seven}{off}"):
        eval_batches(Windows(TOKENS[:80], 10, LENGTH), 8, 5, 0, 8)
    with pytest.raises(DataError, match="batch_size=8 is not divisible by 3"):
        eval_batches(WINDOWS, 8, 5, 0, 3)
    with pytest.raises(DataError, match="limit=0"):
        eval_batches(WINDOWS, 8, 0)
    with pytest.raises(DataError, match="rank 2 of 2"):
        eval_batches(WINDOWS, 8, 5, 2, 2)
