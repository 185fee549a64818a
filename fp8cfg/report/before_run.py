"""Refusals before a run: of data, layout and memory that are not here, with whole lines that run here in its place."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fp8cfg import smoke
from fp8cfg.backends.backend_choice import Choice, Hardware, choose
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.rules import missing_data
from fp8cfg.config.storage import as_sharded
from fp8cfg.report.machine import free_memory, gpus
from fp8cfg.report.memory import layout
from fp8cfg.report.memory.fit_search import Fit, Takes
from fp8cfg.report.memory.machines import placed
from fp8cfg.report.memory.nearest_fit import Line, alternatives, offering, smoke_run, too_large


def refuse_layout(recipe: Recipe, ranks: int, given: bool = False) -> None:
    """Raise ConfigError for a parallel layout, which is never changed for the user, that training does not have, or not on so many
    `ranks`, or not of a model that is `given`."""
    refuse_if(layout.refused(recipe, ranks, given))


def refuse(
    recipe: Recipe,
    hardware: Hardware,
    whole_line: Line,
    problems_of_layout: Sequence[str] = (),
    ranks: int | None = None,
    takes: Takes | None = None,
) -> None:
    """Raise ConfigError, before anything is made, for a recipe without data, for one with `problems_of_layout`, and for one whose
    layout or memory the ranks here, or `ranks` that are to be started here, do not have. Its line ends with those that run here, as
    `whole_line` has them."""
    refuse_if(list(missing_data(recipe)))
    if lines := _problems(recipe, hardware, problems_of_layout, ranks):
        found = [
            *fits(recipe, hardware, ranks, takes),
            *([] if takes else smoke_run_here(recipe, hardware, ranks)),
        ]
        raise ConfigError(offering(lines, "here", list(map(whole_line, found))))


def _problems(
    recipe: Recipe, hardware: Hardware, of_layout: Sequence[str], ranks: int | None
) -> list[str]:
    """Why the ranks of this run, or `ranks` that are to be started, do not train `recipe`: what of the layout they do not have,
    the problems `of_layout` of the recipe itself, or memory."""
    if of_layout and not ranks and not _launched():
        return list(of_layout)
    started = ranks or layout.ranks()
    if (
        lines := layout.refused(recipe, started)
        or list(of_layout)
        or layout.uneven_batch(recipe, started)
    ):
        return layout.refused(recipe, ranks or _ranks(recipe, hardware.device)) or lines
    free, backend = (
        free_memory(hardware.device, ranks),
        choose_backend(recipe, hardware, started).backend,
    )
    line = too_large(recipe, hardware.device, free, backend, started)
    return [line] if line else []


def fits(
    recipe: Recipe, hardware: Hardware, ranks: int | None = None, takes: Takes | None = None
) -> list[Fit]:
    """What runs here in the place of `recipe`: on `ranks` that are to be started, or those of this run. Of a run that is gone on
    with what it `takes`. Outside of a launcher it is a recipe of this machine alone, with trainer.devices where these are no
    multiple of the ranks, over which a layout might not divide."""
    there = ranks or _ranks(recipe, hardware.device)
    if not ranks and not _launched():
        devices = recipe.trainer.devices
        recipe = placed(recipe, 1, there if devices % there else devices)
    return alternatives(
        recipe,
        hardware.device,
        free_memory(hardware.device, ranks),
        there,
        lambda other: choose_backend(other, hardware, there).backend,
        takes,
    )


def smoke_run_here(recipe: Recipe, hardware: Hardware, ranks: int | None = None) -> list[Fit]:
    """The smoke run of `recipe` on `ranks` that are to be started here, or those that start by themselves, if there is one that
    has the memory."""
    there = ranks or (
        min(gpus(), recipe.trainer.devices) if _starts_here(hardware.device) else layout.ranks()
    )
    free = free_memory(hardware.device, ranks)

    def backend(other: Recipe) -> str:
        return choose_backend(other, hardware, there).backend

    def fit(found: Fit) -> bool:
        small = smoke.cut(found.recipe, there)
        return not too_large(small, hardware.device, free, backend(small), there)

    return list(filter(fit, smoke_run(recipe, there, backend)))


def choose_backend(recipe: Recipe, hardware: Hardware, ranks: int) -> Choice:
    """Who multiplies `recipe` on so many ranks of that hardware. Raises ConfigError as `choose` does."""
    precision = as_sharded(recipe.precision, layout.shards(recipe, ranks))
    return choose(
        precision,
        hardware,
        statistics=recipe.log.fp8_stats_every_n_steps,
        adapters=recipe.lora.enabled,
        strategy=recipe.trainer.strategy,
    )


def _ranks(recipe: Recipe, device: str) -> int:
    """The ranks of this run; outside of a launcher, those that a line for this machine starts on its GPUs."""
    if not _starts_here(device):
        return layout.ranks()
    t = recipe.trainer
    return next(n for n in range(min(gpus(), t.devices), 0, -1) if t.global_batch_size % n == 0)


def _starts_here(device: str) -> bool:
    """Whether a line for this machine starts ranks on its GPUs: outside of a launcher."""
    return device == "cuda" and not _launched()


def _launched() -> bool:
    return bool({"RANK", "WORLD_SIZE"} & os.environ.keys())
