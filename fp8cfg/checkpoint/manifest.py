"""Checkpoint manifest (MANIFEST.json): the files of a checkpoint with length and sha256.

safetensors, torch.save and DCP load a file with a flipped byte without an error. The manifest
detects it. It is written last, so a folder with a manifest is complete.

The manifest is untrusted input. Its size is bounded and each field is checked. A file is opened
only if its name is a plain path of a regular file inside the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.schema.errors import Fp8cfgError

SCHEMA = 2
"""Format of a checkpoint: its files, their headers and the manifest."""
MANIFEST = "MANIFEST.json"
MAX_BYTES = 1 << 26
"""Enough for about 300,000 files."""
MAX_NAME = 255
# No part starts with a dot. This excludes "..", absolute paths and names with control characters.
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
SHA256 = re.compile(r"[0-9a-f]{64}")
# "step-00000123", or "step-00000123.2" for a second save of the step. The first save stays.
FOLDER = re.compile(r"step-([0-9]{8,})(?:\.([0-9]+))?")


class NoUsableCheckpoint(Fp8cfgError):
    """There are no valid checkpoints. Exit code 4."""

    exit_code = 4


class DamagedCheckpoint(NoUsableCheckpoint):
    """A checkpoint does not match its manifest. The message names the file and the problem."""


class OtherCheckpointFormat(NoUsableCheckpoint):
    """A version of fp8cfg with another checkpoint format wrote the checkpoint."""


@dataclass(frozen=True)
class FileEntry:
    """A file: its length in bytes and its sha256 in lower-case hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of MANIFEST.json.

    Attributes:
        step: Optimizer steps done.
        world_size: The ranks that wrote the files.
        files: Files by relative path.
        created: Time of writing, ISO 8601, UTC.
    """

    step: int
    world_size: int
    files: dict[str, FileEntry]
    created: str


def write_manifest(
    folder: RunFiles, step: int, world_size: int, entries: dict[str, FileEntry]
) -> Manifest:
    """Writes the manifest of files that are on disk, and syncs it and all folders.

    Args:
        folder: The folder of the checkpoint.
        step: Optimizer steps done.
        world_size: The ranks that wrote the files.
        entries: Each file, by its relative path.

    Raises:
        DamagedCheckpoint: The folder has other files, or files of another length.
        OSError: The manifest cannot be written.
    """
    names, folders = _walk(folder)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(step, world_size, dict(sorted(entries.items())), created)
    for name in entries:
        _check_name(folder.path, name)
    _check_sizes(folder, manifest, names)
    text = json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1)
    folder.replace(MANIFEST, f"{text}\n".encode())
    # Inner folders first: a file survives a power cut only if its folder is synced.
    for name in reversed(folders):
        folder.folder(name).sync()
    folder.sync()
    return manifest


def read_manifest(folder: Path | RunFiles) -> Manifest:
    """Returns the manifest of `folder`. Its fields are checked, its files are not.

    Raises:
        DamagedCheckpoint: The manifest cannot be read.
        OtherCheckpointFormat: It has another format version.
    """
    path = _path_of(folder)
    try:
        raw = json.loads(RunFiles.at(folder).read(MANIFEST, MAX_BYTES))
    except (OSError, StrangeFile) as error:
        raise _damaged(path, MANIFEST, _reason(error)) from error
    # RecursionError: the parser's answer to brackets nested some thousand deep.
    except (ValueError, RecursionError) as error:
        raise _damaged(path, MANIFEST, f"not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise _damaged(path, MANIFEST, "not a JSON object")
    schema = raw.get("schema")
    if _is_int(schema, 1) and schema != SCHEMA:
        raise OtherCheckpointFormat(
            f"{path}: has checkpoint format {schema}, but this version of fp8cfg reads format"
            f" {SCHEMA}; use the version that wrote it, or start a new run"
        )
    problem = _problem(raw)
    if problem:
        raise _damaged(path, MANIFEST, problem)
    files = {
        name: FileEntry(entry["size"], entry["sha256"]) for name, entry in raw["files"].items()
    }
    for name in files:
        _check_name(path, name)
    return Manifest(raw["step"], raw["world_size"], files, raw["created"])


def _path_of(folder: Path | RunFiles) -> Path:
    return folder.path if isinstance(folder, RunFiles) else folder


def verify(folder: Path | RunFiles, sums: Callable[[str], bool] = lambda name: True) -> Manifest:
    """Compares the files of `folder` with its manifest: names, then sizes, then sha256.

    Args:
        folder: The folder of the checkpoint.
        sums: Whether to compare the sha256 of a file, by its name. One core hashes 1.3 GB/s.

    Returns:
        The manifest.

    Raises:
        DamagedCheckpoint: The message names the first file that differs, and how.
        OtherCheckpointFormat: The manifest has another format version.
    """
    manifest = read_manifest(folder)
    path = _path_of(folder)
    try:
        # Names and sizes first: they take milliseconds, the sums may take minutes.
        files = RunFiles.at(folder)
        names, _ = _walk(files)
        _check_sizes(files, manifest, names)
    except (OSError, StrangeFile) as error:
        raise _damaged(path, MANIFEST, _reason(error)) from error
    check_sums(files, manifest, [name for name in manifest.files if sums(name)])
    return manifest


def sha256_of(data: bytes) -> str:
    """Returns the sha256 of `data` in the form of a manifest."""
    return hashlib.sha256(data).hexdigest()


def check_sums(folder: RunFiles, manifest: Manifest, names: Iterable[str]) -> None:
    """Compares the sha256 of the files `names` with the manifest. Raises DamagedCheckpoint."""
    for name in names:
        try:
            with folder.open(name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, StrangeFile) as error:
            raise _damaged(folder.path, name, _reason(error)) from error
        if digest != manifest.files[name].sha256:
            raise _damaged(folder.path, name, "its sha256 is not the one in the manifest")


def _check_sizes(files: RunFiles, manifest: Manifest, names: set[str]) -> None:
    """Compares names and sizes of files with the manifest. Raises DamagedCheckpoint."""
    # Names in only one of the two sets.
    differing = sorted(manifest.files.keys() ^ names)
    if differing:
        name = differing[0]
        if name in manifest.files:
            raise _damaged(files.path, name, "missing")
        raise _damaged(files.path, name, "not listed in the manifest")
    for name, entry in manifest.files.items():
        try:
            size = files.size(name)
        except (OSError, StrangeFile) as error:
            raise _damaged(files.path, name, _reason(error)) from error
        if size != entry.size:
            raise _damaged(files.path, name, f"{size} bytes, the manifest says {entry.size}")


def _walk(files: RunFiles) -> tuple[set[str], list[str]]:
    """Lists the files and folders of a checkpoint.

    Returns:
        Relative paths of all files except the manifest, and of all folders inside.

    Raises:
        DamagedCheckpoint: There is a link, a device or a name that is too long.
    """
    paths: set[str] = set()
    folders = [""]
    # The list grows in the loop. A recursion would fail for a deep tree.
    for parent in folders:
        folder, prefix = files, ""
        if parent:
            folder, prefix = files.folder(parent), f"{parent}/"
        for entry in folder.names():
            name = prefix + entry
            kind = folder.kind(entry)
            if len(name) > MAX_NAME:
                raise _damaged(files.path, name[:80], "not a plain path inside the folder")
            if kind == "folder":
                folders.append(name)
            elif kind != "file":
                raise _damaged(
                    files.path, name, "neither a regular file nor a folder (a link or a device)"
                )
            elif name != MANIFEST:
                paths.add(name)
    return paths, folders[1:]


def _problem(raw: dict[str, Any]) -> str | None:
    """Returns a problem with the fields of a parsed manifest, or None."""
    if raw.get("schema") != SCHEMA:
        return f"its schema must be {SCHEMA}"
    has_step = _is_int(raw.get("step"), 0)
    has_world_size = _is_int(raw.get("world_size"), 1)
    has_created = isinstance(raw.get("created"), str)
    if not (has_step and has_world_size and has_created):
        return "step, world_size or created is missing or of the wrong type"
    files = raw.get("files")
    if not isinstance(files, dict) or not files or not all(map(_is_entry, files.values())):
        return "files must map at least one name to its size and sha256"
    return None


def _is_entry(value: Any) -> bool:
    """Returns whether a value is a valid file entry: a size and a sha256."""
    if not isinstance(value, dict) or not _is_int(value.get("size"), 0):
        return False
    digest = value.get("sha256")
    return isinstance(digest, str) and SHA256.fullmatch(digest) is not None


def _is_int(value: Any, minimum: int) -> bool:
    """Returns whether a value is an int of at least `minimum`."""
    # isinstance would accept a bool.
    return type(value) is int and value >= minimum


def _check_name(folder: Path, name: str) -> None:
    """Raises DamagedCheckpoint unless a name is a plain relative path."""
    if name == MANIFEST or len(name) > MAX_NAME or not PLAIN.fullmatch(name):
        raise _damaged(folder, MANIFEST, f"{name[:80]!r} is not a plain path inside the folder")


def _reason(error: OSError | StrangeFile) -> str:
    """Returns the problem of a file from its error."""
    if isinstance(error, StrangeFile):
        return "not a regular file"
    if isinstance(error, FileNotFoundError):
        return "missing"
    return f"cannot be read ({error.strerror or error})"


def _damaged(folder: Path, name: str, problem: str) -> DamagedCheckpoint:
    """Returns the error for a file of a checkpoint."""
    if not name.isprintable():  # a name from a folder may have control characters
        name = repr(name)
    return DamagedCheckpoint(f"{folder}: {name}: {problem}")


def list_steps(root: RunFiles) -> list[tuple[int, str]]:
    """Returns step and folder name of each checkpoint, valid or not, newest first."""
    return [(step, name) for step, _, name in _newest_first(root)]


def skip_message(problem: object) -> str:
    """Returns the message for a checkpoint that is skipped."""
    return f"warning: skipped damaged checkpoint {problem}"


def no_usable_checkpoint(root: RunFiles) -> NoUsableCheckpoint:
    """Returns the error for a folder in which no checkpoint is valid."""
    return NoUsableCheckpoint(
        f"{root.path}: none of {len(list_steps(root))} checkpoints is valid; restore the folder from"
        " a backup or start a new run"
    )


def verify_step(
    root: RunFiles, name: str, sums: Callable[[str], bool] = lambda name: True
) -> Manifest:
    """Verifies a checkpoint and compares its step with its folder name.

    Args:
        root: The folder of checkpoints.
        name: The folder of the checkpoint.
        sums: Whether to compare the sha256 of a file, by its name.

    Returns:
        The manifest.

    Raises:
        DamagedCheckpoint: The message names the file.
        OtherCheckpointFormat: The manifest has another format version.
    """
    try:
        manifest = verify(root.folder(name), sums)
    except (StrangeFile, OSError) as error:
        raise DamagedCheckpoint(str(error)) from error
    # A copied or renamed folder would resume at a wrong step.
    match = FOLDER.fullmatch(name)
    if match is None or int(match[1]) != manifest.step:
        raise DamagedCheckpoint(f"{root.path / name}: {MANIFEST}: written for step {manifest.step}")
    return manifest


def new_folder_name(root: RunFiles, step: int) -> str:
    """Returns the folder name of a new checkpoint of `step`."""
    attempts = []
    for saved_step, attempt, _ in _newest_first(root):
        if saved_step == step:
            attempts.append(attempt)
    name = f"step-{step:08d}"
    if attempts:
        name += f".{max(attempts) + 1}"
    return name


def remove_old(root: RunFiles, new: str, keep: int, sums: bool = True) -> None:
    """Removes older checkpoints as soon as `keep` valid steps remain.

    Args:
        root: The folder of checkpoints.
        new: The checkpoint that was just written. It stays.
        keep: Number of steps to keep.
        sums: Whether to verify older checkpoints by sha256, or by names and sizes only.

    Raises:
        OSError: A checkpoint could not be removed.
    """
    candidates = [(step, name) for step, name in list_steps(root) if root.kind(name) == "folder"]
    kept_steps = {step for step, name in candidates if name == new}
    for step, name in candidates:
        if name == new:
            continue
        if step in kept_steps or len(kept_steps) >= keep:
            # Renamed first: if the process is killed here, no damaged checkpoint stays.
            trash = f"{name}.tmp-{uuid.uuid4().hex[:12]}"
            root.rename(name, trash)
            failpoint("delete")
            root.remove(trash)
            continue
        # A damaged checkpoint does not count.
        with suppress(NoUsableCheckpoint):
            verify_step(root, name, lambda _: sums)
            kept_steps.add(step)


def _newest_first(root: RunFiles) -> list[tuple[int, int, str]]:
    """Returns step, attempt and name of each checkpoint, newest first."""
    checkpoints = []
    for name in root.names():
        match = FOLDER.fullmatch(name)
        # A link is listed too, so that it is skipped with a message.
        if match and root.kind(name) in ("folder", "strange"):
            checkpoints.append((int(match[1]), int(match[2] or 1), name))
    return sorted(checkpoints, reverse=True)


_failpoint_counts: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Kills this process at a point of a save. For tests only.

    FP8CFG_FAILPOINT=name or name:n kills the process at its n-th pass. name:n:SIGTERM sends another
    signal.

    The points are:
        shard: after each file
        manifest: before the manifest is written
        rename: before the folder is renamed
        renamed: after that
        delete: after an old checkpoint was renamed, before it is removed
    """
    point, _, options = os.environ.get("FP8CFG_FAILPOINT", "").partition(":")
    if name != point:
        return
    _failpoint_counts[name] += 1
    count, _, signal_name = options.partition(":")
    if _failpoint_counts[name] == int(count or 1):
        os.kill(os.getpid(), signal.Signals[signal_name or "SIGKILL"])
