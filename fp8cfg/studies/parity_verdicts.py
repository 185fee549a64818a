"""Verdicts and limits of a parity study.

`judge` reads the run folders, computes the gaps (loss_gap.py) and returns the report. Limits are
weak points of the study: few steps or seeds, a small model, unequal runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fp8cfg.planning.layout import rank_part
from fp8cfg.planning.peak_memory import count_parameters
from fp8cfg.run_folder.environment import compare_environments
from fp8cfg.run_folder.file_names import COVERAGE, ENVIRONMENT
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.schema.errors import ConfigError
from fp8cfg.studies.loss_gap import (
    GapAtStep,
    Gaps,
    common_steps,
    paired_gaps,
    seed_band,
    window_length,
)
from fp8cfg.studies.parity_report import ParityReport, Verdict, VerdictName
from fp8cfg.studies.parity_runs import Study, other_keys
from fp8cfg.studies.run_data import RunData, data_digest, read_json, read_run

SMALL_MODEL = 1_000_000_000
"""Parameters of a large model. A smaller one gets a limit in the report."""
SHORT_RUN = 20
"""Tokens per parameter of a compute-optimal run (arXiv 2203.15556). Fewer are a short run."""
FEW_STEPS = 20
"""Optimizer steps. With fewer, losses have hardly begun to fall."""


def judge(study: Study) -> ParityReport:
    """Reads the runs of a study and judges each precision.

    Args:
        study: The study. Its runs may still train. Their common steps are compared.

    Returns:
        The report.

    Raises:
        ConfigError: A run has no step yet, or the runs have no step in common.
        Diverged: The baseline diverged.
    """
    runs = _read_runs(study)
    _check_baseline(study, runs[study.baseline])
    losses = {}
    for name, runs_by_seed in runs.items():
        losses[name] = {seed: _losses(run) for seed, run in runs_by_seed.items()}
    # Without diverged precisions: their few steps would shorten the comparison of all others.
    healthy = {
        name: of_seed
        for name, of_seed in losses.items()
        if not any(run.state == "diverged" for run in runs[name].values())
    }
    steps = common_steps([run for of_seed in healthy.values() for run in of_seed.values()])
    if not steps:
        raise ConfigError(
            f"{study.folder}: the runs have no step in common; wait until they have trained, and"
            " run the same command again"
        )
    # One window for all precisions, so that their gaps can be compared with each other.
    window = window_length(len(steps))
    baseline = {
        seed: {step: run[step] for step in steps} for seed, run in losses[study.baseline].items()
    }
    verdicts = []
    for name in study.precisions:
        if name in healthy:
            gaps = paired_gaps(baseline, losses[name], window)
            verdicts.append(_judge_gaps(study, name, gaps, runs))
        else:
            verdicts.append(_diverged(name, runs[name]))
    band = seed_band(baseline, steps, window)
    half_widths = [] if band is None else [float(value) for value in band]
    # The limits need the rest of the report.
    report = ParityReport(study, verdicts, steps, window, healthy, half_widths, limits=[])
    return replace(report, limits=[*_limits(report, runs)])


Runs = Mapping[str, Mapping[int, RunData]]
"""Runs by precision and seed."""


def _read_runs(study: Study) -> Runs:
    """Reads all run folders. Raises ConfigError if a run has no steps yet."""
    folders: dict[str, dict[int, Path]] = {}
    if study.baseline_folders:
        folders[study.baseline] = dict(study.baseline_folders)
    for run in study.runs:
        folders.setdefault(run.precision, {})[run.seed] = run.folder
    runs: dict[str, dict[int, RunData]] = {}
    waiting = []
    for name, of_seed in folders.items():
        for seed, folder in of_seed.items():
            data = read_run(folder) if folder.exists() else None
            if data is None or not data.steps:
                waiting.append(folder)
                continue
            runs.setdefault(name, {})[seed] = data
    if waiting:
        raise ConfigError(
            f"{waiting[0]}: has no step yet, like {len(waiting)} of {len(study.runs)} runs; run the"
            " same command again when they have finished"
        )
    return runs


def _check_baseline(study: Study, runs: Mapping[int, RunData]) -> None:
    """Raises Diverged if a run of the baseline diverged."""
    # `train_runs` raises it too, but a given or queued baseline is only read here.
    from fp8cfg.checkpoint.saver import Diverged

    for seed, run in runs.items():
        if run.state == "diverged":
            raise Diverged(
                f"the baseline {study.baseline} diverged with seed {seed}, so nothing can be"
                f" compared with it: {run.folder}; set a lower optim.lr"
            )


def _losses(run: RunData) -> dict[int, float]:
    """Returns the finite losses by step."""
    # With a loss scale, a skipped step may have an infinite loss. It is no common step then.
    steps, values = run.series("loss")
    return {step: value for step, value in zip(steps, values, strict=True) if math.isfinite(value)}


def _judge_gaps(study: Study, name: str, gaps: Gaps, runs: Runs) -> Verdict:
    """Returns the verdict on a precision without diverged runs."""
    return Verdict(
        name,
        judge_gap(gaps.last, study.tolerance),
        gaps.worse_from(study.tolerance),
        gaps,
        _val_gap(runs[study.baseline], runs[name]),
        gaps.detectable(study.tolerance),
        gaps.seeds_needed(study.tolerance),
    )


def judge_gap(gap: GapAtStep, tolerance: float) -> VerdictName:
    """Returns the verdict on a gap. A lower loss than the baseline's never fails."""
    # The order matters: a gap above both bounds is worse, a gap below the noise is chance. The rest
    # is real and small, or unknown with one seed.
    if gap.is_worse(tolerance):
        return "worse"
    if gap.noise is not None and abs(gap.mean) <= gap.noise:
        return "within noise"
    return "within tolerance"


def _val_gap(baseline: Mapping[int, RunData], other: Mapping[int, RunData]) -> float | None:
    """Returns the mean gap of the last common validation loss, None without a finite one."""
    # Keys are (is_other, seed). Validation losses are few and have no window.
    losses = {}
    for runs in (baseline, other):
        for seed, run in runs.items():
            steps, values = run.series("val_loss")
            losses[runs is other, seed] = dict(zip(steps, values, strict=True))
    steps = common_steps(list(losses.values()))
    if not steps:
        return None
    gaps = [losses[True, seed][steps[-1]] - losses[False, seed][steps[-1]] for seed in baseline]
    gap = statistics.fmean(gaps)
    return gap if math.isfinite(gap) else None


def _diverged(name: str, runs: Mapping[int, RunData]) -> Verdict:
    """Returns the verdict on a precision with diverged runs. The earliest one is named."""
    diverged = {seed: run for seed, run in runs.items() if run.state == "diverged"}
    seed, first = min(diverged.items(), key=lambda item: item[1].steps)
    message = f"{len(diverged)} of {len(runs)} runs diverged, seed {seed} at step {first.steps}"
    if first.message:
        message += f": {first.message}"
    return Verdict(name, "diverged", first.steps, message=message)


# ------------------------------------------------------------------------------------------------
# Limits


def _limits(report: ParityReport, runs: Runs) -> Iterator[str]:
    """Yields a line for each limit of the study."""
    study = report.study
    yield from _statistical_limits(report)
    recipe = study.runs[0].recipe
    # Parameters of the whole model, and tokens of one run up to the last common step.
    parameters = count_parameters(recipe, rank_part(recipe)).total
    tokens = report.steps[-1] * recipe.trainer.global_batch_size * recipe.model.seq_length
    if len(report.steps) < FEW_STEPS or tokens < SHORT_RUN * parameters:
        yield (
            f"Short runs: {_count(tokens)} tokens for {_count(parameters)} parameters. A precision"
            " can still fall behind later, when gradients are smaller."
        )
    if parameters < SMALL_MODEL:
        yield (
            f"Small model: {_count(parameters)} parameters. Large models have activations with"
            " outliers, which are harder for FP8."
        )
    unfinished = [
        run for of_seed in runs.values() for run in of_seed.values() if run.state != "done"
    ]
    unfinished = [run for run in unfinished if run.state != "diverged"]
    if unfinished:
        yield (
            f"{len(unfinished)} runs have not finished, such as {unfinished[0].folder}"
            f" ({unfinished[0].steps} steps): {len(report.steps)} steps are compared."
        )
    yield from _unequal_runs(study, runs)
    # One run of each precision: seeds don't change the backend.
    emulated = [
        name for name, of_seed in runs.items() if _is_emulated(next(iter(of_seed.values())))
    ]
    if emulated:
        yield (
            f"FP8 is emulated ({', '.join(emulated)}): it rounds as a GPU does, but a GPU sums"
            " products in another order."
        )
    yield "Losses are compared, not results on downstream tasks."


def _statistical_limits(report: ParityReport) -> Iterator[str]:
    """Yields the limits of few seeds."""
    study = report.study
    if len(study.seeds) == 1:
        yield (
            "One seed: the noise is unknown, so gaps are only compared with the tolerance. Set"
            " --seeds 3 or more."
        )
        return
    for verdict in report.verdicts:
        if verdict.gaps and verdict.verdict == "worse" and verdict.gaps.last.mean < report.band[-1]:
            yield (
                f"{verdict.precision}: its gap is real, but smaller than what other seeds would"
                f" change ({report.band[-1]:.4f})."
            )
        # Twice the tolerance, because no number of seeds detects a gap of just the tolerance.
        detectable = verdict.detectable
        if detectable is None or detectable <= 2 * study.tolerance:
            continue
        line = (
            f"{verdict.precision}: {len(study.seeds)} seeds detect a gap of {detectable:.3f}, not"
            f" of {2 * study.tolerance:g} (twice the tolerance)."
        )
        if verdict.seeds_needed:
            yield f"{line} --seeds {verdict.seeds_needed} would."
        else:
            yield f"{line} Train more steps, or set a larger --tolerance."


def _unequal_runs(study: Study, runs: Runs) -> Iterator[str]:
    """Yields differences between the runs apart from precision and seed."""
    first_name = study.baseline
    first = next(iter(runs[first_name].values()))
    for name in study.precisions:
        recipe = next(iter(runs[name].values())).recipe
        keys = [key for key in other_keys(first.recipe, recipe) if key != "trainer.seed"]
        if keys:
            yield f"{name} differs from {first_name} in {', '.join(keys)} too, not only in precision."
    all_runs = [run for of_seed in runs.values() for run in of_seed.values()]
    # A file may change between two runs, and no key shows it. The digest does.
    if len({data_digest(run) for run in all_runs} - {None}) > 1:
        yield "The runs were not trained on the same data: the text or the tokens differ."
    first_environment = read_json(RunFiles.at(first.folder), ENVIRONMENT)
    lines: dict[str, None] = {}
    for run in all_runs:
        environment = read_json(RunFiles.at(run.folder), ENVIRONMENT)
        lines |= dict.fromkeys(compare_environments(first_environment, environment))
    # Two uncommitted states of the code cannot be compared, so their note would say nothing.
    ignored = ("command", "code: uncommitted")
    differences = [line for line in lines if not line.startswith(ignored)]
    if differences:
        yield f"The runs were not trained in the same environment: {'; '.join(differences[:3])}."


def _is_emulated(run: RunData) -> bool:
    """Whether a run emulated its FP8 GEMMs, as recorded in coverage.json."""
    backend = read_json(RunFiles.at(run.folder), COVERAGE).get("backend")
    return isinstance(backend, dict) and backend.get("product") == "emulate"


def _count(number: float) -> str:
    """Formats a count, such as 3.3M."""
    for unit in ("", "K", "M", "B"):
        if number < 1000 or unit == "B":
            break
        number /= 1000
    return f"{number:.3g}{unit}"
