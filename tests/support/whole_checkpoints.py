"""Checkpoints of whole tensors, saved and loaded at once; manifests of files that no save wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state
from fp8cfg.checkpoint.load import StoredGroup, Tensors, open_checkpoint
from fp8cfg.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    list_steps,
    no_usable_checkpoint,
    skip_message,
    verify_step,
    write_manifest,
)
from fp8cfg.checkpoint.save import Share, write_checkpoint
from fp8cfg.checkpoint.tensor_layout import whole_boxes
from fp8cfg.data import Batches
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFiles


def save(
    root: Path, step: int, tensors: Tensors, state: dict[str, Any], keep: int | None = None
) -> Path:
    """Saves tensors by group and name, as one rank does."""
    boxes = {group: whole_boxes(named) for group, named in tensors.items()}
    path = write_checkpoint(root, step, Share(boxes, state, {}), keep, World())
    assert path is not None
    return path


def collect(
    job: Job, batches: Batches, step: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What one rank saves after `step` steps: tensors by group and name, and the JSON state."""
    share = job_state.collect_share(job, batches, step, World())
    groups = {"rng": share.random}
    for group, boxes in share.boxes.items():
        if boxes:
            groups[group] = {name: box.tensor for box in boxes for name in (box.name, *box.aliases)}
    return groups, share.state


def newest(root: Path, log: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies, None if there has never been one."""
    if not root.is_dir():
        return None
    files = RunFiles.at(root)
    for _, name in list_steps(files):
        try:
            verify_step(files, name)
            return root / name
        except DamagedCheckpoint as error:
            log(skip_message(error))
    if list_steps(files):
        raise no_usable_checkpoint(files)
    return None


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Verifies a checkpoint and reads all of it. Tied tensors share memory."""
    groups, state = open_checkpoint(RunFiles.at(path.parent), path.name)
    tensors = {}
    for group, stored in groups.items():
        assert isinstance(stored, StoredGroup)
        named = {name: stored[name] for name in stored if name not in stored.tied}
        tensors[group] = named | {other: named[name] for other, name in stored.tied.items()}
    return tensors, state


def describe(folder: Path, step: int, world_size: int = 1) -> Manifest:
    """Writes a manifest with the right sums of whatever is in `folder`."""
    entries = {}
    for file in folder.rglob("*"):
        if file.is_file() and file != folder / MANIFEST:
            data = file.read_bytes()
            entry = FileEntry(len(data), hashlib.sha256(data).hexdigest())
            entries[str(file.relative_to(folder))] = entry
    return write_manifest(RunFiles.at(folder), step, world_size, entries)
