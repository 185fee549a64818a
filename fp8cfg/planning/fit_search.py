"""Search for a fit: tries changes in order of cost until a recipe fits into memory.

Changes accumulate. A change is skipped if a rule rejects it or if it does not lower the peak:

    recompute selective, recompute full
    storage.shard=zero2, storage.shard=fsdp
    half the microbatch, down to 1
    twice the ranks, starting again from the recipe's settings

The model and the global batch stay. The parallel layout is only reduced if it does not divide the
ranks. The backend changes to native if it does not support the layout.
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
from fp8cfg.planning.coverage import check_min_coverage, planned_coverage
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.planning.layout import layout_violations, place_on_gpus, split_into_nodes, uneven_batch
from fp8cfg.planning.peak_memory import plan_memory, widest_part
from fp8cfg.schema.errors import ConfigError, NotFP8Error
from fp8cfg.schema.keys import full, short
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import size
from fp8cfg.schema.training import Strategy

SMOKE = "trainer.smoke=true"

Backend = Callable[[Recipe, int], str | None]
"""Returns the backend of a recipe on a number of ranks. Raises ConfigError if none runs it."""
IsResumable = Callable[[Recipe], bool]
"""Returns whether `resume` accepts a changed recipe."""


@dataclass(frozen=True)
class Fit:
    """A recipe that runs, and the overrides to get it from the original recipe.

    Attributes:
        recipe: The changed recipe.
        words: The overrides, such as "storage.shard=fsdp".
        ranks: Number of ranks, if the recipe needs more than requested, or its own number.
            None otherwise.
        peak: Planned peak memory in bytes on each rank.
    """

    recipe: Recipe
    words: tuple[str, ...]
    ranks: int | None = None
    peak: int = 0

    def where(self, here: str) -> str:
        """Returns `here`, or "on N GPUs" if the recipe needs another number of ranks."""
        if self.ranks:
            return f"on {self.ranks} GPU{'s' * (self.ranks > 1)}"
        return here


CommandLine = Callable[[Fit], str]
"""Returns the command line of a fit, or "" if the command would reject the recipe."""


def overrides_only(fit: Fit) -> str:
    """Returns the overrides of a fit, for messages of the Python API."""
    return " ".join(fit.words)


@dataclass(frozen=True)
class Search:
    """Search for a recipe that fits into the memory of each rank.

    Attributes:
        device: "cpu" or "cuda".
        free: Free bytes on each rank.
        backend: Chooses the backend of a changed recipe.
        is_resumable: Whether `resume` accepts a changed recipe. None accepts all.
    """

    device: str
    free: int
    backend: Backend
    is_resumable: IsResumable | None = None

    def nearest(self, recipe: Recipe, world: int) -> Fit | None:
        """Finds the nearest recipe that fits.

        Args:
            recipe: The recipe.
            world: Number of ranks. On GPUs the number is doubled until the recipe fits.

        Returns:
            The fit. If nothing fits, the recipe with the smallest peak: compare `peak` with
            `free`. None if no layout runs on these ranks.
        """
        best = self._climb(recipe, world)
        num_ranks = world
        # An emulated run on CPUs is not worth twice the machines.
        while best and best.peak > self.free and self.device == "cuda":
            num_ranks *= 2
            fit = self._climb(place_on_gpus(recipe, *split_into_nodes(num_ranks)), num_ranks)
            # More ranks than samples in the global batch have no layout. This ends the loop.
            if fit is None:
                break
            if fit.peak < best.peak:
                words = changed_overrides(recipe, fit.recipe)
                best = Fit(fit.recipe, words, num_ranks, fit.peak)
        return best

    def _climb(self, recipe: Recipe, world: int) -> Fit | None:
        """Adds changes on `world` ranks until the recipe fits."""
        start = self._start(recipe, world)
        if start is None:
            return None
        best, peak = start
        for remedy in _remedies(best):
            if peak <= self.free:
                break
            changed = _changed(best, remedy)
            if changed is None:
                continue
            changed_peak = self._peak(changed, world)
            if changed_peak is not None and changed_peak < peak:
                best, peak = changed, changed_peak
        return Fit(best, changed_overrides(recipe, best), peak=peak)

    def _start(self, recipe: Recipe, world: int) -> tuple[Recipe, int] | None:
        """The first layout, backend and microbatch that run on `world` ranks, and their peak."""
        # The recipe's own values come first. The microbatch changes before backend and layout.
        backends = dict.fromkeys([recipe.backend, REFERENCE])
        for layout, backend, micro in product(_layouts(recipe, world), backends, _halved(recipe)):
            values = {**flat(layout, "trainer.strategy"), "backend": backend, **micro}
            changed = _changed(recipe, values)
            if changed is None:
                continue
            peak = self._peak(changed, world)
            if peak is not None:
                return changed, peak
        return None

    def _peak(self, recipe: Recipe, world: int) -> int | None:
        """Peak in bytes of the widest rank, None if the recipe does not run on `world` ranks."""
        # The layout checks come first: planning assumes a layout that divides the ranks.
        if layout_violations(recipe, world) or uneven_batch(recipe, world):
            return None
        if self.is_resumable and not self.is_resumable(recipe):
            return None
        try:
            backend = self.backend(recipe, world)
            if recipe.fp8.min_coverage:
                check_min_coverage(recipe, planned_coverage(recipe, plan_layers(recipe, backend)))
            part = widest_part(recipe, self.device, world, backend)
            return sum(plan_memory(recipe, self.device, part, backend).values())
        except (ConfigError, NotFP8Error):
            return None


def _layouts(recipe: Recipe, world: int) -> Iterator[Strategy]:
    """The recipe's layout, then a layout reduced to divisors of `world` and of the model."""
    strategy, model = recipe.trainer.strategy, recipe.model
    # If the ranks do not suffice for all axes, tensor comes first, then pipeline, then context.
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
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "sequence_parallel": strategy.sequence_parallel and tensor > 1,
        "data_parallel_replicate_size": 1,
    }
    if pipeline == 1:
        sizes["virtual_pipeline_model_parallel_size"] = None
        sizes["pipeline_schedule"] = Strategy().pipeline_schedule
    yield strategy.model_copy(update=sizes)


def _halved(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Overrides for the recipe's microbatch, half of it, and so on down to 1."""
    micro = recipe.trainer.micro_batch_size
    while micro:
        yield {"trainer.micro_batch_size": micro}
        micro //= 2


def _remedies(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Overrides to lower the peak, the cheapest first."""
    # Recomputation costs compute, shards cost communication, and a smaller microbatch makes every
    # GEMM less efficient.
    yield {"model.recompute_granularity": "selective"}
    yield {"model.recompute_granularity": "full"}
    yield {"storage.shard": "zero2"}
    yield {"storage.shard": "fsdp"}
    yield from _halved(recipe)


def _changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe | None:
    """A copy of `recipe` with new values, None if they conflict with other settings.

    The values act like overrides on the command line: conflicting defaults and presets are
    changed. A change of the global batch or of the MS-AMP level counts as a conflict, because it
    changes the training results.
    """
    old = flat(recipe)
    new = {full(key): value for key, value in values.items() if old[full(key)] != value}
    try:
        changed = resolve_recipe(assigned(recipe, new), dict.fromkeys(new, Rank.USER))
    except ConfigError:
        return None
    if changed.problems:
        return None
    if changed.recipe.trainer.global_batch_size != recipe.trainer.global_batch_size:
        return None
    if changed.recipe.precision.opt_level != recipe.precision.opt_level:
        return None
    return changed.recipe


def changed_overrides(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """Returns the overrides to get from one recipe to another, one per changed key."""
    old = flat(before)
    new = flat(after)
    return tuple(f"{short(key)}={_text(new[key])}" for key in new if new[key] != old[key])


def _text(value: Any) -> str:
    """A value in the syntax of overrides: JSON, but strings without quotes."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def smoke_run(recipe: Recipe, world: int, backend: Backend) -> Fit | None:
    """Returns the smoke run of a recipe.

    Args:
        recipe: The recipe.
        world: Number of ranks.
        backend: Chooses the backend.

    Returns:
        The recipe with trainer.smoke=true, not yet cut. None if it is a smoke run already, or if
        its smoke run has no backend or layout on these ranks.
    """
    if recipe.trainer.smoke:
        return None
    trainer = recipe.trainer.model_copy(update={"smoke": True})
    marked = recipe.model_copy(update={"trainer": trainer})
    try:
        small = smoke.cut_recipe(marked, world)
        backend(small, world)
    except ConfigError:
        return None
    if layout_violations(small, world):
        return None
    return Fit(marked, (SMOKE,))


def append_commands(problems: Sequence[str], where: str, lines: Sequence[str]) -> list[str]:
    """Appends command lines without these problems to the last problem.

    Args:
        problems: Error lines.
        where: Place of the run, such as "here" or "on 16 GPUs".
        lines: Command lines. Empty ones are skipped. A smoke run is labeled as one.

    Returns:
        A new list of error lines.
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
    """Appends the smallest peak to the last problem, for recipes that fit nowhere."""
    problem = f"{problems[-1]}; the whole model needs at least {size(fit.peak)}"
    if fit.words:
        problem += f", with {overrides_only(fit)}"
    return [*problems[:-1], problem]


def memory_problem(
    recipe: Recipe, device: str, free: int, backend: str | None = None, started: int | None = None
) -> str:
    """Returns an error line if a recipe does not fit into memory, else "".

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        free: Free bytes on each rank.
        backend: Name of the backend. Defaults to the recipe's.
        started: Number of ranks. Defaults to the launched ranks.
    """
    part = widest_part(recipe, device, started or ranks(), backend)
    need = sum(plan_memory(recipe, device, part, backend).values())
    if need <= free:
        return ""
    return (
        f"recipe={recipe.name}: needs {size(need)}, this machine has {size(free)} free on {device}"
    )


def check_memory(recipe: Recipe, device: str, free: int, backend: str | None = None) -> None:
    """Raises ConfigError if a recipe needs more than `free` bytes on a rank.

    The message has overrides for the nearest recipe that fits. For the arguments see
    `memory_problem`.
    """
    problem = memory_problem(recipe, device, free, backend)
    if not problem:
        return

    def same_backend(recipe: Recipe, world: int) -> str | None:
        return backend

    fits = []
    nearest = Search(device, free, same_backend).nearest(recipe, ranks())
    if nearest and nearest.peak > free:
        [problem] = append_smallest_peak([problem], nearest)
    elif nearest:
        fits.append(nearest)
    smoke_fit = smoke_run(recipe, ranks(), same_backend)
    if smoke_fit:
        fits.append(smoke_fit)
    if fits:
        problem += f"; nearest that fit: {' · '.join(map(overrides_only, fits))}"
    raise ConfigError([problem])
