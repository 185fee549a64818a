"""Streaming data: texts are read and tokenized during the run, for data larger than memory.

The documents of all shards are concatenated, with an end token after each. Sample k is the k-th
window of this sequence. There is no shuffling. A checkpoint stores a cursor: shard, row and token
of the next window.

Each rank reads the whole stream and uses its own windows. So the samples of a step do not depend on
the number of ranks.
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
from fp8cfg.data.corpus import encode_documents
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
    """A position in a stream. All numbers start at 0.

    Attributes:
        epoch: Number of the pass over all shards.
        shard: Number of the file.
        row: Number of the row in the file.
        token: Number of the token in the row.
        digest: Hash of the row's text. A resumed run checks it.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0
    token: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Shards:
    """Files of a stream. The list is fixed when a run starts.

    Attributes:
        kind: Format, a key of SUFFIXES.
        path: File, folder or pattern, as the user wrote it.
        text_key: Column of the text.
        paths: The files, sorted by name.
    """

    kind: str
    path: str
    text_key: str
    paths: tuple[Path, ...]

    @classmethod
    def found(cls, kind: str, path: str, text_key: str) -> Shards:
        """Finds the shards at a path.

        Args:
            kind: Name of the data source.
            path: File, folder or pattern.
            text_key: Column of the text.

        Raises:
            DataError: No such file, or the source cannot be streamed.
        """
        if kind not in SUFFIXES:
            raise DataError(
                f"data source {kind!r} cannot be streamed; use one of {', '.join(SUFFIXES)}"
            )
        return cls(kind, path, text_key, tuple(sorted(table_files(kind, path)[0])))

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of names and sizes. No data is read."""
        # Relative names, so that the data may move. A single file may be renamed too.
        root: str | Path = self.paths[0]
        if len(self.paths) > 1:
            root = os.path.commonpath([path.parent for path in self.paths])
        lines = [self.kind]
        for path in self.paths:
            lines.append(f"{path.relative_to(root).as_posix()} {path.stat().st_size}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def description(self) -> str:
        """Text for the header of a run."""
        count = f"{len(self.paths)} files of " if len(self.paths) > 1 else ""
        return f"stream of {count}{self.path}, {size_of(list(self.paths)) / 1e6:.2f} MB"

    def texts(
        self, start: Cursor, on_bad_row: OnBadRow = raise_error
    ) -> Iterator[tuple[Cursor, bytes]]:
        """Yields texts with their positions, endlessly. Empty texts are skipped.

        Args:
            start: Position of the first text.
            on_bad_row: Called with the error of a row without text. The row is skipped unless the
                callback raises.

        Raises:
            DataError: A file cannot be read, or no row of an epoch has text.
        """
        epoch, shard, first, *_ = start
        while True:
            # A resumed first epoch may have only empty rows left. That is no error.
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
        """Yields the row numbers and texts of one file, from row `first`."""
        for number, (place, row) in file_rows(self.kind, path, first, self.text_key, on_bad_row):
            try:
                text = text_of(place, row, self.text_key).encode("utf-8", "replace")
            except DataError as e:
                on_bad_row(e)
                continue
            if text:
                yield number, text


_STEPS_BEFORE = 4
"""Earlier steps whose samples stay in memory.

A run prefetches up to two steps. It still needs positions of older steps for checkpoints and for
reports on bad steps.
"""


class Stream:
    """Samples of a stream, numbered from the start of the run.

    All samples of a step are read together, so all ranks see a bad row in the same step. Samples of
    recent steps stay in memory. For older ones the stream is read again from where this process
    started.

    The first row must have text, to detect a wrong column. Later rows without text are skipped: one
    bad row in terabytes must not stop a run.

    Args:
        shards: The files.
        tokenizer: The tokenizer.
        seq_length: Tokens per sample.
        held: Samples per step on all ranks.
        eod: See Windows.
        end: See Windows.

    Attributes:
        skipped_rows: Number of skipped rows.
        last_skipped: Error of the last skipped row.
    """

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
        """See SampleSource."""
        return self._eod is not None

    @property
    def sha256(self) -> str:
        """See SampleSource."""
        return self.shards.sha256

    def draw(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        """See SampleSource. A stream is not shuffled, so places are the numbers of samples."""
        return cursor

    def read(self, places: np.ndarray) -> Rows:
        """See SampleSource."""
        return rows_of(
            np.stack([self._at(number) for number in places.tolist()]).astype(np.int64),
            self._eod,
            self._end,
        )

    def origins(self, places: np.ndarray) -> list[Origin]:
        """See SampleSource. Origins have the epoch, the file with the row, and the token in it."""
        found: list[Origin] = []
        for number in places.tolist():
            cursor = self.cursor(number)
            place = f"{self.shards.paths[cursor.shard]}, row {cursor.row}"
            found.append({"epoch": cursor.epoch, "place": place, "offset": cursor.token})
        return found

    def cursor(self, number: int) -> Cursor:
        """Returns the position of a sample, for checkpoints.

        Args:
            number: Number of the sample since the start of the run.
        """
        if number == self._origin[0]:
            return self._origin[1]
        # Each window is stored with the position of its last token, where the next one begins.
        self._at(number - 1)
        return self._windows[number - 1 - self._first][1]

    def restart(self, number: int, cursor: Cursor) -> None:
        """Moves to a sample. The position is checked when it is read.

        Args:
            number: Number of the sample since the start of the run.
            cursor: Position of the sample.

        Raises:
            DataError: The shard does not exist.
        """
        if cursor.shard >= len(self.shards.paths):
            raise DataError(
                f"cannot resume: shard={cursor.shard} of the checkpoint is not one of"
                f" {len(self.shards.paths)}"
            )
        # The rows behind this position are read, and counted, again.
        self.skipped_rows = 0
        self.last_skipped = ""
        self._origin = self._first, _ = number, cursor
        self._windows = deque[tuple[np.ndarray, Cursor]]()
        self._ahead = self._cut(cursor)

    def _at(self, number: int) -> np.ndarray:
        """Returns the window of a sample, int [seq_length + 1]. Reads its whole step if needed."""
        if number < self._origin[0]:
            raise DataError(
                f"sample {number} is before the place {self._origin[0]} from which the stream was"
                " resumed"
            )
        # No longer in memory.
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
        """Yields windows of seq_length + 1 tokens, each with the position of its last token."""
        # The last token of a window is only a target, so the next window begins with it.
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
        """Yields the position and the tokens of each text with its end token, from `start`."""
        # The tokenizer reads texts in groups, so their positions wait in a queue.
        cursors = deque[Cursor]()
        first_epoch = start.epoch
        epoch: int | None = None

        def on_bad_row(error: DataError) -> None:
            """Counts a bad row, or raises its error."""
            # No row has had text yet: data.text_key is probably wrong.
            if epoch is None:
                raise error
            if epoch == first_epoch:  # later epochs skip the same rows again
                self.skipped_rows += 1
                self.last_skipped = str(error)

        def texts() -> Iterator[bytes]:
            """Yields the texts, and queues their positions."""
            nonlocal epoch
            for cursor, text in self.shards.texts(start, on_bad_row):
                epoch = cursor.epoch
                cursors.append(cursor)
                yield text

        for tokens in encode_documents(texts(), self.tokenizer):
            cursor = cursors.popleft()
            # The first text after a resume must be the row of the checkpoint, with equal text.
            if start.digest and cursor._replace(token=start.token) != start:
                raise DataError(
                    f"cannot resume: row {start.row} of {self.shards.paths[start.shard]} has"
                    " changed since the checkpoint; restore the rows up to it, only later ones may change"
                )
            yield cursor._replace(token=start.token), tokens[start.token :]
            start = Cursor()


@dataclass(frozen=True, eq=False)
class StreamBatches(Batches):
    """Batches of a stream. A checkpoint has the cursor of the next sample.

    A resumed run checks only the row at the cursor. Later shards may change between runs.
    """

    samples: Stream

    def state(self, step: int) -> dict[str, Any]:
        """See Batches. Adds the cursor of the next sample."""
        cursor = self.samples.cursor(step * self.global_batch_size)
        return super().state(step) | {"corpus_sha256": self.sha256, "stream": cursor._asdict()}

    def resume(self, state: Mapping[str, Any]) -> int:
        """See Batches. Moves the stream to the cursor."""
        step = super().resume(state)
        place = state.get("stream")
        if not isinstance(place, Mapping):
            raise DataError("cannot resume: the checkpoint has no place in a stream")
        self.samples.restart(step * self.global_batch_size, Cursor(**place))
        # Read the first sample now, so that a changed row is an error of `resume`.
        self.samples.read(np.array([step * self.global_batch_size]))
        return step

    def _identity(self) -> dict[str, Any]:
        """See Batches. Without the fingerprint, since shards may be added between runs."""
        return {key: value for key, value in super()._identity().items() if key != "corpus_sha256"}


def _first(pieces: deque[tuple[Cursor, np.ndarray]], count: int) -> np.ndarray:
    """Returns a copy of the first `count` tokens."""
    parts = []
    for _, tokens in pieces:
        parts.append(tokens[:count])
        count -= len(parts[-1])
        if not count:
            break
    return np.concatenate(parts)


def _drop(pieces: deque[tuple[Cursor, np.ndarray]], count: int) -> None:
    """Removes the first `count` tokens. The cursor of a cut piece moves along."""
    while count:
        cursor, tokens = pieces.popleft()
        if len(tokens) > count:
            pieces.appendleft((cursor._replace(token=cursor.token + count), tokens[count:]))
        count -= min(count, len(tokens))
