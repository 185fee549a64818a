"""Runs in run folders: `fit` starts one, `resume` continues one. The commands do the same.

fit, train, sweep, rerun      opened_run -> loop.train
resume, log.resume=auto       resume_run -> opened_run -> loop.train
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fp8cfg.building.builder import build
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state, manifest, resume_rules
from fp8cfg.checkpoint.load import open_checkpoint
from fp8cfg.checkpoint.manifest import DamagedCheckpoint, NoUsableCheckpoint
from fp8cfg.composition import compose, to_yaml
from fp8cfg.parallel.process_group import World, current
from fp8cfg.parallel.sharding import ranks
from fp8cfg.planning.fit_search import changed_overrides
from fp8cfg.planning.smoke import SAVED_AT, STEPS
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.run_folder import CHECKPOINTS, METRICS, RECIPE, RunFolder
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, printable, refuse_if
from fp8cfg.schema.keywords import refuses_recipe_keys
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.data import run_data
from fp8cfg.training.loop import Interrupted, Loaded, Result, train
from fp8cfg.training.metrics import read
from fp8cfg.training.step_report import Callback

if TYPE_CHECKING:
    from torch import nn


T = TypeVar("T")
Say = Callable[[str], None]
OpenFolder = Callable[[], RunFolder]
"""Opens or creates a run folder, locked for this process."""


@refuses_recipe_keys("set recipe.{key}; fit expects a Job, and fp8cfg.build(recipe) gives one")
def fit(
    job: Job,
    folder: str | Path | RunFolder | None = None,
    start_from: Loaded | None = None,
    world: World | None = None,
    say: Say = print,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Trains `job` to trainer.max_steps, and leaves a run folder as the command line does.

    Args:
        job: Job of `fp8cfg.build`.
        folder: Run folder, by default log.folder, or a new one under log.dir. It has no run in it
            yet, unless log.resume=auto resumes that run. A RunFolder is written to as it is, and
            stays open.
        start_from: Loaded checkpoint to start from.
        world: Ranks of the run, by default those of the process group.
        say: Prints a message, among them a line every log.every_n_steps steps.
        callbacks: Called on the first rank.

    Returns:
        Steps, losses and run folder.

    Raises:
        NotFP8Error: The first step did not run as planned.
        Interrupted: A rank received a signal. All finished steps are saved.
        Diverged: The loss or the gradients are not finite.
        ConfigError: Data or batches do not fit the recipe.
        CheckpointError: The last checkpoint could not be written.
        RunFolderError: The folder cannot be used.
    """
    if not isinstance(job, Job):
        raise ConfigError(
            f"fit: expected a Job, got {type(job).__name__}; fp8cfg.build(recipe) gives one"
        )
    _check_callbacks(callbacks)
    world = world or current()
    if isinstance(folder, RunFolder):
        run = folder if world.first else None
        result = train(job, run, start_from, world, say, callbacks)
        return _with_folder(result, run)

    recipe = job.recipe
    path = None
    key = "log.dir"
    if folder is not None:
        path, key = _to_path(folder), ""
    elif recipe.log.folder is not None:
        path, key = _to_path(recipe.log.folder), "log.folder"
    if (
        path
        and recipe.log.resume == "auto"
        and start_from is None
        # The first rank decides: on others the folder may not be mounted.
        and world.any(world.first and (path / RECIPE).exists())
    ):
        return _resume_job(job, path, world, say, callbacks)
    if path and world.first:
        RunFolder.refuse_taken(path)
    # Before the folder is created: a run without data leaves none.
    data = run_data(recipe)

    def create() -> RunFolder:
        root = Path(recipe.log.dir)
        return RunFolder.create(root, recipe.name, datetime.now(), to_yaml(recipe), path, key=key)

    with opened_run(create, world, say) as run:
        result = train(job, run, start_from, world, say, callbacks, data)
        return _with_folder(result, run)


def _resume_job(
    job: Job, path: Path, world: World, say: Say, callbacks: Sequence[Callback]
) -> Result:
    """Resumes the run in `path` with a job that was built for a new run."""
    say_first = say if world.first else _say_nothing

    def start(_: Recipe, loaded: Loaded | None, open_folder: OpenFolder) -> Result:
        with opened_run(open_folder, world, say) as run:
            result = train(job, run, loaded, world, say, callbacks)
            return _with_folder(result, run)

    with RunFolder.open(path, lock=world.first) as run:
        return resume_run(run, lambda _: job.recipe, start, say_first, is_restart=True)


@refuses_recipe_keys("write overrides=['{key}=VALUE']")
def resume(
    folder: str | Path,
    overrides: Iterable[str] = (),
    allow: Iterable[str] = (),
    model: nn.Module | None = None,
    say: Say = print,
    callbacks: Sequence[Callback] = (),
    step: int | None = None,
    recalibrate_fp8: bool = False,
) -> Result:
    """Resumes the run in `folder` from its newest valid checkpoint, or from the start.

    Args:
        folder: Run folder.
        overrides: Changes of its recipe, such as "trainer.max_steps=200".
        allow: Keys of changes that would not continue the same run, and are errors otherwise.
        model: The custom model of the run, as it was given to `build`.
        say: As of `fit`.
        callbacks: As of `fit`.
        step: Step of the checkpoint to resume from. Later checkpoints are renamed.
        recalibrate_fp8: Restarts FP8 scales and amax histories that are missing or impossible.

    Returns:
        As `fit`. Raises the same errors.
    """
    _check_callbacks(callbacks)
    allowed = _to_keys(allow)
    world = current()
    say_first = say if world.first else _say_nothing

    def start(recipe: Recipe, loaded: Loaded | None, open_folder: OpenFolder) -> Result:
        job = build(recipe, model)
        with opened_run(open_folder, world, say) as run:
            result = train(job, run, loaded, world, say, callbacks)
            return _with_folder(result, run)

    with RunFolder.open(_to_path(folder), lock=world.first) as run:
        return resume_run(
            run,
            lambda before: compose(overrides, base=before),
            start,
            say_first,
            allowed,
            CheckpointChoice(step, recalibrate_fp8),
        )


@contextmanager
def opened_run(open_folder: OpenFolder, world: World, say: Say) -> Iterator[RunFolder | None]:
    """Context manager around the training of a run: opens its folder, and prints its path at the end.

    If an error ends the run before its first step, a new folder is removed. Yields None on all
    ranks but the first.
    """
    run = open_folder() if world.first else None
    try:
        yield run
    except Exception as error:
        # An interrupted run waits to be resumed.
        if run and not isinstance(error, Interrupted):
            with suppress(OSError):
                run.remove_unused()
        raise
    finally:
        if run:
            if run.files.there:
                say(f"run folder: {printable(str(run.path))}")
            run.close()


# ------------------------------------------------------------------------------------------------
# Resume


@dataclass(frozen=True)
class CheckpointChoice:
    """Checkpoint of a resumed run.

    Attributes:
        step: Step of the checkpoint. None chooses the newest valid one.
        recalibrate_fp8: As of `resume`.
    """

    step: int | None = None
    recalibrate_fp8: bool = False

    def find(self, root: RunFiles) -> list[tuple[int, str]]:
        """Returns step and folder name of each checkpoint to try, newest first.

        Raises:
            ConfigError: No checkpoint has the chosen step.
        """
        checkpoints = manifest.list_steps(root)
        if self.step is None:
            return checkpoints
        chosen = [(step, name) for step, name in checkpoints if step == self.step]
        if not chosen:
            steps = dict.fromkeys(str(step) for step, _ in reversed(checkpoints))
            raise ConfigError(
                f"--step {self.step}: no checkpoint of that step; there are:"
                f" {', '.join(steps) or 'none'}"
            )
        return chosen

    def rename_later(self, run: RunFolder, say: Say) -> None:
        """Renames checkpoints later than the chosen step. The run writes others in their place."""
        if self.step is None:
            return
        root = run.files.folder(CHECKPOINTS)
        for step, name in manifest.list_steps(root):
            if step <= self.step:
                continue
            for number in itertools.count(1):
                new_name = f"{name}.aside-{number}"
                if not root.kind(new_name):
                    break
            root.rename(name, new_name)
            say(f"{name} is later than --step {self.step}: renamed to {new_name}")


NEWEST = CheckpointChoice()


def resume_run(
    run: RunFolder,
    change: Callable[[Recipe], Recipe],
    start: Callable[[Recipe, Loaded | None, OpenFolder], T],
    say: Say,
    allow: Sequence[str] = (),
    choice: CheckpointChoice = NEWEST,
    is_restart: bool = False,
) -> T:
    """Resumes `run` from its newest valid checkpoint. `fit`, `resume` and the commands call it.

    Args:
        run: Run folder.
        change: Returns the recipe to continue with, from the recipe of the checkpoint.
        start: Trains a recipe from a loaded checkpoint, None if there is none. Its third argument
            opens the run folder, and writes the recipe to it. If `start` raises DamagedCheckpoint
            before the first step, the next older checkpoint is tried.
        say: Prints a message.
        allow: Keys of changes that would not continue the same run.
        choice: Checkpoint to start from.
        is_restart: The recipe is one for a new run (log.resume=auto): log.dir may differ, and
            trainer.smoke.

    Raises:
        NoUsableCheckpoint: No checkpoint is valid, or all are missing.
        ConfigError: A change would not continue the same run.
    """

    def attempt(name: str, loaded: Loaded | None) -> T:
        recipe = recipe_for_resume(run, name, loaded, change, allow, say, is_restart)

        def open_folder() -> RunFolder:
            run.lock()  # an attempt from a later checkpoint has released it
            write_recipe(run, recipe, loaded)
            choice.rename_later(run, say)
            return run

        return start(recipe, loaded, open_folder)

    run.check_format()
    root = run.files.folder(CHECKPOINTS)
    checkpoints = choice.find(root)
    num_ranks = ranks() if ranks() > 1 else current().size
    for _, name in checkpoints:
        try:
            loaded = open_checkpoint(root, name, num_ranks)
            loaded[0].recalibrate_fp8 = choice.recalibrate_fp8
            job_state.check_saved_state(*loaded)
            return attempt(name, loaded)
        except DamagedCheckpoint as error:
            problem = str(error)
            if name not in problem:
                problem = f"{root.path / name}: {problem}"
            say(manifest.skip_message(printable(problem)))
    if checkpoints:
        raise manifest.no_usable_checkpoint(root)
    _refuse_lost_checkpoints(run)
    return attempt("", None)


def _refuse_lost_checkpoints(run: RunFolder) -> None:
    """Raises NoUsableCheckpoint if `run`, which has no checkpoint, trained beyond a step that it must have saved."""
    recipe = run.read_recipe()
    interval = recipe.checkpoint.every_n_steps
    if not interval or not run.files.kind(METRICS):
        return
    steps = [row["step"] for row in read(run.files, METRICS)]
    num_done = max((step for step in steps if isinstance(step, int)), default=0)
    # An asynchronous save may be under way up to the next one.
    last_without = 2 * interval if recipe.checkpoint.async_save else interval
    if num_done > last_without:
        raise NoUsableCheckpoint(
            f"{run.path}: has no checkpoint, but metrics.jsonl goes to step {num_done} and step"
            f" {interval} was saved; put the folders checkpoints/step-* back, or delete"
            " metrics.jsonl to start over"
        )


def newest_recipe(run: RunFolder, choice: CheckpointChoice = NEWEST) -> tuple[Recipe, int | None]:
    """Returns the recipe with which `run` would be resumed, and the step of its checkpoint.

    It is the recipe of the newest checkpoint whose state is valid, whatever its tensors are; or
    recipe.yaml, without a step. A smoke run is resumed with the size to which it was cut.
    """
    recipe, step = _newest_recipe(run, choice)
    recipe.trainer.smoke = False
    return recipe, step


def _newest_recipe(run: RunFolder, choice: CheckpointChoice) -> tuple[Recipe, int | None]:
    run.check_format()
    root = run.files.folder(CHECKPOINTS)
    for _, name in choice.find(root):
        try:
            # With one rank it would compute the checksums of all tensors.
            loaded = open_checkpoint(root, name, num_ranks=2)
            job_state.check_saved_state(*loaded)
            return Recipe(**loaded[1]["recipe"]), loaded[1]["step"]
        except DamagedCheckpoint:
            continue  # resume_run reports it
    return run.read_recipe(), None


def recipe_for_resume(
    run: RunFolder,
    name: str,
    loaded: Loaded | None,
    change: Callable[[Recipe], Recipe],
    allow: Iterable[str],
    say: Say,
    is_restart: bool = False,
) -> Recipe:
    """Returns the recipe with which `run` is resumed from the checkpoint `name`. Prints changes.

    The arguments are those of `resume_run`.

    Raises:
        ConfigError: A change would not continue the same run, and `allow` lacks its key.
    """
    written = run.read_recipe()
    _check_metrics(run)
    before = Recipe(**loaded[1]["recipe"]) if loaded else written
    # A smoke run has been cut to its size. It is resumed as any other run.
    was_smoke = before.trainer.smoke
    before.trainer.smoke = False
    recipe = change(before)
    # A resumed run has written smoke=false, so a restart with smoke=true is no change either.
    is_smoke = (was_smoke or is_restart) and recipe.trainer.smoke
    before.trainer.smoke = is_smoke
    written.trainer.smoke = is_smoke

    step = loaded[1]["step"] if loaded else None
    resume_rules.refuse_changes(
        before,
        recipe,
        list(allow),
        line=_resume_command(run, step, before, recipe) if is_restart else (),
        step=step,
    )
    if not is_restart:
        refuse_if([*_check_folder(run, before, recipe), *_check_max_steps(step, recipe)])
    origin = name or "the start, it has no checkpoint yet"
    say(f"resuming {printable(str(run.path))} from {origin}")
    if loaded:
        for key in resume_rules.changes(before, written):
            say(
                f"{key} in recipe.yaml is not that of the checkpoint, which holds; give it as a"
                " word to change it"
            )
    for key in resume_rules.changes(before, recipe):
        say(f"changed: {key}")
    return recipe


def _check_metrics(run: RunFolder) -> None:
    """Raises ConfigError for a metrics.jsonl that cannot be read, before anything is built."""
    try:
        if run.files.kind(METRICS):
            read(run.files, METRICS)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _resume_command(run: RunFolder, step: int | None, before: Recipe, recipe: Recipe) -> list[str]:
    """Returns the command that resumes `run`, with recipe `before`, as `recipe`."""
    without_effect = ["log.dir=", "log.folder=", "log.resume="]
    if _check_max_steps(step, recipe):
        without_effect.append("trainer.max_steps=")
    overrides = [
        override
        for override in changed_overrides(before, recipe)
        if not override.startswith(tuple(without_effect))
    ]
    return ["fp8cfg", "resume", str(run.path), *overrides]


def _check_folder(run: RunFolder, before: Recipe, recipe: Recipe) -> list[str]:
    """Returns an error for each change of the folder: a run is resumed in its own folder."""
    problems = []
    for key in ("dir", "folder"):
        value = getattr(recipe.log, key)
        if value == getattr(before.log, key):
            continue
        if key == "folder" and value and Path(value).resolve() == run.path.resolve():
            continue
        problems.append(
            f"log.{key}={value}: a run is resumed in its own folder, {run.path}; drop it, or copy"
            " the folder and resume that"
        )
    return problems


def _check_max_steps(step: int | None, recipe: Recipe) -> list[str]:
    """Returns an error if more steps are done than `recipe` has."""
    num_done = step or 0
    max_steps = recipe.trainer.max_steps
    if num_done <= max_steps:
        return []
    return [
        f"trainer.max_steps={max_steps}: {num_done} steps are done; write"
        f" trainer.max_steps={num_done} or more"
    ]


def write_recipe(run: RunFolder, recipe: Recipe, loaded: Loaded | None) -> None:
    """Writes recipe.yaml of a run that is resumed from the checkpoint `loaded`.

    A recipe that earlier steps ran with is kept under another name. Nothing is written if the
    checkpoint has all steps already, since none runs with `recipe` then.
    """
    num_done = loaded[1]["step"] if loaded else 0
    if num_done >= recipe.trainer.max_steps:
        return
    run.forget_recipes(num_done)
    before = Recipe(**loaded[1]["recipe"]) if loaded else recipe
    if resume_rules.changes(before, recipe):
        run.keep_recipe(num_done, to_yaml(before))
    run.write_recipe(to_yaml(recipe))


# ------------------------------------------------------------------------------------------------
# Smoke runs

LOSS_TOLERANCE = 1e-3
"""Relative difference of losses over several ranks or on a GPU, whose sums may have another order.

On one CPU there is none."""


class ResumeDiffers(Fp8cfgError):
    """A run that was resumed from its checkpoint did not give the losses that it had given before. Exit code 4."""

    exit_code = 4


def resume_smoke(
    recipe: Recipe, folder: Path | None, first: Result, world: World, say: Callable[[str], None]
) -> None:
    """Trains the last step of a smoke run again, from the checkpoint before it.

    Args:
        recipe: Recipe of the run, already cut.
        folder: Run folder, on the first rank.
        first: Result of the run.
        world: Ranks of the run.
        say: Prints a message.

    Raises:
        ResumeDiffers: The losses differ.
        NoUsableCheckpoint: The checkpoint is missing.
    """
    path = Path(world.text(str(folder or "")))
    root = RunFolder.reading(path).files.folder(CHECKPOINTS)
    names = [name for step, name in manifest.list_steps(root) if step == SAVED_AT]
    if not names:
        raise manifest.no_usable_checkpoint(root)
    name = names[0]
    loaded = open_checkpoint(root, name, world.size)
    again = train(build(recipe), None, loaded, world, _say_nothing)
    is_exact = world.size == 1 and not _has_gpu()
    for kind, old, new in (
        ("training", first.loss, again.loss),
        ("validation", first.val_loss, again.val_loss),
    ):
        if old is None or new is None:
            continue
        tolerance = 0.0 if is_exact else LOSS_TOLERANCE * abs(old)
        if not (old == new or abs(old - new) <= tolerance):
            raise ResumeDiffers(
                f"resume: step {STEPS} from {name} has a {kind} loss of {new!r}, and had {old!r}"
                " before"
            )
    losses = f"losses within {LOSS_TOLERANCE:g}"
    if (first.loss, first.val_loss) == (again.loss, again.val_loss):
        losses = "the same losses"
    say(f"resume: step {STEPS} from {name} gave {losses}")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# ------------------------------------------------------------------------------------------------
# Arguments


def _to_path(folder: object) -> Path:
    """Returns the path of a run folder. Raises ConfigError if `folder` is none."""
    if isinstance(folder, (str, os.PathLike)):
        path = str(folder)
        if path and "\0" not in path:
            return Path(path)
    raise ConfigError(f"folder: expected a path, got {folder!r:.40}")


def _to_keys(allow: Iterable[str] | None) -> list[str]:
    """Returns the keys of `allow`. Raises ConfigError unless it is a list of strings."""
    if not isinstance(allow, str):
        keys = list(allow or ())
        if all(isinstance(key, str) for key in keys):
            return keys
    # The letters of a single string are no keys.
    raise ConfigError("allow: expected a list of keys, as in allow=['optim.lr']")


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises ConfigError for callbacks that a run could not call, before its first step."""
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks: expected a list, got {type(callbacks).__name__}")
    for callback in callbacks:
        is_class = isinstance(callback, type)
        has_methods = all(
            callable(getattr(callback, name, None)) for name in ("step", "evaluation", "save")
        )
        if is_class or not has_methods:
            remedy = f"; write {callback.__name__}()" if isinstance(callback, type) else ""
            raise ConfigError(
                "callbacks: expected objects of a class below fp8cfg.Callback, got"
                f" {callback!r:.40}{remedy}"
            )


def _with_folder(result: Result, run: RunFolder | None) -> Result:
    return replace(result, folder=run.path if run else None)


def _say_nothing(_: str) -> None:
    """Prints nothing, on all ranks but the first."""
