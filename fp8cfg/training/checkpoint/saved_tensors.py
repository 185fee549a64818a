"""Saved tensors: a group of a checkpoint, each tensor or part of one read from its file when it is asked for.

A group is one file of whole tensors (`model.safetensors`, written by one rank), or a folder of files of boxes (`model/`), written
by several. Nothing is held between two reads, so that a rank has no more in memory than the parts that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fp8cfg.training.checkpoint.group_reader import GroupReader
from fp8cfg.training.checkpoint.share_writer import SUFFIX
from fp8cfg.training.checkpoint.tensor_box import Offsets
from fp8cfg.training.run_files import RunFiles

_NONE: Mapping[str, str] = {}


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a group by name, on the CPU; `also` are other names of some. Raises DamagedCheckpoint for files that cannot be
    read or do not make whole tensors, as it is made and as it is read."""

    def __init__(self, folder: RunFiles, files: list[str], also: Mapping[str, str] = _NONE) -> None:
        self._reader = GroupReader(folder, files)
        self._reader.read_metadata()
        self._tensors = self._reader.tensors
        self._also = {**self._reader.also, **also}
        for name in self._also.values():
            if name not in self._tensors:
                raise self._reader.damaged(files[0], f"has no {name}")

    def shape(self, name: str) -> Offsets:
        """The shape of the whole tensor `name`."""
        return tuple(self._tensors[self._also.get(name, name)].size)

    def read(self, name: str, offsets: Offsets, size: Offsets) -> Tensor:
        """The part of `size` that begins at `offsets` in the tensor `name`."""
        name = self._also.get(name, name)
        tensor = self._tensors[name]
        part = torch.empty(size, dtype=tensor.properties.dtype)
        items = create_read_items_for_chunk_list(
            name, tensor, [ChunkStorageMetadata(torch.Size(offsets), part.shape)]
        )
        if sum(item.lengths.numel() for item in items) != part.numel():
            raise self._reader.damaged(name, "its parts do not make a whole")
        self._reader.read_data(LoadPlan(items), _Into(part))
        return part

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._also

    def __len__(self) -> int:
        return len(self._tensors) + len(self._also)

    def whole(self) -> dict[str, Tensor]:
        """All tensors, read; names of one tensor share it."""
        read = {name: self[name] for name in self._tensors}
        return read | {name: read[kept] for name, kept in self._also.items()}


class _Into(DefaultLoadPlanner):
    """DCP load planner that puts what is read of one tensor into `part`."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self._part = part

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._part


def groups(folder: RunFiles, also: Mapping[str, Mapping[str, str]]) -> dict[str, SavedTensors]:
    """The groups of tensors of the checkpoint in `folder`, of some of which there are `also` other names. Raises
    DamagedCheckpoint."""
    found: dict[str, SavedTensors] = {}
    for name in folder.names():
        kind = folder.kind(name)
        if kind == "folder":
            inside = folder.folder(name)
            if files := [
                file for file in inside.names() if file.endswith(SUFFIX)
            ]:  # none of a group that no rank has
                found[name] = SavedTensors(inside, files, also.get(name, _NONE))
        elif kind == "file" and name.endswith(SUFFIX):
            found[name.removesuffix(SUFFIX)] = SavedTensors(folder, [name])
    return found
