"""Nearest fit: the words that make a recipe fit into a given memory at the least cost, and the refusal of one that does not.

A fit keeps the model and the global batch (report/memory/fit_search.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fp8cfg import smoke
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.report.memory.fit_search import Backend, Fit, Search, Takes
from fp8cfg.report.memory.layout import ranks, refused
from fp8cfg.report.memory.peak import memory, widest
from fp8cfg.report.tables import size

SMOKE = "trainer.smoke=true"

Line = Callable[[Fit], str]
"""A whole command line that runs a fit, empty where none does; or its words alone."""


def words_alone(fit: Fit) -> str:
    """The words of `fit`, where nobody has typed the line that they change."""
    return " ".join(fit.words)


def alternatives(
    recipe: Recipe, device: str, free: int, world: int, backend: Backend, takes: Takes | None = None
) -> list[Fit]:
    """The changes at the least cost with which `recipe` runs on `world` ranks, each with `free` bytes of `device` ("cpu" or
    "cuda"), and the cheapest of another kind, which changes nothing of what the first changes, such as a level where the first
    recomputes; only those that a run which is gone on with `takes`. One or none where there are no more.
    """
    return list(Search(recipe, device, free, world, backend, takes=takes).fits())


def smoke_run(recipe: Recipe, world: int, backend: Backend) -> list[Fit]:
    """The smoke run of `recipe`, which is none itself, where it trains on `world` ranks: its backend may not, however small it
    is."""
    if recipe.trainer.smoke:
        return []
    whole = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"smoke": True})})
    try:
        small = smoke.cut(whole, world)
        backend(small)
    except ConfigError:
        return []
    return [] if refused(small, world) else [Fit(whole, (SMOKE,))]


def offering(problems: Sequence[str], where: str, lines: Sequence[str]) -> list[str]:
    """`problems`, the last of which ends with those of `lines` that are not empty, which run `where`, "here" or "there"."""
    found = " · ".join(filter(None, lines))
    return [*problems[:-1], f"{problems[-1]}; runs {where}: {found}" if found else problems[-1]]


def refuse_if_too_large(recipe: Recipe, device: str, free: int, backend: str | None = None) -> None:
    """Raise ConfigError where the run needs more than `free` bytes, with the nearest words that fit."""
    if line := too_large(recipe, device, free, backend):
        raise ConfigError(
            f"{line}; nearest that fit:"
            f" {' · '.join(nearest(recipe, device, free, lambda _: backend))}"
        )


def too_large(
    recipe: Recipe, device: str, free: int, backend: str | None = None, started: int | None = None
) -> str:
    """Why `recipe` does not fit into `free` bytes of this machine on the ranks here, or on so many that are `started`; empty where
    it does."""
    need = sum(
        memory(
            recipe, device, widest(recipe, device, started or ranks(), backend), backend
        ).values()
    )
    return (
        f"recipe={recipe.name}: needs {size(need)}, this machine has {size(free)} free on {device}"
        if need > free
        else ""
    )


def nearest(recipe: Recipe, device: str, free: int, backend: Backend) -> Iterator[str]:
    """The words of the cheapest fits on the ranks here, or those of as many layers as fit; and of a smoke run."""
    search = Search(recipe, device, free, ranks(), backend)
    found = list(search.fits())
    if not found and (fewer := search.fewer_layers()):
        found = [fewer]
    yield from map(words_alone, [*found, *smoke_run(recipe, ranks(), backend)])
