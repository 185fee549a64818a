"""Sweeps (`sweep` and -m): Hydra's sweeper and launcher start one run per combination of values."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fp8cfg.cli import hydra as hydra_flags
from fp8cfg.cli import launch_run
from fp8cfg.cli.argv import Arguments
from fp8cfg.cli.recipe_arguments import open_library, resolve_recipe, say_notes
from fp8cfg.cli.run_models import read_object
from fp8cfg.composition import precedence, to_yaml
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.hydra_application import GIVEN, NAME, NULL, application, recipe_from
from fp8cfg.composition.overrides import quoted
from fp8cfg.composition.sweep_overrides import Sweep, refused
from fp8cfg.composition.sweep_overrides import read as read_overrides
from fp8cfg.execution.process_memory import free_memory
from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.file_names import COVERAGE, METRICS
from fp8cfg.run_folder.files import RunFiles, RunFolderNotWritable
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, out_of_memory, printable, refuse_if
from fp8cfg.schema.keys import short
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import fits, table, wrapped
from fp8cfg.studies.runs import median_speed

JOB, ALL = "job-{number}.json", "results.json"
"""Result files. Names have the job's number, because jobs may share a folder."""
Result = dict[str, Any]


def write_result(
    folder: Path,
    number: int,
    overrides: list[str],
    exit_code: int,
    error: str,
    has_run_folder: bool,
) -> Result:
    """Writes the result of a job.

    Args:
        folder: Folder of the job.
        number: Number of the job.
        overrides: Overrides of the job, as full_key=value.
        exit_code: Exit code.
        error: Error message, "" without one.
        has_run_folder: Whether the job created a run folder, so that its metrics are from this job.

    Returns:
        The result, as it was written.
    """
    files = RunFiles.at(folder)
    values = {}
    for override in overrides:
        key, _, value = override.partition("=")
        values[short(key.lstrip("+"))] = value
    # Without a new run, files in the folder are from an older one.
    run_files = files if has_run_folder else None
    result = {
        "job": number,
        "overrides": values,
        "exit_code": exit_code,
        "error": error or None,
        **_read_metrics(run_files),
        "fp8_share": _read_fp8_share(run_files),
        "run_folder": str(folder),
    }
    files.replace(JOB.format(number=number), (json.dumps(result, indent=1) + "\n").encode())
    return result


def read_results(folder: Path) -> list[Result]:
    """Reads the results of a sweep, sorted by job number.

    Args:
        folder: The sweep folder.
    """
    files = folder.rglob(JOB.format(number="*"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return sorted(results, key=lambda result: int(result["job"]))


def report(folder: Path, early_end: str) -> int:
    """Prints the table of a sweep and writes results.json.

    Args:
        folder: The sweep folder.
        early_end: Why the sweep ended early, "" if it did not.

    Returns:
        The largest exit code. But 1 if any job ended with 1, because it may be a bug.
    """
    results = read_results(folder)
    RunFiles.at(folder).replace(ALL, (json.dumps(results, indent=1) + "\n").encode())
    print(f"\nsweep folder: {printable(str(folder))}\n{_table(folder, results)}")
    for result in results:
        is_invalid = result["exit_code"] == ConfigError.exit_code
        outcome = "refused" if is_invalid else "failed"
        for line in (result["error"] or "").splitlines():
            print(f"{_job_name(folder, result)} {outcome}: {printable(line)}")
    if early_end:
        sys.stdout.flush()
        print(f"error: {printable(early_end)}", file=sys.stderr)
    codes = [int(result["exit_code"]) for result in results]
    if 1 in codes:
        return 1
    if early_end:
        codes.append(1)
    return max(codes, default=0)


def _table(folder: Path, results: list[Result]) -> str:
    """Formats one row per job, with the keys that differ between jobs."""
    all_keys = {key: None for result in results for key in result["overrides"]}  # keeps the order
    keys = []
    for key in all_keys:
        values = {result["overrides"].get(key) for result in results}
        if len(values) > 1:
            keys.append(key)
    metrics = ["loss", "val loss", "tokens/s", "FP8", "exit"]
    header = ["folder", *keys, *metrics]
    rows = []
    for result in results:
        rows.append(
            [
                _job_name(folder, result),
                *(result["overrides"].get(key, "") for key in keys),
                _format_number(result["training_loss"], ".4f"),
                _format_number(result["validation_loss"], ".4f"),
                _format_number(result["tokens_per_second"], ",.0f"),
                _format_number(result["fp8_share"], ".1%"),
                str(result["exit_code"]),
            ]
        )
    if not keys or fits(header, rows):
        text: str = table(header, rows, right=range(len(keys) + 1, len(header)))
        return text
    # Too wide for the terminal: print the keys below the table.
    narrow_rows = [[row[0], *row[-len(metrics) :]] for row in rows]
    text = table(["folder", *metrics], narrow_rows, right=range(1, len(metrics) + 1))
    for row in rows:
        overrides = " ".join(f"{key}={value}" for key, value in zip(keys, row[1:], strict=False))
        text += "\n" + wrapped(f"{row[0]}: {overrides}", more="  ")
    return text


def _job_name(folder: Path, result: Result) -> str:
    """Returns the job's folder relative to the sweep folder."""
    return printable(os.path.relpath(result["run_folder"], folder))


def _format_number(value: float | str | None, form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):  # "nan" and "inf"
        return value
    return format(value, form)


def _read_metrics(files: RunFiles | None) -> Result:
    """Returns the last losses and the median speed. None for missing values."""
    rows: list[Any] = []
    if files and files.kind(METRICS):
        rows = metrics_file.read_metrics(files, METRICS)
    last: dict[str, float | None] = {"loss": None, "val_loss": None}
    for row in rows:
        for name in last:
            last[name] = row.get(name, last[name])
    return {
        "training_loss": _json_number(last["loss"]),
        "validation_loss": _json_number(last["val_loss"]),
        "tokens_per_second": median_speed(rows),
    }


def _json_number(value: float | None) -> float | str | None:
    """Converts NaN and infinities to strings, because JSON has no such numbers."""
    if value is None or math.isfinite(value):
        return value
    return str(value)


def _read_fp8_share(files: RunFiles | None) -> float | None:
    """Returns the share of matmul FLOPs in FP8, None without coverage.json."""
    if files is None or not files.kind(COVERAGE):
        return None
    share: float = read_object(files, COVERAGE)["share_of_matmul_flops"]
    return share


def job(library: Library, file: Path | None, config: DictConfig) -> float:
    """Trains one job of a sweep and writes its result.

    Args:
        library: The choices of each group.
        file: The recipe file. None with `recipe=`.
        config: The config from Hydra. Only Hydra's own settings are used.

    Returns:
        The validation loss or else the training loss, for sweepers such as Optuna. NaN after an
        error.

    Raises:
        KeyboardInterrupt: A signal stopped the job. Other errors are caught.
    """

    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    overrides = [_as_typed(word, library) for word in hydra.overrides.task]
    exit_code, error, has_run_folder = _train(overrides, library, file, folder)
    result = write_result(folder, hydra.job.num, overrides, exit_code, error, has_run_folder)
    # 75: stopped by a signal and saved. 130: interrupted. Both stop the whole sweep.
    if exit_code in (75, 130):
        raise KeyboardInterrupt
    losses = [result["validation_loss"], result["training_loss"]]
    losses = [loss for loss in losses if loss is not None]
    if exit_code == 0 and losses:
        return float(losses[0])
    return float("nan")


def _as_typed(word: str, library: Library) -> str:
    """Returns an override of Hydra's as on the command line: `task=null` for `task='null'`."""
    key, _, value = word.partition("=")
    if value == f"'{NULL}'" and key.lstrip("+") in library.groups():
        return f"{key}={NULL}"
    return word


def _train(
    overrides: list[str], library: Library, file: Path | None, folder: Path
) -> tuple[int, str, bool]:
    """Trains the recipe of one job in `folder`.

    Returns:
        The exit code, the error message or "", and whether the run folder was created.
    """
    has_run_folder = False

    def create_folder() -> RunFolder:
        """Creates the run folder in the job's folder."""
        nonlocal has_run_folder
        run = RunFolder.create(folder, recipe.name, datetime.now(), to_yaml(recipe), folder)
        has_run_folder = True
        return run

    exit_code, error = 0, ""
    try:
        words = [word for word in overrides if word != f"recipe={GIVEN}"]
        resolved = precedence.composed(words, library, file, sweep=True)
        refuse_if(resolved.problems)
        say_notes(resolved.notes, resolved.recipe.log.level)
        recipe = launch_run.cut_to_ranks(resolved.recipe)
        exit_code = launch_run.launch(recipe, create_folder, None, is_short=True)
    except Fp8cfgError as failure:
        exit_code, error = failure.exit_code, str(failure)
        for line in error.splitlines():
            print(f"error: {printable(line)}", file=sys.stderr)
    except KeyboardInterrupt:
        exit_code, error = 130, "interrupted"
    except Exception as failure:  # a bug, or no memory: the other runs continue
        exit_code, error = 1, out_of_memory(failure)
        if error:
            print(f"error: {printable(error)}", file=sys.stderr)
        else:
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
    finally:
        free_memory()
    return exit_code, error, has_run_folder


class SweepError(Fp8cfgError):
    """A launcher or sweeper failed. Exit code 1."""


def multirun(arguments: Arguments, file: Path | None) -> int:
    """Checks all combinations, trains them, and reports the results.

    Args:
        arguments: Arguments of the command.
        file: The recipe file, if any.

    Returns:
        The exit code, see `report`.

    Raises:
        ConfigError: An argument is wrong, or no combination can run.
        SweepError: The launcher or the sweeper failed before any job ended.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "-m: a sweep starts its own runs, each on one rank; start it without torchrun"
        )
    words, hydra_words = hydra_flags.hydra_split(arguments.words)
    for word in hydra_words:
        if word.startswith(hydra_flags.RUN_DIR):
            raise ConfigError(f"{word}: for a single run only; write hydra.sweep.dir=FOLDER")
    config_dir = arguments.one("--config-dir")
    library = open_library(config_dir)
    plan = read_overrides(words, library, recipe_from(file, library) if file else None)
    recipe = _check_combinations(plan, config_dir, file)
    # Jobs print their own messages, so Hydra's logging is off.
    overrides = ["hydra/job_logging=none", *plan.overrides, *hydra_words, "hydra.mode=MULTIRUN"]
    with application(plan.nodes, hydra_flags.settings(recipe)) as hydra:
        folder = _create_folder(hydra, overrides, len(plan.combinations))
        early_end = _multirun(hydra, folder, overrides, functools.partial(job, library, file))
    return report(folder, early_end)


def _check_combinations(plan: Sweep, config_dir: str | None, file: Path | None) -> Recipe:
    """Composes all combinations and prints the invalid ones. Returns the first valid recipe."""
    recipes: list[Recipe] = []

    def check(words: Sequence[str]) -> None:
        """Composes one combination. Raises ConfigError if it cannot run."""
        # Without notes: each job prints its own.
        resolved = resolve_recipe(words, config_dir, file, sweep=True)
        folder_problems = []
        folder = resolved.recipe.log.folder
        if folder:
            folder_problems.append(
                f"log.folder={folder}: for a single run only; write hydra.sweep.dir=FOLDER"
            )
        refuse_if([*resolved.problems, *folder_problems])
        recipes.append(resolved.recipe)

    invalid = refused(plan.combinations, check)
    if invalid:
        print(f"{len(invalid)} of {len(plan.combinations)} combinations cannot run:")
    for number, lines in invalid.items():
        # Overrides of all combinations don't tell them apart.
        distinct = []
        for word in plan.combinations[number]:
            if not all(word in combination for combination in plan.combinations):
                distinct.append(word)
        print(f"  {' '.join(distinct)}", *lines, sep="\n    ")
    return recipes[0]


def _create_folder(hydra: Hydra, overrides: list[str], num_jobs: int) -> Path:
    """Creates the sweep folder. Raises ConfigError if all jobs would share one folder."""
    # Each composition resolves ${now:...} to another time. So the folder is fixed here once.
    try:
        config = hydra.compose_config(NAME, overrides, RunMode.MULTIRUN)
    except Exception as error:
        problem = _sweep_error(error)
        raise problem from problem.__cause__
    HydraConfig.instance().set_config(config)
    sweep: Any = OmegaConf.to_container(config.hydra.sweep)
    subdir = str(sweep["subdir"])
    if num_jobs > 1 and "${" not in subdir:
        raise ConfigError(
            f"hydra.sweep.subdir={subdir}: gives all {num_jobs} runs one folder; "
            "put the run into the name, as in 'hydra.sweep.subdir=${hydra.job.num}'"
        )
    folder = Path(str(config.hydra.sweep.dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"hydra.sweep.dir={folder}: is not empty; set a new folder")
    except OSError as error:
        raise RunFolderNotWritable(f"{folder} cannot be written ({error.strerror})") from None
    return folder


def _multirun(
    hydra: Hydra, folder: Path, overrides: list[str], task: Callable[[DictConfig], float]
) -> str:
    """Runs the sweep. Returns why it ended early, or ""."""
    try:
        hydra.multirun(NAME, task, [*overrides, f"hydra.sweep.dir={quoted(str(folder))}"])
    except KeyboardInterrupt:
        return "stopped by a signal; runs that are not in the table have not started"
    except Exception as error:  # from a launcher or sweeper: a missing queue, a lost job
        problem = _sweep_error(error)
        # Results of finished jobs are still reported.
        if read_results(folder):
            return str(problem)
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise problem from problem.__cause__
    return ""


def _sweep_error(error: Exception) -> Exception:
    """Returns the error if it is printed in one line, or else a SweepError with its first line."""
    if isinstance(error, (Fp8cfgError, HydraException, OmegaConfBaseException)):
        return error
    lines = str(error).strip().splitlines() or ["no reason given"]
    return SweepError(f"the sweep failed: {type(error).__name__}: {lines[0]}")
