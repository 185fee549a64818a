"""Presets hold NeMo's and Megatron-Bridge's values, written once, and reachable from both doors."""

from __future__ import annotations

import math

import pytest

import fp8cfg
from fp8cfg.planning import remarks
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.presets import FUNCTIONS, PRESETS, choices, precision_preset
from fp8cfg.schema.storage import resolved
from tests.support.small import chart_row, losses

#            function                                            compute  scaling    format    params start end
TABLE = [
    ("bf16_mixed", "bf16", None, None, False, 0, 0),
    ("fp16_mixed", "fp16", None, None, False, 0, 0),
    ("bf16_with_fp8_mixed", "bf16", "delayed", "hybrid", True, 0, 0),
    ("fp16_with_fp8_mixed", "fp16", "delayed", "hybrid", True, 0, 0),
    ("bf16_with_fp8_delayed_scaling_mixed", "bf16", "delayed", "hybrid", True, 0, 0),
    ("fp16_with_fp8_delayed_scaling_mixed", "fp16", "delayed", "hybrid", True, 0, 0),
    ("bf16_with_fp8_current_scaling_mixed", "bf16", "current", "hybrid", True, 1, 1),
    ("fp16_with_fp8_current_scaling_mixed", "fp16", "current", "hybrid", True, 1, 1),
    ("bf16_with_fp8_subchannel_scaling_mixed", "bf16", "block", "hybrid", False, 0, 0),
    ("fp16_with_fp8_subchannel_scaling_mixed", "fp16", "block", "hybrid", False, 0, 0),
    ("bf16_with_mxfp8_mixed", "bf16", "mxfp8", "e4m3", True, 0, 0),
    ("fp16_with_mxfp8_mixed", "fp16", "mxfp8", "e4m3", True, 0, 0),
    ("nemotron_h_bf16_with_fp8_current_scaling_mixed", "bf16", "current", "hybrid", True, 2, 2),
    ("nanov2_bf16_with_fp8_current_scaling_mixed", "bf16", "block", "hybrid", True, 2, 2),
    ("bf16_with_nvfp4_mixed", "bf16", "nvfp4", "e4m3", True, 0, 0),
    ("nemotron_3_super_bf16_with_nvfp4_mixed", "bf16", "nvfp4", "e4m3", True, 0, 14),
    ("bf16_precision_aware_mixed", "bf16", None, None, False, 0, 0),
    ("bf16_with_fp8_te_fused_adam_mixed", "bf16", "delayed", "hybrid", True, 0, 0),
    ("bf16_with_fp8_block_deepseek_v3_mixed", "bf16", "block", "e4m3", False, 0, 0),
    ("bf16_adamw_fp8_mixed", "bf16", None, None, False, 0, 0),
    ("bf16_with_fp8_current_coat_mixed", "bf16", "current", "hybrid", False, 0, 0),
    ("fp16_amp", "fp16", None, None, False, 0, 0),
    ("bf16_with_fp8_amp", "bf16", "delayed", "hybrid", False, 0, 0),
    ("fp32", "fp32", None, None, False, 0, 0),
]


@pytest.mark.parametrize(("name", "compute", "scaling", "format", "params", "start", "end"), TABLE)
def test_values(
    name: str,
    compute: str,
    scaling: str | None,
    format: str | None,
    params: bool,
    start: int,
    end: int,
) -> None:
    p = getattr(fp8cfg, name)()
    assert (p.compute, p.fp8.enabled, p.fp8.params) == (compute, scaling is not None, params)
    assert (p.fp8.high_precision_at_start, p.fp8.high_precision_at_end) == (start, end)
    if scaling:
        assert (p.fp8.scaling, p.fp8.format) == (scaling, format)
        assert (p.fp8.margin, p.fp8.amax_history_len, p.fp8.amax_compute_algo) == (0, 1024, "max")
    assert (p.initial_loss_scale, p.min_loss_scale, p.loss_scale_window, p.hysteresis) == (
        2.0**32,
        1.0,
        1000,
        2,
    )


def test_the_table_and_the_public_names_are_complete() -> None:
    assert {row[0] for row in TABLE} == set(FUNCTIONS) == set(PRESETS) == set(fp8cfg._PRESETS)
    assert set(FUNCTIONS.values()) == set(choices())


def test_fp16_twins_differ_in_compute_and_comm_alone() -> None:
    for name in choices():
        twin = name.replace("bf16", "fp16", 1)
        if "bf16" not in name or twin not in choices():
            continue
        one, other = precision_preset(name), precision_preset(twin)
        columns = [k for k, v in resolved(one).items() if v != resolved(other)[k]]
        assert set(columns) <= {"weight", "weight_grad", "comm"}
        assert (resolved(one)["comm"], resolved(other)["comm"]) == ("fp32", "fp16")
        other.compute = one.compute
        assert one == other


def test_one_source_for_both_doors() -> None:
    for name, stem in FUNCTIONS.items():
        by_word = fp8cfg.compose([f"precision={stem}", "model.num_layers=32"]).precision
        assert by_word == getattr(fp8cfg, name)() == precision_preset(name.replace("_", "-"))


def test_a_preset_function_takes_changes() -> None:
    p = fp8cfg.bf16_with_fp8_mixed(compute="fp16")
    assert p.compute == "fp16" and p.fp8.enabled and isinstance(p, Precision)
    with pytest.raises(fp8cfg.ConfigError, match=r"precision\.marginn"):
        fp8cfg.bf16_with_fp8_mixed(marginn=1)


def test_storage_resolves_as_megatron_does() -> None:
    assert resolved(fp8cfg.bf16_mixed()) == {
        "weight": "bf16",
        "master_weight": "fp32",
        "weight_grad": "fp32",
        "comm": "fp32",
        "exp_avg": "fp32",
        "exp_avg_sq": "fp32",
    }
    assert resolved(fp8cfg.fp16_mixed())["comm"] == "fp16"
    assert resolved(fp8cfg.fp32())["master_weight"] == "none"
    assert resolved(fp8cfg.bf16_with_fp8_mixed())["weight"] == "fp8"


#    preset                        weight  master_weight  weight_grad  comm    exp_avg       exp_avg_sq    bytes of a parameter
STORED = [
    (
        "bf16_precision_aware",
        "bf16    fp16_scaled    bf16         bf16    fp8           fp16_scaled",
        9,
    ),
    (
        "bf16_fp8_te_fused_adam",
        "fp8     fp32           fp32         fp32    fp8           fp16_scaled",
        12,
    ),
    (
        "bf16_fp8_block_deepseek_v3",
        "bf16    fp32           fp32         fp32    bf16          bf16",
        14,
    ),
    (
        "bf16_adamw_fp8",
        "bf16    none           bf16         bf16    fp8_block     fp8_block",
        6.0625,
    ),
    (
        "bf16_fp8_current_coat",
        "bf16    fp32           fp32         fp32    fp8_expand    fp8_expand",
        12.125,
    ),
]


@pytest.mark.parametrize(("name", "codecs", "each"), STORED)
def test_presets_of_storage(name: str, codecs: str, each: float) -> None:
    """What they store; the rules for the betas and learning rates of small and large recipes; and that they train."""
    for recipe in ("llama_tiny", "llama_8b"):
        composed = fp8cfg.compose([f"recipe={recipe}", f"precision={name}"])
        composed.check()
        assert list(resolved(composed.precision).values()) == codecs.split()
        assert remarks.bytes_per_parameter(chart_row(composed)) == each
    seen = losses(f"precision={name}", count=6)
    assert all(map(math.isfinite, seen)) and seen[-1] < seen[0] - 0.5
