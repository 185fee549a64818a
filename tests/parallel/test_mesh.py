"""Device mesh: which ranks are neighbours, along which axes, and which share of the batch they read."""

from __future__ import annotations

import pytest

from fp8cfg.parallel.mesh import AXES, batch_share, coordinates, group_axes, neighbours
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
    assert neighbours(layout, 0, 32) == [1, *range(2, 16, 2), 16]
    assert neighbours(Strategy(), 14, 16) == [*range(7), 15]


def test_ranks_of_a_replica_are_neighbours_and_read_one_share() -> None:
    strategy = Strategy(pipeline_model_parallel_size=2, context_parallel_size=2)
    assert coordinates(strategy, 5, 8) == dict(zip(AXES, (1, 0, 0, 1, 0), strict=True))
    assert [batch_share(strategy, rank, 8) for rank in range(8)] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ] * 2
    with pytest.raises(ValueError, match="6 ranks are no whole number of replicas, each of 4"):
        batch_share(strategy, 0, 6)
