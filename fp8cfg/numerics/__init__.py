"""FP8 arithmetic in plain torch: formats, scalings, quantization, GEMMs and the FP8 linear layer. Read formats, scaling,
quantize, gemm, fp8_linear, amax_update.

A linear layer y = x Wᵀ multiplies three times in one training step:

    fprop   y  = x  @ Wᵀ      activations and weights: many values of similar size     -> E4M3, more mantissa
    dgrad   dx = dy @ W       gradients span many powers of two and tolerate noise     -> E5M2, more exponent
    wgrad   dW = dyᵀ @ x

Hardware with FP8 multiplies eight-bit operands twice as fast as sixteen-bit ones and accumulates in float32. Eight bits
reach only from 2^-9 to 448 (E4M3), so a tensor is first multiplied by a *scale* that brings its largest magnitude, the
*amax*, to the top of that range, and the product is multiplied by the inverse scales. The scalings differ in how many
elements share a scale, and in where it comes from:

    delayed   one a tensor, predicted from the amaxes of the steps before: no extra pass over memory, wrong after a jump
    current   one a tensor (or a row), from the amax of this very tensor: one more pass
    block     one for 128 elements, for 128x128 of a weight: an outlier costs its neighbours alone, so E4M3 everywhere
    mxfp8     one for 32 elements, a power of two in eight bits
    nvfp4     one for 16 elements of four bits, under one for the tensor

Format pairing and scaling follow Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433, and to the bit
Transformer Engine 2.20 (common/recipe/delayed_scaling.cu, common/recipe/recipe_common.cuh); scaling.py and quantize.py name the
sources of the other scalings.
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
