"""Autograd function of the FP8 linear layer: fprop, dgrad and wgrad in plain torch operations.

    fprop   y  [T, out] = x  [T, in]    W  [out, in]    both contract their second dimension
    dgrad   dx [T, in]  = dy [T, out]   Wᵀ [in, out]    the weight contracts its first dimension
    wgrad   dW [out, in] = dyᵀ [out, T] xᵀ [in, T]      gradient and input contract their first

With one scale a tensor each tensor is quantized once: the input and the weight in the forward pass, both kept for the
backward pass in that form; the incoming gradient once, for dgrad and wgrad together. Scales along the contracted dimension
make it once for each dimension. Each product may be kept in high precision by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.fp8_weights import Stored, dequantize
from fp8cfg.numerics.fp8_weights import operand as stored_operand
from fp8cfg.numerics.fused_quantize import fuses, fuses_tiles, quantize_fused, quantize_tiles_fused
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD, gemm
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.nvfp4 import quantize_nvfp4
from fp8cfg.numerics.quantize import quantize, quantize_tiles
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Scaling, scale_now
from fp8cfg.numerics.unfused_counts import count_values

Products = tuple[bool, bool, bool]  # one flag for each of fprop, dgrad, wgrad
CONTRACTED = {
    (INPUT, FPROP): 1,
    (WEIGHT, FPROP): 1,
    (GRAD_OUTPUT, DGRAD): 1,
    (WEIGHT, DGRAD): 0,
    (GRAD_OUTPUT, WGRAD): 0,
    (INPUT, WGRAD): 0,
}
"""The dimension of each tensor, as stored, over which a product sums."""


class State(NamedTuple):
    """The buffers that the products of a layer read and write: the fields of `Stored` where the weight is float8, the first two
    where it is in a codec, `scales` under delayed scaling, `history` the amax record, `rounding_*` where gradients are rounded
    stochastically. What the backward pass writes is apart.
    """

    stored: Tensor | None
    stored_scale_inv: Tensor | None
    stored_dgrad: Tensor | None
    stored_dgrad_scale_inv: Tensor | None
    stored_global_scale_inv: Tensor | None
    scales: Tensor | None
    history: Tensor
    backward_history: Tensor
    rounding_key: Tensor | None
    rounding_count: Tensor | None
    ran: Tensor
    backward_ran: Tensor

    @property
    def weight(self) -> Stored | None:
        """The float8 weight, if there is one."""
        if self.stored is None or self.stored_scale_inv is None:
            return None
        return Stored(self.stored, self.stored_scale_inv, *self[2:5])

    def in_backward(self, stored: Tensor | None) -> State:
        """What a backward pass reads and writes; `stored` is the weight that it saved."""
        return self._replace(stored=stored, history=self.backward_history, ran=self.backward_ran)

    @property
    def random(self) -> tuple[Tensor, Tensor] | None:
        """The random stream of stochastic rounding."""
        return (
            None
            if self.rounding_key is None or self.rounding_count is None
            else (self.rounding_key, self.rounding_count)
        )


class Plan(NamedTuple):
    """The configuration of one call; static, so that a compiler specialises on it."""

    scaling: Scaling
    high_precision: Products
    carrier: torch.dtype | None  # of emulated operands; None multiplies float8 tensors
    out: torch.dtype
    weight_grad: torch.dtype
    record: bool
    codec: Codec | None = None  # that the weight is held in
    trains: bool = True  # an evaluation in high precision is not recorded
    parts: AmaxGroup | None = None  # of whose amaxes scales are made in this pass
    kept: tuple[Any, Any] = (
        None,
        None,
    )  # format and tile of the weight as fprop and dgrad read it, where it is at hand so

    def operands(
        self, role: int, slots: Sequence[int], make: Callable[[bool, int, bool], Operand]
    ) -> dict[int, Operand]:
        """The operand of `role` in each product of `slots`, contracted dimension last. `make` gives it in high precision or in
        FP8, for a product that contracts the given dimension, or for products that contract either; it is called once where
        products can share."""
        both = {CONTRACTED[role, slot] for slot in slots if not self.high_precision[slot]} == {0, 1}
        made: dict[tuple[bool, int], Operand] = {}
        found = {}
        for slot in slots:
            high, axis = self.high_precision[slot], CONTRACTED[role, slot]
            if axis == 0 and (high, 1) in made and made[high, 1].other is not None:
                found[slot] = made[high, 1].t()
                continue
            key = high, axis if self.scaling.directional(role) and not high else 1
            if key not in made:
                made[key] = make(high, key[1], both)
            found[slot] = made[key] if axis == 1 else made[key].t()
        return found

    def operand(
        self, t: Tensor, role: int, state: State, high_precision: bool, axis: int, both: bool
    ) -> Operand:
        """`t` as stored, quantized along its dimension `axis` where that matters; `both` dimensions will be contracted."""
        if high_precision:
            return Operand(t.to(self.out))
        fmt, tile = self.scaling.format_of(role), self.scaling.tile(role, axis)
        seen = (
            state.history if self.record and (axis == 1 or not both) else None
        )  # once, where it is quantized along both
        if tile is None and fuses(t, self.scaling, self.carrier):
            return quantize_fused(
                t, role, self.scaling, state.scales, state.history, self.record, both, self.parts
            )
        if tile is None:
            scale = scale_now(
                t, role, self.scaling, state.scales, state.history, self.record, self.parts
            )
            if self.record:
                count_values(t, role, state.history[0, role], scale, fmt)
            return quantize(t, scale, fmt, self.carrier or fmt.dtype)
        if fuses_tiles(t, tile, self.scaling, self.carrier):
            return quantize_tiles_fused(t, role, self.scaling, axis, both, seen, self.parts)
        if self.scaling.layout.two_levels:
            return quantize_nvfp4(
                t, role, axis, self.scaling, self.carrier, state.random, seen, self.parts, both
            )
        record, group = (
            None if seen is None else seen[0, role],
            self.parts and self.parts.over(role, tile),
        )
        made = quantize_tiles(
            t, tile, fmt, self.scaling, self.carrier or fmt.dtype, record=record, group=group
        )
        if record is not None:
            count_values(t, role, record, None, fmt)
        return made

    def weights(
        self, w: Tensor, state: State, kept: Sequence[Tensor | None], slots: Sequence[int]
    ) -> dict[int, Operand]:
        """The weight in each product of `slots`: what is `kept` of it (weight_workspace.py), and what is left to be made."""
        at_hand = {
            FPROP: Operand.of(kept[:3], self.kept[0]),
            DGRAD: Operand.of(kept[3:], self.kept[1]),
        }
        found = {
            slot: operand
            for slot, operand in at_hand.items()
            if operand is not None and slot in slots
        }
        left = [slot for slot in slots if slot not in found]
        return {**found, **self.operands(WEIGHT, left, lambda *how: self.weight(w, state, *how))}

    def weight(
        self, w: Tensor, state: State, high_precision: bool, axis: int, both: bool
    ) -> Operand:
        if self.codec is not None:
            held = tuple(t for t in state[:2] if t is not None)
            return self.operand(self.codec.decode(held), WEIGHT, state, high_precision, axis, both)
        stored = state.weight
        if stored is None:
            return self.operand(w, WEIGHT, state, high_precision, axis, both)
        if high_precision:
            return Operand(dequantize(stored, self.out))
        return stored_operand(stored, axis, self.scaling, self.carrier)


class LinearFunction(torch.autograd.Function):
    """x [T, in], w [out, in], bias [out] or None, the fields of State, the tensors of a weight that is kept quantized, Plan ->
    [T, out] of dtype `plan.out`. Where `stored` is the weight, `w` only receives the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        (*buffers, plan), (needs_dx, needs_dw) = rest, ctx.needs_input_grad[:2]
        state, kept_weight = State._make(buffers[:-6]), buffers[-6:]
        xs = plan.operands(
            INPUT, [FPROP] + [WGRAD] * needs_dw, lambda *how: plan.operand(x, INPUT, state, *how)
        )
        ws = plan.weights(w, state, kept_weight, [FPROP] + [DGRAD] * needs_dx)
        ran = state.ran if plan.trains or not plan.high_precision[FPROP] else None
        y = gemm(xs[FPROP], ws[FPROP], plan.out, ran, FPROP, bias)
        # A weight that is held in fewer bits is at hand in the backward pass too, so nothing else is saved of it. The buffers
        # travel as attributes and not as saved tensors: a second forward pass may change them before the first backward pass.
        reads_again = (
            plan.kept[1] is None
            and state.stored is not None
            and (plan.codec is None or plan.high_precision[DGRAD])
        )
        kept = xs.get(WGRAD), None if reads_again else ws.get(DGRAD)
        ctx.save_for_backward(
            *(t for operand in kept for t in (operand.tensors if operand else (None,) * 3)),
            state.stored,
        )
        ctx.kinds = [operand and (operand.fmt, operand.tile) for operand in kept]
        ctx.state, ctx.plan = state._replace(stored=None), plan
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *saved, stored = ctx.saved_tensors
        x, w = Operand.of(saved[:3], ctx.kinds[0]), Operand.of(saved[3:], ctx.kinds[1])
        plan, state = ctx.plan, ctx.state.in_backward(stored)
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx, dw, db = None, None, None
        with torch.autocast(g.device.type, enabled=False):
            wanted = [DGRAD] * needs_dx + [WGRAD] * needs_dw
            gs = plan.operands(
                GRAD_OUTPUT, wanted, lambda *how: plan.operand(g, GRAD_OUTPUT, state, *how)
            )
            if needs_dx:
                if w is None:
                    w = plan.operands(
                        WEIGHT, [DGRAD], lambda *how: plan.weight(saved[3], state, *how)
                    )[DGRAD]
                dx = gemm(gs[DGRAD], w, ctx.dtypes[0], state.ran, DGRAD)
            if needs_dw:
                assert x is not None
                dw = gemm(gs[WGRAD], x, plan.weight_grad, state.ran, WGRAD)
            if state.rounding_count is not None:
                state.rounding_count.add_(
                    1
                )  # here, once for each backward pass: a recomputed forward pass draws nothing
            if needs_db:
                db = g.sum(0).to(ctx.dtypes[1])
        return dx, dw, db, *(None,) * (len(state) + 6), None
