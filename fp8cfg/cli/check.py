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
            folder, file = arguments.one("--config-dir"), recipe_file(arguments.plain, ())
        except ConfigError as e:
            raise ConfigError(e.problems + wrong_words(arguments)) from None
        recipe, line, notes = _checked(arguments.words, folder, file)
    except (ConfigError, NotFP8Error) as e:
        # Tools read the JSON of a wrong recipe too. Otherwise the caller prints the error.
        if not as_json:
            raise
        problems = e.problems if isinstance(e, ConfigError) else [str(e)]
        print(json.dumps({"ok": False, "problems": problems, "notes": []}, indent=1))
        return e.exit_code
    if as_json:
        print(
            json.dumps(
                {
                    "ok": True,
                    "recipe": line,
                    "data": training_data.summarize_data(recipe),
                    "notes": [note.removeprefix("note: ") for note in notes],
                },
                indent=1,
            )
        )
    else:
        say(wrapped(f"ok: {line}", more="  "))
        say(wrapped(training_data.data_line(recipe), more="  "))
        say_notes(notes)
    return 0


def _checked(
    words: list[str], folder: str | None, file: Path | None
) -> tuple[Recipe, str, list[str]]:
    """Returns the recipe, a summary line and the notes.

    Raises:
        ConfigError: The recipe is wrong. The error lists all problems.
        NotFP8Error: The planned coverage is below fp8.min_coverage.
    """
    found = resolve_recipe(words, folder, file)
    recipe = found.recipe
    refuse_if([*violations(recipe, written=found.written), *training_data.unintended_data(recipe)])
    coverage, p, t = planned_coverage(recipe, plan_layers(recipe)), recipe.precision, recipe.trainer
    check_min_coverage(recipe, coverage)
    count = f"{coverage.layers_in_fp8} of {len(coverage.linears)} linear layers"
    fp8 = f", {scalings.title(p.fp8.scaling)} in {count}" if p.fp8.enabled else ""
    said = remarks.remark_lines(recipe, layout.rank_part(recipe, t.num_nodes * t.devices))
    # This machine may differ from the one that trains, so its problems are only notes.
    here = [f"note: {note}" for note in preflight.local_problems(recipe, folder)]
    line = f"{recipe.name}, {p.compute}{fp8}"
    return recipe, line, [*found.notes, *said, *here]
