"""Hardware of a run, described: what rules are asked about, which need no such machine."""

from __future__ import annotations

from dataclasses import dataclass

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities."""
EMULATE = "write fp8.emulate=true to emulate"
"""What refusals of a GPU that cannot multiply offer."""


@dataclass(frozen=True)
class Hardware:
    """The hardware that a recipe is to run on: `device` is "cpu" or "cuda", `capability` the compute capability of a CUDA device,
    `cuda` the CUDA version that torch was built with, `cublaslt` and `cudnn` the versions of these libraries where they are known.
    """

    device: str
    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    cublaslt: tuple[int, int, int] | None = None
    cudnn: tuple[int, int, int] | None = None


def dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version)) if version else "unknown"
