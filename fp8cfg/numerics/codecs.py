"""Storage codecs: how weights, gradients and moments are kept in fewer than 32 bits.

A stored tensor is a tuple of plain tensors, `(data,)` or `(data, scale_inv)`; its value is data x scale_inv. Each codec is a
format, a rule for the scale, and a rounding:

    fp32 bf16 fp16   no scale
    fp16_scaled      one scale a tensor, a power of two                               MS-AMP's weights, masters, second moments
    fp8_pow2         one scale a tensor, a power of two                               MS-AMP's gradients and first moments
    fp8              one scale a tensor, which brings its amax to exactly the maximum
    fp8_block        one such scale for every 128 elements; for second moments the square root is stored, stochastically

A power of two wastes no mantissa, but it stands still while a tensor decays: an average of rate beta whose step 1 - beta is
less than half a unit of the format then rounds back to where it was, for ever. An exact scale moves with the amax and takes
the codes along. Second moments span twice the powers of two of the gradients; on a linear FP8 grid most of them become 0,
and Adam divides by them. Their square roots fit, and what is not 0 is kept from becoming 0.

A tensor, or a block, that holds an infinity or NaN has a scale that is not finite and decodes to NaN as a whole: what was
in it is lost, and that shows. Codecs without a scale treat each element as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8cfg.numerics.formats import E4M3, E5M2, Format, cast, widen
from fp8cfg.numerics.stochastic import round_stochastic, uniform

Stored = tuple[Tensor, ...]
Rounding = Literal["nearest", "stochastic"]

FP32 = Format("fp32", torch.float32, torch.finfo(torch.float32).max, 23, -126)
BF16 = Format("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).max, 7, -126)
FP16 = Format("fp16", torch.float16, 65504.0, 10, -14)
CHUNK = 1 << 16
"""Elements that eager code widens to float32 at a time."""


@dataclass(frozen=True)
class Codec:
    """How one tensor is stored. `block` elements share a scale, all of the tensor where it is 0. With `root` the square root is
    stored, of values that are not negative."""

    format: Format
    scaling: Literal["none", "pow2", "exact"] = "none"
    block: int = 0
    root: bool = False
    rounding: Rounding = "nearest"

    def __str__(self) -> str:
        """What the stored bytes mean, as in `e4m3 exact 128 root`; the rounding is no part of it."""
        words = (self.format.name, self.scaling != "none" and self.scaling, self.block, self.root and "root")
        return " ".join(str(word) for word in words if word)

    @property
    def per_tensor(self) -> bool:
        """Whether the scale waits for the amax of the whole tensor."""
        return self.scaling != "none" and not self.block

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element and its share of a block's scale; a scale for the whole tensor is four bytes more, once."""
        return self.format.dtype.itemsize + (4 / self.block if self.block else 0.0)

    def zeros(self, shape: torch.Size, device: torch.device) -> Stored:
        """A stored tensor of zeros, with scale 1."""
        data = torch.zeros(shape, dtype=self.format.dtype, device=device)
        if self.scaling == "none":
            return (data,)
        scales = (math.ceil(data.numel() / self.block),) if self.block else ()
        return (data, torch.ones(scales, device=device))

    def encode(self, x: Tensor, key: Tensor | None = None) -> Stored:
        """Float32 `x`, any shape, as this codec stores it; `x` itself under fp32. `key` is for stochastic rounding."""
        amax = self.amax(x)
        if amax is None:
            return (self.quantize(x, None, key),)
        scale_inv = self.scale_inv(amax)
        return (self.quantize(x, scale_inv, key), scale_inv)

    def decode(self, stored: Stored) -> Tensor:
        """The float32 values, in the shape of the data; the data itself under fp32."""
        data = stored[0]
        v = widen(data, torch.float32) if data.dtype.itemsize == 1 else data.float()
        if self.scaling == "none":
            return v
        v = self._from_rows(self._rows(v) * stored[1][:, None], v) if self.block else v * stored[1]
        return v * v if self.root else v

    def store(self, x: Tensor, stored: Stored, key: Tensor | None = None) -> None:
        """Encode `x`, of any float dtype, into `stored`, a piece at a time. The pieces make no difference."""
        flat = x.reshape(-1)
        amax: Tensor | None = None
        if self.per_tensor:
            found = [largest(flat[a:b].float()) for a, b in spans(x.numel())]
            amax = torch.stack(found).amax() if found else flat.new_zeros((), dtype=torch.float32)
        scale_inv = None if amax is None else self.scale_inv(amax)
        for a, b in spans(x.numel()):
            self.write(flat[a:b].float(), self.part(stored, a, b), scale_inv, key, start=a)
        if scale_inv is not None:
            stored[1].copy_(scale_inv)

    def part(self, stored: Stored, start: int, stop: int) -> Stored:
        """Elements `start` to `stop`, flat, of a contiguous stored tensor: views. `start` is a multiple of the block."""
        data = stored[0].view(-1)[start:stop]
        if self.block:
            return (data, stored[1][start // self.block : math.ceil(stop / self.block)])
        return (data, *stored[1:])

    def amax(self, x: Tensor) -> Tensor | None:
        """The largest magnitudes that the scale is made from: [] or [blocks]; None without a scale."""
        return None if self.scaling == "none" else self._amax(x)

    def scale_inv(self, amax: Tensor) -> Tensor:
        """Inverse scales from amaxes, of any shape; not finite where the amax is not."""
        if self.scaling == "pow2":
            return pow2_scale(amax, self.format.max).reciprocal()
        # Both operands are tensors, for a true division; below 2^-126 an inverse scale could be 0.
        return (amax / torch.full_like(amax, self.format.max)).clamp(min=2.0**-126)

    def quantize(self, x: Tensor, scale_inv: Tensor | None, key: Tensor | None = None, lane: int = 0, start: int = 0) -> Tensor:
        """The data of `x` under a scale. `start` is the index of its first element in the tensor that it is a piece of."""
        v = square_root(x) if self.root else x
        if scale_inv is not None:
            v = self._rows(v) / scale_inv[:, None] if self.block else v / scale_inv
        if self.root:
            smallest = 2.0 ** (self.format.min_exponent - self.format.mantissa_bits)
            v = torch.where(v > 0, v.clamp(min=smallest), v)
        if self.rounding == "stochastic":
            if key is None:
                raise ValueError(f"codec {self}: stochastic rounding needs a key")
            v = round_stochastic(v, self.format, uniform(key, lane, start, v.numel()).view(v.shape))
        data = cast(v, self.format) if self.format in (E4M3, E5M2) else v.to(self.format.dtype)
        return self._from_rows(data, x) if self.block else data

    def write(
        self, x: Tensor, part: Stored, scale_inv: Tensor | None, key: Tensor | None = None, lane: int = 0, start: int = 0
    ) -> None:
        """Quantize the flat `x` into a part of a stored tensor. A scale of the whole tensor is given, and left to the caller to
        store after the last part; those of blocks are found and stored here."""
        if self.block:
            scale_inv = self.scale_inv(self._amax(x))
            part[1].copy_(scale_inv)
        part[0].copy_(self.quantize(x, scale_inv, key, lane, start))

    def _amax(self, x: Tensor) -> Tensor:
        if self.block:
            return self._rows(square_root(x) if self.root else x).abs().amax(-1)
        return largest(x)

    def _rows(self, x: Tensor) -> Tensor:
        """`x` as [blocks, block], with zeros to the end of the last; no copy where there is nothing to add."""
        if x.dim() == 2 and x.shape[1] == self.block:
            return x
        flat = x.reshape(-1)
        return (F.pad(flat, (0, -flat.numel() % self.block)) if flat.numel() % self.block else flat).view(-1, self.block)

    def _from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        return rows if like.shape == rows.shape else rows.view(-1)[: like.numel()].view(like.shape)


def square_root(x: Tensor) -> Tensor:
    """The float32 nearest to the root, as processors and compiled code give it. Eager torch on a CPU takes MKL's, which is the
    neighbour of that in a sixth of all cases."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.sqrt()
    return x.double().sqrt().float()


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in float32 `x`, []; 0 for an empty tensor, NaN where there is one."""
    if x.numel() == 0:
        return x.new_zeros(())
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.abs().amax()
    low, high = torch.aminmax(x)  # ten times faster than abs().amax()
    return torch.maximum(high, -low)


def pow2_scale(amax: Tensor, largest: float) -> Tensor:
    """The largest power of two that keeps `amax` x scale within `largest`: MS-AMP's scale, 2^floor(log2(largest / amax)).

    1 where amax is 0, NaN where it is not finite. Exponents end at 126, where MS-AMP goes on to an infinite scale. The
    exponent is read from the quotient's bits: a logarithm may round up to the next one, and differs between compilers."""
    quotient = torch.full_like(amax, largest) / amax
    exponent = ((quotient.view(torch.int32) >> 23) - 127).clamp(-126, 126)
    scale = torch.where(amax > 0, ((exponent + 127) << 23).view(torch.float32), 1.0)
    return torch.where(amax < math.inf, scale, math.nan)


def spans(count: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """The pieces, (start, stop), in which `count` elements are processed."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


NAMES = {
    "fp32": Codec(FP32), "bf16": Codec(BF16), "fp16": Codec(FP16), "fp16_scaled": Codec(FP16, "pow2"),
    "fp8": Codec(E4M3, "exact"), "fp8_pow2": Codec(E4M3, "pow2"), "fp8_block": Codec(E4M3, "exact", block=128),
}  # fmt: skip
"""The codecs by the names that the storage keys have."""


def codec(name: str, rounding: Rounding = "nearest", fp8: Format = E4M3, second_moment: bool = False) -> Codec:
    """The codec of that name. `fp8` is the format of the three FP8 ones. Raises ValueError for an unknown name, and for
    stochastic rounding to float32.

    Second moments under fp8_block are rounded stochastically whatever `rounding` says: to nearest they do not come down
    again after gradients have shrunk (measured at beta 0.99: up to 1800 times too large; stochastically 13).
    """
    if name not in NAMES:
        raise ValueError(f"codec {name!r}; choose from {', '.join(NAMES)}")
    if name == "fp32":
        if rounding != "nearest":
            raise ValueError("codec fp32: what is float32 already is not rounded")
        return NAMES[name]
    found = replace(NAMES[name], rounding=rounding)
    if found.format is E4M3:
        found = replace(found, format=fp8)
    return replace(found, root=True, rounding="stochastic") if second_moment and found.block else found
