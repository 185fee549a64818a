"""HTML page of a parity study: verdicts, curves of losses and gaps, limits of the study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8cfg.schema.errors import ConfigError
from fp8cfg.studies.decimation import keep_extremes
from fp8cfg.studies.page import (
    Badge,
    Facts,
    Figure,
    Section,
    Table,
    Text,
    Value,
    check_page_path,
    line_style,
    plotly_script,
    write_page,
)
from fp8cfg.studies.parity_report import ParityReport, Verdict

TONES = {
    "within noise": "good",
    "within tolerance": "good",
    "worse": "bad",
    "diverged": "bad",
}
BAND_COLOR = "rgba(125,133,148,0.25)"
"""Transparent gray, for a light and a dark background."""
MOST_POINTS = 2000
"""Most points of a curve, about the pixels of a wide figure."""
STEP_AXIS = {"title": {"text": "step"}}


def write_parity_page(report: ParityReport, path: Path) -> None:
    """Writes the page of a study.

    Args:
        report: The result of the study.
        path: The HTML file. An older page of fp8cfg is replaced.

    Raises:
        ConfigError: Plotly is not installed, or the path has another file.
        NotWritable: The file cannot be written.
    """
    study = report.study
    sections = [
        Section("Verdict", [_facts(report), _verdict_table(report), *_messages(report)]),
        Section("Gaps", [_gap_figure(report), _seed_figure(report), _gap_table(report)]),
        Section("Losses", [_loss_figure(report), _val_table(report)]),
        Section("What this study cannot tell", [Text(line) for line in report.limits]),
        Section("Runs", [_run_table(report)]),
    ]
    write_page(
        path,
        f"Parity of {study.name}",
        sections,
        subtitle=f"baseline {study.baseline}, steps: {len(report.steps)}, seeds: {len(study.seeds)}",
        legend=list(report.losses),
    )


def check_output(path: Path, option: str = "") -> None:
    """Checks that the page can be written. Call it before the study trains.

    Args:
        path: The HTML file.
        option: Beginning of the message, such as "--output ".

    Raises:
        ConfigError: Plotly is not installed, or the path has another file.
    """
    plotly_script()
    try:
        check_page_path(path)
    except ConfigError as error:
        raise ConfigError([f"{option}{problem}" for problem in error.problems]) from None


def _facts(report: ParityReport) -> Facts:
    """Returns the key figures of the study."""
    study = report.study
    items: list[tuple[str, str]] = [
        ("baseline", study.baseline),
        (f"its loss, last {report.window} steps", f"{report.mean_loss(study.baseline)[-1]:.4f}"),
        ("seeds", str(len(study.seeds))),
        ("tolerance", f"{study.tolerance:g}"),
    ]
    if report.band:
        items.append(("noise band of other seeds", f"±{report.band[-1]:.4f}"))
    return Facts(items)


def _verdict_table(report: ParityReport) -> Table:
    """Lists the verdict and the gap of each precision."""
    rows: list[list[Value | Badge]] = []
    for verdict in report.verdicts:
        last = verdict.gaps.last if verdict.gaps else None
        rows.append(
            [
                verdict.precision,
                Badge(str(verdict), TONES[verdict.verdict]),
                _signed(last.mean if last else None),
                _plain(last.noise if last else None),
                _plain(verdict.detectable),
            ]
        )
    columns = ("precision", "verdict", "gap", "noise (95 %)", "detectable gap")
    return Table(columns, rows, f"Gap of the loss in the last {report.window} steps")


def _messages(report: ParityReport) -> list[Text]:
    """Returns why runs diverged, and an explanation of the table."""
    lines = [
        Text(f"{verdict.precision}: {verdict.message}", "warning")
        for verdict in report.verdicts
        if verdict.message
    ]
    # With one seed the columns of noise are empty. The limits of the study explain it.
    if len(report.study.seeds) == 1:
        return lines
    explanation = (
        "A gap is the mean over the seeds of the loss minus the baseline's loss, with the same seed"
        " and the same data at the same step. It fails if it exceeds both the noise and the"
        " tolerance. A detectable gap fails in four of five studies like this one."
    )
    return [*lines, Text(explanation, "note")]


def _gap_figure(report: ParityReport) -> Figure:
    """Draws the gap of each precision by step, over the noise band of the baseline's seeds."""
    # Gaps are means over windows and have no spikes, so evenly spaced points suffice.
    shown = _shown_points(len(report.steps))
    steps = [report.steps[index] for index in shown]
    traces: list[dict[str, Any]] = []
    if report.band:
        band = [report.band[index] for index in shown]
        traces += _band(steps, [-value for value in band], band, "noise band of other seeds")
    traces.append(
        {
            "name": "tolerance",
            "x": [steps[0], steps[-1]],
            "y": [report.study.tolerance] * 2,
            "mode": "lines",
            "line": {"color": "#d6453d", "dash": "dash", "width": 1},
        }
    )
    for verdict in _with_gaps(report):
        assert verdict.gaps is not None
        traces.append(
            {
                "name": verdict.precision,
                "legendgroup": verdict.precision,
                "x": steps,
                "y": [verdict.gaps.curve[index].mean for index in shown],
                "mode": "lines",
                "line": _line(report, verdict.precision),
            }
        )
    largest = max(
        (abs(gap.mean) for verdict in _with_gaps(report) for gap in _curve(verdict)), default=0.0
    )
    # The band is often much wider than the gaps. An axis for all of it would flatten them.
    reach = 1.2 * max(largest, 2 * report.study.tolerance)
    note = (
        f"Means over {report.window} steps and all seeds. In the gray band, two groups of baseline"
        " runs with different seeds would differ as much by chance."
    )
    return Figure(
        "Gap to the baseline",
        traces,
        {
            "xaxis": STEP_AXIS,
            "yaxis": {"title": {"text": "nats per token"}, "range": [-reach, reach]},
        },
        note=note,
        height=320,
    )


def _seed_figure(report: ParityReport) -> Figure:
    """Draws the gap of each seed in the last window, with the mean and the noise."""
    traces: list[dict[str, Any]] = []
    for verdict in _with_gaps(report):
        assert verdict.gaps is not None
        last = verdict.gaps.last
        color = _line(report, verdict.precision)["color"]
        traces.append(
            {
                "name": f"{verdict.precision}, one seed",
                "legendgroup": verdict.precision,
                "x": [verdict.precision] * len(verdict.gaps.seeds),
                "y": list(verdict.gaps.seeds.values()),
                "text": [f"seed {seed}" for seed in verdict.gaps.seeds],
                "mode": "markers",
                "marker": {"color": color, "symbol": "circle-open", "size": 9},
            }
        )
        traces.append(
            {
                "name": f"{verdict.precision}, mean and noise",
                "legendgroup": verdict.precision,
                "x": [verdict.precision],
                "y": [last.mean],
                "error_y": {"type": "data", "array": [last.noise or 0.0], "color": color},
                "mode": "markers",
                "marker": {"color": color, "symbol": "diamond", "size": 11},
            }
        )
    tolerance = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": report.study.tolerance,
        "y1": report.study.tolerance,
        "line": {"color": "#d6453d", "dash": "dash", "width": 1},
    }
    return Figure(
        "Gap of each seed",
        traces,
        {
            "xaxis": {"type": "category"},
            "yaxis": {"title": {"text": "nats per token"}, "zeroline": True},
            "shapes": [tolerance],
        },
        note=(
            f"Means over the last {report.window} steps. A precision fails if its diamond is above"
            " the red tolerance and its bar, the noise, is above 0."
        ),
        height=320,
    )


def _gap_table(report: ParityReport) -> Table:
    """Lists the gaps of each seed, and the largest gap before the end."""
    seeds = report.study.seeds
    rows = []
    for verdict in _with_gaps(report):
        assert verdict.gaps is not None
        largest = verdict.gaps.largest
        by_seed = [_signed(verdict.gaps.seeds[seed]) for seed in seeds]
        rows.append([verdict.precision, *by_seed, _signed(largest.mean), f"step {largest.step}"])
    columns = ["precision", *(f"seed {seed}" for seed in seeds), "largest gap", "at"]
    return Table(columns, rows, "Gaps by seed")


def _loss_figure(report: ParityReport) -> Figure:
    """Draws the mean loss of each precision by step, and the range of the baseline's seeds."""
    # The band is drawn at evenly spaced steps. Curves are decimated below so that spikes stay.
    shown = _shown_points(len(report.steps))
    steps = [report.steps[index] for index in shown]
    baseline = report.losses[report.study.baseline].values()
    lowest = [min(losses[step] for losses in baseline) for step in steps]
    highest = [max(losses[step] for losses in baseline) for step in steps]
    traces = _band(steps, lowest, highest, "seeds of the baseline")
    for precision, by_seed in report.losses.items():
        curves = [[losses[step] for step in report.steps] for losses in by_seed.values()]
        means = np.array(curves, dtype=np.float64).mean(0)
        drawn = keep_extremes(means, MOST_POINTS)
        traces.append(
            {
                "name": precision,
                "legendgroup": precision,
                "x": [report.steps[index] for index in drawn],
                "y": [float(means[index]) for index in drawn],
                "mode": "lines",
                "line": _line(report, precision),
            }
        )
    note = "Means over the seeds. The gray band has all seeds of the baseline."
    if len(shown) < len(report.steps):
        note += f" At most {MOST_POINTS} of {len(report.steps)} steps are drawn, with all spikes."
    return Figure(
        "Training loss",
        traces,
        {"xaxis": STEP_AXIS, "yaxis": {"title": {"text": "nats per token"}}},
        note=note,
        height=360,
        wide=True,
        log_switch=True,
    )


def _val_table(report: ParityReport) -> Table:
    """Lists the gap of the last validation loss of each precision."""
    rows = [[verdict.precision, _signed(verdict.val_gap)] for verdict in report.verdicts]
    return Table(("precision", "gap"), rows, "Last validation loss, not part of the verdict")


def _run_table(report: ParityReport) -> Table:
    """Lists the run folders, with a given baseline first."""
    rows: list[list[str]] = []
    for seed, folder in report.study.baseline_folders.items():
        rows.append([report.study.baseline, str(seed), str(folder)])
    for run in report.study.runs:
        rows.append([run.precision, str(run.seed), str(run.folder)])
    return Table(("precision", "seed", "folder"), rows)


def _shown_points(count: int) -> list[int]:
    """Returns evenly spaced indices of the drawn points, and the last index.

    Use it for bands and means over windows. A curve with spikes needs `keep_extremes`.
    """
    # Rounded up, so that at most MOST_POINTS points and the last one are drawn.
    stride = -(-count // MOST_POINTS)
    shown = list(range(0, count, stride))
    if shown[-1] != count - 1:
        shown.append(count - 1)
    return shown


def _band(x: Sequence[int], low: list[float], high: list[float], name: str) -> list[dict[str, Any]]:
    """Returns the traces of a filled band.

    Args:
        x: Steps.
        low: Lower edge.
        high: Upper edge.
        name: Name in the legend.
    """
    # Plotly fills from a trace to the one before it. Edges have no line, no label and no entry in
    # the legend, except for one entry of the band.
    edge = {"x": list(x), "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        {**edge, "y": low, "showlegend": False},
        {**edge, "y": high, "fill": "tonexty", "fillcolor": BAND_COLOR, "name": name},
    ]


def _with_gaps(report: ParityReport) -> list[Verdict]:
    """Returns the verdicts with gaps. A diverged precision has none."""
    return [verdict for verdict in report.verdicts if verdict.gaps]


def _curve(verdict: Verdict) -> Sequence[Any]:
    """Returns the gaps at each step, empty for a diverged precision."""
    return verdict.gaps.curve if verdict.gaps else ()


def _line(report: ParityReport, precision: str) -> dict[str, str]:
    """Returns the color and dash of a precision."""
    # By its place in `losses`, because the legend of the page lists these names.
    return line_style(list(report.losses).index(precision))


def _signed(value: float | None) -> str:
    """Formats a gap with its sign."""
    return "" if value is None else f"{value:+.4f}"


def _plain(value: float | None) -> str:
    """Formats noise or a detectable gap. Both are unknown with one seed."""
    return "unknown" if value is None else f"{value:.4f}"
