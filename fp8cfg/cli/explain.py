"""`explain`: a key's type, default, meaning and effect, and every layer that set it."""

from __future__ import annotations

import json

from fp8cfg.cli.argv import recipe_file, split
from fp8cfg.config.errors import ConfigError, refuse_if

USAGE = """
fp8cfg explain KEY [recipe=NAME | FILE.yaml] [key=value ...] [--json]

What KEY is: its type, bounds or choices, default and meaning; what it does
under this recipe, or why it does nothing; and every layer that set it, in
order: schema default, recipe function, preset, recipe file, command line. The
last layer is the value. A node, such as fp8, lists its keys.

  fp8cfg explain fp8.margin recipe=llama_8b precision=bf16_fp8 fp8.margin=1
  fp8cfg explain storage

  --config-dir FOLDER  recipes and presets of your own
  --json               the same as JSON
"""


def run(argv: list[str]) -> int:
    """Explain the key of `argv`. Returns the exit code."""
    from fp8cfg.composition.provenance import trace

    arguments = split(argv, ("--config-dir",), ("--json",))
    files = [arg for arg in arguments.plain if arg.endswith((".yaml", ".yml"))]
    keys = [arg for arg in arguments.plain if arg not in files]
    problems: list[str] = [] if len(keys) == 1 else ["explain: needs one key, as in: fp8cfg explain fp8.margin"]
    try:
        full_key = _known(keys[0]) if not problems else ""
    except ConfigError as e:
        problems += e.problems
    try:
        traced = trace(arguments.words, arguments.one("--config-dir"), recipe_file(files, ()))
    except ConfigError as e:
        problems += e.problems
    refuse_if(problems)

    from fp8cfg.composition.flatten import is_node
    from fp8cfg.report import key_explanation

    node = is_node(full_key)
    if "--json" in arguments.flags:
        print(json.dumps((key_explanation.node_data if node else key_explanation.key_data)(traced, full_key), indent=1))
    else:
        print((key_explanation.node_text if node else key_explanation.key_text)(traced, full_key))
    return 0


def _known(key: str) -> str:
    """The full name of `key`. Raises ConfigError where there is no such key."""
    from fp8cfg.config import foreign_names
    from fp8cfg.config.recipe import fields, full, short, short_keys

    if key == "recipe":
        raise ConfigError("recipe: is chosen by name, it is not a key; `fp8cfg list recipe` shows the names")
    if full(key) not in fields():
        raise ConfigError(foreign_names.unknown(short(full(key)), short_keys()))
    return full(key)
