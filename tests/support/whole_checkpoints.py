"""Checkpoints of whole tensors, saved and loaded at once; manifests of files that no save wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8cfg.checkpoint.load import StoredGroup, Tensors, open_checkpoint
from fp8cfg.checkpoint.manifest import MANIFEST, FileEntry, Manifest, write_manifest
from fp8cfg.checkpoint.save import Share, write_checkpoint
from fp8cfg.checkpoint.tensor_layout import whole_boxes
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
