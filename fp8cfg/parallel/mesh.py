"""Device mesh: the ranks of a run on named axes, with torchtitan's names and order.

    pp            pipeline stages with consecutive layers each
    dp_replicate  groups with a full copy of the state each (HSDP)
    dp_shard      data-parallel ranks, over which storage.shard shards state
    cp            context parallelism: parts of each sequence
    tp            tensor parallelism: parts of each matrix

The last axis varies fastest: ranks that communicate most are neighbors. The recipe sets the sizes
of pp, cp and tp. The rest of the ranks is data-parallel. Context ranks have the same weights as
data-parallel ranks and other tokens. So gradients are summed and state is sharded over both axes
together.
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
SAME_PARAMETERS = ("dp_replicate", "dp_shard", "cp")
"""Axes of the ranks with the same layers and the same part of each matrix."""
SAME_LAYERS = AXES[1:]
"""Axes of the ranks of one pipeline stage."""
SAME_SAMPLES = ("cp", "tp")
"""Axes of the ranks of one pipeline stage with the same samples."""


def axis_sizes(strategy: Strategy, ranks: int) -> dict[str, int]:
    """Returns the size of each axis.

    Args:
        strategy: The sizes of pp, dp_replicate, cp and tp.
        ranks: The number of ranks.

    Raises:
        ValueError: The sizes don't divide the number of ranks.
    """
    if ranks % strategy.size:
        raise ValueError(f"{ranks} ranks: not a multiple of {strategy.size} ranks per replica")
    data_ranks = ranks // strategy.size
    groups = strategy.data_parallel_replicate_size
    if data_ranks % groups:
        raise ValueError(f"{data_ranks} data-parallel ranks: not a multiple of {groups} groups")
    return {
        "pp": strategy.pipeline_model_parallel_size,
        "dp_replicate": groups,
        "dp_shard": data_ranks // groups,
        "cp": strategy.context_parallel_size,
        "tp": strategy.tensor_model_parallel_size,
    }


def coordinates(strategy: Strategy, rank: int, ranks: int) -> dict[str, int]:
    """Returns the position of `rank` on each axis."""
    sizes = axis_sizes(strategy, ranks)
    position = {}
    for i, axis in enumerate(AXES):
        # The last axis varies fastest.
        stride = prod(sizes[inner] for inner in AXES[i + 1 :])
        position[axis] = rank // stride % sizes[axis]
    return position


def batch_share(strategy: Strategy, rank: int, ranks: int) -> tuple[int, int]:
    """Returns which share of each batch `rank` reads, and the number of shares.

    Each model replica has one share, read by all of its ranks.
    """
    sizes = axis_sizes(strategy, ranks)
    position = coordinates(strategy, rank, ranks)
    # Context and tensor ranks read the same samples, so they have no part in the number.
    share = position["dp_replicate"] * sizes["dp_shard"] + position["dp_shard"]
    return share, sizes["dp_replicate"] * sizes["dp_shard"]


def group_axes(strategy: Strategy, members: Sequence[int], ranks: int) -> str:
    """Returns the axes along which the members of a process group differ, for messages.

    For example `tp`, `dp_shard x cp`, or `all ranks` if there are several axes.
    """
    num_axes = sum(size > 1 for size in axis_sizes(strategy, ranks).values())
    if len(members) == ranks and num_axes > 1:
        return "all ranks"
    # An axis belongs to the group if its members differ in it.
    positions = [coordinates(strategy, member, ranks) for member in members]
    axes = [axis for axis in AXES if len({position[axis] for position in positions}) > 1]
    return " x ".join(axes) or "this rank alone"


def neighbors(strategy: Strategy, rank: int, ranks: int, limit: int = 8) -> list[int]:
    """Returns ranks that `rank` sends to, for a diagnosis of a stalled run.

    They are the next ranks in three rings: over pipeline stages, over ranks with the same
    parameters, and over tensor-parallel ranks.

    Args:
        strategy: The layout.
        rank: The sender.
        ranks: The number of ranks.
        limit: Most ranks of each ring. The default is the number of GPUs in a machine.
    """
    positions = [coordinates(strategy, peer, ranks) for peer in range(ranks)]
    chosen: set[int] = set()
    for ring_axes in (("pp",), SAME_PARAMETERS, ("tp",)):
        fixed_axes = [axis for axis in AXES if axis not in ring_axes]
        ring = []
        for peer, position in enumerate(positions):
            if all(position[axis] == positions[rank][axis] for axis in fixed_axes):
                ring.append(peer)
        index = ring.index(rank)
        # From the next rank on, around the ring.
        following = ring[index + 1 :] + ring[:index]
        chosen.update(following[:limit])
    return sorted(chosen)


def device_mesh(strategy: Strategy, device: str, shard: str | None = None) -> DeviceMesh:
    """Returns the mesh of the current process group, the same one for each job of the same layout.

    All ranks call it at the same point. Training steps use only its process groups. `submesh` joins
    axes.

    Args:
        strategy: The layout of the ranks.
        device: "cpu" or "cuda".
        shard: storage.shard, resolved, if FSDP2 shards the model. With none each rank has one
            shard, so that all data-parallel ranks are replicas.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    sizes = axis_sizes(strategy, dist.get_world_size())
    if shard == "none":
        sizes["dp_replicate"] *= sizes["dp_shard"]
        sizes["dp_shard"] = 1
    # FSDP2 needs an axis, of one rank if no other rank has shards.
    needs_shard_axis = shard == "none"
    if shard is not None and sizes["dp_shard"] * sizes["cp"] == 1:
        needs_shard_axis = True
    axes = {}
    for axis, size in sizes.items():
        if size > 1 or (axis == "dp_shard" and needs_shard_axis):
            axes[axis] = size
    if dist.group.WORLD is not _CACHE.world:
        forget_meshes()
        _CACHE.world = dist.group.WORLD
    key = (device, *axes.items())
    if key not in _CACHE.meshes:
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        # Creates the process groups of joined axes now, while all ranks are here.
        for joined in (SAME_PARAMETERS, SAME_LAYERS):
            submesh(mesh, joined)
        _CACHE.meshes[key] = mesh
    return _CACHE.meshes[key]


class _MeshCache:
    """The meshes of the process group `world`."""

    def __init__(self) -> None:
        self.world: ProcessGroup | None = None
        self.meshes: dict[tuple[Any, ...], DeviceMesh] = {}


_CACHE = _MeshCache()


def forget_meshes() -> None:
    """Drops the meshes of a process group that has ended, and torch's references to them.

    DTensor caches sharding propagation by the shape of the mesh, with the mesh in the result. A new
    mesh of that shape would get the old one, without process groups (torch 2.13).
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if _CACHE.meshes:
        _clear_sharding_prop_cache()
    _CACHE.world = None
    _CACHE.meshes.clear()


def submesh(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh | None:
    """Returns the one-dimensional mesh of the ranks that differ from this one only along `axes`.

    All ranks call it at the same point. Returns None if there is no other such rank.
    """
    names = mesh.mesh_dim_names or ()
    present = tuple(axis for axis in axes if axis in names and mesh[axis].size() > 1)
    if not present:
        return None
    if len(present) == 1:
        return mesh[present[0]]
    return mesh[present]._flatten("_".join(present))


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh over whose last axis FSDP2 shards state.

    Groups of ranks along the axis before it, if any, sum gradients. With storage.shard=none the
    last axis has one rank, and context ranks are replicas too.
    """
    from torch.distributed.device_mesh import DeviceMesh

    names = mesh.mesh_dim_names or ()
    if "dp_shard" in names and mesh["dp_shard"].size() == 1:
        shards: DeviceMesh | None = mesh["dp_shard"]
        replicas = submesh(mesh, ("dp_replicate", "cp"))
    else:
        shards = submesh(mesh, ("dp_shard", "cp"))
        replicas = submesh(mesh, ("dp_replicate",))
    assert shards is not None, "device_mesh keeps an axis for FSDP2"
    if replicas is None:
        return shards
    # fully_shard replicates over the first axis of a 2-D mesh and shards over the second.
    return DeviceMesh._concatenate([replicas, shards])


def connect(mesh: DeviceMesh) -> None:
    """Makes NCCL connect the ranks of each process group of `mesh`, in the same order on all ranks.

    NCCL connects a group at its first call and waits for all its ranks. If two groups make their
    first calls in different orders on some ranks, as sends between pipeline stages may, the ranks
    wait for each other.
    """
    import torch
    import torch.distributed as dist

    if mesh.device_type != "cuda":
        return
    ones = torch.ones(1, dtype=torch.float32, device="cuda")
    # _flatten_mapping has the joined axes, see `device_mesh`.
    for axis in (*(mesh.mesh_dim_names or ()), *mesh._flatten_mapping):
        dist.all_reduce(ones, group=mesh.get_group(axis))
