"""Search for a fit: the cheapest changes with which a recipe runs in a given memory on a given number of ranks.

The model stays, and the global batch as it was composed. The parallel layout, what its refusals say to write, storage.shard,
MS-AMP's levels, recomputation, kept transposes and the microbatch are tried, the cheapest combination first, and where none fits
weights that are not in FP8 and moments in fewer bits. What contradicts a change gives way as it does to a typed word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple, get_args

from fp8cfg.backends import REFERENCE
from fp8cfg.composition.precedence import Author, settled
from fp8cfg.composition.recipe_yaml import assigned, flat, typed
from fp8cfg.parallel.sharding import ranks
from fp8cfg.planning import smoke
from fp8cfg.planning.layer_plan import plan
from fp8cfg.planning.layout import refused
from fp8cfg.planning.peak_memory import linears_of, memory, persistent, widest
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import full, short
from fp8cfg.schema.model import Model
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.refusal import LayoutRefusal
from fp8cfg.schema.storage import resolved, sharding
from fp8cfg.schema.tables import size
from fp8cfg.schema.training import Strategy

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
CURED = 0.25
"""Cost of writing what the refusals of a layout say, such as float32 masters, which keeps the layout."""
LEVEL = {None: 0.0, "O1": 1.0, "O2": 1.1, "O3": 1.2}
"""A level changes the numbers, and goes after everything that does not; so does giving one up."""
CACHE, TRANSPOSED = "fp8.keep_transpose_cache", 0.01
"""A key that is given up where it contradicts others or takes too much, and the cost of that: each backward pass reads and writes
each weight once more (docs/concepts.md)."""
HALVED = 0.02
"""Cost of halving the microbatch, whose products are smaller then."""
UNQUANTIZED = {"fp8.params": False}
"""Under storage.shard=fsdp no rank has its shards in FP8 beside them: a byte a parameter over the ranks. What is gathered has the
compute dtype then, twice the bytes sent."""
MOMENTS: dict[str, Any] = {"storage.exp_avg": "bf16", "storage.exp_avg_sq": "bf16"}
"""Moments in fewer bits, which change the numbers on any layout: the last that is tried."""

TENSOR = 8
"""Ranks that split a matrix, at most: the GPUs of a machine, within which its activations are exchanged."""


def layouts(recipe: Recipe, world: int) -> list[Strategy]:
    """Layouts that run on `world` ranks: the recipe's own, or as much of it as they and the model's sizes have; without a
    pipeline; without split matrices too; of whole replicas on each rank."""
    own, m = recipe.trainer.strategy, recipe.model
    tensor, stages, context = (
        own.tensor_model_parallel_size,
        own.pipeline_model_parallel_size,
        own.context_parallel_size,
    )
    tensor = gcd(tensor, m.num_attention_heads, m.num_query_groups, m.ffn_hidden_size, m.vocab_size)
    found = [own] if world % own.size == 0 else []
    for tp, pp, cp in ((tensor, stages, context), (tensor, 1, context), (1, 1, context), (1, 1, 1)):
        tp = gcd(tp, world)
        pp = gcd(pp, world // tp)
        layout = Strategy(
            tensor_model_parallel_size=tp,
            sequence_parallel=own.sequence_parallel and tp > 1,
            context_parallel_size=gcd(cp, world // (tp * pp)),
            pipeline_model_parallel_size=pp,
        )
        if pp > 1:
            layout = layout.model_copy(
                update={
                    "virtual_pipeline_model_parallel_size": (
                        own.virtual_pipeline_model_parallel_size
                    ),
                    "pipeline_schedule": own.pipeline_schedule,
                }
            )
        found += [layout] if layout not in found else []
    return found


def wider_layouts(recipe: Recipe, world: int) -> list[Strategy]:
    """Layouts that split sequences or matrices over more ranks than the recipe's own, as far as `world` ranks have whole replicas
    of them: the fewest ranks first, and of as many those that split sequences."""
    own, m = recipe.trainer.strategy, recipe.model
    tensor, context = own.tensor_model_parallel_size, own.context_parallel_size
    cut = gcd(m.num_attention_heads, m.num_query_groups, m.ffn_hidden_size, m.vocab_size)
    splits = [
        (tp, cp)
        for tp in _doubled(tensor, TENSOR)
        for cp in _doubled(context, world)
        if (tp, cp) != (tensor, context)
        and world % (tp * cp * own.pipeline_model_parallel_size) == 0
        and cut % tp == 0
        and (cp == 1 or m.seq_length % (2 * cp) == 0)
    ]
    return [
        own.model_copy(
            update={
                "tensor_model_parallel_size": tp,
                "context_parallel_size": cp,
                "sequence_parallel": tp > 1 and (own.sequence_parallel or tensor == 1),
            }
        )
        for tp, cp in sorted(splits, key=lambda split: (split[0] * split[1], split[0]))
    ]


def _doubled(size: int, most: int) -> list[int]:
    """`size`, and its doubles up to `most`."""
    return [size, *(_doubled(2 * size, most) if 2 * size <= most else [])]


Backend = Callable[[Recipe], str | None]
"""Who multiplies a recipe; raises ConfigError where nobody does."""
Takes = Callable[[Recipe], bool]
"""Whether a run that is gone on with takes a recipe: its checkpoint has the state of some and not of others."""


@dataclass(frozen=True)
class Fit:
    """`recipe` runs, with `spare` bytes left on each rank where it was searched for. `words` change the recipe that was asked about
    into it."""

    recipe: Recipe
    words: tuple[str, ...]
    spare: int = 0


class Way(NamedTuple):
    """One combination to try. `layout` is an index of the search's layouts; `shard` None leaves storage.shard as the recipe has it,
    and is a codec to write otherwise. Where it is `cured`, what the layout's refusals say is written.
    """

    layout: int
    shard: str | None
    level: str | None
    recompute: str
    micro: int
    transposes: bool
    cured: bool = False


@dataclass
class Search:
    """The fits of `recipe`, with the values `also`, on `world` ranks, each with `free` bytes of `device` ("cpu" or "cuda")."""

    recipe: Recipe
    device: str
    free: int
    world: int
    backend: Backend
    also: Mapping[str, Any] = field(default_factory=dict)
    takes: Takes | None = None
    wider: bool = False

    def fits(self) -> Iterator[Fit]:
        """The cheapest fit of the whole model, and then the cheapest that changes nothing of what the first changes beyond the
        layout that the ranks ask for. Where there is none, those without FP8 shards, and those with moments in fewer bits; and last
        those that split sequences and matrices over more ranks."""
        columns, f = resolved(self.recipe.precision), self.recipe.fp8
        narrower = [UNQUANTIZED] if f.enabled and f.params else []
        if columns["exp_avg"] == columns["exp_avg_sq"] == "fp32":
            narrower += [MOMENTS, *({**each, **MOMENTS} for each in narrower)]
        wider = [replace(self, wider=True)] if wider_layouts(self.recipe, self.world) else []
        for search in (self, *(replace(self, also=also) for also in narrower), *wider):
            if found := list(search._cheapest()):
                yield from found
                return

    def _cheapest(self) -> Iterator[Fit]:
        level = self.recipe.precision.opt_level
        kept = Way(
            0, None, level, self._recompute[0], next(iter(self._micro(0)), 0), self._transposes[0]
        )
        own, taken = self._shard(0, level), set[int]()  # taken: places of what the first changes
        for way in sorted(self._ways(), key=self._cost):
            stays = way._replace(shard=None) if way.shard == own else way
            changes = {
                i for i, (new, old) in enumerate(zip(stays, kept, strict=True)) if new != old
            }
            if (
                not changes & taken
                and (found := self._fit(way))
                and (self.takes is None or self.takes(found.recipe))
            ):
                yield found
                if taken or not changes:
                    return
                taken = changes

    def _ways(self) -> Iterator[Way]:
        """Every combination, of the recipe's own sharding and level and those that store less, but for those that do not fit at
        their leanest. A level, which has moments of its own, does not go with others."""
        own = self.recipe.precision.opt_level
        levels = [own] if self.also else [o for o in LEVEL if o is None or LEVEL[o] >= LEVEL[own]]
        for layout in range(len(self._layouts)):
            for level in levels:
                stronger = [
                    s
                    for s in SHARD
                    if SHARD[s] > SHARD[self._shard(layout, level)] and self._sharers(layout) > 1
                ]
                for shard in (None, *stronger):
                    micro = self._micro(layout)
                    for cured in (
                        (False, True) if self._cures[layout] and level == own else (False,)
                    ):
                        if micro and self._fit(
                            Way(layout, shard, level, self._recompute[-1], micro[-1], False, cured)
                        ):
                            yield from (
                                Way(layout, shard, level, r, m, t, cured)
                                for r in self._recompute
                                for m in micro
                                for t in self._transposes
                            )

    def _cost(self, way: Way) -> float:
        shard = way.shard or self._shard(way.layout, way.level)
        staged = shard == "fsdp" and self._layouts[way.layout].pipeline_model_parallel_size > 1
        leveled = abs(LEVEL[way.level] - LEVEL[self.recipe.precision.opt_level])
        halved, made = (
            self._micro(way.layout).index(way.micro),
            way.transposes != self._transposes[0],
        )
        return (
            LAYOUT * way.layout
            + CURED * way.cured
            + SHARD[shard]
            + STAGED * staged
            + leveled
            + RECOMPUTE[way.recompute]
            + HALVED * halved
            + TRANSPOSED * made
        )

    @cached_property
    def _layouts(self) -> list[Strategy]:
        return (wider_layouts if self.wider else layouts)(self.recipe, self.world)

    @cached_property
    def _recompute(self) -> list[str]:
        """What recomputes no less than the recipe does."""
        own = self.recipe.model.recompute_granularity
        offered = get_args(Model.model_fields["recompute_granularity"].annotation)
        return [
            name
            for name in sorted(offered, key=lambda name: RECOMPUTE[name])
            if RECOMPUTE[name] >= RECOMPUTE[own]
        ]

    @cached_property
    def _transposes(self) -> list[bool]:
        """Whether transposes of weights are kept: as the recipe has it, and not."""
        return [True, False] if self.recipe.fp8.keep_transpose_cache else [False]

    @cached_property
    def _cures(self) -> list[dict[str, Any]]:
        """For each layout what the lines that refuse it say to write, and the backend that has it where its own does not run."""
        found = [
            self.changed(
                {
                    "trainer.micro_batch_size": (self._micro(i) or [1])[-1],
                    **self.also,
                    **_keys(layout),
                }
            )
            for i, layout in enumerate(self._layouts)
        ]
        return [self._cure(recipe) if recipe else {} for recipe in found]

    def _cure(self, recipe: Recipe) -> dict[str, Any]:
        written = {
            k: v
            for line in refused(recipe, self.world)
            if isinstance(line, LayoutRefusal)
            for k, v in line.write.items()
        }
        try:
            self.backend(recipe)
        except ConfigError:
            return {**written, "backend": REFERENCE} if recipe.backend != REFERENCE else written
        return written

    def _micro(self, layout: int) -> list[int]:
        """Microbatches, halved from that of the recipe on, that divide the global batch over the data-parallel ranks."""
        t, found = self.recipe.trainer, list[int]()
        size = t.micro_batch_size
        while size:
            found += (
                [size]
                if t.global_batch_size % (size * self.world // self._layouts[layout].size) == 0
                else []
            )
            size //= 2
        return found

    def _sharers(self, layout: int) -> int:
        """Ranks over which storage.shard splits state under a layout."""
        return (
            self.world // self._layouts[layout].size * self._layouts[layout].context_parallel_size
        )

    def _shard(self, layout: int, level: str | None) -> str:
        """The recipe's storage.shard under a layout and a level, with auto resolved."""
        return sharding(
            self.recipe.precision.model_copy(update={"opt_level": level}), self._sharers(layout)
        )

    def _fit(self, way: Way) -> Fit | None:
        layout = self._layouts[way.layout]
        values = {
            "storage.shard": self.recipe.storage.shard,
            "opt_level": way.level,
            "trainer.micro_batch_size": way.micro,
            "model.recompute_granularity": way.recompute,
            CACHE: way.transposes,
            **_keys(layout),
            **self.also,
        }
        values |= (self._cures[way.layout] if way.cured else {}) | (
            {"storage.shard": way.shard} if way.shard else {}
        )
        found = self.changed(values)
        if found is None or found.precision.opt_level != way.level or refused(found, self.world):
            return None
        if found.trainer.global_batch_size != self.recipe.trainer.global_batch_size:
            return None
        left = self.spare(found)
        return (
            None if left is None or left < 0 else Fit(found, differences(self.recipe, found), left)
        )

    def changed(self, values: Mapping[str, Any]) -> Recipe | None:
        """The recipe with `values`, to which others have given way; None where it is refused."""
        own = flat(self.recipe)
        new = {full(key): value for key, value in values.items() if own[full(key)] != value}
        try:
            found = settled(
                assigned(self.recipe, new), {key: Author.USER for key in new if key != full(CACHE)}
            )
        except ConfigError:
            return None
        return None if found.problems else found.recipe

    def spare(self, recipe: Recipe) -> int | None:
        """Bytes that `recipe` leaves on each rank, or that its lasting state alone leaves, where that is too much; None where
        nobody multiplies it, or a pattern of layers matches nothing."""
        try:
            part = widest(recipe, self.device, self.world)
            if (
                left := self.free - sum(persistent(recipe, part, linears_of(recipe, part)).values())
            ) < 0:
                return left
            backend = self.backend(recipe)
        except ConfigError:
            return None
        return self.free - sum(memory(recipe, self.device, part, backend).values())

    def fewer_layers(self) -> Fit | None:
        """The recipe at its leanest with as many layers as fit; None where there is no such number."""
        layout = self._layouts[0]
        lean = self.changed(
            {
                "trainer.micro_batch_size": (self._micro(0) or [1])[-1],
                CACHE: False,
                "model.recompute_granularity": self._recompute[-1],
                **_keys(layout),
            }
        )
        each = (
            layout.pipeline_model_parallel_size * layout.chunks
        )  # of as many layers a stage can be made
        least, most = (
            0,
            self.recipe.model.num_layers // each,
        )  # fits with `least` of them, does not with `most`: halve the rest
        while lean and most - least > 1:
            middle = (least + most) // 2
            some = self._of_layers(lean, middle * each)
            least, most = (
                (middle, most) if some and (self.spare(some) or -1) >= 0 else (least, middle)
            )
        found = self._of_layers(lean, least * each) if lean and least else None
        return (
            Fit(found, differences(self.recipe, found), self.spare(found) or 0) if found else None
        )

    def _of_layers(self, lean: Recipe, layers: int) -> Recipe | None:
        some = lean.model_copy(deep=True)
        some.model.num_layers = layers
        try:
            some.check()
            plan(some)
        except ConfigError:
            return None
        return some


def differences(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """The words that make `before` into `after`, a key each, the model's first."""
    old = flat(before)
    return tuple(
        f"{short(key)}={_word(value)}" for key, value in flat(after).items() if old[key] != value
    )


def _keys(layout: Strategy) -> dict[str, Any]:
    return {key: typed(key, value) for key, value in flat(layout, "trainer.strategy").items()}


def _word(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else json.dumps(list(value) if isinstance(value, tuple) else value)
    )


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
