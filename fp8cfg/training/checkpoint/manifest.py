"""Checkpoint manifest (MANIFEST.json): the files of a checkpoint, with the length and sha256 of each.

safetensors, torch.save and DCP all load a file with one flipped byte without a word; this is what notices. The manifest is
written last, so a folder that has one was complete. It is read as untrusted input: of bounded size, typed field by field,
and a name in it is opened only if it is a plain path of a regular file found inside the folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp8cfg.config.errors import Fp8cfgError

SCHEMA = 1
MANIFEST = "MANIFEST.json"
MAX_BYTES = 1 << 20
# No part may begin with a dot: this rules out "..", absolute paths and anything a terminal or a log would misread.
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
SHA256 = re.compile(r"[0-9a-f]{64}")


class NoUsableCheckpoint(Fp8cfgError):
    """Checkpoints were looked for and none can be used. Exit code 4."""

    exit_code = 4


class DamagedCheckpoint(NoUsableCheckpoint):
    """A checkpoint is not what its manifest says; the message names the file and what is wrong with it."""


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


def write_manifest(folder: Path, step: int, world_size: int = 1) -> Manifest:
    """Bring every file below `folder` to disk, then describe them in its MANIFEST.json, itself brought to disk.

    Raises OSError, and DamagedCheckpoint where the folder holds what a manifest cannot name (a link, a strange name).
    """
    files, folders = _walk(folder)
    for name in sorted(files):
        _check_name(folder, name)
        fsync(folder / name)
    entries = {name: FileEntry((folder / name).stat().st_size, sha256(folder / name)) for name in sorted(files)}
    manifest = Manifest(step, world_size, entries, datetime.now(UTC).isoformat(timespec="seconds"))
    (folder / MANIFEST).write_text(json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1) + "\n", encoding="utf-8")
    fsync(folder / MANIFEST)
    for each in reversed(folders):
        fsync(each)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, its fields checked, its files not. Raises DamagedCheckpoint and nothing else."""
    try:
        raw = json.loads(_read_bounded(folder))
    except OSError as error:
        raise _damaged(folder, MANIFEST, _reason(error)) from error
    # RecursionError: the parser's answer to brackets nested some thousand deep.
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, MANIFEST, f"not JSON ({error})") from error
    problem = _problem(raw)
    if problem:
        raise _damaged(folder, MANIFEST, problem)
    files = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in raw["files"].items()}
    for name in files:
        _check_name(folder, name)
    return Manifest(raw["step"], raw["world_size"], files, raw["created"])


def verify(folder: Path) -> None:
    """Compare every file of `folder` with its manifest: names, then sizes, then sha256 (some 1.3 GB/s on one core).

    Raises DamagedCheckpoint, whose message names the first file that differs and how, and nothing else.
    """
    listed = read_manifest(folder).files
    name = MANIFEST
    try:
        found, _ = _walk(folder)
        for name in sorted(listed.keys() ^ found):
            raise _damaged(folder, name, "missing" if name in listed else "not listed in the manifest")
        for name, entry in listed.items():
            size = (folder / name).stat().st_size
            if size != entry.size:
                raise _damaged(folder, name, f"{size} bytes, the manifest says {entry.size}")
        for name, entry in listed.items():
            if sha256(folder / name) != entry.sha256:
                raise _damaged(folder, name, "its sha256 is not the one in the manifest")
    except OSError as error:
        raise _damaged(folder, name, _reason(error)) from error


def sha256(path: Path) -> str:
    """Lower-case hex sha256 of a file, read in chunks. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a folder and say so with EINVAL; their renames are durable by themselves.
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
    finally:
        os.close(handle)


def _walk(folder: Path) -> tuple[set[str], list[Path]]:
    """Relative paths of all files but the manifest, and all folders. Links and devices are refused."""
    files: set[str] = set()
    folders = [folder]
    for each in folders:  # grows as it is walked: a deep tree must not end in a RecursionError
        with os.scandir(each) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(folder).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    raise _damaged(folder, name, "neither a regular file nor a folder (a link or a device)")
                elif name != MANIFEST:
                    files.add(name)
    return files, folders


def _read_bounded(folder: Path) -> str:
    path = folder / MANIFEST
    if not stat.S_ISREG(path.lstat().st_mode):
        raise _damaged(folder, MANIFEST, "not a regular file")
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _damaged(folder, MANIFEST, f"longer than {MAX_BYTES} bytes")
    return data.decode("utf-8")


def _problem(raw: Any) -> str | None:
    """What is wrong with the fields of a parsed manifest, or None."""
    if not isinstance(raw, dict):
        return "not a JSON object"
    if raw.get("schema") != SCHEMA:
        return f"its schema is not {SCHEMA}, the one this version reads"
    if not _is_int(raw.get("step"), 0) or not _is_int(raw.get("world_size"), 1) or not isinstance(raw.get("created"), str):
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
    if name == MANIFEST or len(name) > 255 or not PLAIN.fullmatch(name):
        raise _damaged(folder, MANIFEST, f"{name[:80]!r} is not a plain path inside the folder")


def _reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror or error})"


def _damaged(folder: Path, name: str, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{folder}: {name}: {what}" if name.isprintable() else f"{folder}: {name!r}: {what}")
