"""`fp8cfg.run`: a recipe through an executor, into a run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from fp8cfg.composition import to_yaml
from fp8cfg.config.errors import ConfigError, NotWritable, taken
from fp8cfg.config.recipe import Recipe
from fp8cfg.execution import nemo
from fp8cfg.execution.executor import REQUEST, STARTED, Command, Executor, LocalExecutor, RunFailed


@dataclass(frozen=True)
class Execution:
    """A run that an executor has taken: its folder, for `fp8cfg.resume` and `fp8cfg.RunFolder`, and its exit code, which is None
    while it is not waited for."""

    folder: Path
    exit_code: int | None


def run(recipe: Recipe, executor: Any = None, folder: str | Path | None = None) -> Execution:
    """Train `recipe` through `executor` into `folder`, by default log.folder, or a new one under log.dir: LocalExecutor (the
    default), TorchrunExecutor, SlurmExecutor, one of nemo_run's, or whatever has `execute(command)`. A folder with a run in it is
    refused, or gone on with under log.resume=auto. Raises ConfigError for a recipe that breaks a rule, before anything starts,
    NotWritable, and RunFailed with the exit code of a run that failed."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"run: expected a Recipe, got {type(recipe).__name__}; to train a job write"
            " fp8cfg.fit(job)"
        )
    chosen = (
        nemo.NemoExecutor(executor)
        if nemo.is_one(executor)
        else LocalExecutor()
        if executor is None
        else executor
    )
    if not isinstance(chosen, Executor) or isinstance(chosen, type):
        raise ConfigError(
            "run: executor: expected one with execute(command), such as fp8cfg.LocalExecutor(),"
            f" got {executor!r}"
        )
    recipe.check()
    t, given = recipe.trainer, folder or recipe.log.folder
    home = (Path(given).parent if given else Path(recipe.log.dir)).absolute()
    absent = [each for each in (home, *home.parents) if not each.exists()]
    try:
        path = _requested(recipe, Path(given).absolute() if given else None)
    except OSError as e:
        raise NotWritable(
            f"{given or recipe.log.dir}: cannot be written ({e.strerror or e})"
        ) from None
    try:
        code = chosen.execute(Command(path, ranks=t.devices, nodes=t.num_nodes, smoke=t.smoke))
    except ConfigError:
        _remove(path, absent)
        raise
    if code == ConfigError.exit_code and not (path / STARTED).exists():
        _remove(path, absent)
    if code:
        raise RunFailed(path, code)
    return Execution(path, code)


def _requested(recipe: Recipe, given: Path | None) -> Path:
    """The folder `given`, or a new one, with the request of a run of `recipe`. Raises ConfigError where a run is there already that
    is not to go on, and OSError."""
    path = given or _new(recipe).absolute()
    if (path / STARTED).exists() and recipe.log.resume == "never":
        raise ConfigError(taken(str(path)))
    path.mkdir(parents=True, exist_ok=True)
    (path / REQUEST).write_text(to_yaml(recipe), encoding="utf-8")
    return path


def _remove(path: Path, above: Sequence[Path]) -> None:
    """Take the request of a run that has not started away, and, once they are empty, its folder and those `above`."""
    (path / REQUEST).unlink()
    with contextlib.suppress(OSError):
        for each in (path, *above):
            each.rmdir()


def _new(recipe: Recipe) -> Path:
    """A folder under log.dir that nobody has, made here."""
    root = Path(recipe.log.dir)
    name = f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
