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
import shutil
import signal
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fp8cfg.config.errors import Fp8cfgError
from fp8cfg.training.checkpoint import tensor_file
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint, NoUsableCheckpoint, fsync, read_manifest, verify, write_manifest

Tensors = dict[str, dict[str, Tensor]]
STATE = "state.json"
# "step-00000123", or "step-00000123.2" for a second save of the same step, which must not touch the first.
FOLDER = re.compile(r"step-([0-9]{8,})(?:\.([0-9]+))?")


class CheckpointError(Fp8cfgError):
    """A checkpoint could not be written; those written before are intact. Exit code 5."""

    exit_code = 5


def save(root: Path, step: int, tensors: Tensors, state: dict[str, Any], keep: int, world_size: int = 1) -> Path:
    """Write a checkpoint of `step` under `root` and return its folder; keep the newest `keep` (>= 1) that verify.

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
    if step < 0 or keep < 1:
        raise ValueError(f"step must be >= 0 and keep >= 1, not {step} and {keep}")
    for group, named in tensors.items():
        tensor_file.refuse_unstorable(group, named)
    text = _strict_json(state)
    root = Path(root)
    staged = root / f"step-{step:08d}.tmp-{uuid.uuid4().hex[:12]}"
    try:
        _make_room(root, sum(t.nbytes for named in tensors.values() for t in named.values()) + len(text))
        staged.mkdir()
        _write_files(staged, tensors, text)
        failpoint("manifest")
        write_manifest(staged, step, world_size)
        verify(staged)
        failpoint("rename")
        final = staged.rename(_free_name(root, step))
        fsync(root)
    except BaseException as error:
        shutil.rmtree(staged, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError, DamagedCheckpoint)):
            raise CheckpointError(f"cannot save step {step} in {root}: {error}") from error
        raise
    failpoint("renamed")
    try:
        _remove_old(root, final, keep)
    except OSError as error:
        raise CheckpointError(f"{final} is saved, but an older checkpoint cannot be removed: {error}") from error
    return final


def load(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Verify the checkpoint at `path`, then read it: the tensors by group and name, on the CPU, and the state.

    Raises DamagedCheckpoint, naming the file.
    """
    path = Path(path)
    verify(path)
    tensors = {}
    file = path / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        for file in sorted(path.glob("*.safetensors")):
            tensors[file.stem] = tensor_file.read(file)
    # The sums hold and yet it cannot be read: not written by save(). KeyError: an alias of a tensor that is not there.
    except (OSError, ValueError, RecursionError, KeyError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path}: {file.name}: cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path}: {STATE}: not a JSON object")
    return tensors, state


def newest(root: Path, log: Callable[[str], None]) -> Path | None:
    """The checkpoint of the highest step under `root` that verifies; None where there has never been one.

    Each one passed over is logged in a line that names the file and the reason. Raises NoUsableCheckpoint where there are
    checkpoints and none verifies: to start anew would then be a silent loss.
    """
    candidates = _newest_first(Path(root))
    for step, _, path in candidates:
        problem = _damage(path, step)
        if problem is None:
            return path
        log(f"checkpoint passed over: {problem}")
    if candidates:
        raise NoUsableCheckpoint(f"none of the {len(candidates)} checkpoints in {root} verifies")
    return None


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


def _make_room(root: Path, estimate: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    fsync(root.parent)
    for left in root.glob("step-*.tmp-*"):  # of a process that was killed: this root has one writer
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(root).free
    if free < 2 * estimate:
        raise OSError(f"not enough space: needs {2 * estimate} bytes (twice its size), {free} are free")


def _write_files(folder: Path, tensors: Tensors, text: str) -> None:
    (folder / STATE).write_text(text, encoding="utf-8")
    for group, named in tensors.items():
        file = folder / f"{group}.safetensors"
        tensor_file.write(file, named)
        # safetensors makes files that only their owner can read; this one gets what the umask grants.
        file.chmod((folder / STATE).stat().st_mode)
        failpoint("shard")


def _newest_first(root: Path) -> list[tuple[int, int, Path]]:
    """Step, attempt and folder of each checkpoint, by falling step, the later save first where a step was saved twice."""
    found = [(path, FOLDER.fullmatch(path.name)) for path in root.iterdir()] if root.is_dir() else []
    return sorted(
        ((int(m[1]), int(m[2] or 1), path) for path, m in found if m and path.is_dir() and not path.is_symlink()),
        reverse=True,
    )


def _damage(path: Path, step: int) -> str | None:
    """Why the checkpoint at `path`, named after `step`, cannot be used, or None."""
    try:
        verify(path)
        found = read_manifest(path).step
    except DamagedCheckpoint as error:
        return str(error)
    return None if found == step else f"{path}: MANIFEST.json: written for step {found}"


def _free_name(root: Path, step: int) -> Path:
    attempt = max((attempt for other, attempt, _ in _newest_first(root) if other == step), default=0) + 1
    return root / (f"step-{step:08d}" + (f".{attempt}" if attempt > 1 else ""))


def _remove_old(root: Path, new: Path, keep: int) -> None:
    candidates = _newest_first(root)
    kept = {step for step, _, path in candidates if path == new}
    for step, _, path in candidates:
        if path == new:
            continue
        if step in kept or len(kept) >= keep:
            # Renamed first, so that a kill half-way leaves rubbish to collect and not a damaged checkpoint.
            gone = path.rename(root / f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")
            failpoint("delete")
            shutil.rmtree(gone)
        elif _damage(path, step) is None:
            kept.add(step)
