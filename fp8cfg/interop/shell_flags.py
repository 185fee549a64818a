"""Command-line flags: read from a shell script, and written as one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8cfg.interop.key_table import Dialect
from fp8cfg.interop.shell_script import Branch, Field, commands, where
from fp8cfg.schema.errors import ConfigError, refuse_if

PRECISION = ("fp8", "fp4", "no_fp8")
"""What the names of flags of precision begin with."""
_FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_SEVERAL = re.compile(
    r"[@*]|\+.*--|ARGS|OPTS|OPTIONS|FLAGS|PARAMS|EXTRA", re.DOTALL | re.IGNORECASE
)
"""Expansions that stand for several words, by what is in them or by their name."""


@dataclass(frozen=True)
class _Flag:
    name: str
    word: Field
    value: Field | None
    """The word after it, or what stands after its `=`; None where there is none."""

    @property
    def shown(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def said(self) -> str | bool:
        return self.value.text if self.value else True


def found(text: str, matters: Callable[[str], bool]) -> tuple[dict[str, Any], list[str]]:
    """The flags of a shell script, or of one line of it: name with underscores -> value, True where there is none. Text in
    quotes that holds flags counts, as do arrays, and variables that the script sets. The lines say which flag stands twice.

    Raises ConfigError for what is not a shell's text, and with its line for each thing that the script alone does not say and
    that a flag for which `matters(name)` holds may depend on: the value of one, a variable where flags stand, a condition.
    """
    try:
        words = commands(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"not the text of a shell ({str(e).lower()})") from None
    flags, lines, problems = dict[str, Any](), list[str](), list[tuple[int, str]]()
    for command in words:
        here, loose = _flags(command)
        if any(matters(flag.name) for flag in here):
            problems += [
                (word.line, f"{word.text}: {word.unknown}; write what it stands for")
                for word in loose
            ]
        for flag in here:
            if matters(flag.name) and (problem := _unknown(flag, here)):
                problems.append((flag.word.line, problem))
            elif flags.get(flag.name, flag.said) != flag.said:
                lines.append(
                    f"{flag.shown}: given as {flags[flag.name]} and as {flag.said}; the last is"
                    " read"
                )
            flags[flag.name] = flag.said
    several = "\n" in text.strip()
    refuse_if(
        [f"line {line}: {problem}" if several else problem for line, problem in sorted(problems)]
    )
    return flags, lines


def _flags(command: list[Field]) -> tuple[list[_Flag], list[Field]]:
    """The flags of a command, and the unknown words that may hold more; what stands before the program that takes them is its
    launcher's, or a path."""
    here, loose = list[_Flag](), list[Field]()
    program = next((i for i, word in enumerate(command) if word.text.endswith(".py")), -1)
    values = False  # whether a flag that is not looked at may take the word at hand
    for i, word in enumerate(command):
        head = word.pieces[0].text if word.pieces and not word.pieces[0].unknown else ""
        if _FLAG.fullmatch(word.text) and head.lstrip("-"):
            name, eq, _ = head.partition("=")
            value: Field | None = _after(word, len(name) + 1) if eq else None
            after = command[i + 1] if i + 1 < len(command) else None
            if (
                not eq
                and after
                and not _FLAG.match(after.text)
                and not (after.unknown and _SEVERAL.search(after.text))
            ):
                value = after
            here.append(_Flag(name[2:].replace("-", "_"), word, value))
            values = not eq
        elif not word.unknown:
            values = False
        elif (i > program and not values | bool(head and not head.startswith("-"))) or (
            i > program and _SEVERAL.search(word.text) and not head
        ):
            loose.append(word)
    return here, loose


def _after(word: Field, start: int) -> Field:
    """What stands in a word from `start` on, which is in its first piece."""
    first, *rest = word.pieces
    return replace(word, pieces=(first._replace(text=first.text[start:]), *rest))


def _unknown(flag: _Flag, here: list[_Flag]) -> str:
    """The line for a flag whose value, or presence, the script alone does not say; empty where it does."""
    if flag.value and flag.value.unknown:
        return f"{flag.shown} {flag.value.text}: {flag.value.unknown}; write what it stands for"
    equal = [each.word for each in here if (each.name, each.said) == (flag.name, flag.said)]
    gone = [
        lost
        for lost in flag.word.lost
        if not any(set(w.under) <= set(lost) and lost not in w.lost for w in equal)
    ]
    if gone:
        return (
            f"{flag.shown}: is replaced in a condition that the script does not decide"
            f" ({where(gone[0][0])}); leave it in or out"
        )
    if any(not w.under for w in equal):
        return ""
    alike = {branch for w in equal for branch in w.under}
    for branch in flag.word.under:
        if not branch.of.otherwise or any(
            Branch(branch.of, n + 1) not in alike for n in range(branch.of.branches)
        ):
            return (
                f"{flag.shown}: stands in a condition that the script does not decide"
                f" ({where(branch)}); leave it in or out"
            )
    return ""


def takes(dialect: Dialect, flags: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The flags that the table knows, or that are meant for it, as they are written, and one line on all others."""
    mine, rest = dict[str, Any](), list[str]()
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        close = dialect.knows(name) or dialect.lacks(name) or name.startswith(PRECISION)
        if close:
            mine[flag] = value
        else:
            rest.append(flag)
    said = (
        f"{', '.join(rest[:12])}{' and others' if len(rest) > 12 else ''}: not about precision or"
        " shape, not read"
    )
    return mine, [said] if rest else []


def line(data: dict[str, Any]) -> list[str]:
    """The table `data` as words of a command line; a value of True is the flag alone, False nothing."""
    words: list[str] = []
    for name, value in data.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words
