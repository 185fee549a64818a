"""Step folders: the checkpoints under a root by step, which of them verify, and which are kept."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from pathlib import Path

from fp8cfg.training.checkpoint.failpoint import failpoint
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint, NoUsableCheckpoint, verify
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.run_files import RunFiles

# "step-00000123", or "step-00000123.2" for a second save of the same step, which must not touch the first.
FOLDER = re.compile(r"step-([0-9]{8,})(?:\.([0-9]+))?")


def newest(root: Path, log: Callable[[str], None]) -> Path | None:
    """The checkpoint of the highest step under `root` that verifies; None where there has never been one.

    Each one passed over is logged in a line that names the file and the reason. Raises NoUsableCheckpoint where there are
    checkpoints and none verifies: to start anew would then be a silent loss.
    """
    if not root.is_dir():
        return None
    files = RunFiles.at(root)
    for step, name in steps(files):
        problem = damage(files, name, step)
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


def passed_over(problem: object) -> str:
    """The line for a checkpoint that is not used."""
    return f"checkpoint passed over: {problem}"


def none_usable(root: RunFiles) -> NoUsableCheckpoint:
    """The error where there are checkpoints under `root` and none of them can be used."""
    return NoUsableCheckpoint(
        f"none of the {len(steps(root))} checkpoints in {root.path} can be used"
    )


def damage(
    root: RunFiles, name: str, step: int, sums: Callable[[str], bool] = lambda name: True
) -> str | None:
    """Why the checkpoint `name`, of `step`, cannot be used, or None; of sums those that `sums` takes by the files' names."""
    try:
        found = verify(root.folder(name), sums).step
    except (DamagedCheckpoint, StrangeFile, OSError) as error:
        return str(error)
    return None if found == step else f"{root.path / name}: MANIFEST.json: written for step {found}"


def free_name(root: RunFiles, step: int) -> str:
    """The name of a new checkpoint of `step`."""
    attempt = (
        max((attempt for other, attempt, _ in _newest_first(root) if other == step), default=0) + 1
    )
    return f"step-{step:08d}" + (f".{attempt}" if attempt > 1 else "")


def remove_old(root: RunFiles, new: str, keep: int, sums: bool = True) -> None:
    """Remove older checkpoints than `new` where `keep` steps that verify stay, without `sums` by their files' names and sizes.
    Raises OSError."""
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
        elif damage(root, name, step, lambda _: sums) is None:
            kept.add(step)


def _newest_first(root: RunFiles) -> list[tuple[int, int, str]]:
    """Step, attempt and name of each checkpoint, by falling step."""
    found = [(name, FOLDER.fullmatch(name)) for name in root.names()]
    return sorted(
        (
            (int(m[1]), int(m[2] or 1), name)
            for name, m in found
            if m and root.kind(name) == "folder"
        ),
        reverse=True,
    )
