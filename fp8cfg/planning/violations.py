"""Every reason why a recipe cannot run, in one list for `check`, `explain`, `plan` and training."""

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
"""A CPU, Hopper and Blackwell. A recipe that runs on one of them is a valid recipe."""


def violations(
    recipe: Recipe,
    hardware: Hardware | None = None,
    ranks: int | None = None,
    written: Collection[str] = (),
    here: bool = True,
) -> list[Violation]:
    """Lists every violation of a recipe on given hardware.

    The list does not say whether the launch matches the layout, or whether the memory suffices.

    Args:
        recipe: The recipe.
        hardware: What multiplies. None is any hardware, and libraries need not be installed.
        ranks: The ranks that train it. The default is the recipe's own number of GPUs.
        written: Short names of the keys that the user wrote. Writing a key without effect is an
            error even at its default.
        here: Whether the hardware is this machine, so that installed libraries and environment
            variables count.

    Returns:
        The violations of the rules between keys, of the backend and of the parallel layout.
    """
    if ranks is None:
        ranks = recipe.trainer.num_nodes * recipe.trainer.devices
    found = [
        violation for violation in rules.broken(recipe, written) if violation.is_error(written)
    ]
    if not found:
        found += _pattern_violations(recipe)
    has_valid_layers = not found
    if hardware is not None:
        found += _backend_violations(recipe, hardware, ranks, here)
    else:
        reasons = [_backend_violations(recipe, each, ranks, here=False) for each in ANY_HARDWARE]
        reasons.sort(key=len)
        found += reasons[0]
    # A smoke run has another layout, which is made to fit.
    if has_valid_layers and not recipe.trainer.smoke:
        found += limit_violations(recipe, ranks)
    return list({str(violation): violation for violation in found}.values())


def _pattern_violations(recipe: Recipe) -> list[Violation]:
    """Lists the layer patterns that match nothing, and layers that leave nothing to run in FP8."""
    try:
        plan_layers(recipe)
    except ConfigError as error:
        return error.violations
    return []


def _backend_violations(
    recipe: Recipe, hardware: Hardware, ranks: int, here: bool
) -> list[Violation]:
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
