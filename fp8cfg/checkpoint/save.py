"""Writing of a checkpoint: every rank writes a share of the tensors.

    step-00000123/
        model.safetensors                the tensors of a group, on one rank
        model/rank-00001-1.safetensors   the boxes that rank 1 wrote, on several ranks
        rng.safetensors, state.json      random numbers and JSON state of the first rank
        MANIFEST.json                    length and sha256 of every file

A save has four phases. The ranks exchange results after each phase. If one rank fails, all fail.

    1. Each rank checks its share.
    2. The first rank makes the folder `step-00000123.tmp-<random>`.
    3. Each rank writes, hashes and syncs its files.
    4. The first rank checks the headers, writes the manifest and renames the folder.

The rename comes last, so every visible checkpoint is complete. The lock of the run folder ensures
that only one run writes to a root. HuggingFaceStorageReader of torch.distributed.checkpoint can
read a group, because the headers have its keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fp8cfg.checkpoint.load import (
    DTYPES,
    OFFSETS,
    RNG,
    SHAPE,
    SHARDING,
    STATE,
    TORCH_KEYS,
    TensorFiles,
    error_text,
    read_index,
)
from fp8cfg.checkpoint.manifest import (
    PLAIN,
    DamagedCheckpoint,
    FileEntry,
    failpoint,
    new_folder_name,
    remove_old,
    sha256_of,
    write_manifest,
)
from fp8cfg.checkpoint.tensor_layout import SAFETENSORS, Boxes, Groups, TensorBox, whole_boxes
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFiles, StrangeFile, write_all
from fp8cfg.schema.errors import Fp8cfgError
from fp8cfg.schema.tables import size

RESERVE = 1 << 16
"""Extra bytes for the manifest and for rounding to disk blocks."""
CHUNK = 16 << 20
"""Bytes to hash and write at the same time."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FAILED = (
    OSError,
    StrangeFile,
    DamagedCheckpoint,
    SafetensorError,
    TypeError,
    ValueError,
    MemoryError,
    RuntimeError,  # torch raises it if memory runs out
)
"""Errors that make a save fail. Any other error is a bug and ends the run."""


class CheckpointError(Fp8cfgError):
    """A checkpoint could not be written. Older checkpoints are intact. Exit code 5."""

    exit_code = 5


class OldCheckpointStays(CheckpointError):
    """A checkpoint was written, but older ones could not be removed."""


@dataclass
class Share:
    """The part of a checkpoint that one rank writes.

    Attributes:
        boxes: The boxes of each group.
        state: The JSON state. Empty on all ranks except the first.
        random: The random states. Empty on all ranks except the first.
    """

    boxes: Groups
    state: dict[str, Any]
    random: dict[str, Tensor]


def write_checkpoint(
    root: Path | RunFiles | None, step: int, share: Share, keep: int | None, world: World
) -> Path | None:
    """Writes a checkpoint and removes older ones. All ranks call it and share a file system.

    Older checkpoints are removed only if the new one and `keep - 1` others are valid. A single rank
    verifies sha256, several ranks only names and sizes. The new checkpoint stays even if the root
    has later steps.

    Args:
        root: The existing folder of checkpoints on the first rank, None on the others.
        step: Optimizer steps done.
        share: The part of this rank.
        keep: Steps to keep, at least 1. None keeps all.
        world: The ranks.

    Returns:
        The folder of the checkpoint on the first rank, None on the others.

    Raises:
        CheckpointError: On all ranks, if one fails. Older checkpoints are unchanged.
        OldCheckpointStays: On the first rank, if the new checkpoint is complete and older ones
            could not be removed.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step must be >= 0 and keep >= 1, not {step} and {keep}")
    writer = CheckpointWriter(root, step, share, world)
    name = writer.write()
    failpoint("renamed")
    root_files = writer.root_files
    if root_files is None:
        return None
    path = root_files.path / name
    try:
        # The checkpoint is in place: an error from here on does not make the save fail.
        root_files.sync()
        if keep is not None:
            remove_old(root_files, name, keep, sums=world.size == 1)
    except OSError as error:
        raise OldCheckpointStays(
            f"{path} is saved, but older checkpoints could not be removed: {error}"
        ) from error
    return path


class CheckpointWriter:
    """The save of one checkpoint.

    Attributes:
        root_files: The open root. None on all ranks except the first, and before the folder is
            made.
    """

    def __init__(self, root: Path | RunFiles | None, step: int, share: Share, world: World) -> None:
        self.root_files: RunFiles | None = None
        self._root = root
        self._step = step
        self._share = share
        self._world = world
        self._state = b""
        self._staged = f"step-{step:08d}.tmp-{uuid.uuid4().hex[:12]}"
        # The other ranks have no root, so the first rank sends its path.
        path = root.path if isinstance(root, RunFiles) else root
        self._goal = world.text(f"step {step} was not saved in {path}")

    def write(self) -> str:
        """Writes the checkpoint.

        Returns:
            The name of its folder, "" on all ranks except the first.
        """
        try:
            sizes = self._on_all_ranks(self._check_share)
            paths = self._on_all_ranks(partial(self._make_folder, sum(sizes)))
            reports = self._on_all_ranks(partial(self._write_files, paths[0]))
            names = self._on_all_ranks(partial(self._publish, reports))
        except BaseException:
            # Also for KeyboardInterrupt: an unfinished folder takes the space of a checkpoint.
            if self.root_files is not None:
                self.root_files.remove(self._staged, ignore_errors=True)
            raise
        return str(names[self._world.rank])

    def _on_all_ranks(self, phase: Callable[[], Any]) -> list[Any]:
        """Runs one phase on this rank and exchanges results with the other ranks.

        Args:
            phase: Returns a result for JSON. It must not run collectives: a rank that failed
                earlier would not take part.

        Returns:
            The results of all ranks.

        Raises:
            CheckpointError: On all ranks, if the phase fails on one.
        """
        result = None
        problem = ""
        cause: Exception | None = None
        try:
            result = phase()
        except Exception as error:  # the other ranks wait for this one, whatever the error is
            cause = error
            problem = error_text(error)
            if self._world.size > 1:
                problem = f"rank {self._world.rank}: {problem}"
        answers = [json.loads(text) for text in self._world.texts(json.dumps([problem, result]))]
        # A bug: raise it, after the exchange, so that no rank hangs.
        if cause is not None and not isinstance(cause, FAILED):
            raise cause
        for reported, _ in answers:
            if reported:
                raise CheckpointError(f"{self._goal}: {reported}") from cause
        return [result for _, result in answers]

    def _check_share(self) -> int:
        """Checks this rank's share and returns its size in bytes."""
        for group, boxes in self._share.boxes.items():
            check_boxes(group, boxes)
        check_boxes(RNG, whole_boxes(self._share.random))
        if self._world.first:
            self._state = strict_json(self._share.state).encode()
        return share_bytes(self._share) + len(self._state)

    def _make_folder(self, needed: int) -> str:
        """Makes the temporary folder on the first rank and returns its path."""
        if self._root is None:
            return ""
        self.root_files = RunFiles.at(self._root)
        make_room(self.root_files, needed)
        folder = self.root_files.folder(self._staged, make=True)
        # Make the folders of groups now: the other ranks write to them in the next phase.
        if self._world.size > 1:
            for group in self._share.boxes:
                folder.folder(group, make=True)
        return str(folder.path.absolute())

    def _write_files(self, path: str) -> dict[str, dict[str, Any]]:
        """Writes the files of this rank and returns their manifest entries by name."""
        folder = self._open_staged(path)
        entries = {}
        for group, boxes in self._share.boxes.items():
            for number, file_boxes in enumerate(split_files(boxes), start=1):
                name = f"{group}/rank-{self._world.rank:05d}-{number}{SAFETENSORS}"
                if self._world.size == 1:
                    name = f"{group}{SAFETENSORS}"
                entries[name] = write_tensor_file(folder, name, file_boxes)
        if self._share.random:
            name = f"{RNG}{SAFETENSORS}"
            entries[name] = write_tensor_file(folder, name, whole_boxes(self._share.random))
        return {name: asdict(entry) for name, entry in entries.items()}

    def _open_staged(self, path: str) -> RunFiles:
        """Opens the temporary folder, on other ranks by its path."""
        if self.root_files is not None:
            return self.root_files.folder(self._staged)
        # Each rank may be on another machine.
        try:
            return RunFiles.at(Path(path))
        except FileNotFoundError:
            raise OSError(
                f"{path}: not found on this machine; all machines need a shared file system"
            ) from None

    def _publish(self, reports: list[dict[str, dict[str, Any]]]) -> str:
        """Completes and renames the folder on the first rank. Returns its name."""
        if self.root_files is None:
            return ""
        folder = self.root_files.folder(self._staged)
        entries = {}
        for report in reports:
            for name, entry in report.items():
                entries[name] = FileEntry(**entry)
        # The manifest detects later changes of a file. This detects unreadable files, and boxes of
        # all ranks that don't cover their tensors.
        read_index(TensorFiles(folder), entries)
        folder.replace(STATE, self._state)
        entries[STATE] = FileEntry(len(self._state), sha256_of(self._state))
        failpoint("manifest")
        write_manifest(folder, self._step, self._world.size, entries)
        failpoint("rename")
        name = new_folder_name(self.root_files, self._step)
        self.root_files.rename(self._staged, name)
        return name


def check_boxes(group: str, boxes: Sequence[TensorBox]) -> None:
    """Raises ValueError or TypeError if a group cannot be stored and loaded unchanged."""
    if "/" in group or not PLAIN.fullmatch(group):
        raise ValueError(f"group {group!r} cannot be the name of a file")
    for box in boxes:
        # Tensors are keys of the header next to "__metadata__". Aliases are keys of the metadata.
        reserved = {*TORCH_KEYS, SHARDING} & {*box.aliases}
        if box.name == "__metadata__":
            reserved.add(box.name)
        if reserved:
            raise ValueError(f"{group}: the name {min(reserved)} is reserved")
        tensor = box.tensor
        # A wrapper subclass (DTensor, a quantized weight) has its data in inner tensors.
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
        if not is_plain or tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(
                f"{group}: {box.name}: only plain dense tensors can be stored, not"
                f" {type(tensor).__name__}"
            )
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{group}: {box.name}: safetensors does not store {tensor.dtype}")


def share_bytes(share: Share) -> int:
    """Returns the bytes of a share on disk, with a small reserve."""
    total = RESERVE
    for boxes in (*share.boxes.values(), whole_boxes(share.random)):
        total += len(encode_header(boxes))
        total += sum(box.tensor.nbytes for box in boxes)
    return total


def strict_json(state: dict[str, Any]) -> str:
    """Returns `state` as JSON. Raises ValueError or TypeError if it would not load unchanged."""
    text = json.dumps(state, allow_nan=False, indent=1)
    # JSON turns tuples into lists and keys into strings, without an error.
    if json.loads(text) != state:
        raise ValueError(
            "the state cannot be stored as JSON: it has tuples, or keys that are not strings"
        )
    return text


def make_room(root: RunFiles, needed: int) -> None:
    """Removes folders of killed saves. Raises OSError if less than `needed` bytes are free."""
    for name in root.names():
        # The root has one writer, so no save uses these folders.
        if re.fullmatch(r"step-.*\.tmp-.*", name):
            root.remove(name, ignore_errors=True)
    free = root.free_bytes()
    if free < needed:
        raise OSError(f"needs {size(needed)}, {size(free)} free")


def split_files(boxes: Sequence[TensorBox]) -> list[Boxes]:
    """Distributes boxes over files, because a safetensors file has each name once.

    With FSDP2 over tensor parallelism a rank may have several boxes of one tensor. The second box
    goes into the second file.
    """
    files: list[Boxes] = []
    counts = Counter[str]()
    for box in boxes:
        number = counts[box.name]
        counts[box.name] += 1
        if number == len(files):
            files.append([])
        files[number].append(box)
    return files


def write_tensor_file(folder: RunFiles, name: str, boxes: Sequence[TensorBox]) -> FileEntry:
    """Writes a safetensors file, syncs it and returns its manifest entry."""
    digest = hashlib.sha256()
    size = 0
    descriptor = folder.open_at(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with open(descriptor, "wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for chunk in file_chunks(boxes):
            # Hashing and writing release the GIL, so they run at the same time.
            hashing = hasher.submit(digest.update, chunk)
            write_all(file, chunk)
            hashing.result()
            size += len(chunk)
        os.fsync(file.fileno())
    failpoint("shard")
    return FileEntry(size, digest.hexdigest())


def file_chunks(boxes: Sequence[TensorBox]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file. At most one tensor is copied at a time."""
    # Wide elements come first, so that every tensor is aligned.
    boxes = sorted(boxes, key=lambda box: -box.tensor.itemsize)
    yield encode_header(boxes)
    for box in boxes:
        tensor = box.tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]


def encode_header(boxes: Sequence[TensorBox]) -> bytes:
    """Returns the header of a safetensors file: its length as 8 bytes, then JSON.

    Other names of a tensor are in the metadata, as in safetensors' save_model. Format:
    huggingface.co/docs/safetensors.
    """
    places = {box.name: {OFFSETS: box.offsets, SHAPE: box.shape} for box in boxes}
    tied_names = {alias: box.name for box in boxes for alias in box.aliases}
    metadata = {**TORCH_KEYS, SHARDING: json.dumps(places), **tied_names}
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for box in boxes:
        end = start + box.tensor.nbytes
        header[box.name] = {
            "dtype": DTYPE_NAMES[box.tensor.dtype],
            "shape": list(box.tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    # Padded to 8 bytes, so that the first tensor is aligned.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
