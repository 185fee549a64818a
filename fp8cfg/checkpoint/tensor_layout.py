"""Tensor layout: which part of each tensor of a job this rank keeps, to write it and to read it.

Matrices may be split over tensor-parallel ranks, and what a rank then has over data-parallel ones by FSDP2. What every rank has, or
those have that share matrices, is listed as copies, of which one is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.models.weight_init import TensorShard
from fp8cfg.numerics import FP8Linear
from fp8cfg.numerics.codecs import BLOCK
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.numerics.scaling import WEIGHT
from fp8cfg.optim.low_bit.columns import fits, local
from fp8cfg.parallel.process_group import World, data_parallel_world
from fp8cfg.parallel.sharded_state import as_dtensor
from fp8cfg.parallel.sharding import balance_over_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from fp8cfg.parallel.tensor import TensorRank

SUFFIX = ".scale_inv"
SAFETENSORS = ".safetensors"


def parameter(name: str) -> str:
    """The parameter of whose state the scales called `name` are."""
    return name.removesuffix(SUFFIX).rpartition(".")[0]


def split(p: Any, shard: TensorShard | None) -> tuple[TensorShard | None, DTensor | None]:
    """How the block scales of `p` are split, which is the part `shard` of a tensor, and, of the other kind, as which parameter of
    FSDP2. Neither where a cut goes through blocks: this rank has no such scales then, and reads all.
    """
    by_rows = hasattr(p, "placements")
    if (shard and shard.run(p.shape) % BLOCK) or (
        by_rows and not fits(p.shape, p.device_mesh.size(p.device_mesh.ndim - 1), BLOCK)
    ):
        return None, None
    return shard, p if by_rows else None


def joined(part: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """The scales of whole rows, so many, from those of each rank's columns. All ranks of `group` call it."""
    every = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, part.contiguous(), group=group)
    return torch.cat([one.view(rows, -1, *part.shape[1:]) for one in every], 1).flatten(0, 1)


def own(whole: Tensor, rows: int, shard: TensorShard) -> Tensor:
    """Of the scales of so many whole rows those of the columns of `shard`."""
    return whole.view(rows, -1, *whole.shape[1:]).chunk(shard.ranks, 1)[shard.rank].flatten(0, 1)


Offsets = tuple[int, ...]


@dataclass(frozen=True)
class TensorBox:
    """`tensor`, plain, stands at `offsets` in the tensor `name`, whose whole has `shape`. It is copy number `copy` of `copies`, on
    the ranks along the axes `along`, each of which lists the same boxes along these in the same order. `also` are other names of
    the tensor.

    The layout of a run says nothing else of itself to a checkpoint: whatever splits a model lists the boxes of each rank.
    """

    name: str
    shape: Offsets
    offsets: Offsets
    tensor: Tensor
    copy: int = 0
    copies: int = 1
    along: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


Boxes = list[TensorBox]
Groups = dict[str, Boxes]
"""Boxes by the group of tensors that they belong to: model, optimizer, fp8."""


def to_write(groups: Mapping[str, Sequence[TensorBox]]) -> Groups:
    """The boxes that this rank writes: of those that several ranks have about the same bytes each."""
    alike = defaultdict[tuple[int, int, tuple[str, ...]], list[tuple[str, TensorBox]]](list)
    for group, boxes in groups.items():
        for box in boxes:
            alike[box.copy, box.copies, box.along].append((group, box))
    kept: Groups = {group: [] for group in groups}
    for (copy, copies, _), found in alike.items():
        chosen = balance_over_ranks([box.tensor.nbytes for _, box in found], copies)
        for (group, box), owner in zip(found, chosen, strict=True):
            if owner == copy:
                kept[group].append(box)
    return kept


def whole_boxes(named: Mapping[str, Tensor]) -> Boxes:
    """Returns whole tensors as boxes. Several names of one tensor make one box."""
    boxes = []
    for name, *also in names_by_tensor(named):
        tensor = named[name]
        shape = tuple(tensor.shape)
        boxes.append(TensorBox(name, shape, (0,) * len(shape), tensor, also=tuple(also)))
    return boxes


def names_by_tensor(named: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the names of each tensor. Tied embeddings are one tensor with two names."""
    names: dict[Any, list[str]] = {}
    for name, tensor in named.items():
        key = view_of(tensor) if tensor.numel() else name
        names.setdefault(key, []).append(name)
    return list(names.values())


def view_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors that are one and the same have in common."""
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


HISTORY = "fp8_amax_history"


@dataclass(frozen=True)
class Place:
    """A part of `size` that begins at `here` in what this rank keeps, and at `whole` in the whole tensor."""

    here: Offsets
    whole: Offsets
    size: Offsets


class TensorLayout:
    """The layout of the tensors of `job` on this rank, by their names in a checkpoint."""

    def __init__(self, job: Job) -> None:
        model: Any = job.model
        self.tensor: TensorRank | None = job.prepared.tensor_parallel
        self.shards: Mapping[str, TensorShard] = model.shards if self.tensor else {}
        self.sharing: World = data_parallel_world(job.prepared)
        self.params: Mapping[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.split: dict[str, DTensor] = {
            name: p for name, p in self.params.items() if hasattr(p, "placements")
        }
        self.spanning = {
            f"{name}.{WEIGHT_BUFFERS[field]}"
            for name, layer in model.named_modules()
            if isinstance(layer, FP8Linear) and layer.amax_group
            for field, axis in ((0, 1), (2, 0))
            if layer.amax_group.group_of(WEIGHT, layer.scaling.tile(WEIGHT, axis))
        }
        """The scales of weights that lie across the ranks that split these: each has them whole."""

    def boxes(self, name: str, t: Tensor, alone: bool = False) -> Iterator[TensorBox]:
        """The boxes of a tensor that this rank keeps; `alone` where it alone has it. Where matrices are split all ranks call it, in
        the same order."""
        shard, split = self._shard_of(name, t.dim()), hasattr(t, "placements")
        if shard is not None and shard.dim == 1 and name.endswith(SUFFIX):
            t, shard = self._joined(name, t, shard), None
        local = self.local(self._history(name, t))
        shape = tuple(t.shape)
        whole = _wider(shape, shard)
        copies = (0, 1, ()) if alone else self._copies(t if split else None, shard)
        for place in self._places(shape, tuple(local.shape), t if split else None, shard):
            part = (
                local if place.size == tuple(local.shape) else local[slices(place.here, place.size)]
            )
            yield TensorBox(name, whole, place.whole, part, *copies)

    def local(self, t: Tensor) -> Tensor:
        """The plain tensor in the memory of this rank that `t` is, or is a part of."""
        return local(t).detach() if self.split else t.detach()

    def part(self, name: str, whole: Offsets, read: Callable[[Offsets, Offsets], Tensor]) -> Tensor:
        """What this rank keeps of a tensor whose whole has the shape `whole`, of which `read` gives the part that begins somewhere
        and has some size."""
        shard, like = self._shard_of(name, len(whole)), self._parameter_of(name)
        if whole and name.endswith(SUFFIX) and (p := self.params.get(parameter(name))) is not None:
            shard, like = split(p, shard)
            if shard is not None and shard.dim == 1:
                shape, (start, size) = (whole[0] // shard.ranks, *whole[1:]), _piece(like, whole)
                part = own(read(start, size), local(p).shape[0], shard)
                return part if like is None else as_dtensor(part, like, shape)
        shape = _narrower(whole, shard)
        size = _piece(like, shape)[1]
        places = list(self._places(shape, size, like, shard))
        if len(places) == 1 and places[0].size == size:
            part = read(places[0].whole, size)
        else:
            part = read((0,) * len(size), (0, *size[1:])).new_empty(size)
            for place in places:
                part[slices(place.here, place.size)] = read(place.whole, place.size)
        return part if like is None else as_dtensor(part, like, shape)

    def _joined(self, name: str, t: Tensor, shard: TensorShard) -> Tensor:
        """The scales `t` of blocks of some columns, with those of the others."""
        assert self.tensor is not None, "or nothing were split"
        rows = local(self.params[parameter(name)]).shape[0]
        part = joined(local(t), rows, self.tensor.process_group)
        return (
            as_dtensor(part, t, (t.shape[0] * shard.ranks, *t.shape[1:]))
            if hasattr(t, "placements")
            else part
        )

    def _parameter_of(self, name: str) -> DTensor | None:
        """The parameter that FSDP2 split as it splits the tensor `name`, if it splits it; not of scales."""
        return self.split.get(name, self.split.get(name.rpartition(".")[0]))

    def _shard_of(self, name: str, dims: int) -> TensorShard | None:
        """Of which part of the whole a tensor is: a parameter, what the optimizer has of one, or the scales of a float8 weight, or
        of moments, that have more than one; None for what every rank has."""
        owner, _, last = name.rpartition(".")
        if name.endswith(SUFFIX):
            return self.shards.get(parameter(name)) if dims else None
        if last in WEIGHT_BUFFERS:
            return (
                self.shards.get(f"{owner}.weight")
                if dims == 2 and name not in self.spanning
                else None
            )
        return self.shards.get(name, self.shards.get(owner))

    def _places(
        self, shape: Offsets, local: Offsets, like: Any, shard: TensorShard | None
    ) -> Iterator[Place]:
        """Of a tensor of `shape` the places of its part of the shape `local`, split as `like` is, in the whole of `shard`."""
        first = _piece(like, shape)[0]
        ranges = [
            [(0, size, start)] for size, start in zip(local, first, strict=True)
        ]  # here, size, in the tensor of `shape`
        if shard is not None:
            start, size = first[shard.dim], local[shard.dim]
            cut = [
                (max(begin, start), min(end, start + size), at - begin)
                for begin, end, at in shard.boxes(shape[shard.dim])
            ]
            ranges[shard.dim] = [
                (begin - start, end - begin, begin + shift) for begin, end, shift in cut
            ]
        for found in product(*ranges):
            if all(size > 0 for _, size, _ in found) or 0 in shape:
                yield Place(
                    tuple(a for a, _, _ in found),
                    tuple(b for _, _, b in found),
                    tuple(n for _, n, _ in found),
                )

    def _history(self, name: str, t: Tensor) -> Tensor:
        """Of amax histories the largest of the ranks that share matrices, since a weight's is recorded by part."""
        if self.tensor is None or not name.endswith(HISTORY):
            return t
        t = t.detach().clone()
        dist.all_reduce(t, dist.ReduceOp.MAX, group=self.tensor.process_group)
        return t

    def _copies(self, split: Any, shard: TensorShard | None) -> tuple[int, int, tuple[str, ...]]:
        """The number of this rank among those that have the same part of a tensor, how many there are, and along which axes."""
        axes = [("data", self.sharing.rank, self.sharing.size)]
        if split is not None:
            mesh = split.device_mesh
            axes = [
                (f"mesh {i}", mesh.get_local_rank(i), mesh.size(i))
                for i, p in enumerate(split.placements)
                if p.is_replicate()
            ]
        if shard is None and self.tensor:
            axes.append(("tensor", self.tensor.rank, self.tensor.size))
        copy, copies = 0, 1
        for _, rank, size in axes:
            copy, copies = copy * size + rank, copies * size
        return copy, copies, tuple(axis for axis, *_ in axes)


def slices(start: Offsets, size: Offsets) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))


def _wider(shape: Offsets, shard: TensorShard | None) -> Offsets:
    return (
        shape
        if shard is None
        else tuple(n * shard.ranks if dim == shard.dim else n for dim, n in enumerate(shape))
    )


def _narrower(whole: Offsets, shard: TensorShard | None) -> Offsets:
    return (
        whole
        if shard is None
        else tuple(n // shard.ranks if dim == shard.dim else n for dim, n in enumerate(whole))
    )


def _piece(like: Any, shape: Offsets) -> tuple[Offsets, Offsets]:
    """Place and shape of the part that this rank has of a tensor of `shape`, split as `like` is, if that is not None."""
    if like is None:
        return (0,) * len(shape), shape
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(shape, like.device_mesh, like.placements)
    return tuple(offset), tuple(local)
