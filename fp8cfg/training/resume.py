"""Resume of a run: which checkpoint, which recipe, and which changes of it are allowed.

`resume_run` opens the newest valid checkpoint and applies the changes to its recipe. It then calls
a function that trains. The functions `fit` and `resume` of runs.py and the commands share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fp8cfg.checkpoint import job_state, manifest, resume_rules
from fp8cfg.checkpoint.load import open_checkpoint
from fp8cfg.checkpoint.manifest import DamagedCheckpoint, NoUsableCheckpoint
from fp8cfg.composition import to_yaml
from fp8cfg.parallel.process_group import current
from fp8cfg.parallel.sharding import ranks
from fp8cfg.planning.fit_search import changed_overrides
from fp8cfg.run_folder.file_names import CHECKPOINTS, METRICS
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.metrics_file import read_metrics
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema import messages
from fp8cfg.schema.errors import ConfigError, printable, refuse_if
from fp8cfg.schema.messages import Say
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.loop import Loaded

T = TypeVar("T")
OpenFolder = Callable[[], RunFolder]
"""Opens or creates a run folder, locked for this process."""


@dataclass(frozen=True)
class CheckpointChoice:
    """The checkpoint to resume from.

    Attributes:
        step: Step of the checkpoint. None takes the newest valid one.
        recalibrate_fp8: See `resume`.
    """

    step: int | None = None
    recalibrate_fp8: bool = False

    def list_candidates(self, root: RunFiles) -> list[tuple[int, str]]:
        """Returns the step and the folder name of each candidate, newest first.

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
        """Renames checkpoints after the chosen step. The resumed run writes these steps again."""
        if self.step is None:
            return
        root = run.files.folder(CHECKPOINTS)
        for step, name in manifest.list_steps(root):
            if step <= self.step:
                continue
            # An earlier resume may have set aside a checkpoint of the same name.
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
    """Resumes a run from its newest valid checkpoint. `fit`, `resume` and the commands call it.

    Skips damaged checkpoints with a message. If `start` itself raises DamagedCheckpoint before the
    first step, the next older checkpoint is tried.

    Args:
        run: Run folder.
        change: Maps the checkpoint's recipe to the recipe of the resumed run.
        start: Trains the recipe from the loaded checkpoint, or from step 0 if it is None. Calls its
            third argument to lock the run folder and to write recipe.yaml.
        say: Prints a message.
        allow: Keys to change although resume rejects them by default.
        choice: Checkpoint to resume from.
        is_restart: Whether `fit` resumes the run (log.resume=auto). Then the recipe is meant for a
            new run, so log.dir and trainer.smoke may differ.

    Returns:
        The result of `start`.

    Raises:
        NoUsableCheckpoint: All checkpoints are damaged or deleted.
        ConfigError: A changed key is fixed by the checkpoint, or missing from `allow`.
    """

    def resume_from(name: str, loaded: Loaded | None) -> T:
        """Resumes from one checkpoint, or from step 0 if `loaded` is None."""
        recipe = recipe_for_resume(run, name, loaded, change, allow, say, is_restart)

        def open_folder() -> RunFolder:
            run.lock()  # again: a failed attempt from a later checkpoint has released the lock
            write_recipe(run, recipe, loaded)
            choice.rename_later(run, say)
            return run

        return start(recipe, loaded, open_folder)

    run.check_format()
    root = run.files.folder(CHECKPOINTS)
    checkpoints = choice.list_candidates(root)
    # `ranks()` reads torchrun's WORLD_SIZE: the process group may not exist yet.
    num_ranks = ranks()
    if num_ranks == 1:
        num_ranks = current().size
    for _, name in checkpoints:
        try:
            loaded = open_checkpoint(root, name, num_ranks)
            tensors, state = loaded
            tensors.recalibrate_fp8 = choice.recalibrate_fp8
            job_state.check_saved_state(tensors, state)
            return resume_from(name, loaded)
        except DamagedCheckpoint as error:
            problem = str(error)
            if name not in problem:
                problem = f"{root.path / name}: {problem}"
            say(manifest.skip_message(printable(problem)))
    if checkpoints:
        raise manifest.no_usable_checkpoint(root)
    _refuse_lost_checkpoints(run)
    return resume_from("", None)


def _refuse_lost_checkpoints(run: RunFolder) -> None:
    """Raises NoUsableCheckpoint if a run without checkpoints has trained long enough to have some.

    A restart from step 0 would overwrite the metrics of a run with deleted checkpoints.
    """
    recipe = run.read_recipe()
    interval = recipe.checkpoint.every_n_steps
    if not interval:
        return
    num_done = max((row["step"] for row in _read_metrics(run)), default=0)
    max_steps_without = interval
    if recipe.checkpoint.async_save:
        max_steps_without *= 2  # a save can take until the next one begins
    if num_done > max_steps_without:
        raise NoUsableCheckpoint(
            f"{run.path}: has no checkpoint, but metrics.jsonl goes to step {num_done} and step"
            f" {interval} was saved; put the folders checkpoints/step-* back, or delete"
            " metrics.jsonl to start over"
        )


def newest_recipe(run: RunFolder, choice: CheckpointChoice = NEWEST) -> tuple[Recipe, int | None]:
    """Returns the recipe for resuming a run, and the step of its checkpoint.

    The recipe comes from the newest checkpoint with a valid state.json, or from recipe.yaml without
    a step. Tensors are not verified here.
    """
    recipe, step = _newest_recipe(run, choice)
    # The recipe of a smoke run is reduced already. It must not be reduced again.
    recipe.trainer.smoke = False
    return recipe, step


def _newest_recipe(run: RunFolder, choice: CheckpointChoice) -> tuple[Recipe, int | None]:
    """Reads the newest valid recipe, with trainer.smoke as the run had it."""
    run.check_format()
    root = run.files.folder(CHECKPOINTS)
    for _, name in choice.list_candidates(root):
        try:
            # num_ranks=2 skips the checksums of the tensors. They take long for a large model.
            tensors, state = open_checkpoint(root, name, num_ranks=2)
            job_state.check_saved_state(tensors, state)
            return Recipe(**state["recipe"]), state["step"]
        except DamagedCheckpoint:
            continue  # `resume_run` prints the message
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
    """Applies changes to a checkpoint's recipe and checks that the run can continue.

    Args:
        run: Run folder.
        name: Name of the checkpoint, "" if the run has none.
        loaded: The checkpoint, None if the run has none.
        change: Maps the checkpoint's recipe to the recipe of the resumed run.
        allow: Keys to change although resume rejects them by default.
        say: Called with a message for each changed key.
        is_restart: Whether `fit` resumes the run (log.resume=auto).

    Returns:
        The recipe of the resumed run.

    Raises:
        ConfigError: A changed key is fixed by the checkpoint, or missing from `allow`.
    """
    yaml_recipe = run.read_recipe()
    _read_metrics(run)  # reports a damaged file before the job is built
    old_recipe = yaml_recipe
    step = None
    if loaded is not None:
        _, state = loaded
        old_recipe = Recipe(**state["recipe"])
        step = state["step"]
    # A smoke run's recipe is reduced already, so it is resumed like any other run.
    was_smoke = old_recipe.trainer.smoke
    old_recipe.trainer.smoke = False
    recipe = change(old_recipe)
    # A resumed smoke run has written smoke=false. A restart with smoke=true is not a change.
    is_smoke = (was_smoke or is_restart) and recipe.trainer.smoke
    old_recipe.trainer.smoke = is_smoke
    yaml_recipe.trainer.smoke = is_smoke

    command: Sequence[str] = ()
    if is_restart:
        command = _resume_command(run, step, old_recipe, recipe)
    resume_rules.refuse_changes(old_recipe, recipe, list(allow), line=command, step=step)
    if not is_restart:
        refuse_if([*_check_folder(run, old_recipe, recipe), *_check_max_steps(step, recipe)])

    say = messages.of_run(say, recipe.log.level, recipe.log.progress)
    origin = name or "the start, it has no checkpoint yet"
    say(f"resuming {printable(str(run.path))} from {origin}")
    if loaded is not None:
        for key in resume_rules.changes(old_recipe, yaml_recipe):
            say(
                f"note: {key}: recipe.yaml differs from the checkpoint; using the checkpoint; to"
                f" change it, pass {key}=VALUE"
            )
    for key in resume_rules.changes(old_recipe, recipe):
        say(f"changed: {key}")
    return recipe


def _read_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """Reads metrics.jsonl, empty without the file. Raises ConfigError if it cannot be read."""
    try:
        if not run.files.kind(METRICS):
            return []
        return read_metrics(run.files, METRICS)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{run.metrics}: cannot be read ({error.strerror})") from None


def _resume_command(
    run: RunFolder, step: int | None, old_recipe: Recipe, recipe: Recipe
) -> list[str]:
    """Returns the `fp8cfg resume` command that changes the recipe of a run to `recipe`."""
    # A resume keeps the folder, and it cannot have fewer steps than are done.
    without_effect = ["log.dir=", "log.folder=", "log.resume="]
    if _check_max_steps(step, recipe):
        without_effect.append("trainer.max_steps=")
    overrides = []
    for override in changed_overrides(old_recipe, recipe):
        if not override.startswith(tuple(without_effect)):
            overrides.append(override)
    return ["fp8cfg", "resume", str(run.path), *overrides]


def _check_folder(run: RunFolder, old_recipe: Recipe, recipe: Recipe) -> list[str]:
    """Returns an error for each override that moves the run to another folder."""
    problems = []
    for key in ("dir", "folder"):
        value = getattr(recipe.log, key)
        if value == getattr(old_recipe.log, key):
            continue
        # The same folder under another spelling, such as a relative path.
        if key == "folder" and value and Path(value).resolve() == run.path.resolve():
            continue
        problems.append(
            f"log.{key}={value}: a resumed run stays in {run.path}; remove log.{key}, or copy the"
            " folder and resume the copy"
        )
    return problems


def _check_max_steps(step: int | None, recipe: Recipe) -> list[str]:
    """Returns an error if the checkpoint is past trainer.max_steps."""
    num_done = step or 0
    max_steps = recipe.trainer.max_steps
    if num_done <= max_steps:
        return []
    return [
        f"trainer.max_steps={max_steps}: {num_done} steps are done; set"
        f" trainer.max_steps={num_done} or more"
    ]


def write_recipe(run: RunFolder, recipe: Recipe, loaded: Loaded | None) -> None:
    """Replaces recipe.yaml with the recipe of the resumed run.

    The former recipe is kept under another name if earlier steps ran with it. Nothing is written if
    no steps are left to run.
    """
    num_done = 0
    old_recipe = recipe
    if loaded is not None:
        _, state = loaded
        num_done = state["step"]
        old_recipe = Recipe(**state["recipe"])
    if num_done >= recipe.trainer.max_steps:
        return
    # These recipes belong to later steps, and the resumed run repeats these steps.
    run.forget_recipes(num_done)
    if resume_rules.changes(old_recipe, recipe):
        run.keep_recipe(num_done, to_yaml(old_recipe))
    run.write_recipe(to_yaml(recipe))
