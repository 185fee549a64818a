"""Key table of backend=te: each key applied, and where that is read back, or refused, and with which line.

python tests/support/te_table.py        # the table; tests/backends/test_te_keys.py holds every row against genuine Transformer Engine objects
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8cfg.schema.fp8 import FP8

Read = Callable[[Any], Any]
"""What stands in a Converted (see test_te_keys.py)."""


@dataclass(frozen=True)
class Applied:
    key: str
    given: dict[str, Any]
    where: str
    read: Read
    want: Any


@dataclass(frozen=True)
class Refused:
    key: str
    given: dict[str, Any]
    line: str
    compute: str = "bf16"


def field(name: str) -> Read:
    return lambda c: getattr(c.recipe, name)


def shown(name: str) -> Read:
    return lambda c: getattr(c.recipe, name).name


def linears(c: Any) -> list[str]:
    return c.converted


CURRENT, BLOCK, MXFP8, NVFP4 = (
    {"scaling": s, "format": f}
    for s, f in (("current", "hybrid"), ("block", "hybrid"), ("mxfp8", "e4m3"), ("nvfp4", "e4m3"))
)
APPLIED = [
    Applied("fp8.enabled", {}, "layers with a genuine module", lambda c: len(linears(c)), 8),
    Applied(
        "fp8.scaling",
        {},
        "class of the recipe",
        lambda c: type(c.recipe).__name__,
        "DelayedScaling",
    ),
    Applied(
        "fp8.scaling",
        CURRENT,
        "class of the recipe",
        lambda c: type(c.recipe).__name__,
        "Float8CurrentScaling",
    ),
    Applied(
        "fp8.scaling",
        BLOCK,
        "class of the recipe",
        lambda c: type(c.recipe).__name__,
        "Float8BlockScaling",
    ),
    Applied(
        "fp8.scaling",
        MXFP8,
        "class of the recipe",
        lambda c: type(c.recipe).__name__,
        "MXFP8BlockScaling",
    ),
    Applied(
        "fp8.scaling",
        NVFP4,
        "class of the recipe",
        lambda c: type(c.recipe).__name__,
        "NVFP4BlockScaling",
    ),
    *(
        Applied(
            "fp8.format", s | {"format": "e4m3"}, "recipe.fp8_format", shown("fp8_format"), "E4M3"
        )
        for s in ({}, CURRENT, BLOCK)
    ),
    *(
        Applied(
            "fp8.format",
            s,
            "dtype of the grad_output quantizer",
            lambda c: c.quantizers[3].dtype.name,
            "kFloat8E5M2",
        )
        for s in ({}, CURRENT, BLOCK)
    ),
    Applied("fp8.margin", {"margin": 3}, "recipe.margin", field("margin"), 3),
    Applied(
        "fp8.amax_history_len",
        {"amax_history_len": 16},
        "recipe.amax_history_len",
        field("amax_history_len"),
        16,
    ),
    Applied(
        "fp8.amax_history_len",
        {"amax_history_len": 16},
        "rows of fp8_meta amax_history",
        lambda c: len(c.history),
        16,
    ),
    Applied(
        "fp8.amax_compute_algo",
        {"amax_compute_algo": "most_recent"},
        "recipe.amax_compute_algo",
        field("amax_compute_algo"),
        "most_recent",
    ),
    Applied(
        "fp8.reduce_amax", {"reduce_amax": False}, "recipe.reduce_amax", field("reduce_amax"), False
    ),
    Applied(
        "fp8.first_step",
        {"first_step": "te"},
        "fp8_meta scale, all ones",
        lambda c: c.scales,
        [1.0, 1.0, 1.0],
    ),
    *(
        Applied(
            "fp8.use_power_2_scales",
            s | {"use_power_2_scales": on},
            f"force_pow_2_scales of the {t} quantizer",
            lambda c, i=i: c.quantizers[i].force_pow_2_scales,
            on,
        )
        for s in (CURRENT, BLOCK)
        for on in (True, False)
        for i, t in ((0, "input"), (1, "weight"), (3, "grad_output"))
    ),
    *(
        Applied(
            "fp8.enable_2d_quantization",
            BLOCK | {"enable_2d_quantization": on},
            "block_scaling_dim of the weight quantizer",
            lambda c: c.quantizers[1].block_scaling_dim,
            2 if on else 1,
        )
        for on in (True, False)
    ),
    *(
        Applied(
            "fp8.enable_2d_quantization",
            s | {"enable_2d_quantization": on},
            "with_2d_quantization of the weight quantizer",
            lambda c: c.quantizers[1].with_2d_quantization,
            on,
        )
        for s in (MXFP8, NVFP4)
        for on in (True, False)
    ),
    *(
        Applied(
            "fp8.random_hadamard_transform",
            NVFP4 | {"random_hadamard_transform": on},
            f"with_rht of the {t} quantizer",
            lambda c, i=i: c.quantizers[i].with_rht,
            on,
        )
        for on in (True, False)
        for i, t in ((0, "input"), (3, "grad_output"))
    ),
    *(
        Applied(
            "fp8.stochastic_rounding",
            NVFP4 | {"stochastic_rounding": on},
            "stochastic_rounding of the grad_output quantizer",
            lambda c: c.quantizers[3].stochastic_rounding,
            on,
        )
        for on in (True, False)
    ),
    Applied(
        "fp8.params",
        {"params": True},
        "class of the weight",
        lambda c: type(c.layer.weight).__name__,
        "Float8Tensor",
    ),
    *(
        Applied(
            "fp8.params",
            s | {"params": True},
            "class of the weight",
            lambda c: type(c.layer.weight).__name__,
            f"{name}Tensor",
        )
        for s, name in (
            (CURRENT, "Float8"),
            (BLOCK, "Float8BlockwiseQ"),
            (MXFP8, "MXFP8"),
            (NVFP4, "NVFP4"),
        )
    ),
    *(
        Applied(
            f"fp8.override_linear_precision.{g}",
            s | {"override_linear_precision": {"dgrad": True, "wgrad": True}},
            "recipe.backward_override",
            field("backward_override"),
            "high_precision",
        )
        for s in (CURRENT, BLOCK, MXFP8, NVFP4)
        for g in ("dgrad", "wgrad")
    ),
    Applied(
        "fp8.high_precision_at_start",
        {"high_precision_at_start": 1},
        "layers that stay nn.Linear",
        lambda c: linears(c)[0][:9],
        "layers.1.",
    ),
    Applied(
        "fp8.high_precision_at_end",
        {"high_precision_at_end": 1},
        "layers that stay nn.Linear",
        lambda c: linears(c)[-1][:9],
        "layers.0.",
    ),
    Applied(
        "fp8.include",
        {"include": ("*.linear_fc2",)},
        "layers that stay nn.Linear",
        lambda c: len(linears(c)),
        2,
    ),
    Applied(
        "fp8.exclude",
        {"exclude": ("*.linear_fc2",)},
        "layers that stay nn.Linear",
        lambda c: len(linears(c)),
        6,
    ),
    Applied(
        "fp8.output_layer",
        {"output_layer": True},
        "class of output_layer",
        lambda c: type(c.model.output_layer).__name__,
        "TELinear",
    ),
    Applied(
        "fp8.dot_product_attention",
        {"dot_product_attention": True, "margin": 2},
        "recipe.fp8_dpa, with the margin",
        lambda c: (c.recipe.fp8_dpa, c.recipe.margin),
        (True, 2),
    ),
    Applied(
        "fp8.dot_product_attention",
        CURRENT | {"dot_product_attention": True},
        "recipe.fp8_dpa",
        field("fp8_dpa"),
        True,
    ),
    Applied(
        "fp8.dot_product_attention",
        {"dot_product_attention": True},
        "class of core_attention",
        lambda c: type(c.model.layers[0].self_attention.core_attention).__name__,
        "TEAttention",
    ),
]
REFUSED = [
    Refused("fp8.interval", {"interval": 2}, "since 2.3 its recipe has no interval"),
    Refused(
        "fp8.first_step", {"first_step": "in_time"}, "begins with scale 1; set fp8.first_step=te"
    ),
    Refused(
        "fp8.tp_only_amax_red",
        {"tp_only_amax_red": True},
        "its layers reduce amaxes over all ranks here, or none",
    ),
    Refused("fp8.granularity", CURRENT | {"granularity": "row"}, "one scale for a tensor"),
    Refused(
        "fp8.override_linear_precision.fprop",
        CURRENT | {"override_linear_precision": {"fprop": True}},
        "fprop never",
    ),
    Refused(
        "fp8.override_linear_precision.dgrad",
        CURRENT | {"override_linear_precision": {"dgrad": True}},
        "together or neither",
    ),
    Refused(
        "fp8.override_linear_precision.wgrad",
        CURRENT | {"override_linear_precision": {"wgrad": True}},
        "together or neither",
    ),
    Refused(
        "fp8.override_linear_precision.dgrad",
        {"override_linear_precision": {"dgrad": True, "wgrad": True}},
        "no backward_override under fp8.scaling=delayed",
    ),
    Refused(
        "fp8.multi_head_attention",
        {"dot_product_attention": True, "multi_head_attention": True},
        "rotary positions are applied between",
    ),
    Refused("fp8.emulate", {"emulate": True}, "only on the GPU's FP8 units"),
    Refused("precision.compute", NVFP4, "Hadamard transform takes only bf16", "fp16"),
    Refused("fp8.params", {"params": True}, "which get no master copy", "fp32"),
]
ELSEWHERE = {
    "fp8.min_coverage": "training/step.py, from observed()",
    "fp8.use_autocast_during_eval": "autocast(enabled=...)",
    "fp8.keep_transpose_cache": "refused, schema/rules_fp8.py: Transformer Engine keeps transposes",
}


def node(given: dict[str, Any]) -> FP8:
    """An `fp8` node with the settings that Transformer Engine needs of every recipe, and those `given`."""
    delayed = given.get("scaling", "delayed") == "delayed"
    return FP8(enabled=True, **({"first_step": "te"} if delayed else {}) | given)


if __name__ == "__main__":
    lines = {}
    for row in sorted([*APPLIED, *REFUSED], key=lambda r: r.key):
        scaling = row.given.get("scaling", "delayed")
        what = f"applied: {row.where}" if isinstance(row, Applied) else f"refused: ...{row.line}..."
        lines[f"{row.key:38} {scaling:8} {what}"] = None
    print("\n".join(lines))
