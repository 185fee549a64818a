"""Quantized tensors of Transformer Engine's compiled part in plain torch: casts into them, and their values (te_tex.py)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

MAX = {"kFloat8E4M3": 448.0, "kFloat8E5M2": 57344.0}
FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
DTYPES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _name(quantizer: Any) -> str:
    return type(quantizer).__name__


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    x, out = tensor, output
    if noop is not None and noop.item() == 1:
        return _untouched(quantizer, out)
    if _name(quantizer) in ("Float8BlockQuantizer", "MXFP8Quantizer"):
        return _quantize_tiles(x.detach(), quantizer, out)
    if _name(quantizer) == "NVFP4Quantizer":
        return _quantize_nvfp4(x.detach(), quantizer, out)
    assert _name(quantizer) in ("Float8Quantizer", "Float8CurrentScalingQuantizer"), (
        f"no stand-in for {_name(quantizer)}"
    )
    kind = quantizer.dtype.name
    amax = x.detach().float().abs().max()
    if _name(quantizer) == "Float8Quantizer":
        scale = quantizer.scale
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    else:
        amax = amax.clamp(min=quantizer.amax_epsilon)
        scale = torch.where(
            (amax > 0) & amax.isfinite(), torch.div(torch.tensor(MAX[kind]), amax), 1.0
        )
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        if quantizer.force_pow_2_scales:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    data = (x.detach().float() * scale).clamp(-MAX[kind], MAX[kind]).to(FP8[kind]).view(torch.uint8)
    flat = data.reshape(-1, data.shape[-1])
    transpose = flat.t().contiguous() if quantizer.columnwise_usage else None
    scale_inv = scale.reciprocal().reshape(1)
    if out is not None:
        out._data.copy_(data)
        out._scale_inv.copy_(scale_inv)
        out._transpose, out._transpose_invalid = transpose, transpose is None
        return out
    tensors = dict(
        data=data,
        fp8_scale_inv=scale_inv,
        fp8_dtype=quantizer.dtype,
        data_transpose=transpose,
        quantizer=quantizer,
    )
    return _tensor("float8_tensor.Float8Tensor", x, quantizer, tensors)


def _untouched(quantizer: Any, out: Any) -> Any:
    """What a kernel that is told to do nothing leaves of `out`: a transpose that was not there has memory by then, with anything in
    it, and is marked as made (quantizer.cpp, convert_and_update_tensor)."""
    if _name(quantizer) == "Float8Quantizer":
        wanted = quantizer.columnwise_usage
        if wanted and out._transpose is None:
            out._transpose = torch.full(out._data.shape[::-1], 0x7F, dtype=torch.uint8)
        out._transpose, out._transpose_invalid = out._transpose if wanted else None, not wanted
    return out


def _tensor(name: str, x: Tensor, quantizer: Any, tensors: dict[str, Any]) -> Any:
    module, cls = name.split(".")
    found = sys.modules[f"transformer_engine.pytorch.tensor.{module}"]
    if quantizer.internal:
        return getattr(found, cls + "Storage")(**tensors, fake_dtype=x.dtype)
    return getattr(found, cls)(shape=x.shape, dtype=x.dtype, **tensors, device=x.device)


def _quantize_tiles(x: Tensor, quantizer: Any, out: Any) -> Any:
    """Block and MXFP8 scaling. Scales lie as their tiles do, neither padded nor transposed; block's columnwise codes are."""
    block = _name(quantizer) == "Float8BlockQuantizer"
    size, square = (
        (quantizer.block_len, quantizer.block_scaling_dim == 2)
        if block
        else (32, quantizer.with_2d_quantization)
    )
    flat, kind, found = x.reshape(-1, x.shape[-1]).float(), quantizer.dtype.name, {}
    for way, tile, wanted in (
        ("rowwise", (1, size), quantizer.rowwise_usage),
        ("columnwise", (size, 1), quantizer.columnwise_usage),
    ):
        tile = (size, size) if square else tile
        amax = torch.nn.functional.max_pool2d(flat.abs()[None], tile, ceil_mode=True)[0]
        scale = torch.where(amax > 0, MAX[kind] / amax, 1.0)
        if not block or quantizer.force_pow_2_scales:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        data = (
            (flat * _spread(scale, tile, flat))
            .clamp(-MAX[kind], MAX[kind])
            .to(FP8[kind])
            .view(torch.uint8)
        )
        data = data.t().contiguous() if block and way == "columnwise" else data.view(x.shape)
        inverse = scale.reciprocal()
        inverse = inverse if block else (inverse.view(torch.int32) >> 23).to(torch.uint8)
        found |= {
            f"{way}_data": data if wanted else None,
            f"{way}_scale_inv": inverse if wanted else None,
        }
    if out is not None:
        for name, tensor in found.items():
            getattr(out, f"_{name}").copy_(tensor)
        return out
    common = dict(fp8_dtype=quantizer.dtype, quantizer=quantizer)
    if block:
        return _tensor(
            "float8_blockwise_tensor.Float8BlockwiseQTensor",
            x,
            quantizer,
            found | common | {"is_2D_scaled": square},
        )
    return _tensor(
        "mxfp8_tensor.MXFP8Tensor",
        x,
        quantizer,
        found | common | {"with_gemm_swizzled_scales": False},
    )


def _quantize_nvfp4(x: Tensor, quantizer: Any, out: Any) -> Any:
    """Two levels of scales, codes in nibbles. The Hadamard transform is left out of both operands of wgrad, in whose product it
    cancels, and gradients are rounded to the nearest."""
    found: dict[str, Any] = {}
    for way, wanted in (
        ("rowwise", quantizer.rowwise_usage),
        ("columnwise", quantizer.columnwise_usage),
    ):
        flat = x.reshape(-1, x.shape[-1]).float()
        flat = flat if way == "rowwise" else flat.t().contiguous()
        whole = flat.abs().max()
        block = torch.nn.functional.max_pool2d(
            flat.abs()[None], (16, 16) if quantizer.with_2d_quantization else (1, 16)
        )[0]
        if quantizer.with_2d_quantization:
            block = block.repeat_interleave(16, 0)
        encode = torch.where(whole > 0, 448 * 6 / whole, 1.0)
        scale = (block / 6 * encode).clamp(max=448).to(torch.float8_e4m3fn)
        values = flat * torch.where(
            scale.float() > 0, encode / scale.float(), 0.0
        ).repeat_interleave(16, 1)
        codes = (values.abs()[..., None] - GRID).abs().argmin(-1).to(torch.uint8) | (
            (values < 0).to(torch.uint8) << 3
        )
        data = codes[:, ::2] | (codes[:, 1::2] << 4)
        data = data.view(*x.shape[:-1], -1) if way == "rowwise" else data
        found |= {
            f"{way}_data": data if wanted else None,
            f"{way}_scale_inv": scale.view(torch.uint8) if wanted else None,
            f"amax_{way}": whole.reshape(1) if wanted else None,
        }
    if out is not None:
        for name, tensor in found.items():
            getattr(out, f"_{name}").copy_(tensor)
        return out
    found |= {
        "fp4_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "with_gemm_swizzled_scales": False,
    }
    return _tensor("nvfp4_tensor.NVFP4Tensor", x, quantizer, found)


def _nvfp4_values(t: Any, rowwise: bool) -> Tensor:
    way = "rowwise" if rowwise else "columnwise"
    data, inverse, whole = (
        getattr(t, f"_{way}_data"),
        getattr(t, f"_{way}_scale_inv"),
        getattr(t, f"_amax_{way}"),
    )
    data = data.reshape(-1, data.shape[-1])
    codes = torch.stack([data & 15, data >> 4], -1).flatten(1).int()
    values = GRID[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    values = (
        values
        * inverse.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
        * (whole / (448 * 6))
    )
    return values if rowwise else values.t()


def _spread(scale: Tensor, tile: tuple[int, int], like: Tensor) -> Tensor:
    return scale.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[
        : like.shape[0], : like.shape[1]
    ]


def dequantize(input: Any, otype: Any) -> Tensor:
    return values(input, True).to(DTYPES[otype.name]).view(input.size())


def _tiled_values(t: Any, rowwise: bool) -> Tensor:
    way = "_rowwise" if rowwise else "_columnwise"
    data, inverse = getattr(t, way + "_data"), getattr(t, way + "_scale_inv")
    assert data is not None, f"a product reads {way} codes that nobody made"
    if inverse.dtype == torch.uint8:
        inverse = (inverse.int() << 23).view(torch.float32)
    elif not rowwise:
        data = data.t()
    data = data.contiguous().view(FP8[t._fp8_dtype.name]).float()
    data = data.reshape(-1, data.shape[-1])
    tile = tuple(
        next(n for n in (1, 32, 128) if -(-a // n) == b)
        for a, b in zip(data.shape, inverse.shape, strict=True)
    )
    return data * _spread(inverse, tile, data)


def values(t: Any, rowwise: bool) -> Tensor:
    if hasattr(t, "_fp4_dtype"):
        return _nvfp4_values(t, rowwise)
    if not hasattr(t, "_fp8_dtype"):
        return t.float()
    if hasattr(t, "_rowwise_data"):
        return _tiled_values(t, rowwise)
    data = t._data if t._data is not None else t._transpose.t()
    return data.contiguous().view(FP8[t._fp8_dtype.name]).float() * t._scale_inv


def kind(t: Any) -> str:
    if hasattr(t, "_fp4_dtype"):
        return "e2m1"
    return (
        {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}[t._fp8_dtype.name]
        if hasattr(t, "_fp8_dtype")
        else "high precision"
    )
