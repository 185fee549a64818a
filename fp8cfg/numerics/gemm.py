"""GEMM: multiplies two operands in FP8 or high precision, and records what it multiplied.

An FP8 GEMM is real or emulated. A real GEMM multiplies float8 operands by torch's scaled products. An
emulated GEMM multiplies the same values in a carrier: float32, or bfloat16, which holds all of them
exactly. Both accumulate in float32, multiply by the inverse scales, add the bias in the dtype of the
output and round once, to that dtype. With tiles the bias is added after rounding, because no real GEMM
with tiles has a bias. The two differ in the order of summation. Nothing emulates the shorter
accumulator of Hopper's fast accumulation.

Scales that vary along the contracted dimension are multiplied into carried values. Powers of two
change no mantissa, and an E2M1 value times an E4M3 scale has six significant bits: bfloat16 still
holds them exactly. Block scaling with float32 scales needs a float32 carrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from fp8cfg.numerics.formats import E2M1, FORMAT_BY_DTYPE, Format
from fp8cfg.numerics.scaling import encode_e8m0
from fp8cfg.schema.scalings import Tile

FPROP, DGRAD, WGRAD = 0, 1, 2
"""The GEMMs of a linear layer: slots of its record."""


# --- operands


class Operand(NamedTuple):
    """A matrix of a GEMM. Its last dimension is contracted.

    In high precision all fields but `data` are None.

    Attributes:
        data: The matrix. In FP8 it is float8, or bytes that hold two E2M1 codes each, or it holds
            FP8 values in a wider carrier.
        scale_inv: Inverse scales. A float32 scalar, float32 for each tile, or bytes of E8M0 or E4M3
            in the order in which the hardware reads them. None if they are multiplied into `data`.
        fmt: The FP8 format.
        tile: Rows and columns that share a scale. None is the whole matrix.
        columnwise: The operand for GEMMs that contract the first dimension, if one kernel wrote
            both.
        global_scale_inv: NVFP4's inverse scale of the tensor, if the hardware applies it.
    """

    data: Tensor
    scale_inv: Tensor | None = None
    fmt: Format | None = None
    tile: Tile | None = None
    columnwise: Operand | None = None
    global_scale_inv: Tensor | None = None

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor | None], kind: tuple[Format | None, Tile | None] | None
    ) -> Operand | None:
        """Returns the operand with these `tensors`, format and tile, or None if they are None."""
        data, scale_inv, global_scale_inv = tensors
        if data is None or kind is None:
            return None
        fmt, tile = kind
        return cls(data, scale_inv, fmt, tile, global_scale_inv=global_scale_inv)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that a backward pass saves, for `from_tensors`."""
        return self.data, self.scale_inv, self.global_scale_inv

    def t(self) -> Operand:
        """Returns the operand for GEMMs that contract the first dimension."""
        if self.columnwise is not None:
            return self.columnwise
        scale_inv = self.scale_inv
        if scale_inv is not None and scale_inv.dim() == 2:
            scale_inv = scale_inv.t()
        tile = self.tile
        if tile is not None:
            tile = tile[1], tile[0]
        return Operand(
            self.data.t(), scale_inv, self.fmt, tile, global_scale_inv=self.global_scale_inv
        )

    @property
    def execution(self) -> str:
        """How the operand is multiplied: "scaled_mm", "emulated" or "high_precision"."""
        if self.data.dtype in FORMAT_BY_DTYPE or self.data.dtype == torch.uint8:
            return "scaled_mm"
        if self.fmt is None:
            return "high_precision"
        return "emulated"

    @property
    def format_name(self) -> str:
        """Name of the FP8 format, or of the dtype in high precision."""
        if self.fmt == E2M1:
            return self.fmt.name  # its values may be stored in the dtype of E4M3
        fmt = FORMAT_BY_DTYPE.get(self.data.dtype, self.fmt)
        if fmt is None:
            return str(self.data.dtype).removeprefix("torch.")
        return fmt.name


# --- the record of a GEMM

_FORMAT_NAMES = ("e4m3", "e5m2", "float32", "bfloat16", "float16", "float64", "e2m1")
_EXECUTIONS = ("high_precision", "emulated", "scaled_mm")


class GemmRecord(NamedTuple):
    """Record of one GEMM.

    Attributes:
        a: Format or dtype of the first operand, such as "e4m3" or "bfloat16".
        b: Format or dtype of the second operand.
        execution: "emulated", "scaled_mm" or "high_precision".
    """

    a: str
    b: str
    execution: str


def encode_gemm_record(a: Operand, b: Operand) -> int:
    """Encodes the record of a GEMM as an int. 0 stands for a GEMM that has not run.

    Raises:
        TypeError: One operand is FP8 and the other is not.
    """
    if a.execution != b.execution:
        raise TypeError(
            f"one product cannot have operands of two precisions: {a.execution} {a.format_name} and"
            f" {b.execution} {b.format_name}"
        )
    code = _FORMAT_NAMES.index(a.format_name)
    code += 8 * _FORMAT_NAMES.index(b.format_name)
    code += 64 * _EXECUTIONS.index(a.execution)
    return 1 + code


def decode_gemm_record(code: int) -> GemmRecord | None:
    """Decodes one entry of `FP8Linear.gemms_ran`. Returns None if that GEMM has not run."""
    if code == 0:
        return None
    execution, formats = divmod(int(code) - 1, 64)
    b, a = divmod(formats, 8)
    return GemmRecord(_FORMAT_NAMES[a], _FORMAT_NAMES[b], _EXECUTIONS[execution])


# --- the GEMM


def gemm(
    a: Operand,
    b: Operand,
    out: torch.dtype,
    record: Tensor | None,
    slot: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes a [M, K] @ b [N, K]ᵀ + bias [N].

    Args:
        a: First operand.
        b: Second operand.
        out: Dtype of the result.
        record: int32 [3]. `record[slot]` is set to the record of these two operands. It is written
            only here, as an operation on a tensor, so that compiled graphs write it too.
        slot: FPROP, DGRAD or WGRAD.
        bias: The bias.

    Returns:
        [M, N] of dtype `out`.

    Raises:
        TypeError: One operand is FP8 and the other is not.
    """
    code = encode_gemm_record(a, b)
    if record is not None:
        record[slot].fill_(code)
    if a.execution == "high_precision":
        if bias is not None:
            bias = bias.to(a.data.dtype)
        return convert_dtype(F.linear(a.data, b.data, bias), out)
    if a.execution == "scaled_mm" and a.data.shape[1]:
        # Fast accumulation is precise enough for activations, and too coarse for gradients.
        return scaled_mm(a, b, out, bias, fast_accumulation=slot == FPROP)
    return _emulated_mm(a, b, out, bias)


def _emulated_mm(a: Operand, b: Operand, out: torch.dtype, bias: Tensor | None) -> Tensor:
    y = _matmul_fp32(a.data, b.data)
    # Tiles without elements have no scales.
    if a.scale_inv is not None and b.scale_inv is not None and a.data.shape[1]:
        scale_inv_b = b.scale_inv
        if scale_inv_b.dim() == 2:  # scales of rows: those of `b` are columns of the result
            scale_inv_b = scale_inv_b.t()
        y = y * (a.scale_inv * scale_inv_b)
    if bias is None:
        return convert_dtype(y, out)
    if _has_tiles(a):
        y = convert_dtype(y, out)  # a real GEMM with tiles takes no bias and rounds before it
    return convert_dtype(y + bias.to(out), out)


def _has_tiles(operand: Operand) -> bool:
    """Whether scales vary along the contracted dimension. One scale for a row does not."""
    return operand.tile is not None and 0 not in operand.tile


def _matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Returns a [M, K] @ b [N, K]ᵀ as float32 sums that are not rounded to the operands' dtype."""
    if a.shape[1] == 0:
        return torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()  # on a CPU torch.mm has no out_dtype (torch 2.13)


def convert_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `y.to(dtype)`, for the results of autograd functions."""
    # If `to` changes nothing, Dynamo of torch 2.11 takes the result of an autograd function for a
    # tensor that the function did not create. Under torch.compile all gradients of it are 0 then.
    # Use `to` when pyproject.toml requires torch 2.13.
    if y.dtype == dtype:
        return y
    return y.to(dtype)


# --- real GEMMs

BLOCK_WIDTH = 128
"""Elements of a tile of block scaling along the contracted dimension."""
MAX_ROWS_SCALED_AFTERWARDS = 256
"""Up to this number of rows a GPU multiplies without scales of rows, and they are applied
afterwards.

cuBLASLt on an H100 returns CUBLAS_STATUS_NOT_SUPPORTED for [M, 9216] @ [3072, 9216]ᵀ of 256 rows or
less, not of 257, and for [127, 3072] @ [3072, 3072]ᵀ (pytorch/ao#4582, July 2026, open: no version
fixes it yet). The limit for other sizes is unknown, so it does not depend on K and N here.
`check_gpu.py --only gemm` multiplies some.
"""


def scaled_mm(
    a: Operand, b: Operand, out: torch.dtype, bias: Tensor | None, fast_accumulation: bool
) -> Tensor:
    """Computes a [M, K] @ b [N, K]ᵀ + bias [N] of float8 operands by the hardware.

    Args:
        a: First operand.
        b: Second operand.
        out: Dtype of the result.
        bias: The bias. The GEMM adds it before it rounds if `out` has 16 bits and there are no
            tiles. Other GEMMs of the hardware take no bias.
        fast_accumulation: Whether to skip the promotion of partial sums to full float32.

    Returns:
        [M, N] of dtype `out`.
    """
    assert a.scale_inv is not None and b.scale_inv is not None, "a float8 operand has a scale"
    if a.tile is not None and _has_tiles(a):
        if max(a.tile) == BLOCK_WIDTH:
            return _add_bias(_block_scaled_mm(a, b, out), bias)
        return _add_bias(microscaled_mm(a, b, out), bias)

    # cuBLAS wants rows of whole 16 bytes.
    x, w = _pad_columns(a.data, 16), _pad_columns(b.data, 16)
    scale_a, scale_b = a.scale_inv, b.scale_inv
    if a.scale_inv.dim() == 2:
        scale_a, scale_b = a.scale_inv.flatten()[:, None], b.scale_inv.flatten()[None]
        is_unsupported = x.is_cuda and len(x) <= MAX_ROWS_SCALED_AFTERWARDS
        # With scales of rows torch returns only bfloat16.
        if out != torch.bfloat16 or is_unsupported:
            one = torch.ones((), dtype=torch.float32, device=x.device)
            y = torch._scaled_mm(
                x,
                w.t(),
                scale_a=one,
                scale_b=one,
                out_dtype=torch.float32,
                use_fast_accum=fast_accumulation,
            )
            y = y * (scale_a * scale_b)
            if bias is not None:
                y = y + bias.to(out)
            return convert_dtype(y, out)

    gemm_bias = None
    if bias is not None and out.itemsize == 2:
        gemm_bias = bias.to(out)
        bias = None
    y = torch._scaled_mm(
        x,
        w.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=gemm_bias,
        out_dtype=out,
        use_fast_accum=fast_accumulation,
    )
    return _add_bias(y, bias)


def _add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Adds the bias to the rounded result of a GEMM that takes none."""
    if bias is None:
        return y
    return y + bias.to(y.dtype)


def _pad_columns(t: Tensor, multiple: int) -> Tensor:
    """Returns float8 numbers or bytes [M, K], row-major, with K padded to a multiple with zeros.

    Wgrad contracts the tokens, which come in any number.
    """
    t = t.contiguous()
    missing = -t.shape[1] % multiple
    if not missing:
        return t
    return F.pad(t.view(torch.uint8), (0, missing)).view(t.dtype)  # pad knows no float8


def _block_scaled_mm(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    assert a.scale_inv is not None and b.scale_inv is not None
    has_row_tiles_a = a.tile == (1, BLOCK_WIDTH)
    has_row_tiles_b = b.tile == (1, BLOCK_WIDTH)
    y: Tensor = scaled_mm_blocks(
        a.data, b.data, a.scale_inv, b.scale_inv, has_row_tiles_a, has_row_tiles_b, out
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
    """Computes a [M, K] @ b [N, K]ᵀ of float8 operands with block scaling.

    Args:
        a: float8 [M, K].
        b: float8 [N, K].
        scale_a: Inverse scales of `a`, float32.
        scale_b: Inverse scales of `b`, float32.
        rows_a: Whether `a` has tiles of 1 x 128 instead of 128 x 128.
        rows_b: Whether `b` has tiles of 1 x 128 instead of 128 x 128.
        out: Dtype of the result.

    Returns:
        [M, N] of dtype `out`.
    """
    m, n = len(a), len(b)
    a, scale_a, recipe_a = _block_layout(a, scale_a, rows_a)
    b, scale_b, recipe_b = _block_layout(b, scale_b, rows_b)
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


def _block_layout(
    t: Tensor, scale: Tensor, has_row_tiles: bool
) -> tuple[Tensor, Tensor, F.ScalingType]:
    """Returns data and scales in the layout of cuBLAS, padded with zeros, and their type."""
    t = _pad_columns(t, BLOCK_WIDTH)
    if not has_row_tiles:
        # Scales of 128 x 128 are column-major, and their columns have a multiple of 4 numbers.
        missing = -scale.shape[1] % 4
        if missing:
            scale = F.pad(scale, (0, missing))
        return t, scale.contiguous().t(), F.ScalingType.BlockWise128x128

    # Scales of 1 x 128 are column-major too, one column for 128 elements, for a multiple of 4 rows.
    missing = -len(t) % 4
    if missing:
        t = F.pad(t.view(torch.uint8), (0, 0, 0, missing)).view(t.dtype)
        scale = F.pad(scale, (0, 0, 0, missing))
    if scale.stride() != (1, len(scale)):
        # The copy has fresh strides. A single column may have any stride, but torch 2.11 wants
        # (1, rows) for it too.
        scale = scale.t().clone(memory_format=torch.contiguous_format).t()
    return t, scale, F.ScalingType.BlockWise1x128


# --- MXFP8 and NVFP4

ALIGNMENT = 32
"""The contracted dimension is padded to a multiple of it: a tile of MXFP8, and 16 bytes of E2M1."""
SWIZZLE = F.SwizzleType.SWIZZLE_32_4_4


def microscaled_mm(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    """Computes a [M, K] @ b [N, K]ᵀ under MXFP8 or NVFP4, [M, N] of dtype `out`."""
    x, scale_a = hardware_layout(a)
    w, scale_b = hardware_layout(b)
    y: Tensor = scaled_mm_micro(x, w, scale_a, scale_b, a.global_scale_inv, b.global_scale_inv, out)
    return y


def hardware_layout(operand: Operand) -> tuple[Tensor, Tensor]:
    """Returns the bytes of an operand and of its scales as the hardware reads them."""
    assert operand.scale_inv is not None and operand.tile is not None
    scale = operand.scale_inv
    if operand.data.dtype == torch.uint8:
        return operand.data, scale  # a kernel wrote both in this layout
    data = _pad_columns(operand.data.view(torch.uint8), ALIGNMENT)
    if scale.dim() == 1:
        return data, scale
    height = operand.tile[0]
    if height > 1:
        # The hardware knows only tiles of one row. A square repeats its scale for each of its rows.
        scale = scale.repeat_interleave(height, 0)[: len(data)]
    if operand.global_scale_inv is not None:  # NVFP4
        scale_bytes = scale.to(torch.float8_e4m3fn).view(torch.uint8)
        return pack_e2m1(data), swizzle_scales(scale_bytes)
    if scale.dtype != torch.uint8:
        scale = encode_e8m0(scale)
    return data, swizzle_scales(scale)


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
    """Computes a [M, K] @ b [N, K]ᵀ of operands in `hardware_layout`.

    Args:
        a: Bytes [M, K] of E4M3, or [M, K / 2] of packed E2M1.
        b: Bytes [N, K] or [N, K / 2].
        scale_a: Bytes, swizzled: E8M0 for 32 elements, or E4M3 for 16.
        scale_b: The same for `b`.
        whole_a: NVFP4's inverse global scale, float32 []. None under MXFP8.
        whole_b: The same for `b`.
        out: Dtype of the result.

    Returns:
        [M, N] of dtype `out`.
    """
    if whole_a is None or whole_b is None:
        data_dtype, scale_dtype = torch.float8_e4m3fn, torch.float8_e8m0fnu
        recipe = F.ScalingType.BlockWise1x32
        return F.scaled_mm(
            a.view(data_dtype),
            b.view(data_dtype).t(),
            scale_a.view(scale_dtype),
            recipe,
            scale_b.view(scale_dtype),
            recipe,
            SWIZZLE,
            SWIZZLE,
            output_dtype=out,
        )
    data_dtype, scale_dtype = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    recipes = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzles = [SWIZZLE, F.SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(
        a.view(data_dtype),
        b.view(data_dtype).t(),
        [scale_a.view(scale_dtype), whole_a],
        recipes,
        [scale_b.view(scale_dtype), whole_b],
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
    """Returns bytes [R, C] in the order in which the tensor cores read scales, flat.

    The tensor cores read tiles of 128 x 4. In a tile the rows r, r + 32, r + 64 and r + 96 are
    neighbors. Incomplete tiles are padded with zeros.
    """
    rows, columns = scales.shape
    missing_rows, missing_columns = -rows % 128, -columns % 4
    if missing_rows or missing_columns:
        scales = F.pad(scales, (0, missing_columns, 0, missing_rows))
    tiles_down, tiles_across = len(scales) // 128, scales.shape[1] // 4
    return scales.view(tiles_down, 4, 32, tiles_across, 4).permute(0, 3, 2, 1, 4).flatten()


def swizzled_scale_size(rows: int, columns: int) -> int:
    """Returns the number of bytes of `swizzle_scales` for scales [rows, columns]."""
    padded_rows = -(-rows // 128) * 128
    padded_columns = -(-columns // 4) * 4
    return padded_rows * padded_columns


def pack_e2m1(code: Tensor) -> Tensor:
    """Packs E2M1 values two to a byte. The first of two neighbors has the low bits.

    Args:
        code: E2M1 values as bytes of E4M3, [M, K]. NaN becomes some number: E2M1 has no NaN, and
            the scale of its tile is NaN.

    Returns:
        Bytes [M, K / 2].
    """
    # E4M3 has exponents biased by 7 and 3 mantissa bits, E2M1 has a bias of 1 and 1 bit. 0.5 is
    # normal in E4M3 and subnormal in E2M1: 0x38 is 1.0, the smallest normal number of E2M1.
    magnitude = code & 0x7F
    sign = code >> 4 & 8
    code = sign | torch.where(magnitude >= 0x38, (magnitude - 0x30) >> 2 & 7, magnitude >> 5)
    return code[:, ::2] | code[:, 1::2] << 4
