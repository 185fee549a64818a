"""`explain`: prints type, default, meaning, effect and layers of a key."""

from __future__ import annotations

import json
import sys

from fp8cfg.cli.argv import is_recipe_file, split
from fp8cfg.cli.recipe_arguments import chooses, open_library, recipe_file
from fp8cfg.composition.precedence import composed
from fp8cfg.report.key_explanation import explained, known
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import short
from fp8cfg.schema.messages import colored
from fp8cfg.schema.recipe import fields
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.value_errors import options

LEVELS = ("O1", "O2", "O3")
USAGE = """
fp8cfg explain KEY [recipe=NAME | FILE.yaml] [key=value ...] [--json]

Explain a key: type, bounds, default, meaning, effect, and who set it.

Examples:
  fp8cfg explain fp8.margin
  fp8cfg explain fp8.margin recipe=llama_8b precision=bf16_fp8 fp8.margin=1
  fp8cfg explain storage

The layers that set the key are printed in order: schema default, recipe
function, preset, recipe file, command line, and changes to fit your values. The
last one is the value. For a section such as fp8, the keys are listed.

Options:
  --config-dir FOLDER  your own recipes and presets
  --json               print JSON
"""


def run(argv: list[str]) -> int:
    """Explains a key and returns the exit code."""
    arguments = split(argv, ("--config-dir",), ("--json",))
    files = [arg for arg in arguments.plain if is_recipe_file(arg)]
    keys = [arg for arg in arguments.plain if arg not in files]
    problems: list[str] = []
    if len(keys) != 1:
        problems.append("explain: needs one key, as in: fp8cfg explain fp8.margin")
    else:
        try:
            full_key = known(keys[0])
        except ConfigError as error:
            problems += _explain_value(keys[0]) or error.problems
    try:
        folder = arguments.one("--config-dir")
        library = open_library(folder)
        resolved = composed(arguments.words, library, recipe_file(files, ()))
    except ConfigError as error:
        problems += error.problems
    refuse_if(problems)

    explanation = explained(resolved, full_key)
    if "--json" in arguments.flags:
        print(json.dumps(explanation.data(), indent=1))
    else:
        print(colored(str(explanation), sys.stdout))
    return 0


def _explain_value(value: str) -> list[str]:
    """Returns the error if the user gave a value instead of a key, such as a preset's name.

    Raises ConfigError at once for the value of a key.
    """
    values = {
        **_keys_by_value(),
        **dict.fromkeys(SCALINGS, "fp8.scaling"),
        **dict.fromkeys(LEVELS, "opt_level"),
    }
    if value in values:
        raise ConfigError(
            f"{value}: is a value of {values[value]}; write: fp8cfg explain {values[value]}"
        ) from None
    group = chooses(value)
    if not group:
        return []
    return [
        f"{value}: is a choice, not a key; write {group}={value} with a key, as in:"
        f" fp8cfg explain fp8.margin {group}={value}"
    ]


def _keys_by_value() -> dict[str, str]:
    """Returns keys by value, for values of one key only."""
    keys: dict[str, set[str]] = {}
    for key, field in fields().items():
        for option in options(field.annotation):
            keys.setdefault(option, set()).add(short(key))
    return {option: names.pop() for option, names in keys.items() if len(names) == 1}
