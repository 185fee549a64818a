"""What the storage columns of a precision come to, level by level, and every reason to refuse one."""

from __future__ import annotations

from typing import Any

import pytest

import fp8cfg
from fp8cfg.planning import remarks
from fp8cfg.planning.layout import rank_part
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import (
    COLUMNS,
    fp8_weights,
    level,
    low_bit,
    resolve_state_dtypes,
    resolved,
)
from tests.support.small import chart_row

O1 = "fp16_scaled none        fp8  fp8  fp32 fp32"
O2 = "fp16_scaled none        fp8  fp8  fp8  fp16_scaled"
O3 = "fp8         fp16_scaled fp8  fp8  fp8  fp16_scaled"
F32 = "fp32        none        fp32 fp32 fp32 fp32"
BF16 = "bf16        fp32        fp32 fp32 fp32 fp32"
FP8 = "fp8         fp32        fp32 fp32 fp32 fp32"
REST = "fp32        none        fp32 fp32 fp8  fp16_scaled"
REST_O3 = "fp32     none        bf16 fp32 fp8  fp16_scaled"

#   words, columns of linear layers (weight master_weight weight_grad comm exp_avg exp_avg_sq), of the rest, low bit, float8 weights
TABLE = [
    ("precision=fp32", F32, F32, False, False),
    ("precision=bf16", BF16, BF16, False, False),
    (
        "precision=fp16",
        "fp16 fp32 fp16 fp16 fp32 fp32",
        "fp16 fp32 fp16 fp16 fp32 fp32",
        False,
        False,
    ),
    ("precision=fp16 storage.weight=fp32", F32, F32, False, False),
    ("precision=bf16_fp8", FP8, BF16, False, True),
    ("precision=bf16_fp8 fp8.params=false", BF16, BF16, False, False),
    ("precision=bf16_fp8 fp8.params=false storage.weight=fp32", F32, F32, False, False),
    ("precision=bf16_fp8 opt_level=O1", O1, F32, True, False),
    ("precision=bf16_fp8 opt_level=O2", O2, REST, True, False),
    ("precision=bf16_fp8 opt_level=O3", O3, REST_O3, True, True),
    (
        "precision=bf16_fp8 backend=msamp",
        "fp16_scaled none fp8_pow2 fp8_pow2 fp8_pow2 fp16_scaled",
        "fp32 none fp32 fp32 fp8_pow2 fp16_scaled",
        True,
        False,
    ),
    (
        "precision=bf16_fp8 backend=msamp opt_level=O1",
        "fp16_scaled none fp8_pow2 fp8_pow2 fp32 fp32",
        F32,
        True,
        False,
    ),
    ("precision=fp32 opt_level=O2", O2, REST, True, False),
    ("precision=bf16 opt_level=O3", O3, REST_O3, True, False),
    ("precision=fp16_fp8 opt_level=O2", O2, REST, True, False),
    # explicit columns over a level, and over nothing
    (
        "precision=bf16_fp8 opt_level=O2 storage.exp_avg=fp8_pow2",
        O2.replace("fp8  fp16", "fp8_pow2 fp16"),
        REST.replace("fp8  fp16", "fp8_pow2 fp16"),
        True,
        False,
    ),
    (
        "precision=bf16_fp8 opt_level=O2 storage.master_weight=fp32",
        O2.replace("none", "fp32"),
        REST,
        True,
        False,
    ),
    (
        "precision=bf16_fp8 opt_level=O1 storage.weight_grad=fp32 storage.comm=bf16",
        "fp16_scaled none fp32 bf16 fp32 fp32",
        "fp32 none fp32 bf16 fp32 fp32",
        True,
        False,
    ),
    ("precision=bf16_fp8 fp8.params=false storage.weight=fp8", FP8, BF16, False, True),
    ("precision=bf16 storage.weight=fp8", FP8, BF16, False, False),
    ("precision=bf16 storage.comm=fp8", "bf16 fp32 fp32 fp8 fp32 fp32", BF16, False, False),
    (
        "precision=bf16 storage.comm=bf16",
        "bf16 fp32 fp32 bf16 fp32 fp32",
        "bf16 fp32 fp32 bf16 fp32 fp32",
        False,
        False,
    ),
    (
        "precision=bf16 storage.weight_grad=bf16",
        "bf16 fp32 bf16 fp32 fp32 fp32",
        "bf16 fp32 bf16 fp32 fp32 fp32",
        False,
        False,
    ),
    (
        "precision=fp32 storage.weight_grad=bf16",
        "fp32 none bf16 fp32 fp32 fp32",
        "fp32 none bf16 fp32 fp32 fp32",
        True,
        False,
    ),
    (
        "precision=bf16 storage.weight_grad=fp16_scaled",
        "bf16 fp32 fp16_scaled fp32 fp32 fp32",
        BF16,
        True,
        False,
    ),
    (
        "precision=bf16 storage.exp_avg=bf16 storage.exp_avg_sq=bf16",
        "bf16 fp32 fp32 fp32 bf16 bf16",
        "bf16 fp32 fp32 fp32 bf16 bf16",
        True,
        False,
    ),
    (
        "precision=bf16 storage.master_weight=none storage.rounding=stochastic",
        "bf16 none fp32 fp32 fp32 fp32",
        F32,
        True,
        False,
    ),
    (
        "precision=bf16 storage.master_weight=fp16_scaled",
        "bf16 fp16_scaled fp32 fp32 fp32 fp32",
        "bf16 fp16_scaled fp32 fp32 fp32 fp32",
        True,
        False,
    ),
    (
        "precision=bf16 storage.weight=fp16_scaled",
        "fp16_scaled fp32 fp32 fp32 fp32 fp32",
        BF16,
        True,
        False,
    ),
    ("precision=fp32 storage.weight=bf16", BF16, F32, True, False),
    ("precision=bf16 storage.shard=zero1", BF16, BF16, False, False),
    ("precision=bf16 storage.shard=fsdp", F32, F32, False, False),
    ("precision=fp16 storage.shard=fsdp", F32, F32, False, False),
    (
        "precision=bf16_fp8 fp8.params=false storage.shard=fsdp storage.comm=bf16",
        "fp32 none fp32 bf16 fp32 fp32",
        "fp32 none fp32 bf16 fp32 fp32",
        False,
        False,
    ),
]


def precision(words: str) -> Precision:
    return fp8cfg.compose(words.split()).precision


@pytest.mark.parametrize(
    ("words", "linear", "rest", "bits", "float8"), TABLE, ids=[row[0] for row in TABLE]
)
def test_columns(words: str, linear: str, rest: str, bits: bool, float8: bool) -> None:
    p = precision(words)
    assert resolved(p) == dict(zip(COLUMNS, linear.split(), strict=True))
    assert resolve_state_dtypes(p).other == dict(zip(COLUMNS, rest.split(), strict=True))
    assert (low_bit(p), fp8_weights(p)) == (bits, float8)


def test_a_level_says_nothing_of_layers_outside_of_fp8_unless_weights_are_float8_operands() -> None:
    for words, narrow in (
        ("precision=bf16_fp8 opt_level=O2", True),
        ("precision=bf16_fp8 opt_level=O3", False),
        ("precision=bf16 opt_level=O3", True),
    ):
        state = resolve_state_dtypes(precision(words))
        assert state.of_parameter(True, runs_fp8=True) == state.linear != state.other
        assert state.of_parameter(True, runs_fp8=False) == (state.linear if narrow else state.other)
        assert state.of_parameter(False, runs_fp8=False) == state.other


def test_levels() -> None:
    assert [
        level(precision(w))
        for w in (
            "precision=bf16",
            "precision=bf16_fp8 backend=msamp",
            "precision=bf16_fp8 backend=msamp opt_level=O3",
        )
    ] == [None, "O2", "O3"]
    assert {
        n: remarks.row_name(chart_row(fp8cfg.compose(["precision=bf16_fp8", f"opt_level={n}"])))
        for n in ("O1", "O2", "O3")
    } == {n: n for n in ("O1", "O2", "O3")}


HALF = "set storage.rounding=stochastic or storage.master_weight=fp32"
REFUSED = [
    (
        "precision=bf16_fp8 opt_level=O2 storage.exp_avg_sq=fp8",
        "storage.exp_avg_sq=fp8: second moments do not fit one FP8 scale per tensor, and training diverges; set it to fp8_block",
    ),
    (
        "precision=bf16_fp8 opt_level=O2 storage.exp_avg_sq=fp8_pow2",
        "storage.exp_avg_sq=fp8_pow2: second moments do not fit one FP8 scale per tensor, and training diverges; set it to fp8_block",
    ),
    (
        "precision=bf16 storage.exp_avg_sq=bf16 optim.betas=[0.9,0.999]",
        "optim.betas=[0.9, 0.999]: rounding in storage.exp_avg_sq=bf16 stops an average of rate 0.999, so it never decays; "
        "nearest is 0.9961, or set storage.exp_avg_sq=fp16_scaled",
    ),
    (
        "precision=bf16_fp8 opt_level=O2 storage.exp_avg=fp8_pow2 optim.betas=[0.98,0.95]",
        "optim.betas=[0.98, 0.95]: rounding in storage.exp_avg=fp8_pow2 stops an average of rate 0.98, so it never decays; "
        "nearest is 0.9444, or set storage.exp_avg=fp8",
    ),
    *(
        (
            f"precision=bf16_fp8 optim.name=sgd opt_level={n}",
            f"opt_level={n}: needs optim.name=adamw or adam, not sgd (MS-AMP)",
        )
        for n in ("O1", "O2", "O3")
    ),
    (
        "precision=bf16_fp8 opt_level=O3 storage.master_weight=none",
        "storage.master_weight=none: storage.weight=fp8 needs master weights; set it to fp16_scaled or fp32",
    ),
    (
        "precision=bf16_fp8 opt_level=O3 storage.master_weight=fp8",
        "storage.master_weight=fp8: FP8 master weights lose small updates; set it to fp16_scaled or fp32",
    ),
    (
        "precision=bf16_fp8 opt_level=O2 optim.lr=1e-6 storage.rounding=nearest",
        "optim.lr=1e-06: storage.weight=fp16_scaled loses most updates below 7.6e-06 of weights around 0.02; "
        + HALF,
    ),
    (
        "precision=bf16_fp8 opt_level=O3 optim.lr=1e-6 storage.rounding=nearest",
        "optim.lr=1e-06: storage.master_weight=fp16_scaled loses most updates below 7.6e-06 of weights around 0.02; "
        + HALF,
    ),
    (
        "precision=bf16 storage.master_weight=none optim.lr=3e-5 storage.rounding=nearest",
        "optim.lr=3e-05: storage.weight=bf16 loses most updates below 6.1e-05 of weights around 0.02; "
        + HALF,
    ),
    (
        "precision=bf16_fp8 fp8.params=true storage.weight=fp16_scaled",
        "storage.weight=fp16_scaled: contradicts fp8.params=true, which stores weights in FP8; remove one of them",
    ),
    (
        "precision=bf16_fp8 fp8.params=false storage.weight=fp8_pow2",
        "storage.weight=fp8_pow2: fp8.scaling decides the scales of FP8 weights; set storage.weight=fp8, and "
        "fp8.use_power_2_scales=true with current scaling",
    ),
    (
        "precision=bf16 storage.weight=fp8_block",
        "storage.weight=fp8_block: not for weights; set it to fp8, or set fp8.scaling=block with fp8.params=true",
    ),
    (
        "precision=bf16 storage.comm=fp16_scaled",
        "storage.comm=fp16_scaled: cannot be sent between ranks; set it to fp16, fp8 or fp8_pow2",
    ),
    (
        "precision=bf16_fp8 opt_level=O2 storage.comm=fp8_pow2",
        "storage.comm=fp8_pow2: gradients are stored in fp8 and sent unchanged; set it to fp8, or bf16 or fp32 to sum them before they are stored",
    ),
    (
        "precision=fp32 storage.master_weight=fp32",
        "storage.master_weight=fp32: has no effect, storage.weight=fp32 needs no master weights; set it to none",
    ),
    (
        "precision=fp32 storage.rounding=stochastic",
        "storage.rounding=stochastic: has no effect, weights are float32; remove it",
    ),
    (
        "precision=bf16_fp8 storage.rounding=stochastic",
        "storage.rounding=stochastic: has no effect, FP8 layers round their own weights; remove it",
    ),
    (
        "precision=bf16 storage.exp_avg=none",
        "storage.exp_avg=none: only storage.master_weight can be none",
    ),
    (
        "precision=bf16 optim.name=sgd storage.exp_avg=bf16",
        "storage.exp_avg=bf16: has no effect with optim.name=sgd, which has no such moment",
    ),
]


def problems(words: str) -> list[str]:
    try:
        fp8cfg.compose(words.split())
    except fp8cfg.ConfigError as e:
        return e.problems
    return []


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_is_refused_and_why(words: str, line: str) -> None:
    assert problems(words) == [line]


@pytest.mark.parametrize("words", [row[0] for row in TABLE])
def test_the_table_breaks_no_rule(words: str) -> None:
    assert problems(words) == []


@pytest.mark.parametrize(
    "words",
    [
        "opt_level=O2 optim.lr=1e-6 storage.rounding=stochastic",
        "opt_level=O2 optim.lr=1e-6 storage.master_weight=fp32",
        "opt_level=O2 storage.exp_avg_sq=fp8_block",
        "opt_level=O2 optim.betas=[0.98,0.95]",
    ],
)
def test_what_the_lines_say_to_write_is_accepted(words: str) -> None:
    assert problems(f"precision=bf16_fp8 {words}") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", True),
        ("optim.lr_decay_style=constant", False),
        ("optim.min_lr=1e-5", False),
        ("optim.lr=1e-3", False),
    ],
)
def test_a_schedule_that_ends_with_updates_that_are_lost_is_remarked(
    words: str, said: bool
) -> None:
    recipe = fp8cfg.compose(["precision=bf16_fp8", "opt_level=O2", "optim.lr=3e-5", *words.split()])
    found = " ".join(remarks.remark_lines(recipe, rank_part(recipe)))
    assert found.startswith("note: optim.min_lr=3e-06: storage.weight=fp16_scaled loses") == said


def test_o3_on_one_rank_is_allowed_with_a_remark() -> None:
    recipe: Any = fp8cfg.compose(["precision=bf16_fp8", "opt_level=O3"])
    assert problems("precision=bf16_fp8 opt_level=O3") == []
    assert remarks.remark_lines(recipe, rank_part(recipe)) == [
        "note: opt_level=O3: needs more than O2's 6 B/param on one rank; storage.shard=zero1 or zero2 shards its state"
    ]
    recipe.storage.shard = "zero1"
    assert remarks.remark_lines(recipe, rank_part(recipe)) == [
        "note: storage.shard=zero1: no effect on one data-parallel rank"
    ]
    assert remarks.remark_lines(recipe, rank_part(recipe, 2)) == []


def test_transposes_that_are_read_once_are_not_kept() -> None:
    recipe = fp8cfg.compose(
        ["precision=bf16_fp8", "fp8.keep_transpose_cache=true", "trainer.micro_batch_size=8"]
    )
    assert [bool(remarks.remark_lines(recipe, rank_part(recipe, ranks))) for ranks in (1, 2)] == [
        False,
        True,
    ]
    assert remarks.remark_lines(recipe, rank_part(recipe, 2)) == [
        "note: fp8.keep_transpose_cache=true: no effect with one microbatch per step"
    ]


def test_no_advice_that_is_refused() -> None:
    assert (
        problems("precision=bf16 storage.weight_grad=fp8_expand storage.comm=fp8")[-1]
        == "storage.comm=fp8: gradients are stored in fp8_expand and sent unchanged; set it to bf16 or fp32 to sum them before they are stored"
    )


def test_fp8_params_false_is_rejected_under_o3() -> None:
    words = ["precision=bf16_fp8", "opt_level=O3"]
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.params=false: has no effect, opt_level=O3"):
        fp8cfg.compose([*words, "fp8.params=false"])
    recipe = fp8cfg.compose(words)
    assert recipe.fp8.params
    assert fp8cfg.compose([], base=recipe) == recipe
    # The default of a preset, which nobody wrote, is no contradiction.
    assert fp8_weights(fp8cfg.compose(["precision=bf16_fp8_block", "opt_level=O3"]).precision)
