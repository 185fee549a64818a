"""Layouts proved without a cluster: three cells of the table, and that a plan which is wrong is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import launch

TOOL = Path(__file__).parents[2] / "tools" / "prove_layouts.py"


def ends(*argv: str, script: Path = TOOL) -> tuple[int, list[str], str]:
    done = launch(1, *argv, script=script)
    return done.returncode, [" ".join(line.split()) for line in done.stdout.splitlines()], done.stderr


CELLS = {
    "llama_70b --ranks 1024 --precision bf16_fp8 --places middle --sent model.num_layers=4 trainer.strategy.virtual_pipeline_model_parallel_size=null": ("TP4 PP4 CP2 DP32 zero1", ["middle 512"]),
    "olmo2_7b --precision bf16_fp8 --places first,last model.num_layers=2 storage.shard=fsdp": ("TP2 PP1 CP1 DP4 fsdp", ["first 0", "last 7"]),
    "olmo2_13b --precision bf16 --places last --sent model.num_layers=2": ("TP2 PP1 CP1 DP4 zero1", ["last 7"])}
LARGEST = {"llama_405b --ranks 16384 --precision bf16 --places first,last model.num_layers=16": ("TP8 PP8 CP4 DP64 zero1", ["first 0", "last 16383"])}


@pytest.mark.parametrize("cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.slow) for cell in LARGEST)])
def test_ranks_of_a_cell_hold_and_send_what_is_planned(cell: str) -> None:
    (layout, places), (code, lines, err) = (CELLS | LARGEST)[cell], ends(*cell.split())
    rows = [line for line in lines[1:-1] if layout in line]
    assert code == 0 and lines[-1] == "every rank is as planned", (lines, err)
    assert [f" {layout} {place} " in line and " equal (" in line for line, place in zip(rows, places, strict=True)] == [True] * len(places), lines
    sent = [line for line in lines[1:-1] if line not in rows]
    assert bool(sent) == ("--sent" in cell) and all(line.endswith("as planned") for line in sent), lines


def test_a_plan_that_is_wrong_is_found(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import runpy\nfrom fp8cfg.report.memory import shards\n"
        "shards.shard_rows = lambda rows, ranks, rank=0: rows // ranks + 1\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n")
    code, lines, _ = ends("gpt3_125m", "--precision", "bf16", "--places", "first", "model.num_layers=1", script=script)
    assert code == 1 and "NOT EQUAL" in lines[1] and lines[-1] == "1 ranks are not as planned"


def test_what_is_no_cell() -> None:
    code, _, err = ends("llama_8b", "--ranks", "7")
    assert code == 2 and "error: no such cell of the table" in err
