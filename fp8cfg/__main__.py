"""Command line: `python -m fp8cfg`, and the console script `fp8cfg`. Imports what the verb at hand needs, no more."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import time
import warnings
from contextlib import ExitStack, suppress
from typing import Any

from fp8cfg.cli import VERBS, WORDS


def main(argv: list[str] | None = None, own_process: bool = False) -> int:
    """Run one verb; `train` where none is given. Returns the exit code. In a process of its own a second signal ends it at once; in
    one of others it is theirs."""
    from fp8cfg.config.errors import Fp8cfgError, RankLost, RankStalled
    from fp8cfg.config.out_of_memory import out_of_memory

    warnings.showwarning = _warned
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), own_process)
        _flush()
        return code
    except Fp8cfgError as e:
        lines = getattr(e, "problems", None) or [str(e)]
        _report(lines, "" if e.exit_code == 75 else "error: ", at_once=isinstance(e, RankStalled))
        if isinstance(e, RankLost | RankStalled):
            sys.stderr.flush()
            time.sleep(5)  # torchrun ends the other ranks as soon as one fails, and those that know why have yet to say it
        return e.exit_code
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        _silence()
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, MemoryError, RuntimeError, ImportError) as e:
        if line := out_of_memory(e):
            e.__traceback__ = None  # what it holds of memory may be needed to say so
            _report([line], "error: ")
            return 1
        if not isinstance(e, OSError) or e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG):
            raise
        full = e.errno != errno.ENAMETOOLONG
        _report([f"out of space: {e}" if full else f"{str(e.filename)[:40]}...: {e.strerror}"], "error: ")
        return 5 if full else 2


def _run(argv: list[str], own_process: bool) -> int:
    asked = set() if argv[:2] == ["completion", "--words"] else {"-h", "--help", "--version"} & set(argv)
    if argv[:1] == ["help"] or asked & {"-h", "--help"}:
        return _help(argv)
    if asked:
        from fp8cfg import __version__

        print(f"fp8cfg {__version__}")
        return 0
    _refuse_environment()
    verb = argv.pop(0) if argv and argv[0] in WORDS else "train"
    with ExitStack() as stack:
        if VERBS[verb].trains:  # what it prints is beside the point
            from fp8cfg.cli.output import patient_stdout
            from fp8cfg.training import signals

            signals.own_process = own_process
            stack.enter_context(patient_stdout())
            if verb != "sweep":  # whose runs do
                stack.enter_context(signals.waiting_to_stop())
        return int(importlib.import_module(f"fp8cfg.cli.{verb}").run(argv))


def _refuse_environment() -> None:
    """Raise ConfigError where a variable of torchrun's, which is read in many places, is no number."""
    from fp8cfg.config.errors import refuse_if

    sizes, numbers = ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("RANK", "LOCAL_RANK")
    said = {name: os.environ[name] for name in (*sizes, *numbers) if name in os.environ}
    refuse_if([f"{name}={value[:40]}: torchrun sets this environment variable to a number of ranks, or of one; unset it"
               for name, value in said.items() if not value.isdecimal() or (name in sizes and not int(value))])


def _help(argv: list[str]) -> int:
    from fp8cfg.cli.argv import is_recipe_file, no_verb
    from fp8cfg.cli.help import usage
    from fp8cfg.config.errors import ConfigError

    named = [a for a in argv if a != "help" and not a.startswith("-") and "=" not in a and not is_recipe_file(a)]
    if named and named[0] not in WORDS:
        raise ConfigError(no_verb(named[0], WORDS))
    print(usage(named[0] if named else None))
    return 0


def _flush() -> None:
    if sys.stdout is not None:  # it is closed: fp8cfg ... >&-
        sys.stdout.flush()


def _silence() -> None:
    """Whatever is printed from here on, and at the end of the process, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _report(lines: list[str], prefix: str, at_once: bool = False) -> None:
    """The lines of an error, each one line whatever a word or a file has put into it. What all ranks found is said by the
    first: torchrun ends the others as soon as that one fails. What one rank alone found is said by it, a little later or `at_once`.
    """
    from fp8cfg.config.errors import printable

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(0 if at_once else 2)
        prefix = f"rank {rank}: {prefix}"
    try:
        _flush()
    except OSError:  # no reader, or no space: the error is said all the same
        _silence()
    for line in lines:
        with suppress(OSError):  # a terminal that has gone; the exit code says it still
            print(f"{prefix}{printable(line)}", file=sys.stderr)


def _warned(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """A warning of ours to users as one line, said by the first rank; every other warning as Python prints it."""
    from fp8cfg.config.errors import PlainWarning

    if not issubclass(category, PlainWarning):
        _PLAIN(message, category, *where, **more)
    elif os.environ.get("RANK", "0") == "0":
        _report([str(message)], "warning: ")


_PLAIN = warnings.showwarning


def entry() -> None:
    """The console script: `main`, and then the end of the process."""
    if sys.stdout is not None:  # a path may hold what the terminal, or no terminal, has a character for
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = main(own_process=True)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # gloo's threads may still want the interpreter's lock while it is torn down, which aborts a rank that is done. Seen with
        # torch 2.13; ends with the torch whose gloo threads are joined before.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
