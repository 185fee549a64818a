"""Memory of torchao's linear layers, which keep input and weight unquantized and quantize both again in the backward pass.

From torchao's code, run eagerly (float8/float8_linear.py, prototype/moe_training/mxfp8_linear.py). G is the gradient of the output,
W the weight, X the input, in elements:

    dgrad    quantizes G, then W, and multiplies; both stay quantized until the function is done
    wgrad    quantizes G again, then X, and multiplies
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.report.memory.operands import CODEC, emulated
from fp8cfg.scalings import SCALINGS

QUANTIZED, BLOCKS = 1.0, 1 + 1 / 32
"""Bytes of an element in float8: with one scale, or one for each row; and with one for each block of 32."""


def backward(
    recipe: Recipe, device: str, linear: PlannedLinear, g: float, w: float, x: float
) -> float:
    """The most that the backward pass of `linear` takes beside what is kept and the gradient of its output."""
    return max(_moments(recipe, device, linear, g, w, x))


def _moments(
    recipe: Recipe, device: str, linear: PlannedLinear, g: float, w: float, x: float
) -> Iterator[float]:
    c, has_blocks = CODEC[recipe.precision.compute], SCALINGS[recipe.fp8.scaling].torchao == "mx"
    e = BLOCKS if has_blocks else QUANTIZED
    making, multiplying = (
        _making(recipe, device),
        (_emulated if emulated(recipe, device) else _multiplied),
    )
    _, dgrad, wgrad = linear.gemms
    beside = 0.0
    if dgrad:
        yield making * g
        yield e * g + making * w
        yield e * (g + w) + multiplying(c, has_blocks, g, w, x)
        beside = e * (g + w)
    beside += c * x
    if wgrad:
        yield beside + making * g
        yield beside + e * g + making * x
        yield beside + e * (g + x) + multiplying(c, has_blocks, g, x, w)
    yield beside + c * w


def _making(recipe: Recipe, device: str) -> float:
    """Bytes of an element while it is quantized, its float8 among them: scaled and cut to the range in float32; in blocks by
    torch where products are emulated, its amaxes, quotients and a transposed copy among them, and else by one kernel.
    """
    if SCALINGS[recipe.fp8.scaling].torchao != "mx":
        return 4 + 4 + QUANTIZED
    return (
        (14 if CODEC[recipe.precision.compute] == 2 else 12) + 13 / 32
        if emulated(recipe, device)
        else BLOCKS
    )


def _emulated(c: float, blocks: bool, a: float, b: float, out: float) -> float:
    """A product of decoded operands: with blocks in the compute dtype, else copied into rows and columns and in float32."""
    if blocks:
        return max(2 * c * a, c * a + 2 * c * b, c * (a + b + out))
    return a + b + max(8 * a, 4 * a + 8 * b, 4 * (a + b + out), (4 + c) * out)


def _multiplied(c: float, blocks: bool, a: float, b: float, out: float) -> float:
    """A product by hardware, whose operands are copied into rows and columns where they lie otherwise."""
    return (0 if blocks else a + b) + c * out
