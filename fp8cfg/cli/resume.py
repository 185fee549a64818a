"""`resume`: continues a run from its newest valid checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8cfg.checkpoint.resume_rules import can_resume, refuse_changes, unused_allows
from fp8cfg.cli import launch_run
from fp8cfg.cli.argv import VERBOSE, add_verbose, split
from fp8cfg.cli.recipe_arguments import command_lines, idle_folder, resolve_on_ranks, say_notes
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import short
from fp8cfg.schema.recipe import Recipe

USAGE = """
fp8cfg resume RUN_FOLDER [key=value ...] [--allow KEY ...] [--step N]
              [--recalibrate-fp8] [--verbose] [--config-dir FOLDER]

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
  --verbose            print the planned and the observed tables too
  --config-dir FOLDER  your own recipes and presets
"""


def run(argv: list[str]) -> int:
    """Resumes a run and returns the exit code."""
    from fp8cfg.training.resume import CheckpointChoice, newest_recipe

    arguments = split(argv, ("--config-dir", "--allow", "--step"), ("--recalibrate-fp8", VERBOSE))
    add_verbose(arguments)
    if len(arguments.plain) != 1:
        raise ConfigError("resume: needs one run folder, as in: fp8cfg resume runs/NAME")
    path = Path(arguments.plain[0])
    config_dir = arguments.one("--config-dir")
    allow = arguments.options.get("--allow", [])
    choice = CheckpointChoice(
        _read_step(arguments.one("--step")), "--recalibrate-fp8" in arguments.flags
    )
    with RunFolder.open(arguments.plain[0], lock=False) as folder:
        recipe_before, step = newest_recipe(folder, choice)

    def resolve(words: Sequence[str]) -> ResolvedRecipe:
        """Composes the recipe of overrides on top of the checkpoint's."""
        return resolve_on_ranks(words, config_dir, base=recipe_before)

    def change(base: Recipe) -> Recipe:
        """Applies the overrides to the recipe of the loaded checkpoint, with notes."""
        # Called again for each older checkpoint if the newest one is damaged.
        resolved = resolve_on_ranks(arguments.words, config_dir, base=base)
        refuse_if(resolved.problems)
        say_notes(resolved.notes)
        say_notes(idle_folder(arguments.words, config_dir))
        say_notes(
            f"note: --allow {key}: allows nothing, no such key has changed"
            for key in unused_allows(base, resolved.recipe, allow)
        )
        return resolved.recipe

    options = []
    for key in allow:
        options += ["--allow", key]
    if choice.step is not None:
        options += ["--step", str(choice.step)]
    if choice.recalibrate_fp8:
        options.append("--recalibrate-fp8")
    whole_line = command_lines(arguments, resolve, "resume", *options)

    resolved = resolve(arguments.words)
    # launch_run.start_ranks reports problems of the layout, with command lines that run here.
    if not resolved.layout_alone:
        refuse_if(resolved.problems)
    causes = {short(item.key): item.cause for item in resolved.changes}
    # Before ranks start: one process prints the error. Each rank checks again.
    refuse_changes(recipe_before, resolved.recipe, allow, causes, step=step)

    def takes(other: Recipe) -> bool:
        """Returns whether this run can resume with a suggested recipe."""
        return can_resume(resolved.recipe, other, allow)

    code = launch_run.start_ranks(resolved, ["resume", *argv], whole_line, takes)
    if code is not None:
        return code
    return launch_run.resume(path, change, whole_line, allow, choice=choice)


def _read_step(text: str | None) -> int | None:
    """Parses --step. Raises ConfigError."""
    if text is None:
        return None
    # int() would also accept "+2", "1_000" and digits of other scripts. It rejects texts of more
    # than 4300 digits with an error of its own.
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ConfigError(f"--step {text[:40]}: needs the number of a step, as in --step 200")
    return int(text)
