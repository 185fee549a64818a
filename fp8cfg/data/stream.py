"""Stream of tokens: windows of texts that are read and tokenized while a run goes on, for what is too large to hold.

The documents of all shards stand one after the other, an end token after each, and sample k is the k-th window of that row.
Nothing is shuffled. A window is found again from its cursor, the shard, row and token that it begins with, which a checkpoint
keeps: what is left over of a row in the window before belongs to it.

Every rank reads all of the stream and takes its own windows: the samples of a step do not depend on how many ranks there are.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8cfg.data.batches import Batches
from fp8cfg.data.corpus import encoded
from fp8cfg.data.files import DataError, size_of
from fp8cfg.data.samples import Origin, Rows, rows_of
from fp8cfg.data.sources import (
    SUFFIXES,
    OnBadRow,
    file_rows,
    raise_error,
    table_files,
    text_of,
)
from fp8cfg.data.tokenizer import Tokenizer


class Cursor(NamedTuple):
    """A place in a stream: how often all shards were read before, the shard, the row in it, and the token of that row, each from
    0. `digest` is of the row's text, by which a resumed run knows it again."""

    epoch: int = 0
    shard: int = 0
    row: int = 0
    token: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Shards:
    """The files of a stream at `path`; `text_key` is the column of the text. Which they are is settled once, when a run begins."""

    kind: str
    path: str
    text_key: str
    paths: tuple[Path, ...]

    @classmethod
    def found(cls, kind: str, path: str, text_key: str) -> Shards:
        """The shards at `path`, a file, a folder or a pattern. DataError where there is none, and for a kind without shards."""
        if kind not in SUFFIXES:
            raise DataError(
                f"data source {kind!r} is not read as a stream; {', '.join(SUFFIXES)} are"
            )
        return cls(kind, path, text_key, tuple(sorted(table_files(kind, path)[0])))

    @cached_property
    def sha256(self) -> str:
        """A fingerprint of their names and sizes, for which nothing is read; the name of a single file does not count."""
        above = (
            os.path.commonpath([path.parent for path in self.paths])
            if len(self.paths) > 1
            else self.paths[0]
        )
        said = [
            f"{path.relative_to(above).as_posix()} {path.stat().st_size}" for path in self.paths
        ]
        return hashlib.sha256("\n".join([self.kind, *said]).encode()).hexdigest()

    @property
    def description(self) -> str:
        """What they are, for people."""
        count = f"{len(self.paths)} files of " if len(self.paths) > 1 else ""
        return f"stream of {count}{self.path}, {size_of(list(self.paths)) / 1e6:.2f} MB"

    def texts(
        self, start: Cursor, on_bad_row: OnBadRow = raise_error
    ) -> Iterator[tuple[Cursor, bytes]]:
        """Yields the texts from the row of `start` on, without an end. Empty ones are left out.

        Args:
            start: Place of the first text.
            on_bad_row: Is called for a row without text. The row is skipped unless it raises.

        Raises:
            DataError: A file can't be read, or no row of an epoch has text.
        """
        epoch, shard, first, *_ = start
        while True:
            is_empty = not (shard or first)
            for number in range(shard, len(self.paths)):
                for row, text in self._texts_of_file(self.paths[number], first, on_bad_row):
                    is_empty = False
                    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
                    yield Cursor(epoch, number, row, 0, digest), text
                first = 0
            if is_empty:
                raise DataError(f"{self.path}: empty, there is no text in it")
            epoch, shard = epoch + 1, 0

    def _texts_of_file(
        self, path: Path, first: int, on_bad_row: OnBadRow
    ) -> Iterator[tuple[int, bytes]]:
        """The texts of one file from row `first` on, each with the number of its row."""
        for number, (place, row) in file_rows(self.kind, path, first, self.text_key, on_bad_row):
            try:
                text = text_of(place, row, self.text_key).encode("utf-8", "replace")
            except DataError as e:
                on_bad_row(e)
                continue
            if text:
                yield number, text


_STEPS_BEFORE = 4
"""Steps whose samples are kept before those of the latest: a run reads up to two steps ahead, saves the place after the step before
the one that is under way, and looks up where the samples of that step begin if it was bad."""


class Stream:
    """Samples in the order of a stream, by their numbers since the start of a run. Those of a step, of which there are `held`, are
    read together, so that all ranks find a wrong row in the same step, and kept, so that it can be asked for in pieces and twice.
    For earlier ones the stream is read again.

    The first row must have text. A later row without it is skipped and counted in `skipped_rows`: one bad row in terabytes must
    not end a run. `last_skipped` has the error of the last one.

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
        self.skipped_rows = 0
        self.last_skipped = ""
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

    def origins(self, places: np.ndarray) -> list[Origin]:
        found: list[Origin] = []
        for number in places.tolist():
            cursor = self.cursor(number)
            place = f"{self.shards.paths[cursor.shard]}, row {cursor.row}"
            found.append({"epoch": cursor.epoch, "place": place, "offset": cursor.token})
        return found

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
        while self._first < step - _STEPS_BEFORE * self._held:
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
        first_epoch = start.epoch
        epoch: int | None = None

        def on_bad_row(error: DataError) -> None:
            if epoch is None:
                raise error
            if epoch == first_epoch:  # later epochs skip the same rows again
                self.skipped_rows += 1
                self.last_skipped = str(error)

        def texts() -> Iterator[bytes]:
            nonlocal epoch
            for cursor, text in self.shards.texts(start, on_bad_row):
                epoch = cursor.epoch
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
