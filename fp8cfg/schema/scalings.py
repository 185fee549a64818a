"""Scalings: a table of the ways to choose the scales of FP8 tensors.

A scaling is a row of SCALINGS. Rules, planning, numerics and interop read the row and never compare
names, so a new scaling is a new row (docs/extending/scaling.md). The rules of a backend have the
limits of its library. This file imports no torch, because the schema reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScalingName = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
Capability = tuple[int, int]
Tile = tuple[int, int]
SCALE_BYTES = {"float32": 4, "e8m0": 1, "e4m3": 1}
"""Bytes of a stored scale, by dtype."""


@dataclass(frozen=True)
class Descriptor:
    """One scaling.

    Attributes:
        block: Number of elements per scale along the contracted dimension. 0 for one scale per
            tensor, or per row under fp8.granularity=row.
        scale: Dtype of the scales.
        history: Whether scales come from amaxes of past steps. The amaxes are part of a checkpoint.
        power_2_scales: Default of fp8.use_power_2_scales (null). Row scales are powers of two by
            default in any case, as in torchao.
        weights_2d: Default of fp8.enable_2d_quantization (null).
        element: Format of the operands in the forward pass.
        formats: Supported values of fp8.format. hybrid has E5M2 gradients.
        keys: Keys of `fp8` without effect under some other scalings.
        attention: Supported keys of FP8 attention.
        least: Lowest CUDA compute capability with GEMMs in torch. None if it is only emulated.
        below: Lowest newer compute capability without such GEMMs, if there is one.
        cuda: Lowest version of CUDA with these GEMMs.
        multiplied: Values of fp8.format supported by these GEMMs.
        fp8_gather: Whether torchao's FP8 all-gather supports it.
        te: Recipe class of Transformer Engine. This and the next names are empty if the project
            does not have the scaling.
        megatron: fp8_recipe of Megatron, NeMo and Bridge, or fp4_recipe.
        torchao: Converter of torchtitan with torchao's classes.
        accelerate: Backend of Accelerate.
        spellings: Names in other projects, for error messages.
    """

    block: int = 0
    scale: Literal["float32", "e8m0", "e4m3"] = "float32"
    history: bool = False
    power_2_scales: bool = False
    weights_2d: bool = False
    element: Literal["e4m3", "e2m1"] = "e4m3"
    formats: tuple[str, ...] = ("hybrid", "e4m3")
    keys: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    least: Capability | None = (8, 9)
    below: Capability | None = None
    cuda: Capability = (0, 0)
    multiplied: tuple[str, ...] = ("hybrid", "e4m3")
    fp8_gather: bool = False
    te: str = ""
    megatron: str = ""
    torchao: Literal["", "float8", "mx"] = ""
    accelerate: Literal["", "TE", "AO"] = ""
    spellings: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        """Bits of an element of an operand."""
        return 4 if self.element == "e2m1" else 8

    @property
    def two_levels(self) -> bool:
        """Whether a float32 scale of the tensor multiplies the scales of its blocks.

        E4M3 scales need it, because their maximum is 448.
        """
        return self.scale == "e4m3"

    def operands(self, fp8_format: str) -> tuple[str, str]:
        """Returns the formats of forward operands and of output gradients.

        Args:
            fp8_format: fp8.format.
        """
        # A scaling without hybrid, such as mxfp8, has its element format in all GEMMs.
        if fp8_format == "hybrid" and fp8_format in self.formats:
            return self.element, "e5m2"
        return self.element, self.element

    def tile(self, axis: int, granularity: str = "tensor", square: bool = False) -> Tile | None:
        """Returns the shape of the tile that shares a scale, within a matrix.

        Args:
            axis: The contracted dimension of the GEMM, 0 or 1.
            granularity: fp8.granularity.
            square: Whether it is a weight under fp8.enable_2d_quantization.

        Returns:
            Rows and columns of a tile. 0 means all of them. None for one scale of the whole matrix.
        """
        # Tiles extend along the contracted dimension. Then a scale factors out of a partial sum of the
        # GEMM. Squares work along both dimensions, so fprop and dgrad read the same weight.
        if self.block and square:
            return (self.block, self.block)
        if self.block:
            return (1, self.block) if axis == 1 else (self.block, 1)
        if granularity == "tensor":
            return None
        return (1, 0) if axis == 1 else (0, 1)

    def scale_share(self, tile: Tile | None) -> float:
        """Returns the bytes of scales per element. Scales of whole tensors and rows count as 0.

        Args:
            tile: See `tile`.
        """
        if tile is None or 0 in tile:
            return 0
        return SCALE_BYTES[self.scale] / (tile[0] * tile[1])

    def exact_in_bfloat16(self, power_2_scales: bool) -> bool:
        """Returns whether an element times the scale of its block is exact in bfloat16.

        If it is, emulation can dequantize to bfloat16 without error.

        Args:
            power_2_scales: fp8.use_power_2_scales, with null resolved.
        """
        # Powers of two do not change the mantissa. E2M1 times E4M3 has six bits, bfloat16 eight. A
        # float32 scale has too many. Scales of tensors and rows are applied after the GEMM.
        return not self.block or self.scale != "float32" or power_2_scales


_DELAYED = (
    "margin",
    "interval",
    "amax_history_len",
    "amax_compute_algo",
    "reduce_amax",
    "tp_only_amax_red",
    "first_step",
)
SCALINGS: dict[str, Descriptor] = {
    "delayed": Descriptor(
        history=True,
        keys=_DELAYED,
        attention=("dot_product_attention", "multi_head_attention"),
        te="DelayedScaling",
        megatron="delayed",
        accelerate="TE",
    ),
    "current": Descriptor(
        keys=("granularity", "use_power_2_scales"),
        attention=("dot_product_attention",),
        fp8_gather=True,
        te="Float8CurrentScaling",
        megatron="tensorwise",
        torchao="float8",
        accelerate="AO",
        spellings=("tensorwise", "per_tensor"),
    ),
    "block": Descriptor(  # DeepSeek-V3, arXiv 2412.19437: 1x128, weights 128x128
        block=128,
        power_2_scales=True,
        weights_2d=True,
        keys=("use_power_2_scales", "enable_2d_quantization"),
        least=(9, 0),
        below=(10, 0),
        cuda=(12, 9),
        multiplied=("e4m3",),  # torch 2.15 still rejects E5M2 with block scales
        te="Float8BlockScaling",
        megatron="blockwise",
        spellings=("blockwise", "subchannel"),
    ),
    "mxfp8": Descriptor(  # OCP Microscaling Formats 1.0: 1x32
        block=32,
        scale="e8m0",
        formats=("e4m3",),
        keys=("enable_2d_quantization",),
        attention=("dot_product_attention",),
        least=(10, 0),
        cuda=(12, 8),
        te="MXFP8BlockScaling",
        megatron="mxfp8",
        torchao="mx",
        accelerate="TE",
    ),
    "nvfp4": Descriptor(  # arXiv 2509.25149: 1x16, weights 16x16
        block=16,
        scale="e4m3",
        weights_2d=True,
        element="e2m1",
        formats=("e4m3",),
        keys=("enable_2d_quantization", "random_hadamard_transform", "stochastic_rounding"),
        least=(10, 0),
        cuda=(12, 8),
        te="NVFP4BlockScaling",
        megatron="nvfp4",
    ),
}
GENERATIONS = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}
"""NVIDIA's generations by compute capability."""


def needed(capability: Capability) -> str:
    """Formats a compute capability for a message, such as "9.0 (Hopper)"."""
    major, minor = capability
    return f"{major}.{minor} ({GENERATIONS[capability]})"


def title(scaling: str) -> str:
    """Returns the display name of a scaling: "FP8 delayed", "NVFP4"."""
    # 4-bit values are not FP8.
    if SCALINGS[scaling].element == "e2m1":
        return scaling.upper()
    return f"FP8 {scaling}"
