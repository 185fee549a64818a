"""The plan of a recipe, before there is a GPU: who multiplies what in which format, and what each rank holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fp8cfg.backends.backend_choice import BLOCK_CUDA, Choice, Hardware, choose
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.layer_plan import plan
from fp8cfg.report import chart, speedups
from fp8cfg.report.coverage import Coverage, planned
from fp8cfg.report.gpus import GPU
from fp8cfg.report.memory.layout import Part, parts
from fp8cfg.report.memory.peak import linears_of, memory, parameters


@dataclass(frozen=True)
class Rank:
    """A rank's part of the model, how many parameters that are, and its memory by kind."""

    part: Part
    parameters: int
    memory: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """A recipe on `world` ranks, each with `gpu`, or with a CPU where that is None. `choice` is who multiplies there; where it
    is None `refusals` say why nobody does. `ranks` are those that differ."""

    recipe: Recipe
    world: int
    gpu: GPU | None
    hardware: Hardware
    choice: Choice | None
    refusals: list[str]
    coverage: Coverage
    ranks: list[Rank]

    @property
    def backend(self) -> str | None:
        """Who multiplies, where somebody does."""
        return self.choice.backend if self.choice else None

    @property
    def widest(self) -> Rank:
        """The rank that takes most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    def recomputing(self, granularity: str) -> int:
        """Bytes of activations, logits and backward pass on the widest rank, under that model.recompute_granularity."""
        other = self.recipe.model_copy(deep=True, update={
            "model": self.recipe.model.model_copy(update={"recompute_granularity": granularity})})
        kinds = memory(other, self.hardware.device, self.widest.part, self.backend)
        return kinds["activations"] + kinds["logits"] + kinds["backward"]

    def too_small(self) -> dict[str, tuple[int, int]]:
        """Layers that are too small to gain: name -> (in, out) on one rank."""
        part = self.widest.part
        return speedups.too_small(self.recipe, linears_of(self.recipe, part), part)


def make(recipe: Recipe, world: int, gpu: GPU | None) -> Plan:
    """The plan of `recipe`, on a GPU with a CUDA that is new enough for whatever the GPU can do. Raises ConfigError for layer
    patterns that match nothing and a world that does not divide."""
    hardware = Hardware("cuda", gpu.capability, BLOCK_CUDA) if gpu else Hardware("cpu")
    choice, refusals = None, list[str]()
    try:
        choice = choose(recipe.precision, hardware, statistics=recipe.log.fp8_stats_every_n_steps, here=gpu is None)
    except ConfigError as e:
        refusals = e.problems
    backend = choice.backend if choice else None
    ranks = [Rank(part, parameters(recipe, part).total, memory(recipe, hardware.device, part, backend))
             for part in parts(recipe, world)]
    coverage = planned(recipe, plan(recipe, backend))
    return Plan(recipe, world, gpu, hardware, choice, refusals, coverage, ranks)


def data(p: Plan) -> dict[str, Any]:
    """All of the plan as plain data, in an order that stays."""
    row, fits = chart.row(p.recipe), p.gpu and p.widest.total <= p.gpu.memory
    each = chart.bytes_per_parameter(row, p.recipe.storage.shard, p.widest.part.data)
    return {
        "recipe": p.recipe.name, "gpu": asdict(p.gpu) if p.gpu else None, "gpus": p.world,
        "runs": asdict(p.choice) if p.choice else None, "refusals": p.refusals,
        "coverage": p.coverage.data(),
        "chart": {"name": chart.name(p.recipe), **row, "bytes_per_parameter": each},
        "ranks": [{"name": rank.part.name, "layers": len(rank.part.layers), "tensor": rank.part.tensor,
                   "context": rank.part.context, "data": rank.part.data, "parameters": rank.parameters,
                   "memory": rank.memory, "total": rank.total} for rank in p.ranks],
        "widest": p.widest.part.name, "fits": fits,
        "recompute": {granularity: p.recomputing(granularity) for granularity in ("none", "full")},
        "published": [asdict(g) for g in speedups.published(p.recipe, p.hardware.capability)], "measured_here": False,
        "too_small": [{"name": name, "in": k, "out": n} for name, (k, n) in p.too_small().items()],
    }
