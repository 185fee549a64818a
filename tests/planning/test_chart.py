"""The low-precision chart: which row a recipe is, and its bytes."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.planning import remarks
from fp8cfg.planning.layout import rank_part
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import sharding
from tests.support.small import chart_row, small

AMP = {"weight": "fp32", "master_weight": "none", "weight_grad": "fp32", "comm": "fp32"}


@pytest.mark.parametrize(
    ("precision", "name", "each"),
    [
        (Precision(compute="fp16", storage=AMP), "FP16 AMP", 16),
        (Precision(compute="fp32", fp8={"enabled": True}), "TE", 16),
        (fp8cfg.bf16_mixed(), "Megatron BF16", 18),
        (Precision(fp8={"enabled": True}, opt_level="O1"), "O1", 11),
        (Precision(fp8={"enabled": True}, opt_level="O2"), "O2", 6),
        (Precision(fp8={"enabled": True}, opt_level="O3"), "O3", 7),
        (Precision(fp8={"enabled": True}, backend="msamp"), "O2", 6),
        (
            Precision(
                fp8={"enabled": True},
                opt_level="O2",
                storage={"weight": "fp16_scaled", "exp_avg": "fp8_pow2"},
            ),
            "O2",
            6,
        ),
        (
            Precision(fp8={"enabled": True}, opt_level="O2", storage={"exp_avg": "fp32"}),
            "custom",
            9,
        ),
        (fp8cfg.bf16_with_fp8_mixed(), "custom", 17),
        (fp8cfg.fp16_mixed(), "custom", 16),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows(precision: Precision, name: str, each: int) -> None:
    recipe = small()
    recipe.precision = precision
    assert remarks.row_name(chart_row(recipe)) == name
    assert remarks.bytes_per_parameter(chart_row(recipe)) == each


def test_gemm_is_what_multiplies() -> None:
    assert [
        chart_row(small(f"precision={p}"))["gemm"]
        for p in ("fp32", "bf16", "fp16_fp8", "bf16_nvfp4")
    ] == ["fp32", "bf16", "fp8", "fp4"]


def test_text() -> None:
    recipe = small("precision=bf16_fp8", "optim.name=sgd")
    assert (
        "\n".join(remarks.chart_blocks(recipe, rank_part(recipe)))
        == """\
low-precision chart  GEMM  comm  weight  master  grad  moments    B/param
this recipe: custom  fp8   fp32  fp8     fp32    fp32  fp32            13
FP16 AMP             fp16  fp32  fp32    none    fp32  fp32+fp32       16
TE                   fp8   fp32  fp32    none    fp32  fp32+fp32       16
Megatron BF16        bf16  fp32  bf16    fp32    fp32  fp32+fp32       18
O1                   fp8   fp8   fp16    none    fp8   fp32+fp32       11
O2                   fp8   fp8   fp16    none    fp8   fp8+fp16         6
O3                   fp8   fp8   fp8     fp16    fp8   fp8+fp16         7"""
    )


@pytest.mark.parametrize(
    ("words", "ranks", "each"),
    [
        ("opt_level=O3", 8, 7),
        ("opt_level=O3 storage.shard=zero1", 8, 2 + 5 / 8),
        ("opt_level=O3 storage.shard=zero2", 8, 1 + 6 / 8),
        ("opt_level=O2 storage.shard=zero1", 4, 3 + 3 / 4),
        ("opt_level=O2 storage.shard=zero2", 4, 2 + 4 / 4),
        ("", 1, 1 + 4 + 4 + 8),
        ("", 8, 1 + 4 + 12 / 8),
        ("storage.exp_avg=bf16", 8, 1 + 4 + (4 + 6) / 8),
        ("fp8.params=false storage.shard=fsdp", 4, 16 / 4),
        ("opt_level=O3 storage.shard=zero2", 1, 7),
    ],
)
def test_what_is_split_over_ranks_is_counted_once_for_all_of_them(
    words: str, ranks: int, each: float
) -> None:
    recipe = small("precision=bf16_fp8", *words.split())
    assert (
        remarks.bytes_per_parameter(chart_row(recipe), sharding(recipe.precision, ranks), ranks)
        == each
    )
    lines = "\n".join(remarks.chart_blocks(recipe, rank_part(recipe, ranks))).splitlines()
    own = next(line for line in lines if line.startswith("this recipe: "))
    assert own.split()[-1] == f"{each:.3g}"
    unsharded = remarks.bytes_per_parameter(chart_row(recipe))
    said = f"B/param here: on each of {ranks} ranks under storage.shard={sharding(recipe.precision, ranks)}; unsharded {unsharded:g}"
    assert (said in lines) == (each != unsharded)
