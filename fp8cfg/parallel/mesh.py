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
from typing import TYPE_CHECKING, Any

from fp8cfg.schema.training import Strategy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
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


def device_mesh(strategy: Strategy, device: str, shard: str | None = None) -> DeviceMesh:
    """Returns the mesh of the current process group, the same one for each job of the same layout.

    All ranks call it at the same point. Its process groups are the only ones that a job has: `submesh` joins its axes.

    Args:
        strategy: The layout of the ranks.
        device: "cpu" or "cuda".
        shard: storage.shard, resolved, if FSDP2 shards the model. Under none it has one shard on each rank, so that all
            data-parallel ranks are replicas.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    sizes = axis_sizes(strategy, dist.get_world_size())
    if shard == "none":
        sizes["dp_replicate"] *= sizes["dp_shard"]
        sizes["dp_shard"] = 1
    sharded_alone = shard == "none" or (shard is not None and sizes["dp_shard"] * sizes["cp"] == 1)
    axes = {
        axis: size
        for axis, size in sizes.items()
        if size > 1 or (axis == "dp_shard" and sharded_alone)  # FSDP2 needs this axis
    }
    if dist.group.WORLD is not _LAYOUTS.world:
        forget_meshes()
        _LAYOUTS.world = dist.group.WORLD
    key = (device, *axes.items())
    if key not in _LAYOUTS.meshes:
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        for joined in (SAME_PARAMETERS, SAME_LAYERS):  # now, when all ranks are here
            submesh(mesh, joined)
        _LAYOUTS.meshes[key] = mesh
    return _LAYOUTS.meshes[key]


class _Layouts:
    """The meshes of the process group `world`."""

    def __init__(self) -> None:
        self.world: ProcessGroup | None = None
        self.meshes: dict[tuple[Any, ...], DeviceMesh] = {}


_LAYOUTS = _Layouts()


def forget_meshes() -> None:
    """Drop the meshes of a process group that has ended, and what torch keeps of them.

    DTensor caches the results of sharding propagation by a mesh's shape, with the mesh inside. A new mesh of that shape would get
    the old one, whose process groups are gone (torch 2.13).
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if _LAYOUTS.meshes:
        _clear_sharding_prop_cache()
    _LAYOUTS.world = None
    _LAYOUTS.meshes.clear()


SAME_PARAMETERS = ("dp_replicate", "dp_shard", "cp")
"""The axes of the ranks that have the same layers and the same part of each matrix."""
SAME_LAYERS = AXES[1:]
"""The axes of the ranks of a pipeline stage."""
SAME_SAMPLES = ("cp", "tp")
"""The axes of the ranks of a pipeline stage that read the same samples."""


def submesh(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh | None:
    """Returns the one-dimensional mesh of the ranks that differ from this one along `axes` only, in the order of AXES; None if
    there is no other. All ranks call it at the same point."""
    names = mesh.mesh_dim_names or ()
    present = tuple(axis for axis in axes if axis in names and mesh[axis].size() > 1)
    if not present:
        return None
    if len(present) == 1:
        return mesh[present[0]]
    return mesh[present]._flatten("_".join(present))


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh over whose last axis FSDP2 shards state. The groups along the axis before it, if any, sum gradients.

    Under storage.shard=none, whose last axis has one rank, context ranks are replicas too.
    """
    from torch.distributed.device_mesh import DeviceMesh

    shards = submesh(mesh, ("dp_shard", "cp"))
    replicas = submesh(mesh, ("dp_replicate",))
    if "dp_shard" in (mesh.mesh_dim_names or ()) and mesh["dp_shard"].size() == 1:
        shards = mesh["dp_shard"]
        replicas = submesh(mesh, ("dp_replicate", "cp"))
    assert shards is not None, "device_mesh keeps an axis for FSDP2"
    if replicas is None:
        return shards
    return DeviceMesh._concatenate([replicas, shards])


def connect(mesh: DeviceMesh) -> None:
    """Let NCCL connect the ranks of each process group of `mesh`, in one order on all ranks.

    NCCL connects a group at its first call, and waits for all its ranks then. Two groups whose first calls come in another order on
    some rank, as sends between pipeline stages may, would wait for each other.
    """
    import torch
    import torch.distributed as dist

    if mesh.device_type != "cuda":
        return
    one = torch.ones(1, dtype=torch.float32, device="cuda")
    for axis in (*(mesh.mesh_dim_names or ()), *mesh._flatten_mapping):
        dist.all_reduce(one, group=mesh.get_group(axis))
