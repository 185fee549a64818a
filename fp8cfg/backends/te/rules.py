"""Rules of Transformer Engine 2.20: supported keys, GPUs and layer sizes. Does not import it.

Sources are pytorch/quantization.py and module/linear.py of Transformer Engine. This backend has not
run on a GPU, see backend.py.
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
from fp8cfg.schema.packages import installed_version, major_and_minor
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.scalings import SCALINGS, needed
from fp8cfg.schema.storage import fp8_weight_setting, fp8_weights
from fp8cfg.schema.violation import Violation

Version = tuple[int, int, int]

# FP8 attention.

ATTENTION_CAPABILITY = {"current": BLACKWELL}
"""Lowest compute capability by scaling. Others need Hopper."""
ATTENTION_BELOW = (12, 0)
"""Compute capability from which cuDNN has no FP8 attention."""
ATTENTION_CUDNN: dict[str, Version] = {"current": (9, 14, 0), "mxfp8": (9, 21, 0)}
"""Lowest version of cuDNN by scaling. Others need the lowest version of Transformer Engine."""
BROKEN_CUDNN: dict[str, tuple[Version, ...]] = {"mxfp8": ((9, 23, 0), (9, 23, 1))}
"""Versions of cuDNN that Transformer Engine rejects because of bugs."""


def attention_lacks(
    scaling: str, capability: tuple[int, int], cudnn: Version | None
) -> list[Violation]:
    """Returns a violation if FP8 attention does not run on a GPU.

    Args:
        scaling: fp8.scaling.
        capability: Compute capability of the GPU.
        cudnn: Version of cuDNN, or None if it is not known.
    """
    lowest = ATTENTION_CAPABILITY.get(scaling, HOPPER)
    if capability < HOPPER:
        needs = "9.0 (Hopper); remove it"
    elif capability >= ATTENTION_BELOW:
        needs = f"one below {dotted(ATTENTION_BELOW)}; remove it"
    elif capability < lowest:
        needs = (
            f"{needed(lowest)} under fp8.scaling={scaling}; set fp8.scaling=delayed, or remove it"
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
    """Returns a violation if a version of cuDNN has no FP8 attention or a broken one."""
    lowest = ATTENTION_CUDNN.get(scaling, (0, 0, 0))
    if version in BROKEN_CUDNN.get(scaling, ()):
        needs = f"another than {dotted(version)}"
    elif version < lowest:
        needs = f"{dotted(lowest)} or later"
    else:
        return []
    return [
        Violation(
            "fp8.dot_product_attention=true",
            f"cuDNN is {dotted(version)}, Transformer Engine needs"
            f" {needs} for FP8 attention under fp8.scaling={scaling}; install it, or remove"
            " fp8.dot_product_attention",
        )
    ]


def attention_misfit(head_dim: int, capability: tuple[int, int]) -> str:
    """Returns an error if cuDNN cannot train FP8 attention with a head size on a GPU, or ""."""
    if capability < BLACKWELL:
        is_supported = head_dim == 128
        sizes = "128 below 10.0 (Blackwell)"
    else:
        is_supported = head_dim <= 128 and head_dim % 16 == 0
        sizes = "multiples of 16 up to 128"
    if is_supported:
        return ""
    return (
        f"fp8.dot_product_attention=true: heads have {head_dim} channels, cuDNN's FP8 attention"
        f" trains only {sizes}; remove it"
    )


# Environment variables.


class _AllowedValues(NamedTuple):
    """Values that an environment variable may have, and why."""

    values: tuple[str, ...]
    key: str


def contradictions(fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
    """Returns a violation for each variable of `environ` that contradicts `fp8`.

    Transformer Engine reads most of them at import and some in each step. Variables that do not
    change results are allowed (layouts, SM margins, logging). The manifest of a run records all
    NVTE_* variables.
    """
    violations = []
    for name, allowed in _allowed_values(fp8).items():
        if name not in environ or environ[name] in allowed.values:
            continue
        advice = "unset it"
        settable = [value for value in allowed.values if value]
        if settable:
            advice += f" or set it to {settable[0]}"
        violations.append(
            Violation(f"{name}={environ[name]}", f"contradicts {allowed.key}; {advice}")
        )
    return violations


def _allowed_values(fp8: FP8) -> dict[str, _AllowedValues]:
    """Returns the allowed values of each variable that matters for `fp8`."""
    override = fp8.override_linear_precision
    attention = fp8.dot_product_attention
    hadamard = fp8.random_hadamard_transform
    stochastic = fp8.stochastic_rounding
    power_2 = power_2_scales(fp8)
    two_d = weights_2d(fp8)
    power_2_key = f"fp8.use_power_2_scales={spelled(power_2)}"
    attention_key = f"fp8.dot_product_attention={spelled(attention)}"
    variables = {
        # te.TransformerLayer reads these three even if attention is in high precision.
        "NVTE_DPA_FP8_RECIPE": _AllowedValues(("",) if attention else ("", "F16"), attention_key),
        "NVTE_DPA_FP8_RECIPE_DPA": _AllowedValues(("0",), attention_key),
        "NVTE_DPA_FP8_RECIPE_MHA": _AllowedValues(("0",), "fp8.multi_head_attention=false"),
        "NVTE_BACKWARD_OVERRIDE": _AllowedValues(
            ("high_precision",) if override.dgrad and override.wgrad else (),
            f"fp8.override_linear_precision.dgrad={spelled(override.dgrad)}",
        ),
    }
    by_scaling = {
        "delayed": {
            "NVTE_UNFUSED_FP8_UPDATE": _AllowedValues(
                ("0",), "fp8.scaling=delayed, whose scales TE's fused kernel moves"
            ),
        },
        "current": {
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": _AllowedValues(
                (_flag(power_2),), power_2_key
            ),
        },
        "block": {
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": _AllowedValues(
                (_flag(not power_2),), power_2_key
            ),
        },
        "nvfp4": {
            "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": _AllowedValues(
                (_flag(not two_d),), f"fp8.enable_2d_quantization={spelled(two_d)}"
            ),
            "NVTE_NVFP4_DISABLE_RHT": _AllowedValues(
                (_flag(not hadamard),), f"fp8.random_hadamard_transform={spelled(hadamard)}"
            ),
            "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": _AllowedValues(
                (_flag(not stochastic),), f"fp8.stochastic_rounding={spelled(stochastic)}"
            ),
            "NVTE_NVFP4_ROW_SCALED_ACTIVATION": _AllowedValues(
                ("0",), "fp8.scaling=nvfp4, which has one second-level scale for a tensor"
            ),
            "NVTE_NVFP4_4OVER6": _AllowedValues(
                ("none",), "fp8.scaling=nvfp4, whose blocks all map to 6"
            ),
        },
    }
    variables |= by_scaling.get(fp8.scaling, {})
    if attention:
        # Attention reads these directly. They replace its S and dP, or one of its passes.
        variables |= {
            "NVTE_FP8_DPA_BWD": _AllowedValues(
                ("1",), "fp8.dot_product_attention=true, whose backward products are FP8 too"
            ),
            "NVTE_UnfusedDPA_Emulate_FP8": _AllowedValues(("0",), "fp8.emulate=false"),
            "NVTE_FUSED_ATTN": _AllowedValues(
                ("1",), "fp8.dot_product_attention=true, which only cuDNN's fused attention has"
            ),
        }
    return variables


def _flag(value: bool) -> str:
    return "1" if value else "0"


# Linear layers.

MINIMUM = (2, 8)
"""Lowest supported version. It has NVFP4, and all fields of current and block scaling in
recipe.py."""
FP8_CAPABILITY, ADA_CUDA, ADA_CUBLASLT = (8, 9), (12, 1), (12, 1, 3)


@dataclass(frozen=True)
class Has:
    """Requirements of a scaling in Transformer Engine.

    Attributes:
        multiple: Divisor of tokens, in_features and out_features. Each one is the contracted
            dimension of a GEMM.
        least: Lowest compute capability.
        below: Compute capability from which it is not supported, or None.
        cuda: Lowest version of CUDA.
        as_mxfp8: Compute capability from which it runs as MXFP8, or None.
        backward_override: Whether the backward pass can run in high precision.
    """

    multiple: int = 16
    least: tuple[int, int] = FP8_CAPABILITY
    below: tuple[int, int] | None = None
    cuda: tuple[int, int] = (0, 0)
    as_mxfp8: tuple[int, int] | None = None
    backward_override: bool = True

    def multiplied_as_mxfp8(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU runs it as MXFP8. Its scales must then be powers of two."""
        return self.as_mxfp8 is not None and capability >= self.as_mxfp8


HAS = {
    "delayed": Has(backward_override=False),
    "current": Has(),
    "block": Has(least=HOPPER, cuda=(12, 9), as_mxfp8=BLACKWELL),
    "mxfp8": Has(32, least=BLACKWELL, below=(12, 0)),
    "nvfp4": Has(32, least=BLACKWELL),
}
"""Requirements by scaling. Other scalings are errors."""


def unavailable() -> str:
    """Returns why Transformer Engine cannot be imported here, or "". Does not import it."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return "transformer-engine is not installed; pip install 'fp8cfg[te]' (needs an NVIDIA GPU)"
    version = installed_version("transformer-engine")
    if version is None:
        return "transformer-engine has no version, its installation is not complete"
    if major_and_minor(version) < MINIMUM:
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
    """Returns a violation for each setting that it cannot run, as in `Rules.refusals`."""
    if precision.fp8.scaling not in HAS:
        return [
            Violation(
                f"fp8.scaling={precision.fp8.scaling}",
                f"Transformer Engine has only {', '.join(HAS)}; set backend=native",
            )
        ]
    return [*_unsupported_keys(precision), *_hardware_lacks(precision, hardware)]


def product(precision: Precision, hardware: Hardware) -> tuple[str, str]:
    """Returns "scaled_mm", and why. There is no emulation."""
    return "scaled_mm", "Transformer Engine's products on the GPU"


def misfit(fp8: FP8, in_features: int, out_features: int) -> str:
    """Returns why a layer of these sizes stays in high precision, or ""."""
    multiple = tokens_multiple(fp8, "scaled_mm")
    for side, size in (("in", in_features), ("out", out_features)):
        if size % multiple:
            return f"{side}_features={size} is not a multiple of {multiple}"
    return ""


def tokens_multiple(fp8: FP8, product: str) -> int:
    """Returns the number that must divide the tokens of a forward pass. wgrad contracts them."""
    return HAS.get(fp8.scaling, Has()).multiple


def against_sharding(precision: Precision) -> list[Violation]:
    """Returns a violation for each unsupported value of storage.shard."""
    shard = precision.storage.shard
    lines = []
    if shard not in ("auto", "none") and fp8_weights(precision):
        lines.append(
            Violation(
                f"storage.shard={shard}",
                "Transformer Engine's FP8 weights cannot be broadcast;"
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
    """Returns a violation for each NVTE_* variable that contradicts `fp8`."""
    return contradictions(fp8, environ)


def instead(precision: Precision) -> str:
    """Returns the override for machines without Transformer Engine."""
    return "backend=native"


def high_precision_backward(fp8: FP8) -> bool:
    """Whether only fprop runs in FP8: backward_override="high_precision" of Transformer Engine."""
    override = fp8.override_linear_precision
    return override.dgrad and override.wgrad and not override.fprop


def _unsupported_keys(precision: Precision) -> list[Violation]:
    """Returns a violation for each key that Transformer Engine does not support."""
    fp8 = precision.fp8
    lines = []
    if SCALINGS[fp8.scaling].history:
        lines += _unsupported_delayed_keys(fp8)
    if fp8.tp_only_amax_red:
        lines.append(
            Violation(
                "fp8.tp_only_amax_red=true",
                "its layers reduce amaxes over all ranks here, or none;"
                " set it to false, fp8.reduce_amax=false, or backend=native",
                [("fp8.tp_only_amax_red", False)],
                ["backend"],
            )
        )
    if per_row(fp8):
        lines.append(
            Violation(
                f"fp8.granularity={fp8.granularity}",
                "Transformer Engine has one scale for a tensor under"
                " fp8.scaling=current; set tensor, fp8.scaling=block, or backend=torchao",
            )
        )
    lines += _unsupported_overrides(fp8)
    if fp8.multi_head_attention:
        lines.append(
            Violation(
                "fp8.multi_head_attention=true",
                "rotary positions are applied between the projections and attention, and"
                " Transformer Engine applies them in high precision; remove it and keep"
                " fp8.dot_product_attention=true",
                [("fp8.multi_head_attention", False)],
                ["backend"],
            )
        )
    if fp8.emulate:
        lines.append(
            Violation(
                "fp8.emulate=true",
                "Transformer Engine multiplies only on the GPU's FP8 units; set backend=native",
                [("fp8.emulate", False)],
                ["backend"],
            )
        )
    if transforms(fp8) and precision.compute != "bf16":
        lines.append(
            Violation(
                f"precision.compute={precision.compute}",
                f"under fp8.scaling={fp8.scaling} Transformer Engine's"
                " Hadamard transform takes only bf16; set precision=bf16_nvfp4,"
                " fp8.random_hadamard_transform=false, or backend=native",
            )
        )
    if fp8.params and precision.compute == "fp32":
        lines.append(
            Violation(
                f"{fp8_weight_setting(precision)}",
                "Transformer Engine's FP8 weights would pass for float32"
                " ones, which get no master copy; set fp8.params=false, precision.compute=bf16,"
                " or backend=native",
                [("fp8.params", False)],
                ["precision.compute", "backend"],
            )
        )
    return lines


def _unsupported_delayed_keys(fp8: FP8) -> list[Violation]:
    """Returns a violation for each unsupported key of delayed scaling."""
    lines = []
    if fp8.interval != 1:
        lines.append(
            Violation(
                f"fp8.interval={fp8.interval}",
                "Transformer Engine updates scales in every step, and since 2.3 its recipe has no"
                " interval; set it to 1, or backend=native",
                [("fp8.interval", 1)],
                ["backend"],
            )
        )
    if fp8.first_step == "in_time":
        lines.append(
            Violation(
                f"fp8.first_step={fp8.first_step}",
                "Transformer Engine begins with scale 1; set fp8.first_step=te, or backend=native",
                [("fp8.first_step", "te")],
                ["backend"],
            )
        )
    return lines


def _unsupported_overrides(fp8: FP8) -> list[Violation]:
    """Returns a violation if fp8.override_linear_precision has no backward_override."""
    overridden = [
        gemm for gemm in ("fprop", "dgrad", "wgrad") if getattr(fp8.override_linear_precision, gemm)
    ]
    if overridden and not high_precision_backward(fp8):
        return [
            Violation(
                f"fp8.override_linear_precision.{overridden[0]}=true",
                "since 2.0 Transformer Engine keeps"
                " dgrad and wgrad in high precision together or neither, and fprop never; set dgrad"
                " and wgrad, or set backend=native",
            )
        ]
    if overridden and not HAS[fp8.scaling].backward_override:
        return [
            Violation(
                "fp8.override_linear_precision.dgrad=true",
                "Transformer Engine has no backward_override"
                f" under fp8.scaling={fp8.scaling}; set fp8.scaling=current, or backend=native",
            )
        ]
    return []


def _hardware_lacks(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a violation for each missing requirement on GPU, CUDA, cuBLASLt and cuDNN."""
    if hardware.device != "cuda":
        return [
            Violation(
                "backend=te",
                "Transformer Engine runs only on CUDA, this is a CPU; set backend=native",
            )
        ]
    scaling = precision.fp8.scaling
    needs = HAS[scaling]
    capability = hardware.capability or (0, 0)
    cuda = hardware.cuda or (0, 0)
    gpu = f"this GPU has compute capability {dotted(hardware.capability)}"
    if capability < FP8_CAPABILITY:
        return [
            Violation(
                "fp8.enabled=true",
                f"{gpu}, Transformer Engine needs 8.9 (Ada) for FP8; set precision=bf16",
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
        supported = needed(needs.least)
        if needs.below:
            # "10.0 (Blackwell)" becomes "10.0 to below 12.0 (Blackwell)".
            supported = supported.replace(" ", f" to below {dotted(needs.below)} ")
        lines.append(
            Violation(
                f"fp8.scaling={scaling}",
                f"{gpu}, Transformer Engine needs {supported}; set fp8.scaling=current",
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
    if needs.multiplied_as_mxfp8(capability) and precision.fp8.use_power_2_scales is False:
        lines.append(
            Violation(
                "fp8.use_power_2_scales=false",
                f"{gpu} and runs {scaling} scaling as MXFP8, with power-of-two scales; set it to"
                " true or null",
            )
        )
    if precision.fp8.dot_product_attention:
        lines += attention_lacks(scaling, capability, hardware.cudnn)
    return lines


def _extension(package: Path) -> bool:
    """Whether the compiled extension is in a folder that Transformer Engine searches.

    Source: common/__init__.py of Transformer Engine.
    """
    folders = (package.parent, package, package / "wheel_lib")
    return any(
        folder.is_dir() and any(folder.glob("transformer_engine_torch*.so")) for folder in folders
    )
