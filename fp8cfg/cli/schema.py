"""`schema`: prints the JSON Schema of YAML files, for completion and checks in editors."""

from __future__ import annotations

import json

from fp8cfg.cli.argv import split
from fp8cfg.cli.recipe_arguments import open_library
from fp8cfg.composition.config_groups import GROUPS
from fp8cfg.report.recipe_export import preset_schema, recipe_schema
from fp8cfg.schema.errors import ConfigError, suggest

USAGE = """
fp8cfg schema [recipe | precision | data] [--config-dir FOLDER]

Print the JSON Schema of recipe files, for editors.

Examples:
  fp8cfg schema > fp8cfg.schema.json
  fp8cfg schema precision
  fp8cfg schema recipe --config-dir conf

To complete and check a recipe in your editor, write this first line, or let
`fp8cfg export --output` write it:
  # yaml-language-server: $schema=fp8cfg.schema.json

Options:
  --config-dir FOLDER  include the names of your own recipes and presets
"""


def run(argv: list[str]) -> int:
    """Prints a schema and returns the exit code."""
    arguments = split(argv, ("--config-dir",))
    groups = [*arguments.plain, *arguments.words] or ["recipe"]
    group = groups[0]
    if len(groups) > 1 or group not in GROUPS:
        raise ConfigError(f"schema {' '.join(groups)}: no such schema{suggest(group, GROUPS)}")
    if group == "recipe":
        folder = arguments.one("--config-dir")
        schema = recipe_schema(open_library(folder))
    else:
        schema = preset_schema(group)
    print(json.dumps(schema, indent=1))
    return 0
