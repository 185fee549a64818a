"""A run that an error ends saves its last whole step, and goes on from there as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fp8cfg
from fp8cfg.data.indexed import write_indexed
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training.data import run_data
from tests.support.ranks import launch
from tests.support.short_runs import saved
from tests.support.small import small, small_words

STEPS = 6
WORDS = (
    "precision=bf16_fp8",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=0",
    "checkpoint.every_n_steps=100",
)
VOCABULARY = 65_000
BAD = 4
"""Steps before the one whose data cannot be used, and before the one whose callback fails."""


class Fails(fp8cfg.Callback):
    """A callback with a bug, which shows after some steps."""

    def step(self, done: int, values: Mapping[str, Any]) -> None:
        if done == BAD:
            raise KeyError("a bug of the user's")


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of which each can be used."""
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    write_indexed(path, [np.random.default_rng(1).integers(0, 256, 8000)], VOCABULARY)
    return path


def words(path: Path, *more: str) -> list[str]:
    return [
        w
        for w in small_words(*WORDS, "data=tokens", f"data.path={path}", *more)
        if w != "data=tiny"
    ]


def damaged(good: Path, path: Path) -> Path:
    """Tokens of which one is outside of the vocabulary: in the last sample of step BAD + 1, which the last rank reads."""
    batches, _ = run_data(fp8cfg.compose(words(good)))
    size = batches.global_batch_size
    (start,) = batches.samples.draw(np.array([(BAD + 1) * size - 1]), batches.seed).tolist()
    tokens = np.fromfile(f"{good}.bin", dtype=np.uint16)
    tokens[(start + 1) % len(batches.samples.tokens)] = 60_000
    write_indexed(path, [tokens], VOCABULARY)
    return path


@pytest.fixture(scope="module")
def whole(good: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing ends."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fp8cfg.fit(fp8cfg.build(fp8cfg.compose(words(good))), folder, say=lambda _: None)
    return losses(folder)


def test_a_bad_token_loses_no_step(good: Path, whole: list[float], tmp_path: Path) -> None:
    bad = damaged(good, tmp_path / "tokens")
    said: list[str] = []
    job = fp8cfg.build(fp8cfg.compose(words(bad)))
    with pytest.raises(ConfigError, match="token 60000 at index"):
        fp8cfg.fit(job, tmp_path / "run", say=said.append)
    assert saved(tmp_path / "run") == [f"step-{BAD:08}"]
    assert f"step {BAD}, the last complete one, is saved; you can resume from it" in said


def test_a_bug_in_a_callback_loses_no_step(good: Path, whole: list[float], tmp_path: Path) -> None:
    job = fp8cfg.build(fp8cfg.compose(words(good)))
    with pytest.raises(KeyError):
        fp8cfg.fit(job, tmp_path / "run", say=lambda _: None, callbacks=[Fails()])
    assert saved(tmp_path / "run") == [f"step-{BAD:08}"]
    fp8cfg.resume(tmp_path / "run", say=lambda _: None)
    assert losses(tmp_path / "run") == whole


@pytest.mark.parametrize("at", ["forward", "optimizer"])
def test_an_error_in_a_step_is_repeated_as_a_whole(
    at: str, good: Path, whole: list[float], tmp_path: Path
) -> None:
    """With two microbatches, of which the first has drawn random numbers and recorded amaxes."""
    more = ["trainer.micro_batch_size=4", "trainer.compile=off"]
    fp8cfg.fit(fp8cfg.build(fp8cfg.compose(words(good, *more))), tmp_path / "a", say=_silent)
    job, calls = fp8cfg.build(fp8cfg.compose(words(good, *more))), [0]
    fails_at = 2 * BAD + 2 if at == "forward" else BAD + 1

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == fails_at:
            raise RuntimeError("out of memory")

    if at == "forward":
        job.model.register_forward_pre_hook(fail)
    else:
        job.optimizer.on_step.append(fail)
    said: list[str] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        fp8cfg.fit(job, tmp_path / "run", say=said.append)
    if at == "optimizer":
        assert saved(tmp_path / "run") == []
        assert "the error came from the optimizer step, so no checkpoint is saved" in said
        return
    assert saved(tmp_path / "run") == [f"step-{BAD:08}"]
    fp8cfg.resume(tmp_path / "run", say=_silent)
    assert losses(tmp_path / "run") == losses(tmp_path / "a")


def test_an_fp8_mistake_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.training.bad_steps import BadStep, BadSteps
    from fp8cfg.training.loop import Diverged

    def check(_: BadSteps, result: Any) -> BadStep:
        return BadStep(result.step, "a mistake", "stop", result.loss, result.lr, 1.0)

    monkeypatch.setattr(BadSteps, "check", check)
    with pytest.raises(Diverged):
        fp8cfg.fit(fp8cfg.build(small(*WORDS)), tmp_path / "run", say=_silent)
    assert saved(tmp_path / "run") == []


def test_a_run_saves_by_the_clock(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = fp8cfg.compose(words(good, "checkpoint.every_minutes=2", "checkpoint.keep=9"))
    now = [0.0]
    monkeypatch.setattr("fp8cfg.checkpoint.saver.time.monotonic", lambda: now[0])

    class Clock(fp8cfg.Callback):
        def step(self, done: int, values: Mapping[str, Any]) -> None:
            now[0] += 50.0

    fp8cfg.fit(fp8cfg.build(recipe), tmp_path / "run", say=_silent, callbacks=[Clock()])
    assert saved(tmp_path / "run") == ["step-00000003", f"step-{STEPS:08}"]


def test_ranks_stop_together_before_data_that_one_of_them_cannot_use(
    good: Path, whole: list[float], tmp_path: Path
) -> None:
    bad = damaged(good, tmp_path / "tokens")
    run = tmp_path / "run"
    ranks = ["trainer.micro_batch_size=4", f"log.folder={run}"]
    ended = launch(2, *words(bad, *ranks))
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("token 60000 at index") == 2 and "Traceback" not in ended.stderr
    assert saved(run) == [f"step-{BAD:08}"]


def _silent(_: str) -> None: ...
