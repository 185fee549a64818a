"""Output of commands: closed standard output, Ctrl-C during imports, and --output."""

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
from fp8cfg.schema.messages import say

_IMPORT = "<frozen importlib._bootstrap>"


@contextmanager
def ending_imports() -> Iterator[None]:
    """Context manager to exit with code 130 after Ctrl-C during an import.

    Outside of imports it raises KeyboardInterrupt as usual.
    """
    former = signal.getsignal(signal.SIGINT)
    # Keep a handler of the embedding program, and an ignored signal (nohup, background jobs).
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
    """Signal handler: exits if the interrupted code is in an import."""
    # Search the stack for the frame of the import system.
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    with suppress(Exception):  # a closed pipe, or the signal interrupted a print()
        sys.stdout.flush()
    os._exit(128 + number)


GONE = (errno.EPIPE, errno.EIO)
"""Errors of a write after the pager has exited or the terminal was closed."""


class Patient:
    """Stream wrapper. It discards output once the reader is gone.

    A run should not fail because its pager or terminal was closed.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes text. See io.TextIOBase.write."""
        try:
            return int(self._stream.write(text))
        except OSError as e:
            if e.errno not in GONE:
                raise
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flushes the stream. See io.TextIOBase.flush."""
        try:
            self._stream.flush()
        except OSError as e:
            if e.errno not in GONE:
                raise
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        """Redirects the stream to /dev/null."""
        # At the descriptor, because a later flush still writes the buffered text.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def patient_stdout() -> Iterator[None]:
    """Context manager to ignore a closed standard output."""
    stdout = sys.stdout
    if stdout is not None:
        sys.stdout = Patient(stdout)
    try:
        yield
    finally:
        if stdout is not None:
            sys.stdout.flush()
        sys.stdout = stdout


def print_or_write(text: str, output: str | None) -> int:
    """Prints text, or writes it to the new file of --output.

    Args:
        text: The text.
        output: Path of the file. None prints.

    Returns:
        The exit code.

    Raises:
        ConfigError: The file exists.
        NotWritable: The file cannot be written.
    """
    if output is None:
        print(text, end="")
        return 0
    write_new(Path(output), text)
    say(f"wrote {output}")
    return 0


def write_new(path: Path, text: str) -> None:
    """Writes a new file for --output.

    Args:
        path: The file. Its folder is created if needed.
        text: The content.

    Raises:
        ConfigError: The file exists.
        NotWritable: The file cannot be written.
    """
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
