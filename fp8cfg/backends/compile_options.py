"""Options of torch.compile for the layers of a job: what Inductor has to be told to compile them, and to give eager bits."""

from __future__ import annotations

from typing import Any

from fp8cfg.schema.precision import Precision
from fp8cfg.schema.scalings import SCALINGS


def compile_options(precision: Precision, device: str) -> dict[str, Any] | None:
    """Inductor's options on a `device` ("cpu", "cuda"), None where its own serve."""
    if device == "cuda":
        # Triton's own division is an approximation; a scale that is a bit too low would be another power of two.
        return {"eager_numerics.division_rounding": True}
    # A gradient that is quantized in blocks along both dimensions is two loops of other sizes over one tensor. The C++ code
    # generator fuses them, wants to split both by one block, and ends with an AssertionError in try_loop_split where it should
    # leave them as they are. Seen with torch 2.13, where pytorch/pytorch#173607 gives up the split for loops of other depths
    # alone; it ends with the torch that does so for other sizes too. At most one node in a kernel of nodes side by side: none are
    # fused.
    if precision.fp8.enabled and SCALINGS[precision.fp8.scaling].block:
        return {"cpp.max_horizontal_fusion_size": 1}
    return None
