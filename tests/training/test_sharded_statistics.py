"""FP8 statistics on two ranks: under FSDP2 those of the run that is not sharded, of whole masters, and a run that goes on as without."""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.training.data import run_data
from fp8cfg.training.loggers.run_loggers import RunLoggers
from fp8cfg.training.metrics import RunLogs
from fp8cfg.training.step import train_step
from tests.support.ranks import on_ranks
from tests.support.small import small
from tests.support.whole_tensors import WHOLE, shard_word, without_fsdp2

ROWS = {
    "delayed": ("precision=bf16_fp8",),
    "MX": ("precision=bf16_mxfp8", "fp8.params=true"),
    "blocks": ("precision=bf16_fp8_block", "fp8.params=false"),
    "fp16": ("precision=bf16_fp8", "fp8.params=false", "storage.weight=fp16"),
}
SHARDS = (WHOLE, "none", "zero1", "fsdp")


def shards(row: str) -> tuple[str, ...]:
    """storage.shard=fsdp has no weights in fp16 beside bf16 ones."""
    return SHARDS[:3] if row == "fp16" else SHARDS


def run(world: World, folder: Path, every: int, shard: str, *words: str) -> dict[str, Any]:
    """Three steps, with statistics of the second; the lines that are written are the first rank's."""
    with without_fsdp2(shard == WHOLE):
        job = fp8cfg.build(
            small(
                *words,
                shard_word(shard),
                "model.num_layers=1",
                "trainer.micro_batch_size=2",
                "trainer.gradient_clip_val=0",
                f"log.fp8_stats_every_n_steps={every}",
            )
        )
    batches, losses = run_data(job.recipe)[0], []
    made = RunFolder.create(folder, "run", datetime.now(UTC), "") if world.first else None
    with RunLogs(job, made, 0, RunLoggers(job, made, world.size, print)) as logs:
        for step in range(3):
            logs.write_statistics(batches, step, world)
            losses.append(train_step(job, batches, step, world).wait().loss)
    lines = (
        [json.loads(line) for line in made.fp8_stats.read_text().splitlines()]
        if made and every
        else []
    )
    return {"losses": losses, "lines": lines, "fsdp2": job.prepared.fsdp2}


def on_two(folder: Path, world: World) -> dict[str, Any]:
    found = {}
    for row, words in ROWS.items():
        for shard in shards(row):
            found[f"{row} {shard}"] = run(world, folder / f"{row} {shard}", 2, shard, *words)
            found[f"{row} {shard}"]["without"] = run(
                world, folder / f"{row} {shard} without", 0, shard, *words
            )["losses"]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return on_ranks(2, functools.partial(on_two, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_statistics_are_those_of_whole_masters(row: str, two: list[dict[str, Any]]) -> None:
    whole = two[0][f"{row} {WHOLE}"]
    assert {line["tensor"] for line in whole["lines"]} == {"input", "weight", "grad_output"}
    for shard in shards(row):
        found = two[0][f"{row} {shard}"]
        assert (
            found["fsdp2"] == (shard != WHOLE)
            and found["losses"] == found["without"]
            and two[1][f"{row} {shard}"]["losses"] == found["losses"]
        )
        if shard in ("none", "zero1"):
            assert found["lines"] == whole["lines"]
        elif shard == "fsdp":  # after a step with gradients in bf16
            for mine, line in zip(found["lines"], whole["lines"], strict=True):
                assert (
                    mine["error"] == pytest.approx(line["error"], rel=0.02)
                    and mine["error"] > 0.005
                )
                assert (mine["layer"], mine["tensor"], mine["elements"]) == (
                    line["layer"],
                    line["tensor"],
                    line["elements"],
                )
