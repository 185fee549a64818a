"""GEMM: the one function that multiplies operands, in FP8 or high precision, and its record of what it multiplied.

A product is either real (float8 operands, see gemm.py) or emulated: the same values carried in bfloat16, which holds
all of them exactly, or in float32. Both accumulate in float32, scale, add the bias as the output's dtype has it and round once, to
that dtype; where operands have tiles, which no real product with a bias has, they add it to what was rounded. They differ by the
order of summation. What nobody emulates is the shorter accumulator of Hopper's fast accumulation.

Scales that vary along the contracted dimension are multiplied into the carried values. Powers of two change no mantissa,
and nvfp4's E4M3 scales leave six significant bits: bfloat16 still holds the values exactly. Block scaling with float32
scales needs a float32 carrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from fp8cfg.numerics.formats import E2M1, FORMAT_BY_DTYPE, Format
from fp8cfg.numerics.scaling import encode_e8m0


class Operand(NamedTuple):
    """A matrix whose last dimension is contracted. In FP8 `fmt` is set, and `data` is float8, or bytes that hold two codes of E2M1
    each, or holds values of its grid in a wider carrier. `scale_inv` is applied by the product or by the hardware: a float32
    scalar, or one for each tile, or bytes of E8M0 or E4M3, flat in the order in which the hardware reads them; None where it is
    already multiplied into `data`. `columnwise` is the operand of products that contract the first dimension, where one kernel made
    both. `global_scale_inv` is nvfp4's inverse scale of the tensor, above those of tiles, where the hardware applies it. In high precision
    all fields but `data` are None.
    """

    data: Tensor
    scale_inv: Tensor | None = None
    fmt: Format | None = None
    tile: tuple[int, int] | None = None
    columnwise: Operand | None = None
    global_scale_inv: Tensor | None = None

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Tensor | None],
        kind: tuple[Format | None, tuple[int, int] | None] | None,
    ) -> Operand | None:
        """The operand of that format and tile whose `tensors` were kept; None where none was."""
        data, scale_inv, global_scale_inv = tensors
        return (
            None
            if data is None or kind is None
            else cls(data, scale_inv, *kind, global_scale_inv=global_scale_inv)
        )

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a backward pass keeps of it, for `of`."""
        return self.data, self.scale_inv, self.global_scale_inv

    def t(self) -> Operand:
        if self.columnwise is not None:
            return self.columnwise
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
            global_scale_inv=self.global_scale_inv,
        )

    @property
    def execution(self) -> str:
        if self.data.dtype in FORMAT_BY_DTYPE or self.data.dtype == torch.uint8:
            return "scaled_mm"
        return "emulated" if self.fmt else "high_precision"

    @property
    def format_name(self) -> str:
        fmt = (
            E2M1 if self.fmt == E2M1 else FORMAT_BY_DTYPE.get(self.data.dtype, self.fmt)
        )  # in float8 it has E4M3's dtype
        return fmt.name if fmt else str(self.data.dtype).removeprefix("torch.")


def convert_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """`y` in `dtype`, as `y.to(dtype)`, for the results of autograd functions: where that call changes nothing, Dynamo of torch
    2.11 takes what such a function returns for a tensor that it did not make, and every gradient of it is 0 under torch.compile.
    It goes when pyproject.toml asks for torch 2.13, which is right."""
    return y if y.dtype == dtype else y.to(dtype)


ALIGNMENT = 32
"""Elements of which the contracted dimension is a multiple: a tile of MXFP8, and 16 bytes of E2M1."""
SWIZZLE = F.SwizzleType.SWIZZLE_32_4_4


def microscaled_mm(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ as [M, N] of dtype `out`, of operands with scales of 1x32, or 1x16 and one of the tensor, or squares."""
    (x, x_scale), (w, w_scale) = hardware_layout(a), hardware_layout(b)
    product: Tensor = scaled_mm_micro(
        x, w, x_scale, w_scale, a.global_scale_inv, b.global_scale_inv, out
    )
    return product


def hardware_layout(t: Operand) -> tuple[Tensor, Tensor]:
    """The data and scales of `t` as the hardware reads them, bytes. A square of n x n has its scale once for each of its n rows."""
    assert t.scale_inv is not None and t.tile is not None
    if t.data.dtype == torch.uint8:
        return t.data, t.scale_inv
    data, scale = _padded(t.data.view(torch.uint8), ALIGNMENT), t.scale_inv
    if scale.dim() == 1:
        return data, scale
    if t.tile[0] > 1:
        scale = scale.repeat_interleave(t.tile[0], 0)[: len(data)]
    if t.global_scale_inv is None:
        return data, swizzle_scales(scale if scale.dtype == torch.uint8 else encode_e8m0(scale))
    return pack_e2m1(data), swizzle_scales(scale.to(torch.float8_e4m3fn).view(torch.uint8))


@library.custom_op("fp8cfg::scaled_mm_micro", mutates_args=())
def scaled_mm_micro(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    whole_a: Tensor | None,
    whole_b: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ as [M, N] of dtype `out`. All are bytes, scales swizzled: E4M3 with E8M0 scales of 1x32, or with
    `whole_*`, float32 [], two of E2M1 to a byte with E4M3 scales of 1x16."""
    if whole_a is None or whole_b is None:
        data, of_scale, recipe, swizzle = (
            torch.float8_e4m3fn,
            torch.float8_e8m0fnu,
            F.ScalingType.BlockWise1x32,
            SWIZZLE,
        )
        return F.scaled_mm(
            a.view(data),
            b.view(data).t(),
            scale_a.view(of_scale),
            recipe,
            scale_b.view(of_scale),
            recipe,
            swizzle,
            swizzle,
            output_dtype=out,
        )
    packed, of_scale = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    recipes, swizzles = (
        [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise],
        [
            SWIZZLE,
            F.SwizzleType.NO_SWIZZLE,
        ],
    )
    return F.scaled_mm(
        a.view(packed),
        b.view(packed).t(),
        [scale_a.view(of_scale), whole_a],
        recipes,
        [scale_b.view(of_scale), whole_b],
        recipes,
        swizzles,
        swizzles,
        output_dtype=out,
    )


@scaled_mm_micro.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    whole_a: Tensor | None,
    whole_b: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=out)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Bytes `scales` [R, C] in the order that the tensor cores read, completed with zeros to whole tiles of 128 x 4; flat."""
    rows, columns = scales.shape
    missing = (0, -columns % 4, 0, -rows % 128)
    t = F.pad(scales, missing) if any(missing) else scales
    return t.view(len(t) // 128, 4, 32, t.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def swizzled_scale_size(rows: int, columns: int) -> int:
    """The bytes that scales [rows, columns] take in that order."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def pack_e2m1(code: Tensor) -> Tensor:
    """Values of E2M1 as bytes of E4M3 `code` [M, K], two to a byte, [M, K / 2]; of two neighbours the first has the low bits.

    An E4M3 code has the exponent biased by 7 and three bits of mantissa, an E2M1 code biased by 1 and one bit; 0.5 is normal in
    the one and subnormal in the other. A NaN becomes some number: E2M1 has none, and its scale is NaN.
    """
    magnitude = code & 0x7F
    code = (code >> 4 & 8) | torch.where(
        magnitude >= 0x38, (magnitude - 0x30) >> 2 & 7, magnitude >> 5
    )
    return code[:, ::2] | code[:, 1::2] << 4


BLOCK_WIDTH = 128
"""Elements of a tile of block scaling along a contracted dimension."""
FEW = 256
"""Rows up to which a GPU is not asked for scales of rows. On an H100 cuBLASLt, which torch asks there, refuses them for [M, 9216] @
[3072, 9216]ᵀ of 256 rows or less (CUBLAS_STATUS_NOT_SUPPORTED), not of 257, nor for [127, 3072] @ [3072, 3072]ᵀ, nor scales of
tensors (pytorch/ao#4582, July 2026, open: no version ends it yet). Where the limit lies for other sizes is not known: few rows are
scaled afterwards whatever K and N are. `check_gpu.py --only gemm` multiplies some."""


def scaled_mm(
    a: Operand, b: Operand, out: torch.dtype, bias: Tensor | None, fast_accumulation: bool
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ (+ bias [N]), both float8, as [M, N] of dtype `out`, rounded once where `out` has 16 bits and no
    operand has tiles: other products of the hardware take no bias. Fast accumulation spares promoting partial sums to full
    float32: good enough forward, too coarse for gradients."""
    assert a.scale_inv is not None and b.scale_inv is not None, "a float8 operand has a scale"
    if a.tile and 0 not in a.tile:
        y = _block(a, b, out) if max(a.tile) == BLOCK_WIDTH else microscaled_mm(a, b, out)
        return y if bias is None else y + bias.to(out)
    x, w = _padded(a.data, 16), _padded(b.data, 16)
    rows = a.scale_inv.dim() == 2
    scales = (
        (a.scale_inv.flatten()[:, None], b.scale_inv.flatten()[None])
        if rows
        else (a.scale_inv, b.scale_inv)
    )
    if rows and (
        out != torch.bfloat16 or (x.is_cuda and len(x) <= FEW)
    ):  # bfloat16 is all that torch's product with them gives
        one = torch.ones((), dtype=torch.float32, device=x.device)
        y = torch._scaled_mm(
            x,
            w.t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
            use_fast_accum=fast_accumulation,
        )
        y = y * (scales[0] * scales[1])
        return convert_dtype(y if bias is None else y + bias.to(out), out)
    inside = bias.to(out) if bias is not None and out.itemsize == 2 else None
    y = torch._scaled_mm(
        x,
        w.t(),
        scale_a=scales[0],
        scale_b=scales[1],
        bias=inside,
        out_dtype=out,
        use_fast_accum=fast_accumulation,
    )
    return y if bias is None or inside is not None else y + bias.to(out)


def _block(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    assert a.scale_inv is not None and b.scale_inv is not None
    y: Tensor = scaled_mm_blocks(
        a.data,
        b.data,
        a.scale_inv,
        b.scale_inv,
        a.tile == (1, BLOCK_WIDTH),
        b.tile == (1, BLOCK_WIDTH),
        out,
    )
    return y


@library.custom_op("fp8cfg::scaled_mm_blocks", mutates_args=())
def scaled_mm_blocks(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    rows_a: bool,
    rows_b: bool,
    out: torch.dtype,
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ, float8 with scales of 1x128 tiles where `rows_*`, else of 128x128 tiles, as [M, N] of dtype `out`."""
    m, n = len(a), len(b)
    a, scale_a, recipe_a = _blocks(a, scale_a, rows_a)
    b, scale_b, recipe_b = _blocks(b, scale_b, rows_b)
    y = F.scaled_mm(
        a,
        b.t(),
        scale_a=scale_a,
        scale_recipe_a=recipe_a,
        scale_b=scale_b,
        scale_recipe_b=recipe_b,
        output_dtype=out,
    )
    return y[:m, :n].contiguous()


@scaled_mm_blocks.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    rows_a: bool,
    rows_b: bool,
    out: torch.dtype,
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=out)


def _blocks(t: Tensor, scale: Tensor, rows: bool) -> tuple[Tensor, Tensor, F.ScalingType]:
    """Data and scales in the layout that cuBLAS wants, completed with zeros."""
    t = _padded(t, BLOCK_WIDTH)
    if not rows:
        missing = -scale.shape[1] % 4
        return (
            t,
            (F.pad(scale, (0, missing)) if missing else scale).contiguous().t(),
            F.ScalingType.BlockWise128x128,
        )
    missing = -len(t) % 4
    if missing:
        t, scale = (
            F.pad(t.view(torch.uint8), (0, 0, 0, missing)).view(t.dtype),
            F.pad(scale, (0, 0, 0, missing)),
        )
    if scale.stride() != (1, len(scale)):
        # A copy has fresh strides: those of a single column are any, and torch 2.11 wants (1, rows) there too.
        scale = scale.t().clone(memory_format=torch.contiguous_format).t()
    return t, scale, F.ScalingType.BlockWise1x128


def _padded(t: Tensor, multiple: int) -> Tensor:
    """Float8 numbers or bytes `t` [M, K] row-major, K completed with zeros. Tokens are contracted in wgrad and come in any number."""
    t = t.contiguous()
    missing = -t.shape[1] % multiple
    return F.pad(t.view(torch.uint8), (0, missing)).view(t.dtype) if missing else t


FPROP, DGRAD, WGRAD = 0, 1, 2  # slots of a layer's record

_KINDS = ("e4m3", "e5m2", "float32", "bfloat16", "float16", "float64", "e2m1")
_HOW = ("high_precision", "emulated", "scaled_mm")


class GemmRecord(NamedTuple):
    """Record of one product: the kinds of its operands ("e4m3", "e5m2", "bfloat16", ...) and how they were multiplied: "emulated",
    "scaled_mm" or "high_precision".
    """

    a: str
    b: str
    execution: str


def encode_gemm_record(a: Operand, b: Operand) -> int:
    if a.execution != b.execution:
        raise TypeError(
            f"one product cannot have operands of two precisions: {a.execution} {a.format_name} and {b.execution}"
            f" {b.format_name}"
        )
    return (
        1
        + _KINDS.index(a.format_name)
        + 8 * _KINDS.index(b.format_name)
        + 64 * _HOW.index(a.execution)
    )


def decode_gemm_record(code: int) -> GemmRecord | None:
    """Decodes one entry of `FP8Linear.gemms_ran`; None if that product has not run."""
    how, kinds = divmod(int(code) - 1, 64)
    return None if code == 0 else GemmRecord(_KINDS[kinds % 8], _KINDS[kinds // 8], _HOW[how])


def gemm(
    a: Operand,
    b: Operand,
    out: torch.dtype,
    ran: Tensor | None,
    slot: int,
    bias: Tensor | None = None,
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ (+ bias [N]) as [M, N] of dtype `out`, recorded in `ran[slot]`, an int32 tensor, if there is one.

    The record is derived from these two operands and written here and nowhere else, as an operation on a tensor, so that it
    is also made inside a compiled graph. Raises TypeError where one operand is FP8 and the other is not.
    """
    code = encode_gemm_record(a, b)
    if ran is not None:
        ran[slot].fill_(code)
    if a.execution == "high_precision":
        return convert_dtype(
            F.linear(a.data, b.data, None if bias is None else bias.to(a.data.dtype)), out
        )
    if a.execution == "scaled_mm" and a.data.shape[1]:
        return scaled_mm(a, b, out, bias, fast_accumulation=slot == FPROP)
    y = accumulated(a.data, b.data)
    if (
        a.scale_inv is not None and b.scale_inv is not None and a.data.shape[1]
    ):  # tiles of no elements have no scales
        y = y * (a.scale_inv * (b.scale_inv.t() if b.scale_inv.dim() == 2 else b.scale_inv))
    if bias is None or (a.tile and 0 not in a.tile):
        y = convert_dtype(y, out)
    return y if bias is None else convert_dtype(y + bias.to(out), out)


def accumulated(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ, both of one dtype, as float32 sums that are not rounded to that dtype."""
    if a.shape[1] == 0:
        return torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()  # torch's CPU product has no out_dtype (2.13)
