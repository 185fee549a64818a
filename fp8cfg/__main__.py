"""The command line: `python -m fp8cfg`, and the console script `fp8cfg`. Imports what the verb at hand needs, no more."""

from __future__ import annotations

import os
import sys

VERBS = ("train", "resume", "rerun", "list", "explain", "diff", "plan", "check", "doctor", "export", "schema", "completion", "help")


def main(argv: list[str] | None = None) -> int:
    """Run one verb; `train` where none is given. Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    named = bool(argv) and argv[0] in VERBS
    verb = argv.pop(0) if named else "train"
    if verb == "help" or {"-h", "--help"} & set(argv):
        from fp8cfg.cli.help import usage

        print(usage(verb if named and verb != "help" else argv[0] if argv and argv[0] in VERBS else None))
        return 0
    if "--version" in argv:
        from fp8cfg import __version__

        print(f"fp8cfg {__version__}")
        return 0
    return _run(verb, argv)


def _run(verb: str, argv: list[str]) -> int:
    import importlib

    from fp8cfg.config.errors import Fp8cfgError

    try:
        return int(importlib.import_module(f"fp8cfg.cli.{verb}").run(argv))
    except Fp8cfgError as e:
        _report(str(e), "" if e.exit_code == 75 else "error: ")
        return e.exit_code
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return 130


def _report(text: str, prefix: str) -> None:
    """The lines of an error. What all ranks found is said by the first: torchrun ends the others as soon as that one fails.
    What one rank alone found is said by it, a little later.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        import time

        time.sleep(2)
        prefix = f"rank {rank}: {prefix}"
    sys.stdout.flush()
    for line in text.splitlines():
        print(f"{prefix}{line}", file=sys.stderr)


def entry() -> None:
    """The console script: `main`, and then the end of the process."""
    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo's threads may still want the interpreter's lock while it is torn down, which aborts a rank that is done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
