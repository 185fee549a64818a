"""Summaries of runs for `fp8cfg runs`. Reads a folder in milliseconds, and loads no torch."""

from __future__ import annotations

import json
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
from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.run_folder.run_folder import (
    COVERAGE,
    ENVIRONMENT,
    METRICS,
    RECIPE,
    STATUS,
    RunFolder,
)
from fp8cfg.run_folder.status import STATES
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, refuse_if, suggest
from fp8cfg.schema.keys import PLUGIN
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import parse_yaml, plain_text
from fp8cfg.studies.run_data import find_runs, open_run, read_state

DAMAGED = "damaged"
"""State of a folder that can't be read."""
WHOLE: dict[str, Any] = {
    "name": str,
    "data.name": str,
    "data.path": str | None,
    "trainer.max_steps": int,
    f"{PLUGIN}.backend": str,
    f"{PLUGIN}.compute": str,
}
"""Keys of a whole recipe, as runs write it, that a summary needs; with their types."""
SPEED_ROWS = 20
"""Number of rows at the end of metrics.jsonl that give the speed."""
_LOSS = re.compile(rb'"loss": "?([-+.\w]+)')
_VAL_LOSS = re.compile(rb'"val_loss": "?([-+.\w]+)')


@dataclass(frozen=True)
class RunSummary:
    """One row of `fp8cfg runs`. Numbers are None if the run has not measured them.

    Attributes:
        folder: The run folder.
        state: "running", "done", "stopped", "diverged", "crashed" or "damaged".
        message: How the run ended, or why its folder can't be read.
        recipe: Name of the recipe.
        precision: Nearest precision preset. It ends in + if the recipe changes keys of it.
        backend: Backend of the FP8 layers.
        ranks: Number of ranks when the run began.
        data: Name of the data, or the file.
        steps: Optimizer steps done.
        max_steps: Optimizer steps planned.
        loss: Last training loss.
        best_loss: Lowest training loss.
        val_loss: Last validation loss.
        tokens_per_second: Median of the last steps, on all ranks together.
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
        """Returns plain data for JSON. Numbers that JSON doesn't have are strings: "NaN"."""
        values = asdict(self) | {"folder": str(self.folder)}
        return {name: metrics_file.writable(value) for name, value in values.items()}


@dataclass(frozen=True)
class Condition:
    """A condition of `--where`, such as precision=bf16_fp8.

    Attributes:
        key: "state", a group such as "precision", or a full key.
        value: The value. Lists stay lists.
    """

    key: str
    value: Any


def list_runs(folder: str | Path, where: Iterable[str] = ()) -> list[RunSummary]:
    """Summarizes all runs in a folder, newest first.

    Args:
        folder: Where to search. May be a run folder itself.
        where: Conditions, such as "precision=bf16_fp8", "fp8.margin=1" or "state=running". Several
            conditions on one key are alternatives.

    Raises:
        RunFolderError: There is no such folder.
        ConfigError: A condition has an unknown key or an invalid value.
    """
    conditions = _read_conditions(where)
    summaries = []
    for path in find_runs(folder):
        summary, values = _summarize(path)
        if _matches(conditions, summary, values):
            summaries.append(summary)
    return sorted(summaries, key=lambda summary: summary.updated, reverse=True)


def summarize(folder: str | Path) -> RunSummary:
    """Summarizes one run. A folder that can't be read has the state "damaged"."""
    return _summarize(Path(folder))[0]


def _summarize(folder: Path) -> tuple[RunSummary, dict[str, Any]]:
    """Returns the summary of a run, and the values of its recipe by full key."""
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
    # A row may be valid JSON with a text for a number.
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        message = f"{folder}: cannot be read ({error})"
    return replace(summary, message=message), values


def _with_recipe(summary: RunSummary, files: RunFiles, values: Mapping[str, Any]) -> RunSummary:
    """Returns the summary with the fields that the recipe, the plan and the machine decide."""
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
    """Returns the summary with the state and the metrics. Raises ConfigError or OSError."""
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
    """Returns the recipe of a run by full key, as YAML has it: without tuples.

    A whole recipe, as runs write it, is not composed again: that takes longer than all the rest.

    Raises:
        ConfigError: recipe.yaml is not valid.
        RunFolderError: recipe.yaml can't be read.
    """
    path = run.recipe
    values = flat_data(parse_yaml(plain_text(run.files.read(RECIPE), path), str(path)))
    if not all(isinstance(values.get(key, ...), kind) for key, kind in WHOLE.items()):
        values = flat(run.read_recipe())
    # A folder of an older version lacks newer keys.
    return {key: _as_list(value) for key, value in (_defaults() | values).items()}


@cache
def _defaults() -> dict[str, Any]:
    return flat(Recipe())


def precision_name(values: Mapping[str, Any]) -> str:
    """Returns the nearest precision preset, with a + if the recipe changes keys of it."""
    comparable = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
        if key.startswith(PLUGIN)
    }
    name, differing = nearest_preset(comparable)
    return name + "+" * bool(differing)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# ------------------------------------------------------------------------------------------------
# Conditions


def _read_conditions(where: Iterable[str]) -> list[Condition]:
    """Parses conditions. Raises ConfigError with a line for each wrong one."""
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
    """Parses one condition. A mapping such as fp8={margin: 1} has several."""
    key, _, value = text.partition("=")
    if key == "state":
        states = [*STATES, DAMAGED]
        if value not in states:
            raise ConfigError(f"state={value}: no such state{suggest(value, states)}")
        return [Condition(key, value)]
    override = parse_argument(text, Library())
    if override.group:
        return [Condition(override.group, override.name)]
    return [Condition(name, _as_list(wanted)) for name, wanted in override.values.items()]


def _matches(
    conditions: Iterable[Condition], summary: RunSummary, values: Mapping[str, Any]
) -> bool:
    """Whether a run meets one condition of each key."""
    met: dict[str, bool] = {}
    for condition in conditions:
        is_met = _is_met(condition, summary, values)
        met[condition.key] = met.get(condition.key, False) or is_met
    return all(met.values())


def _is_met(condition: Condition, summary: RunSummary, values: Mapping[str, Any]) -> bool:
    """Whether a run meets a condition. A folder without a valid recipe has a state only."""
    key, value = condition.key, condition.value
    if key == "state":
        return bool(summary.state == value)
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
    # The recipe may leave the choice to fp8cfg.
    if key == f"{PLUGIN}.backend" and summary.backend == value:
        return True
    return bool(values.get(key) == value)


def _task(values: Mapping[str, Any]) -> str:
    """Returns the task of a recipe, see `Recipe.task`."""
    if values["lora.enabled"]:
        return "lora"
    return "sft" if values["data.name"] == "chat" else "pretrain"


# ------------------------------------------------------------------------------------------------
# Files


def _read_metrics(files: RunFiles) -> bytes:
    """Returns the complete lines of metrics.jsonl. Empty without the file."""
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
    # The last one is empty: data end with a line break.
    *lines, _ = data.rsplit(b"\n", 2 * SPEED_ROWS)[-2 * SPEED_ROWS :]
    first = data.count(b"\n") - len(lines) + 1
    for number, line in enumerate(lines, first):
        try:
            row = metrics_file.parse(f"{path}:{number}", line)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if "loss" in row:
            rows.append(row)
    return rows[-SPEED_ROWS:]


def _values(pattern: re.Pattern[bytes], data: bytes) -> list[float]:
    """Returns all values of a metric, without parsing each line as JSON."""
    return list(map(float, pattern.findall(data)))


def median_speed(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Returns the median of tokens per second. The first step warms up and does not count."""
    speeds = []
    for row in rows:
        if "tokens_per_second" in row:
            speeds.append(row["tokens_per_second"])
        elif "seconds" in row:  # of an older version
            speeds.append(row["tokens"] / row["step"] / row["seconds"])
    return statistics.median(speeds[1:] or speeds) if speeds else None


def _backend(files: RunFiles) -> str:
    """Returns the backend that ran, or "" before the first step."""
    choice = read_json(files, COVERAGE).get("backend")
    return str(choice.get("backend", "")) if isinstance(choice, dict) else ""


def read_json(files: RunFiles, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file, empty if it can't be read."""
    try:
        data = json.loads(files.read(name))
    except (OSError, ValueError, RecursionError, StrangeFile):
        return {}
    return data if isinstance(data, dict) else {}


def _last_write(files: RunFiles) -> float:
    """Returns when the run wrote last, in Unix seconds."""
    times = [0.0]
    for name in (METRICS, STATUS, RECIPE):
        try:
            times.append(os.stat(name, dir_fd=files.descriptor, follow_symlinks=False).st_mtime)
        except OSError:
            continue
    return max(times)


def folder_size(folder: Path) -> int:
    """Returns the size of all files in a folder, in bytes."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:  # a checkpoint that is deleted at the moment
                continue
    return total
