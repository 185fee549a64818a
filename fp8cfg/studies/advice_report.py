"""Output of precision advice: text for a terminal, JSON, and YAML of the advised recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8cfg.report.recipe_export import as_data
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import dump_yaml
from fp8cfg.schema.tables import table, wrapped
from fp8cfg.studies.advice_rules import ALARM, LayerError, Remedy, group_of

MAX_CAUSES = 12
"""Most causes and reasons in the text. `Advice.data` has all of them."""
MIN_SHARE = 0.5
"""Share of FLOPs in FP8 below which the text warns of little speedup."""


@dataclass(frozen=True)
class Cost:
    """Time of the measurement.

    Attributes:
        step: Median seconds of steps without measurement. None if all steps were measured.
        measured_step: Median seconds of measured steps.
    """

    step: float | None
    measured_step: float


@dataclass(frozen=True)
class Advice:
    """Precision advice for a model. Print it to see tables and overrides.

    Attributes:
        name: Name of the recipe or of the model's class.
        recipe: The recipe to train with. It has no FP8 if no layer is healthy in FP8.
        overrides: Overrides from the given recipe to `recipe`.
        remedy: Overrides of the advised scaling. None if no layer is healthy in FP8.
        remedies: Overrides of every measured scaling, from coarse to fine scales.
        errors: Error of each GEMM of each layer under each scaling.
        unsupported: Reason for each scaling without hardware support.
        unmeasured: Reason for each layer without a measurement.
        hardware: The target hardware, such as "h100".
        compute: The precision of the run, such as "bf16".
        steps: Number of trained steps.
        measured: The measured steps, from 1.
        asked: Whether the given recipe chose the scaling.
        cost: Time of the measurement.
        is_custom: Whether the model is custom. Then the YAML has only precision keys.
    """

    name: str
    recipe: Recipe
    overrides: Sequence[str]
    remedy: Remedy | None
    remedies: Sequence[Remedy]
    errors: Sequence[LayerError]
    unsupported: Mapping[str, str]
    unmeasured: Mapping[str, str]
    hardware: str
    compute: str
    steps: int
    measured: Sequence[int]
    asked: bool
    cost: Cost
    is_custom: bool = False

    @property
    def unhealthy(self) -> list[LayerError]:
        """The unhealthy GEMMs, worst first."""
        alarming = [error for error in self.errors if error.alarming]
        return sorted(alarming, key=lambda error: -error.ratio)

    def data(self) -> dict[str, Any]:
        """Returns the advice as plain data for JSON."""
        return {
            "name": self.name,
            "hardware": self.hardware,
            "compute": self.compute,
            "steps": self.steps,
            "measured": list(self.measured),
            "advice": None if self.remedy is None else _remedy_data(self.remedy),
            "overrides": list(self.overrides),
            "scalings": [_remedy_data(remedy) for remedy in self.remedies],
            "unsupported": dict(self.unsupported),
            "unmeasured": dict(self.unmeasured),
            "alarm": ALARM,
            "errors": [
                # JSON has no infinity: a tensor without noise has no ratio.
                {**asdict(error), "ratio": error.ratio, "snr": min(error.snr, 999.0)}
                for error in self.errors
            ],
            "seconds": asdict(self.cost),
        }

    def yaml(self) -> str:
        """Returns the advised recipe as YAML. Comments explain each override."""
        lines = [
            f"# Advice of fp8cfg for {self.name}, from {self.steps} steps in {self.compute} on the"
            f" scalings of {self.hardware}."
        ]
        preset = {"precision": self.compute}
        if self.remedy is None:
            lines.append("# No layer should run in FP8.")
        else:
            lines.append(f"# {self.remedy.share:.1%} of matmul FLOPs run in FP8.")
            for override in self.remedy.overrides:
                lines.append(f"# {override.word}")
                lines += [f"#   {reason}" for reason in override.reasons]
            preset = dict(word.split("=", 1) for word in self.remedy.preset)
        # Values equal to the named preset are left out.
        choices = {}
        if "precision" in preset:
            choices["precision"] = preset["precision"]
        values = as_data(self.recipe, choices)
        if self.is_custom:
            # convert_model needs no keys of a model or of training.
            values = {key: values[key] for key in ("precision", "fp8") if key in values}
        return "\n".join([*lines, dump_yaml(values)])

    def __str__(self) -> str:
        sections = [_head(self), *_matrices(self), _causes(self), _scalings(self), _advice(self)]
        return "\n\n".join(section for section in sections if section)


def _remedy_data(remedy: Remedy) -> dict[str, Any]:
    """Returns a remedy as plain data for JSON."""
    return {
        "scaling": remedy.scaling,
        "overrides": [
            *({"word": word, "reasons": []} for word in remedy.preset),
            *(asdict(override) for override in remedy.overrides),
        ],
        "layers": list(remedy.layers),
        "healthy_layers_kept_by_preset": list(remedy.kept),
        "share_of_matmul_flops": remedy.share,
        "share_without_overrides": remedy.share_before,
    }


def _head(advice: Advice) -> str:
    """Formats the run, the hardware, the cost and the layers without a measurement."""
    measured = ", ".join(map(str, advice.measured))
    lines = [
        f"{advice.name}: trained {advice.steps} steps in {advice.compute}, measured in step"
        f" {measured}",
        f"scalings of {advice.hardware}",
    ]
    names = ", ".join(advice.unsupported)
    if names:
        lines.append(f"not supported there: {names}")
    seconds = f"a measured step took {advice.cost.measured_step:.2g} s"
    if advice.cost.step is not None:
        seconds += f", other steps {advice.cost.step:.2g} s"
    lines.append(seconds)
    for name, reason in advice.unmeasured.items():
        lines.append(f"not measured: {name}: {reason}")
    return "\n".join(wrapped(line, more="  ") for line in lines)


def _matrices(advice: Advice) -> list[str]:
    """Formats tables of layers by scaling, first the hybrid formats."""
    # Two tables, because one table of all scalings is wider than 80 columns.
    names = [remedy.scaling for remedy in advice.remedies]
    hybrid = [name for name in names if name.endswith("hybrid")]
    other = [name for name in names if name not in hybrid]
    line = (
        "The error of the worst GEMM and layer of a group, relative to the error of normally"
        f" distributed values. Above {ALARM:g} (!) a bit of precision is lost."
    )
    tables = [wrapped(line)]
    for title, columns in (("hybrid", hybrid), ("e4m3", other)):
        if columns:
            tables.append(_matrix(advice, title, columns))
    return tables


def _matrix(advice: Advice, title: str, columns: Sequence[str]) -> str:
    """Formats a table of layer groups by scaling, the worst group first."""
    # A group has the same linear layer of all Transformer layers. Its worst layer decides.
    worst: dict[str, dict[str, LayerError]] = {}
    for error in advice.errors:
        if error.scaling in columns:
            row = worst.setdefault(group_of(error.layer), {})
            current_worst = row.get(error.scaling)
            if current_worst is None or error.ratio > current_worst.ratio:
                row[error.scaling] = error

    def largest_ratio(group: str) -> float:
        return max(error.ratio for error in worst[group].values())

    rows = []
    for group in sorted(worst, key=largest_ratio, reverse=True):
        cells = []
        for name in columns:
            error = worst[group][name]
            mark = "!" if error.alarming else " "
            cells.append(f"{error.ratio:.1f}{mark}")
        rows.append([group, *cells])
    # "current row hybrid" becomes "row" and "delayed hybrid" becomes "delayed": narrow columns.
    heads = [name.removesuffix(f" {title}").removeprefix("current row") for name in columns]
    heads = [head or "row" for head in heads]
    return table([f"{title} formats", *heads], rows, right=range(1, len(columns) + 1))


def _causes(advice: Advice) -> str:
    """Formats the unhealthy layers with the tensor to blame, worst first."""
    # One tensor often hurts several GEMMs and scalings. It is one cause.
    by_cause: dict[tuple[str, str], list[LayerError]] = {}
    for error in advice.unhealthy:
        by_cause.setdefault((error.layer, error.tensor), []).append(error)
    lines = []
    for (layer, tensor), errors in list(by_cause.items())[:MAX_CAUSES]:
        worst = errors[0]
        scalings = dict.fromkeys(error.scaling for error in errors)
        more_scalings = [name for name in scalings if name != worst.scaling]
        lines.append(f"{layer}: {tensor}")
        lines.append(wrapped(f"{worst.scaling}: {worst}", "  ", "    "))
        if more_scalings:
            lines.append(wrapped(f"also under {', '.join(more_scalings)}", "  ", "    "))
    if len(by_cause) > MAX_CAUSES:
        lines.append(f"and {len(by_cause) - MAX_CAUSES} more; the JSON output has all")
    if not lines:
        return "No GEMM is unhealthy."
    return "\n".join(["tensors to blame", *lines])


def _scalings(advice: Advice) -> str:
    """Formats a table of scalings: FLOPs in FP8 before and after their overrides."""
    rows = []
    for remedy in advice.remedies:
        layers = str(len(remedy.layers))
        rows.append([remedy.scaling, f"{remedy.share_before:.1%}", layers, f"{remedy.share:.1%}"])
    heads = ["scaling", "FLOPs in FP8", "unhealthy layers", "FLOPs without them"]
    return table(heads, rows, right=(1, 2, 3))


def _advice(advice: Advice) -> str:
    """Formats the advised scaling, its overrides and the reasons for them."""
    remedy = advice.remedy
    healthy = []
    for candidate in advice.remedies:
        if candidate.recipe and not candidate.overrides:
            healthy.append(candidate.scaling)
    healthy_line = wrapped(f"scalings without unhealthy layers: {', '.join(healthy)}", more="  ")
    if remedy is None:
        precision = "this scaling" if advice.asked else "FP8"
        line = f"advice: stay with precision={advice.compute}; no layer is healthy in {precision}"
        if healthy:
            line += f"\n{healthy_line}"
        return line
    lines = [f"advice: {remedy.scaling}"]
    lines += [f"  {word}" for word in remedy.preset]
    for override in remedy.overrides:
        lines.append(f"  {override.word}")
        lines += [wrapped(reason, "    ", "      ") for reason in override.reasons[:MAX_CAUSES]]
        if len(override.reasons) > MAX_CAUSES:
            lines.append(f"    and {len(override.reasons) - MAX_CAUSES} more")
    if advice.asked and not remedy.overrides:
        lines.append("  the recipe needs no change")
    share = f"{remedy.share:.1%} of matmul FLOPs run in FP8"
    if remedy.overrides:
        share += f", {remedy.share_before:.1%} without the overrides"
    lines.append(share)
    if remedy.overrides and healthy:
        lines.append(healthy_line)
    if remedy.share < MIN_SHARE:
        lines.append("less than half of the FLOPs: expect little speedup")
    if remedy.kept:
        line = (
            f"The preset keeps {len(remedy.kept)} healthy layers in {advice.compute}. To run them in"
            " FP8, set fp8.high_precision_at_start=0 and fp8.high_precision_at_end=0."
        )
        lines.append(wrapped(line))
    return "\n".join(lines)
