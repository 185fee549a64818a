"""Rules of torchao 0.18: current scaling through Float8Linear, and MXFP8 through the prototype MXFP8Linear."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import util

from fp8cfg.backends.native.rules import found, no_units
from fp8cfg.schema.backends import EMULATE, Hardware
from fp8cfg.schema.fp8 import FP8, per_row, weights_2d
from fp8cfg.schema.packages import installed_version
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import fp8_weight_setting, level
from fp8cfg.schema.violation import Violation

LEAST = (0, 18)
"""The oldest torchao whose float8 and mxfp8 training this backend knows."""
MX_CAPABILITY = (10, 0)
"""Least CUDA compute capability with MXFP8 products: Blackwell. Those of 12.0 and above have other instructions."""


def blocks(fp8: FP8) -> bool:
    """Whether MXFP8Linear multiplies, instead of Float8Linear."""
    return SCALINGS[fp8.scaling].torchao == "mx"


def unavailable() -> str:
    if util.find_spec("torchao") is None:
        return "torchao is not installed"
    version = installed_version("torchao")
    if version is None:
        return "torchao has no version, its installation is not complete"
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return (
        "" if release >= LEAST else f"torchao {version} is older than {'.'.join(map(str, LEAST))}"
    )


def refusals(precision: Precision, hardware: Hardware) -> list[Violation]:
    lines = [*_not_there(precision), *(_mxfp8(precision) if blocks(precision.fp8) else ())]
    emulates = product(precision, hardware)[0] == "emulate"
    return lines or (
        [] if emulates else no_units(precision, hardware) or _hardware_lacks(precision, hardware)
    )


def product(precision: Precision, hardware: Hardware) -> tuple[str, str]:
    if hardware.device == "cpu":
        return "emulate", "torchao emulates FP8 on a CPU, in float32"
    if precision.fp8.emulate:
        return "emulate", "fp8.emulate=true"
    return "scaled_mm", "torchao, FP8 matrix products of the GPU"


def misfit(fp8: FP8, in_features: int, out_features: int) -> str:
    multiple = _multiple(fp8)
    for what, size in (("in", in_features), ("out", out_features)):
        if size % multiple:
            return f"{what}_features={size} is not a multiple of {multiple}"
    return ""


def tokens_multiple(fp8: FP8, product: str) -> int:
    return (
        1 if product == "emulate" and not blocks(fp8) else _multiple(fp8)
    )  # wgrad contracts tokens


def against_sharding(precision: Precision) -> list[Violation]:
    return []


def against_environment(fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
    return []


def instead(precision: Precision) -> str:
    return "backend=native"


def _multiple(fp8: FP8) -> int:
    return 32 if blocks(fp8) else 16


def _not_there(p: Precision) -> list[Violation]:
    f, lines = p.fp8, list[Violation]()
    preset = f"{p.compute if p.compute != 'fp32' else 'bf16'}_fp8_current"
    if not SCALINGS[f.scaling].torchao:
        those = " and ".join(name for name, scaling in SCALINGS.items() if scaling.torchao)
        lines.append(
            Violation(
                f"fp8.scaling={f.scaling}",
                f"torchao has only {those}; set backend=native, or precision={preset}",
            )
        )
    if f.params:
        said = fp8_weight_setting(p)
        cure = (
            "fp8.params=false"
            if said == "fp8.params=true"
            else "opt_level=O2"
            if level(p)
            else "storage.weight=fp16_scaled"
        )
        lines.append(
            Violation(
                said,
                f"torchao does not multiply weights that are stored in FP8; set"
                f" backend=native, or {cure}",
                [("fp8.params", False)] if said == "fp8.params=true" else [],
                ["backend"],
            )
        )
    lines += [
        Violation(
            f"fp8.{key}=true",
            "torchao leaves attention as it is; set backend=native, or remove it",
            [(f"fp8.{key}", False)],
            ["backend"],
        )
        for key in ("dot_product_attention", "multi_head_attention")
        if getattr(f, key)
    ]
    return lines


def _mxfp8(p: Precision) -> list[Violation]:
    f, high = p.fp8, p.fp8.override_linear_precision
    lines = [
        Violation(
            f"fp8.override_linear_precision.{gemm}=true",
            "torchao's MXFP8Linear keeps only wgrad in"
            " high precision; set backend=native, or remove it",
            [(f"fp8.override_linear_precision.{gemm}", False)],
            ["backend"],
        )
        for gemm in ("fprop", "dgrad")
        if getattr(high, gemm)
    ]
    if weights_2d(f):
        lines.append(
            Violation(
                "fp8.enable_2d_quantization=true",
                "torchao scales weights along rows; set backend=native, or remove it",
                [("fp8.enable_2d_quantization", False)],
                ["backend"],
            )
        )
    if p.compute == "fp16":
        lines.append(
            Violation(
                "precision.compute=fp16",
                "torchao quantizes bf16 and fp32 to MXFP8; set backend=native, or bf16",
                [("precision.compute", "bf16")],
                ["backend"],
            )
        )
    return list(lines)


def _hardware_lacks(p: Precision, hardware: Hardware) -> list[Violation]:
    capability = hardware.capability or (0, 0)
    if blocks(p.fp8) and not MX_CAPABILITY <= capability < (12, 0):
        return [
            Violation(
                f"fp8.scaling={p.fp8.scaling}",
                f"{found(hardware)}, torchao's MXFP8 needs 10.0"
                f" (Blackwell); {EMULATE}, or"
                f" precision={p.compute if p.compute != 'fp32' else 'bf16'}_fp8_current",
            )
        ]
    if per_row(p.fp8) and p.compute != "bf16":
        return [
            Violation(
                "fp8.granularity=row",
                "torch's product with scales of rows gives bf16, not"
                f" precision.compute={p.compute}; set backend=native, or precision.compute=bf16",
            )
        ]
    return []
