"""Shared save: a checkpoint written by all ranks at once, each its own boxes; nothing is gathered but names, places and sums.

The first rank makes the folder and says where; every rank writes `<group>/rank-<rank>-<n>.safetensors` below it by
torch.distributed.checkpoint, summing as it writes; the first collects lengths and sums, writes the manifest last and renames the
folder, as `checkpoint.save` does. Where one rank fails none has saved: the folder is removed and all say so. Ranks must see one
file system.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from math import prod
from operator import or_
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, float64, tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
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
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fp8cfg.checkpoint import local_save
from fp8cfg.checkpoint.load import ALSO, RNG, STATE
from fp8cfg.checkpoint.local_save import CheckpointError, OldCheckpointStays
from fp8cfg.checkpoint.manifest import (
    DamagedCheckpoint,
    FileEntry,
    failpoint,
    free_name,
    remove_old,
    sum_of,
    write_given,
)
from fp8cfg.checkpoint.tensor_layout import SAFETENSORS, Groups, TensorBox
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFiles, StrangeFile

CHUNK = 64 << 20
Name = str | os.PathLike[str]


class SummedFile(io.FileIO):
    """A file that is written from its beginning to its end, and knows its length and sha256."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._digest, self._size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Write all of `data`, bytes. Raises OSError."""
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), CHUNK):
            part = left = whole[start : start + CHUNK]
            while left:  # an unbuffered file may take less at once
                left = left[super().write(left) :]
            self._digest.update(part)
            self._size += len(part)
        return len(whole)

    def entry(self) -> FileEntry:
        """What a manifest says of the file, also once it is closed."""
        return FileEntry(self._size, self._digest.hexdigest())


class FolderFileSystem(FileSystemBase):
    """The files of a folder for torch.distributed.checkpoint, by names, below the folder's descriptor. `written` has those that
    were written through here."""

    def __init__(self, folder: RunFiles) -> None:
        self.folder = folder
        self.written: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: Name, mode: str) -> Generator[io.IOBase, None, None]:
        """The file `path`, which is not there yet, to write; torch's writer brings it to disk."""
        name = os.fspath(path)
        with SummedFile(self.folder.open_at(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as file:
            yield file
        self.written[name] = file.entry()
        failpoint("shard")

    def concat_path(self, path: Name, suffix: str) -> Name:
        """The name of a file: a folder's own path is not in it."""
        return suffix

    def init_path(self, path: Name) -> Name:
        """The path as it is given."""
        return path

    def rename(self, path: Name, new_path: Name) -> None:
        """Give a file another name."""
        self.folder.rename(os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: Name) -> None:
        """Nothing: the folder is there."""

    def exists(self, path: Name) -> bool:
        """Whether there is a file of that name."""
        return os.fspath(path) in self.folder.names()

    def rm_file(self, path: Name) -> None:
        """Remove a file."""
        os.unlink(path, dir_fd=self.folder.descriptor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Name) -> bool:
        """False: a path is no descriptor."""
        return False


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
            name = f"rank-{self._of_rank:05d}-{number}{SAFETENSORS}"
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


FAILED = (OSError, StrangeFile, DamagedCheckpoint, TypeError, ValueError)


@dataclass
class Share:
    """What one rank writes of a checkpoint: its boxes by group; and of the first rank the JSON state and random numbers."""

    boxes: Groups
    state: dict[str, Any]
    random: dict[str, Tensor]

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by group and name, of a rank that has all of each."""
        found = {
            group: {name: box.tensor for box in boxes for name in (box.name, *box.also)}
            for group, boxes in self.boxes.items()
        }
        return {group: named for group, named in {**found, RNG: self.random}.items() if named}


def save(
    root: Path | RunFiles | None, step: int, share: Share, keep: int | None, world: World
) -> Path | None:
    """Write a checkpoint of `step` under `root`, which the first rank has and which is there, and return its folder there; keep the
    newest `keep`, of which older ones are known by names and sizes of their files, or all where it is None. All ranks call it.

    Raises CheckpointError on all ranks, leaving older checkpoints as they were; OldCheckpointStays on the first.
    """
    files, staged = (
        (RunFiles.at(root) if root is not None else None),
        f"step-{step:08d}.tmp-{uuid.uuid4().hex[:12]}",
    )
    needed = world.sum(tensor(float(share_bytes(share)), dtype=float64, device=world.device)).item()
    said = json.loads(
        world.text(
            json.dumps(_made(files, staged, int(needed), list(share.boxes)) if files else {})
        )
    )
    if not said["problem"]:
        written = world.texts(json.dumps(_written(Path(said["folder"]), share, world)))
        said = json.loads(
            world.text(
                json.dumps(_finished(files, staged, step, written, share.state) if files else {})
            )
        )
    if said["problem"]:
        raise CheckpointError(f"cannot save step {step} in {said['root']}: {said['problem']}")
    if files is None:
        return None
    failpoint("renamed")
    final = files.path / str(said["name"])
    try:
        if keep is not None:
            remove_old(files, said["name"], keep, sums=False)
    except OSError as error:
        raise OldCheckpointStays(
            f"{final} is saved, but an older checkpoint cannot be removed: {error}"
        ) from error
    return final


def share_bytes(share: Share) -> int:
    """Bytes that a rank writes, about."""
    tensors = sum(box.tensor.nbytes + 256 for boxes in share.boxes.values() for box in boxes)
    return tensors + len(json.dumps(share.state)) + local_save.RESERVE


def _made(files: RunFiles, staged: str, needed: int, groups: list[str]) -> dict[str, str]:
    """The folder to write in, made; or why there is none."""
    said = {"root": str(files.path), "problem": "", "folder": ""}
    try:
        local_save.make_room(files, needed)
        inside = files.folder(staged, make=True)
        for group in groups:
            inside.folder(group, make=True)
    except FAILED as error:
        files.remove(staged, ignore_errors=True)
        return {**said, "problem": _reason(error)}
    return {**said, "folder": str(inside.path.absolute())}


def _written(folder: Path, share: Share, world: World) -> dict[str, Any]:
    """The length and the sum of each file that this rank wrote, by its name, and other names of tensors by group; or why it, or
    another, could not."""
    entries: dict[str, FileEntry] = {}
    try:
        for group, boxes in share.boxes.items():
            writer = ShareWriter(folder, group, world.rank)
            dcp_save(
                {}, storage_writer=writer, planner=SharePlanner(boxes), process_group=world.group
            )
            entries |= writer.entries
        if share.random:
            data, name = safetensors_bytes(share.random), f"{RNG}{SAFETENSORS}"
            RunFiles.at(folder).replace(name, data)
            entries[name] = FileEntry(len(data), sum_of(data))
            failpoint("shard")
    except CheckpointException as failed:  # the same on all ranks
        rank, (error, _) = min(failed.failures.items())
        if not isinstance(error, FAILED):
            raise RuntimeError(str(failed)) from error
        return {"problem": f"rank {rank}: {_reason(error)}"}
    except FAILED as error:
        return {"problem": f"rank {world.rank}: {_reason(error)}"}
    also = {
        group: {other: box.name for box in boxes for other in box.also}
        for group, boxes in share.boxes.items()
    }
    return {"files": {name: asdict(entry) for name, entry in entries.items()}, "also": also}


def _finished(
    files: RunFiles, staged: str, step: int, written: list[str], state: dict[str, Any]
) -> dict[str, str]:
    """On the first rank: the name of the folder, whole and in its place; or why there is none."""
    said = {"root": str(files.path), "problem": "", "name": ""}
    found = [json.loads(text) for text in written]
    problems = [each["problem"] for each in found if "problem" in each]
    try:
        if problems:
            raise OSError(problems[0])
        entries = {
            name: FileEntry(**entry) for each in found for name, entry in each["files"].items()
        }
        also = {
            group: reduce(or_, (each["also"][group] for each in found))
            for group in found[0]["also"]
        }
        text = local_save.strict_json({**state, ALSO: also}).encode()
        inside = files.folder(staged)
        inside.replace(STATE, text)
        entries[STATE] = FileEntry(len(text), sum_of(text))
        failpoint("manifest")
        write_given(inside, step, len(found), entries)
        failpoint("rename")
        said["name"] = free_name(files, step)
        files.rename(staged, said["name"])
        files.sync()
    except BaseException as error:
        files.remove(staged, ignore_errors=True)
        if not isinstance(error, FAILED):
            raise
        return {**said, "problem": _reason(error)}
    return said


def _reason(error: Exception) -> str:
    return re.sub(r"/proc/self/fd/\d+/", "", str(error))
