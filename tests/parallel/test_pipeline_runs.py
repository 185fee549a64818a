"""Pipelines through the command line: the folder of a run is that of one rank; and overflow, counted over stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.parallel.process_group import World
from fp8cfg.training.data import run_data
from fp8cfg.training.overflow_watch import reduce_overflow_over_stages
from fp8cfg.training.step import train_step
from tests.support.ranks import launch, on_ranks
from tests.support.small import small, small_words


def test_overflow_is_counted_reduce_overflow_over_stages() -> None:
    each = [
        json.dumps(None),
        json.dumps([2, 1, math.inf, "layers.3.mlp.linear_fc1 input"]),
        json.dumps([1, 0, 3.0, "layers.0.mlp.linear_fc2 input"]),
    ]

    class Stages(World):
        def texts(self, value: str) -> list[str]:
            return each

    assert reduce_overflow_over_stages(None, Stages(0, 3)) == (
        3,
        1,
        math.inf,
        "layers.3.mlp.linear_fc1 input",
    )
    assert reduce_overflow_over_stages(None, World()) is None


@pytest.mark.slow
def test_a_run_leaves_the_folder_of_one_rank(tmp_path: Path) -> None:
    """Through the command line: coverage.json, a checkpoint that one rank reads and exports, and a run that goes on."""
    words = small_words(
        "precision=bf16_fp8",
        "trainer.micro_batch_size=2",
        f"log.folder={tmp_path}/run",
        "log.resume=auto",
    )
    done = launch(
        2,
        *words,
        "trainer.devices=2",
        "trainer.strategy.pipeline_model_parallel_size=2",
        "trainer.strategy.virtual_pipeline_model_parallel_size=2",
        "model.num_layers=4",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "ranks:      2 ranks = pipeline 2 x data 1, 4 microbatches a step on each" in done.stdout
        and "stage outputs" in " ".join(done.stdout.split())
    )
    coverage = json.loads((tmp_path / "run" / "coverage.json").read_text())
    assert coverage["layers_in_fp8"] == 16 and len(coverage["linears"]) == 17
    assert coverage["sdpa_backend"] == {
        f"layers.{n}.self_attention.core_attention": "flash" for n in range(4)
    }
    exported = launch(1, "export", "hf", str(tmp_path / "run"), str(tmp_path / "hf"))
    assert exported.returncode == 0, exported.stderr[-3000:]
    more = launch(1, *words, "model.num_layers=4", "trainer.max_steps=8")
    assert more.returncode == 0 and "resuming" in more.stdout, more.stderr[-3000:]


@pytest.mark.slow
def test_four_ranks_rehearse_the_layout_of_a_large_recipe(tmp_path: Path) -> None:
    """They leave a run that one process reads, whose global batch is of fewer microbatches than the ranks."""
    done = launch(
        4,
        "recipe=llama_70b",
        "precision=bf16_fp8",
        "trainer.smoke=true",
        "trainer.compile=off",
        f"log.dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "ranks:      4 ranks = tensor 2 x pipeline 2 x data 1, " in done.stdout
        and "stage outputs" in " ".join(done.stdout.split())
    )
    assert "resume: step 3 from step-00000002 gave " in done.stdout
    (run,) = tmp_path.iterdir()
    assert [
        main(words)
        for words in (
            ["export", "hf", str(run), str(tmp_path / "hf")],
            ["evaluate", str(run), "--samples", "2"],
        )
    ] == [0, 0]


def _forward_roots(world: World) -> list[int]:
    """Forward passes of FSDP modules in a step of this rank, and how many of them began as a root."""
    calls, roots, before = 0, 0, FSDPState._root_pre_forward

    def counted(state: Any, *given: Any) -> Any:
        nonlocal calls, roots
        calls += 1
        roots += state._state_ctx.iter_forward_root is None
        return before(state, *given)

    job = fp8cfg.build(
        small(
            "precision=bf16",
            "model.num_layers=8",
            "trainer.devices=2",
            "trainer.micro_batch_size=2",
            "trainer.strategy.pipeline_model_parallel_size=2",
            "storage.shard=fsdp",
        )
    )
    try:
        FSDPState._root_pre_forward = counted
        train_step(job, run_data(job.recipe)[0], 0, world)
    finally:
        FSDPState._root_pre_forward = before
    return [calls, roots]


@pytest.mark.slow
def test_layers_of_a_stage_are_gathered_while_others_compute(tmp_path: Path) -> None:
    """FSDP2's all-gathers wait for the compute stream at each root: the stage is one, not each layer."""
    layers, microbatches = 4, 4
    for calls, roots in on_ranks(2, _forward_roots, tmp_path):
        assert calls == microbatches * (layers + 1) and roots == microbatches
