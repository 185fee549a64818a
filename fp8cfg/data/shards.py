"""Shards of a stream: files of a table, read row after row in the order of their names, epoch after epoch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fp8cfg.data.errors import DataError
from fp8cfg.data.rows import table_files, text_of
from fp8cfg.data.sources import size_of
from fp8cfg.data.table_files import SUFFIXES, file_rows


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
                f"data source {kind!r} is not read as a stream; {' and '.join(SUFFIXES)} are"
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

    def texts(self, start: Cursor) -> Iterator[tuple[Cursor, bytes]]:
        """The texts from the row of `start` on, without an end; empty ones are left out. DataError for a row without text, and
        where no row of an epoch has some."""
        epoch, shard, row, *_ = start
        while True:
            some = bool(shard or row)
            for number in range(shard, len(self.paths)):
                for at, (place, found) in file_rows(
                    self.kind, self.paths[number], row, self.text_key
                ):
                    if text := text_of(place, found, self.text_key).encode("utf-8", "replace"):
                        some = True
                        yield (
                            Cursor(
                                epoch,
                                number,
                                at,
                                0,
                                hashlib.blake2b(text, digest_size=16).hexdigest(),
                            ),
                            text,
                        )
                row = 0
            if not some:
                raise DataError(f"{self.path}: empty, there is no text in it")
            epoch, shard = epoch + 1, 0
