"""Shared save: a checkpoint written by all ranks at once, each its own boxes; nothing is gathered but names and sums.

The first rank makes the folder and says where; every rank writes `<group>/rank-<rank>-<n>.safetensors` below it, summing as it
writes; the first collects lengths and sums, writes the manifest last and renames the folder, as `checkpoint.save` does. Where one
rank fails none has saved: the folder is removed and all say so. Ranks must see one file system.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, float64, tensor

from fp8cfg.training.checkpoint import box_file, checkpoint
from fp8cfg.training.checkpoint.checkpoint import CheckpointError, OldCheckpointStays
from fp8cfg.training.checkpoint.failpoint import failpoint
from fp8cfg.training.checkpoint.loaded import RNG, STATE
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint, FileEntry, sum_of, write_given
from fp8cfg.training.checkpoint.step_folders import free_name, remove_old
from fp8cfg.training.checkpoint.tensor_box import Groups, TensorBox
from fp8cfg.training.distributed.world import World
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.run_files import RunFiles

FAILED = (OSError, StrangeFile, DamagedCheckpoint, TypeError, ValueError)


@dataclass
class Share:
    """What one rank writes of a checkpoint: its boxes by group; and of the first rank the JSON state and random numbers."""

    boxes: Groups
    state: dict[str, Any]
    random: dict[str, Tensor]

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by group and name, of a rank that has all of each."""
        found = {group: {name: box.tensor for box in boxes for name in (box.name, *box.also)}
                 for group, boxes in self.boxes.items()}
        return {group: named for group, named in {**found, RNG: self.random}.items() if named}


def save(root: Path | RunFiles | None, step: int, share: Share, keep: int | None, world: World) -> Path | None:
    """Write a checkpoint of `step` under `root`, which the first rank has and which is there, and return its folder there; keep the
    newest `keep`, of which older ones are known by names and sizes of their files, or all where it is None. All ranks call it.

    Raises CheckpointError on all ranks, leaving older checkpoints as they were; OldCheckpointStays on the first.
    """
    files, staged = RunFiles.at(root) if root is not None else None, f"step-{step:08d}.tmp-{uuid.uuid4().hex[:12]}"
    needed = world.sum(tensor(float(share_bytes(share)), dtype=float64, device=world.device)).item()
    said = json.loads(world.text(json.dumps(_made(files, staged, int(needed), list(share.boxes)) if files else {})))
    if not said["problem"]:
        written = world.texts(json.dumps(_written(Path(said["folder"]), share, world)))
        said = json.loads(world.text(json.dumps(_finished(files, staged, step, written, world) if files else {})))
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
        raise OldCheckpointStays(f"{final} is saved, but an older checkpoint cannot be removed: {error}") from error
    return final


def share_bytes(share: Share) -> int:
    """Bytes that a rank writes, about."""
    tensors = sum(box.tensor.nbytes + 256 for boxes in share.boxes.values() for box in boxes)
    return tensors + len(json.dumps(share.state)) + checkpoint.RESERVE


def _made(files: RunFiles, staged: str, needed: int, groups: list[str]) -> dict[str, str]:
    """The folder to write in, made; or why there is none."""
    said = {"root": str(files.path), "problem": "", "folder": ""}
    try:
        checkpoint.make_room(files, needed)
        inside = files.folder(staged, make=True)
        for group in groups:
            inside.folder(group, make=True)
    except FAILED as error:
        files.remove(staged, ignore_errors=True)
        return {**said, "problem": _reason(error)}
    return {**said, "folder": str(inside.path.absolute())}


def _written(folder: Path, share: Share, world: World) -> dict[str, Any]:
    """The length and the sum of each file that this rank wrote, by its name; or why it could not."""
    entries: dict[str, FileEntry] = {}
    try:
        files = RunFiles.at(folder)
        for group, boxes in share.boxes.items():
            inside = files.folder(group)
            for number, part in enumerate(box_file.files_of(boxes), 1):
                name = f"rank-{world.rank:05d}-{number}{box_file.SUFFIX}"
                entries[f"{group}/{name}"] = box_file.write(inside, name, part)
        if world.first:
            text = checkpoint.strict_json(share.state).encode()
            files.replace(STATE, text)
            entries[STATE] = FileEntry(len(text), sum_of(text))
            random = [TensorBox(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in share.random.items()]
            entries[f"{RNG}{box_file.SUFFIX}"] = box_file.write(files, f"{RNG}{box_file.SUFFIX}", random, placed=False)
    except FAILED as error:
        missing = isinstance(error, FileNotFoundError) and not folder.exists()
        why = f"{folder}: not seen here; machines need a file system that they share" if missing else _reason(error)
        return {"problem": f"rank {world.rank}: {why}"}
    return {"files": {name: asdict(entry) for name, entry in entries.items()}}


def _finished(files: RunFiles, staged: str, step: int, written: list[str], world: World) -> dict[str, str]:
    """On the first rank: the name of the folder, whole and in its place; or why there is none."""
    said = {"root": str(files.path), "problem": "", "name": ""}
    found = [json.loads(text) for text in written]
    problems = [each["problem"] for each in found if "problem" in each]
    try:
        if problems:
            raise OSError(problems[0])
        entries = {name: FileEntry(**entry) for each in found for name, entry in each["files"].items()}
        failpoint("manifest")
        inside = files.folder(staged)
        write_given(inside, step, world.size, entries)
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
