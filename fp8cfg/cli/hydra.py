"""Hydra flags: --cfg, --info, --package, --resolve and --hydra-help. For -m see multirun.py."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.cli.argv import Arguments, is_hydra, wrong_words
from fp8cfg.cli.recipe_arguments import open_library, resolve_recipe, say_notes
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
    result: list[str] = []
    for arg, next_arg in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = arg.partition("=")
        arg = SHORT.get(name, name) + equals + value
        is_value = next_arg and not next_arg.startswith("-") and "=" not in next_arg
        if arg == "--info" and not is_value:
            arg = "--info=all"
        result.append(arg)
    return result


def asked(arguments: Arguments) -> str | None:
    """Returns the Hydra flag of a command, None for a normal run.

    Args:
        arguments: Arguments of the command.

    Raises:
        ConfigError: Two flags, an unknown value, or an option without --cfg.
    """
    flags = []
    for flag in ("--multirun", "--cfg", "--info", "--hydra-help"):
        if flag in arguments.flags or flag in arguments.options:
            flags.append(flag)
    problems = []
    if len(flags) > 1:
        problems.append(f"{' and '.join(flags)}: one at a time")
    for option, choices in CHOICES.items():
        value = arguments.one(option)
        if value is not None and value not in choices:
            problems.append(f"{option} {value}: not an option{suggest(value, choices)}")
    if "--cfg" not in flags:
        for option in ("--package", "--resolve"):
            if option in arguments.flags or option in arguments.options:
                problems.append(f"{option}: does nothing without --cfg")
    refuse_if(problems)
    if not flags:
        return None
    return flags[0]


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
    resolved = resolve_recipe(words, folder, file)
    refuse_if(resolved.problems)
    say_notes(resolved.notes)
    package = _package(arguments.one("--package"))
    library = open_library(folder)
    plan = read(words, library, recipe_from(file, library) if file else None)
    # Under torchrun all ranks compose and check, but only one prints.
    if os.environ.get("RANK", "0") == "0":
        overrides = [*plan.overrides, *(change.override for change in resolved.changes)]
        with application(plan.nodes, settings(resolved.recipe)) as hydra:
            _print(hydra, arguments, package, overrides, hydra_words)
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
    recipe_words = [word for word in words if not is_hydra(word)]
    hydra_words = [word for word in words if is_hydra(word)]
    problems = []
    for word in hydra_words:
        if word.lstrip("+~").startswith("hydra.searchpath"):
            problems.append(f"{word}: not accepted; pass your presets as --config-dir FOLDER")
    refuse_if(problems)
    for word in hydra_words:
        key, _, value = word.lstrip("+").partition("=")
        if key in _FOLDERS and value.strip(" '\"") in ("", "null"):
            problems.append(f"{word}: needs a name")
    refuse_if(problems)
    return recipe_words, [hydra_word(word) for word in hydra_words]


def refuse_idle(arguments: Arguments) -> None:
    """Raises ConfigError for overrides of Hydra without an effect in a single run.

    Args:
        arguments: Arguments of the command.
    """
    problems = []
    for word in arguments.words:
        if not is_hydra(word) or word.startswith(RUN_DIR):
            continue
        setting = RUN_DIR.rstrip("=")
        if nearest(word.partition("=")[0], [setting], 0.9):
            problems.append(f"{word}: no such setting of Hydra; did you mean {setting!r}?")
        else:
            problems.append(
                f"{word}: does nothing in a single run; use it with -m, --cfg or --info"
            )
    if problems:
        raise ConfigError(problems + wrong_words(arguments))


def run_dir(arguments: Arguments, file: Path | None, changes: Sequence[Change]) -> Path | None:
    """Returns the run folder of hydra.run.dir, None if it is not set.

    Args:
        arguments: Arguments of the command.
        file: The recipe file, if any.
        changes: Values that were changed to resolve conflicts. The folder may interpolate them.
    """
    words, hydra_words = hydra_split(arguments.words)
    if not hydra_words:
        return None
    from hydra.types import RunMode

    folder = arguments.one("--config-dir")
    library = open_library(folder)
    plan = read(words, library, recipe_from(file, library) if file else None)
    with application(plan.nodes) as hydra:
        overrides = [*plan.overrides, *(change.override for change in changes), *hydra_words]
        config = hydra.compose_config(NAME, overrides, RunMode.RUN, with_log_configuration=False)
        return Path(str(config.hydra.run.dir))


def settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the `hydra` node of the primary config: the folders of runs and sweeps.

    Args:
        recipe: The recipe.
    """
    start_time = "${now:%Y%m%d-%H%M%S}"
    return {
        "job": {"name": "fp8cfg"},
        "run": {"dir": f"{recipe.log.dir}/{recipe.name}-{start_time}"},
        "sweep": {"dir": f"{recipe.log.dir}/sweep-{start_time}"},
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
        parser._actions = [
            action for action in parser._actions if not _NOT_OURS & set(action.option_strings)
        ]
        hydra.hydra_help(NAME, parser, Namespace(overrides=hydra_words))
