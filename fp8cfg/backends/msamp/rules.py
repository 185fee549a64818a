"""Rules of MS-AMP 0.4: its delayed scaling for linear layers, and the storage of levels O1 and O2.

The package is unmaintained and on no index, and Accelerate has deprecated it. This backend has not
run with its kernels, see backend.py. Importing MS-AMP patches torch, so the rules only look for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from fp8cfg.schema.backends import Hardware, dotted
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import COLUMNS, level, of_level, resolved
from fp8cfg.schema.violation import Violation

LIBRARY = Path("/usr/local/lib/libmsamp_dist.so")
"""The only path from which MS-AMP loads its communication (msamp/operators/dist_op/dist_op.py)."""
PARTS = (
    "msamp_adamw",
    "msamp_arithmetic",
    "msamp_quantize",
    "transformer_engine_extensions",
    "deepspeed",
    "colorlog",
)
"""Modules that `import msamp` needs: its compiled parts, the compiled part of Transformer Engine
before 1.9, and two packages."""
H100 = (9, 0)
SCALINGS = ("delayed",)
_FIXED_VALUES: dict[str, tuple[object, str]] = {
    "format": ("hybrid", "quantizes to E4M3 forward, and gradients to E5M2"),
    "margin": (0, "has no margin"),
    "interval": (1, "moves scales in every step"),
    "amax_history_len": (16, "keeps the amaxes of 16 steps"),
    "amax_compute_algo": ("max", "takes the largest amax of its history"),
    "reduce_amax": (
        False,
        "takes the amaxes of inputs and their gradients only from each rank itself",
    ),
    "first_step": ("in_time", "scales in time until its history is full"),
    "dot_product_attention": (False, "leaves attention as it is"),
    "multi_head_attention": (False, "leaves attention as it is"),
    "emulate": (False, "multiplies only on the GPU's FP8 units"),
}
"""FP8 keys with the only value that MS-AMP supports, and its behavior for the message."""


def unavailable() -> str:
    """Returns why MS-AMP cannot be imported here, or ""."""
    if find_spec("msamp") is None:
        return "msamp is not installed, and on no index (github.com/Azure/MS-AMP)"
    missing = [name for name in PARTS if find_spec(name) is None]
    if not LIBRARY.is_file():
        missing.append(str(LIBRARY))
    if missing:
        return f"msamp is installed without {', '.join(missing)}, which it loads"
    return ""


def instead(precision: Precision) -> str:
    """Returns overrides for the native backend with MS-AMP's storage and power-of-two scales."""
    msamp_precision = precision.model_copy(update={"backend": "msamp"})
    overrides = ["backend=native", f"opt_level={level(msamp_precision)}"]
    for column, codec in of_level(msamp_precision).items():
        if codec == "fp8_pow2":
            overrides.append(f"storage.{column}=fp8_pow2")
    if level(msamp_precision) == "O3" and precision.storage.shard in ("auto", "none"):
        overrides.append("storage.shard=zero1")
    return " ".join(overrides)


def refusals(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a violation for each setting that it cannot run, as in `Rules.refusals`."""
    if level(precision) is None:
        return [
            Violation(
                "opt_level=null",
                "MS-AMP stores state by a level; set opt_level=O2, or backend=native",
            )
        ]
    return [
        *_unsupported_keys(precision.fp8),
        *_unsupported_storage(precision),
        *_hardware_lacks(precision, hardware),
    ]


def product(precision: Precision, hardware: Hardware) -> tuple[str, str]:
    """Returns "scaled_mm", and why. There is no emulation."""
    return "scaled_mm", "MS-AMP's products on the GPU"


def misfit(fp8: FP8, in_features: int, out_features: int) -> str:
    """Returns "": layers of all sizes run in FP8."""
    return ""  # msamp/operators/gemm/gemm.py pads operands to multiples of 16


def tokens_multiple(fp8: FP8, product: str) -> int:
    """Returns 1: any number of tokens is supported."""
    return 1


def against_sharding(precision: Precision) -> list[Violation]:
    """Returns nothing: `refusals` rejects all sharding."""
    return []


def against_environment(fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
    """Returns nothing: no environment variable changes its results."""
    return []


def _unsupported_keys(fp8: FP8) -> list[Violation]:
    """Returns a violation for each FP8 key with an unsupported value."""
    if fp8.scaling not in SCALINGS:
        return [
            Violation(
                f"fp8.scaling={fp8.scaling}",
                "MS-AMP has only delayed scaling; set fp8.scaling=delayed, or backend=native",
            )
        ]
    lines = []
    for key, (supported, behavior) in _FIXED_VALUES.items():
        value = getattr(fp8, key)
        if value not in (supported, "auto"):
            lines.append(
                Violation(
                    f"fp8.{key}={spelled(value)}",
                    f"MS-AMP {behavior}; set fp8.{key}={spelled(supported)}, or backend=native",
                    [(f"fp8.{key}", supported)],
                    ["backend"],
                )
            )
    for gemm in ("fprop", "dgrad", "wgrad"):
        if getattr(fp8.override_linear_precision, gemm):
            lines.append(
                Violation(
                    f"fp8.override_linear_precision.{gemm}=true",
                    "MS-AMP multiplies all three in FP8; remove it or set backend=native",
                    [(f"fp8.override_linear_precision.{gemm}", False)],
                    ["backend"],
                )
            )
    return lines


def _unsupported_storage(precision: Precision) -> list[Violation]:
    """Returns a violation for each storage setting that differs from MS-AMP's level."""
    deepspeed = "only through DeepSpeed, whose JSON `fp8cfg export deepspeed` writes"
    opt_level = level(precision)
    if opt_level == "O3":
        return [
            Violation(
                "opt_level=O3",
                f"MS-AMP has it {deepspeed}; set opt_level=O2, or {instead(precision)}",
            )
        ]
    storage = precision.storage
    level_dtypes = of_level(precision.model_copy(update={"backend": "msamp"}))
    native = f"backend=native opt_level={opt_level}"
    if precision.backend == "auto":
        # With backend=auto the user sees the resolved columns of the native backend.
        dtypes = resolved(precision)
        advice = "set that"
    else:
        dtypes = {column: getattr(storage, column) for column in COLUMNS}
        advice = "remove it"
    lines: list[Violation] = []
    for column in COLUMNS:
        if dtypes[column] not in ("auto", level_dtypes[column]):
            lines.append(
                Violation(
                    f"storage.{column}={dtypes[column]}",
                    f"MS-AMP's {opt_level} has {level_dtypes[column]} there; {advice}, or set"
                    f" {native}",
                    [(f"storage.{column}", "auto")],
                    ["opt_level", "backend"],
                )
            )
    if storage.accumulate != "stored":
        lines.append(
            Violation(
                f"storage.accumulate={storage.accumulate}",
                f"MS-AMP adds each microbatch to FP8 gradients; set storage.accumulate=stored, or"
                f" {native}",
                [("storage.accumulate", "stored")],
                ["backend"],
            )
        )
    if storage.rounding != "nearest":
        lines.append(
            Violation(
                f"storage.rounding={storage.rounding}",
                f"MS-AMP rounds to nearest; remove it or set {native}",
                [("storage.rounding", "nearest")],
                ["backend"],
            )
        )
    if storage.shard not in ("auto", "none"):
        lines.append(
            Violation(
                f"storage.shard={storage.shard}",
                f"MS-AMP shards {deepspeed}; remove it or set {native}",
                [("storage.shard", "none")],
                ["backend"],
            )
        )
    return lines


def _hardware_lacks(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a violation if the GPU is no H100. MS-AMP checks its name."""
    if hardware.device != "cuda":
        return [
            Violation(
                "backend=msamp",
                f"MS-AMP runs only on CUDA, this is a CPU; set {instead(precision)}",
            )
        ]
    if hardware.capability != H100:
        return [
            Violation(
                "backend=msamp",
                f"this GPU has compute capability {dotted(hardware.capability)}, MS-AMP multiplies"
                f" in FP8 only on an H100; set {instead(precision)}",
            )
        ]
    return []
