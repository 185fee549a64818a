"""Multirun: a run for each combination of values, started by Hydra's sweeper and launcher; `sweep`, and -m."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.cli import hydra_flags, sweep_results
from fp8cfg.cli.argv import Arguments
from fp8cfg.cli.sweep_job import job
from fp8cfg.config.errors import ConfigError, Fp8cfgError, refuse_if

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from fp8cfg.composition.sweep_words import Sweep
    from fp8cfg.config.recipe import Recipe


class SweepError(Fp8cfgError):
    """A launcher or sweeper failed. Exit code 1."""


def multirun(arguments: Arguments, file: Path | None) -> int:
    """Check every combination, run them, print and write the results. Returns the exit code."""
    from fp8cfg.composition.authors import of_file
    from fp8cfg.composition.config_groups import Library
    from fp8cfg.composition.hydra_compose import application
    from fp8cfg.composition.resolve import recipe_from
    from fp8cfg.composition.sweep_words import read

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "-m: a sweep starts runs of its own, each on one rank; start it without torchrun"
        )
    words, hydra_words = hydra_flags.hydra_split(arguments.words)
    single = [word for word in hydra_words if word.startswith(hydra_flags.RUN_DIR)]
    refuse_if([f"{word}: is of a single run; write hydra.sweep.dir=FOLDER" for word in single])
    config_dir = arguments.one("--config-dir")
    library = Library(Path(config_dir) if config_dir else None)
    plan = read(words, library, recipe_from(file, library) if file else None)
    recipe = _checked(plan, config_dir, file)
    overrides = ["hydra/job_logging=none", *plan.overrides, *hydra_words, "hydra.mode=MULTIRUN"]
    authors = of_file(file, library.data(file), library) if file else {}
    with application(plan.nodes, hydra_flags.settings(recipe)) as hydra:
        folder = _folder(hydra, overrides, len(plan.combinations))
        ended = _multirun(hydra, folder, overrides, functools.partial(job, authors, library))
    return sweep_results.report(folder, ended)


def _checked(plan: Sweep, config_dir: str | None, file: Path | None) -> Recipe:
    """Compose every combination and name those that cannot be; the recipe of the first that can."""
    from fp8cfg.cli.composed import settled
    from fp8cfg.composition.sweep_words import refused

    recipes: list[Recipe] = []

    def build(words: Sequence[str]) -> None:
        found = settled(words, config_dir, file, sweep=True)  # what gives way in it each job says
        one = found.recipe.log.folder
        refuse_if(
            [
                *found.problems,
                *(
                    [f"log.folder={one}: is of a single run; write hydra.sweep.dir=FOLDER"]
                    if one
                    else []
                ),
            ]
        )
        recipes.append(found.recipe)

    holes = refused(plan.combinations, build)
    if holes:
        print(f"{len(holes)} of {len(plan.combinations)} combinations cannot run:")
    for number, lines in holes.items():
        words = [
            word
            for word in plan.combinations[number]
            if any(word not in other for other in plan.combinations)
        ]
        print(f"  {' '.join(words)}", *lines, sep="\n    ")
    return recipes[0]


def _folder(hydra: Hydra, overrides: list[str], jobs: int) -> Path:
    """The folder of the sweep, made and fixed here: what names it after the time would name it anew at each look. Raises
    ConfigError where all of its `jobs` would go to one folder."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from fp8cfg.composition.hydra_compose import NAME
    from fp8cfg.training.run_folder_errors import RunFolderNotWritable

    try:
        config = hydra.compose_config(NAME, overrides, RunMode.MULTIRUN)
    except Exception as e:
        problem = _problem(e)
        raise problem from problem.__cause__
    HydraConfig.instance().set_config(config)
    sweep: Any = OmegaConf.to_container(config.hydra.sweep)
    below = str(sweep["subdir"])
    if jobs > 1 and "${" not in below:
        raise ConfigError(
            f"hydra.sweep.subdir={below}: one folder for all of {jobs} runs; "
            "name the run in it, as in 'hydra.sweep.subdir=${hydra.job.num}'"
        )
    folder = Path(str(config.hydra.sweep.dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"hydra.sweep.dir={folder}: is not empty; a sweep takes a new folder")
    except OSError as e:
        raise RunFolderNotWritable(f"{folder} cannot be written ({e.strerror})") from None
    return folder


def _multirun(
    hydra: Hydra, folder: Path, overrides: list[str], task: Callable[[DictConfig], float]
) -> str:
    """Run the sweep. Returns why it ended early, where it did."""
    from fp8cfg.composition.hydra_compose import NAME
    from fp8cfg.composition.quoted_words import quoted

    try:
        hydra.multirun(NAME, task, [*overrides, f"hydra.sweep.dir={quoted(str(folder))}"])
    except KeyboardInterrupt:
        return "stopped by a signal; what is not in the table has not run"
    except (
        Exception
    ) as e:  # of any launcher or sweeper: a queue that is not there, a job that was lost
        problem = _problem(e)
        if sweep_results.read(folder):
            return str(problem)
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise problem from problem.__cause__
    return ""


def _problem(error: Exception) -> Exception:
    """The error itself where it is one that ends in a line, else one that does."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, (Fp8cfgError, HydraException, OmegaConfBaseException)):
        return error
    first = (str(error).strip().splitlines() or ["no reason given"])[0]
    return SweepError(f"the sweep failed: {type(error).__name__}: {first}")
