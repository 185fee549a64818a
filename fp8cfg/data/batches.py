"""Batches of a training run: windows of a token array, addressed by one integer.

The cursor counts samples since the start of the run. Sample k belongs to epoch k // n and is window permute(k % n) of
that epoch, where n = (tokens - 1) // seq_length. The row is read as a ring, cut into windows from another place in each
epoch: borders move, every window still has its full length, and no window of an epoch overlaps another by more than the
one token that is a target here and an input there.

Optimizer step s takes samples s*G to (s+1)*G, G the global batch size. Ranks share them out in contiguous pieces and each
rank cuts its piece into contiguous micro-batches, so the samples of a step, and their order when the pieces are put
together again, do not depend on how many ranks and micro-batches there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8cfg.data.corpus import fingerprint
from fp8cfg.data.errors import DataError
from fp8cfg.data.order import offset, permute
from fp8cfg.data.token_file import Tokens

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Batches:
    """The training samples of a run; no state, so any batch can be asked for at any time."""

    tokens: Tokens
    seq_length: int
    seed: int
    global_batch_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        _positive(seq_length=self.seq_length, global_batch_size=self.global_batch_size, vocab_size=self.vocab_size)
        _one_window(self.tokens, self.seq_length)

    @property
    def windows(self) -> int:
        """Windows, and so samples, in an epoch."""
        return (len(self.tokens) - 1) // self.seq_length

    @cached_property
    def sha256(self) -> str:
        return fingerprint(self.tokens)

    def batch(
        self, step: int, rank: int = 0, world: int = 1, micro: int = 0, num_micro: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch `micro` of optimizer step `step` on one rank.

        Returns (tokens, targets), int64 [global_batch_size / (world * num_micro), seq_length]; targets are the tokens
        that follow. DataError when the global batch does not divide, or a token is outside of the vocabulary.
        """
        pieces = world * num_micro
        if step < 0 or not 0 <= rank < world or not 0 <= micro < num_micro:
            raise DataError(f"no batch for step={step}, rank {rank} of {world}, micro-batch {micro} of {num_micro}")
        _divides("global_batch_size", self.global_batch_size, pieces, f"{world} ranks x {num_micro} micro-batches")
        size = self.global_batch_size // pieces
        return self.rows(step * self.global_batch_size + (rank * num_micro + micro) * size, size)

    def rows(self, cursor: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples cursor to cursor + count of the run, as `batch` returns them."""
        if cursor < 0 or count < 1:
            raise DataError(f"no {count} samples from cursor={cursor}")
        return _windows(self.tokens, self._starts(cursor, count), self.seq_length, self.vocab_size)

    def _starts(self, cursor: int, count: int) -> np.ndarray:
        epochs, index = np.divmod(np.arange(cursor, cursor + count), self.windows)
        starts = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order = permute(index[here], self.windows, self.seed, epoch)
            starts[here] = offset(len(self.tokens), self.seed, epoch) + order * self.seq_length
        return starts

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps after `step` optimizer steps; plain JSON values."""
        return {
            "seed": self.seed,
            "seq_length": self.seq_length,
            "samples_seen": step * self.global_batch_size,
            "corpus_sha256": self.sha256,
        }

    def resume(self, state: Mapping[str, Any]) -> int:
        """The step to go on with. DataError when the state belongs to other data, or falls inside a global batch."""
        for key, mine in self.state(0).items():
            if key != "samples_seen" and state.get(key) != mine:
                raise DataError(f"cannot resume: {key} is {mine!r}, the checkpoint has {state.get(key)!r}; restore it")
        seen = state.get("samples_seen")
        if type(seen) is not int or seen < 0:
            raise DataError(f"cannot resume: samples_seen={seen!r} in the checkpoint is no count of samples")
        step, inside = divmod(seen, self.global_batch_size)
        if inside:
            raise DataError(
                f"cannot resume: global_batch_size={self.global_batch_size} does not divide the {seen} samples seen; "
                "go on with the one of the checkpoint, or with a divisor of it"
            )
        return step


def eval_batches(
    tokens: Tokens, seq_length: int, batch_size: int, limit: int, vocab_size: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """At most `limit` batches of windows that do not overlap, spread evenly over `tokens`; always the same ones.

    batch_size counts the windows of a batch on all ranks together; each gets its contiguous share,
    int64 [batch_size / world, seq_length]. Every batch is full, so every rank takes equally many steps, shapes never
    change, and the windows do not depend on `world`. DataError, before the first batch, when not one batch is there.
    """
    _positive(seq_length=seq_length, batch_size=batch_size, limit=limit, vocab_size=vocab_size)
    _one_window(tokens, seq_length)
    if not 0 <= rank < world:
        raise DataError(f"no batches for rank {rank} of {world}")
    _divides("batch_size", batch_size, world, f"{world} ranks")
    available = (len(tokens) - 1) // seq_length
    if available < batch_size:
        raise DataError(
            f"the validation part has {available} windows of seq_length={seq_length}, less than one batch of "
            f"{batch_size}: raise validation_fraction, or lower seq_length or the evaluation batch"
        )
    total = min(limit, available // batch_size) * batch_size
    starts = (np.arange(total) * available // total * seq_length).reshape(-1, world, batch_size // world)
    return (_windows(tokens, mine, seq_length, vocab_size) for mine in starts[:, rank])


def _windows(tokens: Tokens, starts: np.ndarray, seq_length: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    positions = (starts[:, None] + np.arange(seq_length + 1)) % len(tokens)
    window = tokens[positions].astype(np.int64)
    if window.min() < 0 or window.max() >= vocab_size:
        bad = ((window < 0) | (window >= vocab_size)).argmax()
        raise DataError(
            f"token {window.flat[bad]} at index {positions.flat[bad]} of this part of the corpus is not in "
            f"range(vocab_size={vocab_size}): the corpus was made with another vocabulary"
        )
    both = torch.from_numpy(window)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name}={value} must be at least 1")


def _one_window(tokens: Tokens, seq_length: int) -> None:
    if len(tokens) < seq_length + 1:
        raise DataError(
            f"{len(tokens)} tokens are less than one window of seq_length + 1 = {seq_length + 1}: "
            "use more text or a smaller seq_length"
        )


def _divides(name: str, value: int, by: int, what: str) -> None:
    if value % by:
        raise DataError(f"{name}={value} is not divisible by {by} ({what}): use {max(by, value // by * by)} instead")
