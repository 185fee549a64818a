"""`resume`: continues a run from its newest checkpoint that verifies."""

from __future__ import annotations

from pathlib import Path

from fp8cfg.cli.argv import split
from fp8cfg.cli.run_recipe import go_on
from fp8cfg.config.errors import ConfigError

USAGE = """
fp8cfg resume RUN_FOLDER [key=value ...] [--allow KEY ...]

Goes on with a run from its newest checkpoint that verifies. A change that would
not continue the same run is refused unless allowed by its key (fp8 or 'fp8.*'
for all of a node).
"""


def run(argv: list[str]) -> int:
    """Resume the run folder of `argv`. Returns the exit code."""
    from fp8cfg.cli.composed import composed

    arguments = split(argv, ("--config-dir", "--allow"))
    if len(arguments.plain) != 1:
        raise ConfigError("resume: needs one run folder, as in: fp8cfg resume runs/NAME")
    return go_on(Path(arguments.plain[0]), lambda base: composed(arguments.words, arguments.one("--config-dir"), base=base),
                 arguments.options.get("--allow", []))
