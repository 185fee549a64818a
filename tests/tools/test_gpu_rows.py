"""Rows of the tools for a GPU: a row over its time budget is stopped and said to be, and the rows after it run."""

from __future__ import annotations

import io
import os
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import fp8cfg
from fp8cfg.backends.any_model import checks
from fp8cfg.building import job
from fp8cfg.models.transformer import Transformer
from fp8cfg.training import compile
from tests.support.forked import processes
from tests.support.small import small, steps
from tools.gpu_rows.byte_counts import ByteCounts
from tools.gpu_rows.proof import draw_weights_on, without_proof
from tools.gpu_rows.results import Results
from tools.gpu_rows.worker import Make, NotRun, Row, Worker

(SLEEPS,) = (
    i
    for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.endswith("# SLEEPS")
)


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
            subprocess.run(
                [
                    "sh",
                    "-c",
                    "echo '  | #include'; echo 'main.c:3: fatal error: Python.h: No such file'; echo ended; exit 1",
                ],
                stdout=2,
                check=True,
            )
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
        assert (
            stopped == [["stopped: over its time budget of 0.5 s"], True, True]
            and f'test_gpu_rows.py", line {SLEEPS} in make' in where
        )
        assert time.monotonic() - began < 30
        assert worker.row("c", 60) == (["made c"], False, False, "")  # in another one
        *raised, where = worker.row("raises", 60)
        assert (
            raised == [["failed: KeyError: 'raises'"], True, False]
            and where.startswith("Traceback")
            and "raise KeyError(what)" in where
        )
        assert worker.row("d", 60).cells == ["made c d"]
        assert worker.row("does not fit", 60) == (["not run: needs 40 GiB"], False, False, "")
        compiling = worker.row("has no compiler", 60)
        assert compiling.cells == [
            "failed: CalledProcessError: sh ended with 1 main.c:3: fatal error: Python.h: No such file"
        ]
        assert compiling.details.endswith("\nended\n") and "KeyError" not in compiling.details
        assert worker.row("breaks the device", 60).failed and not worker.begun
        assert worker.row("e", 60).cells == ["made e"], "no later row meets the error of that one"
        assert worker.row("dies", 60) == (
            ["failed: died with exit code 7 last words"],
            True,
            False,
            "first\nlast words\n",
        )
        assert worker.row("f", 60).cells == ["made f"]


def test_a_row_that_the_time_of_all_rows_stops_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(processes, _start, "made")
    monkeypatch.setattr(
        worker, "row", lambda what, seconds: Row([f"stopped: over {seconds} s"], True, True)
    )
    rows = [worker.row_in_time("a", 60, left, "no time left").cells[0] for left in (90, 5, 0)]
    assert rows == ["stopped: over 60 s", "stopped: no time left", "not run: no time left"]


def test_what_is_left_of_a_killed_run_is_every_row_that_came(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.txt", io.StringIO())
    for row in ("first", "second"):
        results.say(row)
        assert (tmp_path / "rows.txt").read_text().splitlines()[-1] == row
    others = Results(tmp_path / "rows.txt", io.StringIO())
    others.say("third")
    others.row("third", Row(["failed: KeyError"], True, details="where\n\nit was"))
    assert (
        tmp_path / "rows.txt"
    ).read_text() == "first\nsecond\nthird\n    | where\n    | \n    | it was\n"


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
        "",
        "summary: 1 FAILED, 1 STOPPED, 1 MISSED, 2 not run, 1 met, 1 passed",
        "FAILED  e: KeyError: 'k'",
        "STOPPED d: over its time budget of 4 s",
        "MISSED  goal linear delayed: 1.70x of 1.75x, estimated 1.85x",
        "not run b, c: te is not installed",
        "met     goal linear block: 1.50x of 1.45x",
        "passed  a",
    ]


def test_without_proof_a_run_that_multiplies_nothing_in_fp8_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on the fake GPU, whose products leave no record."""
    for module, name in ((checks, "check"), (checks, "_check_forward"), (job, "prove_engagement")):
        monkeypatch.setattr(module, name, getattr(module, name))  # and so put back
    monkeypatch.setattr(job.Job, "_observed", job.Job._observed)
    monkeypatch.setattr(compile, "_largest_difference", compile._largest_difference)
    monkeypatch.setattr(compile, "LOSS_TOLERANCE", compile.LOSS_TOLERANCE)
    without_proof()
    made = fp8cfg.build(small("precision=bf16_fp8"))
    made.prepared.region.active = False
    monkeypatch.setattr(job.JobAutocast, "__call__", lambda self, enabled=True: nullcontext())
    assert [s.stepped for s in steps(made, 2)] == [True, True] and made.prove().share == 0


def test_weights_drawn_on_a_device_are_as_large_as_the_model_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = fp8cfg.build(small("precision=bf16")).model.state_dict()
    monkeypatch.setattr(Transformer, "init_weights", Transformer.init_weights)  # and so put back
    draw_weights_on("cpu")
    drawn, again = (fp8cfg.build(small("precision=bf16")).model.state_dict() for _ in range(2))
    for name, weight in drawn.items():
        assert weight.equal(again[name])
        size = own[name].float().square().mean().item()
        assert weight.float().square().mean().item() == pytest.approx(size, rel=0.1)


def test_differing_bytes_are_counted_by_what_they_are() -> None:
    counts, of = ByteCounts(), torch.tensor
    counts.compare(
        "data",
        of([1.0, 2.0, torch.nan]).to(torch.float8_e5m2),
        of([1.0, 2.0, -torch.nan]).to(torch.float8_e5m2),
        "NaN",
    )
    assert counts.verdict() == "0 of 3 bytes of data differ"
    counts.compare("scales", of([1.0, 0.0]), of([1.0, -0.0]), "zeros")
    counts.compare("data", of([1, 3], dtype=torch.uint8), of([1, 2], dtype=torch.uint8), "bytes")
    with pytest.raises(
        ArithmeticError,
        match=r"^1 of 5 bytes of data, 1 of 8 bytes of scales differ; the first are scales of zeros$",
    ):
        counts.verdict()
    for other in (None, torch.ones(2, 1), torch.ones(2, dtype=torch.float16)):
        with pytest.raises(ArithmeticError, match=r"^data of one are "):
            counts.compare("data", torch.ones(2), other, "one")
