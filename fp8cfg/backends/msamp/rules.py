"""Rules of MS-AMP 0.4: linear layers under its own delayed scaling, and the storage of its levels O1 and O2.

The package is unmaintained and on no index; Accelerate has deprecated it. Its kernels have never been run by the authors of this
backend: see backend.py. Importing it patches torch, so it is looked for and not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from fp8cfg.schema.backends import Hardware
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import COLUMNS, level, of_level, resolved
from fp8cfg.schema.violation import Violation

LIBRARY = Path("/usr/local/lib/libmsamp_dist.so")
"""Where MS-AMP loads its communication from, and nowhere else (msamp/operators/dist_op/dist_op.py)."""
PARTS = (
    "msamp_adamw",
    "msamp_arithmetic",
    "msamp_quantize",
    "transformer_engine_extensions",
    "deepspeed",
    "colorlog",
)
"""What `import msamp` imports: its own compiled parts, that of Transformer Engine before 1.9, and two packages."""
H100 = (9, 0)
SCALINGS = ("delayed",)
_KEYS: dict[str, tuple[object, str]] = {
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
"""Keys of `fp8` with the one value that MS-AMP has, and why."""


def unavailable() -> str:
    if find_spec("msamp") is None:
        return "msamp is not installed, and on no index (github.com/Azure/MS-AMP)"
    missing = [name for name in PARTS if find_spec(name) is None] + (
        [] if LIBRARY.is_file() else [str(LIBRARY)]
    )
    return f"msamp is installed without {', '.join(missing)}, which it loads" if missing else ""


def instead(precision: Precision) -> str:
    """The override words for the native backend with the storage of MS-AMP, its power-of-two scales included."""
    own = precision.model_copy(update={"backend": "msamp"})
    pow2 = [
        f"storage.{column}=fp8_pow2"
        for column, codec in of_level(own).items()
        if codec == "fp8_pow2"
    ]
    shard = (
        ["storage.shard=zero1"]
        if level(own) == "O3" and precision.storage.shard in ("auto", "none")
        else []
    )
    return " ".join(["backend=native", f"opt_level={level(own)}", *pow2, *shard])


def refusals(precision: Precision, hardware: Hardware) -> list[Violation]:
    if level(precision) is None:
        return [
            Violation(
                "opt_level=null",
                "MS-AMP stores state by a level; set opt_level=O2, or backend=native",
            )
        ]
    return [*_keys(precision.fp8), *_storage(precision), *_hardware_lacks(precision, hardware)]


def product(precision: Precision, hardware: Hardware) -> tuple[str, str]:
    return "scaled_mm", "MS-AMP's products on the GPU"


def misfit(fp8: FP8, in_features: int, out_features: int) -> str:
    return ""  # msamp/operators/gemm/gemm.py completes operands to multiples of 16


def tokens_multiple(fp8: FP8, product: str) -> int:
    return 1


def against_sharding(precision: Precision) -> list[Violation]:
    return []  # _storage refuses all of it


def against_environment(fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
    return []


def _keys(f: FP8) -> list[Violation]:
    """A line for each key whose value MS-AMP does not support."""
    if f.scaling not in SCALINGS:
        return [
            Violation(
                f"fp8.scaling={f.scaling}",
                "MS-AMP has only delayed scaling; set fp8.scaling=delayed, or backend=native",
            )
        ]
    lines = [
        Violation(
            f"fp8.{key}={spelled(value)}",
            f"MS-AMP {why}; set fp8.{key}={spelled(want)}, or backend=native",
            [(f"fp8.{key}", want)],
            ["backend"],
        )
        for key, (want, why) in _KEYS.items()
        if (value := getattr(f, key)) not in (want, "auto")
    ]
    kept = [
        gemm for gemm in ("fprop", "dgrad", "wgrad") if getattr(f.override_linear_precision, gemm)
    ]
    return [
        *lines,
        *(
            Violation(
                f"fp8.override_linear_precision.{gemm}=true",
                "MS-AMP multiplies all three in FP8; remove it or set backend=native",
                [(f"fp8.override_linear_precision.{gemm}", False)],
                ["backend"],
            )
            for gemm in kept
        ),
    ]


def _storage(p: Precision) -> list[Violation]:
    """A line for each column that differs from what the level stores."""
    has, s = of_level(p.model_copy(update={"backend": "msamp"})), p.storage
    export = "only through DeepSpeed, whose JSON `fp8cfg export deepspeed` writes"
    if level(p) == "O3":
        return [
            Violation("opt_level=O3", f"MS-AMP has it {export}; set opt_level=O2, or {instead(p)}")
        ]
    words = f"backend=native opt_level={level(p)}"
    # Where the backend is not named, columns left on auto are the native backend's, and it is these that the recipe says.
    said = (
        resolved(p) if p.backend == "auto" else {column: getattr(s, column) for column in COLUMNS}
    )
    cure = "set that" if p.backend == "auto" else "remove it"
    why = f"MS-AMP's {level(p)} has"
    lines: list[Violation] = [
        Violation(
            f"storage.{column}={said[column]}",
            f"{why} {has[column]} there; {cure}, or set {words}",
            [(f"storage.{column}", "auto")],
            ["opt_level", "backend"],
        )
        for column in COLUMNS
        if said[column] not in ("auto", has[column])
    ]
    if s.accumulate != "stored":
        lines.append(
            Violation(
                f"storage.accumulate={s.accumulate}",
                f"MS-AMP adds each microbatch to gradients that"
                f" are stored in FP8; set storage.accumulate=stored, or {words}",
                [("storage.accumulate", "stored")],
                ["backend"],
            )
        )
    if s.rounding != "nearest":
        lines.append(
            Violation(
                f"storage.rounding={s.rounding}",
                f"MS-AMP rounds to nearest; remove it or set {words}",
                [("storage.rounding", "nearest")],
                ["backend"],
            )
        )
    if s.shard not in ("auto", "none"):
        lines.append(
            Violation(
                f"storage.shard={s.shard}",
                f"MS-AMP shards {export}; remove it or set {words}",
                [("storage.shard", "none")],
                ["backend"],
            )
        )
    return lines


def _hardware_lacks(p: Precision, hardware: Hardware) -> list[Violation]:
    if hardware.device != "cuda":
        return [
            Violation("backend=msamp", f"MS-AMP runs only on CUDA, this is a CPU; set {instead(p)}")
        ]
    if hardware.capability != H100:
        has = ".".join(map(str, hardware.capability or ("unknown",)))
        return [
            Violation(
                "backend=msamp",
                f"this GPU has compute capability {has}, MS-AMP multiplies in FP8 only on an H100; set {instead(p)}",
            )
        ]
    return []
