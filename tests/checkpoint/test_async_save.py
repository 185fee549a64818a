"""Saves beside steps (checkpoint.async_save): the same checkpoints, one at a time, whose errors are said, and a run that ends whole."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.checkpoint import save as checkpoint_save
from fp8cfg.checkpoint.manifest import verify
from fp8cfg.checkpoint.save import CheckpointError
from fp8cfg.run_folder.metrics_file import MEASURED, read_metrics
from tests.support import whole_checkpoints
from tests.support.ranks import ended, launch, running
from tests.support.small import small, small_words

WORDS = (
    "precision=bf16_fp8",
    "trainer.compile=off",
    "checkpoint.every_n_steps=1",
    "checkpoint.keep=9",
    "trainer.val_check_interval=0",
)


def run(
    folder: Path, say: list[str], asynchronous: bool = True, steps: int = 4, saved: Any = None
) -> Any:
    recipe = small(
        *WORDS,
        f"trainer.max_steps={steps}",
        "optim.warmup_steps=1",
        f"checkpoint.async_save={str(asynchronous).lower()}",
    )
    return fp8cfg.fit(
        fp8cfg.build(recipe), folder, say=say.append, callbacks=[saved] if saved else []
    )


class Saves(fp8cfg.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, str, bool]] = []

    def save(self, done: int, folder: Path) -> None:
        self.seen.append((done, folder.name, threading.current_thread() is threading.main_thread()))


def test_steps_go_on_and_the_checkpoints_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save is held until two more steps are done, which change what it had copied."""
    real, threads, calls = checkpoint_save.write_checkpoint, list[str](), Saves()
    run(tmp_path / "waiting", [], asynchronous=False)
    stepped = threading.Event()

    class Steps(Saves):
        def step(self, done: int, values: Any) -> None:
            if done == 2:  # the step after the save of the first
                stepped.set()

    calls = Steps()

    def save(*args: Any) -> Path:
        threads.append(threading.current_thread().name)
        assert args[1] != 1 or stepped.wait(60)
        return real(*args)

    monkeypatch.setattr(checkpoint_save, "write_checkpoint", save)
    run(tmp_path / "beside", [], saved=calls)
    assert threads == ["fp8cfg checkpoint"] * 3 + ["MainThread"], "the last is waited for"
    assert calls.seen == [(n, f"step-{n:08d}", True) for n in range(1, 5)]
    for n in range(1, 5):
        (want, state), (found, same) = (
            whole_checkpoints.load(tmp_path / run / "checkpoints" / f"step-{n:08d}")
            for run in ("waiting", "beside")
        )
        assert {**state, "recipe": 0} == {**same, "recipe": 0}
        assert all(
            torch.equal(
                t.view(torch.uint8) if t.dim() else t,
                found[g][k].view(torch.uint8) if t.dim() else found[g][k],
            )
            for g, named in want.items()
            for k, t in named.items()
        )
    stood = [
        line["save_seconds"]
        for line in read_metrics(tmp_path / "beside" / "metrics.jsonl")
        if "save_seconds" in line
    ]
    assert len(stood) == 4 and min(stood) > 0


def test_a_save_that_fails_is_said_and_the_next_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, said = checkpoint_save.write_checkpoint, list[str]()

    def save(root: Any, step: int, *rest: Any) -> Path:
        if step == 2:
            raise CheckpointError("step 2 was not saved in x: no space")
        return real(root, step, *rest)

    monkeypatch.setattr(checkpoint_save, "write_checkpoint", save)
    run(tmp_path / "run", said)
    assert [line for line in said if "was not saved" in line] == [
        "warning: step 2 was not saved in x: no space; older checkpoints are intact, and the next save tries again"
    ]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        f"step-{n:08d}" for n in (1, 3, 4)
    ]


def test_a_fault_in_the_thread_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any) -> Path:
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint_save, "write_checkpoint", save)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", [])


def test_a_run_that_ends_otherwise_is_whole(tmp_path: Path) -> None:
    class Stops(fp8cfg.Callback):
        def step(self, done: int, values: Any) -> None:
            if done == 3:
                raise fp8cfg.ConfigError("stop")

    with pytest.raises(fp8cfg.ConfigError, match="stop"):
        run(tmp_path / "run", [], saved=Stops())
    found = whole_checkpoints.newest(tmp_path / "run" / "checkpoints", print)
    assert found is not None and found.name == "step-00000003"
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp-*"))


def test_without_saves_on_the_way_it_has_no_effect() -> None:
    with pytest.raises(fp8cfg.ConfigError, match=r"checkpoint\.async_save=true: has no effect"):
        small("checkpoint.every_n_steps=0", "checkpoint.async_save=true")


KILLED = (
    *small_words(
        "precision=bf16_fp8",
        "model.num_layers=1",
        "trainer.max_steps=8",
        "checkpoint.every_n_steps=2",
        "checkpoint.async_save=true",
    ),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert launch(1, *KILLED, f"log.folder={folder}").returncode == 0
    return metrics(folder)


def metrics(folder: Path) -> list[dict[str, object]]:
    """Returns the rows of the metrics without times and without the rows of saves.

    A signal may come at any step, and the last save of a run that stops writes no row.
    """
    rows = []
    for line in read_metrics(folder / "metrics.jsonl"):
        if "save_seconds" not in line:
            rows.append({key: value for key, value in line.items() if key not in MEASURED})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failpoint", "code", "newest_step"),
    [
        ("shard:6", -signal.SIGKILL, 2),
        ("manifest:2", -signal.SIGKILL, 2),
        ("rename:2", -signal.SIGKILL, 2),
        ("renamed:2", -signal.SIGKILL, 4),
        ("manifest:2:SIGTERM", 75, 4),
        ("renamed:1:SIGINT", 75, 2),
    ],
)
def test_a_kill_or_a_signal_in_the_thread_that_writes_loses_nothing(
    failpoint: str,
    code: int,
    newest_step: int,
    whole: list[dict[str, object]],
    tmp_path: Path,
) -> None:
    """A checkpoint that a kill leaves half-written is none, and the one before is gone on from; a signal lets the thread end its own,
    and the run then saves the step that it has got to."""
    folder = tmp_path / "run"
    stopped = launch(1, *KILLED, f"log.folder={folder}", FP8CFG_FAILPOINT=failpoint)
    assert stopped.returncode == code, stopped.stderr[-2000:]
    found = sorted(
        int(p.name[5:]) for p in (folder / "checkpoints").iterdir() if p.name[5:].isdigit()
    )
    if code == 75:
        assert (
            newest_step in found
            and found[-1] >= newest_step
            and not list((folder / "checkpoints").glob("*.tmp-*"))
        ), "it is ended"
    else:
        assert found[-1] == newest_step
    for step in found:
        verify(folder / "checkpoints" / f"step-{step:08d}")
    resumed = launch(1, "resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert f"from step-{found[-1]:08d}" in resumed.stdout
    assert metrics(folder) == whole


@pytest.mark.slow
def test_two_ranks_write_beside_their_steps(tmp_path: Path) -> None:
    words = small_words(
        *WORDS, "trainer.max_steps=4", "optim.warmup_steps=1", "trainer.micro_batch_size=4"
    )
    for asynchronous in ("true", "false"):
        done = launch(
            2,
            *words,
            f"checkpoint.async_save={asynchronous}",
            f"log.folder={tmp_path / asynchronous}",
        )
        assert done.returncode == 0, done.stderr[-2000:]
    for n in range(1, 5):
        (want, _), (found, _) = (
            whole_checkpoints.load(tmp_path / run / "checkpoints" / f"step-{n:08d}")
            for run in ("false", "true")
        )
        assert [
            f"{g} {k}"
            for g, named in want.items()
            if g != "rng"
            for k, t in named.items()
            if not torch.equal(t.float(), found[g][k].float())
        ] == []
    done = launch(2, "resume", str(tmp_path / "true"), "trainer.max_steps=5")
    assert done.returncode == 0, done.stderr[-2000:]


ONE_DIES = """
import os, sys, types
from fp8cfg import __main__ as program
from fp8cfg.schema import errors

errors.time = types.SimpleNamespace(sleep=lambda seconds: None)  # a rank that has said why waits for torchrun, which is not there
rank, point = sys.argv.pop(1), sys.argv.pop(1)
if os.environ["RANK"] == rank:
    os.environ["FP8CFG_FAILPOINT"] = point
program.entry()
"""
"""`fp8cfg` on several ranks, of which one gets to a failpoint."""
ON_TWO = (*KILLED, "trainer.micro_batch_size=4")


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("two") / "run"
    assert launch(2, *ON_TWO, f"log.folder={folder}").returncode == 0
    return metrics(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "failpoint"), [(1, "shard:6"), (0, "manifest:2")])
def test_one_of_two_ranks_is_killed_as_it_writes_beside_its_steps(
    rank: int,
    failpoint: str,
    whole_of_two: list[dict[str, object]],
    tmp_path: Path,
) -> None:
    """In the second save, of which no rank then makes a checkpoint: the other rank ends and says why, and both go on from the first
    one to the bits of a run that no one ended."""
    folder, script = tmp_path / "run", tmp_path / "one_dies.py"
    script.write_text(ONE_DIES)
    with running(2, str(rank), failpoint, *ON_TWO, f"log.folder={folder}", script=script) as (
        processes,
        said,
    ):
        assert not ended(processes)
        codes = [process.exitcode for process in processes]
        err = Path(said, f"{1 - rank}.err").read_text()
    assert (
        codes[rank] == -signal.SIGKILL and codes[1 - rank] == 8 and "another rank has ended" in err
    ), (codes, err)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir() if "tmp" not in p.name) == [
        "step-00000002"
    ]
    if rank == 0:  # the first rank removes the folder, if it can
        assert list((folder / "checkpoints").glob("step-00000004.tmp-*"))
    verify(folder / "checkpoints" / "step-00000002")
    resumed = launch(2, "resume", str(folder))
    assert resumed.returncode == 0 and "from step-00000002" in resumed.stdout, resumed.stderr[
        -2000:
    ]
    assert metrics(folder) == whole_of_two
    assert not list((folder / "checkpoints").glob("*.tmp-*"))
