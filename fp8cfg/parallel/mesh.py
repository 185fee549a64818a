"""Device mesh: the ranks of a run on named axes, in the order and by the names of Megatron and torchtitan.

    pp            pipeline stages, each with consecutive layers
    dp_replicate  groups with all state of the model each (HSDP)
    dp_shard      data-parallel ranks, over which storage.shard splits state
    cp            parts of each sequence
    tp            parts of each matrix

The last axis varies fastest: ranks that talk most are neighbours. The axes of the model (pp, cp, tp) are the recipe's; what the
launch has beyond these is data-parallel. Context ranks have the same weights as data-parallel ones and other tokens, so that
gradients, scales and state go over both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from fp8cfg.schema.training import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def axis_sizes(strategy: Strategy, ranks: int) -> dict[str, int]:
    """The size of each axis on so many ranks. Raises ValueError where these are no whole number of model replicas, or these of
    groups with all state."""
    if ranks % strategy.size:
        raise ValueError(f"{ranks} ranks are no whole number of replicas, each of {strategy.size}")
    data, groups = ranks // strategy.size, strategy.data_parallel_replicate_size
    if data % groups:
        raise ValueError(f"{data} data-parallel ranks are no {groups} groups of equal size")
    return {
        "pp": strategy.pipeline_model_parallel_size,
        "dp_replicate": groups,
        "dp_shard": data // groups,
        "cp": strategy.context_parallel_size,
        "tp": strategy.tensor_model_parallel_size,
    }


def coordinates(strategy: Strategy, rank: int, ranks: int) -> dict[str, int]:
    """The place of `rank` on each axis."""
    sizes = axis_sizes(strategy, ranks)
    inner = {axis: prod(sizes[after] for after in AXES[i + 1 :]) for i, axis in enumerate(AXES)}
    return {axis: rank // inner[axis] % sizes[axis] for axis in AXES}


def batch_share(strategy: Strategy, rank: int, ranks: int) -> tuple[int, int]:
    """The share of each batch that `rank` reads, and how many shares there are: one for each data-parallel rank, whatever the ranks
    that split a model replica."""
    sizes, place = axis_sizes(strategy, ranks), coordinates(strategy, rank, ranks)
    return (
        place["dp_replicate"] * sizes["dp_shard"] + place["dp_shard"],
        sizes["dp_replicate"] * sizes["dp_shard"],
    )


def group_axes(strategy: Strategy, members: Sequence[int], ranks: int) -> str:
    """The axes along which the `members` of a process group differ: tp, or dp_shard x cp; "all ranks" of several axes."""
    if len(members) == ranks and sum(n > 1 for n in axis_sizes(strategy, ranks).values()) > 1:
        return "all ranks"
    places = [coordinates(strategy, member, ranks) for member in members]
    return (
        " x ".join(axis for axis in AXES if len({place[axis] for place in places}) > 1)
        or "this rank alone"
    )


def neighbours(strategy: Strategy, rank: int, ranks: int, most: int = 8) -> list[int]:
    """Ranks that `rank` sends to: of those with another stage, of those with other tokens and of those with another part of
    matrices, all else alike, the next ones after it in a ring, at most so many each; 8 are those of a machine.
    """
    places = [coordinates(strategy, other, ranks) for other in range(ranks)]
    found = set[int]()
    for axes in (AXES[:1], AXES[1:4], AXES[4:]):
        group = [
            other
            for other, place in enumerate(places)
            if all(place[a] == places[rank][a] for a in AXES if a not in axes)
        ]
        after = group.index(rank) + 1
        found.update((group[after:] + group[: after - 1])[:most])
    return sorted(found)


def device_mesh(strategy: Strategy, device: str) -> DeviceMesh:
    """The mesh of the process group that is initialised, over `device` ("cpu" or "cuda"); all ranks call it. Axes of one rank are
    left out, for which there is nothing to send."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {axis: n for axis, n in axis_sizes(strategy, dist.get_world_size()).items() if n > 1}
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard_mesh(strategy: Strategy, device: str) -> DeviceMesh:
    """The mesh of those ranks with the axes shards, those with the same parameters, data-parallel and context ranks together, and
    tp, either of which may be of one rank; and before them pp, where there is a pipeline."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    sizes = axis_sizes(strategy, dist.get_world_size())
    pipeline = {"pp": sizes["pp"]} if sizes["pp"] > 1 else {}
    shape = {
        **pipeline,
        "shards": sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"],
        "tp": sizes["tp"],
    }
    return init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))


def fsdp_mesh(device: str, stages: int, groups: int, tensor: int) -> DeviceMesh:
    """The mesh of the ranks that have this one's of the `stages` of a pipeline and of the `tensor` parts of each matrix: over its
    last axis FSDP2 shards state, over the one before it, where there are several `groups`, these sum gradients. All call it.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shape = {
        "pp": stages,
        "dp_replicate": groups,
        "dp_shard": dist.get_world_size() // (stages * groups * tensor),
        "tp": tensor,
    }
    mesh = init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))
    return mesh["dp_replicate", "dp_shard"] if groups > 1 else mesh["dp_shard"]
