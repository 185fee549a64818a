"""Transformer Engine kernels in plain torch, a stand-in for its compiled part: casts, GEMMs, norms, SwiGLU, rotary positions,
softmax, the fused update.

Small and slow, for CPU tests alone. The formulas are those of Transformer Engine 2.20's kernels (cast.cu, delayed_scaling.cu) and
of its Python references; the kernels themselves do not run here."""

from __future__ import annotations

import enum
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MAX = {"kFloat8E4M3": 448.0, "kFloat8E5M2": 57344.0}
FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
DTYPES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CALLS: list[str] = []
"""The layout of each product and the kinds of its operands, since somebody cleared it."""
FusedAttnBackend = enum.IntEnum("FusedAttnBackend", {"No_Backend": -1, "F16_arbitrary_seqlen": 1, "FP8": 2})
QKV_FORMAT = {None: 0, "sbhd": 1, "bshd": 2, "thd": 3}


def extension(root: Path) -> types.ModuleType:
    """The module `transformer_engine_torch`; names without a stand-in are mocks."""
    names = re.findall(r"int\(tex\.DType\.(\w+)\)", (root / "pytorch/constants.py").read_text())
    module = types.ModuleType("transformer_engine_torch")
    module.__getattr__ = missing
    module.DType = enum.IntEnum("DType", names, start=0)
    module.FP8FwdTensors = _numbered("GEMM{}_INPUT", "GEMM{}_WEIGHT", "GEMM{}_OUTPUT")
    module.FP8BwdTensors = _numbered("GRAD_OUTPUT{}", "GRAD_INPUT{}")
    for f in FUNCTIONS:
        setattr(module, f.__name__, f)
    return module


def missing(name: str) -> Any:
    """A mock for whatever is only asked for when modules are imported."""
    if name.startswith("__"):
        raise AttributeError(name)
    return mock.MagicMock(name=name, unsafe=True)


def _numbered(*names: str) -> Any:
    """The columns of a module's buffers, product by product (csrc/common.h)."""
    return enum.IntEnum("Columns", [name.format(n) for n in (1, 2, 3) for name in names], start=0)


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
    assert _name(quantizer) in ("Float8Quantizer", "Float8CurrentScalingQuantizer"), f"no stand-in for {_name(quantizer)}"
    kind = quantizer.dtype.name
    amax = x.detach().float().abs().max()
    if _name(quantizer) == "Float8Quantizer":
        scale = quantizer.scale
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    else:
        amax = amax.clamp(min=quantizer.amax_epsilon)
        scale = torch.where((amax > 0) & amax.isfinite(), torch.div(torch.tensor(MAX[kind]), amax), 1.0)
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
    tensors = dict(data=data, fp8_scale_inv=scale_inv, fp8_dtype=quantizer.dtype, data_transpose=transpose, quantizer=quantizer)
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
    size, square = (quantizer.block_len, quantizer.block_scaling_dim == 2) if block else (32, quantizer.with_2d_quantization)
    flat, kind, found = x.reshape(-1, x.shape[-1]).float(), quantizer.dtype.name, {}
    for way, tile, wanted in (("rowwise", (1, size), quantizer.rowwise_usage), ("columnwise", (size, 1), quantizer.columnwise_usage)):
        tile = (size, size) if square else tile
        amax = torch.nn.functional.max_pool2d(flat.abs()[None], tile, ceil_mode=True)[0]
        scale = torch.where(amax > 0, MAX[kind] / amax, 1.0)
        if not block or quantizer.force_pow_2_scales:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        data = (flat * _spread(scale, tile, flat)).clamp(-MAX[kind], MAX[kind]).to(FP8[kind]).view(torch.uint8)
        data = data.t().contiguous() if block and way == "columnwise" else data.view(x.shape)
        inverse = scale.reciprocal()
        inverse = inverse if block else (inverse.view(torch.int32) >> 23).to(torch.uint8)
        found |= {f"{way}_data": data if wanted else None, f"{way}_scale_inv": inverse if wanted else None}
    if out is not None:
        for name, tensor in found.items():
            getattr(out, f"_{name}").copy_(tensor)
        return out
    common = dict(fp8_dtype=quantizer.dtype, quantizer=quantizer)
    if block:
        return _tensor("float8_blockwise_tensor.Float8BlockwiseQTensor", x, quantizer, found | common | {"is_2D_scaled": square})
    return _tensor("mxfp8_tensor.MXFP8Tensor", x, quantizer, found | common | {"with_gemm_swizzled_scales": False})


def _quantize_nvfp4(x: Tensor, quantizer: Any, out: Any) -> Any:
    """Two levels of scales, codes in nibbles. The Hadamard transform is left out of both operands of wgrad, in whose product it
    cancels, and gradients are rounded to the nearest."""
    found: dict[str, Any] = {}
    for way, wanted in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        flat = x.reshape(-1, x.shape[-1]).float()
        flat = flat if way == "rowwise" else flat.t().contiguous()
        whole = flat.abs().max()
        block = torch.nn.functional.max_pool2d(flat.abs()[None], (16, 16) if quantizer.with_2d_quantization else (1, 16))[0]
        if quantizer.with_2d_quantization:
            block = block.repeat_interleave(16, 0)
        encode = torch.where(whole > 0, 448 * 6 / whole, 1.0)
        scale = (block / 6 * encode).clamp(max=448).to(torch.float8_e4m3fn)
        values = flat * torch.where(scale.float() > 0, encode / scale.float(), 0.0).repeat_interleave(16, 1)
        codes = (values.abs()[..., None] - GRID).abs().argmin(-1).to(torch.uint8) | ((values < 0).to(torch.uint8) << 3)
        data = codes[:, ::2] | (codes[:, 1::2] << 4)
        data = data.view(*x.shape[:-1], -1) if way == "rowwise" else data
        found |= {f"{way}_data": data if wanted else None, f"{way}_scale_inv": scale.view(torch.uint8) if wanted else None,
                  f"amax_{way}": whole.reshape(1) if wanted else None}
    if out is not None:
        for name, tensor in found.items():
            getattr(out, f"_{name}").copy_(tensor)
        return out
    found |= {"fp4_dtype": quantizer.dtype, "quantizer": quantizer, "with_gemm_swizzled_scales": False}
    return _tensor("nvfp4_tensor.NVFP4Tensor", x, quantizer, found)


def _nvfp4_values(t: Any, rowwise: bool) -> Tensor:
    way = "rowwise" if rowwise else "columnwise"
    data, inverse, whole = getattr(t, f"_{way}_data"), getattr(t, f"_{way}_scale_inv"), getattr(t, f"_amax_{way}")
    data = data.reshape(-1, data.shape[-1])
    codes = torch.stack([data & 15, data >> 4], -1).flatten(1).int()
    values = GRID[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    values = values * inverse.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1) * (whole / (448 * 6))
    return values if rowwise else values.t()


def _spread(scale: Tensor, tile: tuple[int, int], like: Tensor) -> Tensor:
    return scale.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: like.shape[0], : like.shape[1]]


def dequantize(input: Any, otype: Any) -> Tensor:
    return _values(input, True).to(DTYPES[otype.name]).view(input.size())


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
    tile = tuple(next(n for n in (1, 32, 128) if -(-a // n) == b) for a, b in zip(data.shape, inverse.shape, strict=True))
    return data * _spread(inverse, tile, data)


def _values(t: Any, rowwise: bool) -> Tensor:
    if hasattr(t, "_fp4_dtype"):
        return _nvfp4_values(t, rowwise)
    if not hasattr(t, "_fp8_dtype"):
        return t.float()
    if hasattr(t, "_rowwise_data"):
        return _tiled_values(t, rowwise)
    data = t._data if t._data is not None else t._transpose.t()
    return data.contiguous().view(FP8[t._fp8_dtype.name]).float() * t._scale_inv


def _kind(t: Any) -> str:
    if hasattr(t, "_fp4_dtype"):
        return "e2m1"
    return {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}[t._fp8_dtype.name] if hasattr(t, "_fp8_dtype") else "high precision"


def generic_gemm(
    A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, output_dtype: Any, bias: Any, bias_type: Any, gelu: Any, gelu_in: Any, grad: bool,
    workspace: Any, workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None,
    extra_output: Any = None, bulk_overlap: bool = False, alpha: float = 1.0, beta: Any = None,
) -> Any:  # fmt: skip
    assert alpha == 1.0 and comm_overlap is None
    assert quantizer is None and not gelu
    CALLS.append(f"{'NT'[transA]}{'NT'[transB]} {_kind(B)} x {_kind(A)}")
    a, b = (v.reshape(-1, v.shape[-1]) for v in (_values(A, transA), _values(B, not transB)))
    y = (b.t() if transB else b) @ (a.t() if transA else a)
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = b.sum(0)
        else:
            y = y + bias.float()
    dtype = DTYPES[output_dtype.name]
    shape = y.shape if transB else (*B.size()[:-1], y.shape[-1])
    y = y.to(dtype).reshape(shape)
    if D is not None:
        D.copy_(D + y if accumulate else y)
        y = D
    return y, bias_grad, None, None


def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return input.reshape(-1, input.shape[-1]).sum(0), quantize(input, quantizer)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor, amax_histories: list[Tensor], scales: list[Tensor], amax_compute_algo: str, fp8_dtype: Any, margin: int, /,
) -> None:  # fmt: skip
    buffer, algo, kind, at = amax_reduction_buffer, amax_compute_algo, fp8_dtype, 0
    for history, scale in zip(amax_histories, scales, strict=True):
        for i in range(scale.numel()):
            h, new = history[:, i].clone(), history[:, i]
            last = buffer[at] if buffer[at] != 0 else h[0]
            at += 1
            amax = torch.zeros(())
            if last != 0:
                new.copy_(torch.cat([h.new_zeros(1), h[2:], last[None]]) if len(h) > 1 else torch.zeros(1))
                amax = torch.fmax(h[1:].max(), last) if len(h) > 1 else last
            if algo == "most_recent":
                amax = last
            if amax > 0 and amax.isfinite():
                scale[i] = torch.div(torch.tensor(MAX[kind.name] * 2.0**-margin), amax).clamp(max=torch.finfo(torch.float32).max)


def _out(y: Tensor, quantizer: Any, dtype: Any) -> Any:
    return y.to(dtype) if quantizer is None else quantize(y, quantizer)


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered_gamma: bool,
) -> Any:  # fmt: skip
    x, w = input, weight
    r = (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return _out(x.float() * r * w.float(), quantizer, x.dtype), None, r


def rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool, /) -> Any:
    dy, r, w = dz, rsigma, gamma
    n, g = x.float() * r, dy.float() * w.float()
    dx = r * (g - n * (g * n).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * n).reshape(-1, n.shape[-1]).sum(0).to(w.dtype)


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int, zero_centered_gamma: bool,
) -> Any:  # fmt: skip
    x, w, b = input, weight, bias
    mean = x.float().mean(-1, keepdim=True)
    r = ((x.float() - mean).pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return _out((x.float() - mean) * r * w.float() + b.float(), quantizer, x.dtype), mean, r


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool, /,
) -> Any:  # fmt: skip
    dy, mean, r, w = dz, mu, rsigma, gamma
    n, g = (x.float() - mean) * r, dy.float() * w.float()
    dx = r * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
    flat = dy.float().reshape(-1, dy.shape[-1])
    return dx.to(x.dtype), (flat * n.reshape(flat.shape)).sum(0).to(w.dtype), flat.sum(0).to(w.dtype)


def swiglu(input: Tensor, quantizer: Any) -> Any:
    x = input
    gate, up = x.float().chunk(2, -1)
    return _out(torch.nn.functional.silu(gate) * up, quantizer, x.dtype)


def dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
    dy, x = grad, fwd_input
    gate, up = x.float().chunk(2, -1)
    s, g = torch.sigmoid(gate), dy.float()
    return _out(torch.cat([g * up * s * (1 + gate * (1 - s)), g * gate * s], -1), quantizer, x.dtype)


def fp8_transpose(input: Tensor, dtype: Any, out: Any) -> Tensor:
    return input.reshape(-1, input.shape[-1]).t().contiguous()


def fused_rope_forward(
    input: Tensor, freqs: Tensor, start_positions: Any, qkv_format: int, interleaved: bool, cu_seqlens: Any, cp_size: int, cp_rank: int, /,
) -> Tensor:  # fmt: skip
    """fused_rope.cu: angles and products in float32, whatever the dtype of `input`."""
    t = input
    assert qkv_format == QKV_FORMAT["bshd"] and not interleaved and start_positions is None and cp_size == 1
    assert freqs.is_contiguous() and freqs.shape[-1] == t.shape[-1]
    angles = freqs[: t.shape[1], 0]  # [T, 1, head_dim]
    first, second = t.float().chunk(2, -1)
    return (t.float() * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(t.dtype)


def fused_rope_backward(
    output_grads: Tensor, freqs: Tensor, start_positions: Any, qkv_format: int, interleaved: bool, cu_seqlens: Any, cp_size: int, cp_rank: int, /,
) -> Tensor:  # fmt: skip
    return fused_rope_forward(output_grads, -freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float, /) -> Tensor:
    return torch.softmax((input.float() * scale_factor).masked_fill(mask, -10000.0), -1).to(input.dtype)


def scaled_masked_softmax_backward(output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float, /) -> Tensor:
    g, p = output_grad_.float(), softmax_results_.float()
    return (scale_factor * p * (g - (g * p).sum(-1, keepdim=True))).to(output_grad_.dtype)


def get_cublasLt_version() -> int:
    return 130000


def get_num_cublas_streams() -> int:
    return 1


def get_cudnn_version() -> int:
    return 92100


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[Any, str]:
    return FusedAttnBackend.No_Backend, "no cuDNN on a CPU"


FUNCTIONS = (quantize, dequantize, generic_gemm, bgrad_quantize, fused_amax_and_scale_update_after_reduction, rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd,
             layernorm_bwd, swiglu, dswiglu, fp8_transpose, fused_rope_forward, fused_rope_backward, scaled_masked_softmax_forward,
             scaled_masked_softmax_backward, get_cublasLt_version, get_num_cublas_streams, get_cudnn_version, get_fused_attn_backend)
"""Their signatures are those of the compiled ones (te_extension.pyi; tests/backends/test_te_extension.py)."""
