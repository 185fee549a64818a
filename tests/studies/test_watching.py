"""`fp8cfg watch`: a running, a finished, a resumed and a missing run, from another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.run_folder.files import RunFolderError
from fp8cfg.studies.watching import MetricsTail, watch
from tests.support.small import small
from tests.support.verbs import ROOT

WORDS = ["trainer.max_steps=4", "log.every_n_steps=2", "trainer.val_check_interval=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    recipe = small(*WORDS, "precision=bf16_fp8", f"log.folder={folder}")
    fp8cfg.fit(fp8cfg.build(recipe), say=lambda _: None)
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_has_its_last_step_and_a_summary(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(finished)]) == 0
    lines = capsys.readouterr().out.splitlines()
    last = [row for row in rows(finished) if "loss" in row][-1]
    assert lines[0] == f"run folder: {finished}"
    assert lines[2].startswith(f"step 4/4  loss {last['loss']:.4f}  ")
    assert lines[3].startswith(f"done: 4 of 4 steps, training loss {last['loss']:.4f}, validation ")


def test_the_newest_run_of_a_folder(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(finished.parent)]) == 0
    assert f"run folder: {finished}\n" in capsys.readouterr().out


def test_json_is_as_in_the_metrics(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(finished), "--json"]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    last = [row for row in rows(finished) if "loss" in row][-1]
    assert json.loads(line) == last | {"max_steps": 4} and "done: " in err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "watch: needs one run folder, as in: fp8cfg watch runs/NAME"),
        (["a", "b"], "watch: needs one run folder, as in: fp8cfg watch runs/NAME"),
        (["nowhere"], "; add --wait if it starts later"),
        ([str(ROOT / "README.md")], "but a file"),
        (["--wiat"], "--wiat: no such option; did you mean '--wait'?"),
    ],
)
def test_a_mistake_is_one_line(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *argv]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(line)


def test_rows_are_read_once_and_a_copy_of_the_file_is_no_news(finished: Path) -> None:
    """A resumed run copies metrics.jsonl, without the steps that it repeats."""
    run = fp8cfg.RunFolder.open(finished, lock=False)
    path = finished / "metrics.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    tail = MetricsTail(run.files)
    try:
        path.write_bytes(b"".join(lines[:2]) + lines[2][:10])
        assert [row["step"] for row in tail.new_rows()] == [1, 2]
        assert tail.new_rows() == [], "the third line is incomplete"
        with path.open("ab") as file:
            file.write(lines[2][10:] + lines[3])
        assert [row["step"] for row in tail.new_rows()] == [2, 3]
        copy = finished / "copy"
        copy.write_bytes(b"".join(lines[:2]))
        copy.rename(path)
        assert tail.new_rows() == []
        with path.open("ab") as file:
            file.write(b'{"step": "x"}\n')
        with pytest.raises(RunFolderError, match="without a step"):
            tail.new_rows()
    finally:
        path.write_bytes(whole)


def test_a_run_is_followed_to_its_end_and_another_watch_is_interrupted(tmp_path: Path) -> None:
    """Three processes: the run, a watch from before its start, and one that gets Ctrl-C."""
    folder = tmp_path / "run"
    words = ["trainer.max_steps=60", "log.every_n_steps=20", f"log.folder={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    watching = [sys.executable, "-m", "fp8cfg", "watch", str(folder), "--wait"]

    def start(command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    from tests.support.small import small_words

    watches = [start(watching), start(watching)]
    run = start([sys.executable, "-m", "fp8cfg", *small_words(*words)])
    began = time.monotonic()
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < began + 60:
        time.sleep(0.05)
    watches[1].send_signal(signal.SIGINT)
    interrupted, _ = watches[1].communicate(timeout=60)
    printed, _ = run.communicate(timeout=60)
    followed, _ = watches[0].communicate(timeout=60)
    assert run.returncode == 0, printed
    assert watches[0].returncode == watches[1].returncode == 0, interrupted
    assert "Traceback" not in interrupted + followed
    losses = {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}
    for step in (20, 40, 60):
        assert f"step {step}/60  loss {losses[step]:.4f}  " in followed
    assert "\x1b" not in followed and "\ndone: 60 of 60 steps, training loss " in followed


def test_a_stopped_run_has_the_command_to_continue(tmp_path: Path) -> None:
    class Stops(fp8cfg.Callback):
        def step(self, done: int, values: Any) -> None:
            if done == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    recipe = small(*WORDS, f"log.folder={tmp_path / 'run'}")
    with pytest.raises(fp8cfg.training.loop.Interrupted):
        fp8cfg.fit(fp8cfg.build(recipe), say=lambda _: None, callbacks=[Stops()])
    said: list[str] = []
    data = watch(tmp_path / "run", say=said.append)
    assert data.state == "stopped"
    assert said[-1].startswith("stopped: 2 of 4 steps, training loss ")
    assert said[-1].endswith(f"continue with fp8cfg resume {tmp_path / 'run'}")
