"""Communication of amaxes: what tensor-parallel ranks send to scale the parts of a tensor as one, where it is quantized.

A tensor that is quantized for two products needs one collective for both (numerics/nvfp4.py).
"""

from __future__ import annotations

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fp8 import FP8, per_row, transforms
from fp8cfg.report.memory.layout import ROW
from fp8cfg.scalings import SCALINGS

TENSORS = {"input": {"fprop": 1, "wgrad": 0}, "weight": {"fprop": 1, "dgrad": 0}, "gradient": {"dgrad": 1, "wgrad": 0}}
"""The tensors of a linear layer: the products that read each, and which dimension these contract."""


def split_dimension(linear: PlannedLinear, tensor: str) -> int | None:
    """The dimension of a `tensor` of `linear`, a row-parallel layer or a column-parallel one, that tensor-parallel ranks split."""
    row = linear.name.endswith(ROW)
    return {"input": 1 if row else None, "weight": 1 if row else 0, "gradient": None if row else 1}[tensor]


def numbers(fp8: FP8, linear: PlannedLinear, tensor: str, tokens: int = 0) -> int:
    """The amaxes, in one message, for a `tensor` of `linear` that is quantized for all of its products in FP8, of so many `tokens`:
    that of all of it, or those of its rows or columns that ranks split; 0 where nobody asks others, and under delayed scaling,
    which does once a step."""
    scaling, dim = SCALINGS[fp8.scaling], split_dimension(linear, tensor)
    axes = {axis for product, axis in TENSORS[tensor].items() if linear.products[product]}
    if dim is None or not axes or scaling.history:
        return 0
    if scaling.two_levels:  # of the tensor, and of its Hadamard transform
        return 2 if tensor != "weight" and transforms(fp8) and axes == {0, 1} else 1
    if scaling.block:
        return 0
    if not per_row(fp8):
        return 1
    return of_rows(linear, tokens)[tensor] if dim in axes else 0


def of_weight(fp8: FP8, linear: PlannedLinear) -> int:
    """Those of a weight that is written in FP8, for products that contract either dimension."""
    scaling = SCALINGS[fp8.scaling]
    if scaling.block and not scaling.two_levels:
        return 0
    return of_rows(linear)["weight"] if per_row(fp8) else 1


def of_rows(linear: PlannedLinear, tokens: int = 0) -> dict[str, int]:
    """How many rows, or columns, of each tensor lie across the ranks that split it."""
    weight = linear.out_features if split_dimension(linear, "weight") == 1 else linear.in_features
    return {"input": tokens, "weight": weight, "gradient": tokens}
