"""What a run saves: saves that fail or would not fit, weights that are not to be kept, and its last step under a signal."""

from __future__ import annotations

import os
import shutil
import signal
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.checkpoint import job_tensors
from fp8cfg.checkpoint import save as checkpoint_save
from fp8cfg.checkpoint.save import CheckpointError, OldCheckpointStays
from fp8cfg.composition import to_yaml
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFolderNotWritable
from fp8cfg.run_folder.metrics_file import read_metrics
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.tables import size as shown_size
from fp8cfg.training import loop, signals
from fp8cfg.training.step import StepResult
from tests.support import whole_checkpoints
from tests.support.short_runs import WORDS, fit, saved
from tests.support.small import SMALL, small

# saves


def test_a_save_that_fails_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, said = checkpoint_save.write_checkpoint, list[str]()

    def save(root: Any, step: int, *rest: Any) -> Path:
        if step in (2, 3):
            raise CheckpointError(f"step {step} was not saved in x: not enough space")
        return real(root, step, *rest)

    monkeypatch.setattr(checkpoint_save, "write_checkpoint", save)
    folder = fit(tmp_path, "checkpoint.every_n_steps=1", "checkpoint.keep=9", say=said.append)
    assert saved(folder.path) == ["step-00000001", "step-00000004"]
    assert [s for s in said if "was not saved" in s] == [
        f"warning: step {n} was not saved in x: not enough space; older checkpoints are intact, and the next save tries again"
        for n in (2, 3)
    ]


def test_the_last_save_ends_the_run_where_it_fails_but_not_an_old_one_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for error in (CheckpointError, OldCheckpointStays):

        def save(*_: Any, kind: type[CheckpointError] = error) -> Path:
            raise kind("so it is")

        monkeypatch.setattr(checkpoint_save, "write_checkpoint", save)
        if error is CheckpointError:
            with pytest.raises(CheckpointError, match="so it is") as e:
                fit(tmp_path, "trainer.max_steps=1", "optim.warmup_steps=1")
            assert e.value.exit_code == 5
    fit(tmp_path, "trainer.max_steps=1", "optim.warmup_steps=1", say=said.append)
    assert "so it is" in said


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("precision=fp32", "optim.name=sgd"),
        ("precision=bf16_fp8",),
        ("precision=bf16_fp8", "opt_level=O2"),
    ],
)
def test_a_disk_too_small_for_one_checkpoint_is_said_before_the_first_step(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(
        *WORDS,
        *words,
        "trainer.max_steps=1",
        "optim.warmup_steps=1",
        "trainer.val_check_interval=0",
    )
    job, free = fp8cfg.build(recipe), [10**9]
    need = job_tensors.checkpoint_bytes(job, World()) + checkpoint_save.RESERVE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, free[0]))
    with RunFolder.create(tmp_path, "x", datetime.now(), to_yaml(recipe)) as folder:
        free[0] = need - 1
        with pytest.raises(
            RunFolderNotWritable,
            match=f"no room for a checkpoint: needs {shown_size(need)}, {shown_size(need - 1)} free",
        ) as e:
            fp8cfg.fit(job, folder, say=lambda _: None)
        assert e.value.exit_code == 5 and job.optimizer.steps == 0
        free[0] = 10**9
        fp8cfg.fit(job, folder, say=lambda _: None)
        size = sum(f.stat().st_size for f in folder.checkpoints.rglob("*.*") if f.is_file())
    assert 0.7 * size < need < 1.3 * size + 2 * checkpoint_save.RESERVE


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        loop.Diverged,
        match=r"step 1: \d+ of \d+ weights are not finite, the first is \S+; they are not saved",
    ):
        fit(
            tmp_path,
            "precision=fp32",
            "optim.lr=1e38",
            "optim.min_lr=1e38",
            "trainer.max_steps=1",
            "optim.warmup_steps=0",
        )
    assert saved(next(tmp_path.iterdir())) == []


def test_no_checkpoint_goes_while_steps_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 to 6 are skipped: their weights are those of step 2, which may be the ones that overflow."""

    def train_step(job: fp8cfg.Job, _: Any, step: int, *__: Any, **___: Any) -> Any:
        stepped = step < 2 or step > 5
        job.optimizer.steps += stepped
        norm = 1.0 if stepped else float("inf")
        return SimpleNamespace(wait=lambda: StepResult(1.0, 0.1, norm, stepped, step + 1))

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(
        fp8cfg.Job, "prove", lambda _: type("Seen", (), {"data": lambda self: {}})()
    )
    seen = dict[int, list[str]]()
    recipe = small(
        *WORDS,
        "precision=fp16",
        "trainer.max_steps=8",
        "checkpoint.every_n_steps=1",
        "trainer.val_check_interval=1",
    )
    with RunFolder.create(tmp_path, "x", datetime.now(), to_yaml(recipe)) as folder:

        def say(text: str) -> None:
            if "validation" in text:
                seen[int(text.split()[1].rstrip(":"))] = [name[-1] for name in saved(folder.path)]

        fp8cfg.fit(fp8cfg.build(recipe), folder, say=say)
    assert [seen[n] for n in range(1, 9)] == [
        [],
        ["1"],
        ["1", "2"],
        ["1", "2"],
        ["1", "2"],
        ["1", "2"],
        ["1", "2"],
        ["2", "7"],
    ]


# signals


def test_a_signal_inside_an_evaluation_is_heeded_between_its_batches(tmp_path: Path) -> None:
    recipe = small(*WORDS, "trainer.limit_val_batches=2", "trainer.micro_batch_size=2")
    job, passes = fp8cfg.build(recipe), list[int]()

    def hook(model: torch.nn.Module, *_: Any) -> None:
        if not model.training:
            passes.append(len(passes))
            if len(passes) == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    job.model.register_forward_pre_hook(hook)
    with RunFolder.create(tmp_path, "x", datetime.now(), to_yaml(recipe)) as folder:
        with pytest.raises(loop.Interrupted, match="stopped after step 2 of 4"):
            fp8cfg.fit(job, folder, say=lambda _: None)
        assert len(passes) == 3 and saved(folder.path) == ["step-00000002"]
        again = fp8cfg.build(recipe)
        fp8cfg.fit(
            again,
            folder,
            whole_checkpoints.load(folder.checkpoints / "step-00000002"),
            say=lambda _: None,
        )
        lines = read_metrics(folder.metrics)
    assert [(line["step"], "val_loss" in line) for line in lines] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
    ]


def test_a_signal_before_the_first_step_is_heeded_there(tmp_path: Path) -> None:
    with signals.waiting_to_stop():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(loop.Interrupted, match="stopped before step 1 of 4") as e:
            fit(tmp_path)
    assert e.value.exit_code == 75 and saved(next(tmp_path.iterdir())) == []


def test_a_command_that_was_told_to_stop_before_its_first_step_ends_with_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fp8cfg.report import run_header

    monkeypatch.setattr(run_header, "header", lambda *_: os.kill(os.getpid(), signal.SIGHUP) or "")
    assert main([*SMALL, *WORDS, f"log.dir={tmp_path}"]) == 75
    assert "stopped before step 1 of 4; continue with fp8cfg resume" in capsys.readouterr().err


def test_a_hangup_is_left_alone_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.stop_requested()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
