"""FP8 attention: causal scaled-dot-product attention with quantized operands, emulated in plain torch.

    P  = Q Kᵀ / √D       dS = dO Vᵀ        dQ = dP K / √D
    S  = softmax(P)      dV = Sᵀ dO        dK = dPᵀ Q / √D      (or another scale than 1 / √D)
    O  = S V             dP = S ∘ (dS - rowsum(S ∘ dS))

Transformer Engine 2.20 quantizes the same tensors where it emulates its fused kernels
(UnfusedDotProductAttention and FP8EmulationFunc in
pytorch/attention/dot_product_attention/backends.py):

    forward format    Q, K and V under one scale; S; O
    gradient format   dO; dP; dQ, dK and dV under one scale

The softmax and dP are computed in float32, from S before rounding. If query heads share a key head, each
has its own dK and dV, which are summed after rounding.

Delayed scaling keeps a history for each of the six. Current scaling scales each by its own amax; S and
dP never by a power of two. Values are quantized from float32, as everywhere in this package.
Transformer Engine's emulation, unlike its kernels, rounds them to the layer's dtype between any two
operations.

This emulation has explicit [T, T] matrices; it is not a flash kernel. The backward pass computes them
again instead of saving them: one layer at a time takes some 12 bytes for each of B x heads x T x T.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8cfg.numerics.amax import compute_amax, keep_overflow, record_amax
from fp8cfg.numerics.autocast import Region
from fp8cfg.numerics.gemm import Operand, convert_dtype, encode_gemm_record
from fp8cfg.numerics.quantize import count_out_of_range, quantize
from fp8cfg.numerics.scaling import (
    GRAD_OUTPUT,
    INPUT,
    Scaling,
    choose_tensor_scale,
    compute_scale,
    floor_to_power_of_2,
)
from fp8cfg.numerics.stored_state import (
    AMAX,
    amax_record,
    complete_delayed,
    in_stored_form,
    move_without_cast,
    persistent,
)

QKV, S, OUT, DOUT, DP, DQKV = range(6)  # columns of the scales and the amax history
ROLES = (INPUT, INPUT, INPUT, GRAD_OUTPUT, GRAD_OUTPUT, GRAD_OUTPUT)
"""Role of each column in the scaling. It decides the format."""
STATE = ("fp8_scale", "fp8_amax_history")
PRODUCTS = ("p", "o", "ds", "dv", "dq", "dk")
"""The six GEMMs by their results, in the order of the record."""


class AttentionBuffers(NamedTuple):
    """Buffers that a pass reads and writes.

    Attributes:
        scales: float32 [6], the scales of delayed scaling, else None.
        amax: float32 [rows, 6]; row 0 receives the amaxes of this pass.
        gemms_ran: int32 [6]; receives what each GEMM multiplied.
    """

    scales: Tensor | None
    amax: Tensor
    gemms_ran: Tensor


class AttentionCall(NamedTuple):
    """Configuration of one call. It is static: a compiler specializes on it.

    Attributes:
        scaling: The scaling.
        carrier: Dtype that holds FP8 values.
        output_dtype: Dtype of the output.
        record_amax: Whether the pass counts for later scales.
        score_scale: Factor of the scores, usually 1 / √D.
        window: Tokens that a token attends to, None for all earlier ones.
    """

    scaling: Scaling
    carrier: torch.dtype
    output_dtype: torch.dtype
    record_amax: bool
    score_scale: float
    window: int | None

    def choose_scale(self, column: int, buffers: AttentionBuffers, *tensors: Tensor) -> Tensor:
        """Returns the scale, float32 [], of tensors that share a column. Counts their overflow."""
        scale = self._choose_scale(column, buffers, *tensors)
        if self.record_amax:
            role = ROLES[column]
            fmt = self.scaling.format_of(role)
            for tensor in tensors:
                count_out_of_range(tensor, role, buffers.amax[0, column], scale, fmt)
        return scale

    def _choose_scale(self, column: int, buffers: AttentionBuffers, *tensors: Tensor) -> Tensor:
        role = ROLES[column]
        # The amax of several tensors is the amax of their amaxes.
        tensor = tensors[0]
        if len(tensors) > 1:
            tensor = torch.stack([compute_amax(tensor) for tensor in tensors])
        if buffers.scales is not None:
            # choose_tensor_scale reads column `role` of what it gets.
            first = column - role
            return choose_tensor_scale(
                tensor,
                role,
                self.scaling,
                buffers.scales[first:],
                buffers.amax[:, first:],
                self.record_amax,
            )
        amax = compute_amax(tensor)
        if self.record_amax:
            record_amax(buffers.amax[0, column], amax)
        scale = compute_scale(amax, self.scaling.format_of(role).max)
        if self.scaling.power_2_scales and column not in (S, DP):
            scale = floor_to_power_of_2(scale)
        return scale

    def quantize(self, column: int, tensor: Tensor, scale: Tensor) -> Operand:
        """Quantizes `tensor` [..., C] to the format of its column."""
        fmt = self.scaling.format_of(ROLES[column])
        operand = quantize(tensor.reshape(-1, tensor.shape[-1]), scale, fmt, self.carrier)
        return operand._replace(data=operand.data.view(tensor.shape))


def attention_gemm(
    a: Operand, b: Operand, buffers: AttentionBuffers, name: str, factor: float = 1.0
) -> Tensor:
    """Computes a [..., M, K] @ b [..., K, N] * factor in float32 and records its operands."""
    assert a.scale_inv is not None and b.scale_inv is not None
    buffers.gemms_ran[PRODUCTS.index(name)].fill_(encode_gemm_record(a, b))
    return (a.data.float() @ b.data.float()).mul_(a.scale_inv * b.scale_inv * factor)


def compute_probabilities(
    query: Operand, key: Operand, buffers: AttentionBuffers, call: AttentionCall
) -> Tensor:
    """Computes S before rounding, float32 [..., Tq, Tk]: the causal softmax inside the window."""
    scores = attention_gemm(query, _transpose(key), buffers, "p", call.score_scale)
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    is_masked = ones.triu(1)
    if call.window is not None:
        is_masked = is_masked | ones.tril(-call.window)
    return scores.masked_fill_(is_masked, -torch.inf).softmax(-1)


class AttentionFunction(torch.autograd.Function):
    """Forward and backward pass for G key heads with R query heads each."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        buffers: AttentionBuffers,
        call: AttentionCall,
    ) -> Tensor:
        """Computes the output [B, G, R, T, D] in `call.output_dtype`.

        Args:
            ctx: Autograd's context.
            query: Queries [B, G, R, T, D].
            key: Keys [B, G, 1, T, D].
            value: Values [B, G, 1, T, D].
            buffers: The buffers of the layer.
            call: The configuration.
        """
        qkv_scale = call.choose_scale(QKV, buffers, query, key, value)
        q = call.quantize(QKV, query, qkv_scale)
        k = call.quantize(QKV, key, qkv_scale)
        v = call.quantize(QKV, value, qkv_scale)
        s = compute_probabilities(q, k, buffers, call)
        # The backward pass rounds S with this scale, even if the buffer has changed by then.
        s_scale = call.choose_scale(S, buffers, s).clone()
        o = attention_gemm(call.quantize(S, s, s_scale), v, buffers, "o")
        ctx.save_for_backward(q.data, k.data, v.data, q.scale_inv, s_scale)
        ctx.fmt = q.fmt
        ctx.buffers = buffers
        ctx.call = call
        ctx.dtypes = query.dtype, key.dtype, value.dtype
        output = call.quantize(OUT, o, call.choose_scale(OUT, buffers, o))
        return _dequantize(output, call.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call, buffers = ctx.call, ctx.buffers
        q_data, k_data, v_data, qkv_scale_inv, s_scale = ctx.saved_tensors
        q = Operand(q_data, qkv_scale_inv, ctx.fmt)
        k = Operand(k_data, qkv_scale_inv, ctx.fmt)
        v = Operand(v_data, qkv_scale_inv, ctx.fmt)
        with torch.autocast(grad_output.device.type, enabled=False):
            do_scale = call.choose_scale(DOUT, buffers, grad_output)
            do = call.quantize(DOUT, grad_output, do_scale)
            s = compute_probabilities(q, k, buffers, call)
            ds = attention_gemm(do, _transpose(v), buffers, "ds")
            # The gradient comes first, as in wgrad.
            s_fp8 = call.quantize(S, s, s_scale)
            dv = attention_gemm(_transpose(do), s_fp8, buffers, "dv").mT
            # dP = S ∘ (dS - rowsum(S ∘ dS)), in place: [T, T] matrices are large.
            dp_values = ds.sub_((s * ds).sum(-1, keepdim=True)).mul_(s)
            dp = call.quantize(DP, dp_values, call.choose_scale(DP, buffers, dp_values))
            dq = attention_gemm(dp, k, buffers, "dq", call.score_scale)
            dk = attention_gemm(_transpose(dp), q, buffers, "dk", call.score_scale)
            scale = call.choose_scale(DQKV, buffers, dq, dk, dv)
            dq = _dequantize(call.quantize(DQKV, dq, scale), torch.float32)
            dk = _dequantize(call.quantize(DQKV, dk, scale), torch.float32)
            dv = _dequantize(call.quantize(DQKV, dv, scale), torch.float32)
        query_dtype, key_dtype, value_dtype = ctx.dtypes
        gradients = (
            dq.to(query_dtype),
            dk.sum(2, keepdim=True).to(key_dtype),
            dv.sum(2, keepdim=True).to(value_dtype),
        )
        if grad_output.dtype == torch.float16 and grad_output.numel():
            keep_overflow(grad_output, *gradients)
        return *gradients, None, None


class FP8Attention(nn.Module):
    """Causal attention with FP8 GEMMs while its region is active.

    Otherwise `plain` computes it, by default torch's scaled dot product. The output has the dtype of
    torch.autocast if that is on, otherwise the dtype of the queries.

    Under delayed scaling `fp8_scale` [6] and `fp8_amax_history` [length, 6] work as in FP8Linear, with
    the columns QKV, S, O, dO, dP, dQKV. A load without them is a load of new weights and resets them.

    Attributes:
        gemms_ran: int32 [6] in the order of PRODUCTS: what each GEMM multiplied last, 0 after a
            training pass in high precision.
        range_used: float32 [6], amaxes of the last step relative to the range of their scales.
    """

    gemms_ran: Tensor
    fp8_scale: Tensor | None
    fp8_amax_history: Tensor | None
    fp8_amax: Tensor | None
    range_used: Tensor | None = None

    def __init__(
        self,
        scaling: Scaling,
        region: Region,
        device: torch.device | None = None,
        plain: nn.Module | None = None,
    ) -> None:
        """Creates the layer.

        Args:
            scaling: Delayed or current scaling with one scale per tensor.
            region: The autocast region of the model.
            device: Device of the buffers.
            plain: The layer that this one replaces. It may have a `scale` other than 1 / √D and a
                sliding `window`.

        Raises:
            ValueError: The scaling has several scales per tensor, or `plain` has a soft cap.
        """
        super().__init__()
        if scaling.tile(INPUT, 1) is not None:
            raise ValueError(
                "FP8 attention needs delayed or current scaling with one scale per tensor, not"
                f" {scaling.kind} scaling per {scaling.granularity}"
            )
        if getattr(plain, "softcap", None) is not None:
            raise ValueError("FP8 attention does not support a soft cap")
        self.scaling = scaling
        self.region = region
        self.scale = getattr(plain, "scale", None)
        self.window = getattr(plain, "window", None)
        # In a tuple, so that it is not a submodule: it has no state.
        self._plain = (plain,)
        gemms_ran = torch.zeros(len(PRODUCTS), dtype=torch.int32, device=device)
        self.register_buffer("gemms_ran", gemms_ran, persistent=False)
        state = self.fresh_state()
        for name in STATE:
            self.register_buffer(name, state.get(name), persistent=False)
        # Under delayed scaling row 0 of the history is the amax record.
        amax = None
        if not state:
            amax = torch.zeros(1, len(ROLES), dtype=torch.float32, device=device)
        self.register_buffer(AMAX, amax, persistent=False)

    def fresh_state(self) -> dict[str, Tensor]:
        """Returns the delayed-scaling state of a new layer, see `Scaling.fresh_state`."""
        return self.scaling.fresh_state(len(ROLES), self.gemms_ran.device)

    def clear_gemms_ran(self) -> None:
        """Clears the record of GEMMs."""
        self.gemms_ran.zero_()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes attention.

        Args:
            q: Queries [B, H, T, D] of any float dtype.
            k: Keys [B, G, T, D]. H is a multiple of G.
            v: Values [B, G, T, D].

        Returns:
            Output [B, H, T, D].
        """
        if not self.region.applies():
            # Evaluations in high precision are not recorded.
            if self.training and torch.is_grad_enabled():
                self.gemms_ran.zero_()
            return self._high_precision(q, k, v)
        device = q.device.type
        output_dtype = q.dtype
        if torch.is_autocast_enabled(device):
            output_dtype = torch.get_autocast_dtype(device)
        carrier = torch.float32
        if output_dtype == torch.bfloat16:
            carrier = torch.bfloat16
        window = self.window
        if window is not None and window >= q.shape[-2]:
            window = None
        score_scale = self.scale
        if score_scale is None:
            score_scale = q.shape[-1] ** -0.5
        call = AttentionCall(
            self.scaling, carrier, output_dtype, torch.is_grad_enabled(), score_scale, window
        )
        buffers = AttentionBuffers(self.fp8_scale, amax_record(self), self.gemms_ran)
        num_key_heads = k.shape[1]
        num_query_heads = q.shape[1] // num_key_heads
        grouped_q = q.reshape(len(q), num_key_heads, num_query_heads, *q.shape[2:])
        with torch.autocast(device, enabled=False):
            output: Tensor = AttentionFunction.apply(
                grouped_q, k.unsqueeze(2), v.unsqueeze(2), buffers, call
            )
        return output.flatten(1, 2)

    def _high_precision(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (plain,) = self._plain
        if plain is not None:
            output: Tensor = plain(q, k, v)
            return output
        has_groups = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=has_groups)

    def extra_repr(self) -> str:
        formats = f"{self.scaling.forward.name}/{self.scaling.backward.name}"
        return f"{self.scaling.kind} {formats}, emulate"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Attention:
        """Moves buffers between devices, but never casts them: `model.bfloat16()` keeps scales."""
        super()._apply(partial(move_without_cast, fn), recurse)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        with persistent(self, STATE, in_stored_form()):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        complete_delayed(self, state_dict, prefix)
        with persistent(self, STATE):
            super()._load_from_state_dict(state_dict, prefix, *rest)


def _transpose(operand: Operand) -> Operand:
    return operand._replace(data=operand.data.mT)


def _dequantize(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Returns the values of an operand in `dtype`, rounded once."""
    assert operand.scale_inv is not None
    return convert_dtype(operand.data.float() * operand.scale_inv, dtype)
