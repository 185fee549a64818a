"""Comparison of runs: keys, losses at equal steps, speed, memory and FP8 share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path
from typing import Any

from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.metrics_file import writable
from fp8cfg.run_folder.run_folder import COVERAGE, RunFolder
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, printable
from fp8cfg.schema.keys import short, shown
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe, fields
from fp8cfg.schema.tables import fits, size, table, wrapped
from fp8cfg.studies.run_data import RunData, newest_checkpoint, read_run
from fp8cfg.studies.runs import folder_size, median_speed, read_json

TOLERANCE = 0.01
"""Relative difference of two losses that is reported with its first step."""
LOCATIONS = ("name", "log.dir", "log.folder", "log.resume")
"""Keys that say where a run is. They are not compared."""
BATCH_KEYS = ("data.*", "trainer.seed", "trainer.global_batch_size", "model.seq_length")
"""Keys that decide which samples a step trains on."""
DATA_PLACES = ("data.name", "data.path", "data.tokenizer")
"""Keys that may differ for the same data."""
WITHOUT_EFFECT = (*LOCATIONS, "log.*", "checkpoint.*", "trainer.max_steps", "trainer.timeout.*")
"""Keys that a resume may change without another loss at the steps before."""


@dataclass(frozen=True)
class Gap:
    """Losses of a run minus losses of the reference, at steps that both have.

    Attributes:
        steps: Number of compared steps.
        mean: Mean difference. Negative if the run has the lower losses.
        largest: Largest absolute difference.
        largest_step: Its step.
        first_difference: First step with other bits. None if all losses are equal.
        first_beyond: First step with a relative difference of more than TOLERANCE, or None.
    """

    steps: int
    mean: float
    largest: float
    largest_step: int
    first_difference: int | None
    first_beyond: int | None


@dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison. Numbers are None if the run has not measured them.

    Attributes:
        folder: The run folder.
        state: See `read_run`.
        steps: Optimizer steps done.
        max_steps: Optimizer steps planned.
        loss: Last training loss.
        val_loss: Last validation loss.
        tokens_per_second: Median after the first step, on all ranks together.
        memory: Peak memory of the first rank in bytes.
        checkpoint: Size of the newest checkpoint in bytes.
        fp8_share: Share of the matmul FLOPs that ran in FP8, observed in the first step.
        loss_gap: Training losses compared with the first run. None for the first run, and if no
            step is common.
        val_gap: The same for validation losses.
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
        keys: Values of the keys that differ, by short name, one for each run.
        notes: What to know about the comparison, such as different seeds.
    """

    runs: list[ComparedRun]
    keys: dict[str, list[Any]]
    notes: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Returns plain data for JSON. Numbers that JSON doesn't have are strings: "NaN"."""
        data: dict[str, Any] = _plain(asdict(self))
        return data

    def __str__(self) -> str:
        return _text(self)


def compare_runs(*runs: str | Path | RunData) -> Comparison:
    """Compares runs with the first one. Does not lock them, so they may be running.

    Args:
        runs: Two or more run folders, or runs from `fp8cfg.read_run`.

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
    """Returns a run's measures, and its gaps to the reference."""
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
        The gap. None if no step is common. A value that is not finite counts as beyond the
        tolerance, unless both are the same; mean and largest are NaN or infinite then.
    """
    expected = dict(zip(*reference, strict=True))
    differences: dict[int, float] = {}
    first_difference = None
    first_beyond = None
    for step, value in zip(*run, strict=True):
        if step not in expected:
            continue
        # Two equal infinities have no difference, but inf - inf is NaN.
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
    """Returns the values of the keys in which a recipe differs from the first, in schema order."""
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
    """Returns what a reader has to know about the comparison."""
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
        notes += _state_notes(run) + _recipe_notes(run)
    return [printable(note) for note in notes]


def _batch_notes(reference: RunData, run: RunData) -> list[str]:
    """Returns a note if the steps of two runs trained on different samples."""
    digests = [_data_digest(reference), _data_digest(run)]
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


def _data_digest(run: RunData) -> str | None:
    """Returns the sha256 of the training data, from the newest checkpoint, or None."""
    checkpoint = newest_checkpoint(RunFiles.at(run.folder))[1]
    if checkpoint is None:
        return None
    try:
        data = read_json(RunFiles.at(checkpoint), "state.json").get("data")
    except OSError:
        return None
    digest = data.get("corpus_sha256") if isinstance(data, dict) else None
    return digest if isinstance(digest, str) else None


def _state_notes(run: RunData) -> list[str]:
    """Returns a note about a run that is not done."""
    if run.state == "done":
        return []
    reason = f": {run.message}" if run.message else ""
    return [f"{run.folder}: {run.state} at step {run.steps}{reason}"]


def _recipe_notes(run: RunData) -> list[str]:
    """Returns a note for each earlier recipe of a run that a resume has changed."""
    try:
        past = RunFolder.reading(run.folder).past_recipes()
    except (Fp8cfgError, OSError) as error:
        return [f"{run.folder}: its earlier recipes are not compared ({error})"]
    notes = []
    for step, recipe in past:
        values = []
        for key, (before, _) in recipe.diff(run.recipe).items():
            if not any(fnmatch(key, pattern) for pattern in WITHOUT_EFFECT):
                values.append(f"{key}={shown(before)}")
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
    """Formats the keys that differ, one value per column if they fit."""
    if not keys:
        return "all keys are equal"
    rows = [[key, *map(shown, values)] for key, values in keys.items()]
    header = ["key", *labels]
    if fits(header, rows):
        return table(header, rows)
    stacked = ["key"]
    for key, *values in rows:
        stacked.append(key)
        for label, value in zip(labels, values, strict=True):
            stacked.append(wrapped(value, f"  {label}  ", "     "))
    return "\n".join(stacked)


def _run_table(runs: Sequence[ComparedRun], labels: Sequence[str]) -> str:
    """Formats the measures of the runs."""
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
                "-" if run.memory is None else size(run.memory),
                "-" if run.checkpoint is None else size(run.checkpoint),
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
                    str(gap.largest_step) if gap.first_difference else "-",
                    _step(gap.first_difference),
                    _step(gap.first_beyond),
                ]
            )
    heading = f"{title} minus those of {labels[0]}, at equal steps"
    return f"{heading}\n{table(header, rows, right=range(1, len(header)))}"


def _label(index: int) -> str:
    """Returns A to Z, and numbers for more runs."""
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _step(step: int | None) -> str:
    return "never" if step is None else f"step {step}"


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, Node):
        return _plain(value.model_dump())
    return str(value) if isinstance(value, Path) else writable(value)
