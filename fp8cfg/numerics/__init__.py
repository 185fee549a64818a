"""FP8 arithmetic in plain torch: formats, scaling, quantization, GEMMs and the FP8 linear layer.

Read in this order: formats, amax, scaling, quantize, gemm, fp8_linear, amax_update. kernels/ has
the Triton kernels, codecs the storage of weights and optimizer state.

A linear layer y = x Wᵀ has three GEMMs in a training step:

    fprop   y  = x  @ Wᵀ    activations and weights: values of similar size    E4M3, more mantissa
    dgrad   dx = dy @ W     gradients: many powers of two, tolerate noise      E5M2, more exponent
    wgrad   dW = dyᵀ @ x

FP8 hardware multiplies 8-bit operands twice as fast as 16-bit ones and accumulates in float32. E4M3
reaches only from 2^-9 to 448. So a tensor is first multiplied by a scale that moves its largest
magnitude, the amax, to the top of that range. The GEMM multiplies its result by the inverse scales.
The scaling algorithms differ in how many elements share a scale, and in where it comes from:

    delayed   a tensor           from the amaxes of past steps: one read, but wrong after a jump
    current   a tensor or row    from the amax of the tensor itself: two reads
    block     128 elements, or 128 x 128 of a weight: an outlier affects only its neighbors
    mxfp8     32 elements        a power of two in 8 bits
    nvfp4     16 4-bit elements  below a global scale of the tensor

Formats and scaling follow Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433,
and equal Transformer Engine 2.20 bit for bit. scaling.py names the source of each algorithm.
"""

from __future__ import annotations

from fp8cfg.numerics.amax import compute_amax
from fp8cfg.numerics.amax_update import Overflow, discard_amax, overflow, update_scales
from fp8cfg.numerics.autocast import Region
from fp8cfg.numerics.formats import E2M1, E4M3, E5M2, Format, cast
from fp8cfg.numerics.fp8_linear import FP8Linear, fp8_linears, seed_rounding
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD, GemmRecord, decode_gemm_record
from fp8cfg.numerics.scaling import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    Scaling,
    compute_scale,
    roll_amax_history,
)
from fp8cfg.numerics.stored_state import (
    high_precision_state_dict,
    in_stored_form,
    persistent,
    say_scales_anew,
    stored_state_dict,
)

__all__ = [
    "DGRAD",
    "E2M1",
    "E4M3",
    "E5M2",
    "FPROP",
    "FP8Linear",
    "Format",
    "GRAD_OUTPUT",
    "INPUT",
    "Overflow",
    "GemmRecord",
    "Region",
    "Scaling",
    "WEIGHT",
    "WGRAD",
    "compute_amax",
    "cast",
    "decode_gemm_record",
    "discard_amax",
    "fp8_linears",
    "high_precision_state_dict",
    "in_stored_form",
    "overflow",
    "persistent",
    "roll_amax_history",
    "say_scales_anew",
    "compute_scale",
    "seed_rounding",
    "stored_state_dict",
    "update_scales",
]
