"""`train`: compose, say what will run and what it takes, refuse or train."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.cli.words import recipe_file, split

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8cfg.config.recipe import Recipe
    from fp8cfg.training.loop import Loaded
    from fp8cfg.training.runfolder import RunFolder


def run(argv: list[str]) -> int:
    """Train the recipe of `argv`. Returns the exit code."""
    from fp8cfg.__main__ import VERBS
    from fp8cfg.composition import compose, to_yaml

    arguments = split(argv, ("--config-dir",))
    recipe = compose(arguments.words, arguments.one("--config-dir"), recipe_file(arguments.plain, VERBS))
    now = datetime.now()

    def folder() -> RunFolder:
        from fp8cfg.training.runfolder import RunFolder

        return RunFolder.create(Path(recipe.log.dir), recipe.name, now, to_yaml(recipe))

    return launch(recipe, folder, None)


def launch(recipe: Recipe, folder: Callable[[], RunFolder], start_from: Loaded | None) -> int:
    """Say what `recipe` runs here, refuse it or train it in `folder()`, from the loaded checkpoint `start_from` if given."""
    from fp8cfg.report import machine, outline

    say = print if os.environ.get("RANK", "0") == "0" else _nothing
    say(outline.head(recipe))
    hardware = machine.find_hardware(recipe.trainer.accelerator)
    say(outline.body(recipe, hardware))
    outline.refuse_layout(recipe, int(os.environ.get("WORLD_SIZE", "1")))

    from fp8cfg.builder import build
    from fp8cfg.training.distributed import world
    from fp8cfg.training.loop import fit

    with world(hardware.device) as ranks:
        job = build(recipe)
        run_folder = folder() if ranks.first else None
        try:
            result = fit(job, run_folder, start_from, ranks, say)
            losses = {"training loss": result.loss, "validation loss": result.val_loss}
            say(f"done: {result.steps} steps" + "".join(f", {k} {v:.4f}" for k, v in losses.items() if v is not None))
        finally:
            if run_folder:
                say(f"run folder: {run_folder.path}")
                run_folder.close()
    return 0


def _nothing(*_: object) -> None:
    """What ranks other than the first print."""
