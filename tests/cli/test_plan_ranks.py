"""`plan` on ranks that a launcher has started: it plans for them, and measures on them."""

from __future__ import annotations

import pytest

from tests.support.ranks import launch

TINY = ("recipe=llama_tiny", "data=tiny", "trainer.micro_batch_size=2", "model.num_layers=2")
TENSOR = "trainer.strategy.tensor_model_parallel_size=2"


@pytest.mark.slow
def test_the_ranks_are_those_of_the_launch() -> None:
    done = launch(2, "plan", *TINY, TENSOR)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("layout: 2 ranks = tensor 2 x") == 1


@pytest.mark.slow
def test_gpus_is_heard_before_the_launch() -> None:
    done = launch(2, "plan", *TINY, "--gpus", "4", TENSOR)
    assert done.returncode == 0, done.stderr
    assert "layout: 4 ranks = tensor 2 x" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["storage.shard=fsdp", TENSOR])
def test_ranks_measure_what_a_step_takes(layout: str) -> None:
    done = launch(2, "plan", *TINY, "precision=bf16_fp8", layout, "--measure")
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("measured here")[2].splitlines()
    peak = next(line.split() for line in table if line.startswith("peak"))
    assert float(peak[-1]) == pytest.approx(1, abs=0.05)
