"""Report of one or several runs: one HTML page with curves, precision, memory and recipe.

reported_run.py reads the runs, report_figures.py draws curves and heat maps, page.py writes HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8cfg.composition.layers import Source, defaults
from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.planning.plan_report import PlanReport
from fp8cfg.run_folder.file_names import RECIPE
from fp8cfg.schema.keys import short, shown
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import size
from fp8cfg.studies import report_figures
from fp8cfg.studies.page import (
    Badge,
    Block,
    Facts,
    Fold,
    Section,
    Table,
    Tabs,
    Text,
    Value,
    check_page_path,
    plotly_script,
    write_page,
)
from fp8cfg.studies.report_figures import Curve
from fp8cfg.studies.reported_run import ReportedRun, read_runs, run_folders

TONES = {"done": "good", "running": "neutral", "stopped": "warning"}
"""Tone of the badge of a state. Other states are bad."""
STATS_KEY = "log.fp8_stats_every_n_steps"
"""Key to record the statistics of the heat maps."""
MEMORY_KINDS = {
    "masters": "master weights",
    "accumulation": "gradient sums",
    "FP8 copies": "FP8 weights, scales and amax histories",
    "to come": "freed before gradients exist",
}
"""Longer names for some kinds of planned memory. Other kinds have plain names."""


def write_report(
    runs: Sequence[str | Path] | str | Path,
    path: str | Path = "report.html",
    reference: str | Path | None = None,
) -> Path:
    """Writes a report of runs, as `fp8cfg report` does. Runs may still train.

    The report is one HTML file. It needs no server and no network.

    Args:
        runs: Run folders, or folders with run folders in them, such as a sweep.
        path: The HTML file. An older report is replaced.
        reference: The run to compare others with. Defaults to the first one.

    Returns:
        The path of the report.

    Raises:
        ConfigError: Plotly is not installed, a recipe is not valid, or `path` has another file.
        RunFolderError: A folder is not a run folder, or its files are damaged.
        NotWritable: The report cannot be written.
    """
    # First the quick checks: a long run takes some seconds to read.
    plotly_script()
    check_page_path(Path(path))
    reported = read_runs(run_folders(runs, reference))
    names = [run.name for run in reported]
    title = f"Run {names[0]}" if len(names) == 1 else f"{len(names)} runs"
    write_page(
        path,
        title,
        report_sections(reported),
        subtitle=_subtitle(reported),
        legend=names if len(names) > 1 else (),
    )
    return Path(path)


def report_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """Returns the sections of a report.

    Args:
        runs: The runs. The first one is the reference of the differences.
    """
    # A run keeps its index, and so its color, in all figures.
    curves = [Curve(i, run.name, run.data) for i, run in enumerate(runs)]
    sections = [
        Section("Overview", _overview(runs)),
        Section("Training", report_figures.training(curves)),
    ]
    if len(runs) > 1:
        sections.append(Section("Differences", report_figures.differences(curves)))
    sections += [
        Section("Precision", _precision(runs)),
        Section("FP8 tensors", _tensors(runs)),
        Section("Memory", _memory(runs, curves)),
        Section("Recipe", _recipe(runs)),
        Section("Environment", _environment(runs)),
    ]
    return sections


def _subtitle(runs: Sequence[ReportedRun]) -> str:
    """Returns the line below the title."""
    if len(runs) > 1:
        return f"Compared with {runs[0].name}"
    recipe = runs[0].data.recipe
    return f"{recipe.name}, {_precision_name(runs[0])}, {runs[0].data.folder}"


def _precision_name(run: ReportedRun) -> str:
    """Returns the precision in short, such as "bf16 with FP8 (delayed, hybrid)"."""
    precision = run.data.recipe.precision
    if not precision.fp8.enabled:
        return precision.compute
    return f"{precision.compute} with FP8 ({precision.fp8.scaling}, {precision.fp8.format})"


# Overview


def _overview(runs: Sequence[ReportedRun]) -> list[Block]:
    """Returns the key figures of the runs, and warnings about them."""
    blocks: list[Block] = []
    if len(runs) == 1:
        blocks.append(_facts(runs[0]))
    else:
        blocks.append(_overview_table(runs))
    for run in runs:
        if run.data.message and run.data.state not in ("done", "running"):
            blocks.append(Text(f"{run.name} {run.data.state}: {run.data.message}", "warning"))
        if not run.data.rows:
            blocks.append(Text(f"{run.name} has no steps yet.", "warning"))
        blocks += [Text(f"{run.name}: {line}", "warning") for line in _problems(run)]
    return blocks


def _facts(run: ReportedRun) -> Facts:
    """Returns the key figures of a single run. Missing ones are left out."""
    facts: dict[str, Value] = {
        "state": run.data.state,
        "steps": f"{run.data.steps:,} of {run.data.recipe.trainer.max_steps:,}",
        "training loss": _last(run, "loss"),
        "validation loss": _last(run, "val_loss"),
        "tokens/s": _speed(run),
        "peak memory": _peak(run),
        "FLOPs in FP8": _share(run),
    }
    return Facts([(name, value) for name, value in facts.items() if value is not None])


def _overview_table(runs: Sequence[ReportedRun]) -> Table:
    """Returns the key figures of several runs."""
    columns = (
        "run",
        "state",
        "precision",
        "steps",
        "training loss",
        "validation loss",
        "tokens/s",
        "peak memory",
        "FLOPs in FP8",
    )
    rows = [
        [
            run.name,
            Badge(run.data.state, TONES.get(run.data.state, "bad")),
            _precision_name(run),
            f"{run.data.steps:,}",
            _last(run, "loss"),
            _last(run, "val_loss"),
            _speed(run),
            _peak(run),
            _share(run),
        ]
        for run in runs
    ]
    return Table(columns, rows)


def _problems(run: ReportedRun) -> list[str]:
    """Returns warnings about non-finite losses and skipped steps."""
    lines = []
    steps, losses = run.data.series("loss")
    bad = [step for step, loss in zip(steps, losses, strict=True) if not np.isfinite(loss)]
    if bad:
        lines.append(f"The loss is not finite in {_count(bad)}, first in step {bad[0]:,}.")
    skipped = run.data.skipped_steps
    if skipped:
        lines.append(f"The optimizer skipped {_count(skipped)}, last step {skipped[-1]:,}.")
    return lines


def _count(steps: Sequence[int]) -> str:
    """Returns the number of steps in words."""
    return f"{len(steps):,} step" + "s" * (len(steps) != 1)


def _last(run: ReportedRun, name: str) -> str | None:
    """Formats the last value of a metric."""
    _, values = run.data.series(name)
    return f"{values[-1]:.4f}" if values else None


def _speed(run: ReportedRun) -> str | None:
    """Formats the median speed in tokens per second."""
    # Not the mean: the first steps compile and warm up.
    _, values = report_figures.tokens_per_second(run.data)
    return f"{np.median(values):,.0f}" if values else None


def _peak(run: ReportedRun) -> str | None:
    """Formats the measured peak memory."""
    _, values = run.data.series("memory")
    return size(max(values)) if values else None


def _share(run: ReportedRun) -> str | None:
    """Formats the share of matmul FLOPs in FP8."""
    share = (run.coverage or {}).get("share_of_matmul_flops")
    return f"{share:.1%}" if isinstance(share, float | int) else None


# Precision


def _precision(runs: Sequence[ReportedRun]) -> list[Block]:
    """Returns the formats of the GEMMs of each run."""
    # Runs with FP8 first, because only the first tab is visible at the start.
    ordered = sorted(runs, key=lambda run: not run.data.recipe.fp8.enabled)
    return _panels("Run", {run.name: _coverage(run) for run in ordered})


def _panels(label: str, panels: Mapping[str, Sequence[Block]]) -> list[Block]:
    """Returns tabs, or just the blocks if there is a single panel."""
    if len(panels) == 1:
        return list(next(iter(panels.values())))
    return [Tabs(label, panels)]


def _coverage(run: ReportedRun) -> list[Block]:
    """Returns the formats of the GEMMs of a run, as recorded in coverage.json."""
    coverage = run.coverage
    if coverage is None:
        return [Text("The run writes its coverage after the first step.")]
    # A row for equal layers of all Transformer layers: number of layers, and of weights.
    groups: dict[tuple[str, ...], list[int]] = {}
    for linear in coverage.get("linears", ()):
        name = _without_index(linear["name"])
        key = (name, linear["fprop"], linear["dgrad"], linear["wgrad"], linear["reason"])
        group = groups.setdefault(key, [0, 0])
        group[0] += 1
        group[1] += linear["in_features"] * linear["out_features"]
    total = sum(weights for _, weights in groups.values())
    rows = [
        [name, count, f"{weights / total:.1%}" if total else None, *formats, reason]
        for (name, *formats, reason), (count, weights) in groups.items()
    ]
    columns = ["linear layers", "number", "weights", "fprop", "dgrad", "wgrad", "reason"]
    backend = coverage.get("backend", {})
    in_fp8, layers = coverage.get("layers_in_fp8"), coverage.get("layers")
    text = f"{in_fp8} of {layers} linear layers and {_share(run)} of the matmul FLOPs ran in FP8"
    blocks: list[Block] = [
        Text(f"{text}, on backend {backend.get('backend')} ({backend.get('why')})."),
        Table(columns, rows, "Formats of the GEMMs in the first step"),
    ]
    attention = coverage.get("attention") or []
    if attention:
        names = ("p", "o", "ds", "dv", "dq", "dk")
        # Layers with equal formats share a row.
        kinds: dict[tuple[str, ...], int] = {}
        for layer in attention:
            key = (*(layer[name] for name in names), layer["reason"])
            kinds[key] = kinds.get(key, 0) + 1
        attention_rows: list[list[Value]] = [[count, *kind] for kind, count in kinds.items()]
        blocks.append(Table(["layers", *names, "reason"], attention_rows, "Attention"))
    each_layer = [
        [linear["name"], linear["fprop"], linear["dgrad"], linear["wgrad"], linear["reason"]]
        for linear in coverage.get("linears", ())
    ]
    table = Table(["layer", "fprop", "dgrad", "wgrad", "reason"], each_layer)
    blocks.append(Fold(f"All {len(each_layer)} linear layers", [table]))
    return blocks


def _without_index(name: str) -> str:
    """Replaces the indices in the name of a layer with stars: layers.*.mlp.linear_fc1."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


# FP8 tensors


def _tensors(runs: Sequence[ReportedRun]) -> list[Block]:
    """Returns clipped values over time, and heat maps of runs with recorded statistics."""
    curves = [Curve(i, run.name, run.data) for i, run in enumerate(runs)]
    blocks = report_figures.overflow(curves)
    histories = {run.name: run.history for run in runs if run.history is not None}
    columns = report_figures.heat_map_columns(list(histories.values()))
    panels: dict[str, Sequence[Block]] = {}
    unrecorded = []
    for run in runs:
        if run.history is not None:
            tokens = report_figures.tokens_of_steps(run.data)
            panels[run.name] = report_figures.heat_maps(run.history, tokens, columns)
        elif run.data.recipe.fp8.enabled:
            unrecorded.append(run.name)
    if panels:
        blocks += _panels("Run", panels)
    if unrecorded:
        line = (
            f"{', '.join(unrecorded)}: amax, scale, underflow, overflow and rounding error of each"
            f" tensor were not recorded. Set {STATS_KEY}=100 to record them."
        )
        blocks.append(Text(line))
    if not any(run.data.recipe.fp8.enabled for run in runs):
        return [
            Text(
                "The runs trained without FP8." if len(runs) > 1 else "The run trained without FP8."
            )
        ]
    return blocks


# Memory


def _memory(runs: Sequence[ReportedRun], curves: Sequence[Curve]) -> list[Block]:
    """Returns planned memory by kind next to the measured peak."""
    blocks: list[Block] = []
    plans = {run.name: run.planned for run in runs if isinstance(run.planned, PlanReport)}
    # Runs may have different kinds: only some have master weights. `widest` is the rank with the
    # largest peak.
    kinds = list(dict.fromkeys(kind for plan in plans.values() for kind in plan.widest.memory))
    rows: list[list[Value]] = []
    for kind in kinds:
        bytes_ = [plan.widest.memory.get(kind, 0) for plan in plans.values()]
        if any(bytes_):
            rows.append([MEMORY_KINDS.get(kind, kind), *(size(count) for count in bytes_)])
    rows.append(["planned peak", *(size(plan.widest.total) for plan in plans.values())])
    measured = {run.name: _peak(run) for run in runs}
    rows.append(["measured peak", *(measured[name] for name in plans)])
    if plans:
        blocks.append(Table(["memory of a rank", *plans], rows))
    for run in runs:
        if isinstance(run.planned, str):
            blocks.append(Text(f"{run.name}: {run.planned}"))
    if any(not run.environment.get("gpus") for run in runs):
        blocks.append(
            Text(
                "On a CPU the measured peak is the resident memory of the process, with Python and"
                " torch. On a GPU it is the memory of tensors.",
                "note",
            )
        )
    return blocks + report_figures.memory(curves)


# Recipe and environment


def _recipe(runs: Sequence[ReportedRun]) -> list[Block]:
    """Returns the different keys of several runs, and each recipe with its sources."""
    blocks: list[Block] = []
    if len(runs) > 1:
        rows = [
            [short(key), *map(shown, values)]
            for key, values in _different_values([run.data.recipe for run in runs]).items()
        ]
        columns = ["key", *(run.name for run in runs)]
        blocks.append(Table(columns, rows, "Keys that differ"))
    panels = {run.name: _recipe_tables(run) for run in runs}
    return blocks + _panels("Run", panels)


def _recipe_tables(run: ReportedRun) -> list[Block]:
    """Returns the changed values of a recipe, and all values in a fold."""
    rows = []
    changed = []
    for key, value in flat(run.data.recipe).items():
        default = Source.DEFAULT.value if value == defaults()[key] else RECIPE
        source = run.sources.get(short(key), default)
        rows.append([short(key), shown(value), source])
        if source != Source.DEFAULT.value:
            changed.append(rows[-1])
    columns = ["key", "value", "source"]
    return [
        Table(columns, changed, "Values other than the defaults of the schema"),
        Fold(f"All {len(rows)} values", [Table(columns, rows)]),
    ]


def _different_values(recipes: Sequence[Recipe]) -> dict[str, list[Any]]:
    """Returns the full keys with different values, with the value of each recipe."""
    values_by_recipe = [flat(recipe) for recipe in recipes]
    different = {}
    for key, first in values_by_recipe[0].items():
        values = [recipe_values[key] for recipe_values in values_by_recipe]
        if any(value != first for value in values):
            different[key] = values
    return different


def _environment(runs: Sequence[ReportedRun]) -> list[Block]:
    """Returns packages, GPUs, command and code of each run."""
    lines = [_environment_lines(run.environment) for run in runs]
    names = list(dict.fromkeys(name for run_lines in lines for name in run_lines))
    rows = [[name, *(run_lines.get(name) for run_lines in lines)] for name in names]
    return [Table(["", *(run.name for run in runs)], rows)]


def _environment_lines(environment: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of environment.json by name."""
    lines: dict[str, str] = {}
    for name, value in environment.items():
        # The version of the folder's layout is of no use to a reader.
        if name == "run_format":
            continue
        if name == "command" and isinstance(value, list):
            lines[name] = " ".join(map(str, value))
        elif isinstance(value, dict):
            # Names of packages and environment variables explain themselves. "commit" does not.
            prefix = "code " if name == "code" else ""
            for inner_name, inner_value in value.items():
                lines[f"{prefix}{inner_name}"] = shown(inner_value)
        elif value not in (None, [], {}):
            lines[name] = shown(value)
    return lines
