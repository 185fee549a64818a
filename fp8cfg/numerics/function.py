"""The three products of a linear layer as one autograd function of plain torch operations.

Each tensor is quantized once: the input and the weight in the forward pass, both kept for the backward pass in that form;
the incoming gradient once, for dgrad and wgrad together. Each product may be kept in high precision by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8cfg.numerics.formats import BY_DTYPE, widen
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD, Operand, gemm, quantize
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Scaling, scale_now
from fp8cfg.numerics.state import dequantize

Products = tuple[bool, bool, bool]  # one flag for each of fprop, dgrad, wgrad


class State(NamedTuple):
    """The buffers of a layer that its products read and write. `stored` and its scale are set where the weight is float8,
    `scales` and `history` under delayed scaling."""

    stored: Tensor | None
    stored_scale: Tensor | None
    scales: Tensor | None
    history: Tensor | None
    ran: Tensor


class Plan(NamedTuple):
    """What one call does; static, so that a compiler specialises on it."""

    scaling: Scaling
    high_precision: Products
    carrier: torch.dtype | None  # of emulated operands; None multiplies float8 tensors
    out: torch.dtype
    weight_grad: torch.dtype
    record: bool

    def operands(self, slots: Sequence[int], make: Callable[[bool], Operand]) -> dict[int, Operand]:
        """The operand of each product in `slots`, made once in FP8 and once in high precision at most."""
        made = {high: make(high) for high in {self.high_precision[slot] for slot in slots}}
        return {slot: made[self.high_precision[slot]] for slot in slots}

    def operand(self, t: Tensor, role: int, state: State, high_precision: bool) -> Operand:
        if high_precision:
            return Operand(t.to(self.out))
        fmt = self.scaling.format_of(role)
        scale = scale_now(t, role, self.scaling, state.scales, state.history, self.record)
        return quantize(t, scale, fmt, self.carrier or fmt.dtype)

    def weight(self, w: Tensor, state: State, high_precision: bool) -> Operand:
        stored, scale = state.stored, state.stored_scale
        if stored is None or scale is None:
            return self.operand(w, WEIGHT, state, high_precision)
        if high_precision:
            return Operand(dequantize(stored, scale, self.out))
        return Operand(widen(stored, self.carrier) if self.carrier else stored, scale.reciprocal(), BY_DTYPE[stored.dtype])


class LinearFunction(torch.autograd.Function):
    """x [T, in], w [out, in], bias [out] or None, the fields of State, Plan -> [T, out] of dtype `plan.out`. With a float8
    weight `w` only receives the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        stored: Tensor | None,
        stored_scale: Tensor | None,
        scales: Tensor | None,
        history: Tensor | None,
        ran: Tensor,
        plan: Plan,
    ) -> Tensor:
        state, (needs_dx, needs_dw) = State(stored, stored_scale, scales, history, ran), ctx.needs_input_grad[:2]
        xs = plan.operands([FPROP] + [WGRAD] * needs_dw, lambda high: plan.operand(x, INPUT, state, high))
        ws = plan.operands([FPROP] + [DGRAD] * needs_dx, lambda high: plan.weight(w, state, high))
        y = gemm(xs[FPROP], ws[FPROP], plan.out, ran, FPROP, bias)
        # Eight-bit weights are at hand in the backward pass too, so nothing wider is kept of them. The buffers travel as
        # attributes and not as saved tensors: a second forward pass may change them before the first backward pass.
        kept = xs.get(WGRAD), ws.get(DGRAD) if stored is None else None
        ctx.save_for_backward(*(part for operand in kept for part in (operand[:2] if operand else (None, None))), stored)
        ctx.fmts = [operand and operand.fmt for operand in kept]
        ctx.stored_scale, ctx.scales, ctx.history, ctx.ran, ctx.plan = stored_scale, scales, history, ran, plan
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, x_inv, w, w_inv, stored = ctx.saved_tensors
        plan, state = ctx.plan, State(stored, ctx.stored_scale, ctx.scales, ctx.history, ctx.ran)
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx, dw, db = None, None, None
        with torch.autocast(g.device.type, enabled=False):
            gs = plan.operands([DGRAD] * needs_dx + [WGRAD] * needs_dw, lambda high: plan.operand(g, GRAD_OUTPUT, state, high))
            if needs_dx:
                kept = Operand(w, w_inv, ctx.fmts[1]) if stored is None else plan.weight(stored, state, plan.high_precision[DGRAD])
                dx = gemm(gs[DGRAD], kept.t(), ctx.dtypes[0], state.ran, DGRAD)
            if needs_dw:
                dw = gemm(gs[WGRAD].t(), Operand(x, x_inv, ctx.fmts[0]).t(), plan.weight_grad, state.ran, WGRAD)
            if needs_db:
                db = g.sum(0).to(ctx.dtypes[1])
        return dx, dw, db, None, None, None, None, None, None
