"""Storage codecs: weights, gradients and optimizer moments in fewer than 32 bits.

A stored tensor is a tuple of plain tensors, `(data,)` or `(data, scale_inv)`. Its value is
data x scale_inv. A codec is a format, a rule for the scale, and a rounding:

    fp32, bf16, fp16   no scale
    fp16_scaled        one power-of-two scale per tensor: MS-AMP's weights, masters, second moments
    fp8_pow2           one power-of-two scale per tensor: MS-AMP's gradients and first moments
    fp8                one scale per tensor, which moves its amax to exactly the maximum
    fp8_block          one scale per 128 elements; second moments as square roots
    fp8_expand         one power per 128 elements, which fills the range of FP8: COAT's moments

A power of two costs no rounding. But it does not move while a tensor decays: if the step 1 - beta
of a moving average is less than half a unit of the format, the average rounds back to its old value
forever. An exact scale moves with the amax, and the codes with it. Second moments span twice the
powers of two that gradients do. On a linear FP8 grid most of them become 0, and Adam divides by
them. Their square roots fit, and values above 0 do not become 0.

A tensor or a block with an infinity or NaN gets a scale that is not finite. All of it decodes to
NaN. Codecs without a scale treat each element as torch does.
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
from fp8cfg.numerics.async_copies import copy_to_device
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

EncodedTensor = tuple[Tensor, ...]
Rounding = Literal["nearest", "stochastic"]

FP32 = Format("fp32", torch.float32, torch.finfo(torch.float32).max, 23, -126)
BF16 = Format("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).max, 7, -126)
FP16 = Format("fp16", torch.float16, 65504.0, 10, -14)
CHUNK = 1 << 16
"""Elements that eager code converts to float32 at a time. They fit into the cache of a CPU."""
GPU_CHUNK = 1 << 22
"""The same on a GPU, where each chunk costs launches: 16 MiB for a tensor."""
BLOCK = 128
"""Elements that share a scale in the codecs with blocks."""
MIN_SCALE_INV = 2.0**-126
"""The smallest inverse scale. Smaller ones could become 0."""


@dataclass(frozen=True)
class Codec:
    """How a tensor is stored.

    Attributes:
        format: Format of the data.
        scaling: The rule for the scale.
        block: Elements that share a scale. 0 is the whole tensor.
        root: Whether the square root is stored, of values that are not negative.
        expand: Whether a power is stored (COAT). The scale of a block has two numbers then.
        rounding: Rounding of the data.
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
        """The meaning of the stored bytes, without the rounding: `e4m3 exact 128 root`."""
        words = [self.format.name]
        if self.scaling != "none":
            words.append(self.scaling)
        if self.block:
            words.append(str(self.block))
        if self.root:
            words.append("root")
        elif self.expand:
            words.append("expand")
        return " ".join(words)

    @property
    def per_tensor(self) -> bool:
        """Whether the scale is computed from the amax of the whole tensor."""
        return self.scaling != "none" and not self.block

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element and its share of the scale of a block."""
        itemsize = self.format.dtype.itemsize
        if not self.block:
            return itemsize  # a scale for the whole tensor is 4 bytes more, once
        scale_bytes = 4
        if self.expand:
            scale_bytes = 8
        return itemsize + scale_bytes / self.block

    def zeros(self, shape: torch.Size, device: torch.device) -> EncodedTensor:
        """Returns a stored tensor of zeros with scale 1."""
        data = torch.zeros(shape, dtype=self.format.dtype, device=device)
        if self.expand:
            send_tables(data.device)
        if self.scaling == "none":
            return (data,)
        scale_shape: tuple[int, ...] = ()
        if self.block:
            scale_shape = (math.ceil(data.numel() / self.block),)
        if self.expand:
            scale_shape = (*scale_shape, 2)
        return (data, torch.ones(scale_shape, dtype=torch.float32, device=device))

    def encode(
        self, x: Tensor, key: Tensor | None = None, scale_inv: Tensor | None = None
    ) -> EncodedTensor:
        """Encodes a tensor.

        Args:
            x: float32 of any shape.
            key: Key of stochastic rounding.
            scale_inv: Scale of the whole tensor, if `x` is a part of it.

        Returns:
            The stored tensor. Under fp32 its data is `x` itself.
        """
        if self.scaling == "none":
            return (self._quantize(x, None, key),)
        if scale_inv is None:
            scale_inv = self._compute_scales(x)
        return (self._quantize(x, scale_inv, key), scale_inv)

    def decode(self, stored: EncodedTensor) -> Tensor:
        """Returns the values, float32, in the shape of the data. Under fp32 the data itself."""
        data = stored[0]
        if self.expand:
            rows = decode_powers(self._to_rows(data.view(torch.uint8)), stored[1])
            return self._from_rows(rows, data)
        values = data.float()
        if self.scaling == "none":
            return values
        # In place: `float` has made a copy.
        if self.block:
            rows = self._to_rows(values).mul_(stored[1][:, None])
            values = self._from_rows(rows, values)
        else:
            values = values.mul_(stored[1])
        if self.root:
            values = values * values
        return values

    def store(
        self,
        x: Tensor,
        stored: EncodedTensor,
        key: Tensor | None = None,
        scale_inv: Tensor | None = None,
    ) -> None:
        """Writes `x`, of any float dtype, into `stored` in chunks. Same bits as `encode`."""
        flat = x.reshape(-1)
        if self.per_tensor:
            if scale_inv is None:
                scale_inv = self._compute_scales(x)
            stored[1].copy_(scale_inv)
        for start, stop in chunk_ranges(x.numel(), x.device):
            part = self.part(stored, start, stop)
            self.write(flat[start:stop].float(), part, scale_inv, key, start=start)

    def part(self, stored: EncodedTensor, start: int, stop: int) -> EncodedTensor:
        """Returns views of elements `start` to `stop`, flat, of a contiguous stored tensor.

        `start` is a multiple of the block.
        """
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
        """Encodes `x` into a part of a stored tensor.

        Args:
            x: float32.
            part: From `part`.
            scale_inv: Scale of the whole tensor. The caller stores it. Scales of blocks are
                computed and stored here.
            key: Key of stochastic rounding.
            lane: Lane of stochastic rounding.
            start: The first element of the part.
            skip: bool []. If true, nothing changes.
        """
        if self.block:
            scale_inv = self._compute_scales(x)
            write_encoded(part[1], scale_inv, skip)
        write_encoded(part[0], self._quantize(x, scale_inv, key, lane, start), skip)

    def scale_inv(self, amax: Tensor) -> Tensor:
        """Returns inverse scales from amaxes of any shape. Not finite if the amax is not."""
        if self.scaling == "pow2":
            return reciprocal(pow2_scale(amax, self.format.max))
        # Both are tensors, for a true division (scaling.py).
        return (amax / torch.full_like(amax, self.format.max)).clamp(min=MIN_SCALE_INV)

    def _compute_scales(self, x: Tensor) -> Tensor:
        """Computes the inverse scale of a tensor, or the scales of its blocks."""
        if not self.block:
            return self.scale_inv(compute_amax_or_nan(x))
        if self.root:
            x = square_root(x)
        rows = self._to_rows(x)
        if self.expand:
            return compute_power_scales(rows)
        return self.scale_inv(rows.abs().amax(-1))

    def _quantize(
        self,
        x: Tensor,
        scale_inv: Tensor | None,
        key: Tensor | None,
        lane: int = 0,
        start: Start = 0,
    ) -> Tensor:
        fmt = self.format
        if self.expand:
            assert scale_inv is not None, "blocks have scales"
            rows = self._to_rows(x)
            codes = encode_powers(rows, scale_inv, self._uniform(rows, key, lane, start))
            return self._from_rows(codes, x)
        v = x
        if self.root:
            v = square_root(v)
        if self.block:
            assert scale_inv is not None, "blocks have scales"
            v = self._to_rows(v)
            scale_inv = scale_inv[:, None]
        if self.scaling == "pow2":
            assert scale_inv is not None, "this codec has a scale"
            # A power of two has an exact reciprocal: the same bits, and a product is faster.
            v = v * reciprocal(scale_inv)
        elif scale_inv is not None:
            v = v / scale_inv
        if self.root:
            # Values above 0 do not become 0: Adam divides by them.
            smallest = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
            v = torch.where(v > 0, v.clamp(min=smallest), v)
        u = self._uniform(v, key, lane, start)
        if u is not None:
            v = round_stochastic(v, fmt, u)
        if fmt.dtype.itemsize == 1:
            v = cast(v, fmt)  # it saturates
        data = v.to(fmt.dtype)
        if self.block:
            data = self._from_rows(data, x)
        return data

    def _uniform(self, v: Tensor, key: Tensor | None, lane: int, start: Start) -> Tensor | None:
        """Returns the random numbers for `v`, or None if the rounding is to nearest."""
        if self.rounding == "nearest":
            return None
        if key is None:
            raise ValueError(f"codec {self}: stochastic rounding needs a key")
        num_keys = key.numel() // 2
        return uniform_numbers(key, lane, start, v.numel() // num_keys).view(v.shape)

    def _to_rows(self, x: Tensor) -> Tensor:
        """Returns `x` as [blocks, block], padded with zeros. A view if no padding is needed."""
        if x.dim() == 2 and x.shape[1] == self.block:
            return x
        flat = x.reshape(-1)
        missing = -flat.numel() % self.block
        if missing:
            flat = F.pad(flat, (0, missing))
        return flat.view(-1, self.block)

    def _from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        """Returns rows [blocks, block] in the shape of `like`. The inverse of `_to_rows`."""
        if like.shape == rows.shape:
            return rows
        return rows.view(-1)[: like.numel()].view(like.shape)


def write_encoded(target: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Copies `new` into `target`, unless `skip`, a bool [], is true."""
    if skip is None:
        target.copy_(new)
        return
    if target.dtype.itemsize == 1:
        # torch.where has no float8.
        new = new.to(target.dtype).view(torch.uint8)
        target = target.view(torch.uint8)
    target.copy_(torch.where(skip, target, new.to(target.dtype)))


def chunk_ranges(count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Iterates over the chunks, (start, stop), of `count` elements on `device`."""
    step = CHUNK
    if device.type == "cuda":
        step = GPU_CHUNK
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


def get_codec(name: str, rounding: Rounding = "nearest", second_moment: bool = False) -> Codec:
    """Returns the codec with a name of CODECS.

    Second moments in blocks are rounded stochastically, whatever `rounding` is. Rounded to nearest
    they do not decay after gradients have shrunk. With beta 0.99 and gradients 33 times smaller
    some stayed 1800 times too large under fp8_block, and 13 times with stochastic rounding. Under
    fp8_expand, which COAT rounds to nearest, it was 940 and 6 times.

    Args:
        name: A name of CODECS.
        rounding: Rounding of the data.
        second_moment: Whether second moments are stored.

    Raises:
        ValueError: Unknown name, or stochastic rounding to float32.
    """
    if name not in CODECS:
        raise ValueError(f"codec {name!r}; choose from {', '.join(CODECS)}")
    codec = CODECS[name]
    if codec.format == FP32 and rounding != "nearest":
        raise ValueError("codec fp32: float32 values are not rounded")
    codec = replace(codec, rounding=rounding)
    if second_moment and codec.block:
        codec = replace(codec, root=not codec.expand, rounding="stochastic")
    return codec


# --- fp8_expand: a power for each block
#
# COAT (arXiv:2410.19313) stores sign(x) |x / max|^k, with an exponent k for each block that
# stretches the block over the whole range of E4M3. Powers differ by compiler and device. So k is a
# multiple of 1 / 16, and the values of all codes are in tables that are computed once, in float64.

STEPS_PER_K = 16
"""k is a multiple of 1 / STEPS_PER_K. "In steps" below means k * STEPS_PER_K."""
MIN_STEPS, MAX_STEPS = 3, 16 * STEPS_PER_K
"""Bounds of k in steps."""


class _Tables(NamedTuple):
    """Tables of the codes for each k in steps. A code is the byte of a positive E4M3 value.

    Attributes:
        values: Values of the 127 codes relative to the largest, [steps x 127].
        codes: Their sort keys, [steps x 127].
        midpoints: Sort keys of the midpoints between neighbors as powers, [steps x 126].
        ranges: The widest range, largest / smallest, of a block for each k, ascending: from
            MAX_STEPS down to MIN_STEPS.
    """

    values: Tensor
    codes: Tensor
    midpoints: Tensor
    ranges: Tensor


def _compute_tables() -> _Tables:
    codes = torch.arange(127, dtype=torch.uint8, device="cpu").view(E4M3.dtype).double() / E4M3.max
    steps = torch.arange(MAX_STEPS + 1, device="cpu")
    roots = STEPS_PER_K / steps[:, None].double().clamp(min=MIN_STEPS)
    midpoints = ((codes[1:] + codes[:-1]) / 2) ** roots
    values = (codes**roots).float()
    return _Tables(
        values.flatten(),
        _sort_keys(values, steps).flatten(),
        _sort_keys(_round_down(midpoints), steps).flatten(),
        _round_down((E4M3.max**2 / 2) ** roots[MIN_STEPS:, 0].flip(0)),
    )


def _sort_keys(values: Tensor, k: Tensor) -> Tensor:
    """Returns int64 keys that ascend with k and, for one k, with the values.

    One search in one table then serves blocks with different k. The bits of positive float32
    numbers are in the order of the numbers, and those of 1 have 30 bits. NaN is above all values of
    its row.

    Args:
        values: float32 from 0 to 1, [.., n].
        k: k of each row in steps, int64 [..].
    """
    return k[:, None] * 2**30 + values.view(torch.int32)


def _round_down(x: Tensor) -> Tensor:
    """Rounds float64 `x` down to float32. A float32 is above `x` if it is above the result."""
    nearest = x.float()
    lower = nearest.nextafter(torch.full_like(nearest, -math.inf))
    return torch.where(nearest.double() > x, lower, nearest)


_TABLES = _compute_tables()
_TABLES_ON_GPU: dict[int | None, _Tables] = {}
"""The tables on each GPU. Compiled code would copy them for each tensor, and wait each time."""


def send_tables(device: torch.device) -> None:
    """Copies the tables to a GPU once. Call it before code that uses them there is compiled."""
    if device.type == "cuda" and device.index not in _TABLES_ON_GPU:
        _TABLES_ON_GPU[device.index] = _Tables(
            *(copy_to_device(table, device) for table in _TABLES)
        )


def _tables_on(device: torch.device) -> _Tables:
    if device.type != "cuda":
        return _Tables(*(table.to(device) for table in _TABLES))
    if not torch.compiler.is_compiling():
        send_tables(device)
    return _TABLES_ON_GPU[device.index]


def compute_power_scales(rows: Tensor) -> Tensor:
    """Computes the scales of blocks.

    Args:
        rows: float32 [blocks, block].

    Returns:
        float32 [blocks, 2]: the largest magnitude, NaN if something is not finite, and k.
    """
    x = rows.abs()
    largest = x.amax(-1)
    smallest = torch.where(x == 0, math.inf, x).amin(-1)
    # The largest k whose codes still reach the smallest magnitude.
    num_narrower = torch.searchsorted(_tables_on(x.device).ranges, largest / smallest)
    k = (MAX_STEPS - num_narrower).clamp(min=MIN_STEPS).float() / STEPS_PER_K
    largest = torch.where(largest < math.inf, largest.clamp(min=MIN_SCALE_INV), math.nan)
    return torch.stack([largest, k], -1)


def encode_powers(rows: Tensor, scales: Tensor, u: Tensor | None = None) -> Tensor:
    """Encodes blocks. Values that are not 0 do not become 0.

    Args:
        rows: float32 [blocks, block].
        scales: From `compute_power_scales`.
        u: Random numbers in [0, 1) of the shape of `rows`. They round between the values of two
            codes. None rounds to the nearest power, as COAT does.

    Returns:
        E4M3 [blocks, block].
    """
    x = rows.abs() / scales[:, :1]
    k = _k_in_steps(scales)
    tables = _tables_on(rows.device)
    if u is None:
        code = (torch.bucketize(_sort_keys(x, k), tables.midpoints) - 126 * k[:, None]).clamp(
            max=126
        )
    else:
        first = 127 * k[:, None]  # the first code of the row in the tables
        position = torch.bucketize(_sort_keys(x, k), tables.codes, right=True)
        code = (position - 1 - first).clamp(0, 125)
        lower = tables.values[first + code]
        upper = tables.values[first + code + 1]
        code = code + (u < (x - lower) / (upper - lower))
    code = torch.where(rows != 0, code.clamp(min=1), code)
    signed = torch.where(rows < 0, code + 128, code)  # the sign bit of E4M3
    return signed.to(torch.uint8).view(E4M3.dtype)


def decode_powers(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the float32 values of the bytes [blocks, block] of `encode_powers`."""
    code = codes.long()
    first = 127 * _k_in_steps(scales)[:, None]
    values = _tables_on(codes.device).values[first + (code & 127)]
    return torch.where(code > 127, -values, values) * scales[:, :1]


def _k_in_steps(scales: Tensor) -> Tensor:
    return (scales[:, 1] * STEPS_PER_K).long()
