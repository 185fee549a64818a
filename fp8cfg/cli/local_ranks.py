"""Local ranks: outside a launcher `fp8cfg` starts one on each GPU of this machine, through torch.distributed's own launcher."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fp8cfg.config.errors import ConfigError
from fp8cfg.execution.torchrun import start as start

if TYPE_CHECKING:
    from fp8cfg.composition.giving_way import Settled
    from fp8cfg.config.recipe import Recipe
    from fp8cfg.report.memory.fit_search import Takes
    from fp8cfg.report.memory.nearest_fit import Line

FIRST = "FIRST_NODE"
"""Stands for the name of a node that this one does not know."""
PORT = 29400
"""Of the rendezvous of several nodes; torchrun's own default."""


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process: torchrun, or one that sets the same variables."""
    return "RANK" in environment or "WORLD_SIZE" in environment


def started(
    found: Settled, argv: Sequence[str], whole_line: Line, takes: Takes | None = None
) -> int | None:
    """The exit code of `fp8cfg ARGV`, which trains `found`, on the ranks that are started here; None where this process is to
    train: one of a launcher, or the only one. Raises ConfigError for a layout that `found` is refused for, and for several nodes,
    with the line of each, with lines that run here: of a run that is gone on with those that it `takes`.
    """
    from fp8cfg.report import before_run, machine
    from fp8cfg.report.memory.nearest_fit import offering

    recipe = found.recipe
    if found.problems:
        before_run.refuse(
            recipe,
            machine.find_hardware(recipe.trainer.accelerator),
            whole_line,
            found.problems,
            takes=takes,
        )
    if launched():
        return None
    gpus = machine.gpus()
    try:
        ranks = count(recipe, gpus)
    except ConfigError as e:
        hardware = machine.find_hardware(recipe.trainer.accelerator)
        if gpus:  # of one of the nodes, which are all alike
            before_run.choose_backend(
                recipe, hardware, recipe.trainer.num_nodes * recipe.trainer.devices
            )
        runs = (
            before_run.fits(recipe, hardware, takes=takes)
            if takes
            else before_run.smoke_run_here(recipe, hardware)
        )
        line = f"{e}: {node_line(recipe, argv, gpus)}"
        raise ConfigError(offering([line], "here", list(map(whole_line, runs)))) from None
    _say_idle(recipe, gpus, ranks)
    return start(ranks, argv) if ranks > 1 else None


def count(recipe: Recipe, gpus: int) -> int:
    """Ranks to start for `recipe` on a machine with that many GPUs: at most trainer.devices, in whole replicas over which the
    global batch divides. 1, this process, without GPUs and for a layout that is refused. Raises ConfigError for several nodes, on a
    login node without GPUs too."""
    from fp8cfg.report.memory.layout import refused, shared_by

    t = recipe.trainer
    if t.accelerator == "cpu":
        return 1
    if t.num_nodes > 1 and not t.smoke:
        if refused(recipe, t.num_nodes * t.devices):
            return 1
        raise ConfigError(
            f"trainer.num_nodes={t.num_nodes}: this process would train alone; start it on each"
            " node with torchrun"
        )
    if gpus == 0:
        return 1
    most = min(gpus, t.devices)
    return most if t.smoke else shared_by(recipe, most) or 1


def _say_idle(recipe: Recipe, gpus: int, ranks: int) -> None:
    """A line where `ranks` are not one on each of these GPUs that the recipe is meant for."""
    from fp8cfg.report.memory.layout import refused

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
