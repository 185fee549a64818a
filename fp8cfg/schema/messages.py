"""Messages of a run: their level, and where they go.

A message is one text of one or more lines, such as "warning: step 5: ...". Its level is its prefix.
`say` prints it. Once a Python user has configured the logger `fp8cfg`, it gets the messages instead:

    logging.getLogger("fp8cfg").setLevel(logging.WARNING)   # only warnings, through logging
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Literal

Say = Callable[[str], None]
Level = Literal["debug", "info", "warning", "error"]
LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_STYLES = {
    r"(?m)^warning:": "yellow",
    r"(?m)^error:": "bold red",
    r"(?m)^note:": "cyan",
    # Labels of the run header and of reports. A time such as 12:30 is none.
    r"(?m)^(?!warning|error|note)[a-zA-Z][\w /,-]{0,28}:(?=\s|$)": "bold",
}


def level_of(text: str) -> int:
    """Returns the level of a message by its prefix, `logging.INFO` without one."""
    if text.startswith("warning: "):
        return logging.WARNING
    if text.startswith("error: "):
        return logging.ERROR
    return logging.INFO


def say(text: str) -> None:
    """Prints a message, or logs it if the logger `fp8cfg` has a level or a handler."""
    if is_logged():
        logging.getLogger("fp8cfg").log(level_of(text), text)
    else:
        print(colored(text, sys.stdout), flush=True)


def say_on_stderr(text: str) -> None:
    """As `say`, but prints to standard error."""
    if is_logged():
        say(text)
    else:
        print(colored(text, sys.stderr), file=sys.stderr, flush=True)


def of_run(say_: Say, level: Level, progress: str) -> Say:
    """Returns the function for the messages of a run.

    Args:
        say_: `say`, or a function of the user.
        level: log.level of the run. Messages below it are dropped.
        progress: log.progress of the run. If standard output has JSON, `say` prints to standard
            error.
    """
    target = say_on_stderr if progress == "json" and say_ in (say, print) else say_

    def filtered(text: str) -> None:
        if level_of(text) >= LEVELS[level]:
            target(text)

    return filtered


def is_logged() -> bool:
    """Whether the user has configured the logger `fp8cfg`."""
    # The root logger does not count: many libraries and notebooks configure it.
    logger = logging.getLogger("fp8cfg")
    return bool(logger.handlers or logger.level)


def has_color(stream: object) -> bool:
    """Whether text for a stream may have color: a terminal, and NO_COLOR is not set."""
    isatty = getattr(stream, "isatty", None)
    if isatty is None or not isatty() or os.environ.get("TERM") == "dumb":
        return False
    return not os.environ.get("NO_COLOR")


def colored(text: str, stream: object) -> str:
    """Returns `text` with colors for labels and levels if `stream` is a terminal."""
    if not has_color(stream):
        return text
    from rich.console import Console
    from rich.text import Text

    rich_text = Text(text)
    for pattern, style in _STYLES.items():
        rich_text.highlight_regex(re.compile(pattern), style)
    console = Console(color_system="standard", force_terminal=True, soft_wrap=True)
    with console.capture() as captured:
        console.print(rich_text, end="")
    return captured.get()
