"""FP8 engagement: the check that the GEMMs which ran are those that were planned, in the formats that were planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8cfg.backends.gemm_plan import PlannedLinear, differences, not_engaged
from fp8cfg.backends.protocol import Observed
from fp8cfg.config.errors import NotFP8Error
from fp8cfg.config.recipe import Recipe
from fp8cfg.layer_plan import attention_plan
from fp8cfg.report.coverage import Coverage, ran, warn_of_share

if TYPE_CHECKING:
    from torch import nn


def prove_engagement(
    recipe: Recipe,
    model: nn.Module,
    plan: Sequence[PlannedLinear],
    observed: Observed,
    foreign: bool = False,
) -> Coverage:
    """The coverage of the step that just ran in `model`, whose products are `observed`; `foreign` says that it is not the
    Transformer of `recipe`. Raises NotFP8Error where it is not what was planned, or less than fp8.min_coverage.
    """
    seen = ran(recipe, model, plan, observed, foreign)
    wrong = (
        not_engaged(plan, observed)
        if foreign
        else differences([*plan, *attention_plan(recipe)], observed)
    )
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise NotFP8Error(f"this run is not what was asked for: {'; '.join(wrong[:3])}{more}")
    if recipe.fp8.enabled and seen.share < recipe.fp8.min_coverage:
        raise NotFP8Error(
            f"fp8.min_coverage={recipe.fp8.min_coverage:g}: {seen.share:.1%} of {seen.what} ran"
            " in FP8"
        )
    if recipe.fp8.enabled and foreign:
        warn_of_share(model, seen)
    return seen
