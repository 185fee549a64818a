"""Command line: `python -m fp8cfg`, and the console script `fp8cfg`.

Only the imports of the given verb are loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from contextlib import ExitStack
from typing import Any

from fp8cfg.cli import VERBS, WORDS
from fp8cfg.cli.argv import before_end, is_recipe_file
from fp8cfg.cli.help import usage
from fp8cfg.cli.output import ending_imports, patient_stdout
from fp8cfg.schema import __version__
from fp8cfg.schema.errors import (
    ConfigError,
    PlainWarning,
    flush_stdout,
    print_errors,
    refuse_if,
    report_error,
)
from fp8cfg.training import signals


def main(argv: list[str] | None = None, own_process: bool = False) -> int:
    """Runs one verb, `train` by default. Prints the help without arguments.

    Args:
        argv: Arguments of the command. Defaults to those of the process.
        own_process: Whether the process runs nothing else. Then a second signal exits at once.
            Otherwise it goes to the handler of the embedding program.

    Returns:
        The exit code.
    """
    warnings.showwarning = _warned
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), own_process)
        flush_stdout()
        return code
    except BaseException as e:
        exit_code = report_error(e)
        if exit_code is None:
            raise
        return exit_code


def _run(argv: list[str], own_process: bool) -> int:
    """Runs the verb of `argv`. Returns the exit code."""
    # Words to complete may have --help among them.
    asked = set() if argv[:2] == ["completion", "--words"] else _help_options(argv)
    if not argv or argv[:1] == ["help"] or asked & {"-h", "--help"}:
        return _help(argv)
    if asked:
        print(f"fp8cfg {__version__}")
        return 0
    _refuse_environment()
    verb = argv.pop(0) if argv and argv[0] in WORDS else "train"
    with ExitStack() as stack:
        if VERBS[verb].trains:
            # In a deleted working directory, libraries of torch would abort the process. This
            # raises an error instead.
            os.getcwd()
            signals.own_process = own_process
            # A run outlives its pager.
            stack.enter_context(patient_stdout())
            if verb != "sweep":  # each job of a sweep waits by itself
                stack.enter_context(signals.waiting_to_stop())
        return int(importlib.import_module(f"fp8cfg.cli.{verb}").run(argv))


def _help_options(argv: list[str]) -> set[str]:
    """Returns the options for help or the version."""
    return {"-h", "--help", "--version"} & set(before_end(argv))


def _refuse_environment() -> None:
    """Raises ConfigError for a variable of torchrun that is not a valid number."""
    # Checked once here, because many modules read these variables.
    sizes, numbers = ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("RANK", "LOCAL_RANK")
    values = {name: os.environ[name] for name in (*sizes, *numbers) if name in os.environ}
    refuse_if(
        [
            f"{name}={value[:40]}: torchrun sets this environment variable to a number of ranks,"
            " or of one; unset it"
            for name, value in values.items()
            if not value.isdecimal() or (name in sizes and not int(value))
        ]
    )


def _help(argv: list[str]) -> int:
    """Prints the help of the verb in `argv`, or the general help. Returns the exit code."""
    named = [
        a
        for a in argv
        if a != "help" and not a.startswith("-") and "=" not in a and not is_recipe_file(a)
    ]
    if named and named[0] not in WORDS:
        from fp8cfg.cli.recipe_arguments import no_verb  # it loads the schema

        raise ConfigError(no_verb(named[0], WORDS))
    print(usage(named[0] if named else None))
    return 0


def _warned(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Prints a warning of fp8cfg as one line, on the first rank. Others are printed by Python."""
    if not issubclass(category, PlainWarning):
        _PLAIN(message, category, *where, **more)
    elif os.environ.get("RANK", "0") == "0":
        print_errors([str(message)], "warning: ")


_PLAIN = warnings.showwarning


def entry() -> None:
    """Runs the console script: `main`, and exits."""
    with ending_imports():
        # Paths may have characters that the terminal cannot print.
        if sys.stdout is not None:
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        code = main(own_process=True)
    sys.exit(code)


if __name__ == "__main__":
    entry()
