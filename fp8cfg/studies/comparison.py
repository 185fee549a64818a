"""Comparison of runs: keys, losses at equal steps, speed, memory and FP8 share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path
from typing import Any

from fp8cfg.run_folder.file_names import COVERAGE
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.metrics_file import to_json_value
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, printable
from fp8cfg.schema.keys import short, shown
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe, fields
from fp8cfg.schema.tables import fits, size, table, wrapped
from fp8cfg.studies.run_data import (
    RunData,
    data_digest,
    newest_checkpoint,
    read_json,
    read_run,
)
from fp8cfg.studies.runs import folder_size, median_speed

TOLERANCE = 0.01
"""Relative difference of two losses. The first step beyond it is reported."""
LOCATIONS = ("name", "log.dir", "log.folder", "log.resume")
"""Keys for the place of a run. They are not compared."""
BATCH_KEYS = ("data.*", "trainer.seed", "trainer.global_batch_size", "model.seq_length")
"""Keys that select the samples of a step."""
DATA_PLACES = ("data.name", "data.path", "data.tokenizer")
"""Keys that may differ for equal data, by its digest."""
WITHOUT_EFFECT = (*LOCATIONS, "log.*", "checkpoint.*", "trainer.max_steps", "trainer.timeout.*")
"""Keys without effect on earlier losses. A resume that changes only these gets no note."""


@dataclass(frozen=True)
class Gap:
    """Losses of a run minus losses of the reference, at common steps.

    Attributes:
        steps: Number of common steps.
        mean: Mean difference. Negative if the run has lower losses.
        largest: Largest absolute difference.
        largest_step: Step of the largest difference.
        first_difference: First step with different bits. None if all losses are equal.
        first_beyond: First step with a relative difference above TOLERANCE, or None.
    """

    steps: int
    mean: float
    largest: float
    largest_step: int
    first_difference: int | None
    first_beyond: int | None


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison. Numbers are None if the run has not measured them.

    Attributes:
        folder: The run folder.
        state: See `read_run`.
        steps: Optimizer steps done.
        max_steps: Optimizer steps planned.
        loss: Last training loss.
        val_loss: Last validation loss.
        tokens_per_second: Median speed of all ranks together, without the first step.
        memory: Peak memory of the first rank in bytes.
        checkpoint: Size of the newest checkpoint in bytes.
        fp8_share: Share of the matmul FLOPs in FP8, as observed in the first step.
        loss_gap: Gap of the training losses to the first run. None for the first run, and without
            common steps.
        val_gap: Gap of the validation losses.
    """

    folder: Path
    state: str
    steps: int
    max_steps: int
    loss: float | None
    val_loss: float | None
    tokens_per_second: float | None
    memory: int | None
    checkpoint: int | None
    fp8_share: float | None
    loss_gap: Gap | None = None
    val_gap: Gap | None = None


@dataclass(frozen=True)
class Comparison:
    """Result of `compare_runs`. Prints as tables.

    Attributes:
        runs: The runs. The first one is the reference.
        keys: Different keys by short name, with the value of each run.
        notes: Limits of the comparison, such as different seeds.
    """

    runs: list[ComparedRun]
    keys: dict[str, list[Any]]
    notes: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Returns plain data for JSON. NaN and infinities are strings such as "NaN"."""
        data: dict[str, Any] = _plain(asdict(self))
        return data

    def __str__(self) -> str:
        return _text(self)


def compare_runs(*runs: str | Path | RunData) -> Comparison:
    """Compares runs with the first one. The runs may still train, because nothing is locked.

    Args:
        runs: Two or more run folders, or runs from `fp8cfg.read_run`.

    Returns:
        Different keys, gaps of the losses, speed and memory. Prints as tables.

    Raises:
        ConfigError: There are fewer than two runs, or a recipe is not valid.
        RunFolderError: A folder is not a run folder, or its metrics are damaged.
    """
    if len(runs) < 2:
        raise ConfigError("compare_runs: needs two or more run folders")
    data = [run if isinstance(run, RunData) else read_run(run) for run in runs]
    reference = data[0]
    compared = [_measure(run, reference) for run in data]
    return Comparison(compared, _different_keys([run.recipe for run in data]), _notes(data))


# ------------------------------------------------------------------------------------------------
# Values


def _measure(run: RunData, reference: RunData) -> ComparedRun:
    """Returns the measurements of a run, and its gaps to the reference."""
    # Rows of evaluations and saves have no loss.
    rows = [row for row in run.rows if "loss" in row]
    val_losses = run.series("val_loss")[1]
    files = RunFiles.at(run.folder)
    checkpoint = newest_checkpoint(files)[1]
    gaps: dict[str, Gap | None] = {}
    if run is not reference:
        gaps = {
            "loss_gap": gap_between(reference.series("loss"), run.series("loss")),
            "val_gap": gap_between(reference.series("val_loss"), run.series("val_loss")),
        }
    return ComparedRun(
        run.folder,
        run.state,
        run.steps,
        run.recipe.trainer.max_steps,
        rows[-1]["loss"] if rows else None,
        val_losses[-1] if val_losses else None,
        median_speed(rows),
        max((row["memory"] for row in rows if "memory" in row), default=None),
        folder_size(checkpoint) if checkpoint else None,
        read_json(files, COVERAGE).get("share_of_matmul_flops"),
        **gaps,
    )


def gap_between(
    reference: tuple[Sequence[int], Sequence[float]], run: tuple[Sequence[int], Sequence[float]]
) -> Gap | None:
    """Compares two series at common steps.

    Args:
        reference: Steps and values, as `RunData.series` returns them.
        run: Steps and values of the run.

    Returns:
        The gap. None without common steps. A non-finite value is beyond the tolerance, unless both
        runs have the same value. It makes the mean and the largest difference non-finite.
    """
    expected = dict(zip(*reference, strict=True))
    differences: dict[int, float] = {}
    first_difference = None
    first_beyond = None
    for step, value in zip(*run, strict=True):
        if step not in expected:
            continue
        # Equal values by their text: two equal infinities have no difference, but inf - inf is
        # NaN. Two NaN are equal too.
        is_equal = value.hex() == expected[step].hex()
        difference = 0.0 if is_equal else value - expected[step]
        differences[step] = difference
        if not is_equal and first_difference is None:
            first_difference = step
        is_beyond = not math.isfinite(difference)
        is_beyond = is_beyond or abs(difference) > TOLERANCE * abs(expected[step])
        if is_beyond and first_beyond is None:
            first_beyond = step
    if not differences:
        return None
    # NaN first: max() would skip it.
    largest_step = max(
        differences, key=lambda step: (math.isnan(differences[step]), abs(differences[step]))
    )
    return Gap(
        len(differences),
        sum(differences.values()) / len(differences),
        abs(differences[largest_step]),
        largest_step,
        first_difference,
        first_beyond,
    )


def _different_keys(recipes: Sequence[Recipe]) -> dict[str, list[Any]]:
    """Returns the keys with different values, in the order of the schema."""
    # Short and full names: `diff` has short ones, `fields` full ones.
    different = {key for recipe in recipes[1:] for key in recipes[0].diff(recipe)}
    values = {}
    for name in fields():
        key = short(name)
        if key in different and key not in LOCATIONS:
            values[key] = [attrgetter(name)(recipe) for recipe in recipes]
    return values


# ------------------------------------------------------------------------------------------------
# Notes


def _notes(runs: Sequence[RunData]) -> list[str]:
    """Returns the limits of the comparison."""
    notes = []
    reference = runs[0]
    for run in runs[1:]:
        notes += _batch_notes(reference, run)
        if run.steps != reference.steps:
            common = min(run.steps, reference.steps)
            notes.append(
                f"{run.folder} has {run.steps} steps and {reference.folder} has"
                f" {reference.steps}; losses are compared up to step {common}"
            )
    for run in runs:
        notes += _state_notes(run) + _skip_notes(run) + _recipe_notes(run)
    return [printable(note) for note in notes]


def _batch_notes(reference: RunData, run: RunData) -> list[str]:
    """Returns a note if the steps of two runs trained on different samples."""
    # Equal digests: another path or tokenizer file makes no difference. Without a checkpoint the
    # digest is unknown, so the keys decide.
    digests = [data_digest(reference), data_digest(run)]
    is_same_data = None not in digests and digests[0] == digests[1]
    reasons = []
    for key, (a, b) in reference.recipe.diff(run.recipe).items():
        if is_same_data and key in DATA_PLACES:
            continue
        if any(fnmatch(key, pattern) for pattern in BATCH_KEYS):
            reasons.append(f"{key}={shown(b)}, not {shown(a)}")
    if not reasons and None not in digests and not is_same_data:
        reasons.append("the data had other contents")
    if not reasons:
        return []
    return [
        f"{run.folder}: its losses are not matched, since a step trains on other samples"
        f" ({'; '.join(reasons)}); the gaps include this difference"
    ]


def _state_notes(run: RunData) -> list[str]:
    """Returns a note about an unfinished or failed run."""
    if run.state == "done":
        return []
    reason = f": {run.message}" if run.message else ""
    return [f"{run.folder}: {run.state} at step {run.steps}{reason}"]


def _skip_notes(run: RunData) -> list[str]:
    """Returns a note about steps without an update. Their losses are compared too."""
    skipped = run.skipped_steps
    if not skipped:
        return []
    count = "1 step" if len(skipped) == 1 else f"{len(skipped)} steps"
    return [f"{run.folder}: the optimizer skipped {count}, the last one is step {skipped[-1]}"]


def _recipe_notes(run: RunData) -> list[str]:
    """Returns a note for each earlier recipe with effects on the losses.

    The table of keys shows only the last recipe of a run.
    """
    try:
        past = RunFolder.reading(run.folder).past_recipes()
    except (Fp8cfgError, OSError) as error:
        return [f"{run.folder}: its earlier recipes are not compared ({error})"]
    notes = []
    for step, recipe in past:
        values = []
        for key, (old_value, _) in recipe.diff(run.recipe).items():
            if not any(fnmatch(key, pattern) for pattern in WITHOUT_EFFECT):
                values.append(f"{key}={shown(old_value)}")
        if values:
            notes.append(
                f"{run.folder}: resumed with changes; up to step {step} it had {', '.join(values)}"
            )
    return notes


# ------------------------------------------------------------------------------------------------
# Text


def _text(comparison: Comparison) -> str:
    """Formats a comparison as tables of 80 columns."""
    runs = comparison.runs
    labels = [_label(index) for index in range(len(runs))]
    names = []
    for label, run in zip(labels, runs, strict=True):
        reference = "  (reference)" if run is runs[0] else ""
        names.append(f"{label}  {printable(str(run.folder))}{reference}")
    parts = ["\n".join(names), _key_table(comparison.keys, labels), _run_table(runs, labels)]
    for title, gaps in (
        ("training losses", [run.loss_gap for run in runs]),
        ("validation losses", [run.val_gap for run in runs]),
    ):
        if any(gaps):
            parts.append(_gap_table(title, gaps, labels))
    if not any(run.loss_gap for run in runs):
        parts.append("no step is common, so no losses are compared")
    if comparison.notes:
        notes = [wrapped(f"note: {note}", more="  ") for note in comparison.notes]
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _key_table(keys: Mapping[str, Sequence[Any]], labels: Sequence[str]) -> str:
    """Formats the different keys. Each run has a column if all columns fit."""
    if not keys:
        return "all keys are equal"
    rows = [[key, *map(shown, values)] for key, values in keys.items()]
    header = ["key", *labels]
    if fits(header, rows):
        return table(header, rows)
    # Long values such as paths: a line for each run instead.
    stacked = ["key"]
    for key, *values in rows:
        stacked.append(key)
        for label, value in zip(labels, values, strict=True):
            stacked.append(wrapped(value, f"  {label}  ", "     "))
    return "\n".join(stacked)


def _run_table(runs: Sequence[ComparedRun], labels: Sequence[str]) -> str:
    """Formats the measurements of the runs."""
    header = ["", "state", "step", "loss", "val loss", "tokens/s", "memory", "checkpoint", "FP8"]
    rows = []
    for label, run in zip(labels, runs, strict=True):
        rows.append(
            [
                label,
                run.state,
                f"{run.steps}/{run.max_steps}",
                _number(run.loss, ".4f"),
                _number(run.val_loss, ".4f"),
                _number(run.tokens_per_second, ",.0f"),
                _size(run.memory),
                _size(run.checkpoint),
                _number(run.fp8_share, ".1%"),
            ]
        )
    return table(header, rows, right=range(2, len(header)))


def _gap_table(title: str, gaps: Sequence[Gap | None], labels: Sequence[str]) -> str:
    """Formats the gaps of one kind of loss."""
    header = ["", "steps", "mean", "largest", "at step", "differs from", "beyond 1% from"]
    rows = []
    for label, gap in zip(labels, gaps, strict=True):
        if gap is not None:
            rows.append(
                [
                    label,
                    str(gap.steps),
                    f"{gap.mean:+.4g}",
                    f"{gap.largest:.4g}",
                    # Equal losses have no step with a largest difference.
                    str(gap.largest_step) if gap.first_difference else "-",
                    _step(gap.first_difference),
                    _step(gap.first_beyond),
                ]
            )
    heading = f"{title} minus those of {labels[0]}, at equal steps"
    return f"{heading}\n{table(header, rows, right=range(1, len(header)))}"


def _label(index: int) -> str:
    """Returns the label of a run: A to Z, then numbers from 27."""
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def _number(value: float | None, form: str) -> str:
    """Formats a measurement, "-" without one."""
    if value is None:
        return "-"
    return format(value, form)


def _size(num_bytes: int | None) -> str:
    """Formats a number of bytes, "-" without one."""
    if num_bytes is None:
        return "-"
    return size(num_bytes)


def _step(step: int | None) -> str:
    """Formats the first step of a difference."""
    if step is None:
        return "never"
    return f"step {step}"


def _plain(value: Any) -> Any:
    """Converts a value for JSON, also within dicts and lists."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, Node):
        return _plain(value.model_dump())
    return str(value) if isinstance(value, Path) else to_json_value(value)
