"""Command-line flags: read from a shell script, and written as a command line."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from fp8cfg.interop.key_table import KeyTable
from fp8cfg.interop.shell_script import Command, Word, parse_commands
from fp8cfg.schema.errors import ConfigError, refuse_if

PRECISION_PREFIXES = ("fp8", "fp4", "no_fp8")  # misspelled precision flags begin like this too
FLAG = re.compile(r"--([A-Za-z][\w-]*)(=.*)?", re.DOTALL)
SEVERAL_WORDS = re.compile(
    r"[@*]|\+.*--|ARGS|OPTS|OPTIONS|FLAGS|PARAMS|EXTRA", re.DOTALL | re.IGNORECASE
)
"""Expansions with several words, to judge by their syntax or name."""


@dataclass(frozen=True)
class Flag:
    """A flag of a command.

    Attributes:
        name: Name with underscores.
        word: The flag in the script.
        value: The word after the flag or after its `=`. None for a switch.
    """

    name: str
    word: Word
    value: Word | None

    @property
    def dashed(self) -> str:
        return dashed(self.name)

    @property
    def setting(self) -> str | bool:
        return self.value.text if self.value else True

    @property
    def condition(self) -> int:
        """Line of the control flow around the flag or its value, or 0."""
        if self.word.condition or self.value is None:
            return self.word.condition
        return self.value.condition


@dataclass(frozen=True)
class _ParsedCommand:
    """Flags of a command, and unexpanded words with possibly more flags."""

    condition: int
    flags: list[Flag]
    unexpanded: list[Word]


def read_flags(
    text: str, table: KeyTable, precision_flags: Container[str]
) -> tuple[dict[str, Any], list[str]]:
    """Reads the flags of a shell script or of a command line.

    This includes flags in quoted text, and in arrays and variables of the script.

    Args:
        text: The script, or one command.
        table: Key table with the known flags.
        precision_flags: Names of flags for which control flow is an error.

    Returns:
        The settings by name with underscores, True for a flag without a value. Then remarks on
        repeated and unread flags.

    Raises:
        ConfigError: A precision flag depends on control flow, or only a shell can expand the value
            of a known flag.
    """
    try:
        script = parse_commands(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a valid shell script ({str(error).lower()})") from None
    commands = [_parse_command(command) for command in script]
    # Control flow decides which of several training commands runs. Flags of all of them are
    # certain.
    launches = []
    for command in commands:
        if any(_is_relevant(flag.name, table) for flag in command.flags):
            launches.append({(flag.name, flag.setting) for flag in command.flags})

    settings: dict[str, Any] = {}
    remarks: list[str] = []
    conditional: list[str] = []
    problems: set[tuple[int, str]] = set()  # line and problem
    for command in commands:
        if any(_is_relevant(flag.name, table) and not flag.condition for flag in command.flags):
            for word in command.unexpanded:
                problems.add((word.line, _unexpanded_problem(word.text, word)))
        for flag in command.flags:
            condition = flag.condition
            is_in_all = all((flag.name, flag.setting) in launch for launch in launches)
            if command.condition and not is_in_all:
                condition = condition or command.condition
            is_precision_flag = table.canonical_name(flag.name) in precision_flags
            if condition and (is_precision_flag or flag.name.startswith(PRECISION_PREFIXES)):
                problems.add((flag.word.line, _conditional_problem(flag, condition)))
            elif condition and table.has_entry(flag.name):
                conditional.append(flag.dashed)
            elif flag.value and flag.value.problem and _is_relevant(flag.name, table):
                words = f"{flag.dashed} {flag.value.text}"
                problems.add((flag.word.line, _unexpanded_problem(words, flag.value)))
            else:
                if settings.get(flag.name, flag.setting) != flag.setting:
                    remarks.append(
                        f"{flag.dashed}: given as {settings[flag.name]} and as {flag.setting};"
                        " the last one counts"
                    )
                settings[flag.name] = flag.setting
    if conditional:
        names = ", ".join(dict.fromkeys(conditional))
        remarks.append(f"{names}: in a condition of the script, not read")

    has_lines = "\n" in text.strip()
    lines = []
    for number, problem in sorted(problems):
        lines.append(f"line {number}: {problem}" if has_lines else problem)
    refuse_if(lines)
    return settings, remarks


def _is_relevant(name: str, table: KeyTable) -> bool:
    return table.has_entry(name) or name.startswith(PRECISION_PREFIXES)


def _unexpanded_problem(text: str, word: Word) -> str:
    return f"{text}: {word.problem}; write its value instead"


def _conditional_problem(flag: Flag, condition: int) -> str:
    return (
        f"{flag.dashed}: depends on a condition (line {condition}); move it out of the condition,"
        f" or pass the flags directly: -- {flag.dashed} ..."
    )


def _parse_command(command: Command) -> _ParsedCommand:
    words = command.words
    flags: list[Flag] = []
    unexpanded: list[Word] = []
    # Unexpanded words before the program are arguments of its launcher, or a path.
    programs = [i for i, word in enumerate(words) if word.text.endswith(".py")]
    program = programs[0] if programs else -1
    follows_flag = False
    for i, word in enumerate(words):
        match = FLAG.fullmatch(word.text)
        if match:
            value = None
            if match[2]:
                value = replace(word, text=match[2][1:])
            elif i + 1 < len(words) and _is_value(words[i + 1]):
                value = words[i + 1]
            flags.append(Flag(match[1].replace("-", "_"), word, value))
            follows_flag = not match[2]
        elif not word.problem:
            follows_flag = False
        elif i > program:
            begins_with_text = word.text[0] not in "$`"
            is_path = begins_with_text and not word.text.startswith("-")
            has_several = bool(SEVERAL_WORDS.search(word.text)) and not begins_with_text
            is_value = follows_flag or is_path
            if has_several or not is_value:
                unexpanded.append(word)
    return _ParsedCommand(command.condition, flags, unexpanded)


def _is_value(word: Word) -> bool:
    # $ARGS after a flag is a list of further flags.
    has_several = word.problem and SEVERAL_WORDS.search(word.text)
    return not FLAG.match(word.text) and not has_several


def known_flags(table: KeyTable, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the project by flag, including misspelled ones."""
    return {
        dashed(name): value
        for name, value in settings.items()
        if _is_relevant(name, table) or table.find_unsupported(name)
    }


def dashed(name: str) -> str:
    """Returns the flag of a name with underscores."""
    return f"--{name.replace('_', '-')}"


def command_line(settings: dict[str, Any]) -> list[str]:
    """Returns settings as words of a command line. True is a switch, and False is left out."""
    words: list[str] = []
    for name, value in settings.items():
        if value is not False:
            words.append(dashed(name))
        if not isinstance(value, bool):
            words.append(str(value))
    return words
