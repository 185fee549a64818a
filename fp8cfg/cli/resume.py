"""`resume`: continues a run from its newest checkpoint that verifies."""

from __future__ import annotations

import os
from pathlib import Path

from fp8cfg.cli.argv import split
from fp8cfg.config.errors import ConfigError

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
    folder = RunFolder.open(Path(arguments.plain[0]), lock=first)

    from fp8cfg.cli.launch import launch  # these load torch: a folder that is none is said first
    from fp8cfg.composition import compose, from_yaml, to_yaml
    from fp8cfg.config.recipe import Recipe
    from fp8cfg.training.checkpoint import checkpoint, job_state

    newest = checkpoint.newest(folder.checkpoints, print if first else lambda _: None)
    loaded = checkpoint.load(newest) if newest else None
    before = Recipe(**loaded[1]["recipe"]) if loaded else from_yaml(folder.recipe)
    recipe = compose(arguments.words, arguments.one("--config-dir"), base=before)
    job_state.refuse_changes(before, recipe, arguments.options.get("--allow", []))
    if first:
        print(f"resuming {folder.path} from {newest.name if newest else 'the start, it has no checkpoint yet'}")
        written = from_yaml(folder.recipe)
        for key in job_state.changes(before, written) if loaded else []:
            print(f"{key} in recipe.yaml is not that of the checkpoint, which holds; give it as a word to change it")
        for key in job_state.changes(before, recipe):
            print(f"changed: {key}")

    def continued() -> RunFolder:
        folder.recipe.write_text(to_yaml(recipe), encoding="utf-8")  # what the folder says is what runs from here on
        return folder

    return launch(recipe, continued, loaded)
