"""Sweeps (`sweep` and -m): Hydra's sweeper and launcher start one run per combination of values."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import statistics
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
from fp8cfg.cli.recipe_arguments import resolve_recipe, say_notes
from fp8cfg.cli.run_models import read_object
from fp8cfg.composition import precedence, to_yaml
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.hydra_application import GIVEN, NAME, application, recipe_from
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

JOB, ALL = "job-{number}.json", "results.json"
"""Result files. Names have the job's number, because jobs may share a folder."""
Result = dict[str, Any]


def write(
    folder: Path, number: int, overrides: list[str], code: int, error: str, ran: bool
) -> Result:
    """Writes the result of a job.

    Args:
        folder: Folder of the job.
        number: Number of the job.
        overrides: Overrides of the job, as full_key=value.
        code: Exit code.
        error: Error message, "" without one.
        ran: Whether the job created a run folder, so that its metrics are from this job.

    Returns:
        The result, as it was written.
    """
    files = RunFiles.at(folder)
    words = {short(key): value for key, _, value in (o.partition("=") for o in overrides)}
    result = {
        "job": number,
        "overrides": words,
        "exit_code": code,
        "error": error or None,
        # Without a new run, files in the folder are from an older one.
        **_metrics(files if ran else None),
        "fp8_share": _share(files) if ran else None,
        "run_folder": str(folder),
    }
    files.replace(JOB.format(number=number), (json.dumps(result, indent=1) + "\n").encode())
    return result


def read(folder: Path) -> list[Result]:
    """Reads the results of a sweep, sorted by job number.

    Args:
        folder: The sweep folder.
    """
    files = folder.rglob(JOB.format(number="*"))
    return sorted(
        (json.loads(p.read_text(encoding="utf-8")) for p in files), key=lambda r: int(r["job"])
    )


def report(folder: Path, ended: str) -> int:
    """Prints the table of a sweep and writes results.json.

    Args:
        folder: The sweep folder.
        ended: Why the sweep ended early, "" if it did not.

    Returns:
        The largest exit code. But 1 if any job ended with 1, because it may be a bug.
    """
    results = read(folder)
    RunFiles.at(folder).replace(ALL, (json.dumps(results, indent=1) + "\n").encode())
    print(f"\nsweep folder: {printable(str(folder))}\n{_table(folder, results)}")
    for r in results:
        for line in (r["error"] or "").splitlines():
            print(
                f"{_name(folder, r)}"
                f" {'refused' if r['exit_code'] == ConfigError.exit_code else 'failed'}:"
                f" {printable(line)}"
            )
    if ended:
        sys.stdout.flush()
        print(f"error: {printable(ended)}", file=sys.stderr)
    codes = [int(result["exit_code"]) for result in results]
    if 1 in codes:
        return 1
    return max([1 if ended else 0, *codes])


def _table(folder: Path, results: list[Result]) -> str:
    """Formats one row per job, with the keys that differ between jobs."""
    every = {key: None for r in results for key in r["overrides"]}
    keys = [k for k in every if len({r["overrides"].get(k) for r in results}) > 1]
    header = ["folder", *keys, "loss", "val loss", "tokens/s", "FP8", "exit"]
    rows = [
        [
            _name(folder, r),
            *(r["overrides"].get(k, "") for k in keys),
            _number(r["training_loss"], ".4f"),
            _number(r["validation_loss"], ".4f"),
            _number(r["tokens_per_second"], ",.0f"),
            _number(r["fp8_share"], ".1%"),
            str(r["exit_code"]),
        ]
        for r in results
    ]
    text: str = table(header, rows, right=range(len(keys) + 1, len(header)))
    # Too wide for the terminal: print the keys below the table.
    if keys and not fits(header, rows):
        text = table(
            ["folder", *header[-5:]], [[row[0], *row[-5:]] for row in rows], right=range(1, 6)
        )
        for row in rows:
            words = " ".join(f"{k}={v}" for k, v in zip(keys, row[1:], strict=False))
            text += "\n" + wrapped(f"{row[0]}: {words}", more="  ")
    return text


def _name(folder: Path, result: Result) -> str:
    """Returns the job's folder relative to the sweep folder."""
    return printable(os.path.relpath(result["run_folder"], folder))


def _number(value: float | str | None, form: str) -> str:
    """Formats a number of a result. "nan" and "inf" are strings already."""
    return "" if value is None else value if isinstance(value, str) else format(value, form)


def _metrics(files: RunFiles | None) -> Result:
    """Returns the last losses and the median speed."""
    rows: list[Any] = (
        metrics_file.read_metrics(files, METRICS) if files and files.kind(METRICS) else []
    )
    steps = [r for r in rows if "seconds" in r]
    # The first step compiles and warms up, so it only counts if it is the only one.
    pace = [r["tokens"] / r["step"] / r["seconds"] for r in steps[1:] or steps]
    last = {
        name: next((r[name] for r in reversed(rows) if name in r), None)
        for name in ("loss", "val_loss")
    }
    return {
        "training_loss": _json(last["loss"]),
        "validation_loss": _json(last["val_loss"]),
        "tokens_per_second": statistics.median(pace) if pace else None,
    }


def _json(value: float | None) -> float | str | None:
    """Converts NaN and infinities to strings, because JSON has no such numbers."""
    return value if value is None or math.isfinite(value) else str(value)


def _share(files: RunFiles) -> float | None:
    """Returns the share of matmul FLOPs in FP8, None without coverage.json."""
    if not files.kind(COVERAGE):
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
    made = list[RunFolder]()
    words = list(hydra.overrides.task)
    code, error = _train(words, library, file, folder, made)
    result = write(folder, hydra.job.num, words, code, error, ran=bool(made))
    # 75: stopped by a signal and saved. 130: interrupted. Both stop the whole sweep.
    if code in (75, 130):
        raise KeyboardInterrupt
    found = [result[k] for k in ("validation_loss", "training_loss") if result[k] is not None]
    return float(found[0]) if found and code == 0 else float("nan")


def _train(
    words: list[str],
    library: Library,
    file: Path | None,
    folder: Path,
    made: list[RunFolder],
) -> tuple[int, str]:
    """Trains a recipe into `folder`. Adds the run folder to `made` when it is created.

    Returns:
        The exit code, and the error message or "".
    """

    def own() -> RunFolder:
        """Creates the run folder in the job's folder."""
        made.append(RunFolder.create(folder, recipe.name, datetime.now(), to_yaml(recipe), folder))
        return made[0]

    try:
        words = [word for word in words if word != f"recipe={GIVEN}"]
        found = precedence.composed(words, library, file, sweep=True)
        refuse_if(found.problems)
        say_notes(found.notes, found.recipe.log.level)
        recipe = launch_run.cut_to_ranks(found.recipe)
        return launch_run.launch(recipe, own, None, is_short=True), ""
    except Fp8cfgError as e:
        print(
            *(f"error: {printable(line)}" for line in str(e).splitlines()),
            sep="\n",
            file=sys.stderr,
        )
        return e.exit_code, str(e)
    except KeyboardInterrupt:
        return 130, "interrupted"
    except Exception as e:  # a bug, or no memory: the other runs continue
        if line := out_of_memory(e):
            print(f"error: {printable(line)}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1, line or f"{type(e).__name__}: {e}"
    finally:
        free_memory()


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
    single = [word for word in hydra_words if word.startswith(hydra_flags.RUN_DIR)]
    refuse_if([f"{word}: is of a single run; write hydra.sweep.dir=FOLDER" for word in single])
    config_dir = arguments.one("--config-dir")
    library = Library(Path(config_dir) if config_dir else None)
    plan = read_overrides(words, library, recipe_from(file, library) if file else None)
    recipe = _checked(plan, config_dir, file)
    # Jobs print their own messages, so Hydra's logging is off.
    overrides = ["hydra/job_logging=none", *plan.overrides, *hydra_words, "hydra.mode=MULTIRUN"]
    with application(plan.nodes, hydra_flags.settings(recipe)) as hydra:
        folder = _folder(hydra, overrides, len(plan.combinations))
        ended = _multirun(hydra, folder, overrides, functools.partial(job, library, file))
    return report(folder, ended)


def _checked(plan: Sweep, config_dir: str | None, file: Path | None) -> Recipe:
    """Composes all combinations and prints the invalid ones. Returns the first valid recipe."""
    recipes: list[Recipe] = []

    def build(words: Sequence[str]) -> None:
        """Composes one combination. Raises ConfigError if it cannot run."""
        found = resolve_recipe(
            words, config_dir, file, sweep=True
        )  # each job prints its notes itself
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
    """Creates the sweep folder. Raises ConfigError if all jobs would share one folder."""

    # Each composition resolves ${now:...} to another time. So the folder is fixed here once.
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
    """Runs the sweep. Returns why it ended early, or ""."""
    try:
        hydra.multirun(NAME, task, [*overrides, f"hydra.sweep.dir={quoted(str(folder))}"])
    except KeyboardInterrupt:
        return "stopped by a signal; what is not in the table has not run"
    except Exception as e:  # from a launcher or sweeper: a missing queue, a lost job
        problem = _problem(e)
        # Results of finished jobs are still reported.
        if read(folder):
            return str(problem)
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise problem from problem.__cause__
    return ""


def _problem(error: Exception) -> Exception:
    """Returns the error if it is printed in one line, or else a SweepError with its first line."""

    if isinstance(error, (Fp8cfgError, HydraException, OmegaConfBaseException)):
        return error
    first = (str(error).strip().splitlines() or ["no reason given"])[0]
    return SweepError(f"the sweep failed: {type(error).__name__}: {first}")
