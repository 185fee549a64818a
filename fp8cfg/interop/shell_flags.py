"""Command-line flags: read from a shell script, and written as one."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from fp8cfg.interop.key_table import Dialect
from fp8cfg.interop.shell_script import Word, commands
from fp8cfg.schema.errors import ConfigError, refuse_if

PREFIXES = ("fp8", "fp4", "no_fp8")  # of precision flags, misspelled ones included
FLAG = re.compile(r"--([A-Za-z][\w-]*)(=.*)?", re.DOTALL)
SEVERAL_WORDS = re.compile(
    r"[@*]|\+.*--|ARGS|OPTS|OPTIONS|FLAGS|PARAMS|EXTRA", re.DOTALL | re.IGNORECASE
)
"""Expansions that stand for several words, by their signs or their names."""


@dataclass(frozen=True)
class Flag:
    """A flag of a command. `value` is the word after it or after its `=`."""

    name: str  # with underscores
    word: Word
    value: Word | None

    @property
    def dashed(self) -> str:
        return dashed(self.name)

    @property
    def text(self) -> str | bool:
        return self.value.text if self.value else True

    @property
    def condition(self) -> int:
        """The line of the control flow that the flag or its value depends on."""
        return self.word.condition or (self.value.condition if self.value else 0)


def read_flags(
    text: str, dialect: Dialect, precision: Container[str]
) -> tuple[dict[str, Any], list[str]]:
    """Reads the flags of a shell script or of a command line.

    Text in quotes that holds flags counts, and so do arrays and variables that the script sets.

    Args:
        text: The script, or one command.
        dialect: The flags that are known.
        precision: Names of the flags that control flow must not decide.

    Returns:
        The values by name, with underscores, and True for a flag without a value. Then remarks on
        flags that stand twice or are not read.

    Raises:
        ConfigError: One line for each precision flag that depends on control flow, and for each
            value that only a shell can tell and that a flag of `dialect` needs.
    """
    try:
        script = commands(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"not the text of a shell ({str(e).lower()})") from None
    parsed = [(command.condition, *flags_of(command.words)) for command in script]
    # Control flow decides which command runs. What all of them have is certain.
    launches = [
        {(flag.name, flag.text) for flag in flags}
        for _, flags, _ in parsed
        if any(is_known(flag.name, dialect) for flag in flags)
    ]
    values: dict[str, Any] = {}
    remarks: list[str] = []
    conditional: list[str] = []
    problems: set[tuple[int, str]] = set()
    for command_condition, flags, loose in parsed:
        if any(is_known(flag.name, dialect) and not flag.condition for flag in flags):
            problems |= {(word.line, unknown(word.text, word)) for word in loose}
        for flag in flags:
            condition = flag.condition
            if command_condition and not all((flag.name, flag.text) in each for each in launches):
                condition = condition or command_condition
            is_precision = dialect.named(flag.name) in precision or flag.name.startswith(PREFIXES)
            if condition and is_precision:
                problems.add((flag.word.line, depends_on_condition(flag, condition)))
            elif condition and dialect.knows(flag.name):
                conditional.append(flag.dashed)
            elif flag.value and flag.value.unknown and is_known(flag.name, dialect):
                line = unknown(f"{flag.dashed} {flag.value.text}", flag.value)
                problems.add((flag.word.line, line))
            else:
                remarks += remark_twice(flag, values)
                values[flag.name] = flag.text
    if conditional:
        names = ", ".join(dict.fromkeys(conditional))
        remarks.append(f"{names}: in a condition of the script, not read")
    several = "\n" in text.strip()
    lines = [f"line {n}: {line}" if several else line for n, line in sorted(problems)]
    refuse_if(lines)
    return values, remarks


def remark_twice(flag: Flag, values: dict[str, Any]) -> list[str]:
    before = values.get(flag.name, flag.text)
    if before == flag.text:
        return []
    return [f"{flag.dashed}: given as {before} and as {flag.text}; the last is read"]


def is_known(name: str, dialect: Dialect) -> bool:
    return dialect.knows(name) or name.startswith(PREFIXES)


def unknown(text: str, word: Word) -> str:
    return f"{text}: {word.unknown}; write what it stands for"


def depends_on_condition(flag: Flag, condition: int) -> str:
    return (
        f"{flag.dashed}: depends on a condition (line {condition}); take it out of the"
        f" condition, or pass the flags directly: -- {flag.dashed} ..."
    )


def flags_of(command: list[Word]) -> tuple[list[Flag], list[Word]]:
    """Returns the flags of a command, and the unknown words that may hold more flags.

    Unknown words before the program are arguments of its launcher, or a path.
    """
    flags: list[Flag] = []
    loose: list[Word] = []
    programs = [i for i, word in enumerate(command) if word.text.endswith(".py")]
    program = programs[0] if programs else -1
    takes_value = False  # the flag before may take the word as its value
    for i, word in enumerate(command):
        match = FLAG.fullmatch(word.text)
        if match:
            value = None
            if match[2]:
                value = replace(word, text=match[2][1:])
            elif i + 1 < len(command) and is_value(command[i + 1]):
                value = command[i + 1]
            flags.append(Flag(match[1].replace("-", "_"), word, value))
            takes_value = not match[2]
        elif not word.unknown:
            takes_value = False
        elif i > program:
            begins_with_text = word.text[0] not in "$`"
            is_path = begins_with_text and not word.text.startswith("-")
            holds_several = bool(SEVERAL_WORDS.search(word.text)) and not begins_with_text
            if holds_several or not (takes_value or is_path):
                loose.append(word)
    return flags, loose


def is_value(word: Word) -> bool:
    return not FLAG.match(word.text) and not (word.unknown and SEVERAL_WORDS.search(word.text))


def known_flags(dialect: Dialect, flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the flags that `dialect` knows or that are meant for it."""
    return {
        dashed(name): value
        for name, value in flags.items()
        if is_known(name, dialect) or dialect.lacks(name)
    }


def dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def line(data: dict[str, Any]) -> list[str]:
    """Returns `data` as words of a command line. True is the flag alone, False nothing."""
    words: list[str] = []
    for name, value in data.items():
        if value is not False:
            words.append(dashed(name))
        if not isinstance(value, bool):
            words.append(str(value))
    return words
