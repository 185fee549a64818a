"""Rules of tensor and sequence parallelism: what split matrices do not have is refused with the words that do."""

from __future__ import annotations

import pytest

import fp8cfg
from tests.support.small import small

TENSOR = "trainer.strategy.tensor_model_parallel_size"
KEY = "tensor_model_parallel_size=2"
ALONE = f"with data parallelism only, not with {KEY}"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "model.num_query_groups=1",
            f"{TENSOR}=2: does not divide model.num_query_groups=1; set {TENSOR}=1",
        ),
        (
            "model.vocab_size=273",
            f"{TENSOR}=2: does not divide model.vocab_size=273; set model.vocab_size=274",
        ),
        (
            "model.ffn_hidden_size=129",
            f"{TENSOR}=2: does not divide model.ffn_hidden_size=129; set model.ffn_hidden_size=130",
        ),
        (
            "model.seq_length=31 trainer.strategy.sequence_parallel=true",
            "trainer.strategy.sequence_parallel=true: needs model.seq_length=31 to be a multiple of 2 ranks; set model.seq_length=32",
        ),
        (
            "precision=bf16_fp8 opt_level=O2",
            f"opt_level=O2: works {ALONE}; set opt_level=null, or {TENSOR}=1",
        ),
        (
            "precision=bf16_precision_aware storage.weight_grad=fp8",
            "storage: low-precision state needs whole matrices, except for moments and gradients "
            f"with float32 masters, but {KEY} splits them; set storage.master_weight=auto",
        ),
        (
            "precision=bf16_fp8 storage.comm=fp8",
            f"storage.comm=fp8: gradients sent in FP8 work {ALONE}; set storage.comm=auto",
        ),
        (
            "precision=bf16_fp8 fp8.dot_product_attention=true",
            f"fp8.dot_product_attention=true: FP8 attention needs all heads, but {KEY} splits them; set it to false",
        ),
        (
            "precision=bf16_fp8 log.fp8_stats_every_n_steps=2",
            f"log.fp8_stats_every_n_steps=2: needs whole matrices on one rank, but {KEY} splits them; set it to 0",
        ),
        (
            "precision=bf16_fp8 fp8.reduce_amax=false",
            f"fp8.reduce_amax=false: shards of a matrix share one scale with {KEY}; set it to true",
        ),
        (
            "precision=bf16_nvfp4 model.ffn_hidden_size=144",
            f"fp8.scaling=nvfp4: {KEY} gives each rank 72 channels of linear_fc1, which must be "
            "a multiple of 16; set fp8.exclude=[*.linear_fc1], another model.ffn_hidden_size, or a smaller tensor_model_parallel_size",
        ),
        (
            "precision=bf16_fp8_block",
            f"fp8.scaling=block: {KEY} gives each rank 64 channels of linear_fc1, which must be a multiple of "
            "128; set fp8.exclude=[*.linear_fc1], another model.ffn_hidden_size, or a smaller tensor_model_parallel_size",
        ),
    ],
)
def test_what_split_matrices_do_not_have_is_refused(
    words: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = small("trainer.devices=2", f"{TENSOR}=2", *words.split())
    from fp8cfg.planning.layout import layout_violations

    assert line in [str(found) for found in layout_violations(recipe, 2)]


def test_other_backends_are_refused() -> None:
    recipe = small(
        "precision=bf16_fp8_current",
        "backend=torchao",
        "fp8.params=false",
        "trainer.devices=2",
        f"{TENSOR}=2",
    )
    with pytest.raises(
        fp8cfg.ConfigError,
        match=f"backend=torchao: its layers do not support {KEY}; set backend=native",
    ):
        fp8cfg.build(recipe)


def test_ranks_that_are_no_whole_replicas_are_refused_with_those_that_are() -> None:
    recipe = small("trainer.devices=2", f"{TENSOR}=2")
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.build(recipe)
    assert e.value.problems == [
        f"{TENSOR}=2: needs a multiple of 2 ranks, got 1; launch 2 ranks or set it to 1"
    ]
