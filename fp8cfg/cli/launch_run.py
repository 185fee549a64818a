"""Launch of a run. `train`, `resume`, `rerun` and the jobs of a sweep share it.

start_ranks    starts a rank on each GPU, unless a launcher has started this process
launch         prints the plan, rejects it or trains: runs.opened_run -> runs.train_job
resume         training.resume.resume_run -> launch
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.building import builder
from fp8cfg.checkpoint.resume_rules import can_resume
from fp8cfg.cli.recipe_arguments import say_notes
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.execution.executor import launch_ranks
from fp8cfg.parallel import sharding
from fp8cfg.planning import hardware as machine
from fp8cfg.planning import layout, preflight, remarks, smoke, training_data
from fp8cfg.planning.coverage import check_min_coverage, planned_coverage
from fp8cfg.planning.fit_search import CommandLine, IsResumable, append_commands, overrides_only
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.planning.layout import largest_rank_count, layout_violations
from fp8cfg.planning.violations import violations
from fp8cfg.report import run_header
from fp8cfg.run_folder.file_names import RECIPE
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema import messages
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.messages import Say, say_on_stderr
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.signals import ranks_meeting, waiting_to_stop

if TYPE_CHECKING:
    from fp8cfg.parallel.process_group import World
    from fp8cfg.training.loop import Loaded
    from fp8cfg.training.resume import CheckpointChoice, OpenFolder

UNKNOWN_NODE = "FIRST_NODE"
"""Placeholder in a command line for the name of the first node."""
RENDEZVOUS_PORT = 29400
"""Port where several nodes meet. The default of torchrun."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether torchrun, or a launcher with the same variables, started this process.

    Args:
        environment: Environment variables.
    """
    return "RANK" in environment or "WORLD_SIZE" in environment


def start_ranks(
    resolved: ResolvedRecipe,
    argv: Sequence[str],
    whole_line: CommandLine,
    takes: IsResumable | None = None,
) -> int | None:
    """Starts the ranks of `fp8cfg ARGV` on the GPUs of this machine, and waits for them.

    Args:
        resolved: Recipe of the command, and its problems.
        argv: Arguments of the command.
        whole_line: Makes a command line from overrides, for suggestions.
        takes: Whether a run that is resumed may change to a recipe.

    Returns:
        The exit code; None if this process trains: a launcher has started it, or it is the only
        rank.

    Raises:
        ConfigError: The layout is not supported, or needs several nodes. Suggests command lines.
    """
    recipe = resolved.recipe
    unintended = training_data.unintended_data(recipe)
    # Report violations together with missing data, so that the user fixes all of them at once.
    if unintended:
        hardware = machine.find_hardware(recipe.trainer.accelerator)
        refuse_if([*violations(recipe, hardware, written=resolved.written), *unintended])
    if resolved.problems:
        hardware = machine.find_hardware(recipe.trainer.accelerator)
        preflight.check_run(recipe, hardware, whole_line, resolved.problems, is_resumable=takes)
    if is_launched():
        return None
    num_gpus = machine.count_gpus()
    try:
        num_ranks = count_ranks(recipe, num_gpus)
    except ConfigError as error:
        hardware = machine.find_hardware(recipe.trainer.accelerator)
        if num_gpus:
            # All nodes have the same GPUs.
            num_ranks = recipe.trainer.num_nodes * recipe.trainer.devices
            preflight.choose_backend(recipe, hardware, layout.rank_part(recipe, num_ranks))
        lines = [f"{error}: {torchrun_line(recipe, argv, num_gpus)}"]
        if takes:
            lines = preflight.append_runs(lines, recipe, hardware, whole_line, is_resumable=takes)
        else:
            smoke_run = preflight.smoke_run_here(recipe, hardware)
            lines = append_commands(lines, "here", [whole_line(smoke_run)] if smoke_run else [])
        raise ConfigError(lines) from None
    _report_unused_gpus(recipe, num_gpus, num_ranks)
    if num_ranks == 1:
        return None
    return launch_ranks(num_ranks, argv)


def count_ranks(recipe: Recipe, num_gpus: int) -> int:
    """Returns how many ranks to start on this machine.

    Args:
        recipe: The recipe.
        num_gpus: GPUs of the machine.

    Returns:
        At most trainer.devices, as whole model replicas that divide the global batch. 1 (this
        process) without GPUs or if the layout is not supported.

    Raises:
        ConfigError: The recipe needs several nodes, also on a login node without GPUs.
    """
    trainer = recipe.trainer
    if trainer.accelerator == "cpu":
        return 1
    if trainer.num_nodes > 1 and not trainer.smoke:
        # With one rank, `launch` reports the layout's violations.
        if layout_violations(recipe, trainer.num_nodes * trainer.devices):
            return 1
        raise ConfigError(
            f"trainer.num_nodes={trainer.num_nodes}: this process would be the only rank;"
            " start it on each node with torchrun"
        )
    if num_gpus == 0:
        return 1
    max_ranks = min(num_gpus, trainer.devices)
    if trainer.smoke:
        return max_ranks
    return largest_rank_count(recipe, max_ranks) or 1


def _report_unused_gpus(recipe: Recipe, num_gpus: int, num_ranks: int) -> None:
    """Prints a note if GPUs of trainer.devices have no rank."""
    trainer = recipe.trainer
    max_ranks = min(num_gpus, trainer.devices)
    if num_gpus == 0 or num_ranks == max_ranks or layout_violations(recipe, num_ranks):
        return
    replica = ""
    if trainer.strategy.size > 1:
        replica = f" {trainer.strategy.size} to a replica,"
    say_on_stderr(
        f"note: {num_ranks} of {max_ranks} GPUs are used,{replica} over which"
        f" trainer.global_batch_size={trainer.global_batch_size} divides in microbatches of"
        f" {trainer.micro_batch_size}"
    )


def torchrun_line(recipe: Recipe, argv: Sequence[str], num_gpus: int) -> str:
    """Returns the torchrun command for a command line. It is the same on each node.

    The rendezvous is on this host. A host without GPUs is probably a login node. Then the command
    has a placeholder for the first node.

    Args:
        recipe: The recipe.
        argv: Arguments of the command.
        num_gpus: GPUs of this machine.
    """
    trainer = recipe.trainer
    host = socket.gethostname() if num_gpus else UNKNOWN_NODE
    command = ["torchrun", "--nnodes", str(trainer.num_nodes)]
    command += ["--nproc-per-node", str(trainer.devices)]
    command += ["--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{host}:{RENDEZVOUS_PORT}"]
    command += ["--rdzv-id", recipe.name]
    line = shlex.join([*command, "-m", "fp8cfg", *argv])
    if num_gpus:
        return line
    return (
        f"{line}; {UNKNOWN_NODE} is the name of one of them, which the scripts of fp8cfg export"
        " slurm find"
    )


def launch(
    recipe: Recipe,
    open_folder: OpenFolder,
    start_from: Loaded | None,
    whole_line: CommandLine | None = None,
    takes: IsResumable | None = None,
    is_short: bool = False,
) -> int:
    """Prints what `recipe` runs here, and trains it on this rank.

    Args:
        recipe: Checked recipe.
        open_folder: Opens or creates the run folder, on the first rank.
        start_from: Loaded checkpoint.
        whole_line: Makes a command line from overrides, for suggestions. None suggests overrides.
        takes: Whether a run that is resumed may change to a recipe.
        is_short: Whether to print a line instead of the whole header.

    Returns:
        The exit code.

    Raises:
        ConfigError: The recipe cannot run on this machine.
        NotFP8Error: The planned coverage is below fp8.min_coverage.
    """
    from fp8cfg.training.data import refuse_absent
    from fp8cfg.training.loggers.run_loggers import refuse_missing
    from fp8cfg.training.profiling import refuse_snapshot_on_cpu

    # Checks are in order of importance: the launch, the recipe, and then data and loggers.
    sharding.refuse_incomplete_launch()
    hardware = machine.find_hardware(recipe.trainer.accelerator)
    preflight.check_run(recipe, hardware, whole_line or overrides_only, is_resumable=takes)
    rank_part = layout.rank_part(recipe, sharding.ranks())
    choice = preflight.choose_backend(recipe, hardware, rank_part)
    check_min_coverage(recipe, planned_coverage(recipe, plan_layers(recipe, choice.backend)))
    refuse_absent(recipe)
    # Only the first rank writes to loggers.
    if _is_first_rank():
        refuse_missing(recipe)
    refuse_snapshot_on_cpu(recipe, hardware.device)
    say_notes(remarks.remark_lines(recipe, rank_part), recipe.log.level)
    head = run_header.header(recipe, hardware, choice)
    if is_short:
        head = run_header.short_header(recipe, choice)
    if recipe.log.level == "debug":
        head += "\n" + run_header.planned_tables(recipe, hardware, choice)

    with waiting_to_stop(), ExitStack() as stack:
        from fp8cfg.parallel.process_group import world

        # A signal during this wait ends the process: nothing is trained yet that could be saved.
        with ranks_meeting(sharding.ranks()):
            ranks = stack.enter_context(world(hardware.device, recipe.trainer))
        _train(recipe, open_folder, start_from, ranks, head)
    return 0


def _train(
    recipe: Recipe,
    open_folder: OpenFolder,
    start_from: Loaded | None,
    world: World,
    head: str,
) -> None:
    """Prints the header `head` and trains `recipe`. Resumes it if it is a smoke run."""
    from fp8cfg.training.data import run_data
    from fp8cfg.training.runs import opened_run, resume_smoke, train_job

    say: Say = _say_nothing
    if _is_first_rank():
        say = messages.of_run(messages.say, recipe.log.level, recipe.log.progress)
    # An error before the first step removes the folder again, such as missing data.
    with opened_run(open_folder, world, say) as run:
        say(head)
        job = builder.build(recipe)
        data = run_data(job.recipe)
        result = train_job(job, run, start_from, world, data=data)
        losses = ""
        if result.loss is not None:
            losses += f", training loss {result.loss:.4f}"
        if result.val_loss is not None:
            losses += f", validation loss {result.val_loss:.4f}"
        say(f"done: {result.steps} steps{losses}")
        if recipe.trainer.smoke and start_from is None:
            recipe = job.recipe
            del job, data  # memory for the job that is resumed
            resume_smoke(recipe, run.path if run else None, result, world, say)


def is_run(path: Path) -> bool:
    """Returns whether a folder has a run.

    Args:
        path: The folder. It may not exist.
    """
    return (path / RECIPE).exists()


def resume(
    path: Path,
    change: Callable[[Recipe], Recipe],
    whole_line: CommandLine,
    allow: Sequence[str] = (),
    is_restart: bool = False,
    choice: CheckpointChoice | None = None,
) -> int:
    """Resumes a run on this rank.

    Args:
        path: The run folder.
        change: Maps the checkpoint's recipe to the recipe of the resumed run.
        whole_line: Makes a command line from overrides, for suggestions.
        allow: Keys to change although resume rejects them by default.
        is_restart: Whether log.resume=auto resumes the run, not `fp8cfg resume`.
        choice: The checkpoint. Defaults to the newest valid one.

    Returns:
        The exit code.
    """
    is_first = _is_first_rank()
    say = messages.say if is_first else _say_nothing
    with RunFolder.open(path, lock=is_first) as folder:
        # Inside, because it loads torch: a path without a run is an error before.
        from fp8cfg.training.resume import NEWEST, resume_run

        def launch_recipe(recipe: Recipe, loaded: Loaded | None, open_folder: OpenFolder) -> int:
            """Trains with the recipe of one checkpoint."""

            def takes(other: Recipe) -> bool:
                """Returns whether this run can resume with a suggested recipe."""
                return can_resume(recipe, other, [*allow])

            return launch(recipe, open_folder, loaded, whole_line, takes, is_short=True)

        return resume_run(folder, change, launch_recipe, say, allow, choice or NEWEST, is_restart)


def cut_to_ranks(recipe: Recipe) -> Recipe:
    """Returns the recipe for the ranks here. A smoke run is cut to their size, with a note.

    Args:
        recipe: The recipe.
    """
    cut_recipe = smoke.cut_recipe(recipe, sharding.ranks())
    note = smoke.describe_cuts(recipe, cut_recipe)
    if note:
        say_notes([note], recipe.log.level)
    return cut_recipe


def _is_first_rank() -> bool:
    """Returns whether this is rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def _say_nothing(_: str) -> None:
    """Discards a message. Used on all ranks except the first."""
