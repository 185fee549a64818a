"""Runs in Python: a job is trained into a run folder, and a run folder is gone on with, as the command line does both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
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
from fp8cfg.training.data import RunData, run_data
from fp8cfg.training.loop import Interrupted, Loaded, Result, train
from fp8cfg.training.metrics import read
from fp8cfg.training.step_report import Callback

if TYPE_CHECKING:
    from torch import nn


T = TypeVar("T")
Say = Callable[[str], None]


@refuses_recipe_keys("set recipe.{key}; fit expects a Job, and fp8cfg.build(recipe) gives one")
def fit(
    job: Job,
    folder: str | Path | RunFolder | None = None,
    start_from: Loaded | None = None,
    world: World | None = None,
    say: Say = print,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train `job` to trainer.max_steps and leave a run folder, with recipe, metrics, coverage and checkpoints, as the command line
    does: `folder`, by default log.folder, which has no run in it yet unless log.resume goes on with it, or a new one under log.dir.
    `result.folder` says where. `say` gets each message, a line every log.every_n_steps steps among them, and `callbacks` are called on the first rank alone; `start_from` is a loaded
    checkpoint to go on from. A RunFolder that is given is written to as it is, and stays open.

    Raises NotFP8Error where the first step did not run as planned, Interrupted after a signal, with all that is done saved,
    Diverged, ConfigError for data or batches that do not fit the recipe, CheckpointError, RunFolderError.
    """
    if not isinstance(job, Job):
        raise ConfigError(
            f"fit: expected a Job, got {type(job).__name__}; fp8cfg.build(recipe) gives one"
        )
    _check_callbacks(callbacks)
    world = world or current()
    r, given = job.recipe, job.recipe.log.folder if folder is None else folder
    exactly = None if given is None or isinstance(given, RunFolder) else _path(given)
    if (
        exactly
        and r.log.resume == "auto"
        and start_from is None
        and world.any(world.first and (exactly / RECIPE).exists())
    ):
        return _gone_on(job, exactly, world, say, callbacks)
    if not world.first or isinstance(folder, RunFolder):
        run = folder if isinstance(folder, RunFolder) and world.first else None
        return _left(train(job, run, start_from, world, say, callbacks), run)
    if exactly:
        RunFolder.refuse_taken(exactly)
    data = run_data(r)
    key = "log.dir" if not exactly else "log.folder" if folder is None else ""
    with RunFolder.create(
        Path(r.log.dir), r.name, datetime.now(), to_yaml(r), exactly, key=key
    ) as run:
        return _trained(job, run, start_from, world, say, callbacks, data)


def _gone_on(
    job: Job, folder: Path, world: World, say: Say, callbacks: Sequence[Callback]
) -> Result:
    """Train `job` on from the newest checkpoint of the run in `folder`, whose recipe must be one that goes on as this one."""
    tell = say if world.first else _nothing
    with RunFolder.open(folder, lock=world.first) as run:

        def go_on(name: str, loaded: Loaded | None) -> Result:
            recipe = continued(run, name, loaded, lambda _: job.recipe, (), tell, anew=True)
            if world.first:
                write_recipe(run, recipe, loaded)
            return _trained(job, run if world.first else None, loaded, world, say, callbacks)

        return from_newest(run, go_on, tell)


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
    """Go on with the run in `folder` from its newest checkpoint that verifies, or from the start where it has none. `overrides` are
    words that change its recipe, such as "trainer.max_steps=200"; one that would not continue the same run is refused unless
    `allow` has its key. `model` is that of a run of your own model, as it was given to `build`. Otherwise as `fit`.

    `step` chooses the checkpoint of that step; later ones are set aside. With `recalibrate_fp8` scales and amax histories that are
    missing or impossible start anew.
    """
    _check_callbacks(callbacks)
    allow = _keys(allow)
    world = current()
    tell = say if world.first else _nothing
    choice = CheckpointChoice(step, recalibrate_fp8)
    with RunFolder.open(_path(folder), lock=world.first) as run:

        def go_on(name: str, loaded: Loaded | None) -> Result:
            recipe = continued(
                run, name, loaded, lambda before: compose(overrides, base=before), allow, tell
            )
            job = build(recipe, model)
            if world.first:
                run.lock()
                write_recipe(run, recipe, loaded)
                choice.set_aside(run, tell)
            return _trained(job, run if world.first else None, loaded, world, say, callbacks)

        return from_newest(run, go_on, tell, choice)


@dataclass(frozen=True)
class CheckpointChoice:
    """How a resumed run chooses and reads its checkpoint.

    Attributes:
        step: The step of the checkpoint; None is the newest that verifies.
        recalibrate_fp8: As of `resume`.
    """

    step: int | None = None
    recalibrate_fp8: bool = False

    def of(self, root: RunFiles) -> list[tuple[int, str]]:
        """Step and folder name of each checkpoint to try. Raises ConfigError if there is none of the step."""
        every = manifest.steps(root)
        if self.step is None:
            return every
        chosen = [(step, name) for step, name in every if step == self.step]
        if not chosen:
            steps = ", ".join(dict.fromkeys(str(step) for step, _ in reversed(every))) or "none"
            raise ConfigError(f"--step {self.step}: no checkpoint of that step; there are: {steps}")
        return chosen

    def set_aside(self, run: RunFolder, say: Say) -> None:
        """Renames checkpoints later than the chosen step: the run writes others in their place."""
        if self.step is None:
            return
        root = run.files.folder(CHECKPOINTS)
        for step, name in manifest.steps(root):
            if step <= self.step:
                continue
            number = next(n for n in count(1) if not root.kind(f"{name}.aside-{n}"))
            root.rename(name, f"{name}.aside-{number}")
            say(f"{name} is later than --step {self.step}: renamed to {name}.aside-{number}")


NEWEST = CheckpointChoice()


def from_newest(
    run: RunFolder,
    go_on: Callable[[str, Loaded | None], T],
    say: Say,
    choice: CheckpointChoice = NEWEST,
) -> T:
    """What `go_on` makes of the name and the contents of the newest checkpoint that verifies, or of those of `choice`; of "" and
    None where there is none. It may raise DamagedCheckpoint before the first step: that one is passed over too. Raises
    NoUsableCheckpoint, ConfigError.
    """
    run.check_format()
    root = run.files.folder(CHECKPOINTS)
    found = choice.of(root)
    size = ranks() if ranks() > 1 else current().size
    for _, name in found:
        try:
            loaded = open_checkpoint(root, name, size)
            loaded[0].recalibrate_fp8 = choice.recalibrate_fp8
            job_state.check_saved_state(*loaded)
            return go_on(name, loaded)
        except DamagedCheckpoint as e:
            problem = str(e) if name in str(e) else f"{root.path / name}: {e}"
            say(manifest.passed_over(printable(problem)))
    if found:
        raise manifest.none_usable(root)
    _refuse_lost_checkpoints(run)
    return go_on("", None)


def _refuse_lost_checkpoints(run: RunFolder) -> None:
    """Raises NoUsableCheckpoint if `run`, which has no checkpoint, trained beyond a step that it must have saved."""
    every = run.read_recipe().checkpoint.every_n_steps
    if not every or not run.files.kind(METRICS):
        return
    steps = [row["step"] for row in read(run.files, METRICS)]
    done = max((step for step in steps if isinstance(step, int)), default=0)
    # An asynchronous save may be under way up to the next one.
    is_async = run.read_recipe().checkpoint.async_save
    if done > (2 * every if is_async else every):
        raise NoUsableCheckpoint(
            f"{run.path}: has no checkpoint, but metrics.jsonl goes to step {done} and step"
            f" {every} was saved; put the folders checkpoints/step-* back, or delete metrics.jsonl"
            " to start over"
        )


def newest_recipe(run: RunFolder, choice: CheckpointChoice = NEWEST) -> tuple[Recipe, int | None]:
    """The recipe with which `run` would go on, and the step of its checkpoint: of the newest checkpoint whose state verifies,
    whatever its tensors are, or else of recipe.yaml, without a step; a smoke run's as it was cut, and cut no more."""
    recipe, step = _newest_recipe(run, choice)
    recipe.trainer.smoke = False
    return recipe, step


def _newest_recipe(run: RunFolder, choice: CheckpointChoice) -> tuple[Recipe, int | None]:
    run.check_format()
    root = run.files.folder(CHECKPOINTS)
    for _, name in choice.of(root):
        try:
            loaded = open_checkpoint(
                root, name, num_ranks=2
            )  # one rank would take the sums of all tensors
            job_state.check_saved_state(*loaded)
            return Recipe(**loaded[1]["recipe"]), loaded[1]["step"]
        except DamagedCheckpoint:  # whoever goes on says so
            continue
    return run.read_recipe(), None


def continued(
    run: RunFolder,
    name: str,
    loaded: Loaded | None,
    changed: Callable[[Recipe], Recipe],
    allow: Iterable[str],
    say: Say,
    anew: bool = False,
) -> Recipe:
    """The recipe with which `run` goes on from the checkpoint `name`: what `changed` makes of that of the checkpoint, or, with
    `anew`, the one that it starts with, a smoke run's as it was cut. Says what differs; raises ConfigError for a change that would
    not continue the same run, unless `allow` has its key."""
    written = run.read_recipe()
    _check_metrics(run)
    before = Recipe(**loaded[1]["recipe"]) if loaded else written
    smoke, before.trainer.smoke = (
        before.trainer.smoke,
        False,
    )  # it has the size to which it was cut, and goes on as any run does
    recipe = changed(before)
    before.trainer.smoke = written.trainer.smoke = (
        smoke or anew
    ) and recipe.trainer.smoke  # a resume has written False
    resume_rules.refuse_changes(
        before,
        recipe,
        list(allow),
        line=_resume_line(run, loaded, before, recipe) if anew else (),
        step=loaded[1]["step"] if loaded else None,
    )
    if not anew:
        refuse_if([*_elsewhere(run, before, recipe), *_done(loaded, recipe)])
    say(f"resuming {printable(str(run.path))} from {name or 'the start, it has no checkpoint yet'}")
    for key in resume_rules.changes(before, written) if loaded else []:
        say(
            f"{key} in recipe.yaml is not that of the checkpoint, which holds; give it as a word to"
            " change it"
        )
    for key in resume_rules.changes(before, recipe):
        say(f"changed: {key}")
    return recipe


def _check_metrics(run: RunFolder) -> None:
    """Raise ConfigError for a metrics.jsonl that cannot be gone on with, before anything is said or built."""
    try:
        if run.files.kind(METRICS):
            read(run.files, METRICS)
    except ValueError as e:
        raise ConfigError(str(e)) from None


def _resume_line(
    run: RunFolder, loaded: Loaded | None, before: Recipe, recipe: Recipe
) -> list[str]:
    """The words of the command that goes on with `run`, of `before`, as `recipe`."""
    idle = [
        "log.dir=",
        "log.folder=",
        "log.resume=",
        *(["trainer.max_steps="] if [*_done(loaded, recipe)] else []),
    ]
    return [
        "fp8cfg",
        "resume",
        str(run.path),
        *(word for word in changed_overrides(before, recipe) if not word.startswith(tuple(idle))),
    ]


def _elsewhere(run: RunFolder, before: Recipe, recipe: Recipe) -> Iterator[str]:
    """Words that would have a run go on in another folder than its own, which none does."""
    for key in ("dir", "folder"):
        was, now = getattr(before.log, key), getattr(recipe.log, key)
        if now != was and not (
            key == "folder" and now and Path(now).resolve() == run.path.resolve()
        ):
            yield (
                f"log.{key}={now}: a run is resumed in its own folder, {run.path}; drop it, or copy"
                " the folder and resume that"
            )


def _done(loaded: Loaded | None, recipe: Recipe) -> Iterator[str]:
    """That more steps are done than the run is to have."""
    done, last = loaded[1]["step"] if loaded else 0, recipe.trainer.max_steps
    if done > last:
        yield (
            f"trainer.max_steps={last}: {done} steps are done; write trainer.max_steps={done} or"
            " more"
        )


def write_recipe(run: RunFolder, recipe: Recipe, loaded: Loaded | None) -> None:
    """Put `recipe` in the place of recipe.yaml, unless the checkpoint `loaded` has all of its steps: none runs with it then. The
    recipe of the checkpoint stays under another name if it differs, for earlier steps ran with it."""
    done = loaded[1]["step"] if loaded else 0
    if done >= recipe.trainer.max_steps:
        return
    run.forget_recipes(done)
    before = Recipe(**loaded[1]["recipe"]) if loaded else recipe
    if resume_rules.changes(before, recipe):
        run.keep_recipe(done, to_yaml(before))
    run.write_recipe(to_yaml(recipe))


def _trained(
    job: Job,
    run: RunFolder | None,
    start_from: Loaded | None,
    world: World,
    say: Say,
    callbacks: Sequence[Callback],
    data: RunData | None = None,
) -> Result:
    try:
        return _left(train(job, run, start_from, world, say, callbacks, data), run)
    except Exception as error:
        remove_unused(run, error)
        raise
    finally:
        if run and run.files.there:
            say(f"run folder: {printable(str(run.path))}")


def remove_unused(run: RunFolder | None, error: Exception) -> None:
    """Removes the folder of a run that `error` ended before its first step, unless it waits to be resumed."""
    if run is None or isinstance(error, Interrupted):
        return
    with suppress(OSError):
        run.remove_unused()


def _left(result: Result, run: RunFolder | None) -> Result:
    return replace(result, folder=run.path if run else None)


def _path(folder: object) -> Path:
    """The path that a user gave for a run folder. Raises ConfigError for what is none."""
    if isinstance(folder, (str, os.PathLike)) and (path := str(folder)) and "\0" not in path:
        return Path(path)
    raise ConfigError(f"folder: expected a path, got {folder!r:.40}")


def _keys(allow: Iterable[str] | None) -> list[str]:
    """The keys of `allow`. Raises ConfigError for one text, whose letters are no keys, and for what is no text."""
    keys = None if isinstance(allow, str) else list(allow or ())
    if keys is None or not all(isinstance(key, str) for key in keys):
        raise ConfigError("allow: expected a list of keys, as in allow=['optim.lr']")
    return keys


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError for what a run could not call, before it has trained a step."""
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks: expected a list, got {type(callbacks).__name__}")
    for each in callbacks:
        if isinstance(each, type) or not all(
            callable(getattr(each, name, None)) for name in ("step", "evaluation", "save")
        ):
            call = f"; write {each.__name__}()" if isinstance(each, type) else ""
            raise ConfigError(
                "callbacks: expected objects of a class below fp8cfg.Callback, got"
                f" {each!r:.40}{call}"
            )


def _nothing(_: str) -> None:
    """What ranks other than the first say."""


BOUND = 1e-3
"""Relative difference of losses over several ranks or on a GPU, whose sums may have another order; on one CPU there is none."""


class ResumeDiffers(Fp8cfgError):
    """A run that was resumed from its checkpoint did not give the losses that it had given before. Exit code 4."""

    exit_code = 4


def resume_smoke(
    recipe: Recipe, folder: Path | None, first: Result, world: World, say: Callable[[str], None]
) -> None:
    """Train the last step of `recipe`, a smoke run that ended with `first`, from the checkpoint before it in the run folder, whose
    path the first rank has. Raises ResumeDiffers where losses are others, and NoUsableCheckpoint.
    """
    root = RunFolder.reading(Path(world.text(str(folder or "")))).files.folder(CHECKPOINTS)
    name = next((name for step, name in manifest.steps(root) if step == SAVED_AT), None)
    if name is None:
        raise manifest.none_usable(root)
    again = train(
        build(recipe), None, open_checkpoint(root, name, world.size), world, lambda _: None
    )
    exact = world.size == 1 and not _on_gpu()
    for what, old, new in (
        ("training", first.loss, again.loss),
        ("validation", first.val_loss, again.val_loss),
    ):
        if (
            old is not None
            and new is not None
            and not (old == new if exact else abs(old - new) <= BOUND * abs(old))
        ):
            raise ResumeDiffers(
                f"resume: step {STEPS} from {name} has a {what} loss of {new!r}, and had {old!r}"
                " before"
            )
    same = (
        "the same losses"
        if (first.loss, first.val_loss) == (again.loss, again.val_loss)
        else f"losses within {BOUND:g}"
    )
    say(f"resume: step {STEPS} from {name} gave {same}")


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
