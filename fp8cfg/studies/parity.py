"""Parity of precisions: compares the losses of a recipe in several precisions with a baseline.

parity_runs.py trains the runs, loss_gap.py has the statistics, parity_verdicts.py judges the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8cfg.composition import compose
from fp8cfg.parallel.sharding import ranks
from fp8cfg.schema import messages
from fp8cfg.schema.errors import ConfigError, expect
from fp8cfg.schema.messages import Say
from fp8cfg.schema.recipe import Recipe
from fp8cfg.studies.parity_page import check_output, write_parity_page
from fp8cfg.studies.parity_report import ParityReport
from fp8cfg.studies.parity_runs import (
    fit_here,
    make_study,
    precision_words,
    split_list,
    train_runs,
    with_executor,
)
from fp8cfg.studies.parity_verdicts import judge


def parity(
    recipe: Recipe,
    precisions: Sequence[str] = ("bf16", "bf16_fp8"),
    seeds: int = 3,
    steps: int | None = None,
    tolerance: float = 0.01,
    against: str | Path | Sequence[str | Path] = (),
    executor: Any = None,
    config_dir: str | Path | None = None,
    output: str | Path | None = None,
    say: Say = messages.say,
) -> ParityReport:
    """Trains a recipe in several precisions and compares the losses with a baseline's.

    All precisions have the same seeds: the same first weights and the same samples in the same
    order. Each run has an ordinary run folder, log.dir/parity-NAME-Nsteps/PRECISION-seedK. A second
    call reuses finished runs and resumes stopped ones.

    Args:
        recipe: The recipe.
        precisions: Names of precision presets, the baseline first. "own" is the precision of
            `recipe`. Overrides may follow a name, such as "bf16_fp8 fp8.margin=1".
        seeds: Number of seeds: trainer.seed and the numbers after it.
        steps: Optimizer steps. Defaults to trainer.max_steps.
        tolerance: Largest accepted gap of the loss, in nats per token.
        against: Run folders of an existing baseline, each with another seed. Then all of
            `precisions` are compared with it, on its seeds.
        executor: Starts each training, see `fp8cfg.run`. Defaults to this process, with one rank.
        config_dir: Folder with your own presets.
        output: HTML page to write, with the curves. Needs the extra fp8cfg[report].
        say: Called with each message.

    Returns:
        The gaps and verdicts. `report.failed` is True if a precision is worse than the baseline.

    Raises:
        ConfigError: The recipe or an argument is not valid, or a run folder has another recipe.
        Diverged: The baseline diverged.
        Interrupted: A signal stopped a run. The next call resumes it.

        All other errors of `fp8cfg.fit`.
    """
    expect("parity", recipe, Recipe, "a Recipe")
    if ranks() > 1:
        raise ConfigError("parity: runs on one rank; for more, pass an executor, without torchrun")
    # First the quick checks: the study may train for days.
    if output is not None:
        check_output(Path(output))
    overrides = [] if steps is None else [f"trainer.max_steps={steps}"]
    recipes = {}
    # A plain string is a list as on the command line: "bf16,bf16_fp8".
    names = split_list(precisions, ",") if isinstance(precisions, str) else precisions
    for text in names:
        recipes[text] = compose([*precision_words(text), *overrides], config_dir, base=recipe)
    folders = [against] if isinstance(against, (str, Path)) else list(against)
    study = make_study(recipes, seeds, tolerance, folders)
    train_runs(study, with_executor(executor) if executor else fit_here, say)
    report = judge(study)
    if output is not None:
        write_parity_page(report, Path(output))
    return report
