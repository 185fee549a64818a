"""Every row of the low-precision chart, on one rank and on two: a run that is stopped and resumed ends with the bits of one that
went on, and holds the planned bytes. tools/kill_resume.py --rows kills processes, tools/measure_bytes.py has the table."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.process_group import World
from fp8cfg.planning import remarks
from fp8cfg.planning.layout import rank_part
from fp8cfg.planning.peak_memory import count_parameters, part_linears, persistent_memory
from fp8cfg.training import memory_measurement
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support import sharded_checkpoints, whole_checkpoints
from tests.support.ranks import on_ranks
from tests.support.small import small

sys.path.append(str(Path(__file__).parents[2] / "tools"))  # where the tool finds its neighbour
TOOL = importlib.import_module("measure_bytes")
rows = TOOL.rows
CASES = [(name, ranks) for ranks in (1, 2) for name in rows(ranks)]


def run(job: Job, world: World, first: int, last: int) -> list[list[float]]:
    batches, _ = run_data(job.recipe)
    return [
        [s.loss, s.grad_norm, s.stepped]
        for s in (train_step(job, batches, step, world).wait() for step in range(first, last))
    ]


def end(job: Job) -> dict[str, Any]:
    """What this rank has, and its bytes by kind, of weights without scales of whole tensors."""
    held = memory_measurement.tensors_by_kind(job)
    kinds = {
        kind: sum(t.nbytes for t in tensors if t.dim() or kind != "weights")
        for kind, tensors in held.items()
        if kind != "scales"
    }
    tensors = {
        k: local(t).contiguous().view(-1).view(torch.uint8).clone()
        for k, t in (stored_state_dict(job.model) | job.optimizer.state_tensors()).items()
    }
    return {"tensors": tensors, "json": job.optimizer.state_json(), "bytes": kinds}


def stopped_and_resumed(folder: Path, world: World) -> dict[str, Any]:
    """By row four steps of a run, and the last two of one that goes on from its checkpoint."""
    found: dict[str, Any] = {}
    for name, row in rows(world.size).items():
        recipe = small(
            *row.split(), "model.num_layers=1", "trainer.micro_batch_size=2", "optim.lr=1e-3"
        )
        job = fp8cfg.build(recipe)
        run(job, world, 0, 2)
        sharded_checkpoints.saved(job, world, folder / name, 2)
        resumed = fp8cfg.build(recipe)
        job_state.restore(
            resumed, *whole_checkpoints.load(folder / name / "step-00000002"), run_data(recipe)[0]
        )
        found[name] = [{"steps": run(its, world, 2, 4), **end(its)} for its in (job, resumed)]
    return found


@functools.cache
def on(ranks: int, folder: Path) -> list[dict[str, Any]]:
    work = functools.partial(stopped_and_resumed, folder / str(ranks))
    return on_ranks(ranks, work, folder) if ranks > 1 else [work(World())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_on(
    name: str, ranks: int, folder: Path
) -> None:
    for found in on(ranks, folder):
        went_on, resumed = found[name]
        assert resumed["steps"] == went_on["steps"] and all(
            stepped for _, _, stepped in resumed["steps"]
        )
        assert (
            resumed["json"] == went_on["json"]
            and resumed["tensors"].keys() == went_on["tensors"].keys()
        )
        assert [
            k for k, t in went_on["tensors"].items() if not torch.equal(t, resumed["tensors"][k])
        ] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_rank_that_has_most_holds_the_planned_bytes(
    name: str, ranks: int, folder: Path
) -> None:
    recipe = small(*rows(ranks)[name].split(), "model.num_layers=1")
    part = rank_part(recipe, ranks)
    planned = persistent_memory(recipe, part, part_linears(recipe, part))
    held = [found[name][0]["bytes"] for found in on(ranks, folder)]
    kinds = ("weights", "masters", "gradients", "moments")
    most = max(held, key=lambda its: sum(its[kind] for kind in kinds))
    for kind in kinds:
        assert abs(most[kind] - planned[kind]) <= 1, kind  # a byte of a division


@pytest.mark.parametrize(
    ("row", "ranks", "most"), [("O2", 1, 6.7), ("O3, zero1", 2, 4.6), ("O3, zero2", 2, 4.6)]
)
def test_bytes_of_a_parameter_of_llama_tiny(row: str, ranks: int, most: float) -> None:
    """Embeddings and norms among them."""
    recipe = fp8cfg.compose(["recipe=llama_tiny", *rows(ranks)[row].split()])
    part = rank_part(recipe, ranks)
    kinds = persistent_memory(recipe, part, part_linears(recipe, part))
    assert (
        sum(kinds[k] for k in ("weights", "masters", "gradients", "moments"))
        <= most * count_parameters(recipe, part).total
    )


@pytest.mark.parametrize("text", ["0", "1,-1", "", "1,", "two"])
def test_numbers_of_ranks_are_positive(text: str) -> None:
    assert TOOL.counts("1,2") == [1, 2]
    with pytest.raises(ValueError):
        TOOL.counts(text)


@pytest.mark.parametrize("name", rows(2))
def test_the_plan_names_the_row(name: str) -> None:
    recipe = fp8cfg.compose(["recipe=llama_tiny", *rows(2)[name].split()])
    assert (
        remarks.chart_blocks(recipe, rank_part(recipe))[0]
        .splitlines()[1]
        .startswith(f"this recipe: {name.partition(',')[0]} ")
    )
