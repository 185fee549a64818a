"""Command line: `python -m fp8cfg`, and the console script `fp8cfg`. Imports what the verb at hand needs, no more."""

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
    """Run one verb, by default `train`; print the help without arguments. Returns the exit code. In a process of its own a second signal ends it at once; in
    one of others it is theirs."""
    warnings.showwarning = _warned
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), own_process)
        flush_stdout()
        return code
    except BaseException as e:
        if (ended := report_error(e)) is None:
            raise
        return ended


def _run(argv: list[str], own_process: bool) -> int:
    asked = set() if argv[:2] == ["completion", "--words"] else _asked(argv)
    if not argv or argv[:1] == ["help"] or asked & {"-h", "--help"}:
        return _help(argv)
    if asked:
        print(f"fp8cfg {__version__}")
        return 0
    _refuse_environment()
    verb = argv.pop(0) if argv and argv[0] in WORDS else "train"
    with ExitStack() as stack:
        if VERBS[verb].trains:  # what it prints is beside the point
            os.getcwd()  # where there is none, libraries that torch loads end the process
            signals.own_process = own_process
            stack.enter_context(patient_stdout())
            if verb != "sweep":  # whose runs do
                stack.enter_context(signals.waiting_to_stop())
        return int(importlib.import_module(f"fp8cfg.cli.{verb}").run(argv))


def _asked(argv: list[str]) -> set[str]:
    """What asks for help or the version."""
    return {"-h", "--help", "--version"} & set(before_end(argv))


def _refuse_environment() -> None:
    """Raise ConfigError where a variable of torchrun's, which is read in many places, is no number."""
    sizes, numbers = ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("RANK", "LOCAL_RANK")
    said = {name: os.environ[name] for name in (*sizes, *numbers) if name in os.environ}
    refuse_if(
        [
            f"{name}={value[:40]}: torchrun sets this environment variable to a number of ranks,"
            " or of one; unset it"
            for name, value in said.items()
            if not value.isdecimal() or (name in sizes and not int(value))
        ]
    )


def _help(argv: list[str]) -> int:
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
    """A warning of ours to users as one line, said by the first rank; every other warning as Python prints it."""
    if not issubclass(category, PlainWarning):
        _PLAIN(message, category, *where, **more)
    elif os.environ.get("RANK", "0") == "0":
        print_errors([str(message)], "warning: ")


_PLAIN = warnings.showwarning


def entry() -> None:
    """The console script: `main`, and then the end of the process."""
    with ending_imports():
        # A path may hold what the terminal, or no terminal, has a character for.
        if sys.stdout is not None:
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        code = main(own_process=True)
    sys.exit(code)


if __name__ == "__main__":
    entry()
