"""Error types: one line for each problem, with the key, the reason and the nearest valid value; and their exit codes."""

from __future__ import annotations

import difflib
import errno
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from fp8cfg.schema.violation import Violation


class Fp8cfgError(Exception):
    """Base of every error that ends a command with one line and its own exit code, never with a traceback."""

    exit_code = 1


class ConfigError(Fp8cfgError, ValueError):
    """An invalid configuration. Exit code 2.

    Attributes:
        problems: One line for each problem. `str(error)` joins them with newlines.
        violations: The problems that are violations, for callers that read more than the line.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str | Violation]) -> None:
        if isinstance(problems, str):
            problems = [problems]
        self.violations = [problem for problem in problems if isinstance(problem, Violation)]
        self.problems = list(dict.fromkeys(str(problem) for problem in problems))
        super().__init__("\n".join(self.problems))


class NoSuchKey(ConfigError, AttributeError):
    """An attribute of a node that is no key. Exit code 2."""


class NotFP8Error(Fp8cfgError):
    """FP8 was asked for and is not what ran, or less is planned than fp8.min_coverage. Exit code 3."""

    exit_code = 3


class RankLost(Fp8cfgError):
    """Another rank ended, and this rank cannot continue. Exit code 8."""

    exit_code = 8


class RankStalled(Fp8cfgError):
    """A rank did not reach a collective within trainer.timeout. Exit code 8."""

    exit_code = 8


class NotWritable(Fp8cfgError):
    """A file or folder of the user's that cannot be written. Exit code 5."""

    exit_code = 5


class PlainWarning(UserWarning):
    """A warning that a command says as one line, without the place in the code."""


class PackageWarning(PlainWarning):
    """An entry point of an installed package that cannot be used, and is left out: one line that names the package."""


def nearest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The option most like `word`, or None where none is near. Upper and lower case are alike."""
    folded = {o.lower(): o for o in options}
    found = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=cutoff)
    return folded[found[0]] if found else None


def suggest(word: str, options: Iterable[str]) -> str:
    """What follows a refused `word`: the nearest option, or all of them where they are few."""
    options = list(options)
    near = nearest(word, options)
    if near:
        return f"; did you mean {near!r}?"
    return f"; choose from {', '.join(options)}" if options and len(options) <= 16 else ""


def taken(folder: str) -> str:
    """The line of a run folder that a new run cannot have."""
    return (
        f"{folder} already holds a run; go on with it by fp8cfg resume {shlex.quote(folder)}, or"
        " name another folder"
    )


def refuse_if(problems: Sequence[str | Violation]) -> None:
    """Raises ConfigError with all `problems`, in their order. Does nothing if there are none."""
    if problems:
        raise ConfigError(problems)


def expect(call: str, given: object, kind: type, what: str) -> None:
    """Raise ConfigError where `given` is no `kind`, `what` `call` takes."""
    if not isinstance(given, kind):
        raise ConfigError(f"{call}: expected {what}, got {type(given).__name__}")


def printable(text: str) -> str:
    """`text` as one line that a terminal shows as it stands, whoever wrote it: what is no printable character is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_WORDS = re.compile(
    r"out of memory|can(?:'|no)t allocate memory|bad_alloc|can't start new thread|failed to map"
    r" segment|"
    r"unable to mmap|not enough memory",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> str:
    """The line for an error that says that memory ran out, or an empty one. MemoryError and torch.OutOfMemoryError are such, and
    RuntimeError, OSError and ImportError with the words of an allocator, of malloc, of mmap or of the loader.
    """
    known = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if not known and not (
        isinstance(error, (RuntimeError, OSError, ImportError)) and _WORDS.search(str(error))
    ):
        return ""
    said = (str(error).strip().splitlines() or [""])[0][:200]
    cure = (
        "lower trainer.micro_batch_size or model.seq_length, or take a smaller model; fp8cfg plan"
        " has what a recipe takes"
    )
    return "out of memory" + (f" ({said})" if said else "") + f": {cure}"


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
