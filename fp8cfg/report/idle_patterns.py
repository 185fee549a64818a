"""Idle patterns: those of fp8.exclude and fp8.include without which the same layers run in FP8."""

from __future__ import annotations

import fnmatch

from fp8cfg.config.recipe import Recipe
from fp8cfg.layer_plan import plan, planned_with


def idle_patterns(recipe: Recipe) -> list[str]:
    """A line for each pattern of fp8.exclude and fp8.include without which the plan of `recipe`, which has one, is the same."""
    found, lines = {p.name: p for p in plan(recipe)}, []
    for key in ("exclude", "include"):
        patterns = getattr(recipe.fp8, key)
        norms = planned_with(recipe)[1] if key == "exclude" else ()
        for pattern in patterns:
            rest = tuple(other for other in patterns if other != pattern)
            without = recipe.model_copy(deep=True)
            setattr(without.fp8, key, rest)
            after = plan(without)
            if fnmatch.filter(norms, pattern) or any(p.fp8 != found[p.name].fp8 for p in after):
                continue
            why = "without it the same layers run"
            if key == "exclude":
                reason = next(p.reason for p in after if fnmatch.fnmatchcase(p.name, pattern))
                why = f"its layers stay in high precision without it ({reason})"
            lines.append(f"fp8.{key}={pattern}: changes nothing, {why}")
    return lines
