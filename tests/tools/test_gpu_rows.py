"""Rows of the tools for a GPU: a row over its time budget is stopped and said to be, and the rows after it run."""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg import job
from fp8cfg.backends import first_pass
from fp8cfg.backends.te import rules as te_rules
from fp8cfg.backends.te.build import Maker
from fp8cfg.training import compiled_gradients
from fp8cfg.training.step_sequence import StepSequence
from tests.support import te_standin
from tests.support.forked import processes
from tests.support.small import small, steps
from tools.gpu_rows import bench_cases, bench_measurement, row_error
from tools.gpu_rows.bench_cases import CASES, CONTENDERS, Contender, ModelCase, Runner, unsupported
from tools.gpu_rows.bench_measurement import measure
from tools.gpu_rows.byte_counts import ByteCounts
from tools.gpu_rows.estimate import Device
from tools.gpu_rows.proof import without_proof
from tools.gpu_rows.results import Results
from tools.gpu_rows.shapes import SHAPES
from tools.gpu_rows.worker import Make, NotRun, Row, Worker

TOOL = Path(__file__).parents[2] / "tools" / "bench_gpu.py"
SLEEPS, SLEEPS_TOO = (i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# SLEEPS"))


def _start(made: str) -> Make:
    rows = [made]

    def make(what: str) -> Row:
        if what == "slow":
            time.sleep(600)  # SLEEPS
        if what == "dies":
            os.write(2, b"first\nlast words\n")
            os._exit(7)
        if what == "raises":
            raise KeyError(what)
        if what == "does not fit":
            raise NotRun("needs 40 GiB")
        if what == "has no compiler":
            subprocess.run(["sh", "-c", "echo '  | #include'; echo 'main.c:3: fatal error: Python.h: No such file'; echo ended; exit 1"], stdout=2, check=True)
        if what == "breaks the device":
            torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lambda: 1 / 0  # type: ignore[assignment]
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        rows.append(what)
        return Row([" ".join(rows)])

    return make


def test_a_row_over_its_budget_costs_one_row() -> None:
    with Worker(processes, _start, "made") as worker:
        assert worker.row("a", 60) == (["made a"], False, False, "")
        assert worker.row("b", 60).cells == ["made a b"]  # in the same process
        began = time.monotonic()
        *stopped, where = worker.row("slow", 0.5)
        assert stopped == [["stopped: over its time budget of 0.5 s"], True, True] and f'test_gpu_rows.py", line {SLEEPS} in make' in where
        assert time.monotonic() - began < 30
        assert worker.row("c", 60) == (["made c"], False, False, "")  # in another one
        *raised, where = worker.row("raises", 60)
        assert raised == [["failed: KeyError: 'raises'"], True, False] and where.startswith("Traceback") and "raise KeyError(what)" in where
        assert worker.row("d", 60).cells == ["made c d"]
        assert worker.row("does not fit", 60) == (["not run: needs 40 GiB"], False, False, "")
        compiling = worker.row("has no compiler", 60)
        assert compiling.cells == ["failed: CalledProcessError: sh ended with 1 main.c:3: fatal error: Python.h: No such file"]
        assert compiling.details.endswith("\nended\n") and "KeyError" not in compiling.details
        assert worker.row("breaks the device", 60).failed and not worker.begun
        assert worker.row("e", 60).cells == ["made e"], "no later row meets the error of that one"
        assert worker.row("dies", 60) == (["failed: died with exit code 7 last words"], True, False, "first\nlast words\n")
        assert worker.row("f", 60).cells == ["made f"]


def test_a_row_that_the_time_of_all_rows_stops_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(processes, _start, "made")
    monkeypatch.setattr(worker, "row", lambda what, seconds: Row([f"stopped: over {seconds} s"], True, True))
    rows = [worker.row_in_time("a", 60, left, "no time left").cells[0] for left in (90, 5, 0)]
    assert rows == ["stopped: over 60 s", "stopped: no time left", "not run: no time left"]


def _slow_case(args: argparse.Namespace, name: str) -> Make:
    """The rows of bench_gpu.py, of which one is slow, one gives wrong gradients."""

    def make(what: object) -> Row:
        if str(what) == "native delayed compiled":
            time.sleep(600)  # SLEEPS
        if name == "probe":
            return Row(["failed: torch compiles layers of this recipe wrongly"], failed=True) if what == "row" else Row(["they are equal"])
        ms = "1.00" if "bf16" in str(what) else "0.60"
        return Row([ms, ms, "0.20" if name == "8b" else "-", "1", "1", "-", "-", f"{1 / float(ms):.2f}", "0.0e+00"])

    return make


def test_the_probe_compiles_as_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(bench_measurement, "compare", lambda job: found.append(job.compiler().keywords))
    for compiler in ("inductor", "aot_eager"):
        bench_measurement.probe(argparse.Namespace(device="cpu", compiler=compiler, no_proof=False), "delayed")
    assert found[0] == fp8cfg.build(small("precision=bf16_fp8")).compiler().keywords and found[1]["backend"] == "aot_eager"


HOPPER = ("delayed", "current", "row", "block")


@pytest.mark.slow
def test_the_benchmark_stops_a_slow_row_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = runpy.run_path(str(TOOL))["bench"]
    bench.__globals__["start"] = _slow_case
    args = argparse.Namespace(minutes=1, row_seconds=4.0, only=["native"], cases=["linear", "block", "8b"], probe=True, scalings=HOPPER,
                              capability=(9, 0), goals=True, known=Device.of("h200"))
    results, alive = Results(tmp_path / "rows.txt", sys.stderr), list[int]()
    monkeypatch.setattr(results, "say", lambda text: (alive.append(len(multiprocessing.active_children())), Results.say(results, text)))
    every = bench(args, processes, results)
    assert max(alive) == 1, "processes of several cases have one GPU's memory together"
    rows = {name: {row[7:34].strip(): row[34:].split() for row in found} for name, found in every.items()}
    assert rows["linear"].pop("native delayed compiled") == ["stopped:", "over", "its", "time", "budget", "of", "4", "s"]
    native = [name for name in rows["linear"] if name.startswith("native")]
    assert native == [
        *(f"native {s} compiled" for s in HOPPER[1:]), *(f"native {s} eager" for s in HOPPER)]
    assert rows["linear"]["native current compiled"][-3:] == ["1.67", "0.0e+00", "1.65"] and rows["linear"]["native row compiled"][-1] == "-"
    said = capsys.readouterr().err
    kept = (tmp_path / "rows.txt").read_text().splitlines(keepends=True)
    assert said == "".join(line for line in kept if not line.startswith("    | "))
    assert any(f"line {SLEEPS_TOO} in make" in line for line in kept), "where the slow row was"
    assert " ".join(said.split()).count("- native mxfp8 compiled not run: mxfp8 needs compute capability 10.0, this GPU has 9.0") == 1
    assert "COMPILED GRADIENTS FAILED under row:" in said
    state = {v.row: v.state for v in results.verdicts}
    assert state["linear native delayed compiled"] == "STOPPED" and state["goal linear current"] == state["goal linear block"] == "met"
    assert state["probe row"] == "FAILED" and state["probe delayed"] == state["8b native current compiled"] == "passed"
    assert "8b whole, current: 8 x (8b - optim + 28 x block) + 4.18 x optim = 138 ms, BF16 231 ms: 1.67x, estimated 1.43x\n" in said
    assert results.failures == sum(name in ("FAILED", "STOPPED") for name in state.values()) == 4


def test_what_is_left_of_a_killed_run_is_every_row_that_came(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.txt", io.StringIO())
    for row in ("first", "second"):
        results.say(row)
        assert (tmp_path / "rows.txt").read_text().splitlines()[-1] == row
    others = Results(tmp_path / "rows.txt", io.StringIO())
    others.say("third")
    others.row("third", Row(["failed: KeyError"], True, details="where\n\nit was"))
    assert (tmp_path / "rows.txt").read_text() == "first\nsecond\nthird\n    | where\n    | \n    | it was\n"


def test_the_summary_says_what_wants_attention_first_and_why() -> None:
    results = Results()
    results.row("a", Row(["1.0", "2.0"]))
    results.row("b", Row(["not run: te is not installed"]))
    results.row("c", Row(["not run: te is not installed"]))
    results.row("d", Row(["stopped: over its time budget of 4 s"], True, True))
    results.row("e", Row(["failed: KeyError: 'k'"], True, details="Traceback"))
    results.goal("linear delayed", 1.7, 1.75, 1.85)
    results.goal("linear block", 1.5, 1.45)
    assert results.summary().splitlines() == [
        "", "summary: 1 FAILED, 1 STOPPED, 1 MISSED, 2 not run, 1 met, 1 passed",
        "FAILED  e: KeyError: 'k'", "STOPPED d: over its time budget of 4 s", "MISSED  goal linear delayed: 1.70x of 1.75x, estimated 1.85x",
        "not run b, c: te is not installed", "met     goal linear block: 1.50x of 1.45x", "passed  a"]


def test_what_a_gpu_has_no_products_for_is_not_run() -> None:
    ran = {capability: {c.scaling for c in CONTENDERS if c.backend == "native" and not unsupported(c.scaling, capability)}
           for capability in ((8, 0), (8, 9), (9, 0), (10, 0), None)}
    assert ran == {(8, 0): set(), (8, 9): {"delayed", "current", "row"}, (9, 0): set(HOPPER), None: set(HOPPER),
                   (10, 0): {"delayed", "current", "row", "mxfp8", "nvfp4"}}


def test_a_model_that_does_not_fit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cases, "free_memory", lambda device: 1 << 20)
    with pytest.raises(NotRun, match=r"^recipe=llama_tiny: needs .* this machine has 1\.0 MiB free on cpu$"):
        ModelCase(argparse.Namespace(device="cpu"), SHAPES[True]["8b"])


def test_a_ratio_is_over_bf16_alone() -> None:
    """Where BF16 did not run, a contender has none, and is nobody's base."""
    runner = Runner(lambda: sum(range(10_000)), lambda: {"y": [torch.ones(1)]})
    case: Any = SimpleNamespace(runner=lambda contender: runner, want=runner.found(), flops=1.0, tokens=1)
    pairs = ((CONTENDERS[2], None), (CONTENDERS[0], None), (CONTENDERS[2], runner))
    ratios = [measure(case, contender, base, "cpu")[1][7] for contender, base in pairs]
    assert ratios[0] == "-" and float(ratios[1]) > 0 and float(ratios[2]) > 0


def _case(**wrong: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A case whose every contender makes of the gradients of these names what the functions do."""
    want = {name: [torch.arange(8.0) + 1, torch.ones(3)] for name in ("y", "dx", "dw")}
    found = {name: [wrong.get(name, torch.clone)(t) for t in tensors] for name, tensors in want.items()}
    return SimpleNamespace(runner=lambda contender: Runner(lambda: None, lambda: found), want=want, flops=1.0, tokens=1)


def _nan_at_its_end(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t[:-1], torch.tensor([torch.nan])])


@pytest.mark.parametrize("scaling", ["bf16", "delayed", "block", "tensorwise", "nvfp4"])
@pytest.mark.parametrize(("name", "wrong", "text"), [
    ("dx", _nan_at_its_end, "nan"), ("dw", torch.neg, "2.0e+00"), ("dx", torch.zeros_like, "1.0e+00"), ("y", lambda t: t.flip(0), "9.0e-01")])
def test_what_computes_something_else_has_no_speed(
    name: str, wrong: Callable[[torch.Tensor], torch.Tensor], text: str, scaling: str
) -> None:
    contender = Contender("native", scaling, True)
    with pytest.raises(ArithmeticError, match=rf"^error {re.escape(text)}.* is above 0\.\d+, the limit of {scaling}"):
        measure(_case(**{name: wrong}), contender, None, "cpu")
    assert measure(_case(), contender, None, "cpu")[1][-1] == "0.0e+00"
    assert len(measure(_case(**{name: wrong}), contender, None, "cpu", proof=False)[1]) == 9, "the fake GPU computes nothing"


def _wrong_case(args: argparse.Namespace, name: str) -> Make:
    """The rows of bench_gpu.py, all of them with gradients of the other sign."""
    bench_cases.CASES[name] = lambda args, shape: _case(dw=torch.neg)
    return bench_measurement.start(args, name)


def test_a_wrong_row_fails_and_reaches_no_goal() -> None:
    """So does a wrong base: nothing is over it."""
    args = argparse.Namespace(minutes=1.0, row_seconds=60.0, only=["delayed"], cases=["linear"], probe=False, scalings=[], capability=(9, 0), goals=True,
                              known=None, device="cpu", small=True, no_proof=False)
    bench, results = runpy.run_path(str(TOOL))["bench"], Results(stream=io.StringIO())
    bench.__globals__["start"] = _wrong_case
    bench(args, processes, results)
    states = {v.row: v.state for v in results.verdicts if "te " not in v.row}
    assert states == dict.fromkeys(["linear torch bf16 compiled", "linear native delayed compiled", "linear native delayed eager"], "FAILED")
    why, = {v.why for v in results.verdicts if v.row.startswith("linear native")}
    assert why == "error 2.0e+00, beside a float32 run, is above 0.3, the limit of delayed: its speed means nothing"


@pytest.mark.parametrize("scaling", [*bench_cases.SCALINGS])
def test_limits_are_some_times_what_emulated_products_have(scaling: str) -> None:
    torch.manual_seed(0)
    case = bench_cases.linear_case(argparse.Namespace(device="cpu"), (256, 128, 256))
    runner = case.runner(Contender("native", scaling, False))
    runner.step()
    wrong = row_error.right(row_error.error(runner.found(), case.want), scaling)
    assert 3 * wrong < row_error.LIMITS.get(scaling, row_error.LIMIT_FP8) < 9 * wrong


@pytest.mark.parametrize(("name", "module"), [("linear", "Linear"), ("block", "TransformerLayer")])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_te_runs_as_fp8cfg_converts_a_layer_to_it(name: str, module: str, scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _te_modules(monkeypatch)
    case, contender = CASES[name](argparse.Namespace(device="cpu"), SHAPES[True][name]), Contender("te", scaling, False)
    with te_standin.transformer_engine():
        _, cells = measure(case, contender, None, "cpu")
    assert float(cells[-1]) < 0.1 and made == {module}


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_native_and_te_train_a_model_by_one_recipe(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, where both could: auto takes Transformer Engine first."""
    made, jobs, build = _te_modules(monkeypatch), list[fp8cfg.Job](), fp8cfg.build
    monkeypatch.setattr(fp8cfg, "build", lambda recipe: jobs.append(build(recipe)) or jobs[-1])
    with te_standin.transformer_engine():
        case = ModelCase(argparse.Namespace(device="cpu"), SHAPES[True]["8b"])
        cells = [measure(case, Contender(backend, scaling, False), None, "cpu")[1] for backend in ("native", "te")]
        bench_measurement.probe(argparse.Namespace(device="cpu", compiler="aot_eager", no_proof=False), scaling)
    assert all(float(row[-1]) < 0.1 and row[6] != "-" for row in cells) and made == {"TransformerLayer"}
    _, native, te, probed = jobs
    assert [job.recipe.backend for job in (native, te, probed)] == ["native", "te", "native"]
    assert native.recipe.fp8.params and te.recipe.precision == native.recipe.precision.model_copy(update={"backend": "te"})


def _te_modules(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The classes of Transformer Engine's modules that ran from here on; its rules find it and a GPU."""
    monkeypatch.setattr(te_rules, "_hardware_lacks", lambda precision, hardware: [])
    monkeypatch.setattr(te_rules, "unavailable", lambda: "")
    made = set[str]()
    built = Maker.built
    monkeypatch.setattr(Maker, "built", lambda self, kind, *args, **options: made.add(kind) or built(self, kind, *args, **options))
    return made


def test_steps_of_a_model_are_taken_as_fit_takes_them_and_their_optimizer_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the same samples each time, with weights that stay as they are."""
    taken = []
    take = StepSequence.take
    monkeypatch.setattr(StepSequence, "take", lambda *given, settled: (taken.append((given[1], settled)), take(*given, settled)))
    case = ModelCase(argparse.Namespace(device="cpu"), SHAPES[True]["8b"])
    runner = case.runner(CONTENDERS[1])
    began = time.process_time()
    runner.step()
    assert taken == [(0, False)] * 2 and runner.optimizer and 0 < runner.optimizer() < time.process_time() - began
    assert float(measure(case, CONTENDERS[1], None, "cpu")[1][2]) > 0


def test_a_whole_step_has_one_optimizer() -> None:
    tool, results = runpy.run_path(str(TOOL)), Results(stream=io.StringIO())
    taken = {("8b", "bf16"): (100.0, 0.0, 50.0), ("8b", "delayed"): (90.0, 0.0, 50.0),
             ("block", "bf16"): (10.0, 0.0, 0.0), ("block", "delayed"): (8.0, 0.0, 0.0)}
    tool["whole"](taken, argparse.Namespace(goals=False, known=None), results)
    said = results._stream
    assert isinstance(said, io.StringIO)
    more = 8030261248 / 1923108864  # of the whole, and of the cut
    bf16, delayed = 8 * (50 + 28 * 10) + more * 50, 8 * (40 + 28 * 8) + more * 50
    how = f"8 x (8b - optim + 28 x block) + {more:.2f} x optim"
    assert said.getvalue() == f"8b whole, delayed: {how} = {delayed:,.0f} ms, BF16 {bf16:,.0f} ms: {bf16 / delayed:.2f}x\n"


@pytest.mark.parametrize(("only", "names", "scalings"), [
    (["te"], ["torch bf16 compiled", *(f"te {s} eager" for s in ("delayed", "current", "block"))], []),
    (["row", "rowwise"], ["torch bf16 compiled", "native row compiled", "torchao rowwise compiled", "native row eager"], ["row"]),
    (["row"], ["torch bf16 compiled", "native row compiled", "native row eager"], ["row"]),
    (["bf16"], ["torch bf16 compiled", "torch bf16 eager"], []), (["ow"], ["torch bf16 compiled"], [])])
def test_only_takes_whole_words(only: list[str], names: list[str], scalings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contender, "missing", lambda self, capability: unsupported(self.scaling, (9, 0)))
    tool = runpy.run_path(str(TOOL))
    args = tool["parse"](["--device", "cpu", "--small", "--only", *only])
    assert [str(c) for c in tool["present"](args, Results(stream=io.StringIO()))] == names and args.scalings == scalings


def test_when_the_time_is_over_nothing_begins() -> None:
    bench = runpy.run_path(str(TOOL))["bench"]
    args = argparse.Namespace(minutes=0.0, row_seconds=1.0, only=["bf16"], cases=["linear", "8b"], probe=True, scalings=[],
                              capability=None, goals=False, known=None)
    results = Results()
    rows = bench(args, processes, results)
    assert results.failures == 0 and all("not run: no time left, of 0 minutes" in row for row in rows["linear"] + rows["8b"])
    assert [len(rows[name]) for name in ("probe", "linear", "8b")] == [0, 2, 2]


def test_without_proof_a_run_that_multiplies_nothing_in_fp8_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the fake GPU, whose products leave no record."""
    for module, name in ((first_pass, "check"), (first_pass, "_look"), (job, "prove_engagement")):
        monkeypatch.setattr(module, name, getattr(module, name))  # and so put back
    monkeypatch.setattr(job.Job, "_observed", job.Job._observed)
    monkeypatch.setattr(compiled_gradients, "TOLERANCE", dict(compiled_gradients.TOLERANCE))
    without_proof()
    made = fp8cfg.build(small("precision=bf16_fp8"))
    made.prepared.region.active = False
    monkeypatch.setattr(fp8cfg.Job, "autocast", lambda self, enabled=True: nullcontext())
    assert [s.stepped for s in steps(made, 2)] == [True, True] and made.prove().share == 0


def test_differing_bytes_are_counted_by_what_they_are() -> None:
    counts, of = ByteCounts(), torch.tensor
    counts.compare("data", of([1.0, 2.0, torch.nan]).to(torch.float8_e5m2), of([1.0, 2.0, -torch.nan]).to(torch.float8_e5m2), "NaN")
    assert counts.verdict() == "0 of 3 bytes of data differ"
    counts.compare("scales", of([1.0, 0.0]), of([1.0, -0.0]), "zeros")
    counts.compare("data", of([1, 3], dtype=torch.uint8), of([1, 2], dtype=torch.uint8), "bytes")
    with pytest.raises(ArithmeticError, match=r"^1 of 5 bytes of data, 1 of 8 bytes of scales differ; the first are scales of zeros$"):
        counts.verdict()
    for other in (None, torch.ones(2, 1), torch.ones(2, dtype=torch.float16)):
        with pytest.raises(ArithmeticError, match=r"^data of one are "):
            counts.compare("data", torch.ones(2), other, "one")
