"""Communication of amaxes: what tensor-parallel ranks send to scale the parts of a tensor as one, where it is quantized.

A tensor that is quantized for two products needs one collective for both (numerics/nvfp4.py).
"""

from __future__ import annotations

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fp8 import FP8, per_row, transforms
from fp8cfg.report.memory.layout import ROW
from fp8cfg.scalings import SCALINGS

OPERANDS = {
    "input": {"fprop": 1, "wgrad": 0},
    "weight": {"fprop": 1, "dgrad": 0},
    "grad_output": {"dgrad": 1, "wgrad": 0},
}
"""The operands of a linear layer: the products that read each, and which dimension these contract."""


def operand_split(linear: PlannedLinear, operand: str) -> int | None:
    """The dimension of an `operand` of `linear`, a row- or column-parallel layer, that tensor-parallel ranks split."""
    row = linear.name.endswith(ROW)
    return {
        "input": 1 if row else None,
        "weight": 1 if row else 0,
        "grad_output": None if row else 1,
    }[operand]


def of_operand(fp8: FP8, linear: PlannedLinear, operand: str, tokens: int = 0) -> int:
    """The amaxes, in one message, of an `operand` of `linear`, of so many `tokens`, that is quantized for all of its products in
    FP8: that of all of it, or those of its rows or columns that ranks split; 0 where each rank has whole ones, and under delayed
    scaling, whose amaxes are sent once a step."""
    scaling, dim = SCALINGS[fp8.scaling], operand_split(linear, operand)
    axes = {axis for product, axis in OPERANDS[operand].items() if linear.products[product]}
    if dim is None or not axes or scaling.history:
        return 0
    if scaling.two_levels:  # of the tensor, and of its Hadamard transform
        return 2 if operand != "weight" and transforms(fp8) and axes == {0, 1} else 1
    if scaling.block:
        return 0
    if not per_row(fp8):
        return 1
    return (_rows(linear) if operand == "weight" else tokens) if dim in axes else 0


def of_written_weight(fp8: FP8, linear: PlannedLinear) -> int:
    """The amaxes of a weight that is written in FP8 after a step, for products that contract either dimension."""
    scaling = SCALINGS[fp8.scaling]
    if scaling.block and not scaling.two_levels:
        return 0
    return _rows(linear) if per_row(fp8) else 1


def _rows(linear: PlannedLinear) -> int:
    """The rows, or columns, of a weight that lie across the ranks that split it."""
    return linear.out_features if operand_split(linear, "weight") == 1 else linear.in_features
