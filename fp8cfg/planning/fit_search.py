"""Search for a fit: known remedies, tried in order of cost until a recipe fits into memory.

The remedies add up. One is skipped if the rules refuse it or if it does not lower the peak:

    recompute selective, recompute full
    storage.shard=zero2, storage.shard=fsdp
    half the microbatch, down to 1
    twice the ranks, which begins again with the recipe's settings

The model and the global batch stay. The parallel layout stays too, unless the ranks are not a
multiple of it: then it is cut to sizes that divide them. A backend that does not train the layout
is changed to native.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

from fp8cfg.backends import REFERENCE
from fp8cfg.composition.layers import Rank
from fp8cfg.composition.precedence import resolve_recipe
from fp8cfg.composition.recipe_yaml import assigned, flat
from fp8cfg.parallel.sharding import ranks
from fp8cfg.planning import layout_limits, smoke
from fp8cfg.planning.layout import layout_violations, place_on_gpus, split_into_nodes, uneven_batch
from fp8cfg.planning.peak_memory import plan_memory, widest_part
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import full, short
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import size
from fp8cfg.schema.training import Strategy

SMOKE = "trainer.smoke=true"

Backend = Callable[[Recipe, int], str | None]
"""Returns the backend of a recipe on so many ranks. Raises ConfigError if there is none."""
IsResumable = Callable[[Recipe], bool]
"""Whether `resume` accepts a recipe."""


@dataclass(frozen=True)
class Fit:
    """A recipe that runs, and the overrides that change the original recipe into it.

    `ranks` is set if it needs more ranks than were asked for. `peak` is in bytes on each rank.
    """

    recipe: Recipe
    words: tuple[str, ...]
    ranks: int | None = None
    peak: int = 0

    def where(self, here: str) -> str:
        """Where it runs: `here`, or on more GPUs."""
        return f"on {self.ranks} GPUs" if self.ranks else here


CommandLine = Callable[[Fit], str]
"""Makes the command line of a fit, or an empty string if that line would be refused."""


def overrides_only(fit: Fit) -> str:
    """The overrides of `fit`, for callers without a command line."""
    return " ".join(fit.words)


@dataclass(frozen=True)
class Search:
    """Search with `free` bytes of `device` ("cpu" or "cuda") on each rank."""

    device: str
    free: int
    backend: Backend
    takes: IsResumable | None = None

    def nearest(self, recipe: Recipe, world: int) -> Fit | None:
        """The fit of `recipe` on `world` ranks, or on the fewest more GPUs.

        If nothing fits it has the smallest peak. None if no layout runs there.
        """
        best = self._climb(recipe, world)
        more = world
        # An emulated run on CPUs is not worth twice the machines.
        while best and best.peak > self.free and self.device == "cuda":
            more *= 2
            fit = self._climb(place_on_gpus(recipe, *split_into_nodes(more)), more)
            if fit is None:
                break
            if fit.peak < best.peak:
                words = changed_overrides(recipe, fit.recipe)
                best = Fit(fit.recipe, words, more, fit.peak)
        return best

    def _climb(self, recipe: Recipe, world: int) -> Fit | None:
        """Tries the remedies on `world` ranks, up to the first that fits."""
        start = self._start(recipe, world)
        if start is None:
            return None
        best, peak = start
        for remedy in _remedies(best):
            if peak <= self.free:
                break
            changed = _changed(best, remedy)
            lower = self._peak(changed, world) if changed else None
            if changed and lower is not None and lower < peak:
                best, peak = changed, lower
        return Fit(best, changed_overrides(recipe, best), peak=peak)

    def _start(self, recipe: Recipe, world: int) -> tuple[Recipe, int] | None:
        """The recipe in a layout, backend and microbatch that run on `world` ranks, and its peak."""
        backends = dict.fromkeys([recipe.backend, REFERENCE])
        for layout, backend, micro in product(_layouts(recipe, world), backends, _halved(recipe)):
            values = {**flat(layout, "trainer.strategy"), "backend": backend, **micro}
            changed = _changed(recipe, values)
            peak = self._peak(changed, world) if changed else None
            if changed and peak is not None:
                return changed, peak
        return None

    def _peak(self, recipe: Recipe, world: int) -> int | None:
        """Peak in bytes on each of `world` ranks; None if the recipe does not run there."""
        if layout_violations(recipe, world) or uneven_batch(recipe, world):
            return None
        if self.takes and not self.takes(recipe):
            return None
        try:
            backend = self.backend(recipe, world)
            part = widest_part(recipe, self.device, world, backend)
            return sum(plan_memory(recipe, self.device, part, backend).values())
        except ConfigError:
            return None


def _layouts(recipe: Recipe, world: int) -> Iterator[Strategy]:
    """The recipe's layout, and that layout cut to sizes that divide `world` and the model."""
    strategy, model = recipe.trainer.strategy, recipe.model
    if world % strategy.size == 0:
        yield strategy
    heads = gcd(model.num_attention_heads, model.num_query_groups)
    tensor = gcd(strategy.tensor_model_parallel_size, world, heads, model.ffn_hidden_size)
    tensor = gcd(tensor, model.vocab_size)
    pipeline = gcd(strategy.pipeline_model_parallel_size, world // tensor)
    if layout_limits.adapter_limits(recipe, pipeline, strategy.chunks):
        pipeline = 1
    if strategy.virtual_pipeline_model_parallel_size is None:
        pipeline = gcd(pipeline, model.num_layers)
    context = gcd(strategy.context_parallel_size, world // (tensor * pipeline))
    cut: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "sequence_parallel": strategy.sequence_parallel and tensor > 1,
        "data_parallel_replicate_size": 1,
    }
    if pipeline == 1:
        cut["virtual_pipeline_model_parallel_size"] = None
        cut["pipeline_schedule"] = Strategy().pipeline_schedule
    yield strategy.model_copy(update=cut)


def _halved(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The recipe's microbatch, half of it, and so on down to 1."""
    micro = recipe.trainer.micro_batch_size
    while micro:
        yield {"trainer.micro_batch_size": micro}
        micro //= 2


def _remedies(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Overrides that lower the peak, the cheapest first."""
    yield {"model.recompute_granularity": "selective"}
    yield {"model.recompute_granularity": "full"}
    yield {"storage.shard": "zero2"}
    yield {"storage.shard": "fsdp"}
    yield from _halved(recipe)


def _changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe | None:
    """A copy of `recipe` with `values`, to which other keys give way as to typed overrides.

    None if the rules refuse it, or if the batch or the level of MS-AMP would give way: these
    change the numbers.
    """
    old = flat(recipe)
    new = {full(key): value for key, value in values.items() if old[full(key)] != value}
    try:
        changed = resolve_recipe(assigned(recipe, new), dict.fromkeys(new, Rank.USER))
    except ConfigError:
        return None
    trainer, level = changed.recipe.trainer, changed.recipe.precision.opt_level
    if changed.problems or trainer.global_batch_size != recipe.trainer.global_batch_size:
        return None
    return changed.recipe if level == recipe.precision.opt_level else None


def changed_overrides(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """The overrides that change `before` into `after`, one for each key."""
    old = flat(before)
    new = flat(after)
    return tuple(f"{short(key)}={_text(new[key])}" for key in new if new[key] != old[key])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def smoke_run(recipe: Recipe, world: int, backend: Backend) -> Fit | None:
    """The smoke run of `recipe`, unless it is one or its backend does not run it on `world` ranks."""
    if recipe.trainer.smoke:
        return None
    trainer = recipe.trainer.model_copy(update={"smoke": True})
    marked = recipe.model_copy(update={"trainer": trainer})
    try:
        small = smoke.cut_recipe(marked, world)
        backend(small, world)
    except ConfigError:
        return None
    return None if layout_violations(small, world) else Fit(marked, (SMOKE,))


def append_commands(problems: Sequence[str], where: str, lines: Sequence[str]) -> list[str]:
    """`problems`, the last of which ends with the `lines` that run `where`. Empty ones do not.

    A smoke run, which is a few steps of a small model, is named as one.
    """
    problem = problems[-1]
    runs = [line for line in lines if line and SMOKE not in line]
    if runs:
        problem += f"; runs {where}: {' · '.join(runs)}"
    for line in lines:
        if SMOKE in line:
            problem += f"; as a smoke run: {line}"
    return [*problems[:-1], problem]


def append_smallest_peak(problems: Sequence[str], fit: Fit) -> list[str]:
    """`problems`, the last of which ends with the smallest peak, that of `fit`."""
    words = f", with {overrides_only(fit)}" if fit.words else ""
    short = f"the whole model needs at least {size(fit.peak)}{words}"
    return [*problems[:-1], f"{problems[-1]}; {short}"]


def memory_problem(
    recipe: Recipe, device: str, free: int, backend: str | None = None, started: int | None = None
) -> str:
    """Why `recipe` does not fit into `free` bytes on each rank here, or on `started` ranks."""
    part = widest_part(recipe, device, started or ranks(), backend)
    need = sum(plan_memory(recipe, device, part, backend).values())
    if need <= free:
        return ""
    return (
        f"recipe={recipe.name}: needs {size(need)}, this machine has {size(free)} free on {device}"
    )


def check_memory(recipe: Recipe, device: str, free: int, backend: str | None = None) -> None:
    """Raises ConfigError, with the nearest fit, if the run needs more than `free` bytes."""
    problem = memory_problem(recipe, device, free, backend)
    if not problem:
        return

    def same_backend(recipe: Recipe, world: int) -> str | None:
        return backend

    problems = [problem]
    fit = Search(device, free, same_backend).nearest(recipe, ranks())
    if fit and fit.peak > free:
        problems = append_smallest_peak(problems, fit)
        fit = None
    fits = [fit, smoke_run(recipe, ranks(), same_backend)]
    words = " · ".join(overrides_only(fit) for fit in fits if fit)
    raise ConfigError([f"{problems[0]}; nearest that fit: {words}" if words else problems[0]])
