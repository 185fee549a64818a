"""Steps that are skipped: overflow under a loss scale, gradients that are not finite, and what is said of them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.training import loop, runs
from fp8cfg.training.step import StepResult
from tests.support.small import small, steps


def test_fp16_scales_the_loss_skips_overflows_and_trains() -> None:
    job = fp8cfg.build(
        small(
            "precision=fp16",
            "precision.initial_loss_scale=4194304",
            "trainer.max_steps=40",
            "precision.hysteresis=1",
        )
    )
    taken = list(steps(job, 40))
    assert not taken[0].stepped and job.loss_scaler.scale < 2.0**22
    assert sum(s.stepped for s in taken) > 20 and taken[-1].loss < taken[0].loss - 0.5
    assert job.optimizer.steps == sum(s.stepped for s in taken)


def test_a_run_whose_gradients_are_not_finite_stops_with_its_weights(tmp_path: Path) -> None:
    job = fp8cfg.build(small("precision=bf16"))
    with torch.no_grad():
        job.optimizer.masters[job.model.final_layernorm.weight].fill_(math.inf)
        job.optimizer.write_parameters()
    before = job.model.embedding.weight.clone()
    with pytest.raises(loop.Diverged, match="step 1: the gradient norm is nan"):
        runs.train_job(job, say=lambda _: None)
    assert torch.equal(before, job.model.embedding.weight)


def test_a_run_that_diverged_says_how_to_go_back(tmp_path: Path) -> None:
    def diverge(job: Job, folder: Path, after: int) -> str:
        class Breaks(fp8cfg.Callback):
            def step(self, done: int, values: object) -> None:
                if done == after:
                    job.optimizer.masters[job.model.final_layernorm.weight].data.fill_(math.nan)
                    job.optimizer.write_parameters()

        with pytest.raises(loop.Diverged) as end:
            fp8cfg.fit(job, folder, say=lambda _: None, callbacks=[Breaks()])
        return str(end.value)

    words = ["precision=bf16", "trainer.val_check_interval=0", "checkpoint.every_n_steps=2"]
    early = diverge(fp8cfg.build(small(*words)), tmp_path / "early", after=1)
    assert early.startswith(
        "step 2: the gradient norm is nan (loss nan), and the step was skipped;"
    )
    assert early.endswith("lower optim.lr and start again")
    late = diverge(fp8cfg.build(small(*words)), tmp_path / "late", after=5)
    command = f"fp8cfg resume {tmp_path / 'late'} --step 2 optim.lr=LR"
    assert late.endswith(f"resume from an earlier step (2, 4), as in: {command}")


def test_an_overflow_that_never_ends_stops_the_run() -> None:
    with pytest.raises(loop.Diverged, match="100 steps in a row"):
        runs.train_job(
            fp8cfg.build(
                small(
                    "precision=fp16",
                    "precision.loss_scale=1e30",
                    "trainer.max_steps=200",
                    "trainer.val_check_interval=0",
                )
            ),
            say=lambda _: None,
        )


def test_skipped_steps_do_not_use_up_the_warm_up() -> None:
    job = fp8cfg.build(
        small(
            "precision=fp16",
            "precision.initial_loss_scale=16777216",
            "trainer.max_steps=24",
            "optim.warmup_steps=5",
        )
    )
    taken = list(steps(job, 24))
    first = next(i for i, s in enumerate(taken) if s.stepped)
    assert first > 3 and taken[first].lr == job.schedule.lr_at(0)
    assert [s.lr for s in taken if s.stepped][-1] == job.schedule.lr_at(job.optimizer.steps - 1)


def test_skips_are_said_and_a_run_of_skips_alone_is_not_done(tmp_path: Path) -> None:
    said: list[str] = []
    runs.train_job(fp8cfg.build(small("precision=fp16", "trainer.max_steps=30")), say=said.append)
    assert any("steps before it were skipped, gradients overflowed" in text for text in said)
    with pytest.raises(loop.Diverged, match="all 6 steps were skipped"):
        fp8cfg.fit(fp8cfg.build(small("precision=fp16")), tmp_path / "run", say=lambda _: None)
    with pytest.raises(loop.Diverged, match="all 6 steps were skipped"):
        fp8cfg.resume(tmp_path / "run", say=lambda _: None)


def test_a_run_that_ends_with_a_loss_that_is_not_finite_has_diverged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too few skipped steps in a row to end it before its last one; a skipped last step with a finite loss is none of those."""

    def train_step(job: fp8cfg.Job, _: Any, step: int, *__: Any, **___: Any) -> Any:
        stepped = step < 2
        job.optimizer.steps += stepped
        loss = last_loss if step > 1 else 1.0
        norm = 1.0 if stepped else math.inf
        return SimpleNamespace(wait=lambda: StepResult(loss, 0.1, norm, stepped, step + 1))

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(loop.StepReport, "_check_coverage", lambda _: None)
    recipe, last_loss = small("precision=fp16", "trainer.val_check_interval=0"), math.nan
    with pytest.raises(
        loop.Diverged,
        match=r"step 6: the training loss is nan, all steps from 3 on were skipped; lower optim.lr",
    ) as e:
        runs.train_job(fp8cfg.build(recipe), say=lambda _: None)
    assert e.value.exit_code == 7
    last_loss = 2.0
    assert runs.train_job(fp8cfg.build(recipe), say=lambda _: None).loss == 2.0
