"""Standard output that may close, where a run goes on once its pager has ended; and files that a verb writes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fp8cfg.schema.errors import ConfigError, NotWritable

_IMPORT = "<frozen importlib._bootstrap>"


@contextmanager
def ending_imports() -> Iterator[None]:
    """In a process of one's own SIGINT ends it, with 130, where it comes within an import, and is a KeyboardInterrupt elsewhere. A
    handler of others, or that it is ignored, stays."""
    former = signal.getsignal(signal.SIGINT)
    if (
        former is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    with suppress(Exception):  # no reader, or this came amid a print()
        sys.stdout.flush()
    os._exit(128 + number)


GONE = (errno.EPIPE, errno.EIO)
"""A pager that has ended, a terminal that was closed."""


class Patient:
    """A stream that goes on in silence once nobody reads it any more: a run does not end because its pager or terminal did."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As that of the stream."""
        try:
            return int(self._stream.write(text))
        except OSError as e:
            if e.errno not in GONE:
                raise
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """As that of the stream."""
        try:
            self._stream.flush()
        except OSError as e:
            if e.errno not in GONE:
                raise
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def patient_stdout() -> Iterator[None]:
    """A standard output that may close without ending what runs inside."""
    before = sys.stdout
    if before is not None:
        sys.stdout = Patient(before)
    try:
        yield
    finally:
        if before is not None:
            sys.stdout.flush()
        sys.stdout = before


def print_or_write(text: str, output: str | None) -> int:
    """Print what a verb made, or write it to the new file that --output names. Returns the exit code. Raises ConfigError for a file
    that exists, and NotWritable."""
    if output is None:
        print(text, end="")
        return 0
    write_new(Path(output), text)
    print(f"wrote {output}")
    return 0


def write_new(path: Path, text: str) -> None:
    """Writes a new file for --output. Raises ConfigError if it exists, and NotWritable."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"--output {path}: exists already; remove it or write to another"
        ) from None
    except OSError as e:
        raise NotWritable(f"--output {path}: cannot be written ({e.strerror})") from None
