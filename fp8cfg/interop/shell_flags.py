"""Command-line flags: read from a shell script, and written as one."""

from __future__ import annotations

import re
import shlex
from typing import Any

from fp8cfg.config.errors import ConfigError
from fp8cfg.interop.key_table import Dialect

_ASSIGNED = re.compile(r"""^(\s*(?:(?:export|local|declare)\s+)?)\w+\+?=(?:\(|(?=["']|--))""", re.MULTILINE)
_NO_VALUE = re.compile(r"--[A-Za-z]|\d?[|&;<>]|(fi|done|else|elif|esac)$")
"""What follows a flag without a value: another one, or what ends a command of a shell."""


def found(text: str) -> tuple[dict[str, Any], list[str]]:
    """The flags of a shell script, or of one line of it: name with underscores -> value, True where there is none. Text in
    quotes that holds flags counts, as do arrays. The lines say which flag stands twice, or takes its value from a variable.
    Raises ConfigError for what is not a shell's text.
    """
    try:
        words = _split(text)
    except ValueError as e:
        raise ConfigError(f"not the text of a shell ({str(e).lower()})") from None
    flags, lines = dict[str, Any](), list[str]()
    for i, word in enumerate(words):
        if not re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", word, re.DOTALL):
            continue
        flag, eq, given = word.partition("=")
        following = words[i + 1] if i + 1 < len(words) and not _NO_VALUE.match(words[i + 1]) else True
        value: str | bool = given if eq else following
        name = flag[2:].replace("-", "_")
        if isinstance(value, str) and "$" in value:
            lines.append(f"{flag} {value}: a variable of the script; not read")
            continue
        if flags.get(name, value) != value:
            lines.append(f"{flag}: given as {flags[name]} and as {value}; the last is read")
        flags[name] = value
    return flags, lines


def _split(text: str) -> list[str]:
    """Words of a shell, without comments and the brackets of arrays; a quoted word of several flags is several."""
    text = _ASSIGNED.sub(r"\1", text.replace("\\\n", " "))
    words = shlex.split(text, comments=True)
    flat = [part for word in words for part in (word.split() if re.search(r"(^|\s)--\w", word) else [word])]
    return [word[:-1] if word.endswith(")") and "(" not in word else word for word in flat]


def takes(dialect: Dialect, flags: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The flags that the table knows, or that are meant for it, as they are written, and one line on all others."""
    mine, rest = dict[str, Any](), list[str]()
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        close = dialect.knows(name) or dialect.lacks(name) or name.startswith(("fp8", "fp4", "no_fp8"))
        if close:
            mine[flag] = value
        else:
            rest.append(flag)
    said = f"{', '.join(rest[:12])}{' and others' if len(rest) > 12 else ''}: not about precision or shape, not read"
    return mine, [said] if rest else []


def line(data: dict[str, Any]) -> list[str]:
    """The table `data` as words of a command line; a value of True is the flag alone, False nothing."""
    words: list[str] = []
    for name, value in data.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words
