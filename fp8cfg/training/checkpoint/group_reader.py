"""Group reader: what torch.distributed.checkpoint (DCP) reads of a group of a checkpoint, below a descriptor and checked.

Torch's reader of safetensors files (2.13) opens paths, whatever file system it is given, and trusts their contents.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.training.checkpoint.tensor_box import Offsets
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.run_files import RunFiles

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Under which the header of a file has where its boxes begin in the whole."""
OF_TORCH = ("DCP_VERSION", "format")


class GroupReader(HuggingFaceStorageReader):
    """DCP storage reader of the `files` of a group in `folder`. Once `read_metadata` was called `tensors` are those that they have,
    and `also` other names in their headers. Raises DamagedCheckpoint for files that cannot be read or do not make whole tensors.
    """

    def __init__(self, folder: RunFiles, files: list[str]) -> None:
        super().__init__(path=str(folder.path))
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.also: dict[str, str] = {}
        self._folder, self._files = folder, files
        self._file_of: dict[MetadataIndex, str] = {}

    def read_metadata(self) -> Metadata:
        """Sizes, dtypes and parts of all tensors."""
        for file in self._files:
            with (
                self._refusing(file),
                safe_open(self._folder.reached / file, framework="pt") as opened,
            ):
                self._index(file, opened)
        for name, tensor in self.tensors.items():
            tensor.size = self._whole(name, tensor.chunks)
        return Metadata({**self.tensors}, storage_data=self._file_of)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what `plan` has from its files to where `planner` wants it."""
        by_file = defaultdict[str, list[ReadItem]](list)
        for item in plan.items:
            by_file[self._file_of[item.storage_index]].append(item)
        for file, items in by_file.items():
            with (
                self._refusing(file),
                safe_open(self._folder.reached / file, framework="pt") as opened,
            ):
                for item in items:
                    tensor = planner.resolve_tensor(item)
                    planner.commit_tensor(item, tensor.copy_(_part(opened, item)))
        done = Future[None]()
        done.set_result(None)
        return done

    def _index(self, file: str, opened: Any) -> None:
        header = dict(opened.metadata() or {})
        places = json.loads(header.pop(SHARDING, "null"))
        if places is not None:
            header = {name: kept for name, kept in header.items() if name not in OF_TORCH}
        for name in opened.keys():  # noqa: SIM118, it is no dict
            stored = opened.get_slice(name)
            shape = torch.Size(stored.get_shape())
            dtype = (
                stored[:0] if shape else opened.get_tensor(name)
            ).dtype  # by its name safetensors 0.8 knows none of F8_E8M0
            offsets = torch.Size(
                [0] * len(shape) if places is None else _checked(places[name][OFFSETS], shape)
            )
            tensor = self.tensors.setdefault(
                name, TensorStorageMetadata(TensorProperties(dtype), shape, [])
            )
            if tensor.properties.dtype != dtype:
                raise ValueError(f"{name} has parts of other dtypes")
            chunk = ChunkStorageMetadata(offsets, shape)
            if chunk not in tensor.chunks:
                tensor.chunks.append(chunk)
                self._file_of[MetadataIndex(name, offsets)] = file
        self.also |= header

    def _whole(self, name: str, chunks: list[ChunkStorageMetadata]) -> torch.Size:
        """The size of the tensor that `chunks` make."""
        if len({len(chunk.sizes) for chunk in chunks}) > 1:
            raise self.damaged(name, "has parts of other dimensions")
        ends = [
            [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            for chunk in chunks
        ]
        size = torch.Size(map(max, zip(*ends, strict=True)))
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(size):
            raise self.damaged(
                self._file_of[MetadataIndex(name, chunks[0].offsets)],
                f"the parts of {name} do not make a whole",
            )
        return size

    @contextmanager
    def _refusing(self, file: str) -> Iterator[None]:
        """Around the reading of `file`. The sums hold and yet it cannot be read: not written by a save."""
        try:
            yield
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            RuntimeError,
            SafetensorError,
            StrangeFile,
        ) as error:
            raise self.damaged(file, f"cannot be read ({error})") from error

    def damaged(self, file: str, what: str) -> DamagedCheckpoint:
        """The error that says `what` is wrong with `file`."""
        return DamagedCheckpoint(f"{self._folder.path}: {file}: {what}")


def _part(opened: Any, item: ReadItem) -> torch.Tensor:
    name = item.storage_index.fqn
    if not item.lengths:  # of which safetensors makes no slices
        scalar: torch.Tensor = opened.get_tensor(name)
        return scalar
    ranges = (
        slice(start, start + size)
        for start, size in zip(item.storage_offsets, item.lengths, strict=True)
    )
    part: torch.Tensor = opened.get_slice(name)[tuple(ranges)]
    return part


def _checked(offsets: Any, shape: Offsets) -> Offsets:
    if (
        not isinstance(offsets, list)
        or len(offsets) != len(shape)
        or not all(type(n) is int and n >= 0 for n in offsets)
    ):
        raise ValueError(f"{OFFSETS} must be a place in {len(shape)} dimensions")
    return tuple(offsets)
