"""Stream of tokens: windows of texts that are read and tokenized while a run goes on, for what is too large to hold.

The documents of all shards stand one after the other, an end token after each, and sample k is the k-th window of that row.
Nothing is shuffled. A window is found again from its cursor, the shard, row and token that it begins with, which a checkpoint
keeps: what is left over of a row in the window before belongs to it.

Every rank reads all of the stream and takes its own windows: the samples of a step do not depend on how many ranks there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8cfg.data.batches import Batches
from fp8cfg.data.corpus import encoded
from fp8cfg.data.errors import DataError
from fp8cfg.data.samples import Rows, rows_of
from fp8cfg.data.shards import Cursor, Shards
from fp8cfg.data.tokenizer import Tokenizer


class Stream:
    """Samples in the order of a stream, by their numbers since the start of a run. Those of a step, of which there are `held`, are
    read together, so that all ranks find a wrong row in the same step, and kept, so that it can be asked for in pieces and twice.
    For earlier ones the stream is read again.

    eod, end: as of Windows."""

    def __init__(
        self,
        shards: Shards,
        tokenizer: Tokenizer,
        seq_length: int,
        held: int,
        eod: int | None = None,
        end: int | None = None,
    ) -> None:
        self.shards, self.tokenizer, self.seq_length = shards, tokenizer, seq_length
        self._held, self._eod, self._end = held, eod, end
        self.restart(0, Cursor())

    @property
    def masked(self) -> bool:
        return self._eod is not None

    @property
    def sha256(self) -> str:
        return self.shards.sha256

    def drawn(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        return cursor

    def read(self, places: np.ndarray) -> Rows:
        return rows_of(
            np.stack([self._at(number) for number in places.tolist()]).astype(np.int64),
            self._eod,
            self._end,
        )

    def cursor(self, number: int) -> Cursor:
        """Where sample `number` begins, which is known once the one before it is read."""
        if number == self._origin[0]:
            return self._origin[1]
        self._at(number - 1)
        return self._windows[number - 1 - self._first][1]

    def restart(self, number: int, cursor: Cursor) -> None:
        """Go on with sample `number`, which begins at `cursor`; that it is there is seen when it is read. DataError for a shard
        that is not."""
        if cursor.shard >= len(self.shards.paths):
            raise DataError(
                f"cannot resume: shard={cursor.shard} of the checkpoint is not one of"
                f" {len(self.shards.paths)}"
            )
        self._origin = self._first, _ = number, cursor
        self._windows = deque[tuple[np.ndarray, Cursor]]()
        self._ahead = self._cut(cursor)

    def _at(self, number: int) -> np.ndarray:
        if number < self._origin[0]:
            raise DataError(
                f"sample {number} is before the place {self._origin[0]} from which the stream was"
                " resumed"
            )
        if number < self._first:
            self.restart(*self._origin)
        step = number // self._held * self._held
        while self._first + len(self._windows) < step + self._held:
            self._windows.append(next(self._ahead))
        while self._first < step:
            self._windows.popleft()
            self._first += 1
        return self._windows[number - self._first][0]

    def _cut(self, start: Cursor) -> Iterator[tuple[np.ndarray, Cursor]]:
        """Windows of seq_length + 1 tokens from `start` on, each with the place of its last token, which the next begins with."""
        pieces, length = deque[tuple[Cursor, np.ndarray]](), 0
        for cursor, tokens in self._documents(start):
            pieces.append((cursor, tokens))
            length += len(tokens)
            while length > self.seq_length:
                window = _first(pieces, self.seq_length + 1)
                length -= self.seq_length
                _drop(pieces, self.seq_length)
                yield window, pieces[0][0]

    def _documents(self, start: Cursor) -> Iterator[tuple[Cursor, np.ndarray]]:
        """The tokens of each text from `start` on, its end token included, and where they stand."""
        cursors = deque[Cursor]()

        def texts() -> Iterator[bytes]:
            for cursor, text in self.shards.texts(start):
                cursors.append(cursor)
                yield text

        for tokens in encoded(texts(), self.tokenizer):
            cursor = cursors.popleft()
            if start.digest and cursor._replace(token=start.token) != start:
                raise DataError(
                    f"cannot resume: row {start.row} of {self.shards.paths[start.shard]} is not the"
                    " one that the checkpoint stands in; rows after it may change, those up to"
                    " it not"
                )
            yield cursor._replace(token=start.token), tokens[start.token :]
            start = Cursor()


@dataclass(frozen=True, eq=False)
class StreamBatches(Batches):
    """Batches of a stream. A checkpoint keeps the cursor of the sample that comes next, and a resumed run asks for the row that it
    stands in, not for shards that may have been mended or added meanwhile."""

    samples: Stream

    def state(self, step: int) -> dict[str, Any]:
        cursor = self.samples.cursor(step * self.global_batch_size)
        return super().state(step) | {"corpus_sha256": self.sha256, "stream": cursor._asdict()}

    def resume(self, state: Mapping[str, Any]) -> int:
        step = super().resume(state)
        if not isinstance(place := state.get("stream"), Mapping):
            raise DataError("cannot resume: the checkpoint has no place in a stream")
        self.samples.restart(step * self.global_batch_size, Cursor(**place))
        self.samples.read(np.array([step * self.global_batch_size]))
        return step

    def _identity(self) -> dict[str, Any]:
        return {key: value for key, value in super()._identity().items() if key != "corpus_sha256"}


def _first(pieces: deque[tuple[Cursor, np.ndarray]], count: int) -> np.ndarray:
    """The first `count` tokens, copied."""
    parts = []
    for _, tokens in pieces:
        parts.append(tokens[:count])
        count -= len(parts[-1])
        if not count:
            break
    return np.concatenate(parts)


def _drop(pieces: deque[tuple[Cursor, np.ndarray]], count: int) -> None:
    """Take the first `count` tokens away."""
    while count:
        cursor, tokens = pieces.popleft()
        if len(tokens) > count:
            pieces.appendleft((cursor._replace(token=cursor.token + count), tokens[count:]))
        count -= min(count, len(tokens))
