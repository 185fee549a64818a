"""Ranks that `fp8cfg` starts by itself: how many on a machine with so many GPUs, and what they end with."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.cli import local_ranks, train
from fp8cfg.config.recipe import Recipe

CONTEXT = ("recipe=llama_8b", "trainer.strategy.context_parallel_size=2")
DATA_PARALLEL = ("recipe=llama_8b", "trainer.strategy.context_parallel_size=1")


def composed(*words: str) -> Recipe:
    return fp8cfg.compose([*words])


@pytest.mark.parametrize(("words", "gpus", "ranks"), [
    (DATA_PARALLEL, 8, 8), (DATA_PARALLEL, 4, 4), (DATA_PARALLEL, 16, 8), (DATA_PARALLEL, 0, 1), (DATA_PARALLEL, 7, 4),
    ((*DATA_PARALLEL, "trainer.accelerator=cpu"), 8, 1), (("recipe=llama_tiny",), 8, 1), (CONTEXT, 8, 8), (CONTEXT, 7, 4), (CONTEXT, 3, 2), (CONTEXT, 1, 1),
    ((*CONTEXT, "trainer.strategy.tensor_model_parallel_size=2"), 7, 4),
    ((*CONTEXT, "trainer.strategy.pipeline_model_parallel_size=2"), 7, 4),
    ((*CONTEXT, "trainer.strategy.pipeline_model_parallel_size=2", "storage.shard=fsdp"), 8, 8),
    ((*DATA_PARALLEL, "trainer.strategy.pipeline_model_parallel_size=2", "trainer.global_batch_size=4"), 8, 4),
    ((*DATA_PARALLEL, "trainer.strategy.data_parallel_replicate_size=2"), 8, 8), ((*DATA_PARALLEL, "lora.enabled=true", "trainer.strategy.tensor_model_parallel_size=2"), 8, 1),
    (("recipe=llama_8b", "trainer.smoke=true"), 7, 7), (("recipe=llama_405b", "trainer.smoke=true"), 4, 4),
])
def test_as_many_ranks_as_gpus_and_whole_batches(words: tuple[str, ...], gpus: int, ranks: int) -> None:
    assert local_ranks.count(composed(*words), gpus) == ranks


def test_fewer_ranks_than_gpus_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert train._ranks(composed(*DATA_PARALLEL), 7, [], "") == 4
    assert capsys.readouterr().err == (
        "note: 4 of 7 GPUs are used, over which trainer.global_batch_size=512 divides in microbatches of 1\n")
    assert train._ranks(composed(*CONTEXT), 3, [], "") == 2
    assert capsys.readouterr().err == (
        "note: 2 of 3 GPUs are used, 2 to a replica, over which trainer.global_batch_size=512 divides in microbatches of 1\n")
    assert train._ranks(composed(*DATA_PARALLEL), 8, [], "") == 8 and capsys.readouterr().err == ""


@pytest.mark.parametrize("gpus", [8, 0])
def test_of_several_nodes_the_line_of_each_is_printed(gpus: int) -> None:
    """On a login node without GPUs too."""
    argv = [*DATA_PARALLEL, "trainer.num_nodes=2", "name=two nodes".replace(" ", "_")]
    with pytest.raises(fp8cfg.ConfigError) as e:
        train._ranks(composed(*argv), gpus, argv, "fp8cfg trainer.smoke=true")
    line, = e.value.problems
    assert line.startswith("trainer.num_nodes=2: this process would train alone; start it on each node with torchrun: torchrun --nnodes 2 "
                           "--nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint ")
    assert line.endswith(f" --rdzv-id two_nodes -m fp8cfg {' '.join(argv)}; runs here: fp8cfg trainer.smoke=true")


def test_a_launcher_is_seen_by_its_variables() -> None:
    assert not local_ranks.launched({}) and local_ranks.launched({"RANK": "0"}) and local_ranks.launched({"WORLD_SIZE": "1"})


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(["trainer.smoke=true"], 0), (["data=text", "data.path=nowhere"], 2)], ids=["trains", "refused"])
def test_ranks_are_started_and_their_exit_code_is_that_of_the_command(words: list[str], code: int, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    assert local_ranks.start(2, ["recipe=llama_tiny", "precision=bf16_fp8", "trainer.micro_batch_size=8", *words]) == code
    runs = list(tmp_path.glob("runs/*/checkpoints/*"))
    assert sorted(p.name for p in runs) == (["step-00000002", "step-00000003"] if code == 0 else [])
