"""CLI reference: the help text of each verb, as `fp8cfg VERB --help` prints it."""

from __future__ import annotations

from fp8cfg.cli import VERBS
from fp8cfg.cli.help import usage


def page() -> str:
    parts = [
        "# Command line\n\n`fp8cfg` and `python -m fp8cfg` are the same program. What follows is what `fp8cfg --help` and "
        "`fp8cfg VERB --help` print.\n"
    ]
    for verb in (None, *VERBS):
        parts.append(f"## {verb or 'fp8cfg'}\n\n```text\n{usage(verb)}\n```\n")
    return "\n".join(parts)
