"""Transformer Engine kernels in plain torch, a stand-in for its compiled part: GEMMs, norms, SwiGLU, rotary positions,
softmax, the fused update.

Small and slow, for CPU tests alone. The formulas are those of Transformer Engine 2.20's kernels (cast.cu, delayed_scaling.cu) and
of its Python references; the kernels themselves do not run here."""

from __future__ import annotations

import enum
import re
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support.te_tex_tensors import DTYPES, MAX, dequantize, kind, quantize, values

CALLS: list[str] = []
"""The layout of each product and the kinds of its operands, since somebody cleared it."""
FusedAttnBackend = enum.IntEnum(
    "FusedAttnBackend", {"No_Backend": -1, "F16_arbitrary_seqlen": 1, "FP8": 2}
)
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


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Any,
    bias_type: Any,
    gelu: Any,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: Any = None,
) -> Any:
    assert alpha == 1.0 and comm_overlap is None
    assert quantizer is None and not gelu
    if (kind(A) == "high precision") != (
        kind(B) == "high precision"
    ):  # cublaslt_gemm.cu's CanonicalizeGemmInput, and cuBLASLt
        raise RuntimeError(
            f"inputs A and B to GEMM need to have compatible scaling modes, but got {kind(A)} and {kind(B)}"
        )
    CALLS.append(f"{'NT'[transA]}{'NT'[transB]} {kind(B)} x {kind(A)}")
    a, b = (v.reshape(-1, v.shape[-1]) for v in (values(A, transA), values(B, not transB)))
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
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: int,
    /,
) -> None:
    buffer, algo, kind, at = amax_reduction_buffer, amax_compute_algo, fp8_dtype, 0
    for history, scale in zip(amax_histories, scales, strict=True):
        for i in range(scale.numel()):
            h, new = history[:, i].clone(), history[:, i]
            last = buffer[at] if buffer[at] != 0 else h[0]
            at += 1
            amax = torch.zeros(())
            if last != 0:
                new.copy_(
                    torch.cat([h.new_zeros(1), h[2:], last[None]]) if len(h) > 1 else torch.zeros(1)
                )
                amax = torch.fmax(h[1:].max(), last) if len(h) > 1 else last
            if algo == "most_recent":
                amax = last
            if amax > 0 and amax.isfinite():
                scale[i] = torch.div(torch.tensor(MAX[kind.name] * 2.0**-margin), amax).clamp(
                    max=torch.finfo(torch.float32).max
                )


def _out(y: Tensor, quantizer: Any, dtype: Any) -> Any:
    return y.to(dtype) if quantizer is None else quantize(y, quantizer)


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Any:
    x, w = input, weight
    r = (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return _out(x.float() * r * w.float(), quantizer, x.dtype), None, r


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
    /,
) -> Any:
    dy, r, w = dz, rsigma, gamma
    n, g = x.float() * r, dy.float() * w.float()
    dx = r * (g - n * (g * n).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * n).reshape(-1, n.shape[-1]).sum(0).to(w.dtype)


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Any:
    x, w, b = input, weight, bias
    mean = x.float().mean(-1, keepdim=True)
    r = ((x.float() - mean).pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return _out((x.float() - mean) * r * w.float() + b.float(), quantizer, x.dtype), mean, r


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
    /,
) -> Any:
    dy, mean, r, w = dz, mu, rsigma, gamma
    n, g = (x.float() - mean) * r, dy.float() * w.float()
    dx = r * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
    flat = dy.float().reshape(-1, dy.shape[-1])
    return (
        dx.to(x.dtype),
        (flat * n.reshape(flat.shape)).sum(0).to(w.dtype),
        flat.sum(0).to(w.dtype),
    )


def swiglu(input: Tensor, quantizer: Any) -> Any:
    x = input
    gate, up = x.float().chunk(2, -1)
    return _out(torch.nn.functional.silu(gate) * up, quantizer, x.dtype)


def dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
    dy, x = grad, fwd_input
    gate, up = x.float().chunk(2, -1)
    s, g = torch.sigmoid(gate), dy.float()
    return _out(
        torch.cat([g * up * s * (1 + gate * (1 - s)), g * gate * s], -1), quantizer, x.dtype
    )


def fp8_transpose(input: Tensor, dtype: Any, out: Any) -> Tensor:
    return input.reshape(-1, input.shape[-1]).t().contiguous()


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Any,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
    /,
) -> Tensor:
    """fused_rope.cu: angles and products in float32, whatever the dtype of `input`."""
    t = input
    assert (
        qkv_format == QKV_FORMAT["bshd"]
        and not interleaved
        and start_positions is None
        and cp_size == 1
    )
    assert freqs.is_contiguous() and freqs.shape[-1] == t.shape[-1]
    angles = freqs[: t.shape[1], 0]  # [T, 1, head_dim]
    first, second = t.float().chunk(2, -1)
    return (t.float() * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(t.dtype)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Any,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
    /,
) -> Tensor:
    return fused_rope_forward(
        output_grads, -freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank
    )


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float, /) -> Tensor:
    return torch.softmax((input.float() * scale_factor).masked_fill(mask, -10000.0), -1).to(
        input.dtype
    )


def scaled_masked_softmax_backward(
    output_grad_: Tensor, softmax_results_: Tensor, scale_factor: float, /
) -> Tensor:
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


FUNCTIONS = (
    quantize,
    dequantize,
    generic_gemm,
    bgrad_quantize,
    fused_amax_and_scale_update_after_reduction,
    rmsnorm_fwd,
    rmsnorm_bwd,
    layernorm_fwd,
    layernorm_bwd,
    swiglu,
    dswiglu,
    fp8_transpose,
    fused_rope_forward,
    fused_rope_backward,
    scaled_masked_softmax_forward,
    scaled_masked_softmax_backward,
    get_cublasLt_version,
    get_num_cublas_streams,
    get_cudnn_version,
    get_fused_attn_backend,
)
"""Their signatures are those of the compiled ones (te_extension.pyi; tests/backends/test_te_extension.py)."""
