"""`resume`: continues a run from its newest checkpoint that verifies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8cfg.checkpoint.resume_rules import allowing_nothing, goes_on, refuse_changes
from fp8cfg.cli import launch_run
from fp8cfg.cli.argv import split
from fp8cfg.cli.launch_run import go_on
from fp8cfg.cli.recipe_arguments import idle_folder, say, settled_on_ranks, whole_lines
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import short
from fp8cfg.schema.recipe import Recipe

USAGE = """
fp8cfg resume RUN_FOLDER [key=value ...] [--allow KEY ...] [--step N]
              [--recalibrate-fp8] [--config-dir FOLDER]

Continue a run from its newest valid checkpoint.

Examples:
  fp8cfg resume runs/mine
  fp8cfg resume runs/mine trainer.max_steps=2000
  fp8cfg resume runs/mine fp8.margin=1 --allow fp8.margin

A change that makes it another run is an error unless you allow its key. Allow
all keys of a section with --allow fp8 or --allow 'fp8.*'.

Options:
  --allow KEY          accept a change of this key
  --step N             resume from the checkpoint of step N; newer checkpoints
                       are renamed to step-NNNNNNNN.aside-1
  --recalibrate-fp8    compute FP8 scales and amax histories again if they are
                       missing from the checkpoint or impossible
  --config-dir FOLDER  your own recipes and presets
"""


def run(argv: list[str]) -> int:
    """Resume the run folder of `argv`. Returns the exit code."""
    from fp8cfg.training import runs

    arguments = split(argv, ("--config-dir", "--allow", "--step"), ("--recalibrate-fp8",))
    if len(arguments.plain) != 1:
        raise ConfigError("resume: needs one run folder, as in: fp8cfg resume runs/NAME")
    path, folder, allow = (
        Path(arguments.plain[0]),
        arguments.one("--config-dir"),
        arguments.options.get("--allow", []),
    )
    choice = runs.CheckpointChoice(
        _step(arguments.one("--step")), "--recalibrate-fp8" in arguments.flags
    )
    with RunFolder.open(arguments.plain[0], lock=False) as run_folder:
        before, step = runs.newest_recipe(run_folder, choice)

    def settle(words: Sequence[str]) -> ResolvedRecipe:
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

    options = [word for key in allow for word in ("--allow", key)]
    if choice.step is not None:
        options += ["--step", str(choice.step)]
    if choice.recalibrate_fp8:
        options.append("--recalibrate-fp8")
    whole_line = whole_lines(arguments, settle, "resume", *options)
    found = settle(arguments.words)
    refuse_if([] if found.layout_alone else found.problems)
    causes = {short(c.key): c.cause for c in found.changes}
    refuse_changes(before, found.recipe, allow, causes, step=step)
    code = launch_run.started(
        found, ["resume", *argv], whole_line, lambda other: goes_on(found.recipe, other, allow)
    )
    if code is not None:
        return code
    return go_on(path, changed, whole_line, allow, choice=choice)


def _step(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"--step {text}: needs the number of a step, as in --step 200")
    return int(text)
