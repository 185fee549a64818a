"""`schema`: the JSON Schema of YAML files, by which editors complete and check them."""

from __future__ import annotations

import json
from pathlib import Path

from fp8cfg.cli.argv import split
from fp8cfg.composition.config_groups import GROUPS, Library
from fp8cfg.report.recipe_export import preset_schema, recipe_schema
from fp8cfg.schema.errors import ConfigError, suggest

USAGE = """
fp8cfg schema [recipe | precision | data] [--config-dir FOLDER]

The JSON Schema (draft 2020-12) of a recipe's YAML file, or of a preset's, by
which editors complete, explain and check keys and names:

  fp8cfg schema > fp8cfg.schema.json

and as the first line of a recipe beside it (`fp8cfg export --output` writes it)

  # yaml-language-server: $schema=fp8cfg.schema.json

  --config-dir FOLDER  recipes and presets of your own are names too
"""


def run(argv: list[str]) -> int:
    """Print the schema that `argv` asks for. Returns the exit code."""
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
