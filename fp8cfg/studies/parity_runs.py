"""Runs of a parity study: the recipes, the run folders and the training.

Read from top to bottom:

    make_study      one recipe per precision and seed, each with its run folder
    train_runs      reuses finished runs, resumes stopped runs and trains the others
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.checkpoint.resume_rules import changes, matches
from fp8cfg.execution.executor import RunFailed
from fp8cfg.execution.executor import run as run_with
from fp8cfg.execution.process_memory import free_memory
from fp8cfg.planning.fit_search import overrides_only
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.planning.preflight import check_run
from fp8cfg.run_folder.file_names import RECIPE
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, printable, refuse_if
from fp8cfg.schema.keys import full, spelled
from fp8cfg.schema.messages import Say
from fp8cfg.schema.recipe import Recipe
from fp8cfg.studies.run_data import read_run, run_name

OWN = "own"
"""Name of the recipe's own precision."""
PRECISION_KEYS = "trainer.plugins."
"""Prefix of the full names of precision keys. They may differ between the runs of a study."""
WITHOUT_EFFECT = ("name", "log.*", "checkpoint.*", "trainer.timeout.*")
"""Keys without effect on losses."""
MAX_SEEDS = 1000
"""Most seeds of a study. All runs are planned in memory, so a typo should not fill it."""
DIVERGED = 7
"""Exit code of a diverged run. With an executor it is the only trace of the error."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study.

    Attributes:
        precision: Name of the precision in the study.
        seed: Value of trainer.seed.
        recipe: The recipe of the run.
        folder: The run folder.
    """

    precision: str
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def title(self) -> str:
        """The run in words."""
        return f"{self.precision}, seed {self.seed}"


TrainRun = Callable[[PlannedRun, Say], None]
"""Trains or resumes a run. Raises Diverged."""


@dataclass(frozen=True)
class Study:
    """Runs to compare.

    Attributes:
        name: Name of the recipe.
        baseline: Name of the baseline.
        precisions: Names of the other precisions.
        seeds: Seeds of the runs.
        runs: Runs to train, the baseline first. A given baseline is not among them.
        baseline_folders: Run folders of an existing baseline by seed. Empty if the study trains the
            baseline.
        tolerance: Largest accepted gap, in nats per token.
    """

    name: str
    baseline: str
    precisions: Sequence[str]
    seeds: Sequence[int]
    runs: Sequence[PlannedRun]
    baseline_folders: Mapping[int, Path]
    tolerance: float

    @property
    def folder(self) -> Path:
        """Folder of the runs."""
        return self.runs[0].folder.parent


def precision_words(text: str) -> list[str]:
    """Returns the overrides for a precision.

    Args:
        text: Name of a preset, or "own" for the recipe's own precision. Overrides may follow, such
            as "bf16_fp8 fp8.margin=1".
    """
    name, *overrides = split_list(text, " ")
    return overrides if name == OWN else [f"precision={name}", *overrides]


def split_list(text: str, separator: str) -> list[str]:
    """Splits a list at its separators, except within brackets, and drops empty items."""
    # Values may be lists with commas, such as fp8.exclude=[a,b].
    items = [""]
    depth = 0
    for character in text:
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        if character == separator and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items if item.strip()]


def make_study(
    recipes: Mapping[str, Recipe],
    seeds: int,
    tolerance: float,
    against: Sequence[str | Path] = (),
) -> Study:
    """Plans the runs of a study.

    Args:
        recipes: Recipe of each precision by name, the baseline first.
        seeds: Number of seeds. Ignored with `against`.
        tolerance: Largest accepted gap, in nats per token.
        against: Run folders of an existing baseline. Then `recipes` has no baseline.

    Returns:
        The study. Nothing is trained or written yet.

    Raises:
        ConfigError: The recipes cannot be compared, or an argument is not valid.
    """
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"seeds={seeds}: must be 1 to {MAX_SEEDS}")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigError(f"tolerance={tolerance:g}: must be a number of at least 0")
    names = list(recipes)
    if not names:
        raise ConfigError("parity: needs precisions to compare, such as bf16 and bf16_fp8")
    first = recipes[names[0]]
    for recipe in recipes.values():
        _refuse_single_run_keys(recipe)
    if against:
        baseline_folders = _read_baseline(against, first)
        # With "run " in front: a run folder may have the name of a preset, such as bf16.
        baseline = f"run {', '.join(run_name(path) for path in baseline_folders.values())}"
        all_seeds = list(baseline_folders)
        compared = names
    else:
        baseline_folders = {}
        baseline, *compared = names
        all_seeds = [first.trainer.seed + number for number in range(seeds)]
    if not compared:
        raise ConfigError(
            f"precision={baseline}: is the baseline; add a precision to compare with it, as in"
            f" precision={baseline},bf16_fp8"
        )
    _refuse_equal(recipes)
    # The folder name has the number of steps. Learning rates follow trainer.max_steps, so runs of
    # different lengths differ from the first step.
    root = Path(first.log.dir) / f"parity-{first.name}-{first.trainer.max_steps}steps"
    runs = []
    for name, recipe in recipes.items():
        for seed in all_seeds:
            folder = root / f"{_folder_name(name)}-seed{seed}"
            runs.append(PlannedRun(name, seed, _recipe_of_run(recipe, seed, folder), folder))
    return Study(first.name, baseline, compared, all_seeds, runs, baseline_folders, tolerance)


def _refuse_single_run_keys(recipe: Recipe) -> None:
    """Raises ConfigError for keys without use in a study of several runs."""
    problems = []
    if recipe.log.folder is not None:
        problems.append(
            f"log.folder={recipe.log.folder}: parity trains several runs; set log.dir instead"
        )
    if recipe.trainer.smoke:
        problems.append("trainer.smoke=true: trains too few steps to compare losses; drop it")
    refuse_if(problems)


def _refuse_equal(recipes: Mapping[str, Recipe]) -> None:
    """Raises ConfigError if two precisions are equal or would share a folder."""
    # Equal recipes under two names would pass as a comparison with a gap of exactly 0.
    problems = []
    for first, second in itertools.combinations(recipes, 2):
        key = f"precision={first},{second}"
        if same_results(recipes[first], recipes[second]):
            problems.append(f"{key}: are the same precision; drop one of them")
        elif _folder_name(first) == _folder_name(second):
            problems.append(f"{key}: would share a run folder; drop one of them")
    refuse_if(problems)


def _folder_name(precision: str) -> str:
    """Returns a precision as part of a folder name."""
    # Overrides after a name have spaces, equal signs and brackets.
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", precision).strip("_")


def _recipe_of_run(recipe: Recipe, seed: int, folder: Path) -> Recipe:
    """Returns the recipe of one run."""
    # With its own folder and resume=auto, both `fit` and `fp8cfg resume` can resume the run.
    recipe = recipe.model_copy(deep=True)
    recipe.trainer.seed = seed
    recipe.log.folder = str(folder)
    recipe.log.resume = "auto"
    return recipe


def _read_baseline(folders: Sequence[str | Path], recipe: Recipe) -> dict[int, Path]:
    """Returns the run folders of an existing baseline by seed.

    Args:
        folders: The run folders.
        recipe: Recipe of the runs to compare with the baseline.

    Raises:
        ConfigError: A run differs from `recipe` in more than precision and seed, or two runs have
            the same seed.
    """
    folder_by_seed: dict[int, Path] = {}
    problems = []
    for folder in folders:
        path = Path(folder)
        run = read_run(path)
        seed = run.recipe.trainer.seed
        if seed in folder_by_seed:
            problems.append(
                f"--against {path}: has trainer.seed={seed}, as {folder_by_seed[seed]} has"
            )
        folder_by_seed[seed] = path
        for key in other_keys(run.recipe, recipe):
            if key == "trainer.seed":
                continue
            theirs = _value(run.recipe, key)
            problems.append(
                f"--against {path}: has {key}={theirs}, the other runs would have"
                f" {_value(recipe, key)}; write {key}={theirs}"
            )
    refuse_if(problems)
    return folder_by_seed


def other_keys(before: Recipe, recipe: Recipe) -> list[str]:
    """Returns the different keys with effect on the losses, except for precision keys."""
    return [
        key for key in _changed_keys(before, recipe) if not full(key).startswith(PRECISION_KEYS)
    ]


def same_results(first: Recipe, second: Recipe) -> bool:
    """Whether two recipes have the same losses."""
    return not _changed_keys(first, second)


def _changed_keys(before: Recipe, recipe: Recipe) -> list[str]:
    """Returns the short names of different keys with effect on the losses."""
    return [key for key in changes(before, recipe) if not matches(key, WITHOUT_EFFECT)]


def _value(recipe: Recipe, key: str) -> str:
    """Returns the value of a key, spelled as in an override."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return spelled(value)


# ------------------------------------------------------------------------------------------------
# Training


def check_runs(study: Study) -> None:
    """Checks that all precisions can run on this machine. Nothing is trained.

    Raises:
        ConfigError: A line for each problem. Without the check, an unsupported precision would fail
            after the baseline has trained.
    """
    problems: dict[str, list[str]] = {}
    for run in study.runs:
        # Seeds don't change hardware support.
        if run.seed != study.seeds[0]:
            continue
        hardware = find_hardware(run.recipe.trainer.accelerator)
        try:
            check_run(run.recipe, hardware, overrides_only)
        except ConfigError as error:
            for line in error.problems:
                problems.setdefault(line, []).append(run.precision)
    refuse_if(for_precisions(problems, len({run.precision for run in study.runs})))


def for_precisions(problems: Mapping[str, Sequence[str]], count: int) -> list[str]:
    """Adds the names of precisions to problems.

    Args:
        problems: Names of the affected precisions by problem.
        count: Number of all precisions. A problem of all of them gets no names.
    """
    lines = []
    for line, names in problems.items():
        prefix = "" if len(names) == count else f"precision={', '.join(names)}: "
        lines.append(prefix + line)
    return lines


def train_runs(study: Study, train_run: TrainRun, say: Say) -> None:
    """Trains all unfinished runs of a study, one after another.

    Args:
        study: The study.
        train_run: Trains or resumes a run.
        say: Called with each message.

    Raises:
        ConfigError: A run folder has another recipe. Raised before anything is trained.
        Diverged: The baseline diverged.

        All errors of `train_run` apply too.
    """
    # Only for its error: a folder with another recipe should not stop the study halfway.
    for run in study.runs:
        has_started(run)
    steps = study.runs[0].recipe.trainer.max_steps
    say(f"{len(study.runs)} runs of {steps} steps in {printable(str(study.folder))}")
    for number, run in enumerate(study.runs, 1):
        title = f"run {number} of {len(study.runs)}: {run.title}"
        if is_finished(run):
            say(f"{title}: reused")
            continue
        say(title)
        _train_or_diverge(study, run, train_run, say)


def _train_or_diverge(study: Study, run: PlannedRun, train_run: TrainRun, say: Say) -> None:
    """Trains a run. Raises Diverged for a baseline. Other diverged runs get a verdict later."""
    from fp8cfg.checkpoint.saver import Diverged
    from fp8cfg.training.loop import Interrupted

    try:
        train_run(run, say)
    except Interrupted:
        say("to continue the study, run the same command again")
        raise
    except Diverged as error:
        if run.precision == study.baseline:
            raise Diverged(f"the baseline diverged, {run.title}: {error}") from None
        say(f"{run.title}: diverged: {error}")


def is_finished(run: PlannedRun) -> bool:
    """Whether a run needs no more training.

    Raises:
        ConfigError: Its folder has a run with another recipe.
    """
    if not has_started(run):
        return False
    data = read_run(run.folder)
    if data.state == "diverged":
        return True  # it would diverge again: runs are deterministic
    return data.state == "done" and data.steps >= run.recipe.trainer.max_steps


def has_started(run: PlannedRun) -> bool:
    """Whether a run has started: its folder has a recipe.

    Raises:
        ConfigError: Its folder has a run with another recipe.
    """
    if not (run.folder / RECIPE).exists():
        return False
    folder = RunFolder.reading(run.folder)
    # Earlier recipes too: a resume with other keys has changed the losses after it.
    for recipe in [folder.read_recipe(), *(recipe for _, recipe in folder.past_recipes())]:
        keys = _changed_keys(recipe, run.recipe)
        if keys:
            old_value, value = _value(recipe, keys[0]), _value(run.recipe, keys[0])
            suffix = f" and {len(keys) - 1} more keys" if len(keys) > 1 else ""
            raise ConfigError(
                f"{run.folder}: has a run with {keys[0]}={old_value}, not {value}{suffix}; delete"
                f" it, or set name=NAME for another study"
            )
    return True


def fit_here(run: PlannedRun, say: Say) -> None:
    """Trains or resumes a run in this process. Raises the errors of `fp8cfg.fit`."""
    from fp8cfg.building.builder import build
    from fp8cfg.training.runs import fit

    def say_progress(line: str) -> None:
        """Prints steps and warnings. Plans and coverage would repeat for each run."""
        if line.startswith(("step ", "warning", "resuming")):
            say(line)

    try:
        fit(build(run.recipe), run.folder, say=say_progress)
    finally:
        # After an error too: a diverged run is followed by the next one.
        free_memory()


def with_executor(executor: Any) -> TrainRun:
    """Returns a function that trains a run through an executor, see `fp8cfg.run`."""

    def train_run(run: PlannedRun, say: Say) -> None:
        """Trains or resumes a run, unless it still runs."""
        from fp8cfg.checkpoint.saver import Diverged

        # An executor such as Slurm may return before its jobs end. A second call finds them.
        if has_started(run) and read_run(run.folder).state == "running":
            say(f"{run.title}: still running")
            return
        try:
            run_with(run.recipe, executor, run.folder)
        except RunFailed as error:
            if error.exit_code == DIVERGED:
                raise Diverged(str(error)) from None
            raise

    return train_run
