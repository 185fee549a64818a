"""Rules of torchao 0.18: Float8Linear for current scaling, prototype MXFP8Linear for MXFP8."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import util

from fp8cfg.backends.native.rules import describe_gpu, no_units
from fp8cfg.schema.backends import EMULATE, Hardware
from fp8cfg.schema.fp8 import FP8, per_row, weights_2d
from fp8cfg.schema.packages import installed_version, major_and_minor
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import fp8_weight_setting, level
from fp8cfg.schema.violation import Violation

LEAST = (0, 18)
"""Lowest supported version. Older ones have another API for FP8 and MXFP8 training."""
MX_CAPABILITY = (10, 0)
"""Lowest compute capability with MXFP8 GEMMs: Blackwell."""
MX_BELOW = (12, 0)
"""Compute capability from which GPUs have other MXFP8 instructions."""


def blocks(fp8: FP8) -> bool:
    """Whether layers are MXFP8Linear, otherwise Float8Linear."""
    return SCALINGS[fp8.scaling].torchao == "mx"


def unavailable() -> str:
    """Returns why torchao cannot be imported here, or ""."""
    if util.find_spec("torchao") is None:
        return "torchao is not installed"
    version = installed_version("torchao")
    if version is None:
        return "torchao has no version, its installation is not complete"
    if major_and_minor(version) < LEAST:
        return f"torchao {version} is older than {'.'.join(map(str, LEAST))}"
    return ""


def refusals(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a violation for each setting that it cannot run, as in `Rules.refusals`."""
    lines = _unsupported_keys(precision)
    if blocks(precision.fp8):
        lines += _unsupported_mxfp8_keys(precision)
    # A user fixes the keys first. They decide which hardware is needed.
    if lines or product(precision, hardware)[0] == "emulate":
        return lines
    return no_units(precision, hardware) or _hardware_lacks(precision, hardware)


def product(precision: Precision, hardware: Hardware) -> tuple[str, str]:
    """Returns "emulate" or "scaled_mm", and why."""
    if hardware.device == "cpu":
        return "emulate", "torchao emulates FP8 on a CPU, in float32"
    if precision.fp8.emulate:
        return "emulate", "fp8.emulate=true"
    return "scaled_mm", "torchao, FP8 matrix products of the GPU"


def misfit(fp8: FP8, in_features: int, out_features: int) -> str:
    """Returns why a layer of these sizes stays in high precision, or ""."""
    multiple = _multiple(fp8)
    for side, size in (("in", in_features), ("out", out_features)):
        if size % multiple:
            return f"{side}_features={size} is not a multiple of {multiple}"
    return ""


def tokens_multiple(fp8: FP8, product: str) -> int:
    """Returns the number that must divide the tokens of a forward pass. wgrad contracts them."""
    if product == "emulate" and not blocks(fp8):
        return 1
    return _multiple(fp8)


def against_sharding(precision: Precision) -> list[Violation]:
    """Returns nothing: all sharding is supported."""
    return []


def against_environment(fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
    """Returns nothing: no environment variable changes its results."""
    return []


def instead(precision: Precision) -> str:
    """Returns the override for machines without torchao."""
    return "backend=native"


def _multiple(fp8: FP8) -> int:
    """Returns the divisor of contracted dimensions: an MXFP8 block, or 16 bytes for cuBLAS."""
    return 32 if blocks(fp8) else 16


def _unsupported_keys(precision: Precision) -> list[Violation]:
    """Returns a violation for each key that torchao does not support."""
    fp8 = precision.fp8
    lines = []
    if not SCALINGS[fp8.scaling].torchao:
        supported = [name for name, scaling in SCALINGS.items() if scaling.torchao]
        lines.append(
            Violation(
                f"fp8.scaling={fp8.scaling}",
                f"torchao has only {' and '.join(supported)}; set backend=native, or"
                f" precision={_current_preset(precision)}",
            )
        )
    if fp8.params:
        lines.append(_fp8_weight_violation(precision))
    for key in ("dot_product_attention", "multi_head_attention"):
        if getattr(fp8, key):
            lines.append(
                Violation(
                    f"fp8.{key}=true",
                    "torchao leaves attention as it is; set backend=native, or remove it",
                    [(f"fp8.{key}", False)],
                    ["backend"],
                )
            )
    return lines


def _current_preset(precision: Precision) -> str:
    """Returns the preset with current scaling and the same compute dtype. fp32 has none."""
    compute = "bf16" if precision.compute == "fp32" else precision.compute
    return f"{compute}_fp8_current"


def _fp8_weight_violation(precision: Precision) -> Violation:
    """Returns the violation for FP8 weights. Its advice changes the key that requests them."""
    setting = fp8_weight_setting(precision)
    fixes: list[tuple[str, object]] = []
    if setting == "fp8.params=true":
        advice = "fp8.params=false"
        fixes = [("fp8.params", False)]
    elif level(precision):
        advice = "opt_level=O2"
    else:
        advice = "storage.weight=fp16_scaled"
    return Violation(
        setting,
        f"torchao does not multiply weights that are stored in FP8; set backend=native, or"
        f" {advice}",
        fixes,
        ["backend"],
    )


def _unsupported_mxfp8_keys(precision: Precision) -> list[Violation]:
    """Returns a violation for each key that torchao's MXFP8Linear does not support."""
    fp8 = precision.fp8
    lines = []
    for gemm in ("fprop", "dgrad"):
        if getattr(fp8.override_linear_precision, gemm):
            lines.append(
                Violation(
                    f"fp8.override_linear_precision.{gemm}=true",
                    "torchao's MXFP8Linear keeps only wgrad in"
                    " high precision; set backend=native, or remove it",
                    [(f"fp8.override_linear_precision.{gemm}", False)],
                    ["backend"],
                )
            )
    if weights_2d(fp8):
        lines.append(
            Violation(
                "fp8.enable_2d_quantization=true",
                "torchao scales weights along rows; set backend=native, or remove it",
                [("fp8.enable_2d_quantization", False)],
                ["backend"],
            )
        )
    if precision.compute == "fp16":
        lines.append(
            Violation(
                "precision.compute=fp16",
                "torchao quantizes bf16 and fp32 to MXFP8; set backend=native, or bf16",
                [("precision.compute", "bf16")],
                ["backend"],
            )
        )
    return lines


def _hardware_lacks(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a violation if the GPU or its GEMMs do not support the scaling."""
    fp8 = precision.fp8
    capability = hardware.capability or (0, 0)
    if blocks(fp8) and not MX_CAPABILITY <= capability < MX_BELOW:
        return [
            Violation(
                f"fp8.scaling={fp8.scaling}",
                f"{describe_gpu(hardware)}, torchao's MXFP8 needs 10.0"
                f" (Blackwell); {EMULATE}, or precision={_current_preset(precision)}",
            )
        ]
    if per_row(fp8) and precision.compute != "bf16":
        return [
            Violation(
                "fp8.granularity=row",
                "torch's product with scales of rows gives bf16, not"
                f" precision.compute={precision.compute}; set backend=native, or"
                " precision.compute=bf16",
            )
        ]
    return []
