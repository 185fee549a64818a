"""Layouts proved without a cluster: three cells of the table, and that a plan which is wrong is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import launch

Ended = tuple[int, list[str], str]
TOOL = Path(__file__).parents[2] / "tools" / "prove_layouts.py"
SEVERAL = f"""
import contextlib, io, json, runpy, sys
from fp8cfg.planning import state_shards

def ended(argv):
    sys.argv[1:] = argv.split()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path({str(TOOL)!r}, run_name="__main__")
        except SystemExit as e:
            return e.code, out.getvalue(), err.getvalue()

found = []
for argv in sys.argv[1:]:
    if argv == "a wrong plan":
        state_shards.shard_rows = lambda rows, ranks, rank=0: rows // ranks + 1
    else:
        found.append(ended(argv))
print(json.dumps(found))
"""


def ends(folder: Path, *commands: str) -> list[Ended]:
    """What comes of the tool with each of `commands`, in one process."""
    script = folder / "several.py"
    script.write_text(SEVERAL)
    done = launch(1, *commands, script=script)
    assert done.returncode == 0, done.stderr
    return [
        (code, [" ".join(line.split()) for line in out.splitlines()], err)
        for code, out, err in json.loads(done.stdout)
    ]


REPLICAS = "trainer.strategy.data_parallel_replicate_size=2"
CELLS = {  # of the table, as the recipes stand
    "llama_8b --ranks 8 --precision bf16_fp8 --places last --sent": (
        "TP1 PP1 CP2 DP4 zero1",
        ["last 7"],
    ),
    "llama_70b --ranks 64 --precision bf16_fp8 --places middle --sent": (
        "TP4 PP4 CP2 DP2 zero1",
        ["middle 32"],
    ),
    "llama_405b --ranks 16384 --precision bf16 --places first,last": (
        "TP8 PP8 CP4 DP64 zero1",
        ["first 0", "last 16383"],
    ),
}
WRONG = "gpt3_125m --precision bf16 --places first model.num_layers=1"
CUT = "model.num_layers=1 trainer.strategy.tensor_model_parallel_size=4 storage.exp_avg=fp8_expand storage.exp_avg_sq=fp8_block storage.weight_grad=fp8_block"
"""Cuts that go through some blocks of moments and gradients, 192 columns and biases of 576 elements among them."""
MORE = {
    "llama_70b --ranks 1024 --precision bf16_fp8 --places middle --sent model.num_layers=4 trainer.strategy.virtual_pipeline_model_parallel_size=null": (
        "TP4 PP4 CP2 DP32 zero1",
        ["middle 512"],
    ),
    "llama_70b --ranks 64 --precision bf16_nvfp4 --places middle --sent model.num_layers=8 trainer.strategy.virtual_pipeline_model_parallel_size=null": (
        "TP4 PP4 CP2 DP2 zero1",
        ["middle 32"],
    ),
    "llama_70b --ranks 64 --precision bf16_fp8_current --places middle --sent --accumulate 2 model.num_layers=8 trainer.strategy.virtual_pipeline_model_parallel_size=null": (
        "TP4 PP4 CP2 DP2 zero1",
        ["middle 32"],
    ),  # by rows
    "olmo2_7b --precision bf16_fp8 --places first,last model.num_layers=2 storage.shard=fsdp": (
        "TP2 PP1 CP1 DP4 fsdp",
        ["first 0", "last 7"],
    ),
    f"olmo2_13b --precision bf16 --places last --sent --accumulate 2 model.num_layers=2 storage.shard=fsdp {REPLICAS}": (
        "TP2 PP1 CP1 DP4 fsdp",
        ["last 7"],
    ),
    "llama_70b --ranks 1024 --precision bf16_fp8 --places last --sent --accumulate 2 model.num_layers=8 trainer.strategy.virtual_pipeline_model_parallel_size=2": (
        "TP4 PP4 CP2 DP32 zero1",
        ["last 1023"],
    ),
    f"llama_70b --ranks 1024 --precision bf16 --places last --sent --accumulate 2 model.num_layers=8 trainer.strategy.virtual_pipeline_model_parallel_size=2 storage.shard=fsdp {REPLICAS}": (
        "TP4 PP4 CP2 DP32 fsdp",
        ["last 1023"],
    ),
    f"llama_8b --ranks 8 --precision bf16_fp8 --places last --sent --accumulate 3 model.num_layers=2 storage.shard=fsdp storage.weight_grad=fp8 storage.accumulate=stored {REPLICAS}": (
        "TP1 PP1 CP2 DP4 fsdp",
        ["last 7"],
    ),
    "olmo2_13b --precision bf16 --places first --sent --accumulate 2 model.num_layers=2 storage.shard=zero2 storage.weight=fp32": (
        "TP2 PP1 CP1 DP4 zero2",
        ["first 0"],
    ),
    f"llama_8b --ranks 8 --precision bf16_fp8 --places last --sent --accumulate 3 model.num_layers=2 storage.shard=zero2 {REPLICAS}": (
        "TP1 PP1 CP2 DP4 zero2",
        ["last 7"],
    ),
    "llama_8b --ranks 8 --precision bf16_fp8 --places last --sent --accumulate 2 model.num_layers=2 storage.shard=fsdp model.recompute_granularity=full": (
        "TP1 PP1 CP2 DP4 fsdp",
        ["last 7"],
    ),
    "llama_8b --ranks 8 --precision bf16_fp8 --places last --sent task=lora model.num_layers=3 lora.targets=[layers.1.*.q_proj] storage.shard=zero2": (
        "TP1 PP1 CP2 DP4 zero2",
        ["last 7"],
    ),
    "llama_8b --ranks 1024 --precision bf16_fp8 --places last --sent task=lora model.num_layers=1": (
        "TP1 PP1 CP2 DP512 zero1",
        ["last 1023"],
    ),  # fewer rows of A than ranks
    "llama_8b --ranks 8 --precision bf16_fp8 --places last --sent --accumulate 2 task=lora model.num_layers=2 storage.shard=fsdp": (
        "TP1 PP1 CP2 DP4 fsdp",
        ["last 7"],
    ),
    "llama_8b --ranks 1024 --precision bf16_fp8 --places last --sent fp8.scaling=mxfp8 fp8.format=e4m3 fp8.params=true model.num_layers=1 model.ffn_hidden_size=14368": (
        "TP1 PP1 CP2 DP512 zero1",
        ["last 1023"],
    ),  # rows that are cut unevenly
    f"llama_8b --ranks 8 --precision bf16 --places last --sent --accumulate 2 model.num_layers=1 storage.comm=bf16 storage.weight_grad=fp32 storage.shard=zero2 {REPLICAS}": (
        "TP1 PP1 CP2 DP4 zero2",
        ["last 7"],
    ),
    "llama_70b --ranks 1024 --precision bf16_fp8 --places first,last --sent model.num_layers=4 trainer.strategy.virtual_pipeline_model_parallel_size=null storage.exp_avg=fp8 storage.exp_avg_sq=fp16_scaled storage.weight_grad=fp8": (
        "TP4 PP4 CP2 DP32 zero1",
        ["first 0", "last 1023"],
    ),
    "gpt3_125m --precision bf16 --places first,last --sent model.num_layers=2 trainer.strategy.pipeline_model_parallel_size=2 storage.master_weight=fp16_scaled storage.exp_avg=fp8": (
        "TP1 PP2 CP1 DP4 none",
        ["first 0", "last 7"],
    ),
    "gpt3_125m --precision bf16_fp8 --places first,last --sent --accumulate 2 model.num_layers=2 trainer.strategy.pipeline_model_parallel_size=2 storage.weight=fp32": (
        "TP1 PP2 CP1 DP4 zero1",
        ["first 0", "last 7"],
    ),
    f"gpt3_125m --precision bf16_fp8 --places last --sent {CUT} storage.shard=none": (
        "TP4 PP1 CP1 DP2 none",
        ["last 7"],
    ),
    f"gpt3_125m --precision bf16 --places last --sent {CUT} storage.shard=fsdp": (
        "TP4 PP1 CP1 DP2 fsdp",
        ["last 7"],
    ),
    "gpt3_125m --precision bf16_fp8 --places first,last --sent model.num_layers=2 opt_level=O3 storage.exp_avg=fp8_block storage.shard=zero1": (
        "TP1 PP1 CP1 DP8 zero1",
        ["first 0", "last 7"],
    ),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    commands = [*CELLS, "llama_8b --ranks 7", WRONG]
    return dict(
        zip(
            commands,
            ends(tmp_path_factory.mktemp("cells"), *commands[:-1], "a wrong plan", WRONG),
            strict=True,
        )
    )


def proved(cell: str, layout: str, places: list[str], ended: Ended) -> None:
    code, lines, err = ended
    rows = [line for line in lines[1:-1] if layout in line]
    assert code == 0 and lines[-1] == "every rank is as planned", (lines, err)
    assert [
        f" {layout} {place} " in line and " equal (" in line
        for line, place in zip(rows, places, strict=True)
    ] == [True] * len(places), lines
    sent = [line for line in lines[1:-1] if line not in rows and not line.startswith("note: ")]
    assert bool(sent) == ("--sent" in cell) and all(line.endswith("as planned") for line in sent), (
        lines
    )


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_ranks_of_a_cell_hold_and_send_what_is_planned(cell: str, ended: dict[str, Ended]) -> None:
    proved(cell, *CELLS[cell], ended[cell])


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return dict(zip(MORE, ends(tmp_path_factory.mktemp("more"), *MORE), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("cell", MORE)
def test_ranks_of_more_cells(cell: str, more: dict[str, Ended]) -> None:
    """Few layers: a pipeline, FSDP2, HSDP and ZeRO-2 with more microbatches; adapters; low-bit state on owners."""
    proved(cell, *MORE[cell], more[cell])


@pytest.mark.slow
def test_a_plan_that_is_wrong_is_found(ended: dict[str, Ended]) -> None:
    code, lines, _ = ended[WRONG]
    assert code == 1 and "NOT EQUAL" in lines[1] and lines[-1] == "1 ranks are not as planned"


@pytest.mark.slow
def test_what_is_no_cell(ended: dict[str, Ended]) -> None:
    code, _, err = ended["llama_8b --ranks 7"]
    assert code == 2 and "error: no such cell of the table" in err
