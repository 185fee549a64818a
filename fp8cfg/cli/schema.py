"""`schema`: prints the JSON Schema of YAML files, for completion and checks in editors."""

from __future__ import annotations

import json
from pathlib import Path

from fp8cfg.cli.argv import split
from fp8cfg.composition.config_groups import GROUPS, Library
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
    asked = [*arguments.plain, *arguments.words] or ["recipe"]
    if len(asked) > 1 or asked[0] not in GROUPS:
        raise ConfigError(f"schema {' '.join(asked)}: no such schema" + suggest(asked[0], GROUPS))
    folder = arguments.one("--config-dir")
    library = Library(Path(folder) if folder else None)
    print(
        json.dumps(
            recipe_schema(library) if asked == ["recipe"] else preset_schema(asked[0]), indent=1
        )
    )
    return 0
