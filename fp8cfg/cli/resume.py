"""`resume`: continues a run from its newest checkpoint that verifies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.cli.argv import split
from fp8cfg.config.errors import ConfigError

if TYPE_CHECKING:
    from fp8cfg.training.loop import Loaded
    from fp8cfg.training.run_folder import RunFolder

USAGE = """
fp8cfg resume RUN_FOLDER [key=value ...] [--allow KEY ...]

Goes on with a run from its newest checkpoint that verifies. A change that would
not continue the same run is refused unless allowed by its key (fp8 or 'fp8.*'
for all of a node).
"""


def run(argv: list[str]) -> int:
    """Resume the run folder of `argv`. Returns the exit code."""
    from fp8cfg.training.run_folder import RunFolder

    arguments = split(argv, ("--config-dir", "--allow"))
    if len(arguments.plain) != 1:
        raise ConfigError("resume: needs one run folder, as in: fp8cfg resume runs/NAME")
    first = os.environ.get("RANK", "0") == "0"
    say = print if first else lambda _: None
    with RunFolder.open(Path(arguments.plain[0]), lock=first) as folder:
        from fp8cfg.training import runs  # this loads torch: a folder that is none is said first

        def go_on(name: str, loaded: Loaded | None) -> int:
            from fp8cfg.cli.composed import composed
            from fp8cfg.cli.run_recipe import launch
            from fp8cfg.composition import to_yaml

            recipe = runs.continued(
                folder, name, loaded, lambda base: composed(arguments.words, arguments.one("--config-dir"), base=base),
                arguments.options.get("--allow", []), say)

            def taken() -> RunFolder:
                folder.lock()  # which an attempt from a later checkpoint has given back
                folder.write_recipe(to_yaml(recipe))  # what the folder says is what runs from here on
                return folder

            return launch(recipe, taken, loaded)

        return runs.from_newest(folder, go_on, say)
