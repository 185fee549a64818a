"""`resume`: continues a run from its newest checkpoint that verifies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8cfg.checkpoint.resume_rules import allowing_nothing, goes_on, refuse_changes
from fp8cfg.cli import launch_run
from fp8cfg.cli.argv import split
from fp8cfg.cli.launch_run import go_on
from fp8cfg.cli.recipe_arguments import idle_folder, say, settled_on_ranks, whole_lines
from fp8cfg.composition.precedence import Settled
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import short
from fp8cfg.schema.recipe import Recipe

USAGE = """
fp8cfg resume RUN_FOLDER [key=value ...] [--allow KEY ...]
              [--config-dir FOLDER]

Goes on with a run from its newest checkpoint that verifies, on as many GPUs of
this machine as training takes. A change that would not continue the same run
is refused unless allowed by its key (fp8 or 'fp8.*' for all of a node).
"""


def run(argv: list[str]) -> int:
    """Resume the run folder of `argv`. Returns the exit code."""
    from fp8cfg.training import runs

    arguments = split(argv, ("--config-dir", "--allow"))
    if len(arguments.plain) != 1:
        raise ConfigError("resume: needs one run folder, as in: fp8cfg resume runs/NAME")
    path, folder, allow = (
        Path(arguments.plain[0]),
        arguments.one("--config-dir"),
        arguments.options.get("--allow", []),
    )
    with RunFolder.open(arguments.plain[0], lock=False) as run_folder:
        before = runs.newest_recipe(run_folder)

    def settle(words: Sequence[str]) -> Settled:
        return settled_on_ranks(words, folder, base=before)

    def changed(base: Recipe) -> Recipe:
        found = settled_on_ranks(arguments.words, folder, base=base)
        refuse_if(found.problems)
        say(found.notes)
        say(idle_folder(arguments.words, folder))
        say(
            f"note: --allow {key}: allows nothing, no such key has changed"
            for key in allowing_nothing(base, found.recipe, allow)
        )
        return found.recipe

    whole_line = whole_lines(
        arguments, settle, "resume", *(word for key in allow for word in ("--allow", key))
    )
    found = settle(arguments.words)
    refuse_if([] if found.layout_alone else found.problems)
    refuse_changes(before, found.recipe, allow, {short(c.key): c.cause for c in found.changes})
    code = launch_run.started(
        found, ["resume", *argv], whole_line, lambda other: goes_on(found.recipe, other, allow)
    )
    return go_on(path, changed, whole_line, allow) if code is None else code
