"""Memory of one FP8 GEMM: bytes of its operands, and temporaries while it quantizes and multiplies.

A layer quantizes the operands of fprop, dgrad and wgrad, multiplies them and writes the output.
Three cases differ:

    hardware     operands are FP8 (FP4), kernels quantize without temporaries, the GEMM writes the
                 output directly
    emulation    operands are FP8 values in a wider dtype, the carrier. The product is float32.
    torchao      backward quantizes again, with torchao's kernels

The counts follow numerics/quantize.py, numerics/formats.py, numerics/gemm.py and
numerics/kernels/launch.py.
"""

from __future__ import annotations

from functools import cache

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.schema.fp8 import FP8, per_row, power_2_scales, transforms, weights_2d
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS, Tile
from fp8cfg.schema.storage import SCALED

# Bytes per element in each storage dtype, with its share of a block's scale. The one scale of a
# per-tensor dtype is added by `stored_bytes`.
ELEMENT_BYTES: dict[str, float] = {
    "none": 0,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp16_scaled": 2,
    "fp8": 1,
    "fp8_pow2": 1,
    "fp8_block": 1 + 4 / 128,
    "fp8_expand": 1 + 8 / 128,  # scale and power of each block (numerics/codecs.py)
}
# Elements that share a scale in fp8_block and fp8_expand (numerics/codecs.py).
STORAGE_BLOCK = 128


@cache
def stored_bytes(dtype: str, elements: int) -> int:
    """Returns the bytes of a tensor in a storage dtype, with its float32 scales.

    Args:
        dtype: Storage dtype, such as "fp8_block".
        elements: Elements of the tensor.
    """
    data_bytes = int(ELEMENT_BYTES[dtype]) * elements
    bytes_per_block = int(ELEMENT_BYTES[dtype] % 1 * STORAGE_BLOCK)
    if bytes_per_block:
        blocks = -(-elements // STORAGE_BLOCK)  # the last block may be partial
        return data_bytes + bytes_per_block * blocks
    if dtype in SCALED and elements:
        return data_bytes + 4
    return data_bytes


# Bytes per element of operands and FP8 weights.


def emulates_gemms(recipe: Recipe, device: str) -> bool:
    """Whether GEMMs are emulated in a wider dtype. `device` is "cpu" or "cuda"."""
    return device == "cpu" or recipe.fp8.emulate


def operand_bytes(recipe: Recipe, device: str) -> float:
    """Returns bytes per element of a quantized activation, or of a weight quantized for one pass.

    Includes the scales of blocks on hardware. Scales of tensors and rows are negligible.
    """
    scaling = SCALINGS[recipe.fp8.scaling]
    if emulates_gemms(recipe, device):
        # The carrier is bf16 if a product of FP8 value and scale is exact in bf16.
        is_exact = scaling.exact_in_bfloat16(power_2_scales(recipe.fp8))
        if recipe.precision.compute == "bf16" and is_exact:
            return ELEMENT_BYTES["bf16"]
        return ELEMENT_BYTES["fp32"]
    if not scaling.two_levels:
        return ELEMENT_BYTES["fp8"] + scaling.scale_share(_tile(recipe.fp8))
    if not _packs_all_operands(recipe.fp8):
        # Without the kernel a 4-bit value takes a byte and its block scale stays float32.
        return ELEMENT_BYTES["fp8"] + ELEMENT_BYTES["fp32"] / scaling.block
    return ELEMENT_BYTES["fp8"] / 2 + scaling.scale_share(_tile(recipe.fp8))


def quantizes_twice(recipe: Recipe) -> bool:
    """Whether activations and gradients are quantized separately for each GEMM."""
    # Two GEMMs contract a tensor along different dimensions. Scales of rows and blocks lie along
    # the contracted dimension, so that each GEMM needs its own quantized tensor.
    return _tile(recipe.fp8) is not None


def weight_needs_two_copies(recipe: Recipe) -> bool:
    """Whether fprop and dgrad need different scales of a weight."""
    # A square tile has the same scale in both directions.
    tile = _tile(recipe.fp8, is_weight=True)
    return tile is not None and tile[0] != tile[1]


def fp8_weight_extra_bytes(recipe: Recipe) -> float:
    """Returns bytes per element of an FP8 primary weight in addition to its data byte."""
    tile = _tile(recipe.fp8, is_weight=True)
    scale_bytes = SCALINGS[recipe.fp8.scaling].scale_share(tile)
    if weight_needs_two_copies(recipe):
        return 1 + 2 * scale_bytes  # a second copy, quantized along columns for dgrad
    return scale_bytes


def decoded_weight_bytes(recipe: Recipe, device: str) -> float:
    """Returns bytes per element of an FP8 primary weight decoded for an emulated GEMM."""
    if emulates_gemms(recipe, device):
        return operand_bytes(recipe, device)
    return 0


def _tile(fp8: FP8, is_weight: bool = False) -> Tile | None:
    """Returns the tile of one scale in fprop, for an activation or a weight."""
    square = is_weight and weights_2d(fp8)
    return SCALINGS[fp8.scaling].tile(1, fp8.granularity, square=square)


def _packs_all_operands(fp8: FP8) -> bool:
    """Whether the NVFP4 kernel quantizes every operand (numerics/quantize.py)."""
    # The kernel needs a Hadamard transform for wgrad's activations, and square tiles for weights.
    return transforms(fp8) and weights_2d(fp8)


# Temporaries of quantizing and multiplying.


def gemm_peak_bytes(
    recipe: Recipe,
    device: str,
    output_bytes: float,
    output_elements: float,
    operand_elements: float,
) -> float:
    """Returns peak bytes of an FP8 GEMM, including its output.

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        output_bytes: Bytes per element of the output.
        output_elements: Elements of the output.
        operand_elements: Elements of both operands together.
    """
    if not emulates_gemms(recipe, device):
        return output_bytes * output_elements
    scaling = SCALINGS[recipe.fp8.scaling]
    copy_bytes = 0.0
    if device == "cpu" and operand_bytes(recipe, device) < 4:
        copy_bytes = 4 * operand_elements  # a CPU widens 2-byte operands to float32 first
    has_scaled_operands = scaling.block and not scaling.two_levels
    if per_row(recipe.fp8):
        after_product = 12.0  # float32 sums, times row scales, times column scales
    elif not has_scaled_operands:
        after_product = 8.0  # float32 sums, times the scale
    elif output_bytes < 4:
        after_product = 4 + output_bytes  # float32 sums and the cast
    else:
        after_product = 4.0  # float32 sums
    return max(copy_bytes + 4 * output_elements, after_product * output_elements)


def has_quantize_kernel(recipe: Recipe, device: str) -> bool:
    """Whether Triton kernels quantize, without temporaries (numerics/kernels/launch.py)."""
    is_supported = _packs_all_operands(recipe.fp8) or not SCALINGS[recipe.fp8.scaling].two_levels
    return device == "cuda" and not emulates_gemms(recipe, device) and is_supported


def quantize_peak_bytes(recipe: Recipe, device: str, elements: float, is_gradient: bool) -> float:
    """Returns peak bytes while a matrix is quantized, including the result.

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        elements: Elements of the matrix.
        is_gradient: Whether it is a gradient. Gradients may have a Hadamard transform and
            stochastic rounding.
    """
    transform_bytes = 0.0
    if is_gradient and transforms(recipe.fp8):
        # The Hadamard transform writes a matrix. It reads a copy laid out along the other dimension.
        transform_bytes = ELEMENT_BYTES[recipe.precision.compute] * elements
    if has_quantize_kernel(recipe, device):
        # The kernel writes the result and its transpose.
        return 2 * transform_bytes + 2 * operand_bytes(recipe, device) * elements
    rounding_bytes = _rounding_bytes(recipe, is_gradient) * elements
    return max(2 * transform_bytes, transform_bytes + rounding_bytes)


def _rounding_bytes(recipe: Recipe, is_gradient: bool) -> float:
    """Returns peak bytes per element while PyTorch operators round (numerics/formats.py)."""
    scaling = SCALINGS[recipe.fp8.scaling]
    tile = _tile(recipe.fp8)
    num_bytes = 0.0
    if tile and recipe.precision.compute != "fp32":
        num_bytes += 4  # the float32 input of a tiled scaling
    if tile and 0 not in tile:
        num_bytes += 2 * 4 / (tile[0] * tile[1])  # two float32 scales per tile
    if scaling.two_levels:
        # Four bits: scaled, clamped, exponent, step, number of steps, product, product clamped.
        num_bytes += 7 * 4
        if is_gradient and recipe.fp8.stochastic_rounding:
            num_bytes += 4  # random numbers
        return num_bytes
    return num_bytes + 4 + 4 + 1  # scaled, clamped, FP8


# torchao.

# Bytes per element of torchao's FP8 tensors: one scale per tensor or row, or per block of 32.
FLOAT8_BYTES = 1.0
MX_BYTES = 1 + 1 / 32


def requantizing_backward_bytes(
    recipe: Recipe,
    device: str,
    linear: PlannedLinear,
    grad_output_elements: float,
    weight_elements: float,
    input_elements: float,
) -> float:
    """Returns peak bytes of the backward pass of a torchao layer.

    Kept activations and grad_output itself are not counted.

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        linear: The layer.
        grad_output_elements: Elements of grad_output on this rank.
        weight_elements: Elements of the weight.
        input_elements: Elements of the input.
    """
    # torchao keeps no quantized tensors. dgrad quantizes grad_output and weight, then wgrad
    # quantizes grad_output and input.
    compute_bytes = ELEMENT_BYTES[recipe.precision.compute]
    is_mx = SCALINGS[recipe.fp8.scaling].torchao == "mx"
    fp8_bytes = MX_BYTES if is_mx else FLOAT8_BYTES
    quantize_bytes = _torchao_quantize_bytes(recipe, device)

    def gemm_bytes(a_elements: float, b_elements: float, output_elements: float) -> float:
        if emulates_gemms(recipe, device):
            return _torchao_emulated_bytes(
                compute_bytes, is_mx, a_elements, b_elements, output_elements
            )
        output = compute_bytes * output_elements
        if is_mx:
            return output
        # Float8 GEMMs copy both operands into the layout of cuBLAS.
        return a_elements + b_elements + output

    _, dgrad, wgrad = linear.gemms
    moments: list[float] = []
    existing = 0.0
    if dgrad:
        operands = fp8_bytes * (grad_output_elements + weight_elements)
        product = gemm_bytes(grad_output_elements, weight_elements, input_elements)
        moments.append(quantize_bytes * grad_output_elements)
        moments.append(fp8_bytes * grad_output_elements + quantize_bytes * weight_elements)
        moments.append(operands + product)
        existing = operands
    existing += compute_bytes * input_elements  # grad_input
    if wgrad:
        operands = fp8_bytes * (grad_output_elements + input_elements)
        product = gemm_bytes(grad_output_elements, input_elements, weight_elements)
        quantized_gradient = fp8_bytes * grad_output_elements
        moments.append(existing + quantize_bytes * grad_output_elements)
        moments.append(existing + quantized_gradient + quantize_bytes * input_elements)
        moments.append(existing + operands + product)
    moments.append(existing + compute_bytes * weight_elements)  # grad_weight
    return max(moments)


def _torchao_quantize_bytes(recipe: Recipe, device: str) -> float:
    """Returns peak bytes per element while torchao quantizes, including the FP8 element."""
    if SCALINGS[recipe.fp8.scaling].torchao != "mx":
        # Scaled and clamped in float32 (torchao 0.18, float8/float8_training_tensor.py).
        return 4 + 4 + FLOAT8_BYTES
    if not emulates_gemms(recipe, device):
        return MX_BYTES  # one kernel
    # PyTorch operators (torchao 0.18, to_mx in prototype/mx_formats/mx_tensor.py): a transposed
    # copy, the same in float32, quotients, clamped quotients.
    compute_bytes = ELEMENT_BYTES[recipe.precision.compute]
    matrix_bytes = compute_bytes + 4 + 4
    if compute_bytes < 4:
        matrix_bytes += 4
    # Of each block of 32: the amax in float32 and as int32, the scale in E8M0 and in float32.
    return matrix_bytes + (4 + 4 + 1 + 4) / 32


def _torchao_emulated_bytes(
    compute_bytes: float, is_mx: bool, a: float, b: float, output: float
) -> float:
    """Returns peak bytes of an emulated torchao GEMM with `a`, `b` and `output` elements."""
    if is_mx:
        # Operands are decoded to the compute dtype, each through a transposed copy.
        return max(
            2 * compute_bytes * a,
            compute_bytes * a + 2 * compute_bytes * b,
            compute_bytes * (a + b + output),
        )
    # Operands are copied as FP8 into the layout of cuBLAS, then decoded and scaled in float32.
    float32_bytes = max(
        8 * a,
        4 * a + 8 * b,
        4 * (a + b + output),
        (4 + compute_bytes) * output,
    )
    return a + b + float32_bytes
