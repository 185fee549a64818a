"""`watch`: follows a run from its folder."""

from __future__ import annotations

from contextlib import suppress

from fp8cfg.cli.argv import split
from fp8cfg.schema.errors import ConfigError

USAGE = """
fp8cfg watch RUN_FOLDER [--wait] [--json]

Follow a run from its folder, until it ends.

Examples:
  fp8cfg watch runs/mine
  fp8cfg watch runs
  fp8cfg watch runs/mine --wait | tee mine.log

It shows what the run itself shows on a terminal: steps, loss, speed, remaining
time. It only reads. Ctrl-C ends it, and the run continues. Of a folder with
several runs it takes the newest. For a finished run it prints the summary.

Options:
  --wait               wait for a run that has not started yet
  --json               print a JSON object every log.every_n_steps steps; all
                       other messages go to standard error

Exit code: 0, whatever the state of the run.
"""


def run(argv: list[str]) -> int:
    """Follows the run folder of `argv`. Returns the exit code."""
    from fp8cfg.schema import messages
    from fp8cfg.studies.watching import watch

    arguments = split(argv, (), ("--wait", "--json"))
    if len(arguments.plain) != 1 or arguments.words:
        raise ConfigError("watch: needs one run folder, as in: fp8cfg watch runs/NAME")
    as_json = "--json" in arguments.flags
    # With --json, standard output has JSON only.
    say = messages.say_on_stderr if as_json else messages.say
    # Ctrl-C is the usual way to stop watching, so it is no error.
    with suppress(KeyboardInterrupt):
        watch(arguments.plain[0], "--wait" in arguments.flags, as_json, say)
    return 0
