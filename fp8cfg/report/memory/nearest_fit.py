"""Nearest fit: the changes that make a recipe fit into a given memory at the least cost, and the refusal of one that does not.

A fit keeps the model and the global batch. It is searched over storage.shard, recomputation, the microbatch, the parallel layout
and MS-AMP's levels, the cheapest first; what contradicts a change gives way as it does to a word of the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, get_args

from fp8cfg.composition.authors import Author
from fp8cfg.composition.flatten import assigned, flat, typed
from fp8cfg.composition.giving_way import settled
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.key_names import full, short
from fp8cfg.config.model import Model
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import sharding
from fp8cfg.config.training_nodes import Strategy
from fp8cfg.layer_plan import plan
from fp8cfg.report.memory.layout import ranks, refused, shards
from fp8cfg.report.memory.peak import linears_of, memory, persistent, widest
from fp8cfg.report.tables import size

RECOMPUTE = {"none": 0.0, "selective": 0.05, "full": 0.33}
"""Cost of model.recompute_granularity in steps: full repeats the forward pass, a third of the products; selective, of attention
alone, takes some per cent (arXiv 2205.05198, section 5)."""
SHARD = {"none": 0.0, "zero1": 0.02, "zero2": 0.03, "fsdp": 0.1}
"""Cost of storage.shard: ZeRO sends what an all-reduce does, FSDP half as much again (arXiv 1910.02054, section 7)."""
STAGED = 0.3
"""Cost of storage.shard=fsdp in pipeline stages beyond that: weights are gathered twice for each of many microbatches. It goes
after full recomputation, which sends no more."""
LAYOUT = 0.5
"""Cost of giving up a layout that runs, which is never changed for the user: it is offered after all that keeps it."""
LEVEL = {None: 0.0, "O1": 1.0, "O2": 1.1, "O3": 1.2}
"""A level changes the numbers, and goes after everything that does not; so does giving one up."""
HALVED = 0.02
"""Cost of halving the microbatch, whose products are smaller then."""
SMOKE = "trainer.smoke=true"

Backend = Callable[[Recipe], str | None]
"""Who multiplies a recipe; raises ConfigError where nobody does."""


@dataclass(frozen=True)
class Fit:
    """`recipe` fits, with `spare` bytes left on each rank. `words` change the recipe that was asked about into it."""

    recipe: Recipe
    words: tuple[str, ...]
    spare: int


@dataclass
class _Search:
    recipe: Recipe
    device: str
    free: int
    world: int
    backend: Backend

    def fits(self) -> Iterator[Fit]:
        """The cheapest fit of the whole model, of the recipe's own sharding and level and of those that store less, and then the
        cheapest that changes nothing of what the first changes. What does not fit at its leanest with split sequences is not tried
        with whole ones, which take more."""
        own_level, ranks = self.recipe.precision.opt_level, shards(self.recipe, self.world)
        levels = {o: self._shard(o, ranks) for o in LEVEL if o is None or LEVEL[o] >= LEVEL[own_level]}
        pairs = [(s, o) for s, (o, own) in product(SHARD, levels.items())
                 if (SHARD[s] >= SHARD[own] if self.world > 1 else s == own)
                 and any(self._lean(layout, s, o) for layout in self._layouts)]
        alive = [(layout, *pair) for layout in self._layouts for pair in pairs]
        every: list[tuple[float, Strategy, str, str | None, str, int]] = [
            (LAYOUT * self._layouts.index(c) + SHARD[s] + STAGED * (s == "fsdp" and c.pipeline_model_parallel_size > 1)
             + abs(LEVEL[o] - LEVEL[own_level]) + RECOMPUTE[r] + HALVED * i, c, s, o, r, m)
            for c, s, o in alive for r in self._recompute for i, m in enumerate(self._micro(c))]
        layout = self._layouts[0]
        kept = (layout, self._shard(own_level, ranks), own_level, self._recompute[0], next(iter(self._micro(layout)), 0))
        taken: set[int] = set()  # places of what the first changes
        for way in (each[1:] for each in sorted(every, key=lambda each: each[0])):
            changes = {i for i, (new, old) in enumerate(zip(way, kept, strict=True)) if new != old}
            if not changes & taken and (found := self._fit(*way)):
                yield found
                if taken or not changes:
                    return
                taken = changes

    @cached_property
    def _layouts(self) -> list[Strategy]:
        """Layouts that run on these ranks, the recipe's own as far as it does first: without a pipeline; without split matrices
        too; of whole replicas on each rank."""
        own = self.recipe.trainer.strategy
        cp, tp, sp = own.context_parallel_size, own.tensor_model_parallel_size, own.sequence_parallel
        found = [own, Strategy(tensor_model_parallel_size=tp, sequence_parallel=sp and tp > 1, context_parallel_size=cp),
                 Strategy(context_parallel_size=cp), Strategy()]
        return [s for i, s in enumerate(found) if self.world % s.size == 0 and s not in found[:i]]

    @cached_property
    def _recompute(self) -> list[str]:
        """What recomputes no less than the recipe does."""
        own = self.recipe.model.recompute_granularity
        offered = get_args(Model.model_fields["recompute_granularity"].annotation)
        return [name for name in sorted(offered, key=lambda name: RECOMPUTE[name]) if RECOMPUTE[name] >= RECOMPUTE[own]]

    def _micro(self, layout: Strategy) -> list[int]:
        """Microbatches, halved from that of the recipe on, that divide the global batch over the data-parallel ranks."""
        t, found = self.recipe.trainer, list[int]()
        size = t.micro_batch_size
        while size:
            found += [size] if t.global_batch_size % (size * self.world // layout.size) == 0 else []
            size //= 2
        return found

    def _shard(self, level: str | None, ranks: int) -> str:
        """The recipe's storage.shard over so many ranks, under a `level`."""
        return sharding(self.recipe.precision.model_copy(update={"opt_level": level}), ranks)

    def _lean(self, layout: Strategy, shard: str, level: str | None) -> bool:
        micro = self._micro(layout)
        return bool(micro) and self._fit(layout, shard, level, self._recompute[-1], micro[-1]) is not None

    def _fit(self, layout: Strategy, shard: str, level: str | None, recompute: str, micro: int) -> Fit | None:
        if shard == self._shard(level, self.world // layout.size * layout.context_parallel_size):
            shard = self.recipe.storage.shard
        values: dict[str, Any] = {"storage.shard": shard, "opt_level": level, "model.recompute_granularity": recompute,
                  "trainer.micro_batch_size": micro}
        found = self.changed({**values, **_layout(layout)})
        if found is None or found.precision.opt_level != level or refused(found, self.world):
            return None
        left = self.spare(found)
        return None if left is None or left < 0 else Fit(found, words(self.recipe, found), left)

    def changed(self, values: Mapping[str, Any]) -> Recipe | None:
        """The recipe with `values`, to which others have given way; None where it is refused."""
        own = flat(self.recipe)
        new = {full(key): value for key, value in values.items() if own[full(key)] != value}
        try:
            found = settled(assigned(self.recipe, new), dict.fromkeys(new, Author.USER))
        except ConfigError:
            return None
        return None if found.problems else found.recipe

    def spare(self, recipe: Recipe) -> int | None:
        """Bytes that `recipe` leaves on each rank, or that its lasting state alone leaves, where that is too much; None where
        nobody multiplies it, or a pattern of layers matches nothing."""
        try:
            part = widest(recipe, self.device, self.world)
            if (left := self.free - sum(persistent(recipe, part, linears_of(recipe, part)).values())) < 0:
                return left
            backend = self.backend(recipe)
        except ConfigError:
            return None
        return self.free - sum(memory(recipe, self.device, part, backend).values())

    def fewer_layers(self) -> Fit | None:
        """The recipe at its leanest with as many layers as fit; None where there is no such number."""
        layout = self._layouts[0]
        lean = self.changed({"trainer.micro_batch_size": (self._micro(layout) or [1])[-1],
                             "model.recompute_granularity": self._recompute[-1], **_layout(layout)})
        each = layout.pipeline_model_parallel_size * layout.chunks  # of as many layers a stage can be made
        least, most = 0, self.recipe.model.num_layers // each  # fits with `least` of them, does not with `most`: halve the rest
        while lean and most - least > 1:
            middle = (least + most) // 2
            some = self._of_layers(lean, middle * each)
            least, most = (middle, most) if some and (self.spare(some) or -1) >= 0 else (least, middle)
        found = self._of_layers(lean, least * each) if lean and least else None
        return Fit(found, words(self.recipe, found), self.spare(found) or 0) if found else None

    def _of_layers(self, lean: Recipe, layers: int) -> Recipe | None:
        some = lean.model_copy(deep=True)
        some.model.num_layers = layers
        try:
            some.check()
            plan(some)
        except ConfigError:
            return None
        return some


def cheapest(recipe: Recipe, device: str, free: int, world: int, backend: Backend) -> Fit | None:
    """The changes at the least cost with which `recipe` runs on `world` ranks, each with `free` bytes of `device`
    ("cpu" or "cuda"); None where it does not, whatever is changed."""
    return next(_Search(recipe, device, free, world, backend).fits(), None)


def alternatives(recipe: Recipe, device: str, free: int, world: int, backend: Backend) -> list[Fit]:
    """The cheapest fit, as `cheapest` has it, and the cheapest of another kind, which changes nothing of what the first changes,
    such as a level where the first recomputes. One or none where there are no more."""
    return list(_Search(recipe, device, free, world, backend).fits())


def refuse_if_too_large(recipe: Recipe, device: str, free: int, backend: str | None = None) -> None:
    """Raise ConfigError where the run needs more than `free` bytes, with the nearest words that fit."""
    if line := too_large(recipe, device, free, backend):
        raise ConfigError(f"{line}; nearest that fit: {' · '.join(nearest(recipe, device, free, lambda _: backend))}")


def too_large(recipe: Recipe, device: str, free: int, backend: str | None = None) -> str:
    """Why `recipe` does not fit into `free` bytes of this machine; empty where it does."""
    need = sum(memory(recipe, device, backend=backend).values())
    return f"recipe={recipe.name}: needs {size(need)}, this machine has {size(free)} free on {device}" if need > free else ""


def nearest(recipe: Recipe, device: str, free: int, backend: Backend) -> Iterator[str]:
    """The words of the cheapest fits on the ranks here, or those of as many layers as fit; and of a smoke run."""
    search = _Search(recipe, device, free, ranks(), backend)
    found = list(search.fits())
    if not found and (fewer := search.fewer_layers()):
        found = [fewer]
    yield from [" ".join(fit.words) for fit in found]
    yield SMOKE


def words(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """The words that make `before` into `after`, a key each, the model's first."""
    old = flat(before)
    return tuple(f"{short(key)}={_word(value)}" for key, value in flat(after).items() if old[key] != value)


def _layout(layout: Strategy) -> dict[str, Any]:
    return {key: typed(key, value) for key, value in flat(layout, "trainer.strategy").items()}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(list(value) if isinstance(value, tuple) else value)
