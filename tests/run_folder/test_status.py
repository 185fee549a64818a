"""status.json and the lock: a reader sees how a run goes, and is in nobody's way."""

from __future__ import annotations

import json
import signal
import threading
from datetime import datetime
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.run_folder.status import is_locked, read_status, write_status
from tests.support.forked import processes


def make(root: Path) -> RunFolder:
    return RunFolder.create(root, "x", datetime(2026, 1, 2), "name: x\n")


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = RunFiles.at(tmp_path)
    assert read_status(files) is None
    write_status(files, "crashed", 7, "out of memory\nat step 7")
    status = read_status(files)
    assert status and (status.state, status.step, status.message) == (
        "crashed",
        7,
        "out of memory",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"state": "lost"},
        {"step": "7"},
        {"step": True},
        {"message": None},
        {"time": "now"},
    ],
)
def test_a_damaged_status_is_none(change: dict[str, Any], tmp_path: Path) -> None:
    files = RunFiles.at(tmp_path)
    write_status(files, "done", 7)
    path = tmp_path / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_status(files) is None
    for text in ("", "[]", "{", "[" * 100_000):
        path.write_text(text)
        assert read_status(files) is None


def hold(path: Path, held: Event) -> None:
    with RunFolder.open(path):
        held.set()
        signal.pause()


def test_the_lock_of_another_process_is_seen_until_it_is_killed(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert is_locked(run.files)
    run.close()
    assert is_locked(run.files) is False
    held = processes.Event()
    child = processes.Process(target=hold, args=(run.path, held))
    child.start()
    assert held.wait(60)
    assert is_locked(run.files)
    child.kill()
    child.join(60)
    assert is_locked(run.files) is False
    (run.path / "run.lock").unlink()
    assert is_locked(run.files) is False


def test_readers_keep_no_run_from_starting(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.close()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            is_locked(run.files)

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(200):
            RunFolder.open(run.path).close()
    finally:
        ended.set()
        for reader in readers:
            reader.join()
