"""Saved tensors: a group of a checkpoint, each tensor or part of one read from its file when it is asked for.

A group is one file of whole tensors (`model.safetensors`, written by one rank), or a folder of files of boxes (`model/`), written
by several. Nothing is held between two reads, so that a rank has no more in memory than the parts that it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8cfg.training.checkpoint.box_file import OFFSETS, SHARDING, SUFFIX
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.training.checkpoint.tensor_box import Offsets
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.run_files import RunFiles


@dataclass(frozen=True)
class _Stored:
    """A box that a file has: where it begins in the whole, and its shape."""

    file: str
    offsets: Offsets
    shape: Offsets


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a group by name, on the CPU. Raises DamagedCheckpoint for files that cannot be read or do not make whole
    tensors, as it is made and as it is read."""

    def __init__(self, folder: RunFiles, files: list[str]) -> None:
        self._folder = folder
        self._boxes: dict[str, dict[tuple[Offsets, Offsets], _Stored]] = {}
        self._also: dict[str, str] = {}
        for file in files:
            with self._refusing(file):
                self._index(file)
        self._shapes = {name: self._whole(name, list(boxes.values())) for name, boxes in self._boxes.items()}
        for name in self._also.values():
            if name not in self._shapes:
                raise self._damaged(files[0], f"has no {name}")

    def shape(self, name: str) -> Offsets:
        """The shape of the whole tensor `name`."""
        return self._shapes[self._also.get(name, name)]

    def read(self, name: str, offsets: Offsets, size: Offsets) -> Tensor:
        """The part of `size` that begins at `offsets` in the tensor `name`."""
        name, found = self._also.get(name, name), None
        left = _count(size)
        for box in self._boxes[name].values():
            start = [max(a, b) for a, b in zip(offsets, box.offsets, strict=True)]
            stop = [min(a + n, b + m) for a, n, b, m in zip(offsets, size, box.offsets, box.shape, strict=True)]
            if any(a >= b for a, b in zip(start, stop, strict=True)) and _count(size):
                continue
            with self._refusing(box.file), safe_open(self._folder.reached / box.file, framework="pt") as opened:
                part = _cut(opened, name, [a - b for a, b in zip(start, box.offsets, strict=True)],
                            [a - b for a, b in zip(stop, box.offsets, strict=True)])
            if tuple(part.shape) == size:
                return part.clone()  # of its own: what is read is mapped from the file, which may change
            found = part.new_empty(size) if found is None else found
            found[tuple(slice(a - b, c - b) for a, b, c in zip(start, offsets, stop, strict=True))] = part
            left -= part.numel()
        if found is None or left:
            raise self._damaged(name, "its parts do not make a whole")
        return found

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        yield from self._boxes
        yield from self._also

    def __len__(self) -> int:
        return len(self._boxes) + len(self._also)

    def whole(self) -> dict[str, Tensor]:
        """All tensors, read; names of one tensor share it."""
        read = {name: self[name] for name in self._boxes}
        return read | {name: read[kept] for name, kept in self._also.items()}

    def _index(self, file: str) -> None:
        with safe_open(self._folder.reached / file, framework="pt") as opened:
            also = dict(opened.metadata() or {})
            text = also.pop(SHARDING, None)
            places = None if text is None else json.loads(text)
            for name in opened.keys():  # noqa: SIM118, it is no dict
                shape = tuple(opened.get_slice(name).get_shape())
                offsets = (0,) * len(shape) if places is None else _checked(places[name][OFFSETS], shape)
                self._boxes.setdefault(name, {})[offsets, shape] = _Stored(file, offsets, shape)
            self._also |= also

    def _whole(self, name: str, boxes: list[_Stored]) -> Offsets:
        if len({len(box.shape) for box in boxes}) > 1:
            raise self._damaged(boxes[0].file, f"{name} has parts of other dimensions")
        shape = tuple(max(box.offsets[i] + box.shape[i] for box in boxes) for i in range(len(boxes[0].shape)))
        if sum(prod(box.shape) for box in boxes) != prod(shape):
            raise self._damaged(boxes[0].file, f"the parts of {name} do not make a whole")
        return shape

    @contextmanager
    def _refusing(self, file: str) -> Iterator[None]:
        """Around the reading of `file`. The sums hold and yet it cannot be read: not written by a save."""
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError, IndexError, RuntimeError, SafetensorError, StrangeFile) as error:
            raise self._damaged(file, f"cannot be read ({error})") from error

    def _damaged(self, file: str, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self._folder.path}: {file}: {what}")


def _cut(opened: Any, name: str, start: list[int], stop: list[int]) -> Tensor:
    if not start:
        scalar: Tensor = opened.get_tensor(name)
        return scalar
    part: Tensor = opened.get_slice(name)[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
    return part


def _count(shape: Offsets) -> int:
    return prod(shape)


def _checked(offsets: Any, shape: Offsets) -> Offsets:
    if not isinstance(offsets, list) or len(offsets) != len(shape) or not all(type(n) is int and n >= 0 for n in offsets):
        raise ValueError(f"{OFFSETS} must be a place in {len(shape)} dimensions")
    return tuple(offsets)


def groups(folder: RunFiles) -> dict[str, SavedTensors]:
    """The groups of tensors of the checkpoint in `folder`. Raises DamagedCheckpoint."""
    found: dict[str, SavedTensors] = {}
    for name in folder.names():
        kind = folder.kind(name)
        if kind == "folder":
            inside = folder.folder(name)
            if files := [file for file in inside.names() if file.endswith(SUFFIX)]:  # none of a group that no rank has
                found[name] = SavedTensors(inside, files)
        elif kind == "file" and name.endswith(SUFFIX):
            found[name.removesuffix(SUFFIX)] = SavedTensors(folder, [name])
    return found
