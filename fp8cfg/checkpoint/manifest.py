"""Checkpoint manifest (MANIFEST.json): the files of a checkpoint, with the length and sha256 of each.

safetensors, torch.save and DCP all load a file with one flipped byte without a word; this is what notices. The manifest is
written last, so a folder that has one was complete. It is read as untrusted input: of bounded size, typed field by field,
and a name in it is opened only if it is a plain path of a regular file found inside the folder.
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


def failpoint(name: str) -> None:
    """For tests only: kill this process where FP8CFG_FAILPOINT=`name` or `name:n` says, at the n-th time it gets here; or send it
    another signal, as `name:n:SIGTERM` says, and go on.

    Points of a save: shard (after each file), manifest (before it), rename (before), renamed (after), delete (an old
    checkpoint is renamed away and not yet removed).
    """
    wanted, nth, number = [*os.environ.get("FP8CFG_FAILPOINT", "").split(":"), "", ""][:3]
    if name == wanted:
        _reached[name] += 1
        if _reached[name] == int(nth or 1):
            os.kill(os.getpid(), signal.Signals[number or "SIGKILL"])


_reached: Counter[str] = Counter()

SCHEMA = 2
"""Format of a checkpoint: its files, their headers and the manifest."""
MANIFEST = "MANIFEST.json"
MAX_BYTES = 1 << 26
"""Some 300,000 files."""
MAX_NAME = 255
# No part may begin with a dot: this rules out "..", absolute paths and anything a terminal or a log would misread.
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
SHA256 = re.compile(r"[0-9a-f]{64}")


class NoUsableCheckpoint(Fp8cfgError):
    """Checkpoints were looked for and none can be used. Exit code 4."""

    exit_code = 4


class DamagedCheckpoint(NoUsableCheckpoint):
    """A checkpoint is not what its manifest says; the message names the file and what is wrong with it."""


class OtherCheckpointFormat(NoUsableCheckpoint):
    """A version of fp8cfg with another checkpoint format wrote the checkpoint."""


@dataclass(frozen=True)
class FileEntry:
    """One file: its length in bytes and its sha256 in lower-case hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What MANIFEST.json says: optimizer step, number of ranks, files by relative path, time of writing (ISO 8601, UTC)."""

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
    path = folder.path if isinstance(folder, RunFiles) else folder
    try:
        raw = json.loads(RunFiles.at(folder).read(MANIFEST, MAX_BYTES))
    except (OSError, StrangeFile) as error:
        raise _damaged(path, MANIFEST, _reason(error)) from error
    # RecursionError: the parser's answer to brackets nested some thousand deep.
    except (ValueError, RecursionError) as error:
        raise _damaged(path, MANIFEST, f"not JSON ({error})") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
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


def verify(folder: Path | RunFiles, sums: Callable[[str], bool] = lambda name: True) -> Manifest:
    """Compare every file of `folder` with its manifest, which is returned: names, then sizes, then sha256 (some 1.3 GB/s on one
    core) of those that `sums` takes by their names.

    Raises DamagedCheckpoint, whose message names the first file that differs and how, and as `read_manifest` does.
    """
    manifest = read_manifest(folder)
    path = folder.path if isinstance(folder, RunFiles) else folder
    try:
        files = RunFiles.at(folder)
        _check_sizes(files, manifest, _walk(files)[0])
    except (OSError, StrangeFile) as error:
        raise _damaged(path, MANIFEST, _reason(error)) from error
    check_sums(files, manifest, [name for name in manifest.files if sums(name)])
    return manifest


def sum_of(data: bytes) -> str:
    """The sha256 of `data`, as a manifest has it."""
    return hashlib.sha256(data).hexdigest()


def check_sums(folder: RunFiles, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the sha256 of the files `names` with that of the manifest. Raises DamagedCheckpoint."""
    for name in names:
        try:
            with folder.open(name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != manifest.files[name].sha256:
                    raise _damaged(folder.path, name, "its sha256 is not the one in the manifest")
        except (OSError, StrangeFile) as error:
            raise _damaged(folder.path, name, _reason(error)) from error


def _check_sizes(files: RunFiles, manifest: Manifest, found: set[str]) -> None:
    for name in sorted(manifest.files.keys() ^ found):
        raise _damaged(
            files.path, name, "missing" if name in manifest.files else "not listed in the manifest"
        )
    for name, entry in manifest.files.items():
        try:
            size = files.size(name)
        except (OSError, StrangeFile) as error:
            raise _damaged(files.path, name, _reason(error)) from error
        if size != entry.size:
            raise _damaged(files.path, name, f"{size} bytes, the manifest says {entry.size}")


def _walk(files: RunFiles) -> tuple[set[str], list[str]]:
    """Relative paths of all files but the manifest, and of all folders below. Links and devices are refused."""
    found: set[str] = set()
    folders = [""]
    for above in folders:  # grows as it is walked: a deep tree must not end in a RecursionError
        inside = files.folder(above) if above else files
        for entry in inside.names():
            name, kind = f"{above}/{entry}" if above else entry, inside.kind(entry)
            if len(name) > MAX_NAME:
                raise _damaged(files.path, name[:80], "not a plain path inside the folder")
            if kind == "folder":
                folders.append(name)
            elif kind != "file":
                raise _damaged(
                    files.path, name, "neither a regular file nor a folder (a link or a device)"
                )
            elif name != MANIFEST:
                found.add(name)
    return found, folders[1:]


def _problem(raw: Any) -> str | None:
    """What is wrong with the fields of a parsed manifest, or None."""
    if not isinstance(raw, dict):
        return "not a JSON object"
    if raw.get("schema") != SCHEMA:
        return f"its schema must be {SCHEMA}"
    if (
        not _is_int(raw.get("step"), 0)
        or not _is_int(raw.get("world_size"), 1)
        or not isinstance(raw.get("created"), str)
    ):
        return "step, world_size or created is missing or of the wrong type"
    files = raw.get("files")
    if not isinstance(files, dict) or not files or not all(map(_is_entry, files.values())):
        return "files must map at least one name to its size and sha256"
    return None


def _is_entry(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_int(value.get("size"), 0)
        and isinstance(value.get("sha256"), str)
        and SHA256.fullmatch(value["sha256"]) is not None
    )


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and value >= least  # type(): a bool is an int to isinstance


def _check_name(folder: Path, name: str) -> None:
    if name == MANIFEST or len(name) > MAX_NAME or not PLAIN.fullmatch(name):
        raise _damaged(folder, MANIFEST, f"{name[:80]!r} is not a plain path inside the folder")


def _reason(error: OSError | StrangeFile) -> str:
    if isinstance(error, StrangeFile):
        return "not a regular file"
    return (
        "missing"
        if isinstance(error, FileNotFoundError)
        else f"cannot be read ({error.strerror or error})"
    )


def _damaged(folder: Path, name: str, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{folder}: {name}: {what}" if name.isprintable() else f"{folder}: {name!r}: {what}"
    )


# "step-00000123", or "step-00000123.2" for a second save of the same step, which must not touch the first.
FOLDER = re.compile(r"step-([0-9]{8,})(?:\.([0-9]+))?")


def steps(root: RunFiles) -> list[tuple[int, str]]:
    """Step and folder name of each checkpoint under `root`, whole or not, by falling step, the later save first where a step was
    saved twice."""
    return [(step, name) for step, _, name in _newest_first(root)]


def passed_over(problem: object) -> str:
    """The line for a checkpoint that is not used."""
    return f"checkpoint passed over: {problem}"


def none_usable(root: RunFiles) -> NoUsableCheckpoint:
    """The error where there are checkpoints under `root` and none of them can be used."""
    return NoUsableCheckpoint(
        f"none of the {len(steps(root))} checkpoints in {root.path} can be used"
    )


def verify_step(
    root: RunFiles, name: str, sums: Callable[[str], bool] = lambda name: True
) -> Manifest:
    """Verifies the checkpoint in the folder `name`, and that it is of the step of this name.

    Args:
        root: The folder of checkpoints.
        name: The folder of the checkpoint.
        sums: Whether the sum of a file is compared, by the name of the file.

    Raises:
        DamagedCheckpoint: The message names the file.
        OtherCheckpointFormat: The manifest has another format version.
    """
    try:
        manifest = verify(root.folder(name), sums)
    except (StrangeFile, OSError) as error:
        raise DamagedCheckpoint(str(error)) from error
    match = FOLDER.fullmatch(name)
    if match is None or int(match[1]) != manifest.step:
        raise DamagedCheckpoint(f"{root.path / name}: {MANIFEST}: written for step {manifest.step}")
    return manifest


def free_name(root: RunFiles, step: int) -> str:
    """The name of a new checkpoint of `step`."""
    attempt = (
        max((attempt for other, attempt, _ in _newest_first(root) if other == step), default=0) + 1
    )
    return f"step-{step:08d}" + (f".{attempt}" if attempt > 1 else "")


def remove_old(root: RunFiles, new: str, keep: int, sums: bool = True) -> None:
    """Removes older checkpoints if `keep` steps that verify stay.

    Args:
        root: The folder of checkpoints.
        new: The checkpoint that was just written. It stays.
        keep: Steps that stay.
        sums: Whether older checkpoints are verified by sums, or by names and sizes only.

    Raises:
        OSError: A checkpoint could not be removed.
    """
    candidates = [(step, name) for step, name in steps(root) if root.kind(name) == "folder"]
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
            continue
        with suppress(NoUsableCheckpoint):
            verify_step(root, name, lambda _: sums)
            kept.add(step)


def _newest_first(root: RunFiles) -> list[tuple[int, int, str]]:
    """Step, attempt and name of each checkpoint, by falling step."""
    found = [(name, FOLDER.fullmatch(name)) for name in root.names()]
    return sorted(
        (
            (int(m[1]), int(m[2] or 1), name)
            for name, m in found
            # A link is listed too: it is then passed over with a reason, not overlooked.
            if m and root.kind(name) in ("folder", "strange")
        ),
        reverse=True,
    )
