"""Runs in run folders: `fit` starts one, `resume` continues one. The commands do the same.

fit, train, sweep, rerun      opened_run -> train_job -> loop.train
resume, log.resume=auto       resume.resume_run -> opened_run -> train_job -> loop.train
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fp8cfg.building.builder import build
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import manifest
from fp8cfg.checkpoint.load import open_checkpoint
from fp8cfg.composition import compose, to_yaml
from fp8cfg.data import DataError
from fp8cfg.parallel.process_group import World, current
from fp8cfg.planning.preflight import check_layout
from fp8cfg.planning.smoke import SAVE_INTERVAL, STEPS
from fp8cfg.run_folder.file_names import CHECKPOINTS, RECIPE
from fp8cfg.run_folder.files import RunFolderNotWritable
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.run_folder.sources import write_sources
from fp8cfg.schema import messages
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, printable
from fp8cfg.schema.keywords import refuses_recipe_keys
from fp8cfg.schema.messages import Say
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import labeled
from fp8cfg.training.data import run_data
from fp8cfg.training.loggers.run_loggers import RunLoggers, refuse_missing
from fp8cfg.training.loop import Interrupted, Loaded, Result, train
from fp8cfg.training.profiling import refuse_snapshot_on_cpu
from fp8cfg.training.progress import Progress, peak_speed
from fp8cfg.training.resume import CheckpointChoice, OpenFolder, resume_run
from fp8cfg.training.run_status import RunStatus
from fp8cfg.training.step_report import Callback

if TYPE_CHECKING:
    from torch import nn

    from fp8cfg.training.data import RunData
    from fp8cfg.training.progress import Peak


@refuses_recipe_keys("set recipe.{key}; fit expects a Job, and fp8cfg.build(recipe) returns one")
def fit(
    job: Job,
    folder: str | Path | RunFolder | None = None,
    start_from: Loaded | None = None,
    world: World | None = None,
    say: Say = messages.say,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Trains a job to trainer.max_steps and writes a run folder.

    The folder has the recipe, metrics, coverage and checkpoints, as on the command line. With
    log.resume=auto, `fit` resumes an existing run in `folder`. All ranks call it.

    Args:
        job: The job from `fp8cfg.build`.
        folder: Run folder. Defaults to log.folder, or a new folder under log.dir. A RunFolder is
            used as it is and stays open.
        start_from: Loaded checkpoint to start from.
        world: Ranks of the run. Defaults to the current process group.
        say: Called with each message on the first rank, including a progress line every
            log.every_n_steps steps.
        callbacks: Called after steps, evaluations and saves, on the first rank only.

    Returns:
        The number of steps, the last losses and the run folder.

    Raises:
        NotFP8Error: The first step did not run in the planned formats.
        Interrupted: A signal stopped the run. A checkpoint was saved.
        Diverged: The loss or the gradients are not finite.
        ConfigError: The data or the batch size does not fit the recipe, or the job has trained
            already.
        CheckpointError: The last checkpoint could not be written.
        RunFolderError: The folder is taken or cannot be written.
    """
    if not isinstance(job, Job):
        raise ConfigError(
            f"fit: expected a Job, got {type(job).__name__}; fp8cfg.build(recipe) returns one"
        )
    _check_callbacks(callbacks)
    world = world or current()
    if world.first:
        refuse_missing(job.recipe)
    refuse_snapshot_on_cpu(job.recipe, job.device.type)
    # The caller has created this folder and closes it.
    if isinstance(folder, RunFolder):
        run = folder if world.first else None
        result = train_job(job, run, start_from, world, say, callbacks)
        return _with_folder(result, run)

    recipe = job.recipe
    path = None
    key = "log.dir"  # for errors: who chose the path
    if folder is not None:
        path = _to_path(folder)
        key = ""
    elif recipe.log.folder is not None:
        path = _to_path(recipe.log.folder)
        key = "log.folder"
    if path and start_from is None and _resumes_existing(recipe, path, world):
        return _resume_job(job, path, world, say, callbacks)
    if path and world.first:
        RunFolder.refuse_taken(path)
    # A new run would start from trained weights, at the end of the learning-rate schedule.
    if start_from is None and job.optimizer.steps:
        raise ConfigError(
            f"fit: this job has already trained {job.optimizer.steps} steps; fp8cfg.build(recipe)"
            " returns a new job, and fp8cfg.resume(FOLDER) continues a run"
        )
    # The data are loaded first, so that a data error leaves no empty run folder.
    data = run_data(recipe)

    def create_folder() -> RunFolder:
        """Creates the run folder, on the first rank."""
        root = Path(recipe.log.dir)
        return RunFolder.create(root, recipe.name, datetime.now(), to_yaml(recipe), path, key=key)

    with opened_run(create_folder, world, _of_run(say, recipe)) as run:
        result = train_job(job, run, start_from, world, say, callbacks, data)
        return _with_folder(result, run)


def _resumes_existing(recipe: Recipe, path: Path, world: World) -> bool:
    """Whether `fit` resumes the run in `path`. All ranks call it."""
    if recipe.log.resume != "auto":
        return False
    # The first rank decides for all: other nodes may not mount the folder.
    return world.any(world.first and (path / RECIPE).exists())


def _resume_job(
    job: Job, path: Path, world: World, say: Say, callbacks: Sequence[Callback]
) -> Result:
    """Resumes the run in `path` with a job for a new run. `fit` uses it for log.resume=auto."""
    say_first = say if world.first else _say_nothing

    def start_training(_: Recipe, loaded: Loaded | None, open_folder: OpenFolder) -> Result:
        with opened_run(open_folder, world, _of_run(say, job.recipe)) as run:
            result = train_job(job, run, loaded, world, say, callbacks)
            return _with_folder(result, run)

    # Only the first rank locks the folder. All others open it to read the checkpoint.
    with RunFolder.open(path, lock=world.first) as run:
        return resume_run(run, lambda _: job.recipe, start_training, say_first, is_restart=True)


@refuses_recipe_keys("pass overrides=['{key}=VALUE']")
def resume(
    folder: str | Path,
    overrides: Iterable[str] = (),
    allow: Iterable[str] = (),
    model: nn.Module | None = None,
    say: Say = messages.say,
    callbacks: Sequence[Callback] = (),
    step: int | None = None,
    recalibrate_fp8: bool = False,
) -> Result:
    """Resumes the run in a folder from its newest valid checkpoint.

    Starts from step 0 if the run has no checkpoint yet. All ranks call it.

    Args:
        folder: Run folder.
        overrides: Changes to the recipe, such as "trainer.max_steps=200".
        allow: Keys to change although resume rejects them by default, such as "fp8.margin".
        model: Your custom model, if you passed one to `build`.
        say: See `fit`.
        callbacks: See `fit`.
        step: Step of the checkpoint to resume from. Later checkpoints are renamed.
        recalibrate_fp8: Whether to reset FP8 scales and amax histories that are missing or
            invalid.

    Returns:
        See `fit`.

    Raises:
        ConfigError: An override changes a key fixed by the checkpoint, or missing from `allow`.
        NoUsableCheckpoint: All checkpoints are damaged.
        RunFolderError: Another process uses the folder, or it is not a run folder.

        All errors of `fit` apply too.
    """
    _check_callbacks(callbacks)
    allowed = _to_keys(allow)
    world = current()
    say_first = say if world.first else _say_nothing

    def start_training(recipe: Recipe, loaded: Loaded | None, open_folder: OpenFolder) -> Result:
        if world.first:
            refuse_missing(recipe)
        job = build(recipe, model)
        refuse_snapshot_on_cpu(recipe, job.device.type)
        with opened_run(open_folder, world, _of_run(say, recipe)) as run:
            result = train_job(job, run, loaded, world, say, callbacks)
            return _with_folder(result, run)

    with RunFolder.open(_to_path(folder), lock=world.first) as run:
        return resume_run(
            run,
            lambda checkpoint_recipe: compose(overrides, base=checkpoint_recipe),
            start_training,
            say_first,
            allowed,
            CheckpointChoice(step, recalibrate_fp8),
        )


@contextmanager
def opened_run(open_folder: OpenFolder, world: World, say: Say) -> Iterator[RunFolder | None]:
    """Opens a run folder for training, and prints the path of a new one.

    If an error ends the run before its first step, a new folder is removed.

    Args:
        open_folder: Opens or creates the folder. Called on the first rank.
        world: Ranks of the run.
        say: Prints a message.

    Yields:
        The folder on the first rank, None on the others.
    """
    if not world.first:
        yield None
        return
    run = open_folder()
    path = run.path
    if run.is_new:
        say(labeled("run folder", printable(str(path))))
    try:
        yield run
    except Exception as error:
        # An interrupted run keeps its folder, even without a step: it will be resumed.
        if not isinstance(error, Interrupted):
            with suppress(OSError):
                run.remove_unused()
        raise
    finally:
        # A user may have deleted or moved the folder during the run.
        if run.files.exists and run.path != path:
            say(labeled("run folder", printable(str(run.path))))
        run.close()


def train_job(
    job: Job,
    run: RunFolder | None = None,
    start_from: Loaded | None = None,
    world: World | None = None,
    say: Say = messages.say,
    callbacks: Sequence[Callback] = (),
    data: RunData | None = None,
) -> Result:
    """Trains a job in an open run folder: creates what the training loop needs, and runs it.

    All ranks call it.

    Args:
        job: The job.
        run: Run folder on the first rank. None writes nothing.
        start_from: Loaded checkpoint to resume from.
        world: Ranks of the run. Defaults to the current process group.
        say: Prints a message, on the first rank.
        callbacks: Called on the first rank.
        data: Data of the recipe. Loaded here by default.

    Returns:
        The number of steps and the last losses, without the run folder.

    Raises:
        ConfigError: Data, batches or ranks do not fit the recipe.
        RunFolderNotWritable: A file of the run folder could not be written.

        All other errors of `loop.train` apply too.
    """
    recipe = job.recipe
    world = world or current()
    # Another `say` or a configured logger may write elsewhere than to the terminal.
    can_draw = say in (messages.say, print) and not messages.is_logged()
    say = _of_run(say, recipe)
    progress = None
    if world.first:
        progress = Progress(recipe, say, can_draw, _peak_speed(job, world.size))
    else:
        say = _say_nothing
        callbacks = ()
    first_step = 0
    if start_from is not None:
        _, state = start_from
        first_step = state["step"]
    # The loggers end last, so they get the final state of the run.
    loggers = RunLoggers(job, run, world.size, say)
    with loggers, RunStatus(run, first_step) as status:
        try:
            data = data or run_data(recipe)
            check_layout(recipe, world.size, job.foreign)
            if run and first_step < recipe.trainer.max_steps:
                write_sources(run.files, recipe)
            return train(
                job, data, loggers, status, progress, run, start_from, world, say, callbacks
            )
        except DataError as error:
            # Some errors appear only when data are read, such as a token outside the vocabulary.
            raise ConfigError(f"data={recipe.data.name}: {error}") from None
        except OSError as error:
            # Without a run folder, only the data are files.
            path = recipe.data.path
            if run is not None:
                path = str(run.path)
            # `from error`: an error of a callback needs its traceback.
            raise RunFolderNotWritable(f"{path}: {error}") from error


def _peak_speed(job: Job, num_ranks: int) -> Peak | None:
    """Returns the peak speed of the ranks. None for a custom model or an unknown GPU."""
    if job.foreign or job.device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_name(job.device)
    return peak_speed(job.recipe, [gpu], num_ranks)


# ------------------------------------------------------------------------------------------------
# Smoke runs

LOSS_TOLERANCE = 1e-3
"""Largest relative difference of the losses with several ranks or a GPU.

There the order of sums may differ between runs. On one CPU the losses must be equal."""


class ResumeDiffers(Fp8cfgError):
    """A resumed smoke run had other losses than before. Exit code 4."""

    exit_code = 4


def resume_smoke(
    recipe: Recipe, folder: Path | None, first: Result, world: World, say: Callable[[str], None]
) -> None:
    """Repeats the last step of a smoke run from its checkpoint, and compares the losses.

    Args:
        recipe: Recipe of the run, already reduced to smoke size.
        folder: Run folder, on the first rank.
        first: Result of the run.
        world: Ranks of the run.
        say: Prints a message.

    Raises:
        ResumeDiffers: The losses differ.
        NoUsableCheckpoint: The checkpoint is missing.
    """
    # Broadcast from the first rank. Only this rank knows the folder.
    path = Path(world.text(str(folder or "")))
    root = RunFolder.reading(path).files.folder(CHECKPOINTS)
    names = [name for step, name in manifest.list_steps(root) if step == SAVE_INTERVAL]
    if not names:
        raise manifest.no_usable_checkpoint(root)
    name = names[0]
    loaded = open_checkpoint(root, name, world.size)
    resumed = train_job(build(recipe), None, loaded, world, _say_nothing)
    is_exact = world.size == 1 and not _has_gpu()
    for kind, old, new in (
        ("training", first.loss, resumed.loss),
        ("validation", first.val_loss, resumed.val_loss),
    ):
        if old is None or new is None:
            continue
        tolerance = LOSS_TOLERANCE * abs(old)
        if is_exact:
            tolerance = 0.0
        # Equality covers equal infinite losses, and "not <=" rejects NaN.
        if not (old == new or abs(old - new) <= tolerance):
            raise ResumeDiffers(
                f"resume: step {STEPS} from {name} has a {kind} loss of {new!r}, but it was {old!r}"
                " before"
            )
    losses = f"losses within {LOSS_TOLERANCE:g}"
    if (first.loss, first.val_loss) == (resumed.loss, resumed.val_loss):
        losses = "the same losses"
    say(f"resume: step {STEPS} from {name} gave {losses}")


def _has_gpu() -> bool:
    """Whether torch finds a CUDA device."""
    return torch.cuda.is_available()


# ------------------------------------------------------------------------------------------------
# Arguments


def _to_path(folder: object) -> Path:
    """Converts a `folder` argument to a Path. Raises ConfigError if it is not a path."""
    if isinstance(folder, (str, os.PathLike)):
        path = str(folder)
        if path and "\0" not in path:
            return Path(path)
    raise ConfigError(f"folder: expected a path, got {folder!r:.40}")


def _to_keys(allow: Iterable[str] | None) -> list[str]:
    """Converts `allow` to a list. Raises ConfigError for a plain string or other items."""
    if not isinstance(allow, str):
        keys = list(allow or ())
        if all(isinstance(key, str) for key in keys):
            return keys
    # A plain string is iterable too, but its letters are not keys.
    raise ConfigError("allow: expected a list of keys, as in allow=['optim.lr']")


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises ConfigError if `callbacks` is not a list of Callback objects."""
    # By methods, not by class: an object with the same methods is accepted.
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks: expected a list, got {type(callbacks).__name__}")
    for callback in callbacks:
        is_class = isinstance(callback, type)
        has_methods = all(
            callable(getattr(callback, name, None)) for name in ("step", "evaluation", "save")
        )
        if is_class or not has_methods:
            remedy = ""
            if isinstance(callback, type):
                remedy = f"; pass {callback.__name__}()"
            raise ConfigError(
                "callbacks: expected objects of a subclass of fp8cfg.Callback, got"
                f" {callback!r:.40}{remedy}"
            )


def _with_folder(result: Result, run: RunFolder | None) -> Result:
    """Returns the result with the path of the run folder, None on other ranks."""
    return replace(result, folder=run.path if run else None)


def _of_run(say: Say, recipe: Recipe) -> Say:
    """Returns the function for the messages of a run with `recipe`."""
    return messages.of_run(say, recipe.log.level, recipe.log.progress)


def _say_nothing(_: str) -> None:
    """Discards a message. Used on all ranks except the first."""
