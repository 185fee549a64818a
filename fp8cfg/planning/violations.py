"""All violations of a recipe in one list, for `check`, `explain`, `plan` and training."""

from __future__ import annotations

from collections.abc import Collection

from fp8cfg.backends.choice import Hardware, choose
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.planning.layout import limit_violations, rank_part
from fp8cfg.schema import rules
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.violation import Violation

ANY_HARDWARE = (
    Hardware("cpu"),
    Hardware("cuda", (9, 0), (13, 0)),
    Hardware("cuda", (10, 0), (13, 0)),
)
"""A CPU, Hopper and Blackwell, with CUDA 13. A valid recipe runs on at least one of them."""


def violations(
    recipe: Recipe,
    hardware: Hardware | None = None,
    ranks: int | None = None,
    written: Collection[str] = (),
    here: bool = True,
) -> list[Violation]:
    """Lists every violation of a recipe on given hardware.

    Memory and the number of launched ranks are not checked here.

    Args:
        recipe: The recipe.
        hardware: Device of the GEMMs. None accepts a recipe for any hardware, and ignores
            installed libraries.
        ranks: Number of ranks. Defaults to trainer.num_nodes x trainer.devices.
        written: Short names of the user's overrides. An override without effect is an error even
            at its default.
        here: Whether the hardware is this machine. Then installed libraries and environment
            variables count.

    Returns:
        The violations of rules between keys, of the backend and of the parallel layout.
    """
    if ranks is None:
        ranks = recipe.trainer.num_nodes * recipe.trainer.devices
    problems = []
    for violation in rules.broken(recipe, written):
        if violation.is_error(written):
            problems.append(violation)
    # Layer patterns need valid model sizes, so broken rules are reported first.
    if not problems:
        problems += _pattern_violations(recipe)
    has_valid_layers = not problems
    if hardware is not None:
        problems += _backend_violations(recipe, hardware, ranks, here)
    else:
        # Report the hardware with the fewest violations. An empty list is a valid recipe.
        candidates = []
        for candidate in ANY_HARDWARE:
            candidates.append(_backend_violations(recipe, candidate, ranks, here=False))
        candidates.sort(key=len)
        problems += candidates[0]
    # A smoke run changes its parallel layout to a supported one.
    if has_valid_layers and not recipe.trainer.smoke:
        problems += limit_violations(recipe, ranks)
    # The backend and the layout may report the same line.
    return list({str(violation): violation for violation in problems}.values())


def _pattern_violations(recipe: Recipe) -> list[Violation]:
    """Lists the layer patterns without a match, and patterns that leave no layer in FP8."""
    try:
        plan_layers(recipe)
    except ConfigError as error:
        return error.violations
    return []


def _backend_violations(
    recipe: Recipe, hardware: Hardware, ranks: int, here: bool
) -> list[Violation]:
    """Lists why no backend runs the recipe on this hardware."""
    try:
        choose(
            rank_part(recipe, ranks).state.precision,
            hardware,
            statistics=recipe.log.fp8_stats_every_n_steps,
            here=here,
            strategy=None if recipe.trainer.smoke else recipe.trainer.strategy,
            adapters=recipe.lora.enabled,
        )
    except ConfigError as error:
        return error.violations
    return []
