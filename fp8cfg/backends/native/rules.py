"""Rules of the native backend: emulation of every scaling, and on GPUs torch's scaled products."""

from __future__ import annotations

from collections.abc import Mapping

from fp8cfg.schema.backends import EMULATE, Hardware, dotted
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.scalings import SCALINGS, needed
from fp8cfg.schema.storage import against_fp8_gather
from fp8cfg.schema.violation import Violation

FP8_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with FP8 GEMMs: Ada (8.9). Hopper is 9.0."""
BLOCK_CUDA = max(scaling.cuda for scaling in SCALINGS.values())
"""Lowest CUDA version whose cuBLAS supports blockwise scales on Hopper."""
ALIGNMENT = 16
"""Scaled GEMMs need contracted and last dimensions divisible by this (cuBLASLt, TE section 3.4)."""


def unavailable() -> str:
    """Returns "": the backend only needs torch."""
    return ""


def refusals(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a violation for each setting that it cannot run, as in `Rules.refusals`."""
    fp8 = precision.fp8
    scaling = SCALINGS[fp8.scaling]
    lines = []
    # Blockwise attention would have to match cuDNN, which quantizes the softmax in its own way.
    if fp8.dot_product_attention and scaling.block and "dot_product_attention" in scaling.attention:
        lines.append(
            Violation(
                "fp8.dot_product_attention=true",
                f"the native backend has none under fp8.scaling={fp8.scaling}, where cuDNN"
                " quantizes the softmax by its own rules; remove it or set fp8.scaling=current",
            )
        )
    if fp8.multi_head_attention:
        lines.append(
            Violation(
                "fp8.multi_head_attention=true",
                "needs FP8 outputs of the projections: backend=te; remove it",
            )
        )
    # A user fixes the keys first. They decide which hardware is needed.
    if lines or product(precision, hardware)[0] == "emulate":
        return lines
    return _hardware_lacks(precision, hardware)


def product(precision: Precision, hardware: Hardware) -> tuple[str, str]:
    """Returns "emulate" or "scaled_mm", and why."""
    if hardware.device == "cpu":
        return "emulate", "a CPU emulates FP8"
    if precision.fp8.emulate:
        return "emulate", "fp8.emulate=true"
    return "scaled_mm", "FP8 matrix products of the GPU"


def misfit(fp8: FP8, in_features: int, out_features: int) -> str:
    """Returns why a layer of these sizes stays in high precision, or ""."""
    # Fprop contracts in_features, dgrad contracts out_features. Emulation keeps the limit, so that
    # a plan does not depend on the machine.
    for side, size in (("in", in_features), ("out", out_features)):
        if size % ALIGNMENT:
            return f"{side}_features={size} is not a multiple of {ALIGNMENT}"
    return ""


def tokens_multiple(fp8: FP8, product: str) -> int:
    """Returns 1: any number of tokens is supported."""
    return 1  # numerics/gemm.py pads tokens with zeros


def against_sharding(precision: Precision) -> list[Violation]:
    """Returns a violation if FSDP2 cannot gather the weights in FP8."""
    if precision.storage.shard == "fsdp" and precision.storage.gather == "fp8":
        reasons = against_fp8_gather(precision, "native")
        return [Violation("storage.gather=fp8", reason) for reason in reasons]
    return []


def against_environment(fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
    """Returns nothing: no environment variable changes its results."""
    return []


def instead(precision: Precision) -> str:
    """Returns the override for this backend."""
    return "backend=native"


def no_units(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a violation if the GPU has no FP8 units."""
    if (hardware.capability or (0, 0)) >= FP8_CAPABILITY:
        return []
    return [
        Violation(
            "fp8.enabled=true",
            f"{describe_gpu(hardware)}, FP8 needs 8.9 (Ada) or 9.0 (Hopper); {EMULATE}, or"
            " precision=bf16",
        )
    ]


def describe_gpu(hardware: Hardware) -> str:
    """Describes the GPU for messages."""
    return f"this GPU has compute capability {dotted(hardware.capability)}"


def _hardware_lacks(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a violation if the GPU or its CUDA version cannot multiply with the scaling.

    The message suggests a setting that works.
    """
    lines = no_units(precision, hardware)
    if lines:
        return lines
    fp8 = precision.fp8
    scaling = SCALINGS[fp8.scaling]
    capability = hardware.capability or (0, 0)
    # fp32 has no FP8 presets.
    compute = "bf16" if precision.compute == "fp32" else precision.compute
    preset = f"{compute}_fp8_current"
    if scaling.least is None:
        return [
            Violation(
                f"fp8.scaling={fp8.scaling}",
                f"the native backend multiplies it only by emulation, and"
                f" {describe_gpu(hardware)}; {EMULATE}, or precision={preset}",
            )
        ]
    if capability < scaling.least or (scaling.below and capability >= scaling.below):
        return [
            Violation(
                f"fp8.scaling={fp8.scaling}",
                f"{describe_gpu(hardware)}, {fp8.scaling} scaling needs {needed(scaling.least)};"
                f" {EMULATE}, or precision={preset}",
            )
        ]
    if (hardware.cuda or (0, 0)) < scaling.cuda:
        return [
            Violation(
                f"fp8.scaling={fp8.scaling}",
                f"torch has CUDA {dotted(hardware.cuda)}, {fp8.scaling} scaling needs"
                f" {dotted(scaling.cuda)}; {EMULATE}, or precision={preset}",
            )
        ]
    # Without FP8 dgrad and wgrad no GEMM has a gradient operand, so its format does not matter.
    override = fp8.override_linear_precision
    has_fp8_gradients = not (override.dgrad and override.wgrad)
    if fp8.format not in scaling.multiplied and has_fp8_gradients:
        supported = scaling.multiplied[0]
        return [
            Violation(
                f"fp8.format={fp8.format}",
                f"torch multiplies fp8.scaling={fp8.scaling} in {supported.upper()}"
                f" only, also gradients; set fp8.format={supported}, or"
                f" {EMULATE.removeprefix('set ')}",
            )
        ]
    if fp8.dot_product_attention:
        return [
            Violation(
                "fp8.dot_product_attention=true",
                f"the native backend has it only by emulation; {EMULATE}, or remove it",
            )
        ]
    return []
