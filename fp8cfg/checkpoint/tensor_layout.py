"""Places of this rank's tensors in the full tensors of a checkpoint.

A checkpoint stores full tensors in boxes, written by several ranks. `TensorLayout` maps a job's
tensors to full tensors. Tensor parallelism splits rows or columns, possibly of several concatenated
matrices. FSDP2 splits rows or columns of the result. `boxes` lists this rank's boxes for a save.
`part` reads them in a load, so a run can resume with any other layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.models.weight_init import TensorShard
from fp8cfg.numerics import FP8Linear
from fp8cfg.numerics.codecs import BLOCK
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.numerics.scaling import WEIGHT
from fp8cfg.optim.low_bit.columns import has_whole_blocks, local
from fp8cfg.parallel.process_group import World, data_parallel_world
from fp8cfg.parallel.sharded_state import as_dtensor
from fp8cfg.parallel.sharding import balance_over_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from fp8cfg.building.job import Job
    from fp8cfg.parallel.tensor import TensorRank

SCALES = ".scale_inv"
"""Suffix of the names of scales in optimizer state."""
SAFETENSORS = ".safetensors"
HISTORY = "fp8_amax_history"

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor, and the ranks that have copies of it.

    A checkpoint records nothing else about the layout of a run.

    Attributes:
        name: The tensor.
        shape: Shape of the full tensor.
        offsets: Where the box begins in the full tensor.
        tensor: The values, a plain tensor.
        copy: Index of this rank's copy.
        copies: The number of copies.
        copy_axes: The axes along which ranks have copies. These ranks list the same boxes in the
            same order.
        aliases: Other names of the tensor.
    """

    name: str
    shape: Offsets
    offsets: Offsets
    tensor: Tensor
    copy: int = 0
    copies: int = 1
    copy_axes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


Boxes = list[TensorBox]
Groups = dict[str, Boxes]
"""Boxes by group of tensors: model, optimizer, fp8."""


def select_boxes(groups: Mapping[str, Sequence[TensorBox]]) -> Groups:
    """Returns the boxes that this rank writes.

    Ranks with copies of the same boxes divide them, balanced by size.
    """
    shared: dict[tuple[Any, ...], list[tuple[str, TensorBox]]] = defaultdict(list)
    for group, boxes in groups.items():
        for box in boxes:
            shared[box.copy, box.copies, box.copy_axes].append((group, box))
    selected: Groups = {group: [] for group in groups}
    for (copy, copies, _), entries in shared.items():
        # Each rank computes the same assignment, without communication.
        writers = balance_over_ranks([box.tensor.nbytes for _, box in entries], copies)
        for (group, box), writer in zip(entries, writers, strict=True):
            if writer == copy:
                selected[group].append(box)
    return selected


def whole_boxes(tensors: Mapping[str, Tensor]) -> Boxes:
    """Returns each full tensor as one box. Several names of one tensor make one box."""
    boxes = []
    for name, *aliases in names_by_tensor(tensors):
        tensor = tensors[name]
        shape = tuple(tensor.shape)
        boxes.append(TensorBox(name, shape, (0,) * len(shape), tensor, aliases=tuple(aliases)))
    return boxes


def names_by_tensor(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the names of each tensor. A tied embedding is one tensor with two names."""
    names: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        key: Any = name  # empty tensors have no memory
        if tensor.numel():
            key = _memory_key(tensor)
        names.setdefault(key, []).append(name)
    return list(names.values())


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key. Tensors with the same memory and interpretation have equal keys."""
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


@dataclass(frozen=True)
class Place:
    """A box of `size`, at `local` in this rank's tensor and at `full` in the full tensor."""

    local: Offsets
    full: Offsets
    size: Offsets


class _Range(NamedTuple):
    """A range of one dimension: start in this rank's tensor, size, start in the full tensor."""

    local: int
    size: int
    full: int


class TensorLayout:
    """How a job splits its tensors, by their names in a checkpoint.

    Args:
        job: The job.

    Attributes:
        sharing: The ranks with the same parameters.
        fsdp_parameters: Parameters sharded by FSDP2, by name.
    """

    def __init__(self, job: Job) -> None:
        model: Any = job.model
        self.sharing: World = data_parallel_world(job.prepared)
        self._tensor_rank: TensorRank | None = job.prepared.tensor_parallel
        self._shards: Mapping[str, TensorShard] = {}
        if self._tensor_rank is not None:
            self._shards = model.shards
        self._parameters: Mapping[str, Tensor] = dict(
            model.named_parameters(remove_duplicate=False)
        )
        self.fsdp_parameters: dict[str, DTensor] = {}
        for name, parameter in self._parameters.items():
            if hasattr(parameter, "placements"):
                self.fsdp_parameters[name] = parameter
        # Scales of FP8 weights for blocks shared by tensor-parallel ranks: each rank has all.
        self._shared_scales = set()
        for name, layer in model.named_modules():
            if not isinstance(layer, FP8Linear) or not layer.amax_group:
                continue
            # The buffers with scales of the weight and of its transpose.
            for buffer, axis in ((WEIGHT_BUFFERS[0], 1), (WEIGHT_BUFFERS[2], 0)):
                if layer.amax_group.group_of(WEIGHT, layer.scaling.tile(WEIGHT, axis)):
                    self._shared_scales.add(f"{name}.{buffer}")

    def boxes(self, name: str, tensor: Tensor, has_no_copies: bool = False) -> Iterator[TensorBox]:
        """Yields this rank's boxes of a tensor.

        With tensor parallelism all ranks call it, in the same order.

        Args:
            name: Name in the checkpoint.
            tensor: A plain tensor or a DTensor of FSDP2.
            has_no_copies: Whether only this rank has the tensor.
        """
        shard = self._shard_of(name, tensor.dim())
        if shard is not None and shard.dim == 1 and name.endswith(SCALES):
            # Scales are flat by rows. The scales of column shards are no box of the full scales.
            tensor = self._gather_column_scales(name, tensor, shard)
            shard = None
        dtensor = tensor if hasattr(tensor, "placements") else None
        values = self.local(self._reduce_history(name, tensor))
        local_shape = tuple(values.shape)
        shape = tuple(tensor.shape)
        full_shape = _full_shape(shape, shard)
        copies: tuple[int, int, tuple[str, ...]] = (0, 1, ())
        if not has_no_copies:
            copies = self._copies(dtensor, shard)
        for place in self._places(shape, local_shape, dtensor, shard):
            box = values
            if place.size != local_shape:
                box = values[slices(place.local, place.size)]
            yield TensorBox(name, full_shape, place.full, box, *copies)

    def part(
        self, name: str, full_shape: Offsets, read: Callable[[Offsets, Offsets], Tensor]
    ) -> Tensor:
        """Reads this rank's part of a tensor.

        Args:
            name: Name in the checkpoint.
            full_shape: Shape of the full tensor.
            read: Returns a box from its offsets and its shape.

        Returns:
            A plain tensor, or a DTensor if FSDP2 shards it.
        """
        shard = self._shard_of(name, len(full_shape))
        like = self._fsdp_parameter_of(name)
        # A tensor without dimensions is one scale for the full parameter.
        if full_shape and name.endswith(SCALES):
            parameter = self._parameters.get(parameter_of_scales(name))
            if parameter is not None:
                shard, like = split_scales(parameter, shard)
            if parameter is not None and shard is not None and shard.dim == 1:
                # Reads scales of full rows, then takes this rank's columns. See `boxes`.
                start, size = _local_box(like, full_shape)
                rows = local(parameter).shape[0]
                values = slice_column_scales(read(start, size), rows, shard)
                shape = (full_shape[0] // shard.ranks, *full_shape[1:])
                return _with_placements(values, like, shape)
        shape = _shard_shape(full_shape, shard)
        _, size = _local_box(like, shape)
        places = list(self._places(shape, size, like, shard))
        if len(places) == 1 and places[0].size == size:
            values = read(places[0].full, size)
        else:
            # An empty read tells the dtype.
            values = read((0,) * len(size), (0, *size[1:])).new_empty(size)
            for place in places:
                values[slices(place.local, place.size)] = read(place.full, place.size)
        return _with_placements(values, like, shape)

    def local(self, tensor: Tensor) -> Tensor:
        """Returns this rank's values as a plain tensor."""
        if self.fsdp_parameters:
            tensor = local(tensor)
        return tensor.detach()

    def _shard_of(self, name: str, dims: int) -> TensorShard | None:
        """Returns the tensor-parallel shard of a tensor, None if every rank has it in full.

        The tensor may be a parameter, its optimizer state, or scales of an FP8 weight or of
        moments.
        """
        owner, _, last = name.rpartition(".")
        if name.endswith(SCALES):
            if dims == 0:  # one scale for the full parameter
                return None
            return self._shards.get(parameter_of_scales(name))
        if last in WEIGHT_BUFFERS:
            # Scales per block are 2-D. A scale per tensor is the same on every rank.
            if dims != 2 or name in self._shared_scales:
                return None
            return self._shards.get(f"{owner}.weight")
        return self._shards.get(name, self._shards.get(owner))

    def _fsdp_parameter_of(self, name: str) -> DTensor | None:
        """Returns the FSDP2 parameter whose placements a tensor has, for example a moment."""
        owner = name.rpartition(".")[0]
        return self.fsdp_parameters.get(name, self.fsdp_parameters.get(owner))

    def _places(
        self, shape: Offsets, local_shape: Offsets, like: Any, shard: TensorShard | None
    ) -> Iterator[Place]:
        """Yields the places of this rank's values in the full tensor.

        Args:
            shape: Shape of the tensor that FSDP2 shards: the tensor-parallel shard.
            local_shape: Shape of this rank's values.
            like: A DTensor with FSDP2's placements, or None.
            shard: The tensor-parallel shard, or None.
        """
        offsets, _ = _local_box(like, shape)
        ranges = []
        for start, size in zip(offsets, local_shape, strict=True):
            ranges.append([_Range(0, size, start)])
        if shard is not None:
            # FSDP2's rows may span several pieces, such as gate and up projection, and the pieces
            # are not adjacent in the full tensor. Cut each piece to this rank's rows.
            start = offsets[shard.dim]
            stop = start + local_shape[shard.dim]
            pieces = []
            for piece_start, piece_stop, full_start in shard.boxes(shape[shard.dim]):
                begin = max(piece_start, start)
                size = min(piece_stop, stop) - begin
                pieces.append(_Range(begin - start, size, begin + full_start - piece_start))
            ranges[shard.dim] = pieces
        for dims in product(*ranges):
            is_empty = any(dim.size <= 0 for dim in dims)
            if not is_empty or 0 in shape:
                yield Place(
                    tuple(dim.local for dim in dims),
                    tuple(dim.full for dim in dims),
                    tuple(dim.size for dim in dims),
                )

    def _gather_column_scales(self, name: str, tensor: Tensor, shard: TensorShard) -> Tensor:
        """Returns scales of full rows from the scales of this rank's columns."""
        assert self._tensor_rank is not None, "a shard comes from tensor parallelism"
        rows = local(self._parameters[parameter_of_scales(name)]).shape[0]
        scales = join_column_scales(local(tensor), rows, self._tensor_rank.process_group)
        if not hasattr(tensor, "placements"):
            return scales
        return as_dtensor(scales, tensor, (tensor.shape[0] * shard.ranks, *tensor.shape[1:]))

    def _reduce_history(self, name: str, tensor: Tensor) -> Tensor:
        """Takes the maximum of an amax history over tensor-parallel ranks."""
        if self._tensor_rank is None or not name.endswith(HISTORY):
            return tensor
        # Each rank records the amax of its part of a weight.
        history = tensor.detach().clone()
        dist.all_reduce(history, dist.ReduceOp.MAX, group=self._tensor_rank.process_group)
        return history

    def _copies(self, like: Any, shard: TensorShard | None) -> tuple[int, int, tuple[str, ...]]:
        """Returns copy, copies and axes for TensorBox: the ranks with the same values."""
        axes = []
        if like is None:
            axes.append(("data", self.sharing.rank, self.sharing.size))
        else:
            mesh = like.device_mesh
            for dim, placement in enumerate(like.placements):
                if placement.is_replicate():
                    axes.append((f"mesh {dim}", mesh.get_local_rank(dim), mesh.size(dim)))
        if shard is None and self._tensor_rank:
            axes.append(("tensor", self._tensor_rank.rank, self._tensor_rank.size))
        copy = 0
        copies = 1
        for _, rank, size in axes:
            # The copies are numbered in row-major order of the axes.
            copy = copy * size + rank
            copies *= size
        return copy, copies, tuple(axis for axis, _, _ in axes)


def slices(start: Offsets, size: Offsets) -> tuple[slice, ...]:
    """Returns the index of a box, for `tensor[...]`."""
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))


def _full_shape(shape: Offsets, shard: TensorShard | None) -> Offsets:
    """Returns the shape of the full tensor of a tensor-parallel shard."""
    if shard is None:
        return shape
    full_shape = list(shape)
    full_shape[shard.dim] *= shard.ranks
    return tuple(full_shape)


def _shard_shape(full_shape: Offsets, shard: TensorShard | None) -> Offsets:
    """Returns the shape of a tensor-parallel shard of a full tensor."""
    if shard is None:
        return full_shape
    shape = list(full_shape)
    shape[shard.dim] //= shard.ranks
    return tuple(shape)


def _with_placements(values: Tensor, like: Any, shape: Offsets) -> Tensor:
    """Returns `values` as a DTensor of `shape` with the placements of `like`, if there are any."""
    if like is None:
        return values
    return as_dtensor(values, like, shape)


def _local_box(like: Any, shape: Offsets) -> tuple[Offsets, Offsets]:
    """Returns offsets and shape of this rank's box of a tensor with the placements of `like`."""
    if like is None:
        return (0,) * len(shape), shape
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(shape, like.device_mesh, like.placements)
    return tuple(offset), tuple(size)


def parameter_of_scales(name: str) -> str:
    """Returns the name of the parameter with optimizer state scaled by `name`."""
    return name.removesuffix(SCALES).rpartition(".")[0]


def split_scales(
    parameter: Any, shard: TensorShard | None
) -> tuple[TensorShard | None, DTensor | None]:
    """Returns how the block scales of a parameter's state are split.

    Args:
        parameter: The parameter.
        shard: Its tensor-parallel shard, or None.

    Returns:
        The tensor-parallel shard, and the parameter if FSDP2 shards it. Both are None if a cut
        splits a block. The rank then keeps its state in float32 and needs all scales to decode it.
    """
    # Elements of a shard that are consecutive in the full tensor must be whole blocks.
    if shard and shard.run(parameter.shape) % BLOCK:
        return None, None
    if not hasattr(parameter, "placements"):
        return shard, None
    mesh = parameter.device_mesh
    if not has_whole_blocks(parameter.shape, mesh.size(mesh.ndim - 1), BLOCK):
        return None, None
    return shard, parameter


def join_column_scales(scales: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Gathers the scales of full rows from each rank's columns. All ranks of `group` call it.

    Args:
        scales: Scales of this rank's columns, flat by rows, [rows * blocks, ...].
        rows: Rows of the parameter.
        group: The tensor-parallel ranks.
    """
    parts = [torch.empty_like(scales) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, scales.contiguous(), group=group)
    return torch.cat([part.view(rows, -1, *scales.shape[1:]) for part in parts], 1).flatten(0, 1)


def slice_column_scales(scales: Tensor, rows: int, shard: TensorShard) -> Tensor:
    """Returns scales of the columns of `shard` from scales of full rows, flat by rows."""
    by_rows = scales.view(rows, -1, *scales.shape[1:])
    return by_rows.chunk(shard.ranks, 1)[shard.rank].flatten(0, 1)
