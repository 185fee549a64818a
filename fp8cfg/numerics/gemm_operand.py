"""GEMM operand: a matrix, quantized or in high precision, with its format and inverse scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.formats import BY_DTYPE, E2M1, Format


class Operand(NamedTuple):
    """A matrix whose last dimension is contracted. In FP8 `fmt` is set, and `data` is float8, or bytes that hold two codes of E2M1
    each, or holds values of its grid in a wider carrier. `scale_inv` is applied by the product or by the hardware: a float32
    scalar, or one for each tile, or bytes of E8M0 or E4M3, flat in the order in which the hardware reads them; None where it is
    already multiplied into `data`. `other` is the operand of products that contract the first dimension, where one kernel made
    both. `whole_inv` is nvfp4's inverse scale of the tensor, above those of tiles, where the hardware applies it. In high precision
    all fields but `data` are None.
    """

    data: Tensor
    scale_inv: Tensor | None = None
    fmt: Format | None = None
    tile: tuple[int, int] | None = None
    other: Operand | None = None
    whole_inv: Tensor | None = None

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor | None],
        kind: tuple[Format | None, tuple[int, int] | None] | None,
    ) -> Operand | None:
        """The operand of that format and tile whose `tensors` were kept; None where none was."""
        data, scale_inv, whole_inv = tensors
        return (
            None
            if data is None or kind is None
            else cls(data, scale_inv, *kind, whole_inv=whole_inv)
        )

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a backward pass keeps of it, for `of`."""
        return self.data, self.scale_inv, self.whole_inv

    def t(self) -> Operand:
        if self.other is not None:
            return self.other
        scale_inv = (
            self.scale_inv.t()
            if self.scale_inv is not None and self.scale_inv.dim() == 2
            else self.scale_inv
        )
        return Operand(
            self.data.t(),
            scale_inv,
            self.fmt,
            self.tile and (self.tile[1], self.tile[0]),
            whole_inv=self.whole_inv,
        )

    @property
    def how(self) -> str:
        if self.data.dtype in BY_DTYPE or self.data.dtype == torch.uint8:
            return "scaled_mm"
        return "emulated" if self.fmt else "high_precision"

    @property
    def kind(self) -> str:
        fmt = (
            E2M1 if self.fmt == E2M1 else BY_DTYPE.get(self.data.dtype, self.fmt)
        )  # in float8 it has E4M3's dtype
        return fmt.name if fmt else str(self.data.dtype).removeprefix("torch.")


def in_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """`y` in `dtype`, as `y.to(dtype)`, for the results of autograd functions: where that call changes nothing, Dynamo of torch
    2.11 takes what such a function returns for a tensor that it did not make, and every gradient of it is 0 under torch.compile.
    It goes when pyproject.toml asks for torch 2.13, which is right."""
    return y if y.dtype == dtype else y.to(dtype)
