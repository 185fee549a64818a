"""Bytes per element: of the storage codecs, and of the quantized operands of the native backend's GEMMs."""

from __future__ import annotations

from functools import cache

from fp8cfg.config.fp8 import FP8, per_row, power_2_scales, transforms, weights_2d
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import SCALED
from fp8cfg.scalings import SCALINGS, Tile

CODEC: dict[str, float] = {
    "none": 0,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp16_scaled": 2,
    "fp8": 1,
    "fp8_pow2": 1,
    "fp8_block": 1 + 4 / 128,
    "fp8_expand": 1 + 8 / 128,
}
"""One element in each codec of `storage`, with its share of a block's scale; one for a whole tensor is left out."""
CODEC_BLOCK = 128
"""Elements that share a scale in the codecs of blocks."""
CHUNK = 1 << 17
"""Elements that a CPU quantizes at a time (numerics/quantize.py)."""


@cache
def stored_bytes(codec: str, elements: int) -> int:
    """A tensor of `elements` in a codec of `storage`, with its scales, float32: one, or those of its blocks."""
    data, per_block = int(CODEC[codec]) * elements, int(CODEC[codec] % 1 * CODEC_BLOCK)
    if per_block:
        return data + per_block * -(-elements // CODEC_BLOCK)
    return data + (4 if codec in SCALED and elements else 0)


def emulated(recipe: Recipe, device: str) -> bool:
    """Whether products are emulated on `device` ("cpu" or "cuda"): float8 values carried in a wider dtype."""
    return device == "cpu" or recipe.fp8.emulate


def operand(recipe: Recipe, device: str) -> float:
    """An element of a quantized activation, or of a weight quantized for one pass. Emulated it is the carrier's: bfloat16 under
    bf16, unless its scale is multiplied in and is no power of two, and else float32. On hardware a byte, under nvfp4 half of one
    where a kernel packs it, and its share of a block's scale."""
    scaling = SCALINGS[recipe.fp8.scaling]
    if emulated(recipe, device):
        exact = scaling.exact_in_bfloat16(power_2_scales(recipe.fp8))
        return CODEC["bf16"] if recipe.precision.compute == "bf16" and exact else CODEC["fp32"]
    if scaling.two_levels and not _packs(recipe.fp8):
        return CODEC["fp8"] + CODEC["fp32"] / scaling.block
    return CODEC["fp8"] / (2 if scaling.two_levels else 1) + scaling.scale_share(_tile(recipe.fp8))


def _packs(fp8: FP8) -> bool:
    """Whether the kernel of nvfp4 makes every operand (numerics/nvfp4.py): of activations for wgrad it takes transformed ones, of
    weights squares."""
    return transforms(fp8) and weights_2d(fp8)


def _tile(fp8: FP8, weight: bool = False) -> Tile | None:
    """What shares a scale of an activation, or of a weight, as fprop reads it."""
    return SCALINGS[fp8.scaling].tile(1, fp8.granularity, square=weight and weights_2d(fp8))


def directions(recipe: Recipe) -> int:
    """How often an activation or a gradient is quantized: twice where scales lie along the contracted dimension, since
    products contract both."""
    return 2 if _tile(recipe.fp8) else 1


def row_scaled(recipe: Recipe) -> bool:
    """Whether a weight has scales along rows, and others for dgrad."""
    tile = _tile(recipe.fp8, weight=True)
    return tile is not None and tile[0] != tile[1]


def held_beside(recipe: Recipe) -> float:
    """What an element of a weight held in FP8 alone takes beside its byte: its share of scales; and where these lie along rows,
    another byte and scales along columns, for dgrad."""
    tile = _tile(recipe.fp8, weight=True)
    share = SCALINGS[recipe.fp8.scaling].scale_share(tile)
    return 1 + 2 * share if row_scaled(recipe) else share


def decoded(recipe: Recipe, device: str) -> float:
    """What an element of a weight held in FP8 alone takes more while an emulated product reads it: the carrier."""
    return operand(recipe, device) if emulated(recipe, device) else 0


def product(recipe: Recipe, device: str, out: float, made: float, read: float) -> float:
    """The most that an FP8 product takes before its result of `made` elements is there, `out` bytes each; `read` are the elements
    of its operands.

    Hardware writes the output. An emulated product has float32 sums (numerics/gemm.py), for which a CPU copies operands of two
    bytes. Scales that are not in the operands are multiplied in afterwards, into another float32 matrix; those of rows and columns
    are one themselves then.
    """
    if not emulated(recipe, device):
        return out * made
    carrier, scaling = operand(recipe, device), SCALINGS[recipe.fp8.scaling]
    copies = 4 * read if device == "cpu" and carrier < 4 else 0
    cast = out if out < 4 else 0
    after = (
        12 if per_row(recipe.fp8) else 4 + cast if scaling.block and not scaling.two_levels else 8
    )
    return max(copies + 4 * made, after * made)


def by_kernel(recipe: Recipe, device: str) -> bool:
    """Whether kernels quantize, without temporaries (numerics/fused_quantize.py): for products of the hardware."""
    packs = _packs(recipe.fp8) or not SCALINGS[recipe.fp8.scaling].two_levels
    return device == "cuda" and not emulated(recipe, device) and packs


def quantizing(recipe: Recipe, device: str, elements: float, gradient: bool) -> float:
    """The most that quantizing a matrix of `elements`, a `gradient` or a weight, takes, its result among it. A CPU does so in
    chunks (numerics/quantize.py, CHUNK); a GPU by a kernel that writes the result and its transpose alone, or the whole matrix,
    eagerly. The Hadamard transform of a gradient is made of a copy that runs along the other dimension, and quantized in its place;
    scales of columns need all rows, in float32, twice."""
    mixed = CODEC[recipe.precision.compute] * elements if gradient and transforms(recipe.fp8) else 0
    if by_kernel(recipe, device):
        return 2 * mixed + 2 * operand(recipe, device) * elements
    each = _rounding(recipe, device, gradient)
    if device == "cuda":
        return max(2 * mixed, mixed + each * elements)
    return max(
        2 * mixed,
        mixed + _in_chunks(recipe, elements, each),
        8 * elements if 0 in (_tile(recipe.fp8) or ()) else 0,
    )


def _in_chunks(recipe: Recipe, elements: float, each: float) -> float:
    """The most that a CPU takes to quantize a matrix of `elements` in chunks, `each` bytes an element of one, with the result; of
    tiles beside what the chunk before became, and float32 scales: of all that were, and of the chunk those to multiply by.
    """
    result, chunk, tile = operand(recipe, "cpu"), min(CHUNK, elements), _tile(recipe.fp8)
    if tile is None:
        return result * elements + each * chunk
    before, scale = min(chunk, elements - chunk), 0 if 0 in tile else 4 / (tile[0] * tile[1])
    return result * (elements + before) + each * chunk + scale * (elements + chunk)


def _rounding(recipe: Recipe, device: str, gradient: bool) -> float:
    """The most that an element of a matrix takes while it is rounded without a kernel (numerics/formats.py): float32 scaled and cut
    to the range, and its code; a CPU then looks up, beside what was scaled and the code, the place in a table and what stands
    there. Four bits are rounded in steps: scaled, cut, its exponent, step, number of steps, product and that cut again, beside a
    random number where a `gradient` is rounded stochastically. With scales of tiles what was scaled stays beside it.
    """
    apart = 4 if _tile(recipe.fp8) and recipe.precision.compute != "fp32" else 0
    if SCALINGS[recipe.fp8.scaling].two_levels:
        return apart + 7 * 4 + 4 * (gradient and recipe.fp8.stochastic_rounding)
    return apart + (4 + 1 + 4 + operand(recipe, device) if device == "cpu" else 4 + 4 + 1)
