"""Summaries of runs for `fp8cfg runs`.

A folder takes milliseconds, because users list a thousand runs: recipes are not composed again,
losses are found by regular expressions, and torch is not imported.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.overrides import parse_argument
from fp8cfg.composition.recipe_yaml import flat, flat_data
from fp8cfg.report.recipe_export import nearest_preset
from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.file_names import COVERAGE, ENVIRONMENT, METRICS, RECIPE, STATUS
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.run_folder.status import STATES
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, refuse_if, suggest
from fp8cfg.schema.keys import PLUGIN
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import parse_yaml, plain_text
from fp8cfg.studies.run_data import find_runs, open_run, read_json, read_state

DAMAGED = "damaged"
"""State of an unreadable folder."""
WHOLE: dict[str, Any] = {
    "name": str,
    "data.name": str,
    "data.path": str | None,
    "trainer.max_steps": int,
    f"{PLUGIN}.backend": str,
    f"{PLUGIN}.compute": str,
}
"""Keys of a complete recipe.yaml that a summary needs, with their types.

A file without them is incomplete and has to be composed."""
SPEED_ROWS = 20
"""Number of last rows of metrics.jsonl for the speed: the current speed, not the average."""
_LOSS = re.compile(rb'"loss": "?([-+.\w]+)')
_VAL_LOSS = re.compile(rb'"val_loss": "?([-+.\w]+)')


@dataclass(frozen=True)
class RunSummary:
    """One row of `fp8cfg runs`. Numbers are None if the run has not measured them.

    Attributes:
        folder: The run folder.
        state: "running", "done", "stopped", "diverged", "crashed" or "damaged".
        message: A line on the end of the run, or the error of an unreadable folder.
        recipe: Name of the recipe.
        precision: Nearest precision preset, with a + if the recipe changes some of its keys.
        backend: Backend of the FP8 layers.
        ranks: Number of ranks at the start of the run.
        data: Name of the data, or of its file.
        steps: Optimizer steps done.
        max_steps: Optimizer steps planned.
        loss: Last training loss.
        best_loss: Lowest training loss.
        val_loss: Last validation loss.
        tokens_per_second: Median speed of the last steps, of all ranks together.
        updated: Time of the last write, in Unix seconds.
        size: Size of the folder in bytes, with checkpoints.
    """

    folder: Path
    state: str
    message: str = ""
    recipe: str = ""
    precision: str = ""
    backend: str = ""
    ranks: int | None = None
    data: str = ""
    steps: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    best_loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    updated: float = 0.0
    size: int = 0

    def as_data(self) -> dict[str, Any]:
        """Returns plain data for JSON. NaN and infinities are strings such as "NaN"."""
        values = asdict(self) | {"folder": str(self.folder)}
        return {name: metrics_file.to_json_value(value) for name, value in values.items()}


@dataclass(frozen=True)
class Condition:
    """A condition of `--where`, such as precision=bf16_fp8.

    Attributes:
        key: "state", a group such as "precision", or a full key.
        value: The value. Lists are lists, not tuples as in recipes.
    """

    key: str
    value: Any


def list_runs(folder: str | Path, where: Iterable[str] = ()) -> list[RunSummary]:
    """Summarizes all runs in a folder, newest first.

    Args:
        folder: Folder to search. May be a run folder itself.
        where: Conditions, such as "precision=bf16_fp8", "fp8.margin=1" or "state=running". Several
            conditions on one key are alternatives.

    Returns:
        The summaries. An unreadable folder is in the list too, with the state "damaged".

    Raises:
        RunFolderError: The folder does not exist.
        ConfigError: A condition has an unknown key or an invalid value.
    """
    conditions = _read_conditions(where)
    summaries = []
    for path in find_runs(folder):
        summary, values = _summarize(path)
        if _matches(conditions, summary, values):
            summaries.append(summary)
    return sorted(summaries, key=lambda summary: summary.updated, reverse=True)


def _summarize(folder: Path) -> tuple[RunSummary, dict[str, Any]]:
    """Returns the summary of a run, and the values of its recipe by full key."""
    # Filled field by field: a damaged folder shows all fields up to the error.
    summary = RunSummary(folder, DAMAGED)
    values: dict[str, Any] = {}
    try:
        run = open_run(folder)
        summary = replace(summary, updated=_last_write(run.files), size=folder_size(folder))
        values = recipe_values(run)
        summary = _with_recipe(summary, run.files, values)
        return _with_metrics(summary, run), values
    except (Fp8cfgError, OSError) as error:
        message = str(error).partition("\n")[0]
    # A row may be valid JSON with text in place of a number.
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        message = f"{folder}: cannot be read ({error})"
    return replace(summary, message=message), values


def _with_recipe(summary: RunSummary, files: RunFiles, values: Mapping[str, Any]) -> RunSummary:
    """Returns the summary with the fields from recipe, coverage and environment."""
    # The backend of the coverage is the chosen one. The recipe may have backend=auto.
    ranks = read_json(files, ENVIRONMENT).get("ranks")
    return replace(
        summary,
        recipe=values["name"],
        precision=precision_name(values),
        backend=_backend(files) or values[f"{PLUGIN}.backend"],
        ranks=ranks if isinstance(ranks, int) else None,
        data=Path(values["data.path"] or values["data.name"]).name,
        max_steps=values["trainer.max_steps"],
    )


def _with_metrics(summary: RunSummary, run: RunFolder) -> RunSummary:
    """Returns the summary with state and metrics. Raises ConfigError or OSError."""
    data = _read_metrics(run.files)
    last_rows = _last_rows(run, data)
    last = last_rows[-1] if last_rows else {}
    finite = [loss for loss in _values(_LOSS, data) if math.isfinite(loss)]
    val_losses = _values(_VAL_LOSS, data)
    state, status = read_state(run.files, last, summary.max_steps or 0)
    return replace(
        summary,
        state=state,
        message=status.message if status else "",
        steps=last.get("step", 0),
        loss=last.get("loss"),
        best_loss=min(finite, default=None),
        val_loss=val_losses[-1] if val_losses else None,
        tokens_per_second=median_speed(last_rows),
    )


# ------------------------------------------------------------------------------------------------
# Recipe


def recipe_values(run: RunFolder) -> dict[str, Any]:
    """Returns the values of a run's recipe by full key, with lists in place of tuples.

    Raises:
        ConfigError: recipe.yaml is not valid.
        RunFolderError: recipe.yaml can't be read.
    """
    path = run.recipe
    # Runs write complete recipes. Composing one again would take longer than the rest of a summary.
    values = flat_data(parse_yaml(plain_text(run.files.read(RECIPE), path), str(path)))
    if not all(isinstance(values.get(key, ...), kind) for key, kind in WHOLE.items()):
        values = flat(run.read_recipe())
    # A folder of an older version has no newer keys.
    return {key: _as_list(value) for key, value in (_defaults() | values).items()}


@cache
def _defaults() -> dict[str, Any]:
    """Returns the defaults of the schema by full key."""
    return flat(Recipe())


def precision_name(values: Mapping[str, Any]) -> str:
    """Returns the nearest precision preset, with a + if the recipe changes some of its keys.

    Args:
        values: Values of the recipe by full key.
    """
    # Presets have tuples, YAML has lists.
    comparable = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
        if key.startswith(PLUGIN)
    }
    name, differing = nearest_preset(comparable)
    return name + "+" * bool(differing)


def _as_list(value: Any) -> Any:
    """Converts a tuple to a list, as YAML has it."""
    return list(value) if isinstance(value, tuple) else value


# ------------------------------------------------------------------------------------------------
# Conditions


def _read_conditions(where: Iterable[str]) -> list[Condition]:
    """Parses conditions. Raises ConfigError with a line for each invalid condition."""
    conditions = []
    problems: list[str] = []
    for text in where:
        try:
            conditions += _parse_condition(text)
        except ConfigError as error:
            problems += error.problems
    refuse_if(problems)
    return conditions


def _parse_condition(text: str) -> list[Condition]:
    """Parses one condition. A mapping such as fp8={margin: 1} is one condition per key."""
    key, _, value = text.partition("=")
    if key == "state":
        states = [*STATES, DAMAGED]
        if value not in states:
            raise ConfigError(f"state={value}: no such state{suggest(value, states)}")
        return [Condition(key, value)]
    # As an override of the command line: keys are checked and values get their types.
    override = parse_argument(text, Library())
    if override.group:
        return [Condition(override.group, override.name)]
    return [Condition(name, _as_list(value)) for name, value in override.values.items()]


def _matches(
    conditions: Iterable[Condition], summary: RunSummary, values: Mapping[str, Any]
) -> bool:
    """Whether a run meets at least one condition of each key."""
    met: dict[str, bool] = {}
    for condition in conditions:
        is_met = _is_met(condition, summary, values)
        met[condition.key] = met.get(condition.key, False) or is_met
    return all(met.values())


def _is_met(condition: Condition, summary: RunSummary, values: Mapping[str, Any]) -> bool:
    """Whether a run meets a condition."""
    key, value = condition.key, condition.value
    if key == "state":
        return bool(summary.state == value)
    # Without a valid recipe, a folder has nothing but a state.
    if not values:
        return False
    if key == "recipe":
        return bool(summary.recipe == value)
    if key == "precision":
        return bool(summary.precision.removesuffix("+") == value)
    if key == "data":
        return bool(values["data.name"] == value)
    if key == "task":
        return bool(_task(values) == value)
    # Both the chosen backend and the recipe's value, such as auto, meet the condition.
    if key == f"{PLUGIN}.backend" and summary.backend == value:
        return True
    return bool(values.get(key) == value)


def _task(values: Mapping[str, Any]) -> str:
    """Returns the task of a recipe by its flat values. See `Recipe.task`."""
    if values["lora.enabled"]:
        return "lora"
    return "sft" if values["data.name"] == "chat" else "pretrain"


# ------------------------------------------------------------------------------------------------
# Files


def _read_metrics(files: RunFiles) -> bytes:
    """Returns the complete lines of metrics.jsonl, empty without the file."""
    try:
        with files.open(METRICS) as file:
            data = file.read()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _last_rows(run: RunFolder, data: bytes) -> list[dict[str, Any]]:
    """Returns the last rows of steps. Raises ConfigError if one of them is damaged."""
    rows = []
    path = run.metrics
    # Twice as many lines as rows, because rows of evaluations lie between. Data end with a line
    # break, so the last item of the split is empty.
    *lines, _ = data.rsplit(b"\n", 2 * SPEED_ROWS)[-2 * SPEED_ROWS :]
    first = data.count(b"\n") - len(lines) + 1
    for number, line in enumerate(lines, first):
        try:
            row = metrics_file.parse_line(f"{path}:{number}", line)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if "loss" in row:
            rows.append(row)
    return rows[-SPEED_ROWS:]


def _values(pattern: re.Pattern[bytes], data: bytes) -> list[float]:
    """Returns all values of a metric."""
    # Parsing each line as JSON takes many times longer.
    return list(map(float, pattern.findall(data)))


def median_speed(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Returns the median of tokens per second without the first row. None without a speed.

    Args:
        rows: Rows of metrics.jsonl.
    """
    # The first step compiles and warms up.
    speeds = []
    for row in rows:
        if "tokens_per_second" in row:
            speeds.append(row["tokens_per_second"])
        elif "seconds" in row:  # of an older version
            # "tokens" counts from the start of the run.
            speeds.append(row["tokens"] / row["step"] / row["seconds"])
    return statistics.median(speeds[1:] or speeds) if speeds else None


def _backend(files: RunFiles) -> str:
    """Returns the backend of the first step, or "" before it."""
    choice = read_json(files, COVERAGE).get("backend")
    return str(choice.get("backend", "")) if isinstance(choice, dict) else ""


def _last_write(files: RunFiles) -> float:
    """Returns the time of the last write of a run, in Unix seconds."""
    # Not the time of the folder: it does not change with a file in it.
    times = [0.0]
    for name in (METRICS, STATUS, RECIPE):
        try:
            times.append(os.stat(name, dir_fd=files.descriptor, follow_symlinks=False).st_mtime)
        except OSError:
            continue
    return max(times)


def folder_size(folder: Path) -> int:
    """Returns the size of all files in a folder in bytes. Does not follow links."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:  # a checkpoint that is deleted at the moment
                continue
    return total
