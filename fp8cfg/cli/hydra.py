"""Hydra flags: --cfg, --info, --package, --resolve and --hydra-help. For -m see multirun.py."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.cli.argv import Arguments, is_hydra, wrong_words
from fp8cfg.cli.recipe_arguments import resolve_recipe, say_notes
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.hydra_application import NAME, application, recipe_from
from fp8cfg.composition.overrides import hydra_word
from fp8cfg.composition.precedence import Change
from fp8cfg.composition.sweep_overrides import read
from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if, suggest
from fp8cfg.schema.keys import full
from fp8cfg.schema.recipe import Recipe, fields, short_keys

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

OPTIONS = ("--config-dir", "--cfg", "--info", "--package")
FLAGS = ("--multirun", "--resolve", "--hydra-help")
SHORT = {"-m": "--multirun", "-c": "--cfg", "-i": "--info", "-p": "--package"}
CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
RUN_DIR = "hydra.run.dir="
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
_NOT_OURS = {
    "--run",
    "--version",
    "--shell-completion",
    "--config-path",
    "--config-name",
    "--experimental-rerun",
}
"""Flags of Hydra applications that fp8cfg does not have, or uses differently."""


def spelled_out(argv: list[str]) -> list[str]:
    """Replaces Hydra's short flags by long ones, and `--info` without a value by `--info=all`.

    Args:
        argv: Arguments of the command.
    """
    out: list[str] = []
    for arg, after in zip(argv, [*argv[1:], ""], strict=False):
        name, eq, value = arg.partition("=")
        out.append(SHORT.get(name, name) + eq + value)
        if out[-1] == "--info" and (after.startswith("-") or "=" in after or not after):
            out[-1] = "--info=all"
    return out


def asked(arguments: Arguments) -> str | None:
    """Returns the Hydra flag of a command, None for a normal run.

    Args:
        arguments: Arguments of the command.

    Raises:
        ConfigError: Two flags, an unknown value, or an option without --cfg.
    """
    given = [
        f
        for f in ("--multirun", "--cfg", "--info", "--hydra-help")
        if f in arguments.flags or f in arguments.options
    ]
    problems = [f"{' and '.join(given)}: one at a time"] if len(given) > 1 else []
    for option, choices in CHOICES.items():
        value = arguments.one(option)
        if value is not None and value not in choices:
            problems.append(f"{option} {value}: not an option{suggest(value, choices)}")
    if "--cfg" not in given:
        problems += [
            f"{o}: does nothing without --cfg"
            for o in ("--package", "--resolve")
            if o in arguments.flags or o in arguments.options
        ]
    refuse_if(problems)
    return given[0] if given else None


def show(arguments: Arguments, file: Path | None) -> int:
    """Prints the output of --cfg, --info or --hydra-help, as Hydra does.

    Args:
        arguments: Arguments of the command.
        file: The recipe file, if any.

    Returns:
        The exit code.
    """
    words, hydra_words = hydra_split(arguments.words)
    folder = arguments.one("--config-dir")
    found = resolve_recipe(words, folder, file)
    refuse_if(found.problems)
    say_notes(found.notes)
    package = _package(arguments.one("--package"))
    library = Library(Path(folder) if folder else None)
    run = read(words, library, recipe_from(file, library) if file else None)
    # Under torchrun all ranks compose and check, but only one prints.
    if os.environ.get("RANK", "0") == "0":
        with application(run.nodes, settings(found.recipe)) as hydra:
            _print(
                hydra,
                arguments,
                package,
                [*run.overrides, *(change.override for change in found.changes)],
                hydra_words,
            )
    return 0


def hydra_split(words: list[str]) -> tuple[list[str], list[str]]:
    """Separates overrides of the recipe from Hydra's own.

    Args:
        words: Overrides of a command.

    Returns:
        Overrides of the recipe, and Hydra's.

    Raises:
        ConfigError: A search path, because Hydra would read unchecked files. Or an empty folder,
            which would be the current one.
    """
    ours, theirs = [w for w in words if not is_hydra(w)], [w for w in words if is_hydra(w)]
    refuse_if(
        [
            f"{w}: not accepted; your presets go to --config-dir FOLDER"
            for w in theirs
            if w.lstrip("+~").startswith("hydra.searchpath")
        ]
    )
    refuse_if([f"{w}: needs a name" for w in theirs if _nameless(*w.lstrip("+").split("=", 1))])
    theirs = [hydra_word(word) for word in theirs]
    return ours, theirs


def _nameless(key: str, value: str = "") -> bool:
    """Returns whether a folder of Hydra is set to nothing."""
    return key in _FOLDERS and value.strip(" '\"") in ("", "null")


def refuse_idle(arguments: Arguments) -> None:
    """Raises ConfigError for overrides of Hydra without an effect in a single run.

    Args:
        arguments: Arguments of the command.
    """
    idle = [w for w in arguments.words if is_hydra(w) and not w.startswith(RUN_DIR)]
    if idle:
        meant = RUN_DIR.rstrip("=")
        lines = [
            (
                f"{w}: no such setting of Hydra; did you mean {meant!r}?"
                if nearest(w.partition("=")[0], [meant], 0.9)
                else f"{w}: does nothing in a single run; -m, --cfg and --info take it"
            )
            for w in idle
        ]
        raise ConfigError(lines + wrong_words(arguments))


def run_dir(arguments: Arguments, file: Path | None, changes: Sequence[Change]) -> Path | None:
    """Returns the run folder of hydra.run.dir, None if it is not set.

    Args:
        arguments: Arguments of the command.
        file: The recipe file, if any.
        changes: Values that were changed to resolve conflicts. The folder may interpolate them.
    """
    words, theirs = hydra_split(arguments.words)
    if not theirs:
        return None
    from hydra.types import RunMode

    folder = arguments.one("--config-dir")
    library = Library(Path(folder) if folder else None)
    plan = read(words, library, recipe_from(file, library) if file else None)
    with application(plan.nodes) as hydra:
        said = [*plan.overrides, *(change.override for change in changes), *theirs]
        made = hydra.compose_config(NAME, said, RunMode.RUN, with_log_configuration=False)
        return Path(str(made.hydra.run.dir))


def settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the `hydra` node of the primary config: the folders of runs and sweeps.

    Args:
        recipe: The recipe.
    """
    at = "${now:%Y%m%d-%H%M%S}"
    return {
        "job": {"name": "fp8cfg"},
        "run": {"dir": f"{recipe.log.dir}/{recipe.name}-{at}"},
        "sweep": {"dir": f"{recipe.log.dir}/sweep-{at}"},
    }


def _package(key: str | None) -> str | None:
    """Returns the full name of --package. Raises ConfigError for an unknown node or key."""
    if key is None or key == "_global_" or key.partition(".")[0] == "hydra":
        return key
    if full(key) not in fields():
        raise ConfigError(f"--package {foreign_names.unknown(key, short_keys())}")
    return full(key)


def _print(
    hydra: Hydra,
    arguments: Arguments,
    package: str | None,
    words: list[str],
    hydra_words: list[str],
) -> None:
    """Prints the output of the flag through Hydra's own functions."""
    cfg, info = arguments.one("--cfg"), arguments.one("--info")
    if cfg:
        try:
            hydra.show_cfg(
                NAME, [*words, *hydra_words], cfg, package, "--resolve" in arguments.flags
            )
        except SystemExit:  # Hydra has printed its own error already
            raise ConfigError(f"--package {package}: not in --cfg {cfg}") from None
    elif info:
        hydra.show_info(info, NAME, [*words, *hydra_words])
    else:
        from hydra._internal.utils import get_args_parser

        # argparse has no public way to remove options.
        parser = get_args_parser()
        parser._actions = [a for a in parser._actions if not _NOT_OURS & set(a.option_strings)]
        hydra.hydra_help(NAME, parser, Namespace(overrides=hydra_words))
