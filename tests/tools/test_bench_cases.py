"""Cases of tools/bench_gpu.py: what a contender runs, how its steps are taken, and that a wrong one has no speed."""

from __future__ import annotations

import argparse
import io
import re
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.backends.te import rules
from fp8cfg.backends.te.engine_builder import EngineBuilder
from tests.support import te_standin
from tests.support.forked import processes
from tools.gpu_rows import bench_cases, bench_measurement, row_error
from tools.gpu_rows.bench_cases import CASES, ModelCase, Runner
from tools.gpu_rows.bench_measurement import measure
from tools.gpu_rows.contenders import CONTENDERS, SCALINGS, Contender
from tools.gpu_rows.fit_steps import FitSteps
from tools.gpu_rows.results import Results
from tools.gpu_rows.shapes import SHAPES
from tools.gpu_rows.worker import Make, NotRun

TOOL = Path(__file__).parents[2] / "tools" / "bench_gpu.py"


def test_a_model_that_does_not_fit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cases, "free_memory", lambda device: 1 << 20)
    with pytest.raises(
        NotRun, match=r"^recipe=llama_tiny: needs .* this machine has 1\.0 MiB free on cpu$"
    ):
        ModelCase(argparse.Namespace(device="cpu"), SHAPES[True]["8b"])


def test_a_ratio_is_over_bf16_alone() -> None:
    """Where BF16 did not run, a contender has none, and is nobody's base."""
    runner = Runner(lambda: sum(range(10_000)), lambda: {"y": [torch.ones(1)]})
    case: Any = SimpleNamespace(
        runner=lambda contender: runner, want=runner.found(), flops=1.0, tokens=1
    )
    pairs = ((CONTENDERS[2], None), (CONTENDERS[0], None), (CONTENDERS[2], runner))
    ratios = [measure(case, contender, base, "cpu")[1][7] for contender, base in pairs]
    assert ratios[0] == "-" and float(ratios[1]) > 0 and float(ratios[2]) > 0


def _case(**wrong: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A case whose every contender makes of the gradients of these names what the functions do."""
    want = {name: [torch.arange(8.0) + 1, torch.ones(3)] for name in ("y", "dx", "dw")}
    found = {
        name: [wrong.get(name, torch.clone)(t) for t in tensors] for name, tensors in want.items()
    }
    return SimpleNamespace(
        runner=lambda contender: Runner(lambda: None, lambda: found), want=want, flops=1.0, tokens=1
    )


def _nan_at_its_end(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t[:-1], torch.tensor([torch.nan])])


@pytest.mark.parametrize("scaling", ["bf16", "delayed", "block", "tensorwise", "nvfp4"])
@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("dx", _nan_at_its_end, "nan"),
        ("dw", torch.neg, "2.0e+00"),
        ("dx", torch.zeros_like, "1.0e+00"),
        ("y", lambda t: t.flip(0), "9.0e-01"),
    ],
)
def test_what_computes_something_else_has_no_speed(
    name: str, wrong: Callable[[torch.Tensor], torch.Tensor], text: str, scaling: str
) -> None:
    contender = Contender("native", scaling, True)
    with pytest.raises(
        ArithmeticError,
        match=rf"^error {re.escape(text)}.* is above 0\.\d+, the limit of {scaling}",
    ):
        measure(_case(**{name: wrong}), contender, None, "cpu")
    assert measure(_case(), contender, None, "cpu")[1][-1] == "0.0e+00"
    assert len(measure(_case(**{name: wrong}), contender, None, "cpu", proof=False)[1]) == 9, (
        "the fake GPU computes nothing"
    )


@pytest.mark.parametrize("scaling", [*SCALINGS])
def test_limits_are_some_times_what_emulated_products_have(scaling: str) -> None:
    torch.manual_seed(0)
    case = bench_cases.linear_case(argparse.Namespace(device="cpu"), (256, 128, 256))
    runner = case.runner(Contender("native", scaling, False))
    runner.step()
    wrong = row_error.right(row_error.error(runner.found(), case.want), scaling)
    assert 3 * wrong < row_error.LIMITS.get(scaling, row_error.LIMIT_FP8) < 9 * wrong


@pytest.mark.parametrize(("name", "module"), [("linear", "Linear"), ("block", "TransformerLayer")])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_te_runs_as_fp8cfg_converts_a_layer_to_it(
    name: str, module: str, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _te_modules(monkeypatch)
    case, contender = (
        CASES[name](argparse.Namespace(device="cpu"), SHAPES[True][name]),
        Contender("te", scaling, False),
    )
    with te_standin.transformer_engine():
        _, cells = measure(case, contender, None, "cpu")
    assert float(cells[-1]) < 0.1 and made == {module}


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_native_and_te_train_a_model_by_one_recipe(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself, where both could: auto takes Transformer Engine first."""
    made, jobs, build = _te_modules(monkeypatch), list[fp8cfg.Job](), fp8cfg.build
    monkeypatch.setattr(fp8cfg, "build", lambda recipe: jobs.append(build(recipe)) or jobs[-1])
    with te_standin.transformer_engine():
        case = ModelCase(argparse.Namespace(device="cpu"), SHAPES[True]["8b"])
        cells = [
            measure(case, Contender(backend, scaling, False), None, "cpu")[1]
            for backend in ("native", "te")
        ]
        bench_measurement.probe(
            argparse.Namespace(device="cpu", compiler="aot_eager", no_proof=False), scaling
        )
    assert all(float(row[-1]) < 0.1 and row[6] != "-" for row in cells) and made == {
        "TransformerLayer"
    }
    _, native, te, probed = jobs
    assert [job.recipe.backend for job in (native, te, probed)] == ["native", "te", "native"]
    assert native.recipe.fp8.params and te.recipe.precision == native.recipe.precision.model_copy(
        update={"backend": "te"}
    )


def _te_modules(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The classes of Transformer Engine's modules that ran from here on; its rules find it and a GPU."""
    monkeypatch.setattr(rules, "_hardware_lacks", lambda precision, hardware: [])
    monkeypatch.setattr(rules, "unavailable", lambda: "")
    made = set[str]()
    build_module = EngineBuilder.build_module
    monkeypatch.setattr(
        EngineBuilder,
        "build_module",
        lambda self, kind, *args, **options: (
            made.add(kind) or build_module(self, kind, *args, **options)
        ),
    )
    return made


def test_steps_of_a_model_are_taken_as_fit_takes_them_and_their_optimizer_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the same samples each time, with weights that stay as they are."""
    taken = []
    take = FitSteps.take
    monkeypatch.setattr(
        FitSteps, "take", lambda steps, step: (taken.append(step), take(steps, step))
    )
    case = ModelCase(argparse.Namespace(device="cpu"), SHAPES[True]["8b"])
    runner = case.runner(CONTENDERS[1])
    began = time.process_time()
    runner.step()
    assert (
        taken == [0] * 2
        and runner.optimizer
        and 0 < runner.optimizer() < time.process_time() - began
    )
    assert float(measure(case, CONTENDERS[1], None, "cpu")[1][2]) > 0


def _wrong_case(args: argparse.Namespace, name: str) -> Make:
    """The rows of bench_gpu.py, all of them with gradients of the other sign."""
    bench_cases.CASES[name] = lambda args, shape: _case(dw=torch.neg)
    return bench_measurement.start(args, name)


def test_a_wrong_row_fails_and_reaches_no_goal() -> None:
    """So does a wrong base: nothing is over it."""
    args = argparse.Namespace(
        minutes=1.0,
        row_seconds=60.0,
        only=["delayed"],
        cases=["linear"],
        probe=False,
        scalings=[],
        capability=(9, 0),
        goals=True,
        known=None,
        device="cpu",
        small=True,
        no_proof=False,
    )
    bench, results = runpy.run_path(str(TOOL))["bench"], Results(stream=io.StringIO())
    bench.__globals__["start"] = _wrong_case
    bench(args, processes, results)
    states = {v.row: v.state for v in results.verdicts if "te " not in v.row}
    assert states == dict.fromkeys(
        [
            "linear torch bf16 compiled",
            "linear native delayed compiled",
            "linear native delayed eager",
        ],
        "FAILED",
    )
    (why,) = {v.why for v in results.verdicts if v.row.startswith("linear native")}
    assert (
        why
        == "error 2.0e+00, beside a float32 run, is above 0.3, the limit of delayed: its speed means nothing"
    )
