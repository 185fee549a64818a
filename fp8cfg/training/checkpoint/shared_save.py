"""Shared save: a checkpoint written by all ranks at once, each its own boxes; nothing is gathered but names, places and sums.

The first rank makes the folder and says where; every rank writes `<group>/rank-<rank>-<n>.safetensors` below it by
torch.distributed.checkpoint, summing as it writes; the first collects lengths and sums, writes the manifest last and renames the
folder, as `checkpoint.save` does. Where one rank fails none has saved: the folder is removed and all say so. Ranks must see one
file system.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from safetensors.torch import save as safetensors_bytes
from torch import Tensor, float64, tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fp8cfg.training.checkpoint import checkpoint
from fp8cfg.training.checkpoint.checkpoint import CheckpointError, OldCheckpointStays
from fp8cfg.training.checkpoint.failpoint import failpoint
from fp8cfg.training.checkpoint.loaded import ALSO, RNG, STATE
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint, FileEntry, sum_of, write_given
from fp8cfg.training.checkpoint.share_writer import SUFFIX, SharePlanner, ShareWriter
from fp8cfg.training.checkpoint.step_folders import free_name, remove_old
from fp8cfg.training.checkpoint.tensor_box import Groups
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
            data, name = safetensors_bytes(share.random), f"{RNG}{SUFFIX}"
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
        text = checkpoint.strict_json({**state, ALSO: also}).encode()
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
