"""Runs are read as they are: done, stopped, diverged, crashed, killed and running."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.run_folder.files import RunFolderError
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.errors import ConfigError
from fp8cfg.studies.run_data import RunData, find_runs, read_run
from fp8cfg.training.loop import Diverged, Interrupted
from tests.support.forked import processes
from tests.support.short_runs import WORDS
from tests.support.small import small


class At(fp8cfg.Callback):
    """Calls a function after a step."""

    def __init__(self, done: int, call: Callable[[], object]) -> None:
        self.at, self.call = done, call

    def step(self, done: int, values: Any) -> None:
        if done == self.at:
            self.call()


def start(folder: Path, *words: str, at: int = 0, call: Callable[[], object] = int) -> fp8cfg.Job:
    job = fp8cfg.build(small(*WORDS, "trainer.compile=off", *words))
    fp8cfg.fit(job, folder, say=lambda _: None, callbacks=[At(at, call)])
    return job


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    start(folder)
    return folder


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "mine"))


def test_a_run_is_read_with_its_recipe_and_its_series(whole: Path) -> None:
    run = read_run(whole)
    assert (run.name, run.state, run.message, run.steps) == ("run", "done", "", 4)
    assert run.recipe == RunFolder.open(whole, lock=False).read_recipe()
    written = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps, losses = run.series("loss")
    assert steps == [1, 2, 3, 4]
    assert losses == [row["loss"] for row in written if "loss" in row]
    assert run.series("val_loss")[0] == [2, 4]
    assert run.series("nothing") == ([], [])


def test_rows_have_time_speed_and_memory(whole: Path) -> None:
    rows = [row for row in read_run(whole).rows if "loss" in row]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(8 * 32 / row["seconds"])
        # More than an interpreter with torch, less than the machine.
        assert 50 << 20 < row["memory"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    assert abs(times[-1] - (whole / "metrics.jsonl").stat().st_mtime) < 60


def test_a_running_run_is_read_up_to_its_last_line(tmp_path: Path) -> None:
    seen: list[RunData] = []
    start(tmp_path / "run", at=3, call=lambda: seen.append(read_run(tmp_path / "run")))
    assert [(run.state, run.steps) for run in seen] == [("running", 3)]
    assert read_run(tmp_path / "run").state == "done"


def test_a_run_that_is_stopped_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        start(folder, at=3, call=lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = read_run(folder)
    assert (run.state, run.steps) == ("stopped", 3)
    assert run.message.startswith("stopped after step 3 of 4")
    fp8cfg.resume(folder, say=lambda _: None)
    assert read_run(folder).state == "done"
    assert read_run(folder).message == ""


def test_a_run_that_diverged(tmp_path: Path) -> None:
    job = fp8cfg.build(small(*WORDS, "trainer.compile=off"))

    def damage() -> None:
        job.optimizer.masters[job.model.final_layernorm.weight].data.fill_(math.nan)
        job.optimizer.write_parameters()

    with pytest.raises(Diverged):
        fp8cfg.fit(job, tmp_path / "run", say=lambda _: None, callbacks=[At(1, damage)])
    run = read_run(tmp_path / "run")
    assert run.state == "diverged"
    assert run.message.startswith("step 2: the gradient norm is nan")


def test_a_run_that_crashed_has_its_error(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        start(tmp_path / "run", at=2, call=fail)
    run = read_run(tmp_path / "run")
    assert (run.state, run.message) == ("crashed", "KeyError: 'a bug'")


def train_until_killed(folder: Path, trained: Event) -> None:
    def wait() -> None:
        trained.set()
        signal.pause()

    start(folder, at=2, call=wait)


def test_a_killed_run_is_running_and_then_crashed(tmp_path: Path) -> None:
    folder, trained = tmp_path / "run", processes.Event()
    child = processes.Process(target=train_until_killed, args=(folder, trained))
    child.start()
    assert trained.wait(60)
    assert read_run(folder).state == "running"
    child.kill()
    child.join(60)
    run = read_run(folder)
    assert (run.state, run.steps) == ("crashed", 2)
    assert "killed" in run.message


def cut(folder: Path, count: int) -> None:
    """Keeps the first `count` lines of the metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:count]))


def test_folders_of_older_versions_have_a_state_too(mine: Path) -> None:
    (mine / "status.json").unlink()
    assert read_run(mine).state == "done"
    cut(mine, 3)  # steps 1 and 2, and a validation loss
    shutil.rmtree(mine / "checkpoints" / "step-00000004")
    assert read_run(mine).state == "stopped"
    cut(mine, 1)
    assert read_run(mine).state == "crashed"
    (mine / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\n{"step": 2, "lo')
    assert read_run(mine).state == "diverged"


def test_a_copy_without_checkpoints_and_metrics_is_read(mine: Path) -> None:
    shutil.rmtree(mine / "checkpoints")
    (mine / "metrics.jsonl").unlink()
    assert read_run(mine).rows == []


def test_reading_changes_nothing(mine: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in [mine, *mine.rglob("*")]}
    read_run(mine)
    find_runs(mine.parent)
    assert before == {path: path.stat().st_mtime_ns for path in [mine, *mine.rglob("*")]}


def test_a_folder_that_is_no_run(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("recipe: llama_tiny\n")
    with pytest.raises(RunFolderError, match=f"^{tmp_path}: not a run folder"):
        read_run(tmp_path)
    with pytest.raises(RunFolderError, match="nowhere: run folder not found"):
        read_run("nowhere")
    with pytest.raises(RunFolderError, match=f"1 run in it, such as {whole}"):
        read_run(whole.parent)


def test_damaged_files_are_named(mine: Path) -> None:
    recipe = (mine / "recipe.yaml").read_text()
    (mine / "recipe.yaml").write_text(recipe.replace("max_steps: 4", "max_steps: many"))
    with pytest.raises(ConfigError, match=f"^{mine}/recipe.yaml: trainer.max_steps=many"):
        read_run(mine)
    (mine / "recipe.yaml").write_text(recipe)
    (mine / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(RunFolderError, match=r"metrics.jsonl:1: not a line of metrics"):
        read_run(mine)


def test_runs_are_found_in_sweeps_and_not_below_links(mine: Path) -> None:
    root = mine.parent
    shutil.copytree(mine, root / "sweep" / "0")
    shutil.copytree(mine, root / "sweep" / "1")
    (root / "latest").symlink_to(mine)
    (root / "recipes").mkdir()
    (root / "recipes" / "recipe.yaml").write_text("recipe: llama_tiny\n")
    assert find_runs(root) == [mine, root / "sweep" / "0", root / "sweep" / "1"]
    assert find_runs(mine) == [mine]
