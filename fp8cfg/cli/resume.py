"""`resume`: continues a run from its newest checkpoint that verifies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.cli.argv import Arguments, split
from fp8cfg.config.errors import ConfigError, printable

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
    from fp8cfg.training.run_folder import CHECKPOINTS, RunFolder

    arguments = split(argv, ("--config-dir", "--allow"))
    if len(arguments.plain) != 1:
        raise ConfigError("resume: needs one run folder, as in: fp8cfg resume runs/NAME")
    first = os.environ.get("RANK", "0") == "0"
    say = print if first else lambda _: None
    with RunFolder.open(Path(arguments.plain[0]), lock=first) as folder:
        # These load torch: a folder that is none is said first.
        from fp8cfg.training.checkpoint import checkpoint, job_state, step_folders
        from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint

        root = folder.files.folder(CHECKPOINTS)
        found = step_folders.steps(root)
        for _, name in found:
            try:
                loaded = checkpoint.load_named(root, name)
                job_state.check(*loaded)
                return _go_on(arguments, folder, name, loaded, say)
            except DamagedCheckpoint as e:
                problem = str(e) if name in str(e) else f"{root.path / name}: {e}"
                say(step_folders.passed_over(printable(problem)))
        if found:
            raise step_folders.none_usable(root)
        return _go_on(arguments, folder, "", None, say)


def _go_on(arguments: Arguments, folder: RunFolder, name: str, loaded: Loaded | None, say: Callable[[str], None]) -> int:
    """Go on from the checkpoint `name`, or from the start. Raises DamagedCheckpoint, before the first step, where its contents are
    not those of its recipe."""
    from fp8cfg.cli.composed import composed
    from fp8cfg.cli.launch import launch
    from fp8cfg.composition import to_yaml
    from fp8cfg.config.recipe import Recipe
    from fp8cfg.training.checkpoint import job_state

    written = folder.read_recipe()
    before = Recipe(**loaded[1]["recipe"]) if loaded else written
    recipe = composed(arguments.words, arguments.one("--config-dir"), base=before)
    job_state.refuse_changes(before, recipe, arguments.options.get("--allow", []))
    say(f"resuming {printable(str(folder.path))} from {name or 'the start, it has no checkpoint yet'}")
    for key in job_state.changes(before, written) if loaded else []:
        say(f"{key} in recipe.yaml is not that of the checkpoint, which holds; give it as a word to change it")
    for key in job_state.changes(before, recipe):
        say(f"changed: {key}")

    def continued() -> RunFolder:
        folder.lock()  # which an attempt from a later checkpoint has given back
        folder.write_recipe(to_yaml(recipe))  # what the folder says is what runs from here on
        return folder

    return launch(recipe, continued, loaded)
