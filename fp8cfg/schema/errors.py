"""Errors with a plain message and an exit code, and their report by a command.

An error message has one line per problem: the key, the reason, and what to do.
"""

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8cfg.schema.violation import Violation


class Fp8cfgError(Exception):
    """Base of the errors that end a command with a plain message instead of a traceback."""

    exit_code = 1


class ConfigError(Fp8cfgError, ValueError):
    """An invalid configuration. Exit code 2.

    Attributes:
        problems: One line for each problem. `str(error)` joins them with newlines.
        violations: The problems of type Violation. They have fixes in addition to the message.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str | Violation]) -> None:
        if isinstance(problems, str):
            problems = [problems]
        # Several rules may report the same line. dict.fromkeys drops repeats and keeps the order.
        self.violations = [problem for problem in problems if not isinstance(problem, str)]
        self.problems = list(dict.fromkeys(str(problem) for problem in problems))
        super().__init__("\n".join(self.problems))


class NoSuchKey(ConfigError, AttributeError):
    """An attribute of a node that is not a key. Exit code 2."""


class NotFP8Error(Fp8cfgError):
    """The model did not run in FP8 as planned, or less than fp8.min_coverage would. Exit code 3."""

    exit_code = 3


class RankLost(Fp8cfgError):
    """Another rank ended, and this rank cannot continue. Exit code 8."""

    exit_code = 8


class RankStalled(Fp8cfgError):
    """A rank did not reach a collective within trainer.timeout. Exit code 8."""

    exit_code = 8


class NotWritable(Fp8cfgError):
    """A file or folder that the user named cannot be written. Exit code 5."""

    exit_code = 5


class PlainWarning(UserWarning):
    """A warning that a command prints as one line, without file and line number."""


class PackageWarning(PlainWarning):
    """An entry point of an installed package cannot be used and is skipped."""


def refuse_if(problems: Sequence[str | Violation]) -> None:
    """Raises ConfigError with all `problems`. Does nothing for an empty list."""
    if problems:
        raise ConfigError(problems)


def expect(call: str, value: object, kind: type, description: str) -> None:
    """Raises ConfigError if an argument has the wrong type.

    Args:
        call: Name of the called function, for the message.
        value: The argument.
        kind: The expected type.
        description: The expected type in words, such as "a Recipe".
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{call}: expected {description}, got {type(value).__name__}")


def nearest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the option most similar to `word`, ignoring case, or None.

    Args:
        word: The user's word.
        options: The options.
        cutoff: Least similarity, from 0 to 1 (difflib).
    """
    by_lower_case = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=cutoff)
    return by_lower_case[matches[0]] if matches else None


def suggest(word: str, options: Iterable[str]) -> str:
    """Returns the end of a message about an unknown `word`.

    That is the nearest option, a list of up to 16 options, or an empty string.
    """
    options = list(options)
    question = did_you_mean(nearest(word, options))
    if question:
        return question
    if options and len(options) <= 16:
        return f"; choose from {', '.join(options)}"
    return ""


def did_you_mean(option: str | None) -> str:
    """Returns the end of a message with the suggestion `option`, empty without one."""
    return f"; did you mean {option!r}?" if option else ""


def folder_taken(folder: str) -> str:
    """Returns the message about a run folder that contains another run."""
    return (
        f"{folder}: already contains a run; continue it with fp8cfg resume {shlex.quote(folder)},"
        " or set another log.folder"
    )


def printable(text: str) -> str:
    """Escapes characters that would break a line or control the terminal.

    Messages quote values of untrusted files. Such values may contain escape sequences.
    """
    characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


_MEMORY_MESSAGES = re.compile(
    "out of memory|can(?:'|no)t allocate memory|bad_alloc|can't start new thread"
    "|failed to map segment|unable to mmap|not enough memory",
    re.IGNORECASE,
)
"""Messages of torch's allocators, malloc, mmap and the dynamic loader."""

_NO_FRAME = re.compile(
    "<function .* returned NULL without setting an exception|error return without exception set"
)
"""Messages of CPython 3.11 if a call of a Python function found no memory for its frame.

A C function without an exception is a bug of its library. Its message starts with <built-in.
"""


def out_of_memory(error: BaseException) -> str:
    """Returns the message if `error` means that CPU or GPU memory ran out, otherwise ""."""
    is_memory_error = isinstance(error, MemoryError)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        is_memory_error = True
    # torch.OutOfMemoryError is a RuntimeError, but the schema loads no torch. Importing a library
    # without memory to map it raises ImportError. So the text decides.
    if isinstance(error, RuntimeError | OSError | ImportError):
        is_memory_error = is_memory_error or bool(_MEMORY_MESSAGES.search(str(error)))
    if isinstance(error, SystemError) and _NO_FRAME.match(str(error)):
        is_memory_error = True
    if not is_memory_error:
        return ""
    first_line = str(error).strip().partition("\n")[0][:200]
    details = f" ({first_line})" if first_line else ""
    return (
        f"out of memory{details}: lower trainer.micro_batch_size or model.seq_length, or use a"
        " smaller model; fp8cfg plan shows the memory of a recipe"
    )


@contextmanager
def exit_codes() -> Iterator[None]:
    """Reports the errors of a script as fp8cfg's commands do.

    Errors of fp8cfg, missing memory or disk space and Ctrl-C print one line for each problem to
    standard error and raise SystemExit with the exit code. Other errors pass through.

        with fp8cfg.exit_codes():
            train(fp8cfg.compose(sys.argv[1:]))
    """
    try:
        yield
    except BaseException as error:
        code = report_error(error)
        if code is None:
            raise
        sys.exit(code)


def report_error(error: BaseException) -> int | None:
    """Prints the message of `error` and returns the exit code.

    Returns None, and prints nothing, for an unexpected error. Then the traceback helps.
    """
    if isinstance(error, Fp8cfgError):
        return _report_own_error(error)
    # The reader, such as `head`, has closed the pipe. That is no error.
    if isinstance(error, BrokenPipeError):
        _discard_stdout()
        return 0
    # 128 + SIGINT, as a shell reports it.
    if isinstance(error, KeyboardInterrupt):
        return 130
    message = out_of_memory(error)
    if message:
        # Frees the tensors in its frames, to have memory for the message.
        error.__traceback__ = None
        print_errors([message], "error: ")
        return 1
    if not isinstance(error, OSError):
        return None
    message = _missing_folder(error)
    if message:
        print_errors([message], "error: ")
        return 2
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        print_errors([f"out of space: {error}"], "error: ")
        return 5
    if error.errno == errno.ENAMETOOLONG:
        print_errors([f"{str(error.filename)[:40]}...: {error.strerror}"], "error: ")
        return 2
    if isinstance(error, PermissionError) and error.filename is not None:
        print_errors([f"{error.filename}: {error.strerror}"], "error: ")
        return 2
    return None


def _report_own_error(error: Fp8cfgError) -> int:
    """Prints the lines of an error of this package and returns its exit code."""
    lines = error.problems if isinstance(error, ConfigError) else [str(error)]
    # Exit code 75 (EX_TEMPFAIL) is a stop by a signal with everything saved, not an error.
    prefix = "" if error.exit_code == 75 else "error: "
    print_errors(lines, prefix, at_once=isinstance(error, RankStalled))
    if isinstance(error, RankLost | RankStalled):
        sys.stderr.flush()
        # torchrun kills the other ranks as soon as one exits. Ranks with the real cause need time to
        # print it.
        time.sleep(5)
    return error.exit_code


def _missing_folder(error: OSError) -> str:
    """Returns the message if the working directory or Inductor's cache is gone, otherwise ""."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory was deleted; cd to another folder"
    # Inductor creates its cache folder. It fails with a bare OSError if it cannot.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if cache and error.filename == cache and not os.path.isdir(cache):
        return (
            f"TORCHINDUCTOR_CACHE_DIR={cache}: cannot be created ({error.strerror}); set it to"
            " a writable folder or unset it"
        )
    return ""


def flush_stdout() -> None:
    """Flushes standard output, unless it is closed (fp8cfg ... >&-)."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_stdout() -> None:
    """Redirects standard output to /dev/null, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def print_errors(lines: list[str], prefix: str, at_once: bool = False) -> None:
    """Prints the lines of an error or a warning to standard error.

    Every rank may call it. Rank 0 prints at once and exits, and torchrun then kills the other ranks.
    So an error of all ranks is printed once. Other ranks wait two seconds and add their number.

    Args:
        lines: The lines. Control characters are escaped.
        prefix: Start of each line.
        at_once: Whether other ranks print without waiting.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        if not at_once:
            time.sleep(2)
        prefix = f"rank {rank}: {prefix}"
    try:
        flush_stdout()
    except OSError:
        # A closed pipe or a full disk must not hide the error.
        _discard_stdout()
    for line in lines:
        # A closed terminal takes no message. The exit code is still right.
        with suppress(OSError):
            print(f"{prefix}{printable(line)}", file=sys.stderr)
