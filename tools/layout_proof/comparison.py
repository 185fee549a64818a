"""Layout comparison: the bytes that a built job holds on one rank, and those that `plan` says of it."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

from torch import nn

from fp8cfg.building import graph  # noqa: F401 - with Fiddle, loaded before processes are forked
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel import pipeline_schedule  # noqa: F401 - as is torch's
from fp8cfg.parallel.fsdp import gathered_weights
from fp8cfg.parallel.mesh import axis_sizes, coordinates
from fp8cfg.planning.communication import step_traffic
from fp8cfg.planning.layout import Part, stage_parts
from fp8cfg.planning.peak_memory import part_linears, persistent_memory
from fp8cfg.planning.plan_recipe import report_plan
from fp8cfg.planning.plan_report import PlanReport
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.memory_measurement import gradient_tensors, persistent_tensors
from tools.layout_proof.cells import Cell
from tools.layout_proof.collective_counter import CollectiveCounter
from tools.layout_proof.fake_rank import fake_rank, stepped

TOLERANCE = 0.02
"""Of the bytes that are sent over an axis."""
KINDS = ("weights", "masters", "gradients", "moments")


@dataclass(frozen=True)
class Compared:
    """Rank number `rank` of a cell: by kind the bytes that it holds after a step, those planned for it, and those that `plan` says of
    the rank of its stage that has most; with the CPU seconds of building and stepping it."""

    cell: Cell
    layout: str
    place: str
    rank: int
    built: dict[str, int]
    planned: dict[str, int]
    widest: dict[str, int]
    seconds: float
    sent: dict[str, int] | None = None
    planned_sent: dict[str, int] | None = None

    @property
    def equal(self) -> bool:
        """Whether the rank holds and sends what is planned for it, and holds no more than the plan has room for."""
        room = sum(self.built.values()) <= sum(self.widest.values())
        same = self.sent is None or not wrong_axes(self.sent, self.planned_sent or {})
        return room and self.built == self.planned and same


def compare(cell: Cell, place: str, rank: int, count: bool = False) -> Compared:
    """Build and step the job of `cell` as `rank`, in a process of its own, and look at it, and at its collectives where these are to
    `count`. In one process DTensor takes a mesh for an equal one of a group that is gone (torch 2.13)."""
    _planned(cell)
    with ProcessPoolExecutor(1, get_context("fork")) as process:
        return process.submit(_compared, cell, place, rank, count).result()


@cache
def _planned(cell: Cell) -> tuple[Recipe, PlanReport]:
    """The recipe of `cell`, and its plan: the same for all ranks."""
    recipe = cell.compose()
    return recipe, report_plan(recipe, cell.ranks, None)


def _compared(cell: Cell, place: str, rank: int, count: bool) -> Compared:
    (recipe, found), began = _planned(cell), time.process_time()
    counter = CollectiveCounter(recipe.trainer.strategy) if count else None
    with fake_rank(rank, cell.ranks, messages=count):
        job = stepped(recipe, counter)
        held = persistent_tensors(job) | {"gradients": gradient_tensors(job)}
        built = {kind: sum(local(t).nbytes for t in held[kind]) for kind in KINDS}
        if (
            job.prepared.fsdp2 and not held["weights"]
        ):  # which are there from the first pass of a step to its last
            built["weights"] = gathered_bytes(job.model)
    seconds = time.process_time() - began
    part = stage_parts(found.recipe, cell.ranks)[
        coordinates(recipe.trainer.strategy, rank, cell.ranks)["pp"]
    ]
    linears = part_linears(found.recipe, part)
    shard = _shard(recipe, rank, cell.ranks, part)
    each, widest = (
        persistent_memory(found.recipe, part, linears, job.choice.backend, one)
        for one in (shard, None)
    )
    compared = Compared(
        cell,
        _layout(recipe, cell.ranks, found.shard),
        place,
        rank,
        built,
        _chosen(each),
        _chosen(widest),
        seconds,
    )
    if counter is None:
        return compared
    return replace(
        compared,
        sent=dict(counter.sent),
        planned_sent=planned_sent(found.recipe, part, job.choice.backend, shard),
    )


def planned_sent(recipe: Recipe, part: Part, backend: str, rank: int) -> dict[str, int]:
    """Bytes by axis that number `rank` of those with the parameters of `part` sends in a step, as planned."""
    sent = Counter[str]()
    for each in step_traffic(recipe, part, backend, rank):
        sent[each.axis] += each.bytes
    return dict(sent)


def wrong_axes(sent: dict[str, int], planned: dict[str, int]) -> list[str]:
    """The axes whose bytes differ from those `planned` by more than the tolerance.

    An axis that only carries amaxes, losses and norms is not planned: its bytes count as part of
    all that is sent.
    """
    wrong = []
    for axis, size in planned.items():
        counted = sent.get(axis, 0)
        if abs(counted - size) > TOLERANCE * counted:
            wrong.append(axis)
    numbers = {axis: size for axis, size in sent.items() if axis not in planned}
    if sum(numbers.values()) > TOLERANCE * sum(sent.values()):
        wrong += numbers
    return wrong


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of all weights as FSDP2 gathers them; of those in FP8 with the scales of tiles, and the other matrix where there is one."""
    return sum(
        t.nbytes
        for p in gathered_weights(model)
        for t in getattr(p, "tensors", (p,))
        if t is not None and t.dim()
    )


def _chosen(kinds: dict[str, Any]) -> dict[str, int]:
    return {kind: kinds[kind] for kind in KINDS}


def _shard(recipe: Recipe, rank: int, ranks: int, part: Part) -> int:
    """The number of `rank` among those that storage.shard splits state over."""
    strategy = recipe.trainer.strategy
    sizes, place = axis_sizes(strategy, ranks), coordinates(strategy, rank, ranks)
    number = (place["dp_replicate"] * sizes["dp_shard"] + place["dp_shard"]) * sizes["cp"] + place[
        "cp"
    ]
    return number % part.shards


def _layout(recipe: Recipe, ranks: int, shard: str) -> str:
    sizes = axis_sizes(recipe.trainer.strategy, ranks)
    data = sizes["dp_replicate"] * sizes["dp_shard"]
    return f"TP{sizes['tp']} PP{sizes['pp']} CP{sizes['cp']} DP{data} {shard}"
