"""`check`: validates a recipe for any hardware, without running it."""

from __future__ import annotations

import json
from pathlib import Path

from fp8cfg.cli.argv import split, wrong_words
from fp8cfg.cli.recipe_arguments import recipe_file, resolve_recipe, say_notes
from fp8cfg.planning import layout, preflight, remarks, training_data
from fp8cfg.planning.coverage import check_min_coverage, planned_coverage
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.planning.violations import violations
from fp8cfg.schema import scalings
from fp8cfg.schema.errors import ConfigError, NotFP8Error, refuse_if
from fp8cfg.schema.messages import say
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import wrapped

USAGE = """
fp8cfg check [recipe=NAME | FILE.yaml] [precision=NAME] [key=value ...] [--json]
             [--config-dir FOLDER]

Validate a recipe without training.

Examples:
  fp8cfg check recipe=llama_tiny precision=bf16_fp8
  fp8cfg check mine.yaml fp8.margin=1
  fp8cfg check mine.yaml --json

It checks types, bounds, rules between keys, layer patterns, the backends, the
parallel layout and the training data. Notes on standard error list changed
values, unusual settings and missing hardware.

Options:
  --config-dir FOLDER  your own recipes and presets
  --json               print results, problems and notes as JSON

Exit code: 0 if the recipe is valid, 2 if not, 3 if the FP8 share of the matmul
FLOPs is below fp8.min_coverage.
"""


def run(argv: list[str]) -> int:
    """Checks a recipe and returns the exit code."""
    arguments = split(argv, ("--config-dir",), ("--json",))
    as_json = "--json" in arguments.flags
    try:
        try:
            folder = arguments.one("--config-dir")
            file = recipe_file(arguments.plain, ())
        except ConfigError as error:
            raise ConfigError(error.problems + wrong_words(arguments)) from None
        recipe, line, notes = _check_recipe(arguments.words, folder, file)
    except (ConfigError, NotFP8Error) as error:
        # Tools read the JSON of a wrong recipe too. Otherwise the caller prints the error.
        if not as_json:
            raise
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        print(json.dumps({"ok": False, "problems": problems, "notes": []}, indent=1))
        return error.exit_code
    if as_json:
        data = {
            "ok": True,
            "recipe": line,
            "data": training_data.summarize_data(recipe),
            "notes": [note.removeprefix("note: ") for note in notes],
        }
        print(json.dumps(data, indent=1))
    else:
        say(wrapped(f"ok: {line}", more="  "))
        say(wrapped(training_data.data_line(recipe), more="  "))
        say_notes(notes)
    return 0


def _check_recipe(
    words: list[str], folder: str | None, file: Path | None
) -> tuple[Recipe, str, list[str]]:
    """Returns the recipe, a summary line and the notes.

    Raises:
        ConfigError: The recipe is wrong. The error lists all problems.
        NotFP8Error: The planned coverage is below fp8.min_coverage.
    """
    resolved = resolve_recipe(words, folder, file)
    recipe = resolved.recipe
    problems = violations(recipe, written=resolved.written)
    refuse_if([*problems, *training_data.unintended_data(recipe)])
    coverage = planned_coverage(recipe, plan_layers(recipe))
    check_min_coverage(recipe, coverage)

    line = f"{recipe.name}, {recipe.precision.compute}"
    fp8 = recipe.precision.fp8
    if fp8.enabled:
        line += (
            f", {scalings.title(fp8.scaling)} in {coverage.layers_in_fp8} of"
            f" {len(coverage.linears)} linear layers"
        )
    num_ranks = recipe.trainer.num_nodes * recipe.trainer.devices
    notes = [*resolved.notes, *remarks.remark_lines(recipe, layout.rank_part(recipe, num_ranks))]
    # This machine may differ from the one that trains, so its problems are only notes.
    notes += [f"note: {problem}" for problem in preflight.local_problems(recipe, folder)]
    return recipe, line, notes
