"""Rules of Transformer Engine: what its recipes, the GPU and layer shapes allow, without loading it.

Rules are those of Transformer Engine 2.20 (pytorch/quantization.py, module/linear.py). Its multiplications have not been run on
a GPU by the authors of this backend: see backend.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fp8cfg.schema.backends import BLACKWELL, HOPPER, Hardware, dotted
from fp8cfg.schema.fp8 import FP8, per_row, power_2_scales, transforms, weights_2d
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.packages import installed_version
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.scalings import SCALINGS, needed
from fp8cfg.schema.storage import fp8_weight_setting, fp8_weights
from fp8cfg.schema.violation import Violation

Version = tuple[int, int, int]
CAPABILITY = {"current": BLACKWELL}
"""The lowest compute capability by scaling, where it is not Hopper's."""
BELOW = (12, 0)
CUDNN: dict[str, Version] = {"current": (9, 14, 0), "mxfp8": (9, 21, 0)}
"""The lowest version of cuDNN by scaling, where it is not Transformer Engine's own lowest."""
BROKEN: dict[str, tuple[Version, ...]] = {"mxfp8": ((9, 23, 0), (9, 23, 1))}
"""The versions that are left out for their bugs."""


def attention_lacks(
    scaling: str, capability: tuple[int, int], cudnn: Version | None
) -> list[Violation]:
    """The requirement of FP8 attention that a GPU, or cuDNN where its version is known, does not meet."""
    least = CAPABILITY.get(scaling, HOPPER)
    if capability < HOPPER:
        needs = "9.0 (Hopper); remove it"
    elif capability >= BELOW:
        needs = f"one below {dotted(BELOW)}; remove it"
    elif capability < least:
        needs = (
            f"{needed(least)} under fp8.scaling={scaling}; set fp8.scaling=delayed, or remove it"
        )
    elif cudnn is not None:
        return _cudnn_lacks(scaling, cudnn)
    else:
        return []
    return [
        Violation(
            "fp8.dot_product_attention=true",
            f"this GPU has compute capability {dotted(capability)}, cuDNN's FP8 attention needs"
            f" {needs}",
        )
    ]


def _cudnn_lacks(scaling: str, version: Version) -> list[Violation]:
    least, broken = CUDNN.get(scaling, (0, 0, 0)), version in BROKEN.get(scaling, ())
    if version >= least and not broken:
        return []
    wanted = f"another than {dotted(version)}" if broken else f"{dotted(least)} or later"
    return [
        Violation(
            "fp8.dot_product_attention=true",
            f"cuDNN is {dotted(version)}, Transformer Engine needs"
            f" {wanted} for FP8 attention under fp8.scaling={scaling}; install it, or remove"
            " fp8.dot_product_attention",
        )
    ]


def attention_misfit(head_dim: int, capability: tuple[int, int]) -> str:
    """Why FP8 attention does not train heads of `head_dim` channels on such a GPU; empty where it does."""
    if capability < BLACKWELL:
        fits, wants = head_dim == 128, "128 below 10.0 (Blackwell)"
    else:
        fits, wants = head_dim <= 128 and head_dim % 16 == 0, "multiples of 16 up to 128"
    key = f"fp8.dot_product_attention=true: heads have {head_dim} channels"
    return "" if fits else f"{key}, cuDNN's FP8 attention trains {wants} alone; remove it"


class _Wanted(NamedTuple):
    """The value that a variable must have where it is set, and the key that decides it."""

    values: tuple[str, ...]
    key: str


def contradictions(fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
    """A line for each variable of `environ` that contradicts `fp8`: its name, its value, the key, what to write instead.

    Transformer Engine reads most of them when it is imported, some at each step; its attention reads others than its linear
    layers. Variables that choose among equal ways (layouts, margins of SMs, logging) are left alone: the manifest of a run
    records all NVTE_* variables.
    """
    return [
        Violation(
            f"{name}={environ[name]}",
            f"contradicts {wanted.key}; unset it{_or_write(wanted.values)}",
        )
        for name, wanted in _wanted(fp8).items()
        if name in environ and environ[name] not in wanted.values
    ]


def _or_write(values: tuple[str, ...]) -> str:
    shown = [value for value in values if value]
    return f" or set it to {shown[0]}" if shown else ""


def _wanted(fp8: FP8) -> dict[str, _Wanted]:
    override = fp8.override_linear_precision
    backward = ("high_precision",) if override.dgrad and override.wgrad else ()
    on, mixes, rounds = (
        fp8.dot_product_attention,
        fp8.random_hadamard_transform,
        fp8.stochastic_rounding,
    )
    attention = {
        # Not read by the recipe but by attention: they replace its S and dP, or one of its passes.
        "NVTE_FP8_DPA_BWD": _Wanted(
            ("1",), "fp8.dot_product_attention=true, whose backward products are FP8 too"
        ),
        "NVTE_UnfusedDPA_Emulate_FP8": _Wanted(("0",), "fp8.emulate=false"),
        "NVTE_FUSED_ATTN": _Wanted(
            ("1",), "fp8.dot_product_attention=true, which only cuDNN's fused attention has"
        ),
    }
    every = {
        # Read by te.TransformerLayer too, whose attention is in high precision: they put FP8 around it.
        "NVTE_DPA_FP8_RECIPE": _Wanted(
            ("",) if on else ("", "F16"), f"fp8.dot_product_attention={spelled(on)}"
        ),
        "NVTE_DPA_FP8_RECIPE_DPA": _Wanted(("0",), f"fp8.dot_product_attention={spelled(on)}"),
        "NVTE_DPA_FP8_RECIPE_MHA": _Wanted(("0",), "fp8.multi_head_attention=false"),
        "NVTE_BACKWARD_OVERRIDE": _Wanted(
            backward, f"fp8.override_linear_precision.dgrad={spelled(override.dgrad)}"
        ),
        "NVTE_UNFUSED_FP8_UPDATE": _Wanted(
            ("0",), "fp8.scaling=delayed, whose scales TE's fused kernel moves"
        ),
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": _Wanted(
            (_flag(power_2_scales(fp8)),), _resolved(fp8, "use_power_2_scales")
        ),
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": _Wanted(
            (_flag(not power_2_scales(fp8)),), _resolved(fp8, "use_power_2_scales")
        ),
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": _Wanted(
            (_flag(not weights_2d(fp8)),), _resolved(fp8, "enable_2d_quantization")
        ),
        "NVTE_NVFP4_DISABLE_RHT": _Wanted(
            (_flag(not mixes),), f"fp8.random_hadamard_transform={spelled(mixes)}"
        ),
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": _Wanted(
            (_flag(not rounds),), f"fp8.stochastic_rounding={spelled(rounds)}"
        ),
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION": _Wanted(
            ("0",), "fp8.scaling=nvfp4, which has one second-level scale for a tensor"
        ),
        "NVTE_NVFP4_4OVER6": _Wanted(("none",), "fp8.scaling=nvfp4, whose blocks all map to 6"),
    }
    only = {
        "NVTE_UNFUSED_FP8_UPDATE": "delayed",
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "current",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "block",
    }
    mine = {
        name: wanted
        for name, wanted in every.items()
        if fp8.scaling == only.get(name, "nvfp4" if name.startswith("NVTE_NVFP4") else fp8.scaling)
    }
    return mine | (attention if on else {})


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _resolved(fp8: FP8, key: str) -> str:
    value = power_2_scales(fp8) if key == "use_power_2_scales" else weights_2d(fp8)
    return f"fp8.{key}={spelled(value)}"


MINIMUM = (2, 8)
"""Least version: it has NVFP4, and in current and block scaling every field that is read back (recipe.py)."""
FP8_CAPABILITY, ADA_CUDA, ADA_CUBLASLT = (8, 9), (12, 1), (12, 1, 3)


@dataclass(frozen=True)
class Has:
    """Requirements of a scaling in Transformer Engine. `multiple` is what tokens and both sizes of a layer must be multiples of:
    each is the contracted dimension of one product. `least` and `below` bound the compute capability, `cuda` is the lowest version
    of CUDA, and `as_mxfp8` the first that multiplies it as MXFP8.
    """

    multiple: int = 16
    least: tuple[int, int] = FP8_CAPABILITY
    below: tuple[int, int] | None = None
    cuda: tuple[int, int] = (0, 0)
    as_mxfp8: tuple[int, int] | None = None
    backward_override: bool = True

    def multiplied_as_mxfp8(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of that compute capability multiplies it as MXFP8, so that its scales have to be powers of two."""
        return self.as_mxfp8 is not None and capability >= self.as_mxfp8


HAS = {
    "delayed": Has(backward_override=False),
    "current": Has(),
    "block": Has(least=HOPPER, cuda=(12, 9), as_mxfp8=BLACKWELL),
    "mxfp8": Has(32, least=BLACKWELL, below=(12, 0)),
    "nvfp4": Has(32, least=BLACKWELL),
}
"""By the name of the scaling; what is not here is refused."""


def unavailable() -> str:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return "transformer-engine is not installed; pip install 'fp8cfg[te]' (needs an NVIDIA GPU)"
    version = installed_version("transformer-engine")
    if version is None:
        return "transformer-engine has no version, its installation is not complete"
    if _numbers(version) < MINIMUM:
        return (
            f"transformer-engine {version} is installed, at least {'.'.join(map(str, MINIMUM))} is"
            " needed"
        )
    if not _extension(Path(spec.origin).parent):
        return (
            f"transformer-engine {version} has no compiled part for torch here; pip install"
            " 'transformer-engine[pytorch]' (needs an NVIDIA GPU)"
        )
    return ""


def refusals(precision: Precision, hardware: Hardware) -> list[Violation]:
    if precision.fp8.scaling not in HAS:
        return [
            Violation(
                f"fp8.scaling={precision.fp8.scaling}",
                f"Transformer Engine has only {', '.join(HAS)}; set backend=native",
            )
        ]
    return [*_keys(precision), *_hardware_lacks(precision, hardware)]


def product(precision: Precision, hardware: Hardware) -> tuple[str, str]:
    return "scaled_mm", "Transformer Engine's products on the GPU"


def misfit(fp8: FP8, in_features: int, out_features: int) -> str:
    multiple = tokens_multiple(fp8, "scaled_mm")
    for what, size in (("in", in_features), ("out", out_features)):
        if size % multiple:
            return f"{what}_features={size} is not a multiple of {multiple}"
    return ""


def tokens_multiple(fp8: FP8, product: str) -> int:
    return HAS.get(fp8.scaling, Has()).multiple


def against_sharding(precision: Precision) -> list[Violation]:
    shard, lines = precision.storage.shard, list[Violation]()
    if shard not in ("auto", "none") and fp8_weights(precision):
        lines.append(
            Violation(
                f"storage.shard={shard}",
                "Transformer Engine's FP8 weights are not handed round;"
                " set backend=native, or storage.weight=fp16_scaled with fp8.params=false",
                [("fp8.params", False)],
                ["storage.shard", "backend"],
            )
        )
    if shard == "fsdp":
        lines.append(
            Violation(
                "storage.shard=fsdp",
                "not in this version with Transformer Engine's layers; set"
                " backend=torchao or native, or storage.shard=zero2",
            )
        )
    return lines


def against_environment(fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
    return contradictions(fp8, environ)


def instead(precision: Precision) -> str:
    return "backend=native"


def high_precision_backward(fp8: FP8) -> bool:
    """Whether both backward products are kept in high precision, which is TE's backward_override="high_precision"."""
    o = fp8.override_linear_precision
    return o.dgrad and o.wgrad and not o.fprop


def _keys(p: Precision) -> list[Violation]:
    """A line for each key that Transformer Engine does not support."""
    f, o, lines, scaling = (
        p.fp8,
        p.fp8.override_linear_precision,
        list[Violation](),
        SCALINGS[p.fp8.scaling],
    )
    if scaling.history and f.interval != 1:
        lines.append(
            Violation(
                f"fp8.interval={f.interval}",
                "Transformer Engine moves scales in every step, since"
                " 2.3 its recipe has no interval; set it to 1, or backend=native",
                [("fp8.interval", 1)],
                ["backend"],
            )
        )
    if scaling.history and f.first_step == "in_time":
        lines.append(
            Violation(
                f"fp8.first_step={f.first_step}",
                "Transformer Engine begins with scale 1; set fp8.first_step=te, or backend=native",
                [("fp8.first_step", "te")],
                ["backend"],
            )
        )
    if f.tp_only_amax_red:
        lines.append(
            Violation(
                "fp8.tp_only_amax_red=true",
                "its layers reduce amaxes over all ranks here, or none;"
                " set it to false, fp8.reduce_amax=false, or backend=native",
                [("fp8.tp_only_amax_red", False)],
                ["backend"],
            )
        )
    if per_row(f):
        lines.append(
            Violation(
                f"fp8.granularity={f.granularity}",
                "Transformer Engine has one scale for a tensor under"
                " fp8.scaling=current; set tensor, fp8.scaling=block, or backend=torchao",
            )
        )
    kept = [g for g in ("fprop", "dgrad", "wgrad") if getattr(o, g)]
    if kept and not high_precision_backward(f):
        lines.append(
            Violation(
                f"fp8.override_linear_precision.{kept[0]}=true",
                "since 2.0 Transformer Engine keeps"
                " dgrad and wgrad in high precision together or neither, and fprop never; set dgrad"
                " and wgrad, or set backend=native",
            )
        )
    if high_precision_backward(f) and not HAS[f.scaling].backward_override:
        lines.append(
            Violation(
                "fp8.override_linear_precision.dgrad=true",
                "Transformer Engine has no backward_override"
                f" under fp8.scaling={f.scaling}; set fp8.scaling=current, or backend=native",
            )
        )
    if f.multi_head_attention:
        lines.append(
            Violation(
                "fp8.multi_head_attention=true",
                "rotary positions stand between the projections and"
                " attention, and Transformer Engine turns them in high precision; remove it and keep"
                " fp8.dot_product_attention=true",
                [("fp8.multi_head_attention", False)],
                ["backend"],
            )
        )
    if f.emulate:
        lines.append(
            Violation(
                "fp8.emulate=true",
                "Transformer Engine multiplies only on the GPU's FP8 units; set backend=native",
                [("fp8.emulate", False)],
                ["backend"],
            )
        )
    if transforms(f) and p.compute != "bf16":
        lines.append(
            Violation(
                f"precision.compute={p.compute}",
                f"under fp8.scaling={f.scaling} Transformer Engine's"
                " Hadamard transform takes only bf16; set precision=bf16_nvfp4,"
                " fp8.random_hadamard_transform=false, or backend=native",
            )
        )
    if f.params and p.compute == "fp32":
        lines.append(
            Violation(
                f"{fp8_weight_setting(p)}",
                "Transformer Engine's FP8 weights would pass for float32"
                " ones, which get no master copy; set fp8.params=false, precision.compute=bf16,"
                " or backend=native",
                [("fp8.params", False)],
                ["precision.compute", "backend"],
            )
        )
    return lines


def _hardware_lacks(p: Precision, hardware: Hardware) -> list[Violation]:
    """The requirements of Transformer Engine on GPU, CUDA and cuBLASLt that are not met."""
    scaling, needs = p.fp8.scaling, HAS[p.fp8.scaling]
    capability, cuda = hardware.capability or (0, 0), hardware.cuda or (0, 0)
    if hardware.device != "cuda":
        return [
            Violation(
                "backend=te",
                "Transformer Engine runs only on CUDA, this is a CPU; set backend=native",
            )
        ]
    has = f"this GPU has compute capability {dotted(hardware.capability)}"
    if capability < FP8_CAPABILITY:
        return [
            Violation(
                "fp8.enabled=true",
                f"{has}, Transformer Engine needs 8.9 (Ada) for FP8; set precision=bf16",
            )
        ]
    lines = []
    if capability < HOPPER and cuda < ADA_CUDA:
        lines.append(
            Violation(
                "fp8.enabled=true",
                f"torch has CUDA {dotted(hardware.cuda)}, Transformer Engine needs 12.1 on Ada",
            )
        )
    if capability < HOPPER and hardware.cublaslt and hardware.cublaslt < ADA_CUBLASLT:
        lines.append(
            Violation(
                "fp8.enabled=true",
                f"cuBLASLt is {dotted(hardware.cublaslt)}, Transformer Engine needs 12.1.3 on Ada",
            )
        )
    if capability < needs.least or (needs.below and capability >= needs.below):
        least = needed(needs.least)
        if needs.below:
            least = least.replace(" ", f" to below {dotted(needs.below)} ")
        lines.append(
            Violation(
                f"fp8.scaling={scaling}",
                f"{has}, Transformer Engine needs {least}; set fp8.scaling=current",
            )
        )
    if cuda < needs.cuda:
        lines.append(
            Violation(
                f"fp8.scaling={scaling}",
                f"torch has CUDA {dotted(hardware.cuda)}, Transformer Engine"
                f" needs {dotted(needs.cuda)}; set fp8.scaling=current",
            )
        )
    if needs.multiplied_as_mxfp8(capability) and p.fp8.use_power_2_scales is False:
        lines.append(
            Violation(
                "fp8.use_power_2_scales=false",
                f"{has}, where Transformer Engine multiplies {scaling}"
                " scaling as MXFP8, whose scales are powers of two; set it to true or null",
            )
        )
    if p.fp8.dot_product_attention:
        lines += attention_lacks(scaling, capability, hardware.cudnn)
    return lines


def _extension(package: Path) -> bool:
    """Whether the compiled extension is where Transformer Engine looks for it (common/__init__.py)."""
    folders = (package.parent, package, package / "wheel_lib")
    return any(
        folder.is_dir() and any(folder.glob("transformer_engine_torch*.so")) for folder in folders
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
