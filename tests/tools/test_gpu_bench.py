"""Rows of tools/bench_gpu.py: their time, goals and words, and what is put together from them."""

from __future__ import annotations

import argparse
import io
import multiprocessing
import runpy
import sys
import time
from pathlib import Path

import pytest

import fp8cfg
from tests.support.forked import processes
from tests.support.small import small
from tools.gpu_rows import bench_measurement
from tools.gpu_rows.contenders import CONTENDERS, Contender, unsupported
from tools.gpu_rows.estimate import Device
from tools.gpu_rows.results import Results
from tools.gpu_rows.worker import Make, Row

TOOL = Path(__file__).parents[2] / "tools" / "bench_gpu.py"
(SLEEPS,) = (
    i
    for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.endswith("# SLEEPS")
)


def _slow_case(args: argparse.Namespace, name: str) -> Make:
    """The rows of bench_gpu.py, of which one is slow, one gives wrong gradients."""

    def make(what: object) -> Row:
        if str(what) == "native delayed compiled":
            time.sleep(600)  # SLEEPS
        if name == "probe":
            return (
                Row(["failed: torch compiles layers of this recipe wrongly"], failed=True)
                if what == "row"
                else Row(["they are equal"])
            )
        ms = "1.00" if "bf16" in str(what) else "0.60"
        return Row(
            [
                ms,
                ms,
                "0.20" if name == "8b" else "-",
                "1",
                "1",
                "-",
                "-",
                f"{1 / float(ms):.2f}",
                "0.0e+00",
            ]
        )

    return make


def test_the_probe_compiles_as_a_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(
        bench_measurement, "compare", lambda job, *_: found.append(job.compiler().keywords) or 0.0
    )
    for compiler in ("inductor", "aot_eager"):
        bench_measurement.probe(
            argparse.Namespace(device="cpu", compiler=compiler, no_proof=False), "delayed"
        )
    assert (
        found[0] == fp8cfg.build(small("precision=bf16_fp8")).compiler().keywords
        and found[1]["backend"] == "aot_eager"
    )


HOPPER = ("delayed", "current", "row", "block")


@pytest.mark.slow
def test_the_benchmark_stops_a_slow_row_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = runpy.run_path(str(TOOL))["bench"]
    bench.__globals__["start"] = _slow_case
    args = argparse.Namespace(
        minutes=1,
        row_seconds=4.0,
        only=["native"],
        cases=["linear", "block", "8b"],
        probe=True,
        scalings=HOPPER,
        capability=(9, 0),
        goals=True,
        known=Device.of("h200"),
    )
    results, alive = Results(tmp_path / "rows.txt", sys.stderr), list[int]()
    monkeypatch.setattr(
        results,
        "say",
        lambda text: (
            alive.append(len(multiprocessing.active_children())),
            Results.say(results, text),
        ),
    )
    every = bench(args, processes, results)
    assert max(alive) == 1, "processes of several cases have one GPU's memory together"
    rows = {
        name: {row[7:34].strip(): row[34:].split() for row in found}
        for name, found in every.items()
    }
    assert rows["linear"].pop("native delayed compiled") == [
        "stopped:",
        "over",
        "its",
        "time",
        "budget",
        "of",
        "4",
        "s",
    ]
    native = [name for name in rows["linear"] if name.startswith("native")]
    assert native == [
        *(f"native {s} compiled" for s in HOPPER[1:]),
        *(f"native {s} eager" for s in HOPPER),
    ]
    assert (
        rows["linear"]["native current compiled"][-3:] == ["1.67", "0.0e+00", "1.65"]
        and rows["linear"]["native row compiled"][-1] == "-"
    )
    said = capsys.readouterr().err
    kept = (tmp_path / "rows.txt").read_text().splitlines(keepends=True)
    assert said == "".join(line for line in kept if not line.startswith("    | "))
    assert any(f"line {SLEEPS} in make" in line for line in kept), "where the slow row was"
    assert (
        " ".join(said.split()).count(
            "- native mxfp8 compiled not run: mxfp8 needs compute capability 10.0, this GPU has 9.0"
        )
        == 1
    )
    assert "COMPILED GRADIENTS FAILED under row:" in said
    state = {v.row: v.state for v in results.verdicts}
    assert (
        state["linear native delayed compiled"] == "STOPPED"
        and state["goal linear current"] == state["goal linear block"] == "met"
    )
    assert (
        state["probe row"] == "FAILED"
        and state["probe delayed"] == state["8b native current compiled"] == "passed"
    )
    assert (
        "8b whole, current: 8 x (8b - optim + 28 x block) + 4.18 x optim = 138 ms, BF16 231 ms: 1.67x, estimated 1.43x\n"
        in said
    )
    assert results.failures == sum(name in ("FAILED", "STOPPED") for name in state.values()) == 4


def test_what_a_gpu_has_no_products_for_is_not_run() -> None:
    ran = {
        capability: {
            c.scaling
            for c in CONTENDERS
            if c.backend == "native" and not unsupported(c.scaling, capability)
        }
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0), None)
    }
    assert ran == {
        (8, 0): set(),
        (8, 9): {"delayed", "current", "row"},
        (9, 0): set(HOPPER),
        None: set(HOPPER),
        (10, 0): {"delayed", "current", "row", "mxfp8", "nvfp4"},
    }


def test_a_whole_step_has_one_optimizer() -> None:
    tool, results = runpy.run_path(str(TOOL)), Results(stream=io.StringIO())
    taken = {
        ("8b", "bf16"): (100.0, 0.0, 50.0),
        ("8b", "delayed"): (90.0, 0.0, 50.0),
        ("block", "bf16"): (10.0, 0.0, 0.0),
        ("block", "delayed"): (8.0, 0.0, 0.0),
    }
    tool["whole"](taken, argparse.Namespace(goals=False, known=None), results)
    said = results._stream
    assert isinstance(said, io.StringIO)
    more = 8030261248 / 1923108864  # of the whole, and of the cut
    bf16, delayed = 8 * (50 + 28 * 10) + more * 50, 8 * (40 + 28 * 8) + more * 50
    how = f"8 x (8b - optim + 28 x block) + {more:.2f} x optim"
    assert (
        said.getvalue()
        == f"8b whole, delayed: {how} = {delayed:,.0f} ms, BF16 {bf16:,.0f} ms: {bf16 / delayed:.2f}x\n"
    )


@pytest.mark.parametrize(
    ("only", "names", "scalings"),
    [
        (
            ["te"],
            ["torch bf16 compiled", *(f"te {s} eager" for s in ("delayed", "current", "block"))],
            [],
        ),
        (
            ["row", "rowwise"],
            [
                "torch bf16 compiled",
                "native row compiled",
                "torchao rowwise compiled",
                "native row eager",
            ],
            ["row"],
        ),
        (["row"], ["torch bf16 compiled", "native row compiled", "native row eager"], ["row"]),
        (["bf16"], ["torch bf16 compiled", "torch bf16 eager"], []),
        (
            ["native delayed", "rowwise"],
            [
                "torch bf16 compiled",
                "native delayed compiled",
                "torchao rowwise compiled",
                "native delayed eager",
            ],
            ["delayed"],
        ),
    ],
)
def test_only_takes_whole_words(
    only: list[str], names: list[str], scalings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Contender, "missing", lambda self, capability: unsupported(self.scaling, (9, 0))
    )
    tool = runpy.run_path(str(TOOL))
    args = tool["parse"](["--device", "cpu", "--small", "--only", *only])
    assert [
        str(c) for c in tool["present"](args, Results(stream=io.StringIO()))
    ] == names and args.scalings == scalings


@pytest.mark.parametrize("tool", ["bench_gpu", "check_gpu"])
@pytest.mark.parametrize("only", ["ow", "native delayd", "rowwise native"])
def test_only_refuses_what_selects_nothing(
    tool: str, only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = runpy.run_path(str(TOOL.with_name(f"{tool}.py")))["parse"]
    with pytest.raises(SystemExit) as ended:
        parse(["--small", "--only", "bf16", only])
    assert ended.value.code == 2 and f"--only {only}: no " in capsys.readouterr().err


def test_when_the_time_is_over_nothing_begins() -> None:
    bench = runpy.run_path(str(TOOL))["bench"]
    args = argparse.Namespace(
        minutes=0.0,
        row_seconds=1.0,
        only=["bf16"],
        cases=["linear", "8b"],
        probe=True,
        scalings=[],
        capability=None,
        goals=False,
        known=None,
    )
    results = Results()
    rows = bench(args, processes, results)
    assert results.failures == 0 and all(
        "not run: no time left, of 0 minutes" in row for row in rows["linear"] + rows["8b"]
    )
    assert [len(rows[name]) for name in ("probe", "linear", "8b")] == [0, 2, 2]
