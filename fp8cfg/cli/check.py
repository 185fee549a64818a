"""`check`: validates a recipe, for whatever hardware, without running it."""

from __future__ import annotations

import sys

from fp8cfg.cli.argv import recipe_file, split, wrong_words
from fp8cfg.config.errors import ConfigError, refuse_if

USAGE = """
fp8cfg check [recipe=NAME | FILE.yaml] [precision=NAME] [key=value ...]

Composes a recipe and asks everything that needs no hardware: types and bounds,
the rules between keys, layer patterns, and what this version does not have.
One line and exit code 0, or every problem and exit code 2; and on standard
error notes on what is allowed and may not be meant.

  --config-dir FOLDER  recipes and presets of your own
"""


def run(argv: list[str]) -> int:
    """Check the recipe of `argv`. Returns the exit code."""
    from fp8cfg.cli.composed import say, settled
    from fp8cfg.report.key_effect import refusals

    arguments = split(argv, ("--config-dir",))
    try:
        folder, file = arguments.one("--config-dir"), recipe_file(arguments.plain, ())
    except ConfigError as e:
        raise ConfigError(e.problems + wrong_words(arguments)) from None
    found = settled(arguments.words, folder, file)
    recipe = found.recipe
    refuse_if(refusals(recipe, found.written))

    from fp8cfg.layer_plan import plan
    from fp8cfg.report import chart
    from fp8cfg.report.coverage import planned
    from fp8cfg.report.tables import wrapped

    coverage = planned(recipe, plan(recipe))
    p, count = recipe.precision, coverage.layers_in_fp8
    if p.fp8.enabled and coverage.share < p.fp8.min_coverage:
        raise ConfigError(f"fp8.min_coverage={p.fp8.min_coverage:g}: {coverage.share:.1%} of matmul FLOPs would run in FP8")
    fp8 = f", FP8 {p.fp8.scaling} in {count} of {len(coverage.linears)} linear layers" if p.fp8.enabled else ""
    print(wrapped(f"ok: {recipe.name}, {p.compute}{fp8}", more="  "))
    say(found.notes)
    t = recipe.trainer
    for line in chart.remarks(recipe, t.num_nodes * t.devices // t.strategy.size):
        print(line, file=sys.stderr)
    return 0
