"""Checkpoint directory: one safetensors file per group of tensors, state.json for the rest, under a manifest with sha256 sums.

A save writes into `step-00000123.tmp-<random>`, brings each file to disk, writes the manifest last, verifies what it wrote,
and only then renames the folder to `step-00000123`. So a visible folder was complete, whatever killed the process, and
newest() needs neither a `latest` file nor clocks: it takes the highest step that still verifies. Nothing is ever
pickled. One process writes to a root at a time; the lock of the run folder sees to that.
"""

from __future__ import annotations

import json
import os
import re
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fp8cfg.config.errors import Fp8cfgError
from fp8cfg.training.checkpoint import tensor_file
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint, NoUsableCheckpoint, verify, write_manifest
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.run_files import RunFiles

Tensors = dict[str, dict[str, Tensor]]
STATE = "state.json"
MAX_STATE = 1 << 30
RESERVE = 1 << 16
"""Bytes for the manifest and for what the file system rounds up."""
SUFFIX = ".safetensors"
# "step-00000123", or "step-00000123.2" for a second save of the same step, which must not touch the first.
FOLDER = re.compile(r"step-([0-9]{8,})(?:\.([0-9]+))?")


class CheckpointError(Fp8cfgError):
    """A checkpoint could not be written; those written before are intact. Exit code 5."""

    exit_code = 5


class OldCheckpointStays(CheckpointError):
    """A checkpoint was written, and an older one could not be removed."""


def save(
    root: Path | RunFiles, step: int, tensors: Tensors, state: dict[str, Any], keep: int | None, world_size: int = 1
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
        tensor_file.refuse_unstorable(group, named)
    text = _strict_json(state)
    staged = f"step-{step:08d}.tmp-{uuid.uuid4().hex[:12]}"
    try:
        files = RunFiles.at(root)
        _make_room(files, room_for(tensors.values(), len(text)))
        try:
            inside = files.folder(staged, make=True)
            _write_files(inside, tensors, text)
            failpoint("manifest")
            write_manifest(inside, step, world_size)
            verify(inside)
            failpoint("rename")
            final = _free_name(files, step)
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
            _remove_old(files, final, keep)
    except OSError as error:
        raise OldCheckpointStays(f"{files.path / final} is saved, but an older checkpoint cannot be removed: {error}") from error
    return files.path / final


def load(path: Path | RunFiles) -> tuple[Tensors, dict[str, Any]]:
    """Verify the checkpoint at `path`, then read it: the tensors by group and name, on the CPU, and the state.

    Raises DamagedCheckpoint, naming the file.
    """
    verify(path)
    return _read(RunFiles.at(path))


def newest(root: Path, log: Callable[[str], None]) -> Path | None:
    """The checkpoint of the highest step under `root` that verifies; None where there has never been one.

    Each one passed over is logged in a line that names the file and the reason. Raises NoUsableCheckpoint where there are
    checkpoints and none verifies: to start anew would then be a silent loss.
    """
    if not root.is_dir():
        return None
    files = RunFiles.at(root)
    for step, name in steps(files):
        problem = _damage(files, name, step)
        if problem is None:
            return files.path / name
        log(passed_over(problem))
    if steps(files):
        raise none_usable(files)
    return None


def steps(root: RunFiles) -> list[tuple[int, str]]:
    """Step and folder name of each checkpoint under `root`, whole or not, by falling step, the later save first where a step was
    saved twice."""
    return [(step, name) for step, _, name in _newest_first(root)]


def load_named(root: RunFiles, name: str) -> tuple[Tensors, dict[str, Any]]:
    """`load` of the folder `name`, which also says the step that it was written for."""
    match = FOLDER.fullmatch(name)
    problem = _damage(root, name, int(match[1]) if match else -1)
    if problem:
        raise DamagedCheckpoint(problem)
    return _read(root.folder(name))


def passed_over(problem: object) -> str:
    """The line for a checkpoint that is not used."""
    return f"checkpoint passed over: {problem}"


def none_usable(root: RunFiles) -> NoUsableCheckpoint:
    """The error where there are checkpoints under `root` and none of them can be used."""
    return NoUsableCheckpoint(f"none of the {len(steps(root))} checkpoints in {root.path} can be used")


def room_for(groups: Iterable[Mapping[str, Tensor]], text: int = 0) -> int:
    """Bytes that a save of `groups` of tensors and `text` bytes of state takes on the disk, headers and a small reserve included.
    Tensors that are one and the same count once."""
    found = [tensor_file.distinct(named) for named in groups]
    return sum(t.nbytes + 256 for each in found for t in each) + text + RESERVE


def failpoint(name: str) -> None:
    """For tests only: kill this process where FP8CFG_FAILPOINT=`name` or `name:n` says, at the n-th time it gets here.

    Points of save(): shard (after each group), manifest (before it), rename (before), renamed (after), delete (an old
    checkpoint is renamed away and not yet removed).
    """
    wanted, _, nth = os.environ.get("FP8CFG_FAILPOINT", "").partition(":")
    if name == wanted:
        _reached[name] += 1
        if _reached[name] == int(nth or 1):
            os.kill(os.getpid(), signal.SIGKILL)


_reached: Counter[str] = Counter()


def _strict_json(state: dict[str, Any]) -> str:
    text = json.dumps(state, allow_nan=False, indent=1)
    if json.loads(text) != state:
        raise ValueError("state would not come back from JSON as it is: it has tuples, or keys that are not strings")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read(files: RunFiles) -> tuple[Tensors, dict[str, Any]]:
    tensors, name = {}, STATE
    try:
        state = json.loads(files.read(STATE, MAX_STATE), parse_constant=_refuse_constant)
        for name in files.names():
            if name.endswith(SUFFIX) and files.kind(name) == "file":
                tensors[name.removesuffix(SUFFIX)] = tensor_file.read(files.reached / name)
    # The sums hold and yet it cannot be read: not written by save(). KeyError: an alias of a tensor that is not there.
    except (OSError, ValueError, RecursionError, KeyError, SafetensorError, StrangeFile) as error:
        raise DamagedCheckpoint(f"{files.path}: {name}: cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{files.path}: {STATE}: not a JSON object")
    return tensors, state


def _make_room(root: RunFiles, needed: int) -> None:
    for left in root.names():
        if re.fullmatch(r"step-.*\.tmp-.*", left):  # of a process that was killed: this root has one writer
            root.remove(left, ignore_errors=True)
    if (free := root.free()) < needed:
        raise OSError(f"not enough space: needs {needed} bytes, {free} are free")


def _write_files(folder: RunFiles, tensors: Tensors, text: str) -> None:
    folder.replace(STATE, text.encode())
    with folder.open(STATE) as file:
        mode = os.fstat(file.fileno()).st_mode
    for group, named in tensors.items():
        tensor_file.write(folder.reached / f"{group}{SUFFIX}", named)
        with folder.open(f"{group}{SUFFIX}") as file:
            # safetensors makes files that only their owner can read; this one gets what the umask grants.
            os.fchmod(file.fileno(), mode)
        failpoint("shard")


def _newest_first(root: RunFiles) -> list[tuple[int, int, str]]:
    """Step, attempt and name of each checkpoint, by falling step."""
    found = [(name, FOLDER.fullmatch(name)) for name in root.names()]
    return sorted(((int(m[1]), int(m[2] or 1), name) for name, m in found if m and root.kind(name) == "folder"), reverse=True)


def _damage(root: RunFiles, name: str, step: int) -> str | None:
    """Why the checkpoint `name`, of `step`, cannot be used, or None."""
    try:
        found = verify(root.folder(name)).step
    except (DamagedCheckpoint, StrangeFile, OSError) as error:
        return str(error)
    return None if found == step else f"{root.path / name}: MANIFEST.json: written for step {found}"


def _free_name(root: RunFiles, step: int) -> str:
    attempt = max((attempt for other, attempt, _ in _newest_first(root) if other == step), default=0) + 1
    return f"step-{step:08d}" + (f".{attempt}" if attempt > 1 else "")


def _remove_old(root: RunFiles, new: str, keep: int) -> None:
    candidates = steps(root)
    kept = {step for step, name in candidates if name == new}
    for step, name in candidates:
        if name == new:
            continue
        if step in kept or len(kept) >= keep:
            # Renamed first, so that a kill half-way leaves rubbish to collect and not a damaged checkpoint.
            gone = f"{name}.tmp-{uuid.uuid4().hex[:12]}"
            root.rename(name, gone)
            failpoint("delete")
            root.remove(gone)
        elif _damage(root, name, step) is None:
            kept.add(step)
