"""Attention in FP8: causal scaled-dot-product attention with quantized operands, emulated in plain torch.

    P  = Q Kᵀ / √D       dS = dO Vᵀ        dQ = dP K / √D
    S  = softmax(P)      dV = Sᵀ dO        dK = dPᵀ Q / √D      (or another scale than 1 / √D)
    O  = S V             dP = S ∘ (dS - rowsum(S ∘ dS))

Quantized are, as where Transformer Engine 2.20 emulates its fused kernels (UnfusedDotProductAttention and FP8EmulationFunc in
pytorch/attention/dot_product_attention/backends.py): Q, K and V under one scale, S, and O, in the forward format; dO, dP,
and under one scale dQ, dK and dV, in that of gradients. The softmax and dP are computed in float32, from the S before
rounding. Where query heads share a key head, each has a dK and a dV of its own, which are summed after rounding.

Under delayed scaling each of the six has a history; under current scaling each is scaled from itself, S and dP never by a
power of two. Values are carried on the FP8 grid and quantized from float32, as everywhere in this package; Transformer
Engine's emulation rounds them to the layer's dtype between any two operations, which its kernels do not.

This is an emulation with explicit [T, T] matrices, not a flash kernel. They are made again in the backward pass and not
kept in between: one layer at a time takes some 12 bytes for each of B x heads x T x T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8cfg.numerics.amax import compute_amax, record_amax
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
    persistent,
)

QKV, S, OUT, DOUT, DP, DQKV = range(6)  # columns of the scales and the amax history
ROLES = (INPUT, INPUT, INPUT, GRAD_OUTPUT, GRAD_OUTPUT, GRAD_OUTPUT)
"""What each column is to `Scaling.format_of`."""
STATE = ("fp8_scale", "fp8_amax_history")
PRODUCTS = ("p", "o", "ds", "dv", "dq", "dk")
"""The six products by what they make, in the order of the record."""


class State(NamedTuple):
    """The buffers that the products read and write; `scales` under delayed scaling, `history` the amax record."""

    scales: Tensor | None
    history: Tensor
    ran: Tensor


class Plan(NamedTuple):
    """What one call does; static, so that a compiler specialises on it."""

    scaling: Scaling
    carrier: torch.dtype
    out: torch.dtype
    record: bool
    score_scale: float
    window: int | None

    def scale(self, column: int, state: State, *tensors: Tensor) -> Tensor:
        """The scale that all `tensors`, which share one column of the state, are quantized with; of what does not fit values are
        counted."""
        scale, fmt = self._scale(column, state, *tensors), self.scaling.format_of(ROLES[column])
        for t in tensors if self.record else ():
            count_out_of_range(t, ROLES[column], state.history[0, column], scale, fmt)
        return scale

    def _scale(self, column: int, state: State, *tensors: Tensor) -> Tensor:
        role = ROLES[column]
        t = tensors[0] if len(tensors) == 1 else torch.stack([compute_amax(t) for t in tensors])
        if state.scales is None:
            amax = compute_amax(t)
            if self.record:
                record_amax(state.history[0, column], amax)
            scale = compute_scale(amax, self.scaling.format_of(role).max)
            return (
                floor_to_power_of_2(scale)
                if self.scaling.power_2_scales and column not in (S, DP)
                else scale
            )
        first = column - role  # scale_now finds `role` in what it is given
        return choose_tensor_scale(
            t, role, self.scaling, state.scales[first:], state.history[:, first:], self.record
        )

    def quantize(self, column: int, t: Tensor, scale: Tensor) -> Operand:
        """`t` [..., C] as an operand in the format of its column."""
        made = quantize(
            t.reshape(-1, t.shape[-1]), scale, self.scaling.format_of(ROLES[column]), self.carrier
        )
        return made._replace(data=made.data.view(t.shape))


def product(a: Operand, b: Operand, state: State, name: str, factor: float = 1.0) -> Tensor:
    """a [..., M, K] @ b [..., K, N] x `factor` in float32, recorded in `state.ran` from the operands that it multiplies."""
    assert a.scale_inv is not None and b.scale_inv is not None
    state.ran[PRODUCTS.index(name)].fill_(encode_gemm_record(a, b))
    return (a.data.float() @ b.data.float()).mul_(a.scale_inv * b.scale_inv * factor)


def probabilities(q: Operand, k: Operand, state: State, plan: Plan) -> Tensor:
    """S before rounding, float32 [..., Tq, Tk]: the softmax over this and earlier tokens, as far back as the window is wide."""
    p = product(q, _t(k), state, "p", plan.score_scale)
    hidden = torch.ones(p.shape[-2:], dtype=torch.bool, device=p.device)
    hidden = hidden.triu(1) if plan.window is None else hidden.triu(1) | hidden.tril(-plan.window)
    return p.masked_fill_(hidden, -torch.inf).softmax(-1)


class AttentionFunction(torch.autograd.Function):
    """q [B, G, R, T, D], k and v [B, G, 1, T, D], the fields of State, Plan -> [B, G, R, T, D] of dtype `plan.out`, for G key
    heads with R query heads each."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        *buffers, plan = rest
        state = State(*buffers)
        scale = plan.scale(QKV, state, q, k, v)
        qs, ks, vs = (plan.quantize(QKV, t, scale) for t in (q, k, v))
        p = probabilities(qs, ks, state, plan)
        scale = plan.scale(
            S, state, p
        ).clone()  # the backward pass rounds with this one, whatever becomes of the buffer
        o = product(plan.quantize(S, p, scale), vs, state, "o")
        ctx.save_for_backward(qs.data, ks.data, vs.data, qs.scale_inv, scale)
        ctx.fmt, ctx.state, ctx.plan, ctx.dtypes = qs.fmt, state, plan, (q.dtype, k.dtype, v.dtype)
        return _values(plan.quantize(OUT, o, plan.scale(OUT, state, o)), plan.out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *data, scale_inv, s_scale = ctx.saved_tensors
        q, k, v = (Operand(t, scale_inv, ctx.fmt) for t in data)
        plan, state, root = ctx.plan, ctx.state, ctx.plan.score_scale
        with torch.autocast(g.device.type, enabled=False):
            do = plan.quantize(DOUT, g, plan.scale(DOUT, state, g))
            p = probabilities(q, k, state, plan)
            ds = product(do, _t(v), state, "ds")
            dv = product(
                _t(do), plan.quantize(S, p, s_scale), state, "dv"
            ).mT  # the gradient first, as in wgrad
            grad = ds.sub_((p * ds).sum(-1, keepdim=True)).mul_(p)
            dp = plan.quantize(DP, grad, plan.scale(DP, state, grad))
            dq, dk = product(dp, k, state, "dq", root), product(_t(dp), q, state, "dk", root)
            scale = plan.scale(DQKV, state, dq, dk, dv)
            dq, dk, dv = (
                _values(plan.quantize(DQKV, t, scale), torch.float32) for t in (dq, dk, dv)
            )
        grads = dq, dk.sum(2, keepdim=True), dv.sum(2, keepdim=True)
        return (
            *(t.to(dtype) for t, dtype in zip(grads, ctx.dtypes, strict=True)),
            *(None for _ in state),
            None,
        )


class FP8Attention(nn.Module):
    """softmax(q kᵀ / √D) v, causal, with products in FP8 while its region is active, and as `plain` computes it otherwise: torch's
    scaled dot product where nothing is given. `plain` may have a `scale` in the place of 1 / √D and a sliding `window`.

    q [B, H, T, D] and k, v [B, G, T, D] of any float dtype, H a multiple of G; output [B, H, T, D] in the autocast dtype, else
    in that of q. `gemms_ran`, int32 [6] in the order of PRODUCTS, holds what each product last multiplied, 0 after a
    training pass in high precision. Under delayed scaling `fp8_scale` [6] and `fp8_amax_history` [length, 6] work as in FP8Linear,
    with the columns QKV, S, O, dO, dP, dQKV. A load that lacks them is a load of new weights and forgets them.
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
        """Raises ValueError for a scaling with more than one scale a tensor, and for a `plain` with a soft cap."""
        super().__init__()
        if scaling.tile(INPUT, 1) is not None:
            raise ValueError(
                "FP8 attention has delayed or current scaling by one scale a tensor, not"
                f" {scaling.kind} by {scaling.granularity}"
            )
        if getattr(plain, "softcap", None) is not None:
            raise ValueError("FP8 attention knows no soft cap of its scores")
        self.scaling, self.region = scaling, region
        self.scale, self.window = getattr(plain, "scale", None), getattr(plain, "window", None)
        self._plain = (plain,)  # no module of this one: it has no state
        self.register_buffer(
            "gemms_ran",
            torch.zeros(len(PRODUCTS), dtype=torch.int32, device=device),
            persistent=False,
        )
        state = self.fresh_state()
        for name in STATE:
            self.register_buffer(name, state.get(name), persistent=False)
        amax = None if state else torch.zeros(1, len(ROLES), dtype=torch.float32, device=device)
        self.register_buffer(AMAX, amax, persistent=False)

    def fresh_state(self) -> dict[str, Tensor]:
        """See `Scaling.fresh_state`."""
        return self.scaling.fresh_state(len(ROLES), self.gemms_ran.device)

    def clear_gemms_ran(self) -> None:
        """Forget which products ran."""
        self.gemms_ran.zero_()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.region.applies():
            if (
                self.training and torch.is_grad_enabled()
            ):  # an evaluation in high precision is not recorded
                self.gemms_ran.zero_()
            if self._plain[0] is not None:
                plain: Tensor = self._plain[0](q, k, v)
                return plain
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        device = q.device.type
        out = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
        carrier = torch.bfloat16 if out == torch.bfloat16 else torch.float32
        window = self.window if self.window is not None and self.window < q.shape[-2] else None
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        plan = Plan(self.scaling, carrier, out, torch.is_grad_enabled(), scale, window)
        state = State(self.fp8_scale, amax_record(self), self.gemms_ran)
        groups = k.shape[1]
        grouped = (
            q.reshape(len(q), groups, q.shape[1] // groups, *q.shape[2:]),
            k.unsqueeze(2),
            v.unsqueeze(2),
        )
        with torch.autocast(device, enabled=False):
            o: Tensor = AttentionFunction.apply(*grouped, *state, plan)
        return o.flatten(1, 2)

    def extra_repr(self) -> str:
        return (
            f"{self.scaling.kind} {self.scaling.forward.name}/{self.scaling.backward.name}, emulate"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Attention:
        """Moves the state between devices and never casts it: `model.bfloat16()` must not round scales."""

        def move(t: Tensor) -> Tensor:
            new = fn(t)
            return new if new.dtype == t.dtype else t.to(new.device)

        super()._apply(move, recurse)
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


def _t(operand: Operand) -> Operand:
    return operand._replace(data=operand.data.mT)


def _values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """The dequantized values of a tensor in `dtype`, rounded once."""
    assert operand.scale_inv is not None
    return convert_dtype(operand.data.float() * operand.scale_inv, dtype)
