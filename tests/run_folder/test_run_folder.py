"""A run folder is whole, is one process's, and says what it ran on without saying a secret."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
from datetime import datetime
from io import FileIO
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from fp8cfg.run_folder import environment, files, run_folder
from fp8cfg.run_folder.files import RunFiles, RunFolderError, RunFolderNotWritable
from fp8cfg.run_folder.run_folder import (
    RUN_FORMAT,
    OtherRunFormat,
    RunFolder,
    RunFolderInUse,
    take_lock,
)
from tests.support.forked import processes

NOW = datetime(2024, 2, 29, 23, 59, 1)


def create(root: Path, **more: object) -> RunFolder:
    return RunFolder.create(root, "llama", NOW, "model: é\n", **more)


def test_create_and_open(tmp_path: Path) -> None:
    with create(tmp_path / "runs") as run:
        assert run.path == tmp_path / "runs" / "llama-20240229-235901"
        assert run.recipe.read_text(encoding="utf-8") == "model: é\n"
        assert run.checkpoints.is_dir()
        assert (run.metrics.name, run.coverage.name) == ("metrics.jsonl", "coverage.json")
    with RunFolder.open(run.path) as again:
        assert again.path == run.path


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    runs = [create(tmp_path) for _ in range(3)]
    assert [run.path.name.removeprefix("llama-20240229-235901") for run in runs] == ["", "-2", "-3"]
    for run in runs:
        run.close()


def test_explicit_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "deep"
    create(tmp_path, folder=folder).close()
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints",
        "environment.json",
        "recipe.yaml",
        "run.lock",
    ]
    with pytest.raises(RunFolderError, match="already contains a run"):
        create(tmp_path, folder=folder)
    assert RunFolder.open(folder, lock=False).recipe.exists()


def test_a_run_that_was_faster_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins and ends between the look into the folder and its lock."""
    recipe = tmp_path / "recipe.yaml"

    def late(files: RunFiles) -> FileIO:
        recipe.write_text("theirs")
        return take_lock(files)

    monkeypatch.setattr(run_folder, "take_lock", late)
    with pytest.raises(RunFolderError, match="already contains a run"):
        create(tmp_path, folder=tmp_path)
    assert recipe.read_text() == "theirs" and not (tmp_path / "environment.json").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "", ".x", "a\0b", "a b", "x" * 101, "x\n"])
def test_names_stay_in_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match="run name"):
        RunFolder.create(tmp_path, name, NOW, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["recipe.yaml", "environment.json", "checkpoints", ""])
def test_not_a_run_folder(tmp_path: Path, part: str) -> None:
    with create(tmp_path) as run:
        lost = run.path / part
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    message = f"not a run folder, {lost} is missing" if part else "run folder not found"
    with pytest.raises(RunFolderError, match=message) as caught:
        RunFolder.open(run.path)
    assert caught.value.exit_code == 2


def test_checkpoints_are_in_a_folder(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.checkpoints.rmdir()
        run.checkpoints.touch()
    with pytest.raises(RunFolderError, match=r"checkpoints: cannot be read \(Not a dir"):
        RunFolder.open(run.path)


@pytest.mark.parametrize("run_format", [None, RUN_FORMAT + 1, "1"])
def test_another_format_is_named(tmp_path: Path, run_format: object) -> None:
    with create(tmp_path) as run:
        run.check_format()
        environment = json.loads(run.environment.read_text())
        del environment["run_format"]
        if run_format is not None:
            environment["run_format"] = run_format
        run.environment.write_text(json.dumps(environment))
        with pytest.raises(OtherRunFormat, match=r"has run folder format .* reads format") as error:
            run.check_format()
    assert error.value.exit_code == 4


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=f"^{tmp_path}/file: not a run folder, but a file$"):
        RunFolder.open(tmp_path / "file")


def test_lock_in_one_process(tmp_path: Path) -> None:
    run = create(tmp_path)
    with pytest.raises(
        RunFolderInUse, match=f"pid {os.getpid()} on {socket.gethostname()}"
    ) as caught:
        RunFolder.open(run.path)
    assert caught.value.exit_code == 6 and "\n" not in str(caught.value)
    RunFolder.open(
        run.path, lock=False
    ).close()  # a reader neither needs the lock nor takes it away
    with pytest.raises(RunFolderInUse):
        RunFolder.open(run.path)
    run.close()
    run.close()
    RunFolder.open(run.path).close()


def hold(path: Path, held: Event) -> None:
    with RunFolder.open(path):
        held.set()
        signal.pause()


def test_lock_of_another_process_ends_with_it(tmp_path: Path) -> None:
    create(tmp_path).close()
    (path,) = tmp_path.iterdir()
    held = processes.Event()
    child = processes.Process(target=hold, args=(path, held))
    child.start()
    assert held.wait(60)
    with pytest.raises(RunFolderInUse, match=f"pid {child.pid} on"):
        RunFolder.open(path)
    child.kill()
    child.join(60)
    RunFolder.open(path).close()


def hold_with_a_worker(path: Path, worker: Event) -> None:
    run = RunFolder.open(path)
    if os.fork() == 0:
        worker.set()
        signal.alarm(30)
        signal.pause()
    worker.wait(30)
    os.kill(os.getpid(), signal.SIGKILL)
    run.close()


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    create(tmp_path).close()
    (path,) = tmp_path.iterdir()
    forked = processes.Event()  # held here, or the child finds it gone
    child = processes.Process(target=hold_with_a_worker, args=(path, forked))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    RunFolder.open(path).close()


def create_as_nobody(root: Path) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        create(root)
    except RunFolderNotWritable as error:
        os._exit(0 if str(root) in str(error) and "Permission denied" in str(error) else 2)


def test_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    child = processes.Process(target=create_as_nobody, args=(tmp_path,))
    child.start()
    child.join(60)
    tmp_path.chmod(0o755)
    assert child.exitcode == 0
    assert RunFolderNotWritable.exit_code == 5


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderNotWritable, match="file"):
        create(tmp_path / "file" / "runs")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_all(file: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "mine"
    path.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", write_all)
        for folder in (None, path):
            with pytest.raises(RunFolderNotWritable, match="No space left on device"):
                create(tmp_path, folder=folder)
    assert list(tmp_path.iterdir()) == [path]  # nothing is left of a run that cannot begin
    assert list(path.iterdir()) == []
    create(tmp_path, folder=path).close()  # the lock was released


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {
        "NVTE_FRAMEWORK",
        "NVTE_FLASH_ATTN",
        "TORCH_LOGS",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "OMP_NUM_THREADS",
    }
    for name in shown:
        monkeypatch.setenv(name, "shown")
    for name in (
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "FP8CFG_DSN",
        "TORCH_AUTH",
        "TORCHX_PASS",
        "NVTE_X",
        "OMP_NUM_THREADS_X",
    ):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setattr(environment, "_code_version", lambda: {"commit": "abc", "dirty": True})
    with create(tmp_path) as run:
        said = json.loads(run.environment.read_text())
    assert {name for name, value in said["variables"].items() if value == "shown"} == shown
    assert run.environment.stat().st_mode & 0o777 == 0o600
    assert "hidden" not in json.dumps(said)
    assert {"torch", "numpy", "safetensors"} <= said["packages"].keys()
    assert (
        said["python"]
        and said["cpu"]
        and said["os"]
        and said["command"]
        and said["code"]["commit"] == "abc"
    )


def test_code_in_a_work_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAME", "EMAIL"):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", "x")
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", "x")
    here = tmp_path / "code.py"
    here.write_text("1")
    monkeypatch.setattr(environment, "__file__", str(here))
    assert environment._code_version() is None
    git = lambda *arguments: environment._run_git(tmp_path, *arguments)  # noqa: E731
    assert git("init", "-q") is not None
    assert environment._code_version() is None  # in somebody's repository, and not of it
    git("add", "code.py")
    assert git("-c", "commit.gpgsign=false", "commit", "-q", "-m", "one") is not None
    commit = git("rev-parse", "HEAD")
    assert environment._code_version() == {"commit": commit, "dirty": False}
    here.write_text("2")
    assert environment._code_version() == {"commit": commit, "dirty": True}
    git("checkout", "code.py")
    git("config", "core.quotepath", "false")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xefve")).touch()  # no UTF-8
    assert environment._code_version() == {"commit": commit, "dirty": True}
