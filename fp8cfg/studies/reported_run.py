"""Runs of a report: the files of their folders, and a plan for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.planning.hardware import GPUS
from fp8cfg.planning.plan_recipe import plan
from fp8cfg.planning.plan_report import PlanReport
from fp8cfg.run_folder.file_names import COVERAGE, ENVIRONMENT
from fp8cfg.run_folder.files import RunFolderError, StrangeFile
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.run_folder.sources import read_sources
from fp8cfg.schema.errors import ConfigError
from fp8cfg.studies.fp8_history import FP8History, read_history
from fp8cfg.studies.run_data import RunData, find_runs, read_run

MOST_RUNS = 32
"""Most runs in a report: 8 colors with 4 dashes each. More lines would look alike."""


@dataclass(frozen=True)
class ReportedRun:
    """A run of a report, with more files than `RunData`.

    Attributes:
        data: The run.
        name: Unique name in the report.
        environment: Contents of environment.json. Empty without the file.
        sources: Contents of sources.json: the source of each value by short key.
        coverage: Contents of coverage.json. None before the first step.
        history: FP8 statistics. None if the run did not record them.
        planned: The plan for the GPUs of the run, or a sentence on why it is missing.
    """

    data: RunData
    name: str
    environment: Mapping[str, Any]
    sources: Mapping[str, str]
    coverage: Mapping[str, Any] | None
    history: FP8History | None
    planned: PlanReport | str


def run_folders(
    runs: Sequence[str | Path] | str | Path, reference: str | Path | None
) -> list[Path]:
    """Returns the run folders of a report, the reference first.

    Args:
        runs: Run folders, or folders with run folders in them.
        reference: Run folder of the reference. None for the first run.

    Returns:
        The folders without duplicates.

    Raises:
        ConfigError: There are no runs, or more than MOST_RUNS.
        RunFolderError: A folder does not exist.
    """
    if isinstance(runs, str | Path):
        runs = [runs]
    if not runs:
        raise ConfigError("report: needs a run folder, as in: fp8cfg report runs/NAME")
    # By resolved path, because a folder may be given twice: as the reference and in a sweep.
    folders: dict[Path, Path] = {}
    paths = list(runs)
    if reference is not None:
        paths.insert(0, reference)
    for path in paths:
        # For a folder without runs, read_run raises the error.
        for folder in find_runs(Path(path)) or [Path(path)]:
            folders.setdefault(folder.resolve(), folder)
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"report: {len(folders)} runs are too many; choose up to {MOST_RUNS}")
    return list(folders.values())


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Reads the runs of a report.

    Args:
        folders: The run folders, the reference first.

    Returns:
        The runs. Their names are paths if two folders have the same name.

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
    """Reads the other files of a run, and plans its recipe."""
    folder = RunFolder.reading(run.folder)
    environment = _json_file(folder, ENVIRONMENT) or {}
    coverage = _json_file(folder, COVERAGE)
    history = read_history(folder.files)
    sources = read_sources(folder.files)
    planned = _plan(run, environment, coverage)
    return ReportedRun(run, name, environment, sources, coverage, history, planned)


def _json_file(folder: RunFolder, name: str) -> dict[str, Any] | None:
    """Reads a JSON object of a run folder. None if the file is missing.

    Raises:
        RunFolderError: The file is damaged.
    """
    if not folder.files.kind(name):
        return None
    try:
        data = json.loads(folder.files.read(name))
    except (OSError, ValueError, RecursionError, StrangeFile) as error:
        raise RunFolderError(f"{folder.path / name}: cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise RunFolderError(f"{folder.path / name}: is no JSON object")
    return data


def _plan(
    run: RunData, environment: Mapping[str, Any], coverage: Mapping[str, Any] | None
) -> PlanReport | str:
    """Plans the recipe for the GPUs of the run. Returns a sentence if this is impossible."""
    gpu = None
    names = environment.get("gpus") or []
    if names:
        # The driver reports longer names, such as "NVIDIA H100 80GB HBM3".
        known = [key for key in GPUS if key in str(names[0]).lower().replace(" ", "-")]
        if not known:
            return f"There is no plan for {names[0]}."
        # "l4" is in the name of an L40S too. The longest match is the right one.
        gpu = max(known, key=len)
    try:
        planned = plan(run.recipe, gpu, environment.get("ranks"))
    except ConfigError as error:
        return f"There is no plan: {error.problems[0]}"
    # A custom model has a recipe too, but its memory is not the plan's.
    layers = {linear["name"] for linear in (coverage or {}).get("linears", ())}
    if layers and layers != {linear.name for linear in planned.coverage.linears}:
        return "There is no plan: the run trained a custom model."
    return planned
