"""The loop: what it writes, what stops it, and the keys that act while it runs."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.composition import to_yaml
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.parallel.process_group import Traffic, World
from fp8cfg.planning import communication
from fp8cfg.planning.communication import Sent
from fp8cfg.run_folder.metrics_file import read_metrics
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.training import loop, runs
from fp8cfg.training import step as training_step
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import Stopped, evaluate, validation_batches
from tests.support.small import losses, small, steps

FP8 = "precision=bf16_fp8"


def run(tmp_path: Path, *words: str, **more: Any) -> tuple[RunFolder, loop.Result, list[str]]:
    recipe = small(*words)
    said: list[str] = []
    with RunFolder.create(
        tmp_path, recipe.name, datetime(2026, 1, 2, 3, 4, 5), to_yaml(recipe)
    ) as folder:
        return folder, fp8cfg.fit(fp8cfg.build(recipe), folder, say=said.append, **more), said


def test_a_run_leaves_a_folder_behind(tmp_path: Path) -> None:
    folder, result, said = run(tmp_path, FP8, "name=mine")
    assert folder.path.name == "mine-20260102-030405"
    assert fp8cfg.from_yaml(folder.recipe) == small(FP8, "name=mine")
    lines = read_metrics(folder.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert (
        result.steps == 6
        and lines[-2]["loss"] == result.loss
        and lines[-1]["val_loss"] == result.val_loss
    )
    assert lines[-2]["tokens"] == 6 * 8 * 32
    assert json.loads(folder.coverage.read_text())["layers_in_fp8"] == 8
    assert any(text.endswith("as planned, emulated") for text in said)
    assert "torch" in json.loads(folder.environment.read_text())["packages"]


def test_loss_falls_on_real_text() -> None:
    values = [
        s.loss for s in steps(fp8cfg.build(small(FP8, "optim.lr=3e-3", "trainer.max_steps=30")), 30)
    ]
    assert values[0] == pytest.approx(math.log(272), rel=0.05)
    assert sum(values[-5:]) / 5 < values[0] - 1.5


def test_checkpoint_keys(tmp_path: Path) -> None:
    folder, _, _ = run(tmp_path / "a", "checkpoint.every_n_steps=1", "checkpoint.keep=3")
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == [
        f"step-0000000{i}" for i in (4, 5, 6)
    ]
    folder, _, _ = run(tmp_path / "b", "checkpoint.every_n_steps=0")
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step-00000006"]


def test_evaluation_keys(tmp_path: Path) -> None:
    folder, result, _ = run(tmp_path, "trainer.val_check_interval=0")
    assert result.val_loss is None and not any(
        "val_loss" in line for line in read_metrics(folder.metrics)
    )
    recipe = small("trainer.limit_val_batches=3")
    _, held_out = run_data(recipe)
    assert len(list(validation_batches(recipe, held_out, World()))) == 3


def test_log_keys(tmp_path: Path) -> None:
    _, _, said = run(tmp_path, "log.every_n_steps=3")
    shown = [line for line in said if "tokens/s" in line]
    assert [line.split()[1] for line in shown] == ["3/6", "6/6"]


def test_microbatches_leave_the_losses_and_scales_of_one() -> None:
    one, four = (fp8cfg.build(small(FP8, f"trainer.micro_batch_size={m}")) for m in (8, 2))
    got, want = [s.loss for s in steps(four, 3)], [s.loss for s in steps(one, 3)]
    assert got == pytest.approx(want, rel=5e-3)
    for a, b in zip(fp8_linears(four.model), fp8_linears(one.model), strict=True):
        assert torch.allclose(
            a.fp8_scale, b.fp8_scale, rtol=0.15
        )  # .02 to .13 over ten seeds; a microbatch left out is .5 and more
    # before weights or scales could differ, the first layer sees the very same numbers
    first, other = (
        next(fp8_linears(job.model)) for job in _after_one_step("fp8.params=false", 8, 2)
    )
    assert torch.equal(first.fp8_amax_history[-1, :2], other.fp8_amax_history[-1, :2])
    for a, b in zip(
        *(fp8_linears(job.model) for job in _after_one_step("fp8.first_step=te", 8, 2)), strict=True
    ):
        assert torch.allclose(a.fp8_amax_history[-1], b.fp8_amax_history[-1], rtol=0.02)


def _after_one_step(word: str, *sizes: int) -> list[Any]:
    jobs = [fp8cfg.build(small(FP8, word, f"trainer.micro_batch_size={m}")) for m in sizes]
    for job in jobs:
        list(steps(job, 1))
    return jobs


def test_recomputation_changes_neither_losses_nor_fp8_state() -> None:
    jobs = [
        fp8cfg.build(small(FP8, f"model.recompute_granularity={g}"))
        for g in ("none", "selective", "full")
    ]
    a, b, c = ([s.loss for s in steps(job, 4)] for job in jobs)
    assert a == b == c
    for one, *others in zip(*(fp8_linears(job.model) for job in jobs), strict=True):
        for other in others:
            assert torch.equal(one.fp8_amax_history, other.fp8_amax_history) and torch.equal(
                one.fp8_scale, other.fp8_scale
            )


def test_scales_move_every_interval_steps_and_the_history_at_each() -> None:
    job = fp8cfg.build(
        small(FP8, "fp8.interval=3", "fp8.amax_history_len=8", "trainer.max_steps=20")
    )
    layer = next(fp8_linears(job.model))
    seen = []
    for _ in steps(job, 7):
        seen.append((layer.fp8_scale[2].item(), layer.fp8_amax_history[-1, 2].item()))
    scales, newest = zip(*seen, strict=True)
    assert scales[0] > 0, "a scale that was never set is set at once"
    assert scales[0] == scales[1] and scales[2] == scales[3] == scales[4] and scales[5] == scales[6]
    assert len(set(newest)) == 7


@pytest.mark.parametrize("in_fp8", [False, True])
def test_evaluation_moves_no_fp8_state(in_fp8: bool) -> None:
    words = (FP8, f"fp8.use_autocast_during_eval={str(in_fp8).lower()}")
    job, other = fp8cfg.build(small(*words)), fp8cfg.build(small(*words))
    list(steps(job, 2)), list(steps(other, 2))
    _, held_out = run_data(job.recipe)
    before = [b.clone() for b in stored_state_dict(job.model).values()]
    loss = evaluate(job, validation_batches(job.recipe, held_out, World()), World())
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, stored_state_dict(job.model).values(), strict=True)
    )
    assert [s.loss for s in steps(job, 2, first=2)] == [s.loss for s in steps(other, 2, first=2)]
    reference = fp8cfg.build(small(FP8, f"fp8.use_autocast_during_eval={str(not in_fp8).lower()}"))
    list(steps(reference, 2))
    assert loss != evaluate(
        reference, validation_batches(job.recipe, held_out, World()), World()
    ), "the key acts"


class Second(World):
    """One of two ranks, of which the other one asks to stop."""

    asks = 0.0

    def any(self, flag: bool) -> bool:
        raise AssertionError("the host waits for the other rank")

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        return value.clamp(min=self.asks)


def test_an_evaluation_on_several_ranks_ends_a_microbatch_after_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each microbatch reads what the one before it asked the other ranks."""
    job = fp8cfg.build(small("trainer.micro_batch_size=2", "trainer.val_check_interval=1"))
    batches = validation_batches(job.recipe, run_data(job.recipe)[1], World())
    passes: list[int] = []
    job.model.register_forward_hook(lambda *_: passes.append(1))
    world = Second(0, 2)
    monkeypatch.setattr(Second, "asks", 1.0)
    with pytest.raises(Stopped):
        evaluate(job, batches, world)
    assert len(passes) == 1
    monkeypatch.setattr(Second, "asks", 0.0)
    monkeypatch.setattr(Second, "sum", lambda world, value: value)
    evaluate(job, batches, world)
    assert len(passes) > 2


def test_traffic_of_a_pass_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job, counted = fp8cfg.build(small()), []

    def pass_traffic(recipe: Any, part: Any, samples: int) -> Iterator[Sent]:
        counted.append(samples)
        yield Sent("tensor", "activations", 100 * samples, 1)

    monkeypatch.setattr(communication, "pass_traffic", pass_traffic)
    world = World(0, 2, Traffic())
    for samples in (2, 2, 1, 2):
        training_step.count_traffic(job, samples, world)
    assert counted == [2, 1] and world.traffic.bytes == {"activations": 700}


def test_a_signal_stops_at_a_checkpoint(tmp_path: Path) -> None:
    recipe = small(FP8, "trainer.max_steps=50", "trainer.val_check_interval=1")
    with RunFolder.create(tmp_path, "x", datetime.now(), to_yaml(recipe)) as folder:

        def say(text: str) -> None:
            if text.startswith("step 2: validation"):
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(loop.Interrupted, match="stopped after step 2 of 50") as e:
            fp8cfg.fit(fp8cfg.build(recipe), folder, say=say)
        assert e.value.exit_code == 75
        assert [p.name for p in folder.checkpoints.iterdir()] == ["step-00000002"]


def test_a_batch_that_cannot_be_had_is_said_before_the_first_step() -> None:
    with pytest.raises(fp8cfg.ConfigError, match=r"data=tiny: .*validation_fraction"):
        runs.train_job(fp8cfg.build(small("data.validation_fraction=0.0005")), say=lambda _: None)
    with pytest.raises(fp8cfg.ConfigError, match=r"data=tiny: .*vocab_size"):
        runs.train_job(fp8cfg.build(small("model.vocab_size=128")), say=lambda _: None)


def test_a_loop_of_ones_own_gives_the_same_losses() -> None:
    job = fp8cfg.build(small(FP8))
    batches, _ = run_data(job.recipe)
    mine = []
    for step in range(4):
        tokens, targets = batches.batch(step)
        with job.autocast():
            loss = job.model(tokens, targets)
            job.backward(loss)
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step()
        job.optimizer.zero_grad()
        mine.append(loss.item())
    assert mine == losses(FP8)


def test_a_parallel_layout_is_refused_by_name_on_any_number_of_ranks() -> None:
    recipe = small("trainer.devices=2", "trainer.strategy.tensor_model_parallel_size=2")
    with pytest.raises(
        fp8cfg.ConfigError,
        match="tensor_model_parallel_size=2: needs a multiple of 2 ranks, got 1",
    ):
        fp8cfg.build(recipe)
    job = fp8cfg.build(recipe, model=torch.nn.Sequential(torch.nn.Linear(64, 64)))
    for world in (World(0, 1), World(0, 2)):
        with pytest.raises(
            fp8cfg.ConfigError,
            match="tensor_model_parallel_size=2: splits matrices of a recipe's Transformer",
        ):
            runs.train_job(job, world=world, say=lambda _: None)


def test_evaluation_takes_micro_batches() -> None:
    job = fp8cfg.build(small("trainer.micro_batch_size=2"))
    rows: list[int] = []
    job.model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    _, held_out = run_data(job.recipe)
    whole = fp8cfg.build(small())
    got, want = (
        evaluate(j, validation_batches(j.recipe, held_out, World()), World()) for j in (job, whole)
    )
    assert set(rows) == {2} and got == pytest.approx(want, rel=1e-3)


def test_a_damaged_metrics_file_is_one_line(tmp_path: Path) -> None:
    recipe = small()
    with RunFolder.create(tmp_path, "x", datetime.now(), to_yaml(recipe)) as folder:
        folder.metrics.write_text("not a line\n")
        with pytest.raises(
            fp8cfg.ConfigError,
            match=r"metrics\.jsonl:1: not a line of metrics: 'not a line'; delete that line$",
        ):
            fp8cfg.fit(fp8cfg.build(recipe), folder, say=lambda _: None)
        folder.metrics.unlink()
        folder.metrics.mkdir()
        with pytest.raises(fp8cfg.schema.errors.Fp8cfgError) as e:
            fp8cfg.fit(fp8cfg.build(recipe), folder, say=lambda _: None)
        assert e.value.exit_code == 5


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_resume_reports_a_damaged_metrics_file(has_checkpoints: bool, tmp_path: Path) -> None:
    folder, _, _ = run(tmp_path, "trainer.max_steps=4")
    folder.close()
    if not has_checkpoints:
        shutil.rmtree(folder.checkpoints)
        folder.checkpoints.mkdir()
    with folder.metrics.open("a") as file:
        file.write("x\n")
    with pytest.raises(fp8cfg.ConfigError, match=r"not a line of metrics: 'x'; delete that line$"):
        fp8cfg.resume(folder.path)
    folder.metrics.unlink()
    folder.metrics.mkdir()
    with pytest.raises(fp8cfg.ConfigError, match=r"metrics\.jsonl: cannot be read \(Is a dir"):
        fp8cfg.resume(folder.path)


def test_a_missing_evaluation_can_end_a_run_as_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal interrupts the last evaluation, and the resumed run repeats only that."""

    def stop(*_: Any) -> float:
        raise Stopped

    monkeypatch.setattr(loop, "evaluate", stop)
    job = fp8cfg.build(small("trainer.max_steps=2", "trainer.val_check_interval=2"))
    with pytest.raises(loop.Interrupted, match="stopped after step 2 of 2"):
        fp8cfg.fit(job, tmp_path / "run", say=lambda _: None)
    monkeypatch.setattr(loop, "evaluate", lambda *_: math.nan)
    with pytest.raises(loop.Diverged, match="the validation loss is nan"):
        fp8cfg.resume(tmp_path / "run", say=lambda _: None)


def test_a_run_with_less_than_half_in_fp8_says_so() -> None:
    said: list[str] = []
    fp8cfg.fit(
        fp8cfg.build(
            small(
                "precision=bf16_fp8",
                "fp8.include=['*.linear_proj']",
                "trainer.max_steps=1",
                "optim.warmup_steps=0",
                "trainer.compile=off",
            )
        ),
        say=said.append,
    )
    (line,) = [" ".join(text.split()) for text in said if text.startswith("warning: ")]
    assert (
        line.startswith("warning: only ")
        and "of matmul FLOPs ran in FP8; the largest part in high precision is layers.*.mlp.linear_fc1"
        in line
    )
