"""`parity`: trains a recipe in several precisions and compares the losses with a baseline."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

from fp8cfg.checkpoint.resume_rules import matches
from fp8cfg.cli import WORDS, launch_run
from fp8cfg.cli.argv import Arguments, is_hydra, split
from fp8cfg.cli.recipe_arguments import recipe_file, resolve_recipe, say_notes
from fp8cfg.cli.run_models import integer_option
from fp8cfg.composition.overrides import parsed
from fp8cfg.execution.executor import LocalExecutor
from fp8cfg.planning.hardware import count_gpus
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema import messages
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import full
from fp8cfg.schema.recipe import Recipe
from fp8cfg.studies import parity_page, parity_runs, parity_verdicts
from fp8cfg.studies.parity_runs import (
    OWN,
    for_precisions,
    precision_words,
    same_results,
    split_list,
)

USAGE = """
fp8cfg parity [recipe=NAME | FILE.yaml] precision=BASELINE,NAME,... [--steps N]
              [--seeds N] [--tolerance X] [--against RUN_FOLDER] [key=value ...]
              [--output FILE.html] [--json] [--config-dir FOLDER]

Train a recipe in several precisions, and compare the losses with a baseline.

Examples:
  fp8cfg parity precision=bf16,bf16_fp8,bf16_mxfp8 recipe=llama_tiny --steps 40
  fp8cfg parity mine.yaml precision=bf16,own,'bf16_fp8 fp8.margin=1' --seeds 5
  fp8cfg parity precision=bf16_mxfp8 --against runs/mine --output parity.html

The first precision is the baseline; a single one is compared with bf16. own is
the recipe's own precision. Overrides of one precision follow its name. Other
overrides hold for all runs, but fp8.* and backend only for precisions with FP8.

All precisions have the same seeds: the same first weights and data. A precision
fails if its loss in the last quarter of the steps is higher than the baseline's
by more than the noise between seeds and by more than the tolerance.

Runs are in log.dir/parity-NAME-Nsteps. The same command again reuses finished
runs and resumes stopped ones.

Options:
  --steps N            optimizer steps; default trainer.max_steps
  --seeds N            seeds, from trainer.seed on; default 3. One seed has no
                       noise, so only the tolerance counts
  --tolerance X        largest accepted gap, in nats per token; default 0.01
  --against RUN_FOLDER compare with this run, on its seed; repeat it for more
                       seeds. Without a recipe, its recipe is used
  --output FILE.html   write a page with the curves
  --json               print JSON
  --config-dir FOLDER  your own recipes and presets
  hydra/launcher=NAME  run all trainings through a launcher of Hydra, such as
                       joblib or submitit_slurm; hydra.launcher.* configures it

Exit code: 0 if no precision failed, 3 if one is worse or diverged.
"""
OPTIONS = (
    "--seeds",
    "--steps",
    "--tolerance",
    "--against",
    "--output",
    "--config-dir",
)
DEFAULT_BASELINE = "bf16"
"""Baseline of a single precision."""
FP8_KEYS = ("trainer.plugins.fp8", "trainer.plugins.backend")
"""Full names of keys and nodes. Precisions without FP8 reject them."""


def run(argv: list[str]) -> int:
    """Compares the precisions of `argv`. Returns the exit code."""
    arguments = split(argv, OPTIONS, ("--json",))
    file = recipe_file(arguments.plain, WORDS)
    seeds = integer_option(arguments, "--seeds", 1)
    steps = integer_option(arguments, "--steps", 1)
    tolerance = _tolerance(arguments)
    folders = arguments.options.get("--against", [])
    if folders and seeds is not None:
        raise ConfigError("--seeds: with --against, its runs set the seeds; drop --seeds")
    if launch_run.is_launched():
        raise ConfigError("parity: starts the ranks of its runs itself; start it without torchrun")
    output = arguments.one("--output")
    # Before training, although the page is written at the end.
    if output:
        parity_page.check_output(Path(output), "--output ")

    recipes = _recipes(arguments, file, folders, steps)
    study = parity_runs.make_study(recipes, seeds or 3, tolerance, folders)
    with _json_only() if "--json" in arguments.flags else nullcontext():
        _train(study, arguments)
    report = parity_verdicts.judge(study)
    if output:
        parity_page.write_parity_page(report, Path(output))
    if "--json" in arguments.flags:
        print(json.dumps(report.data(), indent=1))
        return report.exit_code
    from rich.console import Console

    print()
    report.print(Console())
    if output:
        print(f"wrote {output}")
    return report.exit_code


@contextmanager
def _json_only() -> Iterator[None]:
    """Context in which all output goes to standard error, also the output of child processes."""
    # redirect_stdout only changes sys.stdout. Ranks and C libraries write to file descriptor 1.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _tolerance(arguments: Arguments) -> float:
    """Returns the value of --tolerance. Raises ConfigError for negative and non-finite values."""
    text = arguments.one("--tolerance")
    if text is None:
        return 0.01
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"--tolerance {text[:40]}: needs a number of at least 0, such as 0.01")
    return value


def _train(study: parity_runs.Study, arguments: Arguments) -> None:
    """Trains the unfinished runs of a study, through a launcher of Hydra if one is named."""
    hydra_words = [word for word in arguments.words if is_hydra(word)]
    if hydra_words:
        from fp8cfg.cli import parity_launcher  # Hydra is slow to load

        parity_launcher.train_runs(study, hydra_words, messages.say)
        return
    recipe = study.runs[0].recipe
    if recipe.trainer.num_nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes={recipe.trainer.num_nodes}: parity starts runs on one machine; for"
            " more, call fp8cfg.parity in Python with executor=fp8cfg.SlurmExecutor()"
        )
    # Not with a launcher, whose jobs may run on other machines.
    parity_runs.check_runs(study)
    parity_runs.train_runs(study, _trainer(recipe), messages.say)


def _trainer(recipe: Recipe) -> parity_runs.TrainRun:
    """Returns a function to train a run: in this process, or in a process for each GPU."""
    if launch_run.count_ranks(recipe, count_gpus()) > 1:
        return parity_runs.with_executor(LocalExecutor())
    return parity_runs.fit_here


# ------------------------------------------------------------------------------------------------
# Recipes


def _recipes(
    arguments: Arguments, file: Path | None, folders: Sequence[str], steps: int | None
) -> dict[str, Recipe]:
    """Composes the recipe of each precision.

    Args:
        arguments: The command line.
        file: The recipe file, if any.
        folders: Run folders of --against.
        steps: Value of --steps, if any.

    Returns:
        The recipes by precision, the baseline first. With --against there is no baseline.

    Raises:
        ConfigError: A line for each problem of all recipes.
    """
    words = [word for word in arguments.words if not is_hydra(word)]
    precisions, words = _precisions(words, has_baseline=bool(folders))
    if steps is not None:
        if any(_key(word) == "trainer.max_steps" for word in words):
            raise ConfigError(f"--steps {steps}: trainer.max_steps is set too; drop one of them")
        words.append(f"trainer.max_steps={steps}")
    config_dir = arguments.one("--config-dir")
    has_recipe = file is not None or any(word.startswith("recipe=") for word in words)
    base = None
    # Without a recipe, all precisions have the recipe of the given baseline.
    if folders and not has_recipe:
        base = _recipe_of_run(folders[0], config_dir)

    recipes: dict[str, Recipe] = {}
    problems: dict[str, list[str]] = {}
    notes: dict[str, None] = {}
    fp8_words = [word for word in words if matches(_key(word), FP8_KEYS)]
    common = [word for word in words if word not in fp8_words]
    for text in precisions:
        chosen = precision_words(text)
        # First without the FP8 overrides: a precision without FP8 would reject them. The words of
        # the precision come last, so they win.
        resolved = resolve_recipe([*common, *chosen], config_dir, file, base)
        if fp8_words and resolved.recipe.fp8.enabled:
            resolved = resolve_recipe([*common, *fp8_words, *chosen], config_dir, file, base)
        elif fp8_words:
            notes[f"note: {' '.join(fp8_words)}: not for {text}, which has no FP8"] = None
        for line in map(str, resolved.problems):
            problems.setdefault(line, []).append(text)
        notes |= dict.fromkeys(resolved.notes)
        recipes[text] = resolved.recipe
    refuse_if(for_precisions(problems, len(precisions)))
    # The recipe's own precision is the default baseline, so there is nothing to compare.
    if precisions == [DEFAULT_BASELINE, OWN] and same_results(*recipes.values()):
        raise ConfigError(
            "parity: needs precisions to compare, as in precision=bf16,bf16_fp8,bf16_mxfp8"
        )
    say_notes(notes)
    return recipes


def _recipe_of_run(folder: str, config_dir: str | None) -> Recipe:
    """Reads the recipe of a run as the base of other runs, without its folder."""
    recipe = RunFolder.open(folder, lock=False).read_recipe(config_dir)
    recipe.log.folder = None
    recipe.log.resume = "never"
    return recipe


def _key(word: str) -> str:
    """Returns the full name of the key of an override."""
    return full(parsed(word)[0])


def _precisions(words: Sequence[str], has_baseline: bool) -> tuple[list[str], list[str]]:
    """Separates the list of precisions from other overrides.

    Args:
        words: Overrides of the command line.
        has_baseline: Whether --against has the baseline. Then no baseline is added.

    Returns:
        The precisions, with the baseline first unless `has_baseline`, and the other overrides.

    Raises:
        ConfigError: A precision or the whole list is given twice.
    """
    values = [word.removeprefix("precision=") for word in words if word.startswith("precision=")]
    remaining = [word for word in words if not word.startswith("precision=")]
    if values[1:]:
        raise ConfigError("precision: given twice; write one list, as in precision=bf16,bf16_fp8")
    precisions = split_list(values[0], ",") if values else [OWN]
    if len(precisions) == 1 and not has_baseline and precisions[0] != DEFAULT_BASELINE:
        precisions.insert(0, DEFAULT_BASELINE)
    twice = [text for text in precisions if precisions.count(text) > 1]
    if twice:
        raise ConfigError(f"precision={','.join(precisions)}: {twice[0]} is given twice")
    return precisions, remaining
