"""Checkpoint directory: one safetensors file per group of tensors, state.json for the rest, under a manifest with sha256 sums.

A save writes into `step-00000123.tmp-<random>`, brings each file to disk, writes the manifest last, verifies what it wrote,
and only then renames the folder to `step-00000123`. So a visible folder was complete, whatever killed the process, and
step_folders.newest() needs neither a `latest` file nor clocks: it takes the highest step that still verifies. Nothing is ever
pickled. One process writes to a root at a time; the lock of the run folder sees to that.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fp8cfg.checkpoint import load as loaded
from fp8cfg.checkpoint import tensor_layout
from fp8cfg.checkpoint.load import RNG, STATE, LoadedTensors, SavedTensors, Tensors
from fp8cfg.checkpoint.manifest import (
    FOLDER,
    DamagedCheckpoint,
    damage,
    failpoint,
    free_name,
    read_manifest,
    remove_old,
    verify,
    write_manifest,
)
from fp8cfg.checkpoint.tensor_layout import SAFETENSORS
from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.schema.errors import Fp8cfgError

RESERVE = 1 << 16
"""Bytes for the manifest and for what the file system rounds up."""


class CheckpointError(Fp8cfgError):
    """A checkpoint could not be written; those written before are intact. Exit code 5."""

    exit_code = 5


class OldCheckpointStays(CheckpointError):
    """A checkpoint was written, and an older one could not be removed."""


def save(
    root: Path | RunFiles,
    step: int,
    tensors: Tensors,
    state: dict[str, Any],
    keep: int | None,
    world_size: int = 1,
) -> Path:
    """Write a checkpoint of `step` under `root`, which is there, and return its folder; keep the newest `keep` (>= 1) that
    verify, or all of them where it is None.

    `tensors` maps group to name to tensor; each group becomes `<group>.safetensors`. Any dense dtype safetensors knows, any
    device, strided or not, comes back bitwise, contiguous and on the CPU. A tensor that stands under two names (tied
    embeddings) is stored once and comes back as one; views that overlap otherwise are stored separately.
    `state` must be what JSON gives back: no NaN, no tuples, keys that are strings.

    `keep` counts distinct steps; 2 or more survive a disk that loses one. Older folders are removed only after the new one
    and `keep - 1` others were verified, which reads them in full; damaged ones are left until then. The folder just saved
    is never removed, even where later steps of an abandoned run stand beside it.

    Raises CheckpointError (no space, not writable, a disk that returns other bytes), leaving older checkpoints as they
    were; ValueError or TypeError, before anything is written, for what cannot be stored.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step must be >= 0 and keep >= 1, not {step} and {keep}")
    for group, named in tensors.items():
        tensor_layout.refuse_unstorable(group, named)
    text = strict_json(state)
    staged = f"step-{step:08d}.tmp-{uuid.uuid4().hex[:12]}"
    try:
        files = RunFiles.at(root)
        make_room(files, room_for(tensors.values(), len(text)))
        try:
            inside = files.folder(staged, make=True)
            _write_files(inside, tensors, text)
            failpoint("manifest")
            write_manifest(inside, step, world_size)
            verify(inside)
            failpoint("rename")
            final = free_name(files, step)
            files.rename(staged, final)
            files.sync()
        except BaseException:
            files.remove(staged, ignore_errors=True)
            raise
    except (OSError, SafetensorError, DamagedCheckpoint, StrangeFile) as error:
        shown = root.path if isinstance(root, RunFiles) else root
        reason = re.sub(r"/proc/self/fd/\d+/", "", str(error))
        raise CheckpointError(f"cannot save step {step} in {shown}: {reason}") from error
    failpoint("renamed")
    try:
        if keep is not None:
            remove_old(files, final, keep)
    except OSError as error:
        raise OldCheckpointStays(
            f"{files.path / final} is saved, but an older checkpoint cannot be removed: {error}"
        ) from error
    return files.path / final


def load(path: Path | RunFiles) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Verify the checkpoint at `path`, then read it, whatever wrote it: the whole tensors by group and name, on the CPU, and the
    state.

    Raises DamagedCheckpoint, naming the file.
    """
    tensors, state = loaded.read(RunFiles.at(path), verify(path), [])
    return {
        group: t.whole() if isinstance(t, SavedTensors) else dict(t) for group, t in tensors.items()
    }, state


def load_named(root: RunFiles, name: str, ranks: int = 1) -> tuple[LoadedTensors, dict[str, Any]]:
    """The checkpoint in the folder `name`, written for the step that it says: its state, and its tensors, which are read when they
    are asked for. It is verified, but where several `ranks` go on with it, each of which calls this, for the sums of its tensors:
    `check_sums` of these shares them out. Raises DamagedCheckpoint, naming the file."""
    match = FOLDER.fullmatch(name)
    at_once: Callable[[str], bool] = (
        (lambda file: file in (STATE, f"{RNG}{SAFETENSORS}")) if ranks > 1 else (lambda file: True)
    )
    problem = damage(root, name, int(match[1]) if match else -1, at_once)
    if problem:
        raise DamagedCheckpoint(problem)
    folder = root.folder(name)
    manifest = read_manifest(folder)
    return loaded.read(folder, manifest, [file for file in manifest.files if not at_once(file)])


def room_for(groups: Iterable[Mapping[str, Tensor]], text: int = 0) -> int:
    """Bytes that a save of `groups` of tensors and `text` bytes of state takes on the disk, headers and a small reserve included.
    Tensors that are one and the same count once."""
    found = [tensor_layout.distinct(named) for named in groups]
    return sum(t.nbytes + 256 for each in found for t in each) + text + RESERVE


def strict_json(state: dict[str, Any]) -> str:
    text = json.dumps(state, allow_nan=False, indent=1)
    if json.loads(text) != state:
        raise ValueError(
            "state would not come back from JSON as it is: it has tuples, or keys that are not"
            " strings"
        )
    return text


def make_room(root: RunFiles, needed: int) -> None:
    for left in root.names():
        if re.fullmatch(
            r"step-.*\.tmp-.*", left
        ):  # of a process that was killed: this root has one writer
            root.remove(left, ignore_errors=True)
    if (free := root.free()) < needed:
        raise OSError(f"not enough space: needs {needed} bytes, {free} are free")


def _write_files(folder: RunFiles, tensors: Tensors, text: str) -> None:
    folder.replace(STATE, text.encode())
    with folder.open(STATE) as file:
        mode = os.fstat(file.fileno()).st_mode
    for group, named in tensors.items():
        tensor_layout.write(folder.reached / f"{group}{SAFETENSORS}", named)
        with folder.open(f"{group}{SAFETENSORS}") as file:
            # safetensors makes files that only their owner can read; this one gets what the umask grants.
            os.fchmod(file.fileno(), mode)
        failpoint("shard")
