"""Which recipes torch's FSDP2 shards over data-parallel ranks, and which have owners of whole tensors."""

from __future__ import annotations

import pytest

from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import resolve_state_dtypes
from tests.support.small import small


@pytest.mark.parametrize(
    ("words", "ranks", "backend", "sharded"),
    [
        ("precision=bf16", 2, "native", True),
        ("precision=bf16", 1, "native", False),
        ("precision=bf16 storage.shard=fsdp", 1, "native", True),
        ("precision=bf16 storage.shard=none", 2, "native", True),
        ("precision=bf16 storage.shard=none", 1, "native", False),
        ("precision=bf16_fp8 opt_level=O2", 2, "native", False),
        ("precision=bf16_fp8 fp8.params=true backend=te", 2, "te", False),
        ("precision=fp16 storage.shard=zero2", 2, "native", True),
        ("precision=bf16_fp8", 2, "native", True),
        ("precision=bf16_fp8_current", 2, "torchao", True),
        ("precision=bf16_fp8 fp8.params=false", 2, "te", True),
        ("precision=bf16_fp8 fp8.params=false", 2, "msamp", False),
        ("precision=bf16_mxfp8", 2, "native", True),
        ("precision=bf16_mxfp8 fp8.params=false", 2, "native", True),
        ("precision=bf16_fp8_block fp8.params=true", 2, "native", True),
        ("precision=bf16 storage.weight=fp32", 2, "native", True),
        ("precision=bf16 storage.comm=bf16", 2, "native", True),
        ("precision=bf16 storage.weight_grad=bf16 storage.comm=fp32", 2, "native", True),
        ("precision=bf16 storage.comm=bf16 storage.weight_grad=bf16", 2, "native", True),
        ("precision=bf16 storage.weight_grad=fp8", 2, "native", True),
        ("precision=bf16_fp8 fp8.params=false storage.weight_grad=fp8_block", 2, "te", True),
        ("precision=fp32 storage.weight_grad=fp16_scaled", 2, "native", True),
        ("precision=bf16 storage.weight=fp8", 2, "native", True),
        ("precision=fp32 storage.weight=bf16", 2, "native", True),
        ("precision=bf16_fp8 fp8.params=false storage.weight=fp16", 2, "native", True),
        ("precision=bf16_fp8 fp8.params=false storage.weight=fp16", 2, "te", False),
        ("precision=bf16 storage.comm=fp8", 2, "native", False),
        ("precision=bf16 storage.comm=fp8 storage.weight_grad=fp8", 2, "native", False),
        ("precision=bf16_fp8 opt_level=O2 storage.shard=zero1", 2, "native", False),
        ("precision=bf16_fp8_te_fused_adam storage.shard=zero1", 2, "native", True),
        ("precision=bf16_fp8_current_coat storage.shard=zero2", 2, "native", True),
        ("precision=bf16_precision_aware storage.shard=zero1", 2, "native", False),
        (
            "precision=bf16 storage.shard=zero1 storage.exp_avg=bf16 storage.rounding=stochastic",
            2,
            "native",
            False,
        ),
        ("precision=bf16 task=lora model.weights=.", 2, "native", True),
        ("precision=bf16_fp8 storage.comm=fp8 task=lora model.weights=.", 2, "native", False),
        ("precision=bf16_fp8 log.fp8_stats_every_n_steps=2", 2, "native", True),
    ],
)
def test_what_is_gathered_as_it_is_stored(
    words: str, ranks: int, backend: str, sharded: bool
) -> None:
    recipe = small(*words.split())
    state = resolve_state_dtypes(recipe.precision)
    assert by_fsdp2(recipe, state, ranks, backend) is sharded
