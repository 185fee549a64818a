"""Error types: one line for each problem, with the key, the reason and the nearest valid value; and their exit codes."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence


class Fp8cfgError(Exception):
    """Base of every error that ends a command with one line and its own exit code, never with a traceback."""

    exit_code = 1


class ConfigError(Fp8cfgError, ValueError):
    """A recipe that cannot be: every problem found, each as one line. Exit code 2.

    `problems` holds the lines; `str(error)` joins them with newlines.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class NoSuchKey(ConfigError, AttributeError):
    """An attribute of a node that is no key. Exit code 2."""


class NotFP8Error(Fp8cfgError):
    """FP8 was asked for and is not what ran. Exit code 3."""

    exit_code = 3


class RankLost(Fp8cfgError):
    """Another rank of the group ended, and this one cannot go on. Exit code 1."""


class RankStalled(Fp8cfgError):
    """A rank did not come to a collective within trainer.timeout. Exit code 1."""


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


def refuse_if(problems: Sequence[str]) -> None:
    """Raise ConfigError with all `problems`, each once, in their order; do nothing where there are none."""
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def expect(call: str, given: object, kind: type, what: str) -> None:
    """Raise ConfigError where `given` is no `kind`, `what` `call` takes."""
    if not isinstance(given, kind):
        raise ConfigError(f"{call}: expected {what}, got {type(given).__name__}")


def printable(text: str) -> str:
    """`text` as one line that a terminal shows as it stands, whoever wrote it: what is no printable character is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
