"""Launch of a run: what `train`, `resume`, `rerun` and each job of a sweep do with a checked recipe, or with a run folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.config.errors import printable

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe
    from fp8cfg.job import Job
    from fp8cfg.report.memory.fit_search import Takes
    from fp8cfg.report.memory.nearest_fit import Line
    from fp8cfg.training.distributed.world import World
    from fp8cfg.training.loop import Loaded
    from fp8cfg.training.run_folder import RunFolder


def launch(
    recipe: Recipe,
    folder: Callable[[], RunFolder],
    start_from: Loaded | None,
    whole_line: Line | None = None,
    takes: Takes | None = None,
) -> int:
    """Say what `recipe` runs here, refuse it or train it in `folder()`, from the loaded checkpoint `start_from` if given.
    `whole_line` makes a command line of a fit that a refusal offers, without it its words stand alone; a run that is gone on with
    is offered what it `takes`."""
    from fp8cfg.report import before_run, machine, remarks, run_header
    from fp8cfg.report.memory import layout
    from fp8cfg.report.memory.nearest_fit import words_alone
    from fp8cfg.training.data import refuse_absent
    from fp8cfg.training.signals import waiting_to_stop

    say = print if os.environ.get("RANK", "0") == "0" else _nothing
    say(run_header.head(recipe))
    hardware = machine.find_hardware(recipe.trainer.accelerator)
    try:
        say(run_header.body(recipe, hardware))
    finally:  # of a backend that does not split its layers so: with lines that run here
        before_run.refuse(recipe, hardware, whole_line or words_alone, takes=takes)
    refuse_absent(recipe)
    for line in remarks.lines(recipe, layout.shards(recipe, layout.ranks())):
        say(line, file=sys.stderr)

    with waiting_to_stop():
        from fp8cfg.builder import build
        from fp8cfg.training.distributed.world import world

        with world(hardware.device, recipe.trainer) as ranks:
            _train(build(recipe), folder, start_from, ranks, say)
    return 0


def is_run(path: Path) -> bool:
    """Whether there is a run in `path`, and not just a folder to start one in."""
    from fp8cfg.training.run_folder import RECIPE

    return (path / RECIPE).exists()


def go_on(
    path: Path,
    changed: Callable[[Recipe], Recipe],
    whole_line: Line,
    allow: Sequence[str] = (),
    anew: bool = False,
) -> int:
    """Go on with the run folder at `path` from its newest checkpoint that verifies, with what `changed` makes of the checkpoint's
    recipe, or, with `anew`, with the one that it starts with. A change that would not continue the same run is refused unless
    `allow` has its key. `whole_line` is as of `launch`. Returns the exit code."""
    from fp8cfg.training.checkpoint.resume_rules import goes_on
    from fp8cfg.training.run_folder import RunFolder

    first = os.environ.get("RANK", "0") == "0"
    say = print if first else _nothing
    with RunFolder.open(path, lock=first) as folder:
        from fp8cfg.training import runs  # this loads torch: a folder that is none is said first

        def attempt(name: str, loaded: Loaded | None) -> int:
            recipe = runs.continued(folder, name, loaded, changed, allow, say, anew)

            def taken() -> RunFolder:
                folder.lock()  # which an attempt from a later checkpoint has given back
                runs.write_recipe(
                    folder, recipe, loaded
                )  # what the folder says is what runs from here on
                return folder

            return launch(
                recipe, taken, loaded, whole_line, lambda other: goes_on(recipe, other, [*allow])
            )

        return runs.from_newest(folder, attempt, say)


def sized(recipe: Recipe) -> Recipe:
    """`recipe` as it runs on the ranks here: cut, with a line that says how, where trainer.smoke asks for it."""
    from fp8cfg import smoke
    from fp8cfg.cli.composed import say
    from fp8cfg.report.memory.layout import ranks

    small = smoke.cut(recipe, ranks())
    say(line for line in [smoke.note(recipe, small)] if line)
    return small


def _train(
    job: Job,
    folder: Callable[[], RunFolder],
    start_from: Loaded | None,
    ranks: World,
    say: Callable[[str], None],
) -> None:
    from fp8cfg.training.data import run_data
    from fp8cfg.training.loop import train

    recipe, data = job.recipe, run_data(job.recipe)
    run_folder = folder() if ranks.first else None
    try:
        result = train(job, run_folder, start_from, ranks, say, data=data)
        del job, data
        losses = {"training loss": result.loss, "validation loss": result.val_loss}
        say(
            f"done: {result.steps} steps"
            + "".join(f", {k} {v:.4f}" for k, v in losses.items() if v is not None)
        )
        if recipe.trainer.smoke and start_from is None:
            from fp8cfg.training.smoke_resume import resume

            resume(recipe, run_folder.path if run_folder else None, result, ranks, say)
    finally:
        if run_folder:
            if run_folder.files.there:
                say(f"run folder: {printable(str(run_folder.path))}")
            run_folder.close()


def _nothing(*_: object, **__: object) -> None:
    """What ranks other than the first print."""
