"""Result of a parity study: gaps, verdicts and limits, as text, JSON and in notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8cfg.schema.errors import printable
from fp8cfg.schema.sections import Section, sections_html
from fp8cfg.schema.tables import wrapped
from fp8cfg.studies.loss_gap import (
    Gaps,
    Losses,
    trailing_means,
)
from fp8cfg.studies.parity_runs import Study

VerdictName = Literal["within noise", "within tolerance", "worse", "diverged"]
FAILED = 3
"""Exit code if a precision is worse than the baseline or diverged. CI jobs can test for it."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one precision.

    Attributes:
        precision: Name of the precision.
        verdict: "within noise", "within tolerance", "worse" or "diverged".
        from_step: First step of the worse stretch, or step of the first divergence. None if the
            precision passes.
        gaps: Gaps to the baseline. None if a run diverged.
        val_gap: Mean gap of the last common validation loss. None without validation.
        detectable: True gap that fails in four of five studies like this. None with one seed.
        seeds_needed: Number of seeds to detect twice the tolerance. None if it is unknown or above
            MOST_SEEDS.
        message: Reason of a divergence, or "".
    """

    precision: str
    verdict: VerdictName
    from_step: int | None = None
    gaps: Gaps | None = None
    val_gap: float | None = None
    detectable: float | None = None
    seeds_needed: int | None = None
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether the precision is worse than the baseline or diverged."""
        return self.verdict in ("worse", "diverged")

    def __str__(self) -> str:
        if self.verdict == "worse":
            return f"worse from step {self.from_step} on"
        if self.verdict == "diverged":
            return f"diverged at step {self.from_step}"
        if self.gaps and self.gaps.last.is_lower:
            return f"{self.verdict} (lower)"
        return self.verdict


@dataclass(frozen=True, repr=False)
class ParityReport:
    """Result of a parity study. Prints as a table with the limits of the study.

    Attributes:
        study: The runs.
        verdicts: A verdict for each precision except the baseline.
        steps: Common steps of all runs. Losses are compared at these steps.
        window: Length of the last window in steps. Its mean decides the verdict.
        losses: Training losses by precision, seed and step, the baseline first. Diverged precisions
            are left out.
        band: Noise band from the baseline's seeds at each step. Empty with one seed.
        limits: Limits of the study, one line each.
    """

    study: Study
    verdicts: Sequence[Verdict]
    steps: Sequence[int]
    window: int
    losses: Mapping[str, Mapping[int, Losses]]
    band: Sequence[float]
    limits: Sequence[str]

    @property
    def failed(self) -> bool:
        """Whether a precision is worse than the baseline or diverged."""
        return any(verdict.failed for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """3 if a precision failed, otherwise 0."""
        return FAILED if self.failed else 0

    def mean_loss(self, precision: str) -> list[float]:
        """Returns the smoothed mean loss over the seeds at each of `steps`."""
        losses = [[run[step] for step in self.steps] for run in self.losses[precision].values()]
        smooth = trailing_means(np.array(losses, dtype=np.float64), self.window)
        return [float(value) for value in smooth.mean(0)]

    def data(self) -> dict[str, Any]:
        """Returns the result as plain data for JSON."""
        study = self.study
        return {
            "recipe": study.name,
            "baseline": study.baseline,
            "seeds": list(study.seeds),
            "steps": len(self.steps),
            "last_step": self.steps[-1],
            "window": self.window,
            "tolerance": study.tolerance,
            "baseline_loss": self.mean_loss(study.baseline)[-1],
            "seed_band": self.band[-1] if self.band else None,
            "precisions": [_verdict_data(verdict) for verdict in self.verdicts],
            "limits": list(self.limits),
            "runs": [
                {"precision": run.precision, "seed": run.seed, "folder": str(run.folder)}
                for run in study.runs
            ],
            "failed": self.failed,
            "exit_code": self.exit_code,
        }

    def print(self, console: Console) -> None:
        """Prints the table and the limits of the study."""
        study = self.study
        lines = [
            f"parity of {study.name}: {len(self.steps)} steps, {_seeds(study.seeds)}, tolerance"
            f" {study.tolerance:g}",
            self._baseline_line(),
        ]
        _print_lines(console, lines)
        console.print(_table(self.verdicts))
        # Only diverged precisions have a message.
        lines = [f"{verdict.precision}: {verdict.message}" for verdict in self.verdicts]
        _print_lines(console, [line for line in lines if not line.endswith(": ")])
        _print_lines(console, ["what this study cannot tell:"])
        _print_lines(console, self.limits, first="- ")
        _print_lines(console, [f"runs: {study.folder}"])

    def _baseline_line(self) -> str:
        """Returns the line on the baseline: its last loss and the noise band."""
        loss = self.mean_loss(self.study.baseline)[-1]
        steps = "step" if self.window == 1 else f"{self.window} steps"
        line = f"baseline {self.study.baseline}: loss {loss:.4f} in the last {steps}"
        if self.band:
            line += f"; other seeds would move it by up to {self.band[-1]:.4f}"
        return line

    def __str__(self) -> str:
        console = Console(width=80, force_terminal=False, color_system=None)
        with console.capture() as capture:
            self.print(console)
        return capture.get().rstrip()

    def __repr__(self) -> str:
        return str(self)  # the losses of all steps would fill the screen

    def _repr_html_(self) -> str:
        """Returns the table for notebooks."""
        return sections_html(f"Parity of {self.study.name}", [Section("verdicts", [str(self)])])


def _seeds(seeds: Sequence[int]) -> str:
    """Returns the seeds in words."""
    # With --against the seeds need not be consecutive.
    if len(seeds) > 3 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    numbers = ", ".join(map(str, seeds))
    if len(seeds) == 1:
        return f"seed {numbers}"
    return f"seeds {numbers}"


def _print_lines(console: Console, lines: Sequence[str], first: str = "") -> None:
    """Prints lines of at most 80 columns."""
    # As Text, because rich would read brackets in paths and overrides as markup.
    for line in lines:
        text = wrapped(printable(line), first, "  ")
        console.print(Text(text), soft_wrap=True)


def _table(verdicts: Sequence[Verdict]) -> Table:
    """Returns the table of verdicts."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("precision")
    for column in ("gap", "noise", "detectable", "val gap"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for verdict in verdicts:
        style = "red" if verdict.failed else "green"
        cells = ["", "", ""]
        if verdict.gaps:
            last = verdict.gaps.last
            cells = [f"{last.mean:+.4f}", _number(last.noise), _number(verdict.detectable)]
        val_gap = "" if verdict.val_gap is None else f"{verdict.val_gap:+.4f}"
        name = printable(verdict.precision)
        table.add_row(Text(name), *cells, val_gap, Text(str(verdict), style=style))
    return table


def _number(value: float | None) -> str:
    """Formats noise or a detectable gap. Both are unknown with one seed."""
    return "?" if value is None else f"{value:.4f}"


def _verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict as plain data for JSON."""
    gaps = verdict.gaps
    last = gaps.last if gaps else None
    largest = gaps.largest if gaps else None
    return {
        "precision": verdict.precision,
        "verdict": verdict.verdict,
        "failed": verdict.failed,
        "from_step": verdict.from_step,
        "gap": last.mean if last else None,
        "noise": last.noise if last else None,
        "lower": last.is_lower if last else False,
        "gap_by_seed": dict(gaps.seeds) if gaps else None,
        "detectable": verdict.detectable,
        "seeds_needed": verdict.seeds_needed,
        "largest_gap": largest.mean if largest else None,
        "largest_gap_step": largest.step if largest else None,
        "val_gap": verdict.val_gap,
        "message": verdict.message,
    }
