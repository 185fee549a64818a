"""Out-of-memory check before a run, and the nearest recipes that fit into a given memory."""

from __future__ import annotations

from collections.abc import Iterator

from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.recipe_registry import recipes
from fp8cfg.layer_plan import plan
from fp8cfg.report.memory.layout import whole
from fp8cfg.report.memory.peak import memory, parameters
from fp8cfg.report.tables import size


def refuse_if_too_large(recipe: Recipe, device: str, free: int, backend: str | None = None) -> None:
    """Raise ConfigError where the run needs more than `free` bytes, with the nearest overrides that fit."""
    need = sum(memory(recipe, device, backend=backend).values())
    if need > free:
        near = list(fitting(recipe, device, free, backend))
        hint = f"; nearest that fit: {' · '.join(near)}" if near else ""
        raise ConfigError(f"recipe={recipe.name}: needs {size(need)}, this machine has {size(free)} free on {device}{hint}")


def fitting(recipe: Recipe, device: str, free: int, backend: str | None = None) -> Iterator[str]:
    """Overrides that make `recipe` fit into `free` bytes of `device`: the same model with less memory, else with fewer layers; and
    the largest recipe that fits."""

    def fits(r: Recipe) -> bool:
        return _valid(r) and sum(memory(r, device, backend=backend).values()) <= free

    lean, words = recipe.model_copy(deep=True), list[str]()
    for node, key, value in ((lean.trainer, "micro_batch_size", 1), (lean.model, "recompute_granularity", "full")):
        if getattr(node, key) != value:
            setattr(node, key, value)
            words.append(f"{node.key(key)}={value}")
            if fits(lean):
                yield " ".join(words)
                return
    least, most = 0, recipe.model.num_layers  # fits with `least` layers, does not with `most`: halve what lies between
    while most - least > 1:
        lean.model.num_layers = (least + most) // 2
        least, most = (lean.model.num_layers, most) if fits(lean) else (least, lean.model.num_layers)
    if least:
        yield " ".join([f"model.num_layers={least}", *words])
    others = [r for make in recipes().values() if (r := make()) and r.name != recipe.name]
    for other in others:
        other.precision = recipe.precision
    fit = [r for r in others if fits(r)]
    if fit:
        yield f"recipe={max(fit, key=lambda r: parameters(r, whole(r)).total).name}"


def _valid(recipe: Recipe) -> bool:
    try:
        recipe.check()
        plan(recipe)
    except ConfigError:
        return False
    return True
