"""Scalings: the one table of where the scales of FP8 tensors come from, and who multiplies with them.

A scaling is a row of SCALINGS. Rules, planner, memory, coverage, numerics and interop read the row and compare no names, so that
another scaling is another row: docs/extending/scaling.md. What a library has of a scaling stands in that backend's rules, by its
name. Plain data that imports nothing, since config, which loads no torch, and numerics, which knows no config, both read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScalingName = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
Capability = tuple[int, int]
Tile = tuple[int, int]
SCALE_BYTES = {"float32": 4, "e8m0": 1, "e4m3": 1}
"""Dtypes of scales, and their bytes where they are stored."""


@dataclass(frozen=True)
class Descriptor:
    """One scaling.

    `block` is how many elements along the contracted dimension share a scale, 0 where all of a tensor do, or of a row under
    fp8.granularity=row; `scale` the dtype of scales, by which numerics quantizes; `history` whether scales come from the amaxes
    of past steps, which are state. `power_2_scales` and `weights_2d` are what fp8.use_power_2_scales and
    fp8.enable_2d_quantization stand for where they are null; scales of rows are powers of two then, as torchao's.

    `element` is the format of operands in forward, and `formats` the values of fp8.format, of which hybrid has E5M2 gradients.
    `keys` are the keys of `fp8` that mean something under this scaling and not under all, `attention` the switches of FP8
    attention that it can have.

    `least` is the least CUDA compute capability with which torch multiplies it, None where it is emulated alone, `below` the first
    that has no such products any more, `cuda` the least version of CUDA, `multiplied` the values of fp8.format that it takes there;
    `fp8_gather` whether torchao's FP8 all-gather takes it.

    The rest is what others call it, empty where they have none: the recipe class of Transformer Engine, fp8_recipe of Megatron,
    NeMo and Bridge (fp4_recipe, of four bits), the converter of torchtitan with torchao's class, the engine of Accelerate; and
    `spellings` that are answered by "did you mean".
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
        """Bits of an operand's element."""
        return 4 if self.element == "e2m1" else 8

    @property
    def two_levels(self) -> bool:
        """Whether the tensor has a float32 scale above those of its blocks, which E4M3 ones need: they reach 448 alone."""
        return self.scale == "e4m3"

    def operands(self, fp8_format: str) -> tuple[str, str]:
        """The formats of forward operands and of gradients under `fp8_format`."""
        return self.element, (
            "e5m2" if fp8_format == "hybrid" and fp8_format in self.formats else self.element
        )

    def tile(self, axis: int, granularity: str = "tensor", square: bool = False) -> Tile | None:
        """Rows and columns of a matrix that share a scale, where the product contracts its dimension `axis`; 0 stands for all.
        None is one scale for the matrix, whatever is contracted. `square` is a weight under enable_2d_quantization.
        """
        if self.block:
            return (
                (self.block, self.block)
                if square
                else (1, self.block)
                if axis == 1
                else (self.block, 1)
            )
        return None if granularity == "tensor" else (1, 0) if axis == 1 else (0, 1)

    def scale_share(self, tile: Tile | None) -> float:
        """Bytes of an element's share of the scale of its `tile`; those of whole tensors and rows are left out."""
        return SCALE_BYTES[self.scale] / (tile[0] * tile[1]) if tile and 0 not in tile else 0

    def exact_in_bfloat16(self, power_2_scales: bool) -> bool:
        """Whether an element times its block's scale fits bfloat16's mantissa: powers of two change none, E2M1 times E4M3 has six
        bits, and a float32 scale has too many. Scales of tensors and rows are multiplied in after the product.
        """
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
        multiplied=("e4m3",),  # torch 2.15 refuses E5M2 with scales of blocks still
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
"""NVIDIA's names of compute capabilities."""


def needed(capability: Capability) -> str:
    """A compute capability for a line that refuses a GPU, such as "9.0 (Hopper)"."""
    return f"{capability[0]}.{capability[1]} ({GENERATIONS[capability]})"


def title(scaling: str) -> str:
    """What a scaling makes of the layers, in words: NVFP4 has 4-bit values, which are not FP8."""
    if SCALINGS[scaling].element == "e2m1":
        return scaling.upper()
    return f"FP8 {scaling}"
