"""`train`: composes a recipe and trains it. Also dispatches to sweeps and Hydra's flags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from fp8cfg.cli import WORDS, hydra, launch_run
from fp8cfg.cli.argv import VERBOSE, Arguments, add_verbose, is_hydra, split, wrong_words
from fp8cfg.cli.recipe_arguments import command_lines, recipe_file, resolve_on_ranks, say_notes
from fp8cfg.composition import to_yaml
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.planning import remarks
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, refuse_if

USAGE = """
fp8cfg [train] [recipe=NAME | FILE.yaml] [precision=NAME] [data=NAME]
               [key=value ...] [--verbose] [--config-dir FOLDER]

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
  --verbose            print the planned and the observed tables too; short for
                       log.level=debug
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
    """Trains a recipe, or runs the command of a Hydra flag. Returns the exit code."""
    arguments, file = _read_arguments(argv)
    flag = hydra.asked(arguments)
    if flag == "--multirun":
        from fp8cfg.cli.multirun import multirun  # here: Hydra is slow to load

        return multirun(arguments, file)
    if flag:
        return hydra.show(arguments, file)
    hydra.refuse_idle(arguments)

    def resolve(words: Sequence[str]) -> ResolvedRecipe:
        """Composes the recipe of overrides and the file."""
        return resolve_on_ranks(words, arguments.one("--config-dir"), file)

    resolved = resolve([word for word in arguments.words if not is_hydra(word)])
    path = hydra.run_dir(arguments, file, resolved.changes)
    log = resolved.recipe.log
    conflicts = []
    if log.folder and path:
        conflicts = [f"hydra.run.dir={path}: log.folder={log.folder} is the run folder; drop one"]
    # launch_run.start_ranks reports problems of the layout, with command lines that run here.
    if conflicts or not resolved.layout_alone:
        refuse_if([*resolved.problems, *conflicts])
    whole_line = command_lines(arguments, resolve)
    code = launch_run.start_ranks(resolved, argv, whole_line)
    if code is not None:
        return code

    level = resolved.recipe.log.level
    say_notes(resolved.notes, level)  # only here: with several ranks, the started ranks print them
    recipe = launch_run.cut_to_ranks(resolved.recipe)
    if path:
        unused = remarks.unused_log_dir(log, "hydra.run.dir", str(path))
        say_notes([f"note: {line}" for line in unused], level)
    if log.folder:
        path = Path(log.folder)
        if log.resume == "auto" and launch_run.is_run(path):
            return launch_run.resume(path, lambda _: recipe, whole_line, is_restart=True)
    if path and os.environ.get("RANK", "0") == "0":  # the rank that creates the folder
        RunFolder.refuse_taken(path)
    key = "log.dir"
    if path:
        key = "log.folder" if log.folder else "hydra.run.dir"
    start_time = datetime.now()

    def create() -> RunFolder:
        """Creates the run folder. Only the first rank calls it."""
        return RunFolder.create(
            Path(log.dir), recipe.name, start_time, to_yaml(recipe), path, key=key
        )

    return launch_run.launch(recipe, create, None, whole_line)


def _read_arguments(argv: list[str]) -> tuple[Arguments, Path | None]:
    """Returns the arguments and the recipe file. Raises ConfigError with all wrong arguments."""
    # If the split below fails, these overrides are checked too, to report all errors at once.
    arguments = Arguments(words=[word for word in argv if "=" in word and not word.startswith("-")])
    try:
        # Check the verb first: the options of a mistyped verb cannot be checked.
        if argv and argv[0] and argv[0][0] not in "-+~" and "=" not in argv[0]:
            recipe_file(argv[:1], WORDS)
        commands = [
            word
            for previous, word in pairwise(argv)
            if word in WORDS and not previous.startswith("-")
        ]
        recipe_file(commands, WORDS)
        arguments = split(hydra.spelled_out(argv), hydra.OPTIONS, (*hydra.FLAGS, VERBOSE))
        add_verbose(arguments)
        hydra.asked(arguments)
        return arguments, recipe_file(arguments.plain, WORDS)
    except ConfigError as error:
        problems = error.problems + wrong_words(arguments)
        raise ConfigError(list(dict.fromkeys(problems))) from None
