"""What a run must not lose: other people's files, its folder, its checkpoints, its answer to a signal."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.composition import to_yaml
from fp8cfg.training import loop, signals, step_sequence
from fp8cfg.training.checkpoint import checkpoint, job_state, job_tensors, step_folders
from fp8cfg.training.checkpoint.checkpoint import CheckpointError, OldCheckpointStays
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint, write_manifest
from fp8cfg.training.data import run_data
from fp8cfg.training.distributed.world import World
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.metrics import read
from fp8cfg.training.run_files import RunFiles
from fp8cfg.training.run_folder import RunFolder
from fp8cfg.training.run_folder_errors import RunFolderDeleted, RunFolderNotWritable
from fp8cfg.training.train_step import Step
from tests.support.small import SMALL, small

WORDS = ("precision=bf16", "model.num_layers=1", "trainer.max_steps=4", "trainer.val_check_interval=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps with checkpoints of steps 2 and 4, to copy."""
    recipe = small(*WORDS)
    with RunFolder.create(tmp_path_factory.mktemp("whole"), "x", datetime.now(), to_yaml(recipe)) as folder:
        fp8cfg.fit(fp8cfg.build(recipe), folder, say=lambda _: None)
    return folder.path


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    """A copy, in a folder whose name no terminal should see as it is."""
    return Path(shutil.copytree(whole, tmp_path / "a\x1b[31m\nb" / "run"))


def fit(root: Path, *words: str, say: Callable[[str], None] = lambda _: None) -> RunFolder:
    recipe = small(*WORDS, *words)
    with RunFolder.create(root, "x", datetime.now(), to_yaml(recipe)) as folder:
        fp8cfg.fit(fp8cfg.build(recipe), folder, say=say)
    return folder


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


# links


@pytest.mark.parametrize("name", ["run.lock", "recipe.yaml", "metrics.jsonl", "fp8_stats.jsonl", "checkpoints", "checkpoints/step-00000004"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_a_run_folder_is_refused_and_leads_nowhere(name: str, there: bool, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = tmp_path / "victim"
    folder = name.startswith("checkpoints")
    if there:
        shutil.move(mine / name, victim) if folder else victim.write_text("export A=1\n")
    before = sorted(victim.rglob("*")) if folder and there else victim.read_text() if there else None
    if (mine / name).exists():
        shutil.rmtree(mine / name) if folder else (mine / name).unlink()
    (mine / name).symlink_to(victim)
    if name.endswith("4"):  # no folder of a checkpoint: the one before it is gone on from
        assert [n for _, n in step_folders.steps(RunFiles.at(mine / "checkpoints"))] == ["step-00000002"]
        return
    assert main(["resume", str(mine), "trainer.max_steps=5"]) == 2
    out, err = capsys.readouterr()
    assert f"{name}: is no file or folder but a link" in err and err.count("\n") == 1 and "\x1b" not in out + err
    assert (sorted(victim.rglob("*")) if folder and there else victim.read_text() if there else None) == before
    assert victim.exists() == there


def test_what_a_run_replaces_is_replaced_and_not_followed(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The names that were predictable, the file that is written after the first step, and second names of one file."""
    victims = {name: tmp_path / f"victim {name}" for name in ("metrics.jsonl.tmp", "coverage.json", "metrics.jsonl")}
    for name, victim in victims.items():
        victim.write_bytes((mine / name).read_bytes() if (mine / name).exists() else b"export A=1\n")
        (mine / name).unlink(missing_ok=True)
        os.link(victim, mine / name) if name == "metrics.jsonl" else (mine / name).symlink_to(victim)
    before = {name: victim.read_bytes() for name, victim in victims.items()}
    assert main(["resume", str(mine), "trainer.max_steps=5"]) == 0
    assert {name: victim.read_bytes() for name, victim in victims.items()} == before
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "run folder: " in out and "a\\x1b[31m\\nb/run" in out
    assert [line["step"] for line in read(mine / "metrics.jsonl")] == [1, 2, 2, 3, 4, 4, 5, 5]
    assert saved(mine) == ["step-00000004", "step-00000005"]


def test_a_lock_with_a_second_name_is_refused(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("export A=1\n")
    (mine / "run.lock").unlink()
    os.link(tmp_path / "victim", mine / "run.lock")
    with pytest.raises(StrangeFile, match="a second name"):
        RunFolder.open(mine)
    assert (tmp_path / "victim").read_text() == "export A=1\n"


def test_files_are_opened_part_by_part_and_never_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_text("x")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "in" / "deep")
    os.mkfifo(tmp_path / "in" / "pipe")
    files = RunFiles.at(tmp_path / "in")
    assert files.read("deep/file") == b"x" and files.names() == ["deep", "link", "pipe"]
    assert [files.kind(n) for n in ("deep", "deep/file", "link", "pipe", "none")] == ["folder", "file", "strange", "strange", ""]
    assert [files.kind(n) for n in ("link/file", "deep/file/x")] == ["strange", ""]
    for name in ("link/file", "link", "pipe"):
        with pytest.raises(StrangeFile, match=f"{tmp_path}/in/{name}: "):
            files.read(name)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/in/deep/none"):
        files.open("deep/none")
    with pytest.raises(OSError, match="longer than 0 bytes"):
        files.read("deep/file", 0)
    (tmp_path / "in").rename(tmp_path / "out")
    files.replace("new", b"1")
    assert files.path == tmp_path / "out" and (tmp_path / "out" / "new").read_bytes() == b"1" and files.there
    shutil.rmtree(tmp_path / "out")
    assert not files.there
    with pytest.raises(FileNotFoundError):
        files.replace("new", b"1")
    with pytest.raises(FileNotFoundError):
        files.folder("sub", make=True)


# the folder


def test_a_run_follows_its_folder_where_it_is_renamed(tmp_path: Path) -> None:
    def say(text: str) -> None:
        if text.startswith("step 2: validation"):
            next((tmp_path / "runs").iterdir()).rename(tmp_path / "moved")

    folder = fit(tmp_path / "runs", say=say)
    assert folder.path == tmp_path / "moved" and not list((tmp_path / "runs").iterdir())
    assert saved(tmp_path / "moved") == ["step-00000002", "step-00000004"]
    assert [line["step"] for line in read(tmp_path / "moved" / "metrics.jsonl")] == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("part", ["", "recipe.yaml"])
def test_a_run_whose_folder_is_deleted_ends_and_makes_none(part: str, tmp_path: Path) -> None:
    def say(text: str) -> None:
        if text.startswith("step 2: validation"):
            gone = next(tmp_path.iterdir()) / part
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()

    with pytest.raises(RunFolderDeleted, match="was deleted while") as e:
        fit(tmp_path, say=say)
    assert e.value.exit_code == 5
    assert (not part and not list(tmp_path.iterdir())) or (part and saved(next(tmp_path.iterdir())) == [])


# saves


def test_a_save_that_fails_is_said_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, said = checkpoint.save, list[str]()

    def save(root: Any, step: int, *rest: Any) -> Path:
        if step in (2, 3):
            raise CheckpointError(f"cannot save step {step} in x: not enough space")
        return real(root, step, *rest)

    monkeypatch.setattr(checkpoint, "save", save)
    folder = fit(tmp_path, "checkpoint.every_n_steps=1", "checkpoint.keep=9", say=said.append)
    assert saved(folder.path) == ["step-00000001", "step-00000004"]
    assert [s for s in said if "cannot save" in s] == [
        f"cannot save step {n} in x: not enough space; older checkpoints stay, and the next save tries again" for n in (2, 3)]


def test_the_last_save_ends_the_run_where_it_fails_but_not_an_old_one_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for error in (CheckpointError, OldCheckpointStays):
        def save(*_: Any, kind: type[CheckpointError] = error) -> Path:
            raise kind("so it is")

        monkeypatch.setattr(checkpoint, "save", save)
        if error is CheckpointError:
            with pytest.raises(CheckpointError, match="so it is") as e:
                fit(tmp_path, "trainer.max_steps=1", "optim.warmup_steps=1")
            assert e.value.exit_code == 5
    fit(tmp_path, "trainer.max_steps=1", "optim.warmup_steps=1", say=said.append)
    assert "so it is" in said


@pytest.mark.parametrize("words", [(), ("precision=fp32", "optim.name=sgd"), ("precision=bf16_fp8",), ("precision=bf16_fp8", "opt_level=O2")])
def test_a_disk_too_small_for_one_checkpoint_is_said_before_the_first_step(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small(*WORDS, *words, "trainer.max_steps=1", "optim.warmup_steps=1", "trainer.val_check_interval=0")
    job, free = fp8cfg.build(recipe), [10**9]
    need = job_tensors.checkpoint_bytes(job, World()) + checkpoint.RESERVE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, free[0]))
    with RunFolder.create(tmp_path, "x", datetime.now(), to_yaml(recipe)) as folder:
        free[0] = need - 1
        with pytest.raises(RunFolderNotWritable, match=f"not enough space for one checkpoint: needs {need} bytes, {need - 1} are free") as e:
            fp8cfg.fit(job, folder, say=lambda _: None)
        assert e.value.exit_code == 5 and job.optimizer.steps == 0
        free[0] = 10**9
        fp8cfg.fit(job, folder, say=lambda _: None)
        size = sum(f.stat().st_size for f in folder.checkpoints.rglob("*.*") if f.is_file())
    assert 0.7 * size < need < 1.3 * size + 2 * checkpoint.RESERVE


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(loop.Diverged, match=r"step 1: \d+ of \d+ weights are not finite, the first is \S+; they are not saved"):
        fit(tmp_path, "precision=fp32", "optim.lr=1e38", "optim.min_lr=1e38", "trainer.max_steps=1", "optim.warmup_steps=0")
    assert saved(next(tmp_path.iterdir())) == []


def test_no_checkpoint_goes_while_steps_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 3 to 6 are skipped: their weights are those of step 2, which may be the ones that overflow."""
    def train_step(job: fp8cfg.Job, batches: Any, step: int, world: World) -> Step:
        stepped = step < 2 or step > 5
        job.optimizer.steps += stepped
        return Step(1.0, 0.1, 1.0 if stepped else float("inf"), stepped)

    monkeypatch.setattr(step_sequence, "train_step", train_step)
    monkeypatch.setattr(fp8cfg.Job, "prove", lambda _: type("Seen", (), {"data": lambda self: {}})())
    seen = dict[int, list[str]]()
    recipe = small(*WORDS, "precision=fp16", "trainer.max_steps=8", "checkpoint.every_n_steps=1", "trainer.val_check_interval=1")
    with RunFolder.create(tmp_path, "x", datetime.now(), to_yaml(recipe)) as folder:
        def say(text: str) -> None:
            if "validation" in text:
                seen[int(text.split()[1].rstrip(":"))] = [name[-1] for name in saved(folder.path)]

        fp8cfg.fit(fp8cfg.build(recipe), folder, say=say)
    assert [seen[n] for n in range(1, 9)] == [[], ["1"], ["1", "2"], ["1", "2"], ["1", "2"], ["1", "2"], ["1", "2"], ["2", "7"]]


# contents


STATES: list[Callable[[dict[str, Any]], Any]] = [
    *(lambda s, k=key: s.pop(k) for key in ("step", "data", "optimizer", "rng", "recipe", "compiled")),
    *(lambda s, k=key: s.update({k: None}) for key in ("step", "data", "optimizer", "rng", "recipe", "compiled")),
    lambda s: s.clear(), lambda s: s.update(step=-1), lambda s: s.update(step=1.5), lambda s: s.update(step=10**400), lambda s: s.update(compiled="yes"), lambda s: s.update(backend=1),
    lambda s: s["data"].update(samples_seen="x"), lambda s: s["data"].pop("corpus_sha256"), lambda s: s["data"].update(samples_seen=3),
    lambda s: s["rng"].pop("python"), lambda s: s["rng"].update(python=[]), lambda s: s["rng"]["numpy"].update(bit_generator="x"),
    lambda s: s["rng"]["python"].update(version=9), lambda s: s["rng"]["numpy"].pop("state"), lambda s: s["recipe"]["model"].update(num_layers="many"),
    lambda s: s["recipe"].update(unknown=1), lambda s: s["recipe"].update(trainer=[]),
    lambda s: s["optimizer"].clear(), lambda s: s["optimizer"].update(steps="x"), lambda s: s["optimizer"].update(steps=10**400),
    lambda s: s["optimizer"].update(state=None), lambda s: s["optimizer"].update(state={}), lambda s: s["optimizer"].update(optimizer="SGD"),
    lambda s: s["optimizer"]["state"].update({k: None for k in s["optimizer"]["state"]}),
    lambda s: next(iter(s["optimizer"]["state"].values())).pop("tensors"), lambda s: next(iter(s["optimizer"]["state"].values())).update(step="x"),
]


@pytest.fixture(scope="module")
def job(whole: Path) -> fp8cfg.Job:
    return fp8cfg.build(fp8cfg.from_yaml(whole / "recipe.yaml"))


@pytest.mark.parametrize("number", range(len(STATES)))
def test_a_state_of_other_contents_is_a_damaged_checkpoint(number: int, whole: Path, job: fp8cfg.Job) -> None:
    tensors, state = checkpoint.load(whole / "checkpoints" / "step-00000004")
    STATES[number](state)
    with pytest.raises(DamagedCheckpoint) as e:
        job_state.restore(job, tensors, state, run_data(job.recipe)[0])
    assert "\n" not in str(e.value) and e.value.exit_code == 4


def test_a_torn_group_names_the_tensor(whole: Path, job: fp8cfg.Job) -> None:
    tensors, state = checkpoint.load(whole / "checkpoints" / "step-00000004")
    name = next(iter(tensors["model"]))
    kept = tensors["model"].pop(name)
    with pytest.raises(DamagedCheckpoint, match=f"Missing key.*{name}"):
        job_state.restore(job, tensors, state, run_data(job.recipe)[0])
    tensors["model"][name] = kept[:1]
    with pytest.raises(DamagedCheckpoint, match=f"size mismatch for {name}"):
        job_state.restore(job, tensors, state, run_data(job.recipe)[0])


def test_older_checkpoints_are_tried_where_contents_are_wrong(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = mine / "checkpoints" / "step-00000004"
    shutil.copytree(newest, mine / "checkpoints" / "step-00000004.2")
    (newest / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")  # whole, and without a tensor
    write_manifest(newest, 4)
    again = mine / "checkpoints" / "step-00000004.2"
    (again / "model.safetensors").write_bytes(b"no safetensors")
    write_manifest(again, 4)
    assert main(["resume", str(mine), "trainer.max_steps=3"]) == 0
    out = capsys.readouterr().out
    passed = [line for line in out.splitlines() if "passed over" in line]
    assert len(passed) == 2 and "step-00000004.2: model.safetensors: cannot be read" in passed[0] and "step-00000004: " in passed[1]
    assert "from step-00000002" in out and saved(mine)[-1] == "step-00000004.2" and "step-00000003" in saved(mine)
    for name in saved(mine):
        file = mine / "checkpoints" / name / "state.json"
        file.write_text(json.dumps({"step": int(name[5:13])}))
        write_manifest(file.parent, int(name[5:13]))
    assert main(["resume", str(mine), "trainer.max_steps=5"]) == 4
    err = capsys.readouterr().err
    assert "none of the" in err and err.count("\n") == 1


# signals


def test_a_signal_inside_an_evaluation_is_heeded_between_its_batches(whole: Path, tmp_path: Path) -> None:
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
        fp8cfg.fit(again, folder, checkpoint.load(folder.checkpoints / "step-00000002"), say=lambda _: None)
        lines = read(folder.metrics)
    assert [(line["step"], "val_loss" in line) for line in lines] == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]


def test_a_signal_before_the_first_step_is_heeded_there(tmp_path: Path) -> None:
    with signals.waiting_to_stop():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(loop.Interrupted, match="stopped before step 1 of 4") as e:
            fit(tmp_path)
    assert e.value.exit_code == 75 and saved(next(tmp_path.iterdir())) == []


def test_a_command_that_was_told_to_stop_before_its_first_step_ends_with_75(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                           capsys: pytest.CaptureFixture[str]) -> None:
    from fp8cfg.report import run_header

    monkeypatch.setattr(run_header, "body", lambda *_: os.kill(os.getpid(), signal.SIGHUP) or "")
    assert main([*SMALL, *WORDS, f"log.dir={tmp_path}"]) == 75
    assert "stopped before step 1 of 4; resume goes on from there" in capsys.readouterr().err


def test_a_hangup_is_left_alone_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.stop_requested()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
