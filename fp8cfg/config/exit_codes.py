"""Exit codes: what ends a command, or a script of one's own, as lines on standard error and the number that it ends with."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fp8cfg.config.errors import Fp8cfgError, RankLost, RankStalled, printable
from fp8cfg.config.out_of_memory import out_of_memory


@contextmanager
def exit_codes() -> Iterator[None]:
    """The end of a script as that of a command: an error of fp8cfg is a line for each problem on standard error and SystemExit with
    its exit code, without a traceback, as are running out of memory or space and Ctrl-C. Every other error is raised as it is.

        with fp8cfg.exit_codes():
            train(fp8cfg.compose(sys.argv[1:]))
    """
    try:
        yield
    except BaseException as e:
        if (code := said(e)) is None:
            raise
        sys.exit(code)


def said(e: BaseException) -> int | None:
    """The exit code of a command that `e` ends, whose lines are printed; None, and nothing printed, where that is a bug."""
    if isinstance(e, Fp8cfgError):
        lines = getattr(e, "problems", None) or [str(e)]
        report(lines, "" if e.exit_code == 75 else "error: ", at_once=isinstance(e, RankStalled))
        if isinstance(e, RankLost | RankStalled):
            sys.stderr.flush()
            time.sleep(
                5
                # torchrun ends the other ranks as soon as one fails, and those that know why have yet
                # to say it
            )
        return e.exit_code
    if isinstance(e, BrokenPipeError):  # the reader, `head` say, has seen enough
        _silence()
        return 0
    if isinstance(e, KeyboardInterrupt):
        return 130
    if not isinstance(e, OSError | MemoryError | RuntimeError | ImportError):
        return None
    if line := out_of_memory(e):
        e.__traceback__ = None  # what it holds of memory may be needed to say so
        report([line], "error: ")
        return 1
    if isinstance(e, OSError) and (gone := _no_folder(e)):
        report([gone], "error: ")
        return 2
    if not isinstance(e, OSError) or e.errno not in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENAMETOOLONG,
    ):
        return None
    full = e.errno != errno.ENAMETOOLONG
    report(
        [f"out of space: {e}" if full else f"{str(e.filename)[:40]}...: {e.strerror}"], "error: "
    )
    return 5 if full else 2


def _no_folder(e: OSError) -> str | None:
    """The line of an `e` for a folder that the process was started in, or with, and that is not there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory is gone; cd to one that is there"
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if cache and e.filename == cache and not os.path.isdir(cache):
        return (
            f"TORCHINDUCTOR_CACHE_DIR={cache}: no folder, and none can be made ({e.strerror}); set"
            " it to one, or unset it"
        )
    return None


def flush() -> None:
    """Write out what is printed, where there is somewhere to."""
    if sys.stdout is not None:  # it is closed: fp8cfg ... >&-
        sys.stdout.flush()


def _silence() -> None:
    """Whatever is printed from here on, and at the end of the process, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def report(lines: list[str], prefix: str, at_once: bool = False) -> None:
    """The lines of an error, each one line whatever a word or a file has put into it. What all ranks found is said by the
    first: torchrun ends the others as soon as that one fails. What one rank alone found is said by it, a little later or `at_once`.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(0 if at_once else 2)
        prefix = f"rank {rank}: {prefix}"
    try:
        flush()
    except OSError:  # no reader, or no space: the error is said all the same
        _silence()
    for line in lines:
        with suppress(OSError):  # a terminal that has gone; the exit code says it still
            print(f"{prefix}{printable(line)}", file=sys.stderr)
