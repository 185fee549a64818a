"""Figures of a report: curves of several runs, and heat maps of FP8 statistics.

Numbers of points and cells are limited. So a report of many long runs stays a page of a few MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fp8cfg.studies.decimation import Floats, keep_extremes, running_mean
from fp8cfg.studies.fp8_history import STATISTICS, FP8History
from fp8cfg.studies.page import Block, Figure, Tabs, Text, line_style, packed, plotly_text
from fp8cfg.studies.run_data import RunData

MOST_POINTS = 2000
"""Most points of a curve, about the pixels of a wide figure."""
CURVE_POINTS = 12_000
"""Most points of all curves of a figure: 0.2 MB. A point has step, tokens and value in 12 bytes."""
SMOOTH_FROM = 400
"""Points from which a noisy curve gets a running mean."""
MEAN_POINTS = 500
"""Most points of a running mean. It has no spikes, so fewer points suffice."""
MARKED_POINTS = 60
"""Most points of a curve with markers."""
MOST_COLUMNS = 128
"""Most columns of a heat map."""
HEAT_MAP_CELLS = 650_000
"""Most cells of all heat maps of a report: 3.5 MB of float32 in base64."""
STEPS, TOKENS = "steps", "tokens"
"""Names of the two x axes."""
Series = tuple[Sequence[int], Sequence[float]]
"""Steps and values of a metric."""


@dataclass(frozen=True)
class Curve:
    """A run in the figures.

    Attributes:
        index: Number of its color and dash, see `line_style`.
        name: Name in the legend.
        run: The run.
    """

    index: int
    name: str
    run: RunData

    @cached_property
    def tokens(self) -> Callable[[Any], Floats]:
        """See `tokens_of_steps`. Cached, because each figure calls it."""
        return tokens_of_steps(self.run)


def tokens_per_second(run: RunData) -> Series:
    """Returns the speed of each step in tokens per second."""
    # Runs of older versions recorded only seconds.
    series = run.series("tokens_per_second")
    if series[0]:
        return series
    steps, seconds = run.series("seconds")
    tokens = run.recipe.trainer.global_batch_size * run.recipe.model.seq_length
    return steps, [tokens / duration if duration > 0 else np.nan for duration in seconds]


def tokens_of_steps(run: RunData) -> Callable[[Any], Floats]:
    """Returns a function from steps to the number of tokens trained until then."""
    # Interpolated, because heat maps ask for steps between the rows of metrics.jsonl. Without
    # recorded tokens, as in older versions, all steps count the same.
    steps, tokens = run.series("tokens")
    per_step = run.recipe.trainer.global_batch_size * run.recipe.model.seq_length
    if not steps:
        return lambda asked: np.asarray(asked, dtype=np.float64) * per_step
    return lambda asked: np.interp(asked, steps, tokens)


def training(curves: Sequence[Curve]) -> list[Block]:
    """Returns loss, validation loss, learning rate, gradient norm and speed over time."""
    figures = [
        _figure("Training loss", curves, "loss", smooth=True, log_switch=True, wide=True),
        _figure("Validation loss", curves, "val_loss", markers=True, log_switch=True),
        _figure("Learning rate", curves, "lr", log_switch=True, exponent="e"),
        _figure("Gradient norm", curves, "grad_norm", smooth=True, log_switch=True),
        _figure("Tokens per second", curves, tokens_per_second, smooth=True),
        _figure("Loss scale", curves, "loss_scale", log_switch=True),
    ]
    blocks: list[Block] = [figure for figure in figures if figure is not None]
    if not blocks:
        return [Text("There are no steps yet.")]
    longest = max(curve.run.steps for curve in curves)
    if longest > SMOOTH_FROM:
        window = _window(longest)
        text = (
            f"Strong lines are means of up to {window:,} steps. Pale lines have the values of the"
            " steps."
        )
        if longest > _points(curves):
            text += (
                f" They are drawn with at most {_points(curves):,} points: the smallest and the"
                " largest value of each stretch."
            )
        blocks.insert(0, Text(text, "note"))
    return blocks


def differences(curves: Sequence[Curve]) -> list[Block]:
    """Returns the differences of losses to the first run, at equal numbers of tokens."""
    reference = curves[0]
    figures = [
        _difference("Training loss", curves, "loss"),
        _difference("Validation loss", curves, "val_loss"),
    ]
    blocks: list[Block] = [figure for figure in figures if figure is not None]
    if not blocks:
        return [Text("The runs have no step in common.")]
    text = (
        f"Loss of each run minus the loss of {reference.name}, after equal numbers of tokens. Above"
        " zero the run is worse."
    )
    if any(len(curve.run.series("loss")[0]) >= SMOOTH_FROM for curve in curves):
        text += " Differences of training losses are means, like the strong lines above."
    return [Text(text), *blocks]


def memory(curves: Sequence[Curve]) -> list[Block]:
    """Returns the measured memory over time."""

    def in_gib(run: RunData) -> Series:
        """Returns the peak memory by step in GiB."""
        steps, values = run.series("memory")
        return steps, [value / 2**30 for value in values]

    figure = _figure("Measured peak memory (GiB)", curves, in_gib)
    return [figure] if figure else []


def overflow(curves: Sequence[Curve]) -> list[Block]:
    """Returns clipped and infinite values and skipped steps over time."""

    def skipped(run: RunData) -> Series:
        """Returns the number of skipped steps until each step. Empty without skipped steps."""
        steps, stepped = run.series("stepped")
        total = np.cumsum([not value for value in stepped])
        return (steps, total.tolist()) if len(total) and total[-1] else ([], [])

    figures = [
        _figure("Clipped tensors of a step", curves, "fp8_clipped", smooth=True),
        _figure(
            "Clipped values of a step", curves, "fp8_clipped_values", smooth=True, log_switch=True
        ),
        _figure("Infinite values of a step", curves, _unless_zero("fp8_infinite_values")),
        _figure("Skipped steps so far", curves, skipped),
    ]
    return [figure for figure in figures if figure is not None]


def _unless_zero(name: str) -> Callable[[RunData], Series]:
    """Returns a function from a run to a metric. It is empty if all values are zero."""

    # A figure without any infinite value would only take space.
    def series(run: RunData) -> Series:
        """Returns the metric of a run."""
        steps, values = run.series(name)
        return (steps, values) if any(values) else ([], [])

    return series


def _points(curves: Sequence[Curve]) -> int:
    """Returns the most points of a curve, fewer for many runs."""
    # 100 points still show the shape of a curve.
    return max(min(MOST_POINTS, CURVE_POINTS // len(curves)), 100)


def _window(count: int) -> int:
    """Returns the window of the running mean of `count` values: 1 %, at least 10."""
    return max(count // 100, 10)


def _figure(
    title: str,
    curves: Sequence[Curve],
    series: str | Callable[[RunData], Series],
    smooth: bool = False,
    markers: bool = False,
    log_switch: bool = False,
    wide: bool = False,
    exponent: str = "SI",
) -> Figure | None:
    """Returns a figure of one metric of all runs. None if no run has it.

    Args:
        title: Title of the figure.
        curves: The runs.
        series: Field of metrics.jsonl, or a function that returns the series of a run.
        smooth: Whether to add a running mean to long curves.
        markers: Whether to mark each point of a short curve.
        log_switch: Whether to offer a logarithmic y axis.
        wide: Whether the figure takes the whole width.
        exponent: Plotly's exponentformat of the y axis: "SI" for 10k, "e" for 3e-4.
    """
    lines = _Lines(_points(curves))
    for curve in curves:
        steps, values = curve.run.series(series) if isinstance(series, str) else series(curve.run)
        if steps:
            lines.add(
                curve, np.asarray(steps), np.asarray(values, dtype=np.float64), smooth, markers
            )
    return lines.figure(title, log_switch, wide, exponent)


def _difference(title: str, curves: Sequence[Curve], name: str) -> Figure | None:
    """Returns the difference of a loss to the first run, at equal numbers of tokens.

    Args:
        title: Title of the figure.
        curves: The runs, the reference first.
        name: "loss" or "val_loss".

    Returns:
        The figure. None if no run has a number of tokens in common with the reference.
    """
    reference, *compared = curves
    # By tokens, not by steps: runs may differ in batch size.
    base = _at_tokens(reference, name)
    lines = _Lines(_points(curves))
    for curve in compared:
        losses = _at_tokens(curve, name)
        common = sorted(base.keys() & losses.keys())
        if common:
            gap = np.array([losses[tokens][1] - base[tokens][1] for tokens in common])
            steps = np.array([losses[tokens][0] for tokens in common])
            lines.add(curve, steps, gap, smooth=name == "loss", markers=name != "loss")
    return lines.figure(title)


def _at_tokens(curve: Curve, name: str) -> dict[int, tuple[int, float]]:
    """Returns step and value of a metric, by the number of tokens until then."""
    # Rounded, because interpolated numbers are floats and serve as keys.
    steps, values = curve.run.series(name)
    tokens = curve.tokens(steps) if steps else np.zeros(0)
    return {
        round(count): (step, value)
        for count, step, value in zip(tokens.tolist(), steps, values, strict=True)
    }


class _Lines:
    """Traces of a figure, with the steps and the tokens of their points.

    Args:
        limit: Most points of a curve.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._traces: list[dict[str, Any]] = []
        self._steps: list[Any] = []
        self._tokens: list[Any] = []

    def add(
        self,
        curve: Curve,
        steps: np.ndarray[Any, Any],
        values: Floats,
        smooth: bool = False,
        markers: bool = False,
    ) -> None:
        """Adds a curve.

        Args:
            curve: The run.
            steps: int64 [N].
            values: float64 [N].
            smooth: Whether to add a running mean to a long curve.
            markers: Whether to mark each point of a short curve.
        """
        # The curve itself is decimated with all spikes. Behind its mean it is pale.
        indices = keep_extremes(values, self._limit)
        is_smooth = smooth and len(values) >= SMOOTH_FROM
        trace: dict[str, Any] = {}
        if is_smooth:
            trace = {"opacity": 0.28, "hoverinfo": "skip"}
        if markers and len(values) <= MARKED_POINTS:
            trace |= {"mode": "lines+markers", "marker": {"size": 5}}
        self._trace(curve, steps[indices], values[indices], **trace)
        if is_smooth:
            # The mean of all values, not only of the kept ones: extremes would bias it.
            means = running_mean(values, _window(len(values)))
            count = min(MEAN_POINTS, self._limit)
            indices = np.unique(np.linspace(0, len(values) - 1, count).astype(np.int64))
            self._trace(curve, steps[indices], means[indices])

    def figure(
        self, title: str, log_switch: bool = False, wide: bool = False, exponent: str = "SI"
    ) -> Figure | None:
        """Returns the figure, or None without curves."""
        if not self._traces:
            return None
        return Figure(
            title,
            self._traces,
            {"yaxis": {"exponentformat": exponent}},
            height=340 if wide else 280,
            wide=wide,
            log_switch=log_switch,
            x_choices={STEPS: self._steps, TOKENS: self._tokens},
        )

    def _trace(
        self, curve: Curve, steps: np.ndarray[Any, Any], values: Floats, **more: Any
    ) -> None:
        """Adds a Plotly trace. `more` has further attributes of the trace."""
        # Infinity would break the range of the axis. NaN is a gap.
        finite = np.where(np.isfinite(values), values, np.nan)
        trace = {
            "type": "scatter",
            "mode": "lines" if len(steps) > 1 else "markers",
            "name": plotly_text(curve.name),
            "legendgroup": curve.name,
            "y": packed(finite),
            "line": line_style(curve.index),
            "hovertemplate": "%{y:.5~g}",
        }
        self._traces.append(trace | more)
        self._steps.append(packed(steps))
        self._tokens.append(packed(curve.tokens(steps)))


# Heat maps


@dataclass(frozen=True)
class HeatMap:
    """Look of a heat map.

    Attributes:
        title: Title of the figure.
        note: Meaning of a cell.
        log: Whether colors are logarithmic, for values of many powers of ten.
        percent: Whether to show fractions in percent.
    """

    title: str
    note: str
    log: bool = True
    percent: bool = False


HEAT_MAPS = {
    "amax": HeatMap("amax", "Largest magnitude of the tensor"),
    "scale_min": HeatMap("Scale", "Factor before rounding"),
    "scale_max": HeatMap("Largest scale", "The largest of the tensor's tiles"),
    "underflow": HeatMap("Underflow", "Share of elements rounded to zero", percent=True),
    "overflow": HeatMap("Overflow", "Share of elements that were clipped", percent=True),
    "error": HeatMap("Rounding error", "rms(rounded - tensor) / rms(tensor)", log=False),
    "nonfinite": HeatMap("Not finite", "Number of infinities and NaN"),
}
MERGED = {"max": "largest", "min": "smallest", "mean": "mean"}


def heat_map_columns(histories: Sequence[FP8History]) -> int:
    """Returns the most columns of each heat map, fewer for many layers and runs."""
    num_rows = sum(len(history.rows) * len(_shown_statistics(history)) for history in histories)
    return max(min(MOST_COLUMNS, HEAT_MAP_CELLS // max(num_rows, 1)), 2)


def heat_maps(
    history: FP8History, tokens: Callable[[Any], Floats], num_columns: int
) -> list[Block]:
    """Returns the heat maps of a run, in tabs by tensor.

    Args:
        history: The statistics.
        tokens: See `tokens_of_steps`.
        num_columns: Most columns, from `heat_map_columns`.
    """
    merged = history.merged(num_columns)
    names = _shown_statistics(history)
    panels = {
        tensor: [_heat_map(merged, name, tensor, tokens) for name in names]
        for tensor in history.tensors
    }
    first, last = int(history.steps[0, 0]), int(history.steps[-1, 1])
    text = (
        f"Measured in {history.num_steps:,} steps from {first:,} to {last:,}. Rows are layers in"
        " the order of the model."
    )
    if history.num_steps > len(merged.steps):
        per_column = -(-history.num_steps // len(merged.steps))
        text += f" Each column merges up to {per_column:,} measured steps."
    return [Text(text, "note"), Tabs("Tensor", panels)]


def _shown_statistics(history: FP8History) -> list[str]:
    """Returns the statistics worth a heat map."""
    # With one scale for a tensor, the smallest and the largest scale are equal. Non-finite values
    # are rare. Equal NaN are missing measurements.
    names = list(STATISTICS)
    if np.array_equal(history.values["scale_min"], history.values["scale_max"], equal_nan=True):
        names.remove("scale_max")
    if not np.nansum(history.values["nonfinite"]):
        names.remove("nonfinite")
    return names


def _heat_map(
    history: FP8History, name: str, tensor: str, tokens: Callable[[Any], Floats]
) -> Figure:
    """Returns the heat map of one statistic of one tensor: a row for each layer."""
    look = HEAT_MAPS[name]
    layers, values = history.of_tensor(name, tensor)
    centers = history.steps.mean(axis=1)
    suffix = "%" if look.percent else ""
    # page.js replaces z by its logarithm and keeps the original values in customdata.
    hover_field = "customdata" if look.log else "z"
    trace: Mapping[str, Any] = {
        "type": "heatmap",
        "z": packed((values * 100 if look.percent else values).astype(np.float32)),
        "y": [plotly_text(layer) for layer in layers],
        "colorscale": "Viridis",
        "colorbar": {"ticksuffix": suffix},
        "hovertemplate": f"%{{y}}<br>%{{x:,.0f}}: %{{{hover_field}:.4~g}}{suffix}<extra></extra>",
    }
    note = look.note
    if name == "scale_min" and "scale_max" in _shown_statistics(history):
        note += ", the smallest of the tensor's tiles"
    if history.num_steps > len(history.steps):
        note += f". {MERGED[STATISTICS[name]].capitalize()} of the merged steps"
    return Figure(
        look.title,
        [trace],
        {"hovermode": "closest", "yaxis": {"autorange": "reversed", "type": "category"}},
        note=f"{note}.",
        # About 16 pixels for a layer. Beyond 620 pixels, a figure would not fit a screen.
        height=max(180, min(90 + 16 * len(layers), 620)),
        wide=len(layers) > 40,
        log_colors=look.log,
        x_choices={STEPS: [packed(centers)], TOKENS: [packed(tokens(centers))]},
    )
