"""Hardware of a run, described: what rules are asked about, which need no such machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """The hardware that a recipe is to run on: `device` is "cpu" or "cuda", `capability` the compute capability of a CUDA device,
    `cuda` the CUDA version that torch was built with, `cublaslt` the version of cuBLASLt where it is known.
    """

    device: str
    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    cublaslt: tuple[int, int, int] | None = None
