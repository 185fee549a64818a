"""Launch of a run: what `train`, `resume`, `rerun` and each job of a sweep do with a checked recipe, or with a run folder."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.building import builder
from fp8cfg.building.job import Job
from fp8cfg.checkpoint.resume_rules import goes_on
from fp8cfg.cli.recipe_arguments import say as say_notes
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.execution.executor import start
from fp8cfg.parallel import sharding
from fp8cfg.planning import hardware as machine
from fp8cfg.planning import layout, preflight, remarks, smoke, training_data
from fp8cfg.planning.fit_search import CommandLine, IsResumable, append_commands, overrides_only
from fp8cfg.planning.layout import refused, shared_by
from fp8cfg.planning.violations import violations
from fp8cfg.report import run_header
from fp8cfg.run_folder.run_folder import RECIPE, RunFolder
from fp8cfg.schema.errors import ConfigError, printable, refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.signals import ranks_meeting, waiting_to_stop

if TYPE_CHECKING:
    from fp8cfg.parallel.process_group import World
    from fp8cfg.training.loop import Loaded
    from fp8cfg.training.runs import CheckpointChoice

FIRST = "FIRST_NODE"
"""Stands for the name of a node that this one does not know."""
PORT = 29400
"""Of the rendezvous of several nodes; torchrun's own default."""


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process: torchrun, or one that sets the same variables."""
    return "RANK" in environment or "WORLD_SIZE" in environment


def started(
    found: ResolvedRecipe,
    argv: Sequence[str],
    whole_line: CommandLine,
    takes: IsResumable | None = None,
) -> int | None:
    """The exit code of `fp8cfg ARGV`, which trains `found`, on the ranks that are started here; None where this process is to
    train: one of a launcher, or the only one. Raises ConfigError for a layout that `found` is refused for, and for several nodes,
    with the line of each, with lines that run here: of a run that is gone on with those that it `takes`.
    """
    recipe = found.recipe
    unintended = training_data.unintended_data(recipe)
    if unintended:
        hardware = machine.find_hardware(recipe.trainer.accelerator)
        refuse_if([*violations(recipe, hardware, written=found.written), *unintended])
    if found.problems:
        preflight.check_run(
            recipe,
            machine.find_hardware(recipe.trainer.accelerator),
            whole_line,
            found.problems,
            takes=takes,
        )
    if launched():
        return None
    gpus = machine.count_gpus()
    try:
        ranks = count(recipe, gpus)
    except ConfigError as e:
        hardware = machine.find_hardware(recipe.trainer.accelerator)
        if gpus:  # of one of the nodes, which are all alike
            preflight.choose_backend(
                recipe, hardware, recipe.trainer.num_nodes * recipe.trainer.devices
            )
        lines = [f"{e}: {node_line(recipe, argv, gpus)}"]
        if takes:
            lines = preflight.append_runs(lines, recipe, hardware, whole_line, takes=takes)
        else:
            fit = preflight.smoke_run_here(recipe, hardware)
            lines = append_commands(lines, "here", [whole_line(fit)] if fit else [])
        raise ConfigError(lines) from None
    _say_idle(recipe, gpus, ranks)
    return start(ranks, argv) if ranks > 1 else None


def count(recipe: Recipe, gpus: int) -> int:
    """Ranks to start for `recipe` on a machine with that many GPUs: at most trainer.devices, in whole replicas over which the
    global batch divides. 1, this process, without GPUs and for a layout that is refused. Raises ConfigError for several nodes, on a
    login node without GPUs too."""
    t = recipe.trainer
    if t.accelerator == "cpu":
        return 1
    if t.num_nodes > 1 and not t.smoke:
        if refused(recipe, t.num_nodes * t.devices):
            return 1
        raise ConfigError(
            f"trainer.num_nodes={t.num_nodes}: this process would be the only rank; start it on each"
            " node with torchrun"
        )
    if gpus == 0:
        return 1
    most = min(gpus, t.devices)
    return most if t.smoke else shared_by(recipe, most) or 1


def _say_idle(recipe: Recipe, gpus: int, ranks: int) -> None:
    """A line where `ranks` are not one on each of these GPUs that the recipe is meant for."""
    t = recipe.trainer
    if gpus and ranks != (meant := min(gpus, t.devices)) and not refused(recipe, ranks):
        split = f" {t.strategy.size} to a replica," if t.strategy.size > 1 else ""
        print(
            f"note: {ranks} of {meant} GPUs are used,{split} over which"
            f" trainer.global_batch_size={t.global_batch_size} divides in microbatches of"
            f" {t.micro_batch_size}",
            file=sys.stderr,
        )


def node_line(recipe: Recipe, argv: Sequence[str], gpus: int) -> str:
    """The torchrun line of `fp8cfg ARGV`, one and the same on each of its nodes. They meet on this host, or, where it has no `gpus`
    and so is none of them, on the first, whose name the reader has."""
    t, host = recipe.trainer, socket.gethostname() if gpus else FIRST
    meeting = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{host}:{PORT}",
        "--rdzv-id",
        recipe.name,
    ]
    ranks = ["--nnodes", str(t.num_nodes), "--nproc-per-node", str(t.devices)]
    line = shlex.join(["torchrun", *ranks, *meeting, "-m", "fp8cfg", *argv])
    return (
        line
        if gpus
        else (
            f"{line}; {FIRST} is the name of one of them, which the scripts of fp8cfg export slurm"
            " find"
        )
    )


def launch(
    recipe: Recipe,
    folder: Callable[[], RunFolder],
    start_from: Loaded | None,
    whole_line: CommandLine | None = None,
    takes: IsResumable | None = None,
) -> int:
    """Say what `recipe` runs here, refuse it or train it in `folder()`, from the loaded checkpoint `start_from` if given.
    `whole_line` makes a command line of a fit that a refusal offers, without it its words stand alone; a run that is gone on with
    is offered what it `takes`."""
    from fp8cfg.training.data import refuse_absent

    sharding.refuse_incomplete_launch()
    say = print if os.environ.get("RANK", "0") == "0" else _nothing
    say(run_header.head(recipe))
    hardware = machine.find_hardware(recipe.trainer.accelerator)
    try:
        say(run_header.body(recipe, hardware))
    finally:  # of a backend that does not split its layers so: with lines that run here
        preflight.check_run(recipe, hardware, whole_line or overrides_only, takes=takes)
    refuse_absent(recipe)
    for line in remarks.remark_lines(recipe, layout.whole(recipe, sharding.ranks())):
        say(line, file=sys.stderr)

    with waiting_to_stop(), ExitStack() as stack:
        from fp8cfg.parallel.process_group import world

        with ranks_meeting(sharding.ranks()):
            ranks = stack.enter_context(world(hardware.device, recipe.trainer))
        _train(builder.build(recipe), folder, start_from, ranks, say)
    return 0


def is_run(path: Path) -> bool:
    """Whether there is a run in `path`, and not just a folder to start one in."""
    return (path / RECIPE).exists()


def go_on(
    path: Path,
    changed: Callable[[Recipe], Recipe],
    whole_line: CommandLine,
    allow: Sequence[str] = (),
    anew: bool = False,
    choice: CheckpointChoice | None = None,
) -> int:
    """Go on with the run folder at `path` from its newest checkpoint that verifies, with what `changed` makes of the checkpoint's
    recipe, or, with `anew`, with the one that it starts with. A change that would not continue the same run is refused unless
    `allow` has its key. `whole_line` is as of `launch`; `choice` is of the checkpoint. Returns the exit code."""
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
                if choice:
                    choice.set_aside(folder, say)
                return folder

            return launch(
                recipe, taken, loaded, whole_line, lambda other: goes_on(recipe, other, [*allow])
            )

        return runs.from_newest(folder, attempt, say, choice or runs.NEWEST)


def sized(recipe: Recipe) -> Recipe:
    """`recipe` as it runs on the ranks here: cut, with a line that says how, where trainer.smoke asks for it."""
    small = smoke.cut_recipe(recipe, sharding.ranks())
    say_notes(line for line in [smoke.describe_cuts(recipe, small)] if line)
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
    from fp8cfg.training.runs import remove_unused

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
            from fp8cfg.training.runs import resume_smoke as resume

            resume(recipe, run_folder.path if run_folder else None, result, ranks, say)
    except Exception as error:
        remove_unused(run_folder, error)
        raise
    finally:
        if run_folder:
            if run_folder.files.there:
                say(f"run folder: {printable(str(run_folder.path))}")
            run_folder.close()


def _nothing(*_: object, **__: object) -> None:
    """What ranks other than the first print."""
