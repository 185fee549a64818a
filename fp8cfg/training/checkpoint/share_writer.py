"""Share writer: what a rank writes of a group of tensors, by the safetensors storage of torch.distributed.checkpoint (DCP).

Torch's writer (2.13) writes the second box of a name over the first where both stand in one file, and builds a file twice in memory
before it writes that: here a file has a name once, and LIMIT bytes at most. Files stand below a descriptor, not at paths, and their
sums are made as they are written, so that nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fp8cfg.training.checkpoint.folder_file_system import FolderFileSystem
from fp8cfg.training.checkpoint.manifest import FileEntry
from fp8cfg.training.checkpoint.tensor_box import TensorBox
from fp8cfg.training.run_files import RunFiles

SUFFIX = ".safetensors"
LIMIT = 512 << 20
"""Bytes of tensors in a file, about."""


class ShareWriter(HuggingFaceStorageWriter):
    """DCP storage writer of safetensors files, of which each rank writes its own into the folder `group` of `folder`:
    `rank-<rank>-<n>.safetensors`. `entries` are their lengths and sums by name, from `folder`."""

    def __init__(self, folder: Path, group: str, rank: int) -> None:
        super().__init__(path=group, save_distributed=True)
        self._folder, self._group, self._of_rank = folder, group, rank

    @property
    def entries(self) -> dict[str, FileEntry]:
        """What this rank has written."""
        return {f"{self._group}/{name}": entry for name, entry in self._files.written.items()}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan of this rank, which sees the folder. An error here is one on all ranks."""
        try:
            self._files = FolderFileSystem(RunFiles.at(self._folder).folder(self._group))
        except FileNotFoundError:
            raise OSError(
                f"{self._folder}: not seen here; machines need a file system that they share"
            ) from None
        self.fs = self._files  # type: ignore[assignment]
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what `plan` has of this rank, a file at a time."""
        queue = Queue[tuple[str, str, list[WriteItem]]]()
        for number, items in enumerate(files_of(plan.items), 1):
            name = f"rank-{self._of_rank:05d}-{number}{SUFFIX}"
            queue.put((name, name, items))
        return self._write_data(planner, queue)


class SharePlanner(DefaultSavePlanner):
    """DCP save planner of this rank's `boxes`, of which large ones are written in parts. Before that the boxes of all ranks are
    looked at: ValueError where they do not make whole tensors."""

    def __init__(self, boxes: Sequence[TensorBox]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {
            MetadataIndex(part.name, part.offsets): part for box in boxes for part in parts(box)
        }

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: boxes are there."""

    def create_local_plan(self) -> SavePlan:
        """The plan of this rank."""
        self.plan = SavePlan([_item(index, part) for index, part in self._parts.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of an item."""
        return self._parts[write_item.index].tensor.detach().contiguous()


def parts(box: TensorBox, limit: int = LIMIT) -> list[TensorBox]:
    """A box as boxes of at most `limit` bytes each, where its rows are not longer."""
    t = box.tensor
    if t.nbytes <= limit or t.dim() == 0:
        return [box]
    rows = max(limit * len(t) // t.nbytes, 1)
    return [
        replace(box, offsets=(box.offsets[0] + at, *box.offsets[1:]), tensor=t[at : at + rows])
        for at in range(0, len(t), rows)
    ]


def files_of(items: Sequence[WriteItem], limit: int = LIMIT) -> list[list[WriteItem]]:
    """`items` by the file that each stands in: no file has a name twice, and one of several items at most `limit` bytes."""
    files: list[list[WriteItem]] = []
    held: list[tuple[set[str], int]] = []
    for item in items:
        name, size = item.index.fqn, _bytes(item)
        fits = (
            i
            for i, (taken, there) in enumerate(held)
            if name not in taken and there + size <= limit
        )
        at = next(fits, len(files))
        if at == len(files):
            files.append([])
            held.append((set(), 0))
        files[at].append(item)
        held[at] = held[at][0] | {name}, held[at][1] + size
    return files


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, "there are boxes of tensors alone"
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _item(index: MetadataIndex, box: TensorBox) -> WriteItem:
    t = box.tensor
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), t.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=t.dtype), torch.Size(box.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
