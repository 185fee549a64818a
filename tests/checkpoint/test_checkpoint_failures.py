"""Checkpoints after damage, kills and errors of the disk: the newest whole one, never a mix."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from fp8cfg.checkpoint import save as checkpoint_save
from fp8cfg.checkpoint.manifest import (
    DamagedCheckpoint,
    NoUsableCheckpoint,
    verify,
)
from fp8cfg.checkpoint.save import RESERVE, CheckpointError, OldCheckpointStays, Share, share_bytes
from fp8cfg.checkpoint.tensor_layout import whole_boxes
from fp8cfg.run_folder.files import RunFiles
from tests.support.forked import processes
from tests.support.small_checkpoints import GROUPS, content, flip, names, put, step_of
from tests.support.whole_checkpoints import describe, load, newest, save


@pytest.mark.parametrize(
    "file", [*(f"{group}.safetensors" for group in GROUPS), "state.json", "MANIFEST.json"]
)
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damage_is_passed_over_by_name(tmp_path: Path, file: str, damage: str) -> None:
    put(tmp_path, 1)
    path = put(tmp_path, 2) / file
    match damage:
        case "truncate":
            path.write_bytes(path.read_bytes()[:-9])
        case "flip":
            # The middle of a manifest is a digit of some sum or a name: each flip must show.
            flip(path)
        case "delete":
            path.unlink()
    lines: list[str] = []
    found = newest(tmp_path, lines.append)
    assert found is not None and step_of(found) == 1
    assert len(lines) == 1 and "step-00000002" in lines[0] and "\n" not in lines[0]
    assert file in lines[0] or file == "MANIFEST.json"
    with pytest.raises(DamagedCheckpoint):
        load(path.parent)
    shutil.rmtree(found)
    with pytest.raises(NoUsableCheckpoint):
        newest(tmp_path, lines.append)


def test_nothing_there_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.tmp-abc").mkdir()
    (tmp_path / "step-00000002").write_text("a file")
    (tmp_path / "latest").symlink_to(tmp_path)
    assert newest(tmp_path, pytest.fail) is None
    assert newest(tmp_path / "none", pytest.fail) is None


def test_renamed_folder_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path, 1).rename(tmp_path / "step-00000009")
    lines: list[str] = []
    with pytest.raises(NoUsableCheckpoint):
        newest(tmp_path, lines.append)
    assert "written for step 1" in lines[0]


@pytest.mark.parametrize("state", ["[]", "NaN", '{"a": Infinity}', "", "[" * 100_000])
def test_a_whole_manifest_over_a_foreign_state(tmp_path: Path, state: str) -> None:
    path = put(tmp_path, 1)
    (path / "state.json").write_text(state)
    describe(path, step=1)
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        load(path)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    path, marker = put(tmp_path, 1), tmp_path / "marker"
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    (path / "model.safetensors").write_bytes(payload)
    describe(path, step=1)
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors"):
        load(path)
    assert not marker.exists()


def save_and_die(root: Path, step: int, failpoint: str) -> None:
    os.environ["FP8CFG_FAILPOINT"] = failpoint
    put(root, step)


def run(target: Any, *arguments: Any) -> int | None:
    child = processes.Process(target=target, args=arguments)
    child.start()
    child.join(60)
    return child.exitcode


POINTS = ["shard", "shard:2", "shard:3", "manifest", "rename", "renamed", "delete"]


@pytest.mark.parametrize("failpoint", POINTS)
@pytest.mark.parametrize("step", [2, 3])  # the step that is there already, and a new one
def test_kill_inside_save(tmp_path: Path, failpoint: str, step: int) -> None:
    for earlier in (1, 2):
        put(tmp_path, earlier)
    assert run(save_and_die, tmp_path, step, failpoint) == -signal.SIGKILL
    new = failpoint in ("renamed", "delete")
    found = newest(tmp_path, pytest.fail)
    assert found is not None and step_of(found) == (step if new else 2)
    assert (found.name in ("step-00000001", "step-00000002")) != new
    whole = [name for name in names(tmp_path) if "tmp" not in name]
    for name in whole:
        verify(tmp_path / name)
    assert len(whole) >= 2
    put(tmp_path, 4)
    assert not [name for name in names(tmp_path) if "tmp" in name]
    assert step_of(newest(tmp_path, pytest.fail)) == 4


def save_for_ever(root: Path) -> None:
    for step in range(4, 100_000):
        put(root, step)


def test_kill_anywhere(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(8):
        child = processes.Process(target=save_for_ever, args=(tmp_path,))
        child.start()
        deadline = time.monotonic() + 60
        # Any whole one from 5 on: the child may have removed the fifth before it is looked for.
        while time.monotonic() < deadline and not any(
            n >= "step-00000005" and "tmp" not in n for n in names(tmp_path)
        ):
            time.sleep(0.01)
        time.sleep(rng.random() / 10)
        child.kill()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        found = newest(tmp_path, pytest.fail)
        assert found is not None and step_of(found) >= 5
        for name in names(tmp_path):
            if "tmp" not in name:
                shutil.rmtree(tmp_path / name)


def save_with_a_limit(root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        put(root, 3)
    except CheckpointError as error:
        os._exit(0 if "File too large" in str(error) and str(root) in str(error) else 2)


def save_as_nobody(root: Path) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        put(root, 3)
    except CheckpointError as error:
        os._exit(0 if "Permission denied" in str(error) and str(root) in str(error) else 2)


def test_file_size_limit(tmp_path: Path) -> None:
    put(tmp_path, 2)
    assert run(save_with_a_limit, tmp_path) == 0
    assert names(tmp_path) == ["step-00000002"]
    assert step_of(newest(tmp_path, pytest.fail)) == 2


def test_no_permission(tmp_path: Path) -> None:
    put(tmp_path, 2)
    tmp_path.chmod(0o555)
    assert run(save_as_nobody, tmp_path) == 0
    tmp_path.chmod(0o755)
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize(
    "place", ["mkdir", "write_all", "write_manifest", "rename", "fsync", "replace"]
)
def test_errors_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int
) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)

    def fail(*arguments: Any, **__: Any) -> None:
        if place == "rename" and not arguments[1].startswith(
            "step-"
        ):  # of the folder, the last thing that is done
            return real(*arguments)
        raise OSError(code, os.strerror(code), str(tmp_path))

    with monkeypatch.context() as patch:
        where: Any = {
            "mkdir": os,
            "fsync": os,
            "rename": RunFiles,
            "replace": RunFiles,
        }.get(place, checkpoint_save)
        real = getattr(where, place)
        patch.setattr(where, place, fail)
        with pytest.raises(CheckpointError, match=os.strerror(code)) as caught:
            put(tmp_path, 3)
    assert str(tmp_path) in str(caught.value) and caught.value.exit_code == 5
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert step_of(put(tmp_path, 3)) == 3


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no memory"), SafetensorError("x")])
def test_errors_of_memory_and_of_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    put(tmp_path, 1)

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_save, "write_all", fail)
        with pytest.raises(CheckpointError, match=str(error) or "MemoryError") as caught:
            put(tmp_path, 2)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-00000001"]


def test_a_header_that_was_written_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1, keep=1)
    encode = checkpoint_save.encode_header

    def encode_wrong(boxes: Any) -> bytes:
        return encode(boxes).replace(b'"F32"', b'"F64"')

    monkeypatch.setattr(checkpoint_save, "encode_header", encode_wrong)
    with pytest.raises(CheckpointError, match=r"step 2 .*model\.safetensors: cannot be read"):
        put(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-00000001"]


def test_a_root_that_cannot_be_synced_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, keep=1)
    sync = RunFiles.sync

    def fail(files: RunFiles) -> None:
        if files.path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(files)

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "sync", fail)
        with pytest.raises(OldCheckpointStays, match="step-00000002 is saved, but older"):
            put(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert step_of(newest(tmp_path, pytest.fail)) == 2


def test_space_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1)
    (tmp_path / "step-00000002.tmp-left").mkdir()
    size = sum(t.nbytes for named in content(2)[0].values() for t in named.values())
    free = [size]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, free[0]))
    with pytest.raises(CheckpointError, match=r"needs 113\.1 KiB, 48\.0 KiB free"):
        put(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]
    free[0] = round(1.1 * size) + RESERVE  # far less than twice its size is enough
    put(tmp_path, 2)


def test_what_a_save_takes_is_what_it_asks_for(tmp_path: Path) -> None:
    weight = torch.zeros(300, 300)
    groups = {"m": {"embed": weight, "head": weight, "other": torch.zeros(100)}}
    path = save(tmp_path, 1, groups, {}, keep=1)
    taken = sum(file.stat().st_size for file in path.iterdir())
    share = Share({"m": whole_boxes(groups["m"])}, {}, {})
    assert taken <= share_bytes(share) + len("{}") <= taken + RESERVE


def test_an_older_one_that_cannot_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1, keep=1)
    real = shutil.rmtree
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda path, ignore_errors=False, dir_fd=None: real(
            f"{path}/none", ignore_errors, dir_fd=dir_fd
        ),
    )
    with pytest.raises(CheckpointError, match="step-00000002 is saved, but"):
        put(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert step_of(newest(tmp_path, pytest.fail)) == 2


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_save, "write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path, 1)
    assert names(tmp_path) == []
