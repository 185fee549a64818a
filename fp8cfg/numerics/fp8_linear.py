"""FP8Linear: nn.Linear with quantized GEMMs, its state in plain buffers; no tensor subclass, no process-wide state.

Delayed scaling needs memory between steps. Row 0 of `fp8_amax_history`, with what backward passes saw (stored_state.py), is a
running maximum since the last `update_scales`, and nothing else moves in a forward or backward pass. A maximum taken twice is
the same maximum, so recomputing activations, accumulating gradients and evaluating in between need no special case.
(Transformer Engine rolls at the end of each forward pass instead, and stashes scales for the recomputation.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8cfg.numerics.amax import AmaxGroup
from fp8cfg.numerics.autocast import Region
from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.formats import RandomStream, random_key
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, FP8Weight, dequantize, stored_operand
from fp8cfg.numerics.fsdp_weights import (
    GatheredWeight,
    ShardPlace,
    ShardScales,
    quantized_shard,
    shard_parameter,
)
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD, Operand, gemm
from fp8cfg.numerics.kernels.launch import (
    can_fuse_tensor,
    can_fuse_tiles,
    quantize_tensor_fused,
    quantize_tiles_fused,
)
from fp8cfg.numerics.quantize import count_out_of_range, quantize, quantize_nvfp4, quantize_tiles
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Scaling, choose_tensor_scale
from fp8cfg.numerics.state_dict_conversion import BUFFERS, ROUNDING_COUNT, prepare_load
from fp8cfg.numerics.stored_state import AMAX, ANEW, BACKWARD_AMAX, RAN, PassRecords, amax_record
from fp8cfg.numerics.token_shard import TokenShard
from fp8cfg.numerics.weight_storage import QuantizedWeight
from fp8cfg.numerics.weight_workspace import NOTHING, WeightWorkspace

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
    """The buffers that the products of a layer read and write: the fields of `FP8Weight` where the weight is float8, the first two
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
    def weight(self) -> FP8Weight | None:
        """The float8 weight, if there is one."""
        if self.stored is None or self.stored_scale_inv is None:
            return None
        return FP8Weight(self.stored, self.stored_scale_inv, *self[2:5])

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
    shard: TokenShard | None = (
        None  # this rank's tokens of the input, if all ranks have gathered it
    )
    samples: int = 1  # sequences in the input
    keeps_input: bool = False  # as it came, because it takes no memory: recompute.py makes it again

    @property
    def quantizes_later(self) -> bool:
        """Whether wgrad's operand of the input is made in the backward pass."""
        in_fp8 = not (self.high_precision[FPROP] or self.high_precision[WGRAD])
        return in_fp8 and (self.keeps_input or self.shard is not None)

    @property
    def one_scale(self) -> bool:
        """Whether one scale covers the input, whatever is contracted."""
        return self.scaling.tile(INPUT, 0) is None

    @property
    def gathers_input(self) -> bool:
        """Whether a pass keeps this rank's tokens of the input and gathers them again for wgrad."""
        return self.shard is not None and (self.one_scale or not self.keeps_input)

    def input_shard(self, quantized: Operand) -> Operand | None:
        """This rank's tokens of the input, float8, from fprop's operand [T, in]; None unless one scale covers the input."""
        if not (self.gathers_input and self.one_scale):
            return None
        assert self.shard is not None and quantized.fmt is not None
        data = self.shard.part(quantized.data, self.samples)
        return Operand(data.to(quantized.fmt.dtype), quantized.scale_inv, quantized.fmt)

    def input_source(self, x: Tensor) -> Tensor:
        """What wgrad's operand is quantized from in the backward pass: the input [T, in], or this rank's tokens of it."""
        if not self.gathers_input:
            return x
        # Scales lie along the contracted tokens, so that those of all ranks are quantized together.
        assert self.shard is not None
        return self.shard.part(x, self.samples)

    def wgrad_input(self, kept: Operand | None, source: Tensor | None, state: State) -> Operand:
        """Wgrad's operand of the input, from its `input_shard` or `input_source`."""
        if kept is not None:
            assert self.shard is not None and kept.fmt is not None
            data = self.shard.whole(kept.data, self.samples)
            return kept._replace(data=data.to(self.carrier or kept.fmt.dtype)).t()
        assert source is not None
        x = source
        if self.gathers_input:
            assert self.shard is not None
            x = self.shard.whole(source, self.samples)
        # The forward pass has recorded the amax.
        plan = self._replace(record=False)
        operands = plan.operands(INPUT, [WGRAD], lambda *how: plan.operand(x, INPUT, state, *how))
        return operands[WGRAD]

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
            if axis == 0 and (high, 1) in made and made[high, 1].columnwise is not None:
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
        if tile is None and can_fuse_tensor(t, self.scaling, self.carrier):
            return quantize_tensor_fused(
                t, role, self.scaling, state.scales, state.history, self.record, both, self.parts
            )
        if tile is None:
            scale = choose_tensor_scale(
                t, role, self.scaling, state.scales, state.history, self.record, self.parts
            )
            if self.record:
                count_out_of_range(t, role, state.history[0, role], scale, fmt)
            return quantize(t, scale, fmt, self.carrier or fmt.dtype)
        if can_fuse_tiles(t, tile, self.scaling, self.carrier):
            return quantize_tiles_fused(t, role, self.scaling, axis, both, seen, self.parts)
        if self.scaling.layout.two_levels:
            return quantize_nvfp4(
                t, role, axis, self.scaling, self.carrier, state.random, seen, self.parts, both
            )
        record, group = (
            None if seen is None else seen[0, role],
            self.parts and self.parts.group_of(role, tile),
        )
        made = quantize_tiles(
            t, tile, fmt, self.scaling, self.carrier or fmt.dtype, record=record, group=group
        )
        if record is not None:
            count_out_of_range(t, role, record, None, fmt)
        return made

    def weights(
        self, w: Tensor, state: State, kept: Sequence[Tensor | None], slots: Sequence[int]
    ) -> dict[int, Operand]:
        """The weight in each product of `slots`: what is `kept` of it (weight_workspace.py), and what is left to be made."""
        at_hand = {
            FPROP: Operand.from_tensors(kept[:3], self.kept[0]),
            DGRAD: Operand.from_tensors(kept[3:], self.kept[1]),
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
        quantizes_later = needs_dw and plan.quantizes_later
        slots = [FPROP] if quantizes_later or not needs_dw else [FPROP, WGRAD]
        xs = plan.operands(INPUT, slots, lambda *how: plan.operand(x, INPUT, state, *how))
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
        kept_input, source = xs.get(WGRAD), None
        if quantizes_later:
            kept_input = plan.input_shard(xs[FPROP])
            source = plan.input_source(x) if kept_input is None else None
        kept = kept_input, None if reads_again else ws.get(DGRAD)
        ctx.save_for_backward(
            *(t for operand in kept for t in (operand.tensors if operand else (None,) * 3)),
            state.stored,
            source,
        )
        ctx.kinds = [operand and (operand.fmt, operand.tile) for operand in kept]
        ctx.state, ctx.plan = state._replace(stored=None), plan
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *saved, stored, source = ctx.saved_tensors
        x, w = (
            Operand.from_tensors(saved[:3], ctx.kinds[0]),
            Operand.from_tensors(saved[3:], ctx.kinds[1]),
        )
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
                if plan.quantizes_later:
                    x = plan.wgrad_input(x, source, state)
                assert x is not None
                dw = gemm(gs[WGRAD], x, plan.weight_grad, state.ran, WGRAD)
                if g.dtype == torch.float16 and g.numel():
                    dw = keep_overflow(dw, g)
            if state.rounding_count is not None:
                state.rounding_count.add_(
                    1
                )  # here, once for each backward pass: a recomputed forward pass draws nothing
            if needs_db:
                db = g.sum(0).to(ctx.dtypes[1])
        return dx, dw, db, *(None,) * (len(state) + 6), None


def keep_overflow(weight_grad: Tensor, grad_output: Tensor) -> Tensor:
    """Makes `weight_grad` infinite if the float16 `grad_output` it was computed from overflowed.

    FP8 saturates, which would hide the overflow from torch.amp.GradScaler: it lowers its scale only if it sees an infinite gradient.
    """
    lowest, highest = grad_output.aminmax()
    overflowed = lowest.isinf() | highest.isinf()
    return weight_grad.masked_fill_(overflowed, torch.inf)  # in place: weights are large


ROUNDING_KEY = "fp8_rounding_key"


# `weight` is a property.
class FP8Linear(PassRecords, WeightWorkspace, QuantizedWeight, nn.Linear):  # type: ignore[override]
    """An nn.Linear whose three GEMMs (fprop, dgrad, wgrad) run in FP8 while its region is active, and in high precision otherwise.
    Its weight may be stored in fewer bits, by `codec`, than the GEMMs read it in.

    Input [..., in] of any float dtype; output [..., out] in the autocast dtype, else in the input's. Evaluations in high precision
    are left out of `gemms_ran`."""

    kept = (*BUFFERS, ROUNDING_COUNT)
    region: Region
    high_precision: Products
    range_used: Tensor | None = None
    sharded = gathered_once = False
    adds_bias = True
    token_shard: TokenShard | None = None
    keeps_input = False
    shard_place: ShardPlace
    shard_scales: ShardScales
    shard_codec: Codec | None = None
    """The codec in which FSDP2 gathers the weight, where that is not as FP8 products read it."""
    shard_quantized: FP8Weight | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scaling: Scaling,
        region: Region,
        high_precision: Products = (False, False, False),
        product: Literal["emulate", "scaled_mm"] = "emulate",
        fp8_params: bool = False,
        codec: Codec | None = None,
        read_as: torch.dtype | None = None,
    ) -> FP8Linear:
        """Takes over the very parameters of `linear`: tied weights stay tied, frozen ones frozen.

        With `fp8_params` the weight becomes a float8 Parameter instead, quantized from `linear.weight`, and `set_weight` writes
        to it; its gradient has the dtype that `linear.weight` had, unless `weight.grad_dtype` is set later. With `codec` it is
        held in that one, and each pass decodes it: also where all products stay in high precision. Either stands for a weight in
        `read_as`, by default the dtype of `linear.weight`. Of a `linear` that is split over tensor-parallel ranks the attributes
        `amax_group`, `token_shard`, `keeps_input` and `adds_bias` go with it. Raises ValueError where the hardware's product cannot
        have the layer's shape.
        """
        n, k = linear.weight.shape
        if product not in ("emulate", "scaled_mm"):
            raise ValueError(f"product={product!r}; choose one of emulate, scaled_mm")
        if product == "scaled_mm" and scaling.layout.least is None:
            raise ValueError(f"{scaling.kind} is emulated alone, not multiplied by scaled_mm")
        if product == "scaled_mm" and not scaling.has_hardware_gemms(high_precision):
            raise ValueError(
                f"scaled_mm multiplies {scaling.kind} scaling in E4M3 alone, not gradients in "
                f"{scaling.backward.name.upper()}"
            )
        if product == "scaled_mm" and (n % 16 or k % 16):
            raise ValueError(
                f"in_features={k} and out_features={n}: scaled_mm needs both divisible by 16; keep"
                " this layer in high precision"
            )
        new = cls(k, n, bias=linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias  # type: ignore[misc]
        new.train(linear.training)
        new.amax_group, new.adds_bias = (
            getattr(linear, "amax_group", None),
            getattr(linear, "adds_bias", True),
        )
        new.token_shard = getattr(linear, "token_shard", None)
        new.keeps_input = getattr(linear, "keeps_input", False)
        new.scaling, new.region, new.high_precision, new.product = (
            scaling,
            region,
            high_precision,
            product,
        )
        new.weight_grad_dtype, device, new.codec = linear.weight.dtype, linear.weight.device, None
        new.read_as = read_as or linear.weight.dtype
        state = new.fresh_state()
        for name in BUFFERS:
            new.register_buffer(name, state.get(name), persistent=False)
        for name in (ROUNDING_KEY, ROUNDING_COUNT):
            new.register_buffer(name, None, persistent=False)
        if scaling.rounds_stochastically(GRAD_OUTPUT):
            new.register_buffer(
                ROUNDING_COUNT, torch.zeros((), dtype=torch.int32, device=device), persistent=False
            )
            new.seed_rounding(0)
        new.record_passes(bool(state), device)
        if fp8_params:
            data, *buffers = new._stored(linear.weight.detach())
            for name, buffer in zip(WEIGHT_BUFFERS, buffers, strict=True):
                new.register_buffer(name, buffer, persistent=False)
            new._store(data, linear.weight.requires_grad)
        elif codec:
            new.hold(codec, new.read_as)
        new._prepare_gradient()
        return new

    def shard_in_fp8(self, codec: Codec | None = None) -> None:
        """Let FSDP2, which is to split the weight, gather it in FP8, or in `codec`, which each pass decodes."""
        self._parameters["weight"], self.sharded, self.shard_codec = (
            shard_parameter(self.parameter),
            True,
            codec,
        )

    @property
    def shard_scaling(self) -> Scaling:
        """How the weight that FSDP2 gathers is scaled: as products read it, or in a codec as a whole."""
        return Scaling(kind="current") if self.shard_codec else self.scaling

    def quantized_shard(self, shard: Tensor) -> FP8Weight:
        """This rank's rows of the weight in float8, made once a step; kept unless they are gathered once a step too, as those in a
        codec are."""
        if self.shard_codec:
            scale_inv = self.shard_scales.scale
            data = self.shard_codec.encode(shard, None, scale_inv)[0]
            return FP8Weight(
                data,
                (
                    torch.ones((), dtype=torch.float32, device=data.device)
                    if scale_inv is None
                    else scale_inv
                ),
            )
        made = self.shard_quantized or quantized_shard(
            shard, self.scaling, self.shard_place, self.shard_scales, amax_record(self)
        )
        self.shard_quantized = None if self.gathered_once else made
        return made

    def fresh_state(self) -> dict[str, Tensor]:
        """See `Scaling.fresh_state`."""
        return self.scaling.fresh_state(3, self.parameter.device)

    def reset_fp8_state(self) -> None:
        """Sets scales, histories and records to those of a new layer, on the device of the weight."""
        device = self.parameter.device
        fresh = self.fresh_state()
        names = ("fp8_scale", "fp8_amax_history", *RAN, AMAX, BACKWARD_AMAX, ROUNDING_COUNT)
        for name in names:
            buffer = self._buffers[name]
            if buffer is not None:
                zeros = torch.zeros_like(buffer, device=device)
                self._buffers[name] = fresh.get(name, zeros)
        self.seed_rounding(0)
        vars(self).pop(ANEW, None)  # a new layer has no scales to lose

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.parameter.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.parameter.is_meta:
            self.reset_fp8_state()  # to_empty() leaves garbage in buffers
        return self

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise RuntimeError(
                f"FP8 layer: input of dtype {x.dtype}, expected a float dtype as nn.Linear does;"
                " cast it, for example with x.float()"
            )
        weight, state, plan = self.pass_inputs(x.dtype, device := x.device.type)
        bias = self.bias if self.adds_bias else None
        plan = plan._replace(
            shard=self.token_shard,
            samples=x.shape[:-2].numel() if self.token_shard else 1,
            # A compiler decides itself what it keeps.
            keeps_input=self.keeps_input and not torch.compiler.is_compiling(),
        )
        with torch.autocast(device, enabled=False):
            kept = self.kept_weight(weight, plan, state, x.requires_grad)
            of_weight, plan = (
                (kept.tensors, plan._replace(kept=kept.kinds)) if kept else (NOTHING, plan)
            )
            y: Tensor = LinearFunction.apply(
                x.reshape(-1, self.in_features), weight, bias, *state, *of_weight, plan
            )
        return y.view(*x.shape[:-1], self.out_features)

    def quantize_kept(self, dtype: torch.dtype) -> None:
        """Quantize the weight that is kept, for compiled code that is to read it, where inputs are of `dtype` or autocast's."""
        if self.keeps_weight and torch.is_grad_enabled():
            weight, state, plan = self.pass_inputs(dtype, device := self.parameter.device.type)
            with torch.autocast(device, enabled=False):
                self.kept_weight(weight, plan, state, dgrad=True)

    def pass_inputs(self, dtype: torch.dtype, device: str) -> tuple[Tensor, State, Plan]:
        """The weight, or what receives its gradient, the buffers of a pass over inputs of `dtype` on `device`, and its plan."""
        out = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
        exact = self.scaling.layout.exact_in_bfloat16(self.scaling.power_2_scales)
        carrier = torch.bfloat16 if out == torch.bfloat16 and exact else torch.float32
        high_precision = self.high_precision if self.region.applies() else (True, True, True)
        weight, stored = self.receiver_and_stored() if self.held else (self.parameter, None)
        weight_grad = weight.dtype if stored is None else self.weight_grad_dtype
        beside: list[Tensor | None] = [getattr(self, name) for name in WEIGHT_BUFFERS]
        if isinstance(weight, GatheredWeight):
            stored, *beside = weight.stored
        product = None if self.product == "scaled_mm" else carrier
        learns = torch.is_grad_enabled()
        trains = learns and self.training
        codec = self.codec or self.shard_codec
        plan = Plan(
            self.scaling,
            high_precision,
            product,
            out,
            weight_grad,
            learns,
            codec,
            trains,
            self.parts,
        )
        rounding = [getattr(self, ROUNDING_KEY), getattr(self, ROUNDING_COUNT)]
        records = (
            amax_record(self),
            self.fp8_backward_amax,
            *rounding,
            self.ran_forward,
            self.ran_backward,
        )
        return weight, State._make([stored, *beside, self.fp8_scale, *records]), plan

    def seed_rounding(self, seed: int, *words: int | str) -> None:
        """Seeds the stochastic rounding of gradients from `seed` and these words, such as the layer's name and the rank. The count
        of draws, one for each backward pass, is in the state dict; the key is not, since it differs by rank.
        """
        if self.scaling.rounds_stochastically(GRAD_OUTPUT):
            self.register_buffer(
                ROUNDING_KEY, random_key(seed, *words).to(self.parameter.device), persistent=False
            )

    def random(self, lane: int) -> RandomStream | None:
        """The random numbers for rounding the next gradient, for the products that contract its dimension `lane`; None where
        gradients are rounded to nearest."""
        key, count = getattr(self, ROUNDING_KEY), getattr(self, ROUNDING_COUNT)
        return None if key is None else RandomStream(key, count, lane)

    def extra_repr(self) -> str:
        formats = f"{self.scaling.forward.name}/{self.scaling.backward.name}"
        held = f", weight {self.codec}" if self.codec else ""
        return f"{super().extra_repr()}, {self.scaling.kind} {formats}, {self.product}{held}"

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        master = prepare_load(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.forget_scales_set()
        if self.ran_forward.is_meta and not self.parameter.is_meta:
            self.reset_fp8_state()  # load_state_dict(assign=True) replaced only the parameters
        if master is not None:
            self.set_weight(master)


def seed_rounding(model: nn.Module, seed: int) -> None:
    """Seeds stochastic rounding in all FP8 layers of `model`: each layer, and each rank, draws its own random numbers."""
    rank = (
        dist.get_rank()
        if dist.is_available() and dist.is_initialized()
        else int(os.environ.get("RANK", "0"))
    )
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            layer.seed_rounding(seed, name, rank)


def fp8_linears(model: nn.Module) -> Iterator[FP8Linear]:
    """The FP8 layers of `model`, each once, in the order of its modules."""
    return (module for module in model.modules() if isinstance(module, FP8Linear))
