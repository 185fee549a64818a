"""Rules of Transformer Engine's FP8 attention: what the GPU and cuDNN allow, which has it alone, without a fallback there.

Those of Transformer Engine 2.20 (pytorch/attention/dot_product_attention/utils.py, common/fused_attn/fused_attn.cpp).
"""

from __future__ import annotations

from fp8cfg.config.hardware import BLACKWELL, HOPPER, dotted
from fp8cfg.scalings import needed

Version = tuple[int, int, int]
CAPABILITY = {"current": BLACKWELL}
"""The lowest compute capability by scaling, where it is not Hopper's."""
BELOW = (12, 0)
CUDNN: dict[str, Version] = {"current": (9, 14, 0), "mxfp8": (9, 21, 0)}
"""The lowest version of cuDNN by scaling, where it is not Transformer Engine's own lowest."""
BROKEN: dict[str, tuple[Version, ...]] = {"mxfp8": ((9, 23, 0), (9, 23, 1))}
"""The versions that are left out for their bugs."""


def attention_lacks(scaling: str, capability: tuple[int, int], cudnn: Version | None) -> list[str]:
    """The requirement of FP8 attention that a GPU, or cuDNN where its version is known, does not meet."""
    key = (
        f"fp8.dot_product_attention=true: this GPU has compute capability {dotted(capability)},"
        " cuDNN's FP8 attention"
    )
    least = CAPABILITY.get(scaling, HOPPER)
    if capability < HOPPER:
        return [f"{key} needs 9.0 (Hopper); drop it"]
    if capability >= BELOW:
        return [f"{key} needs one below {dotted(BELOW)}; drop it"]
    if capability < least:
        return [
            f"{key} needs {needed(least)} under fp8.scaling={scaling}; write fp8.scaling=delayed,"
            " or drop it"
        ]
    return [] if cudnn is None else _cudnn_lacks(scaling, cudnn)


def _cudnn_lacks(scaling: str, version: Version) -> list[str]:
    least, broken = CUDNN.get(scaling, (0, 0, 0)), version in BROKEN.get(scaling, ())
    if version >= least and not broken:
        return []
    wanted = f"another than {dotted(version)}" if broken else f"{dotted(least)} or later"
    return [
        f"fp8.dot_product_attention=true: cuDNN is {dotted(version)}, Transformer Engine needs"
        f" {wanted} for FP8 attention under fp8.scaling={scaling}; install it, or drop"
        " fp8.dot_product_attention"
    ]


def attention_misfit(head_dim: int, capability: tuple[int, int]) -> str:
    """Why FP8 attention does not train heads of `head_dim` channels on such a GPU; empty where it does."""
    if capability < BLACKWELL:
        fits, wants = head_dim == 128, "128 below 10.0 (Blackwell)"
    else:
        fits, wants = head_dim <= 128 and head_dim % 16 == 0, "multiples of 16 up to 128"
    key = f"fp8.dot_product_attention=true: heads have {head_dim} channels"
    return "" if fits else f"{key}, cuDNN's FP8 attention trains {wants} alone; drop it"
