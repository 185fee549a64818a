"""sources.json of a run folder: the source of each value in recipe.yaml."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fp8cfg.composition.layers import Source
from fp8cfg.composition.value_sources import value_sources
from fp8cfg.run_folder.file_names import SOURCES
from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.schema.keys import short

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe


def write_sources(files: RunFiles, recipe: Recipe) -> None:
    """Writes sources.json. A resumed run keeps the sources of the values that it takes over.

    Raises:
        OSError: The file cannot be written.
    """
    old_sources = read_sources(files)
    sources = {}
    for key, source in value_sources(recipe).items():
        name = short(key)
        # To `resume`, the recipe of the checkpoint is one layer.
        if source.startswith(Source.RECIPE.value):
            source = old_sources.get(name, source)
        sources[name] = source
    files.replace(SOURCES, (json.dumps(sources, indent=1) + "\n").encode())


def read_sources(files: RunFiles) -> dict[str, str]:
    """Reads sources.json: a text by short key, such as "command line: fp8.margin=1".

    Empty if the file is missing or damaged, as in folders of older versions.
    """
    try:
        sources = json.loads(files.read(SOURCES))
    except (OSError, StrangeFile, ValueError, RecursionError):
        return {}
    if not isinstance(sources, dict):
        return {}
    return {key: source for key, source in sources.items() if isinstance(source, str)}
