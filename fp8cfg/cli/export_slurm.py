"""`export slurm`: a recipe as a batch script, for clusters on which a user hands in scripts."""

from __future__ import annotations

from fp8cfg.cli.argv import Arguments, recipe_file
from fp8cfg.cli.launch import settings
from fp8cfg.config.errors import ConfigError


def run(arguments: Arguments) -> int:
    """Print the script for the recipe of `arguments`, or write it to --output. Returns the exit code."""
    from fp8cfg.cli.composed import composed
    from fp8cfg.cli.output import print_or_write
    from fp8cfg.execution.slurm_script import batch_script

    if arguments.flags:
        raise ConfigError(
            f"{sorted(arguments.flags)[0]}: not with slurm, whose scripts have one form"
        )
    folder, said = arguments.one("--config-dir"), arguments.plain[1:]
    recipe = composed(arguments.words, folder, recipe_file(said, ()))
    words = [*said, *arguments.words, *(["--config-dir", folder] if folder else [])]
    text = batch_script(recipe, words, settings(arguments.one("--slurm") or "", submitit=False))
    return print_or_write(text, arguments.one("--output"))
