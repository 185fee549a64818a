"""Compiled gradients of a run's first microbatch against eager ones, with compilers that are quick, or wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.backends.compiled_layers import compile_options
from fp8cfg.building.job import Job
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.parallel.process_group import World
from fp8cfg.training import compile, runs
from fp8cfg.training.data import run_data
from tests.support.small import SMALL, small
from tests.support.traced import TRACE

DELAYED = "precision=bf16_fp8"


def compile_with(monkeypatch: pytest.MonkeyPatch, compiler: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(Job, "compiler", lambda job: compiler)


def compared(words: str) -> tuple[Job, float]:
    job = fp8cfg.build(small(*words.split()))
    batches, _ = run_data(job.recipe)
    return job, compile.compare(job, batches, 0, World())


def trained(words: str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """The losses of a short run, its last state and its messages."""
    job = fp8cfg.build(small("trainer.max_steps=3", "trainer.compile=on", *words.split()))
    losses: list[float] = []
    messages: list[str] = []

    class Losses(fp8cfg.Callback):
        def step(self, done: int, values: Any) -> None:
            losses.append(values["loss"])

    runs.train_job(job, say=messages.append, callbacks=[Losses()])
    return losses, stored_state_dict(job.model), messages


@pytest.mark.parametrize(
    "words",
    [
        DELAYED,
        pytest.param("precision=bf16_nvfp4 model.num_layers=16", marks=pytest.mark.slow),
        pytest.param(
            "precision=fp16_fp8 opt_level=O2 precision.initial_loss_scale=1024",
            marks=pytest.mark.slow,
        ),
        pytest.param(f"{DELAYED} storage.shard=fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_same_with_and_without_the_comparison(
    monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    compile_with(monkeypatch, TRACE)
    losses, state, messages = trained(words)
    assert any("match the eager ones" in message for message in messages)
    monkeypatch.setattr(compile, "compare", lambda job, *_: job.compile_model() or 0.0)
    other_losses, other_state, _ = trained(words)
    assert losses == other_losses
    for name, tensor in state.items():
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), other_state[name].reshape(-1).view(torch.uint8)
        ), name


def test_a_comparison_leaves_random_state_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, TRACE)
    random_state = torch.get_rng_state()
    job, difference = compared("precision=fp16_fp8")
    assert difference < 0.1
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in job.model.parameters())
    assert job.loss_scaler is not None and job.loss_scaler.scale == 2.0**32
    assert all(not any(ran.values()) for ran in job._observed().values())


def test_random_numbers_of_dropout_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, TRACE)
    monkeypatch.setattr(compile, "compare", lambda *_: pytest.fail("compared"))
    job = fp8cfg.build(small(DELAYED, "task=lora", "lora.dropout=0.1", "trainer.compile=on"))
    batches, _ = run_data(job.recipe)
    compile.compile_as_chosen(job, None, batches, 0, World(), say=lambda _: None)
    assert job.compiled


@pytest.mark.slow
def test_inductor_compiles_blocks_along_both_dimensions_of_a_gradient() -> None:
    """MXFP8 in a small model: with horizontal fusion Inductor's try_loop_split ends the compilation."""
    assert compared("precision=bf16_mxfp8 model.num_layers=3")[1] < 0.2


def test_inductors_options() -> None:
    assert compile_options("cpu") is None
    # quantize.limit_horizontal_fusion sets it for every compiled model, a user's too.
    assert torch._inductor.config.cpp.max_horizontal_fusion_size == 1
    assert compile_options("cuda") == {"eager_numerics.division_rounding": True}
    assert torch._inductor.config.eager_numerics.division_rounding is not None


class Scaled(torch.autograd.Function):
    """x times the first factor, its gradient times the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_factor = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g * ctx.backward_factor, None, None


def scale_layers(forward: float, backward: float) -> Callable[[Any], Any]:
    """A compiler whose layers have outputs and gradients that are wrong by a factor."""
    return lambda run: lambda *args: Scaled.apply(run(*args), forward, backward)


@pytest.mark.parametrize(
    ("forward", "backward", "problem"),
    [
        (1.0, 1.1, ""),
        (1.0, 2.0, r"the gradient of .* differs by .*%"),
        (1.0, 0.0, r"the gradient of .* differs by 100.0%"),
        (1.0, math.nan, r"the gradient of .* differs by inf%"),
        (math.nan, 1.0, r"the gradient of .* differs by inf%"),
    ],
)
def test_wrong_gradients_are_an_error(
    monkeypatch: pytest.MonkeyPatch, forward: float, backward: float, problem: str
) -> None:
    compile_with(monkeypatch, scale_layers(forward, backward))
    if problem:
        with pytest.raises(fp8cfg.NotFP8Error, match=problem):
            compared(DELAYED)
    else:
        assert 0.09 < compared(DELAYED)[1] < compile.TOLERANCE


def test_a_wrong_loss_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, lambda run: run)
    losses = iter([torch.tensor(4.0), torch.tensor(4.2)])
    monkeypatch.setattr(compile, "check_pass", lambda *_: next(losses))
    with pytest.raises(fp8cfg.NotFP8Error, match=r"the loss is 4\.2, the eager one 4;"):
        compared(DELAYED)


def test_wrong_gradients_end_a_run_with_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    compile_with(monkeypatch, scale_layers(1.0, 0.0))
    assert main([*SMALL, DELAYED, "trainer.compile=on", f"log.dir={tmp_path}"]) == 3
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "compiles this recipe wrongly: in the first microbatch the gradient of" in line
    assert line.endswith("set trainer.compile=off, or install another torch")
