"""Rows of the tools for a GPU: a row over its time budget is stopped and said to be, and the rows after it run."""

from __future__ import annotations

import argparse
import os
import runpy
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg import job
from fp8cfg.backends import first_pass
from fp8cfg.training import compiled_gradients
from tests.support.forked import processes
from tests.support.small import small, steps
from tools.gpu_rows.proof import without_proof
from tools.gpu_rows.worker import Make, Row, Worker

TOOL = Path(__file__).parents[2] / "tools" / "bench_gpu.py"


def _start(made: str) -> Make:
    rows = [made]

    def make(what: str) -> Row:
        if what == "slow":
            time.sleep(600)
        if what == "dies":
            os.write(2, b"first\nlast words\n")
            os._exit(7)
        if what == "raises":
            raise KeyError(what)
        rows.append(what)
        return Row([" ".join(rows)])

    return make


def test_a_row_over_its_budget_costs_one_row() -> None:
    with Worker(processes, _start, "made") as worker:
        assert worker.row("a", 60) == (["made a"], False, False)
        assert worker.row("b", 60).cells == ["made a b"]  # in the same process
        began = time.monotonic()
        assert worker.row("slow", 0.5) == (["stopped: over its time budget of 0.5 s"], True, True)
        assert time.monotonic() - began < 30
        assert worker.row("c", 60) == (["made c"], False, False)  # in another one
        assert worker.row("raises", 60) == (["failed: KeyError: 'raises'"], True, False)
        assert worker.row("dies", 60) == (["failed: died with exit code 7 last words"], True, False)
        assert worker.row("d", 60).cells == ["made d"]


def _slow_case(args: argparse.Namespace, name: str) -> Make:
    """The rows of bench_gpu.py, of which one is slow."""

    def make(what: object) -> Row:
        if "delayed compiled" in str(what):
            time.sleep(600)
        return Row(["1.00", "-", "1", "1", "-", "-", "1.00", "0.0e+00"])

    return make


def test_the_benchmark_stops_a_slow_row_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    bench = runpy.run_path(str(TOOL))["bench"]
    bench.__globals__["start"] = _slow_case
    args = argparse.Namespace(minutes=1, row_seconds=4.0, only=["native"], cases=["linear"])
    rows, failures = bench(args, processes)
    found = {row[7:34].strip(): row[34:].split() for row in rows["linear"]}
    assert failures == 1 and found.pop("native delayed compiled") == ["stopped:", "over", "its", "time", "budget", "of", "4", "s"]
    assert list(found) == ["torch bf16 compiled", *(f"native {s} compiled" for s in ("current", "row", "block")),
                           *(f"native {s} eager" for s in ("delayed", "current", "row", "block"))]
    assert all(cells[0] == "1.00" for cells in found.values())
    assert len(rows["probe"]) == 4 and "stopped" in capsys.readouterr().err


def test_when_the_time_is_over_nothing_begins() -> None:
    bench = runpy.run_path(str(TOOL))["bench"]
    args = argparse.Namespace(minutes=0.0, row_seconds=1.0, only=["bf16"], cases=["linear", "8b"])
    rows, failures = bench(args, processes)
    assert failures == 0 and all(row.endswith("not run: no time left of 0 minutes") for row in rows["linear"] + rows["8b"])
    assert [len(rows[name]) for name in ("probe", "linear", "8b")] == [0, 2, 2]


def test_without_proof_a_run_that_multiplies_nothing_in_fp8_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the fake GPU, whose products leave no record."""
    for module, name in ((first_pass, "check"), (first_pass, "_look"), (job, "prove_engagement")):
        monkeypatch.setattr(module, name, getattr(module, name))  # and so put back
    monkeypatch.setattr(compiled_gradients, "TOLERANCE", dict(compiled_gradients.TOLERANCE))
    without_proof()
    made = fp8cfg.build(small("precision=bf16_fp8"))
    made.prepared.region.active = False
    monkeypatch.setattr(fp8cfg.Job, "autocast", lambda self, enabled=True: nullcontext())
    assert [s.stepped for s in steps(made, 2)] == [True, True] and made.prove().share == 0
