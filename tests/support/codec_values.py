"""Storage codecs by the names of their tests, and what they make of random values."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8cfg.numerics.codecs import CODECS, Codec, get_codec
from fp8cfg.numerics.formats import E5M2, random_key

KEY = random_key(0, "test")
ALL = {
    **CODECS,
    "fp8 e5m2": replace(get_codec("fp8"), format=E5M2),
    "fp8_pow2 e5m2": replace(get_codec("fp8_pow2"), format=E5M2),
    "root": get_codec("fp8_block", second_moment=True),
    **{f"{name} stochastic": get_codec(name, "stochastic") for name in CODECS if name != "fp32"},
}


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def values(c: Codec, x: torch.Tensor) -> torch.Tensor:
    return c.decode(c.encode(x, KEY))
