"""`train`: composes, prints the plan of the run, refuses or trains; and dispatches to Hydra's ways of inspecting and sweeping."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from fp8cfg.cli import WORDS, hydra, launch_run
from fp8cfg.cli.argv import Arguments, is_hydra, split, wrong_words
from fp8cfg.cli.launch_run import go_on, is_run, launch, sized
from fp8cfg.cli.recipe_arguments import recipe_file, say, settled_on_ranks, whole_lines
from fp8cfg.composition import to_yaml
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.planning import remarks
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe

USAGE = """
fp8cfg [train] [recipe=NAME | FILE.yaml] [precision=NAME] [data=NAME]
               [key=value ...] [--config-dir FOLDER]

Train a recipe. The run folder is a new folder in log.dir.

Examples:
  fp8cfg recipe=llama_tiny precision=bf16_fp8
  fp8cfg mine.yaml fp8.margin=1 log.folder=runs/mine
  torchrun --nproc-per-node 2 -m fp8cfg recipe=llama_tiny precision=bf16_fp8
  fp8cfg recipe=llama_405b precision=bf16_fp8 trainer.smoke=true

On a machine with GPUs, one rank starts on each, at most trainer.devices.
trainer.smoke=true shrinks any recipe: it trains three steps, saves and resumes.

Options:
  --config-dir FOLDER  your own recipes and presets
  -m, --multirun       one run per combination of values: fp8cfg sweep --help
  -c, --cfg job|hydra|all
                       print the composed config; -p, --package KEY prints a
                       part of it, --resolve resolves interpolations
  -i, --info all|config|defaults|defaults-tree|plugins|searchpath
                       print how the config is composed
  --hydra-help         Hydra's own flags and groups
  hydra.run.dir=FOLDER the run folder; other hydra.* and hydra/* arguments
                       configure the options above
"""


def run(argv: list[str]) -> int:
    """Train the recipe of `argv`, or what its flags ask for instead. Returns the exit code."""
    arguments = Arguments(words=[a for a in argv if "=" in a and not a.startswith("-")])
    try:
        if argv and argv[0] and argv[0][0] not in "-+~" and "=" not in argv[0]:
            recipe_file(
                argv[:1], WORDS
            )  # before the options: those of a verb with a typo are nobody's
        recipe_file(
            [arg for before, arg in pairwise(argv) if arg in WORDS and not before.startswith("-")],
            WORDS,
        )
        arguments = split(hydra.spelled_out(argv), hydra.OPTIONS, hydra.FLAGS)
        asked = hydra.asked(arguments)
        file = recipe_file(arguments.plain, WORDS)
    except ConfigError as e:
        raise ConfigError(list(dict.fromkeys(e.problems + wrong_words(arguments)))) from None
    if asked == "--multirun":
        from fp8cfg.cli.multirun import multirun  # Hydra is slow to load

        return multirun(arguments, file)
    if asked:
        return hydra.show(arguments, file)
    hydra.refuse_idle(arguments)

    def settle(words: Sequence[str]) -> ResolvedRecipe:
        return settled_on_ranks(words, arguments.one("--config-dir"), file)

    found = settle([word for word in arguments.words if not is_hydra(word)])
    exactly = hydra.run_dir(arguments, file, found.changes)
    two = _two_folders(found.recipe, exactly)
    refuse_if([*found.problems, *two] if two or not found.layout_alone else [])
    whole_line = whole_lines(arguments, settle)
    if (code := launch_run.started(found, argv, whole_line)) is not None:
        return code
    say(found.notes)  # which ranks say that were started here
    recipe, log = sized(found.recipe), found.recipe.log
    if exactly:
        say(f"note: {line}" for line in remarks.unused_log_dir(log, "hydra.run.dir", str(exactly)))
    if log.folder:
        exactly = Path(log.folder)
        if log.resume == "auto" and is_run(exactly):
            return go_on(exactly, lambda _: recipe, whole_line, anew=True)
    if exactly and os.environ.get("RANK", "0") == "0":  # which alone makes the folder
        RunFolder.refuse_taken(exactly)
    now = datetime.now()

    def folder() -> RunFolder:
        key = "log.folder" if log.folder else "hydra.run.dir" if exactly else "log.dir"
        return RunFolder.create(Path(log.dir), recipe.name, now, to_yaml(recipe), exactly, key=key)

    return launch(recipe, folder, None, whole_line)


def _two_folders(recipe: Recipe, exactly: Path | None) -> list[str]:
    """A line where hydra.run.dir names another folder than the recipe."""
    said = recipe.log.folder
    return (
        [f"hydra.run.dir={exactly}: log.folder={said} is the run folder; drop one"]
        if said and exactly
        else []
    )
