"""Storage codecs: weights, gradients and optimizer moments in fewer than 32 bits.

A stored tensor is a tuple of plain tensors, `(data,)` or `(data, scale_inv)`; its value is data x scale_inv. A codec is a
format, a rule for the scale, and a rounding:

    fp32 bf16 fp16   no scale
    fp16_scaled      one scale a tensor, a power of two: MS-AMP's weights, masters and second moments
    fp8_pow2         one scale a tensor, a power of two: MS-AMP's gradients and first moments
    fp8              one scale a tensor, which brings its amax to exactly the maximum
    fp8_block        such a scale for every 128 elements; of second moments the square root, rounded stochastically
    fp8_expand       of every 128 elements a power that fills the range of FP8, see codecs.py: COAT's moments

A power of two costs no rounding, but it stands still while a tensor decays: an average of rate beta whose step 1 - beta is
less than half a unit of the format then rounds back to where it was, for ever. An exact scale moves with the amax and takes
the codes along. Second moments span twice the powers of two that gradients do; on a linear FP8 grid most of them become 0,
and Adam divides by them. Their square roots fit, and what is not 0 is kept from becoming 0.

A tensor, or a block, that holds an infinity or NaN gets a scale that is not finite and decodes to NaN as a whole: what was in
it is lost, and that shows. Codecs without a scale treat each element as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8cfg.numerics.amax import compute_amax_or_nan
from fp8cfg.numerics.async_copies import sent
from fp8cfg.numerics.formats import (
    E4M3,
    Format,
    Start,
    cast,
    pow2_scale,
    reciprocal,
    round_stochastic,
    square_root,
    uniform_numbers,
)

STEPS = 16
"""k is a multiple of 1 / STEPS."""
LEAST, MOST = 3, 16 * STEPS
"""Bounds of k, in steps."""


def _below(x: Tensor) -> Tensor:
    """Float64 `x` as float32, rounded down: y > x and y > _below(x) are the same for every float32 y."""
    nearest = x.float()
    return torch.where(
        nearest.double() > x, nearest.nextafter(torch.full_like(nearest, -math.inf)), nearest
    )


def _keys(values: Tensor, k: Tensor) -> Tensor:
    """Float32 `values` from 0 to 1, [.., n], of rows whose k, in steps, is `k`, int64 [..], as int64 that ascend with k and, for
    one k, with values, as the bits of a float32 do, of which 1 has 30. NaN is beyond all of its row.
    """
    return k[:, None] * 2**30 + values.view(torch.int32)


class _Tables(NamedTuple):
    """By k, in steps: the values of the 127 codes, over the largest, [.. x 127] and their keys, the keys of where they meet
    [.. x 126]. And, ascending, the widest range of a block for each k, from MOST down to LEAST."""

    values: Tensor
    codes: Tensor
    meets: Tensor
    ranges: Tensor


def _tables() -> _Tables:
    codes = torch.arange(127, dtype=torch.uint8, device="cpu").view(E4M3.dtype).double() / E4M3.max
    steps = torch.arange(MOST + 1, device="cpu")
    roots = STEPS / steps[:, None].double().clamp(min=LEAST)
    meets = ((codes[1:] + codes[:-1]) / 2) ** roots
    values = (codes**roots).float()
    return _Tables(
        values.flatten(),
        _keys(values, steps).flatten(),
        _keys(_below(meets), steps).flatten(),
        _below((E4M3.max**2 / 2) ** roots[LEAST:, 0].flip(0)),
    )


_TABLES = _tables()
_ON_GPU: dict[int | None, _Tables] = {}
"""The tables on each GPU, sent once: compiled code would send them anew for each tensor, and wait each time."""


def send_tables(device: torch.device) -> None:
    """Send the tables to `device`, if it is a GPU that has none yet: before code that uses them there is compiled."""
    if device.type == "cuda" and device.index not in _ON_GPU:
        _ON_GPU[device.index] = _Tables(*(sent(table, device) for table in _TABLES))


def _on(device: torch.device) -> _Tables:
    if device.type == "cuda":
        if not torch.compiler.is_compiling():
            send_tables(device)
        return _ON_GPU[device.index]
    return _Tables(*(table.to(device) for table in _TABLES))


def scales(rows: Tensor) -> Tensor:
    """For each row of float32 `rows` [blocks, block] its largest magnitude and k, float32 [blocks, 2]. The first is NaN where
    something in the row is not finite."""
    x = rows.abs()
    largest, smallest = x.amax(-1), torch.where(x == 0, math.inf, x).amin(-1)
    narrower = torch.searchsorted(_on(x.device).ranges, largest / smallest)
    k = (MOST - narrower).clamp(min=LEAST).float() / STEPS
    return torch.stack(
        [torch.where(largest < math.inf, largest.clamp(min=2.0**-126), math.nan), k], -1
    )


def encode(rows: Tensor, scales: Tensor, u: Tensor | None = None) -> Tensor:
    """The codes, E4M3 [blocks, block], of float32 `rows`: nearest among the powers, as COAT has it, or with the random numbers `u`
    stochastic among the values themselves. What is not 0 does not become 0."""
    x, k, tables = rows.abs() / scales[:, :1], _steps(scales), _on(rows.device)
    if u is None:
        code = (torch.bucketize(_keys(x, k), tables.meets) - 126 * k[:, None]).clamp(max=126)
    else:
        first = 127 * k[:, None]
        code = (torch.bucketize(_keys(x, k), tables.codes, right=True) - 1 - first).clamp(0, 125)
        lower, upper = tables.values[first + code], tables.values[first + code + 1]
        code = code + (u < (x - lower) / (upper - lower))
    code = torch.where(rows != 0, code.clamp(min=1), code)
    return torch.where(rows < 0, code + 128, code).to(torch.uint8).view(E4M3.dtype)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of `codes`, the bytes [blocks, block] that `encode` returned."""
    code = codes.long()
    values = _on(codes.device).values[_steps(scales)[:, None] * 127 + (code & 127)]
    return torch.where(code > 127, -values, values) * scales[:, :1]


def _steps(scales: Tensor) -> Tensor:
    return (scales[:, 1] * STEPS).long()


EncodedTensor = tuple[Tensor, ...]
Rounding = Literal["nearest", "stochastic"]

FP32 = Format("fp32", torch.float32, torch.finfo(torch.float32).max, 23, -126)
BF16 = Format("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).max, 7, -126)
FP16 = Format("fp16", torch.float16, 65504.0, 10, -14)
CHUNK = 1 << 16
"""Elements that eager code widens to float32 at a time: what fits a CPU's cache."""
GPU_CHUNK = 1 << 22
"""The same on a GPU, where each piece costs launches: 16 MiB a tensor."""
BLOCK = 128
"""Elements that share a scale in the codecs with blocks."""


@dataclass(frozen=True)
class Codec:
    """How one tensor is stored. `block` elements share a scale, the whole tensor where it is 0. With `root` the square root is
    stored, of values that are not negative; with `expand` a power, and a block's scale is two numbers.
    """

    format: Format
    scaling: Literal["none", "pow2", "exact"] = "none"
    block: int = 0
    root: bool = False
    expand: bool = False
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.block and (self.scaling == "none" or CHUNK % self.block):
            raise ValueError(f"block={self.block}: needs a scale, and a power of two up to {CHUNK}")
        if self.expand and (not self.block or self.format != E4M3):
            raise ValueError("expand: needs blocks, and E4M3")

    def __str__(self) -> str:
        """The meaning of the stored bytes, as in `e4m3 exact 128 root`; the rounding is not part of it."""
        power = "root" if self.root else "expand" if self.expand else ""
        words = (self.format.name, self.scaling != "none" and self.scaling, self.block, power)
        return " ".join(str(word) for word in words if word)

    @property
    def per_tensor(self) -> bool:
        """Whether the scale is computed from the amax of the whole tensor."""
        return self.scaling != "none" and not self.block

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element and its share of a block's scale; a scale for the whole tensor is four bytes more, once."""
        return self.format.dtype.itemsize + (
            (8 if self.expand else 4) / self.block if self.block else 0.0
        )

    def zeros(self, shape: torch.Size, device: torch.device) -> EncodedTensor:
        """A stored tensor of zeros, with scale 1."""
        data = torch.zeros(shape, dtype=self.format.dtype, device=device)
        if self.expand:
            send_tables(data.device)
        if self.scaling == "none":
            return (data,)
        scales = (
            (math.ceil(data.numel() / self.block), *((2,) if self.expand else ()))
            if self.block
            else ()
        )
        return (data, torch.ones(scales, dtype=torch.float32, device=device))

    def encode(
        self, x: Tensor, key: Tensor | None = None, scale_inv: Tensor | None = None
    ) -> EncodedTensor:
        """Float32 `x`, any shape, as this codec stores it; `x` itself under fp32. `key` is for stochastic rounding, `scale_inv` the
        scale of a whole tensor of which `x` is a part."""
        if self.scaling == "none":
            return (self._quantize(x, None, key),)
        if scale_inv is None:
            scale_inv = (
                self._scales_of_rows(x) if self.block else self.scale_inv(compute_amax_or_nan(x))
            )
        return (self._quantize(x, scale_inv, key), scale_inv)

    def decode(self, stored: EncodedTensor) -> Tensor:
        """The float32 values, in the shape of the data, scaled in place; the data itself under fp32."""
        data = stored[0]
        if self.expand:
            return self._from_rows(decode(self._rows(data.view(torch.uint8)), stored[1]), data)
        v = data.float()
        if self.scaling == "none":
            return v
        v = (
            self._from_rows(self._rows(v).mul_(stored[1][:, None]), v)
            if self.block
            else v.mul_(stored[1])
        )
        return v * v if self.root else v

    def store(
        self,
        x: Tensor,
        stored: EncodedTensor,
        key: Tensor | None = None,
        scale_inv: Tensor | None = None,
    ) -> None:
        """Write `x`, of any float dtype, into `stored`: the bits of `encode`, a piece at a time."""
        flat = x.reshape(-1)
        if self.per_tensor:
            if scale_inv is None:
                scale_inv = self.scale_inv(compute_amax_or_nan(x))
            stored[1].copy_(scale_inv)
        for a, b in chunk_ranges(x.numel(), x.device):
            self.write(flat[a:b].float(), self.part(stored, a, b), scale_inv, key, start=a)

    def part(self, stored: EncodedTensor, start: int, stop: int) -> EncodedTensor:
        """Elements `start` to `stop`, flat, of a contiguous stored tensor: views. `start` is a multiple of the block."""
        data = stored[0].view(-1)[start:stop]
        if self.block:
            return (data, stored[1][start // self.block : math.ceil(stop / self.block)])
        return (data, *stored[1:])

    def write(
        self,
        x: Tensor,
        part: EncodedTensor,
        scale_inv: Tensor | None,
        key: Tensor | None = None,
        lane: int = 0,
        start: Start = 0,
        skip: Tensor | None = None,
    ) -> None:
        """Quantize float32 `x` into a part, from element `start` on, of a stored tensor. A scale of the whole tensor is given,
        and stored by the caller; those of blocks are found and stored here. Where `skip`, a bool [], is true, nothing changes.
        """
        if self.block:
            scale_inv = self._scales_of_rows(x)
            write_encoded(part[1], scale_inv, skip)
        write_encoded(part[0], self._quantize(x, scale_inv, key, lane, start), skip)

    def scale_inv(self, amax: Tensor) -> Tensor:
        """Inverse scales from the amaxes, of any shape, of what is stored; not finite where those are not."""
        if self.scaling == "pow2":
            return reciprocal(pow2_scale(amax, self.format.max))
        # Both operands are tensors, for a true division; below 2^-126 an inverse scale could be 0.
        return (amax / torch.full_like(amax, self.format.max)).clamp(min=2.0**-126)

    def _scales_of_rows(self, x: Tensor) -> Tensor:
        rows = self._rows(square_root(x) if self.root else x)
        return scales(rows) if self.expand else self.scale_inv(rows.abs().amax(-1))

    def _quantize(
        self,
        x: Tensor,
        scale_inv: Tensor | None,
        key: Tensor | None,
        lane: int = 0,
        start: Start = 0,
    ) -> Tensor:
        if self.expand:
            v = self._rows(x)
            assert scale_inv is not None, "blocks have scales"
            return self._from_rows(encode(v, scale_inv, self._uniform(v, key, lane, start)), x)
        v, fmt = square_root(x) if self.root else x, self.format
        if scale_inv is not None:
            v, by = (self._rows(v), scale_inv[:, None]) if self.block else (v, scale_inv)
            v = v * reciprocal(by) if self.scaling == "pow2" else v / by  # the same bits, sooner
        if self.root:
            v = torch.where(v > 0, v.clamp(min=2.0 ** (fmt.min_exponent - fmt.mantissa_bits)), v)
        u = self._uniform(v, key, lane, start)
        v = v if u is None else round_stochastic(v, fmt, u)
        data = cast(v, fmt) if fmt.dtype.itemsize == 1 else v.to(fmt.dtype)
        return self._from_rows(data, x) if self.block else data

    def _uniform(self, v: Tensor, key: Tensor | None, lane: int, start: Start) -> Tensor | None:
        if self.rounding == "nearest":
            return None
        if key is None:
            raise ValueError(f"codec {self}: stochastic rounding needs a key")
        return uniform_numbers(key, lane, start, v.numel() // (key.numel() // 2)).view(v.shape)

    def _rows(self, x: Tensor) -> Tensor:
        """`x` as [blocks, block], with zeros to the end of the last; no copy where there is nothing to add."""
        if x.dim() == 2 and x.shape[1] == self.block:
            return x
        flat = x.reshape(-1)
        return (
            F.pad(flat, (0, -flat.numel() % self.block)) if flat.numel() % self.block else flat
        ).view(-1, self.block)

    def _from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        return rows if like.shape == rows.shape else rows.view(-1)[: like.numel()].view(like.shape)


def write_encoded(target: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Copy `new` into `target`, unless `skip`, a bool [], is true."""
    if (
        skip is not None and target.dtype.itemsize == 1
    ):  # torch has no choice between float8 numbers
        target, new = target.view(torch.uint8), new.to(target.dtype).view(torch.uint8)
    target.copy_(new if skip is None else torch.where(skip, target, new.to(target.dtype)))


def chunk_ranges(count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """The pieces, (start, stop), in which eager code processes `count` elements on `device`."""
    step = GPU_CHUNK if device.type == "cuda" else CHUNK
    return ((start, min(start + step, count)) for start in range(0, count, step))


CODECS = {
    "fp32": Codec(FP32),
    "bf16": Codec(BF16),
    "fp16": Codec(FP16),
    "fp16_scaled": Codec(FP16, "pow2"),
    "fp8": Codec(E4M3, "exact"),
    "fp8_pow2": Codec(E4M3, "pow2"),
    "fp8_block": Codec(E4M3, "exact", block=BLOCK),
    "fp8_expand": Codec(E4M3, "exact", block=BLOCK, expand=True),
}
"""The codecs by the names that the storage keys take."""


def get_codec(
    name: str, rounding: Rounding = "nearest", fp8: Format = E4M3, second_moment: bool = False
) -> Codec:
    """The codec of that name. `fp8` is the format of the three FP8 ones. Raises ValueError for an unknown name, and for
    stochastic rounding to float32.

    Second moments in blocks are rounded stochastically whatever `rounding` says. To nearest they do not come down again after
    gradients have shrunk: at beta 0.99, by a factor of 33, some stayed 1800 times too large under fp8_block, stochastically 13;
    under fp8_expand, which COAT rounds to nearest, 940 and 6.
    """
    if name not in CODECS:
        raise ValueError(f"codec {name!r}; choose from {', '.join(CODECS)}")
    found = CODECS[name]
    if found.format == FP32 and rounding != "nearest":
        raise ValueError("codec fp32: what is float32 already is not rounded")
    found = replace(found, rounding=rounding, format=fp8 if found.format == E4M3 else found.format)
    return (
        replace(found, root=not found.expand, rounding="stochastic")
        if second_moment and found.block
        else found
    )
