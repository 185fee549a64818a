"""Device mesh: which ranks are neighbors, along which axes, and which share of the batch they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8cfg.parallel.mesh import (
    AXES,
    SAME_LAYERS,
    SAME_PARAMETERS,
    SAME_SAMPLES,
    axis_sizes,
    batch_share,
    coordinates,
    device_mesh,
    forget_meshes,
    fsdp_mesh,
    group_axes,
    neighbors,
    submesh,
)
from fp8cfg.schema.training import Strategy


def test_the_axes_of_a_process_group_are_those_along_which_its_ranks_differ() -> None:
    layout = Strategy(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2
    )
    groups = {
        "tp": [4, 5],
        "cp": [1, 3],
        "dp_shard": [8, 12],
        "pp": [3, 19],
        "dp_shard x cp": [0, 2, 4, 6, 8, 10, 12, 14],
        "cp x tp": [0, 1, 2, 3],
        "all ranks": range(32),
    }
    assert {axes: group_axes(layout, list(members), 32) for axes, members in groups.items()} == {
        axes: axes for axes in groups
    }
    assert (
        group_axes(Strategy(context_parallel_size=2), [0, 1], 2) == "cp"
        and group_axes(Strategy(), [0, 1], 2) == "dp_shard"
    )
    assert group_axes(Strategy(data_parallel_replicate_size=2), [1, 3], 4) == "dp_replicate"
    assert neighbors(layout, 0, 32) == [1, *range(2, 16, 2), 16]
    assert neighbors(Strategy(), 14, 16) == [*range(7), 15]


def test_ranks_of_a_replica_are_neighbors_and_read_one_share() -> None:
    strategy = Strategy(pipeline_model_parallel_size=2, context_parallel_size=2)
    assert coordinates(strategy, 5, 8) == dict(zip(AXES, (1, 0, 0, 1, 0), strict=True))
    assert [batch_share(strategy, rank, 8) for rank in range(8)] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ] * 2
    with pytest.raises(ValueError, match="6 ranks: not a multiple of 4 ranks per replica"):
        batch_share(strategy, 0, 6)


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int], None]]:
    """Starts torch's fake process group of so many ranks, of which this process is the first."""

    def start(ranks: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)  # type: ignore[no-untyped-call]

    yield start
    dist.destroy_process_group()
    forget_meshes()


TENSOR, PIPELINE = Strategy(tensor_model_parallel_size=2), "pipeline_model_parallel_size"
EVERY = Strategy(**{**TENSOR.model_dump(), PIPELINE: 2, "context_parallel_size": 2})
HYBRID = Strategy(data_parallel_replicate_size=2, context_parallel_size=2)


@pytest.mark.parametrize(
    ("strategy", "shard", "fsdp"),
    [
        (EVERY, "fsdp", [(0, 2, 4, 6)]),
        (EVERY, "none", [(0, 2, 4, 6), (0,)]),
        (EVERY, None, None),
        (TENSOR, "zero1", [(0, 2, 4, 6, 8, 10, 12, 14)]),
        (HYBRID, "fsdp", [(0, 8), (0, 1, 2, 3, 4, 5, 6, 7)]),
        (Strategy(), "none", [tuple(range(16)), (0,)]),
        (Strategy(**{PIPELINE: 16}), "fsdp", [(0,)]),
    ],
)
def test_each_set_of_ranks_has_one_process_group(
    strategy: Strategy,
    shard: str | None,
    fsdp: list[tuple[int, ...]] | None,
    fake_ranks: Callable[[int], None],
) -> None:
    """However many jobs are built; FSDP2 shards over the last axis of its mesh."""
    fake_ranks(16)
    for _ in range(2):
        mesh = device_mesh(strategy, "cpu", shard)
        for axes in (SAME_PARAMETERS, SAME_LAYERS, SAME_SAMPLES):
            joined = submesh(mesh, axes)
            ranks = [0] if joined is None else dist.get_process_group_ranks(joined.get_group())
            differing = [
                axis
                for axis in AXES
                if len({coordinates(strategy, rank, 16)[axis] for rank in ranks}) > 1
            ]
            sizes = axis_sizes(strategy, 16)
            assert differing == [axis for axis in axes if sizes[axis] > 1]
        if fsdp is not None:
            groups = fsdp_mesh(mesh).get_all_groups()
            assert [tuple(dist.get_process_group_ranks(group)) for group in groups] == fsdp
    every = [
        tuple(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map
    ]
    assert len(every) == len(set(every)), every


def test_a_second_process_group_has_its_own_meshes(fake_ranks: Callable[[int], None]) -> None:
    """DTensor caches results by the shape of a mesh, with the mesh: its groups would have ended."""
    for before in ([EVERY], []):
        fake_ranks(8)
        for strategy in before:  # so that groups have other numbers
            device_mesh(strategy, "cpu")
        mesh = device_mesh(TENSOR, "cpu")["tp"]
        doubled: Any = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False) * 2
        assert doubled.device_mesh.get_group() in dist.distributed_c10d._world.pg_map
