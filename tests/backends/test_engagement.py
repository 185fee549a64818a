"""The proof that a given model ran in FP8: what ran outside of the context, how much each layer multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8cfg
from fp8cfg.conversion.convert import Conversion
from tests.support.convert_models import BACKENDS, recipe
from tests.support.traced import TRACE

OUTSIDE = (
    r"layers\.1 \(fprop, dgrad, wgrad\): planned in FP8, ran in high precision, outside of the autocast context; layers\.2 .* "
    "and 6 more"
)


class Ten(nn.Module):
    """Ten linear layers, or so many, of which the first alone runs in FP8, in one of three ways."""

    def __init__(self, way: str = "", layers: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.way = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers)), way
        self.fp8: Any = None

    def rest(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.way == "disabled":
            with self.fp8.autocast(False):
                return self.rest(x)
        return x if self.way == "left out" else self.rest(x)


def ten(
    backend: str, way: str = "", *words: str, layers: int = 10
) -> tuple[Ten, Conversion, Tensor]:
    model = Ten(way, layers)
    model.fp8 = fp8cfg.convert_model(model, recipe(*words, backend=backend))
    return model, model.fp8, torch.randn(16, 32, requires_grad=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["outside", "disabled"])
def test_a_layer_that_ran_outside_of_the_context_is_named(backend: str, way: str) -> None:
    model, fp8, x = ten(backend, way)
    with fp8.autocast():
        y = model.layers[0](x) if way == "outside" else model(x)
    (model.rest(y) if way == "outside" else y).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match=OUTSIDE):
        fp8.prove()
    assert (
        str(fp8cfg.coverage(model)).count("high precision: ran outside of the autocast context")
        == 9
    )
    model.way = ""
    with fp8.autocast():
        model(x).sum().backward()
    fp8.prove()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autowrap_finds_it_out_too(backend: str) -> None:
    model, _, x = ten(backend, "disabled")
    fp8cfg.apply_fp8_autowrap(model, recipe(backend=backend))
    model(x).sum().backward()
    with pytest.raises(
        fp8cfg.NotFP8Error,
        match=r"layers\.1 \(fprop, dgrad, wgrad\): planned in FP8, ran in high precision",
    ):
        model(x)


def test_autowrap_finds_it_out_under_a_wrappers_names() -> None:
    model, _, x = ten("native", "disabled")
    wrapper = nn.Sequential(model)
    fp8cfg.apply_fp8_autowrap(wrapper, recipe())
    wrapper(x).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match=r"0\.layers\.1 \(fprop"):
        wrapper(x)


def test_a_jobs_model_is_found_out_too() -> None:
    job = fp8cfg.build(recipe("precision.compute=fp32"), model=Ten("disabled"))
    job.model.fp8 = job
    with job.autocast():
        job.backward(job.model(torch.randn(16, 32, requires_grad=True)).sum())
    with pytest.raises(
        fp8cfg.NotFP8Error, match=r"layers\.1 \(fprop, dgrad, wgrad\): planned in FP8"
    ):
        job.prove()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["no_grad", "eval", "eval and no_grad", "left out"])
def test_evaluations_and_layers_left_out_are_no_failure(backend: str, way: str) -> None:
    model, fp8, x = ten(backend)
    with fp8.autocast():
        (model.layers[0](x) if way == "left out" else model(x)).sum().backward()
    model.train("eval" not in way)
    if way != "left out":
        with torch.set_grad_enabled("no_grad" not in way):
            model(x)
    fp8.prove()
    found = fp8cfg.coverage(model).linears
    assert [bool(p.gemms[0]) for p in found] == [True] + [way != "left out"] * 9
    assert way != "left out" or found[1].gemms == (None, None, None), (
        "did not run, which is not high precision"
    )


def test_training_in_evaluation_mode_shows_in_its_backward_pass() -> None:
    model, fp8, x = ten("native", "disabled")
    model.eval()
    with fp8.autocast():
        model(x).sum().backward()
    with pytest.raises(
        fp8cfg.NotFP8Error,
        match=r"layers\.1 \(dgrad, wgrad\): planned in FP8, ran in high precision",
    ):
        fp8.prove()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_it_is_found_out_and_nothing_is_compiled_anew(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, fp8, x = ten(backend, layers=3)
    run = TRACE(model)
    for _ in range(3):
        with fp8.autocast():
            run(x).sum().backward()
    fp8.prove()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [p.rows for p in fp8cfg.coverage(model).linears] == [None] * 3, "sizes alone are known"
    with fp8.autocast():
        y = model.layers[0](x).detach().requires_grad_()
    TRACE(model.rest)(y).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match=r"layers\.1 \(fprop, dgrad, wgrad\)"):
        fp8.prove()
    torch._dynamo.reset()


# How much each layer multiplies.


def patches(backend: str = "native", *words: str) -> tuple[nn.ModuleList, Conversion]:
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(512, 512)])
    return model, fp8cfg.convert_model(model, recipe("fp8.exclude=['0']", *words, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_weighs_as_much_as_it_multiplied(backend: str) -> None:
    model, fp8 = patches(backend, "fp8.min_coverage=0.5")
    assert "98.5% of the linear layers' FLOPs" in str(fp8), "nothing ran yet: sizes alone are known"
    for _ in range(2):
        with fp8.autocast():
            (
                model[0](input=torch.randn(4, 2048, 64)).sum()
                + model[1](torch.randn(8, 512, requires_grad=True)).sum()
            ).backward()
    seen = fp8cfg.coverage(model)
    assert [p.rows for p in seen.linears] == [16384, 16] and seen.share == pytest.approx(
        16 * 512**2 / (16 * 512**2 + 16384 * 64**2)
    )
    with pytest.raises(
        fp8cfg.NotFP8Error,
        match=r"fp8\.min_coverage=0\.5: 5\.9% of the linear layers' FLOPs ran in FP8",
    ):
        fp8.prove()


def test_what_is_done_again_or_evaluated_does_not_count() -> None:
    model, fp8 = patches()
    x, y = torch.randn(16, 64, requires_grad=True), torch.randn(16, 512, requires_grad=True)
    with fp8.autocast():
        for reentrant in (False, True):
            (checkpoint(model[0], x, use_reentrant=reentrant).sum() + model[1](y).sum()).backward()
        model.eval()
        with torch.no_grad():
            model[0](x)
    assert [p.rows for p in fp8cfg.coverage(model).linears] == [32, 32]


def test_a_layer_that_nobody_saw_weighs_as_the_one_that_saw_most() -> None:
    model, fp8 = patches()
    with fp8.autocast():
        model[1](torch.randn(16, 512, requires_grad=True)).sum().backward()
    assert fp8cfg.coverage(model).share == pytest.approx(512**2 / (512**2 + 64**2))


def test_converted_back_nothing_of_it_is_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(64, 64, 1), nn.Linear(64, 10))
    fp8cfg.convert_model(model, recipe())
    assert model[2]._forward_pre_hooks and model[1]._forward_hooks
    fp8cfg.convert_back(model)
    assert not any(
        hooks
        for m in model
        for hooks in (m._forward_pre_hooks, m._forward_hooks, m._forward_pre_hooks_with_kwargs)
    )
