"""Launch: what `train`, `resume`, `rerun` and each job of a sweep do with a checked recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from fp8cfg.config.errors import printable

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe
    from fp8cfg.training.loop import Loaded
    from fp8cfg.training.run_folder import RunFolder


def launch(recipe: Recipe, folder: Callable[[], RunFolder], start_from: Loaded | None) -> int:
    """Say what `recipe` runs here, refuse it or train it in `folder()`, from the loaded checkpoint `start_from` if given."""
    from fp8cfg.report import before_run, chart, machine
    from fp8cfg.report.memory import layout
    from fp8cfg.training.signals import waiting_to_stop

    say = print if os.environ.get("RANK", "0") == "0" else _nothing
    say(before_run.head(recipe))
    hardware = machine.find_hardware(recipe.trainer.accelerator)
    say(before_run.body(recipe, hardware))
    before_run.refuse_layout(recipe, layout.ranks())
    for line in chart.remarks(recipe, layout.ranks()):
        say(line, file=sys.stderr)

    with waiting_to_stop():
        from fp8cfg.builder import build
        from fp8cfg.training.distributed.world import world
        from fp8cfg.training.loop import train

        with world(hardware.device) as ranks:
            job = build(recipe)
            run_folder = folder() if ranks.first else None
            try:
                result = train(job, run_folder, start_from, ranks, say)
                losses = {"training loss": result.loss, "validation loss": result.val_loss}
                say(f"done: {result.steps} steps" + "".join(f", {k} {v:.4f}" for k, v in losses.items() if v is not None))
            finally:
                if run_folder:
                    if run_folder.files.there:
                        say(f"run folder: {printable(str(run_folder.path))}")
                    run_folder.close()
    return 0


def _nothing(*_: object, **__: object) -> None:
    """What ranks other than the first print."""
