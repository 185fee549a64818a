"""Pipeline rules: what stages do not have is refused with the words that do, and schedules have the names of torchtitan too."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.planning.layout import layout_violations
from fp8cfg.schema.training import Strategy
from tests.support.small import small

PIPELINE = "trainer.strategy.pipeline_model_parallel_size"
KEY = "pipeline_model_parallel_size=2"
ALONE = f"with data parallelism only, not with {KEY}"
TWO_CHUNKS = "trainer.strategy.virtual_pipeline_model_parallel_size=2"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "",
            f"{PIPELINE}=2: a step has 1 microbatch on each rank, but 2 stages need at least 2; set trainer.micro_batch_size=4",
        ),
        (
            f"model.num_layers=4 trainer.global_batch_size=24 {TWO_CHUNKS}",
            f"{PIPELINE}=2: a step has 3 microbatches on each rank, but interleaved stages need a multiple of 2; set trainer.micro_batch_size=6",
        ),
        (
            f"model.num_layers=4 trainer.global_batch_size=7 trainer.micro_batch_size=1 {TWO_CHUNKS}",
            f"{PIPELINE}=2: a step has 7 microbatches on each rank, but interleaved stages need a multiple of 2; set trainer.global_batch_size=8",
        ),
        (
            "precision=bf16_fp8 opt_level=O2",
            f"opt_level=O2: works {ALONE}; set opt_level=null, or {PIPELINE}=1",
        ),
        (
            "precision=bf16_fp8 storage.weight_grad=fp8 storage.comm=fp8 storage.accumulate=stored",
            f"storage.comm=fp8: gradients sent in FP8 work {ALONE}; set storage.comm=auto storage.accumulate=wide",
        ),
        (
            "precision=bf16_fp8 log.fp8_stats_every_n_steps=2",
            f"log.fp8_stats_every_n_steps=2: needs all layers on one rank, but {KEY} splits them; set it to 0",
        ),
        (
            "task=lora lora.targets=[layers.0.*]",
            "lora.targets: pipeline stage 1 has no adapter to train; add layers of each"
            f" stage, or set {PIPELINE}=1",
        ),
        (
            "task=lora lora.targets=[lm_head]",
            "lora.targets: pipeline stage 0 has no adapter to train; add layers of each"
            f" stage, or set {PIPELINE}=1",
        ),
    ],
)
def test_what_stages_do_not_have_is_refused(
    words: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = layout_violations(small("trainer.devices=2", f"{PIPELINE}=2", *words.split()), 2)
    assert line in [str(violation) for violation in found]


def test_owners_of_whole_tensors_are_not_had_in_stages() -> None:
    words = (
        "precision=bf16_precision_aware",
        "storage.shard=zero1",
        "trainer.micro_batch_size=2",
        f"{PIPELINE}=2",
    )
    assert [str(found) for found in layout_violations(small("trainer.devices=4", *words), 4)] == [
        f"storage.shard=zero1: shards whole tensors, which works {ALONE}; set storage.shard=none"
    ]
    assert layout_violations(small("trainer.devices=2", *words), 2) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["ZBVZeroBubble"],
            "trainer.strategy.pipeline_schedule=ZBVZeroBubble: zero-bubble schedules compute gradients of weights and "
            "inputs separately, but FP8 layers compute both from one quantized gradient; set it to auto",
        ),
        (
            ["interleaved_1f1b"],
            "trainer.strategy.pipeline_schedule=interleaved_1f1b: needs several chunks on each GPU; set "
            "trainer.strategy.virtual_pipeline_model_parallel_size=2",
        ),
        (
            ["1f1b", TWO_CHUNKS, "model.num_layers=4"],
            "trainer.strategy.pipeline_schedule=1f1b: runs one chunk on each GPU, but "
            "virtual_pipeline_model_parallel_size=2; set it to interleaved_1f1b, or set virtual_pipeline_model_parallel_size=null",
        ),
        (
            [f"{PIPELINE}=1", "1f1b"],
            "trainer.strategy.pipeline_schedule=1f1b: has no effect with pipeline_model_parallel_size=1; set it to auto",
        ),
        (
            ["model.num_layers=2", TWO_CHUNKS, "auto"],
            f"{PIPELINE}=2: needs at least one layer in each of 4 chunks, but model.num_layers=2; nearest is virtual_pipeline_model_parallel_size=null",
        ),
        (
            ["model.num_layers=3", TWO_CHUNKS, "auto"],
            f"{PIPELINE}=2: needs at least one layer in each of 4 chunks, but model.num_layers=3; nearest is 1 with virtual_pipeline_model_parallel_size=null",
        ),
    ],
)
def test_schedules_that_do_not_go_with_the_stages_are_refused(words: list[str], line: str) -> None:
    named = [w if "=" in w else f"trainer.strategy.pipeline_schedule={w}" for w in words]
    with pytest.raises(fp8cfg.ConfigError) as e:
        small("trainer.devices=2", f"{PIPELINE}=2", *named)
    assert line in e.value.problems


def test_torchtitans_names_of_schedules_are_read() -> None:
    assert Strategy(pipeline_schedule="Interleaved1F1B").pipeline_schedule == "interleaved_1f1b"
    assert Strategy(pipeline_schedule="1F1B").pipeline_schedule == "1f1b"


def test_other_backends_are_refused() -> None:
    recipe = small(
        "precision=bf16_fp8",
        "backend=msamp",
        "opt_level=null",
        "trainer.devices=2",
        f"{PIPELINE}=2",
        "trainer.micro_batch_size=4",
    )
    with pytest.raises(
        fp8cfg.ConfigError,
        match=f"backend=msamp: its scales do not support {KEY}; set backend=native",
    ):
        fp8cfg.build(recipe)


def test_ranks_that_are_no_whole_replicas_are_refused_with_those_that_are() -> None:
    recipe = small(
        "trainer.devices=4",
        f"{PIPELINE}=2",
        "trainer.strategy.tensor_model_parallel_size=2",
        "trainer.micro_batch_size=4",
    )
    both = f"trainer.strategy.tensor_model_parallel_size=2: with {KEY} needs a multiple of 4 ranks, got 6; launch 8 ranks"
    assert [str(found) for found in layout_violations(recipe, 6)] == [both]
    alone = small("trainer.devices=2", f"{PIPELINE}=2", "trainer.micro_batch_size=4")
    assert [str(found) for found in layout_violations(alone, 1)] == [
        f"{PIPELINE}=2: needs a multiple of 2 ranks, got 1; launch 2 ranks or set it to 1"
    ]
    assert [str(found) for found in layout_violations(alone, 2, is_custom_model=True)] == [
        f"{PIPELINE}=2: splits layers of a recipe's Transformer, not of a custom model; set it to 1"
    ]
