"""Plan of a recipe for GPUs not at hand: which GEMMs run in which format on which backend, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fp8cfg.backends.backend_choice import BLOCK_CUDA, Choice, Hardware, choose
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import as_sharded, sharding
from fp8cfg.layer_plan import plan
from fp8cfg.report import chart, plan_text, speedups
from fp8cfg.report.communication.collectives import Collective
from fp8cfg.report.communication.step import of_step
from fp8cfg.report.coverage import Coverage, planned
from fp8cfg.report.gpus import GPU
from fp8cfg.report.memory.fit_search import Backend, Fit, differences
from fp8cfg.report.memory.layout import Part, parts, refused, shards, shared_by, whole
from fp8cfg.report.memory.machines import machines, placed
from fp8cfg.report.memory.nearest_fit import Line, alternatives, offering, smoke_run, words_alone
from fp8cfg.report.memory.peak import COMING, linears_of, memory, multiplying, parameters
from fp8cfg.report.tables import size

UNBOUNDED = 1 << 62
"""Bytes where no GPU is named: the layout alone is looked at."""


@dataclass(frozen=True)
class Rank:
    """A rank that differs from others in what it holds."""

    part: Part
    """Part of the model that it holds: layers, and ways in which they are split."""
    parameters: int
    """Parameters of that part."""
    memory: dict[str, int]
    """Bytes by kind: weights, masters, gradients, moments, activations, and others."""

    sent: Sequence[Collective] = ()
    """What it sends in a step, by axis of the layout, matter and kind of collective; nothing where there is one rank."""

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes that it sends in a step."""
        return sum(one.bytes for one in self.sent)


@dataclass(frozen=True)
class Plan:
    """Plan of a recipe's run: what multiplies in which format, and what each rank holds. `str()` is what `fp8cfg plan` prints."""

    recipe: Recipe
    """What is planned."""
    world: int
    """Ranks, each with one GPU."""
    gpu: GPU | None
    """GPU of each rank; None is a CPU, which emulates FP8."""
    hardware: Hardware
    """That GPU or CPU as backends see it."""
    choice: Choice | None
    """Who multiplies, and why; None where nobody does."""
    refusals: Sequence[str]
    """Why nobody multiplies; empty where somebody does."""
    coverage: Coverage
    """Formats of every linear layer's three GEMMs, and their share of the FLOPs."""
    ranks: Sequence[Rank]
    """Ranks that differ, one of each kind."""
    problems: Sequence[str] = ()
    """Why it does not run as it stands where somebody multiplies: its layout, its memory, or too little in FP8. Empty where it
    does run."""
    offered: Sequence[Fit] = ()
    """Recipes that run on these ranks in its place, with the words that change it into each; none where there are no `problems`."""
    lines: Sequence[str] = ()
    """Those as whole command lines, with every word that differs from what was typed, of machines and batch too; in Python the
    words alone."""
    built: Mapping[str, Mapping[str, Any]] | None = None
    """Autocast context, optimizer, schedule and loss scaler that will be built, each "name" and its arguments; None where
    nobody multiplies."""

    @property
    def write(self) -> Sequence[str]:
        """Words with which it runs on these ranks, at the least cost; of a smoke run where the whole model does not. Empty where
        there are no `problems`."""
        return self.offered[0].words if self.offered else ()

    @property
    def alternative(self) -> Sequence[str]:
        """Words with which it runs there, too, that change nothing of what `write` changes, such as opt_level=O2 where that
        recomputes; empty where there are none."""
        return self.offered[1].words if len(self.offered) > 1 else ()

    @property
    def backend(self) -> str | None:
        """Who multiplies, where somebody does."""
        return self.choice.backend if self.choice else None

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, each once."""
        return parameters(self.recipe, whole(self.recipe)).total

    @property
    def shard(self) -> str:
        """What storage.shard comes to on these ranks."""
        return sharding(self.recipe.precision, self.widest.part.shards)

    @property
    def widest(self) -> Rank:
        """The rank that takes most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    def recomputing(self, granularity: str) -> int:
        """Bytes of activations, logits and backward pass on the widest rank, less gradients that are to come, under that
        model.recompute_granularity."""
        other = self.recipe.model_copy(
            deep=True,
            update={
                "model": self.recipe.model.model_copy(update={"recompute_granularity": granularity})
            },
        )
        kinds = memory(other, self.hardware.device, self.widest.part, self.backend)
        return kinds["activations"] + kinds["logits"] + kinds["backward"] + kinds.get(COMING, 0)

    def too_small(self) -> dict[str, tuple[int, int]]:
        """Layers that are too small to gain: name -> (in, out) on one rank."""
        part = self.widest.part
        return speedups.too_small(self.recipe, linears_of(self.recipe, part), part)

    def data(self) -> dict[str, Any]:
        """All of the plan as plain data, in an order that stays, as `fp8cfg plan --json` prints it."""
        row, fits = chart.row(self.recipe), self.gpu and self.widest.total <= self.gpu.memory
        each = chart.bytes_per_parameter(row, self.shard, self.widest.part.shards)
        published = speedups.published(self.recipe, self.hardware.capability)
        return {
            "recipe": self.recipe.name,
            "gpu": asdict(self.gpu) if self.gpu else None,
            "gpus": self.world,
            "runs": asdict(self.choice) if self.choice else None,
            "refusals": self.refusals,
            "coverage": self.coverage.data(),
            "chart": {"name": chart.name(self.recipe), **row, "bytes_per_parameter": each},
            "parameters": self.parameters,
            "shard": self.shard,
            "ranks": [
                {
                    "name": rank.part.name,
                    "layers": len(rank.part.layers),
                    "tensor": rank.part.tensor,
                    "context": rank.part.context,
                    "data": rank.part.data,
                    "parameters": rank.parameters,
                    "memory": rank.memory,
                    "total": rank.total,
                    "sent": [asdict(one) for one in rank.sent],
                }
                for rank in self.ranks
            ],
            "widest": self.widest.part.name,
            "fits": fits,
            "problems": self.problems,
            "write": self.write,
            "alternative": self.alternative,
            "lines": self.lines,
            "recompute": {
                granularity: self.recomputing(granularity)
                for granularity in ("none", "selective", "full")
            },
            "published": [asdict(g) for g in published],
            "measured_here": False,
            "too_small": [
                {"name": name, "in": k, "out": n} for name, (k, n) in self.too_small().items()
            ],
            "built": self.built,
        }

    def __str__(self) -> str:
        return plan_text.text(self)


def make(
    recipe: Recipe,
    world: int,
    gpu: GPU | None,
    whole_line: Line = words_alone,
    problems_of_layout: Sequence[str] = (),
) -> Plan:
    """The plan of `recipe`, on a GPU with a CUDA that is new enough for whatever the GPU can do. Raises ConfigError for layer
    patterns that match nothing; and for `problems_of_layout`, and a world that is no whole number of replicas or over which the
    batch does not divide, with what runs there, each fit as `whole_line` has it."""
    hardware = Hardware("cuda", gpu.capability, BLOCK_CUDA) if gpu else Hardware("cpu")
    choice, refusals, memory_of_each = None, list[str](), gpu.memory if gpu else UNBOUNDED
    try:
        choice = _chosen(recipe, hardware, shards(recipe, world))
    except ConfigError as e:
        refusals = e.problems
    try:
        refuse_if(problems_of_layout)
        layout = parts(recipe, world)
    except ConfigError as e:  # there are no ranks of which to say more
        found = (
            _offered(recipe, world, hardware, memory_of_each)
            if choice or recipe.backend != "auto"
            else []
        )
        raise ConfigError(
            [*refusals, *offering(e.problems, "there", list(map(whole_line, found)))]
        ) from None
    backend = choice.backend if choice else None
    ranks = [
        Rank(
            part,
            parameters(recipe, part).total,
            memory(recipe, hardware.device, part, backend),
            of_step(recipe, part, backend or multiplying(recipe)) if world > 1 else (),
        )
        for part in layout
    ]
    coverage = planned(recipe, plan(recipe, backend))
    layout_problems = refused(recipe, world)
    problems = layout_problems or _too_large(recipe, ranks, gpu) if choice else []
    offered = (
        _offered(recipe, world, hardware, memory_of_each) if problems or layout_problems else []
    )
    problems = [*problems, *_below_least(recipe, coverage)]
    return Plan(
        recipe,
        world,
        gpu,
        hardware,
        choice,
        refusals,
        coverage,
        ranks,
        problems,
        offered,
        list(filter(None, map(whole_line, offered))),
    )


def _chosen(recipe: Recipe, hardware: Hardware, ranks: int) -> Choice:
    statistics = recipe.log.fp8_stats_every_n_steps
    return choose(
        as_sharded(recipe.precision, ranks),
        hardware,
        statistics=statistics,
        here=hardware.device == "cpu",
        strategy=recipe.trainer.strategy,
        adapters=recipe.lora.enabled,
    )


def _below_least(recipe: Recipe, coverage: Coverage) -> list[str]:
    least = recipe.fp8.min_coverage
    if not recipe.fp8.enabled or coverage.share >= least:
        return []
    return [f"fp8.min_coverage={least:g}: {coverage.share:.1%} of matmul FLOPs would run in FP8"]


def _too_large(recipe: Recipe, ranks: Sequence[Rank], gpu: GPU | None) -> list[str]:
    need = max(rank.total for rank in ranks)
    if gpu is None or need <= gpu.memory:
        return []
    return [
        f"recipe={recipe.name}: needs {size(need)} on each rank, {gpu.name} has {size(gpu.memory)}"
    ]


def _offered(recipe: Recipe, world: int, hardware: Hardware, free: int) -> list[Fit]:
    """What runs on `world` ranks in the place of `recipe`, of which the machines that make these ranks are a part; on as many of
    them as a launch would start where nothing runs on all; or the smoke run."""
    for ranks in filter(None, dict.fromkeys([world, shared_by(recipe, world)])):
        if found := _fits(recipe, ranks, hardware, free):
            return found
    return smoke_run(recipe, world, _backend(hardware, world))


def _fits(recipe: Recipe, ranks: int, hardware: Hardware, free: int) -> list[Fit]:
    here = (
        recipe
        if ranks == recipe.trainer.num_nodes * recipe.trainer.devices
        else placed(recipe, *machines(ranks))
    )
    found = alternatives(here, hardware.device, free, ranks, _backend(hardware, ranks))
    return [replace(fit, words=differences(recipe, fit.recipe)) for fit in found]


def _backend(hardware: Hardware, ranks: int) -> Backend:
    return lambda recipe: _chosen(recipe, hardware, shards(recipe, ranks)).backend
