"""Runs of a report, read from their folders: metrics, environment, coverage, FP8 statistics and plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.planning.hardware import GPUS
from fp8cfg.planning.plan_report import PlanReport, plan
from fp8cfg.run_folder.files import StrangeFile
from fp8cfg.run_folder.run_folder import COVERAGE, ENVIRONMENT, RunFolder, RunFolderError
from fp8cfg.schema.errors import ConfigError
from fp8cfg.studies.fp8_history import FP8History, read_history
from fp8cfg.studies.run_data import RunData, find_runs, read_run

MOST_RUNS = 32
"""Runs in a report: as many as there are pairs of a color and a dash."""


@dataclass(frozen=True)
class ReportedRun:
    """A run of a report, with the files that `RunData` does not have.

    Attributes:
        data: The run.
        name: Name in the report, unique there.
        environment: Contents of environment.json, empty if it is damaged.
        coverage: Contents of coverage.json. None before the first step.
        history: FP8 statistics. None if the run did not record them.
        planned: The plan for the GPUs of the run, or a sentence why there is none.
    """

    data: RunData
    name: str
    environment: Mapping[str, Any]
    coverage: Mapping[str, Any] | None
    history: FP8History | None
    planned: PlanReport | str


def run_folders(
    runs: Sequence[str | Path] | str | Path, reference: str | Path | None
) -> list[Path]:
    """Returns the run folders of a report, the reference first and each folder once.

    Args:
        runs: Run folders, or folders with run folders in them.
        reference: The reference. None if it is the first run.

    Raises:
        ConfigError: There are no runs, or too many.
        RunFolderError: There is no such folder.
    """
    if isinstance(runs, str | Path):
        runs = [runs]
    if not runs:
        raise ConfigError("report: needs a run folder, as in: fp8cfg report runs/NAME")
    found: dict[Path, Path] = {}
    for given in [reference, *runs] if reference is not None else runs:
        folder = Path(given)
        inner = find_runs(folder)
        # Without runs in it, read_run has a message for the folder.
        for each in inner or [folder]:
            found.setdefault(each.resolve(), each)
    if len(found) > MOST_RUNS:
        raise ConfigError(f"report: {len(found)} runs are too many; choose up to {MOST_RUNS}")
    return list(found.values())


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Reads runs. If two folders have the same name, the names in the report are paths.

    Raises:
        ConfigError: A recipe is not valid in this version of fp8cfg.
        RunFolderError: A folder is not a run folder, or its files are damaged.
    """
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    return [_read_files(run, name) for run, name in zip(runs, names, strict=True)]


def _read_files(run: RunData, name: str) -> ReportedRun:
    folder = RunFolder.reading(run.folder)
    environment = _json_file(folder, ENVIRONMENT) or {}
    coverage = _json_file(folder, COVERAGE)
    history = read_history(folder.files)
    return ReportedRun(run, name, environment, coverage, history, _plan(run, environment, coverage))


def _json_file(folder: RunFolder, name: str) -> dict[str, Any] | None:
    """Reads a JSON object of a run folder. None if the file is missing.

    Raises:
        RunFolderError: The file is damaged.
    """
    if not folder.files.kind(name):
        return None
    try:
        found = json.loads(folder.files.read(name))
    except (OSError, ValueError, RecursionError, StrangeFile) as error:
        raise RunFolderError(f"{folder.path / name}: cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise RunFolderError(f"{folder.path / name}: is no JSON object")
    return found


def _plan(
    run: RunData, environment: Mapping[str, Any], coverage: Mapping[str, Any] | None
) -> PlanReport | str:
    """Plans the recipe for the GPUs of the run. Returns a sentence if there is no plan."""
    gpu = None
    names = environment.get("gpus") or []
    if names:
        known = [key for key in GPUS if key in str(names[0]).lower().replace(" ", "-")]
        if not known:
            return f"There is no plan for {names[0]}."
        gpu = max(known, key=len)
    try:
        planned = plan(run.recipe, gpu, environment.get("ranks"))
    except ConfigError as error:
        return f"There is no plan: {error.problems[0]}"
    layers = {linear["name"] for linear in (coverage or {}).get("linears", ())}
    if layers and layers != {linear.name for linear in planned.coverage.linears}:
        return "There is no plan: the run trained a custom model."
    return planned
