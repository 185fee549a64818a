"""Compiled gradients against eager ones before a compiled run trains, with compilers that are quick, or wrong."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.backends.compiled_layers import compile_options
from fp8cfg.building.job import Job
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.training import compile
from tests.support.small import SMALL, small
from tests.support.traced import TRACE


def compiled_by(monkeypatch: pytest.MonkeyPatch, compiler: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(Job, "compiler", lambda job: compiler)


def zero_gradients(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What torch 2.11 made of a layer: the right output, and gradients of 0."""

    def wrong(*args: Any) -> torch.Tensor:
        y = run(*args)
        y.register_hook(torch.zeros_like)
        return y

    return wrong


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16_fp8",
        pytest.param("precision=bf16_nvfp4 model.num_layers=16", marks=pytest.mark.slow),
        pytest.param("precision=fp16_fp8 opt_level=O2", marks=pytest.mark.slow),
        "precision=bf16 storage.weight=fp8",
        "precision=bf16_fp8_current backend=torchao fp8.params=false model.num_layers=3",
    ],
)
def test_compiled_layers_give_the_eager_bits_and_move_nothing(
    monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    compiled_by(monkeypatch, TRACE)  # Dynamo and AOTAutograd made the zeros of torch 2.11
    if "torchao" in words:
        pytest.importorskip("torchao")
    job = fp8cfg.build(small(*words.split()))
    state, random = (
        {k: v.clone() for k, v in stored_state_dict(job.model).items()},
        torch.get_rng_state(),
    )
    assert compile.compare(job) == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(
        torch.equal(v.view(torch.uint8), state[k].view(torch.uint8))
        for k, v in stored_state_dict(job.model).items()
        if v.dim()
    )
    assert all(p.grad is None for p in job.model.parameters())


@pytest.mark.slow
def test_inductor_compiles_blocks_along_both_dimensions_of_a_gradient() -> None:
    """Of which there are more outputs than tokens: where Inductor fuses both, its try_loop_split ends the compilation."""
    assert compile.compare(fp8cfg.build(small("precision=bf16_mxfp8"))) == 0


@pytest.mark.parametrize("scaling", SCALINGS)
def test_inductors_options(scaling: str) -> None:
    precision = small("precision=bf16_fp8", f"fp8.scaling={scaling}").precision
    options = compile_options(precision, "cpu") or {}
    assert bool(options) == (scaling in ("block", "mxfp8", "nvfp4"))
    for name in [*options, *(compile_options(precision, "cuda") or {})]:
        assert functools.reduce(getattr, name.split("."), torch._inductor.config) is not None, (
            "of this torch"
        )
    assert compile_options(small("precision=bf16").precision, "cpu") is None


def test_a_model_of_torchs_own_layers_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_by(monkeypatch, zero_gradients)
    assert compile.compare(fp8cfg.build(small("precision=bf16"))) is None


def test_comparisons_of_a_process_do_not_add_up_for_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_by(monkeypatch, partial(torch.compile, backend="eager", fullgraph=True, dynamic=False))
    job = fp8cfg.build(small("precision=bf16_fp8"))
    with torch._dynamo.config.patch(recompile_limit=1, error_on_recompile=True):
        assert [compile.compare(job) for _ in range(3)] == [0, 0, 0]


def test_gradients_of_0_end_a_run_with_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    compiled_by(monkeypatch, zero_gradients)
    assert main([*SMALL, "precision=bf16_fp8", "trainer.compile=on", f"log.dir={tmp_path}"]) == 3
    lines = capsys.readouterr().err.strip().splitlines()
    assert (
        len(lines) == 1
        and "compiles layers of this recipe wrongly: the input's gradient of one is 100.00% away"
        in lines[0]
    )
    assert "write trainer.compile=off, or install another torch" in lines[0]


class Scaled(torch.autograd.Function):
    """x times the first factor, its gradient times the second."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_factor = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return g * ctx.backward_factor, None, None


@pytest.mark.parametrize(
    ("forward", "backward", "wrong"),
    [
        (1.001, 0.999, ""),
        (1.02, 1.0, "output of one is 2.00%"),
        (1.0, 0.98, "gradient of one is 2.00%"),
        (1.0, math.nan, "gradient of one is inf%"),
        (math.nan, 1.0, "output of one is inf%"),
    ],
)
def test_the_tolerance_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, forward: float, backward: float, wrong: str
) -> None:
    """Its figure alone, on a CPU: a share of what a tensor is, whichever differs."""
    compiled_by(monkeypatch, lambda run: lambda x: Scaled.apply(run(x), forward, backward))
    job = fp8cfg.build(
        small(
            "precision=bf16_fp8_current",
            "precision.compute=fp32",
            "model.num_layers=3",
            "fp8.use_power_2_scales=false",
        )
    )
    monkeypatch.setitem(compile.TOLERANCE, "cpu", compile.TOLERANCE["cuda"])
    if wrong:
        with pytest.raises(fp8cfg.NotFP8Error, match=wrong):
            compile.compare(job)
    else:
        assert compile.compare(job) == pytest.approx(0.001, rel=0.1)
